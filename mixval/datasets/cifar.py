"""CIFAR-10 and CIFAR-100, of 32 x 32 pixels."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from mixval.dataset_facts import FACTS
from mixval.datasets.checks import whole
from mixval.datasets.finding import damaged, locate
from mixval.datasets.packs import read_pack
from mixval.fingerprints import array_fingerprint
from mixval.types import Part, Source


def cifar10(*, root: str | None = None, download: bool = False) -> Source:
    """Return CIFAR-10: 50,000 train and 10,000 test photos of 10 classes, 32 x 32."""
    from torchvision.datasets import CIFAR10

    return _cifar("cifar10", CIFAR10, root, download)


def cifar100(*, root: str | None = None, download: bool = False) -> Source:
    """Return CIFAR-100: 50,000 train and 10,000 test photos of 100 classes, 32 x 32."""
    from torchvision.datasets import CIFAR100

    return _cifar("cifar100", CIFAR100, root, download)


def _cifar(name: str, dataset: Any, root: str | None, download: bool) -> Source:
    path = locate(name, root, download, lambda folder: dataset(folder, download=True))
    if path.is_file():
        pack = read_pack(path)
        source = Source(pack.train, pack.test, pack.classes)
    else:
        train, test = (_read(dataset, path, split) for split in (True, False))
        first = len(train.targets)
        source = Source(_part(train, 0), _part(test, first), tuple(train.classes))
    assert source.test is not None
    digest = array_fingerprint(source.train.labels, source.test.labels)
    return whole(source, path, FACTS[name], digest)


def _read(dataset: Any, path: Path, train: bool) -> Any:
    try:
        return dataset(path.parent, train=train)  # checks the md5 of every file
    except (RuntimeError, OSError) as error:
        raise damaged(path, "the md5 of a file is not the known one") from error


def _part(dataset: Any, first_id: int) -> Part:
    images = torch.from_numpy(np.ascontiguousarray(dataset.data.transpose(0, 3, 1, 2)))
    labels = torch.tensor(dataset.targets, dtype=torch.int64)
    return Part(images, labels, torch.arange(first_id, first_id + len(labels)))
