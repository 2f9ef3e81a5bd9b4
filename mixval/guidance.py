"""The teacher's part of a training step: scores -> weights, with replay, refill and stopping."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mixval.errors import UserError
from mixval.objectives import Weights
from mixval.rhat import Scored, Scorer
from mixval.types import Batch, MixScores

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
    replay: "Record | None" = None
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
    ) -> list[Weights]:
        """Return the weights of the micro-batches of one step: policies see the whole step.

        `rows` is the epoch and the rows of its plan that the step covers.
        """
        sizes = [len(batch.clean) for batch in batches]
        lam = torch.cat(
            [b.clean.new_ones(len(b.clean)) if b.lam is None else b.lam for b in batches]
        )
        mixed = clean = torch.ones_like(lam)
        soft: list[Tensor | None] = [None] * len(batches)
        if batches[0].mixed is not None:
            scores = self._scores(batches, [pair[1] for pair in logits], mixed=True)
            replayed = None if self.replay is None else self.replay.mixed[rows].float()
            mixed = self._decide(lam, scores, rng, replayed, faded)
            soft = [scored.soft_labels for scored in scores] if self.relabels else soft
        if self.filters_clean:
            scores = self._scores(batches, [pair[0] for pair in logits], mixed=False)
            replayed = None if self.replay is None else self.replay.clean[rows].float()
            clean = self._decide(torch.ones_like(lam), scores, rng, replayed, faded)
        parts = zip(torch.split(mixed, sizes), torch.split(clean, sizes), soft, strict=True)
        return [Weights(m, c, s) for m, c, s in parts]

    def accepts(self, model: nn.Module, batch: Batch, rng: np.random.Generator) -> Tensor:
        """Return which mixes the policy keeps, as a mask: for `refill`, before the step."""
        assert batch.mixed is not None and batch.lam is not None
        with without_traces(model):
            scores = self._scores([batch], [model(batch.mixed)], mixed=True)
        return self._decide(batch.lam, scores, rng, None, 0.0) > 0.5

    def _scores(
        self, batches: list[Batch], logits: list[Tensor | None], *, mixed: bool
    ) -> list[Scored]:
        if self.scorer is None:
            return []
        scores = []
        for batch, own in zip(batches, logits, strict=True):
            inputs, targets = (
                (batch.mixed, batch.mixed_targets) if mixed else (batch.clean, batch.clean_targets)
            )
            assert inputs is not None and targets is not None and own is not None
            base = F.log_softmax(own.detach().float(), dim=-1)[None]
            scores.append(self.scorer(inputs, targets, base, batch.fold))
        return scores

    def _decide(
        self,
        lam: Tensor,
        scores: list[Scored],
        rng: np.random.Generator,
        replayed: Tensor | None,
        faded: float,
    ) -> Tensor:
        nothing = torch.zeros_like(lam)

        def joined(name: str) -> Tensor:
            return torch.cat([getattr(s, name) for s in scores]) if scores else nothing

        weights = self.policy(
            MixScores(
                r_hat=joined("r_hat"),
                updated=joined("updated"),
                base=joined("base"),
                lam=lam,
                rng=rng,
                replayed=None if replayed is None else replayed.to(lam.device),
            )
        )
        if weights.shape != lam.shape or not bool(((weights >= 0) & (weights <= 1)).all()):
            raise UserError(
                f"filter: must return weights in [0, 1] of shape {tuple(lam.shape)}, "
                f"got {tuple(weights.shape)} from {float(weights.min())} to {float(weights.max())}"
            )
        return (1 - faded) * weights + faded


@dataclass(frozen=True)
class Record:
    """The weights that were given to every row of every epoch's plan, (epochs, rows).

    NaN where nothing was mixed, or no clean sample was filtered.
    """

    mixed: Tensor
    clean: Tensor

    @staticmethod
    def blank(epochs: int, rows: int) -> "Record":
        return Record(*(torch.full((epochs, rows), torch.nan, dtype=torch.float16) for _ in "mc"))

    def write(self, epoch: int, rows: slice, weights: list[Weights], *, mixes: bool) -> None:
        if mixes:
            self.mixed[epoch, rows] = torch.cat([w.mixed for w in weights]).cpu().half()
        self.clean[epoch, rows] = torch.cat([w.clean for w in weights]).cpu().half()


@contextmanager
def without_traces(model: nn.Module) -> Iterator[None]:
    """Run the model without gradients, leaving BatchNorm and the generators as they were.

    A pass that only scores must not make a guided student differ from its control.
    """
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    device = next(model.parameters()).device
    forked = [device] if device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(forked):
        yield
        for buffer, before in buffers:
            buffer.copy_(before)
