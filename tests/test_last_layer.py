"""The last layer's posterior against autograd, scipy and quadrature, and the split of a network."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from scipy import optimize
from torch import nn
from torch.nn import functional as F

from mixval.curvature import STRUCTURES
from mixval.engine import Engine
from mixval.errors import UserError
from mixval.last_layer import LastLayer, draw, fit, split_head, updated
from mixval.models import mlp, timm

quick = settings(deadline=None, derandomize=True, max_examples=20)
CLASSES, WIDTH, DELTA = 3, 4, 0.5


def toy_features(rows: int, seed: int = 0, width: int = WIDTH) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng([seed, rows]).standard_normal((rows, width)))


def toy_posterior(
    structure: str, seed: int = 0, *, rows: int = 60, delta: float = DELTA
) -> LastLayer:
    mean = torch.from_numpy(np.random.default_rng(seed).standard_normal((CLASSES, WIDTH + 1)))
    return fit(toy_features(rows, seed).split(25), mean, structure, delta)


def with_one(features: torch.Tensor) -> torch.Tensor:
    return torch.cat([features, torch.ones(len(features), 1, dtype=features.dtype)], dim=1)


def dense(posterior: LastLayer) -> torch.Tensor:
    units = torch.eye(posterior.mean.numel(), dtype=torch.float64)
    return torch.stack(
        [posterior.precision_times(u.view_as(posterior.mean)).flatten() for u in units]
    )


def loss_given(posterior: LastLayer, features: torch.Tensor, labels: torch.Tensor):
    """Return -log p(F | W) + 1/2 (W - W_D)^T P_D (W - W_D) of W read as one row."""
    precision, start = dense(posterior), posterior.mean.flatten()

    def loss(flat: torch.Tensor) -> torch.Tensor:
        logits = with_one(features) @ flat.view_as(posterior.mean).T
        change = flat - start
        return F.cross_entropy(logits, labels, reduction="sum") + change @ precision @ change / 2

    return loss


# -- p(W | D, F) --------------------------------------------------------------------------------


@quick
@given(
    seed=st.integers(0, 1000),
    structure=st.sampled_from(list(STRUCTURES)),
    rows=st.sampled_from([1, 3, 40]),
    delta=st.sampled_from([1e-3, 0.5, 50.0]),
    scale=st.sampled_from([0.1, 1.0, 30.0]),
)
def test_the_moved_mean_is_where_the_gradient_is_zero(seed, structure, rows, delta, scale):
    # By autograd. Far-off features make the first Newton step overshoot: it must be damped.
    posterior = toy_posterior(structure, seed, delta=delta)
    features = scale * toy_features(rows, seed + 1)
    labels = torch.from_numpy(np.random.default_rng(seed).integers(0, CLASSES, rows))
    mean = updated(posterior, features, labels).mean.flatten().requires_grad_()
    loss = loss_given(posterior, features, labels)
    (gradient,) = torch.autograd.grad(loss(mean), mean)
    hessian = torch.autograd.functional.hessian(loss, mean.detach())
    left = torch.linalg.solve(hessian, gradient)  # how far the mode still is
    assert float((left @ hessian @ left).sqrt()) < 1e-6


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_moved_mean_is_what_scipy_finds(structure):
    posterior = toy_posterior(structure)
    features, labels = toy_features(12, 5), torch.arange(12) % CLASSES
    loss = loss_given(posterior, features, labels)

    def with_gradient(flat: np.ndarray):
        point = torch.from_numpy(flat).requires_grad_()
        value = loss(point)
        return value.item(), torch.autograd.grad(value, point)[0].numpy()

    found = optimize.minimize(with_gradient, posterior.mean.flatten().numpy(), jac=True, tol=1e-10)
    mean = updated(posterior, features, labels).mean.flatten().numpy()
    np.testing.assert_allclose(mean, found.x, atol=1e-5)


def test_the_labels_decide_where_the_mean_goes():
    # The curvature is the same for any labels: a posterior that kept its mean would be, too.
    posterior = toy_posterior("full")
    features = toy_features(5, 3)
    moved = {}
    for label in range(CLASSES):
        labels = torch.full((5,), label)
        moved[label] = updated(posterior, features, labels)
        before, after = (
            F.cross_entropy(with_one(features) @ mean.T, labels)
            for mean in (posterior.mean, moved[label].mean)
        )
        assert after < before
    assert (moved[0].mean - moved[1].mean).abs().max() > 0.1


@pytest.mark.parametrize("label", [0, 1])
def test_the_mean_moves_as_the_exact_posterior_does(label):
    # Two classes, one feature, no bias; by quadrature over both weights, nothing Gaussian
    # but what D says. The mode is not the mean: same way, and not far from it.
    mean = torch.tensor([[0.3], [-0.2]], dtype=torch.float64)
    posterior = fit([toy_features(30, width=1)], mean, "full", DELTA)
    features, labels = torch.tensor([[1.0], [0.5]]).double(), torch.tensor([label, label])
    axis = torch.linspace(-6, 6, 401, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)  # (G, 2)
    change = grid - mean.flatten()
    log_probs = (features @ grid[:, None, :]).log_softmax(2)[:, :, label].sum(1)
    log_mass = log_probs - (change @ dense(posterior) * change).sum(1) / 2
    exact = log_mass.softmax(0) @ grid - mean.flatten()
    ours = (updated(posterior, features, labels).mean - mean).flatten()
    assert torch.equal(ours.sign(), exact.sign())
    torch.testing.assert_close(ours, exact, rtol=0.1, atol=0)


@pytest.mark.parametrize("structure", ["full", "diag"])
def test_the_precision_grows_by_the_curvature_of_f_at_the_new_mean(structure):
    posterior = toy_posterior(structure)
    features, labels = toy_features(7, 2), torch.arange(7) % CLASSES
    moved = updated(posterior, features, labels)
    grown = dense(moved) - dense(posterior)

    def loss(flat: torch.Tensor) -> torch.Tensor:
        logits = with_one(features) @ flat.view_as(moved.mean).T
        return F.cross_entropy(logits, labels, reduction="sum")

    hessian = torch.autograd.functional.hessian(loss, moved.mean.flatten())
    torch.testing.assert_close(grown, hessian if structure == "full" else hessian.diag().diag())


def test_the_factors_of_a_product_grow_as_if_f_had_been_among_the_data():
    # The mean of f f^T is over D and F together, and the prior stays what it was.
    posterior = toy_posterior("kron")
    more = toy_features(7, 2)
    moved = updated(posterior, more, torch.arange(7) % CLASSES)
    rows = with_one(torch.cat([toy_features(60), more]))
    inputs = rows.T @ rows / 67
    inputs[-1, :-1] = inputs[:-1, -1] = 0
    torch.testing.assert_close(moved.curvature.inputs, inputs)
    probs = (with_one(more) @ moved.mean.T).softmax(1)
    grown = torch.diag(probs.sum(0)) - probs.T @ probs
    torch.testing.assert_close(moved.curvature.outputs - posterior.curvature.outputs, grown)
    assert moved.prior_precision == DELTA


@pytest.mark.parametrize("structure", STRUCTURES)
def test_no_failures_change_nothing(structure):
    posterior = toy_posterior(structure)
    same = updated(posterior, torch.empty(0, WIDTH), torch.empty(0, dtype=torch.long))
    assert torch.equal(same.mean, posterior.mean)
    torch.testing.assert_close(dense(same), dense(posterior))


# -- draws --------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
def test_draws_have_the_mean_and_the_covariance(structure):
    posterior = toy_posterior(structure)
    noise = torch.from_numpy(np.random.default_rng(0).standard_normal((40_000, 15)))
    draws = draw(posterior, noise)
    assert draws.shape == (40_000, CLASSES, WIDTH + 1)
    covariance = torch.linalg.inv(dense(posterior))
    spread = covariance.diagonal().sqrt()
    flat = draws.flatten(1)
    assert ((flat.mean(0) - posterior.mean.flatten()) / spread).abs().max() < 5 / 200
    scaled = (torch.cov(flat.T) - covariance) / torch.outer(spread, spread)
    assert scaled.abs().max() < 5 * 2**0.5 / 200


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_same_noise_makes_the_difference_of_near_posteriors_small(structure):
    # Var[H' - H] of paired draws against independent ones: what r_hat's error is made of.
    posterior = toy_posterior(structure, rows=400)
    moved = updated(posterior, toy_features(4, 7), torch.arange(4) % CLASSES)
    rng = np.random.default_rng(0)
    noise, other = (torch.from_numpy(rng.standard_normal((2000, 15))) for _ in range(2))
    rows = with_one(toy_features(6, 9))

    def losses(which: LastLayer, noise: torch.Tensor) -> torch.Tensor:
        return -torch.einsum("bd,skd->sbk", rows, draw(which, noise)).log_softmax(2)[:, :, 0]

    base = losses(posterior, noise)
    paired, independent = ((losses(moved, n) - base).var(0) for n in (noise, other))
    assert (paired < 0.1 * independent).all()


# -- what is refused, and kept --------------------------------------------------------------------


def test_what_cannot_be_fitted_is_refused_in_one_line():
    mean, rows = torch.zeros(CLASSES, WIDTH + 1), toy_features(9)
    refused = [
        (([rows], mean, "low-rank", 1.0), "structure: must be one of full, kron, diag"),
        (([rows], mean, "full", -1.0), "prior_precision: must be finite and >= 0, got -1"),
        (([rows], mean, "full", float("nan")), "prior_precision: must be finite"),
        (([rows], mean, "full", 0.0), "prior_precision: must make the full"),
        (([], mean, "full", 1.0), "features: a posterior needs data"),
        (([rows * torch.nan], mean, "diag", 1.0), "features: must be finite"),
        (([rows], torch.zeros(100, 600), "kron", 1.0), "features must be"),
        (([toy_features(2, width=512)], torch.zeros(100, 513), "full", 1.0), "21.1 GB"),
    ]
    for arguments, message in refused:
        with pytest.raises(ValueError, match=message) as caught:
            fit(*arguments)
        assert "\n" not in str(caught.value)


def test_failures_must_fit_the_posterior():
    posterior = toy_posterior("diag")
    with pytest.raises(ValueError, match=r"features must be \(B, 4\), got \(2, 5\)"):
        updated(posterior, torch.zeros(2, 5), torch.zeros(2).long())
    with pytest.raises(ValueError, match=r"labels must be in 0\.\.2, got 0\.\.3"):
        updated(posterior, torch.zeros(2, 4), torch.tensor([0, 3]))
    with pytest.raises(ValueError, match="2 rows of features and 3 labels"):
        updated(posterior, torch.zeros(2, 4), torch.zeros(3).long())


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_posterior_survives_a_file(structure, tmp_path):
    posterior = toy_posterior(structure, delta=0.1)
    tensors, facts = posterior.to_tensors()
    save_file(tensors, tmp_path / "posterior.safetensors", metadata=facts)
    with safe_open(tmp_path / "posterior.safetensors", framework="pt") as file:
        read = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        again = LastLayer.from_tensors(read, file.metadata())
    noise = torch.from_numpy(np.random.default_rng(0).standard_normal((3, 15)))
    features, labels = toy_features(4, 2), torch.arange(4) % CLASSES
    assert torch.equal(draw(posterior, noise), draw(again, noise))
    moved, moved_again = (updated(one, features, labels) for one in (posterior, again))
    assert torch.equal(draw(moved, noise), draw(moved_again, noise))


# -- the split of a network -----------------------------------------------------------------------


class Ending(nn.Module):
    """A network that ends in a way of its own."""

    def __init__(self, end) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.last = nn.Linear(6, CLASSES)
        self.end = end

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.end(self, inputs)


def images(rows: int = 5, channels: int = 1) -> torch.Tensor:
    rng = np.random.default_rng(0)
    return torch.from_numpy(rng.standard_normal((rows, channels, 8, 8), dtype=np.float32))


def networks():
    torch.manual_seed(0)
    yield mlp((1, 8, 8), CLASSES, hidden=[7]), 7
    yield timm((1, 8, 8), CLASSES, architecture="resnet10t"), 512
    yield nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES, bias=False)), 64


def test_features_and_logits_are_those_of_the_network():
    for network, width in networks():
        head = split_head(network)
        features, logits = head(images())
        assert features.shape == (5, width)
        torch.testing.assert_close(logits, network.eval()(images()))
        rows = features.double()
        rows = with_one(rows) if head.mean.shape[1] == width + 1 else rows
        torch.testing.assert_close((rows @ head.mean.T).float(), logits)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_prepared_network_runs_as_the_engine_runs_it(precision):
    # A compiled one, too: it is run plain, and a second time.
    engine = Engine(torch.device("cpu"), 1, precision, channels_last=True, compile=True)
    network, width = next(networks())
    prepared = engine.prepare(network)
    head = split_head(prepared)
    head(images(3))
    features, logits = head(images())
    assert features.dtype == logits.dtype == torch.float32
    assert features.shape == (5, width)
    with torch.inference_mode():
        plain = Engine(torch.device("cpu"), 1, precision, channels_last=True).prepare(network)
        assert torch.equal(logits, plain.eval()(images()))


def test_the_users_network_is_left_as_it_was():
    network = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES)).train()
    before = copy.deepcopy(network.state_dict())
    head = split_head(network)
    head(torch.ones(4, 6))
    assert network.training and all(p.requires_grad for p in network.parameters())
    assert not network[2]._forward_hooks and not head.layer._forward_hooks
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())
    nn.init.zeros_(network[2].weight)
    assert head.mean.any(), "the copy must not follow the network as it trains on"


def test_a_layer_called_by_keyword_is_found():
    head = split_head(Ending(lambda net, inputs: net.last(input=net.first(inputs))))
    assert head(torch.ones(2, 6))[0].shape == (2, 6)


@pytest.mark.parametrize(
    "end",
    [
        lambda net, inputs: net.last(net.first(inputs)).softmax(1),
        lambda net, inputs: net.first(inputs),  # the last one is not used
        lambda net, inputs: net.last(inputs) + net.last(net.first(inputs)),
        lambda net, inputs: (net.last(inputs), net.last(net.first(inputs)))[1],
        lambda net, inputs: net.last(inputs[:, None, :]),
    ],
    ids=["softmax", "unused", "sum", "twice", "tokens"],
)
def test_a_network_that_does_not_end_with_the_layer_is_refused(end):
    with pytest.raises(UserError, match=r"^model: its output must be that of its last nn.Linear"):
        split_head(Ending(end))(torch.ones(2, 6))


def test_a_network_without_a_linear_layer_is_refused():
    with pytest.raises(UserError, match=r"model: a last-layer posterior needs an nn\.Linear"):
        split_head(nn.Sequential(nn.Conv2d(1, 3, 8), nn.Flatten()))
