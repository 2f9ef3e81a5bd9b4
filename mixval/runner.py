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
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SPAWN = multiprocessing.get_context("spawn")  # a fork would inherit torch's threads and locks


def run_cells(work: Work, begin: Callable[[Estimate], None]) -> Counter[str]:
    """Run every cell; return how much of what kind was finished already.

    `begin` is called once the cost is measured and the settings have proved to work.
    Raises Interrupted once every process has saved its state.
    """
    with _listening() as received:
        run = _run_here if work.workers == 1 else _run_in_workers
        return run(work, begin, received)


def _run_here(work: Work, begin: Callable[[Estimate], None], received: list[int]) -> Counter[str]:
    cost = estimate(work)
    begin(cost)
    with _progress(cost.steps) as advance:
        watch = Watch(lambda: bool(received), advance, work.recipe.engine.checkpoint_seconds)
        return sum((_run_cell(work, *cell, watch) for cell in work.cells), Counter())


def _run_in_workers(
    work: Work, begin: Callable[[Estimate], None], received: list[int]
) -> Counter[str]:
    stop, progress = _SPAWN.Event(), _SPAWN.Queue()
    with ProcessPoolExecutor(work.workers, _SPAWN, _start_worker, (stop, progress)) as pool:
        with _signals_blocked():  # workers inherit the mask, and lift it once they are ready
            measured = pool.submit(estimate, work)
        cost = measured.result()
        begin(cost)
        with _signals_blocked():
            futures = {pool.submit(_worker_cell, work, *cell) for cell in work.cells}
        with _progress(cost.steps) as advance:
            return _follow(futures, progress, advance, stop, received)


def _run_cell(work: Work, panel: str, seed: int, watch: Watch) -> Counter[str]:
    engine = start_engine(work.recipe.engine)
    cell = Cell(work.recipe, panel, seed, engine, watch)
    CellRun(cell, work.store).upto(work.stage, work.arms)
    return cell.reused


def _follow(
    futures: set[Future[Counter[str]]],
    progress: Any,
    advance: Callable[[int], None],
    stop: Any,
    received: list[int],
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
        if received:
            stop.set()
        if stop.is_set():
            for future in pending:
                future.cancel()
    if failure is not None:
        raise failure
    return reused


# -- in the worker processes ------------------------------------------------------------

_worker: dict[str, Any] = {}


def _start_worker(stop: Any, progress: Any) -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # both reach the whole group; the parent decides
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
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
    speaks = os.environ.get("RANK", "0") == "0"  # of several processes, the main one
    hidden = None if speaks else True
    with tqdm(total=steps, unit="step", unit_scale=True, disable=hidden, leave=False) as bar:
        done, said = 0, time.monotonic()

        def advance(count: int) -> None:
            nonlocal done, said
            done += count
            bar.update(count)
            if speaks and bar.disable and time.monotonic() - said > 30:
                said = time.monotonic()
                log.info("%d of about %d steps", done, steps)

        yield advance


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Hold signals back: what arrives meanwhile is delivered after."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


@contextmanager
def _listening() -> Iterator[list[int]]:
    """Yield a list that Ctrl-C or SIGTERM puts its number in; a second one ends everything at once.

    A list, not an event: a handler may interrupt the very code that holds an event's lock.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received  # only the main thread can listen; the caller's own handlers stay
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}

    def on_signal(number: int, frame: Any) -> None:
        if received:
            for child in multiprocessing.active_children():
                child.kill()
            os._exit(128 + number)
        received.append(number)

    for number in before:
        signal.signal(number, on_signal)
    try:
        yield received
    except Interrupted:
        raise Interrupted(*received) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        raise Interrupted(*received)
