"""Run the cells of a recipe, here or in worker processes: progress, stopping, estimates."""

import logging
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from mixval.engine import start_engine
from mixval.errors import Interrupted
from mixval.pipeline import CellRun
from mixval.recipe import Learner, Recipe
from mixval.stages.cell import Cell
from mixval.store import Store
from mixval.training import Job, Watch, build_model, train

log = logging.getLogger(__name__)
_SPAWN = multiprocessing.get_context("spawn")  # a fork would inherit torch's threads and locks


@dataclass(frozen=True)
class Estimate:
    """What a run will take, measured on a few batches."""

    networks: int
    steps: int
    seconds: float
    megabytes: float
    workers: int

    def __str__(self) -> str:
        return (
            f"estimated cost: {self.networks} networks, {self.steps:,} optimiser steps, "
            f"about {self.seconds:.0f} s with {self.workers} workers, "
            f"{self.megabytes:.0f} MB on disk"
        )


def num_workers(recipe: Recipe, cells: int) -> int:
    return max(1, min(recipe.engine.workers or os.cpu_count() or 1, cells))


def planned_networks(
    recipe: Recipe, stage: str, arms: list[str]
) -> list[tuple[tuple[str, ...], Learner]]:
    """Return the place and the settings of every network that a cell needs for a stage."""
    used = {recipe.arms[arm].teacher for arm in arms} if stage in ("student", "run") else set()
    teachers = {
        name: t
        for name, t in recipe.teachers.items()
        if not t.weights and (name in used or stage in ("teacher", "score"))
    }
    students = (
        [(("students", arm), recipe.arms[arm]) for arm in arms]
        if stage in ("student", "run")
        else []
    )
    planned: list[tuple[tuple[str, ...], Learner]] = []
    for name, t in teachers.items():
        places = [("teachers", name, f"fold-{k}") for k in range(t.folds)]
        planned += [(place, t) for place in (places if t.folds > 1 else [("teachers", name)])]
    planned += students
    scored = stage in ("score", "run") and bool(used or teachers) and recipe.scores.rows > 0
    if (
        stage in ("base", "failures")
        or scored
        or any(x.data == "train+failures" for _, x in planned)
    ):
        planned.insert(0, (("base",), recipe.base))
    return planned


