"""r_hat against loops over draws and rows, hand-made cases, and its own laws."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from mixval.filter_policies import negative, positive
from mixval.losses import cross_entropy
from mixval.mixing import mix, mixed_targets
from mixval.posteriors import ensemble, out_of_fold, point
from mixval.rhat import Scorer, draw_losses, score
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


@pytest.mark.parametrize(("draws", "base_draws"), [(1, 1), (1, 4), (4, 1)])
def test_a_single_draw_has_no_error(draws, base_draws):
    # Catches 0 for "unknown".
    generator = np.random.default_rng(0)
    updated, base = (torch.from_numpy(generator.random((n, 3))) for n in (draws, base_draws))
    assert score(updated, base).std_error.isnan().all()


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
