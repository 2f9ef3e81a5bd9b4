"""r_hat of the rows of plans, chunk by chunk: any number of rows in the same memory."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import torch

from mixval.feeding import feed
from mixval.mixing import RowMaker
from mixval.processes import ALONE, Processes
from mixval.rhat import Scorer, probability_negative
from mixval.types import Batch, MixPlan, Posterior, ScoreTable

_READ_AHEAD = 256  # chunks that loaders may be given at once


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
    chunks = _chunks(plans, chunk)
    # Rows at lambda = 1 are still scored as mixes: of a sample with nothing.
    numbered = ((k * chunk, replace(rows, alpha=rows.alpha or 1.0)) for k, rows in chunks)
    own = itertools.islice(numbered, processes.rank, None, processes.world)
    while group := list(itertools.islice(own, _READ_AHEAD)):
        batches = feed(maker, [rows for _, rows in group], None)
        for (start, rows), batch in zip(group, batches, strict=True):
            yield _score_rows(maker, rows, batch, start, scorer, base, epoch)


def _chunks(plans: Iterable[MixPlan], size: int) -> Iterator[tuple[int, MixPlan]]:
    """Yield the rows of plans in numbered pieces of `size`, across the ends of plans."""
    held, number = None, itertools.count()
    for plan in plans:
        held = plan if held is None else MixPlan.join([held, plan])
        whole = len(held) // size * size
        for at in range(0, whole, size):
            yield next(number), held.keep(slice(at, at + size))
        held = held.keep(slice(whole, None))
    if held is not None and len(held):
        yield next(number), held


def _score_rows(
    maker: RowMaker,
    rows: MixPlan,
    batch: Batch,
    start: int,
    scorer: Scorer,
    base: Posterior,
    epoch: int,
) -> ScoreTable:
    """Return the scores of rows; `start` is the place of the first among all."""
    assert batch.mixed is not None and batch.mixed_targets is not None
    scored = scorer(batch.mixed, batch.mixed_targets, base(batch.mixed), batch.fold)
    columns = (scored.updated, scored.base, scored.r_hat, scored.std_error)
    updated, base_term, r_hat, std_error = torch.stack(columns).cpu().numpy()
    probable = probability_negative(r_hat, std_error, scored.draws)
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
        p_negative=probable,
        kept=np.full(len(rows), np.nan, dtype=np.float32),
    )
