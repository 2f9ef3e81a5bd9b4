"""Closed forms of r against brute force, quadrature, evidence ratios and many draws."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats
from torch.nn import functional as F

from mixval.closed_form import LinearRegression, Logits, log_mean_exp, sequential_log_mean_exp
from mixval.last_layer import LastLayer, draw, fit, updated

quick = settings(deadline=None, derandomize=True, max_examples=20)
CLASSES, WIDTH = 3, 4


def toy_regression(seed: int, rows: int = 40, width: int = 3):
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(rows, width))
    return inputs, inputs @ rng.normal(size=width) + rng.normal(size=rows)


def toy_posterior(seed: int, structure: str = "full", *, bias: bool = True) -> LastLayer:
    rng = np.random.default_rng(seed)
    features = torch.from_numpy(rng.standard_normal((30, WIDTH)))
    mean = torch.from_numpy(rng.standard_normal((CLASSES, WIDTH + bias)))
    return fit([features], mean, structure, 2.0)


def toy_rows(seed: int, rows: int):
    """Return features and soft targets; every second row has a hard label."""
    rng = np.random.default_rng([seed, rows])
    features = torch.from_numpy(rng.standard_normal((rows, WIDTH)))
    targets = torch.from_numpy(rng.dirichlet(np.ones(CLASSES), rows))
    targets[::2] = torch.eye(CLASSES, dtype=torch.float64)[
        rng.integers(0, CLASSES, len(targets[::2]))
    ]
    return features, targets


def losses_of(posterior: LastLayer, features, targets, noise):
    """Return H of the set for each draw of the weights, through the plain formula."""
    rows = F.pad(features, (0, int(posterior.bias)), value=1.0)
    log_probs = (rows @ draw(posterior, noise).mT).log_softmax(-1)
    return -(targets * log_probs).sum((1, 2))


# -- linear regression ----------------------------------------------------------------------


def log_evidence(inputs, outputs, given):
    """Return log p(outputs | inputs, given data) from the joint predictive Gaussian."""
    precision = np.eye(inputs.shape[1]) + given[0].T @ given[0]
    mean = np.linalg.solve(precision, given[0].T @ given[1])
    covariance = np.eye(len(inputs)) + inputs @ np.linalg.solve(precision, inputs.T)
    return stats.multivariate_normal(inputs @ mean, covariance).logpdf(outputs)


@quick
@given(seed=st.integers(0, 1000), size=st.sampled_from([1, 4, 30]))
def test_r_is_what_removing_part_of_the_data_does_to_the_evidence_of_the_failures(seed, size):
    inputs, outputs = toy_regression(seed)
    data, failures = slice(0, 34), slice(34, 40)
    fail, known = (inputs[failures], outputs[failures]), (inputs[data], outputs[data])
    rest = inputs[size:34], outputs[size:34]
    expected = log_evidence(*fail, rest) - log_evidence(*fail, known)
    causes = inputs[:size], outputs[:size]
    both = LinearRegression.given(inputs, outputs), LinearRegression.given(*known)
    got = both[0].log_mean_exp(*causes) - both[1].log_mean_exp(*causes)
    assert got == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize("bent", [0.2, 0.9])
def test_the_mean_of_exp_h_is_its_integral(bent):
    # One weight: by quadrature.
    posterior = LinearRegression(np.array([0.3]), np.array([[2.0]]))
    inputs, outputs = np.array([[math.sqrt(2 * bent)]]), np.array([1.1])

    def integrand(theta: float) -> float:
        h = (outputs[0] - inputs[0, 0] * theta) ** 2 / 2 + math.log(2 * math.pi) / 2
        return math.exp(h + stats.norm(0.3, 0.5**0.5).logpdf(theta))

    expected = math.log(integrate.quad(integrand, -60, 60, limit=500, points=[0.0])[0])
    assert posterior.log_mean_exp(inputs, outputs) == pytest.approx(expected, abs=1e-6)
    assert posterior.bend(inputs) == pytest.approx(bent)


def test_from_a_bend_of_one_on_it_is_infinite():
    posterior = LinearRegression(np.zeros(2), np.diag([4.0, 9.0]))
    for length, finite in ((1.99, True), (2.01, False)):
        got = posterior.log_mean_exp(np.array([[length, 0.0]]), np.ones(1))
        assert math.isfinite(got) == finite
    assert math.isfinite(posterior.log_mean_exp(np.array([[0.0, 2.01]]), np.ones(1)))


def test_the_draws_have_the_mean_and_variance_of_a_quadratic_form():
    # E[H] = H(m) + tr(A S) / 2 and Var[H] = g^T S g + tr((A S)^2) / 2 with S = P^-1.
    inputs, outputs = toy_regression(0)
    posterior = LinearRegression.given(inputs, outputs)
    x, y = inputs[:5], outputs[:5] + 1
    noise = np.random.default_rng(0).normal(size=(200_000, 3))
    losses = posterior.losses(x, y, noise)
    covariance, curved = np.linalg.inv(posterior.precision), x.T @ x
    errors = y - x @ posterior.mean
    at_mean = -stats.norm(0, 1).logpdf(errors).sum()
    slope, product = x.T @ errors, curved @ covariance
    assert losses.mean() == pytest.approx(at_mean + np.trace(product) / 2, rel=3e-3)
    variance = slope @ covariance @ slope + np.trace(product @ product) / 2
    assert losses.var() == pytest.approx(variance, rel=0.02)


# -- logits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_the_logits_have_the_moments_of_drawn_weights(structure, bias):
    posterior = toy_posterior(1, structure, bias=bias)
    features, _ = toy_rows(2, 2)
    logits = Logits.of(posterior, features)
    noise = np.random.default_rng(0).standard_normal((200_000, posterior.mean.numel()))
    rows = F.pad(features, (0, int(bias)), value=1.0)
    drawn = (rows @ draw(posterior, torch.from_numpy(noise)).mT).flatten(1)  # (S, n K)
    torch.testing.assert_close(drawn.mean(0), logits.mean.flatten(), atol=0.01, rtol=0)
    covariance = logits.covariance.reshape(drawn.shape[1], -1)
    torch.testing.assert_close(drawn.T.cov(), covariance, atol=0.01, rtol=0)


def test_the_bend_is_that_of_the_hessian_beside_the_precision():
    posterior = toy_posterior(3)
    features, targets = toy_rows(4, 5)
    rows = F.pad(features, (0, 1), value=1.0)

    def loss(flat: torch.Tensor) -> torch.Tensor:
        return -(targets * (rows @ flat.view_as(posterior.mean).T).log_softmax(-1)).sum()

    hessian = torch.autograd.functional.hessian(loss, posterior.mean.flatten())
    solved = posterior.factor.solve(hessian.view(-1, *posterior.mean.shape)).flatten(1)
    expected = float(torch.linalg.eigvals(solved).real.max())
    assert Logits.of(posterior, features).bend() == pytest.approx(expected)


# -- E[exp H] of softmax ----------------------------------------------------------------------


@quick
@given(seed=st.integers(0, 1000), rows=st.integers(1, 4))
def test_it_is_the_sum_over_all_choices_of_classes(seed, rows):
    # Each choice (k_1, ..., k_n) is one Gaussian's generating function, at a = (e_k - t) of
    # all rows: a^T mean + a^T Cov a / 2.
    features, targets = toy_rows(seed, rows)
    logits = Logits.of(toy_posterior(seed), features)
    mean, covariance = logits.mean.flatten(), logits.covariance.reshape(rows * CLASSES, -1)
    terms = []
    for choice in itertools.product(range(CLASSES), repeat=rows):
        way = (F.one_hot(torch.tensor(choice), CLASSES) - targets).flatten()
        terms.append(float(way @ mean + way @ covariance @ way / 2))
    assert log_mean_exp(logits, targets) == pytest.approx(np.logaddexp.reduce(terms), abs=1e-10)


@pytest.mark.parametrize("target", [0.0, 0.3])
def test_two_classes_are_an_integral_on_a_line(target):
    # H depends on the difference of the logits alone; the target may be soft.
    mean = torch.tensor([[0.7, -0.4]], dtype=torch.float64)
    covariance = torch.tensor([[1.0, 0.3], [0.3, 0.8]], dtype=torch.float64).view(1, 2, 1, 2)
    centre, width = 1.1, math.sqrt(1.0 + 0.8 - 2 * 0.3)

    def integrand(s: float) -> float:  # s = z_0 - z_1
        h = np.logaddexp(0, s) - target * s
        return math.exp(h) * stats.norm(centre, width).pdf(s)

    expected = math.log(integrate.quad(integrand, -15, 17)[0])
    targets = torch.tensor([[target, 1 - target]], dtype=torch.float64)
    assert log_mean_exp(Logits(mean, covariance), targets) == pytest.approx(expected, abs=1e-8)


def test_many_draws_agree_for_a_small_set_and_r_has_both_posteriors():
    base = toy_posterior(5)
    features, targets = toy_rows(6, 3)
    after = updated(base, toy_rows(7, 6)[0], torch.arange(6) % CLASSES)
    noise = torch.from_numpy(np.random.default_rng(0).standard_normal((200_000, 15)))
    for posterior in (after, base):
        weights = losses_of(posterior, features, targets, noise).exp()
        exact = math.exp(log_mean_exp(Logits.of(posterior, features), targets))
        error = float(weights.std()) / 200_000**0.5
        assert abs(float(weights.mean()) - exact) < 4 * error
        assert error < 0.02 * exact


def test_it_is_finite_where_the_curvature_exceeds_the_precision():
    # A squared error of that curvature would have no mean of exp H.
    logits = Logits(torch.zeros(1, 2).double(), 100 * torch.eye(2).double().view(1, 2, 1, 2))
    assert logits.bend() > 1
    got = log_mean_exp(logits, torch.tensor([[1.0, 0.0]], dtype=torch.float64))
    assert got == pytest.approx(np.logaddexp(0.0, 100.0))  # 1 + E[exp(z_1 - z_0)], variance 200


def test_too_many_gaussians_are_refused():
    features, targets = toy_rows(0, 13)
    with pytest.raises(ValueError, match="13 rows of 3 classes are more than 1,000,000"):
        log_mean_exp(Logits.of(toy_posterior(0), features), targets)


@pytest.mark.parametrize("particles", [20, 2000])
def test_particles_are_unbiased_for_every_number_of_rows(particles):
    # Of E[exp H], not of its logarithm: the mean over many runs, few particles included.
    # Features of that length make weights so unequal that particles are drawn anew.
    features, targets = toy_rows(8, 6)
    logits = Logits.of(toy_posterior(9), 2 * features)
    exact = np.array([log_mean_exp(logits.first(n), targets[:n]) for n in range(1, 7)])
    rng = np.random.default_rng(0)
    runs = 40_000 // particles
    found = np.stack(
        [sequential_log_mean_exp(logits, targets, rng, particles=particles) for _ in range(runs)]
    )
    ratios = np.exp(found - exact)
    assert np.abs(ratios[:, 0] - 1).max() < 1e-10  # one row needs no choice
    errors = ratios.std(0, ddof=1) / runs**0.5
    assert (np.abs(ratios.mean(0) - 1)[1:] < 4 * errors[1:]).all()
    assert (errors < 0.1).all() and errors[-1] > 0
