"""What is measured: a network, a batch size and a precision on CIFAR-shaped synthetic images."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from mixval.engine import Engine
from mixval.recipe import Choice, Training
from mixval.seeding import generator
from mixval.training_job import build_model
from mixval.types import Part, Splits

Steps = Callable[[int], float]  # does that many steps and returns their seconds

STREAM = "bench"
SEED = 0


@dataclass(frozen=True)
class Case:
    """One column of a benchmark. All loops of a case share network, optimiser and precision."""

    model: Choice
    batch_size: int
    engine: Engine
    samples: int = 50_000
    shape: tuple[int, int, int] = (3, 32, 32)
    num_classes: int = 10

    @property
    def name(self) -> str:
        network = self.model.parameters.get("architecture", self.model.name)
        device, threads = self.engine.device.type, self.engine.threads
        how = f"{self.engine.precision}, {device}, {threads} threads"
        return f"{network}, batch {self.batch_size}, {how}"

    @cached_property
    def splits(self) -> Splits:
        train = _images(self.samples, self.shape, self.num_classes)
        few = train.take(np.arange(min(self.samples, 64)))
        return Splits(
            train=train,
            val_f=few,
            val_dev=few,
            test=few,
            classes=tuple(map(str, range(self.num_classes))),
            flipped=torch.zeros(0, dtype=torch.int64),
            mean=torch.full((self.shape[0], 1, 1), 0.5),
            std=torch.full((self.shape[0], 1, 1), 0.25),
        )

    @property
    def training(self) -> Training:
        """Return the settings that mixval trains with, and the others' optimiser is made from."""
        return Training.model_validate(
            {
                "batch_size": self.batch_size,
                "lr": 0.01,
                "augmentation": "crop_flip",
                "evaluate_every": 10**9,  # evaluation is no part of any loop here
            }
        )

    def network(self) -> nn.Module:
        """Return the network with the initial weights that every loop of the case begins with.

        The plain module, as the other libraries' scripts run it: in the case's layout, and
        under its autocast.
        """
        return self.engine.prepare(build_model(self.model, self.splits, SEED, STREAM)).network

    def autocast(self) -> AbstractContextManager[Any]:
        return self.engine.autocast()

    def now(self) -> float:
        """Return the time when everything asked of the device is done."""
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize()
        elif self.engine.device.type == "mps":
            torch.mps.synchronize()
        return time.perf_counter()


def _images(samples: int, shape: tuple[int, int, int], num_classes: int) -> Part:
    """Return noise around one pattern per class: as large as real images, and learnable."""
    rng = generator(SEED, f"{STREAM}/images")
    patterns = rng.integers(0, 128, (num_classes, *shape), dtype=np.uint8)
    labels = rng.integers(0, num_classes, samples)
    images = rng.integers(0, 128, (samples, *shape), dtype=np.uint8)
    images += patterns[labels]
    ids = torch.arange(samples)
    return Part(torch.from_numpy(images), torch.from_numpy(labels), ids)
