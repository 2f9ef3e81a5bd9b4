"""r_hat against loops over draws and rows, hand-made cases, and its own laws."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import nn
from torch.nn import functional as F

from mixval.filter_policies import confident, negative, positive
from mixval.losses import cross_entropy
from mixval.mixing import mix, mixed_targets
from mixval.posteriors import ensemble, out_of_fold, point
from mixval.rhat import Scorer, draw_losses, exact_r, probability_negative, score
from mixval.types import MixScores

quick = settings(deadline=None, derandomize=True, max_examples=50)
CLASSES = 4


def toy_draws(draws: int, rows: int, seed: int = 0) -> torch.Tensor:
    logits = np.random.default_rng([seed, draws]).standard_normal((draws, rows, CLASSES))
    return torch.from_numpy(2 * logits).log_softmax(-1)


def toy_rows(rows: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    label_i, label_j = torch.from_numpy(rng.integers(0, CLASSES, (2, rows)))
    return label_i, label_j, torch.from_numpy(rng.random(rows))


def toy_network(seed: int, *, normalised: bool = False) -> nn.Module:
    torch.manual_seed(seed)
    middle = [nn.BatchNorm1d(6)] if normalised else []
    layers = [nn.Flatten(), nn.Linear(9, 6), *middle, nn.Tanh(), nn.Linear(6, CLASSES)]
    return nn.Sequential(*layers).double()


def toy_inputs(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng([seed, 7]).standard_normal((rows, 1, 3, 3)))


def r_hat_of(updated, base, targets):
    losses = (draw_losses(draws, targets, cross_entropy) for draws in (updated, base))
    return score(*losses)


def loop_over_draws(log_probs, label_i, label_j, lam) -> np.ndarray:
    """Return the mean of H over draws with the formula of the module, number by number."""
    means = []
    for row in range(len(lam)):
        part = float(lam[row])
        values = [
            -part * float(draw[row, label_i[row]]) - (1 - part) * float(draw[row, label_j[row]])
            for draw in log_probs
        ]
        means.append(sum(values) / len(values))
    return np.array(means)


@quick
@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 8), st.integers(0, 99))
def test_r_hat_is_the_loop_over_draws_and_rows(draws, base_draws, rows, seed):
    # Catches draws and rows exchanged in a reshape, and base minus updated.
    updated, base = toy_draws(draws, rows, seed), toy_draws(base_draws, rows, seed + 100)
    label_i, label_j, lam = toy_rows(rows, seed)
    got = r_hat_of(updated, base, mixed_targets(label_i, label_j, lam, CLASSES))
    after = loop_over_draws(updated, label_i, label_j, lam)
    before = loop_over_draws(base, label_i, label_j, lam)
    np.testing.assert_allclose(got.updated.numpy(), after, rtol=1e-10)
    np.testing.assert_allclose(got.base.numpy(), before, rtol=1e-10)
    np.testing.assert_allclose(got.r_hat.numpy(), after - before, rtol=1e-8, atol=1e-12)


def test_at_lambda_one_it_is_r_hat_of_the_sample():
    # The mix with nothing is the sample: the difference of two plain cross-entropies.
    rows = 9
    label_i, label_j, _ = toy_rows(rows)
    inputs, partners = toy_inputs(rows), toy_inputs(rows, 1)
    ones = torch.ones(rows).double()
    teacher, student = toy_network(1), toy_network(2)
    mixed, targets = mix(inputs, partners, ones), mixed_targets(label_i, label_j, ones, CLASSES)
    got = Scorer(point([teacher]), cross_entropy)(mixed, targets, point([student])(mixed))
    after, before = (
        F.cross_entropy(net(inputs), label_i, reduction="none") for net in (teacher, student)
    )
    torch.testing.assert_close(got.r_hat, after - before)


def test_r_hat_of_a_set_is_the_sum_of_its_members():
    # The log-likelihood of a set adds, so r_hat of any division of it adds, too.
    rows = 12
    updated, base = toy_draws(3, rows), toy_draws(3, rows, 5)
    targets = mixed_targets(*toy_rows(rows), CLASSES)
    whole = r_hat_of(updated, base, targets).r_hat.sum()
    # As one sample: H of the set in each draw first, then the mean over draws.
    of_set = [
        (-(targets * draws).sum((1, 2))).mean() for draws in (updated, base)
    ]  # (S, B, K) -> (S,) -> scalar
    torch.testing.assert_close(whole, of_set[0] - of_set[1])
    for cut in (1, 5):
        parts = [
            r_hat_of(updated[:, rows_], base[:, rows_], targets[rows_]).r_hat.sum()
            for rows_ in (slice(0, cut), slice(cut, None))
        ]
        torch.testing.assert_close(sum(parts), whole)


def test_equal_posteriors_give_exactly_zero():
    # Catches a different treatment of the two terms (weights, smoothing, reduction).
    draws, targets = toy_draws(3, 8), mixed_targets(*toy_rows(8), CLASSES)
    got = r_hat_of(draws, draws, targets)
    assert (got.r_hat == 0).all()
    assert (got.std_error == 0).all()


@quick
@given(st.integers(0, 999))
def test_swapping_the_parents_changes_nothing(seed):
    # (i, lam) with (j, 1 - lam) is the same mix. Single precision, as in training.
    rows = 6
    label_i, label_j, lam = toy_rows(rows, seed)
    lam = lam.float()
    first, second = toy_inputs(rows, seed).float(), toy_inputs(rows, seed + 1).float()
    teacher, student = toy_network(1).float(), toy_network(2).float()
    scorer, base = Scorer(point([teacher]), cross_entropy), point([student])
    r_hats = []
    for x_i, x_j, y_i, y_j, part in (
        (first, second, label_i, label_j, lam),
        (second, first, label_j, label_i, 1 - lam),
    ):
        mixed, targets = mix(x_i, x_j, part), mixed_targets(y_i, y_j, part, CLASSES)
        r_hats.append(scorer(mixed, targets, base(mixed)).r_hat)
    assert (r_hats[0] - r_hats[1]).abs().max() < 1e-6


def test_the_expectation_is_of_h_and_not_h_of_the_mean():
    """S = 2, one row, two classes: p(y) is 0.9 in one draw and 0.1 in the other.

    E[H] = -(log 0.9 + log 0.1) / 2 = 1.204; H of the mean prediction is log 2 = 0.693.
    """
    probabilities = torch.tensor([[[0.9, 0.1]], [[0.1, 0.9]]], dtype=torch.float64)
    targets = torch.tensor([[1.0, 0.0]]).double()
    certain = torch.full((2, 1, 2), 0.5).double().log()
    got = r_hat_of(probabilities.log(), certain, targets)
    mean_of_h = -(math.log(0.9) + math.log(0.1)) / 2
    h_of_mean = math.log(2)
    assert float(got.updated) == pytest.approx(mean_of_h)
    assert float(got.r_hat) == pytest.approx(mean_of_h - math.log(2))
    assert abs(mean_of_h - h_of_mean) > 0.5
    # H of the mean would give r_hat = 0 and keep the mix; the mean of H excludes it.
    assert float(got.r_hat) > 0.5


def test_a_worse_updated_model_gives_positive_r_hat_and_is_dropped():
    """The sign, by hand: p(y) falls from 0.8 to 0.3 for row 0, and rises for row 1."""
    after = torch.tensor([[[0.3, 0.7], [0.8, 0.2]]]).log()
    before = torch.tensor([[[0.8, 0.2], [0.3, 0.7]]]).log()
    targets = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    got = r_hat_of(after, before, targets)
    assert float(got.r_hat[0]) == pytest.approx(math.log(0.8 / 0.3), rel=1e-5)
    assert float(got.r_hat[1]) == pytest.approx(math.log(0.3 / 0.8), rel=1e-5)
    scores = MixScores(got.r_hat, got.updated, got.base, torch.ones(2), np.random.default_rng(0))
    assert negative(scores).tolist() == [0, 1]
    assert positive(scores).tolist() == [1, 0]


@pytest.mark.parametrize("draws", [2, 3, 10])
def test_the_standard_error_is_that_of_paired_differences(draws):
    # Catches ddof = 0, a missing square root of S, and unpaired variances.
    updated, base = torch.from_numpy(np.random.default_rng(draws).random((2, draws, 5)))
    got = score(updated, base).std_error.numpy()
    differences = (updated - base).numpy()
    for row in range(5):
        expected = np.std(differences[:, row], ddof=1) / np.sqrt(draws)
        assert got[row] == pytest.approx(expected)


def test_common_noise_leaves_the_paired_error():
    # Both posteriors share their draws; what moves both alike is no error of the difference.
    noise = torch.from_numpy(np.random.default_rng(0).random((6, 3)))
    error = score(noise + 0.25, noise).std_error
    assert error.abs().max() < 1e-12


def test_unequal_numbers_of_draws_add_their_variances():
    updated, base = (
        torch.from_numpy(np.random.default_rng(draws).random((draws, 4))) for draws in (7, 3)
    )
    expected = np.sqrt(updated.numpy().var(0, ddof=1) / 7 + base.numpy().var(0, ddof=1) / 3)
    np.testing.assert_allclose(score(updated, base).std_error.numpy(), expected)


def test_two_single_draws_have_no_error():
    # Catches 0 for "unknown".
    updated, base = torch.from_numpy(np.random.default_rng(0).random((2, 1, 3)))
    got = score(updated, base)
    assert got.std_error.isnan().all() and got.draws == 1


@pytest.mark.parametrize("points", ["updated", "base"])
def test_a_point_against_draws_adds_no_error_of_its_own(points):
    rng = np.random.default_rng(0)
    many, one = torch.from_numpy(rng.random((4, 3))), torch.from_numpy(rng.random((1, 3)))
    got = score(one, many) if points == "updated" else score(many, one)
    np.testing.assert_allclose(got.std_error.numpy(), many.numpy().std(0, ddof=1) / 2)
    assert got.draws == 4


# -- the decision ---------------------------------------------------------------------------


@pytest.mark.parametrize("draws", [2, 5, 30])
def test_the_probability_is_that_of_a_one_sided_t_test(draws):
    differences = np.random.default_rng(draws).normal(0.1, 1.0, (draws, 40))
    got = score(torch.from_numpy(differences), torch.zeros(draws, 40, dtype=torch.float64))
    probable = probability_negative(got.r_hat.numpy(), got.std_error.numpy(), got.draws)
    test = stats.ttest_1samp(differences, 0.0, alternative="greater")  # small p: mean above 0
    np.testing.assert_allclose(probable, test.pvalue)


def test_the_probability_covers_the_sign_of_the_true_mean():
    # At a true mean of 0 the probability is uniform: each decile is hit as often.
    differences = np.random.default_rng(1).normal(0.0, 2.0, (6, 20_000))
    got = score(torch.from_numpy(differences), torch.zeros(6, 20_000, dtype=torch.float64))
    probable = probability_negative(got.r_hat.numpy(), got.std_error.numpy(), got.draws)
    assert stats.kstest(probable, "uniform").pvalue > 0.01


def test_one_draw_has_no_probability_and_equal_draws_have_certainty():
    r_hat = np.array([-0.5, 0.0, 0.5])
    assert np.isnan(probability_negative(r_hat, np.full(3, np.nan), 1)).all()
    assert probability_negative(r_hat, np.zeros(3), 4).tolist() == [1, 1, 0]


def test_confident_keeps_what_is_probable_enough_and_refuses_a_point():
    draws = torch.from_numpy(np.random.default_rng(3).normal(0.0, 1.0, (8, 300)))
    got = score(draws, torch.zeros_like(draws))
    lam, rng = torch.ones(300), np.random.default_rng(0)
    scores = MixScores(
        got.r_hat, got.updated, got.base, lam, rng, std_error=got.std_error, draws=got.draws
    )
    probable = probability_negative(got.r_hat.numpy(), got.std_error.numpy(), got.draws)
    for level in (0.5, 0.8, 0.99):
        kept = confident(scores, level=level).bool().numpy()
        np.testing.assert_array_equal(kept, probable >= level)
    assert torch.equal(confident(scores, level=0.5), negative(scores))
    with pytest.raises(ValueError, match="at least 2 draws"):
        confident(replace(scores, draws=1))


# -- r of sets ------------------------------------------------------------------------------


def test_r_of_one_draw_is_r_hat():
    updated, base = torch.from_numpy(np.random.default_rng(0).random((2, 1, 5)))
    torch.testing.assert_close(exact_r(updated, base), score(updated, base).r_hat)


def test_r_is_the_logarithm_of_the_ratio_of_mean_inverse_likelihoods():
    updated, base = np.random.default_rng(0).random((2, 9, 4)) * 30
    expected = [
        math.log(np.mean([math.exp(h) for h in updated[:, k]]))
        - math.log(np.mean([math.exp(h) for h in base[:, k]]))
        for k in range(4)
    ]
    got = exact_r(torch.from_numpy(updated), torch.from_numpy(base))
    np.testing.assert_allclose(got.numpy(), expected)
    far = exact_r(torch.from_numpy(updated) + 5000, torch.from_numpy(base) + 5000)  # no overflow
    np.testing.assert_allclose(far.numpy(), expected)


def linear_regression(seed: int):
    """Return Bayesian linear regression: data D, its causes C (part of D), failures F."""
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(40, 3))
    outputs = inputs @ np.array([1.0, -2.0, 0.5]) + rng.normal(size=40)
    return inputs, outputs, slice(0, 6), slice(34, 40)


def gaussian_posterior(inputs, outputs):
    """Return mean and precision under a standard normal prior and unit noise."""
    precision = np.eye(3) + inputs.T @ inputs
    return np.linalg.solve(precision, inputs.T @ outputs), precision


def log_evidence(inputs, outputs, given):
    """Return log p(outputs | inputs, given data) from the joint predictive Gaussian."""
    mean, precision = gaussian_posterior(*given)
    covariance = np.eye(len(inputs)) + inputs @ np.linalg.solve(precision, inputs.T)
    return stats.multivariate_normal(inputs @ mean, covariance).logpdf(outputs)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_r_is_what_removing_the_set_does_to_the_failures_of_a_linear_regression(seed):
    # log p(F | D without C) - log p(F | D) in closed form, never by the identity under test.
    inputs, outputs, causes, failures = linear_regression(seed)
    known = slice(0, 34)
    fail = inputs[failures], outputs[failures]
    without = (inputs[6:34], outputs[6:34])
    expected = log_evidence(*fail, without) - log_evidence(*fail, (inputs[known], outputs[known]))
    posteriors = [(inputs, outputs), (inputs[known], outputs[known])]
    noise = np.random.default_rng(seed).normal(size=(400_000, 3))
    sums = []
    for data in posteriors:  # p(theta | D, F), then p(theta | D)
        mean, precision = gaussian_posterior(*data)
        theta = mean + np.linalg.solve(np.linalg.cholesky(precision).T, noise.T).T
        errors = outputs[causes] - theta @ inputs[causes].T
        sums.append((errors**2 / 2 + math.log(2 * math.pi) / 2).sum(1))
    got = float(exact_r(*(torch.from_numpy(total) for total in sums)))
    assert got == pytest.approx(expected, abs=0.02)
    first_order = float(sums[0].mean() - sums[1].mean())
    assert abs(first_order - expected) > abs(got - expected)


def test_r_and_r_hat_agree_to_first_order_in_a_logistic_regression():
    # One weight, so that both posteriors are integrals on a line; C is weighed by a small eps.
    theta = np.linspace(-12, 12, 20_001)
    x, y = np.array([0.5, 1.5, -1.0, 2.0]), np.array([1, 1, -1, -1])
    log_p = -np.log1p(np.exp(-y * x * theta[:, None]))
    prior = -(theta**2) / 2
    data, failure, cause = prior + log_p[:, :3].sum(1), log_p[:, 3], log_p[:, 0]

    def evidence(log_density):
        return math.log(np.trapezoid(np.exp(log_density), theta))

    def r(eps):  # log p(F | D without eps C) - log p(F | D)
        rest = data - eps * cause
        return evidence(rest + failure) - evidence(rest) - evidence(data + failure) + evidence(data)

    draws = []
    for density in (data + failure, data):
        weights = np.exp(density - density.max())
        quantiles = (np.arange(4000) + 0.5) / 4000
        draws.append(np.interp(quantiles, np.cumsum(weights) / weights.sum(), theta))
    losses = [torch.from_numpy(np.log1p(np.exp(-0.5 * sample)))[:, None] for sample in draws]
    assert float(exact_r(*losses)) == pytest.approx(r(1.0), abs=2e-3)
    assert float(score(*losses).r_hat) == pytest.approx(r(1e-4) / 1e-4, abs=2e-3)


def test_r_of_what_is_not_a_number_is_refused():
    with pytest.raises(FloatingPointError, match="not finite"):
        exact_r(torch.tensor([[torch.nan]]), torch.ones(1, 1))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("which", ["updated", "base", "both"])
def test_logits_that_are_not_finite_are_refused(bad, which):
    # NaN <= 0 is False: the filter would quietly exclude the rows and training would go on.
    good = toy_draws(2, 3)
    broken = good.clone()
    broken[1, 2] = bad
    updated, base = (broken if which in (side, "both") else good for side in ("updated", "base"))
    targets = mixed_targets(*toy_rows(3), CLASSES)
    with pytest.raises(FloatingPointError, match="r_hat"):
        r_hat_of(updated, base, targets)


@pytest.mark.parametrize("members", [1, 3])
def test_the_scorer_is_the_loop_over_rows_and_networks(members):
    # Catches a network left in training mode, and rows that influence each other.
    rows = 7
    networks = [toy_network(seed, normalised=True) for seed in range(members)]
    student = toy_network(9)
    label_i, label_j, lam = toy_rows(rows)
    inputs = toy_inputs(rows)
    for network in networks:  # statistics of their own, so that the modes differ
        network.train()(toy_inputs(30, 3))
        network.train()
    targets = mixed_targets(label_i, label_j, lam, CLASSES)
    make = point if members == 1 else ensemble
    got = Scorer(make(networks), cross_entropy)(
        inputs, targets, F.log_softmax(student(inputs).detach(), -1)[None]
    )
    for row in range(rows):
        terms = []
        for group in (networks, [student]):
            values = []
            for network in group:
                with torch.no_grad():
                    outputs = network.eval()(inputs[row : row + 1])[0]
                log_probs = outputs - outputs.exp().sum().log()
                part = float(lam[row])
                values.append(
                    -part * float(log_probs[label_i[row]])
                    - (1 - part) * float(log_probs[label_j[row]])
                )
            terms.append(np.mean(values))
        assert float(got.r_hat[row]) == pytest.approx(terms[0] - terms[1], abs=1e-9)


def test_soft_labels_are_the_mean_prediction():
    # The mean of probabilities, which are a distribution; the mean of logarithms is not.
    networks = [toy_network(seed) for seed in range(3)]
    inputs = toy_inputs(5)
    base = toy_draws(1, 5)
    got = Scorer(ensemble(networks), cross_entropy)(
        inputs, mixed_targets(*toy_rows(5), CLASSES), base
    )
    expected = torch.stack([network(inputs).softmax(-1) for network in networks]).mean(0)
    torch.testing.assert_close(got.soft_labels, expected)
    torch.testing.assert_close(got.soft_labels.sum(-1), torch.ones(5).double())


# -- posteriors -----------------------------------------------------------------------------


def test_a_point_is_one_draw_of_one_network():
    network, inputs = toy_network(0), toy_inputs(4)
    expected = network(inputs).detach().log_softmax(-1)
    torch.testing.assert_close(point([network])(inputs), expected[None])


@pytest.mark.parametrize("count", [0, 2])
def test_a_point_refuses_another_number_of_networks(count):
    with pytest.raises(ValueError, match="1 network"):
        point([toy_network(seed) for seed in range(count)])


def test_an_ensemble_is_one_draw_of_each_network():
    # Catches networks averaged before they are returned.
    networks, inputs = [toy_network(seed) for seed in range(3)], toy_inputs(4)
    draws = ensemble(networks)(inputs)
    assert draws.shape == (3, 4, CLASSES)
    for draw, network in zip(draws, networks, strict=True):
        torch.testing.assert_close(draw, network(inputs).log_softmax(-1))


@pytest.mark.parametrize(
    "fold", [[0, 1, 2, 1, 0, 2], [2, 2, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1], [0, 0, 2, 2, 0, 2]]
)
def test_out_of_fold_scores_each_row_with_the_network_of_its_fold(fold):
    # Catches rows returned in the order of the folds, and another fold's network. Folds that
    # no row of the batch lies in must do no harm.
    networks, inputs = [toy_network(seed) for seed in range(3)], toy_inputs(6)
    got = out_of_fold(networks)(inputs, torch.tensor(fold))
    assert got.shape == (1, 6, CLASSES)
    for row, which in enumerate(fold):
        expected = networks[which](inputs[row : row + 1]).log_softmax(-1)[0]
        torch.testing.assert_close(got[0, row], expected)


def test_out_of_fold_refuses_a_fold_that_has_no_network():
    # Its row would hold whatever lay in memory, and be filtered by it.
    posterior = out_of_fold([toy_network(seed) for seed in range(2)])
    with pytest.raises((AssertionError, IndexError, ValueError)):
        posterior(toy_inputs(3), torch.tensor([0, 1, 2]))


def test_out_of_fold_needs_folds():
    with pytest.raises(AssertionError, match="fold"):
        out_of_fold([toy_network(0), toy_network(1)])(toy_inputs(2))


@pytest.mark.parametrize("make", [point, ensemble, out_of_fold])
def test_posteriors_are_frozen_and_leave_the_network_to_its_owner(make):
    # Catches a gradient that flows into the teacher, BatchNorm that goes on moving, and a
    # user's network that can't be trained any more after it was scored with.
    network = toy_network(0, normalised=True).train()
    posterior = make([network])
    before = {name: value.clone() for name, value in network.state_dict().items()}
    inputs, fold = toy_inputs(4).requires_grad_(), torch.zeros(4, dtype=torch.long)
    draws = posterior(inputs, fold)
    assert not draws.requires_grad
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert network.training
    assert all(parameter.requires_grad for parameter in network.parameters())
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(1.0)
    assert torch.equal(posterior(inputs, fold), draws)
