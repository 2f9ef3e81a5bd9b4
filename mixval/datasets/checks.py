"""What every source must keep, and what a whole copy of a named dataset must hold."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from mixval.dataset_facts import Facts
from mixval.datasets.finding import damaged
from mixval.errors import UserError
from mixval.types import Part, Source

COLOURS = (1, 3, 4)  # how many channels pictures have; others may be anything


def parts_of(source: Source) -> dict[str, Part]:
    every = {"train": source.train, "val": source.val, "test": source.test}
    return {name: part for name, part in every.items() if part is not None}


def checked(source: Source, where: Path | str) -> Source:
    """Return the source if a network can learn from it; refuse it by name otherwise."""
    parts, classes = parts_of(source), len(source.classes)
    if classes < 2:
        found = "one class only" if classes else "no class"
        raise UserError(f"{where}: must have 2 or more classes; there is {found}")
    for name, part in parts.items():
        if not len(part):
            raise UserError(f"{where}: the {name} split has no image")
        _check_kind(part, name, where)
        wrong = part.labels[(part.labels < 0) | (part.labels >= classes)]
        if len(wrong):
            raise UserError(
                f"{where}: {name} labels must be among the {classes} classes, got {int(wrong[0])}"
            )
        if part.images.shape[1:] != source.train.images.shape[1:]:
            raise UserError(
                f"{where}: {name} images are {tuple(part.images.shape[1:])}, "
                f"those of train {tuple(source.train.images.shape[1:])}; make them one size"
            )
    counts = torch.bincount(source.train.labels, minlength=classes)
    if (counts == 0).any():
        empty = source.classes[int((counts == 0).nonzero()[0])]
        raise UserError(f"{where}: class {empty} has no image in train; add some or remove it")
    ids = torch.cat([part.ids for part in parts.values()])
    assert len(set(ids.tolist())) == len(ids), "two samples share an id"
    return source


def _check_kind(part: Part, name: str, where: Path | str) -> None:
    shape = tuple(part.images.shape)
    if len(shape) != 4 or (isinstance(part.images, Tensor) and part.images.dtype != torch.uint8):
        raise UserError(f"{where}: {name} images must be uint8 (N, C, H, W), got {shape}")
    if part.labels.dtype != torch.int64 or not len(part.labels) == len(part.ids) == shape[0]:
        raise UserError(
            f"{where}: {name} needs an int64 label and an id for each of {shape[0]} images"
        )


def whole(source: Source, where: Path | str, facts: Facts, digest: str) -> Source:
    """Return the source if it is a whole copy of the dataset with these facts."""
    parts = parts_of(source)
    if len(source.classes) != facts.classes:
        raise damaged(where, f"has {len(source.classes)} classes, not {facts.classes}")
    for name in ("train", "val", "test"):
        found, expected = len(parts[name]) if name in parts else 0, getattr(facts, name)
        if found != expected:
            raise damaged(where, f"has {found} {name} images, not {expected}")
    checked(source, where)
    if facts.balanced == "splits":
        for part in parts.values():
            _check_balance([part.labels], source.classes, where)
    elif facts.balanced == "whole":
        _check_balance([part.labels for part in parts.values()], source.classes, where)
    if facts.digest and digest != facts.digest:
        raise damaged(where, f"labels or file names are not the known ones: {digest}")
    return source


def _check_balance(labels: Sequence[Tensor], classes: Sequence[str], where: Path | str) -> None:
    counts = torch.bincount(torch.cat(list(labels)), minlength=len(classes))
    expected = int(counts.sum()) // len(classes)
    for name, count in zip(classes, counts.tolist(), strict=True):
        if count != expected:
            raise damaged(where, f"class {name} has {count} images, not {expected}")


def count_classes(labels: Tensor, where: Path | str) -> int:
    """Return K of labels that must be 0 to K-1, without a gap."""
    if int(labels.min()) < 0:
        raise UserError(f"{where}: labels must be >= 0, got {int(labels.min())}")
    count = int(labels.max()) + 1
    # One wrong label must not make a list of a thousand million classes.
    empty = sorted(set(range(min(count, len(labels) + 1))) - set(labels.tolist()))
    if empty or count < 2:
        found = f"class {empty[0]} has no image" if empty else "there is one class only"
        raise UserError(f"{where}: labels must be 0 to K-1 with K of 2 or more; {found}")
    return count
