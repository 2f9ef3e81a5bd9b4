"""The loss against torch's own, against the interpolated form, and against finite differences."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from mixval.losses import cross_entropy
from mixval.mixing import mixed_targets
from mixval.objectives import Objective, Weights
from mixval.types import Batch

BATCH, CLASSES = 7, 4


def toy(seed: int = 0):
    """Return logits, two labels and lambda of a small batch, and class weights."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(3 * rng.standard_normal((BATCH, CLASSES)))
    label_i, label_j = torch.from_numpy(rng.integers(0, CLASSES, (2, BATCH)))
    lam = torch.from_numpy(rng.random(BATCH))
    class_weight = torch.from_numpy(rng.random(CLASSES) + 0.2)
    return logits, label_i, label_j, lam, class_weight


def by_hand(logits: np.ndarray, targets: np.ndarray, class_weight: np.ndarray) -> np.ndarray:
    """Return the loss of each row with plain loops and logarithms."""
    losses = []
    for row, target in zip(logits, targets, strict=True):
        total = math.log(sum(math.exp(value) for value in row))
        losses.append(
            sum(
                weight * mass * (total - value)
                for weight, mass, value in zip(class_weight, target, row, strict=True)
            )
        )
    return np.array(losses)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 0.7])
def test_soft_targets_agree_with_torch(weighted, label_smoothing):
    # Catches a class weight applied before smoothing, or to the row and not to the class.
    logits, label_i, label_j, lam, class_weight = toy()
    targets = mixed_targets(label_i, label_j, lam, CLASSES)
    weight = class_weight if weighted else None
    expected = F.cross_entropy(
        logits, targets, weight=weight, reduction="none", label_smoothing=label_smoothing
    )
    got = cross_entropy(logits, targets, weight, label_smoothing=label_smoothing)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
def test_hard_labels_agree_with_torch(weighted, label_smoothing):
    # torch has another code path for class indices than for probabilities.
    logits, labels, _, _, class_weight = toy(1)
    weight = class_weight if weighted else None
    expected = F.cross_entropy(
        logits, labels, weight=weight, reduction="none", label_smoothing=label_smoothing
    )
    targets = F.one_hot(labels, CLASSES).double()
    got = cross_entropy(logits, targets, weight, label_smoothing=label_smoothing)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_interpolated_and_soft_target_forms_agree(weighted, label_smoothing):
    # lam CE(y_i) + (1 - lam) CE(y_j), as mixup is usually written, against one soft target.
    logits, label_i, label_j, lam, class_weight = toy(2)
    options = {
        "weight": class_weight if weighted else None,
        "reduction": "none",
        "label_smoothing": label_smoothing,
    }
    one, other = (F.cross_entropy(logits, labels, **options) for labels in (label_i, label_j))
    targets = mixed_targets(label_i, label_j, lam, CLASSES)
    got = cross_entropy(logits, targets, options["weight"], label_smoothing=label_smoothing)
    torch.testing.assert_close(got, lam * one + (1 - lam) * other)


def test_log_probabilities_may_stand_in_for_logits():
    # r_hat passes log-probabilities; a loss that expects raw logits would change them.
    logits, label_i, label_j, lam, _ = toy(3)
    targets = mixed_targets(label_i, label_j, lam, CLASSES)
    torch.testing.assert_close(
        cross_entropy(F.log_softmax(logits, -1), targets), cross_entropy(logits, targets)
    )


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_gradient_agrees_with_finite_differences(weighted, label_smoothing):
    # Catches a detached factor: the value would be right and the training wrong.
    logits, label_i, label_j, lam, class_weight = toy(4)
    targets = mixed_targets(label_i, label_j, lam, CLASSES)
    weight = class_weight if weighted else torch.ones(CLASSES).double()
    smoothed = targets * (1 - label_smoothing) + label_smoothing / CLASSES
    logits.requires_grad_()
    loss = cross_entropy(
        logits, targets, class_weight if weighted else None, label_smoothing=label_smoothing
    )
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    plain, step = logits.detach().numpy(), 1e-5
    for row in range(BATCH):
        for column in range(CLASSES):
            shift = np.zeros_like(plain)
            shift[row, column] = step
            above, below = (
                by_hand(plain + sign * shift, smoothed.numpy(), weight.numpy()).sum()
                for sign in (1, -1)
            )
            difference = (above - below) / (2 * step)
            assert float(gradient[row, column]) == pytest.approx(difference, abs=1e-8)


