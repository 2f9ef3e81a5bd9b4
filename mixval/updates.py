r"""Move a trained network: towards the failures F it should fit, or away from the samples C.

All start from the trained weights $\hat\theta$ and return a new network in eval mode; the
one that was given stays as it is. BatchNorm statistics do not move and dropout is off: F is
a handful of rows, and its statistics are not those of the data. Only parameters that
require gradients move.

`held` is $A = N \hat F + \lambda$, how firmly the N training samples hold each parameter
(`fisher.precision`); log p of a set is the sum over its samples. After Tanno et al.,
"Repairing Neural Networks by Leaving the Right Past Behind" (2022).
"""

import copy
import math
import warnings
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, jvp

from mixval.engine import plain
from mixval.errors import UserError
from mixval.fisher import (
    LabelledBatch,
    Parameters,
    check_finite,
    log_likelihood,
    pieces,
    still,
    summed_gradient,
    trainable,
)
from mixval.losses import cross_entropy

# No network that means anything is this far off on average, in nats per sample.
_LOST = 1000.0


def fine_tune(
    model: nn.Module,
    batches_of_epoch: Callable[[int], Iterable[LabelledBatch]],
    *,
    lr: float,
    epochs: int,
) -> nn.Module:
    """Return the network after SGD (momentum 0.9, constant rate) on the mean loss of each batch.

    On F, on the data with F, or on the data without C: what `batches_of_epoch` gives for
    epochs 0, 1, ...
    """
    _check_positive(lr=lr, epochs=epochs)
    twin = copy.deepcopy(model).eval()
    network = plain(twin)
    parameters = [p for p in network.parameters() if p.requires_grad]
    device = next(iter(trainable(network).values())).device
    optimiser = torch.optim.SGD(parameters, lr=lr, momentum=0.9)
    for epoch in range(epochs):
        count = 0
        for inputs, labels in batches_of_epoch(epoch):
            count += len(labels)
            logits = twin(inputs.to(device))
            targets = nn.functional.one_hot(labels.to(device), logits.shape[-1]).to(logits.dtype)
            optimiser.zero_grad()
            cross_entropy(logits, targets).mean().backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        if count == 0:
            raise UserError(
                f"batches_of_epoch: must give at least 1 sample, got none in epoch {epoch}"
            )
        check_finite(trainable(network), f"fine-tuning at lr {lr}, epoch {epoch},")
    optimiser.zero_grad()
    return twin


def ewc(
    model: nn.Module,
    held: Parameters,
    inputs: Tensor,
    labels: Tensor,
    *,
    steps: int = 100,
    chunk: int = 256,
) -> nn.Module:
    r"""Return the network that fits F and stays where the data hold it (elastic weights).

    $$ \theta_{+F} = \arg\max_\theta \log p(F|\theta)
       - \tfrac12 (\theta-\hat\theta)^\top A\, (\theta-\hat\theta) $$

    The optimum does not depend on a learning rate, so there is none: L-BFGS with a line
    search over all of F, until it stands still or `steps` are done.
    """
    return _climb(model, held, inputs, labels, sign=1, steps=steps, chunk=chunk)


def ewc_deletion(
    model: nn.Module,
    held: Parameters,
    inputs: Tensor,
    labels: Tensor,
    *,
    steps: int = 100,
    chunk: int = 256,
) -> nn.Module:
    r"""Return the network that forgets C and stays where the data hold it.

    $$ \theta_{-C} = \arg\max_\theta -\log p(C|\theta)
       - \tfrac12 (\theta-\hat\theta)^\top A\, (\theta-\hat\theta) $$

    A local maximum near the start: the loss on C has no upper bound, and with several
    layers it grows faster than the square that holds it. Where nothing near holds it, that
    is a FloatingPointError. The published ridge of 0.1 is far too small in deep networks,
    and what it takes grows with C: a small network that forgets a tenth of the data it has
    fitted is held from about 3000 on (docs/repair.md).
    """
    return _climb(model, held, inputs, labels, sign=-1, steps=steps, chunk=chunk)


def natural_gradient(
    model: nn.Module,
    held: Parameters,
    inputs: Tensor,
    labels: Tensor,
    *,
    step: float = 1.0,
    chunk: int = 256,
) -> nn.Module:
    r"""Return the network at $\hat\theta + \gamma A^{-1} \nabla \log p(F|\hat\theta)$."""
    _check_positive(step=step)
    direction = natural_direction(model, held, inputs, labels, chunk=chunk)
    return _moved(model, {name: step * way for name, way in direction.items()})


def newton_deletion(
    model: nn.Module,
    held: Parameters,
    inputs: Tensor,
    labels: Tensor,
    *,
    step: float = 1.0,
    chunk: int = 256,
) -> nn.Module:
    r"""Return the network at $\hat\theta - \gamma A^{-1} \nabla \log p(C|\hat\theta)$.

    Down the likelihood of C. A published notebook goes up (it subtracts the gradient of
    the loss), which fits C instead of forgetting it.
    """
    _check_positive(step=step)
    direction = natural_direction(model, held, inputs, labels, chunk=chunk)
    return _moved(model, {name: -step * way for name, way in direction.items()})


def natural_direction(
    model: nn.Module,
    held: Parameters,
    inputs: Tensor,
    labels: Tensor,
    *,
    chunk: int = 256,
) -> Parameters:
    r"""Return $A^{-1} \nabla \log p(F|\hat\theta)$, by parameter."""
    _check_rows(labels)
    network = still(model)
    parameters = trainable(network)
    slopes = summed_gradient(network, parameters, inputs, labels, chunk=chunk)
    direction = {name: slopes[name] / held[name] for name in parameters}
    check_finite(direction, "the natural gradient")
    return direction


