"""Draw a MixPlan; make the mixed rows of a plan."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from mixval.seeding import generator
from mixval.types import Batch, Floats, Ints, MixPlan, Part, Splits


def draw_plan(
    *,
    seed: int,
    epoch: int,
    alpha: float,
    num_samples: int,
    same_lam: int = 1,
    derange: bool = False,
    folds: Ints | None = None,
    stream: str = "plan",
    draw: int = 0,
) -> MixPlan:
    """Return the mixes of one epoch, a pure function of the arguments.

    Partners come from a second permutation of the whole epoch, not from the batch, so
    the rows are the same at any batch size and on any number of processes. `same_lam`
    consecutive rows share one lambda (1: a lambda per row; the batch size: as in the
    original mixup). `derange`: no sample is mixed with itself. `folds` (N,): partners
    are drawn within the fold of the first sample. `draw` = 1, 2, ...: another partner
    and lambda for each row of the same order.
    """
    first = generator(seed, f"{stream}/order", epoch).permutation(num_samples)
    second = _partners(generator(seed, f"{stream}/partner", epoch, draw), first, derange, folds)
    rng = generator(seed, f"{stream}/lam", epoch, draw)
    lam = draw_lam(rng, alpha, -(-num_samples // same_lam)).repeat(same_lam)[:num_samples]
    return MixPlan(first, second, lam, alpha, epoch)


def draw_lam(rng: np.random.Generator, alpha: float, size: int) -> Floats:
    """Return lambda ~ Beta(alpha, alpha) in float64; exactly 1 at alpha = 0.

    numpy's sampler works in logarithms where torch's returns 0/0 below alpha = 0.01.
    """
    if not (np.isfinite(alpha) and alpha >= 0):
        raise ValueError(f"alpha must be finite and >= 0, got {alpha}")
    return np.ones(size) if alpha == 0 else rng.beta(alpha, alpha, size)


def mix(first: Tensor, second: Tensor, lam: Tensor) -> Tensor:
    """Return lam x_i + (1 - lam) x_j, row by row; lam is (B,)."""
    lam = lam.view(-1, *[1] * (first.dim() - 1))
    return torch.lerp(second, first, lam)


def mixed_targets(label_i: Tensor, label_j: Tensor, lam: Tensor, num_classes: int) -> Tensor:
    """Return lam e_{y_i} + (1 - lam) e_{y_j}, (B, K); equal labels add their two masses."""
    one, other = (F.one_hot(y, num_classes).to(lam.dtype) for y in (label_i, label_j))
    return mix(one, other, lam)


@dataclass(frozen=True)
class RowMaker:
    """Plan rows -> Batch: gather, augment, normalise and mix, all on the device."""

    part: Part
    num_classes: int
    mean: Tensor  # (C, 1, 1)
    std: Tensor  # (C, 1, 1)
    augment: Callable[[Tensor, Tensor], Tensor] | None = None
    folds: Tensor | None = None  # (N,)
    loaders: int = 0  # processes that read ahead, where images are not in memory

    @staticmethod
    def of(part: Part, splits: Splits, device: torch.device, loaders: int = 0) -> "RowMaker":
        """Return the maker of unaugmented rows of a part, normalised as its splits are."""
        mean, std = splits.mean.to(device), splits.std.to(device)
        return RowMaker(part.to(device), splits.num_classes, mean, std, loaders=loaders)

    def inputs(
        self, positions: Tensor, uniforms: Tensor | None = None, decoded: Tensor | None = None
    ) -> Tensor:
        """Return what a network sees of these samples; `uniforms` (N, ...) augment them.

        `decoded` are their images, where a loader has read them already.
        """
        images = self._images(positions) if decoded is None else decoded
        images = images.to(self.mean.device)
        if self.augment is not None and uniforms is not None:
            images = self.augment(images, uniforms[positions])
        return images.float().div_(255).sub_(self.mean).div_(self.std)

    def batch(
        self, rows: MixPlan, uniforms: Tensor | None = None, decoded: Tensor | None = None
    ) -> Batch:
        """Return the rows of a plan; `decoded`: the images of `rows.parents`, if read already."""
        device, count = self.part.labels.device, len(rows)
        # Both parents of all rows at once: half as many operations.
        parents = torch.from_numpy(rows.parents).to(device)
        seen = self.inputs(parents, uniforms, decoded)
        labels = F.one_hot(self.part.labels[parents], self.num_classes).to(seen.dtype)
        fold = None if self.folds is None else self.folds[parents[:count]]
        if not rows.mixes:
            return Batch(seen, labels, fold=fold)
        lam = torch.from_numpy(rows.lam).to(device, seen.dtype)
        return Batch(
            clean=seen[:count],
            clean_targets=labels[:count],
            mixed=mix(seen[:count], seen[count:], lam),
            mixed_targets=mix(labels[:count], labels[count:], lam),
            lam=lam,
            fold=fold,
        )

    def _images(self, positions: Tensor) -> Tensor:
        images = self.part.images
        return (
            images.index_select(0, positions) if isinstance(images, Tensor) else images[positions]
        )


def assign_folds(seed: int, num_samples: int, num_folds: int) -> Ints:
    """Return a fold for each sample, sizes equal to within one."""
    order = generator(seed, "folds").permutation(num_samples)
    folds = np.empty(num_samples, dtype=np.int64)
    folds[order] = np.arange(num_samples) % num_folds
    return folds


def _partners(rng: np.random.Generator, first: Ints, derange: bool, folds: Ints | None) -> Ints:
    if folds is None:
        return _permuted(rng, first, derange)
    second = np.empty_like(first)
    for fold in np.unique(folds):
        rows = folds[first] == fold
        second[rows] = _permuted(rng, first[rows], derange)
    return second


def _permuted(rng: np.random.Generator, first: Ints, derange: bool) -> Ints:
    # Permute the sorted samples, not `first`: partners then do not depend on the order.
    second: Ints = rng.permutation(np.sort(first))
    if derange:
        if len(first) < 2:
            raise ValueError(f"derange needs at least 2 samples to mix, got {len(first)}")
        _undo_fixed_points(rng, first, second)
    return second


def _undo_fixed_points(rng: np.random.Generator, first: Ints, second: Ints) -> None:
    fixed: npt.NDArray[np.intp] = np.flatnonzero(first == second)
    if len(fixed) == 1:  # a lone one trades places with any other row
        others = np.delete(np.arange(len(first)), fixed)
        fixed = np.append(fixed, rng.choice(others))
    second[fixed] = second[np.roll(fixed, 1)]
