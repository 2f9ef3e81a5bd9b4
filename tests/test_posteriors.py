"""Draws of the last layer against whole networks, and E[H] against quadrature."""

import numpy as np
import pytest
import torch
from torch import nn

from mixval.engine import Engine
from mixval.last_layer import draw, fit, split_head
from mixval.losses import cross_entropy
from mixval.models import mlp
from mixval.posteriors import ensemble, last_layer, point
from mixval.rhat import draw_losses

CLASSES = 3


def toy_images(rows: int) -> torch.Tensor:
    rng = np.random.default_rng(rows)
    return torch.from_numpy(rng.standard_normal((rows, 1, 4, 4), dtype=np.float32))


def toy_network(*, bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, CLASSES, bias=bias)
    )


@pytest.mark.parametrize("bias", [True, False])
def test_every_draw_is_a_network_with_another_last_layer(bias):
    network = toy_network(bias=bias)
    noise = torch.from_numpy(np.random.default_rng(0).standard_normal((5, CLASSES, 6 + bias)))
    networks = []
    for weights in noise.float():
        networks.append(toy_network(bias=bias).requires_grad_(False))
        networks[-1][3].weight.copy_(weights[:, :6])
        if bias:
            networks[-1][3].bias.copy_(weights[:, 6])
    ours, theirs = last_layer(network, noise)(toy_images(7)), ensemble(networks)(toy_images(7))
    assert ours.shape == (5, 7, CLASSES)
    torch.testing.assert_close(ours, theirs)


def test_all_draws_share_one_pass_through_the_backbone():
    network, calls = toy_network(), []
    network[1].register_forward_hook(lambda *_: calls.append(1))  # is copied with the network
    posterior = last_layer(network, torch.zeros(30, CLASSES, 7))
    posterior(toy_images(4))
    assert len(calls) == 1


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_mean_as_the_only_draw_is_the_point(precision):
    engine = Engine(torch.device("cpu"), 1, precision)
    prepared = engine.prepare(mlp((1, 4, 4), CLASSES, hidden=[6]))
    posterior = last_layer(prepared, split_head(prepared).mean[None])
    ours = posterior(toy_images(7), torch.zeros(7, dtype=torch.long))
    tolerance = {"fp32": 1e-6, "bf16": 2e-2}[precision]  # the heads are float32 in any case
    torch.testing.assert_close(ours, point([prepared])(toy_images(7)), atol=tolerance, rtol=0)


def test_draws_of_another_layer_are_refused():
    for shape in [(5, CLASSES, 6), (5, CLASSES + 1, 7), (5, CLASSES, 8)]:
        with pytest.raises(ValueError, match="are not of the layer Linear"):
            last_layer(toy_network(), torch.zeros(shape))


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_the_mean_of_h_is_its_integral_over_the_logits(structure):
    # With two classes H depends on the difference of the logits, which is normal with
    # variance c^T Sigma c, c = (f, -f): Gauss-Hermite against draws through the whole path.
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 3), nn.Tanh(), nn.Linear(3, 2))
    head = split_head(network)
    fitted = fit([head(toy_images(20))[0]], head.mean, structure, 1.0)
    noise = torch.from_numpy(np.random.default_rng(0).standard_normal((20_000, 8)))
    targets = torch.tensor([[0.3, 0.7], [1.0, 0.0], [0.5, 0.5]])
    log_probs = last_layer(network, draw(fitted, noise))(toy_images(3))
    sampled = draw_losses(log_probs, targets, cross_entropy).double()

    features = torch.cat([head(toy_images(3))[0], torch.ones(3, 1)], dim=1).double()
    contrast = torch.cat([features, -features], dim=1).view(3, 2, 4)
    variance = (contrast * fitted.factor.solve(contrast)).sum((1, 2))
    centre = (contrast * fitted.mean).sum((1, 2))
    nodes, weights = map(torch.from_numpy, np.polynomial.hermite_e.hermegauss(60))
    logits = centre[:, None] + variance.sqrt()[:, None] * nodes  # (B, nodes)
    losses = torch.nn.functional.softplus(logits) - targets[:, :1].double() * logits
    exact = losses @ weights / weights.sum()
    errors = sampled.std(0) / 20_000**0.5
    assert ((sampled.mean(0) - exact).abs() < 4 * errors).all()
    assert (errors < 0.02 * exact).all()
