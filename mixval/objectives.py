"""Clean loss, mixed loss, filter and weights -> one scalar.

    loss = clean_weight (1/B) sum_i c_i CE(x_i, y_i)
         + mixed_weight (1/B) sum_i [ w_i H(mix_i) + (1 - w_i) instead_i ]

w_i is the weight the filter gave to mix i, c_i that of the clean sample (1 unless it is
filtered too), `instead` what becomes of an excluded mix. B is the planned size of the
whole optimiser step, over all micro-batches, so arms that keep fewer mixes are not
given larger steps. With class weights, B becomes the sum of the rows' class weights.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mixval.types import Batch, Loss


@dataclass(frozen=True)
class Weights:
    """What the filter decided for each row of a batch."""

    mixed: Tensor  # (B,)
    clean: Tensor  # (B,)
    soft_labels: Tensor | None = None  # (B, K) the teacher's, for `relabel`


@dataclass(frozen=True)
class Objective:
    """(logits, batch, weights) -> scalar."""

    loss: Loss
    class_weight: Tensor | None  # (K,)
    clean_weight: float
    mixed_weight: float
    normalise: str  # batch | kept | joint
    forward: str  # joint | separate
    excluded: str  # drop | clean | relabel (refill exchanges rows before they get here)
    uses_clean: bool  # whether the clean term is there at all

    def logits(self, model: nn.Module, batch: Batch) -> tuple[Tensor | None, Tensor | None]:
        """Return the logits of the clean and of the mixed rows, as far as they are needed."""
        if batch.mixed is None:
            return model(batch.clean), None
        if not self.needs_clean:
            return None, model(batch.mixed)
        if self.forward == "separate":
            return model(batch.clean), model(batch.mixed)
        # One pass, so that BatchNorm sees clean and mixed rows together, as RegMixup does.
        clean, mixed = model(torch.cat([batch.clean, batch.mixed])).chunk(2)
        return clean, mixed

    @property
    def needs_clean(self) -> bool:
        return self.uses_clean or self.excluded == "clean"

    def __call__(
        self,
        logits: tuple[Tensor | None, Tensor | None],
        batch: Batch,
        weights: Weights,
        step_size: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Return this (micro-)batch's part of the step's loss; `step_size` is of the whole step."""
        clean_logits, mixed_logits = logits
        clean_size, mixed_size = step_size
        if mixed_logits is None:  # alpha = 0: the clean term takes the whole weight
            assert clean_logits is not None
            clean = self._loss(clean_logits, batch.clean_targets)
            return (weights.clean * clean).sum() / clean_size
        mixed = weights.mixed * self._loss(mixed_logits, batch.mixed_targets)
        mixed = mixed + (1 - weights.mixed) * self._instead(logits, batch, weights)
        total = self.mixed_weight * mixed.sum() / mixed_size
        if self.uses_clean:
            clean = weights.clean * self._loss(clean_logits, batch.clean_targets)
            total = total + self.clean_weight * clean.sum() / clean_size
        return total

    def step_size(
        self,
        batches: list[Batch],
        weights: list[Weights],
        total: Callable[[Tensor], Tensor] = lambda rows: rows,
    ) -> tuple[Tensor, Tensor]:
        """Return what the clean and the mixed sums of a whole optimiser step are divided by.

        `total` adds up what several processes count of it.
        """
        pairs = list(zip(batches, weights, strict=True))
        kept = self.normalise == "kept"
        clean = total(_sum(self._rows(b.clean_targets, w.clean, kept) for b, w in pairs))
        if batches[0].mixed_targets is None:
            return _not_zero(clean), _not_zero(clean)
        kept = kept and self.excluded in ("drop", "refill")
        mixed = total(_sum(self._rows(b.mixed_targets, w.mixed, kept) for b, w in pairs))
        scale = 2 if self.normalise == "joint" and self.uses_clean else 1
        return scale * _not_zero(clean), scale * _not_zero(mixed)

    def _rows(self, targets: Tensor | None, weight: Tensor, kept: bool) -> Tensor:
        """Return the planned number of rows, or of those kept, each with its class weight."""
        assert targets is not None
        if self.class_weight is None:
            return weight.sum() if kept else weight.new_full((), len(weight))
        rows = targets @ self.class_weight
        return (rows * weight if kept else rows).sum()

    def _instead(
        self, logits: tuple[Tensor | None, Tensor | None], batch: Batch, weights: Weights
    ) -> Tensor | float:
        if self.excluded == "clean":
            return self._loss(logits[0], batch.clean_targets)
        if self.excluded == "relabel" and weights.soft_labels is not None:
            return self._loss(logits[1], weights.soft_labels)
        return 0.0

    def _loss(self, logits: Tensor | None, targets: Tensor | None) -> Tensor:
        return self.loss(logits, targets, self.class_weight)


def _sum(counts: Iterable[Tensor]) -> Tensor:
    return functools.reduce(torch.add, counts)


def _not_zero(rows: Tensor) -> Tensor:
    """Return the number of rows, or 1 where there are none: the sum over no rows is 0 anyway."""
    return rows + (rows == 0)
