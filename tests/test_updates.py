"""Updates against scipy, numpy, loops and finite differences; signs; what they leave alone."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize
from torch import nn
from torch.nn import functional as F

from mixval.errors import UserError
from mixval.fisher import diagonal_fisher, precision
from mixval.losses import cross_entropy
from mixval.models import conv_net, mlp
from mixval.updates import (
    ewc,
    ewc_deletion,
    fine_tune,
    linear_influence,
    loss_slopes,
    natural_direction,
    natural_gradient,
    newton_deletion,
)

CLASSES, FEATURES, SAMPLES = 3, 4, 60
MOVES = [ewc, ewc_deletion, natural_gradient, newton_deletion]
FITS, DELETES = [ewc, natural_gradient], [ewc_deletion, newton_deletion]


def blobs(count: int, seed: int = 0, shift: float = 0.0):
    """Return three overlapping classes, in double precision."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, count)
    inputs = rng.standard_normal((count, FEATURES)) + shift
    inputs[np.arange(count), labels] += 1.5
    return torch.from_numpy(inputs), torch.from_numpy(labels)


def trained(network: nn.Module, inputs, labels, steps: int = 100) -> nn.Module:
    optimiser = torch.optim.SGD(network.parameters(), lr=0.3, weight_decay=1e-3)
    for _ in range(steps):
        optimiser.zero_grad()
        F.cross_entropy(network(inputs), labels).backward()
        optimiser.step()
    optimiser.zero_grad()
    return network


@pytest.fixture(scope="module")
def regression():
    """Return a softmax regression on the blobs, its Fisher information, and failures F."""
    network = nn.Linear(FEATURES, CLASSES).double()
    nn.init.zeros_(network.weight), nn.init.zeros_(network.bias)
    data = blobs(SAMPLES)
    trained(network, *data)
    return network, diagonal_fisher(network, [data]), blobs(5, seed=3, shift=0.5)


@pytest.fixture(scope="module")
def deep():
    """Return a network with BatchNorm on images, its Fisher information, and failures F."""
    inputs, labels = blobs(SAMPLES)
    images = inputs.view(-1, 1, 2, 2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = conv_net((1, 2, 2), CLASSES, width=2).double()
    trained(network, images, labels, steps=30)
    fisher = diagonal_fisher(network, [(images, labels)])
    wanted, wanted_labels = blobs(5, seed=3, shift=0.5)
    return network, fisher, (wanted.view(-1, 1, 2, 2), wanted_labels)


@pytest.fixture(scope="module")
def smooth():
    """Return a network of three layers without kinks, its Fisher information, and failures F."""
    data = blobs(SAMPLES)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        hidden = [nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 8), nn.Softplus()]
        network = nn.Sequential(*hidden, nn.Linear(8, CLASSES)).double()
    trained(network, *data, steps=60)
    return network, diagonal_fisher(network, [data]), blobs(5, seed=3, shift=0.5)


def held_by(network: nn.Module, fisher, ridge: float, num_samples: int = SAMPLES):
    return precision(network, fisher, num_samples=num_samples, ridge=ridge)


def mean_loss(network: nn.Module, inputs, labels) -> float:
    with torch.no_grad():
        return float(F.cross_entropy(copy.deepcopy(network).eval()(inputs), labels))


def flat(parameters) -> np.ndarray:
    return np.concatenate([p.detach().numpy().ravel() for p in parameters])


def distance(one: nn.Module, other: nn.Module) -> float:
    return float(np.abs(flat(one.parameters()) - flat(other.parameters())).max())


