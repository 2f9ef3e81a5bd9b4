"""Does the cost of scoring and of training grow linearly, and does memory stay flat?

Command: python experiments/bench_linear.py [--repeats 3] [--largest 10000000] [--only WORK ...]
Scores mixes of the digits MLP into parquet (10^4 to 10^7 rows), and trains it for 1 to 1000
epochs, and on 100 to 100,000 synthetic samples. Every measurement is a process of its own,
so that its peak of memory is its own, too; what a process does first is not measured.
Time: about 3 minutes a repeat on an idle machine; nothing else should run meanwhile.

Result of --repeats 1 (seed 0) on a machine so busy that only seconds of the processor count;
slopes of log cost over log size with 95 % intervals; figures/linear_cost.png:
  scoring  10^4 to 10^7 mixes: 8.4 to 9.3 µs a mix, slope 0.990 ± 0.032;
           at most 0.740, 0.753, 0.764 and 0.776 GB resident
  epochs   1 to 1000: 13 to 14 ms an epoch and 12 ms once, slope 0.913 ± 0.166 for the latter
  samples  100 to 100,000: 42 to 57 µs a sample and epoch, slope 0.980 ± 0.120; at most 0.95 GB
"""

import argparse
import json
import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from matplotlib import pyplot as plt
from scipy import stats

from mixval import MixPlan, Part, Scorer, Splits, draw_plan, load_recipe, point
from mixval.engine import Engine, start_engine
from mixval.losses import cross_entropy
from mixval.mixing import RowMaker
from mixval.recipe import EngineSettings, Learner
from mixval.score_store import ScoreWriter
from mixval.scoring import score_plans
from mixval.seeding import generator
from mixval.sources import load_source
from mixval.splits import load_splits
from mixval.training import train
from mixval.training_job import Job, Watch, build_model

HERE = Path(__file__).parent
RECIPE = load_recipe("digits")
LIMIT = 1.5  # GB resident that 10 million rows may take


# -- the work -----------------------------------------------------------------------------


def score(rows: int) -> None:
    """Score that many mixes of digits by two networks, into one file."""
    splits, engine = digits(), one_thread()
    updated, base = (
        point([engine.prepare(build_model(RECIPE.model, splits, seed, "linear"))])
        for seed in (0, 1)
    )
    maker = RowMaker.of(splits.train, splits, engine.device)
    scorer, chunk = Scorer(updated, cross_entropy), RECIPE.scores.chunk
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "part-0000.parquet"
        with ScoreWriter(path, {"plan": "linear"}) as writer:
            for table in score_plans(
                maker, plans(rows, len(splits.train)), scorer, base, chunk=chunk
            ):
                writer.write(table)


