"""Train a small network for so many steps, and look at what it says."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mixval import mix, models
from mixval.losses import cross_entropy
from mixval.mixing import draw_lam
from mixval.seeding import generator, torch_stream
from score_protocols.cases import Case

Watch = Callable[[int, nn.Module], None]


def train(
    case: Case,
    data: tuple[Tensor, Tensor],
    *,
    stream: str,
    steps: int | None = None,
    watch: Watch | None = None,
) -> nn.Module:
    """Return a new network after so many steps on inputs (N, ...) and labels (N,).

    Steps are counted, not epochs, so that a network which sees fewer samples is trained as
    long. Initial weights and order depend on the seed and `stream` alone. With `case.alpha`
    it sees mixes only, each row mixed with the next one of its batch.
    """
    inputs, targets = data[0], case.targets(data[1])
    network = new_network(case, stream)
    total = case.setting.steps if steps is None else steps
    optimiser = optimiser_of(case, network)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, total)
    order = batches(case, len(targets), stream)
    rng = generator(case.seed, f"{stream}/lam")
    for step in range(1, total + 1):
        rows = next(order)
        seen, wanted = inputs[rows], targets[rows]
        if case.alpha:
            lam = torch.from_numpy(draw_lam(rng, case.alpha, len(rows))).float()
            seen, wanted = (mix(each, each.roll(1, 0), lam) for each in (seen, wanted))
        descend(optimiser, cross_entropy(network(seen), wanted).mean())
        schedule.step()
        if watch is not None:
            watch(step, network)
    return network.eval()


def new_network(case: Case, stream: str) -> nn.Module:
    with torch_stream(case.seed, f"{stream}/weights"):
        return models.mlp(case.shape, case.num_classes, hidden=list(case.setting.hidden))


def optimiser_of(case: Case, network: nn.Module) -> torch.optim.Optimizer:
    setting = case.setting
    return torch.optim.SGD(
        network.parameters(), lr=setting.lr, momentum=0.9, weight_decay=setting.weight_decay
    )


def descend(optimiser: torch.optim.Optimizer, loss: Tensor) -> None:
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()


def batches(case: Case, count: int, stream: str, size: int | None = None) -> Iterator[Tensor]:
    """Yield positions of whole batches without end, each epoch in a new order."""
    size = min(count, size or case.setting.batch)
    epoch = 0
    while True:
        order = generator(case.seed, f"{stream}/order", epoch).permutation(count)
        for begin in range(0, count - size + 1, size):
            yield torch.from_numpy(order[begin : begin + size])
        epoch += 1


@torch.no_grad()
def log_probs(network: nn.Module, inputs: Tensor) -> Tensor:
    """Return log-probabilities of one network, (1, B, K)."""
    return F.log_softmax(network(inputs), dim=-1)[None]


@torch.no_grad()
def hits(network: nn.Module, data: tuple[Tensor, Tensor]) -> np.ndarray:
    """Return which rows the network predicts as they are labelled, (B,)."""
    inputs, labels = data
    return (network(inputs).argmax(-1) == labels).numpy()


def accuracy(network: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    return float(hits(network, data).mean())
