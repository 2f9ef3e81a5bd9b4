"""Protocol 1, mislabel detection: does the score find labels that were flipped on purpose?

Of samples, and of mixes: a mix is bad if a parent's label was flipped, however small its
share. A second count calls it bad only where the flipped parents' share is at least a half.
"""

import numpy as np
import torch

from mixval import draw_plan, mix
from mixval.types import MixPlan
from score_protocols.cases import Setting, make_case
from score_protocols.measures import auroc, found_after
from score_protocols.scores import Fitted, fit, row_scores, sample_columns

SHARES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0)


def run(setting: Setting, seed: int, noise: float, alpha: float) -> dict:
    """Return AUROC and what was found after inspecting each of SHARES, by score."""
    fitted = fit(make_case(setting, seed, noise, alpha))
    samples = sample_columns(fitted)
    flipped = fitted.case.flipped.numpy()
    plan = draw_plan(
        seed=seed, epoch=0, alpha=1.0, num_samples=len(flipped), derange=True, stream="rows"
    )
    mixes = mix_columns(fitted, plan, samples)
    share = plan.lam * flipped[plan.first] + (1 - plan.lam) * flipped[plan.second]
    return {
        "failures": len(fitted.failures[1]),
        "samples": _measured(samples, flipped),
        "mixes": _measured(mixes, flipped[plan.first] | flipped[plan.second]),
        "mixes, flipped share ≥ ½": _measured(mixes, share >= 0.5),
    }


def mix_columns(
    fitted: Fitted, plan: MixPlan, samples: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return all scores of the mixes of a plan, and the worse of their parents' for some."""
    case = fitted.case
    first, second = torch.from_numpy(plan.first), torch.from_numpy(plan.second)
    lam = torch.from_numpy(plan.lam).float()
    inputs = mix(case.inputs[first], case.inputs[second], lam)
    labels = case.targets(case.labels)
    # Out of fold: without the fold of the first parent, which leaves the other one seen.
    columns = row_scores(
        fitted, inputs, mix(labels[first], labels[second], lam), fitted.folds[first]
    )
    for name in ("r̂ teacher D+V", "r̂ EWC", "loss", "EL2N", "forgetting", "random"):
        worse = np.maximum(samples[name][plan.first], samples[name][plan.second])
        columns[f"worse parent's {name}"] = worse
    columns["random"] = columns.pop("worse parent's random")
    return columns


def _measured(columns: dict[str, np.ndarray], bad: np.ndarray) -> dict[str, dict]:
    return {
        name: {"auroc": auroc(column, bad), "found": found_after(column, bad, SHARES)}
        for name, column in columns.items()
    }
