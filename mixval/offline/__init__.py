"""r_hat of mixes under models of one's own: into parquet, part by part, so that it can resume."""

import itertools
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import ValidationError
from tqdm import tqdm

from mixval.engine import Engine, start_engine
from mixval.environment import environment
from mixval.errors import Interrupted, UserError
from mixval.fingerprints import fingerprint
from mixval.losses import cross_entropy
from mixval.offline.files import BatchFiles
from mixval.offline.folder import ScoreFolder
from mixval.offline.models import CheckedModel, Model, OwnModel, load_models
from mixval.offline.sources import Layout, Made, Mixes, Numbers, plan_mixes
from mixval.posteriors import ensemble
from mixval.processes import Processes
from mixval.recipe import EngineSettings
from mixval.recipe_errors import one_line
from mixval.rhat import Scorer
from mixval.score_store import ScoreWriter
from mixval.types import MixPlan, Posterior

_Made = TypeVar("_Made")


@dataclass(frozen=True)
class OfflineScores:
    """Where scores lie (`mixval.read_scores`), how many, and the share with r_hat <= 0."""

    folder: Path
    rows: int
    share: float


@dataclass(frozen=True)
class _Task:
    """All that decides the scores."""

    mixes: Mixes
    layout: Layout
    base: Posterior
    updated: Posterior
    outputs: int
    made_from: dict[str, Any]

    @property
    def provenance(self) -> dict[str, str]:
        prints = {key: self.made_from[key] for key in ("data", "base", "updated")}
        settings = fingerprint(self.made_from)
        return {**prints, "plan": self.made_from["mixes"], "settings": settings}


def score_mixes(
    base: Model | Sequence[Model],
    updated: Model | Sequence[Model],
    data: Any = None,
    mixes: Path | str | MixPlan | None = None,
    *,
    out: Path | str,
    split: str = "train",
    rows: int | None = None,
    alpha: float = 1.0,
    seed: int = 0,
    batches: Sequence[Path | str] = (),
    mean: Numbers | None = None,
    std: Numbers | None = None,
    chunk: int = 256,
    device: str = "auto",
    precision: str = "fp32",
    threads: int | None = None,
    command: str = "",
    progress: bool = True,
) -> OfflineScores:
    """Score mixes under networks of one's own, into the folder `out`; what is there already stays.

    r_hat = mean_s H(z; updated_s) - mean_s H(z; base_s), H the cross-entropy of the mix. A model
    is an nn.Module that returns logits, `NAME@FILE` or `module:function`; several make an
    ensemble, and equal numbers of both are paired. The mixes are of samples of `data` (a torch
    Dataset, a Source, or a name as in a recipe): `rows` drawn ones, those of a table (a file
    with i, j, lam, where i and j are ids), or those of a MixPlan; or they are in `batches`.
    Images are divided by 255, less `mean`, over `std`: those of the train split if not given.

    A folder is gone on with if data, mixes, models, normalisation, chunk, device, threads and
    precision are the same, and refused otherwise. A change of an nn.Module's code alone can't
    be seen.
    """
    _check_numbers(rows=rows, chunk=chunk, threads=threads, alpha=alpha, seed=seed)
    folder = ScoreFolder(Path(out))
    before = (folder.settings() or {}).get("made_from", {})
    kept_threads = torch.get_num_threads()
    engine = _engine(before, device, precision, threads)

    def prepare() -> _Task:
        loaded = _mixes(
            data,
            split,
            mixes,
            batches,
            engine,
            rows=rows,
            alpha=alpha,
            seed=seed,
            mean=mean,
            std=std,
        )
        task = _task(loaded, base, updated, engine, chunk)
        folder.check(task.made_from, task.layout)
        return task

    try:
        task = _first_by_main(engine.processes, prepare)
        said = {
            "made_from": task.made_from,
            "classes": list(task.mixes.classes),
            "rows": task.layout.count,
            "command": command,
            "environment": environment(),
        }
        return _write(task, folder, engine, said, progress)
    finally:
        torch.set_num_threads(kept_threads)


# -- preparing ----------------------------------------------------------------------------


def _check_numbers(
    rows: int | None, chunk: int, threads: int | None, alpha: float, seed: int
) -> None:
    for name, value in (("rows", rows), ("chunk", chunk), ("threads", threads)):
        if value is not None and value < 1:
            raise UserError(f"--{name}: must be at least 1, got {value}")
    if not 0 <= alpha < float("inf"):
        raise UserError(f"--alpha: must be finite and >= 0, got {alpha}")
    if seed < 0:
        raise UserError(f"--seed: must be at least 0, got {seed}")


