"""The Laplace posterior of a softmax classifier's last layer, and how failures F move it.

    p(W | D)     = N(W_D, P_D^-1)        P_D = G_D(W_D) + delta I
    p(W | D, F)  = N(W_F, P_F^-1)        P_F = P_D + G_F(W_F)
    W_F          = argmax log p(F | W) - 1/2 (W - W_D)^T P_D (W - W_D)

W_D are the trained weights; the backbone below them is fixed. G (`curvature`) does not see
labels: with W_D kept, F would only shrink the posterior, whatever its labels say. So the
mean moves to the mode, where log p(F | W) is exact and what D says of W is quadratic.
"""

import copy
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mixval.curvature import STRUCTURES, Curvature, Factor, Structure, curvature_from
from mixval.engine import Prepared
from mixval.errors import UserError

_NEWTON_STEPS, _CONJUGATE_STEPS = 100, 1000


# -- a network in two parts ---------------------------------------------------------------------


@dataclass(frozen=True)
class Head:
    """A frozen copy of a network whose output is that of its last linear layer."""

    network: nn.Module
    layer: nn.Linear

    @property
    def mean(self) -> Tensor:
        """Return the layer's weights, and its bias as the last column: (K, D + 1) or (K, D)."""
        weight = self.layer.weight.detach()
        parts = [weight] if self.layer.bias is None else [weight, self.layer.bias.detach()[:, None]]
        return torch.cat(parts, dim=1).to("cpu", torch.float64)

    @torch.inference_mode()
    def __call__(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features (B, D) that enter the layer and the logits (B, K), in one pass."""
        seen: list[tuple[Tensor, Tensor]] = []

        def note(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any], out: Tensor) -> None:
            seen.append(((*given, *named.values())[0], out))

        handle = self.layer.register_forward_hook(note, with_kwargs=True)
        try:
            logits: Tensor = self.network(inputs)
        finally:
            handle.remove()
        if len(seen) != 1 or seen[0][0].dim() != 2 or not _same(seen[0][1], logits):
            raise UserError(
                "model: its output must be that of its last nn.Linear, from features (B, D), "
                f"but {self.layer} ran {len(seen)} times and gave something else; let it end there"
            )
        return seen[0][0].float(), logits.float()


def split_head(model: nn.Module) -> Head:
    """Return a copy of `model` that also gives the features its last nn.Linear works on."""
    if isinstance(model, Prepared):
        # Plain: with the hook that reads the features it would have to be compiled again.
        engine = replace(model.engine, compile=False)
        network: nn.Module = Prepared(copy.deepcopy(model.network), engine)
    else:
        network = copy.deepcopy(model)
    network.eval().requires_grad_(False)
    layers = [part for part in network.modules() if isinstance(part, nn.Linear)]
    if not layers:
        raise UserError(
            f"model: a last-layer posterior needs an nn.Linear, got {type(model).__name__} "
            "without one; end it with one"
        )
    return Head(network, layers[-1])


def _same(output: Tensor, logits: Tensor) -> bool:
    # What the engine casts to float32 after the layer is still the layer's.
    return output is logits or torch.equal(output.to(logits.dtype), logits)


# -- the posterior ------------------------------------------------------------------------------


@dataclass(frozen=True)
class LastLayer:
    """N(mean, (curvature + prior_precision I)^-1) over weights and bias. All in float64."""

    mean: Tensor  # (K, D + 1), the bias last; (K, D) without one
    structure: Structure
    curvature: Curvature
    prior_precision: float
    bias: bool

    @cached_property
    def factor(self) -> Factor:
        return self.curvature.factor(self.prior_precision)

    def precision_times(self, vector: Tensor) -> Tensor:
        return self.curvature.times(vector) + self.prior_precision * vector

    def to_tensors(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return what a safetensors file holds: tensors and metadata."""
        tensors = {"mean": self.mean, **self.curvature.tensors()}
        return tensors, {
            "structure": self.structure,
            "prior_precision": repr(self.prior_precision),
            "bias": str(self.bias),
        }

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], facts: dict[str, str]) -> "LastLayer":
        # Copied into memory of torch's own: where a file's tensors begin is not aligned, and
        # the last bits of a product depend on that.
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        structure, bias = _known(facts["structure"]), facts["bias"] == "True"
        curvature = curvature_from(tensors, structure, bias)
        return cls(tensors["mean"], structure, curvature, float(facts["prior_precision"]), bias)


def fit(
    features: Iterable[Tensor], mean: Tensor, structure: Structure, prior_precision: float
) -> LastLayer:
    """Return p(W | D) of the trained weights `mean` from D's features, in batches (B, D).

    The logits are made again from features and mean, in float64.
    """
    structure = _known(structure)
    if not (math.isfinite(prior_precision) and prior_precision >= 0):
        raise UserError(f"prior_precision: must be finite and >= 0, got {prior_precision}")
    mean = mean.detach().to("cpu", torch.float64, copy=True)  # the caller's may train on
    batches = iter(features)
    first = next(batches, None)
    if first is None:
        raise UserError("features: a posterior needs data, got no batch")
    num_classes, width = mean.shape
    bias = width == first.shape[1] + 1
    empty: Curvature = STRUCTURES[structure].zeros(num_classes, width, bias)
    curvature = empty.plus(_predictions(chain([first], batches), mean, bias))
    posterior = LastLayer(mean, structure, curvature, prior_precision, bias)
    assert posterior.factor  # refuses a singular precision here and not at the first draw
    return posterior


