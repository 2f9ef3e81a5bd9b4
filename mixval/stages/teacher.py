"""The networks that stand for p(theta | D, F)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
from torch import nn

from mixval import posteriors
from mixval.fingerprints import fingerprint
from mixval.metrics import accuracy_and_nll, predict
from mixval.mixing import assign_folds
from mixval.stages.cell import Cell
from mixval.stages.network import Network, learn, load_external
from mixval.store import Artifact, Store
from mixval.training_job import Cost, Job
from mixval.types import FailureSet, Ints, Pair, Posterior


@dataclass(frozen=True)
class TeacherSet:
    """One teacher, several of equal weight, or one for each fold."""

    networks: Sequence[Network]
    folds: Ints | None  # (N,) of the train samples

    @cached_property
    def posterior(self) -> Posterior:
        models = [network.model for network in self.networks]
        return posteriors.ensemble(models) if self.folds is None else posteriors.out_of_fold(models)

    @property
    def passes(self) -> int:
        """Networks that a scored row passes through."""
        return len(self.networks) if self.folds is None else 1

    @property
    def leaks(self) -> bool:
        return any(network.leaks for network in self.networks)

    @property
    def cost(self) -> Cost:
        return sum((network.cost for network in self.networks), Cost())

    @property
    def fingerprint(self) -> str:
        return fingerprint([network.fingerprint for network in self.networks])

    def against(self, model: nn.Module, fingerprint: str) -> Pair:
        """Return the pair that scores mixes: the teacher beside a network that stands for D."""
        base = posteriors.point([model])
        return Pair(base, self.posterior, fingerprint, self.fingerprint, self.folds, self.leaks)

    def dev_accuracy(self, cell: Cell) -> float:
        """Return the accuracy on val_dev, on average over networks."""
        rows = cell.rows(cell.splits.val_dev)
        every = [predict(network.model, rows) for network in self.networks]
        return float(np.mean([accuracy_and_nll(p, rows.part.labels)[0] for p in every]))


def teacher(cell: Cell, name: str, failures: FailureSet | None, store: Store) -> TeacherSet:
    """Return the teacher `name`: trained, reused, or taken from the file it names."""
    settings = cell.recipe.teachers[name]
    if settings.weights is not None:
        return TeacherSet([load_external(cell, f"teachers.{name}", settings)], None)
    folds = None
    if settings.folds > 1:
        folds = assign_folds(cell.seed, len(cell.splits.train), settings.folds)
    networks = [
        learn(
            cell,
            settings,
            ("teachers", name, *place),
            store,
            stream="/".join(("teacher", *place)),
            failures=failures,
            extra={} if folds is None else {"without fold": number},
            make_job=partial(_without, folds, number),
        )
        for number, place in enumerate(settings.places)
    ]
    return TeacherSet(networks, folds)


def _without(folds: Ints | None, fold: int, job: Job, artifact: Artifact) -> Job:
    """Take the fold's train samples out; what was joined to train stays."""
    if folds is None:
        return job
    stays = np.ones(len(job.part), dtype=bool)
    stays[: len(folds)] = folds != fold
    return replace(job, part=job.part.take(np.flatnonzero(stays)))
