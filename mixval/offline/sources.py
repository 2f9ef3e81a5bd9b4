"""What is scored offline: mixes of a dataset's samples, or batches that come made."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from mixval import choose
from mixval.errors import UserError
from mixval.fingerprints import fingerprint
from mixval.mixing import RowMaker
from mixval.offline.files import BatchFiles, read_table
from mixval.own_dataset import from_dataset
from mixval.recipe import Choice, option_of
from mixval.recipe_errors import one_line
from mixval.rhat import Scorer
from mixval.scoring import drawn_plans, pieces, score_chunks, score_made
from mixval.sources import load_source, place_images
from mixval.splits import pixel_statistics
from mixval.types import MixPlan, Part, Posterior, ScoreTable, Source

Numbers = Sequence[float]
_DATA: TypeAdapter[Choice] = TypeAdapter(Annotated[Choice, option_of("datasets")])
_MANY_PARTS, _LARGE_PART = 64, 256  # parts to divide among processes; chunks of a part at most
_HASHED = 1 << 16  # rows that are hashed at a time


@dataclass(frozen=True)
class Layout:
    """How rows lie in files: chunks go through the networks together, parts are files.

    A function of the number of rows and the chunk alone, so that any number of processes and
    any number of interruptions leave the same files.
    """

    count: int
    chunk: int

    @property
    def part_rows(self) -> int:
        chunks = -(-self.count // self.chunk)
        return self.chunk * min(max(1, chunks // _MANY_PARTS), _LARGE_PART)

    @property
    def num_parts(self) -> int:
        return -(-self.count // self.part_rows)

    def rows(self, part: int) -> range:
        return range(part * self.part_rows, min((part + 1) * self.part_rows, self.count))

    def starts(self, part: int) -> range:
        """Return the first row of each chunk of a part."""
        rows = self.rows(part)
        return range(rows.start, rows.stop, self.chunk)


@dataclass(frozen=True)
class Planned:
    """Mixes of samples, whose pixels are made as they are scored."""

    maker: RowMaker
    plans: Callable[[], Iterator[MixPlan]]  # all rows in their order, from the start
    count: int
    plan: str  # fingerprint of (i, j, lambda)
    classes: tuple[str, ...]

    @property
    def data(self) -> str:
        return self.maker.part.fingerprint

    @property
    def num_labels(self) -> int:
        return len(self.classes)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.maker.part.images.shape[1:])

    @property
    def normalisation(self) -> dict[str, list[float]]:
        statistics = {"mean": self.maker.mean, "std": self.maker.std}
        return {name: value.flatten().tolist() for name, value in statistics.items()}

    def first(self) -> Tensor:
        """Return what networks see of the first samples."""
        return self.maker.inputs(torch.arange(min(2, len(self.maker.part))))

    def tables(
        self, parts: Collection[int], layout: Layout, scorer: Scorer, base: Posterior, outputs: int
    ) -> Iterator[ScoreTable]:
        """Yield the scores of these parts, chunk by chunk; targets have `outputs` classes."""
        maker = replace(self.maker, num_classes=outputs)
        return score_chunks(maker, self._chunks(parts, layout), scorer, base)

    def _chunks(self, parts: Collection[int], layout: Layout) -> Iterator[tuple[int, MixPlan]]:
        for part, rows in pieces(self.plans(), layout.part_rows):
            if part in parts:
                for start in layout.starts(part):
                    at = start - layout.rows(part).start
                    yield start, rows.keep(slice(at, at + layout.chunk))


@dataclass(frozen=True)
class Made:
    """Batches of mixes in files, as networks see them."""

    files: BatchFiles
    device: torch.device

    classes: tuple[str, ...] = ()
    normalisation: None = None  # x comes as the networks want it

    @property
    def count(self) -> int:
        return len(self.files)

    @property
    def data(self) -> str:
        return fingerprint(self.files.digests)

    plan = data

    @property
    def num_labels(self) -> int:
        return self.files.num_labels

    @property
    def input_shape(self) -> tuple[int, ...]:
        return self.files.input_shape

    def first(self) -> Tensor:
        return self.files.read(0, min(2, self.count)).inputs.to(self.device)

    def tables(
        self, parts: Collection[int], layout: Layout, scorer: Scorer, base: Posterior, outputs: int
    ) -> Iterator[ScoreTable]:
        for part in sorted(parts):
            for start in layout.starts(part):
                stop = min(start + layout.chunk, layout.rows(part).stop)
                mixes = self.files.read(start, stop).to(self.device)
                yield score_made(mixes, start, scorer, base, outputs)


Mixes = Planned | Made


def plan_mixes(
    data: Any,
    split: str,
    mixes: Path | str | MixPlan | None,
    device: torch.device,
    *,
    rows: int | None,
    alpha: float,
    seed: int,
    mean: Numbers | None,
    std: Numbers | None,
    loaders: int,
) -> Planned:
    """Return the mixes of a dataset's split: those of a table or a plan, or drawn ones."""
    source = load_data(data)
    part = _split(source, split)
    maker = _maker(source, part, mean, std, device, loaders)

    def plans() -> Iterator[MixPlan]:
        if isinstance(mixes, MixPlan):
            return iter([_checked_plan(mixes, part, split)])
        if mixes is not None:
            return read_table(Path(mixes), part, split)
        wanted = len(part) if rows is None else rows
        return drawn_plans(wanted, seed=seed, alpha=alpha, num_samples=len(part))

    count, hashes = 0, []
    for _, piece in pieces(plans(), _HASHED):
        count += len(piece)
        hashes.append(piece.fingerprint)
    return Planned(maker, plans, count, fingerprint(hashes), source.classes)


