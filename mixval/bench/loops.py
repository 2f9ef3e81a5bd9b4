"""What mixval is measured against: bare steps without data, and the loops of other libraries.

Each does whole optimiser steps with the case's network, optimiser and precision. The other
libraries' loops are measured as documented, images normalised one by one, and as fast as
they can be made, normalised a batch at a time; each with zero, one or two worker processes,
of which the fastest counts (`suites.fastest`).
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from timm.data import FastCollateMixup, Mixup
from timm.data.loader import PrefetchLoader
from timm.loss import SoftTargetCrossEntropy
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import default_collate
from torchvision.transforms import v2

from mixval.bench.case import Case, Steps
from mixval.bench.feeds import Feed, Images, crop_flip, normalise
from mixval.mixing import RowMaker, draw_plan
from mixval.optimisers import make_optimiser
from mixval.types import Batch

Pairs = Iterator[tuple[Tensor, Tensor]]  # inputs (B, C, H, W) and soft targets (B, K)
WORKERS = (0, 1, 2)
ALPHA = 1.0


class Loop:
    """Batches -> optimiser steps, timed; one more step goes before, unmeasured, to warm up."""

    def __init__(
        self,
        case: Case,
        pairs: Pairs,
        feed: Feed | None = None,
        loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    ) -> None:
        self.case, self.pairs, self.feed, self.loss = case, pairs, feed, loss
        self.model = case.network().train()
        # The schedule is not followed: these loops keep the first learning rate.
        self.optimiser, _ = make_optimiser(self.model, case.training, steps=2, warmup_steps=0)

    def __call__(self, steps: int) -> float:
        if self.feed is not None:
            self.feed.resume()
        self.step()
        start = self.case.now()
        for _ in range(steps):
            self.step()
        seconds = self.case.now() - start
        if self.feed is not None:
            self.feed.pause()
        return seconds

    def step(self) -> Tensor:
        """Take a batch and do one optimiser step; return the loss."""
        inputs, targets = next(self.pairs)
        with self.case.autocast():
            loss = self.loss(self.model(inputs), targets)
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimiser.step()
        return loss.detach()


# -- bare steps ---------------------------------------------------------------------------


def mixed_batch(case: Case, alpha: float = ALPHA) -> Batch:
    """Return the first batch of a plan, on the device and channels last."""
    rows = RowMaker.of(case.splits.train, case.splits, case.engine.device)
    plan = draw_plan(seed=0, epoch=0, alpha=alpha, num_samples=case.samples)
    return rows.batch(plan.keep(slice(case.batch_size)))


def fixed_batch(case: Case) -> Loop:
    """Return the limit: mixed steps on one batch that was made once. No loop can be faster."""
    batch = mixed_batch(case)
    assert batch.mixed is not None and batch.mixed_targets is not None
    return Loop(case, _again(_channels_last(batch.mixed), batch.mixed_targets))


def regmixup_step(case: Case) -> Loop:
    """Return RegMixup's bare step: clean and mixed rows of one fixed batch in one pass."""
    batch = mixed_batch(case)
    assert batch.mixed is not None and batch.mixed_targets is not None
    inputs = _channels_last(torch.cat([batch.clean, batch.mixed]))
    targets = torch.cat([batch.clean_targets, batch.mixed_targets])

    def both_terms(logits: Tensor, targets: Tensor) -> Tensor:
        return 2 * F.cross_entropy(logits, targets)  # two means over B are twice one over 2B

    return Loop(case, _again(inputs, targets), loss=both_terms)


def teacher_forward(case: Case) -> Steps:
    """Return what a live teacher can't do without: its forward pass of the mixed rows."""
    return _forwards(case, networks=1)


def two_forwards(case: Case) -> Steps:
    """Return what r_hat can't do without: a forward pass of the mixed rows by both networks."""
    return _forwards(case, networks=2)


def _forwards(case: Case, networks: int) -> Steps:
    batch, every = mixed_batch(case), [case.network().eval() for _ in range(networks)]
    assert batch.mixed is not None
    inputs = _channels_last(batch.mixed)

    @torch.inference_mode()
    def run(steps: int) -> float:
        with case.autocast():
            start = case.now()
            for step in range(steps + 1):
                start = case.now() if step == 1 else start  # the first warms up
                for network in every:
                    network(inputs)
            return case.now() - start

    return run


# -- other libraries ----------------------------------------------------------------------


def torchvision_loop(case: Case, workers: int, batchwise: bool) -> Loop:
    """Return the loop of torchvision's documentation: transforms in the loader, then v2.MixUp.

    `batchwise` normalises whole batches, after the loader instead of in it.
    """
    inside = crop_flip(case) + ([] if batchwise else normalise(case))
    feed = Feed(case, Images(case.splits.train, v2.Compose(inside)), workers, default_collate)
    late = v2.Compose(normalise(case)) if batchwise else None
    mix = v2.MixUp(alpha=ALPHA, num_classes=case.num_classes)

    def pairs() -> Pairs:
        for images, labels in feed:
            images, labels = _moved(case, images), _moved(case, labels)
            mixed, targets = mix(images if late is None else late(images), labels)
            yield _channels_last(mixed), targets

    return Loop(case, pairs(), feed)


def timm_loop(case: Case, workers: int, batchwise: bool) -> Loop:
    """Return the loop of timm's train script, its prefetcher off; `batchwise`: on.

    With the prefetcher images are mixed as bytes while they are collated, in the workers,
    and normalised as a batch.
    """
    loss = SoftTargetCrossEntropy()  # type: ignore[no-untyped-call]
    inside = crop_flip(case) + ([] if batchwise else normalise(case))
    images = Images(case.splits.train, v2.Compose(inside))
    settings = {"mixup_alpha": ALPHA, "label_smoothing": 0.0, "num_classes": case.num_classes}
    if batchwise:
        collate = FastCollateMixup(**settings)  # type: ignore[no-untyped-call]
        feed = Feed(case, images, workers, collate)
        mean, std = (tuple(v.flatten().tolist()) for v in (case.splits.mean, case.splits.std))
        of_feed: Any = feed  # it wants a DataLoader, and only iterates
        ready = PrefetchLoader(of_feed, mean, std, case.shape[0], case.engine.device)
        return Loop(case, _in_channels_last(ready), feed, loss)
    feed = Feed(case, images, workers, default_collate)
    mix = Mixup(**settings)  # type: ignore[no-untyped-call]
    mixed = (mix(_moved(case, images), _moved(case, labels)) for images, labels in feed)
    return Loop(case, _in_channels_last(mixed), feed, loss)


def _moved(case: Case, tensor: Tensor) -> Tensor:
    return tensor.to(case.engine.device, non_blocking=True)


def _in_channels_last(pairs: Iterable[tuple[Tensor, Tensor]]) -> Pairs:
    return ((_channels_last(images), targets) for images, targets in pairs)


def _channels_last(images: Tensor) -> Tensor:
    return images.contiguous(memory_format=torch.channels_last)


def _again(inputs: Tensor, targets: Tensor) -> Pairs:
    while True:
        yield inputs, targets
