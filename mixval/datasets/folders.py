"""Folders of image files: one's own, and Tiny-ImageNet."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from mixval.bounds import Count
from mixval.dataset_facts import FACTS, TINY_PART
from mixval.datasets.checks import checked, whole
from mixval.datasets.decoding import EXTENSIONS, ImageFiles, file_part
from mixval.datasets.finding import damaged, locate
from mixval.datasets.trees import Folder, Tree, lines_of, open_tree
from mixval.errors import UserError
from mixval.types import Part, Source


def image_folder(*, path: str, size: Count = 224, mode: Literal["RGB", "L"] = "RGB") -> Source:
    """Return your own images: path/CLASS/*.jpg, or path/{train,val,test}/CLASS/*.jpg."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise UserError(
            f"data.source.path: no folder {path!r}; give one that has a folder for every class"
        )
    tree, splits = Folder(folder), _split_folders(folder)
    classes = _class_folders(folder / splits[0])
    names = [name for name in tree.names() if name.lower().endswith(EXTENSIONS)]
    parts: dict[str, Part] = {}
    for split in splits:
        inside = [name for name in names if name.startswith(f"{split}/" if split else "")]
        labelled = _labelled(inside, classes, 1 if split else 0, folder)
        first = sum(map(len, parts.values()))
        files = ImageFiles(tree, [name for name, _ in labelled], size, mode=mode)
        parts[split or "train"] = file_part(files, [label for _, label in labelled], first_id=first)
    source = Source(parts["train"], parts.get("test"), tuple(classes), parts.get("val"))
    return checked(source, folder)


def tiny_imagenet(*, size: Count = 64, part: bool = False, root: str | None = None) -> Source:
    """Return Tiny-ImageNet: 100,000 train photos of 200 classes, 64 x 64; its val split is test.

    Its own test split has no labels. `part: true` takes a copy of a tenth: 50 train and 10
    test images a class. No library fetches it, so there is no `download`.
    """
    path = locate("tiny_imagenet", root)
    if path.is_file() and not part:
        raise UserError(f"{path}: is a part of tiny_imagenet; put the whole there, or part: true")
    tree = open_tree(path, "tiny-imagenet-200")
    classes = sorted(lines_of(tree, "wnids.txt"))
    names = [name for name in tree.names() if name.lower().endswith(EXTENSIONS)]
    train = _labelled([n for n in names if n.startswith("train/")], classes, 1, path)
    test = _tiny_val(tree, [n for n in names if n.startswith("val/")], classes)
    parts = [
        file_part(ImageFiles(tree, [name for name, _ in labelled], size), [k for _, k in labelled])
        for labelled in (train, test)
    ]
    shifted = Part(parts[1].images, parts[1].labels, parts[1].ids + len(train))
    source = Source(parts[0], shifted, tuple(classes))
    return whole(source, path, TINY_PART if part else FACTS["tiny_imagenet"], "")


def _tiny_val(tree: Tree, names: Sequence[str], classes: Sequence[str]) -> list[tuple[str, int]]:
    """Return the labelled validation images: as distributed, or sorted into class folders."""
    if not any(name.startswith("val/images/") for name in names):
        return _labelled(names, classes, 1, tree.path)
    known = set(names)
    labelled = []
    for line in lines_of(tree, "val/val_annotations.txt"):
        name, wnid, *_ = [*line.split("\t"), ""]
        if f"val/images/{name}" not in known or wnid not in classes:
            raise damaged(tree.path, f"val/val_annotations.txt: {line[:60]!r}")
        labelled.append((f"val/images/{name}", classes.index(wnid)))
    return sorted(labelled)


def _split_folders(folder: Path) -> list[str]:
    """Return train, val and test where the folder has them; [""] if it is one of classes."""
    if not (folder / "train").is_dir() or not _class_folders(folder / "train"):
        return [""]
    known = ("train", "val", "test")
    others = [name for name in _class_folders(folder) if name not in known]
    if others:
        raise UserError(
            f"{folder}: has train/, so it may have val/ and test/ besides, but not "
            f"{others[0]}/; rename it, or take it out"
        )
    return [name for name in known if (folder / name).is_dir()]


def _class_folders(folder: Path) -> list[str]:
    return sorted(
        inner.name for inner in folder.iterdir() if inner.is_dir() and inner.name[0] != "."
    )


def _labelled(
    names: Sequence[str], classes: Sequence[str], depth: int, where: Path
) -> list[tuple[str, int]]:
    """Return the names with the label that the folder at this depth says."""
    label_of = {name: label for label, name in enumerate(classes)}
    labelled = []
    for name in names:
        folders = name.split("/")[:-1]
        if len(folders) <= depth:
            continue  # beside the class folders, such as a contact sheet
        if folders[depth] not in label_of:
            raise UserError(f"{where}: {name} is of a class that train does not have")
        labelled.append((name, label_of[folders[depth]]))
    return labelled
