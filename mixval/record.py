"""What a filter decided for every row of a training: the record that a yoked control replays."""

import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mixval.epoch_file import EpochFile


class Record:
    """The weights that were given to every row of every epoch's plan, in files of float16.

    NaN where nothing was mixed, or no clean sample was filtered. The epoch that is being
    trained is held here, and is part of a checkpoint; the others are on disk.
    """

    def __init__(self, folder: Path) -> None:
        self.files = {name: EpochFile(_record_path(folder, name)) for name in ("mixed", "clean")}
        self.current = {name: self._blank() for name in self.files}
        self.sums: list[list[int]] = []  # checksums of each epoch written

    @staticmethod
    def create(folder: Path | None, epochs: int, rows: int) -> "Record":
        """Return the record in a folder, begun or gone on with; in one of its own for None."""
        place = folder or Path(tempfile.mkdtemp())
        for name in ("mixed", "clean"):
            EpochFile.create(_record_path(place, name), epochs, rows, "float16")
        record = Record(place)
        if folder is None:
            weakref.finalize(record, shutil.rmtree, place, ignore_errors=True)
        return record

    @staticmethod
    def is_in(folder: Path) -> bool:
        return _record_path(folder, "mixed").is_file()

    def write(self, rows: slice, mixed: Tensor | None, clean: Tensor) -> None:
        for name, weights in (("mixed", mixed), ("clean", clean)):
            if weights is not None:
                self.current[name][rows] = weights.cpu().half()

    def end_epoch(self, epoch: int) -> None:
        for name, file in self.files.items():
            file.write(epoch, self.current[name].numpy())
            self.current[name] = self._blank()
        self.sums = [*self.sums[:epoch], self._checksums(epoch)]

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold; the epochs before this one are in the files."""
        return {"current": self.current, "sums": self.sums}

    def resume(self, state: dict[str, Any]) -> bool:
        """Go on from a checkpoint; say whether the files hold the epochs that it knows."""
        for epoch, known in enumerate(state["sums"]):
            if self._checksums(epoch) != known:
                return False
        self.current, self.sums = state["current"], state["sums"]
        return True

    def mean(self, name: str) -> float:
        """Return the mean weight over all rows that have one; 1 where none has."""
        total, count = 0.0, 0
        for epoch in range(self.files[name].epochs):
            weights = self.files[name].read(epoch).float()
            total, count = total + float(weights.nansum()), count + int(weights.isfinite().sum())
        return total / count if count else 1.0

    @property
    def mixed(self) -> Tensor:
        return self.files["mixed"].table

    @property
    def clean(self) -> Tensor:
        return self.files["clean"].table

    def _checksums(self, epoch: int) -> list[int]:
        return [file.checksum(epoch) for file in self.files.values()]

    def _blank(self) -> Tensor:
        return torch.full((self.files["mixed"].rows,), torch.nan, dtype=torch.float16)


def _record_path(folder: Path, name: str) -> Path:
    return folder / f"record_{name}.npy"
