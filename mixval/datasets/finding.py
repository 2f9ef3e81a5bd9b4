"""Where a named dataset lies: found below the root, fetched, or refused with what to put where."""

import os
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from mixval.dataset_facts import ROOT, data_root, find, wanted
from mixval.errors import UserError


def locate(
    name: str,
    root: str | None,
    download: bool = False,
    fetch: Callable[[Path], object] | None = None,
) -> Path:
    """Return the path of the dataset's folder or pack; `fetch` downloads it below the root."""
    folder = data_root(root)
    if not download or fetch is None:
        found = find(name, folder)
        if found is None:
            missing = f"no {name} under {str(folder)!r}; put {wanted(name)} there"
            if folder is None:
                missing = f"not given; give a folder with {wanted(name)}"
            also = "" if fetch is None else ", or download: true"
            raise UserError(f"data.source.root: {missing}, or set {ROOT}{also}")
        return found
    if folder is None:
        raise UserError(f"data.source.root: must say where to download {name} to (or set {ROOT})")
    found = find(name, folder)
    if found is not None and not os.access(folder, os.W_OK):
        return found  # on a disk that nobody can be fetching to
    folder.mkdir(parents=True, exist_ok=True)
    # Seeds run in processes of their own: one fetches, the others wait and find it.
    with FileLock(folder / f".mixval-{name}.lock"):
        found = find(name, folder)
        if found is None:
            _fetch(name, folder, fetch)
            found = find(name, folder)
    if found is None:
        raise UserError(f"{folder}: {name} was fetched but is not there; delete what is, try again")
    return found


def _fetch(name: str, folder: Path, fetch: Callable[[Path], object]) -> None:
    try:
        fetch(folder)
    except Exception as error:  # no network, a wrong checksum, a cut archive, a full disk
        reason = " ".join(str(error).split())
        raise UserError(
            f"data.source.download: {name} could not be fetched to {str(folder)!r} ({reason}); "
            f"put {wanted(name)} there"
        ) from error


def damaged(path: Path | str, why: object) -> UserError:
    """Return the refusal of a copy that is not what it should be."""
    reason = " ".join(str(why).split())
    return UserError(f"{path}: damaged or incomplete ({reason}); delete it and get it again")
