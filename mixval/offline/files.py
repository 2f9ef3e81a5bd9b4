"""Mixes in files: tables of (i, j, lam), and batches that were made elsewhere."""

import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from mixval.errors import UserError
from mixval.fingerprints import file_digest
from mixval.scoring import MadeMixes
from mixval.types import Floats, Ints, MixPlan, Part

_COLUMNS = {"i": pa.int64(), "j": pa.int64(), "lam": pa.float64()}
_ARRAYS = ("x", "y_a", "y_b", "lam")


# -- tables -------------------------------------------------------------------------------


def read_table(path: Path, part: Part, split: str) -> Iterator[MixPlan]:
    """Yield the mixes of a table (.csv or .parquet) with the columns i, j and lam, in its order.

    i and j are ids of samples of the part, as in a ScoreTable; rows that are none are refused.
    """
    ids = part.ids.numpy()
    order = np.argsort(ids, kind="stable")
    row = 0
    for batch in _opened(path):
        columns = {name: _column(batch, name, path, row) for name in _COLUMNS}
        lam = _checked_lam(columns["lam"], path, row)
        i, j = (
            _positions(columns[name], ids, order, f"{path}: {name}", split, row)
            for name in ("i", "j")
        )
        row += len(lam)
        yield MixPlan(i, j, lam, alpha=1.0, epoch=0)
    if not row:
        raise UserError(f"{path}: has no rows; give a table with the columns i, j and lam")


def _opened(path: Path) -> Iterator[pa.RecordBatch]:
    reader = {".csv": _csv, ".parquet": _parquet}.get(path.suffix)
    if reader is None:
        raise UserError(f"{path}: must be a .csv or .parquet with the columns i, j and lam")
    if not path.is_file():
        raise UserError(f"{path}: there is no such file; give a .csv or .parquet")
    try:
        yield from reader(path)
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: not a readable table of mixes ({reason})") from error


def _csv(path: Path) -> Iterator[pa.RecordBatch]:
    # By its name as text first: a missing column is then told from one of other things.
    with path.open(encoding="utf-8-sig") as file:
        _check_names([name.strip().strip('"') for name in file.readline().split(",")], path)
    wanted = pa.csv.ConvertOptions(column_types=_COLUMNS, include_columns=list(_COLUMNS))
    with pa.csv.open_csv(path, convert_options=wanted) as reader:
        yield from reader


def _parquet(path: Path) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        _check_names(file.schema_arrow.names, path)
        yield from file.iter_batches(columns=list(_COLUMNS))


def _check_names(found: Sequence[str], path: Path) -> None:
    for name in _COLUMNS:
        if name not in found:
            shown = ", ".join(found)[:80]
            raise UserError(f"{path}: has no column {name!r}; it needs i, j and lam, has {shown}")


def _column(batch: pa.RecordBatch, name: str, path: Path, row: int) -> Any:
    column, kind = batch.column(name), _COLUMNS[name]
    number = pa.types.is_integer(column.type) or (
        name == "lam" and pa.types.is_floating(column.type)
    )
    if not number:
        rule = "numbers" if name == "lam" else "whole numbers"
        raise UserError(f"{path}: {name} must be {rule}, got {column.type}")
    if column.null_count:
        first = row + int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise UserError(f"{path}: {name} must be a number in every row, got nothing in row {first}")
    return np.array(column.cast(kind))  # a copy: torch does not take what can't be written to


def _checked_lam(lam: Floats, path: Path, row: int) -> Floats:
    wrong = np.flatnonzero(~((lam >= 0) & (lam <= 1)))  # NaN too
    if len(wrong):
        at = int(wrong[0])
        raise UserError(f"{path}: lam must be in [0, 1], got {lam[at]:g} in row {row + at}")
    return lam


def _positions(given: Ints, ids: Ints, order: Ints, name: str, split: str, row: int) -> Ints:
    """Return where the samples with these ids are."""
    places = np.searchsorted(ids, given, sorter=order)
    found: Ints = order[np.minimum(places, len(ids) - 1)]
    wrong = np.flatnonzero(ids[found] != given)
    if len(wrong):
        at = int(wrong[0])
        raise UserError(
            f"{name} must be the id of a sample of {split} ({ids.min()} to {ids.max()}), "
            f"got {given[at]} in row {row + at}"
        )
    return found


# -- batches ------------------------------------------------------------------------------


