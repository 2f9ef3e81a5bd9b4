"""Accuracy, negative log-likelihood and calibration of a network on a part of the data."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mixval.mixing import RowMaker
from mixval.processes import ALONE, Processes


@torch.inference_mode()
def predict(
    model: nn.Module, maker: RowMaker, chunk: int = 1000, processes: Processes = ALONE
) -> Tensor:
    """Return log-probabilities (N, K) of every sample, in evaluation mode.

    Each of several processes predicts its share, and all get the whole.
    """
    was_training = model.training
    model.eval()
    positions = torch.arange(len(maker.part), device=maker.part.labels.device)
    own = positions[processes.share(len(positions))]
    logits = [model(maker.inputs(rows)) for rows in torch.split(own, chunk)]
    model.train(was_training)
    return F.log_softmax(processes.gather(torch.cat(logits).float()), dim=-1)


def accuracy_and_nll(log_probs: Tensor, labels: Tensor) -> tuple[float, float]:
    hits = (log_probs.argmax(1) == labels).sum()
    return float(hits) / len(labels), float(F.nll_loss(log_probs, labels))


def calibration_error(log_probs: Tensor, labels: Tensor, bins: int = 15) -> float:
    """Return the expected calibration error of the top class, in equal bins of confidence."""
    from torchmetrics.functional.classification import multiclass_calibration_error

    classes = log_probs.shape[1]
    return float(multiclass_calibration_error(log_probs.exp(), labels, classes, n_bins=bins))
