"""F, what the base network fails."""

import logging
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from mixval import choose
from mixval.metrics import predict
from mixval.seeding import generator
from mixval.stages.cell import Cell
from mixval.stages.network import Network
from mixval.store import Artifact, Store
from mixval.types import FailureSet, Part

log = logging.getLogger(__name__)


def failures(cell: Cell, base: Network, store: Store) -> FailureSet:
    """Return the samples that the base network fails, divided into query and hold-out."""
    settings = cell.recipe.failures
    part = cell.splits.val_f if settings.split == "val_f" else cell.splits.test
    artifact = cell.artifact(
        store,
        "failures",
        made_from={
            "settings": settings.model_dump(mode="json"),
            "base": base.fingerprint,
            "examined": part.fingerprint,
        },
    )
    if cell.reuse(artifact) is None:
        rows = cell.rows(part)
        seen = predict(base.model, rows, processes=cell.engine.processes)
        cell.once(artifact, lambda: _find(cell, seen, part, artifact))
    table = pq.read_table(artifact.path("failures.parquet")).to_pydict()
    ids, use = np.array(table["id"], dtype=np.int64), np.array(table["use"])
    return FailureSet(
        query=np.sort(ids[use == "query"]),
        holdout=np.sort(ids[use == "holdout"]),
        rule=settings.rule.name,
        split=settings.split,
        examined=len(part),
    )


def _find(cell: Cell, seen: Tensor, part: Part, artifact: Artifact) -> dict[str, Any]:
    settings = cell.recipe.failures
    rule = choose.pick("failure_rules", settings.rule.name, settings.rule.parameters)
    failing = rule(seen, part.labels.to(seen.device)).cpu().numpy()
    ids = generator(cell.seed, "failures").permutation(part.ids.numpy()[failing])
    held = round(settings.holdout * len(ids))
    use = np.where(np.arange(len(ids)) < held, "holdout", "query")
    pq.write_table(
        pa.table({"id": ids, "use": use.tolist()}),
        artifact.path("failures.parquet"),
        write_page_checksum=True,
    )
    if not len(ids):
        log.warning(
            "%s, seed %d: the base network fails nothing on %s; a teacher on D∪F is one on D",
            *(cell.panel, cell.seed, settings.split),
        )
    return {"found": len(ids), "of": len(part)}
