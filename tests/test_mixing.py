"""Plans and mixed rows against permutations counted by hand, scipy's Beta, torchvision and timm."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats
from timm.data.mixup import Mixup
from torchvision.transforms import v2

from mixval.augmentations import crop_flip, draw_uniforms
from mixval.fingerprints import array_fingerprint
from mixval.mixing import RowMaker, assign_folds, draw_lam, draw_plan, mix, mixed_targets
from mixval.types import MixPlan, Part

quick = settings(deadline=None, derandomize=True, max_examples=60)
ALPHAS = [1e-4, 1e-3, 1e-2, 0.2, 1.0, 20.0]


def plan_of(**changes):
    return draw_plan(**{"seed": 3, "epoch": 5, "alpha": 0.7, "num_samples": 101, **changes})


def same(one: MixPlan, other: MixPlan) -> bool:
    return all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in ("first", "second", "lam")
    )


def toy_part(count: int, channels: int = 2, size: int = 5, classes: int = 4) -> Part:
    rng = np.random.default_rng(count)
    images = rng.integers(0, 256, (count, channels, size, size), dtype=np.uint8)
    labels = rng.integers(0, classes, count)
    return Part(torch.from_numpy(images), torch.from_numpy(labels), torch.arange(count))


def toy_maker(part: Part, classes: int = 4, **changes) -> RowMaker:
    channels = part.images.shape[1]
    mean = torch.linspace(0.3, 0.6, channels).view(-1, 1, 1)
    std = torch.linspace(0.2, 0.5, channels).view(-1, 1, 1)
    return RowMaker(part, classes, mean, std, **changes)


# -- the plan -----------------------------------------------------------------------------


def test_a_plan_is_a_pure_function_of_its_arguments():
    # Catches any use of a generator that keeps state between calls.
    before = plan_of()
    np.random.default_rng(0).random(7)
    plan_of(seed=4)
    assert same(before, plan_of())


@pytest.mark.parametrize("change", [{"seed": 4}, {"epoch": 6}, {"draw": 1}, {"stream": "student"}])
def test_a_plan_changes_with_each_argument(change):
    # Catches an argument that is left out of the seeding: every epoch would see the same mixes.
    assert not same(plan_of(), plan_of(**change))


def test_another_draw_keeps_the_order_and_changes_partners_and_lambda():
    # `refill` replaces mixes of the same first samples; the clean rows must not move.
    one, other = plan_of(draw=0), plan_of(draw=1)
    assert np.array_equal(one.first, other.first)
    assert not np.array_equal(one.second, other.second)
    assert not np.intersect1d(one.lam, other.lam).size


def test_alpha_changes_neither_order_nor_partners():
    # Arms that differ in alpha must see the same pairs, or their paired difference is noise.
    one, other = plan_of(alpha=0.0), plan_of(alpha=20.0)
    assert np.array_equal(one.first, other.first)
    assert np.array_equal(one.second, other.second)


@quick
@given(st.integers(1, 120), st.integers(1, 130), st.integers(0, 5))
def test_slices_of_any_batch_size_join_to_the_plan(num_samples, batch_size, epoch):
    # Catches partners or lambdas that are drawn per batch, and a lost last odd batch.
    plan = plan_of(num_samples=num_samples, epoch=epoch)
    slices = [plan.keep(slice(at, at + batch_size)) for at in range(0, num_samples, batch_size)]
    assert sum(map(len, slices)) == num_samples
    for name in ("first", "second", "lam"):
        joined = np.concatenate([getattr(piece, name) for piece in slices])
        assert np.array_equal(joined, getattr(plan, name))
    assert all(piece.alpha == plan.alpha and piece.epoch == epoch for piece in slices)


def test_another_process_draws_the_same_plan():
    # Catches Python's salted hash() or global generators in the seeding.
    code = (
        "from mixval.mixing import draw_plan, assign_folds\n"
        "from mixval.fingerprints import array_fingerprint\n"
        "folds = assign_folds(3, 101, 4)\n"
        "plan = draw_plan(seed=3, epoch=5, alpha=0.7, num_samples=101, folds=folds)\n"
        "print(plan.fingerprint, array_fingerprint(folds))\n"
    )
    elsewhere = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "77", "PYTHONPATH": ":".join(filter(None, sys.path))},
    ).stdout.split()
    folds = assign_folds(3, 101, 4)
    here = plan_of(folds=folds)
    assert elsewhere == [here.fingerprint, array_fingerprint(folds)]
    assert elsewhere[0] != plan_of().fingerprint


@quick
@given(st.integers(1, 200), st.integers(0, 50), st.booleans())
def test_order_and_partners_are_permutations(num_samples, seed, derange):
    # Catches partners drawn with replacement: some samples would be mixed in twice, others never.
    plan = plan_of(num_samples=num_samples, seed=seed, derange=derange and num_samples > 1)
    assert sorted(plan.first) == sorted(plan.second) == list(range(num_samples))


def test_partners_are_uniform_over_the_samples():
    # Catches partners that are a shift of the order (as in torchvision) or tied to it:
    # with a uniform permutation, the partner of each sample is every sample equally often.
    size, draws = 5, 4000
    counts = np.zeros((size, size))
    gaps = np.zeros(size)
    for epoch in range(draws):
        plan = plan_of(num_samples=size, epoch=epoch)
        counts[plan.first, plan.second] += 1
        place_of = np.argsort(plan.first)
        gaps[(place_of[plan.second[0]]) % size] += 1
    assert stats.chisquare(counts.ravel()).pvalue > 1e-3
    assert stats.chisquare(gaps).pvalue > 1e-3


@settings(deadline=None, derandomize=True, max_examples=300)
@given(st.integers(2, 50), st.integers(0, 10_000))
def test_derange_leaves_no_sample_with_itself(num_samples, seed):
    # Catches a repair that makes new fixed points (n = 2 and 3 are the hard ones).
    plan = plan_of(num_samples=num_samples, seed=seed, derange=True)
    assert (plan.first != plan.second).all()
    assert sorted(plan.second) == list(range(num_samples))


@pytest.mark.parametrize("num_samples", [2, 3, 4])
def test_derange_repairs_every_number_of_fixed_points(num_samples):
    # Small sets: the seeds below meet each number of fixed points that can happen.
    met = set()
    for seed in range(200):
        chance = plan_of(num_samples=num_samples, seed=seed)
        met.add(int((chance.first == chance.second).sum()))
        plan = plan_of(num_samples=num_samples, seed=seed, derange=True)
        assert (plan.first != plan.second).all()
        assert sorted(plan.second) == list(range(num_samples))
    assert met == set(range(num_samples + 1)) - {num_samples - 1}


def test_without_derange_some_sample_meets_itself():
    # The mean number of fixed points of a random permutation is 1: the option does something.
    fixed = [(p.first == p.second).sum() for p in (plan_of(epoch=e) for e in range(400))]
    assert np.mean(fixed) == pytest.approx(1, abs=5 / np.sqrt(400))


def test_derange_of_a_single_sample_is_refused():
    with pytest.raises(ValueError, match="derange"):
        plan_of(num_samples=1, derange=True)


@quick
@given(st.integers(10, 120), st.integers(1, 5), st.booleans())
def test_partners_lie_in_the_fold_of_the_first_sample(num_samples, num_folds, derange):
    # Catches folds indexed by row instead of by sample: an out-of-fold teacher would then
    # have trained on one of the parents.
    folds = assign_folds(1, num_samples, num_folds)
    plan = plan_of(num_samples=num_samples, folds=folds, derange=derange)
    for i, j in zip(plan.first, plan.second, strict=True):
        assert folds[i] == folds[j]
    assert sorted(plan.second) == list(range(num_samples))
    if derange:
        assert (plan.first != plan.second).all()


@quick
@given(st.integers(1, 200), st.integers(1, 9), st.integers(0, 9))
def test_folds_are_equal_in_size_to_within_one(num_samples, num_folds, seed):
    sizes = np.bincount(assign_folds(seed, num_samples, num_folds), minlength=num_folds)
    assert len(sizes) == num_folds
    assert sizes.sum() == num_samples
    assert sizes.max() - sizes.min() <= 1


def test_folds_are_random_and_not_blocks_of_the_data():
    folds = assign_folds(0, 60, 3)
    assert not np.array_equal(folds, np.arange(60) % 3)
    assert not np.array_equal(folds, assign_folds(1, 60, 3))


@quick
@given(st.integers(1, 90), st.integers(1, 100))
def test_consecutive_rows_share_lambda_in_groups(num_samples, same_lam):
    # Catches tile instead of repeat: rows far apart would share lambda, neighbours not.
    lam = plan_of(num_samples=num_samples, same_lam=same_lam).lam
    assert len(lam) == num_samples
    for row in range(num_samples):
        assert lam[row] == lam[row - row % same_lam]
    assert len(np.unique(lam)) == -(-num_samples // same_lam)


# -- lambda -------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", ALPHAS)
def test_lambda_has_the_moments_of_the_beta_distribution(alpha):
    # Catches Beta(alpha, 1), max(lambda, 1 - lambda), and 0 / 0 at small alpha.
    size = 200_000
    lam = draw_lam(np.random.default_rng(1), alpha, size)
    assert np.isfinite(lam).all()
    assert ((lam >= 0) & (lam <= 1)).all()
    variance = 1 / (4 * (2 * alpha + 1))
    assert abs(lam.mean() - 0.5) < 5 * np.sqrt(variance / size)
    squares = (lam - 0.5) ** 2
    assert abs(squares.mean() - variance) < 5 * squares.std() / np.sqrt(size)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_lambda_has_the_distribution_function_of_the_beta_distribution(alpha):
    """Counts below fixed points against scipy's incomplete beta function, by binomial error.

    Not a KS test alone: below alpha = 0.01 half of the mass lies under the smallest float.
    """
    size = 200_000
    lam = draw_lam(np.random.default_rng(2), alpha, size)
    for place in (1e-300, 1e-100, 1e-10, 1e-3, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999):
        expected = special.betainc(alpha, alpha, place)
        error = np.sqrt(expected * (1 - expected) / size) + 1 / size
        assert abs((lam <= place).mean() - expected) < 5 * error, place


@pytest.mark.parametrize("alpha", [0.2, 1.0, 20.0])
def test_lambda_passes_a_kolmogorov_smirnov_test(alpha):
    lam = draw_lam(np.random.default_rng(3), alpha, 20_000)
    assert stats.kstest(lam, stats.beta(alpha, alpha).cdf).pvalue > 1e-3


@pytest.mark.parametrize("alpha", [1e-300, 1e-30, 1e-8, 1e6])
def test_lambda_is_finite_at_any_alpha(alpha):
    lam = draw_lam(np.random.default_rng(4), alpha, 5000)
    assert np.isfinite(lam).all()
    assert ((lam >= 0) & (lam <= 1)).all()
    assert lam.mean() == pytest.approx(0.5, abs=5 * 0.5 / np.sqrt(5000))


def test_alpha_zero_is_lambda_one_exactly():
    # Beta(0, 0) raises; the limit of Beta(alpha, alpha) would be a coin of 0 and 1.
    plan = plan_of(alpha=0.0)
    assert (plan.lam == 1.0).all()
    assert not plan.mixes
    assert plan_of(alpha=1e-9).mixes


@pytest.mark.parametrize("alpha", [-1.0, -1e-12, np.nan, np.inf, -np.inf])
def test_alpha_out_of_range_is_refused(alpha):
    with pytest.raises(ValueError, match="alpha"):
        plan_of(alpha=alpha)


def test_lambda_is_in_double_precision():
    # Catches a float32 draw: 1 - lambda would be 0 for a third of the rows at alpha = 0.01.
    lam = plan_of(num_samples=1000, alpha=1.0).lam
    assert lam.dtype == np.float64
    assert (lam != lam.astype(np.float32)).mean() > 0.9


# -- the rows -----------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_mix_is_the_loop_over_rows(batch):
    # Odd batches and a batch of one; catches lambda broadcast along the wrong axis.
    rng = np.random.default_rng(batch)
    first, second = rng.random((2, batch, batch, 3, batch))
    lam = rng.random(batch)
    got = mix(*map(torch.from_numpy, (first, second, lam)))
    for row in range(batch):
        expected = lam[row] * first[row] + (1 - lam[row]) * second[row]
        np.testing.assert_allclose(got[row].numpy(), expected, rtol=1e-14)


def test_equal_labels_add_their_two_masses():
    # Catches a scatter that overwrites: the row would sum to lambda or to 1 - lambda.
    lam = torch.tensor([0.3, 0.3, 0.0, 1.0], dtype=torch.float64)
    label_i, label_j = torch.tensor([2, 2, 0, 0]), torch.tensor([2, 1, 1, 1])
    got = mixed_targets(label_i, label_j, lam, 3)
    expected = [[0, 0, 1.0], [0, 0.7, 0.3], [0, 1.0, 0], [1.0, 0, 0]]
    np.testing.assert_allclose(got.numpy(), expected, atol=1e-15)


@quick
@given(st.integers(1, 15), st.integers(0, 100))
def test_mixed_targets_are_the_loop_over_rows(batch, seed):
    rng = np.random.default_rng(seed)
    label_i, label_j = rng.integers(0, 4, (2, batch))
    lam = rng.random(batch)
    expected = np.zeros((batch, 4))
    for row in range(batch):
        expected[row, label_i[row]] += lam[row]
        expected[row, label_j[row]] += 1 - lam[row]
    got = mixed_targets(*map(torch.from_numpy, (label_i, label_j, lam)), 4)
    np.testing.assert_allclose(got.numpy(), expected, atol=1e-15)


def brute_force_rows(part, maker, plan, uniforms, augment):
    """Return mixed images and targets by a loop that looks up each sample by itself."""
    images, targets = [], []
    for i, j, lam in zip(plan.first, plan.second, plan.lam, strict=True):
        views = []
        for sample in (i, j):
            pixels = part.images[sample].numpy().astype(np.float64)
            if augment is not None:  # before normalising: what comes in from outside is black
                one = torch.from_numpy(pixels)[None]
                pixels = augment(one, uniforms[sample : sample + 1])[0].numpy()
            views.append((pixels / 255 - maker.mean.numpy()) / maker.std.numpy())
        images.append(lam * views[0] + (1 - lam) * views[1])
        target = np.zeros(maker.num_classes)
        target[part.labels[i]] += lam
        target[part.labels[j]] += 1 - lam
        targets.append(target)
    return np.stack(images), np.stack(targets)


@pytest.mark.parametrize("augment", [None, crop_flip])
@pytest.mark.parametrize("rows", [slice(0, 7), slice(7, 8), slice(3, 24), slice(None)])
def test_batch_is_the_loop_over_rows(augment, rows):
    # Catches another permutation for labels than for images, uniforms looked up by row
    # instead of by sample, normalisation after mixing with the wrong channel, lost odd rows.
    part = toy_part(25)
    maker = toy_maker(part, augment=augment)
    uniforms = draw_uniforms(0, 1, part.ids) if augment is not None else None
    plan = draw_plan(seed=0, epoch=1, alpha=0.8, num_samples=25).keep(rows)
    batch = maker.batch(plan, uniforms)
    images, targets = brute_force_rows(part, maker, plan, uniforms, augment)
    np.testing.assert_allclose(batch.mixed.numpy(), images, atol=2e-6)
    np.testing.assert_allclose(batch.mixed_targets.numpy(), targets, atol=1e-6)
    unmixed = MixPlan(plan.first, plan.first, np.ones(len(plan)), 1.0, 1)
    images, targets = brute_force_rows(part, maker, unmixed, uniforms, augment)
    np.testing.assert_allclose(batch.clean.numpy(), images, atol=2e-6)
    np.testing.assert_array_equal(batch.clean_targets.numpy(), targets)
    np.testing.assert_allclose(batch.lam.numpy(), plan.lam, atol=1e-7)


@pytest.mark.parametrize("batch_size", [1, 3, 10, 25])
def test_a_row_is_the_same_in_any_batch(batch_size):
    # Bit for bit: a row can be made again later, alone or on another process.
    part = toy_part(25)
    maker = toy_maker(part, augment=crop_flip)
    uniforms = draw_uniforms(0, 1, part.ids)
    plan = draw_plan(seed=0, epoch=1, alpha=0.8, num_samples=25)
    whole = maker.batch(plan, uniforms)
    pieces = [
        maker.batch(plan.keep(slice(at, at + batch_size)), uniforms)
        for at in range(0, 25, batch_size)
    ]
    for name in ("clean", "clean_targets", "mixed", "mixed_targets", "lam"):
        joined = torch.cat([getattr(piece, name) for piece in pieces])
        assert torch.equal(joined, getattr(whole, name)), name


def test_labels_go_with_their_images():
    """The pairing mistake: one permutation for images and another for labels.

    Each image here is its label written in every pixel, so what the mixed image shows
    (lam y_i + (1 - lam) y_j) must be the mean label under the mixed target.
    """
    classes = 11
    labels = torch.arange(classes)
    images = labels.to(torch.uint8).view(-1, 1, 1, 1).expand(classes, 1, 2, 2).contiguous()
    maker = RowMaker(
        Part(images, labels, labels), classes, torch.zeros(1, 1, 1), torch.full((1, 1, 1), 1 / 255)
    )
    plan = draw_plan(seed=1, epoch=0, alpha=1.0, num_samples=classes, derange=True)
    batch = maker.batch(plan)
    shown = batch.mixed.double().mean((1, 2, 3))
    told = batch.mixed_targets.double() @ labels.double()
    torch.testing.assert_close(shown, told, atol=1e-5, rtol=0)
    # The control of this test: labels of another permutation are seen to be wrong.
    wrong = batch.mixed_targets.double().roll(1, 0) @ labels.double()
    assert (shown - wrong).abs().max() > 0.1


def test_lambda_goes_with_the_first_label():
    # The swap: weight lam on y_j. At lam = 0.9 the mix must look like i and be called i.
    part = Part(
        torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1),
        torch.tensor([0, 1]),
        torch.arange(2),
    )
    maker = RowMaker(part, 2, torch.zeros(1, 1, 1), torch.ones(1, 1, 1))
    plan = MixPlan(np.array([0, 1]), np.array([1, 0]), np.array([0.9, 0.8]), 1.0, 0)
    batch = maker.batch(plan)
    torch.testing.assert_close(batch.mixed.flatten(), torch.tensor([0.1, 0.8]))
    torch.testing.assert_close(batch.mixed_targets, torch.tensor([[0.9, 0.1], [0.2, 0.8]]))


def test_nothing_is_mixed_at_alpha_zero():
    part = toy_part(9)
    batch = toy_maker(part).batch(draw_plan(seed=0, epoch=0, alpha=0.0, num_samples=9))
    assert batch.mixed is None and batch.mixed_targets is None and batch.lam is None
    assert len(batch.clean) == 9


def test_batch_names_the_fold_of_its_parents():
    # Catches folds looked up by row number.
    part = toy_part(20)
    folds = assign_folds(0, 20, 3)
    maker = toy_maker(part, folds=torch.from_numpy(folds))
    plan = draw_plan(seed=0, epoch=0, alpha=1.0, num_samples=20, folds=folds).keep(slice(4, 11))
    fold = maker.batch(plan).fold.numpy()
    assert (fold == folds[plan.first]).all()
    assert (fold == folds[plan.second]).all()
    assert len(set(fold)) > 1


# -- other libraries as oracles -------------------------------------------------------------


@pytest.mark.parametrize("batch", [2, 5, 8])
def test_rows_agree_with_torchvision_given_its_lambda_and_partners(batch):
    # torchvision mixes row b with row b - 1 and draws one lambda from torch's Beta.
    part = toy_part(batch)
    maker = toy_maker(part)
    clean = maker.inputs(torch.arange(batch))
    torch.manual_seed(batch)
    images, targets = v2.MixUp(alpha=0.8, num_classes=4)(clean, part.labels)
    torch.manual_seed(batch)
    lam = float(torch.distributions.Beta(torch.tensor([0.8]), torch.tensor([0.8])).sample())
    first = np.arange(batch)
    plan = MixPlan(first, np.roll(first, 1), np.full(batch, lam), 0.8, 0)
    got = maker.batch(plan)
    torch.testing.assert_close(got.mixed, images)
    torch.testing.assert_close(got.mixed_targets, targets)


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
def test_rows_agree_with_timm_given_its_lambda_and_partners(mode):
    # timm mixes row b with row B - 1 - b. With all labels different, its targets tell
    # lambda; it is not drawn again here.
    batch = 8
    part = Part(toy_part(batch).images, torch.arange(batch), torch.arange(batch))
    maker = toy_maker(part, classes=batch)
    clean = maker.inputs(torch.arange(batch))
    np.random.seed(5)
    mixup = Mixup(mixup_alpha=0.8, label_smoothing=0.0, num_classes=batch, mode=mode)
    images, targets = mixup(clean.clone(), part.labels)
    lam = targets[torch.arange(batch), part.labels].double().numpy()
    assert len(np.unique(lam)) == {"batch": 1, "pair": batch // 2, "elem": batch}[mode]
    first = np.arange(batch)
    got = maker.batch(MixPlan(first, first[::-1].copy(), lam, 0.8, 0))
    torch.testing.assert_close(got.mixed, images, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(got.mixed_targets, targets)


def test_equal_labels_agree_with_timm():
    # The case where both parents have one label, in another library's words.
    labels = torch.tensor([1, 0, 0, 1])
    np.random.seed(2)
    mixup = Mixup(mixup_alpha=1.0, label_smoothing=0.0, num_classes=3, mode="batch")
    _, targets = mixup(torch.zeros(4, 1, 2, 2), labels)
    got = mixed_targets(labels, labels.flip(0), torch.full((4,), 0.37), 3)
    torch.testing.assert_close(got, targets)
