"""A dataset divided for one seed, with labels made wrong on purpose, as a network sees it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from mixval.corruptions import confuse_labels
from mixval.mixing import RowMaker
from mixval.seeding import generator
from mixval.sources import load_source
from mixval.splits import load_splits


@dataclass(frozen=True)
class Setting:
    """How large everything is, for one dataset."""

    source: str
    train: int
    pool: int  # samples with right labels, of which failures are found: val_f
    hidden: tuple[int, ...]
    steps: int  # of a whole training
    early: int  # steps after which EL2N and GraNd are taken
    confused: Mapping[tuple[int, int], float]  # for failure repair
    target: float  # accuracy that steps-to-accuracy waits for
    batch: int = 32
    lr: float = 0.05
    weight_decay: float = 5e-4
    test: int = 5000  # at most so many test samples
    runs: int = 5  # that EL2N and GraNd are averaged over
    folds: int = 3  # of out-of-fold networks
    draws: int = 30  # of the last-layer posterior

    @property
    def precision(self) -> float:
        """N x weight decay: the precision of the prior whose mode the training looks for."""
        return self.train * self.weight_decay


SETTINGS = {
    "digits": Setting(
        source="digits",
        train=600,
        pool=500,
        hidden=(100, 50),
        steps=600,
        early=80,
        confused={(1, 7): 0.4, (6, 9): 0.3},
        target=0.9,
    ),
    "fashion": Setting(
        source="fashion20",
        train=2000,
        pool=1000,
        hidden=(300, 100),
        steps=500,
        early=100,
        runs=3,
        confused={(0, 6): 0.4, (7, 9): 0.3},
        target=0.78,
    ),
}


@dataclass(frozen=True)
class Case:
    """The data of one run: N training rows, M of the pool, T of test."""

    seed: int
    setting: Setting
    inputs: Tensor  # (N, C, H, W) normalised
    labels: Tensor  # (N,) as the networks see them, some of them wrong
    flipped: Tensor  # (N,) whose label is wrong
    pool: tuple[Tensor, Tensor]  # inputs (M, ...), labels (M,)
    test: tuple[Tensor, Tensor]  # inputs (T, ...), labels (T,)
    num_classes: int
    alpha: float = 0.0  # of the mixup that all its networks are trained with; 0: none

    @property
    def shape(self) -> torch.Size:
        return self.inputs.shape[1:]

    def targets(self, labels: Tensor) -> Tensor:
        return F.one_hot(labels, self.num_classes).float()


def make_case(setting: Setting, seed: int, noise: float, alpha: float = 0.0) -> Case:
    """Return the dataset with a share `noise` of the train labels moved to another class."""
    source = load_source(setting.source, {}, "memory")
    sizes = {"train": setting.train, "val_f": setting.pool, "val_dev": 10}
    splits = load_splits(source, seed=seed, **sizes, label_noise=noise)

    def seen(name: str) -> tuple[Tensor, Tensor]:
        part = getattr(splits, name)
        rows = RowMaker.of(part, splits, torch.device("cpu"))
        count = min(len(part), setting.test) if name == "test" else len(part)
        return rows.inputs(torch.arange(count)), part.labels[:count]

    inputs, labels = seen("train")
    flipped = torch.isin(splits.train.ids, splits.flipped)
    pool, test = seen("val_f"), seen("test")
    return Case(seed, setting, inputs, labels, flipped, pool, test, splits.num_classes, alpha)


def confused(case: Case) -> Case:
    """Return the case with two pairs of classes taken for each other, for failure repair."""
    rng = generator(case.seed, "confused labels")
    labels, flipped = confuse_labels(case.labels, case.setting.confused, rng)
    return replace(case, labels=labels, flipped=flipped)
