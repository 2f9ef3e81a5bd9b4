"""What a cell learns from, on record: who is in which split, and what was damaged on purpose."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mixval.stages.cell import Cell
from mixval.store import Artifact, Store


def data(cell: Cell, store: Store) -> None:
    """Write id, split and label of every sample but those of test, whose labels stay unread."""
    settings = cell.data.model_dump(mode="json")
    artifact = cell.artifact(store, "data", made_from={"settings": settings})
    cell.once(artifact, lambda: _write(cell, artifact))


def _write(cell: Cell, artifact: Artifact) -> dict[str, Any]:
    splits = cell.splits
    parts = {"train": splits.train, "val_f": splits.val_f, "val_dev": splits.val_dev}
    ids = np.concatenate([part.ids.numpy() for part in parts.values()])
    names = [name for name, part in parts.items() for _ in range(len(part))]
    labels = np.concatenate([part.labels.numpy() for part in parts.values()])
    flipped, corrupted = (
        np.isin(ids, damaged.numpy()) for damaged in (splits.flipped, splits.corrupted)
    )
    columns = {"id": ids, "split": names, "label": labels}
    table = pa.table({**columns, "flipped": flipped, "corrupted": corrupted})
    pq.write_table(table, artifact.path("splits.parquet"), write_page_checksum=True)
    sizes = {name: len(part) for name, part in parts.items()}
    counts = {**sizes, "test": len(splits.test), "flipped": int(flipped.sum())}
    counts["corrupted"] = int(corrupted.sum())
    return {**counts, "classes": list(splits.classes)}
