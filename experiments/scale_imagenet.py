"""Plans, bank and score store of ImageNet-1k x 300 epochs, made and read here in flat memory.

Command: python experiments/scale_imagenet.py [--epochs 300] [--samples 1281167]
         [--scores-epochs 300] [--out DIR]
Time: 33 minutes on a busy machine, and 12 GB of disk, which is freed again.
No network runs: H is a random number that depends on epoch and row, so all that is read back
is compared with what was written. What networks take is not in these seconds.

Result, all 300 epochs of plans, bank and score store, on a busy machine (2 cores, so that the
seconds of the processor count; seed 0, one run):
  memory   written: 829 MB resident after 10 epochs, 852 after 100, 765 after 300, 865 at most;
           read: 1127, 1134 and 1130 MB, 1142 at most. Flat; 0.6 GB are Python and torch.
  disk     bank 1.54 GB (4.00 bytes a mix), score store 9.92 GB (25.81 bytes a mix)
  seconds  of the processor per epoch: plan 0.263, augmentation's numbers 0.052, bank written
           0.005 and read 0.003, scores written 0.258 and read 0.201
"""

import argparse
import resource
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from mixval import MixPlan, ScoreTable, draw_plan, read_scores
from mixval.augmentations import draw_uniforms
from mixval.epoch_file import EpochFile
from mixval.score_store import ScoreWriter
from mixval.seeding import generator

CLASSES = 1000
MARKS = (1, 10, 100, 300)  # epochs after which memory is shown


class Clock:
    """Seconds by what they were spent on: on the wall, and of the processor."""

    def __init__(self) -> None:
        self.spent: dict[str, list[tuple[float, float]]] = defaultdict(list)

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        wall, processor = time.perf_counter(), time.process_time()
        yield
        now = (time.perf_counter() - wall, time.process_time() - processor)
        self.spent[what].append(now)

    def say(self, samples: int) -> None:
        print("\nseconds per epoch: median on the wall, mean of the processor; ns of it per row")
        for what, pairs in self.spent.items():
            wall, processor = np.array(pairs).T
            row = 1e9 * processor.mean() / samples
            shown = f"{np.median(wall):8.3f} {processor.mean():8.3f} {row:8.0f}"
            print(f"  {what:<30} {shown}   ({len(pairs)} epochs)")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--epochs", type=int, default=300)
    parser.add_argument("--samples", type=int, default=1_281_167)
    parser.add_argument("--scores-epochs", type=int, help="of the score store (default: all)")
    parser.add_argument("--chunk", type=int, default=1000, help="rows scored at a time")
    parser.add_argument("--out", type=Path, help="keep the files there (default: removed)")
    asked = parser.parse_args()
    place = asked.out or Path(tempfile.mkdtemp())
    scored = asked.epochs if asked.scores_epochs is None else asked.scores_epochs
    clock = Clock()
    made = Made(place, asked.epochs, scored, asked.samples, asked.chunk)
    try:
        write_all(made, clock)
        read_all(made, clock)
        clock.say(asked.samples)
        say_sizes(made)
    finally:
        if asked.out is None:
            shutil.rmtree(place)


@dataclass(frozen=True)
class Made:
    """What is made, and where."""

    place: Path
    epochs: int
    scored: int  # epochs of the score store
    samples: int
    chunk: int

    @property
    def bank(self) -> Path:
        return self.place / "bank.npy"

    def part(self, epoch: int) -> Path:
        return self.place / "scores" / f"part-{epoch:04d}.parquet"


def write_all(made: Made, clock: Clock) -> None:
    """Draw every plan; write the bank, and the score store, a part for each epoch."""
    bank = EpochFile.create(made.bank, made.epochs, made.samples, "float32")
    ids = torch.arange(made.samples)
    for epoch in range(made.epochs):
        with clock("plan drawn"):
            plan = planned(epoch, made.samples)
        with clock("augmentation's numbers drawn"):
            draw_uniforms(0, epoch, ids)
        values = simulated("updated", epoch, made.samples)
        with clock("bank written"):
            bank.write(epoch, values)
        if epoch < made.scored:
            table = scores_of(plan)
            with clock("scores written"), ScoreWriter(made.part(epoch), {"data": "x"}) as writer:
                for start in range(0, made.samples, made.chunk):
                    writer.write(rows_of(table, slice(start, start + made.chunk)))
        say_memory("written", epoch + 1)


def read_all(made: Made, clock: Clock) -> None:
    """Read bank and score store; every number must be what was written."""
    bank = EpochFile(made.bank)
    for epoch in range(made.epochs):
        with clock("bank read"):
            known = bank.read(epoch).numpy()
        assert np.array_equal(known, simulated("updated", epoch, made.samples))
        if epoch < made.scored:
            with clock("scores read"):
                found = read_scores(made.part(epoch))
            expected = scores_of(planned(epoch, made.samples))
            for name in ScoreTable.columns():
                one, other = getattr(found, name), getattr(expected, name)
                assert one.dtype == other.dtype and one.tobytes() == other.tobytes(), name
        say_memory("read", epoch + 1)


def planned(epoch: int, samples: int) -> MixPlan:
    return draw_plan(seed=0, epoch=epoch, alpha=1.0, num_samples=samples)


def simulated(what: str, epoch: int, samples: int) -> np.ndarray:
    return generator(0, what, epoch).standard_exponential(samples, dtype=np.float32)


def scores_of(plan: MixPlan) -> ScoreTable:
    """Return what scoring a plan would give, with H of both posteriors at random."""
    count = len(plan)
    labels = generator(0, "labels").integers(0, CLASSES, count).astype(np.int32)
    updated, base = (simulated(what, plan.epoch, count) for what in ("updated", "base"))
    nothing = np.full(count, np.nan, dtype=np.float32)
    return ScoreTable(
        epoch=np.full(count, plan.epoch, dtype=np.int32),
        row=np.arange(count),
        i=plan.first,
        j=plan.second,
        lam=plan.lam,
        label_i=labels[plan.first],
        label_j=labels[plan.second],
        updated=updated,
        base=base,
        r_hat=updated - base,
        std_error=nothing,
        p_negative=nothing,
        kept=nothing,
    )


def rows_of(table: ScoreTable, rows: slice) -> ScoreTable:
    return ScoreTable(**{name: getattr(table, name)[rows] for name in ScoreTable.columns()})


def say_memory(what: str, epoch: int) -> None:
    """Print the memory of this process, now and at its highest, at a few epochs."""
    if epoch not in MARKS:
        return
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    now = pages * resource.getpagesize() / 1e6
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    print(f"{what}: epoch {epoch:3d}: {now:6.0f} MB resident, {peak:6.0f} at most", flush=True)


def say_sizes(made: Made) -> None:
    parts = sum(made.part(epoch).stat().st_size for epoch in range(made.scored))
    sizes = {"bank": (made.bank.stat().st_size, made.epochs), "scores": (parts, made.scored)}
    for what, (size, epochs) in sizes.items():
        mixes = epochs * made.samples
        if mixes:
            each = f"{size / mixes:.2f} bytes a mix"
            print(f"{what}: {size / 1e9:.2f} GB for {mixes:,} mixes, {each}")


if __name__ == "__main__":
    main()
