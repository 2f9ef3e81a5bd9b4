"""Progress in [0, 1] -> alpha of the Beta(alpha, alpha) that lambda is drawn from; 0 = no mixing.

Large alpha mixes strongly (lambda near 1/2, hard samples), small alpha weakly (easy
ones). `easy` therefore falls and `hard` rises. Epoch e of E stands at progress
(e + 1/2) / E, so that hard at epoch e equals easy at epoch E - 1 - e.
"""

import math

from mixval.bounds import InnerFraction, NonNegative, Positive

__all__ = [
    "constant",
    "cosine",
    "easy",
    "easy_hard_easy",
    "exponential",
    "geometric",
    "hard",
    "linear",
    "points",
]


def constant(progress: float, *, value: NonNegative = 1.0) -> float:
    """Return the same alpha at every epoch."""
    return value


def linear(progress: float, *, start: NonNegative = 10.0, end: NonNegative = 0.0) -> float:
    """Return alpha on the straight line from start to end."""
    return start + (end - start) * progress


def cosine(progress: float, *, start: NonNegative = 10.0, end: NonNegative = 0.0) -> float:
    """Return alpha on a half cosine wave from start to end: flat at both ends."""
    return end + (start - end) * (1 + math.cos(math.pi * progress)) / 2


def geometric(progress: float, *, start: Positive = 10.0, end: Positive = 0.1) -> float:
    """Return alpha with a constant ratio from epoch to epoch; neither end can be 0."""
    return float(start * (end / start) ** progress)


def exponential(
    progress: float,
    *,
    start: NonNegative = 10.0,
    middle: NonNegative = 1.0,
    end: NonNegative = 0.0,
    at: InnerFraction = 0.5,
) -> float:
    r"""Return alpha on the exponential a + b c^t through (0, start), (at, middle), (1, end).

    $$ \alpha(t) = start + (end - start) \frac{c^t - 1}{c - 1} $$

    c is fixed by the middle: (c^at - 1) / (c - 1) = (middle - start) / (end - start).
    With at = 1/2 that is c = ((end - middle) / (middle - start))^2, for example 1/81 for
    10, 1, 0. A middle on the straight line is the limit c -> 1.
    """
    if start == end:
        if middle != start:
            raise ValueError(f"middle must equal start and end when they are equal, got {middle}")
        return start
    share = (middle - start) / (end - start)
    if not 0 < share < 1:
        raise ValueError(f"middle must lie strictly between start and end, got {middle}")
    return start + (end - start) * _bend(progress, _log_base(share, at))


def easy(
    progress: float,
    *,
    alpha_max: Positive = 10.0,
    alpha_mid: Positive = 1.0,
    at: InnerFraction = 0.5,
) -> float:
    """Return alpha falling exponentially from alpha_max to 0, alpha_mid at `at`: hard to easy."""
    _check_middle(alpha_mid, alpha_max)
    return exponential(progress, start=alpha_max, middle=alpha_mid, end=0.0, at=at)


def hard(
    progress: float,
    *,
    alpha_max: Positive = 10.0,
    alpha_mid: Positive = 1.0,
    at: InnerFraction = 0.5,
) -> float:
    """Return alpha rising exponentially from 0 to alpha_max, alpha_mid at `at`: easy to hard."""
    _check_middle(alpha_mid, alpha_max)
    return exponential(progress, start=0.0, middle=alpha_mid, end=alpha_max, at=at)


def easy_hard_easy(
    progress: float, *, alpha_max: Positive = 10.0, alpha_mid: Positive = 1.0
) -> float:
    """Return alpha rising to alpha_max at half-time and falling; alpha_mid at the quarters."""
    _check_middle(alpha_mid, alpha_max)
    rise = 1 - abs(2 * progress - 1)
    return exponential(rise, start=0.0, middle=alpha_mid, end=alpha_max)


def points(progress: float, *, at: list[float], alpha: list[float]) -> float:
    """Return alpha on straight lines through points given by hand: at = progress, alpha = value."""
    if len(at) != len(alpha) or len(at) < 2:
        raise ValueError(
            f"at and alpha need the same length of 2 or more, got {len(at)}, {len(alpha)}"
        )
    if at[0] != 0 or at[-1] != 1 or sorted(set(at)) != list(at):
        raise ValueError(f"at must rise from 0 to 1, got {at}")
    if min(alpha) < 0:
        raise ValueError(f"alpha must be >= 0, got {alpha}")
    right = next(i for i in range(1, len(at)) if progress <= at[i])
    share = (progress - at[right - 1]) / (at[right] - at[right - 1])
    return alpha[right - 1] + (alpha[right] - alpha[right - 1]) * share


def _check_middle(alpha_mid: float, alpha_max: float) -> None:
    if alpha_mid >= alpha_max:
        raise ValueError(f"alpha_mid must be below alpha_max ({alpha_max}), got {alpha_mid}")


def _bend(progress: float, log_base: float) -> float:
    """Return (c^t - 1) / (c - 1) for c = exp(log_base), stable for any c and for c -> 1."""
    if abs(log_base) < 1e-9:
        return progress
    if log_base > 0:  # divide by the larger power, so that nothing overflows
        return math.exp(log_base * (progress - 1)) * (
            math.expm1(-log_base * progress) / math.expm1(-log_base)
        )
    return math.expm1(log_base * progress) / math.expm1(log_base)


def _log_base(share: float, at: float) -> float:
    """Return log c such that (c^at - 1) / (c - 1) = share; the left side falls as c grows."""
    if at == 0.5:  # (sqrt(c) - 1) / (c - 1) = 1 / (sqrt(c) + 1)
        return 2 * math.log(1 / share - 1)
    from scipy.optimize import brentq  # here, because it takes longer to load than to run

    reach = 1.0
    while not _bend(at, reach) < share < _bend(at, -reach):
        reach *= 2
    return float(brentq(lambda log_base: _bend(at, log_base) - share, -reach, reach, xtol=1e-14))
