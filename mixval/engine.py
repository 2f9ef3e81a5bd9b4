"""Device, threads and what they resolve to; written into the run and pinned on resume."""

import os
from dataclasses import asdict, dataclass

import torch

from mixval.errors import UserError


@dataclass(frozen=True)
class Engine:
    """Where the networks run. Each of these can change the last bits of a result."""

    device: torch.device
    threads: int

    @property
    def described(self) -> dict[str, str | int]:
        return {**asdict(self), "device": self.device.type}


def start_engine(device: str, threads: int) -> Engine:
    """Resolve `auto`, set the number of threads for this process, and check the device."""
    torch.set_num_threads(threads)
    torch.backends.cudnn.deterministic = True  # a resume must repeat every bit
    torch.backends.cudnn.benchmark = False
    return Engine(torch.device(_resolve(device)), threads)


def num_workers(device: str, asked: int, cells: int) -> int:
    """Return how many processes share the cells: one per core that is ours, one on a GPU."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    default = (cores or 1) if _resolve(device) == "cpu" else 1
    return min(asked or default, cells)


def _resolve(device: str) -> str:
    present = {
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
    }
    if device == "auto":
        return next(name for name in ("cuda", "mps", "cpu") if present[name])
    if not present.get(device.split(":")[0], False):
        raise UserError(f"engine.device: {device!r} is not available here; use auto or cpu")
    return device
