"""One network on each side: the trained one, and the same moved by F."""

from collections.abc import Iterator
from typing import Literal

from torch import nn

from mixval import updates
from mixval.bounds import Count, NonNegative, Positive
from mixval.fisher import LabelledBatch
from mixval.fitting import Known, states
from mixval.posteriors import Fitted


def point(
    known: Known,
    *,
    data: Literal["failures", "train+failures"] = "failures",
    lr: Positive = 0.01,
    epochs: Count = 10,
) -> Fitted:
    """The network, and the network fine-tuned on F or on D with F."""
    return _moved(known, fine_tuned(known, data, lr, epochs))


def ewc(known: Known, *, ridge: NonNegative = 0.1, steps: Count = 100) -> Fitted:
    """The network, and the optimum of log p(F) where the diagonal Fisher of D holds the weights."""
    moved = updates.ewc(known.model, known.precision(ridge), *known.failures, steps=steps)
    return _moved(known, moved)


def natural_gradient(known: Known, *, step: Positive = 1.0, ridge: NonNegative = 10.0) -> Fitted:
    """The network, and one natural-gradient step towards F: as it shrinks, linear influence."""
    held = known.precision(ridge)
    moved = updates.natural_gradient(known.model, held, *known.failures, step=step)
    return _moved(known, moved)


def fine_tuned(
    known: Known, data: Literal["failures", "train+failures"], lr: float, epochs: int
) -> nn.Module:
    """Return the network after SGD on F alone, in one batch, or on D with F."""

    def batches(epoch: int) -> Iterator[LabelledBatch]:
        yield from [known.failures] if data == "failures" else known.batches(data, epoch)

    return updates.fine_tune(known.model, batches, lr=lr, epochs=epochs)


def _moved(known: Known, moved: nn.Module) -> Fitted:
    return Fitted("networks", states([known.model]), states([moved]), draws=1)