@dataclass
class BatchFiles:
    """Batches x (B, ...), y_a (B,), y_b (B,) and lam (B,) or (), a file each, read when needed.

    x is float and what the networks see: mixed, and normalised as they want it.
    """

    paths: Sequence[Path]
    counts: list[int] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    input_shape: tuple[int, ...] = ()
    num_labels: int = 0
    held: tuple[Path, MadeMixes] | None = None

    def __post_init__(self) -> None:
        for path in self.paths:
            mixes = self._file(path)
            shape = tuple(mixes.inputs.shape[1:])
            if shape != (self.input_shape or shape):
                raise UserError(
                    f"{path}: a row of x must be {self.input_shape} as in {self.paths[0]}, "
                    f"got {shape}"
                )
            self.input_shape = shape
            self.counts.append(len(mixes))
            self.digests.append(file_digest(path)[:16])
            largest = max(int(mixes.label_i.max()), int(mixes.label_j.max()))
            self.num_labels = max(self.num_labels, largest + 1)

    def __len__(self) -> int:
        return sum(self.counts)

    def read(self, start: int, stop: int) -> MadeMixes:
        """Return the rows from `start` up to `stop`, counted over all files."""
        found, first = [], 0
        for path, count in zip(self.paths, self.counts, strict=True):
            if start < first + count and stop > first:
                rows = slice(max(start - first, 0), stop - first)
                found.append(self._file(path).keep(rows))
            first += count
        columns = ("inputs", "label_i", "label_j", "lam")
        return MadeMixes(*(torch.cat([getattr(m, name) for m in found]) for name in columns))

    def _file(self, path: Path) -> MadeMixes:
        if self.held is None or self.held[0] != path:
            self.held = path, _checked_batch(_arrays(path), path)
        return self.held[1]


def _arrays(path: Path) -> dict[str, Tensor]:
    readers: dict[str, Callable[[Path], dict[str, Tensor]]]
    readers = {".npz": _npz, ".safetensors": load_file}
    reader = readers.get(path.suffix)
    if reader is None:
        raise UserError(f"{path}: must be a .npz or .safetensors with x, y_a, y_b and lam")
    if not path.is_file():
        raise UserError(f"{path}: there is no such file; give a .npz or .safetensors")
    try:
        arrays = reader(path)
    except (SafetensorError, zipfile.BadZipFile, OSError, ValueError, TypeError, EOFError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: not a readable batch of plain arrays ({reason})") from error
    for name in _ARRAYS:
        if name not in arrays:
            raise UserError(f"{path}: has no {name!r}; it needs x, y_a, y_b and lam")
    return arrays


def _npz(path: Path) -> dict[str, Tensor]:
    with np.load(path, allow_pickle=False) as file:
        return {name: torch.from_numpy(np.asarray(file[name])) for name in _ARRAYS if name in file}


def _checked_batch(arrays: dict[str, Tensor], path: Path) -> MadeMixes:
    inputs, lam = arrays["x"], arrays["lam"]
    if not inputs.is_floating_point() or inputs.dim() < 2 or not len(inputs):
        raise UserError(
            f"{path}: x must be floats (B, ...) as the models see them, "
            f"got {inputs.dtype} {tuple(inputs.shape)}"
        )
    if not torch.isfinite(inputs).all():
        row = int((~torch.isfinite(inputs.flatten(1)).all(1)).nonzero()[0])
        raise UserError(f"{path}: x must be finite, got NaN or infinity in row {row}")
    if not lam.is_floating_point() or lam.shape not in ((), inputs.shape[:1]):
        raise UserError(
            f"{path}: lam must be a float or floats ({len(inputs)},), "
            f"got {lam.dtype} {tuple(lam.shape)}"
        )
    every = _checked_lam(lam.double().expand(len(inputs)).numpy(), path, 0)
    y_a, y_b = (_checked_labels(arrays[name], name, len(inputs), path) for name in ("y_a", "y_b"))
    return MadeMixes(inputs.float(), y_a, y_b, torch.from_numpy(np.array(every)))


def _checked_labels(labels: Tensor, name: str, rows: int, path: Path) -> Tensor:
    whole = not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)
    if not whole or labels.shape != (rows,):
        raise UserError(
            f"{path}: {name} must be whole numbers ({rows},), "
            f"got {labels.dtype} {tuple(labels.shape)}"
        )
    if int(labels.min()) < 0:
        raise UserError(f"{path}: {name} must be at least 0, got {int(labels.min())}")
    return labels.long()
