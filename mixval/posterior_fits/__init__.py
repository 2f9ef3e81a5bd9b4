"""What is known -> the draws of p(theta | D) and p(theta | D, F): `Known` -> `Fitted`.

The options, one family to a file. A teacher is the other way to a pair: p(theta | D, F) is
the teacher, p(theta | D) the base network or the student, and nothing has to be fitted.
"""

from mixval.posterior_fits.gaussian import laplace, swag
from mixval.posterior_fits.networks import deep_ensemble, mc_dropout, snapshot
from mixval.posterior_fits.updated import ewc, natural_gradient, point

__all__ = [
    "deep_ensemble",
    "ewc",
    "laplace",
    "mc_dropout",
    "natural_gradient",
    "point",
    "snapshot",
    "swag",
]
