"""Failure rules against loops over the samples."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mixval.failure_rules import loss_above_quantile, lowest_margin, misclassified

quick = settings(deadline=None, derandomize=True, max_examples=60)
sizes, seeds = st.integers(1, 40), st.integers(0, 1000)


def toy(count: int, seed: int, classes: int = 4):
    rng = np.random.default_rng(seed)
    log_probs = torch.from_numpy(rng.standard_normal((count, classes))).log_softmax(1)
    return log_probs, torch.from_numpy(rng.integers(0, classes, count))


@quick
@given(sizes, seeds)
def test_misclassified_is_the_loop_over_samples(count, seed):
    # Catches the mask of hits.
    log_probs, labels = toy(count, seed)
    expected = []
    for row, label in zip(log_probs.tolist(), labels.tolist(), strict=True):
        expected.append(any(other > row[label] for k, other in enumerate(row) if k != label))
    assert misclassified(log_probs, labels).tolist() == expected


@quick
@given(sizes, seeds, st.floats(0.05, 0.95))
def test_lowest_margin_is_the_loop_over_samples(count, seed, fraction):
    # Catches a margin to the best class including the label itself (never above 0), the
    # largest margins instead of the smallest, and a wrong number of samples.
    log_probs, labels = toy(count, seed)
    margins = []
    for row, label in zip(log_probs.tolist(), labels.tolist(), strict=True):
        margins.append(row[label] - max(other for k, other in enumerate(row) if k != label))
    wanted = max(1, round(fraction * count))
    lowest = sorted(range(count), key=lambda sample: margins[sample])[:wanted]
    got = lowest_margin(log_probs, labels, fraction=fraction)
    assert got.nonzero().flatten().tolist() == sorted(lowest)


def test_lowest_margin_takes_the_misclassified_first():
    # The margin is negative exactly where the label is not the most likely class.
    log_probs, labels = toy(60, 3)
    wrong = misclassified(log_probs, labels)
    share = float(wrong.float().mean())
    assert 0 < share < 1
    assert torch.equal(lowest_margin(log_probs, labels, fraction=share), wrong)


@quick
@given(sizes, seeds, st.floats(0.05, 0.95))
def test_loss_above_quantile_is_the_loop_over_samples(count, seed, quantile):
    # The quantile by hand: between the two nearest ranks, in proportion.
    log_probs, labels = toy(count, seed)
    losses = [-log_probs[n, label].item() for n, label in enumerate(labels.tolist())]
    place = quantile * (count - 1)
    below, above = sorted(losses)[math.floor(place)], sorted(losses)[math.ceil(place)]
    bar = below + (above - below) * (place - math.floor(place))
    got = loss_above_quantile(log_probs, labels, quantile=quantile)
    for loss, failing in zip(losses, got.tolist(), strict=True):
        if abs(loss - bar) > 1e-9:  # on the bar itself rounding decides
            assert failing == (loss > bar)


@pytest.mark.parametrize("quantile", [0.5, 0.9])
def test_loss_above_quantile_leaves_that_share_below(quantile):
    log_probs, labels = toy(201, 5)
    failing = int(loss_above_quantile(log_probs, labels, quantile=quantile).sum())
    assert failing == round((1 - quantile) * 200)
