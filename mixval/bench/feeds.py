"""Batches as the users of torchvision and timm make them: a DataLoader over images.

What these libraries draw at random they draw from global generators of their own.
"""

import time
from collections.abc import Callable, Iterator
from multiprocessing import Value
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torchvision.transforms import v2

from mixval.bench.case import SEED, STREAM, Case
from mixval.seeding import torch_seed
from mixval.types import Part

_ENDLESS = 10**12  # samples: a loader that never ends its epoch never waits for the next one
_PREFETCH = 2  # batches per worker, as DataLoader has it
_PATIENCE = 30.0  # seconds to wait for workers that have nothing else to do

Collate = Callable[[list[Any]], Any]


class Images(Dataset[tuple[Tensor, int]]):
    """Images in memory, each transformed when it is asked for."""

    def __init__(self, part: Part, transform: Callable[[Tensor], Tensor]) -> None:
        self.part, self.labels, self.transform = part, part.labels.tolist(), transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        image = self.part.images[place]  # type: ignore[index]
        return self.transform(image), self.labels[place]


class _Counting:
    """A collate function that says, across processes, how many batches it has made."""

    def __init__(self, collate: Collate) -> None:
        self.collate, self.made = collate, Value("q", 0)

    def __call__(self, samples: list[Any]) -> Any:
        batch = self.collate(samples)
        with self.made.get_lock():
            self.made.value += 1
        return batch


class Feed:
    """An endless, shuffled DataLoader that can pause while something else is measured.

    Left alone, workers would go on into the others' time, and their loop would begin with
    batches that cost it nothing. So `pause` lets the workers fill their queues, unmeasured,
    and `resume` throws away as many batches as they were ahead of where the loop was.
    """

    def __init__(self, case: Case, dataset: Images, workers: int, collate: Collate) -> None:
        self._counting = _Counting(collate)
        self._in_flight = workers * _PREFETCH
        self._taken, self._gained = 0, 0
        rng = torch.Generator().manual_seed(torch_seed(SEED, f"{STREAM}/order"))
        self._batches = iter(
            DataLoader(
                dataset,
                batch_size=case.batch_size,
                sampler=RandomSampler(dataset, num_samples=_ENDLESS, generator=rng),
                num_workers=workers,
                collate_fn=self._counting,
                pin_memory=case.engine.device.type == "cuda",
                prefetch_factor=_PREFETCH if workers else None,
                generator=rng,
            )
        )

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._taken += 1
        return next(self._batches)

    @property
    def ahead(self) -> int:
        """How many batches are made and not yet taken."""
        return int(self._counting.made.value) - self._taken

    def pause(self) -> None:
        if not self._in_flight:
            return
        before, start = self.ahead, time.monotonic()
        while self.ahead < self._in_flight:
            assert time.monotonic() - start < _PATIENCE, "the workers of a DataLoader are stuck"
            time.sleep(0.001)
        self._gained = self.ahead - before

    def resume(self) -> None:
        for _ in range(self._gained):
            next(self)
        self._gained = 0


def crop_flip(case: Case) -> list[v2.Transform]:
    return [v2.RandomCrop(case.shape[-2:], padding=4), v2.RandomHorizontalFlip()]


def normalise(case: Case) -> list[v2.Transform]:
    mean, std = (value.flatten().tolist() for value in (case.splits.mean, case.splits.std))
    return [v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)]
