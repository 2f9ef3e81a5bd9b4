"""Batches in order: made from memory, or from images that a DataLoader reads ahead.

Both ways give the same batches bit by bit: what is read is decided by the plan, and
augmentation and mixing happen here, in the training process, from the same numbers.
Partners come from the whole epoch, so streaming decodes two images for every mix.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mixval.errors import UserError
from mixval.mixing import RowMaker
from mixval.types import Batch, Ints, MixPlan, StreamedImages


def feed(maker: RowMaker, plans: Sequence[MixPlan], uniforms: Tensor | None) -> Iterator[Batch]:
    """Yield the batch of each plan."""
    if not maker.part.streams:
        yield from (maker.batch(plan, uniforms) for plan in plans)
        return
    wanted = [plan.parents for plan in plans]
    for plan, decoded in zip(plans, _read(maker, wanted), strict=True):
        yield maker.batch(plan, uniforms, decoded)


def feed_inputs(maker: RowMaker, chunks: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield what a network sees of the samples at these positions, unaugmented."""
    if not maker.part.streams:
        yield from (maker.inputs(positions) for positions in chunks)
        return
    wanted = [np.asarray(positions.cpu()) for positions in chunks]
    for positions, decoded in zip(chunks, _read(maker, wanted), strict=True):
        yield maker.inputs(positions, decoded=decoded)


def feed_labelled(
    maker: RowMaker, order: Tensor | None = None, size: int = 256
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and labels of at most `size` samples, unaugmented, in this order of positions.

    Without an order all of them, as they lie. The size changes numbers by rounding alone.
    """
    labels = maker.part.labels
    places = torch.arange(len(labels)) if order is None else order
    chunks = torch.split(places.to(labels.device), size)
    for inputs, positions in zip(feed_inputs(maker, chunks), chunks, strict=True):
        yield inputs, labels[positions]


def _read(maker: RowMaker, wanted: list[Ints]) -> Iterator[Tensor]:
    images = maker.part.images
    assert isinstance(images, StreamedImages)
    for item in _reader(maker, images, wanted):
        if isinstance(item, UserError):
            raise item
        yield item


def _reader(
    maker: RowMaker, images: StreamedImages, wanted: list[Ints]
) -> DataLoader[Tensor | UserError]:
    workers = min(maker.loaders, len(wanted))
    # In a process that was spawned torch would spawn loaders, too, which load all libraries
    # anew at every epoch: seconds each. Forked, as on Linux elsewhere, they are there at once.
    forks = workers > 0 and sys.platform == "linux"
    return DataLoader(
        _Wanted(images, wanted),
        batch_size=None,  # an item is a batch already
        num_workers=workers,
        pin_memory=maker.mean.device.type == "cuda",
        multiprocessing_context="fork" if forks else None,
    )


@dataclass(frozen=True)
class _Wanted(Dataset[Tensor | UserError]):
    """Place in the order -> the images at its positions, (B, C, H, W).

    A file that can't be read comes as the error itself: raised in a loader, its line would
    arrive wrapped into the loader's traceback.
    """

    images: StreamedImages
    wanted: list[Ints]

    def __len__(self) -> int:
        return len(self.wanted)

    def __getitem__(self, place: int) -> Tensor | UserError:
        try:
            return self.images[self.wanted[place]]
        except UserError as error:
            return error
