"""What a fit of p(theta | D) and p(theta | D, F) starts from, and what several fits share."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mixval.engine import plain
from mixval.fisher import (
    LabelledBatch,
    Parameters,
    check_finite,
    diagonal_fisher,
    precision,
    trainable,
)
from mixval.seeding import generators_kept, seed_torch, torch_seed

Pool = Literal["train", "train+failures"]
State = dict[str, Tensor]


@dataclass(frozen=True)
class Known:
    """A network trained on D, D itself, and the failures F that it should have fitted."""

    model: nn.Module
    failures: LabelledBatch  # F, in one batch
    num_samples: int  # of D
    rows: Callable[[], Iterator[LabelledBatch]]  # D as it is, in order
    # An epoch's batches, shuffled and augmented as in training; F comes on top of D's order.
    batches: Callable[[Pool, int], Iterable[LabelledBatch]]
    steps: int  # batches of an epoch
    learn: Callable[[Pool, int], nn.Module]  # a member of an ensemble, trained from scratch
    weight_decay: float
    seed: int

    def precision(self, ridge: float) -> Parameters:
        """Return N F + ridge of each weight, with the diagonal empirical Fisher F of D."""
        fisher = diagonal_fisher(self.model, self.rows())
        return precision(self.model, fisher, num_samples=self.num_samples, ridge=ridge)

    def noise(self, draws: int, size: int) -> Tensor:
        """Return standard normal numbers (S, P), the same for both posteriors."""
        source = torch.Generator().manual_seed(torch_seed(self.seed, "posterior"))
        return torch.randn(draws, size, generator=source, dtype=torch.float64)


def states(networks: Sequence[nn.Module]) -> State:
    """Return every tensor of the networks' states, stacked: (S, ...)."""
    every = [plain(network).state_dict() for network in networks]
    return {name: torch.stack([state[name] for state in every]) for name in every[0]}


def with_parameters(model: nn.Module, vectors: Tensor) -> State:
    """Return the states of networks like `model` with trainable weights (S, P), stacked."""
    network = plain(model)
    parts, at = dict[str, Tensor](), 0
    for name, value in trainable(network).items():
        parts[name] = vectors[:, at : at + value.numel()].to(value).view(-1, *value.shape)
        at += value.numel()
    rest = network.state_dict()
    return {
        name: parts.get(name, value.expand(len(vectors), *value.shape).clone())
        for name, value in rest.items()
    }


def walk(
    known: Known, pool: Pool, *, epochs: int, lr: Callable[[float], float]
) -> Iterator[nn.Module]:
    """Train the network on, and yield it after each epoch; the same object every time.

    SGD with Nesterov momentum 0.9 on the cross-entropy of clean rows, in train mode, at the
    rate `lr` of the epochs done so far. Order, augmentation and dropout are functions of the
    seed and the epoch, so that walks on D and on D with F are as alike as their data.
    """
    twin = copy.deepcopy(known.model).train()
    parameters = [p for p in twin.parameters() if p.requires_grad]
    optimiser = torch.optim.SGD(
        parameters, lr=1.0, momentum=0.9, nesterov=True, weight_decay=known.weight_decay
    )
    device = next(twin.parameters()).device
    with generators_kept(device):
        for epoch in range(epochs):
            seed_torch(torch_seed(known.seed, "posterior/forward", epoch), device)
            for step, (inputs, labels) in enumerate(known.batches(pool, epoch)):
                optimiser.param_groups[0]["lr"] = lr(epoch + step / known.steps)
                optimiser.zero_grad()
                F.cross_entropy(twin(inputs), labels).backward()  # type: ignore[no-untyped-call]
                optimiser.step()
            check_finite(dict(plain(twin).named_parameters()), f"the network in epoch {epoch}")
            optimiser.zero_grad()
            yield twin
