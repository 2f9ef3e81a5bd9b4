"""r_hat of the rows of plans, chunk by chunk: any number of rows in the same memory."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import torch

from mixval.mixing import RowMaker
from mixval.processes import ALONE, Processes
from mixval.rhat import Scorer
from mixval.types import MixPlan, Posterior, ScoreTable


def score_plans(
    maker: RowMaker,
    plans: Iterable[MixPlan],
    scorer: Scorer,
    base: Posterior,
    *,
    chunk: int,
    epoch: int = 0,
    processes: Processes = ALONE,
) -> Iterator[ScoreTable]:
    """Yield the scores of all rows of the plans: those chunks of them that are this process's turn.

    `epoch` is that of the network behind `base`, for the table.
    """
    start = 0
    for number, rows in enumerate(_chunks(plans, chunk)):
        if number % processes.world == processes.rank:
            yield _score_rows(maker, rows, start, scorer, base, epoch)
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
    maker: RowMaker, rows: MixPlan, start: int, scorer: Scorer, base: Posterior, epoch: int
) -> ScoreTable:
    """Return the scores of rows; `start` is the place of the first among all."""
    # Rows at lambda = 1 are still scored as mixes: of a sample with nothing.
    batch = maker.batch(replace(rows, alpha=rows.alpha or 1.0))
    assert batch.mixed is not None and batch.mixed_targets is not None
    scored = scorer(batch.mixed, batch.mixed_targets, base(batch.mixed), batch.fold)
    columns = (scored.updated, scored.base, scored.r_hat, scored.std_error)
    updated, base_term, r_hat, std_error = torch.stack(columns).cpu().numpy()
    ids, labels = maker.part.ids.numpy(), maker.part.labels.cpu().numpy()
    return ScoreTable(
        epoch=np.full(len(rows), epoch, dtype=np.int32),
        row=np.arange(start, start + len(rows)),
        i=ids[rows.first],
        j=ids[rows.second],
        lam=rows.lam,
        label_i=labels[rows.first].astype(np.int32),
        label_j=labels[rows.second].astype(np.int32),
        updated=updated,
        base=base_term,
        r_hat=r_hat,
        std_error=std_error,
        kept=np.full(len(rows), np.nan, dtype=np.float32),
    )
