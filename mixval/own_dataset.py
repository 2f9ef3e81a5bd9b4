"""Any torch Dataset as a source: what a user's own `module:function` returns."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mixval.datasets.checks import COLOURS, checked, count_classes
from mixval.datasets.decoding import to_tensor
from mixval.errors import UserError
from mixval.fingerprints import array_fingerprint, fingerprint
from mixval.types import Part, Source, StreamedImages

_SAMPLED = 64  # items whose pixels are part of the fingerprint


def from_dataset(
    train: Any, test: Any = None, *, classes: Sequence[str] | None = None, val: Any = None
) -> Source:
    """Return torch Datasets of (image, label) as a source; without val or test they are split off.

    An image is a PIL image, a uint8 (C, H, W) tensor or a uint8 (H, W[, C]) array, always
    of one size, and the same whenever it is asked for: leave normalising and augmenting to
    the recipe.
    """
    parts: dict[str, Part] = {}
    for name, dataset in (("train", train), ("val", val), ("test", test)):
        if dataset is not None:
            first = sum(map(len, parts.values()))
            parts[name] = _part(dataset, f"{name} dataset {type(dataset).__name__}", first)
    where = f"train dataset {type(train).__name__}"
    if classes is None:
        classes = getattr(train, "classes", None)
    if classes is None:
        classes = [str(k) for k in range(count_classes(parts["train"].labels, where))]
    names = tuple(map(str, classes))
    return checked(Source(parts["train"], parts.get("test"), names, parts.get("val")), where)


class DatasetImages:
    """The decoder of a torch Dataset of (image, label)."""

    def __init__(self, dataset: Any, where: str) -> None:
        self.dataset, self.where = dataset, where
        channels, height, width = _pixels(_item(dataset, 0, where)[0], f"{where}, item 0").shape
        if channels not in COLOURS and width in COLOURS:
            raise UserError(
                f"{where}: images must be (C, H, W), got {(channels, height, width)}, which looks "
                "like (H, W, C); permute(2, 0, 1) in its transform"
            )
        self.image_shape = (channels, height, width)
        self.content = ""

    def __call__(self, place: int) -> Tensor:
        image = _pixels(_item(self.dataset, place, self.where)[0], f"{self.where}, item {place}")
        if image.shape != self.image_shape:
            raise UserError(
                f"{self.where}, item {place}: is {tuple(image.shape)}, item 0 {self.image_shape}; "
                "make all of one size and number of channels in its transform"
            )
        return image


def _part(dataset: Any, where: str, first_id: int) -> Part:
    try:
        count = len(dataset)
    except TypeError as error:
        raise UserError(
            f"{where}: must have a length and items by number, as map-style Datasets do; "
            "make a list of what it iterates over"
        ) from error
    if not count:
        raise UserError(f"{where}: has no item")
    images = DatasetImages(dataset, where)
    sampled = np.linspace(0, len(dataset) - 1, min(len(dataset), _SAMPLED)).astype(np.int64)
    labels = _labels(dataset, sampled.tolist(), where)
    pixels = torch.stack([images(place) for place in sampled.tolist()])
    if not all(torch.equal(images(int(p)), seen) for p, seen in zip(sampled, pixels, strict=True)):
        raise UserError(f"{where}: gives another image each time; augment by training.augmentation")
    images.content = fingerprint([len(dataset), array_fingerprint(labels, pixels)])
    ids = torch.arange(first_id, first_id + len(dataset))
    return Part(StreamedImages.of(images, len(dataset)), labels, ids)


def _labels(dataset: Any, sampled: list[int], where: str) -> Tensor:
    """Return all labels: from an attribute if it agrees with the items, else from the items."""
    for name in ("targets", "labels"):
        try:
            known = np.asarray(getattr(dataset, name))
        except (AttributeError, ValueError):
            continue
        if known.shape == (len(dataset),) and known.dtype.kind in "iu":
            labels = torch.from_numpy(known.astype(np.int64))
            # A target_transform or a subset changes what the items say.
            if all(int(labels[place]) == _item(dataset, place, where)[1] for place in sampled):
                return labels
    return torch.tensor([_item(dataset, place, where)[1] for place in range(len(dataset))])


def _item(dataset: Any, place: int, where: str) -> tuple[Any, int]:
    """Return the image and the label of an item; say which one is not such a pair."""
    try:
        item = dataset[place]
    except Exception as error:  # whatever the user's code raises
        raise UserError(f"{where}, item {place}: {type(error).__name__}: {error}") from error
    try:
        image, label = item
        number = int(label)
        if number != label:
            raise ValueError
    except (TypeError, ValueError) as error:
        kinds = f"({', '.join(type(x).__name__ for x in item)})" if isinstance(item, tuple) else ""
        found = kinds or type(item).__name__
        raise UserError(
            f"{where}, item {place}: must be (image, whole number), got {found}"
        ) from error
    return image, number


def _pixels(image: Any, where: str) -> Tensor:
    if isinstance(image, Image.Image):
        return to_tensor(image if image.mode in ("L", "RGB") else image.convert("RGB"))
    if isinstance(image, Tensor) and image.dtype == torch.uint8 and image.dim() == 3:
        return image
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim in (2, 3):
        spread = image[..., None] if image.ndim == 2 else image
        return torch.from_numpy(np.ascontiguousarray(spread.transpose(2, 0, 1)))
    found = f"{getattr(image, 'dtype', '')} {type(image).__name__}".strip()
    raise UserError(
        f"{where}: an image must be a PIL image, uint8 tensor (C, H, W) or uint8 array "
        f"(H, W[, C]), got {found}; leave ToTensor and Normalize out of its transform"
    )
