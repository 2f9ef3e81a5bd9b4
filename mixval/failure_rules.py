"""(log-probabilities (N, K), labels (N,)) -> which samples fail, a mask (N,)."""

import torch
from torch import Tensor
from torch.nn import functional as F

from mixval.bounds import InnerFraction

__all__ = ["loss_above_quantile", "lowest_margin", "misclassified"]


def misclassified(log_probs: Tensor, labels: Tensor) -> Tensor:
    """Return the samples whose most likely class is not their label."""
    return log_probs.argmax(1) != labels


def lowest_margin(log_probs: Tensor, labels: Tensor, *, fraction: InnerFraction = 0.1) -> Tensor:
    """Return the fraction with the smallest log p(label) - max of the other log p."""
    own = log_probs.gather(1, labels[:, None]).squeeze(1)
    others = log_probs.masked_fill(F.one_hot(labels, log_probs.shape[1]).bool(), -torch.inf)
    margin = own - others.amax(1)
    count = max(1, round(fraction * len(labels)))
    failing = torch.zeros(len(labels), dtype=torch.bool, device=labels.device)
    failing[margin.argsort(stable=True)[:count]] = True
    return failing


def loss_above_quantile(
    log_probs: Tensor, labels: Tensor, *, quantile: InnerFraction = 0.9
) -> Tensor:
    """Return the samples whose loss -log p(label) lies above that quantile of the split."""
    loss = -log_probs.gather(1, labels[:, None]).squeeze(1)
    return loss > loss.quantile(quantile)
