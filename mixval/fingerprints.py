"""What something is, as sixteen hex digits: equal content, equal fingerprint."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np


def fingerprint(value: Any) -> str:
    """Return the fingerprint of JSON-like data; the order of keys does not matter."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def array_fingerprint(*arrays: Any) -> str:
    """Return the fingerprint of arrays or CPU tensors: their bytes, shapes and types."""
    digest = hashlib.sha256()
    for array in map(np.asarray, arrays):
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)  # no copy: arrays may be all the data
    return digest.hexdigest()[:16]


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
