"""Epochs and what holds in them: moments given as shares, and alpha at an epoch."""

import math
from typing import TYPE_CHECKING

from mixval import choose

if TYPE_CHECKING:
    from mixval.recipe import Learner


def epoch_of(moment: int | float, epochs: int) -> int:
    """Return the epoch of a moment that may be given as a share of the training."""
    return moment if isinstance(moment, int) else round(moment * epochs)


def alpha_at(learner: "Learner", epoch: int, epochs: int) -> float:
    """Return alpha of this epoch; epoch e of E stands at progress (e + 1/2) / E."""
    if learner.mixup_until is not None and epoch >= epoch_of(learner.mixup_until, epochs):
        return 0.0
    schedule = choose.pick("alpha_schedules", learner.alpha.name, learner.alpha.parameters)
    alpha = float(schedule((epoch + 0.5) / epochs))
    if not (math.isfinite(alpha) and alpha >= 0):
        raise ValueError(f"alpha must be finite and >= 0, got {alpha} at epoch {epoch}")
    return alpha
