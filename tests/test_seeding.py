"""Random streams: reproducible anywhere, independent of each other, and polite to the caller."""

import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch
from scipy import stats

from mixval.seeding import generator, seed_torch, torch_seed, torch_stream

PLACES = [
    (0, "plan/order"),
    (0, "plan/order", 1),
    (0, "plan/order", 2),
    (0, "plan/order", 1, 1),
    (0, "plan/order", 1, 2),
    (0, "plan/order", 2, 1),
    (0, "plan/partner", 1),
    (0, "plan/lam", 1),
    (1, "plan/order", 1),
    (2**40, "plan/order", 1),
    (2**63 - 1, "plan/order", 1),
]


def test_a_stream_is_the_same_in_another_process():
    # Catches hash(), which Python salts anew in every process.
    code = (
        "from mixval.seeding import generator, torch_seed\n"
        "print(list(generator(3, 'plan/lam', 4, 5).integers(0, 2**62, 4)))\n"
        "print(torch_seed(3, 'student/forward', 4, 5))\n"
    )
    elsewhere = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "123", "PYTHONPATH": ":".join(filter(None, sys.path))},
    ).stdout.splitlines()
    assert elsewhere[0] == str(list(generator(3, "plan/lam", 4, 5).integers(0, 2**62, 4)))
    assert elsewhere[1] == str(torch_seed(3, "student/forward", 4, 5))


def test_drawing_from_one_stream_does_not_move_another():
    before = generator(0, "a", 1).random(5)
    generator(0, "a", 1).random(1000)
    generator(0, "b", 1).random(1000)
    assert np.array_equal(generator(0, "a", 1).random(5), before)


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(PLACES, 2)))
def test_different_places_have_different_streams(one, other):
    # Catches seeds that are added up: (0, epoch 1) would be (1, epoch 0).
    mine, theirs = generator(*one).random(50), generator(*other).random(50)
    assert not np.isin(mine, theirs).any()
    assert abs(stats.pearsonr(mine, theirs).statistic) < 0.6
    assert torch_seed(*one) != torch_seed(*other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((0, "a"), (0, "a", 0)),
        ((0, "a", 1), (0, "a", 1, 0)),
    ],
)
def test_a_place_is_not_the_same_as_the_first_place_inside_it(one, other):
    # Trailing zeros: numpy's SeedSequence fills short entropy up with them.
    assert not np.array_equal(generator(*one).random(5), generator(*other).random(5))


def test_neighbouring_seeds_and_epochs_are_uncorrelated():
    # Many neighbours at once: uniform as a whole, and no two rows alike.
    rows = np.array(
        [generator(seed, "plan/lam", epoch).random(40) for seed in range(12) for epoch in range(12)]
    )
    assert stats.kstest(rows.ravel(), "uniform").pvalue > 1e-3
    correlations = np.corrcoef(rows)[np.triu_indices(len(rows), 1)]
    assert abs(correlations.mean()) < 5 / np.sqrt(40 * len(correlations))
    assert abs(correlations).max() < 0.85


def test_seeds_for_torch_fit_and_differ():
    seeds = [torch_seed(seed, "forward", step) for seed in range(20) for step in range(50)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    # Not all small or all even: the top bit that remains and the lowest bit both vary.
    assert 0.3 < np.mean([seed >= 2**62 for seed in seeds]) < 0.7
    assert 0.3 < np.mean([seed % 2 for seed in seeds]) < 0.7


def test_seeding_torch_is_torchs_own_seeding():
    seed_torch(123, torch.device("cpu"))
    got = torch.rand(4)
    torch.manual_seed(123)
    assert torch.equal(got, torch.rand(4))


def test_torch_streams_repeat_and_differ():
    def drawn(*place):
        with torch_stream(*place):
            return torch.rand(4)

    assert torch.equal(drawn(0, "weights"), drawn(0, "weights"))
    assert not torch.equal(drawn(0, "weights"), drawn(1, "weights"))
    assert not torch.equal(drawn(0, "weights"), drawn(0, "dropout"))
    assert not torch.equal(drawn(0, "weights", 1), drawn(0, "weights", 2))


def test_a_torch_stream_leaves_the_callers_generator_as_it_was():
    # A library must not reseed the program that uses it.
    torch.manual_seed(7)
    expected = torch.rand(3), torch.rand(3)
    torch.manual_seed(7)
    first = torch.rand(3)
    with torch_stream(0, "weights"):
        torch.rand(100)
    assert torch.equal(first, expected[0])
    assert torch.equal(torch.rand(3), expected[1])


def test_a_torch_stream_restores_the_generator_after_an_error():
    torch.manual_seed(7)
    before = torch.get_rng_state()

    def fail_inside():
        with torch_stream(0, "weights"):
            torch.rand(5)
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail_inside()
    assert torch.equal(torch.get_rng_state(), before)


def test_numpys_global_generator_is_not_touched():
    np.random.seed(1)
    before = np.random.get_state()[1].copy()
    generator(0, "a").random(10)
    with torch_stream(0, "b"):
        torch.rand(3)
    assert np.array_equal(np.random.get_state()[1], before)
