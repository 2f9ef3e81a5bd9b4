"""Datasets are loaded once, into memory or decoded when needed; damage is found before training."""

from dataclasses import replace
from pathlib import Path

import miniatures
import numpy as np
import pytest
import torch
from PIL import Image

from mixval import sources
from mixval.datasets import digits, image_folder
from mixval.datasets.checks import checked
from mixval.errors import UserError
from mixval.sources import forget_sources, load_source, place_images
from mixval.splits import load_splits
from mixval.types import Part, Source


@pytest.fixture
def folder(tmp_path) -> Path:
    for split, count in (("train", 20), ("val", 6), ("test", 4)):
        for name in "ab":
            for k in range(count):
                miniatures.save_image(tmp_path / "own" / split / name / f"{k:02d}.png", (12, 10))
    forget_sources()
    return tmp_path / "own"


@pytest.mark.parametrize("images", ["auto", "memory", "stream"])
def test_images_are_the_same_wherever_they_are(folder, images):
    source = image_folder(path=str(folder), size=8)
    placed = place_images(source, images)
    for name in ("train", "val", "test"):
        before, after = getattr(source, name), getattr(placed, name)
        assert after.streams == (images == "stream")
        rows = torch.tensor([0, 3, 7, 3])
        assert torch.equal(before.images[rows], after.images[rows])
        assert torch.equal(before.labels, after.labels) and torch.equal(before.ids, after.ids)


def test_auto_streams_what_is_too_large(folder, monkeypatch):
    source = image_folder(path=str(folder), size=8)
    num_bytes = 60 * 3 * 8 * 8
    monkeypatch.setattr(sources, "IN_MEMORY", num_bytes)
    assert not place_images(source, "auto").train.streams
    monkeypatch.setattr(sources, "IN_MEMORY", num_bytes - 1)
    assert place_images(source, "auto").train.streams
    assert not place_images(source, "memory").train.streams


def test_arrays_stay_in_memory():
    source = digits()
    assert all(place_images(source, how) == source for how in ("auto", "memory", "stream"))


@pytest.mark.parametrize("images", ["memory", "stream"])
@pytest.mark.parametrize("kind", ["png", "jpg", "bmp"])
@pytest.mark.parametrize("damage", ["text", "cut", "empty"])
def test_a_damaged_image_is_refused_by_name_before_training(folder, images, damage, kind):
    # A file cut in its pixels still has its header: only its end tells.
    old = folder / "val" / "b" / "03.png"
    path = old.with_suffix(f".{kind}")
    with Image.open(old) as image:
        image.convert("RGB").resize((64, 64)).save(path)
    if path != old:
        old.unlink()
    whole = path.read_bytes()
    path.write_bytes({"text": b"no image", "cut": whole[: -len(whole) // 4], "empty": b""}[damage])
    source = image_folder(path=str(folder), size=8)
    with pytest.raises(UserError, match=rf"val/b/03\.{kind}") as caught:
        place_images(source, images)
    assert "\n" not in str(caught.value)


def test_splits_of_streamed_images_are_those_of_images_in_memory(folder):
    # The same samples in the same parts; official validation and test are used.
    source = image_folder(path=str(folder), size=8)
    sizes = {"seed": 0, "train": 30, "val_f": 6, "val_dev": 6, "label_noise": 0.2}
    streamed, held = (
        load_splits(place_images(source, how), **sizes) for how in ("stream", "memory")
    )
    assert torch.equal(streamed.mean, held.mean) and torch.equal(streamed.std, held.std)
    for name in ("train", "val_f", "val_dev", "test"):
        one, other = getattr(streamed, name), getattr(held, name)
        assert torch.equal(one.ids, other.ids) and torch.equal(one.labels, other.labels)
        assert torch.equal(one.images[torch.arange(len(one))], other.images)
    joined = Part.join([streamed.train, streamed.val_f])
    assert torch.equal(joined.images[torch.tensor([31])], held.val_f.images[[1]])


def test_a_dataset_is_loaded_once_until_it_changes(folder, tmp_path, monkeypatch):
    # Seeds of one process share it. Catches a stale one after the file was written again.
    path = tmp_path / "own.npz"
    images, labels = miniatures.pixels(6, 4, 4), np.arange(6) % 2
    np.savez(path, images=images, labels=labels)
    load = lambda how="auto": load_source("npz", {"path": str(path)}, how)  # noqa: E731
    first = load()
    assert load() is first
    assert load("memory") is not first
    np.savez(path, images=images[:4], labels=labels[:4])
    assert len(load().train) == 4
    again = load()
    forget_sources()
    assert load() is not again


def test_the_root_in_the_environment_is_part_of_what_is_remembered(tmp_path, monkeypatch):
    roots = []
    for name in "ab":
        with pytest.MonkeyPatch.context() as once:
            roots.append(miniatures.lay_out("caltech101", tmp_path / name, once))
    miniatures.lay_out("caltech101", tmp_path / "c", monkeypatch)
    loaded = []
    for root in roots:
        monkeypatch.setenv("MIXVAL_DATA", str(root))
        loaded.append(load_source("caltech101", {"size": 8}, "auto"))
    assert loaded[0].train.fingerprint != loaded[1].train.fingerprint


BAD_SOURCES = {
    "float images": ({"images": torch.zeros(4, 1, 2, 2)}, "must be uint8"),
    "flat images": ({"images": torch.zeros(4, 2, dtype=torch.uint8)}, "(N, C, H, W)"),
    "too few labels": ({"labels": torch.tensor([0, 1])}, "int64 label and an id"),
    "int32 labels": ({"labels": torch.tensor([0, 1, 0, 1], dtype=torch.int32)}, "int64 label"),
    "label out of range": ({"labels": torch.tensor([0, 1, 0, 2])}, "among the 2 classes, got 2"),
    "negative label": ({"labels": torch.tensor([0, 1, 0, -1])}, "among the 2 classes, got -1"),
    "empty class": ({"labels": torch.tensor([0, 0, 0, 0])}, "class b has no image in train"),
}


@pytest.mark.parametrize("case", BAD_SOURCES)
def test_sources_of_own_functions_are_checked(case):
    changes, fragment = BAD_SOURCES[case]
    good = Part(
        torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 1, 0, 1]), torch.arange(4)
    )
    checked(Source(good, None, ("a", "b")), "mine")
    with pytest.raises(UserError) as caught:
        checked(Source(replace(good, **changes), None, ("a", "b")), "mine")
    assert str(caught.value).startswith("mine: ") and fragment in str(caught.value)


def test_an_option_that_returns_no_source_is_refused(tmp_path, monkeypatch):
    (tmp_path / "odd_option.py").write_text("def odd():\n    return 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match=r"odd_option:odd must return a Source .* got int"):
        load_source("odd_option:odd", {}, "auto")
