"""Photo collections in files: Caltech-101, Describable Textures, FGVC-Aircraft."""

from pathlib import Path
from typing import Literal

from mixval.bounds import Count
from mixval.dataset_facts import FACTS
from mixval.datasets.checks import whole
from mixval.datasets.decoding import EXTENSIONS, ImageFiles, file_part
from mixval.datasets.finding import damaged, locate
from mixval.datasets.trees import Folder, lines_of, open_tree
from mixval.fingerprints import fingerprint
from mixval.types import Part, Source

_BACKGROUND = "BACKGROUND_Google"  # not a class: pictures of anything
_BANNER = 20  # rows at the bottom of every aircraft photo that name its owner


def caltech101(*, size: Count = 224, root: str | None = None, download: bool = False) -> Source:
    """Return Caltech-101: 8,677 photos of 101 kinds of objects; it has no splits of its own."""
    from torchvision.datasets import Caltech101

    path = locate("caltech101", root, download, lambda folder: Caltech101(folder, download=True))
    tree = open_tree(path, "caltech101/101_ObjectCategories")
    found = [name for name in tree.names() if name.lower().endswith(EXTENSIONS)]
    names = [n for n in found if n.count("/") == 1 and not n.startswith(_BACKGROUND)]
    classes = sorted({name.split("/")[0] for name in names})
    labels = [classes.index(name.split("/")[0]) for name in names]
    source = Source(file_part(ImageFiles(tree, names, size), labels), None, tuple(classes))
    return whole(source, path, FACTS["caltech101"], fingerprint(names))


def dtd(
    *,
    partition: Literal[1, 2, 3, 4, 5, 6, 7, 8, 9, 10] = 1,
    size: Count = 224,
    root: str | None = None,
    download: bool = False,
) -> Source:
    """Return Describable Textures: 47 classes, 1,880 train, validation and test photos each.

    The ten official partitions divide the same 5,640 photos; their ids stay the same.
    """
    from torchvision.datasets import DTD

    path = locate("dtd", root, download, lambda folder: DTD(folder, download=True))
    tree = open_tree(path, "dtd/dtd")
    lists = {s: lines_of(tree, f"labels/{s}{partition}.txt") for s in ("train", "val", "test")}
    every = sorted(name for names in lists.values() for name in names)
    if len(set(every)) != len(every) or not all(name.count("/") == 1 for name in every):
        raise damaged(path, f"the lists of partition {partition} name an image twice or no class")
    ids = {name: place for place, name in enumerate(every)}
    classes = sorted({name.split("/")[0] for name in every})
    parts = {}
    for split, names in lists.items():
        files = ImageFiles(tree, [f"images/{name}" for name in names], size)
        labels = [classes.index(name.split("/")[0]) for name in names]
        parts[split] = file_part(files, labels, ids=[ids[name] for name in names])
    source = Source(parts["train"], parts["test"], tuple(classes), parts["val"])
    return whole(source, path, FACTS["dtd"], fingerprint(every))


def fgvc_aircraft(
    *, trainval: bool = False, size: Count = 224, root: str | None = None, download: bool = False
) -> Source:
    """Return FGVC-Aircraft: 100 variants, 3,334 train, 3,333 validation and 3,333 test photos.

    The banner at the bottom is cut off. `trainval: true` joins train and validation.
    """
    from torchvision.datasets import FGVCAircraft

    path = locate(
        "fgvc_aircraft", root, download, lambda folder: FGVCAircraft(folder, download=True)
    )
    classes = lines_of(Folder(path), "variants.txt")
    parts: dict[str, Part] = {}
    for split in ("train", "val", "test"):
        first = sum(map(len, parts.values()))
        parts[split] = _aircraft(path, split, classes, size, first)
    source = Source(parts["train"], parts["test"], tuple(classes), parts["val"])
    whole(source, path, FACTS["fgvc_aircraft"], "")
    if not trainval:
        return source
    return Source(Part.join([parts["train"], parts["val"]]), parts["test"], tuple(classes))


def _aircraft(path: Path, split: str, classes: list[str], size: int, first_id: int) -> Part:
    tree, names, labels = Folder(path), [], []
    for line in lines_of(tree, f"images_variant_{split}.txt"):
        number, _, variant = line.partition(" ")
        if variant not in classes:
            raise damaged(path, f"images_variant_{split}.txt: {line[:60]!r}")
        names.append(f"images/{number}.jpg")
        labels.append(classes.index(variant))
    return file_part(ImageFiles(tree, names, size, banner=_BANNER), labels, first_id=first_id)
