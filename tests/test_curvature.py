"""The curvature of a softmax layer against autograd, loops and laplace-torch."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from mixval import curvature as home
from mixval.curvature import STRUCTURES, Diag, Full, Kron, curvature_from
from mixval.errors import UserError
from mixval.last_layer import fit, split_head

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch.jit.script, while it is imported
    from laplace import Laplace
    from laplace.curvature import BackPackGGN

quick = settings(deadline=None, derandomize=True, max_examples=25)
CLASSES, WIDTH, ROWS, DELTA = 3, 5, 23, 0.7


def toy(rows: int = ROWS, seed: int = 0, classes: int = CLASSES, width: int = WIDTH):
    """Return probabilities, features and the weights that made them."""
    rng = np.random.default_rng([seed, rows])
    features = torch.from_numpy(rng.standard_normal((rows, width)) + 0.5)
    weights = torch.from_numpy(rng.standard_normal((classes, width)))
    return (features @ weights.T).softmax(1), features, weights


def dense(curvature, classes: int = CLASSES, width: int = WIDTH) -> torch.Tensor:
    """Return G as a matrix, column by column, through its product with unit vectors."""
    units = torch.eye(classes * width, dtype=torch.float64).view(-1, classes, width)
    return torch.stack([curvature.times(unit).flatten() for unit in units], dim=1)


def measured(structure: str, *, bias: bool = False, **more):
    probs, features, _ = toy(**more)
    empty = STRUCTURES[structure].zeros(probs.shape[1], features.shape[1], bias)
    return empty.plus([(probs, features)])


# -- what it is ---------------------------------------------------------------------------------


def test_full_is_the_hessian_of_the_summed_cross_entropy():
    # By autograd, at labels of any kind: the curvature does not depend on them.
    _, features, weights = toy()
    labels = torch.arange(ROWS) % CLASSES

    def loss(flat: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(features @ flat.view_as(weights).T, labels, reduction="sum")

    hessian = torch.autograd.functional.hessian(loss, weights.flatten())
    torch.testing.assert_close(measured("full").matrix, hessian)


def test_kron_and_diag_are_the_sums_that_they_say():
    probs, features, _ = toy()
    lambdas = [torch.diag(p) - torch.outer(p, p) for p in probs]
    inputs = sum(torch.outer(f, f) for f in features) / ROWS
    torch.testing.assert_close(dense(measured("kron")), torch.kron(sum(lambdas), inputs))
    whole = sum(torch.kron(a, torch.outer(f, f)) for a, f in zip(lambdas, features, strict=True))
    torch.testing.assert_close(measured("diag").diagonal.flatten(), whole.diagonal())


def test_kron_is_exact_where_the_prediction_does_not_depend_on_the_features():
    probs, features, _ = toy()
    batch = [(probs[:1].expand(ROWS, -1), features)]
    whole, product = (
        STRUCTURES[name].zeros(CLASSES, WIDTH, False).plus(batch) for name in ("full", "kron")
    )
    torch.testing.assert_close(dense(product), dense(whole))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_precision_is_that_of_laplace_torch(structure, bias):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES, bias=bias))
    network = network.double()
    inputs = torch.from_numpy(np.random.default_rng(0).standard_normal((ROWS, 4)))
    labels = torch.arange(ROWS) % CLASSES
    other = Laplace(
        network,
        "classification",
        subset_of_weights="last_layer",
        hessian_structure=structure,
        prior_precision=DELTA,
        backend=BackPackGGN,
    )
    other.fit(DataLoader(TensorDataset(inputs, labels), batch_size=7))
    expected = other.posterior_precision
    if structure != "full":
        expected = expected.to_matrix() if structure == "kron" else expected.diag()
    features = network[:2](inputs).detach()
    ours = fit(features.split(7), split_head(network).mean, structure, DELTA)
    width = WIDTH + bias
    matrix = dense(ours.curvature, width=width) + DELTA * torch.eye(CLASSES * width)
    # Theirs is ordered as the parameters are: all weights, then all biases.
    places = torch.arange(CLASSES * width).view(CLASSES, width)
    order = torch.cat([places[:, :WIDTH].flatten(), places[:, WIDTH:].flatten()])
    torch.testing.assert_close(matrix[order][:, order], expected.detach().to(matrix))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_rows_may_come_in_any_batches(structure, monkeypatch):
    # Catches a mean of means, a mirror that is applied twice, and a chunk that is left out.
    probs, features, _ = toy()
    empty = STRUCTURES[structure].zeros(CLASSES, WIDTH, True)
    once = empty.plus([(probs, features)])
    monkeypatch.setattr(home, "_CHUNK", 8 * CLASSES * WIDTH * 4)
    parts = list(zip(probs.split(9), features.split(9), strict=True))
    torch.testing.assert_close(dense(empty.plus(parts)), dense(once))
    torch.testing.assert_close(dense(empty.plus(parts[:1]).plus(parts[1:])), dense(once))
    assert not dense(empty).any(), "it was changed in place"


def test_a_matrix_of_several_strips_is_symmetric():
    # 3 x 400 is more than two strips of 512, the last one cut.
    matrix = measured("full", rows=4, width=400).matrix
    assert torch.equal(matrix, matrix.T)
    probs, features, _ = toy(4, width=400)
    block = -(features.T * (probs[:, 2] * probs[:, 0])) @ features
    torch.testing.assert_close(matrix[800:, :400], block)


@quick
@given(seed=st.integers(0, 1000), structure=st.sampled_from(list(STRUCTURES)))
def test_every_curvature_is_positive_semi_definite_and_blind_to_a_shift(seed, structure):
    # The same vector added to every class changes no prediction; diag alone can't say so.
    matrix = dense(measured(structure, seed=seed))
    assert torch.linalg.eigvalsh(matrix).min() > -1e-10
    shift = torch.ones(CLASSES, 1, dtype=torch.float64) * torch.arange(WIDTH)
    if structure != "diag":
        assert (matrix @ shift.flatten()).abs().max() < 1e-10


# -- its factor ---------------------------------------------------------------------------------


@quick
@given(
    seed=st.integers(0, 1000),
    structure=st.sampled_from(list(STRUCTURES)),
    delta=st.floats(1e-3, 1e3),
)
def test_the_factor_solves_and_its_root_squares_to_the_inverse(seed, structure, delta):
    curvature = measured(structure, seed=seed)
    inverse = torch.linalg.inv(dense(curvature) + delta * torch.eye(CLASSES * WIDTH))
    factor = curvature.factor(delta)
    units = torch.eye(CLASSES * WIDTH, dtype=torch.float64).view(-1, CLASSES, WIDTH)
    torch.testing.assert_close(factor.solve(units).flatten(1), inverse)
    root = factor.colour(units).flatten(1)  # rows are R e_i: root = R^T
    torch.testing.assert_close(root.T @ root, inverse)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_near_precisions_have_near_roots(structure):
    # Catches eigenvectors whose signs or order are the luck of the decomposition.
    probs, features, _ = toy()
    empty = STRUCTURES[structure].zeros(CLASSES, WIDTH, False)
    base = empty.plus([(probs, features)])
    near = empty.plus([(probs, features + 1e-6 * features.flip(0))])
    noise = torch.from_numpy(np.random.default_rng(0).standard_normal((9, CLASSES, WIDTH)))
    change = near.factor(DELTA).colour(noise) - base.factor(DELTA).colour(noise)
    assert float(change.abs().max()) < 1e-4


# -- what it refuses ----------------------------------------------------------------------------


def test_a_matrix_above_the_limit_is_refused_before_it_is_made():
    # ResNet-18 on CIFAR-100; this would be 21 GB.
    with pytest.raises(UserError, match=r"full needs a 51300 x 51300 matrix of 21\.1 GB.*kron or"):
        Full.zeros(100, 513, True)
    with pytest.raises(UserError, match=r"kron needs a 20000 x 20000 .*3\.2 GB.*take diag"):
        Kron.zeros(10, 20000, False)
    Kron.zeros(100, 513, True)
    Diag.zeros(10, 20000, False)


@pytest.mark.parametrize("structure", ["full", "kron"])
def test_without_a_prior_the_shift_is_free_and_is_refused(structure):
    # A factor of such a matrix may exist, made of rounding errors.
    for seed in range(10):
        with pytest.raises(UserError, match=r"prior_precision: .* positive definite, got 0 "):
            measured(structure, seed=seed).factor(0.0)
    measured(structure).factor(1e-6)


def test_a_diagonal_needs_a_prior_only_where_the_data_say_nothing():
    measured("diag").factor(0.0)
    probs, features, _ = toy()
    features[:, 2] = 0
    curvature = Diag.zeros(CLASSES, WIDTH, False).plus([(probs, features)])
    with pytest.raises(UserError, match="prior_precision"):
        curvature.factor(0.0)
    assert curvature.factor(1e-3).solve(torch.ones(CLASSES, WIDTH))[0, 2] == pytest.approx(1e3)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_certain_predictions_have_no_curvature_and_are_refused(structure):
    batch = [(torch.eye(CLASSES, dtype=torch.float64), torch.ones(CLASSES, WIDTH).double())]
    curvature = STRUCTURES[structure].zeros(CLASSES, WIDTH, False).plus(batch)
    with pytest.raises(UserError, match="prior_precision"):
        curvature.factor(0.0)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_its_tensors_make_it_again(structure):
    curvature = measured(structure, bias=True)
    again = curvature_from(curvature.tensors(), structure, True)
    assert torch.equal(dense(again), dense(curvature))
    probs, features, _ = toy(seed=1)
    more = [(probs, features)]
    assert torch.equal(dense(again.plus(more)), dense(curvature.plus(more)))
