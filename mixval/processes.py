"""One process, or several that torchrun started: who does what, and what all of them know.

Every step's rows are divided in the plan's order, so the rows, their number and what a
filter decides are the same for any number of processes.
"""

import atexit
import contextlib
import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from mixval.errors import UserError

_Made = TypeVar("_Made")


@dataclass(frozen=True)
class Processes:
    """This process among `world` ones. With one, every method gives back what it is given."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0  # among those on this machine: which GPU is ours

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def share(self, count: int) -> slice:
        """Return which of `count` rows are this process's; all of them, each once."""
        return slice(count * self.rank // self.world, count * (self.rank + 1) // self.world)

    def total(self, value: Tensor) -> Tensor:
        """Return the sum over all processes."""
        return value

    def gather(self, rows: Tensor) -> Tensor:
        """Return the rows of all processes, in the order of their shares."""
        return rows

    def any(self, flags: list[bool], device: torch.device) -> list[bool]:
        """Return for each flag whether any process has raised it."""
        return flags

    def from_main(self, make: Callable[[], _Made]) -> _Made:
        """Return what the main process makes; the others wait for it, or for its error."""
        return make()

    def wait(self) -> None:
        """Go on once all processes have come to here."""
        self.from_main(lambda: None)

    def sum_gradients(self, network: nn.Module) -> None:
        """Add up the gradients of all processes, each of its own rows."""

    def average_buffers(self, network: nn.Module) -> None:
        """Give all the mean of what each has counted for itself, such as BatchNorm's statistics."""


ALONE = Processes()


class _Several(Processes):
    """Processes under torchrun; accelerate knows the backend of each device."""

    def total(self, value: Tensor) -> Tensor:
        from accelerate.utils import reduce

        return reduce(value.clone(), "sum")  # type: ignore[no-any-return]

    def gather(self, rows: Tensor) -> Tensor:
        from accelerate.utils import gather

        counts = gather(torch.tensor([len(rows)], device=rows.device)).tolist()
        # Shares may differ by a row, and all must send as much. Not accelerate's own padding:
        # it changes the type of what it pads, and only where it pads.
        padded = rows.new_zeros((max(counts), *rows.shape[1:]))
        padded[: len(rows)] = rows
        parts = torch.split(gather(padded), max(counts)) if max(counts) else [rows]
        return torch.cat([part[:n] for part, n in zip(parts, counts, strict=False)])

    def any(self, flags: list[bool], device: torch.device) -> list[bool]:
        raised = self.total(torch.tensor(flags, dtype=torch.float32, device=device))
        return [bool(count > 0) for count in raised.tolist()]

    def from_main(self, make: Callable[[], _Made]) -> _Made:
        from accelerate.utils import broadcast_object_list

        made: list[Any] = [None, None]
        if self.is_main:
            try:
                made[0] = make()
            except Exception as error:
                made[1] = error
        broadcast_object_list(made)
        if made[1] is not None:
            made[1].said_by_main = True
            raise made[1]
        return made[0]  # type: ignore[no-any-return]

    def sum_gradients(self, network: nn.Module) -> None:
        # Once per optimiser step, whatever number of passes and micro-batches it has: shares
        # may differ by a row, so gradients are added and never averaged.
        gradients = [p.grad for p in network.parameters() if p.grad is not None]
        self._sum_in_place(gradients)

    def average_buffers(self, network: nn.Module) -> None:
        buffers = [b for b in network.buffers() if b.is_floating_point()]
        self._sum_in_place(buffers)
        for buffer in buffers:
            buffer /= self.world

    def _sum_in_place(self, tensors: list[Tensor]) -> None:
        if not tensors:
            return
        flat = self.total(torch.cat([tensor.flatten() for tensor in tensors]))
        sizes = [tensor.numel() for tensor in tensors]
        for tensor, part in zip(tensors, torch.split(flat, sizes), strict=True):
            tensor.copy_(part.view_as(tensor))


def start_processes(device: str) -> Processes:
    """Return this process's place among those torchrun started; alone if it did not."""
    return ALONE if int(os.environ.get("WORLD_SIZE", "1")) == 1 else _join_others(device)


def joined() -> bool:
    """Say whether this process works with others already."""
    return _join_others.cache_info().currsize > 0


def leave(code: int) -> NoReturn:
    """End the process, its work done; one of several ends at once.

    A thread of the backend that wakes while Python takes itself down aborts the process, and
    so the whole launch (pytorch pull request 179291): such a process does not take itself down.
    """
    if not joined():
        sys.exit(code)
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):  # nobody reads any more
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


@functools.cache
def _join_others(device: str) -> Processes:
    try:
        from accelerate import PartialState
    except ImportError as error:
        raise UserError(
            "several processes need accelerate: pip install 'mixval[distributed]'"
        ) from error
    state = PartialState(cpu=device == "cpu")
    # Without an orderly end, threads of the backend may abort a process that is done.
    atexit.register(state.destroy_process_group)
    return _Several(state.process_index, state.num_processes, state.local_process_index)
