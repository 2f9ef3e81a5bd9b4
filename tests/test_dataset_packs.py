"""Packed copies: the same images as the files they were packed from, and damage found."""

from dataclasses import replace
from pathlib import Path

import miniatures
import numpy as np
import pytest
import torch

from mixval import dataset_facts, datasets
from mixval.datasets import folders
from mixval.datasets.packs import read_pack
from mixval.datasets.trees import Archive
from mixval.errors import UserError
from mixval.sources import place_images

START = {
    "caltech101": "caltech101/101_ObjectCategories",
    "dtd": "dtd/dtd",
    "tiny_imagenet": "tiny-imagenet-200",
}


def write_pack(path: Path, size: int = 8, **raw: str):
    images = miniatures.pixels(21, size, size, 3)
    labels = np.arange(21) % 3
    return miniatures.write_pack(path, images, labels, 15, **raw), images, labels


def test_sheets_hold_the_images_in_order(tmp_path):
    # Catches cells read by column, a last sheet that is not full, and lost labels.
    path, images, labels = write_pack(tmp_path / "a.zip", fold_indices="0 1 2\n")
    pack = read_pack(path)
    joined = torch.cat([pack.train.images, pack.test.images]).permute(0, 2, 3, 1)
    assert np.array_equal(joined.numpy(), images)
    assert torch.cat([pack.train.labels, pack.test.labels]).tolist() == labels.tolist()
    assert torch.cat([pack.train.ids, pack.test.ids]).tolist() == [*range(21)]
    assert len(pack.train) == 15 and pack.classes == ("class 0", "class 1", "class 2")
    assert pack.raw == {"fold_indices.txt": b"0 1 2\n"}


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "stl10"])
def test_named_datasets_are_found_packed(name, tmp_path, monkeypatch):
    facts = dataset_facts.FACTS[name]
    small = replace(facts, classes=3, train=15, test=6, digest="")
    monkeypatch.setitem(dataset_facts.FACTS, name, small)
    folds = "\n".join("0 4 8" for _ in range(10))
    _, images, _ = write_pack(tmp_path / facts.packed[-1], fold_indices=folds)
    source = getattr(datasets, name)(root=str(tmp_path))
    assert np.array_equal(source.test.images.permute(0, 2, 3, 1).numpy(), images[15:])
    if name == "stl10":
        folded = datasets.stl10(root=str(tmp_path), fold=2)
        assert folded.train.ids.tolist() == [0, 4, 8]
        assert len(folded.val) == 12


@pytest.mark.parametrize("name", sorted(START))
def test_archives_hold_what_the_folder_holds(name, tmp_path, monkeypatch):
    # The same reader for both: same images, labels, ids and classes.
    plain = miniatures.lay_out(name, tmp_path / "plain", monkeypatch)
    facts = dataset_facts.FACTS[name]
    path = tmp_path / "packed" / facts.packed[0]
    miniatures.write_archive(path, plain / facts.plain, START[name])
    more = {"part": True} if name == "tiny_imagenet" else {}
    one, other = (
        place_images(getattr(datasets, name)(root=str(tmp_path / root), size=16, **more), "memory")
        for root in ("plain", "packed")
    )
    assert one.train.fingerprint == other.train.fingerprint
    assert one.classes == other.classes
    if one.test is not None:
        assert one.test.fingerprint == other.test.fingerprint


def test_a_part_is_never_taken_for_the_whole(tmp_path, monkeypatch):
    plain = miniatures.lay_out("tiny_imagenet", tmp_path / "plain", monkeypatch)
    facts = dataset_facts.FACTS["tiny_imagenet"]
    path = tmp_path / facts.packed[0]
    miniatures.write_archive(path, plain / facts.plain, START["tiny_imagenet"])
    with pytest.raises(UserError, match="part: true"):
        datasets.tiny_imagenet(root=str(tmp_path))
    # Nor the whole, or another part, for the part.
    monkeypatch.setattr(folders, "TINY_PART", replace(folders.TINY_PART, train=6))
    with pytest.raises(UserError, match="has 9 train images, not 6"):
        datasets.tiny_imagenet(root=str(tmp_path), part=True)


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "flipped":
        content[len(content) // 3] ^= 0x10
    path.write_bytes({"cut": content[: len(content) // 2], "empty": b""}.get(how, content))


@pytest.mark.parametrize("how", ["cut", "empty", "flipped"])
@pytest.mark.parametrize("kind", ["zip", "tar.xz"])
def test_a_damaged_pack_is_refused_by_name(kind, how, tmp_path):
    # Catches pixels that are not the dataset's: a checksum is compared before they are used.
    path = tmp_path / f"some.{kind}"
    if kind == "zip":
        write_pack(path, size=32)
    else:
        for k in range(4):
            miniatures.save_image(tmp_path / "files" / f"{k}.png", (64, 64))
        miniatures.write_archive(path, tmp_path / "files", "files")
    read = read_pack if kind == "zip" else lambda p: Archive(p, "files")
    read(path)
    damage(path, how)
    with pytest.raises(UserError, match=rf"some\.{kind}: damaged or incomplete"):
        read(path)
