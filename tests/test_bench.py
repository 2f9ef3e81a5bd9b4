"""The benchmark: its statistics are right, its loops really train. Nothing is timed here."""

import itertools
import json
import multiprocessing
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from mixval.arguments import BENCH_SUITES
from mixval.bench import loops, suites
from mixval.bench.case import Case
from mixval.bench.measure import MIN_ROUNDS, Quotient, Ratio, interleaved, ratio, turn
from mixval.bench.ours import (
    banked_job,
    guided_job,
    mixup_job,
    our_loop,
    our_scoring,
    regmixup_job,
)
from mixval.cli import main
from mixval.engine import start_engine
from mixval.recipe import Choice, EngineSettings
from mixval.score_store import ScoreWriter, read_scores
from mixval.training import Loop
from mixval.training_job import build_model

A_TO_B = Quotient(("a",), ("b",))
LIBRARIES = {"torchvision": loops.torchvision_loop, "timm": loops.timm_loop}


def make_case(precision="bf16", **fields):
    model = Choice(name="conv_net", width=4)
    engine = start_engine(EngineSettings(device="cpu", precision=precision, channels_last=True))
    return Case(model, **{"batch_size": 16, "engine": engine, "samples": 64, **fields})


def simulated(rng, rounds, true_ratio, drift=1.0):
    """Return seconds with lognormal noise and a common drift that swings by `drift` in log."""
    common = np.exp(drift * np.cumsum(rng.normal(size=rounds)) / np.sqrt(rounds))
    noise = np.exp(0.05 * rng.normal(size=(2, rounds)))
    return {"a": true_ratio * common * noise[0], "b": common * noise[1]}


# -- ratios -------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [8, 25, 60])
def test_the_interval_covers_the_true_ratio_whatever_drifts(rounds):
    rng = np.random.default_rng(rounds)
    found = [ratio(simulated(rng, rounds, 0.95), A_TO_B) for _ in range(600)]
    covered = np.mean([r.low <= 0.95 <= r.high for r in found])
    assert covered > 0.95 - 3 * np.sqrt(0.95 * 0.05 / 600)


def test_pairing_is_what_makes_the_interval_narrow():
    # The control of the test above: without pairing the drift stays in.
    times = simulated(np.random.default_rng(0), 60, 0.95)
    unpaired = {"a": times["a"], "b": np.random.default_rng(1).permutation(times["b"])}
    assert ratio(times, A_TO_B).width < 0.3 * ratio(unpaired, A_TO_B).width


def test_the_interval_lies_between_the_order_statistics_of_the_binomial():
    # By counting sign patterns: with 9 rounds, 2nd to 8th smallest cover 1 - 2 (1 + 9) / 2^9.
    values = np.random.default_rng(2).lognormal(size=9)
    found = ratio({"a": values, "b": np.ones(9)}, A_TO_B)
    assert (found.low, found.high) == (np.sort(values)[1], np.sort(values)[7])
    assert 1 - 2 * (1 + 9) / 2**9 >= 0.95 > 1 - 2 * (1 + 9 + 36) / 2**9


def test_too_few_rounds_have_no_bounded_interval():
    few, enough = (np.arange(1.0, n + 1) for n in (MIN_ROUNDS - 1, MIN_ROUNDS))
    found = ratio({"a": few, "b": np.ones_like(few)}, A_TO_B)
    assert (found.low, found.high) == (0, np.inf)
    assert ratio({"a": enough, "b": np.ones_like(enough)}, A_TO_B).width < np.inf


seconds = st.lists(st.floats(1e-3, 1e3), min_size=12, max_size=12)


@given(a=seconds, b=seconds, power=st.integers(-8, 8))
def test_another_unit_of_time_leaves_every_ratio(a, b, power):
    # Powers of two: a unit that rounds nothing.
    times = {"a": np.array(a), "b": np.array(b)}
    assert ratio({k: v * 2.0**power for k, v in times.items()}, A_TO_B) == ratio(times, A_TO_B)


