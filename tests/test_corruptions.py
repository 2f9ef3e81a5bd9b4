"""Damage: how often, to which samples, and that it does damage."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import nn
from torch.nn import functional as F

from mixval.corruptions import (
    annotation_noise,
    confuse_labels,
    fgsm,
    fgsm_poisoning,
    gaussian_noise,
    input_noise,
    none,
    salt_and_pepper,
)
from mixval.datasets import digits
from mixval.errors import UserError
from mixval.models import conv_net
from mixval.splits import load_splits
from mixval.types import Part, StreamedImages

PAIRS = {(1, 7): 0.4, (6, 9): 0.3}


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def in_bounds(hits: int, count: int, probability: float) -> bool:
    return stats.binomtest(hits, count, probability).pvalue > 1e-4


def test_classes_are_confused_as_often_as_asked():
    labels = torch.arange(10).repeat(2000)
    noisy, flipped = confuse_labels(labels, PAIRS, rng())
    for one, other, chance in [(1, 7, 0.4), (7, 1, 0.4), (6, 9, 0.3), (9, 6, 0.3)]:
        of_class = labels == one
        assert in_bounds(int(flipped[of_class].sum()), 2000, chance)
        assert (noisy[of_class & flipped] == other).all()
    assert not flipped[~torch.isin(labels, torch.tensor([1, 7, 6, 9]))].any()
    # The control of the bound: a frequency next to it is not taken for it.
    assert not in_bounds(int(flipped[labels == 1].sum()), 2000, 0.3)


@given(st.lists(st.integers(0, 5), max_size=30), st.floats(0, 1), st.integers(0, 2**32))
def test_laws_of_confused_labels(values, chance, seed):
    labels = torch.tensor(values, dtype=torch.int64)
    before = labels.clone()
    noisy, flipped = confuse_labels(labels, {(0, 3): chance, (2, 4): 1.0}, rng(seed))
    assert torch.equal(labels, before)
    assert torch.equal(noisy != labels, flipped)
    assert torch.equal(
        noisy[(labels == 2) | (labels == 4)], 6 - labels[(labels == 2) | (labels == 4)]
    )
    swap = torch.tensor([3, 1, 4, 0, 2, 5])
    assert torch.equal(torch.where(flipped, swap[labels], labels), noisy)
    # One pair's flips do not depend on the other's.
    alone, _ = confuse_labels(labels, {(0, 3): chance}, rng(seed))
    zero_three = (labels == 0) | (labels == 3)
    assert torch.equal(alone[zero_three], noisy[zero_three])
    # More chance flips more, never others.
    _, less = confuse_labels(labels, {(0, 3): chance / 2}, rng(seed))
    assert not (less & ~flipped).any()


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ({(1, 7): 1.5}, "from 0 to 1, got 1.5"),
        ({(1, 7): float("nan")}, "from 0 to 1, got nan"),
        ({(1, 7): 0.1, (7, 2): 0.1}, "each class once"),
        ({(3, 3): 0.1}, "each class once"),
    ],
)
def test_pairs_without_a_meaning_are_refused(pairs, message):
    with pytest.raises(UserError, match=message):
        confuse_labels(torch.arange(10), pairs, rng())


@pytest.mark.parametrize("share", [0.0, 0.2, 0.9, 1.0])
def test_salt_and_pepper_hits_its_share_of_pixels_evenly(share):
    images = torch.full((20, 3, 30, 30), 100, dtype=torch.uint8)
    noisy = salt_and_pepper(images, share, rng())
    assert noisy.dtype == torch.uint8
    assert (noisy == noisy[:, :1]).all()  # all channels of a pixel at once
    salt, pepper = (int((noisy[:, 0] == value).sum()) for value in (255, 0))
    assert in_bounds(salt + pepper, 18000, share)
    assert in_bounds(salt, 18000, share / 2)
    assert int((noisy[:, 0] == 100).sum()) == 18000 - salt - pepper
    assert (images == 100).all()


def test_gaussian_noise_has_its_spread_and_stays_a_byte():
    images = torch.full((20, 3, 30, 30), 128, dtype=torch.uint8)
    noisy = gaussian_noise(images, 20.0, rng()).double()
    assert noisy.mean() == pytest.approx(128, abs=3 * 20 / 54000**0.5)
    # Rounding to whole levels adds 1/12 to the variance.
    assert noisy.std() == pytest.approx((400 + 1 / 12) ** 0.5, rel=5 / (2 * 54000) ** 0.5)
    assert torch.equal(gaussian_noise(images, 0.0, rng()), images)
    strong = gaussian_noise(images, 500.0, rng()).flatten()  # would wrap around if not clipped
    beyond = stats.norm.sf(127.5 / 500)
    assert in_bounds(int((strong == 0).sum()), 54000, stats.norm.cdf(-127.5 / 500))
    assert int((strong == 255).sum()) == pytest.approx(54000 * beyond, rel=0.03)
    assert (images == 128).all()


@pytest.mark.parametrize("damage", [salt_and_pepper, gaussian_noise])
def test_noise_is_for_bytes_and_sane_amounts(damage):
    images = torch.zeros(2, 1, 3, 3, dtype=torch.uint8)
    for amount in (-0.1, float("nan")):
        with pytest.raises(UserError, match="must be"):
            damage(images, amount, rng())
    for wrong in (images.float(), images[0]):
        with pytest.raises(UserError, match="bytes"):
            damage(wrong, 0.5, rng())


def attacked(seed: int = 0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = conv_net((1, 6, 6), 3, width=4)
        inputs = torch.randn(16, 1, 6, 6)
    return network, inputs, torch.arange(16) % 3


def test_fgsm_goes_along_the_sign_of_each_samples_own_gradient():
    network, inputs, labels = attacked()
    moved = fgsm(network, inputs, labels, 0.1)
    frozen = copy.deepcopy(network).eval()
    for row, label, got in zip(inputs, labels, moved, strict=True):
        row = row[None].clone().requires_grad_()
        F.cross_entropy(frozen(row), label[None]).backward()
        torch.testing.assert_close(got, (row + 0.1 * row.grad.sign())[0].detach())


def test_fgsm_raises_the_loss_and_changes_nothing_else(engine):
    network, inputs, labels = attacked()
    before, seen = copy.deepcopy(network.state_dict()), inputs.clone()
    with torch.no_grad():
        moved = fgsm(engine.prepare(network), inputs, labels, 0.01)
    torch.testing.assert_close(network.state_dict(), before, rtol=0, atol=0)
    assert network.training and torch.equal(inputs, seen)
    assert all(p.grad is None for p in network.parameters())
    network.eval()
    losses = [F.cross_entropy(network(x), labels, reduction="none") for x in (inputs, moved)]
    assert (losses[1] > losses[0]).all()
    assert torch.equal(fgsm(network, inputs, labels, 0.0), inputs)


def test_fgsm_refuses_what_has_no_gradient():
    network, inputs, labels = attacked()
    with pytest.raises(FloatingPointError, match="not finite"):
        fgsm(network, inputs / 0, labels, 0.1)
    with pytest.raises(UserError, match="epsilon"):
        fgsm(nn.Flatten(), inputs, labels, -1.0)


# -- as settings of the train data -----------------------------------------------------------------

DIGITS = digits().train


def damaged(before: Part, after: Part) -> torch.Tensor:
    return (before.images != after.images).flatten(1).any(1)


def test_annotation_noise_is_the_published_confusion():
    noisy = annotation_noise(DIGITS, 10, rng())
    expected, _ = confuse_labels(DIGITS.labels, PAIRS, rng())
    assert torch.equal(noisy.labels, expected) and noisy.images is DIGITS.images
    assert none(DIGITS, 10, rng()) is DIGITS


@pytest.mark.parametrize("kind", ["salt_and_pepper", "gaussian"])
@pytest.mark.parametrize("damage", [input_noise, fgsm_poisoning])
def test_images_of_the_named_classes_are_hit_as_often_as_asked(damage, kind):
    own = {"kind": kind, "amount": 0.5} if damage is input_noise else {}
    noisy = damage(DIGITS, 10, rng(), share=0.25, classes=[1, 6], **own)
    hit, named = damaged(DIGITS, noisy), torch.isin(DIGITS.labels, torch.tensor([1, 6]))
    assert not hit[~named].any()
    assert in_bounds(int(hit.sum()), int(named.sum()), 0.25)
    assert torch.equal(noisy.labels, DIGITS.labels) and torch.equal(noisy.ids, DIGITS.ids)
    assert noisy.images.dtype == torch.uint8
    every = damaged(DIGITS, damage(DIGITS, 10, rng(), share=0.25, **own))
    assert in_bounds(int(every.sum()), len(DIGITS), 0.25)
    assert torch.equal(every & named, hit)  # one class's do not depend on another's
    again = damage(DIGITS, 10, rng(), share=0.25, classes=[1, 6], **own)
    assert torch.equal(again.images, noisy.images)


def test_poisoned_images_fool_a_classifier_that_noise_of_that_size_does_not():
    # Another library's classifier, fitted to the first half, asked about the second.
    from sklearn.linear_model import LogisticRegression

    pixels = DIGITS.images.flatten(1).numpy() / 255
    judge = LogisticRegression(max_iter=1000).fit(pixels[:900], DIGITS.labels[:900])
    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    noisy = fgsm_poisoning(DIGITS, 10, rng(), share=0.5, epsilon=0.2)
    assert torch.equal(torch.random.get_rng_state(), state)  # it draws nothing of torch's
    moved = noisy.images.short() - DIGITS.images.short()
    assert int(moved.abs().max()) == 51
    hit = damaged(DIGITS, noisy).numpy() & (np.arange(len(DIGITS)) >= 900)
    signs = rng(1).choice([-0.2, 0.2], pixels[hit].shape)
    random = np.clip(pixels[hit] + signs, 0, 1)
    labels = DIGITS.labels.numpy()[hit]
    accuracy = [
        judge.score(x, labels) for x in (noisy.images.flatten(1).numpy()[hit] / 255, random)
    ]
    assert accuracy[0] < 0.5 < 0.8 < accuracy[1]


@pytest.mark.parametrize("damage", [annotation_noise, input_noise, fgsm_poisoning])
def test_splits_know_what_was_damaged_and_damage_train_alone(damage):
    sizes = {"seed": 3, "train": 300, "val_f": 100, "val_dev": 100}
    clean = load_splits(digits(), label_noise=0.0, **sizes)
    splits = load_splits(digits(), label_noise=0.2, corrupt=damage, **sizes)
    wrong = splits.train.labels != clean.train.labels
    image = damaged(clean.train, splits.train)
    assert image.any() == (damage is not annotation_noise)
    assert torch.equal(splits.flipped, clean.train.ids[wrong])
    assert torch.equal(splits.corrupted, clean.train.ids[wrong | image])
    for name in ("val_f", "val_dev", "test"):
        assert getattr(splits, name).fingerprint == getattr(clean, name).fingerprint
    pixels = splits.train.images.double() / 255  # a network sees the damaged images' statistics
    assert splits.mean.item() == pytest.approx(pixels.mean().item(), abs=1e-6)


def test_damage_without_a_meaning_is_refused():
    class Nothing:
        image_shape, content = (1, 8, 8), ""

    streamed = Part(StreamedImages.of(Nothing(), len(DIGITS)), DIGITS.labels, DIGITS.ids)
    for damage in (input_noise, fgsm_poisoning):
        with pytest.raises(UserError, match=r"classes: must name classes from 0 to 9, got 10"):
            damage(DIGITS, 10, rng(), classes=[10])
        with pytest.raises(UserError, match=r"data\.images: must be memory"):
            damage(streamed, 10, rng())
    for pairs, message in (
        ([[1, 7]], "class, class, probability"),
        ([[1.5, 7, 0.1]], "class, class, probability"),
        ([[1, 10, 0.1]], "classes from 0 to 9, got 10"),
        ([[1, 7, 1.1]], "from 0 to 1"),
    ):
        with pytest.raises(UserError, match=message):
            annotation_noise(DIGITS, 10, rng(), pairs=pairs)
