"""Divide a dataset for one seed: train, val_f, val_dev and test, with damage in train only."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from mixval.errors import UserError
from mixval.seeding import generator
from mixval.types import Part, Source, Splits

# Mean and standard deviation of the pixels are taken from at most so many images, and of
# large ones from as many as have that many values, but 200 at least.
_MEASURED, _MEASURED_VALUES = 5000, 2 * 10**7

Corrupt = Callable[[Part, int, np.random.Generator], Part]


def load_splits(
    source: Source,
    *,
    seed: int,
    train: int | None,
    val_f: int,
    val_dev: int,
    label_noise: float,
    corrupt: Corrupt | None = None,
) -> Splits:
    """Return the source divided for this seed: stratified, noise and corruption in train only.

    Validation samples come from the dataset's own validation split where it has one.
    """
    _check_sizes(source, train, val_f, val_dev)
    rng = generator(seed, "splits")
    held, rest = (source.train, None) if source.val is None else (source.val, source.train)
    parts = {}
    for name, count in (("val_f", val_f), ("val_dev", val_dev)):
        parts[name], held = _take_stratified(rng, held, count)
    rest = held if rest is None else rest
    if train is None:
        parts["train"], rest = rest, rest.take(np.arange(0))
    else:
        parts["train"], rest = _take_stratified(rng, rest, train)
    noisy, _ = flip_labels(parts["train"], label_noise, len(source.classes), seed)
    if corrupt is not None:
        noisy = corrupt(noisy, len(source.classes), generator(seed, "corruption"))
    flipped = noisy.labels != parts["train"].labels  # not what flip_labels says: it may be undone
    mean, std = pixel_statistics(noisy)
    return Splits(
        train=noisy,
        val_f=parts["val_f"],
        val_dev=parts["val_dev"],
        test=source.test if source.test is not None else rest,
        classes=source.classes,
        flipped=noisy.ids[flipped],
        corrupted=noisy.ids[flipped | _changed_images(parts["train"], noisy)],
        mean=mean,
        std=std,
        content=source.train.fingerprint,
        own_test=source.test is not None,
    )


def _check_sizes(source: Source, train: int | None, val_f: int, val_dev: int) -> None:
    if train is None and source.test is None:
        raise UserError("data.train: must be given: this dataset has no test split of its own")
    validation, asked = val_f + val_dev, train or 1
    if source.val is not None:
        if validation > len(source.val):
            raise UserError(
                f"data: val_f + val_dev must be at most the {len(source.val)} samples of the "
                f"dataset's own validation split, got {validation}"
            )
    else:
        asked += validation
    if asked > len(source.train) - (source.test is None):
        names = "train" if source.val is not None else "train + val_f + val_dev"
        left = " and leave a test sample" if source.test is None else ""
        raise UserError(
            f"data: {names} must be at most the {len(source.train)} samples there are{left}, "
            f"got {asked}"
        )


def flip_labels(part: Part, share: float, num_classes: int, seed: int) -> tuple[Part, Tensor]:
    """Return the part with that share of labels moved to another class at random, and whose."""
    rng = generator(seed, "label noise")
    chosen = np.sort(rng.permutation(len(part))[: round(share * len(part))])
    labels = part.labels.clone()
    steps = rng.integers(1, num_classes, len(chosen)) if len(chosen) else np.zeros(0, np.int64)
    labels[chosen] = (labels[chosen] + torch.from_numpy(steps)) % num_classes
    return replace(part, labels=labels), part.ids[chosen]


def _changed_images(before: Part, after: Part) -> Tensor:
    """Return which images differ in any pixel, (N,)."""
    if after.images is before.images:
        return torch.zeros(len(after), dtype=torch.bool)
    assert isinstance(before.images, Tensor) and isinstance(after.images, Tensor)
    return (after.images != before.images).flatten(1).any(1)


def _take_stratified(rng: np.random.Generator, part: Part, count: int) -> tuple[Part, Part]:
    """Split `count` samples off a part, in the proportions of the classes; order stays."""
    labels = part.labels.numpy()
    shuffled = rng.permutation(len(part))
    by_class = shuffled[labels[shuffled].argsort(kind="stable")]
    # Equal steps through the samples sorted by class take each class in its proportion;
    # the random start decides which classes get the one sample more.
    places = (np.arange(count) + rng.random()) * len(by_class) / count
    chosen = by_class[np.minimum(places.astype(np.int64), len(by_class) - 1)]
    left = np.setdiff1d(np.arange(len(part)), chosen)
    return part.take(np.sort(chosen)), part.take(left)


def pixel_statistics(part: Part) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each channel, over evenly spaced images."""
    enough = max(200, _MEASURED_VALUES // math.prod(part.images.shape[1:]))
    count = min(len(part), _MEASURED, enough)
    places = np.linspace(0, len(part) - 1, count).astype(np.int64)
    pixels = part.images[torch.from_numpy(places)].double() / 255
    mean = pixels.mean((0, 2, 3)).float()
    std = pixels.std((0, 2, 3)).float().clamp_min(1e-6)
    return mean.view(-1, 1, 1), std.view(-1, 1, 1)
