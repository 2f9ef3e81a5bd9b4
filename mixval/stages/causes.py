"""C, the train samples that stand in the way of the failures F."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from mixval.errors import UserError
from mixval.feeding import feed_labelled
from mixval.fisher import Parameters, diagonal_fisher, precision
from mixval.metrics import predict
from mixval.mixing import RowMaker
from mixval.rhat import score
from mixval.seeding import generator
from mixval.stages.cell import Cell
from mixval.stages.network import Network
from mixval.types import Column, FailureSet, Ints
from mixval.updates import ewc, loss_slopes, natural_direction, natural_gradient


@dataclass(frozen=True)
class Causes:
    """The train samples with the largest positive scores, largest first."""

    ids: Ints  # (C,)
    scores: Column  # (C,)


@dataclass(frozen=True)
class Patient:
    """A base network and its failures, whose causes are looked for in train."""

    cell: Cell
    base: Network
    failures: FailureSet

    @property
    def model(self) -> nn.Module:
        return self.base.model

    @cached_property
    def fisher(self) -> Parameters:
        return diagonal_fisher(self.model, feed_labelled(self.cell.rows(self.cell.splits.train)))

    def held(self, ridge: float) -> Parameters:
        """Return the precision that all of train and the ridge give to each parameter."""
        samples = len(self.cell.splits.train)
        return precision(self.model, self.fisher, num_samples=samples, ridge=ridge)


def choose_causes(ids: Ints, scores: Column, limit: int) -> Causes:
    """Return the at most `limit` samples of largest score, of those above 0.

    r_hat adds up over samples, so no other set of that size has a larger r_hat.
    """
    order = np.argsort(-scores, kind="stable")[:limit]
    order = order[scores[order] > 0]
    return Causes(ids[order], scores[order])


def num_causes(cell: Cell) -> int:
    """Return how many samples C may have at most."""
    asked, samples = cell.recipe.repair.causes, len(cell.splits.train)
    if isinstance(asked, float):
        return max(1, round(asked * samples))
    if asked >= samples:
        raise UserError(f"repair.causes: must be below the {samples} train samples, got {asked}")
    return asked


def scores_of(patient: Patient, selector: str) -> Column:
    r"""Return the score of every train sample z, (N,): as a rule

    $$ \hat r(z) = H(z; \theta_{+F}) - H(z; \hat\theta), \quad H(z; \theta) = -\log p(y|x,\theta) $$

    with $\theta_{+F}$ the base network updated by the query failures F: by `ewc`, by a step
    of `natural_gradient`, or to first order in that step (`linear`). The controls: `loss` is
    $H(z; \hat\theta)$, which knows nothing of F, and `random` knows nothing at all.
    """
    cell, model, failures = patient.cell, patient.model, patient.failures
    train = cell.rows(cell.splits.train)
    if selector == "random":
        return generator(cell.seed, "repair/random").random(len(train.part))
    if selector == "loss":
        return _losses(model, train).cpu().numpy()
    query = cell.gathered(getattr(cell.splits, failures.split), failures.query)
    held = patient.held(cell.recipe.repair.ridge)
    if selector == "linear":
        direction = natural_direction(model, held, *query)
        return _slopes(model, direction, train).cpu().numpy()
    update = ewc if selector == "ewc" else natural_gradient
    updated = update(model, held, *query)
    return score(_losses(updated, train)[None], _losses(model, train)[None]).r_hat.cpu().numpy()


def _losses(model: nn.Module, maker: RowMaker) -> Tensor:
    """Return H of every sample at its label, (N,)."""
    return -predict(model, maker).gather(1, maker.part.labels[:, None]).squeeze(1)


def _slopes(model: nn.Module, direction: Parameters, maker: RowMaker) -> Tensor:
    slopes = []
    for inputs, labels in feed_labelled(maker):
        targets = nn.functional.one_hot(labels, maker.num_classes).to(inputs.dtype)
        slopes.append(loss_slopes(model, direction, (inputs, targets)))
    return torch.cat(slopes)
