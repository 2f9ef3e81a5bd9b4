"""What do 30 draws of a last-layer posterior cost beside a point?

Command: python experiments/bench_posterior.py [SECONDS] [--draws 30] [--processor] [--threads 1]
Time: 2 cases (batch 64 and 256) of SECONDS (120). Nothing else should run meanwhile.
r_hat of one batch of mixes by ResNet-18 on images of 32 x 32, bf16 and channels_last: points
and draws on both sides, with one backbone for both posteriors (their heads are one product) and
with one for each.

Result of 60 --processor --threads 1 on a busy machine of 2 cores (load 10), so seconds of the
processor; 6 rounds, 95 % intervals of the median:     batch 64               256
  draws / points, one backbone                    1.005 [0.963, 1.021]  1.022 [0.981, 1.045]
  draws / points, a backbone for each side        1.005 [0.964, 1.041]  1.002 [0.966, 1.030]
  draws on one backbone / points as two networks  0.498 [0.489, 0.524]  0.504 [0.490, 0.525]
By the clock, 2 threads, batch 64, the same machine: 1.08 [0.70, 1.57], which decides nothing.
"""

import argparse
import os
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from mixval import Scorer, point
from mixval.bench.case import SEED, STREAM, Case, Steps
from mixval.bench.loops import mixed_batch
from mixval.bench.measure import Quotient, Times, interleaved, ratio
from mixval.engine import Prepared, num_cores, start_engine
from mixval.last_layer import draw, fit, split_head, updated
from mixval.losses import cross_entropy
from mixval.posteriors import last_layer
from mixval.recipe import Choice, EngineSettings
from mixval.rhat import draw_losses, score
from mixval.seeding import generator
from mixval.types import Posterior

AIM = 1.15
Clock = Callable[[], float]
FIT_ROWS, FAILURES = 256, 32
MODEL = Choice(name="timm", architecture="resnet18", small_images=True)
NETWORKS, HEADS, DRAWS, APART = (
    "two networks, points",
    "one backbone, two points",
    "one backbone, draws on both sides",
    "two backbones, draws on both sides",
)
ASKED = {  # what is compared, and the aim if there is one
    "draws / points, one backbone": (Quotient((DRAWS,), (HEADS,)), AIM),
    "draws / points, a backbone for each side": (Quotient((APART,), (NETWORKS,)), AIM),
    "draws on one backbone / points as two networks": (Quotient((DRAWS,), (NETWORKS,)), None),
}


def candidates(case: Case, draws: int, clock: Clock) -> dict[str, Steps]:
    """Return the ways to score one batch of mixes, all with the same network."""
    model = case.engine.prepare(case.network())
    both = fitted(case, model, draws)
    means = [each.mean(0, keepdim=True) for each in both]
    split = [last_layer(model, each) for each in both]
    networks = [point([case.engine.prepare(case.network())]) for _ in range(2)]
    return {
        NETWORKS: apart(case, clock, *networks),
        HEADS: together(case, clock, last_layer(model, torch.cat(means))),
        DRAWS: together(case, clock, last_layer(model, torch.cat(both))),
        APART: apart(case, clock, *split),
    }


def fitted(case: Case, model: Prepared, draws: int) -> list[Tensor]:
    """Return draws of p(W | D, F) and p(W | D), (S, K, D + 1) each, with the same noise."""
    head, rng = split_head(model), generator(SEED, f"{STREAM}/posterior")
    part = case.splits.train.take(np.arange(FIT_ROWS + FAILURES))
    assert isinstance(part.images, Tensor)
    images = (part.images.float() / 255 - case.splits.mean) / case.splits.std
    features = head(images)[0]
    base = fit([features[:FIT_ROWS]], head.mean, "kron", 1.0)
    moved = updated(base, features[FIT_ROWS:], part.labels[FIT_ROWS:])
    noise = torch.from_numpy(rng.standard_normal((draws, head.mean.numel())))
    return [draw(moved, noise), draw(base, noise)]


def apart(case: Case, clock: Clock, after: Posterior, before: Posterior) -> Steps:
    """Return scoring by two posteriors, each with a pass of its own."""
    scorer, (inputs, targets) = Scorer(after, cross_entropy), rows(case)
    return timed(clock, lambda: scorer(inputs, targets, before(inputs)).r_hat)


def together(case: Case, clock: Clock, pair: Posterior) -> Steps:
    """Return scoring by two posteriors that share a pass: draws of both, one behind the other."""
    inputs, targets = rows(case)

    def scored() -> Tensor:
        losses = draw_losses(pair(inputs), targets, cross_entropy)
        after, before = losses.chunk(2)
        return score(after, before).r_hat

    return timed(clock, scored)


def rows(case: Case) -> tuple[Tensor, Tensor]:
    batch = mixed_batch(case)
    assert batch.mixed is not None and batch.mixed_targets is not None
    return batch.mixed.contiguous(memory_format=torch.channels_last), batch.mixed_targets


def timed(clock: Clock, work: Callable[[], Tensor]) -> Steps:
    @torch.inference_mode()
    def run(steps: int) -> float:
        start = clock()
        for _ in range(steps):
            work()
        return clock() - start

    return run


def say(case: Case, times: Times) -> None:
    rounds = len(times[DRAWS])
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"\n{case.name}; medians of {rounds} rounds; load of the machine {load}")
    for name, seconds in times.items():
        print(f"  {name:<50} {1e3 * float(np.median(seconds)):8.0f} ms a batch")
    for name, (quotient, aim) in ASKED.items():
        found = ratio(times, quotient)
        kept = "" if aim is None else f"  <= {aim}: {verdict(found.low, found.high, aim)}"
        print(f"  {name:<50} {found!s:>20}{kept}", flush=True)


def verdict(low: float, high: float, aim: float) -> str:
    return "yes" if high <= aim else "no" if low > aim else "open"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("seconds", type=float, nargs="?", default=120.0, help="of each case")
    parser.add_argument("--draws", type=int, default=30)
    parser.add_argument("--batch-size", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--threads", type=int, default=num_cores())
    parser.add_argument("--processor", action="store_true", help="count its seconds: if it is busy")
    asked = parser.parse_args()
    settings = {"device": "cpu", "precision": "bf16", "channels_last": True}
    engine = start_engine(EngineSettings.model_validate({**settings, "threads": asked.threads}))
    for size in asked.batch_size:
        case = Case(MODEL, size, engine, samples=2000)
        clock = time.process_time if asked.processor else case.now
        work = {
            name: partial(steps, 1) for name, steps in candidates(case, asked.draws, clock).items()
        }
        for once in work.values():
            once()  # warms up
        say(case, interleaved(work, 1000, seconds=asked.seconds))


if __name__ == "__main__":
    main()
