"""Files that are whole or not there, and folders that say what is in them."""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from mixval.errors import UserError
from mixval.fingerprints import file_digest, fingerprint

log = logging.getLogger(__name__)
MANIFEST = "manifest.json"


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees the old one or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def seal(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write the manifest of a folder, last of all: facts, the digest of each file, and its own."""
    files = {path.name: file_digest(path) for path in sorted(folder.iterdir()) if path.is_file()}
    files.pop(MANIFEST, None)
    said = {"facts": dict(facts), "files": files}
    text = json.dumps({**said, "digest": fingerprint(said)}, indent=1, sort_keys=True)
    write_atomically(folder / MANIFEST, text.encode())


def sealed_facts(folder: Path) -> dict[str, Any] | None:
    """Return the facts of a sealed folder; None if unfinished, or damaged (logged by name)."""
    if not (folder / MANIFEST).is_file():
        return None
    try:
        said = json.loads((folder / MANIFEST).read_bytes())
        whole = said.pop("digest") == fingerprint(said)
    except (ValueError, KeyError, AttributeError, TypeError):
        whole = False
    if not whole:
        log.warning("%s is damaged and is not used", folder / MANIFEST)
        return None
    for name, digest in said["files"].items():
        if not (folder / name).is_file() or file_digest(folder / name) != digest:
            log.warning("%s is damaged or missing and is not used", folder / name)
            return None
    facts: dict[str, Any] = said["facts"]
    return facts


def weight_facts(path: Path) -> dict[str, str]:
    """Return the facts in the header of a weights file, without reading the tensors."""
    try:
        with safe_open(path, framework="numpy") as file:
            return dict(file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({error})") from error
