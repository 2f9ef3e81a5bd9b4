"""A normal distribution over weights on each side, drawn with the same noise."""

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector
from torch.optim.swa_utils import update_bn

from mixval import last_layer
from mixval.bounds import Count, Positive
from mixval.engine import plain
from mixval.fisher import trainable
from mixval.fitting import (
    Known,
    Pool,
    State,
    states,
    walk,
    with_parameters,
)
from mixval.posterior_fits.whole_laplace import whole_laplace
from mixval.posteriors import Fitted, with_states
from mixval.seeding import generators_kept, seed_torch, torch_seed


def laplace(
    known: Known,
    *,
    weights: Literal["last_layer", "all"] = "last_layer",
    structure: Literal["full", "kron", "diag"] = "kron",
    prior_precision: Positive = 1.0,
    draws: Count = 30,
) -> Fitted:
    """Gaussians at the modes given D and given D with F; `all` weights needs mixval[laplace].

    Of the last layer: `last_layer.py`, our own softmax GGN and the exact mode given F. Of
    all weights: laplace-torch's curvature, and one Gauss-Newton step towards F.
    """
    if weights == "all":
        return whole_laplace(known, structure, prior_precision, draws)
    head = last_layer.split_head(known.model)
    features = (head(inputs)[0] for inputs, _ in known.rows())
    base = last_layer.fit(features, head.mean, structure, prior_precision)
    failing, labels = known.failures
    updated = last_layer.updated(base, head(failing)[0], labels)
    noise = known.noise(draws, base.mean.numel())
    drawn = [{"head": last_layer.draw(side, noise).float()} for side in (base, updated)]
    return Fitted("heads", drawn[0], drawn[1], draws=draws)


def swag(
    known: Known,
    *,
    epochs: Count = 20,
    lr: Positive = 0.01,
    rank: Count = 20,
    draws: Count = 30,
) -> Fitted:
    r"""Train on at a constant rate, on D and on D with F; a Gaussian of where the weights went.

    $$ \theta = \bar\theta + \tfrac{1}{\sqrt 2} \Bigl( \sigma \odot z_1
       + \tfrac{1}{\sqrt{K-1}} \hat D z_2 \Bigr) $$

    with the mean and the standard deviation of the weights after each epoch and their last
    K deviations from the running mean (Maddox et al. 2019). BatchNorm statistics are those
    of each draw, from one pass over D.
    """
    rank = min(rank, epochs)
    size = sum(value.numel() for value in trainable(plain(known.model)).values())
    noise = known.noise(draws, size + rank)

    def drawn(pool: Pool) -> State:
        mean, spread, deviations = moments(known, pool, epochs, lr, rank)
        low_rank = noise[:, size:] @ deviations / math.sqrt(max(rank - 1, 1))
        every = mean + math.sqrt(0.5) * (noise[:, :size] * spread + low_rank)  # (S, P)
        return _refreshed(known, with_parameters(known.model, every))

    return Fitted("networks", drawn("train"), drawn("train+failures"), draws=draws)


def moments(
    known: Known, pool: Pool, epochs: int, lr: float, rank: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean (P,), standard deviation (P,) and the last deviations (rank, P) of a walk."""
    total, squares, deviations = torch.zeros(()), torch.zeros(()), list[Tensor]()
    for count, network in enumerate(walk(known, pool, epochs=epochs, lr=lambda done: lr), 1):
        moving = trainable(plain(network)).values()
        weights = parameters_to_vector(moving).double().cpu()
        total, squares = total + weights, squares + weights.square()
        deviations = [*deviations, weights - total / count][-rank:]
    mean = total / epochs
    spread = (squares / epochs - mean.square()).clamp_min(0).sqrt()
    return mean, spread, torch.stack(deviations)


def _refreshed(known: Known, stacked: State) -> State:
    """Return the states with the BatchNorm statistics that each has on D."""
    if not any(name.endswith("running_mean") for name in stacked):
        return stacked
    networks = with_states(known.model, stacked)
    device = next(known.model.parameters()).device
    with generators_kept(device):
        for network in networks:
            seed_torch(torch_seed(known.seed, "posterior/statistics"), device)  # of dropout
            update_bn((inputs for inputs, _ in known.rows()), network)
    return states(networks)
