"""Optimiser and learning-rate schedule, from timm."""

from typing import Any

from torch import nn
from torch.optim import Optimizer

from mixval.recipe import Training


def make_optimiser(
    model: nn.Module, training: Training, steps: int, warmup_steps: int
) -> tuple[Optimizer, Any]:
    """Return the optimiser and a cosine schedule that is a pure function of the step."""
    from timm.optim import create_optimizer_v2  # slow to load, and not needed to score
    from timm.scheduler import CosineLRScheduler

    # Nesterov's form of momentum needs some; without any both are plain SGD.
    plain = training.optimizer == "sgd" and training.momentum == 0
    optimiser = create_optimizer_v2(
        model,
        opt="momentum" if plain else training.optimizer,
        lr=training.lr,
        weight_decay=training.weight_decay,
        momentum=training.momentum,
    )
    schedule = CosineLRScheduler(
        optimiser, t_initial=steps, warmup_t=warmup_steps, t_in_epochs=False
    )
    return optimiser, schedule
