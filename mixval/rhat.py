"""r_hat of mixes under two posteriors, its standard error, and the Scorer.

    H(z; theta)  = -lam log p(y_i | x_mix, theta) - (1 - lam) log p(y_j | x_mix, theta)
    r_hat(z)     = E_{p(theta | D, F)}[H] - E_{p(theta | D)}[H]

The expectation is of H, never H of the averaged prediction. r_hat > 0 says that fitting
the failures F conflicts with the mix. r_hat of a set is the sum over its members.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mixval.types import Loss, Posterior


@dataclass(frozen=True)
class Scored:
    """Both terms of r_hat for each row, and their difference."""

    updated: Tensor  # (B,) E[H] under p(theta | D, F)
    base: Tensor  # (B,) E[H] under p(theta | D)
    r_hat: Tensor  # (B,)
    std_error: Tensor  # (B,) of r_hat over draws; NaN for a single draw
    soft_labels: Tensor | None = None  # (B, K) what p(theta | D, F) predicts, where asked


def draw_losses(log_probs: Tensor, targets: Tensor, loss: Loss) -> Tensor:
    """Return H of each draw, (S, B), from log-probabilities (S, B, K) and targets (B, K)."""
    draws, rows, classes = log_probs.shape
    flat = loss(log_probs.reshape(-1, classes), targets.repeat(draws, 1))
    return flat.view(draws, rows)


def score(updated: Tensor, base: Tensor) -> Scored:
    """Return r_hat from H of each draw under both posteriors, each (S, B).

    The standard error is paired, because both posteriors use common random numbers:
    it is that of the mean of the differences. With unequal numbers of draws the two
    variances add.
    """
    r_hat = updated.mean(0) - base.mean(0)
    if not torch.isfinite(r_hat).all():
        raise FloatingPointError(
            "r_hat is not finite: a network gives NaN or infinite outputs; lower the learning rate"
        )
    if len(updated) == len(base):
        error = _standard_error(updated - base)
    else:
        error = (_standard_error(updated) ** 2 + _standard_error(base) ** 2).sqrt()
    return Scored(updated.mean(0), base.mean(0), r_hat, error)


def _standard_error(values: Tensor) -> Tensor:
    if len(values) == 1:
        return torch.full_like(values[0], torch.nan)
    return values.std(0) / math.sqrt(len(values))


@dataclass(frozen=True)
class Scorer:
    """Mixed rows -> r_hat: the same callable offline and inside the student.

    Inside the student the base posterior is the student itself, whose logits the
    training step has already; they are passed as `base`, and nothing is run twice.
    """

    updated: Posterior
    loss: Loss

    def __call__(
        self,
        inputs: Tensor,
        targets: Tensor,
        base: Tensor,
        fold: Tensor | None = None,
        known: Tensor | None = None,
    ) -> Scored:
        """Return the scores of rows whose log-probabilities under p(theta | D) are `base`.

        `known` is E[H] under p(theta | D, F), (B,), where a bank holds it already.
        """
        base_losses = draw_losses(base, targets, self.loss)
        if known is not None:
            return score(known[None], base_losses)
        log_probs = self.updated(inputs, fold)
        losses = draw_losses(log_probs, targets, self.loss)
        return replace(score(losses, base_losses), soft_labels=log_probs.exp().mean(0))
