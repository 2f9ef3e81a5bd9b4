"""What a ranking is worth. A score is oriented: the higher, the more suspicious."""

from collections.abc import Sequence

import numpy as np
from scipy import stats


def auroc(scores: np.ndarray, bad: np.ndarray) -> float:
    r"""Return P(a bad row scores higher than a good one), ties counting one half.

    $$ \frac{R - n_b (n_b + 1) / 2}{n_b n_g} $$

    with R the sum of the ranks of the n_b bad rows. Infinite scores are ranked like others.
    """
    num_bad, num_good = int(bad.sum()), int((~bad).sum())
    if not num_bad or not num_good:
        raise ValueError(f"AUROC needs bad and good rows, got {num_bad} and {num_good}")
    ranks = stats.rankdata(scores)
    return float((ranks[bad].sum() - num_bad * (num_bad + 1) / 2) / (num_bad * num_good))


def found_after(scores: np.ndarray, bad: np.ndarray, shares: Sequence[float]) -> list[float]:
    """Return the share of bad rows among the most suspicious `share` of all, for each share.

    Expected over the order of ties: a score that knows few levels gains nothing by luck.
    """
    _, group = np.unique(scores, return_inverse=True)
    chance = np.bincount(group, weights=bad) / np.bincount(group)  # of a row to be bad, by level
    found = np.cumsum(chance[np.sort(group)[::-1]]) / bad.sum()
    counts = [round(share * len(scores)) for share in shares]
    return [float(found[count - 1]) if count else 0.0 for count in counts]


def steps_to(curve: Sequence[tuple[int, float]], target: float) -> int | None:
    """Return the first evaluated step whose accuracy is at least `target`, None if never."""
    return next((step for step, accuracy in curve if accuracy >= target), None)
