"""(labels, number of classes) -> a weight for each class, (K,) with mean 1 over the samples."""

import torch
from torch import Tensor

from mixval.bounds import NonNegative
from mixval.errors import UserError

__all__ = ["balanced", "given", "uniform"]


def uniform(labels: Tensor, num_classes: int) -> Tensor:
    """Return 1 for each class."""
    return torch.ones(num_classes)


def balanced(labels: Tensor, num_classes: int) -> Tensor:
    """Return n / (K n_k): each class weighs the same in total; all 1 on balanced data."""
    counts = torch.bincount(labels.cpu(), minlength=num_classes)
    if (counts == 0).any():
        empty = (counts == 0).nonzero().flatten().tolist()
        raise UserError(
            f"training.class_weights: balanced weights need every class, got no sample of {empty}"
        )
    return len(labels) / (num_classes * counts.float())


def given(labels: Tensor, num_classes: int, *, values: list[NonNegative]) -> Tensor:
    """Return these values, scaled to mean 1 over the samples."""
    if len(values) != num_classes:
        raise UserError(f"values must name one weight per class ({num_classes}), got {len(values)}")
    weights = torch.tensor(values, dtype=torch.float32)
    mean = weights[labels.cpu()].mean()
    if mean == 0:
        raise UserError("training.class_weights: values must not be 0 for every class there is")
    return weights / mean
