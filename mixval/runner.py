"""Run the cells of a recipe, here or in worker processes: progress, stopping, estimates."""

import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
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
            f"about {self.seconds:.0f} s with {self.workers} workers, {self.megabytes:.0f} MB on disk"
        )


def num_workers(recipe: Recipe, cells: int) -> int:
    return max(1, min(recipe.engine.workers or os.cpu_count() or 1, cells))


def planned_learners(recipe: Recipe, stage: str, arms: list[str]) -> list[tuple[Learner, int]]:
    """Return the networks that one cell trains up to a stage, and how many of each."""
    planned: list[tuple[Learner, int]] = [(recipe.base, 1)]
    if stage in ("teacher", "score", "student", "run"):
        used = {recipe.arms[arm].teacher for arm in arms}
        planned += [
            (t, t.folds)
            for name, t in recipe.teachers.items()
            if not t.weights and (name in used or stage in ("teacher", "score"))
        ]
    if stage in ("student", "run"):
        planned += [(recipe.arms[arm], 1) for arm in arms]
    return planned


def estimate(recipe: Recipe, stage: str, arms: list[str], cells: int) -> Estimate:
    """Train a few batches of a student with both terms, and multiply."""
    panel, seed = next(iter(recipe.panels)), recipe.seeds[0]
    engine = start_engine(recipe.engine.device, recipe.engine.threads)
    cell = Cell(recipe, panel, seed, engine)
    splits, size = cell.splits, recipe.training.batch_size
    planned = planned_learners(recipe, stage, arms)
    steps_per_epoch = -(-len(splits.train) // size)
    steps = sum(count * recipe.epochs_of(learner) for learner, count in planned) * steps_per_epoch
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
    seconds = train(job, engine, None, Watch()).cost
    weights = sum(p.numel() for p in build_model(recipe.model, splits, seed, "estimate").parameters())
    networks = sum(count for _, count in planned) * cells
    workers = num_workers(recipe, cells)
    return Estimate(
        networks=networks,
        steps=steps * cells,
        seconds=steps * cells * seconds.seconds / seconds.steps / workers,
        megabytes=networks * weights * 4 / 1e6,
        workers=workers,
    )


def run_cells(
    recipe: Recipe,
    store: Store,
    stage: str,
    arms: list[str],
    panels: list[str],
    announce: Callable[[str], None],
) -> None:
    """Run every panel and seed up to a stage; raise Interrupted once all have saved their state."""
    cells = [(panel, seed) for seed in recipe.seeds for panel in panels]
    workers = num_workers(recipe, len(cells))
    if workers == 1:
        cost = estimate(recipe, stage, arms, len(cells))
        announce(str(cost))
        with _stop_on_signals() as stop, _progress(cost.steps) as advance:
            watch = _watch(recipe, stop.is_set, advance)
            for panel, seed in cells:
                _run_cell(recipe, store, stage, arms, panel, seed, watch)
        return
    progress: Any = _SPAWN.Queue()
    with _stop_on_signals() as stop:
        setup = (stop, progress)
        with ProcessPoolExecutor(workers, _SPAWN, _start_worker, setup) as pool:
            cost = pool.submit(estimate, recipe, stage, arms, len(cells)).result()
            announce(str(cost))
            futures = {
                pool.submit(_worker_cell, recipe, store, stage, arms, panel, seed)
                for panel, seed in cells
            }
            with _progress(cost.steps) as advance:
                _follow(futures, progress, advance, stop)


def _follow(futures: set[Future[None]], progress: Any, advance: Callable[[int], None], stop: Any) -> None:
    pending, failure = futures, None
    while pending:
        done, pending = wait(pending, timeout=0.3, return_when=FIRST_COMPLETED)
        while not progress.empty():
            advance(progress.get())
        failure = failure or next((f.exception() for f in done if not f.cancelled() and f.exception()), None)
        if (failure or stop.is_set()) and not all(f.cancelled() or f.running() for f in pending):
            stop.set()
            for future in pending:
                future.cancel()
    if failure:
        raise failure


def _run_cell(
    recipe: Recipe, store: Store, stage: str, arms: list[str], panel: str, seed: int, watch: Watch
) -> None:
    engine = start_engine(recipe.engine.device, recipe.engine.threads)
    CellRun(Cell(recipe, panel, seed, engine, watch), store).upto(stage, arms)


def _watch(recipe: Recipe, should_stop: Callable[[], bool], advance: Callable[[int], None]) -> Watch:
    return Watch(should_stop, advance, recipe.engine.checkpoint_seconds)


# -- in the worker processes ------------------------------------------------------------

_worker: dict[str, Any] = {}


def _start_worker(stop: Any, progress: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _worker.update(stop=stop, progress=progress)


def _worker_cell(recipe: Recipe, store: Store, stage: str, arms: list[str], panel: str, seed: int) -> None:
    watch = _watch(recipe, _worker["stop"].is_set, _worker["progress"].put)
    _run_cell(recipe, store, stage, arms, panel, seed, watch)


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
    stop, received = _SPAWN.Event(), []
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