def test_several_names_are_added_and_totals_count_what_is_rare():
    times = {"a": np.full(9, 6.0), "b": np.full(9, 1.0), "c": np.full(9, 2.0)}
    assert ratio(times, Quotient(("a",), ("b", "c"))).median == 2
    times["a"][0] = 60
    found = ratio(times, Quotient(("a",), ("c",)))
    assert (found.median, found.totals) == (3, (60 + 8 * 6) / 18)


# -- taking turns -------------------------------------------------------------------------


def test_everyone_runs_once_a_round_and_equally_often_in_every_place():
    names = ["a", "b", "c"]
    orders = [turn(names, number) for number in range(6)]
    assert all(sorted(order) == names for order in orders)
    for place in range(3):
        assert sorted(order[place] for order in orders) == ["a", "a", "b", "b", "c", "c"]
    follows = [pair for order in orders for pair in itertools.pairwise(order)]
    assert all(follows.count((x, y)) == follows.count((y, x)) for x, y in ("ab", "ac", "bc"))


def test_a_drift_within_rounds_favours_nobody():
    clock = itertools.count(1000)  # every unit of work is a little slower than the one before
    work = {name: lambda: float(next(clock)) for name in "abc"}
    found = ratio(interleaved(work, 60), A_TO_B)
    assert found.median == pytest.approx(1, abs=1e-3)


def test_it_ends_by_rounds_by_width_or_by_time_and_never_without_an_interval():
    steady = {"a": lambda: 2.0, "b": lambda: 1.0}
    assert len(interleaved(steady, 40)["a"]) == 40
    assert len(interleaved(steady, 40, asked=[A_TO_B], width=0.01)["a"]) == MIN_ROUNDS
    noise = np.random.default_rng(0)
    noisy = {"a": lambda: float(noise.lognormal()), "b": lambda: 1.0}
    assert len(interleaved(noisy, 40, asked=[A_TO_B], width=0.01)["a"]) == 40
    clock = itertools.count()
    assert len(interleaved(steady, 40, seconds=10, clock=lambda: next(clock))["a"]) < 20
    assert len(interleaved(steady, 40, seconds=0)["a"]) == MIN_ROUNDS


@pytest.mark.parametrize(
    ("bounds", "verdict"),
    [
        ((0.96, 0.98), ">= 0.95: yes"),
        ((0.94, 0.98), ">= 0.95: open"),
        ((0.90, 0.94), ">= 0.95: no"),
    ],
)
def test_a_verdict_needs_the_whole_interval(bounds, verdict):
    low, high = bounds
    assert suites.Claim("x", A_TO_B, at_least=0.95).verdict(Ratio(0.95, low, high, 1, 9)) == verdict
    mirrored = Ratio(0.95, 1.9 - high, 1.9 - low, 1, 9)
    at_most = suites.Claim("x", A_TO_B, at_most=0.95).verdict(mirrored)
    assert at_most == verdict.replace(">=", "<=")


# -- loops --------------------------------------------------------------------------------


def bare_and_borrowed(case):
    yield loops.fixed_batch(case)
    yield loops.regmixup_step(case)
    for build in LIBRARIES.values():
        yield from (build(case, 0, batchwise) for batchwise in (False, True))


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_every_loop_begins_with_the_same_weights_and_learns(precision):
    case = make_case(precision=precision)
    started = [p.clone() for p in case.network().parameters()]
    for loop in bare_and_borrowed(case):
        assert all(map(torch.equal, loop.model.parameters(), started))
        losses = [float(loop.step()) for _ in range(60)]
        assert np.mean(losses[-15:]) < np.mean(losses[:15])


def test_every_loop_has_the_optimiser_of_a_run():
    for loop in bare_and_borrowed(make_case()):
        group = loop.optimiser.param_groups[0]
        assert group["nesterov"] and group["momentum"] == 0.9 and group["lr"] == 0.01


