"""Named benchmarks: what is run side by side, and what is claimed of it."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from mixval.bench import loops
from mixval.bench.case import Case, Steps
from mixval.bench.measure import Quotient, Ratio, Times, interleaved, ratio
from mixval.bench.ours import (
    banked_job,
    guided_job,
    mixup_job,
    our_loop,
    our_scoring,
    regmixup_job,
)

log = logging.getLogger(__name__)
WIDTH = 0.03  # of an interval that is narrow enough
_ROUNDS = 200  # rounds that the budget should allow for: turns must be short beside the noise
_MAX_ROUNDS = 10_000
_TRIED = 4  # steps of a turn when numbers of workers are tried


@dataclass(frozen=True)
class Claim:
    """A ratio of seconds and the bound that it is said to keep; without a bound it is shown."""

    text: str
    quotient: Quotient
    at_least: float | None = None
    at_most: float | None = None

    def verdict(self, found: Ratio) -> str:
        """Return whether the whole interval keeps the bound: yes, no, or open if it straddles."""
        if self.at_least is not None:
            good, bad = found.low >= self.at_least, found.high < self.at_least
            bound = f">= {self.at_least}"
        elif self.at_most is not None:
            good, bad = found.high <= self.at_most, found.low > self.at_most
            bound = f"<= {self.at_most}"
        else:
            return ""
        return f"{bound}: {'yes' if good else 'no' if bad else 'open'}"


@dataclass(frozen=True)
class Suite:
    """The work of one suite for one case, ready to be measured."""

    candidates: Mapping[str, Steps]
    claims: list[Claim]


@dataclass(frozen=True)
class Result:
    """What was measured: seconds of every round, `steps` steps each."""

    title: str
    batch_size: int
    steps: int
    times: Times
    claims: list[Claim]

    def ratios(self) -> list[tuple[Claim, Ratio]]:
        return [(claim, ratio(self.times, claim.quotient)) for claim in self.claims]

    def __str__(self) -> str:
        rounds = len(next(iter(self.times.values())))
        lines = [f"{self.title}; medians of {rounds} rounds, {self.steps} steps each"]
        wide = max(len(text) for text in (*self.times, *(claim.text for claim in self.claims)))
        for name, seconds in self.times.items():
            step = float(np.median(seconds)) / self.steps
            speed = f"{self.batch_size / step:,.0f} images/s"
            lines.append(f"  {name:<{wide}}  {speed:>20}  {1e3 * step:.2f} ms per step")
        for claim, found in self.ratios():
            line = f"  {claim.text:<{wide}}  {found!s:>20}  {claim.verdict(found)}"
            lines.append(line.rstrip())
        return "\n".join(lines)

    def described(self) -> dict[str, Any]:
        """Return everything as plain values, for a file."""
        found = [
            {"claim": claim.text, "verdict": claim.verdict(ratio), **asdict(ratio)}
            for claim, ratio in self.ratios()
        ]
        seconds = {name: values.tolist() for name, values in self.times.items()}
        return {"title": self.title, "steps": self.steps, "ratios": found, "seconds": seconds}


# -- the suites ---------------------------------------------------------------------------


def mixup(case: Case) -> Suite:
    """Return mixup training: mixval, the fixed-batch limit, torchvision's and timm's loops."""
    ours = our_loop(case, mixup_job(case))
    candidates: dict[str, Steps] = {"fixed batch": loops.fixed_batch(case), "mixval": ours}
    claims = [_speed("mixval", "fixed batch", at_least=0.95)]
    # Where the network is small the loop matters; where it is large nobody can be much faster.
    bound = 1.2 if case.model.name == "conv_net" else 1.0
    for library, build in (("torchvision", loops.torchvision_loop), ("timm", loops.timm_loop)):
        for batchwise in (False, True):
            name, loop = fastest(case, library, build, batchwise)
            candidates[name] = loop
            claims.append(_speed("mixval", name, at_least=bound))
    return Suite(candidates, claims)


def guided(case: Case) -> Suite:
    """Return guided training with a live teacher, beside its two parts measured bare."""
    candidates: dict[str, Steps] = {
        "RegMixup step, bare": loops.regmixup_step(case),
        "teacher forward, bare": loops.teacher_forward(case),
        "mixval, RegMixup": our_loop(case, regmixup_job(case)),
        "mixval, guided by a live teacher": our_loop(case, guided_job(case)),
        "mixval, guided by a bank": our_loop(case, banked_job(case)),
    }
    step, forward, alone, live, banked = candidates
    claims = [
        Claim(
            "time of guided / (RegMixup step + teacher)",
            Quotient((live,), (step, forward)),
            at_most=1.05,
        ),
        Claim(
            "time of guided by a bank / RegMixup step", Quotient((banked,), (step,)), at_most=1.03
        ),
        Claim("time of RegMixup, mixval / bare", Quotient((alone,), (step,))),
    ]
    return Suite(candidates, claims)


def scoring(case: Case) -> Suite:
    """Return offline scoring: r_hat of mixes, written to parquet, beside two bare passes.

    A step is a chunk of rows, as large as the case's batch.
    """
    candidates: dict[str, Steps] = {
        "two forward passes, bare": loops.two_forwards(case),
        "mixval, scored and written": our_scoring(case),
    }
    bare, ours = candidates
    return Suite(candidates, [_speed(ours, bare, at_least=0.95)])


SUITES: dict[str, Callable[[Case], Suite]] = {
    "mixup": mixup,
    "guided": guided,
    "scoring": scoring,
}


def _speed(one: str, other: str, *, at_least: float) -> Claim:
    """Return a claim on speeds: the seconds are divided the other way round."""
    return Claim(f"speed of {one} / {other}", Quotient((other,), (one,)), at_least=at_least)


# -- running them -------------------------------------------------------------------------


def run(name: str, case: Case, seconds: float) -> Result:
    """Measure a suite for about that many seconds, or until its intervals are narrow."""
    suite = SUITES[name](case)
    log.info("%s: %s: measuring", name, case.name)
    turns = {candidate: steps(1) for candidate, steps in suite.candidates.items()}  # warms up, too
    share = seconds / _ROUNDS / len(turns)
    count = max(1, round(share / max(turns.values())))
    times = interleaved(
        {candidate: partial(steps, count) for candidate, steps in suite.candidates.items()},
        _MAX_ROUNDS,
        asked=[claim.quotient for claim in suite.claims],
        width=WIDTH,
        seconds=seconds,
    )
    return Result(f"{name}: {case.name}", case.batch_size, count, times, suite.claims)


def fastest(
    case: Case, library: str, build: Callable[[Case, int, bool], loops.Loop], batchwise: bool
) -> tuple[str, loops.Loop]:
    """Return another library's loop with the fastest number of workers, and what it is called."""
    settings = {
        _described(library, workers, batchwise): build(case, workers, batchwise)
        for workers in loops.WORKERS
    }
    log.info("%s: %s: trying numbers of workers", library, case.name)
    times = interleaved({name: partial(loop, _TRIED) for name, loop in settings.items()}, 3)
    name = min(times, key=lambda name: float(np.median(times[name])))
    return name, settings[name]


def _described(library: str, workers: int, batchwise: bool) -> str:
    batched = {"torchvision": "normalised in batches", "timm": "prefetcher"}[library]
    details = [f"{workers} worker{'s' * (workers != 1)}", *([batched] if batchwise else [])]
    return f"{library}, {', '.join(details)}"
