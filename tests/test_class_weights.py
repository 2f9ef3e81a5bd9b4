"""Class weights against scikit-learn and by counting."""

import numpy as np
import pytest
import torch
from hypothesis import given as given_examples
from hypothesis import settings
from hypothesis import strategies as st
from sklearn.utils.class_weight import compute_class_weight

from mixval.class_weights import balanced, given, uniform
from mixval.losses import cross_entropy


@settings(deadline=None, derandomize=True, max_examples=60)
@given_examples(st.lists(st.integers(1, 40), min_size=2, max_size=8), st.randoms())
def test_balanced_agrees_with_scikit_learn(counts, random):
    # Catches n_k / n instead of its inverse, and a missing 1 / K.
    labels = [label for label, count in enumerate(counts) for _ in range(count)]
    random.shuffle(labels)
    classes = np.arange(len(counts))
    expected = compute_class_weight("balanced", classes=classes, y=np.array(labels))
    got = balanced(torch.tensor(labels), len(counts))
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize(("classes", "each"), [(2, 1), (3, 7), (10, 30)])
def test_balanced_does_nothing_on_balanced_data(classes, each):
    # Exactly 1, because training leaves weights of 1 out altogether.
    labels = torch.arange(classes).repeat(each)
    assert torch.equal(balanced(labels, classes), torch.ones(classes))


def test_balanced_gives_each_class_the_same_total():
    labels = torch.tensor([0] * 90 + [1] * 9 + [2])
    per_class = balanced(labels, 3) * torch.bincount(labels)
    torch.testing.assert_close(per_class, torch.full((3,), 100 / 3))


def test_balanced_refuses_a_class_without_samples():
    # n / 0 would be an infinite weight that only shows as NaN an epoch later.
    with pytest.raises(ValueError, match=r"\[1, 3\]"):
        balanced(torch.tensor([0, 2, 2]), 4)


def test_uniform_is_no_weight_at_all():
    logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    targets = torch.eye(3)[torch.tensor([0, 1, 2, 1, 0])]
    weighted = cross_entropy(logits, targets, uniform(torch.tensor([0, 0, 1]), 3))
    assert torch.equal(weighted, cross_entropy(logits, targets))


@settings(deadline=None, derandomize=True, max_examples=60)
@given_examples(st.lists(st.floats(0.01, 100), min_size=3, max_size=3), st.integers(0, 99))
def test_given_weights_keep_their_ratios_and_have_mean_one(values, seed):
    # Mean over samples, not over classes: a rare class counts as often as it comes.
    labels = torch.from_numpy(np.random.default_rng(seed).integers(0, 3, 50))
    got = given(labels, 3, values=values)
    mean = sum(float(got[label]) for label in labels) / len(labels)
    assert mean == pytest.approx(1, rel=1e-5)
    for one, other in ((0, 1), (1, 2)):
        ratio = float(got[one]) / float(got[other])
        assert ratio == pytest.approx(values[one] / values[other], rel=1e-5)


def test_given_weights_may_be_whole_numbers():
    # `values=[1, 2]` from Python: integers are numbers, too.
    got = given(torch.tensor([0, 0, 1]), 2, values=[1, 2])
    torch.testing.assert_close(got, torch.tensor([0.75, 1.5]))


@pytest.mark.parametrize("values", [[1.0], [1.0, 2.0, 3.0]])
def test_given_refuses_another_number_of_weights(values):
    with pytest.raises(ValueError, match="one weight per class"):
        given(torch.tensor([0, 1]), 2, values=values)


def test_given_refuses_weights_that_are_all_zero():
    # 0 / 0: every weight would be NaN, and training would blame the learning rate.
    with pytest.raises(ValueError, match="values"):
        given(torch.tensor([0, 1]), 2, values=[0.0, 0.0])
