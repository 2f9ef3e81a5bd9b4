"""The nouns of mixval, frozen. Shapes: S draws, B rows, K classes, N samples."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mixval.fingerprints import array_fingerprint, fingerprint

Ints = npt.NDArray[np.int64]
Loss = Callable[..., Tensor]  # (logits, soft targets[, class weight]) -> (B,)
Floats = npt.NDArray[np.float64]
Column = npt.NDArray[Any]


class Decoder(Protocol):
    """Images that lie on disk or in a user's dataset: place -> (C, H, W) uint8.

    Worker processes get a copy, so it can be pickled.
    """

    image_shape: tuple[int, int, int]
    content: str  # a fingerprint of what it decodes

    def __call__(self, place: int) -> Tensor: ...


@dataclass(frozen=True)
class StreamedImages:
    """Images that are decoded when they are asked for; in all else like a (N, C, H, W) tensor."""

    decoders: tuple[Decoder, ...]
    places: Ints  # (N, 2): which decoder, and the place in it

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.places), *self.decoders[0].image_shape

    def __getitem__(self, positions: Tensor | Ints) -> Tensor:
        index = positions.cpu() if isinstance(positions, Tensor) else positions
        rows = self.places[np.asarray(index)].tolist()
        if not rows:
            return torch.empty((0, *self.shape[1:]), dtype=torch.uint8)
        return torch.stack([self.decoders[which](place) for which, place in rows])

    def take(self, positions: Tensor | Ints) -> "StreamedImages":
        return replace(self, places=self.places[np.asarray(positions)])

    @staticmethod
    def of(decoder: Decoder, count: int) -> "StreamedImages":
        places = np.stack([np.zeros(count, np.int64), np.arange(count)], axis=1)
        return StreamedImages((decoder,), places)

    @staticmethod
    def join(parts: Sequence["StreamedImages"]) -> "StreamedImages":
        known = {id(decoder): decoder for part in parts for decoder in part.decoders}
        number = {key: place for place, key in enumerate(known)}
        moved = []
        for part in parts:
            which = np.array([number[id(decoder)] for decoder in part.decoders])
            moved.append(np.stack([which[part.places[:, 0]], part.places[:, 1]], axis=1))
        return StreamedImages(tuple(known.values()), np.concatenate(moved))

    @property
    def fingerprint(self) -> str:
        return fingerprint([*(d.content for d in self.decoders), array_fingerprint(self.places)])


@dataclass(frozen=True)
class Part:
    """Labelled images with ids that stay the same in every split and pool."""

    images: Tensor | StreamedImages  # (N, C, H, W) uint8
    labels: Tensor  # (N,) int64
    ids: Tensor  # (N,) int64

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def streams(self) -> bool:
        """Whether the images are decoded when they are needed, not held in memory."""
        return isinstance(self.images, StreamedImages)

    def take(self, positions: Tensor | Ints) -> "Part":
        index = torch.as_tensor(positions)
        images = self.images
        taken = images.take(index) if isinstance(images, StreamedImages) else images[index]
        return Part(taken, self.labels[index], self.ids[index])

    def with_ids(self, wanted: Tensor) -> "Part":
        """Return the samples with these ids, in this part's order."""
        return self.take(torch.isin(self.ids, wanted).nonzero().squeeze(1))

    def to(self, device: torch.device) -> "Part":
        images = self.images if isinstance(self.images, StreamedImages) else self.images.to(device)
        return Part(images, self.labels.to(device), self.ids)

    @staticmethod
    def join(parts: Sequence["Part"]) -> "Part":
        streamed = [part.images for part in parts if isinstance(part.images, StreamedImages)]
        held = [part.images for part in parts if isinstance(part.images, Tensor)]
        assert not (streamed and held), "parts in memory and parts on disk do not join"
        images = StreamedImages.join(streamed) if streamed else torch.cat(held)
        labels, ids = (torch.cat([getattr(p, name) for p in parts]) for name in ("labels", "ids"))
        return Part(images, labels, ids)

    @cached_property
    def fingerprint(self) -> str:
        images = self.images
        if isinstance(images, StreamedImages):
            return fingerprint([images.fingerprint, array_fingerprint(self.labels.cpu(), self.ids)])
        return array_fingerprint(images.cpu(), self.labels.cpu(), self.ids)


@dataclass(frozen=True)
class Source:
    """A dataset as it comes; `val` and `test` are None where it has no such split of its own."""

    train: Part
    test: Part | None
    classes: tuple[str, ...]
    val: Part | None = None


@dataclass(frozen=True)
class Splits:
    """Train, validation in two halves, and test.

    `val_f` is where failures come from and may train teachers; nothing trains on
    `val_dev`; only the last evaluation reads the labels of `test`.
    """

    train: Part
    val_f: Part
    val_dev: Part
    test: Part
    classes: tuple[str, ...]
    flipped: Tensor  # ids of the train samples whose label was replaced by a wrong one
    mean: Tensor  # (C, 1, 1) of the train pixels in [0, 1]
    std: Tensor  # (C, 1, 1)
    content: str = ""  # fingerprint of the dataset before it was divided
    own_test: bool = False  # whether the dataset came with this test split, the same for all seeds
    # ids of the flipped samples, and of the train samples whose image was damaged on purpose
    corrupted: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        channels, height, width = self.train.images.shape[1:]
        return channels, height, width

    @property
    def fingerprint(self) -> str:
        """Everything a stage before the last evaluation may depend on: not the test split."""
        parts = (self.train, self.val_f, self.val_dev)
        return "-".join(part.fingerprint for part in parts)


