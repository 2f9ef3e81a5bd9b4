"""The only stage that reads the labels of the test split, unless a setting says otherwise."""

from dataclasses import asdict
from typing import Any

import torch

from mixval.metrics import accuracy_and_nll, calibration_error, predict
from mixval.stages.cell import Cell
from mixval.stages.network import Network
from mixval.store import Store
from mixval.training_job import Cost
from mixval.types import FailureSet


def evaluation(
    cell: Cell,
    name: str,
    network: Network,
    preparation: Cost,
    failures: FailureSet | None,
    store: Store,
) -> dict[str, Any]:
    """Return accuracy, NLL and ECE of the last epoch on test, and what the network cost."""
    test = cell.splits.test
    artifact = cell.artifact(
        store,
        "results",
        name,
        made_from={
            "network": network.fingerprint,
            "test": test.fingerprint,
            "hold-out failures": [] if failures is None else failures.holdout.tolist(),
        },
    )
    facts = cell.reuse(artifact)
    if facts is None:
        made = _measured(cell, name, network, preparation, failures)  # by all processes
        facts = cell.once(artifact, lambda: made)
    return facts


def _measured(
    cell: Cell, name: str, network: Network, preparation: Cost, failures: FailureSet | None
) -> dict[str, Any]:
    rows = cell.rows(cell.splits.test)
    log_probs = predict(network.model, rows, processes=cell.engine.processes)
    accuracy, nll = accuracy_and_nll(log_probs, rows.part.labels)
    facts = {
        "panel": cell.panel,
        "seed": cell.seed,
        "arm": name,
        "accuracy": accuracy,
        "nll": nll,
        "ece": calibration_error(log_probs, rows.part.labels),
        **_kept(network),
        "leaks_test_labels": network.leaks,
        "cost": asdict(network.cost),
        "preparation": asdict(preparation),
    }
    if failures is not None and len(failures.holdout):
        split = getattr(cell.splits, failures.split)
        held = cell.rows(split.with_ids(torch.from_numpy(failures.holdout)))
        seen = predict(network.model, held, processes=cell.engine.processes)
        facts["holdout_accuracy"] = accuracy_and_nll(seen, held.part.labels)[0]
    return facts


def _kept(network: Network) -> dict[str, float]:
    """Return the mean weight of the mixes and of the clean samples, over the epochs that filter."""
    if network.record is None:
        return {"kept": 1.0, "clean_kept": 1.0}
    return {"kept": network.record.mean("mixed"), "clean_kept": network.record.mean("clean")}
