"""Small copies of the named datasets, laid out as the whole ones are, and the facts of them."""

import hashlib
import io
import json
import lzma
import pickle
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torchvision.datasets
from PIL import Image

from mixval import dataset_facts
from mixval.dataset_facts import FACTS
from mixval.datasets import folders

CLASSES = 3
RNG = np.random.default_rng(0)
SIZES = {  # train, val, test
    "caltech101": (12, 0, 0),
    "cifar10": (30, 0, 6),
    "cifar100": (30, 0, 6),
    "dtd": (6, 6, 6),
    "fashion20": (10, 0, 10),
    "fashion_mnist": (50, 0, 10),
    "fgvc_aircraft": (3, 3, 3),
    "stl10": (15, 0, 6),
    "tiny_imagenet": (9, 0, 6),
}


def pixels(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def save_image(path: Path, size: tuple[int, int] = (20, 16), mode: str = "RGB") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
    Image.fromarray(pixels(*shape)).save(path)
    return path


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


def lay_out(name: str, root: Path, monkeypatch) -> Path:
    """Write the miniature of a dataset below root, and make its facts those of the dataset."""
    train, val, test = SIZES[name]
    classes = 10 if name.startswith("fashion") else CLASSES
    small = replace(
        FACTS[name], classes=classes, train=train, val=val, test=test, digest="", system=""
    )
    monkeypatch.setitem(dataset_facts.FACTS, name, small)
    if name == "fashion20":
        lay_out("fashion_mnist", root, monkeypatch)
    else:
        WRITERS[name](root / FACTS[name].plain, monkeypatch)
    return root


def _cifar(folder: Path, monkeypatch, dataset, files: dict[str, int], key: str, meta: str) -> None:
    folder.mkdir(parents=True)
    for file, count in files.items():
        entry = {"data": pixels(count, 3072), key: [k % CLASSES for k in range(count)]}
        (folder / file).write_bytes(pickle.dumps(entry))
    names = "label_names" if meta == "batches.meta" else "fine_label_names"
    (folder / meta).write_bytes(pickle.dumps({names: ["x", "y", "z"]}))
    listed = [[file, md5(folder / file)] for file in files]
    monkeypatch.setattr(dataset, "train_list", listed[:-1])
    monkeypatch.setattr(dataset, "test_list", listed[-1:])
    monkeypatch.setattr(dataset, "meta", {**dataset.meta, "md5": md5(folder / meta)})


def cifar10(folder: Path, monkeypatch) -> None:
    files = {"data_batch_1": 15, "data_batch_2": 15, "test_batch": 6}
    _cifar(folder, monkeypatch, torchvision.datasets.CIFAR10, files, "labels", "batches.meta")


def cifar100(folder: Path, monkeypatch) -> None:
    files = {"train": 30, "test": 6}
    _cifar(folder, monkeypatch, torchvision.datasets.CIFAR100, files, "fine_labels", "meta")


def stl10(folder: Path, monkeypatch) -> None:
    folder.mkdir(parents=True)
    for split, count in (("train", 15), ("test", 6)):
        (folder / f"{split}_X.bin").write_bytes(pixels(count, 3, 96, 96).tobytes())
        labels = np.arange(count) % CLASSES + 1
        (folder / f"{split}_y.bin").write_bytes(labels.astype(np.uint8).tobytes())
    (folder / "class_names.txt").write_text("x\ny\nz\n")
    folds = [" ".join(str((3 * f + k) % 15) for k in range(3)) for f in range(10)]
    (folder / "fold_indices.txt").write_text(" \n".join(folds) + " \n")
    dataset = torchvision.datasets.STL10
    for split in ("train", "test"):
        listed = [[f"{split}_{kind}.bin", md5(folder / f"{split}_{kind}.bin")] for kind in "Xy"]
        monkeypatch.setattr(dataset, f"{split}_list", listed)


def fashion_mnist(folder: Path, monkeypatch) -> None:
    folder.mkdir(parents=True)
    for split, count in (("train", 50), ("t10k", 10)):
        images = bytes([0, 0, 8, 3]) + np.array([count, 28, 28], ">i4").tobytes()
        labels = bytes([0, 0, 8, 1]) + np.array([count], ">i4").tobytes()
        (folder / f"{split}-images-idx3-ubyte").write_bytes(images + pixels(count, 784).tobytes())
        numbers = (np.arange(count) % 10).astype(np.uint8)
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(labels + numbers.tobytes())


def caltech101(folder: Path, monkeypatch) -> None:
    for name, count in (("ant", 3), ("bee", 4), ("cat", 5), ("BACKGROUND_Google", 2)):
        for k in range(count):
            mode = "L" if (name, k) == ("bee", 0) else "RGB"
            save_image(folder / name / f"image_{k + 1:04d}.jpg", mode=mode)


def dtd(folder: Path, monkeypatch) -> None:
    inside = {c: [f"{c}/{c}_{k:04d}.jpg" for k in range(6)] for c in ("banded", "dotted", "lined")}
    for names in inside.values():
        for name in names:
            save_image(folder / "images" / name)
    (folder / "labels").mkdir()
    for partition in range(1, 11):
        for place, split in enumerate(("train", "val", "test")):
            first = partition + 2 * place
            chosen = [names[k % 6] for names in inside.values() for k in (first, first + 1)]
            (folder / "labels" / f"{split}{partition}.txt").write_text("\n".join(chosen) + "\n")


def fgvc_aircraft(folder: Path, monkeypatch) -> None:
    variants = ["707-320", "727-200", "A340 300"]
    folder.mkdir(parents=True)
    (folder / "variants.txt").write_text("\n".join(variants) + "\n")
    for place, split in enumerate(("train", "val", "test")):
        lines = []
        for k, variant in enumerate(variants):
            number = f"{10 * place + k:07d}"
            save_image(folder / "images" / f"{number}.jpg", size=(60, 60))
            lines.append(f"{number} {variant}")
        (folder / f"images_variant_{split}.txt").write_text("\n".join(lines) + "\n")


def tiny_imagenet(folder: Path, monkeypatch) -> None:
    """Write the layout of the archive that is distributed."""
    wnids = ["n03", "n01", "n02"]  # not sorted there either
    folder.mkdir(parents=True)
    (folder / "wnids.txt").write_text("\n".join(wnids) + "\n")
    lines = []
    for place, wnid in enumerate(wnids):
        for k in range(3):
            save_image(folder / "train" / wnid / "images" / f"{wnid}_{k}.JPEG", (64, 64))
        (folder / "train" / wnid / f"{wnid}_boxes.txt").write_text("x\t0\t0\t1\t1\n")
        for k in range(2):
            name = f"val_{10 * k + place}.JPEG"
            save_image(folder / "val" / "images" / name, (64, 64))
            lines.append(f"{name}\t{wnid}\t0\t0\t1\t1")
    (folder / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    save_image(folder / "test" / "images" / "test_0.JPEG", (64, 64))
    small = replace(folders.TINY_PART, classes=CLASSES, train=9, test=6)
    monkeypatch.setattr(folders, "TINY_PART", small)


WRITERS = {
    "caltech101": caltech101,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "dtd": dtd,
    "fashion_mnist": fashion_mnist,
    "fgvc_aircraft": fgvc_aircraft,
    "stl10": stl10,
    "tiny_imagenet": tiny_imagenet,
}


# -- packed -------------------------------------------------------------------------------


def write_pack(path: Path, images: np.ndarray, labels: np.ndarray, num_train: int, **raw) -> Path:
    """Write images (N, H, W, 3) as lossless sheets of 2 x 4 cells, with labels and raw files."""
    count, height, width = images.shape[:3]
    meta = {"h": height, "w": width, "n": count, "grid": [2, 4], "ext": "png"}
    meta["classes"] = [f"class {k}" for k in range(int(labels.max()) + 1)]
    meta["splits"] = {"train": [0, num_train], "test": [num_train, count]}
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as opened:
        for sheet in range(-(-count // 8)):
            canvas = np.zeros((2 * height, 4 * width, 3), np.uint8)
            for cell, image in enumerate(images[8 * sheet : 8 * sheet + 8]):
                row, column = divmod(cell, 4)
                top, left = row * height, column * width
                canvas[top : top + height, left : left + width] = image
            content = io.BytesIO()
            Image.fromarray(canvas).save(content, "png")
            opened.writestr(f"tiles/{sheet:05d}.png", content.getvalue())
        saved = io.BytesIO()
        np.save(saved, labels.astype(np.uint8))
        opened.writestr("labels.npy", saved.getvalue())
        opened.writestr("meta.json", json.dumps(meta))
        for name, content in raw.items():
            opened.writestr(f"raw/{name}.txt.xz", lzma.compress(content.encode()))
    return path


def write_archive(path: Path, folder: Path, start: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:xz") as opened:
        opened.add(folder, arcname=start)
    return path
