"""The objective against a loop over single samples, by value and by gradient."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mixval.losses import cross_entropy
from mixval.objectives import Objective, Weights
from mixval.types import Batch

BATCH, CLASSES = 6, 3
NORMALISE, EXCLUDED, FORWARD = (
    ("batch", "kept", "joint"),
    ("drop", "clean", "relabel", "refill"),
    ("joint", "separate"),
)
SPLITS = ([6], [2, 4], [1, 3, 2])


def toy_network(*, normalised: bool = False) -> nn.Module:
    torch.manual_seed(0)
    middle = [nn.BatchNorm1d(5)] if normalised else []
    layers = [nn.Flatten(), nn.Linear(4, 5), *middle, nn.Tanh(), nn.Linear(5, CLASSES)]
    return nn.Sequential(*layers).double()


def toy_batch(seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    clean, mixed = torch.from_numpy(rng.standard_normal((2, BATCH, 1, 2, 2)))
    lam = torch.from_numpy(rng.random(BATCH))[:, None]
    one, other = torch.eye(CLASSES).double()[rng.integers(0, CLASSES, (2, BATCH))]
    return Batch(clean, one, mixed, lam * one + (1 - lam) * other, lam.squeeze(1))


def toy_weights(kind: str, seed: int = 1) -> Weights:
    rng = np.random.default_rng(seed)
    values = rng.random((2, BATCH))
    if kind == "hard":
        values = np.array([[1, 0, 0, 1, 1, 0], [1, 1, 0, 1, 0, 1]])
    mixed, clean = torch.from_numpy(values.astype(np.float64))
    soft_labels = torch.from_numpy(rng.dirichlet(np.ones(CLASSES), BATCH))
    return Weights(mixed, clean, soft_labels)


def toy_objective(**changes) -> Objective:
    settings = {
        "loss": cross_entropy,
        "class_weight": None,
        "clean_weight": 0.7,
        "mixed_weight": 1.3,
        "normalise": "batch",
        "forward": "joint",
        "excluded": "drop",
        "uses_clean": True,
    }
    return Objective(**{**settings, **changes})


def cut(batch: Batch, weights: Weights, sizes: list[int]) -> tuple[list[Batch], list[Weights]]:
    edges = [0, *itertools.accumulate(sizes)]
    pieces = [slice(*edge) for edge in itertools.pairwise(edges)]

    def taken(thing, rows):
        values = {name: value[rows] for name, value in vars(thing).items() if value is not None}
        return replace(thing, **values)

    return [taken(batch, rows) for rows in pieces], [taken(weights, rows) for rows in pieces]


def total_loss(objective, network, batch, weights, sizes=(BATCH,)):
    """Return the loss of an optimiser step of several micro-batches, as training adds it up."""
    batches, parts = cut(batch, weights, list(sizes))
    size = objective.step_size(batches, parts)
    return sum(
        objective(objective.logits(network, piece), piece, part, size)
        for piece, part in zip(batches, parts, strict=True)
    )


def loop_over_samples(network, batch, weights, *, class_weight, normalise, excluded, uses_clean):
    """Return the loss of the module's formula, one sample and one class at a time."""
    w = [1.0] * CLASSES if class_weight is None else class_weight.tolist()

    def loss_of(image, target):
        logits = network(image[None])[0]
        log_total = torch.log(sum(torch.exp(value) for value in logits))
        return sum(w[k] * target[k] * (log_total - logits[k]) for k in range(CLASSES))

    def weight_of(target):
        return sum(w[k] * float(target[k]) for k in range(CLASSES))

    clean_sum = mixed_sum = clean_size = mixed_size = 0.0
    for row in range(BATCH):
        kept, trusted = float(weights.mixed[row]), float(weights.clean[row])
        # A mix that something else stands in for is not gone, and counts as planned.
        gone = normalise == "kept" and excluded in ("drop", "refill")
        clean_size += weight_of(batch.clean_targets[row]) * (trusted if normalise == "kept" else 1)
        mixed_size += weight_of(batch.mixed_targets[row]) * (kept if gone else 1)
        clean = loss_of(batch.clean[row], batch.clean_targets[row])
        clean_sum = clean_sum + trusted * clean
        mixed_sum = mixed_sum + kept * loss_of(batch.mixed[row], batch.mixed_targets[row])
        if excluded == "clean":
            mixed_sum = mixed_sum + (1 - kept) * clean
        if excluded == "relabel":
            told = loss_of(batch.mixed[row], weights.soft_labels[row])
            mixed_sum = mixed_sum + (1 - kept) * told
    halves = 2 if normalise == "joint" and uses_clean else 1
    total = 1.3 * mixed_sum / (halves * mixed_size)
    if uses_clean:
        total = total + 0.7 * clean_sum / (halves * clean_size)
    return total


