"""The teacher's part of a training step: scores -> weights, with replay, refill and stopping."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mixval.objectives import Weights
from mixval.rhat import Scorer, Scores
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
        mixed_scores = self._scores(batches, [pair[1] for pair in logits], mixed=True)
        replayed = None if self.replay is None else self.replay.mixed[rows].float()
        lam = torch.cat([batch.lam for batch in batches if batch.lam is not None])
        mixed = self._decide(lam, mixed_scores, rng, replayed, faded)
        clean = torch.ones_like(mixed)
        if self.filters_clean:
            clean_scores = self._scores(batches, [pair[0] for pair in logits], mixed=False)
            replayed = None if self.replay is None else self.replay.clean[rows].float()
            clean = self._decide(torch.ones_like(lam), clean_scores, rng, replayed, faded)
        soft = [s.soft_labels for s in mixed_scores] if self.relabels else [None] * len(batches)
        parts = zip(torch.split(mixed, sizes), torch.split(clean, sizes), soft, strict=True)
        return [Weights(m, c, s) for m, c, s in parts]

    def accepts(self, model: nn.Module, batch: Batch, rng: np.random.Generator) -> Tensor:
        """Return which mixes the policy keeps, as a mask: for `refill`, before the step."""
        assert batch.mixed is not None and batch.lam is not None
        with torch.no_grad():
            scores = self._scores([batch], [model(batch.mixed)], mixed=True)
        return self._decide(batch.lam, scores, rng, None, 0.0) > 0.5

    def _scores(
        self, batches: list[Batch], logits: list[Tensor | None], *, mixed: bool
    ) -> list[Scores]:
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
        scores: list[Scores],
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
        return (1 - faded) * weights + faded


@dataclass(frozen=True)
class Record:
    """The weights that were given to every row of every epoch's plan, (epochs, rows)."""

    mixed: Tensor
    clean: Tensor

    @staticmethod
    def blank(epochs: int, rows: int) -> "Record":
        return Record(*(torch.ones(epochs, rows, dtype=torch.float16) for _ in range(2)))
