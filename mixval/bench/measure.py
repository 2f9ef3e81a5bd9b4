"""Seconds of several pieces of work, measured in turn, and their ratios with intervals.

A machine gets faster and slower while it is measured: clocks, neighbours, heat. Work done
in turn meets the same machine, so its ratio within a round is steady where its seconds
are not. Only such paired ratios are reported.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from mixval.types import Floats

Work = Callable[[], float]  # does one unit and returns the seconds it took
Times = dict[str, Floats]  # seconds of each round, by the name of the work

MIN_ROUNDS = 6  # the fewest whose 95 % interval of a median is bounded


class Quotient(NamedTuple):
    """Which seconds are divided by which; several names stand for their sum."""

    of: tuple[str, ...]
    to: tuple[str, ...]


@dataclass(frozen=True)
class Ratio:
    """The median of the rounds' ratios, and a 95 % interval for it."""

    median: float
    low: float
    high: float
    totals: float  # ratio of the sums: unlike the median it counts what is rare and slow
    rounds: int

    @property
    def width(self) -> float:
        return self.high - self.low

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def ratio(times: Mapping[str, Floats], asked: Quotient) -> Ratio:
    """Return the paired ratio with the distribution-free interval of its median.

    The interval lies between two order statistics, chosen by the binomial distribution of
    the number of rounds below the median. It assumes nothing of the noise but that rounds
    are alike, and covers at least 95 %. Below six rounds there is none: it is (0, inf).
    """
    above, below = (np.sum([times[name] for name in names], axis=0) for names in asked)
    paired = above / below
    interval: Any = stats.quantile_test(paired, q=0, p=0.5).confidence_interval(0.95)
    bounded = bool(np.isfinite(interval.low) and np.isfinite(interval.high))
    return Ratio(
        median=float(np.median(paired)),
        low=float(interval.low) if bounded else 0.0,
        high=float(interval.high) if bounded else np.inf,
        totals=float(above.sum() / below.sum()),
        rounds=len(paired),
    )


def interleaved(
    candidates: Mapping[str, Work],
    repeats: int,
    *,
    asked: Sequence[Quotient] = (),
    width: float = 0.0,
    seconds: float = np.inf,
    clock: Callable[[], float] = time.monotonic,
) -> Times:
    """Do each candidate's work once a round; return the seconds of every round.

    Ends after `repeats` rounds, or when `seconds` are over, or when the intervals of all
    the ratios `asked` for are narrower than `width`; never within a round, and not before
    there are rounds enough for an interval.
    """
    assert candidates and repeats >= 1
    start = clock()
    rounds: list[dict[str, float]] = []
    while len(rounds) < repeats:
        rounds.append({name: candidates[name]() for name in turn(list(candidates), len(rounds))})
        if len(rounds) < MIN_ROUNDS:
            continue
        if clock() - start > seconds or (asked and _narrow(_columns(rounds), asked, width)):
            break
    return _columns(rounds)


def turn(names: list[str], number: int) -> list[str]:
    """Return the order of a round: reversed every second time, and begun one later every two.

    So whoever runs first, last or after whom changes, and a drift within the round favours
    nobody.
    """
    start = number // 2 % len(names)
    order = names[start:] + names[:start]
    return order[::-1] if number % 2 else order


def _narrow(times: Times, asked: Sequence[Quotient], width: float) -> bool:
    return all(ratio(times, quotient).width < width for quotient in asked)


def _columns(rounds: list[dict[str, float]]) -> Times:
    return {name: np.array([seconds[name] for seconds in rounds]) for name in rounds[0]}