def _engine(before: dict[str, Any], device: str, precision: str, threads: int | None) -> Engine:
    """Return the engine; what is not asked for is as it was when the folder was begun."""
    if device == "auto":
        device = before.get("device", device)
    threads = threads or before.get("threads") or torch.get_num_threads()
    try:
        settings = EngineSettings.model_validate(
            {"device": device, "precision": precision, "threads": threads}
        )
    except ValidationError as error:
        raise UserError(f"--{one_line(error, EngineSettings)}") from error
    if settings.precision == "auto":
        raise UserError("--precision: must be fp32 or bf16, got 'auto'")
    return start_engine(settings)


def _first_by_main(processes: Processes, make: Callable[[], _Made]) -> _Made:
    """Return what each process makes, the main one first: its error is everybody's, said once."""
    made: list[_Made] = []
    processes.from_main(lambda: made.append(make()))
    return made[0] if made else make()


def _mixes(
    data: Any,
    split: str,
    mixes: Path | str | MixPlan | None,
    batches: Sequence[Path | str],
    engine: Engine,
    **options: Any,
) -> Mixes:
    if batches:
        if data is not None or mixes is not None:
            raise UserError("--batches: hold all there is; leave --data and --mixes out")
        return Made(BatchFiles([Path(path) for path in batches]), engine.device)
    if data is None:
        raise UserError("--data: must be given, such as fashion_mnist; or give --batches")
    return plan_mixes(data, split, mixes, engine.device, loaders=engine.loaders, **options)


def _task(
    mixes: Mixes,
    base: Model | Sequence[Model],
    updated: Model | Sequence[Model],
    engine: Engine,
    chunk: int,
) -> _Task:
    shape, classes = mixes.input_shape, mixes.num_labels
    loaded = {
        role: load_models(models, role, shape, classes)
        for role, models in (("base", base), ("updated", updated))
    }
    ready = {role: [CheckedModel(m, engine) for m in models] for role, models in loaded.items()}
    made_from = {
        "data": mixes.data,
        "mixes": mixes.plan,
        **{role: _fingerprint(models) for role, models in loaded.items()},
        "normalisation": mixes.normalisation,
        "chunk": chunk,
        "device": engine.device.type,
        "threads": engine.threads,
        "precision": engine.precision,
    }
    outputs = _num_outputs([*ready["base"], *ready["updated"]], mixes)
    layout = Layout(mixes.count, chunk)
    posteriors = ensemble(ready["base"]), ensemble(ready["updated"])
    return _Task(mixes, layout, *posteriors, outputs, made_from)


def _fingerprint(models: Sequence[OwnModel]) -> str:
    return fingerprint([model.fingerprint for model in models])


def _num_outputs(models: Sequence[CheckedModel], mixes: Mixes) -> int:
    """Return how many classes the networks tell apart; refuse too few, or different numbers."""
    inputs = mixes.first()
    found = [(model.title, model.num_outputs(inputs)) for model in models]
    first, outputs = found[0]
    for title, number in found:
        if number < mixes.num_labels:
            raise UserError(
                f"{title}: has {number} outputs, the data {mixes.num_labels} classes; "
                "give a model of these classes"
            )
        if number != outputs:
            raise UserError(
                f"{title}: has {number} outputs, {first} has {outputs}; they must be of one task"
            )
    return outputs


# -- scoring ------------------------------------------------------------------------------


def _write(
    task: _Task, folder: ScoreFolder, engine: Engine, said: dict[str, Any], progress: bool
) -> OfflineScores:
    processes, layout = engine.processes, task.layout
    with ExitStack() as stack:
        processes.from_main(lambda: stack.enter_context(folder.locked()))

        def begin() -> list[int]:
            folder.check(task.made_from, layout)  # again: another may have been here meanwhile
            folder.write(said)
            return folder.missing(layout, task.provenance)

        missing = processes.from_main(begin)
        with _stoppable():
            own = missing[processes.rank :: processes.world]
            _write_parts(task, folder, own, progress and processes.is_main)
        processes.wait()

        def finish() -> float:
            share = folder.num_kept(layout) / layout.count
            folder.write({**said, "share r_hat <= 0": share})
            return share

        return OfflineScores(folder.root, layout.count, processes.from_main(finish))


def _write_parts(task: _Task, folder: ScoreFolder, parts: list[int], shown: bool) -> None:
    """Write these parts, each a file that is there when it is whole."""
    layout, scorer = task.layout, Scorer(task.updated, cross_entropy)
    rows = sum(len(layout.rows(part)) for part in parts)
    tables = task.mixes.tables(set(parts), layout, scorer, task.base, task.outputs)
    hidden = None if shown else True  # None: only on a terminal
    with tqdm(total=rows, unit="mix", unit_scale=True, disable=hidden, leave=False) as bar:
        for part, group in itertools.groupby(tables, lambda t: int(t.row[0]) // layout.part_rows):
            with ScoreWriter(folder.part(part), task.provenance) as writer:
                for table in group:
                    writer.write(table)
                    bar.update(len(table))


@contextmanager
def _stoppable() -> Iterator[None]:
    """Let SIGTERM end the work as Ctrl-C does: what is whole stays, what is begun is removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise Interrupted(number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
