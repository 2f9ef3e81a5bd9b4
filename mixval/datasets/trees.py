"""Files in a folder or in a packed archive, read the same way."""

import io
import lzma
import os
import tarfile
from pathlib import Path
from typing import Protocol

from mixval.datasets.finding import damaged


class Tree(Protocol):
    """Named files: names are relative, with slashes."""

    path: Path

    def names(self) -> list[str]: ...

    def read(self, name: str) -> bytes: ...

    def num_bytes(self, name: str) -> int: ...


class Folder:
    """The files below a folder; hidden ones are left out."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def names(self) -> list[str]:
        found = []
        for folder, inner, files in os.walk(self.path, followlinks=True):
            inner[:] = [name for name in inner if not name.startswith(".")]
            prefix = Path(folder).relative_to(self.path).as_posix()
            start = "" if prefix == "." else f"{prefix}/"
            found += [start + name for name in files if not name.startswith(".")]
        return sorted(found)

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def num_bytes(self, name: str) -> int:
        return (self.path / name).stat().st_size


class Archive:
    """The files of a small .tar.xz archive, held in memory: nothing is unpacked to disk."""

    def __init__(self, path: Path, start: str) -> None:
        self.path = path
        self.files: dict[str, bytes] = {}
        try:
            # All of it first: that is what compares the checksum of the compressed data.
            whole = io.BytesIO(lzma.decompress(path.read_bytes()))
            with tarfile.open(fileobj=whole) as opened:
                for member in opened:
                    content = opened.extractfile(member) if member.isfile() else None
                    if content is not None and member.name.startswith(f"{start}/"):
                        self.files[member.name.removeprefix(f"{start}/")] = content.read()
        except Exception as error:  # tarfile, lzma and the end of a file each raise their own
            raise damaged(path, error) from error

    def names(self) -> list[str]:
        return sorted(self.files)

    def read(self, name: str) -> bytes:
        return self.files[name]

    def num_bytes(self, name: str) -> int:
        return len(self.files[name])


def open_tree(path: Path, start: str) -> Tree:
    """Return the files of a folder, or those below `start` in an archive."""
    return Folder(path) if path.is_dir() else Archive(path, start)


def lines_of(tree: Tree, name: str) -> list[str]:
    """Return the lines of a text file that are not empty."""
    try:
        text = tree.read(name).decode()
    except (OSError, KeyError, UnicodeDecodeError) as error:
        raise damaged(tree.path, f"no readable file {name}") from error
    return [line.strip() for line in text.splitlines() if line.strip()]
