"""What streaming costs: the same training step from memory and from JPEG files decoded on the fly.

Command: python experiments/bench_streaming.py [--images 1000] [--sizes 64 224] [--rounds 6]
Partners come from the whole epoch, not from the batch, so a streamed mix takes two decoded
images where a batch-wise mixup takes one; this counts them, and measures what they cost.
A turn is a whole epoch, with the start of its loaders; ways take turns.
Time: 8 minutes with --images 500 on a busy machine of 2 cores.

Result of --images 500 (470 mixes an epoch, conv_net of width 8, one thread, 6 rounds, on a busy
machine): 2.00 decodes a mix. Time of an epoch over that from memory, 95 % interval of the median:
  64 pixels   0 loaders 1.34 [1.24, 1.35], 1: 1.76 [1.64, 1.87], 2: 1.76 [1.72, 2.00];
              one core decodes 5,100 of these files a second
  224 pixels  0 loaders 1.13 [0.85, 1.33], 1: 1.08 [1.00, 1.22], 2: 1.14 [0.98, 1.29];
              one core decodes 1,700 of these files a second
Loaders start anew in every epoch, which 7 small steps do not make good.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import Value
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mixval.bench.measure import Quotient, Times, interleaved, ratio
from mixval.datasets import image_folder
from mixval.engine import start_engine
from mixval.recipe import Choice, EngineSettings, Learner, Training
from mixval.seeding import generator
from mixval.sources import place_images
from mixval.splits import load_splits
from mixval.training import Loop
from mixval.training_job import Job, Watch, num_steps
from mixval.types import Decoder, Splits, StreamedImages

CLASSES = 10
LOADERS = (0, 1, 2)
BATCH = 64


class Counted:
    """A decoder that counts, across processes, the images it has decoded."""

    def __init__(self, decoder: Decoder, count: Any) -> None:
        self.decoder, self.count = decoder, count
        self.image_shape, self.content = decoder.image_shape, decoder.content

    def __call__(self, place: int) -> Tensor:
        with self.count.get_lock():
            self.count.value += 1
        return self.decoder(place)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 224])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1, help="of the training process")
    asked = parser.parse_args()
    for size in asked.sizes:
        with tempfile.TemporaryDirectory() as folder:
            write_images(Path(folder), asked.images, size)
            measure(Path(folder), size, asked.rounds, asked.threads)


def write_images(folder: Path, count: int, size: int) -> None:
    """Write smooth pictures with a little noise, of about the bytes a pixel that photos have."""
    rng = generator(0, "streaming/images")
    for number in range(count):
        coarse = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        smooth = np.asarray(Image.fromarray(coarse).resize((size, size), Image.Resampling.BICUBIC))
        noisy = smooth + rng.normal(0, 6, smooth.shape)
        place = folder / f"class-{number % CLASSES}" / f"{number:05d}.jpg"
        place.parent.mkdir(exist_ok=True)
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(place, quality=90)


def measure(folder: Path, size: int, rounds: int, threads: int) -> None:
    count = Value("q", 0)
    held, streamed = (splits_of(folder, size, images) for images in ("memory", "stream"))
    counting = with_counter(streamed, count)
    trainings = {"memory": epochs_of(held, 0, threads)}
    for loaders in LOADERS:
        trainings[f"stream, {loaders} loaders"] = epochs_of(counting, loaders, threads)
    for run in trainings.values():
        run()  # warms up
    count.value = 0
    times = interleaved(trainings, rounds)
    mixes = rounds * len(LOADERS) * len(held.train)
    kilobytes = sum(file.stat().st_size for file in folder.rglob("*.jpg")) / 1e3
    each = kilobytes / sum(1 for _ in folder.rglob("*.jpg"))
    print(f"\n{size} x {size} pixels, {each:.1f} kB each, {len(held.train)} samples, ", end="")
    print(f"{rounds} rounds: {count.value / mixes:.2f} decodes a mix")
    say(times, len(held.train))
    decoded = 1 / seconds_of_decoding(streamed)
    print(f"  {'decoding alone':<28}  {decoded:8.0f} images per second of one core")


def say(times: Times, samples: int) -> None:
    for way, seconds in times.items():
        speed = f"{samples / float(np.median(seconds)):8.0f} mixes/s"
        found = ratio(times, Quotient((way,), ("memory",)))
        print(f"  {way:<28}  {speed}  time / from memory: {found}")


def splits_of(folder: Path, size: int, images: str) -> Splits:
    source = place_images(image_folder(path=str(folder), size=size), images)
    left = len(source.train) - 3 * CLASSES
    return load_splits(source, seed=0, train=left, val_f=CLASSES, val_dev=CLASSES, label_noise=0.0)


def with_counter(splits: Splits, count: Any) -> Splits:
    images = splits.train.images
    assert isinstance(images, StreamedImages)
    decoders = tuple(Counted(decoder, count) for decoder in images.decoders)
    return replace(splits, train=replace(splits.train, images=replace(images, decoders=decoders)))


def epochs_of(splits: Splits, loaders: int, threads: int) -> Callable[[], float]:
    """Return what trains one epoch more, and says how long it took."""
    engine = start_engine(EngineSettings(device="cpu", threads=threads, loaders=loaders))
    training = {"batch_size": BATCH, "lr": 0.01, "evaluate_every": 10**9}
    job = Job(
        learner=Learner.model_validate({"alpha": 1, "clean": "none"}),
        training=Training.model_validate(training),
        model=Choice(name="conv_net", width=8),
        epochs=10**6,
        part=splits.train,
        splits=splits,
        seed=0,
        stream="streaming",
    )
    steps = Loop(job, engine, None, Watch()).steps()
    per_epoch = num_steps(len(splits.train), BATCH)

    def run() -> float:
        start = time.perf_counter()
        for _ in range(per_epoch):
            next(steps)
        return time.perf_counter() - start

    return run


def seconds_of_decoding(splits: Splits) -> float:
    """Return the processor's seconds to read one image, decode it and make it a tensor."""
    places = torch.arange(min(len(splits.train), 512))
    start = time.process_time()
    for batch in torch.split(places, BATCH):
        splits.train.images[batch]
    return (time.process_time() - start) / len(places)


if __name__ == "__main__":
    main()
