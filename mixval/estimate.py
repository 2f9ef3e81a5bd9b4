"""What a run will take: the networks that are not there yet, and a few batches measured."""

from dataclasses import dataclass

import numpy as np

from mixval.engine import start_engine
from mixval.recipe import Learner, Recipe
from mixval.stages.cell import Cell
from mixval.training import Job, Watch, build_model, train
from mixval.work import Work

Place = tuple[str, ...]


@dataclass(frozen=True)
class Estimate:
    """The cost of what is missing, as far as a few batches tell."""

    networks: int
    steps: int
    seconds: float
    megabytes: float
    workers: int

    def __str__(self) -> str:
        return (
            f"estimated cost: {self.networks} networks, {self.steps:,} optimiser steps, "
            f"about {self.seconds:.0f} s with {self.workers} worker{'s' * (self.workers > 1)}, "
            f"{self.megabytes:.0f} MB on disk"
        )


def estimate(work: Work) -> Estimate:
    """Build every network, train a few batches of one with both terms, and multiply."""
    recipe = work.recipe
    planned = planned_networks(recipe, work.stage, work.arms)
    missing = [
        learner
        for cell in work.cells
        for place, learner in planned
        if not work.store.is_finished(*cell, *place)
    ]
    engine = start_engine(recipe.engine.device, recipe.engine.threads)
    panel, seed = work.cells[0]
    splits, size = Cell(recipe, panel, seed, engine).splits, recipe.training.batch_size
    for model in {m.model_dump_json(): m for m in map(recipe.model_of, missing)}.values():
        build_model(model, splits, seed, "estimate")
    job = Job(
        learner=Learner(),
        training=recipe.training.model_copy(update={"warmup_epochs": 0}),
        model=recipe.model,
        epochs=1,
        part=splits.train.take(np.arange(min(len(splits.train), 4 * size))),
        splits=splits,
        seed=seed,
        stream="estimate",
    )
    train(job, engine, None, Watch())  # the first time loads libraries and fills caches
    measured = train(job, engine, None, Watch())
    weights = sum(tensor.numel() for tensor in measured.model.state_dict().values())
    steps = sum(map(recipe.epochs_of, missing)) * -(-len(splits.train) // size)
    return Estimate(
        networks=len(missing),
        steps=steps,
        seconds=steps * measured.cost.seconds / measured.cost.steps / work.workers,
        megabytes=len(missing) * weights * 4 / 1e6,
        workers=work.workers,
    )


def planned_networks(recipe: Recipe, stage: str, arms: list[str]) -> list[tuple[Place, Learner]]:
    """Return the place and the settings of every network that a cell needs for a stage."""
    trains_students = stage in ("student", "run")
    used = {recipe.arms[arm].teacher for arm in arms} if trains_students else set(recipe.teachers)
    planned: list[tuple[Place, Learner]] = []
    if stage not in ("base", "failures"):
        for name, teacher in recipe.teachers.items():
            if name in used and not teacher.weights:
                folds = [(f"fold-{k}",) for k in range(teacher.folds)]
                places = folds if teacher.folds > 1 else [()]
                planned += [(("teachers", name, *place), teacher) for place in places]
    scored = stage in ("score", "run") and bool(used) and recipe.scores.rows > 0
    if trains_students:
        planned += [(("students", arm), recipe.arms[arm]) for arm in arms]
    asked = stage in ("base", "failures")
    if asked or scored or any(learner.data == "train+failures" for _, learner in planned):
        planned.insert(0, (("base",), recipe.base))
    return planned
