"""Name -> labelled images; `load_splits` divides them for one seed."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mixval.errors import UserError
from mixval.seeding import generator
from mixval.types import Ints, Part, Splits

__all__ = ["digits", "npz"]


@dataclass(frozen=True)
class Source:
    """A dataset as it comes: `test` is None where there is no official test split."""

    train: Part
    test: Part | None
    classes: tuple[str, ...]


def digits() -> Source:
    """Return scikit-learn's 1797 handwritten digits of 8 x 8 pixels; they come with the package."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.from_numpy(bunch.images * 15).to(torch.uint8)[:, None]  # 0..16 -> 0..240
    labels = torch.from_numpy(bunch.target).long()
    return Source(Part(images, labels, torch.arange(len(labels))), None, tuple("0123456789"))


def npz(*, path: str) -> Source:
    """Return your own arrays: images (N, H, W[, C]) uint8 and labels (N,), also *_test if given."""
    arrays = _read_npz(Path(path))
    train = _part(arrays["images"], arrays["labels"], 0, path)
    test = None
    if "images_test" in arrays:
        test = _part(arrays["images_test"], arrays["labels_test"], len(train), path)
        if test.images.shape[1:] != train.images.shape[1:]:
            raise UserError(f"{path}: images_test must have the size and channels of images")
    count = int(train.labels.max()) + 1
    empty = sorted(set(range(min(count, len(train) + 1))) - set(train.labels.tolist()))
    if empty or count < 2:
        found = f"class {empty[0]} has no image" if empty else "there is one class only"
        raise UserError(f"{path}: labels must be 0 to K-1 with K of 2 or more; {found}")
    if test is not None and int(test.labels.max()) >= count:
        raise UserError(f"{path}: labels_test must be among the {count} classes of labels")
    return Source(train, test, tuple(str(k) for k in range(count)))


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise UserError(
            f"data.source.path: no file {str(path)!r}; give an .npz with images and labels"
        )
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except Exception as error:  # numpy, zipfile and zlib each raise their own
        raise UserError(f"{path}: not a readable .npz file of plain arrays ({error})") from error
    needed = {"images", "labels"} | ({"labels_test"} if "images_test" in arrays else set())
    if missing := needed - arrays.keys():
        raise UserError(f"{path}: has no array {sorted(missing)[0]!r}; it has {sorted(arrays)}")
    return arrays


def _part(images: np.ndarray, labels: np.ndarray, first_id: int, path: str) -> Part:
    if images.dtype != np.uint8 or images.ndim not in (3, 4):
        raise UserError(
            f"{path}: images must be uint8 (N, H, W[, C]), got {images.dtype} {images.shape}"
        )
    if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu" or not len(labels):
        raise UserError(
            f"{path}: labels must be integers ({len(images)},), got {labels.dtype} {labels.shape}"
        )
    if labels.min() < 0:
        raise UserError(f"{path}: labels must be >= 0, got {labels.min()}")
    pixels = torch.from_numpy(images if images.ndim == 4 else images[..., None])
    ids = torch.arange(first_id, first_id + len(labels))
    return Part(pixels.permute(0, 3, 1, 2).contiguous(), torch.from_numpy(labels).long(), ids)


def load_splits(
    source: Source, *, seed: int, train: int | None, val_f: int, val_dev: int, label_noise: float
) -> Splits:
    """Return the source divided for this seed: stratified, label noise in train only."""
    rest = np.arange(len(source.train))
    labels = source.train.labels.numpy()
    if train is None and source.test is None:
        raise UserError("data.train: must be given: this dataset has no test split of its own")
    wanted = val_f + val_dev + (train or 1)
    if wanted > len(rest) - (source.test is None):
        raise UserError(
            f"data: train + val_f + val_dev must leave a test sample, got {wanted} of {len(rest)}"
        )
    rng = generator(seed, "splits")
    positions = {}
    for name, count in (("val_f", val_f), ("val_dev", val_dev), ("train", train)):
        if name == "train" and train is None:
            positions[name], rest = rest, rest[:0]
        else:
            assert count is not None
            positions[name], rest = _take_stratified(rng, rest, labels, count)
    parts = {name: source.train.take(chosen) for name, chosen in positions.items()}
    noisy, flipped = flip_labels(parts["train"], label_noise, len(source.classes), seed)
    mean, std = _pixel_statistics(noisy.images)
    return Splits(
        train=noisy,
        val_f=parts["val_f"],
        val_dev=parts["val_dev"],
        test=source.test if source.test is not None else source.train.take(rest),
        classes=source.classes,
        flipped=flipped,
        mean=mean,
        std=std,
        content=source.train.fingerprint,
        own_test=source.test is not None,
    )


def flip_labels(part: Part, share: float, num_classes: int, seed: int) -> tuple[Part, Tensor]:
    """Return the part with that share of labels moved to another class at random, and whose."""
    rng = generator(seed, "label noise")
    chosen = np.sort(rng.permutation(len(part))[: round(share * len(part))])
    labels = part.labels.clone()
    steps = rng.integers(1, num_classes, len(chosen)) if len(chosen) else np.zeros(0, np.int64)
    labels[chosen] = (labels[chosen] + torch.from_numpy(steps)) % num_classes
    return replace(part, labels=labels), part.ids[chosen]


def _take_stratified(
    rng: np.random.Generator, rest: Ints, labels: Ints, count: int
) -> tuple[Ints, Ints]:
    """Split `count` positions off `rest`, in the proportions of the classes."""
    shuffled = rng.permutation(rest)
    by_class = shuffled[labels[shuffled].argsort(kind="stable")]
    # Equal steps through the samples sorted by class take each class in its proportion;
    # the random start decides which classes get the one sample more.
    places = (np.arange(count) + rng.random()) * len(by_class) / count
    chosen = by_class[np.minimum(places.astype(np.int64), len(by_class) - 1)]
    return np.sort(chosen), np.setdiff1d(rest, chosen)


def _pixel_statistics(images: Tensor) -> tuple[Tensor, Tensor]:
    pixels = images.double() / 255
    mean = pixels.mean((0, 2, 3)).float()
    std = pixels.std((0, 2, 3)).float().clamp_min(1e-6)
    return mean.view(-1, 1, 1), std.view(-1, 1, 1)
