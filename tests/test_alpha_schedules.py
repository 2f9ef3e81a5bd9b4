"""Schedules against closed forms, numpy and scipy; facts.md 9.3 is where the forms come from."""

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import optimize

from mixval import choose
from mixval.alpha_schedules import (
    constant,
    cosine,
    easy,
    easy_hard_easy,
    exponential,
    geometric,
    hard,
    linear,
    points,
)

GRID = np.linspace(0, 1, 41)
quick = settings(deadline=None, derandomize=True, max_examples=150)
alphas = st.floats(0, 50, allow_subnormal=False)
progresses = st.floats(0, 1, allow_subnormal=False)


@pytest.mark.parametrize("progress", GRID)
def test_easy_is_the_exponential_through_ten_one_and_zero(progress):
    # Catches a base other than 81, and easy and hard exchanged.
    assert easy(progress) == pytest.approx((81 ** (1 - progress) - 1) / 8, abs=1e-12)


@pytest.mark.parametrize("progress", GRID)
def test_hard_is_the_exponential_through_zero_one_and_ten(progress):
    assert hard(progress) == pytest.approx((81**progress - 1) / 8, abs=1e-12)


@pytest.mark.parametrize("progress", GRID)
def test_easy_hard_easy_is_the_closed_form_of_the_tent(progress):
    tent = min(2 * progress, 2 - 2 * progress)
    assert easy_hard_easy(progress) == pytest.approx((81**tent - 1) / 8, abs=1e-12)


def test_easy_hard_easy_has_its_peak_at_half_time_and_one_at_the_quarters():
    # Catches a peak that is not alpha_max, and alpha_mid at half-time instead of the quarters.
    assert easy_hard_easy(0.5) == pytest.approx(10)
    assert easy_hard_easy(0.25) == pytest.approx(1)
    assert easy_hard_easy(0.75) == pytest.approx(1)
    assert easy_hard_easy(0.0) == easy_hard_easy(1.0) == 0


@quick
@given(alphas, st.floats(0.02, 0.98), alphas, st.floats(0.05, 0.95))
def test_exponential_passes_through_its_three_points(start, share, end, at):
    # Catches a base solved for another equation, and a root search that gives up early.
    assume(abs(end - start) > 1e-3)
    middle = start + share * (end - start)
    curve = {"start": start, "middle": middle, "end": end, "at": at}
    tolerance = 1e-9 * max(start, end)
    assert exponential(0.0, **curve) == pytest.approx(start, abs=tolerance)
    assert exponential(at, **curve) == pytest.approx(middle, abs=tolerance)
    assert exponential(1.0, **curve) == pytest.approx(end, abs=tolerance)


@quick
@given(st.floats(0.1, 50), st.floats(0.05, 0.95), st.floats(0.1, 0.9), progresses)
def test_exponential_is_an_exponential_between_its_points(start, share, at, progress):
    """Three points do not make the curve: a parabola passes through them, too.

    a + b c^t has differences over equal steps that form a geometric series.
    """
    curve = {"start": start, "middle": share * start, "end": 0.0, "at": at}
    values = np.array([exponential(t, **curve) for t in np.linspace(0, 1, 5)])
    steps = np.diff(values)
    assert steps[1] ** 2 == pytest.approx(steps[0] * steps[2], rel=1e-4, abs=1e-12 * start**2)
    assert steps[2] ** 2 == pytest.approx(steps[1] * steps[3], rel=1e-4, abs=1e-12 * start**2)
    assert -1e-12 <= exponential(progress, **curve) <= start * (1 + 1e-12)


