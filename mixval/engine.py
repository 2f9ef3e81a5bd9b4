"""Device, precision and processes, and what they resolve to; recorded and pinned on resume."""

import copy
import ctypes
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mixval.errors import UserError
from mixval.processes import ALONE, Processes, start_processes
from mixval.recipe import EngineSettings

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_KEPT_BYTES = 1 << 30


@dataclass(frozen=True)
class Engine:
    """Where and how the networks run. All but `loaders` can change the last bits of a result."""

    device: torch.device
    threads: int
    precision: str = "fp32"  # fp32 | bf16
    channels_last: bool = False
    compile: bool = False
    loaders: int = 0  # processes that decode images which are not in memory
    processes: Processes = field(default=ALONE, compare=False)

    @property
    def described(self) -> dict[str, Any]:
        """Return what the bits of a result depend on."""
        return {
            "device": self.device.type,
            "threads": self.threads,
            "precision": self.precision,
            "channels_last": self.channels_last,
            "compile": self.compile,
            "processes": self.processes.world,
        }

    def prepare(self, network: nn.Module) -> "Prepared":
        return Prepared(network, self)

    def autocast(self) -> AbstractContextManager[Any]:
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)


class Prepared(nn.Module):
    """A network as the engine runs it: its device, layout and precision; float32 comes out.

    `network` is the plain module, whose weights are saved and copied.
    """

    network: nn.Module

    def __init__(self, network: nn.Module, engine: Engine) -> None:
        super().__init__()
        self.engine = engine
        layout = torch.channels_last if engine.channels_last else torch.preserve_format
        self.network = network.to(engine.device).to(memory_format=layout)
        # Not as an attribute: a compiled module would be registered as a second network.
        self.__dict__["run"] = torch.compile(network) if engine.compile else network

    def forward(self, inputs: Tensor) -> Tensor:
        if self.engine.channels_last and inputs.dim() == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        with self.engine.autocast():
            logits: Tensor = self.__dict__["run"](inputs)
        return logits.float()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Prepared":
        twin = Prepared(copy.deepcopy(self.network, memo), self.engine)
        return twin.train(self.training)


def plain(model: nn.Module) -> nn.Module:
    """Return the network itself, without what the engine put around it."""
    return model.network if isinstance(model, Prepared) else model


def start_engine(settings: EngineSettings) -> Engine:
    """Resolve the device, set the number of threads for this process, and check what is there."""
    assert "auto" not in (settings.precision, settings.channels_last, settings.compile)
    torch.set_num_threads(settings.threads)
    _keep_freed_memory()
    torch.backends.cudnn.deterministic = True  # a resume must repeat every bit
    torch.backends.cudnn.benchmark = False
    device = resolve_device(settings.device)
    processes = start_processes(device)
    if processes.world > 1 and device != "cpu":
        if device != "cuda":
            raise UserError(f"engine.device: must be cuda or cpu under torchrun, got {device!r}")
        device = f"cuda:{processes.local_rank}"
    return Engine(
        device=torch.device(device),
        threads=settings.threads,
        precision=settings.precision,
        channels_last=bool(settings.channels_last),
        compile=bool(settings.compile),
        loaders=settings.loaders,
        processes=processes,
    )


def _keep_freed_memory() -> None:
    """Tell glibc to keep what tensors free for the next step instead of giving it back.

    Given back, every page of every step's temporaries is faulted in anew: thousands of
    faults in each step of a small network.
    """
    if sys.platform == "linux":
        adjust = getattr(ctypes.CDLL(None), "mallopt", lambda option, value: 0)  # musl has none
        adjust(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        adjust(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def num_workers(device: str, asked: int, cells: int) -> int:
    """Return how many processes share the cells: one per core that is ours, one on a GPU."""
    default = num_cores() if resolve_device(device) == "cpu" else 1
    return min(asked or default, cells)


def num_cores() -> int:
    """Return the cores that are ours, which may be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def resolve_device(device: str) -> str:
    """Return the device that `auto` means here; refuse one that is not there."""
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