def test_gradient_of_unweighted_loss_is_prediction_minus_target():
    logits, label_i, label_j, lam, _ = toy(5)
    targets = mixed_targets(label_i, label_j, lam, CLASSES)
    logits.requires_grad_()
    (gradient,) = torch.autograd.grad(cross_entropy(logits, targets).sum(), logits)
    torch.testing.assert_close(gradient, logits.detach().softmax(-1) - targets)


@pytest.mark.parametrize("size", [1e2, 1e4, 1e30])
def test_extreme_logits_give_a_finite_loss(size):
    # Catches log(softmax(x)): log 0 where the label is wrong with certainty.
    logits = torch.tensor([[size, -size], [-size, size]])
    targets = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    loss = cross_entropy(logits, targets)
    assert float(loss[0]) == pytest.approx(2 * size, rel=1e-6)
    assert float(loss[1]) == 0.0


def objective_with(class_weight: torch.Tensor | None) -> Objective:
    return Objective(cross_entropy, class_weight, 1.0, 1.0, "batch", "joint", "drop", True)


@pytest.mark.parametrize("seed", range(3))
def test_the_normaliser_of_hard_labels_is_that_of_torch(seed):
    """With class weights, torch's mean divides by the sum of the rows' weights, not by B."""
    logits, labels, _, _, class_weight = toy(seed)
    batch = Batch(logits, F.one_hot(labels, CLASSES).double())
    ones = torch.ones(BATCH).double()
    objective = objective_with(class_weight)
    size = objective.step_size([batch], [Weights(ones, ones)])
    assert float(size[0]) == pytest.approx(sum(float(class_weight[y]) for y in labels))
    loss = objective((logits, None), batch, Weights(ones, ones), size)
    torch.testing.assert_close(loss, F.cross_entropy(logits, labels, weight=class_weight))


def test_the_normaliser_of_mixes_is_the_sum_of_their_labels_weights():
    # lam w_{y_i} + (1 - lam) w_{y_j}, by hand; at lam = 1 it is that of the sample.
    logits, label_i, label_j, lam, class_weight = toy(6)
    targets = mixed_targets(label_i, label_j, lam, CLASSES)
    batch = Batch(logits, F.one_hot(label_i, CLASSES).double(), logits, targets, lam)
    ones = torch.ones(BATCH).double()
    clean, mixed = objective_with(class_weight).step_size([batch], [Weights(ones, ones)])
    expected = sum(
        float(part * class_weight[i] + (1 - part) * class_weight[j])
        for i, j, part in zip(label_i, label_j, lam, strict=True)
    )
    assert float(mixed) == pytest.approx(expected)
    assert float(clean) == pytest.approx(sum(float(class_weight[y]) for y in label_i))


def test_weighted_loss_does_not_change_with_the_scale_of_the_weights():
    # Dividing by the sum of weights makes 2 w the same as w.
    logits, labels, _, _, class_weight = toy(7)
    batch = Batch(logits, F.one_hot(labels, CLASSES).double())
    weights = Weights(torch.ones(BATCH).double(), torch.ones(BATCH).double())
    losses = []
    for scale in (1, 2):
        objective = objective_with(scale * class_weight)
        size = objective.step_size([batch], [weights])
        losses.append(objective((logits, None), batch, weights, size))
    torch.testing.assert_close(*losses)
