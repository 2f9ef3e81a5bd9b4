"""Filters against loops and counts."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mixval import filter_policies
from mixval.filter_policies import (
    high_fraction,
    low_fraction,
    negative,
    positive,
    soft,
    top_k,
    yoked,
)
from mixval.types import MixScores

quick = settings(deadline=None, derandomize=True, max_examples=80)
sizes, seeds = st.integers(1, 60), st.integers(0, 10_000)


def toy_scores(count: int, seed: int = 0, *, replayed=None, draw: int = 0) -> MixScores:
    rng = np.random.default_rng(seed)
    updated, base = torch.from_numpy(rng.exponential(size=(2, count)))
    return MixScores(
        r_hat=updated - base,
        updated=updated,
        base=base,
        lam=torch.from_numpy(rng.beta(0.5, 0.5, count)),
        rng=np.random.default_rng([seed, draw]),
        replayed=replayed,
    )


def kept_rows(weights: torch.Tensor) -> set[int]:
    assert set(weights.tolist()) <= {0.0, 1.0}
    return set(weights.nonzero().flatten().tolist())


def deciles_by_hand(lam: torch.Tensor) -> list[list[int]]:
    """Return rows in order of lambda, dealt into ten runs of which the first may be one longer."""
    order = sorted(range(len(lam)), key=lambda row: float(lam[row]))
    groups = []
    for decile in range(10):
        size = len(lam) // 10 + (decile < len(lam) % 10)
        groups.append(order[:size])
        order = order[size:]
    assert not order
    return groups


@quick
@given(sizes, seeds)
def test_all_keeps_everything(count, seed):
    assert kept_rows(filter_policies.all(toy_scores(count, seed))) == set(range(count))


@quick
@given(sizes, seeds)
def test_negative_and_positive_are_complementary(count, seed):
    # Catches a mix that both or neither keep.
    scores = toy_scores(count, seed)
    assert torch.equal(negative(scores) + positive(scores), torch.ones(count).double())
    for row, r_hat in enumerate(scores.r_hat.tolist()):
        assert (row in kept_rows(negative(scores))) == (r_hat <= 0)


def test_negative_keeps_what_fits_the_failures_and_zero():
    # The sign, by hand: r_hat > 0 conflicts and goes; 0 says nothing against the mix and stays.
    scores = toy_scores(3)
    hand_made = MixScores(
        torch.tensor([-0.2, 0.0, 0.2]), scores.updated, scores.base, scores.lam, scores.rng
    )
    assert negative(hand_made).tolist() == [1, 1, 0]
    assert positive(hand_made).tolist() == [0, 0, 1]


@quick
@given(sizes, seeds, st.floats(0.01, 0.99))
def test_fractions_keep_exactly_that_many_from_their_end(count, seed, fraction):
    # Catches a quantile threshold (off by one, or by many with ties) and the wrong end.
    scores = toy_scores(count, seed)
    wanted = round(fraction * count)
    ranked = sorted(range(count), key=lambda row: float(scores.r_hat[row]))
    assert kept_rows(low_fraction(scores, fraction=fraction)) == set(ranked[:wanted])
    assert kept_rows(high_fraction(scores, fraction=fraction)) == set(ranked[count - wanted :])


@quick
@given(sizes, st.floats(0.01, 0.99))
def test_fractions_keep_exactly_that_many_among_equal_scores(count, fraction):
    scores = toy_scores(count)
    tied = MixScores(torch.zeros(count), scores.updated, scores.base, scores.lam, scores.rng)
    for policy in (low_fraction, high_fraction):
        assert policy(tied, fraction=fraction).sum() == round(fraction * count)


@quick
@given(sizes, seeds, st.integers(1, 80))
def test_top_k_keeps_the_k_lowest(count, seed, k):
    # RHO-LOSS takes the largest reducible loss, which is the lowest r_hat, not the largest.
    scores = toy_scores(count, seed)
    reducible = (scores.base - scores.updated).tolist()
    ranked = sorted(range(count), key=lambda row: -reducible[row])
    assert kept_rows(top_k(scores, k=k)) == set(ranked[:k])


@quick
@given(st.integers(2, 60), seeds, st.floats(0.01, 5))
def test_soft_falls_as_r_hat_grows(count, seed, tau):
    # Catches a lost minus sign.
    scores = toy_scores(count, seed)
    weights = soft(scores, tau=tau)[scores.r_hat.argsort()]
    assert (weights.diff() <= 0).all()
    assert ((weights >= 0) & (weights <= 1)).all()
    expected = [1 / (1 + np.exp(value / tau)) for value in scores.r_hat.tolist()]
    np.testing.assert_allclose(soft(scores, tau=tau).numpy(), expected, rtol=1e-10)


@pytest.mark.parametrize("tau", [1e-9, 0.1, 10.0])
def test_soft_is_one_half_at_zero(tau):
    scores = toy_scores(4)
    zero = MixScores(torch.zeros(4), scores.updated, scores.base, scores.lam, scores.rng)
    assert soft(zero, tau=tau).tolist() == [0.5] * 4


def test_soft_tends_to_negative_as_tau_goes_to_zero():
    scores = toy_scores(200, 3)
    gaps = [
        float((soft(scores, tau=tau) - negative(scores)).abs().mean()) for tau in (1, 0.1, 0.01)
    ]
    assert gaps[0] > gaps[1] > gaps[2]
    torch.testing.assert_close(soft(scores, tau=1e-12), negative(scores))


# -- the yoked control ----------------------------------------------------------------------


def replayed_of(count: int, seed: int) -> torch.Tensor:
    return torch.from_numpy((np.random.default_rng(seed).random(count) < 0.4).astype(np.float64))


@pytest.mark.parametrize("within", [False, True])
@quick
@given(sizes, seeds)
def test_yoked_keeps_as_many_as_the_arm_it_replays(within, count, seed):
    # Catches an independent coin per mix with the same mean: the count would only be near.
    replayed = replayed_of(count, seed)
    before = replayed.clone()
    scores = toy_scores(count, seed, replayed=replayed)
    weights = yoked(scores, of="guided", within_lam_deciles=within)
    assert len(kept_rows(weights)) == len(kept_rows(replayed))
    assert torch.equal(replayed, before), "the record was changed in place"


@pytest.mark.parametrize("within", [False, True])
@quick
@given(sizes, seeds)
def test_yoked_preserves_the_multiset_of_soft_weights(within, count, seed):
    replayed = torch.from_numpy(np.random.default_rng(seed).random(count))
    scores = toy_scores(count, seed, replayed=replayed)
    weights = yoked(scores, of="guided", within_lam_deciles=within)
    assert sorted(weights.tolist()) == sorted(replayed.tolist())


@pytest.mark.parametrize("within", [False, True])
def test_yoked_differs_by_generator_and_repeats_with_it(within):
    # Catches a replay that is not shuffled at all, and a fixed shuffle.
    replayed = replayed_of(100, 1)
    one, again, other = (
        yoked(toy_scores(100, 1, replayed=replayed, draw=draw), of="a", within_lam_deciles=within)
        for draw in (0, 0, 1)
    )
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert not torch.equal(one, replayed)


@quick
@given(sizes, seeds)
def test_yoked_within_deciles_keeps_the_count_in_every_decile(count, seed):
    # Catches deciles by row number, and equal-width bins of lambda instead of equal-count.
    replayed = replayed_of(count, seed)
    scores = toy_scores(count, seed, replayed=replayed)
    weights = yoked(scores, of="guided", within_lam_deciles=True)
    for rows in deciles_by_hand(scores.lam):
        assert sum(weights[row].item() for row in rows) == sum(replayed[row].item() for row in rows)


def test_only_the_deciles_expose_a_filter_that_selects_lambda():
    """What the second control is for: keep lambda < 0.3, and see which control follows."""
    count = 1000
    lam = toy_scores(count, 5).lam
    replayed = (lam < 0.3).double()
    scores = toy_scores(count, 5, replayed=replayed)
    assert torch.equal(scores.lam, lam)
    kept = replayed.sum()
    plain = yoked(scores, of="guided")
    within = yoked(scores, of="guided", within_lam_deciles=True)
    guided_mean = float((replayed * lam).sum() / kept)
    assert float((within * lam).sum() / kept) == pytest.approx(guided_mean, abs=0.02)
    assert float((plain * lam).sum() / kept) == pytest.approx(float(lam.mean()), abs=0.05)
    assert abs(guided_mean - float(lam.mean())) > 0.3


def test_yoked_chooses_every_row_equally_often():
    # Catches a shuffle that leaves some rows where they were.
    replayed = torch.tensor([1.0, 1.0] + [0.0] * 6)
    total = sum(
        yoked(toy_scores(8, 2, replayed=replayed, draw=draw), of="a") for draw in range(2000)
    )
    expected, error = 2000 * 2 / 8, np.sqrt(2000 * 0.25 * 0.75)
    assert (total - expected).abs().max() < 4.5 * error
