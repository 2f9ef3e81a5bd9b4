"""A folder of scores that is written part by part, and says how it was made."""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from mixval.errors import UserError
from mixval.files import write_atomically
from mixval.offline.sources import Layout
from mixval.score_store import read_scores
from mixval.store import Store

log = logging.getLogger(__name__)
SETTINGS = "scores.json"


class ScoreFolder:
    """part-*.parquet, and scores.json with what they were made from."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def settings(self) -> dict[str, Any] | None:
        """Return what scores.json says; None where nothing is yet; refuse what is not ours."""
        path = self.root / SETTINGS
        if not path.is_file():
            if self.root.exists() and not self.root.is_dir():
                raise UserError(f"--out: {self.root} is a file; give a folder")
            if self.root.exists() and any(p.name != ".lock" for p in self.root.iterdir()):
                raise UserError(
                    f"--out: {self.root} is not empty and has no {SETTINGS}; choose another"
                )
            return None
        try:
            said: dict[str, Any] = json.loads(path.read_bytes())
            assert isinstance(said["made_from"], dict)
        except (ValueError, KeyError, TypeError, AssertionError) as error:
            raise UserError(f"--out: {path} is damaged or not ours; choose another") from error
        return said

    def check(self, made_from: Mapping[str, Any], layout: Layout) -> None:
        """Refuse a folder of scores that were made from something else."""
        before = (self.settings() or {"made_from": made_from})["made_from"]
        for key in made_from:
            if before.get(key) != made_from[key]:
                values = f"{before.get(key)}, not {made_from[key]}"
                raise UserError(
                    f"--out: {self.root} was made with another {key} ({values}); choose another "
                    "--out, or remove that folder"
                )
        known = {self.part(number).name for number in range(layout.num_parts)}
        for path in sorted(self.root.glob("part-*.parquet")):
            if path.name not in known:
                raise UserError(f"--out: {path} is not of these scores; choose another --out")

    def write(self, said: Mapping[str, Any]) -> None:
        text = json.dumps(said, indent=1, sort_keys=True)
        write_atomically(self.root / SETTINGS, text.encode())

    def part(self, number: int) -> Path:
        return self.root / f"part-{number:05d}.parquet"

    def missing(self, layout: Layout, provenance: dict[str, str]) -> list[int]:
        """Return the parts that are not there, or not whole."""
        return [
            number
            for number in range(layout.num_parts)
            if not self._is_whole(self.part(number), layout.rows(number), provenance)
        ]

    def _is_whole(self, path: Path, rows: range, provenance: dict[str, str]) -> bool:
        if not path.is_file():
            return False
        try:
            table = read_scores(path)
        except UserError:
            log.warning("%s is damaged and is made again", path)
            return False
        return table.provenance == provenance and np.array_equal(table.row, rows)

    def num_kept(self, layout: Layout) -> int:
        """Return how many rows have r_hat <= 0, from what was written."""
        kept = 0
        for number in range(layout.num_parts):
            column = pq.read_table(
                self.part(number), columns=["r_hat"], page_checksum_verification=True
            )
            kept += int((np.asarray(column["r_hat"]) <= 0).sum())
        return kept

    @contextmanager
    def locked(self) -> Iterator[None]:
        with Store(self.root).locked():
            yield


def class_names(path: Path) -> list[str]:
    """Return the class names of a folder of scores; warn where rows are missing."""
    if not (path / SETTINGS).is_file():
        return []
    said = ScoreFolder(path).settings() or {}
    if said.get("share r_hat <= 0") is None:
        log.warning("%s is unfinished: give the same mixval score again to go on", path)
    return list(said.get("classes", []))
