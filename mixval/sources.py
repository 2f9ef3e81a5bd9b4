"""Load the dataset that a recipe names, once in a process: in memory, or decoded when needed."""

import json
import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mixval import choose
from mixval.dataset_facts import ROOT
from mixval.datasets.checks import checked, parts_of
from mixval.datasets.decoding import ImageFiles
from mixval.errors import UserError
from mixval.types import Part, Source, StreamedImages

IN_MEMORY = 4 * 10**9  # bytes of pixels that `images: auto` holds in memory
_CHUNK = 64  # images that one thread decodes at a time


def load_source(name: str, parameters: dict[str, Any], images: str) -> Source:
    """Return the dataset with its images where they shall be; damaged files are refused now."""
    given = [value for value in parameters.values() if isinstance(value, str)]
    files = [Path(value) for value in given if os.path.exists(value)]
    stamps = [(str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files]
    code = choose.own_code({"name": name})
    state = repr([os.getcwd(), os.environ.get(ROOT), stamps, code])  # what else may change it
    return _load(name, json.dumps(parameters, sort_keys=True), images, state)


def forget_sources() -> None:
    """Read the datasets again when they are next asked for: their files may have changed."""
    _load.cache_clear()


@lru_cache(maxsize=1)  # the seeds of a run ask one after the other for the same one
def _load(name: str, parameters: str, images: str, state: str) -> Source:
    source = choose.pick("datasets", name, json.loads(parameters))()
    if not isinstance(source, Source):
        kind = type(source).__name__
        raise UserError(
            f"data.source: {name} must return a Source (see mixval.from_dataset), got {kind}"
        )
    return place_images(checked(source, name) if ":" in name else source, images)


def place_images(source: Source, images: str) -> Source:
    """Return the source with its image files decoded into memory, or only looked at."""
    parts = parts_of(source)
    streamed = {name: part for name, part in parts.items() if part.streams}
    num_bytes = sum(math.prod(part.images.shape) for part in streamed.values())
    if images == "memory" or (images == "auto" and num_bytes <= IN_MEMORY):
        held = {**parts, **{name: _decoded(part) for name, part in streamed.items()}}
        return Source(held["train"], held.get("test"), source.classes, held.get("val"))
    for part in streamed.values():
        for decoder in part.images.decoders if isinstance(part.images, StreamedImages) else ():
            if isinstance(decoder, ImageFiles):
                decoder.check()
    return source


def _decoded(part: Part) -> Part:
    images = part.images
    assert isinstance(images, StreamedImages)
    try:
        held = torch.empty(images.shape, dtype=torch.uint8)
    except RuntimeError as error:
        size = math.prod(images.shape) / 1e9
        raise UserError(
            f"data.images: {size:.1f} GB do not fit into memory; use stream, or a smaller size"
        ) from error

    def decode(first: int) -> None:
        place = np.arange(first, min(first + _CHUNK, len(part)))
        held[torch.from_numpy(place)] = images[place]

    # PIL decodes outside Python's lock; a user's own dataset may not like threads.
    safe = all(isinstance(decoder, ImageFiles) for decoder in images.decoders)
    with ThreadPoolExecutor(None if safe else 1) as pool:
        for _ in pool.map(decode, range(0, len(part), _CHUNK)):
            pass
    return replace(part, images=held)
