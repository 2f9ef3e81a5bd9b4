"""What goes into a training and what comes out: the job, its plans, its watch and its cost."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mixval import choose
from mixval.augmentations import draw_uniforms
from mixval.engine import Prepared
from mixval.guidance import Guidance
from mixval.mixing import RowMaker, draw_plan
from mixval.recipe import Choice, Learner, Training
from mixval.record import Record
from mixval.seeding import torch_stream
from mixval.types import Ints, MixPlan, Part, Splits


@dataclass
class Cost:
    """What a network cost. A forward pass is one sample through one network."""

    steps: int = 0
    forwards: int = 0
    seconds: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.steps + other.steps, self.forwards + other.forwards, self.seconds + other.seconds
        )


@dataclass(frozen=True)
class Job:
    """Everything that decides the weights of one network."""

    learner: Learner
    training: Training
    model: Choice
    epochs: int
    part: Part  # what it is trained on
    splits: Splits
    seed: int
    stream: str  # networks of one stream share initial weights, order, partners and lambdas
    guidance: Guidance | None = None
    excluded: str = "drop"
    folds: Ints | None = None  # (N,) folds of `part` for out-of-fold teachers
    after_epoch: Callable[[int, nn.Module], None] | None = None  # epochs done, the network
    folder: Path | None = None  # where the record of a guided training is written
    preparation: Cost = field(default_factory=Cost)  # of what was made for it, such as a bank


@dataclass(frozen=True)
class Watch:
    """How the outside follows a training and asks it to stop."""

    should_stop: Callable[[], bool] = lambda: False
    on_steps: Callable[[int], None] = lambda steps: None
    checkpoint_seconds: float = 60.0


@dataclass(frozen=True)
class Trained:
    """A finished network, how it got there, and what it cost."""

    model: Prepared
    metrics: list[dict[str, Any]]
    record: Record | None
    cost: Cost


class Plans(dict[int, MixPlan]):
    """The plan of an epoch and, where `refill` asks for them, further draws; each drawn once."""

    def __init__(self, job: Job, epoch: int, alpha: float) -> None:
        super().__init__()
        self.job, self.epoch, self.alpha = job, epoch, alpha

    def __missing__(self, draw: int) -> MixPlan:
        plan = self[draw] = draw_plan(
            seed=self.job.seed,
            epoch=self.epoch,
            alpha=self.alpha,
            num_samples=len(self.job.part),
            same_lam=self.job.learner.same_lam,
            derange=self.job.learner.derange,
            folds=self.job.folds,
            stream=self.job.stream,
            draw=draw,
        )
        return plan


def build_model(model: Choice, splits: Splits, seed: int, stream: str) -> nn.Module:
    """Return the network with its initial weights, the same for every use of the stream."""
    with torch_stream(seed, f"{stream}/weights"):
        build = choose.pick("models", model.name, model.parameters)
        network: nn.Module = build(splits.image_shape, splits.num_classes)
    return network


def num_steps(samples: int, batch_size: int) -> int:
    """Return the optimiser steps of an epoch: batches of about that size, none of them a rest."""
    return max(1, round(samples / batch_size))


def step_rows(samples: int, steps: int, step: int) -> slice:
    """Return the step's rows of a plan: steps are equal to within one row, so none weighs more."""
    return slice(samples * step // steps, samples * (step + 1) // steps)


def micro_batches(plan: MixPlan, count: int) -> list[MixPlan]:
    """Return the rows of a step as at most `count` plans of about the same size."""
    size = -(-len(plan) // count)
    return [plan.keep(slice(at, at + size)) for at in range(0, len(plan), size)]


def train_rows(job: Job, device: torch.device, loaders: int) -> RowMaker:
    """Return the maker of what is trained on: with augmentation, and the folds of partners."""
    settings, augment, folds = job.training.augmentation, None, None
    if settings.name != "none":
        augment = choose.pick("augmentations", settings.name, settings.parameters)
    if job.folds is not None:
        folds = torch.from_numpy(job.folds).to(device)
    plain = RowMaker.of(job.part, job.splits, device, loaders)
    return replace(plain, augment=augment, folds=folds)


def epoch_uniforms(job: Job, maker: RowMaker, epoch: int) -> Tensor | None:
    """Return the random numbers of the epoch's augmentation, where there is one."""
    if maker.augment is None:
        return None
    return draw_uniforms(job.seed, epoch, job.part.ids).to(maker.mean.device)