@pytest.mark.parametrize(("middle", "at"), [(1.0, 0.5), (2.0, 0.3), (9.0, 0.7), (0.2, 0.9)])
def test_exponential_agrees_with_scipy_solving_for_all_three_constants(middle, at):
    # Another route to the curve: solve a + b exp(k t) at the three points numerically.
    def misses(constants):
        offset, scale, rate = constants
        wanted = {0.0: 10.0, at: middle, 1.0: 0.0}
        return [offset + scale * math.exp(rate * t) - alpha for t, alpha in wanted.items()]

    guess = -4.0 if middle < 10 * (1 - at) else 4.0
    offset, scale, rate = optimize.fsolve(misses, (0.0, 10.0 if guess < 0 else -1.0, guess))
    assert max(map(abs, misses((offset, scale, rate)))) < 1e-8
    for progress in GRID:
        expected = offset + scale * math.exp(rate * progress)
        got = exponential(progress, start=10.0, middle=middle, end=0.0, at=at)
        assert got == pytest.approx(expected, abs=1e-6)


@quick
@given(alphas, alphas, st.floats(0.1, 0.9), progresses)
def test_exponential_with_its_middle_on_the_line_is_the_line(start, end, at, progress):
    # Catches 0 / 0 at c = 1.
    assume(abs(end - start) > 1e-3)
    middle = start + at * (end - start)
    got = exponential(progress, start=start, middle=middle, end=end, at=at)
    assert got == pytest.approx(linear(progress, start=start, end=end), abs=1e-6)


@pytest.mark.parametrize("gap", [1e-5, 1e-7, 1e-9, 1e-11, 1e-13])
def test_exponential_tends_to_the_line_without_a_jump(gap):
    # Catches cancellation in (c^t - 1) / (c - 1) near c = 1.
    for progress in GRID:
        got = exponential(progress, start=10.0, middle=5.0 * (1 + gap), end=0.0)
        assert got == pytest.approx(10 * (1 - progress), abs=20 * gap + 1e-7)


@pytest.mark.parametrize("middle", [1e-9, 1e-14, 10 - 1e-12])
@pytest.mark.parametrize("at", [0.01, 0.5, 0.99])
def test_exponential_stays_finite_for_a_middle_next_to_an_end(middle, at):
    # Catches c^t overflowing, and a bracket that never closes.
    for progress in GRID:
        alpha = exponential(progress, start=10.0, middle=middle, end=0.0, at=at)
        assert math.isfinite(alpha)
        assert 0 <= alpha <= 10


@pytest.mark.parametrize("epochs", [1, 2, 7, 60, 600])
def test_hard_is_easy_played_backwards_at_mid_epoch_progress(epochs):
    # Catches progress e / E or e / (E - 1): at e + 1/2 the mirror is exact for every E.
    for epoch in range(epochs):
        forward = hard((epoch + 0.5) / epochs)
        backward = easy((epochs - 1 - epoch + 0.5) / epochs)
        assert forward == pytest.approx(backward, rel=1e-9, abs=1e-12)


@quick
@given(st.floats(0.01, 50), st.floats(0.01, 50), progresses)
def test_geometric_is_linear_in_the_logarithm(start, end, progress):
    expected = math.exp(np.interp(progress, [0, 1], [math.log(start), math.log(end)]))
    assert geometric(progress, start=start, end=end) == pytest.approx(expected, rel=1e-9)


def test_geometric_is_the_alternative_form_of_the_easy_schedule():
    # facts.md 9.3: alpha = 10^(1 - 2t).
    for progress in GRID:
        assert geometric(progress) == pytest.approx(10 ** (1 - 2 * progress))


@quick
@given(alphas, alphas, progresses)
def test_cosine_is_the_square_of_a_quarter_wave(start, end, progress):
    # (1 + cos x) / 2 = cos^2(x / 2): the same curve, written otherwise.
    weight = math.cos(math.pi * progress / 2) ** 2
    expected = weight * start + (1 - weight) * end
    assert cosine(progress, start=start, end=end) == pytest.approx(expected, abs=1e-9)


@quick
@given(alphas, alphas, progresses)
def test_linear_is_numpys_interpolation(start, end, progress):
    expected = np.interp(progress, [0, 1], [start, end])
    assert linear(progress, start=start, end=end) == pytest.approx(expected, abs=1e-9)


