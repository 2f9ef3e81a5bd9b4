"""Accuracy, NLL and calibration against scikit-learn and a loop over bins."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, log_loss
from torch import nn

from mixval.metrics import accuracy_and_nll, calibration_error, predict
from mixval.mixing import RowMaker
from mixval.types import Part

quick = settings(deadline=None, derandomize=True, max_examples=40)


def toy(count: int, seed: int, classes: int = 5, scale: float = 2.0):
    rng = np.random.default_rng(seed)
    log_probs = torch.from_numpy(scale * rng.standard_normal((count, classes))).log_softmax(1)
    return log_probs, torch.from_numpy(rng.integers(0, classes, count))


def toy_maker(count: int) -> RowMaker:
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(0, 256, (count, 1, 3, 3), dtype=np.uint8))
    labels = torch.from_numpy(rng.integers(0, 4, count))
    part = Part(images, labels, torch.arange(count))
    return RowMaker(part, 4, torch.full((1, 1, 1), 0.4), torch.full((1, 1, 1), 0.3))


def toy_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(9, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 4)
    )


@quick
@given(st.integers(1, 60), st.integers(0, 999))
def test_accuracy_and_nll_agree_with_scikit_learn(count, seed):
    log_probs, labels = toy(count, seed)
    accuracy, nll = accuracy_and_nll(log_probs, labels)
    assert accuracy == pytest.approx(accuracy_score(labels, log_probs.argmax(1)))
    expected = log_loss(labels, log_probs.exp().numpy(), labels=np.arange(5))
    assert nll == pytest.approx(expected, rel=1e-6)


def error_by_hand(log_probs, labels, bins: int) -> float:
    """Return sum over bins of |hits - confidence|, each as a share of all samples."""
    probabilities = log_probs.exp().numpy()
    total = 0.0
    for number in range(bins):
        hits = confidence = 0.0
        for row, label in zip(probabilities, labels.tolist(), strict=True):
            last = number == bins - 1
            low, high = number / bins, (number + 1) / bins
            if low <= row.max() < high or (last and row.max() >= high):
                hits += row.argmax() == label
                confidence += row.max()
        total += abs(hits - confidence) / len(labels)
    return total


@quick
@given(st.integers(1, 80), st.integers(0, 999), st.sampled_from([0.5, 2.0, 10.0]))
def test_calibration_error_is_the_loop_over_bins(count, seed, scale):
    # Catches the root-mean-square or maximum norm, and the confidence of the label's class.
    log_probs, labels = toy(count, seed, scale=scale)
    got = calibration_error(log_probs, labels)
    assert got == pytest.approx(error_by_hand(log_probs, labels, 15), abs=1e-6)


@pytest.mark.parametrize("bins", [1, 5, 40])
def test_calibration_error_uses_as_many_bins_as_told(bins):
    log_probs, labels = toy(300, 1)
    got = calibration_error(log_probs, labels, bins)
    assert got == pytest.approx(error_by_hand(log_probs, labels, bins), abs=1e-6)


def test_certain_predictions_are_calibrated_when_right_and_not_when_wrong():
    # Confidence 1 exactly lies in the last bin; catches a bin that leaves 1 out.
    labels = torch.tensor([0, 1, 2, 0])
    right = (100 * torch.eye(3)[labels]).log_softmax(1)
    assert float(right.exp().max()) == 1
    assert calibration_error(right, labels) == pytest.approx(0, abs=1e-6)
    assert calibration_error(right, (labels + 1) % 3) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("chunk", [1, 7, 50, 1000])
def test_predictions_do_not_depend_on_the_chunk(chunk):
    # Catches a lost last chunk, and BatchNorm or dropout in training mode.
    maker, network = toy_maker(50), toy_network()
    expected = []
    network.eval()
    for image in maker.part.images:
        pixels = (image.float() / 255 - 0.4) / 0.3
        outputs = network(pixels[None])[0].detach()
        expected.append(outputs - outputs.exp().sum().log())
    network.train()
    torch.testing.assert_close(predict(network, maker, chunk), torch.stack(expected))


@pytest.mark.parametrize("training", [False, True])
def test_predicting_leaves_the_network_as_it_was(training):
    # Evaluation in the middle of training must change neither mode nor statistics.
    maker, network = toy_maker(20), toy_network().train(training)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    log_probs = predict(network, maker)
    assert not log_probs.requires_grad
    assert network.training == training
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    torch.testing.assert_close(log_probs.exp().sum(1), torch.ones(20))
