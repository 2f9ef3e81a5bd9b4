"""Packed copies of array datasets: a zip of image sheets, each a grid of cells in order."""

import io
import json
import lzma
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mixval.datasets.finding import damaged
from mixval.types import Part


@dataclass(frozen=True)
class Pack:
    """What a pack holds: every split as arrays, and the small original files as bytes."""

    train: Part
    test: Part
    classes: tuple[str, ...]
    raw: dict[str, bytes]


def read_pack(path: Path) -> Pack:
    """Return the images, labels and small files of a pack; a damaged one is refused by name."""
    try:
        with zipfile.ZipFile(path) as opened:
            meta = json.loads(opened.read("meta.json"))
            labels = np.load(io.BytesIO(opened.read("labels.npy")), allow_pickle=False)
            images = _read_sheets(opened, meta)
            raw = {name: _member(opened, f"raw/{name}") for name in _raw_names(opened)}
            ids = torch.arange(len(images))
            whole = Part(images, torch.from_numpy(labels.astype(np.int64)), ids)
            if len(labels) != len(images):
                raise ValueError(f"{len(labels)} labels of {len(images)} images")
            ranges = (slice(*meta["splits"][name]) for name in ("train", "test"))
            train, test = (Part(images[r], whole.labels[r], ids[r]) for r in ranges)
            return Pack(train, test, tuple(meta["classes"]), raw)
    except Exception as error:  # zipfile, json, numpy, lzma and PIL each raise their own
        raise damaged(path, error) from error


def _read_sheets(opened: zipfile.ZipFile, meta: dict[str, Any]) -> Tensor:
    """Return the cells of all sheets, row by row, as (N, 3, H, W)."""
    height, width, count = (meta[key] for key in ("h", "w", "n"))
    rows, columns = meta["grid"]
    images = torch.empty((count, 3, height, width), dtype=torch.uint8)
    each = rows * columns

    def read(sheet: int) -> None:
        with Image.open(io.BytesIO(opened.read(f"tiles/{sheet:05d}.{meta['ext']}"))) as image:
            pixels = np.asarray(image.convert("RGB"))
        cells = pixels.reshape(rows, height, columns, width, 3).transpose(0, 2, 4, 1, 3)
        first = sheet * each
        place = slice(first, min(first + each, count))
        flat = cells.reshape(each, 3, height, width)[: place.stop - first]
        images[place] = torch.from_numpy(np.ascontiguousarray(flat))

    with ThreadPoolExecutor() as pool:  # PIL decodes outside Python's lock
        list(pool.map(read, range(-(-count // each))))
    return images


def _raw_names(opened: zipfile.ZipFile) -> list[str]:
    inside = [name for name in opened.namelist() if name.startswith("raw/")]
    return [name.removeprefix("raw/").removesuffix(".xz") for name in inside]


def _member(opened: zipfile.ZipFile, name: str) -> bytes:
    if f"{name}.xz" in opened.namelist():
        return lzma.decompress(opened.read(f"{name}.xz"))
    return opened.read(name)