def _checked_plan(plan: MixPlan, part: Part, split: str) -> MixPlan:
    """Return a plan made in Python if its positions are of this part and its lambdas can be."""
    if not len(plan):
        raise UserError("--mixes: the plan has no rows")
    for name, places in (("first", plan.first), ("second", plan.second)):
        if places.min() < 0 or places.max() >= len(part):
            raise UserError(
                f"--mixes: {name} must be positions in {split}, 0 to {len(part) - 1}, "
                f"got {places.min()} to {places.max()}"
            )
    if not ((plan.lam >= 0) & (plan.lam <= 1)).all():
        raise UserError("--mixes: lam must be in [0, 1] in every row of the plan")
    return plan


# -- data ---------------------------------------------------------------------------------


def load_data(data: Any) -> Source:
    """Return a source: named as in a recipe, made by the user's `module:function`, or given.

    A torch Dataset of (image, label) is taken as `from_dataset` takes it.
    """
    if isinstance(data, str | Mapping):
        try:
            choice = _DATA.validate_python(data)
        except ValidationError as error:
            raise UserError(f"--data: {one_line(error, Choice)}") from error
        if ":" not in choice.name:
            return load_source(choice.name, choice.parameters, "auto")
        data = choose.pick("datasets", choice.name, choice.parameters)()
    if not isinstance(data, Source):
        if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
            kind = type(data).__name__
            raise UserError(f"--data: must be a dataset's name, a Source or a Dataset, got {kind}")
        data = from_dataset(data)
    return place_images(data, "auto")


def _split(source: Source, split: str) -> Part:
    there = {"train": source.train, "val": source.val, "test": source.test}
    part = there.get(split)
    if part is None:
        known = [name for name, found in there.items() if found is not None]
        raise UserError(f"--split: the data has no {split!r}; {choose.nearest(split, known)}")
    return part


def _maker(
    source: Source,
    part: Part,
    mean: Numbers | None,
    std: Numbers | None,
    device: torch.device,
    loaders: int,
) -> RowMaker:
    measured = pixel_statistics(source.train) if mean is None or std is None else (None, None)
    statistics = [
        found.to(device) if given is None and found is not None else _given(name, given, part)
        for name, given, found in zip(("mean", "std"), (mean, std), measured, strict=True)
    ]
    center, scale = (value.to(device) for value in statistics)
    if not (scale > 0).all():
        raise UserError(f"--std: must be above 0, got {min(std or [0.0]):g}")
    return RowMaker(part.to(device), len(source.classes), center, scale, loaders=loaders)


def _given(name: str, numbers: Numbers | None, part: Part) -> Tensor:
    channels, values = part.images.shape[1], list(numbers or [])
    if len(values) not in (1, channels) or not np.isfinite(values).all():
        raise UserError(
            f"--{name}: must be one finite number, or one for each of {channels} channels, "
            f"got {' '.join(map(str, values)) or 'none'}"
        )
    return torch.tensor(values, dtype=torch.float32).view(-1, 1, 1).expand(channels, 1, 1)