def test_a_call_does_its_steps_and_one_before():
    loop, taken = loops.fixed_batch(make_case()), []
    step = loop.step
    loop.step = lambda: taken.append(step())
    assert loop(3) > 0
    assert len(taken) == 4


def test_regmixup_is_the_sum_of_both_means():
    case = make_case(precision="fp32")
    loop, batch = loops.regmixup_step(case), loops.mixed_batch(case)
    joint = loop.model(torch.cat([batch.clean, batch.mixed]))
    clean, mixed = joint.detach().chunk(2)
    terms = F.cross_entropy(clean, batch.clean_targets), F.cross_entropy(mixed, batch.mixed_targets)
    assert float(loop.step()) == pytest.approx(float(sum(terms)), rel=1e-5)


@pytest.mark.parametrize("batchwise", [False, True])
@pytest.mark.parametrize("library", LIBRARIES)
def test_the_libraries_loops_feed_convex_combinations(library, batchwise):
    # Every image of a class has one grey: so the middle, which cropping does not reach,
    # must be the mean grey of the classes that the soft label names.
    case = make_case()
    greys = torch.arange(10) * 25
    train_part = case.splits.train
    flat = greys[train_part.labels].to(torch.uint8)[:, None, None, None].expand(-1, 3, 32, 32)
    case.__dict__["splits"] = replace(case.splits, train=replace(train_part, images=flat))
    loop = LIBRARIES[library](case, 0, batchwise)
    mixed_rows = 0
    for _ in range(6):
        inputs, targets = next(loop.pairs)
        assert inputs.shape == (16, 3, 32, 32) and inputs.dtype == torch.float32
        assert inputs.is_contiguous(memory_format=torch.channels_last)
        assert torch.allclose(targets.sum(1), torch.ones(16)) and (targets >= 0).all()
        assert ((targets > 0).sum(1) <= 2).all()
        middle = (inputs[:, :, 8:24, 8:24] * 0.25 + 0.5) * 255
        expected = (targets @ greys.float())[:, None, None, None].expand_as(middle)
        torch.testing.assert_close(middle, expected, atol=0.51, rtol=0)  # bytes are rounded
        edges = inputs[:, :, :4]
        mixed_rows += int(((targets > 0).sum(1) == 2).sum())
        assert edges.unique().numel() > 2  # zeros of the padding came in
    assert mixed_rows > 40


# Forking while threads are alive is what a DataLoader does by default.
forks = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@forks
def test_paused_workers_rest_and_the_loop_goes_on_where_it_was():
    case = make_case(batch_size=4)
    feed = loops.timm_loop(case, 2, False).feed
    for _ in range(5):
        next(feed)
    feed.pause()
    gained, full = feed._gained, feed.ahead
    time.sleep(0.05)
    assert feed.ahead == full == 4  # nothing is made while others are measured
    assert 0 <= gained <= full
    taken = feed._taken
    feed.resume()
    assert feed._taken == taken + gained
    assert {len(images) for images, _ in itertools.islice(feed, 40)} == {4}  # beyond an epoch of 16


@forks
@pytest.mark.parametrize("batchwise", [False, True])
def test_the_fastest_number_of_workers_is_chosen_and_the_other_workers_end(batchwise):
    case = make_case()

    def build(case, workers, batchwise):
        loop = loops.torchvision_loop(case, workers, batchwise)
        return lambda steps, kept=loop: 1.0 + abs(workers - 1)

    name, _ = suites.fastest(case, "torchvision", build, batchwise)
    assert name == "torchvision, 1 worker" + ", normalised in batches" * batchwise
    assert len(multiprocessing.active_children()) <= 1


@pytest.mark.parametrize("make_job", [mixup_job, regmixup_job, guided_job, banked_job])
@pytest.mark.parametrize("steps", [1, 3, 9])  # 9 is beyond two epochs of 4
def test_ours_goes_on_with_the_real_loop_by_its_steps_and_one_before(make_job, steps, monkeypatch):
    taken = []

    class Spied(Loop):
        def _step(self, *arguments):
            taken.append(self.state.epoch * self.steps_per_epoch + self.state.step)
            return super()._step(*arguments)

    monkeypatch.setattr("mixval.bench.ours.Loop", Spied)
    case = make_case()
    run = our_loop(case, make_job(case))
    assert run(steps) > 0
    assert run(steps) > 0
    assert taken == list(range(2 * (steps + 1)))


