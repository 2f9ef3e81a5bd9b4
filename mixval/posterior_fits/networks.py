"""Several networks on each side, or one under several masks."""

import copy
import math
from typing import Literal

import torch

from mixval.bounds import Count, Positive
from mixval.errors import UserError
from mixval.fitting import Known, Pool, State, states, walk
from mixval.posterior_fits.updated import fine_tuned
from mixval.posteriors import Fitted, dropout


def deep_ensemble(known: Known, *, members: Count = 5) -> Fitted:
    """Networks trained from scratch on D and on D with F, in pairs of equal initial weights."""
    pools: tuple[Pool, Pool] = ("train", "train+failures")
    base, updated = (states([known.learn(pool, k) for k in range(members)]) for pool in pools)
    return Fitted("networks", base, updated, draws=members)


def snapshot(
    known: Known, *, cycles: Count = 5, cycle_epochs: Count = 5, lr: Positive = 0.05
) -> Fitted:
    r"""Train on, on D and on D with F, in cosine cycles; a draw is where a cycle ends.

    $$ \eta(t) = \tfrac{\eta_0}{2} \bigl( \cos(\pi\, (t \bmod T) / T) + 1 \bigr) $$

    After Huang et al. 2017, with the trained network as the start of the first cycle.
    """

    def rate(done: float) -> float:
        return lr / 2 * (math.cos(math.pi * (done % cycle_epochs) / cycle_epochs) + 1)

    def minima(pool: Pool) -> State:
        passed = walk(known, pool, epochs=cycles * cycle_epochs, lr=rate)
        ends = [copy.deepcopy(at) for n, at in enumerate(passed, 1) if n % cycle_epochs == 0]
        return states(ends)

    return Fitted("networks", minima("train"), minima("train+failures"), draws=cycles)


def mc_dropout(
    known: Known,
    *,
    draws: Count = 30,
    data: Literal["failures", "train+failures"] = "failures",
    lr: Positive = 0.01,
    epochs: Count = 10,
) -> Fitted:
    """The network, and the network fine-tuned on F or on D with F, under the same dropout masks."""
    first_row = known.failures[0][:1]
    probe = first_row.expand(8, *first_row.shape[1:])
    first, second = dropout(known.model, 2, known.seed)(probe)
    if draws > 1 and torch.equal(first, second):
        raise UserError(
            "model: mc_dropout needs a network with dropout, got one without; give it some, "
            "such as {name: mlp, dropout: 0.2} or {name: timm, drop_rate: 0.2}"
        )
    moved = fine_tuned(known, data, lr, epochs)
    return Fitted("dropout", states([known.model]), states([moved]), draws=draws)
