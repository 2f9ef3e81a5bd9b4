"""r_hat of the rows of plans, chunk by chunk: any number of rows in the same memory."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mixval.feeding import feed, feed_inputs
from mixval.mixing import RowMaker, draw_plan, mixed_targets
from mixval.processes import ALONE, Processes
from mixval.rhat import Scored, Scorer, probability_negative
from mixval.sample_scores import el2n, entropy, margin
from mixval.types import Column, Ints, MixPlan, Posterior, ScoreTable

_READ_AHEAD = 256  # chunks that loaders may be given at once


@dataclass(frozen=True)
class MadeMixes:
    """Mixes as networks see them, made elsewhere."""

    inputs: Tensor  # (B, ...)
    label_i: Tensor  # (B,) int64
    label_j: Tensor  # (B,) int64
    lam: Tensor  # (B,) float64, on the CPU

    def __len__(self) -> int:
        return len(self.inputs)

    def keep(self, rows: slice) -> "MadeMixes":
        kept = (self.inputs[rows], self.label_i[rows], self.label_j[rows], self.lam[rows])
        return MadeMixes(*kept)

    def to(self, device: torch.device) -> "MadeMixes":
        labels = self.label_i.to(device), self.label_j.to(device)
        return MadeMixes(self.inputs.to(device), *labels, self.lam)


def score_plans(
    maker: RowMaker,
    plans: Iterable[MixPlan],
    scorer: Scorer,
    base: Posterior,
    *,
    chunk: int,
    epoch: int = 0,
    processes: Processes = ALONE,
    sample_el2n: Tensor | None = None,
) -> Iterator[ScoreTable]:
    """Yield the scores of all rows of the plans: those chunks of them that are this process's turn.

    `epoch` is that of the network behind `base`, for the table. With `sample_el2n` (N,), of
    the samples themselves, the table holds what stands beside r_hat, too.
    """
    numbered = ((number * chunk, rows) for number, rows in pieces(plans, chunk))
    own = itertools.islice(numbered, processes.rank, None, processes.world)
    yield from score_chunks(maker, own, scorer, base, epoch=epoch, sample_el2n=sample_el2n)


def score_chunks(
    maker: RowMaker,
    chunks: Iterable[tuple[int, MixPlan]],
    scorer: Scorer,
    base: Posterior,
    *,
    epoch: int = 0,
    sample_el2n: Tensor | None = None,
) -> Iterator[ScoreTable]:
    """Yield the scores of each chunk, which comes with the place of its first row among all."""
    # Rows at lambda = 1 are still scored as mixes: of a sample with nothing.
    mixed = ((start, replace(rows, alpha=rows.alpha or 1.0)) for start, rows in chunks)
    while group := list(itertools.islice(mixed, _READ_AHEAD)):
        batches = feed(maker, [rows for _, rows in group], None)
        ids, labels = maker.part.ids.numpy(), maker.part.labels.cpu().numpy()
        for (start, rows), batch in zip(group, batches, strict=True):
            assert batch.mixed is not None and batch.mixed_targets is not None
            given_d = base(batch.mixed)
            scored = scorer(batch.mixed, batch.mixed_targets, given_d, batch.fold)
            of = {"i": ids[rows.first], "j": ids[rows.second], "lam": rows.lam}
            of |= {"label_i": labels[rows.first], "label_j": labels[rows.second]}
            table = _table(scored, start, epoch, of)
            if sample_el2n is not None:
                assert scored.log_probs is not None
                parents = sample_el2n[rows.first], sample_el2n[rows.second]
                known = _beside(given_d, scored.log_probs, batch.mixed_targets, *parents)
                table = replace(table, beside=known)
            yield table


def _beside(
    given_d: Tensor, given_f: Tensor, targets: Tensor, el2n_i: Tensor, el2n_j: Tensor
) -> dict[str, Column]:
    """Return the columns beside r_hat; the loss is `base` and RHO-LOSS is -r_hat already."""
    columns = {
        "margin": margin(given_d, targets),
        "entropy": entropy(given_d),
        "teacher_entropy": entropy(given_f),
        "el2n": el2n(given_d, targets),
        "el2n_i": el2n_i,
        "el2n_j": el2n_j,
    }
    return {name: column.cpu().numpy() for name, column in columns.items()}


def el2n_of_samples(maker: RowMaker, base: Posterior, chunk: int) -> Tensor:
    """Return EL2N of every sample of the maker's part, unmixed, (N,)."""
    labels = maker.part.labels
    chunks = torch.split(torch.arange(len(labels), device=labels.device), chunk)
    errors = []
    for positions, inputs in zip(chunks, feed_inputs(maker, chunks), strict=True):
        targets = F.one_hot(labels[positions], maker.num_classes).to(inputs.dtype)
        errors.append(el2n(base(inputs), targets))
    return torch.cat(errors)


def score_made(
    mixes: MadeMixes, start: int, scorer: Scorer, base: Posterior, num_classes: int
) -> ScoreTable:
    """Return the scores of mixes that come made; whose samples they are is not known: i = j = -1.

    `start` is the place of the first among all.
    """
    inputs, lam = mixes.inputs, mixes.lam.to(mixes.inputs)
    targets = mixed_targets(mixes.label_i, mixes.label_j, lam, num_classes)
    scored = scorer(inputs, targets, base(inputs))
    nobody = np.full(len(mixes), -1)
    labels = {name: getattr(mixes, name).cpu().numpy() for name in ("label_i", "label_j")}
    columns = {"i": nobody, "j": nobody, "lam": mixes.lam.numpy(), **labels}
    return _table(scored, start, 0, columns)


def drawn_plans(
    rows: int, *, seed: int, alpha: float, num_samples: int, folds: Ints | None = None
) -> Iterator[MixPlan]:
    """Yield the mixes that are scored again and again: as many epochs as the rows need."""
    for epoch in range(-(-rows // num_samples)):
        plan = draw_plan(
            seed=seed,
            epoch=epoch,
            alpha=alpha,
            num_samples=num_samples,
            folds=folds,
            stream="probe",
        )
        yield plan.keep(slice(rows - epoch * num_samples))


def pieces(plans: Iterable[MixPlan], size: int) -> Iterator[tuple[int, MixPlan]]:
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


def _table(scored: Scored, start: int, epoch: int, of: dict[str, Column]) -> ScoreTable:
    """Return scored rows as a table; `of` says of what, `start` is the place of the first."""
    columns = (scored.updated, scored.base, scored.r_hat, scored.std_error)
    updated, base_term, r_hat, std_error = torch.stack(columns).cpu().numpy()
    return ScoreTable(
        epoch=np.full(len(r_hat), epoch, dtype=np.int32),
        row=np.arange(start, start + len(r_hat)),
        i=of["i"],
        j=of["j"],
        lam=of["lam"],
        label_i=of["label_i"].astype(np.int32),
        label_j=of["label_j"].astype(np.int32),
        updated=updated,
        base=base_term,
        r_hat=r_hat,
        std_error=std_error,
        p_negative=probability_negative(r_hat, std_error, scored.draws),
        kept=np.full(len(r_hat), np.nan, dtype=np.float32),
    )
