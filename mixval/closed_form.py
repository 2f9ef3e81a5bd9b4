r"""r of sets under Gaussian posteriors without draws: for a squared error, and for softmax.

r(C) = log E[exp H(C)] under p(theta | D, F), less that under p(theta | D).

Squared error, H quadratic with curvature A = X^T X: finite only while P - A is positive
definite.

Softmax with soft targets t that sum to 1: H = log sum_k exp(z_k) - t^T z, so that

    exp H = sum_k exp((e_k - t)^T z)

Under Gaussian logits z every term has a closed form, and weighing the Gaussian by it moves
its mean by Cov(., z) (e_k - t) and leaves its covariance. So p(z) exp H(C) is a mixture of
K^n Gaussians, and E[exp H(C)] the sum of their masses: finite for every set C, because H
grows only linearly in z. The masses can grow as the exponential of n^2, though, and from
some size on they lie where no draw comes.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mixval.last_layer import LastLayer
from mixval.types import Floats

_LIMIT = 1_000_000  # Gaussians that are added up one by one


# -- linear regression --------------------------------------------------------------------------


@dataclass(frozen=True)
class LinearRegression:
    """N(mean, precision^-1) over theta, with H = sum_C (y - x theta)^2 / 2 + log(2 pi) / 2."""

    mean: Floats  # (D,)
    precision: Floats  # (D, D)

    @staticmethod
    def given(inputs: Floats, outputs: Floats) -> "LinearRegression":
        """Return p(theta | data (N, D), (N,)) under a standard normal prior and unit noise."""
        precision = np.eye(inputs.shape[1]) + inputs.T @ inputs
        mean = np.linalg.solve(precision, inputs.T @ outputs)
        return LinearRegression(mean.astype(np.float64), precision)

    def losses(self, inputs: Floats, outputs: Floats, noise: Floats) -> Floats:
        """Return H of a set (n, D), (n,) for each draw from standard normal noise (S, D), (S,)."""
        root = np.linalg.cholesky(self.precision).T
        theta = self.mean + np.linalg.solve(root, noise.T).T
        squares = (outputs - theta @ inputs.T) ** 2
        summed: Floats = (squares + np.log(2 * np.pi)).sum(1) / 2
        return summed

    def bend(self, inputs: Floats) -> float:
        """Return the largest eigenvalue of P^-1 A: from 1 on, E[exp H] is infinite."""
        root = np.linalg.solve(np.linalg.cholesky(self.precision), inputs.T)
        return float(np.linalg.norm(root, 2) ** 2)

    def log_mean_exp(self, inputs: Floats, outputs: Floats) -> float:
        r"""Return log E[exp H] of a set, with g = X^T (y - X m) and H(m) at the mean m.

        $$ H(m) + \tfrac12 g^T (P - A)^{-1} g - \tfrac12 \log\det(I - P^{-1} A) $$
        """
        if self.bend(inputs) >= 1:
            return float("inf")
        slope = inputs.T @ (outputs - inputs @ self.mean)
        rest = self.precision - inputs.T @ inputs
        shrunk = np.linalg.slogdet(rest)[1] - np.linalg.slogdet(self.precision)[1]
        at_mean = self.losses(inputs, outputs, np.zeros((1, len(self.mean))))[0]
        return float(at_mean + (slope @ np.linalg.solve(rest, slope) - shrunk) / 2)


# -- softmax ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Logits:
    """The logits of n rows under a Gaussian last layer. All in float64."""

    mean: Tensor  # (n, K)
    covariance: Tensor  # (n, K, n, K)

    @staticmethod
    def of(posterior: LastLayer, features: Tensor) -> "Logits":
        """Return the logits of rows with these features, (n, D)."""
        rows = F.pad(features.to("cpu", torch.float64), (0, int(posterior.bias)), value=1.0)
        count, classes = len(rows), len(posterior.mean)
        basis = torch.zeros(count, classes, *posterior.mean.shape, dtype=torch.float64)
        for k in range(classes):
            basis[:, k, k] = rows  # d z_nk / d W
        flat = basis.flatten(0, 1)
        covariance = flat.flatten(1) @ posterior.factor.solve(flat).flatten(1).T
        return Logits(rows @ posterior.mean.T, covariance.view(count, classes, count, classes))

    def first(self, count: int) -> "Logits":
        return Logits(self.mean[:count], self.covariance[:count, :, :count])

    def bend(self) -> float:
        """Return the largest eigenvalue of P^-1 G_C: the rows' curvature, at the mean, beside P."""
        probs = self.mean.softmax(1)
        # (I - p 1^T) diag(p)^1/2 is a root of diag(p) - p p^T: the product is symmetric.
        roots = torch.diag_embed(probs.sqrt()) - probs[:, :, None] * probs.sqrt()[:, None, :]
        product = torch.einsum("akj,akbm,bml->ajbl", roots, self.covariance, roots)
        side = self.mean.numel()
        return float(torch.linalg.eigvalsh(product.reshape(side, side)).max())


