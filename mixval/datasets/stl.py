"""STL-10's labelled images, with its ten folds."""

import hashlib
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from mixval.bounds import Count
from mixval.dataset_facts import FACTS
from mixval.datasets.checks import checked, whole
from mixval.datasets.finding import damaged, locate
from mixval.datasets.packs import Pack, read_pack
from mixval.errors import UserError
from mixval.fingerprints import array_fingerprint
from mixval.types import Part, Source


def stl10(
    *,
    fold: Literal[0, 1, 2, 3, 4, 5, 6, 7, 8, 9] | None = None,
    size: Count | None = None,
    root: str | None = None,
    download: bool = False,
) -> Source:
    """Return STL-10: 5,000 train and 8,000 test photos of 10 classes, 96 x 96 or averaged to size.

    With a fold, its 1,000 images are train and the other 4,000 the validation split.
    """
    from torchvision.datasets import STL10

    path = locate("stl10", root, download, lambda folder: STL10(folder, download=True))
    pack = read_pack(path) if path.is_file() else _read_binaries(path, STL10)
    digest = array_fingerprint(pack.train.labels, pack.test.labels)
    source = whole(Source(pack.train, pack.test, pack.classes), path, FACTS["stl10"], digest)
    if size is not None:
        source = Source(_averaged(pack.train, size), _averaged(pack.test, size), pack.classes)
    return source if fold is None else _folded(source, _fold(pack, path, fold), path)


def _read_binaries(path: Path, dataset: Any) -> Pack:
    """Read the files of torchvision's layout; the 2.6 GB without labels need not be there."""
    content = {}
    try:
        for name, md5 in [*dataset.train_list[:2], *dataset.test_list]:
            content[name] = (path / name).read_bytes()
            if hashlib.md5(content[name], usedforsecurity=False).hexdigest() != md5:
                raise damaged(path / name, "its md5 is not the known one")
        classes = tuple((path / dataset.class_names_file).read_text().split())
        raw = {dataset.folds_list_file: (path / dataset.folds_list_file).read_bytes()}
    except OSError as error:
        raise damaged(path, f"there is no {error.filename}") from error
    train = _part(content["train_X.bin"], content["train_y.bin"], 0)
    test = _part(content["test_X.bin"], content["test_y.bin"], len(train))
    return Pack(train, test, classes, raw)


def _part(pixels: bytes, labels: bytes, first_id: int) -> Part:
    images = np.frombuffer(pixels, np.uint8).reshape(-1, 3, 96, 96).transpose(0, 1, 3, 2)
    numbers = np.frombuffer(labels, np.uint8).astype(np.int64) - 1
    ids = torch.arange(first_id, first_id + len(numbers))
    return Part(torch.from_numpy(images.copy()), torch.from_numpy(numbers), ids)


def _fold(pack: Pack, path: Path, fold: int) -> Tensor:
    try:
        line = pack.raw["fold_indices.txt"].decode().splitlines()[fold]
        places = sorted({int(word) for word in line.split()})
        if 5 * len(places) != len(pack.train) or places[0] < 0 or places[-1] >= len(pack.train):
            raise ValueError(f"fold {fold} is not a fifth of the train images")
    except (KeyError, IndexError, ValueError) as error:
        raise damaged(path, f"fold_indices.txt: {error}") from error
    return torch.tensor(places)


def _folded(source: Source, places: Tensor, path: Path) -> Source:
    chosen = torch.zeros(len(source.train), dtype=torch.bool)
    chosen[places] = True
    train, val = (source.train.take(mask.nonzero().squeeze(1)) for mask in (chosen, ~chosen))
    return checked(Source(train, source.test, source.classes, val), path)


def _averaged(part: Part, size: int) -> Part:
    assert isinstance(part.images, Tensor)
    if size > part.images.shape[-1]:
        raise UserError(f"data.source.size: must be at most {part.images.shape[-1]}, got {size}")
    smaller = [
        interpolate(part.images[k : k + 500].float(), (size, size), mode="area").round()
        for k in range(0, len(part), 500)
    ]
    return Part(torch.cat(smaller).to(torch.uint8), part.labels, part.ids)
