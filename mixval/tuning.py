"""What `auto` means here: a few training steps measured in each way, the fastest kept."""

import itertools
import time
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import Any

from mixval.engine import Engine, start_engine
from mixval.recipe import Learner, Recipe
from mixval.stages.cell import Cell
from mixval.training import Loop
from mixval.training_job import Job, Watch, num_steps

_PLAIN = {"precision": "fp32", "channels_last": False, "compile": False}
_ROUNDS, _STEPS, _SECONDS = 5, 3, 0.3  # turns, and steps and seconds of a turn at least
_WORTH = 0.97  # another way than the plain one must take at most this share of its time
Way = dict[str, Any]


@dataclass(frozen=True)
class Tuned:
    """A recipe without `auto`, and a line that says what was found."""

    recipe: Recipe
    found: str = ""


def tuned(recipe: Recipe, panel: str) -> Tuned:
    """Return the recipe with each `auto` of its engine replaced by what is fastest here."""
    unknown = recipe.engine.to_measure
    if not unknown:
        return Tuned(recipe)
    plain = {key: _PLAIN[key] for key in unknown}
    engine = start_engine(recipe.with_engine(plain).engine)
    cell = Cell(recipe.with_engine(plain), panel, recipe.seeds[0], engine)
    job = measured_job(recipe, cell)
    values: dict[str, list[Any]] = {
        "precision": ["fp32", "bf16"],
        "channels_last": [False, True],
        "compile": [False],
    }
    ways = [
        dict(zip(unknown, way, strict=True))
        for way in itertools.product(*(values[key] for key in unknown))
    ]
    turns = _interleaved([start_engine(recipe.with_engine(way).engine) for way in ways], job)
    best = _fastest(turns)
    speed = median(turns[0]) / median(turns[best])
    way, found = ways[best], f"{speed:.2f} times as fast as {_said(ways[0])}"
    if "compile" in unknown and _compiling_pays(recipe, way, job, median(turns[best])):
        way = {**way, "compile": True}
    return Tuned(recipe.with_engine(way), f"engine: {_said(way)} ({found})")


def measured_job(recipe: Recipe, cell: Cell) -> Job:
    """Return a job with both terms, as most students have them, to measure steps by."""
    return Job(
        learner=Learner(),
        training=recipe.training.model_copy(update={"evaluate_every": 10**9}),
        model=recipe.model,
        epochs=recipe.training.epochs,
        part=cell.splits.train,
        splits=cell.splits,
        seed=cell.seed,
        stream="estimate",
    )


def seconds_of(job: Job, engine: Engine, steps: int) -> float:
    """Return how long the first steps of a job take, preparing it not counted."""
    taken = Loop(job, engine, None, Watch()).steps()
    start, count = time.monotonic(), 0
    for _ in itertools.islice(taken, steps):
        count += 1
    return (time.monotonic() - start) * steps / count  # a short job may have fewer


def _fastest(turns: list[list[float]]) -> int:
    """Return the way with the least time; the first, plain one unless another always beats it."""
    plain = turns[0]
    beats = [
        all(mine < _WORTH * its for mine, its in zip(times, plain, strict=True)) for times in turns
    ]
    return min(range(len(turns)), key=lambda k: median(turns[k]) if beats[k] or k == 0 else inf)


def _interleaved(engines: list[Engine], job: Job) -> list[list[float]]:
    """Return the seconds of a step in each way, turn by turn, so that noise hits all alike."""
    rough = max(seconds_of(job, engine, _STEPS) / _STEPS for engine in engines)  # fills caches, too
    main = engines[0].processes  # its clock decides, so that all processes do the same
    steps = main.from_main(lambda: min(max(_STEPS, int(_SECONDS / rough)), 1000))
    taken: list[list[float]] = [[] for _ in engines]
    for _ in range(_ROUNDS):
        for times, engine in zip(taken, engines, strict=True):
            times.append(seconds_of(job, engine, steps) / steps)
    return main.from_main(lambda: taken)


def _compiling_pays(recipe: Recipe, way: Way, job: Job, plain: float) -> bool:
    """Say whether compiling a network is made good by the steps that it is trained for."""
    engine = start_engine(recipe.with_engine({**way, "compile": True}).engine)
    steps = job.epochs * num_steps(len(job.part), job.training.batch_size)
    first = seconds_of(job, engine, 1)
    compiled = median(_interleaved([engine], job)[0])
    pays = first + compiled * steps < _WORTH * plain * steps
    return engine.processes.from_main(lambda: pays)


def _said(way: Way) -> str:
    return ", ".join(f"{key} {str(value).lower()}" for key, value in way.items())