def linear_influence(
    model: nn.Module,
    held: Parameters,
    mixes: tuple[Tensor, Tensor],
    inputs: Tensor,
    labels: Tensor,
    *,
    step: float = 1.0,
    chunk: int = 256,
) -> Tensor:
    r"""Return r_hat of each mix to first order in the step $\gamma$ of `natural_gradient`, (B,).

    $$ \hat r(z) \approx -\gamma\, \nabla \log p(z|\hat\theta)^\top A^{-1}
       \nabla \log p(F|\hat\theta), \qquad \log p(z|\theta) = -H(y_{mix}, p(x_{mix}|\theta)) $$

    `mixes` are rows (B, ...) and soft targets (B, K).
    """
    _check_positive(step=step)
    direction = natural_direction(model, held, inputs, labels, chunk=chunk)
    return step * loss_slopes(model, direction, mixes, chunk=chunk)


def loss_slopes(
    model: nn.Module, direction: Parameters, mixes: tuple[Tensor, Tensor], *, chunk: int = 256
) -> Tensor:
    r"""Return $\nabla H(y, p(x|\hat\theta))^\top d$ for each row and one direction d, (B,).

    Forward-mode differentiation: the cost of about two forward passes for all rows, where
    the gradient of each row would need a backward pass and the memory of a network.
    """
    network = still(model)
    parameters = trainable(network)
    slopes = []
    for rows, targets in pieces(network, *mixes, chunk):

        def losses(
            parameters: Parameters, rows: Tensor = rows, targets: Tensor = targets
        ) -> Tensor:
            return cross_entropy(functional_call(network, parameters, (rows,)), targets)

        with warnings.catch_warnings():  # torch warns of itself, when it first does this
            warnings.filterwarnings("ignore", r"`torch\.jit\.script` is dep", FutureWarning)
            slopes.append(jvp(losses, (parameters,), (direction,))[1])
    together = torch.cat(slopes)
    check_finite({"all": together}, "the slope of the loss of mixes")
    return together


def _climb(
    model: nn.Module,
    held: Parameters,
    inputs: Tensor,
    labels: Tensor,
    *,
    sign: int,
    steps: int,
    chunk: int,
) -> nn.Module:
    r"""Maximise $s \log p - \tfrac12 \Delta^\top A \Delta$ over $\Delta = A^{-1/2} u$.

    In u the penalty is a round bowl, $\tfrac12 |u|^2$, whatever the scales of the parameters
    are, and only the few directions that F sees bend differently.
    """
    _check_rows(labels)
    _check_positive(steps=steps)
    scale = {name: value.rsqrt() for name, value in held.items()}
    walk = {name: torch.zeros_like(value) for name, value in held.items()}
    objective = _penalised_loss(model, scale, walk, inputs, labels, sign=sign, chunk=chunk)
    optimiser = torch.optim.LBFGS(
        list(walk.values()), max_iter=steps, max_eval=4 * steps, line_search_fn="strong_wolfe"
    )
    before = optimiser.step(objective)  # type: ignore[no-untyped-call]
    after = objective()
    if after > before + 1e-5 * max(1.0, abs(before)):  # more than rounding
        raise FloatingPointError(
            f"the update ended worse than it began: {after:g} > {before:g}; give a larger ridge"
        )
    return _moved(model, {name: scale[name] * walk[name] for name in walk})


def _penalised_loss(
    model: nn.Module,
    scale: Parameters,
    walk: Parameters,
    inputs: Tensor,
    labels: Tensor,
    *,
    sign: int,
    chunk: int,
) -> Callable[[], float]:
    """Return a function of what `walk` holds when it is called; it leaves its gradient there."""
    network = still(model)
    start = trainable(network)

    def loss(walk: Parameters, rows: Tensor, row_labels: Tensor) -> Tensor:
        here = {name: start[name] + scale[name] * walk[name] for name in start}
        return -sign * log_likelihood(network, here, rows, row_labels).sum()

    def objective() -> float:
        gradient = {name: way.clone() for name, way in walk.items()}
        total = sum(0.5 * float(way.square().sum()) for way in walk.values())
        for rows, row_labels in pieces(network, inputs, labels, chunk):
            slopes, value = grad_and_value(loss)(walk, rows, row_labels)
            total += float(value)
            for name, slope in slopes.items():
                gradient[name] += slope
        for name, way in walk.items():
            way.grad = gradient[name]
        _check_bounded(total / len(labels))
        return total

    return objective


def _moved(model: nn.Module, change: Parameters) -> nn.Module:
    """Return a copy of the network with its parameters changed by so much."""
    twin = copy.deepcopy(model).eval()
    parameters = trainable(plain(twin))
    for name, difference in change.items():
        parameters[name].add_(difference)
    check_finite(parameters, "the updated network")
    return twin


def _check_bounded(objective: float) -> None:
    if math.isfinite(objective) and objective > -_LOST:
        return
    raise FloatingPointError(
        f"the update diverged: its objective is {objective:g} per sample, so the curvature "
        "does not hold the network; give a larger ridge, or look for bad pixels in the inputs"
    )


def _check_rows(labels: Tensor) -> None:
    if len(labels) == 0:
        raise UserError("labels: must name at least 1 sample to move the network, got none")


def _check_positive(**numbers: float) -> None:
    for name, value in numbers.items():
        if not (math.isfinite(value) and value > 0):
            raise UserError(f"{name}: must be finite and > 0, got {value}")
