"""(seed, stream, epoch, ...) -> generator. Nothing else in mixval draws randomness.

Every random number is a pure function of where it is used, never of what was drawn
before. So a run can be cut at any step, resumed, batched or spread over processes
differently, and still see the same order, partners, lambdas and augmentations.
"""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def _entropy(seed: int, stream: str, *place: int) -> np.random.SeedSequence:
    # As a spawn key, because entropy is padded with zeros: [7] and [7, 0] would be one stream.
    return np.random.SeedSequence([seed, zlib.crc32(stream.encode())], spawn_key=place)


def generator(seed: int, stream: str, *place: int) -> np.random.Generator:
    """Return numpy's generator for `stream` at `place` (an epoch, or an epoch and a step)."""
    return np.random.Generator(np.random.PCG64(_entropy(seed, stream, *place)))


def torch_seed(seed: int, stream: str, *place: int) -> int:
    """Return an integer to seed torch with, for what only torch can draw (weights, dropout)."""
    return int(_entropy(seed, stream, *place).generate_state(1, np.uint64)[0] >> np.uint64(1))


def seed_torch(value: int, device: torch.device) -> None:
    """Seed the generators that a network on `device` draws from.

    Not torch.manual_seed: without a GPU it stores a traceback at every call, which costs
    more than a small network's training step.
    """
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(value)
    elif device.type == "mps":
        torch.mps.manual_seed(value)


@contextmanager
def generators_kept(device: torch.device) -> Iterator[None]:
    """Leave the generators that a network on `device` draws from as they were."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield


@contextmanager
def torch_stream(seed: int, stream: str, *place: int) -> Iterator[None]:
    """Draw torch's random numbers from `stream`, and leave the caller's generator as it was."""
    with torch.random.fork_rng(devices=[]):  # weights are drawn on the CPU
        seed_torch(torch_seed(seed, stream, *place), torch.device("cpu"))
        yield