@quick
@given(progresses, alphas)
def test_constant_does_not_depend_on_progress(progress, value):
    assert constant(progress, value=value) == value


@quick
@given(
    st.lists(st.integers(1, 999), max_size=5, unique=True),
    st.lists(alphas, min_size=7, max_size=7),
    progresses,
)
def test_points_are_numpys_interpolation(inner, alpha, progress):
    # Catches the wrong segment, and shares measured from the wrong end of it.
    at = [0.0, *(place / 1000 for place in sorted(inner)), 1.0]
    alpha = alpha[: len(at)]
    expected = np.interp(progress, at, alpha)
    assert points(progress, at=at, alpha=alpha) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("place", [0.0, 0.25, 1.0])
def test_points_hit_the_points_themselves(place):
    at, alpha = [0.0, 0.25, 1.0], [3.0, 0.5, 7.0]
    assert points(place, at=at, alpha=alpha) == alpha[at.index(place)]


@pytest.mark.parametrize(
    "curve",
    [
        {"start": 10.0, "middle": 10.0, "end": 0.0},
        {"start": 10.0, "middle": 0.0, "end": 0.0},
        {"start": 10.0, "middle": 11.0, "end": 0.0},
        {"start": 1.0, "middle": 2.0, "end": 1.0},
        {"start": 0.0, "middle": 5.0, "end": 4.0},
    ],
)
def test_exponential_refuses_a_middle_that_no_exponential_reaches(curve):
    with pytest.raises(ValueError, match="middle"):
        exponential(0.3, **curve)


def test_exponential_without_a_change_is_constant():
    assert exponential(0.3, start=2.0, middle=2.0, end=2.0) == 2.0


@pytest.mark.parametrize("schedule", [easy, hard, easy_hard_easy])
def test_the_named_exponentials_refuse_a_middle_above_the_maximum(schedule):
    with pytest.raises(ValueError, match="alpha_mid"):
        schedule(0.3, alpha_max=1.0, alpha_mid=2.0)


@pytest.mark.parametrize(
    ("at", "alpha", "named"),
    [
        ([0.0, 1.0], [1.0], "length"),
        ([0.0], [1.0], "length"),
        ([0.1, 1.0], [1.0, 2.0], "rise"),
        ([0.0, 0.9], [1.0, 2.0], "rise"),
        ([0.0, 0.5, 0.5, 1.0], [1.0, 2.0, 3.0, 4.0], "rise"),
        ([0.0, 0.7, 0.5, 1.0], [1.0, 2.0, 3.0, 4.0], "rise"),
        ([0.0, 1.0], [1.0, -2.0], "alpha"),
    ],
)
def test_points_refuse_what_is_no_schedule(at, alpha, named):
    with pytest.raises(ValueError, match=named):
        points(0.5, at=at, alpha=alpha)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("constant", {"value": -1}),
        ("constant", {"value": math.nan}),
        ("constant", {"value": math.inf}),
        ("constant", {"alpha": 1.0}),
        ("linear", {"start": -0.1}),
        ("cosine", {"end": -0.1}),
        ("geometric", {"end": 0}),
        ("geometric", {"start": 0}),
        ("easy", {"alpha_max": 0}),
        ("easy", {"alpha_mid": 0}),
        ("hard", {"at": 0}),
        ("hard", {"at": 1}),
        ("exponential", {"middle": -1}),
        ("points", {"at": [0, 1]}),
        ("points", {"at": [0, 1], "alpha": [1, math.nan]}),
        ("points", {"at": [0, 1], "alpha": [1, math.inf]}),
    ],
)
def test_parameters_out_of_range_are_refused_by_the_signature(name, parameters):
    # This is the check a recipe goes through; it reads the range from the annotation.
    with pytest.raises(ValueError, match=name):
        choose.option("alpha_schedules", name).parameters.model_validate(parameters)
