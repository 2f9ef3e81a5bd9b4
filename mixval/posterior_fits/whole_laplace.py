"""A Laplace posterior of all weights, with the curvature of laplace-torch."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from mixval.errors import UserError
from mixval.fisher import LabelledBatch, still, summed_gradient, trainable
from mixval.fitting import Known, with_parameters
from mixval.posteriors import Fitted
from mixval.seeding import torch_seed

_FULL_LIMIT = 20_000  # weights; a square matrix of them is 1.6 GB


def whole_laplace(known: Known, structure: str, prior_precision: float, draws: int) -> Fitted:
    r"""Return draws of N(theta_D, P_D^-1) and N(theta_F, P_F^-1), P_F = P_D + G_F.

    $$ \theta_F = \theta_D + P_F^{-1} \nabla \log p(F | \theta_D) $$

    is one Gauss-Newton step: the curvature does not see F's labels, so the mean has to move.
    """
    network = still(known.model)  # laplace-torch writes into what it is given
    size = sum(p.numel() for p in network.parameters())
    if structure == "full" and size > _FULL_LIMIT:
        raise UserError(
            f"structure: full of all {size:,} weights needs {4 * size**2 / 1e9:,.0f} GB; "
            "give kron or diag, or weights: last_layer"
        )
    kind = {"subset_of_weights": "all", "hessian_structure": structure}
    fitted = _laplace()(network, "classification", **kind, prior_precision=prior_precision)
    device = next(network.parameters()).device

    def drawn() -> Tensor:
        noise = torch.Generator(device).manual_seed(torch_seed(known.seed, "posterior"))
        samples: Tensor = fitted.sample(draws, generator=noise)
        return samples

    try:
        with _unwarned():
            fitted.fit(_Batches(known.rows, known.num_samples))
    except NotImplementedError as error:  # Kronecker factors of BatchNorm, for one
        raise UserError(
            f"structure: {structure} can't be had for all weights of this network ({error}); "
            "give diag, or weights: last_layer"
        ) from error
    base = drawn()
    slopes = summed_gradient(network, trainable(network), *known.failures, chunk=256)
    fitted.fit(_Batches(lambda: iter([known.failures]), len(known.failures[1])), override=False)
    step = _solved(fitted, structure, parameters_to_vector(slopes.values()))
    return Fitted(
        "networks",
        with_parameters(known.model, base),
        with_parameters(known.model, drawn() + step),
        draws=draws,
    )


def _solved(fitted: Any, structure: str, gradient: Tensor) -> Tensor:
    """Return P^-1 gradient, for each way that laplace-torch keeps P."""
    precision: Any = fitted.posterior_precision
    solve = {
        "diag": lambda: gradient / precision,
        "kron": lambda: precision.bmm(gradient, exponent=-1).flatten(),
        "full": lambda: torch.linalg.solve(precision, gradient),
    }
    step: Tensor = solve[structure]()
    return step


class _Batches:
    """What laplace-torch asks of a loader: batches, and the length of its dataset."""

    def __init__(self, batches: Any, count: int) -> None:
        self.batches, self.dataset = batches, range(count)

    def __iter__(self) -> Iterator[LabelledBatch]:
        return iter(self.batches())


@contextmanager
def _unwarned() -> Iterator[None]:
    """Leave out what torch says of itself when laplace-torch first uses it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def _laplace() -> Any:
    try:
        with _unwarned():
            logging.disable(logging.WARNING)  # of laplace, about backends that nobody asked for
            from laplace import Laplace
    except ImportError as error:
        fix = "pip install 'mixval[laplace]'"
        raise UserError(f"weights: must be last_layer without laplace-torch; {fix}") from error
    finally:
        logging.disable(logging.NOTSET)
    return Laplace
