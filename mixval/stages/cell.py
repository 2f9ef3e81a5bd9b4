"""One panel and one seed of a run: what every stage of it needs to know."""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mixval import choose
from mixval.engine import Engine
from mixval.errors import UserError
from mixval.feeding import feed_labelled
from mixval.mixing import RowMaker
from mixval.recipe import Data, Recipe
from mixval.sources import load_source
from mixval.splits import load_splits
from mixval.store import Artifact, Store
from mixval.training_job import Watch
from mixval.types import FailureSet, Ints, Part, Splits

log = logging.getLogger(__name__)
FORMAT = 3  # of what stages write; raise it when older artifacts must not be used again


@dataclass(frozen=True)
class Cell:
    """A panel and a seed. `splits` are the same for every stage of the cell."""

    recipe: Recipe
    panel: str
    seed: int
    engine: Engine
    watch: Watch = field(default_factory=Watch)
    reused: Counter[str] = field(default_factory=Counter)  # what stages found finished, by kind

    @property
    def data(self) -> Data:
        return self.recipe.data_of(self.panel)

    @cached_property
    def splits(self) -> Splits:
        data = self.data
        source = load_source(data.source.name, data.source.parameters, data.images)
        splits = load_splits(
            source,
            seed=self.seed,
            train=data.train,
            val_f=data.val_f,
            val_dev=data.val_dev,
            label_noise=data.label_noise,
            corrupt=choose.pick("corruptions", data.corruption.name, data.corruption.parameters),
        )
        present = torch.bincount(splits.train.labels, minlength=splits.num_classes) > 0
        if absent := [c for c, found in zip(splits.classes, present, strict=True) if not found]:
            log.warning(
                "data.train: %d of %d classes have no train sample, such as %s",
                *(len(absent), splits.num_classes, absent[0]),
            )
        if self.recipe.training.batch_size > len(splits.train):
            raise UserError(
                f"training.batch_size: must be at most the {len(splits.train)} train samples, "
                f"got {self.recipe.training.batch_size}"
            )
        return splits

    @cached_property
    def data_fingerprint(self) -> str:
        return self.splits.fingerprint

    def pool(self, data: str, failures: FailureSet | None) -> Part:
        """Return what `data` names: train alone, or joined with samples from outside it."""
        splits = self.splits
        if data == "train":
            return splits.train
        if data == "train+val_f":
            return Part.join([splits.train, splits.val_f])
        if data == "train+test":
            return Part.join([splits.train, splits.test])
        assert failures is not None
        found = getattr(splits, failures.split).with_ids(torch.from_numpy(failures.query))
        return Part.join([splits.train, found])

    def rows(self, part: Part) -> RowMaker:
        """Return the maker of unaugmented rows of a part, on the engine's device."""
        return RowMaker.of(part, self.splits, self.engine.device, self.engine.loaders)

    def gathered(self, part: Part, ids: Ints) -> tuple[Tensor, Tensor]:
        """Return inputs (B, C, H, W) and labels (B,) of the samples with these ids."""
        batches = feed_labelled(self.rows(part.with_ids(torch.from_numpy(ids))))
        inputs, labels = zip(*batches, strict=True)
        return torch.cat(inputs), torch.cat(labels)

    def probe_rows(self, folds: Ints | None) -> RowMaker:
        """Return the maker of unaugmented rows of `train`, which knows the folds of its samples."""
        device = self.engine.device
        known = None if folds is None else torch.from_numpy(folds).to(device)
        return replace(self._train_rows, folds=known)

    @cached_property
    def _train_rows(self) -> RowMaker:
        return self.rows(self.splits.train)

    def reuse(self, artifact: Artifact) -> dict[str, Any] | None:
        """Return the facts of an artifact that is finished, and count it; None otherwise."""
        facts = self.engine.processes.from_main(artifact.facts)
        if facts is not None:
            self.reused[artifact.kind] += 1
        return facts

    def once(self, artifact: Artifact, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the facts of an artifact; where it is not finished, one process makes it."""
        facts = self.reuse(artifact)
        if facts is not None:
            return facts

        def finished() -> dict[str, Any]:
            made = make()
            artifact.finish(made)
            return made

        return self.engine.processes.from_main(finished)

    def artifact(self, store: Store, *place: str, made_from: dict[str, Any]) -> Artifact:
        common = {
            "format": FORMAT,
            "data": self.data_fingerprint,
            "seed": self.seed,
            "engine": self.engine.described,
        }
        folder, code = store.place(self.panel, self.seed, *place), choose.own_code(made_from)
        own = {"own code": code} if code else {}
        return Artifact(folder, {**common, **made_from, **own}, kind=place[0])