@pytest.mark.parametrize("make_job", [mixup_job, regmixup_job, guided_job])
def test_mixval_trains_the_same_network_with_the_same_settings(make_job):
    case = make_case()
    job = make_job(case)
    ours = build_model(job.model, job.splits, job.seed, job.stream)
    assert all(map(torch.equal, ours.parameters(), case.network().parameters()))
    assert job.training == case.training and job.training.augmentation.name == "crop_flip"


@pytest.mark.parametrize("networks", [1, 2])
def test_bare_passes_are_of_the_mixed_rows_without_gradients(networks, monkeypatch):
    case, seen = make_case(), []

    def spied(network, inputs, outputs):
        seen.append((network.training, torch.is_inference_mode_enabled(), inputs[0]))

    network = case.network()
    network.register_forward_hook(spied)
    monkeypatch.setattr(Case, "network", lambda self: network)
    run = (loops.teacher_forward, loops.two_forwards)[networks - 1](case)
    assert run(3) > 0
    assert len(seen) == networks * (3 + 1)
    mixed = loops.mixed_batch(case).mixed
    assert all(not t and inference and torch.equal(x, mixed) for t, inference, x in seen)


@pytest.mark.parametrize("chunks", [1, 6])  # 6 is beyond an epoch of 4
def test_every_chunk_is_scored_and_in_the_file_when_the_clock_stops(chunks, monkeypatch):
    tables = []

    class Spied(ScoreWriter):
        def __exit__(self, *error):
            super().__exit__(*error)
            tables.append(read_scores(self.path))

    monkeypatch.setattr("mixval.bench.ours.ScoreWriter", Spied)
    run = our_scoring(make_case())
    assert run(chunks) > 0
    assert run(chunks) > 0
    # Each call scores one chunk of 16 more than it writes.
    starts = 16, 16 * (chunks + 2)
    assert [table.row.tolist() for table in tables] == [
        list(range(start, start + 16 * chunks)) for start in starts
    ]
    assert all((table.updated > 0).all() and (table.r_hat == 0).all() for table in tables)


# -- the command --------------------------------------------------------------------------


def test_the_command_names_the_suites_there_are():
    assert tuple(suites.SUITES) == BENCH_SUITES


@forks
def test_the_command_prints_ratios_and_writes_every_round(tmp_path, capsys):
    file = tmp_path / "bench.json"
    words = ["--model", "mlp", "--batch-size", "8", "--seconds", "0.2", "--samples", "64"]
    assert main(["bench", *words, "--threads", "1", "--json", str(file)]) == 0
    said = capsys.readouterr().out
    assert all(f"{suite}: mlp, batch 8, bf16" in said for suite in BENCH_SUITES)
    assert "images/s" in said and ">= 0.95: " in said and "<= 1.05: " in said
    results = json.loads(file.read_text())["results"]
    assert [len(result["ratios"]) for result in results] == [5, 3, 1]
    for result in results:
        counts = {len(values) for values in result["seconds"].values()}
        assert len(counts) == 1 and counts.pop() >= MIN_ROUNDS


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["mixupp"], "did you mean 'mixup'?"),
        (["--batch-size", "7"], "must be even"),
        (["--seconds", "0"], "--seconds: must be above 0"),
        (["--samples", "8"], "--samples: must be at least a batch of 64"),
        (["--model", "resnet1", "--samples", "256"], "timm has no architecture 'resnet1'"),
        (["--precision", "int8"], "invalid choice"),
    ],
)
def test_bad_input_is_one_line(words, told, capsys):
    assert main(["bench", *words]) == 2
    said = capsys.readouterr().err.strip()
    assert told in said and "\n" not in said
