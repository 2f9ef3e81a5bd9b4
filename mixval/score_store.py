"""ScoreTable <-> parquet: one file per part, with page checksums and the provenance inside."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mixval.errors import UserError
from mixval.types import ScoreTable

_PROVENANCE = b"mixval"
_GROUP = 1 << 16  # rows that are compressed together
# Columns of few values, or of one. The others would make a dictionary as long as themselves:
# without it, and with encodings for their type, files are 0.6 as large and written 3 times as fast.
_FEW = ["epoch", "label_i", "label_j", "std_error", "p_negative", "kept"]


class ScoreWriter:
    """Write tables one after the other into one file, in groups of rows worth compressing.

    Columns keep the types that the first table has.
    """

    def __init__(self, path: Path, provenance: dict[str, str]) -> None:
        self.path, self.provenance = path, provenance
        self.unfinished = path.with_name(f".{path.name}.part")
        self.file: pq.ParquetWriter | None = None
        self.held, self.count = list[ScoreTable](), 0

    def __enter__(self) -> "ScoreWriter":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.file is None and not self.held:
            self.held = [_no_rows()]
        self._flush()
        assert self.file is not None
        self.file.close()
        if kind is None:
            os.replace(self.unfinished, self.path)
        else:
            self.unfinished.unlink()

    def write(self, table: ScoreTable) -> None:
        self.held.append(table)
        self.count += len(table)
        if self.count >= _GROUP:
            self._flush()

    def _flush(self) -> None:
        if not self.held:
            return
        columns = {
            name: np.concatenate([getattr(table, name) for table in self.held])
            for name in ScoreTable.columns()
        }
        for name in self.held[0].beside:
            columns[name] = np.concatenate([table.beside[name] for table in self.held])
        described = {_PROVENANCE: json.dumps(self.provenance, sort_keys=True).encode()}
        table = pa.table(columns).replace_schema_metadata(described)
        if self.file is None:
            self.file = pq.ParquetWriter(
                self.unfinished,
                table.schema,
                compression="zstd",
                write_page_checksum=True,
                use_dictionary=_FEW,
                column_encoding=_encodings(table.schema),
            )
        self.file.write_table(table)
        self.held, self.count = [], 0


def _no_rows() -> ScoreTable:
    whole = {"epoch", "row", "i", "j", "label_i", "label_j"}
    columns: dict[str, Any] = {
        name: np.zeros(0, dtype=np.int64 if name in whole else np.float64)
        for name in ScoreTable.columns()
    }
    return ScoreTable(**columns)


def _encodings(schema: pa.Schema) -> dict[str, str]:
    """Return how the columns of many values are laid out: floats by byte, integers by steps."""
    return {
        column.name: "BYTE_STREAM_SPLIT"
        if pa.types.is_floating(column.type)
        else "DELTA_BINARY_PACKED"
        for column in schema
        if column.name not in _FEW
    }


def write_scores(path: Path, table: ScoreTable) -> None:
    with ScoreWriter(path, table.provenance) as writer:
        writer.write(table)


def read_scores(path: Path | str) -> ScoreTable:
    """Return the scores of one part, or of every part in a folder."""
    path = Path(path)
    if path.is_dir():
        return _join(path, [read_scores(part) for part in sorted(path.glob("part-*.parquet"))])
    try:
        table = pq.read_table(path, page_checksum_verification=True)
        provenance = json.loads((table.schema.metadata or {})[_PROVENANCE])
        columns = {name: np.asarray(table[name]) for name in ScoreTable.columns()}
        others = [name for name in table.column_names if name not in columns]
        beside = {name: np.asarray(table[name]) for name in others}
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise UserError(f"{path}: not a readable table of scores ({error})") from error
    return ScoreTable(**columns, provenance=provenance, beside=beside)


def _join(folder: Path, tables: list[ScoreTable]) -> ScoreTable:
    """Return the parts as one; refuse parts of other data, another plan or another teacher."""
    if not tables:
        raise UserError(f"{folder}: holds no table of scores; make one with `mixval score`")
    for table in tables[1:]:
        check_provenance(
            table, {key: tables[0].provenance[key] for key in ("data", "plan", "updated")}
        )
    return ScoreTable.join(tables)


def check_provenance(table: ScoreTable, expected: dict[str, str]) -> None:
    """Refuse to join scores to data, plans or networks other than those they were made with."""
    for what, value in expected.items():
        if table.provenance.get(what) != value:
            raise UserError(
                f"scores: made with another {what} ({table.provenance.get(what)}, not {value}); "
                "score again"
            )
