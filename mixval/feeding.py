"""The batches of an epoch in order: made from memory, or from images that a DataLoader reads.

Both ways give the same batches bit by bit: what is read is decided by the plan, and
augmentation and mixing happen here, in the training process, from the same numbers.
Partners come from the whole epoch, so streaming decodes two images for every mix.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mixval.mixing import RowMaker
from mixval.types import Batch, MixPlan, StreamedImages


def feed(
    maker: RowMaker, plans: Sequence[MixPlan], uniforms: Tensor | None, loaders: int
) -> Iterator[Batch]:
    """Yield the batch of each plan; `loaders` processes read ahead what is not in memory."""
    images = maker.part.images
    if isinstance(images, Tensor):
        yield from (maker.batch(plan, uniforms) for plan in plans)
        return
    reader = DataLoader(
        _Parents(images, plans),
        batch_size=None,  # an item is a batch already
        num_workers=min(loaders, len(plans)),
        pin_memory=maker.mean.device.type == "cuda",
    )
    for plan, decoded in zip(plans, reader, strict=True):
        yield maker.batch(plan, uniforms, decoded)


@dataclass(frozen=True)
class _Parents(Dataset[list[Tensor]]):
    """Place in the epoch -> the images of both parents of every row, (B, C, H, W) each."""

    images: StreamedImages
    plans: Sequence[MixPlan]

    def __len__(self) -> int:
        return len(self.plans)

    def __getitem__(self, place: int) -> list[Tensor]:
        plan = self.plans[place]
        parents = (plan.first, plan.second) if plan.mixes else (plan.first,)
        return [self.images[positions] for positions in parents]
