"""The curvature of a softmax layer's loss, whole or in an approximation that fits in memory.

With p_n = softmax(W f_n) and Lambda_n = diag(p_n) - p_n p_n^T, the generalised Gauss-Newton
matrix of the summed cross-entropy (here also its Hessian: the logits are linear in W) is

    G = sum_n Lambda_n (x) f_n f_n^T              over W (K, D) read row by row, P = K D

    full   G itself
    kron   (sum_n Lambda_n) (x) (1/N sum_n f_n f_n^T), and no products of weights and bias:
           the convention of laplace-torch's KronLLLaplace
    diag   the diagonal of G

A precision is P = G + delta I. Its factor gives P^-1 v, and P^-1/2 z for standard normal z.
Sums and factors are in float64, because delta is small beside a sum over a dataset.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, Self

import torch
from torch import Tensor

from mixval.errors import UserError

Structure = Literal["full", "kron", "diag"]
Batches = Iterable[tuple[Tensor, Tensor]]  # probabilities (B, K) and features (B, D), float64

MATRIX_LIMIT = 2_000_000_000  # bytes of one matrix; its factor takes as much again
_CHUNK = 32_000_000  # bytes of what is made for the rows that are summed at once


class Factor(Protocol):
    """What a precision P can do once it is factorised, to tensors (..., K, D)."""

    def solve(self, vectors: Tensor) -> Tensor: ...  # P^-1 v

    def colour(self, noise: Tensor) -> Tensor: ...  # R z with R R^T = P^-1


class Curvature(Protocol):
    """G in one of the structures. Nothing is changed in place once it is made."""

    @classmethod
    def zeros(cls, num_classes: int, width: int, bias: bool) -> Self: ...

    def plus(self, batches: Batches) -> Self: ...  # G of these rows added

    def times(self, vector: Tensor) -> Tensor: ...  # G v, (K, D)

    def factor(self, prior_precision: float) -> Factor: ...  # of G + delta I

    def tensors(self) -> dict[str, Tensor]: ...


# -- full ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Full:
    """G itself."""

    matrix: Tensor  # (P, P)

    @classmethod
    def zeros(cls, num_classes: int, width: int, bias: bool) -> Self:
        side = num_classes * width
        _refuse_above_limit("full", side, "kron or diag")
        return cls(torch.zeros(side, side, dtype=torch.float64))

    def plus(self, batches: Batches) -> Self:
        matrix = self.matrix.clone()
        for probs, features in _chunks(batches):
            _add_blocks(matrix, probs, features)
        _mirror(matrix)
        return type(self)(matrix)

    def times(self, vector: Tensor) -> Tensor:
        return (self.matrix @ vector.reshape(-1)).view_as(vector)

    def factor(self, prior_precision: float) -> "CholeskyFactor":
        precision = self.matrix.clone()
        precision.diagonal().add_(prior_precision)
        largest = float(precision.diagonal().max())
        root, failed = torch.linalg.cholesky_ex(precision)
        # A matrix that is singular but for rounding has a root, too: of rounding errors.
        smallest = 0.0 if int(failed) else float(root.diagonal().min()) ** 2
        _refuse_singular("full", smallest, largest, len(precision), prior_precision)
        return CholeskyFactor(root)

    def tensors(self) -> dict[str, Tensor]:
        return {"matrix": self.matrix}


@dataclass(frozen=True)
class CholeskyFactor:
    """P = L L^T. Of two near precisions L is near, too, and so are R z = L^-T z."""

    root: Tensor  # (P, P), lower

    def solve(self, vectors: Tensor) -> Tensor:
        columns = vectors.reshape(-1, len(self.root)).T
        return torch.cholesky_solve(columns, self.root).T.reshape(vectors.shape)

    def colour(self, noise: Tensor) -> Tensor:
        columns = noise.reshape(-1, len(self.root)).T
        coloured: Tensor = torch.linalg.solve_triangular(self.root.T, columns, upper=True)
        return coloured.T.reshape(noise.shape)


def _add_blocks(matrix: Tensor, probs: Tensor, features: Tensor) -> None:
    """Add the blocks of G on and above the diagonal: half the work, the rest is mirrored."""
    num_classes, width = probs.shape[1], features.shape[1]
    for k in range(num_classes):
        weights = -probs[:, k, None] * probs[:, k:]  # (B, K - k), row k of each Lambda_n
        weights[:, 0] += probs[:, k]
        weighted = (weights[:, :, None] * features[:, None, :]).flatten(1)
        matrix[k * width : (k + 1) * width, k * width :].addmm_(features.T, weighted)


def _mirror(matrix: Tensor) -> None:
    # By strips: triu and its transpose would hold two more copies of a matrix near the limit.
    for start in range(0, len(matrix), 512):
        end = start + 512
        matrix[end:, start:end] = matrix[start:end, end:].T
        block = matrix[start:end, start:end]
        block.copy_(block.triu() + block.triu(1).T)


# -- kron ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kron:
    """G as a Kronecker product, exact where p_n does not vary with f_n (without a bias)."""

    outputs: Tensor  # (K, K) sum of Lambda_n
    inputs: Tensor  # (D, D) mean of f_n f_n^T
    count: int  # rows in the mean
    bias: bool  # the last feature is the 1 of the bias

    @classmethod
    def zeros(cls, num_classes: int, width: int, bias: bool) -> Self:
        _refuse_above_limit("kron", max(num_classes, width), "diag")
        outputs = torch.zeros(num_classes, num_classes, dtype=torch.float64)
        return cls(outputs, torch.zeros(width, width, dtype=torch.float64), 0, bias)

    def plus(self, batches: Batches) -> Self:
        outputs, inputs, count = self.outputs.clone(), self.inputs * self.count, self.count
        for probs, features in _chunks(batches):
            outputs -= probs.T @ probs
            outputs.diagonal().add_(probs.sum(0))
            inputs += features.T @ features
            count += len(features)
        if self.bias:
            inputs[-1, :-1] = inputs[:-1, -1] = 0
        return type(self)(outputs, inputs / max(count, 1), count, self.bias)

    def times(self, vector: Tensor) -> Tensor:
        return self.outputs @ vector @ self.inputs

    def factor(self, prior_precision: float) -> "KronFactor":
        classes, left = torch.linalg.eigh(self.outputs)
        features, right = torch.linalg.eigh(self.inputs)
        # Both factors are positive semi-definite; what is below 0 is rounding.
        values = torch.outer(classes.clamp(min=0), features.clamp(min=0)) + prior_precision
        smallest, largest = float(values.min()), float(values.max())
        _refuse_singular("kron", smallest, largest, values.numel(), prior_precision)
        return KronFactor(left, right, values)

    def tensors(self) -> dict[str, Tensor]:
        count = torch.tensor(self.count)
        return {"outputs": self.outputs, "inputs": self.inputs, "count": count}


@dataclass(frozen=True)
class KronFactor:
    """P = (U (x) V) diag(values) (U (x) V)^T, and R its symmetric inverse root.

    Symmetric, because it does not depend on the signs and the order of eigenvectors, in
    which two near precisions may differ.
    """

    left: Tensor  # (K, K)
    right: Tensor  # (D, D)
    values: Tensor  # (K, D)

    def solve(self, vectors: Tensor) -> Tensor:
        return self._turned(vectors, 1 / self.values)

    def colour(self, noise: Tensor) -> Tensor:
        return self._turned(noise, self.values.rsqrt())

    def _turned(self, vectors: Tensor, scale: Tensor) -> Tensor:
        return self.left @ (scale * (self.left.T @ vectors @ self.right)) @ self.right.T


# -- diag ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Diag:
    """The diagonal of G: p_nk (1 - p_nk) f_nd^2, summed over n."""

    diagonal: Tensor  # (K, D)

    @classmethod
    def zeros(cls, num_classes: int, width: int, bias: bool) -> Self:
        return cls(torch.zeros(num_classes, width, dtype=torch.float64))

    def plus(self, batches: Batches) -> Self:
        diagonal = self.diagonal.clone()
        for probs, features in _chunks(batches):
            diagonal += (probs * (1 - probs)).T @ features.square()
        return type(self)(diagonal)

    def times(self, vector: Tensor) -> Tensor:
        return self.diagonal * vector

    def factor(self, prior_precision: float) -> "DiagFactor":
        values = self.diagonal + prior_precision
        # Each weight stands alone here, however small its precision is beside another's.
        _refuse_singular("diag", float(values.min()), 0.0, 0, prior_precision)
        return DiagFactor(values)

    def tensors(self) -> dict[str, Tensor]:
        return {"diagonal": self.diagonal}


@dataclass(frozen=True)
class DiagFactor:
    """P = diag(values)."""

    values: Tensor  # (K, D)

    def solve(self, vectors: Tensor) -> Tensor:
        return vectors / self.values

    def colour(self, noise: Tensor) -> Tensor:
        return noise * self.values.rsqrt()


# -- all three ----------------------------------------------------------------------------------

STRUCTURES: dict[Structure, type[Curvature]] = {"full": Full, "kron": Kron, "diag": Diag}


def curvature_from(tensors: dict[str, Tensor], structure: Structure, bias: bool) -> Curvature:
    """Return the curvature whose `tensors()` these were."""
    if structure == "full":
        return Full(tensors["matrix"])
    if structure == "diag":
        return Diag(tensors["diagonal"])
    return Kron(tensors["outputs"], tensors["inputs"], int(tensors["count"]), bias)


def _chunks(batches: Batches) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the rows so few at a time that K D numbers for each fit into the chunk."""
    for probs, features in batches:
        rows = max(1, _CHUNK // (8 * probs.shape[1] * features.shape[1]))
        yield from zip(torch.split(probs, rows), torch.split(features, rows), strict=True)


def _refuse_above_limit(structure: str, side: int, instead: str) -> None:
    size = 8 * side**2
    if size > MATRIX_LIMIT:
        raise UserError(
            f"structure: {structure} needs a {side} x {side} matrix of {size / 1e9:.1f} GB, "
            f"above {MATRIX_LIMIT / 1e9:.0f} GB; take {instead}"
        )


def _refuse_singular(
    structure: str, smallest: float, largest: float, side: int, prior_precision: float
) -> None:
    """Refuse a precision whose smallest eigenvalue (or pivot) is 0, or rounding of the largest."""
    rounding = side * torch.finfo(torch.float64).eps * largest
    if smallest > rounding:
        return
    raise UserError(
        f"prior_precision: must make the {structure} posterior precision positive definite, got "
        f"{prior_precision:g} (smallest pivot {smallest:.1g}, largest {largest:.1g}): "
        "weights that the data leave free need a prior; raise it"
    )
