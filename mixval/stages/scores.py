"""r_hat of the probe plan: base against teacher, and teacher against student as it trains."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from mixval import choose
from mixval.fingerprints import fingerprint
from mixval.mixing import draw_plan
from mixval.posteriors import point
from mixval.rhat import Scorer
from mixval.score_store import ScoreWriter
from mixval.stages.cell import Cell
from mixval.stages.network import Network
from mixval.stages.teacher import TeacherSet
from mixval.store import Artifact, Store
from mixval.types import Loss, MixPlan, Posterior, ScoreTable


def scores(cell: Cell, base: Network, name: str, teacher: TeacherSet, store: Store) -> Path:
    """Return the folder with r_hat of the probe plan, the base network as p(theta | D)."""
    settings = cell.recipe.scores
    provenance = probe_provenance(cell, teacher, base.fingerprint)
    artifact = cell.artifact(
        store,
        "scores",
        name,
        made_from={"settings": settings.model_dump(mode="json"), **provenance},
    )
    if cell.reuse(artifact) is None:
        kept = write_probe(cell, artifact, teacher, point([base.model]), provenance)
        if cell.engine.processes.is_main:
            share = kept / settings.rows
            artifact.finish({"rows": settings.rows, "share r_hat <= 0": share})
        cell.engine.processes.wait()
    return artifact.folder


def write_probe(
    cell: Cell,
    artifact: Artifact,
    teacher: TeacherSet,
    base: Posterior,
    provenance: dict[str, str],
    epoch: int = 0,
) -> int:
    """Score every row of the probe plan once, into parts by process; return how many are kept.

    Rows go to disk as they are scored, so any number of them needs the same memory.
    """
    processes = cell.engine.processes
    if processes.is_main:
        for stale in artifact.folder.glob(f"part-{epoch:04d}*.parquet"):
            stale.unlink()
    processes.wait()
    suffix = f"-{processes.rank:03d}" if processes.rank else ""
    kept, plans = 0, probe_plans(cell, teacher)
    with ScoreWriter(artifact.path(f"part-{epoch:04d}{suffix}.parquet"), provenance) as writer:
        for table in score_plans(cell, plans, teacher, base, epoch):
            kept += int((table.r_hat <= 0).sum())
            writer.write(table)
    return int(processes.total(torch.tensor(kept, device=cell.engine.device)))


def probe_plans(cell: Cell, teacher: TeacherSet) -> Iterator[MixPlan]:
    """Yield the fixed mixes that are scored again and again: as many epochs as the rows need."""
    settings, samples = cell.recipe.scores, len(cell.splits.train)
    for epoch in range(-(-settings.rows // samples)):
        plan = draw_plan(
            seed=cell.seed,
            epoch=epoch,
            alpha=settings.alpha,
            num_samples=samples,
            folds=teacher.folds,
            stream="probe",
        )
        yield plan.keep(slice(settings.rows - epoch * samples))


def probe_provenance(cell: Cell, teacher: TeacherSet, base: str) -> dict[str, str]:
    return {
        "data": cell.data_fingerprint,
        "plan": fingerprint([plan.fingerprint for plan in probe_plans(cell, teacher)]),
        "updated": teacher.fingerprint,
        "base": base,
        "leaks test labels": "yes" if teacher.leaks else "no",
    }


def score_plans(
    cell: Cell, plans: Iterable[MixPlan], teacher: TeacherSet, base: Posterior, epoch: int = 0
) -> Iterator[ScoreTable]:
    """Yield r_hat of the rows of plans in chunks: those chunks that are this process's turn."""
    processes, start = cell.engine.processes, 0
    for number, rows in enumerate(_chunks(plans, cell.recipe.scores.chunk)):
        if number % processes.world == processes.rank:
            yield _score_rows(cell, rows, start, teacher, base, epoch)
        start += len(rows)


def _chunks(plans: Iterable[MixPlan], size: int) -> Iterator[MixPlan]:
    """Yield the rows of plans in pieces of `size`, across the ends of plans."""
    held = None
    for plan in plans:
        held = plan if held is None else MixPlan.join([held, plan])
        whole = len(held) // size * size
        for at in range(0, whole, size):
            yield held.keep(slice(at, at + size))
        held = held.keep(slice(whole, None))
    if held is not None and len(held):
        yield held


def _score_rows(
    cell: Cell, rows: MixPlan, start: int, teacher: TeacherSet, base: Posterior, epoch: int
) -> ScoreTable:
    """Return r_hat of rows over the train split; `start` is the place of the first in its plan."""
    settings, train = cell.recipe.scores, cell.splits.train
    loss: Loss = choose.pick("losses", settings.loss.name, settings.loss.parameters)
    maker = cell.train_rows(teacher.folds)
    # Rows at lambda = 1 are still scored as mixes: of a sample with nothing.
    batch = maker.batch(replace(rows, alpha=rows.alpha or 1.0))
    assert batch.mixed is not None and batch.mixed_targets is not None
    scored = Scorer(teacher.posterior, loss)(
        batch.mixed, batch.mixed_targets, base(batch.mixed), batch.fold
    )
    columns = (scored.updated, scored.base, scored.r_hat, scored.std_error)
    updated, base_term, r_hat, std_error = torch.stack(columns).cpu().double().numpy()
    ids, labels = train.ids.numpy(), train.labels.numpy()
    return ScoreTable(
        epoch=np.full(len(rows), epoch),
        row=np.arange(start, start + len(rows)),
        i=ids[rows.first],
        j=ids[rows.second],
        lam=rows.lam,
        label_i=labels[rows.first],
        label_j=labels[rows.second],
        updated=updated,
        base=base_term,
        r_hat=r_hat,
        std_error=std_error,
        kept=np.full(len(rows), np.nan),
    )