def plans(rows: int, samples: int) -> Iterator[MixPlan]:
    for epoch in range(-(-rows // samples)):
        plan = draw_plan(seed=0, epoch=epoch, alpha=1.0, num_samples=samples)
        yield plan.keep(slice(rows - epoch * samples))


def train_epochs(epochs: int) -> None:
    """Train on the 300 digits of the default run for that many epochs."""
    train_network(digits(), epochs)


def train_samples(samples: int) -> None:
    """Train on that many synthetic images for 10 epochs."""
    splits = digits()
    rng = generator(0, "linear/images")
    images = torch.from_numpy(rng.integers(0, 256, (samples, 1, 8, 8), dtype=np.uint8))
    labels = torch.from_numpy(rng.integers(0, 10, samples))
    part = Part(images, labels, torch.arange(samples))
    train_network(Splits(**{**vars(splits), "train": part}), epochs=10)


def train_network(splits: Splits, epochs: int) -> None:
    training = RECIPE.training.model_copy(update={"evaluate_every": 10**9})
    job = Job(
        learner=Learner(),  # both terms, alpha = 1
        training=training,
        model=RECIPE.model,
        epochs=epochs,
        part=splits.train,
        splits=splits,
        seed=0,
        stream="linear",
    )
    train(job, one_thread(), None, Watch())


def digits() -> Splits:
    data = RECIPE.data
    source = load_source(data.source.name, data.source.parameters, "memory")
    return load_splits(source, seed=0, train=300, val_f=200, val_dev=200, label_noise=0.0)


def one_thread() -> Engine:
    return start_engine(EngineSettings(device="cpu", threads=1))


@dataclass(frozen=True)
class Work:
    """What grows, and how far."""

    what: str
    unit: str
    do: Callable[[int], None]
    sizes: tuple[int, ...]


WORKS = {
    "scoring": Work("r̂ of mixes, into parquet", "mixes", score, (10**4, 10**5, 10**6, 10**7)),
    "epochs": Work("training, 300 digits", "epochs", train_epochs, (1, 10, 100, 1000)),
    "samples": Work("training, 10 epochs", "samples", train_samples, (100, 1000, 10**4, 10**5)),
}


# -- measuring ----------------------------------------------------------------------------


def measured(name: str, size: int) -> tuple[float, float, float]:
    """Return seconds, processor seconds and peak memory in GB; runs in a fresh process."""
    work = WORKS[name]
    work.do(work.sizes[0])  # loads and warms up
    start, processor = time.perf_counter(), time.process_time()
    work.do(size)
    seconds = time.perf_counter() - start, time.process_time() - processor
    return *seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def in_own_process(name: str, size: int) -> tuple[float, float, float]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(measured, name, size).result()


def slope(sizes: list[int], seconds: list[float]) -> str:
    """Return the slope of log seconds over log size with its 95 % interval."""
    fit = stats.linregress(np.log(sizes), np.log(seconds))
    reach = stats.t.ppf(0.975, len(sizes) - 2) * fit.stderr
    return f"{fit.slope:.3f} ± {reach:.3f}"


def say(name: str, rows: list[dict[str, float]]) -> str:
    """Print the table of one work; return the slope over its three decades."""
    print(f"\n{WORKS[name].what}\n{WORKS[name].unit:>12}  seconds  of processor  µs each   peak GB")
    for size in sorted({row["size"] for row in rows}):
        of_size = [row for row in rows if row["size"] == size]
        wall, processor, peak = (
            float(np.median([row[key] for row in of_size])) for key in ("wall", "processor", "peak")
        )
        each = 1e6 * processor / size
        print(f"{size:12,.0f} {wall:8.3f} {processor:13.3f} {each:8.1f} {peak:9.3f}")
    sizes = [int(row["size"]) for row in rows]
    walls, found = (slope(sizes, [row[key] for row in rows]) for key in ("wall", "processor"))
    print(f"slope of log seconds over log {WORKS[name].unit} (1: linear): {walls};", end=" ")
    print(f"of the processor's {found}")
    return found


def draw(found: dict[str, list[dict[str, float]]], slopes: dict[str, str]) -> None:
    mpl.use("agg")
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.8), layout="constrained")
    for marker, (name, rows) in zip("os^", found.items(), strict=False):
        sizes, seconds = (np.array([row[key] for row in rows]) for key in ("size", "processor"))
        work = WORKS[name]
        label = f"{work.what}, by {work.unit}: slope {slopes[name]}"
        (points,) = left.loglog(sizes, seconds, marker, fillstyle="none", label=label)
        ends = np.array([sizes.min(), sizes.max()])
        middle = np.exp(np.log(seconds).mean() - np.log(sizes).mean())
        left.loglog(ends, middle * ends, "--", color=points.get_color(), linewidth=1)
        peaks = [row["peak"] for row in rows]
        right.semilogx(sizes, peaks, marker, fillstyle="none", label=work.what)
    left.set(
        xlabel="mixes, epochs or samples",
        ylabel="seconds of the processor",
        title="Cost (dashed: slope 1)",
    )
    right.axhline(LIMIT, color="grey", linestyle=":", label=f"limit, {LIMIT} GB")
    right.set(xlabel="mixes, epochs or samples", ylabel="GB resident at most", title="Memory")
    right.set_ylim(0, 1.1 * LIMIT)
    for axes in (left, right):
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False)
    figure.savefig(HERE.parent / "figures" / "linear_cost.png", dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--largest", type=int, default=10**7, help="of mixes, to try it out")
    parser.add_argument("--only", nargs="+", choices=WORKS, default=list(WORKS))
    asked = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {name: [] for name in asked.only}
    for _ in range(asked.repeats):
        for name in asked.only:
            for size in WORKS[name].sizes:
                if size > asked.largest:
                    continue
                wall, processor, peak = in_own_process(name, size)
                row = {"size": size, "wall": wall, "processor": processor, "peak": peak}
                found[name].append(row)
                print(name, json.dumps(row), flush=True)
    slopes = {name: say(name, rows) for name, rows in found.items()}
    draw(found, slopes)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
