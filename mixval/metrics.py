"""Accuracy, negative log-likelihood and calibration of a network on a part of the data."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mixval.feeding import feed_inputs
from mixval.mixing import RowMaker
from mixval.processes import ALONE, Processes

_NUMBERS = 1 << 25  # in the inputs of one forward pass: large images go in smaller chunks


@torch.inference_mode()
def predict(
    model: nn.Module, maker: RowMaker, chunk: int | None = None, processes: Processes = ALONE
) -> Tensor:
    """Return log-probabilities (N, K) of every sample, in evaluation mode.

    Each of several processes predicts its share, and all get the whole.
    """
    was_training = model.training
    model.eval()
    positions = torch.arange(len(maker.part), device=maker.part.labels.device)
    own = positions[processes.share(len(positions))]
    size = chunk or max(16, min(1000, _NUMBERS // math.prod(maker.part.images.shape[1:])))
    logits = [model(inputs) for inputs in feed_inputs(maker, torch.split(own, size))]
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
