"""The teacher's part of a training step: scores -> weights, with replay, refill and stopping."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mixval.epoch_file import EpochFile
from mixval.errors import UserError
from mixval.objectives import Weights
from mixval.processes import ALONE, Processes
from mixval.record import Record
from mixval.rhat import Scored, Scorer
from mixval.seeding import generators_kept
from mixval.types import Batch, MixPlan, MixScores

Policy = Callable[[MixScores], Tensor]


@dataclass(frozen=True)
class Guidance:
    """Which mixes a student trains on. Without a scorer nothing is scored (`all`, `yoked`)."""

    policy: Policy
    scorer: Scorer | None = None
    num_teachers: int = 0  # networks that each scored row passes through
    filters_clean: bool = False
    relabels: bool = False
    refill_draws: int = 0  # 0: excluded mixes are not replaced
    bank: EpochFile | None = None  # the teacher's H of every planned mix, scored beforehand
    replay: Record | None = None
    until: int | None = None  # epoch where guidance stops
    overtake: float | None = None  # accuracy on val_dev at which it stops
    fade: int = 0  # epochs over which it then fades

    def faded(self, epoch: int, stopped_at: int | None) -> float:
        """Return f in [0, 1]: a weight w becomes (1 - f) w + f. 1 means filter `all`."""
        stop = self.until if stopped_at is None else stopped_at
        if stop is None or epoch < stop:
            return 0.0
        return 1.0 if self.fade == 0 else min(1.0, (epoch - stop + 1) / (self.fade + 1))

    def weights(
        self,
        batches: list[Batch],
        logits: list[tuple[Tensor | None, Tensor | None]],
        rows: tuple[int, slice],
        rng: np.random.Generator,
        faded: float,
        processes: Processes = ALONE,
    ) -> list[Weights]:
        """Return the weights of the micro-batches of one step: policies see the whole step.

        `rows` is the epoch and the rows of its plan that the step covers, `batches` are
        this process's share of them.
        """
        sizes = [len(batch.clean) for batch in batches]
        ones = torch.cat([batch.clean.new_ones(len(batch.clean)) for batch in batches])
        mixed = clean = ones
        soft: list[Tensor | None] = [None] * len(batches)
        if batches[0].mixed is not None:
            lam = torch.cat([batch.lam for batch in batches if batch.lam is not None])
            known = None if self.bank is None else _own(self.bank.read(*rows), processes, lam)
            scores = self._scores(batches, [pair[1] for pair in logits], known, mixed=True)
            replayed = None if self.replay is None else self.replay.files["mixed"].read(*rows)
            mixed = self._decide(lam, scores, rng, replayed, processes)
            mixed = (1 - faded) * mixed + faded
            soft = [scored.soft_labels for scored in scores] if self.relabels else soft
        if self.filters_clean:
            scores = self._scores(batches, [pair[0] for pair in logits], None, mixed=False)
            replayed = None if self.replay is None else self.replay.files["clean"].read(*rows)
            clean = self._decide(ones, scores, rng, replayed, processes)
            clean = (1 - faded) * clean + faded
        parts = zip(torch.split(mixed, sizes), torch.split(clean, sizes), soft, strict=True)
        return [Weights(m, c, s) for m, c, s in parts]

    def refilled(
        self,
        model: nn.Module,
        draws: Callable[[int], MixPlan],
        make: Callable[[MixPlan], Batch],
        rng: Callable[[int], np.random.Generator],
    ) -> tuple[MixPlan, npt.NDArray[np.bool_], int]:
        """Exchange mixes that are not kept for those of further draws, as long as there are some.

        Return the rows, which of them were kept in the end, and how many mixes were tried.
        """
        plan = draws(0)
        second, lam = plan.second.copy(), plan.lam.copy()
        kept, tried = np.zeros(len(plan), dtype=bool), 0
        for draw in range(self.refill_draws):
            open_rows = np.flatnonzero(~kept)
            if not len(open_rows):
                break
            candidates = draws(draw).keep(open_rows)
            accepted = self.accepts(model, make(candidates), rng(draw)).cpu().numpy()
            tried += len(open_rows)
            filled = open_rows[accepted]
            second[filled], lam[filled] = candidates.second[accepted], candidates.lam[accepted]
            kept[filled] = True
        return replace(plan, second=second, lam=lam), kept, tried

    def accepts(self, model: nn.Module, batch: Batch, rng: np.random.Generator) -> Tensor:
        """Return which mixes the policy keeps, as a mask: for `refill`, before the step."""
        assert batch.mixed is not None and batch.lam is not None
        with without_traces(model):
            scores = self._scores([batch], [model(batch.mixed)], None, mixed=True)
        return self._decide(batch.lam, scores, rng, None, ALONE) > 0.5

    def _scores(
        self,
        batches: list[Batch],
        logits: list[Tensor | None],
        known: Tensor | None,
        *,
        mixed: bool,
    ) -> list[Scored]:
        if self.scorer is None:
            return []
        sizes = [len(batch.clean) for batch in batches]
        parts = [None] * len(batches) if known is None else torch.split(known, sizes)
        scores = []
        for batch, own, updated in zip(batches, logits, parts, strict=True):
            inputs, targets = (
                (batch.mixed, batch.mixed_targets) if mixed else (batch.clean, batch.clean_targets)
            )
            assert inputs is not None and targets is not None and own is not None
            base = F.log_softmax(own.detach().float(), dim=-1)[None]
            scores.append(self.scorer(inputs, targets, base, batch.fold, updated))
        return scores

    def _decide(
        self,
        lam: Tensor,
        scores: list[Scored],
        rng: np.random.Generator,
        replayed: Tensor | None,
        processes: Processes,
    ) -> Tensor:
        """Return this process's part of what the policy says of the whole step."""
        nothing = torch.zeros_like(lam)

        def joined(name: str) -> Tensor:
            own = torch.cat([getattr(s, name) for s in scores]) if scores else nothing
            return processes.gather(own)

        every_lam = processes.gather(lam)
        weights = self.policy(
            MixScores(
                r_hat=joined("r_hat"),
                updated=joined("updated"),
                base=joined("base"),
                lam=every_lam,
                rng=rng,
                replayed=None if replayed is None else replayed.to(lam.device, lam.dtype),
                std_error=joined("std_error"),
                draws=min((s.draws for s in scores), default=1),
            )
        )
        wrong = weights.shape != every_lam.shape
        if wrong or not bool(((weights >= 0) & (weights <= 1)).all()):
            raise UserError(
                f"filter: must return weights in [0, 1] of shape {tuple(every_lam.shape)}, "
                f"got {tuple(weights.shape)} from {float(weights.min())} to {float(weights.max())}"
            )
        return _own(weights, processes, lam)


def _own(whole: Tensor, processes: Processes, like: Tensor) -> Tensor:
    """Return this process's rows of a whole step."""
    return whole[processes.share(len(whole))].to(like.device, like.dtype)


@contextmanager
def without_traces(model: nn.Module) -> Iterator[None]:
    """Run the model without gradients, leaving BatchNorm and the generators as they were.

    A pass that only scores must not make a guided student differ from its control.
    """
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.no_grad(), generators_kept(next(model.parameters()).device):
        yield
        for buffer, before in buffers:
            buffer.copy_(before)
