"""r_hat (and what it was made of) -> a weight in [0, 1] for each mix of the global batch.

r_hat > 0: fitting the failures conflicts with the mix. Weight 0 excludes it.
"""

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from mixval.bounds import Count, InnerFraction, Positive
from mixval.types import MixScores

__all__ = [
    "all",
    "confident",
    "high_fraction",
    "low_fraction",
    "negative",
    "positive",
    "soft",
    "top_k",
    "yoked",
]


def all(scores: MixScores) -> Tensor:  # noqa: A001 - the name users write in recipes
    """Keep every mix: the guided objective with nothing excluded."""
    return torch.ones_like(scores.r_hat)


def negative(scores: MixScores) -> Tensor:
    """Keep r_hat <= 0: the mixes that do not conflict with the failures."""
    return (scores.r_hat <= 0).to(scores.r_hat.dtype)


def positive(scores: MixScores) -> Tensor:
    """Keep r_hat > 0: the opposite filter, as a control."""
    return (scores.r_hat > 0).to(scores.r_hat.dtype)


def confident(scores: MixScores, *, level: InnerFraction = 0.9) -> Tensor:
    """Keep the mixes of which P(mean r_hat <= 0) is at least `level`, over the teacher's draws.

    The one-sided t interval of r_hat lies below 0: r_hat + t se <= 0.
    """
    if scores.draws < 2 or scores.std_error is None:
        raise ValueError(
            f"confident needs a teacher of at least 2 draws (members), got {scores.draws}"
        )
    quantile = float(stats.t.ppf(level, scores.draws - 1))
    return (scores.r_hat + quantile * scores.std_error <= 0).to(scores.r_hat.dtype)


def low_fraction(scores: MixScores, *, fraction: InnerFraction = 0.5) -> Tensor:
    """Keep that fraction of the batch with the lowest r_hat."""
    return _lowest(scores.r_hat, round(fraction * len(scores.r_hat)))


def high_fraction(scores: MixScores, *, fraction: InnerFraction = 0.5) -> Tensor:
    """Keep that fraction of the batch with the highest r_hat."""
    return _lowest(-scores.r_hat, round(fraction * len(scores.r_hat)))


def top_k(scores: MixScores, *, k: Count) -> Tensor:
    """Keep the k mixes of the batch with the largest reducible loss -r_hat (RHO-LOSS)."""
    return _lowest(scores.r_hat, k)


def soft(scores: MixScores, *, tau: Positive = 0.1) -> Tensor:
    """Weigh each mix by sigmoid(-r_hat / tau): `negative` with a soft edge."""
    return torch.sigmoid(-scores.r_hat / tau)


def yoked(scores: MixScores, *, of: str, within_lam_deciles: bool = False) -> Tensor:
    """Replay the weights that the arm `of` gave in this step, shuffled over the mixes.

    As many mixes are kept as `of` kept, chosen at random: what is left of an effect then
    is not due to how many were kept. With `within_lam_deciles` they are shuffled among
    mixes of like lambda only, which exposes a filter that merely selects lambda.
    """
    assert scores.replayed is not None, f"no record of {of!r} to replay"
    shuffled = scores.replayed.clone()
    for rows in _lam_deciles(scores.lam) if within_lam_deciles else [np.arange(len(shuffled))]:
        shuffled[rows] = scores.replayed[scores.rng.permutation(rows)]
    return shuffled


def _lowest(values: Tensor, count: int) -> Tensor:
    weights = torch.zeros_like(values)
    weights[values.argsort(stable=True)[:count]] = 1.0
    return weights


def _lam_deciles(lam: Tensor) -> list[np.ndarray]:
    """Return the rows of the batch in ten groups of like lambda, equal in size to within one."""
    return np.array_split(lam.cpu().numpy().argsort(kind="stable"), 10)
