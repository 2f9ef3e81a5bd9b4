"""What a run will take: the networks that are not there yet, and a few batches measured."""

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from mixval.engine import start_engine
from mixval.pipeline import CellRun
from mixval.recipe import Arm, Learner, Recipe
from mixval.stages.cell import Cell
from mixval.store import Store
from mixval.training_job import build_model, num_steps
from mixval.tuning import measured_job, seconds_of
from mixval.work import Work

Place = tuple[str, ...]
_Learner = TypeVar("_Learner", bound=Learner)
_MEASURED_STEPS = 10
_RECORDED = 4  # bytes of the record of a row: its own weight, and that of the clean sample


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
    """Train a few batches of every kind of network with both terms, and multiply."""
    recipe = work.recipe
    planned = planned_networks(recipe, work.stage, work.arms)
    missing = [
        learner
        for cell in work.cells
        for place, learner in planned
        if not work.store.is_finished(*cell, *place)
    ]
    engine = start_engine(recipe.engine)
    cell = Cell(recipe, *work.cells[0], engine)
    samples = len(cell.splits.train)
    per_epoch = num_steps(samples, recipe.training.batch_size)
    steps, seconds, weights, records = 0, 0.0, 0, 0
    measured = _measured(recipe, missing, cell)
    for learner in missing:
        per_step, size = measured[recipe.model_of(learner).model_dump_json()]
        epochs = recipe.epochs_of(learner)
        steps, seconds = steps + epochs * per_epoch, seconds + epochs * per_epoch * per_step
        weights += size
        guided = isinstance(learner, Arm) and bool(learner.teacher or learner.yoked_to)
        records += epochs * samples * _RECORDED if guided else 0
    return Estimate(
        networks=len(missing),
        steps=steps,
        seconds=seconds / work.workers,
        megabytes=(4 * weights + records) / 1e6,
        workers=work.workers,
    )


def _measured(recipe: Recipe, missing: list[Learner], cell: Cell) -> dict[str, tuple[float, int]]:
    """Return the seconds of a step and the number of weights of each kind of network."""
    kinds = {model.model_dump_json(): model for model in map(recipe.model_of, missing)}
    found = {}
    for key, model in kinds.items():
        job = replace(measured_job(recipe, cell), model=model)
        seconds_of(job, cell.engine, 2)  # the first time loads libraries and fills caches
        seconds = seconds_of(job, cell.engine, _MEASURED_STEPS) / _MEASURED_STEPS
        tensors = build_model(model, cell.splits, cell.seed, "estimate").state_dict().values()
        found[key] = seconds, sum(tensor.numel() for tensor in tensors)
    return found


def rehearse(work: Work) -> None:
    """Run every stage and arm of the first cell on a little data, in a folder thrown away after."""
    recipe = work.recipe
    panel, seed = work.cells[0]
    engine = start_engine(recipe.engine)
    splits = Cell(recipe, panel, seed, engine).splits
    little = min(len(splits.train), max(recipe.training.batch_size, 2 * splits.num_classes))
    short = {"epochs": 2, "warmup_epochs": 0}
    update = {
        "data": recipe.data.model_copy(update={"train": little}),
        "training": recipe.training.model_copy(update=short),
        "base": _shortened(recipe.base),
        "teachers": {name: _shortened(teacher) for name, teacher in recipe.teachers.items()},
        "arms": {name: _shortened(arm) for name, arm in recipe.arms.items()},
        "repair": recipe.repair.model_copy(
            update={"causes": min(recipe.repair.causes, little // 2), "epochs": 1}
        ),
    }
    with tempfile.TemporaryDirectory() as own:
        folder = engine.processes.from_main(lambda: own)
        cell = Cell(recipe.model_copy(update=update), panel, seed, engine)
        CellRun(cell, Store(Path(folder))).upto(work.stage, work.arms)
        engine.processes.wait()


def _shortened(learner: _Learner) -> _Learner:
    return learner.model_copy(update={"epochs": None})


def planned_networks(recipe: Recipe, stage: str, arms: list[str]) -> list[tuple[Place, Learner]]:
    """Return the place and the settings of every network that a cell needs for a stage."""
    trains_students = stage in ("student", "run")
    used = {recipe.arms[arm].teacher for arm in arms} if trains_students else {*recipe.teachers}
    used -= {None}
    planned: list[tuple[Place, Learner]] = []
    if stage not in ("base", "failures", "posteriors", "repair"):
        for name, teacher in recipe.teachers.items():
            if name in used and not teacher.weights:
                planned += [(("teachers", name, *place), teacher) for place in teacher.places]
    if stage in ("posteriors", "score", "run"):
        planned += _ensembles(recipe)
    fitted = bool(recipe.posteriors) and stage in ("posteriors", "score", "run")
    scored = fitted or (stage in ("score", "run") and bool(used) and recipe.scores.rows > 0)
    if trains_students:
        planned += [(("students", arm), recipe.arms[arm]) for arm in arms]
    if stage == "repair" and "retrain" in recipe.repair.removals:
        planned += [(("retrained", name), recipe.base) for name in recipe.repair.selectors]
    asked = stage in ("base", "failures", "repair")
    if asked or scored or any(learner.data == "train+failures" for _, learner in planned):
        planned.insert(0, (("base",), recipe.base))
    return planned


def _ensembles(recipe: Recipe) -> list[tuple[Place, Learner]]:
    """Return the networks that posteriors train from scratch: pairs on D and on D with F."""
    return [
        (("posteriors", name, f"{pool}-{member}"), recipe.base.model_copy(update={"data": pool}))
        for name, settings in recipe.posteriors.items()
        for pool in ("train", "train+failures")
        for member in range(settings.parameters.get("members", 0))
    ]
