"""Means, paired differences over seeds, and the one sentence they allow."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and the half-width of its t interval; NaN half-width for one seed."""

    mean: float
    half_width: float
    n: int

    @property
    def low(self) -> float:
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        return self.mean + self.half_width

    @property
    def sign(self) -> int:
        """+1 or -1 where the interval leaves zero out, else 0: nothing can be said.

        Nor where the spread is zero: equal differences of a few seeds do not estimate it.
        """
        spread = self.half_width > 1e-12 * max(1.0, abs(self.mean))  # more than rounding
        if not spread or self.low <= 0 <= self.high:
            return 0
        return 1 if self.mean > 0 else -1


def mean_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Return mean and t interval over seeds."""
    array = np.asarray(values, dtype=float)
    if len(array) < 2:
        return Interval(float(array.mean()), math.nan, len(array))
    reach = stats.t.ppf((1 + confidence) / 2, len(array) - 1)
    return Interval(float(array.mean()), float(reach * stats.sem(array)), len(array))


def paired_difference(arm: Mapping[int, float], control: Mapping[int, float]) -> Interval | None:
    """Return arm - control over the seeds that both have, or None if they share none.

    Paired, because both arms of a seed share data, initial weights, order and mixes.
    """
    seeds = sorted(arm.keys() & control.keys())
    if not seeds:
        return None
    return mean_interval([arm[seed] - control[seed] for seed in seeds])


def verdict(
    arm: str,
    control: Mapping[str, Interval],
    lam_control: Mapping[str, Interval],
    same_labels: Mapping[str, Interval],
    same_labels_arm: str = "",
) -> str:
    """Return one sentence: did filtering beat its yoked controls, and the labels used directly?

    Each argument holds paired differences, arm minus control, by metric; empty if not run.
    """
    if not control:
        return f"{arm}: no verdict, because its yoked control was not run."
    accuracy = control["accuracy"]
    if accuracy.n < 2:
        return f"{arm}: no verdict from one seed; run more (--seeds 0-9)."
    sentence = f"{arm}: {_finding(control)} ({_shown(control)} against its yoked control"
    if lam_control and lam_control["accuracy"].n > 1:
        sentence += f"; {_shown(lam_control)} against the one within λ-deciles"
        if accuracy.sign > 0 and lam_control["accuracy"].sign <= 0:
            sentence += ", so selecting by λ alone may explain it"
    elif accuracy.sign > 0:
        sentence += "; selecting by λ is not ruled out, no control within λ-deciles was run"
    sentence += f"; n = {accuracy.n})"
    if same_labels and same_labels["accuracy"].n > 1:
        finding = _labels_finding(same_labels)
        named = f" {same_labels_arm}" if same_labels_arm else ""
        sentence += f"; {finding}{named} ({_shown(same_labels)})"
    return sentence + "."


def _finding(differences: Mapping[str, Interval]) -> str:
    accuracy, nll = differences["accuracy"].sign, differences["nll"].sign
    found = {1: "filtering helped", -1: "filtering hurt", 0: "no effect of filtering shown"}
    if nll == 0 or accuracy == -nll:
        return found[accuracy]
    return f"{found[accuracy]} in accuracy, NLL {'worse' if nll > 0 else 'better'}"


def _labels_finding(differences: Mapping[str, Interval]) -> str:
    accuracy, nll = differences["accuracy"].sign, differences["nll"].sign
    found = {
        1: "it beat using the labels its teacher saw directly",
        -1: "using the labels its teacher saw directly did better",
        0: "no difference shown to using the labels its teacher saw directly",
    }[accuracy]
    if nll == 0 or accuracy == -nll:
        return f"{found}:"
    return f"{found} in accuracy, its NLL is {'worse' if nll > 0 else 'better'}:"


def _shown(differences: Mapping[str, Interval]) -> str:
    accuracy, nll = differences["accuracy"], differences["nll"]
    return (
        f"accuracy {100 * accuracy.mean:+.2f} ± {100 * accuracy.half_width:.2f} points, "
        f"NLL {nll.mean:+.3f} ± {nll.half_width:.3f}"
    )
