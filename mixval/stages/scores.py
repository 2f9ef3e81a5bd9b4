"""r_hat of the probe plan under a pair of posteriors: base and teacher, student and teacher, ..."""

from collections.abc import Iterator
from pathlib import Path

import torch

from mixval import choose
from mixval.fingerprints import fingerprint
from mixval.rhat import Scorer
from mixval.score_store import ScoreWriter
from mixval.scoring import drawn_plans, el2n_of_samples, score_plans
from mixval.stages.cell import Cell
from mixval.store import Artifact, Store
from mixval.types import Ints, Loss, MixPlan, Pair, ScoreTable


def scores(cell: Cell, name: str, pair: Pair, store: Store) -> Path:
    """Return the folder with r_hat of the probe plan under the pair called `name`."""
    settings = cell.recipe.scores
    provenance = probe_provenance(cell, pair)
    artifact = cell.artifact(
        store,
        "scores",
        name,
        made_from={"settings": settings.model_dump(mode="json", exclude={"bank"}), **provenance},
    )
    if cell.reuse(artifact) is None:
        kept = write_probe(cell, artifact, pair)
        if cell.engine.processes.is_main:
            share = kept / settings.rows
            artifact.finish({"rows": settings.rows, "share r_hat <= 0": share})
        cell.engine.processes.wait()
    return artifact.folder


def write_probe(cell: Cell, artifact: Artifact, pair: Pair, epoch: int = 0) -> int:
    """Score every row of the probe plan once, into parts by process; return how many are kept.

    Rows go to disk as they are scored, so any number of them needs the same memory.
    """
    processes = cell.engine.processes
    if processes.is_main:
        for stale in artifact.folder.glob(f"part-{epoch:04d}*.parquet"):
            stale.unlink()
    processes.wait()
    suffix = f"-{processes.rank:03d}" if processes.rank else ""
    path = artifact.path(f"part-{epoch:04d}{suffix}.parquet")
    kept = 0
    with ScoreWriter(path, probe_provenance(cell, pair)) as writer:
        for table in score_probe(cell, pair, epoch):
            kept += int((table.r_hat <= 0).sum())
            writer.write(table)
    return int(processes.total(torch.tensor(kept, device=cell.engine.device)))


def score_probe(cell: Cell, pair: Pair, epoch: int = 0) -> Iterator[ScoreTable]:
    """Yield this process's part of the scores of the probe plan, chunk by chunk."""
    settings = cell.recipe.scores
    loss: Loss = choose.pick("losses", settings.loss.name, settings.loss.parameters)
    maker = cell.probe_rows(pair.folds)
    return score_plans(
        maker,
        probe_plans(cell, pair.folds),
        Scorer(pair.updated, loss),
        pair.base,
        chunk=settings.chunk,
        epoch=epoch,
        processes=cell.engine.processes,
        sample_el2n=el2n_of_samples(maker, pair.base, settings.chunk),
    )


def probe_plans(cell: Cell, folds: Ints | None) -> Iterator[MixPlan]:
    """Return the fixed mixes that are scored again and again."""
    settings = cell.recipe.scores
    return drawn_plans(
        settings.rows,
        seed=cell.seed,
        alpha=settings.alpha,
        num_samples=len(cell.splits.train),
        folds=folds,
    )


def probe_provenance(cell: Cell, pair: Pair) -> dict[str, str]:
    return {
        "data": cell.data_fingerprint,
        "plan": fingerprint([plan.fingerprint for plan in probe_plans(cell, pair.folds)]),
        "updated": pair.updated_fingerprint,
        "base": pair.base_fingerprint,
        "leaks test labels": "yes" if pair.leaks else "no",
    }