@dataclass(frozen=True)
class MixPlan:
    """Rows (i, j, lambda) of one epoch: which samples are mixed how, and no pixels.

    `first` and `second` are positions in the training data, `first` the epoch's order.
    """

    first: Ints
    second: Ints
    lam: Floats
    alpha: float
    epoch: int

    def __len__(self) -> int:
        return len(self.first)

    @property
    def mixes(self) -> bool:
        """Whether anything is mixed at all: alpha = 0 means it is not."""
        return self.alpha > 0

    @property
    def parents(self) -> Ints:
        """Whose images the rows are made of: all first samples, then, if mixed, all second."""
        return np.concatenate([self.first, self.second]) if self.mixes else self.first

    def keep(self, rows: npt.NDArray[Any] | slice) -> "MixPlan":
        # Take rows of the one drawn sequence; never draw a shorter one. Filtered and
        # unfiltered students then see the same mixes in the same order, so comparing
        # them measures the filter and not the luck of a second draw.
        return replace(self, first=self.first[rows], second=self.second[rows], lam=self.lam[rows])

    @staticmethod
    def join(plans: Sequence["MixPlan"]) -> "MixPlan":
        """Return the rows of plans of one alpha behind each other."""
        first, second, lam = (
            np.concatenate([getattr(plan, name) for plan in plans])
            for name in ("first", "second", "lam")
        )
        return replace(plans[0], first=first, second=second, lam=lam)

    @property
    def fingerprint(self) -> str:
        return array_fingerprint(self.first, self.second, self.lam)


@dataclass(frozen=True)
class Batch:
    """Clean rows and their mixes; `mixed` and the rest are None where nothing is mixed."""

    clean: Tensor  # (B, C, H, W)
    clean_targets: Tensor  # (B, K)
    mixed: Tensor | None = None  # (B, C, H, W)
    mixed_targets: Tensor | None = None  # (B, K)
    lam: Tensor | None = None  # (B,)
    fold: Tensor | None = None  # (B,) in which both parents lie


@dataclass(frozen=True)
class FailureSet:
    """The samples that the base model fails: by which rule, on which split."""

    query: Ints  # ids that teachers and posteriors may learn from
    holdout: Ints  # ids kept back, to ask whether unseen failures were repaired
    rule: str
    split: str
    examined: int  # how many samples the rule was applied to

    def __len__(self) -> int:
        return len(self.query) + len(self.holdout)


class Posterior(Protocol):
    """Inputs -> log-probabilities of S draws, (S, B, K); S = 1 for a point.

    `fold` (B,) says in which fold both parents of a mix lie, for teachers that must not
    have seen them; everyone else ignores it.
    """

    def __call__(self, inputs: Tensor, fold: Tensor | None = None) -> Tensor: ...


@dataclass(frozen=True)
class Pair:
    """p(theta | D) and p(theta | D, F), whose difference r_hat is, with their fingerprints."""

    base: Posterior
    updated: Posterior
    base_fingerprint: str
    updated_fingerprint: str
    folds: Ints | None = None  # (N,) of the train samples, for out-of-fold teachers
    leaks: bool = False  # whether test labels may have reached it


@dataclass(frozen=True)
class MixScores:
    """r_hat of the mixes of one global batch and what it was made of, for a filter policy."""

    r_hat: Tensor  # (B,)
    updated: Tensor  # (B,) E[H] under p(theta | D, F)
    base: Tensor  # (B,) E[H] under p(theta | D)
    lam: Tensor  # (B,)
    rng: np.random.Generator  # of this step, for policies that choose at random
    replayed: Tensor | None = None  # (B,) the weights another run gave to these rows
    std_error: Tensor | None = None  # (B,) of r_hat, over draws
    draws: int = 1  # that the standard error rests on


@dataclass(frozen=True)
class ScoreTable:
    """Scored rows of plans, with the fingerprints of what they were scored with.

    Lambda has 64 bits, because mixes are made from it again; what networks say has 32.
    """

    epoch: Column
    row: Column  # place in the plan
    i: Column  # ids of the samples, not positions
    j: Column
    lam: Floats
    label_i: Column
    label_j: Column
    updated: Column
    base: Column
    r_hat: Column
    std_error: Column  # Monte-Carlo, over draws; NaN for a single draw
    p_negative: Column  # P(mean r_hat <= 0) by those draws; NaN for a single one
    kept: Column  # the weight the row had in training; NaN where it did not train
    provenance: dict[str, str] = field(default_factory=dict)
    # Other scores of the same rows, by name; empty where none were asked for.
    beside: dict[str, Column] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.row)

    @staticmethod
    def columns() -> tuple[str, ...]:
        return tuple(f.name for f in fields(ScoreTable) if f.name not in ("provenance", "beside"))

    @staticmethod
    def join(tables: Iterable["ScoreTable"]) -> "ScoreTable":
        """Return the rows of all tables, by epoch and row: processes score them in turns."""
        tables = list(tables)
        merged = {
            name: np.concatenate([getattr(t, name) for t in tables])
            for name in ScoreTable.columns()
        }
        order = np.lexsort((merged["row"], merged["epoch"]))
        ordered = {name: column[order] for name, column in merged.items()}
        beside = {
            name: np.concatenate([table.beside[name] for table in tables])[order]
            for name in tables[0].beside
        }
        return ScoreTable(**ordered, provenance=tables[0].provenance, beside=beside)
