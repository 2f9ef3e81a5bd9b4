"""Take the causes C of the failures F out of the base network, and see what that mends."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn

from mixval.errors import UserError
from mixval.feeding import feed_labelled
from mixval.metrics import predict
from mixval.seeding import generator
from mixval.stages.causes import (
    Causes,
    Patient,
    choose_causes,
    num_causes,
    scores_of,
)
from mixval.stages.cell import Cell
from mixval.stages.network import Network, learn
from mixval.store import Artifact, Store
from mixval.types import FailureSet, Ints
from mixval.updates import ewc_deletion, fine_tune, newton_deletion

log = logging.getLogger(__name__)
Accuracies = dict[str, float | None]  # by group of samples; None where there is none


def repair(cell: Cell, base: Network, failures: FailureSet, store: Store) -> None:
    """Find causes by each selector of the recipe, remove them in each way, and measure.

    Accuracy on the query failures, which chose C, on hold-out failures, on the rest of their
    split (what was right before, where F is what was misclassified) and on test.
    """
    if not len(failures.query):
        raise UserError(
            f"failures: {cell.panel}, seed {cell.seed} has no query failure on {failures.split} "
            "to find the causes of; give more data.val_f, or another failures.rule or holdout"
        )
    patient, limit = Patient(cell, base, failures), num_causes(cell)
    for selector in cell.recipe.repair.selectors:
        artifact = _artifact(patient, selector, store)
        if cell.reuse(artifact) is None:
            _repair(patient, selector, limit, artifact, store)


def _artifact(patient: Patient, selector: str, store: Store) -> Artifact:
    cell, failures = patient.cell, patient.failures
    made_from = {
        "settings": cell.recipe.repair.model_dump(mode="json", exclude={"selectors"}),
        "batch size": cell.recipe.training.batch_size,
        "base": patient.base.fingerprint,
        "query": failures.query.tolist(),
        "hold-out": failures.holdout.tolist(),
        "test": cell.splits.test.fingerprint,
    }
    return cell.artifact(store, "repair", selector, made_from=made_from)


def _repair(patient: Patient, selector: str, limit: int, artifact: Artifact, store: Store) -> None:
    cell = patient.cell

    def find() -> Causes:
        return choose_causes(cell.splits.train.ids.numpy(), scores_of(patient, selector), limit)

    causes = cell.engine.processes.from_main(find)
    again = None
    if "retrain" in cell.recipe.repair.removals:
        again = _retrained(cell, selector, causes, store)  # by all processes
    cell.once(artifact, lambda: _write(patient, causes, again, artifact))


def _write(
    patient: Patient, causes: Causes, again: Network | None, artifact: Artifact
) -> dict[str, Any]:
    cell = patient.cell
    corrupted = np.isin(causes.ids, cell.splits.corrupted.numpy())
    table = pa.table({"id": causes.ids, "score": causes.scores, "corrupted": corrupted})
    pq.write_table(table, artifact.path("causes.parquet"), write_page_checksum=True)
    groups = divided(cell, patient.failures)
    removals: dict[str, Accuracies | None] = {"none": _measured(patient, patient.model, groups)}
    for removal in cell.recipe.repair.removals:
        model = _removed(patient, removal, causes, again)
        removals[removal] = None if model is None else _measured(patient, model, groups)
    return {
        "causes": len(causes.ids),
        "causes corrupted": int(corrupted.sum()),
        "corrupted": len(cell.splits.corrupted),
        "train": len(cell.splits.train),
        "sizes": {name: len(ids) for name, ids in groups.items()},
        "removals": removals,
        "leaks_test_labels": patient.base.leaks or patient.failures.split == "test",
    }


def divided(cell: Cell, failures: FailureSet) -> dict[str, Ints]:
    """Return the ids of the failures' split in three: query, hold-out, and all others."""
    every = getattr(cell.splits, failures.split).ids.numpy()
    failing = np.concatenate([failures.query, failures.holdout])
    right = np.setdiff1d(every, failing)
    return {"query": failures.query, "holdout": failures.holdout, "right before": right}


def _measured(patient: Patient, model: nn.Module, groups: dict[str, Ints]) -> Accuracies:
    """Return the accuracy on each group and on test."""
    cell, split = patient.cell, patient.failures.split
    part = getattr(cell.splits, split)
    hits, test = (_hits(cell, model, name) for name in (split, "test"))
    found: Accuracies = {}
    for name, ids in groups.items():
        of_group = np.isin(part.ids.numpy(), ids)
        found[name] = float(hits[of_group].mean()) if len(ids) else None
    return {**found, "test": float(test.mean())}


def _hits(cell: Cell, model: nn.Module, split: str) -> np.ndarray[Any, Any]:
    rows = cell.rows(getattr(cell.splits, split))
    return (predict(model, rows).argmax(1) == rows.part.labels).double().cpu().numpy()


def _removed(
    patient: Patient, removal: str, causes: Causes, again: Network | None
) -> nn.Module | None:
    """Return the network without C; None where EWC-deletion finds nothing that holds it."""
    cell, model = patient.cell, patient.model
    if removal == "retrain":
        assert again is not None
        return again.model
    if removal == "fine_tune":
        settings = cell.recipe.repair
        batches = _batches_without(cell, causes)
        return fine_tune(model, batches, lr=settings.lr, epochs=settings.epochs)
    if not len(causes.ids):
        return model
    samples = cell.gathered(cell.splits.train, causes.ids)
    held = patient.held(cell.recipe.repair.deletion_ridge)
    if removal == "newton":
        return newton_deletion(model, held, *samples)
    try:
        return ewc_deletion(model, held, *samples)
    except FloatingPointError as error:
        log.warning("%s, seed %d: repair.deletion_ridge: %s", cell.panel, cell.seed, error)
        return None


def _remaining(cell: Cell, causes: Causes) -> Ints:
    """Return the positions in train of what is not in C."""
    return np.flatnonzero(~np.isin(cell.splits.train.ids.numpy(), causes.ids))


def _batches_without(cell: Cell, causes: Causes) -> Callable[[int], Any]:
    """Return what gives the batches of an epoch over the train samples without C."""
    rows = cell.rows(cell.splits.train.take(_remaining(cell, causes)))
    size = cell.recipe.training.batch_size

    def batches(epoch: int) -> Any:
        rng = generator(cell.seed, "repair/order", epoch)
        order: Tensor = torch.from_numpy(rng.permutation(len(rows.part)))
        return feed_labelled(rows, order, size)

    return batches


def _retrained(cell: Cell, selector: str, causes: Causes, store: Store) -> Network:
    """Return the base network as it would be had it never seen C."""
    left = cell.splits.train.take(_remaining(cell, causes))
    return learn(
        cell,
        cell.recipe.base,
        ("retrained", selector),
        store,
        stream="base",
        extra={"without": left.fingerprint},
        make_job=lambda job, artifact: replace(job, part=left),
    )
