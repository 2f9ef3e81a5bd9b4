"""Intervals against scipy's t tests, and the sentences they allow."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from mixval.compare import Interval, mean_interval, paired_difference, verdict

quick = settings(deadline=None, derandomize=True, max_examples=60)


def sample(count: int, seed: int, spread: float = 0.01) -> list[float]:
    return list(0.9 + spread * np.random.default_rng(seed).standard_normal(count))


def by_seed(values) -> dict[int, float]:
    return dict(enumerate(values))


@quick
@given(st.integers(2, 30), st.integers(0, 999), st.sampled_from([0.8, 0.95, 0.99]))
def test_mean_interval_is_that_of_the_t_test(count, seed, confidence):
    # Catches a normal instead of a t quantile, a one-sided one, and ddof = 0.
    values = sample(count, seed)
    expected = stats.ttest_1samp(values, 0).confidence_interval(confidence)
    got = mean_interval(values, confidence)
    assert got.mean == pytest.approx(np.mean(values))
    assert (got.low, got.high) == pytest.approx((expected.low, expected.high))
    assert got.n == count


def test_intervals_are_of_95_percent_unless_told():
    expected = stats.ttest_1samp(sample(5, 1), 0).confidence_interval(0.95)
    assert mean_interval(sample(5, 1)).low == pytest.approx(expected.low)


def test_intervals_cover_the_truth_as_often_as_they_say():
    # The other way round: 95 % of the intervals of samples around 0.9 hold 0.9.
    intervals = [mean_interval(sample(4, seed)) for seed in range(2000)]
    covered = sum(interval.low <= 0.9 <= interval.high for interval in intervals)
    assert stats.binomtest(covered, 2000, 0.95).pvalue > 1e-3


@quick
@given(st.integers(2, 30), st.integers(0, 999))
def test_paired_difference_is_that_of_the_paired_t_test(count, seed):
    # Catches an unpaired interval and control - arm.
    common = np.array(sample(count, seed, 0.1))
    arm, control = common + sample(count, seed + 1), common + sample(count, seed + 2)
    expected = stats.ttest_rel(arm, control).confidence_interval()
    got = paired_difference(by_seed(arm), by_seed(control))
    assert (got.low, got.high) == pytest.approx((expected.low, expected.high))


def test_pairs_are_matched_by_seed_and_not_by_place():
    # Seeds in another order, and some that only one arm has.
    arm = {3: 0.5, 0: 0.2, 7: 9.0, 1: 0.3}
    control = {1: 0.1, 3: 0.2, 0: 0.1, 8: -5.0}
    got = paired_difference(arm, control)
    expected = stats.ttest_rel([0.2, 0.3, 0.5], [0.1, 0.1, 0.2]).confidence_interval()
    assert got.n == 3
    assert (got.low, got.high) == pytest.approx((expected.low, expected.high))


def test_arms_without_a_common_seed_have_no_difference():
    assert paired_difference({0: 1.0}, {1: 1.0}) is None


def test_one_seed_has_a_mean_and_no_interval():
    # Catches a half-width of 0, which would make every difference significant.
    got = mean_interval([0.9])
    assert got.mean == 0.9
    assert math.isnan(got.half_width)
    assert got.sign == 0


@pytest.mark.parametrize(
    ("mean", "half_width", "sign"),
    [
        (1, 0.5, 1),
        (-1, 0.5, -1),
        (1, 2, 0),
        (-1, 2, 0),
        (1, 1, 0),
        (-1, 1, 0),
        (0, 0, 0),
        (1, 0, 0),  # no spread at all is no estimate of it
    ],
)
def test_the_sign_is_shown_only_where_zero_is_left_out(mean, half_width, sign):
    assert Interval(mean, half_width, 5).sign == sign


@pytest.mark.parametrize("gain", [0.01, 0.02, -0.03])
def test_equal_differences_say_nothing_in_floating_point_either(gain):
    # 0.95 - 0.94 and 0.33 - 0.32 differ in the last bit: that is no spread over seeds.
    control = {0: 0.94, 1: 0.32, 2: 0.7}
    got = paired_difference({seed: value + gain for seed, value in control.items()}, control)
    assert got.mean == pytest.approx(gain)
    assert got.sign == 0


# -- the sentence ---------------------------------------------------------------------------

GAIN, LOSS, NOTHING = 0.02, -0.02, 0.0


def difference(accuracy: float, *, n: int = 5) -> dict[str, Interval]:
    half_width = 0.005 if n > 1 else math.nan
    return {
        "accuracy": Interval(accuracy, half_width, n),
        "nll": Interval(-accuracy, half_width, n),
        "ece": Interval(0.0, half_width, n),
    }


@pytest.mark.parametrize(
    ("accuracy", "said", "unsaid"),
    [
        (GAIN, "filtering helped", ("hurt", "no effect")),
        (LOSS, "filtering hurt", ("helped", "no effect")),
        (NOTHING, "no effect of filtering shown", ("helped", "hurt")),
    ],
)
def test_the_verdict_follows_the_yoked_control(accuracy, said, unsaid):
    sentence = verdict("guided", difference(accuracy), {}, {})
    assert sentence.startswith("guided: ")
    assert said in sentence
    assert not any(word in sentence for word in unsaid)
    assert "n = 5" in sentence
    assert sentence.endswith(".")


def test_the_verdict_shows_points_and_nll_with_their_intervals():
    # Catches shares shown as points, and NLL multiplied by 100.
    sentence = verdict("guided", difference(GAIN), {}, {})
    assert "accuracy +2.00 ± 0.50 points" in sentence
    assert "NLL -0.020 ± 0.005" in sentence


def test_an_accuracy_gain_is_not_read_from_the_nll():
    # NLL falls where accuracy rises: judged by the wrong metric, a gain would be called a loss.
    mixed = {**difference(NOTHING), "nll": Interval(-0.5, 0.01, 5)}
    assert "no effect of filtering shown" in verdict("guided", mixed, {}, {})


@pytest.mark.parametrize(("within", "explained"), [(GAIN, False), (NOTHING, True), (LOSS, True)])
def test_lambda_explains_a_gain_that_its_deciles_have_as_well(within, explained):
    sentence = verdict("guided", difference(GAIN), difference(within), {})
    assert ("λ alone may explain it" in sentence) == explained
    assert "within λ-deciles" in sentence


@pytest.mark.parametrize("accuracy", [NOTHING, LOSS])
def test_lambda_explains_nothing_where_there_is_no_gain(accuracy):
    sentence = verdict("guided", difference(accuracy), difference(NOTHING), {})
    assert "λ alone" not in sentence


def test_without_its_control_there_is_no_verdict():
    sentence = verdict("guided", {}, difference(GAIN), difference(GAIN))
    assert "no verdict" in sentence and "control was not run" in sentence
    assert "helped" not in sentence


def test_one_seed_gives_no_verdict():
    sentence = verdict("guided", difference(GAIN, n=1), {}, difference(GAIN, n=1))
    assert "no verdict from one seed" in sentence
    assert "helped" not in sentence and "nan" not in sentence


@pytest.mark.parametrize(
    ("accuracy", "said"),
    [
        (GAIN, "it beat using the labels its teacher saw directly"),
        (LOSS, "using the labels its teacher saw directly did better"),
        (NOTHING, "no difference shown to using the labels its teacher saw directly"),
    ],
)
def test_the_same_labels_used_directly_are_named(accuracy, said):
    # A filter that helped may still be worse than its teacher's labels: both are said.
    sentence = verdict("guided", difference(GAIN), {}, difference(accuracy), "all on D and F")
    assert "filtering helped" in sentence
    assert said in sentence
    assert "all on D and F" in sentence


def test_the_nll_against_the_same_labels_is_said_where_it_differs():
    mixed = {**difference(NOTHING), "nll": Interval(0.03, 0.01, 5)}
    sentence = verdict("guided", difference(GAIN), {}, mixed)
    assert "no difference shown" in sentence and "in accuracy, its NLL is worse" in sentence


def test_no_difference_to_the_same_labels_is_not_called_equality():
    # An interval around zero shows no difference; that both are equal it does not show.
    wide = {
        "accuracy": Interval(-0.05, 0.06, 3),
        "nll": Interval(0.0, 0.1, 3),
        "ece": Interval(0.0, 0.1, 3),
    }
    sentence = verdict("guided", difference(GAIN), {}, wide)
    assert "labels its teacher saw" in sentence
    assert "did as well" not in sentence


@pytest.mark.parametrize("which", ["lam_control", "same_labels"])
def test_a_comparison_from_one_seed_is_not_shown_as_a_finding(which):
    # The controls may have fewer seeds than the arm: "± nan" and what follows is no result.
    others = {"lam_control": {}, "same_labels": {}, which: difference(LOSS, n=1)}
    sentence = verdict("guided", difference(GAIN), **others)
    assert "nan" not in sentence