def log_mean_exp(logits: Logits, targets: Tensor) -> float:
    """Return log E[exp H] of the set of all rows, exactly; targets (n, K) sum to 1."""
    count, classes = targets.shape
    if classes**count > _LIMIT:
        raise ValueError(f"{count} rows of {classes} classes are more than {_LIMIT:,} Gaussians")
    ways, moves, halves = _tilts(logits, targets)
    centres, masses = logits.mean[None], torch.zeros(1, dtype=torch.float64)
    for row in range(count):
        terms = centres[:, 0] @ ways[row].T + halves[row]  # (Gaussians, K)
        centres = (centres[:, None, 1:] + moves[row, :, row + 1 :]).flatten(0, 1)
        masses = (masses[:, None] + terms).flatten()
    return float(masses.logsumexp(0))


def sequential_log_mean_exp(
    logits: Logits, targets: Tensor, rng: np.random.Generator, *, particles: int = 500
) -> Tensor:
    """Return log E[exp H] of the first 1, 2, ..., n rows, (n,), by sequential Monte Carlo.

    A particle is one of the Gaussians: at each row it is weighed by the sum of its K masses
    and goes on with one of them, chosen in proportion. Unbiased for E[exp H], and exact for
    one row. Where half of the particles count no more, they are drawn anew.
    """
    ways, moves, halves = _tilts(logits, targets)
    centres = logits.mean.expand(particles, -1, -1)
    weights, settled = torch.zeros(particles, dtype=torch.float64), 0.0
    means = torch.empty(len(targets), dtype=torch.float64)
    for row in range(len(targets)):
        terms = centres[:, 0] @ ways[row].T + halves[row]  # (particles, K)
        weights = weights + terms.logsumexp(1)
        means[row] = settled + weights.logsumexp(0) - np.log(particles)
        uniforms = torch.from_numpy(rng.random((particles, 1)))
        chosen = (uniforms > terms.softmax(1).cumsum(1)[:, :-1]).sum(1)
        centres = centres[:, 1:] + moves[row, :, row + 1 :][chosen]
        shares = weights.softmax(0)
        if 1 / shares.square().sum() < particles / 2:
            places = (np.arange(particles) + rng.random()) / particles
            centres = centres[np.searchsorted(shares.cumsum(0)[:-1].numpy(), places)]
            weights, settled = torch.zeros_like(weights), float(means[row])
    return means


def _tilts(logits: Logits, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return e_k - t, how it moves the means of all rows, and half the variance of (e_k - t)^T z.

    (n, K, K), (n, K, n, K) and (n, K).
    """
    ways = torch.eye(targets.shape[1], dtype=torch.float64) - targets[:, None, :]
    moves = torch.einsum("akj,ajbm->akbm", ways, logits.covariance)
    own = torch.stack([moves[row, :, row] for row in range(len(targets))])
    return ways, moves, (ways * own).sum(-1) / 2
