"""The Fisher information against loops over samples, a closed form, and how data may be cut."""

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from mixval.errors import UserError
from mixval.fisher import diagonal_fisher, pieces, precision, summed_gradient, trainable
from mixval.models import conv_net, mlp

CLASSES, SHAPE = 3, (2, 4, 4)


def rows(count: int = 11, seed: int = 0):
    """Return inputs and labels, in double precision so that comparisons are sharp."""
    rng = np.random.default_rng(seed)
    inputs = torch.from_numpy(rng.standard_normal((count, *SHAPE)))
    return inputs, torch.from_numpy(rng.integers(0, CLASSES, count))


def in_place() -> nn.Module:
    layers = [nn.Conv2d(2, 3, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Dropout(0.5), nn.Linear(3, CLASSES))


def tied() -> nn.Module:
    network = nn.Sequential(nn.Flatten(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
    network[3].weight = network[1].weight
    return network


MAKERS = {
    "mlp": lambda: mlp(SHAPE, CLASSES, hidden=[5], dropout=0.3),
    "batch norm": lambda: conv_net(SHAPE, CLASSES, width=2),
    "in place": in_place,
    "tied": tied,
}


def network_of(kind: str) -> nn.Module:
    """Return a network in train mode whose BatchNorm has seen something."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        network = MAKERS[kind]().double()
        network(2 + rows(20, seed=9)[0])
    return network.train()


def by_loop(network: nn.Module, inputs, labels):
    """Return the gradient of log p of each sample by one backward pass each."""
    network = copy.deepcopy(network).eval()
    every = []
    for row, label in zip(inputs, labels, strict=True):
        network.zero_grad()
        (-F.cross_entropy(network(row[None]), label[None])).backward()
        every.append({n: p.grad.clone() for n, p in network.named_parameters()})
    return {name: torch.stack([each[name] for each in every]) for name in every[0]}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_fisher_is_the_mean_square_of_a_loop(kind, chunk):
    network, (inputs, labels) = network_of(kind), rows()
    fisher = diagonal_fisher(network, [(inputs, labels)], chunk=chunk)
    every = by_loop(network, inputs, labels)
    torch.testing.assert_close(fisher, {n: g.square().mean(0) for n, g in every.items()})


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_summed_gradient_is_the_sum_of_a_loop(kind, chunk):
    network, (inputs, labels) = network_of(kind).eval(), rows()
    got = summed_gradient(network, trainable(network), inputs, labels, chunk=chunk)
    every = by_loop(network, inputs, labels)
    torch.testing.assert_close(got, {name: g.sum(0) for name, g in every.items()})


def test_fisher_of_softmax_regression_has_a_closed_form():
    # d log p / dW = (e_y - p) x^T, so F_W = mean (e_y - p)^2 (x^2)^T.
    network, (inputs, labels) = nn.Sequential(nn.Flatten(), nn.Linear(32, CLASSES)), rows(50)
    network = network.double()
    fisher = diagonal_fisher(network, [(inputs, labels)])
    x = inputs.flatten(1).numpy()
    logits = x @ network[1].weight.detach().numpy().T + network[1].bias.detach().numpy()
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    residual = (np.eye(CLASSES)[labels.numpy()] - p) ** 2
    np.testing.assert_allclose(fisher["1.weight"], residual.T @ x**2 / 50, rtol=1e-10)
    np.testing.assert_allclose(fisher["1.bias"], residual.mean(0), rtol=1e-10)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 10), max_size=3), st.integers(1, 12), st.randoms())
def test_fisher_does_not_depend_on_order_batches_or_chunks(cuts, chunk, random):
    network, (inputs, labels) = network_of("mlp"), rows()
    whole = diagonal_fisher(network, [(inputs, labels)])
    order = list(range(len(labels)))
    random.shuffle(order)
    bounds = [0, *sorted(cuts), len(labels)]
    parts = [order[a:b] for a, b in pairwise(bounds)]  # some are empty
    cut = diagonal_fisher(network, ((inputs[p], labels[p]) for p in parts), chunk=chunk)
    torch.testing.assert_close(cut, whole)


def test_a_prepared_network_is_unwrapped_and_nothing_of_it_changes(engine):
    network, (inputs, labels) = network_of("batch norm"), rows()
    before = copy.deepcopy(network.state_dict())
    wrapped = diagonal_fisher(engine.prepare(network), [(inputs, labels)])
    torch.testing.assert_close(wrapped, diagonal_fisher(network, [(inputs, labels)]))
    assert network.training
    assert all(p.grad is None and p.requires_grad for p in network.parameters())
    torch.testing.assert_close(network.state_dict(), before, rtol=0, atol=0)


def test_frozen_parameters_have_no_curvature():
    network, batch = network_of("mlp"), rows()
    whole = diagonal_fisher(network, [batch])
    network[1].requires_grad_(False)
    partly = diagonal_fisher(network, [batch])
    assert set(partly) == {n for n in whole if not n.startswith("1.")}
    torch.testing.assert_close(partly, {name: whole[name] for name in partly})
    with pytest.raises(UserError, match="trainable"):
        diagonal_fisher(network.requires_grad_(False), [batch])


def test_what_can_not_be_measured_is_refused():
    network, (inputs, labels) = network_of("mlp"), rows()
    for nothing in ([], [(inputs[:0], labels[:0])]):
        with pytest.raises(UserError, match="at least 1 sample"):
            diagonal_fisher(network, nothing)
    with pytest.raises(UserError, match="one per input, got 3 for 11"):
        diagonal_fisher(network, [(inputs, labels[:3])])
    with pytest.raises(UserError, match="chunk"):
        diagonal_fisher(network, [(inputs, labels)], chunk=0)
    with pytest.raises(FloatingPointError, match=r"not finite for parameter '1\.weight'"):
        diagonal_fisher(network, [(inputs / 0, labels)])
    with pytest.raises(FloatingPointError, match=r"not finite for parameter '1\.weight'"):
        summed_gradient(network, trainable(network), inputs / 0, labels, chunk=5)
    with pytest.raises((IndexError, RuntimeError)):  # torch's own losses ignore -100
        diagonal_fisher(network, [(inputs, labels - 100)])


def network_of_two() -> nn.Module:
    network = nn.Module()
    network.w = nn.Parameter(torch.zeros(2))
    return network


def test_precision_is_the_scaled_fisher_and_the_ridge():
    fisher = {"w": torch.tensor([0.5, 0.0])}
    got = precision(network_of_two(), fisher, num_samples=10, ridge=0.25)
    torch.testing.assert_close(got, {"w": torch.tensor([5.25, 0.25])})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ridge": 0.0}, r"curvature is zero for parameter 'w' \(1 of 2 values\); give ridge > 0"),
        ({"ridge": -1.0}, "ridge: must be finite and >= 0, got -1"),
        ({"ridge": float("nan")}, "ridge: must be finite"),
        ({"num_samples": 0}, "num_samples: must be at least 1, got 0"),
        ({"fisher": {"v": torch.ones(2)}}, r"'v' is \(2,\) there and missing here"),
        ({"fisher": {"w": torch.ones(3)}}, r"'w' is \(3,\) there and \(2,\) here"),
        ({"fisher": {"w": torch.tensor([1, float("nan")])}}, "finite and >= 0, is not for .*'w'"),
        ({"fisher": {"w": torch.tensor([1, -2.0])}}, "finite and >= 0, is not for .*'w'"),
    ],
)
def test_a_precision_that_can_not_be_divided_by_is_refused(changes, message):
    usual = {"fisher": {"w": torch.tensor([0.5, 0.0])}, "num_samples": 10, "ridge": 0.25}
    fisher, *_ = (asked := usual | changes).values()
    with pytest.raises(UserError, match=message):
        precision(network_of_two(), fisher, num_samples=asked["num_samples"], ridge=asked["ridge"])


@given(st.integers(0, 30), st.integers(1, 40))
def test_pieces_are_the_rows_in_order(count, chunk):
    values = torch.arange(count)
    cut = list(pieces(nn.Linear(1, 1), values, -values, chunk))
    assert all(len(one) == len(other) <= chunk for one, other in cut)
    assert torch.equal(torch.cat([one for one, _ in cut]), values)
    assert torch.equal(torch.cat([other for _, other in cut]), -values)
