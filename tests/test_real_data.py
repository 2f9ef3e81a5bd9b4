"""Real datasets, where they are: whole, equal to what torchvision reads, and trained on.

`data` tests need MIXVAL_DATA; `packs` tests packed copies in it and the script that unpacks
them, an independent reader; `fashion` tests Debian's package. What is not there is left out.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision.datasets

from mixval import datasets
from mixval.dataset_facts import DEBIAN_FASHION, FACTS, data_root, find
from mixval.datasets.decoding import square, to_tensor
from mixval.errors import UserError
from mixval.sources import place_images

FILES = ("caltech101", "dtd", "fgvc_aircraft", "tiny_imagenet")
PRESENT = [name for name in sorted(FACTS) if find(name, data_root(None)) is not None]


@pytest.mark.data
@pytest.mark.parametrize("name", PRESENT)
def test_what_is_here_is_whole(name):
    path = find(name, data_root(None))
    part = {"part": True} if name == "tiny_imagenet" and path.is_file() else {}
    source = getattr(datasets, name)(**part, **({"size": 32} if name in FILES else {}))
    assert len(source.classes) == FACTS[name].classes
    if not part:
        sizes = [len(part) if part else 0 for part in (source.train, source.val, source.test)]
        assert sizes == [FACTS[name].train, FACTS[name].val, FACTS[name].test]
    rows = torch.arange(0, len(source.train), 97)
    pixels = source.train.images[rows].double()
    assert 40 < pixels.mean() < 200 and pixels.std() > 30  # not blank


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """Return a function that unpacks a dataset into torchvision's layout and returns the root."""
    script = Path(os.environ["MIXVAL_DATA"]) / "unpack.py"

    def unpack(name: str) -> str:
        root = tmp_path_factory.mktemp(name)
        subprocess.run([sys.executable, script, name, root], check=True, stdout=subprocess.DEVNULL)
        return str(root)

    return unpack


def assert_equal(part, images, labels) -> None:
    assert np.array_equal(part.images.numpy(), images)
    assert part.labels.tolist() == list(labels)


@pytest.mark.packs
def test_cifar10_from_its_pack_is_cifar10(unpacked):
    # The unpacked files have the official md5s, which torchvision checks.
    root = unpacked("cifar10")
    packed, plain = datasets.cifar10(), datasets.cifar10(root=root)
    assert packed.train.fingerprint == plain.train.fingerprint
    for part, train in ((packed.train, True), (packed.test, False)):
        oracle = torchvision.datasets.CIFAR10(root, train=train)
        assert_equal(part, oracle.data.transpose(0, 3, 1, 2), oracle.targets)
    assert packed.classes == tuple(oracle.classes)


@pytest.mark.packs
def test_stl10_from_its_pack_is_what_torchvision_reads(unpacked, monkeypatch):
    # The pack is lossy, so the md5s can't be right: torchvision must be told not to look.
    root = unpacked("stl10")
    monkeypatch.setattr(torchvision.datasets.STL10, "_check_integrity", lambda self: True)
    packed = datasets.stl10()
    for part, split in ((packed.train, "train"), (packed.test, "test")):
        oracle = torchvision.datasets.STL10(root, split)
        assert_equal(part, oracle.data, oracle.labels)
    assert packed.classes == tuple(oracle.classes)
    for fold in (0, 9):
        source = datasets.stl10(fold=fold, size=8)
        oracle = torchvision.datasets.STL10(root, "train", folds=fold)
        assert (len(source.train), len(source.val)) == (1000, 4000)
        counts = torch.bincount(source.train.labels, minlength=10).tolist()
        assert counts == np.bincount(oracle.labels, minlength=10).tolist()
    with pytest.raises(UserError, match="md5"):
        datasets.stl10(root=root)


@pytest.mark.packs
def test_dtd_from_its_pack_is_what_torchvision_reads(unpacked):
    root = unpacked("dtd")
    for partition in (1, 10):
        packed = datasets.dtd(partition=partition, size=32)
        for name in ("train", "val", "test"):
            oracle = torchvision.datasets.DTD(root, split=name, partition=partition)
            part, rows = getattr(packed, name), range(0, 1880, 131)
            wanted = [to_tensor(square(oracle[k][0], 32)) for k in rows]
            assert torch.equal(part.images[torch.tensor(rows)], torch.stack(wanted))
            assert part.labels.tolist() == oracle._labels
        assert packed.classes == tuple(oracle.classes)


@pytest.mark.packs
def test_caltech101_from_its_pack_is_what_torchvision_reads(unpacked):
    root = unpacked("caltech101")
    packed = place_images(datasets.caltech101(size=32), "memory")
    oracle = torchvision.datasets.Caltech101(root)
    rows = range(0, len(oracle), 61)
    wanted = [to_tensor(square(oracle[k][0].convert("RGB"), 32)) for k in rows]
    assert torch.equal(packed.train.images[torch.tensor(rows)], torch.stack(wanted))
    assert packed.train.labels.tolist() == oracle.y
    assert packed.classes == tuple(oracle.categories)


@pytest.mark.packs
def test_tiny_imagenet_from_its_pack_is_an_image_folder(unpacked):
    root = unpacked("tinyimagenet")
    packed = datasets.tiny_imagenet(part=True)
    for part, split in ((packed.train, "train"), (packed.test, "val")):
        oracle = torchvision.datasets.ImageFolder(f"{root}/tiny-imagenet-200/{split}")
        rows = range(0, len(oracle), 211)
        wanted = torch.stack([to_tensor(oracle[k][0]) for k in rows])
        assert torch.equal(part.images[torch.tensor(rows)], wanted)
        assert part.labels.tolist() == oracle.targets
    plain = datasets.tiny_imagenet(part=True, root=root)
    assert plain.train.fingerprint == packed.train.fingerprint
    with pytest.raises(UserError, match="has 10000 train images, not 100000"):
        datasets.tiny_imagenet(root=root)


@pytest.mark.fashion
def test_debians_fashion_mnist_is_read_where_it_is_installed(monkeypatch):
    # Its digest is checked; the mean is the 0.2860 that everyone normalises with.
    monkeypatch.delenv("MIXVAL_DATA", raising=False)
    assert find("fashion_mnist", None) == Path(DEBIAN_FASHION)
    source = datasets.fashion_mnist()
    assert float(source.train.images.double().mean() / 255) == pytest.approx(0.2860, abs=1e-4)
    fifth = datasets.fashion20()
    assert torch.bincount(fifth.train.labels).tolist() == [1200] * 10
    assert torch.equal(fifth.train.images, source.train.images[fifth.train.ids])
    assert torch.equal(fifth.test.images, source.test.images)