def estimate(
    recipe: Recipe, store: Store, stage: str, arms: list[str], cells: Sequence[tuple[str, int]]
) -> Estimate:
    """Train a few batches with both terms, and multiply by what is not finished yet."""
    planned = planned_networks(recipe, stage, arms)
    missing = [
        learner
        for panel, seed in cells
        for place, learner in planned
        if not store.is_finished(panel, seed, *place)
    ]
    engine = start_engine(recipe.engine.device, recipe.engine.threads)
    panel, seed = cells[0]
    splits, size = Cell(recipe, panel, seed, engine).splits, recipe.training.batch_size
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
    models = {model.model_dump_json(): model for model in map(recipe.model_of, missing)}
    for model in models.values():  # one that can't be built fails here, before anything trains
        build_model(model, splits, seed, "estimate")
    train(job, engine, None, Watch())  # the first time loads libraries and fills caches
    measured = train(job, engine, None, Watch())
    per_step = measured.cost.seconds / measured.cost.steps
    weights = sum(tensor.numel() for tensor in measured.model.state_dict().values())
    steps = sum(map(recipe.epochs_of, missing)) * -(-len(splits.train) // size)
    workers = num_workers(recipe, len(cells))
    return Estimate(
        networks=len(missing),
        steps=steps,
        seconds=steps * per_step / workers,
        megabytes=len(missing) * weights * 4 / 1e6,
        workers=workers,
    )


def run_cells(
    recipe: Recipe,
    store: Store,
    stage: str,
    arms: list[str],
    panels: list[str],
    begin: Callable[[Estimate], None],
) -> Counter[str]:
    """Run every panel and seed up to a stage; return how much of what kind was reused.

    `begin` is called once the cost is measured and the settings have proved to work.
    Raises Interrupted once every process has saved its state.
    """
    cells = [(panel, seed) for seed in recipe.seeds for panel in panels]
    workers = num_workers(recipe, len(cells))
    if workers == 1:
        cost = estimate(recipe, store, stage, arms, cells)
        begin(cost)
        with _stop_on_signals() as stop, _progress(cost.steps) as advance:
            watch = _watch(recipe, stop.is_set, advance)
            return sum(
                (_run_cell(recipe, store, stage, arms, *cell, watch) for cell in cells), Counter()
            )
    progress: Any = _SPAWN.Queue()
    with _stop_on_signals() as stop:
        setup = (stop, progress)
        with ProcessPoolExecutor(workers, _SPAWN, _start_worker, setup) as pool:
            cost = pool.submit(estimate, recipe, store, stage, arms, cells).result()
            begin(cost)
            futures = {
                pool.submit(_worker_cell, recipe, store, stage, arms, panel, seed)
                for panel, seed in cells
            }
            with _progress(cost.steps) as advance:
                return _follow(futures, progress, advance, stop)


def _follow(
    futures: set[Future[Counter[str]]], progress: Any, advance: Callable[[int], None], stop: Any
) -> Counter[str]:
    pending, failure, reused = futures, None, Counter[str]()
    while pending:
        done, pending = wait(pending, timeout=0.3, return_when=FIRST_COMPLETED)
        while not progress.empty():
            advance(progress.get())
        for future in done:
            if future.cancelled():
                continue
            if (error := future.exception()) is None:
                reused += future.result()
            elif failure is None or isinstance(failure, Interrupted):
                failure = error
                stop.set()  # the others save their state and stop
        if stop.is_set():
            for future in pending:
                future.cancel()
    if failure is not None:
        raise failure
    return reused


def _run_cell(
    recipe: Recipe, store: Store, stage: str, arms: list[str], panel: str, seed: int, watch: Watch
) -> Counter[str]:
    engine = start_engine(recipe.engine.device, recipe.engine.threads)
    cell = Cell(recipe, panel, seed, engine, watch)
    CellRun(cell, store).upto(stage, arms)
    return cell.reused


def _watch(
    recipe: Recipe, should_stop: Callable[[], bool], advance: Callable[[int], None]
) -> Watch:
    return Watch(should_stop, advance, recipe.engine.checkpoint_seconds)


# -- in the worker processes ------------------------------------------------------------

_worker: dict[str, Any] = {}


def _start_worker(stop: Any, progress: Any) -> None:
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole group; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _worker.update(stop=stop, progress=progress)


def _worker_cell(
    recipe: Recipe, store: Store, stage: str, arms: list[str], panel: str, seed: int
) -> Counter[str]:
    watch = _watch(recipe, _worker["stop"].is_set, _worker["progress"].put)
    return _run_cell(recipe, store, stage, arms, panel, seed, watch)


# -- progress and signals -----------------------------------------------------------------


@contextmanager
def _progress(steps: int) -> Iterator[Callable[[int], None]]:
    """Show steps with an ETA on a terminal; elsewhere write a line now and then."""
    with tqdm(total=steps, unit="step", unit_scale=True, disable=None, leave=False) as bar:
        done, said = 0, time.monotonic()

        def advance(count: int) -> None:
            nonlocal done, said
            done += count
            bar.update(count)
            if bar.disable and time.monotonic() - said > 30:
                said = time.monotonic()
                log.info("%d of about %d steps", done, steps)

        yield advance


@contextmanager
def _stop_on_signals() -> Iterator[Any]:
    """Yield an event that Ctrl-C or SIGTERM sets; a second one ends the process at once."""
    stop = _SPAWN.Event()
    received: list[int] = []
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}

    def on_signal(number: int, frame: Any) -> None:
        if received:
            os._exit(128 + number)
        received.append(number)
        stop.set()

    for number in before:
        signal.signal(number, on_signal)
    try:
        yield stop
    except Interrupted:
        raise Interrupted(*received) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        raise Interrupted(*received)
