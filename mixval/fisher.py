"""How sharply the likelihood of a trained network bends, parameter by parameter.

Everything here looks at the network in eval mode and in its own precision: BatchNorm
statistics are constants, dropout is off, so the samples do not see each other and
the gradient of a sum is the sum of gradients. The caller's network is never touched.
"""

import copy
import math
from collections.abc import Iterable, Iterator

from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from mixval.engine import plain
from mixval.errors import UserError

Parameters = dict[str, Tensor]  # by name, as `named_parameters` of the plain network has them
LabelledBatch = tuple[Tensor, Tensor]  # inputs (B, ...), labels (B,)


def diagonal_fisher(
    model: nn.Module, batches: Iterable[LabelledBatch], *, chunk: int = 32
) -> Parameters:
    r"""Return the diagonal of the empirical Fisher information, for each trainable parameter.

    $$ \hat F = \frac1N \sum_n \left( \nabla_\theta \log p(y_n | x_n, \theta) \right)^2 $$

    At the labels that were observed, not at labels drawn from the network. A mean, so a
    part of the data estimates it: N enters where it is used. `chunk` gradients, each as
    large as the network, are in memory at once.
    """
    network = still(model)
    parameters = trainable(network)

    def of_one(parameters: Parameters, row: Tensor, label: Tensor) -> Tensor:
        return log_likelihood(network, parameters, row[None], label[None])[0]

    gradients = vmap(grad(of_one), in_dims=(None, 0, 0))
    total, count = {name: value.new_zeros(value.shape) for name, value in parameters.items()}, 0
    for inputs, labels in batches:
        count += len(labels)
        for rows, row_labels in pieces(network, inputs, labels, chunk):
            for name, each in gradients(parameters, rows, row_labels).items():
                total[name] += each.square().sum(0)
    if count == 0:
        raise UserError("batches: must hold at least 1 sample, got none; give the training data")
    check_finite(total, "the Fisher information")
    return {name: value / count for name, value in total.items()}


def summed_gradient(
    network: nn.Module, parameters: Parameters, inputs: Tensor, labels: Tensor, *, chunk: int
) -> Parameters:
    r"""Return $\nabla_\theta \sum_n \log p(y_n | x_n, \theta)$ of a plain network in eval mode."""

    def of_rows(parameters: Parameters, rows: Tensor, row_labels: Tensor) -> Tensor:
        return log_likelihood(network, parameters, rows, row_labels).sum()

    total = {name: value.new_zeros(value.shape) for name, value in parameters.items()}
    for rows, row_labels in pieces(network, inputs, labels, chunk):
        for name, slope in grad(of_rows)(parameters, rows, row_labels).items():
            total[name] += slope
    check_finite(total, "the gradient of log p")
    return total


def precision(
    model: nn.Module, fisher: Parameters, *, num_samples: int, ridge: float
) -> Parameters:
    r"""Return $N \hat F + \lambda$, the diagonal of the posterior precision; refuse zeros in it."""
    parameters = trainable(plain(model))
    if num_samples < 1:
        raise UserError(f"num_samples: must be at least 1, got {num_samples}")
    if not (math.isfinite(ridge) and ridge >= 0):
        raise UserError(f"ridge: must be finite and >= 0, got {ridge}")
    shapes, given = ({n: tuple(t.shape) for n, t in d.items()} for d in (parameters, fisher))
    if shapes != given:
        wrong = min(n for n in shapes | given if shapes.get(n) != given.get(n))
        raise UserError(
            f"fisher: must be of this network's trainable parameters, but {wrong!r} is "
            f"{given.get(wrong, 'missing')} there and {shapes.get(wrong, 'missing')} here"
        )
    return {
        name: _bent(name, num_samples * fisher[name].to(value) + ridge)
        for name, value in parameters.items()
    }


def _bent(name: str, curvature: Tensor) -> Tensor:
    """Return the curvature of one parameter if it can be divided by."""
    if not bool((curvature.isfinite() & (curvature >= 0)).all()):
        raise UserError(f"fisher: must be finite and >= 0, is not for parameter {name!r}")
    if flat := int((curvature == 0).sum()):
        raise UserError(
            f"curvature is zero for parameter {name!r} "
            f"({flat} of {curvature.numel()} values); give ridge > 0"
        )
    return curvature


def log_likelihood(
    network: nn.Module, parameters: Parameters, inputs: Tensor, labels: Tensor
) -> Tensor:
    """Return log p(y | x, theta) of each row, (B,)."""
    log_probs = F.log_softmax(functional_call(network, parameters, (inputs,)), dim=-1)
    # Not nll_loss: it takes a label of -100 for "ignore", which would pass unseen.
    return log_probs.gather(1, labels[:, None]).squeeze(1)


def still(model: nn.Module) -> nn.Module:
    """Return a plain copy in eval mode: the caller's goes on as it was."""
    return copy.deepcopy(plain(model)).eval()


def trainable(network: nn.Module) -> Parameters:
    """Return the parameters that may move, apart from any graph."""
    found = {name: p.detach() for name, p in network.named_parameters() if p.requires_grad}
    if not found:
        raise UserError("model: must have a trainable parameter, got a frozen network")
    return found


def pieces(
    network: nn.Module, inputs: Tensor, targets: Tensor, chunk: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut rows into pieces of at most `chunk`, on the device of the network."""
    if chunk < 1:
        raise UserError(f"chunk: must be at least 1, got {chunk}")
    if len(inputs) != len(targets):
        raise UserError(f"labels: must be one per input, got {len(targets)} for {len(inputs)}")
    device = next(network.parameters()).device
    for begin in range(0, max(len(inputs), 1), chunk):  # of no rows one piece, which is empty
        rows = slice(begin, begin + chunk)
        yield inputs[rows].to(device), targets[rows].to(device)


def check_finite(parameters: Parameters, what: str) -> None:
    """Refuse to go on from what is no longer a number, naming where."""
    for name, value in parameters.items():
        if not bool(value.isfinite().all()):
            raise FloatingPointError(
                f"{what} is not finite for parameter {name!r}; "
                "look for bad pixels in the inputs, or at how the network was trained"
            )
