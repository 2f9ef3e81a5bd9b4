"""What is known of each named dataset before it is loaded, and where it is looked for; no torch."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = "MIXVAL_DATA"  # the environment variable that says where datasets lie
DEBIAN_FASHION = "/usr/share/datasets/fashion-mnist"  # of the package dataset-fashion-mnist


@dataclass(frozen=True)
class Facts:
    """What a whole copy holds, under which terms, and which files show that it is there."""

    classes: int
    train: int
    val: int  # 0: no validation split of its own, so it is taken from train
    test: int  # 0: no test split of its own
    pixels: str
    licence: str
    plain: str = ""  # below the root, as torchvision or the dataset's own archive lays it out
    packed: tuple[str, ...] = ()  # other copies, below the root
    system: str = ""  # where the operating system's package puts it
    balanced: Literal["splits", "whole", "no"] = "splits"  # equally many images of every class
    digest: str = ""  # of the labels (and pixels), or of the names of the image files


_CIFAR = ("32 x 32", "none stated; cite Krizhevsky 2009")
_FASHION = ("FashionMNIST/raw", (), DEBIAN_FASHION)
FACTS = {
    "caltech101": Facts(
        *(101, 8_677, 0, 0, "about 300 x 200", "CC BY 4.0", "caltech101/101_ObjectCategories"),
        packed=("caltech101/caltech101_short64.tar.xz",),
        balanced="no",
        digest="a083aeef55c25b58",
    ),
    "cifar10": Facts(
        *(10, 50_000, 0, 10_000, *_CIFAR, "cifar-10-batches-py", ("cifar10/cifar10.zip",)),
        digest="40a3c38e1eb3003d",
    ),
    "cifar100": Facts(
        *(100, 50_000, 0, 10_000, *_CIFAR, "cifar-100-python"),
        packed=("cifar100/cifar100_lossless.zip", "cifar100/cifar100_jpeg.zip"),
        digest="bc6a2226d6f88eef",
    ),
    "digits": Facts(10, 1_797, 0, 0, "8 x 8 grey", "CC BY 4.0", balanced="no"),
    "dtd": Facts(
        *(47, 1_880, 1_880, 1_880, "300 to 640 a side", "research use", "dtd/dtd"),
        packed=("dtd/dtd_short96.tar.xz",),
        digest="464a7bfb2f30533c",
    ),
    "fashion20": Facts(10, 12_000, 0, 10_000, "28 x 28 grey", "MIT", *_FASHION),
    "fashion_mnist": Facts(
        10, 60_000, 0, 10_000, "28 x 28 grey", "MIT", *_FASHION, digest="b42e0f3189f494f7"
    ),
    "fgvc_aircraft": Facts(
        *(100, 3_334, 3_333, 3_333, "about 1000 x 700", "non-commercial research"),
        plain="fgvc-aircraft-2013b/data",
        balanced="whole",
    ),
    "stl10": Facts(
        *(10, 5_000, 0, 8_000, "96 x 96", "research use; cite Coates 2011", "stl10_binary"),
        packed=("stl10/stl10_lossless.zip", "stl10/stl10_jpeg.zip"),
        digest="e3f290faf97ec584",
    ),
    "tiny_imagenet": Facts(
        *(200, 100_000, 0, 10_000, "64 x 64", "non-commercial research", "tiny-imagenet-200"),
        packed=("tinyimagenet/tiny-imagenet-200_part.tar.xz",),
    ),
}
# The first 50 of 500 and 10 of 50 images of every class: a small copy for trying things.
TINY_PART = Facts(200, 10_000, 0, 2_000, "64 x 64", "non-commercial research")


def data_root(given: str | None) -> Path | None:
    """Return where datasets lie: what the recipe says, else $MIXVAL_DATA."""
    place = given or os.environ.get(ROOT)
    return Path(place).expanduser() if place else None


def find(name: str, root: Path | None) -> Path | None:
    """Return the first of the dataset's places that exists."""
    facts = FACTS[name]
    below = (facts.plain, *facts.packed) if root is not None else ()
    places = [root / place for place in below if root is not None and place]
    places += [Path(facts.system)] if facts.system else []
    return next((place for place in places if place.exists()), None)


def wanted(name: str) -> str:
    """Return what below the root makes the dataset present."""
    facts = FACTS[name]
    debian = " or, anywhere, Debian's dataset-fashion-mnist" if facts.system else ""
    return " or ".join((facts.plain, *facts.packed)) + debian


def describe(root: Path | None) -> list[tuple[str, ...]]:
    """Return the rows of `mixval datasets`: name, classes, images, size, licence, where."""
    heads = ("name", "classes", "train", "val", "test", "pixels", "licence", "present")
    rows: list[tuple[str, ...]] = [heads]
    for name, facts in sorted(FACTS.items()):
        found = find(name, root)
        there = str(found) if found is not None else f"no: put {wanted(name)} there"
        if name == "digits":
            there = "comes with scikit-learn"
        if name == "tiny_imagenet" and found is not None and found.is_file():
            there += " (a part)"
        counts = (f"{count:,}" if count else "-" for count in (facts.train, facts.val, facts.test))
        rows.append((name, str(facts.classes), *counts, facts.pixels, facts.licence, there))
    return rows