@pytest.mark.parametrize("kind", ["hard", "soft"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("uses_clean", [False, True])
@pytest.mark.parametrize("excluded", EXCLUDED)
@pytest.mark.parametrize("normalise", NORMALISE)
@pytest.mark.parametrize("forward", FORWARD)
def test_value_and_gradient_are_those_of_the_loop(
    forward, normalise, excluded, uses_clean, weighted, kind
):
    """Every combination of settings, in one batch and in unequal micro-batches.

    Catches a normaliser per micro-batch, a clean term that is weighted by the mixed
    weights, an `instead` that replaces the wrong share, and clean and mixed logits
    exchanged after the joint pass.
    """
    class_weight = torch.tensor([0.5, 1.0, 2.5]).double() if weighted else None
    network, batch, weights = toy_network(), toy_batch(), toy_weights(kind)
    settings = {
        "class_weight": class_weight,
        "normalise": normalise,
        "excluded": excluded,
        "uses_clean": uses_clean,
    }
    expected = loop_over_samples(network, batch, weights, **settings)
    wanted = torch.autograd.grad(expected, list(network.parameters()))
    objective = toy_objective(forward=forward, **settings)
    for sizes in SPLITS:
        loss = total_loss(objective, network, batch, weights, sizes)
        torch.testing.assert_close(loss, expected)
        got = torch.autograd.grad(loss, list(network.parameters()))
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one, other)


def test_the_normaliser_is_the_planned_batch_and_not_what_is_kept():
    """The wrong normaliser: dividing by the kept count makes an arm that keeps few learn faster.

    All logits equal, so every loss is log K: keeping 2 of 6 gives a third of log K.
    """
    batch = toy_batch()
    weights = Weights(torch.tensor([1.0, 0, 0, 1, 0, 0]).double(), torch.ones(BATCH).double())
    flat = torch.zeros(BATCH, CLASSES).double()
    for normalise, expected in (("batch", math.log(CLASSES) / 3), ("kept", math.log(CLASSES))):
        objective = toy_objective(normalise=normalise, uses_clean=False, mixed_weight=1.0)
        size = objective.step_size([batch], [weights])
        loss = objective((None, flat), batch, weights, size)
        assert float(loss) == pytest.approx(expected)


def test_the_sign_lets_the_loss_fall():
    """The wrong sign: the gradient in the logits is (p - y) / B for kept mixes, else 0."""
    batch, weights = toy_batch(), toy_weights("hard")
    logits = torch.randn(BATCH, CLASSES, generator=torch.Generator().manual_seed(3)).double()
    logits.requires_grad_()
    objective = toy_objective(uses_clean=False, mixed_weight=1.0)
    size = objective.step_size([batch], [weights])
    loss = objective((None, logits), batch, weights, size)
    (gradient,) = torch.autograd.grad(loss, logits)
    for row in range(BATCH):
        expected = torch.zeros(CLASSES).double()
        if weights.mixed[row] == 1:
            expected = (logits[row].detach().softmax(0) - batch.mixed_targets[row]) / BATCH
        torch.testing.assert_close(gradient[row], expected)
    after = objective((None, logits.detach() - gradient), batch, weights, size)
    assert float(after) < float(loss.detach())


def test_everything_kept_is_regmixup():
    # The sum of two means, and with `joint` the mean over 2 B, in torch's words.
    network, batch = toy_network(), toy_batch()
    ones = Weights(torch.ones(BATCH).double(), torch.ones(BATCH).double())
    clean, mixed = (
        F.cross_entropy(network(images), targets)
        for images, targets in (
            (batch.clean, batch.clean_targets),
            (batch.mixed, batch.mixed_targets),
        )
    )
    plain = {"clean_weight": 1.0, "mixed_weight": 1.0}
    for normalise, expected in (("batch", clean + mixed), ("joint", (clean + mixed) / 2)):
        loss = total_loss(toy_objective(normalise=normalise, **plain), network, batch, ones)
        torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("normalise", NORMALISE)
@pytest.mark.parametrize("uses_clean", [False, True])
@pytest.mark.parametrize("sizes", SPLITS)
def test_without_mixing_the_clean_term_takes_the_whole_weight(normalise, uses_clean, sizes):
    # alpha = 0 is ERM whatever the weights of the two terms, also for `clean: none`.
    network, batch = toy_network(), toy_batch()
    clean_only = Batch(batch.clean, batch.clean_targets)
    ones = Weights(torch.ones(BATCH).double(), torch.ones(BATCH).double())
    objective = toy_objective(normalise=normalise, uses_clean=uses_clean)
    loss = total_loss(objective, network, clean_only, ones, sizes)
    torch.testing.assert_close(loss, F.cross_entropy(network(batch.clean), batch.clean_targets))


def gradients(objective, network, batch, weights):
    loss = total_loss(objective, network, batch, weights)
    return torch.autograd.grad(loss, list(network.parameters()))


def test_joint_and_separate_passes_agree_without_batch_norm():
    network, batch, weights = toy_network(), toy_batch(), toy_weights("soft")
    joint, separate = (
        gradients(toy_objective(forward=forward), network, batch, weights) for forward in FORWARD
    )
    for one, other in zip(joint, separate, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_joint_and_separate_passes_differ_with_batch_norm():
    # Catches a `forward` setting that does nothing. The joint pass is one over 2 B rows.
    network, batch, weights = toy_network(normalised=True), toy_batch(), toy_weights("soft")
    joint, separate = (
        gradients(toy_objective(forward=forward), network, batch, weights) for forward in FORWARD
    )
    assert max(float((a - b).abs().max()) for a, b in zip(joint, separate, strict=True)) > 1e-3
    clean, mixed = toy_objective(forward="joint").logits(network, batch)
    together = network(torch.cat([batch.clean, batch.mixed]))
    torch.testing.assert_close(torch.cat([clean, mixed]), together)
    clean, mixed = toy_objective(forward="separate").logits(network, batch)
    torch.testing.assert_close(clean, network(batch.clean))
    torch.testing.assert_close(mixed, network(batch.mixed))


@pytest.mark.parametrize("normalise", NORMALISE)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("mixed_weight", [1.0, 20.0])
@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
def test_nothing_kept_leaves_a_finite_loss_and_no_gradient(
    normalise, weighted, mixed_weight, precision
):
    # 0 / 0 under `kept`: a step that keeps nothing must change nothing, not turn all to NaN.
    # With a large mixed weight, too: the tiny denominator must not overflow on the way back.
    network = toy_network().to(precision)
    batch = Batch(**{name: value.to(precision) for name, value in nonempty(toy_batch())})
    nothing = Weights(torch.zeros(BATCH).to(precision), torch.ones(BATCH).to(precision))
    class_weight = torch.tensor([0.5, 1.0, 2.5]).to(precision) if weighted else None
    objective = toy_objective(
        class_weight=class_weight,
        normalise=normalise,
        uses_clean=False,
        mixed_weight=mixed_weight,
    )
    loss = total_loss(objective, network, batch, nothing)
    assert float(loss.detach()) == 0
    for gradient in torch.autograd.grad(loss, list(network.parameters())):
        assert (gradient == 0).all()


@pytest.mark.parametrize("normalise", NORMALISE)
def test_nothing_kept_leaves_the_clean_term(normalise):
    network, batch = toy_network(), toy_batch()
    nothing = Weights(torch.zeros(BATCH).double(), torch.ones(BATCH).double())
    loss = total_loss(toy_objective(normalise=normalise), network, batch, nothing)
    clean = F.cross_entropy(network(batch.clean), batch.clean_targets)
    torch.testing.assert_close(loss, 0.7 * clean / (2 if normalise == "joint" else 1))


@pytest.mark.parametrize("normalise", NORMALISE)
@pytest.mark.parametrize("mixes", [False, True])
def test_a_batch_of_classes_without_weight_leaves_a_finite_loss(normalise, mixes):
    # `given` allows a weight of 0, and the last batch of an epoch may be a single sample.
    network, batch = toy_network(), toy_batch()
    unwanted = torch.eye(CLASSES).double()[[0] * BATCH]
    batch = replace(batch, clean_targets=unwanted, mixed_targets=unwanted)
    batch = batch if mixes else Batch(batch.clean, batch.clean_targets)
    ones = Weights(torch.ones(BATCH).double(), torch.ones(BATCH).double())
    class_weight = torch.tensor([0.0, 1.0, 2.0]).double()
    objective = toy_objective(class_weight=class_weight, normalise=normalise)
    loss = total_loss(objective, network, batch, ones)
    assert float(loss.detach()) == 0
    for gradient in torch.autograd.grad(loss, list(network.parameters())):
        assert (gradient == 0).all()


def nonempty(thing):
    return [(name, value) for name, value in vars(thing).items() if value is not None]


@pytest.mark.parametrize("excluded", EXCLUDED)
def test_clean_rows_are_passed_forward_only_where_they_are_needed(excluded):
    # Plain mixup costs one forward pass per row; the cost table counts on it.
    seen = []
    network = toy_network()
    network.register_forward_hook(lambda module, inputs, output: seen.append(len(inputs[0])))
    objective = toy_objective(uses_clean=False, excluded=excluded)
    clean, mixed = objective.logits(network, toy_batch())
    needed = excluded == "clean"
    assert (clean is not None) == needed
    assert mixed is not None
    assert sum(seen) == BATCH * (2 if needed else 1)


def test_excluded_mixes_get_no_gradient_when_dropped():
    # Their images can hold anything: the gradient in the pixels must be exactly zero.
    network, batch, weights = toy_network(), toy_batch(), toy_weights("hard")
    batch.mixed.requires_grad_()
    loss = total_loss(toy_objective(), network, batch, weights)
    (gradient,) = torch.autograd.grad(loss, batch.mixed)
    touched = gradient.abs().sum((1, 2, 3)) > 0
    assert touched.tolist() == (weights.mixed > 0).tolist()
