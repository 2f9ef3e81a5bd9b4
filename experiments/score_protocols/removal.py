"""Protocols 2 and 3, removal curves: retrain without the most, or the least, suspicious rows.

Every network is trained for the same number of optimiser steps, however few samples are
left, from the same initial weights. A good score gains when its most suspicious go, and
loses when its least suspicious go.
"""

import numpy as np
import torch

from score_protocols.cases import Case, Setting, make_case
from score_protocols.networks import accuracy, train
from score_protocols.scores import fit, sample_columns

NOISE = 0.1
FRACTIONS = (0.1, 0.3, 0.5)
LEFT_OUT = {"r̂ natural gradient", "r̂ Laplace", "out-of-fold loss", "hold-out loss"}  # for time


def run(setting: Setting, seed: int) -> dict:
    """Return test accuracy with nothing removed, and by score, end and fraction removed."""
    case = make_case(setting, seed, NOISE)
    columns = {
        name: column for name, column in sample_columns(fit(case)).items() if name not in LEFT_OUT
    }
    return {
        "nothing removed": accuracy_of(case, np.arange(len(case.labels))),
        "flipped removed": accuracy_of(case, np.flatnonzero(~case.flipped.numpy())),
        "curves": {name: curves(case, column) for name, column in columns.items()},
    }


def curves(case: Case, scores: np.ndarray) -> dict[str, list[float]]:
    # Ties are broken by position, which says nothing about a sample: splits are shuffled.
    suspicious_first = np.argsort(-scores, kind="stable")
    ends = {"most": suspicious_first, "least": suspicious_first[::-1]}
    return {
        end: [accuracy_of(case, order[round(part * len(order)) :]) for part in FRACTIONS]
        for end, order in ends.items()
    }


def accuracy_of(case: Case, kept: np.ndarray) -> float:
    rows = torch.from_numpy(np.sort(kept))
    network = train(case, (case.inputs[rows], case.labels[rows]), stream="retrained")
    return accuracy(network, case.test)
