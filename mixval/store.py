"""A run directory: the only thing that knows paths.

Each artifact is a folder whose manifest, written last, holds the fingerprints of what it
was made from and the digest of each of its files. An artifact that was made from the
same things is used again; one that was made from others is never overwritten.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from mixval.errors import UserError
from mixval.files import MANIFEST, seal, sealed_facts, write_atomically
from mixval.fingerprints import fingerprint
from mixval.recipe import NAMED, Recipe
from mixval.recipe_loading import recorded_recipe


class Artifact:
    """One stage's product in a folder of its own."""

    def __init__(self, folder: Path, made_from: Mapping[str, Any], kind: str) -> None:
        self.folder, self.made_from, self.kind = folder, dict(made_from), kind

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.made_from)

    def path(self, name: str) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder / name

    def facts(self) -> dict[str, Any] | None:
        """Return what the stage noted, if the artifact is whole and made from the same things."""
        sealed = sealed_facts(self.folder)
        if sealed is None:
            (self.folder / MANIFEST).unlink(missing_ok=True)
            return None
        before = sealed["made_from"]
        for key, value in self.made_from.items():
            if before.get(key) != value:
                raise UserError(
                    f"{self.folder}: was made with another {key}; "
                    "choose another --out, or remove that folder to make it again"
                )
        facts: dict[str, Any] = sealed["facts"]
        return facts

    def finish(self, facts: Mapping[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        seal(self.folder, {"made_from": self.made_from, "facts": dict(facts)})


class Store:
    """The artifacts of a run, by panel and seed, and the files that describe the run."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def place(self, panel: str, seed: int, *names: str) -> Path:
        return self.root.joinpath(panel, f"seed-{seed}", *names)

    def places(self, panel: str, *names: str) -> list[Path]:
        """Return what there is at this place in any seed."""
        return sorted(self.root.glob("/".join([panel, "seed-*", *names])))

    def is_finished(self, panel: str, seed: int, *names: str) -> bool:
        """Say whether something lies there; whether it is whole and fits, its Artifact says."""
        return self.place(panel, seed, *names, MANIFEST).is_file()

    def check(self, recipe: Recipe) -> None:
        """Refuse a directory that is another recipe's, or no run's at all."""
        before = self.recipe()
        if before is None:
            if self.root.exists() and not self.root.is_dir():
                raise UserError(f"--out: {self.root} is a file; give a directory")
            if self.root.exists() and any(p.name != ".lock" for p in self.root.iterdir()):
                raise UserError(f"--out: {self.root} is not empty and holds no run; choose another")
        elif key := recipe.conflict_with(before):
            raise UserError(
                f"--out: {self.root} belongs to another recipe (it differs in {key}); "
                "choose another --out"
            )

    def bind(self, recipe: Recipe) -> None:
        """Make this the directory of `recipe`; arms, teachers, panels and seeds of before stay."""
        self.check(recipe)
        before = self.recipe()
        if before is not None:
            added = {kind: {**getattr(before, kind), **getattr(recipe, kind)} for kind in NAMED}
            seeds = sorted({*before.seeds, *recipe.seeds})
            recipe = recipe.model_copy(update={**added, "seeds": seeds})
        described = yaml.safe_dump(
            recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True
        )
        write_atomically(self.root / "recipe.yaml", described.encode())

    def settled(self, recipe: Recipe) -> Recipe:
        """Return the recipe with each `auto` of its engine as this run has resolved it before."""
        before = self.recipe()
        if before is None:
            return recipe
        return recipe.with_engine({k: getattr(before.engine, k) for k in recipe.engine.to_measure})

    def recipe(self) -> Recipe | None:
        path = self.root / "recipe.yaml"
        return recorded_recipe(path) if path.is_file() else None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory alone; a killed run's lock is gone with its process."""
        self.root.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.root / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise UserError(
                f"--out: {self.root} is in use by another run; wait or choose another"
            ) from None
        try:
            yield
        finally:
            lock.release()

    def write_json(self, name: str, value: Any) -> None:
        write_atomically(self.root / name, json.dumps(value, indent=1, sort_keys=True).encode())

    def read_json(self, name: str) -> Any:
        path = self.root / name
        return json.loads(path.read_text()) if path.is_file() else None

    def write_text(self, name: str, text: str) -> Path:
        write_atomically(self.root / name, text.encode())
        return self.root / name

    def finished(self, pattern: str) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
        """Yield the place and the facts of every finished artifact whose place matches."""
        for manifest in sorted(self.root.glob(f"{pattern}/{MANIFEST}")):
            sealed = sealed_facts(manifest.parent)
            if sealed is not None:
                yield manifest.parent.relative_to(self.root).parts, sealed["facts"]

    def size(self) -> int:
        return sum(path.stat().st_size for path in self.root.rglob("*") if path.is_file())
