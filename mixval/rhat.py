"""r and r_hat of mixes under two posteriors, their Monte-Carlo error, and the Scorer.

    H(z; theta)  = -lam log p(y_i | x_mix, theta) - (1 - lam) log p(y_j | x_mix, theta)
    r(C)         = log E_{p(theta | D, F)}[exp H(C)] - log E_{p(theta | D)}[exp H(C)]
    r_hat(C)     = E_{p(theta | D, F)}[H(C)] - E_{p(theta | D)}[H(C)]

H(C) is the sum over the members of the set C. r(C) = log p(F | D without C) - log p(F | D)
is what removing C does to the failures F; r_hat is its first order and adds up over
members. The expectation is of H, never H of the averaged prediction. r_hat > 0 says that
fitting F conflicts with the mix.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from mixval.types import Column, Loss, Posterior


@dataclass(frozen=True)
class Scored:
    """Both terms of r_hat for each row, and their difference."""

    updated: Tensor  # (B,) E[H] under p(theta | D, F)
    base: Tensor  # (B,) E[H] under p(theta | D)
    r_hat: Tensor  # (B,)
    std_error: Tensor  # (B,) of r_hat over draws; NaN if both posteriors are points
    draws: int  # that the standard error rests on
    log_probs: Tensor | None = None  # (S, B, K) under p(theta | D, F); None where a bank spoke

    @property
    def soft_labels(self) -> Tensor | None:
        """Return what p(theta | D, F) predicts, (B, K)."""
        return None if self.log_probs is None else self.log_probs.exp().mean(0)


def draw_losses(log_probs: Tensor, targets: Tensor, loss: Loss) -> Tensor:
    """Return H of each draw, (S, B), from log-probabilities (S, B, K) and targets (B, K)."""
    draws, rows, classes = log_probs.shape
    flat = loss(log_probs.reshape(-1, classes), targets.repeat(draws, 1))
    return flat.view(draws, rows)


def score(updated: Tensor, base: Tensor) -> Scored:
    """Return r_hat from H of each draw under both posteriors, each (S, B).

    The standard error is paired, because both posteriors use common random numbers:
    it is that of the mean of the differences. With unequal numbers of draws the two
    variances add; a point (one draw) is known exactly and adds none.
    """
    r_hat = updated.mean(0) - base.mean(0)
    if not torch.isfinite(r_hat).all():
        raise FloatingPointError(
            "r_hat is not finite: a network gives NaN or infinite outputs; lower the learning rate"
        )
    spread = [updated - base] if len(updated) == len(base) else [updated, base]
    spread = [losses for losses in spread if len(losses) > 1]
    draws = min(map(len, spread), default=1)
    error = torch.full_like(r_hat, torch.nan)
    if spread:
        error = torch.stack([losses.var(0) / len(losses) for losses in spread]).sum(0).sqrt()
    return Scored(updated.mean(0), base.mean(0), r_hat, error, draws)


def exact_r(updated: Tensor, base: Tensor) -> Tensor:
    """Return r from H of sets, (S, ...) each the sum over a set's members, for each draw.

    log-mean-exp over draws: each of the two terms is too low on average, and dominated by few
    draws when sets are large. Do not trust it where H of the set has a standard deviation
    above 1. Of a squared error the true r is infinite where the curvature of C exceeds the
    posterior's precision; of softmax it is finite, but far from what any number of draws
    shows (`closed_form`).
    """
    terms = [losses.logsumexp(0) - math.log(len(losses)) for losses in (updated, base)]
    r = terms[0] - terms[1]
    if not torch.isfinite(r).all():
        raise FloatingPointError("r is not finite: H of a draw is NaN or infinite")
    return r


def probability_negative(r_hat: Column, std_error: Column, draws: int) -> Column:
    """Return P(mean r_hat <= 0), by Student's t with S - 1 degrees of freedom.

    Certainty about the Monte-Carlo mean, not the posterior's spread; NaN for one draw.
    max(P, 1 - P) is how stable the decision to keep or drop is under another set of draws.
    """
    if draws < 2:
        return np.full(np.shape(r_hat), np.nan, dtype=np.asarray(r_hat).dtype)
    moved = np.asarray(std_error) > 0
    scaled = np.divide(-r_hat, std_error, where=moved, out=np.zeros_like(r_hat))
    certain = (np.asarray(r_hat) <= 0).astype(scaled.dtype)
    return np.where(moved, stats.t.cdf(scaled, draws - 1), certain).astype(scaled.dtype)


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
        return replace(score(losses, base_losses), log_probs=log_probs)