def updated(posterior: LastLayer, features: Tensor, labels: Tensor) -> LastLayer:
    """Return p(W | D, F) from p(W | D) and F's features (M, D) and labels (M,)."""
    rows, labels = _rows(features, posterior.mean, posterior.bias), labels.to("cpu")
    num_classes = len(posterior.mean)
    if len(labels) != len(rows):
        raise ValueError(f"{len(rows)} rows of features and {len(labels)} labels")
    if len(labels) and not (int(labels.min()) >= 0 and int(labels.max()) < num_classes):
        found = f"{int(labels.min())}..{int(labels.max())}"
        raise ValueError(f"labels must be in 0..{num_classes - 1}, got {found}")
    mean = _mode(posterior, rows, labels)
    curvature = posterior.curvature.plus([((rows @ mean.T).softmax(1), rows)])
    moved = replace(posterior, mean=mean, curvature=curvature)
    assert moved.factor
    return moved


def draw(posterior: LastLayer, noise: Tensor) -> Tensor:
    """Return weights (S, K, D + 1) from standard normal noise (S, P): W + P^-1/2 z.

    The same noise gives draws of p(W | D) and p(W | D, F) that differ as little as the two
    do (common random numbers); r_hat is their difference and has less variance for it.
    """
    shaped = noise.to("cpu", torch.float64).reshape(-1, *posterior.mean.shape)
    return posterior.mean + posterior.factor.colour(shaped)


def _known(structure: str) -> Structure:
    for name in STRUCTURES:
        if name == structure:
            return name
    raise UserError(f"structure: must be one of {', '.join(STRUCTURES)}, got {structure!r}")


def _predictions(
    batches: Iterable[Tensor], mean: Tensor, bias: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    for batch in batches:
        rows = _rows(batch, mean, bias)
        yield (rows @ mean.T).softmax(1), rows


def _rows(features: Tensor, mean: Tensor, bias: bool) -> Tensor:
    """Return features (B, D) in float64, with a 1 for the bias as the last column."""
    columns = mean.shape[1] - bias
    if features.dim() != 2 or features.shape[1] != columns:
        raise ValueError(f"features must be (B, {columns}), got {tuple(features.shape)}")
    rows = features.detach().to("cpu", torch.float64)
    if not bool(rows.isfinite().all()):
        raise UserError("features: must be finite, got NaN or infinity; the network has diverged")
    return functional.pad(rows, (0, 1), value=1.0) if bias else rows


# -- the mode given F ---------------------------------------------------------------------------


def _mode(posterior: LastLayer, rows: Tensor, labels: Tensor) -> Tensor:
    """Return argmin of the convex L(W) = -log p(F | W) + 1/2 (W - W_D)^T P_D (W - W_D).

    Damped Newton steps; in each (P_D + G_F(W)) step = -gradient is solved by conjugate
    gradients with P_D^-1 as preconditioner, so one factor of P_D serves every structure, and
    all of G_F is used, not its approximation.
    """
    targets = functional.one_hot(labels, len(posterior.mean)).to(rows)
    change = torch.zeros_like(posterior.mean)
    for _ in range(_NEWTON_STEPS):
        probs = (rows @ (posterior.mean + change).T).softmax(1)
        gradient = (probs - targets).T @ rows + posterior.precision_times(change)
        step = _newton_step(posterior, rows, probs, gradient)
        slope = float((gradient * step).sum())
        value = _objective(posterior, rows, labels, change)
        if -slope <= 1e-13 * (1 + value):  # the next value would differ by rounding alone
            return posterior.mean + change + step
        size = 1.0
        while _objective(posterior, rows, labels, change + size * step) > value + slope * size / 4:
            size /= 2
        change = change + size * step
    raise UserError(
        f"prior_precision: the mean given F was not found in {_NEWTON_STEPS} Newton steps with "
        f"{posterior.prior_precision:g} and features up to {float(rows.abs().max()):.1g}; raise it"
    )


def _objective(posterior: LastLayer, rows: Tensor, labels: Tensor, change: Tensor) -> float:
    logits = rows @ (posterior.mean + change).T
    loss = functional.cross_entropy(logits, labels, reduction="sum")
    return float(loss + (change * posterior.precision_times(change)).sum() / 2)


def _newton_step(posterior: LastLayer, rows: Tensor, probs: Tensor, gradient: Tensor) -> Tensor:
    """Return -(P_D + G_F)^-1 gradient by preconditioned conjugate gradients."""

    def hessian_times(vector: Tensor) -> Tensor:
        logits = rows @ vector.T
        bent = probs * (logits - (probs * logits).sum(1, keepdim=True))  # Lambda_n of each row
        return bent.T @ rows + posterior.precision_times(vector)

    solution, residual = torch.zeros_like(gradient), -gradient
    direction = whitened = posterior.factor.solve(residual)
    size = start = float((residual * whitened).sum())
    for _ in range(_CONJUGATE_STEPS):
        if size <= 1e-8 * start:  # the next Newton step makes up for the rest
            break
        curved = hessian_times(direction)
        length = size / float((direction * curved).sum())
        solution = solution + length * direction
        residual = residual - length * curved
        whitened = posterior.factor.solve(residual)
        size, before = float((residual * whitened).sum()), size
        direction = whitened + size / before * direction
    return solution
