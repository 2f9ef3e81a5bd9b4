"""Protocol 5, failure repair: find the causes C of failures F, take them out, look again.

Pairs of classes are taken for each other in the training labels (annotation noise). F are
the failures in the pool; a score names as many causes as labels are wrong, which every score
is told alike. Accuracy is that on F (which the scores saw), on failures in test (which
nobody saw) and on what was right in test before: 0, 0 and 1 before the repair.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from mixval import updates
from mixval.fisher import precision
from score_protocols.cases import Case, Setting, confused, make_case
from score_protocols.networks import accuracy, hits, train
from score_protocols.scores import (
    NATURAL_GRADIENT_RIDGE,
    Fitted,
    fine_tuned,
    fit,
    joined,
    sample_columns,
)

TREATED = ("r̂ EWC", "flipped")  # whose causes every treatment is tried on


def run(setting: Setting, seed: int) -> dict:
    """Return the repair by each score's causes, and by each treatment of a few."""
    case = confused(make_case(setting, seed, noise=0.0))
    fitted = fit(case)
    flipped = case.flipped.numpy()
    columns = {**sample_columns(fitted), "flipped": flipped.astype(float)}
    count = int(flipped.sum())
    causes = {name: np.argsort(-column, kind="stable")[:count] for name, column in columns.items()}
    found = {name: float(flipped[rows].mean()) for name, rows in causes.items()}
    repaired = {
        name: fine_tuned(case, fitted.base, _without(case, c)) for name, c in causes.items()
    }
    data = case.inputs, case.labels
    repaired["nothing removed"] = fine_tuned(case, fitted.base, data)
    repaired["F added to D"] = fine_tuned(case, fitted.base, joined(data, fitted.failures))
    return {
        "causes": count,
        "failures": len(fitted.failures[1]),
        "found": found,
        "fine-tuned": {name: _after(fitted, network) for name, network in repaired.items()},
        "treatments": {name: _treated(fitted, causes[name]) for name in TREATED},
    }


def _without(case: Case, causes: np.ndarray) -> tuple[Tensor, Tensor]:
    kept = torch.ones(len(case.labels), dtype=torch.bool)
    kept[torch.from_numpy(causes)] = False
    return case.inputs[kept], case.labels[kept]


def _after(fitted: Fitted, network: nn.Module) -> dict[str, float]:
    case = fitted.case
    before, now = hits(fitted.base, case.test), hits(network, case.test)
    return {
        "F": accuracy(network, fitted.failures),
        "failures in test": float(now[~before].mean()),
        "right before": float(now[before].mean()),
        "test": float(now.mean()),
    }


def _treated(fitted: Fitted, causes: np.ndarray) -> dict[str, dict[str, float] | None]:
    """Return what each way to remove C leads to; None where it diverged."""
    case, setting = fitted.case, fitted.case.setting
    rows = torch.from_numpy(causes)
    removed = case.inputs[rows], case.labels[rows]
    # With less the network is not held at all: at N x weight decay EWC-deletion diverges.
    ridge = NATURAL_GRADIENT_RIDGE * setting.precision
    held = precision(fitted.base, fitted.fisher, num_samples=setting.train, ridge=ridge)
    ways: dict[str, Callable[[], nn.Module]] = {
        "fine-tuned on D∖C": lambda: fine_tuned(case, fitted.base, _without(case, causes)),
        "trained again on D∖C": lambda: train(case, _without(case, causes), stream="base"),
        "Newton deletion": lambda: updates.newton_deletion(fitted.base, held, *removed),
        "EWC-deletion": lambda: updates.ewc_deletion(fitted.base, held, *removed),
    }
    return {name: _tried(fitted, way) for name, way in ways.items()}


def _tried(fitted: Fitted, way: Callable[[], nn.Module]) -> dict[str, float] | None:
    try:
        return _after(fitted, way())
    except FloatingPointError:  # nothing near the start holds the network
        return None