def numpy_gradient(theta: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
    """Return log p and its gradient for softmax regression (weights, then biases), in numpy."""
    weight, bias = theta[:-CLASSES].reshape(CLASSES, FEATURES), theta[-CLASSES:]
    logits = x @ weight.T + bias
    logits -= logits.max(1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    residual = np.eye(CLASSES)[y] - np.exp(log_p)
    gradient = np.concatenate([(residual.T @ x).ravel(), residual.sum(0)])
    return float(log_p[np.arange(len(y)), y].sum()), gradient


# -- ewc against another optimiser of the same objective ------------------------------------


@pytest.mark.parametrize(("update", "sign"), [(ewc, 1), (ewc_deletion, -1)])
@pytest.mark.parametrize("ridge", [0.0, 0.1, 5.0])
@pytest.mark.parametrize("chunk", [2, 256])
def test_ewc_finds_the_optimum_that_scipy_finds(regression, update, sign, ridge, chunk):
    network, fisher, (inputs, labels) = regression
    start = flat(network.parameters())
    held = SAMPLES * flat(fisher.values()) + ridge

    def objective(theta):
        log_p, gradient = numpy_gradient(theta, inputs.numpy(), labels.numpy())
        move = theta - start
        return -sign * log_p + 0.5 * held @ move**2, -sign * gradient + held * move

    best = optimize.minimize(objective, start, jac=True, method="BFGS", options={"gtol": 1e-9})
    got = update(network, held_by(network, fisher, ridge), inputs, labels, chunk=chunk)
    moved = np.abs(best.x - start).max()
    assert moved > 0.02  # the control: there is something to find
    np.testing.assert_allclose(flat(got.parameters()), best.x, atol=1e-4 * moved)


@pytest.mark.parametrize(("update", "sign"), [(ewc, 1), (ewc_deletion, -1)])
def test_ewc_ends_where_the_pull_of_the_samples_is_the_pull_of_the_data(smooth, update, sign):
    # The condition of the optimum, in a network where no oracle knows the optimum itself.
    network, fisher, wanted = smooth
    end = update(network, held_by(network, fisher, 40.0), *wanted)
    (-F.cross_entropy(end(wanted[0]), wanted[1], reduction="sum")).backward()
    assert distance(end, network) > 0.01
    for (name, now), then in zip(end.named_parameters(), network.parameters(), strict=True):
        pull = (SAMPLES * fisher[name] + 40.0) * (now - then)
        torch.testing.assert_close(sign * now.grad, pull.detach(), atol=1e-4, rtol=1e-4)


def test_a_deletion_stays_in_the_valley_it_starts_in(smooth):
    # The objective has no lower bound far away, so a line search could jump out of where
    # small steps down the gradient lead.
    network, fisher, samples = smooth
    end = ewc_deletion(network, held_by(network, fisher, 40.0), *samples)
    walker = copy.deepcopy(network)
    pairs = list(zip(walker.parameters(), network.parameters(), fisher.values(), strict=True))
    for _ in range(600):
        log_p = -F.cross_entropy(walker(samples[0]), samples[1], reduction="sum")
        slopes = torch.autograd.grad(log_p, list(walker.parameters()))
        with torch.no_grad():
            for (now, then, f), slope in zip(pairs, slopes, strict=True):
                now -= 0.05 * (slope / (SAMPLES * f + 40.0) + now - then)
    assert distance(end, walker) < 1e-3 * distance(end, network)


def test_ewc_stays_with_endless_data_and_moves_less_with_more(regression):
    network, fisher, wanted = regression
    moves = [
        distance(ewc(network, held_by(network, fisher, 0.0, n), *wanted), network)
        for n in (10, 100, 1000, 10**12)
    ]
    assert moves == sorted(moves, reverse=True)
    assert moves[0] > 0.1 and moves[-1] < 1e-9


@settings(max_examples=20, deadline=None)
@given(st.floats(0.01, 100), st.integers(1, 10**6), st.integers(1, 4), st.integers(0, 99))
def test_no_update_ends_worse_than_it_began(ridge, num_samples, steps, seed):
    data, wanted = blobs(20, seed), blobs(4, seed + 1)
    network = nn.Linear(FEATURES, CLASSES).double()
    nn.init.zeros_(network.weight), nn.init.zeros_(network.bias)
    fisher = diagonal_fisher(network, [data])
    end = ewc(network, held_by(network, fisher, ridge, num_samples), *wanted, steps=steps)
    pulls = [
        ((num_samples * fisher[name] + ridge) * (now - then) ** 2).sum().item()
        for (name, now), then in zip(end.named_parameters(), network.parameters(), strict=True)
    ]
    assert 4 * mean_loss(end, *wanted) + sum(pulls) / 2 <= 4 * mean_loss(network, *wanted) + 1e-9


# -- one step, against numpy ----------------------------------------------------------------


@pytest.mark.parametrize(("update", "sign"), [(natural_gradient, 1), (newton_deletion, -1)])
@pytest.mark.parametrize(("ridge", "step"), [(0.0, 1.0), (0.7, 0.3)])
def test_a_natural_step_of_regression_is_what_numpy_says(regression, update, sign, ridge, step):
    network, fisher, (inputs, labels) = regression
    start = flat(network.parameters())
    x, y = blobs(SAMPLES)
    each = [numpy_gradient(start, x.numpy()[[n]], y.numpy()[[n]])[1] for n in range(SAMPLES)]
    held = np.square(each).sum(0) + ridge  # N times the mean
    _, gradient = numpy_gradient(start, inputs.numpy(), labels.numpy())
    got = update(network, held_by(network, fisher, ridge), inputs, labels, step=step, chunk=2)
    np.testing.assert_allclose(
        flat(got.parameters()), start + sign * step * gradient / held, rtol=1e-9
    )


def test_a_held_network_takes_the_same_small_step_by_ewc_and_by_natural_gradient(deep):
    # With a large ridge log p is linear within reach, and the optimum is one step away.
    network, fisher, wanted = deep
    for climbs, jumps in [(ewc, natural_gradient), (ewc_deletion, newton_deletion)]:
        held = held_by(network, fisher, 1e5)
        one, other = (update(network, held, *wanted) for update in (climbs, jumps))
        assert distance(one, other) < 0.01 * distance(one, network)


# -- signs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("update", MOVES)
@pytest.mark.parametrize("kind", ["regression", "deep"])
def test_fitting_lowers_the_loss_and_deleting_raises_it(request, update, kind):
    network, fisher, samples = request.getfixturevalue(kind)
    end = update(network, held_by(network, fisher, 500.0), *samples)
    change = mean_loss(end, *samples) - mean_loss(network, *samples)
    assert change < -1e-3 if update in FITS else change > 1e-3


def test_the_two_steps_are_opposite(deep):
    network, fisher, samples = deep
    there, back = (
        flat(f(network, held_by(network, fisher, 1.0), *samples).parameters())
        for f in (natural_gradient, newton_deletion)
    )
    np.testing.assert_allclose((there + back) / 2, flat(network.parameters()), atol=1e-12)


def test_a_repair_mends_the_failures_and_leaves_what_is_far_alone():
    # Class 2 turns up in a place that the data never showed.
    rng = np.random.default_rng(0)
    centres = torch.tensor([[-3.0, 0.0], [3.0, 0.0], [0.0, 6.0]])
    labels, wanted = torch.arange(90) % 3, torch.full((12,), 2)
    data = centres[labels] + 0.4 * torch.from_numpy(rng.standard_normal((90, 2))).float()
    place = torch.tensor([0.0, -5.0])
    failures = place + 0.3 * torch.from_numpy(rng.standard_normal((12, 2))).float()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = mlp((1, 1, 2), 3, hidden=[32])
    trained(network, data, labels, steps=300)
    fisher = diagonal_fisher(network, [(data, labels)])
    repaired = ewc(network, held_by(network, fisher, 1.0, 90), failures[:6], wanted[:6])
    careless = fine_tune(network, lambda epoch: [(failures[:6], wanted[:6])], lr=0.1, epochs=30)

    def accuracies(network):  # on failures it was not given, and on the data
        with torch.no_grad():
            hits = [
                network(x).argmax(1) == y for x, y in ((failures[6:], wanted[6:]), (data, labels))
            ]
        return [float(hit.double().mean()) for hit in hits]

    assert accuracies(network) == [0, 1]
    assert accuracies(repaired) == [1, 1]
    assert accuracies(careless)[1] < 0.5  # the control: here it is hard to leave the data alone
    change = (repaired(data).softmax(1) - network(data).softmax(1)).abs().max()
    assert float(change.detach()) < 0.1


# -- linear influence ---------------------------------------------------------------------------


def some_mixes(like, count: int = 7):
    rng = np.random.default_rng(8)
    rows = torch.from_numpy(rng.standard_normal((count, *like.shape[1:])))
    return rows, torch.from_numpy(rng.dirichlet(np.ones(CLASSES), count))


@pytest.mark.parametrize("kind", ["regression", "deep"])
@pytest.mark.parametrize("chunk", [2, 256])
def test_linear_influence_is_the_product_of_gradients(request, kind, chunk):
    network, fisher, failures = request.getfixturevalue(kind)
    rows, targets = some_mixes(failures[0])
    held = held_by(network, fisher, 2.0, 50)
    got = linear_influence(network, held, (rows, targets), *failures, step=0.3, chunk=chunk)
    frozen = copy.deepcopy(network).eval()
    weights = list(frozen.parameters())
    loss = F.cross_entropy(frozen(failures[0]), failures[1], reduction="sum")
    pull = [-g for g in torch.autograd.grad(loss, weights)]
    for row, target, value in zip(rows, targets, got, strict=True):
        log_p = -F.cross_entropy(frozen(row[None]), target[None])
        own = torch.autograd.grad(log_p, weights)
        by_name = zip(own, fisher.values(), pull, strict=True)
        expected = -0.3 * sum((g / (50 * f + 2.0) * p).sum() for g, f, p in by_name)
        assert float(value) == pytest.approx(float(expected), rel=1e-8)


@pytest.mark.parametrize("kind", ["regression", "deep"])
def test_linear_influence_is_the_limit_of_a_small_natural_step(request, kind):
    network, fisher, failures = request.getfixturevalue(kind)
    rows, targets = some_mixes(failures[0])
    held = held_by(network, fisher, 2.0, 50)

    def entropy_after(step):
        with torch.no_grad():
            moved = natural_gradient(network, held, *failures, step=step)
            return cross_entropy(moved(rows), targets)

    with torch.no_grad():
        before = cross_entropy(copy.deepcopy(network).eval()(rows), targets)
    slope = linear_influence(network, held, (rows, targets), *failures)
    for step in (1e-5, 1e-6):
        torch.testing.assert_close(
            (entropy_after(step) - before) / step, slope, rtol=1e-3, atol=10 * step
        )


def test_failures_themselves_are_no_conflict(deep):
    # Their own gradients point where the step goes, so together they have r_hat < 0.
    network, fisher, (inputs, labels) = deep
    own = (inputs, F.one_hot(labels, CLASSES).double())
    r_hat = linear_influence(network, held_by(network, fisher, 1.0, 50), own, inputs, labels)
    assert float(r_hat.sum()) < 0


def test_slopes_of_one_direction_serve_any_number_of_mixes(deep):
    network, fisher, failures = deep
    rows, targets = some_mixes(failures[0])
    held = held_by(network, fisher, 2.0, 50)
    direction = natural_direction(network, held, *failures)
    whole = linear_influence(network, held, (rows, targets), *failures)
    for cut in (slice(0, 3), slice(3, 7), slice(0, 0)):
        part = loss_slopes(network, direction, (rows[cut], targets[cut]))
        torch.testing.assert_close(part, whole[cut])


# -- fine-tuning ----------------------------------------------------------------------------------


def test_fine_tuning_is_momentum_by_hand(regression):
    network, _, _ = regression
    batches = [[blobs(6, seed=10 * epoch + b) for b in range(2)] for epoch in range(3)]
    got = fine_tune(network, batches.__getitem__, lr=0.05, epochs=3)
    theta, velocity = flat(network.parameters()), 0.0
    for x, y in [batch for epoch in batches for batch in epoch]:
        _, gradient = numpy_gradient(theta, x.numpy(), y.numpy())
        velocity = 0.9 * velocity - gradient / 6
        theta = theta - 0.05 * velocity
    np.testing.assert_allclose(flat(got.parameters()), theta, rtol=1e-9)


def test_fine_tuning_refuses_nothing_and_divergence(regression):
    network, _, failures = regression
    with pytest.raises(UserError, match="at least 1 sample, got none in epoch 1"):
        fine_tune(network, lambda epoch: [failures] * (1 - epoch), lr=0.1, epochs=2)
    with pytest.raises(FloatingPointError, match=r"fine-tuning at lr 0\.1, epoch 0"):
        fine_tune(network, lambda epoch: [(failures[0] / 0, failures[1])], lr=0.1, epochs=2)
    for wrong in (
        {"lr": 0.0, "epochs": 1},
        {"lr": float("nan"), "epochs": 1},
        {"lr": 1, "epochs": 0},
    ):
        with pytest.raises(UserError, match="must be finite and > 0"):
            fine_tune(network, lambda epoch: [failures], **wrong)


# -- what all of them keep ------------------------------------------------------------------------


def tuned(model, held, inputs, labels):
    return fine_tune(model, lambda epoch: [(inputs, labels)], lr=0.1, epochs=2)


@pytest.mark.parametrize("update", [*MOVES, tuned])
@pytest.mark.parametrize("wrapped", [False, True])
def test_the_given_network_and_the_statistics_stay(deep, update, wrapped, engine):
    network, fisher, samples = copy.deepcopy(deep)
    network.train()[0].requires_grad_(False)  # a frozen layer stays frozen
    fisher = {name: value for name, value in fisher.items() if not name.startswith("0.")}
    model = engine.prepare(network).train() if wrapped else network
    before, buffers = copy.deepcopy(network.state_dict()), dict(network.named_buffers())
    # Prepared computes float32 logits, so its double weights are compared loosely.
    end = update(model, held_by(model, fisher, 500.0), *samples)
    assert type(end) is type(model) and end is not model
    assert network.training and not end.training
    torch.testing.assert_close(network.state_dict(), before, rtol=0, atol=0)
    assert all(p.grad is None for p in [*network.parameters(), *end.parameters()])
    inner = end.network if wrapped else end
    torch.testing.assert_close(dict(inner.named_buffers()), buffers, rtol=0, atol=0)
    assert torch.equal(inner[0].weight, network[0].weight)
    assert not inner[0].weight.requires_grad
    assert not torch.equal(inner[3].weight, network[3].weight)
    bare = update(network, held_by(network, fisher, 500.0), *samples)
    assert distance(bare, inner) < 1e-6


@pytest.mark.parametrize("update", MOVES)
def test_what_can_not_move_a_network_is_refused(regression, update):
    network, fisher, (inputs, labels) = regression
    held = held_by(network, fisher, 1.0)
    with pytest.raises(UserError, match="at least 1 sample"):
        update(network, held, inputs[:0], labels[:0])
    with pytest.raises(FloatingPointError, match=r"not finite|diverged.*nan"):
        update(network, held, inputs / 0, labels)
    amount = "steps" if update in (ewc, ewc_deletion) else "step"
    with pytest.raises(UserError, match=f"{amount}: must be finite and > 0"):
        update(network, held, inputs, labels, **{amount: 0})


def test_a_deletion_that_nothing_holds_is_stopped(deep):
    # Four layers: the loss grows with the fourth power of the weights, the penalty with the second.
    network, fisher, samples = deep
    with pytest.raises(FloatingPointError, match=r"diverged: its objective is -\d.*larger ridge"):
        ewc_deletion(network, held_by(network, fisher, 1e-6, 1), *samples)
