"""A table (epochs, rows) on disk, written and read an epoch at a time, so that memory stays flat.

For what is known of every row of every epoch's plan: the weight it was given, or the
teacher's H of it. A plain .npy file; numpy reads it without us.
"""

import contextlib
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mixval.errors import UserError

Values = npt.NDArray[Any]


class EpochFile:
    """One such table."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            table: np.memmap[Any, Any] = np.load(path, mmap_mode="r")
            self.epochs, self.rows = table.shape
        except Exception as error:  # numpy lets those of its header's parser through
            raise UserError(f"{path}: not a readable table of epochs and rows ({error})") from error
        self.dtype, self.offset = table.dtype, table.offset
        self._held: tuple[int, Tensor] = (-1, torch.empty(0))

    @staticmethod
    def create(path: Path, epochs: int, rows: int, dtype: str) -> "EpochFile":
        """Return the table at `path`, made anew unless one of this shape is there."""
        with contextlib.suppress(UserError):
            found = EpochFile(path)
            if (found.epochs, found.rows, found.dtype) == (epochs, rows, np.dtype(dtype)):
                return found  # of a training that goes on
        path.parent.mkdir(parents=True, exist_ok=True)
        begun = path.with_name(f".{path.name}.part")
        np.lib.format.open_memmap(begun, mode="w+", dtype=np.dtype(dtype), shape=(epochs, rows))
        os.replace(begun, path)
        return EpochFile(path)

    def write(self, epoch: int, values: Values) -> None:
        # Through the file, not the map: mapped pages would count as this process's memory.
        assert values.shape == (self.rows,) and epoch < self.epochs
        with self.path.open("r+b") as file:
            file.seek(self.offset + epoch * self.rows * self.dtype.itemsize)
            file.write(np.ascontiguousarray(values, dtype=self.dtype).tobytes())
        self._held = (-1, torch.empty(0))

    def read(self, epoch: int, rows: slice = slice(None)) -> Tensor:
        """Return rows of an epoch, which is held until another one is asked for."""
        if self._held[0] != epoch:
            values = np.array(np.load(self.path, mmap_mode="r")[epoch])
            self._held = epoch, torch.from_numpy(values)
        return self._held[1][rows]

    def checksum(self, epoch: int) -> int:
        return zlib.crc32(self.read(epoch).numpy().tobytes())

    @property
    def table(self) -> Tensor:
        """All of it, (epochs, rows), mapped from the file."""
        return torch.from_numpy(np.load(self.path, mmap_mode="c"))
