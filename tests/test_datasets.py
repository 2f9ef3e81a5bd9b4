"""Splits: sizes, disjoint, stratified, seeded; label noise in train only; own arrays."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mixval.datasets import digits, npz
from mixval.errors import UserError
from mixval.splits import flip_labels, load_splits

SOURCE = digits()
SIZES = {"train": 300, "val_f": 200, "val_dev": 200}
PARTS = ("train", "val_f", "val_dev", "test")


def split(seed=0, label_noise=0.0, source=SOURCE, **sizes):
    return load_splits(source, seed=seed, label_noise=label_noise, **{**SIZES, **sizes})


def label_of(ids):
    """Return the true labels: digits has its ids in the order of its samples."""
    return SOURCE.train.labels[ids]


def test_digits_are_the_1797_images_with_their_labels():
    # Catches pixels that wrap around in uint8, and labels that lose their image.
    from sklearn.datasets import load_digits

    bunch = load_digits()
    assert SOURCE.train.images.shape == (1797, 1, 8, 8)
    assert SOURCE.train.images.dtype == torch.uint8
    pixels = SOURCE.train.images.squeeze(1).double() / 15
    assert torch.equal(pixels, torch.from_numpy(bunch.images))
    assert torch.equal(SOURCE.train.labels, torch.from_numpy(bunch.target))
    assert len(SOURCE.classes) == 10


def test_parts_have_the_asked_sizes_and_share_no_sample():
    # Catches a sample that is trained on and tested on.
    splits = split()
    assert [len(getattr(splits, name)) for name in PARTS] == [300, 200, 200, 1097]
    ids = torch.cat([getattr(splits, name).ids for name in PARTS])
    assert torch.equal(ids.sort().values, torch.arange(1797))


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 400), st.integers(1, 400), st.integers(1, 400))
def test_any_sizes_are_exact_disjoint_and_stratified(seed, train, val_f, val_dev):
    # Catches rounding that loses a sample, takes one twice, or favours a class.
    splits = split(seed, train=train, val_f=val_f, val_dev=val_dev)
    sizes = (train, val_f, val_dev, 1797 - train - val_f - val_dev)
    assert tuple(len(getattr(splits, name)) for name in PARTS) == sizes
    ids = torch.cat([getattr(splits, name).ids for name in PARTS])
    assert len(ids.unique()) == 1797
    share = torch.bincount(SOURCE.train.labels, minlength=10).double() / 1797
    for name, size in zip(PARTS, sizes, strict=True):
        part = getattr(splits, name)
        assert torch.equal(part.labels, label_of(part.ids))
        assert torch.equal(part.images, SOURCE.train.images[part.ids])
        counts = torch.bincount(part.labels, minlength=10)
        # Each part is stratified within what the parts before it left: to within 3 samples.
        assert (counts - share * size).abs().max() <= 3


def test_a_seed_gives_the_same_splits_and_another_seed_others():
    # Catches a draw that depends on what was drawn before, or on no seed at all.
    one, again, other = split(3), split(3), split(4)
    for name in PARTS:
        assert torch.equal(getattr(one, name).ids, getattr(again, name).ids)
        assert not torch.equal(getattr(one, name).ids, getattr(other, name).ids)
    assert one.fingerprint == again.fingerprint != other.fingerprint


def test_parts_of_different_panels_are_the_same_samples():
    # Catches label noise that also changes who is in which part: panels could not be compared.
    clean, noisy = split(0, 0.0), split(0, 0.2)
    for name in PARTS:
        assert torch.equal(getattr(clean, name).ids, getattr(noisy, name).ids)
        assert torch.equal(getattr(clean, name).images, getattr(noisy, name).images)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.2, 0.333, 0.9])
def test_label_noise_flips_the_exact_share_in_train_only(share):
    # Catches "flips" that draw the true label again, and noise that reaches what is evaluated.
    splits = split(1, share)
    wrong = splits.train.labels != label_of(splits.train.ids)
    assert int(wrong.sum()) == round(share * 300)
    assert torch.equal(splits.flipped.sort().values, splits.train.ids[wrong].sort().values)
    for name in ("val_f", "val_dev", "test"):
        part = getattr(splits, name)
        assert torch.equal(part.labels, label_of(part.ids))


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.floats(0, 0.99), st.integers(2, 12))
def test_flipped_labels_are_other_valid_classes(seed, share, classes):
    # Catches a flip out of range or onto itself, for any number of classes.
    part = replace(SOURCE.train, labels=SOURCE.train.labels % classes)
    flipped, ids = flip_labels(part, share, classes, seed)
    changed = flipped.labels != part.labels
    assert int(changed.sum()) == round(share * len(part)) == len(ids)
    assert flipped.labels.min() >= 0 and flipped.labels.max() < classes
    assert torch.equal(part.ids[changed], ids)


def test_flipped_labels_go_to_every_other_class():
    # Catches noise that always moves to the next class: a network could learn that.
    flipped, _ = flip_labels(SOURCE.train, 0.9, 10, 0)
    steps = (flipped.labels - SOURCE.train.labels) % 10
    counts = torch.bincount(steps, minlength=10)[1:]
    assert counts.min() > 0.8 * counts.double().mean()


def test_pixel_statistics_are_of_train_alone():
    # Catches statistics that look at val or test.
    splits = split()
    pixels = splits.train.images.double() / 255
    assert splits.mean.item() == pytest.approx(pixels.mean().item(), abs=1e-6)
    assert splits.std.item() == pytest.approx(pixels.std().item(), abs=1e-6)


@pytest.mark.parametrize(
    "sizes", [{"train": 1397}, {"train": 5000}, {"val_f": 1797}, {"val_dev": 1500}]
)
def test_sizes_that_leave_no_test_sample_are_refused(sizes):
    # Catches an accuracy of nothing.
    with pytest.raises(UserError, match="data: train \\+ val_f \\+ val_dev"):
        split(**sizes)
    assert len(split(train=1396).test) == 1


# -- a validation split of the dataset's own ----------------------------------------------

OFFICIAL = replace(
    SOURCE,
    train=SOURCE.train.take(np.arange(1000)),
    val=SOURCE.train.take(np.arange(1000, 1400)),
    test=SOURCE.train.take(np.arange(1400, 1797)),
)


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 10**6),
    st.none() | st.integers(1, 1000),
    st.integers(1, 200),
    st.integers(1, 200),
)
def test_validation_comes_from_the_datasets_own_split_and_train_from_its_own(
    seed, train, val_f, val_dev
):
    # Catches train samples that are given away as validation, official validation samples that
    # are trained on, and a subset of train that favours a class.
    splits = split(seed, source=OFFICIAL, train=train, val_f=val_f, val_dev=val_dev)
    sizes = (train or 1000, val_f, val_dev, 397)
    assert tuple(len(getattr(splits, name)) for name in PARTS) == sizes
    assert splits.train.ids.max() < 1000
    validation = torch.cat([splits.val_f.ids, splits.val_dev.ids])
    assert validation.min() >= 1000 and validation.max() < 1400
    assert (
        len(validation.unique()) == val_f + val_dev and len(splits.train.ids.unique()) == sizes[0]
    )
    assert torch.equal(splits.test.ids, OFFICIAL.test.ids) and splits.own_test
    for name, whole in (("train", OFFICIAL.train), ("val_f", OFFICIAL.val)):
        part = getattr(splits, name)
        assert torch.equal(part.labels, label_of(part.ids))
        assert torch.equal(part.images, SOURCE.train.images[part.ids])
        share = torch.bincount(whole.labels, minlength=10).double() / len(whole)
        assert (torch.bincount(part.labels, minlength=10) - share * len(part)).abs().max() <= 1


def test_all_of_an_official_train_split_is_trained_on_in_every_seed():
    # Catches a train split that shrinks by the validation samples it does not give.
    for seed in (0, 1):
        splits = split(seed, source=OFFICIAL, train=None)
        assert torch.equal(splits.train.ids, torch.arange(1000))
    ids = [split(seed, source=OFFICIAL, train=500).val_dev.ids for seed in (0, 0, 1)]
    assert torch.equal(ids[0], ids[1]) and not torch.equal(ids[0], ids[2])


def test_without_an_official_test_split_the_rest_of_train_is_the_test():
    # Catches a test split of what is left of validation, or one that train reaches into.
    splits = split(source=replace(OFFICIAL, test=None), train=600)
    ids = torch.cat([splits.train.ids, splits.test.ids])
    assert torch.equal(ids.sort().values, torch.arange(1000)) and not splits.own_test


@pytest.mark.parametrize(
    ("source", "sizes", "line"),
    [
        (
            OFFICIAL,
            {"val_f": 201},
            "data: val_f + val_dev must be at most the 400 samples of the dataset's own "
            "validation split, got 401",
        ),
        (
            OFFICIAL,
            {"train": 1001},
            "data: train must be at most the 1000 samples there are, got 1001",
        ),
        (
            replace(OFFICIAL, test=None),
            {"train": 1000},
            "data: train must be at most the 1000 samples there are and leave a test sample, "
            "got 1000",
        ),
    ],
    ids=["validation", "train", "nothing left to test"],
)
def test_more_than_the_official_splits_have_is_refused_in_a_line(source, sizes, line):
    # Catches sizes that are checked against the sum of both splits; one sample less is taken.
    with pytest.raises(UserError) as caught:
        split(source=source, **sizes)
    assert str(caught.value) == line
    split(source=source, **{name: size - 1 for name, size in sizes.items()})


# -- own arrays ---------------------------------------------------------------------------


def write_npz(path, **changes):
    rng = np.random.default_rng(0)
    arrays = {
        "images": rng.integers(0, 256, (90, 5, 6), dtype=np.uint8),
        "labels": np.arange(90) % 3,
        **changes,
    }
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return str(path)


@pytest.mark.parametrize(("shape", "channels"), [((90, 5, 6), 1), ((90, 5, 6, 3), 3)])
def test_own_arrays_keep_pixels_and_labels(tmp_path, shape, channels):
    # Catches channels that end up as rows, and images that lose their label.
    images = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
    source = npz(path=write_npz(tmp_path / "a.npz", images=images))
    assert source.train.images.shape == (90, channels, 5, 6)
    last = images.reshape(90, 5, 6, channels)
    assert np.array_equal(source.train.images.numpy(), last.transpose(0, 3, 1, 2))
    assert source.train.labels.tolist() == [k % 3 for k in range(90)]
    assert source.classes == ("0", "1", "2") and source.test is None


def test_own_test_arrays_are_the_test_split_of_every_seed(tmp_path):
    # Catches an official test split that is divided anew, or whose ids meet those of train.
    images_test = np.random.default_rng(2).integers(0, 256, (20, 5, 6), dtype=np.uint8)
    labels_test = np.arange(20) % 3
    path = write_npz(tmp_path / "a.npz", images_test=images_test, labels_test=labels_test)
    source = npz(path=path)
    for seed in (0, 1):
        splits = split(seed, source=source, train=None, val_f=20, val_dev=20)
        assert np.array_equal(splits.test.images.squeeze(1).numpy(), images_test)
        assert len(splits.train) == 50  # all that are left
        assert not torch.isin(splits.test.ids, splits.train.ids).any()
        ids = torch.cat([getattr(splits, name).ids for name in PARTS])
        assert len(ids.unique()) == 110


BAD_ARRAYS = {
    "no labels": ({"labels": None}, "has no array 'labels'"),
    "no images": ({"images": None}, "has no array 'images'"),
    "no labels_test": (
        {"images_test": np.zeros((4, 5, 6), np.uint8)},
        "has no array 'labels_test'",
    ),
    "float images": ({"images": np.zeros((90, 5, 6))}, "images must be uint8"),
    "flat images": ({"images": np.zeros((90, 30), np.uint8)}, "images must be uint8"),
    "float labels": ({"labels": np.zeros(90)}, "labels must be integers"),
    "too few labels": ({"labels": np.zeros(89, np.int64)}, "labels must be integers (90,)"),
    "negative label": ({"labels": np.arange(90) - 1}, "labels must be >= 0, got -1"),
    "nothing": (
        {"images": np.zeros((0, 5, 6), np.uint8), "labels": np.zeros(0, np.int64)},
        "at least 1 image",
    ),
    "channels first": ({"images": np.zeros((90, 3, 5, 6), np.uint8)}, "transpose(0, 2, 3, 1)"),
    "unknown class in test": (
        {"images_test": np.zeros((4, 5, 6), np.uint8), "labels_test": np.arange(4)},
        "among the 3 classes",
    ),
    "test of another shape": (
        {"images_test": np.zeros((4, 7, 7), np.uint8), "labels_test": np.arange(4) % 3},
        "test images are",
    ),
    "test of other channels": (
        {"images_test": np.zeros((4, 5, 6, 3), np.uint8), "labels_test": np.arange(4) % 3},
        "test images are",
    ),
}


@pytest.mark.parametrize("case", BAD_ARRAYS)
def test_bad_arrays_are_refused_by_file_and_array(tmp_path, case):
    # Catches arrays that fail deep inside the training, or only after it, at the evaluation.
    changes, fragment = BAD_ARRAYS[case]
    path = write_npz(tmp_path / "own.npz", **changes)
    with pytest.raises(UserError) as caught:
        npz(path=path)
    assert "own.npz" in str(caught.value) and fragment in str(caught.value)


@pytest.mark.parametrize(
    "case", ["text", "empty", "cut", "flipped", "single", "pickled", "missing", "folder"]
)
def test_a_file_that_holds_no_arrays_is_refused_by_name(tmp_path, case):
    # Catches zipfile's, pickle's and numpy's own exceptions, and files left open.
    path = tmp_path / f"{case}.npz"
    whole = Path(write_npz(tmp_path / "good.npz")).read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 3] ^= 1
    contents = {
        "text": b"not a zip",
        "empty": b"",
        "cut": whole[: len(whole) // 2],
        "flipped": bytes(flipped),
    }
    if case in contents:
        path.write_bytes(contents[case])
    elif case == "single":
        with path.open("wb") as file:
            np.save(file, np.zeros(3))
    elif case == "pickled":
        np.savez(path, images=np.array([{}], dtype=object), labels=np.zeros(1))
    elif case == "folder":
        path.mkdir()
    with pytest.raises(UserError, match=rf"{case}\.npz"):
        npz(path=str(path))


def test_the_fingerprint_of_splits_sees_every_pixel_and_label_but_no_test():
    # Catches artifacts that are reused for other data, or remade because test changed.
    splits = split()
    for name in ("train", "val_f", "val_dev"):
        part = getattr(splits, name)
        images = part.images.clone()
        images[-1, 0, 3, 3] += 1
        labels = part.labels.clone()
        labels[0] = (labels[0] + 1) % 10
        for changed in (replace(part, images=images), replace(part, labels=labels)):
            assert replace(splits, **{name: changed}).fingerprint != splits.fingerprint
    rotated = replace(splits.test, labels=(splits.test.labels + 1) % 10)
    assert replace(splits, test=rotated).fingerprint == splits.fingerprint


@pytest.mark.parametrize(
    ("labels", "finding"),
    [
        ([0, 2, 2, 0], "class 1 has no image"),
        ([0, 0, 0, 0], "one class only"),
        ([0, 10**9, 0, 1], "class 2"),
    ],
)
def test_labels_with_gaps_are_refused_before_a_list_of_classes_is_made(tmp_path, labels, finding):
    # Catches a thousand million class names made for one wrong label, and classes nobody can learn.
    path = tmp_path / "gaps.npz"
    np.savez(path, images=np.zeros((4, 2, 2), np.uint8), labels=np.array(labels))
    with pytest.raises(UserError, match=rf"gaps\.npz.*{finding}"):
        npz(path=str(path))
