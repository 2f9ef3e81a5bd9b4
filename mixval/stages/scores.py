"""r_hat of the probe plan: base against teacher, and teacher against student as it trains."""

from dataclasses import replace

import numpy as np
import torch

from mixval import choose
from mixval.mixing import draw_plan
from mixval.posteriors import point
from mixval.rhat import Scorer
from mixval.score_store import read_scores, write_scores
from mixval.stages.cell import Cell
from mixval.stages.network import Network
from mixval.stages.teacher import TeacherSet
from mixval.store import Store
from mixval.types import Loss, MixPlan, Posterior, ScoreTable


def scores(cell: Cell, base: Network, name: str, teacher: TeacherSet, store: Store) -> ScoreTable:
    """Return r_hat of the probe plan, with the base network as p(theta | D)."""
    settings = cell.recipe.scores
    plan = probe_plan(cell, teacher)
    provenance = probe_provenance(cell, plan, teacher, base.fingerprint)
    artifact = cell.artifact(
        store,
        "scores",
        name,
        made_from={"settings": settings.model_dump(mode="json"), **provenance},
    )
    path = artifact.path("part-0000.parquet")
    if cell.reuse(artifact) is None:
        table = score_plan(cell, plan, teacher, point([base.model]))
        write_scores(path, replace(table, provenance=provenance))
        share = float((table.r_hat <= 0).mean())
        artifact.finish({"rows": len(table), "share r_hat <= 0": share})
    return read_scores(path)


def probe_plan(cell: Cell, teacher: TeacherSet) -> MixPlan:
    """Return the fixed mixes that are scored again and again: as many epochs as the rows need."""
    settings, samples = cell.recipe.scores, len(cell.splits.train)
    plans = [
        draw_plan(
            seed=cell.seed,
            epoch=epoch,
            alpha=settings.alpha,
            num_samples=samples,
            folds=teacher.folds,
            stream="probe",
        )
        for epoch in range(-(-settings.rows // samples))
    ]
    joined = {
        name: np.concatenate([getattr(plan, name) for plan in plans])[: settings.rows]
        for name in ("first", "second", "lam")
    }
    return MixPlan(**joined, alpha=settings.alpha, epoch=0)


def probe_provenance(cell: Cell, plan: MixPlan, teacher: TeacherSet, base: str) -> dict[str, str]:
    return {
        "data": cell.data_fingerprint,
        "plan": plan.fingerprint,
        "updated": teacher.fingerprint,
        "base": base,
        "leaks test labels": "yes" if teacher.leaks else "no",
    }


def score_plan(
    cell: Cell, plan: MixPlan, teacher: TeacherSet, base: Posterior, epoch: int = 0
) -> ScoreTable:
    """Return r_hat of every row of a plan over the train split, chunk by chunk."""
    settings, train = cell.recipe.scores, cell.splits.train
    loss: Loss = choose.pick("losses", settings.loss.name, settings.loss.parameters)
    scorer = Scorer(teacher.posterior, loss)
    folds = None if teacher.folds is None else torch.from_numpy(teacher.folds)
    maker = replace(cell.rows(train), folds=None if folds is None else folds.to(cell.engine.device))
    chunks = []
    for start in range(0, len(plan), settings.chunk):
        # Rows at lambda = 1 are still scored as mixes: of a sample with nothing.
        rows = replace(plan.keep(slice(start, start + settings.chunk)), alpha=plan.alpha or 1.0)
        batch = maker.batch(rows)
        assert batch.mixed is not None and batch.mixed_targets is not None
        scored = scorer(batch.mixed, batch.mixed_targets, base(batch.mixed), batch.fold)
        columns = (scored.updated, scored.base, scored.r_hat, scored.std_error)
        chunks.append(torch.stack(columns).cpu().double().numpy())
    updated, base_term, r_hat, std_error = np.concatenate(chunks, axis=1)
    ids, labels = train.ids.numpy(), train.labels.numpy()
    return ScoreTable(
        epoch=np.full(len(plan), epoch),
        row=np.arange(len(plan)),
        i=ids[plan.first],
        j=ids[plan.second],
        lam=plan.lam,
        label_i=labels[plan.first],
        label_j=labels[plan.second],
        updated=updated,
        base=base_term,
        r_hat=r_hat,
        std_error=std_error,
        kept=np.full(len(plan), np.nan),
    )
