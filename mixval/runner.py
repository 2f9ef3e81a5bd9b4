"""Run the cells of a work order, here or in worker processes, with progress and a way to stop."""

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from mixval.engine import start_engine
from mixval.errors import Interrupted
from mixval.estimate import Estimate, estimate
from mixval.pipeline import CellRun
from mixval.stages.cell import Cell
from mixval.training_job import Watch
from mixval.work import Work

log = logging.getLogger(__name__)
_SPAWN = multiprocessing.get_context("spawn")  # a fork would inherit torch's threads and locks


def run_cells(work: Work, begin: Callable[[Estimate], None]) -> Counter[str]:
    """Run every cell; return how much of what kind was finished already.

    `begin` is called once the cost is measured and the settings have proved to work.
    Raises Interrupted once every process has saved its state.
    """
    with _stop_on_signals() as stop:
        if work.workers == 1:
            return _run_here(work, begin, stop)
        progress: Any = _SPAWN.Queue()
        setup = (stop, progress)
        with ProcessPoolExecutor(work.workers, _SPAWN, _start_worker, setup) as pool:
            cost = pool.submit(estimate, work).result()
            begin(cost)
            futures = {pool.submit(_worker_cell, work, *cell) for cell in work.cells}
            with _progress(cost.steps) as advance:
                return _follow(futures, progress, advance, stop)


def _run_here(work: Work, begin: Callable[[Estimate], None], stop: Any) -> Counter[str]:
    cost = estimate(work)
    begin(cost)
    with _progress(cost.steps) as advance:
        watch = Watch(stop.is_set, advance, work.recipe.engine.checkpoint_seconds)
        return sum((_run_cell(work, *cell, watch) for cell in work.cells), Counter())


def _run_cell(work: Work, panel: str, seed: int, watch: Watch) -> Counter[str]:
    engine = start_engine(work.recipe.engine.device, work.recipe.engine.threads)
    cell = Cell(work.recipe, panel, seed, engine, watch)
    CellRun(cell, work.store).upto(work.stage, work.arms)
    return cell.reused


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


# -- in the worker processes ------------------------------------------------------------

_worker: dict[str, Any] = {}


def _start_worker(stop: Any, progress: Any) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # both reach the whole group; the parent decides
    _worker.update(stop=stop, progress=progress)
    threading.Thread(target=_end_with_parent, args=(stop,), daemon=True).start()


def _end_with_parent(stop: Any) -> None:
    """When the parent is killed, let a training save its state, and leave no process behind."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    stop.set()
    time.sleep(10)
    os._exit(1)


def _worker_cell(work: Work, panel: str, seed: int) -> Counter[str]:
    seconds = work.recipe.engine.checkpoint_seconds
    watch = Watch(_worker["stop"].is_set, _worker["progress"].put, seconds)
    return _run_cell(work, panel, seed, watch)


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
    """Yield an event that Ctrl-C or SIGTERM sets; a second one ends everything at once."""
    stop = _SPAWN.Event()
    received: list[int] = []
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}

    def on_signal(number: int, frame: Any) -> None:
        if received:
            for child in multiprocessing.active_children():
                child.kill()
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
