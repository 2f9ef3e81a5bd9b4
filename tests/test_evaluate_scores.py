"""The study of scores: its measures are right, and a tiny run of every protocol goes through."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
sys.path.insert(0, str(EXPERIMENTS))

import evaluate_scores  # noqa: E402
from score_protocols import (  # noqa: E402
    cases,
    figures,
    libraries,
    mislabels,
    networks,
    removal,
    repair,
    scores,
    steps,
    summary,
)
from score_protocols.measures import auroc, found_after, steps_to  # noqa: E402

TINY = replace(
    cases.SETTINGS["digits"],
    train=80,
    pool=60,
    hidden=(16,),
    steps=40,
    early=10,
    batch=8,
    runs=2,
    folds=2,
    draws=4,
    test=100,
)

quick = settings(deadline=None, derandomize=True)

# -- the measures -----------------------------------------------------------------------------

ranked = st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=2, max_size=40).filter(
    lambda rows: len({bad for _, bad in rows}) == 2
)


@quick
@given(ranked)
def test_auroc_is_scikit_learns_with_ties(rows):
    values, bad = (np.array(column) for column in zip(*rows, strict=True))
    assert auroc(values.astype(float), bad) == pytest.approx(roc_auc_score(bad, values))


@quick
@given(ranked)
def test_found_after_counts_a_tied_level_in_proportion(rows):
    values, bad = (np.array(column) for column in zip(*rows, strict=True))
    shares = [count / len(rows) for count in range(len(rows) + 1)]
    for count, found in enumerate(found_after(values, bad, shares)):
        edge = np.sort(values)[::-1][count - 1] if count else np.inf
        above, level = values > edge, values == edge
        open_places = count - above.sum()
        expected = bad[above].sum() + (open_places * bad[level].mean() if level.any() else 0)
        assert found == pytest.approx(expected / bad.sum())


def test_a_perfect_score_finds_all_and_a_reversed_one_nothing():
    bad = np.arange(100) < 10
    assert auroc(bad.astype(float), bad) == 1.0
    assert auroc(-bad.astype(float), bad) == 0.0
    assert found_after(bad.astype(float), bad, [0.0, 0.05, 0.1, 1.0]) == [0.0, 0.5, 1.0, 1.0]
    assert found_after(-bad.astype(float), bad, [0.9, 0.95]) == [0.0, 0.5]


def test_a_random_score_is_worth_one_half():
    rng = np.random.default_rng(0)
    bad = rng.random(20_000) < 0.1
    values = rng.random(20_000)
    assert auroc(values, bad) == pytest.approx(0.5, abs=0.02)
    assert found_after(values, bad, [0.2]) == pytest.approx([0.2], abs=0.03)
    assert auroc(np.zeros(20_000), bad) == 0.5


def test_infinite_scores_rank_highest():
    bad = np.array([True, False, False])
    assert auroc(np.array([np.inf, 3.0, 2.0]), bad) == 1.0


def test_auroc_of_one_kind_only_is_refused():
    with pytest.raises(ValueError, match="bad and good rows, got 0 and 3"):
        auroc(np.zeros(3), np.zeros(3, dtype=bool))


def test_steps_to_is_the_first_step_that_reaches_the_target():
    curve = [(0, 0.1), (20, 0.8), (40, 0.7), (60, 0.9)]
    assert steps_to(curve, 0.8) == 20
    assert steps_to(curve, 0.85) == 60
    assert steps_to(curve, 0.95) is None


# -- the cases and the networks ---------------------------------------------------------------


def test_a_case_flips_the_asked_share_and_the_pool_stays_right():
    clean, noisy = (cases.make_case(TINY, 0, noise) for noise in (0.0, 0.2))
    assert int(noisy.flipped.sum()) == 16
    assert torch.equal(noisy.labels != clean.labels, noisy.flipped)
    assert torch.equal(noisy.pool[1], clean.pool[1])
    assert len(noisy.test[1]) == 100


def test_confused_labels_change_only_the_named_classes():
    clean = cases.make_case(TINY, 0, 0.0)
    mixed_up = cases.confused(clean)
    pairs = {frozenset(pair) for pair in TINY.confused}
    changed = mixed_up.flipped
    assert changed.any()
    both = zip(clean.labels[changed].tolist(), mixed_up.labels[changed].tolist(), strict=True)
    assert {frozenset(pair) for pair in both} <= pairs


def test_training_is_a_function_of_seed_and_stream_and_learns():
    case = cases.make_case(TINY, 0, 0.0)
    data = case.inputs, case.labels
    one, same, other = (networks.train(case, data, stream=s) for s in ("a", "a", "b"))
    assert torch.equal(one[1].weight, same[1].weight)
    assert not torch.equal(one[1].weight, other[1].weight)
    assert networks.accuracy(one, case.test) > 0.5


def test_batches_are_whole_and_show_every_sample_once_an_epoch():
    case = cases.make_case(TINY, 0, 0.0)
    order = networks.batches(case, 24, "any")
    epoch = torch.cat([next(order) for _ in range(3)])
    assert sorted(epoch.tolist()) == list(range(24))


# -- the scores -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fitted():
    return scores.fit(cases.make_case(TINY, 0, 0.2))


def test_r_hat_and_rho_are_differences_of_losses_by_a_loop(fitted):
    columns = scores.sample_columns(fitted)
    case = fitted.case
    for row in (0, 17, 79):
        label = int(case.labels[row])
        inputs = case.inputs[row : row + 1]
        base, hold_out = (
            -float(networks.log_probs(network, inputs)[0, 0, label])
            for network in (fitted.base, fitted.hold_out)
        )
        teacher = -float(fitted.updated["r̂ teacher D+V"](inputs)[0, 0, label])
        assert columns["RHO-LOSS"][row] == pytest.approx(hold_out - base, abs=1e-4)
        assert columns["r̂ teacher D+V"][row] == pytest.approx(teacher - base, abs=1e-4)
        assert columns["loss"][row] == pytest.approx(base, abs=1e-4)


def test_every_score_is_a_number_for_every_sample(fitted):
    columns = scores.sample_columns(fitted)
    assert set(scores.R_HATS) < set(columns)
    for name, column in columns.items():
        assert column.shape == (80,)
        assert np.isfinite(column).all() or name == "forgetting"


def test_the_failures_are_what_the_base_network_gets_wrong(fitted):
    wrong = ~networks.hits(fitted.base, fitted.case.pool)
    assert len(fitted.failures[1]) == wrong.sum() > 0
    assert networks.accuracy(fitted.base, fitted.failures) == 0


def test_columns_of_mixes_at_lambda_one_are_those_of_samples(fitted):
    from mixval.types import MixPlan

    samples = scores.sample_columns(fitted)
    order = np.arange(80)
    plan = MixPlan(order, order[::-1].copy(), np.ones(80), 1.0, 0)
    mixes = mislabels.mix_columns(fitted, plan, samples)
    for name in ("r̂ EWC", "r̂ out-of-fold", "EL2N", "margin", "linear influence"):
        assert mixes[name] == pytest.approx(samples[name], rel=1e-3, abs=1e-4)
    worse = np.maximum(samples["loss"], samples["loss"][::-1])
    assert mixes["worse parent's loss"] == pytest.approx(worse)


# -- the protocols ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found():
    """Return what a tiny run of every protocol finds; libraries are made to be missing."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("cleanlab", "captum", "dattri", "pydvl", "laplace"):
            patch.setitem(sys.modules, name, None)
        return {
            "mislabels": mislabels.run(TINY, 0, noise=0.2, alpha=0.0),
            "removal": removal.run(replace(TINY, steps=10), 0),
            "steps": steps.run(TINY, 0),
            "repair": repair.run(TINY, 0),
            "libraries": libraries.run(replace(TINY, steps=10), 0),
        }


def test_mislabels_measures_samples_and_mixes(found):
    for rows in ("samples", "mixes", "mixes, flipped share ≥ ½"):
        for measured in found["mislabels"][rows].values():
            assert 0 <= measured["auroc"] <= 1
            assert measured["found"][0] == 0
            assert measured["found"][-1] == pytest.approx(1)
    assert found["mislabels"]["samples"]["hold-out loss"]["auroc"] > 0.8


def test_networks_trained_with_mixup_are_others():
    plain, mixed = (cases.make_case(TINY, 0, 0.0, alpha) for alpha in (0.0, 1.0))
    one, other = (networks.train(c, (c.inputs, c.labels), stream="a") for c in (plain, mixed))
    assert not torch.equal(one[1].weight, other[1].weight)
    assert networks.accuracy(other, mixed.test) > 0.3  # chance is 0.1


def test_removal_retrains_without_the_rows_it_says(monkeypatch):
    case = cases.make_case(TINY, 0, 0.1)
    kept = []
    monkeypatch.setattr(removal, "accuracy_of", lambda case, rows: kept.append(set(rows)) or 0.5)
    removal.curves(case, np.arange(80.0))
    most, least = kept[: len(removal.FRACTIONS)], kept[len(removal.FRACTIONS) :]
    assert most[-1] == set(range(40))
    assert least[-1] == set(range(40, 80))
    assert [len(rows) for rows in most] == [72, 56, 40]


def test_removal_keeps_what_the_other_end_loses(found):
    assert set(found["removal"]["curves"]["random"]) == {"most", "least"}
    assert 0 < found["removal"]["flipped removed"] <= 1


def test_steps_trains_on_the_most_wished_for_and_counts_wrong_labels():
    case = cases.make_case(TINY, 0, 0.1)
    wrong = case.flipped
    lookup = {tuple(row.flatten().tolist()): bool(bad) for row, bad in zip(case.inputs, wrong)}  # noqa: B905

    def wish(logits, inputs, targets):
        return torch.tensor([float(lookup[tuple(r.flatten().tolist())]) for r in inputs])

    sought = steps.selected(case, wish, 0.0)
    avoided = steps.selected(case, lambda *given: -wish(*given), 0.0)
    assert avoided["wrong"] == 0
    assert sought["wrong"] > 0.3
    assert [step for step, _ in sought["curve"]] == [0, 20, 40]


def test_steps_runs_for_samples_and_mixes(found):
    assert set(found["steps"]) == {"samples", "mixes"}
    assert all(0 <= each["wrong"] <= 1 for each in found["steps"]["mixes"].values())


def test_repair_finds_the_flipped_ones_where_it_is_told(found):
    assert found["repair"]["found"]["flipped"] == 1
    assert set(found["repair"]["treatments"]) == set(repair.TREATED)
    after = found["repair"]["fine-tuned"]["F added to D"]
    assert 0 <= after["failures in test"] <= 1
    assert after["F"] > 0


def test_libraries_that_are_missing_are_left_out_and_named(found):
    names = {"cleanlab", "captum", "dattri", "pyDVL", "laplace-torch"}
    assert set(found["libraries"]) == names
    assert all("left out" in each for each in found["libraries"].values())


@pytest.mark.filterwarnings("ignore")  # laplace-torch warns of itself
def test_laplace_torch_agrees_with_our_last_layer(fitted):
    pairs = libraries.laplace_torch(fitted, {})
    for ours, theirs in pairs.values():
        assert (
            libraries.compared(ours, theirs, fitted.case.flipped.numpy())["rank correlation"] > 0.8
        )


def test_the_product_of_gradients_is_that_of_a_loop(fitted):
    product = libraries.gradient_product(fitted)
    case = fitted.case

    def gradient(inputs, labels):
        loss = torch.nn.functional.cross_entropy(fitted.base(inputs), labels, reduction="sum")
        parts = torch.autograd.grad(loss, list(fitted.base.parameters()))
        return torch.cat([part.flatten() for part in parts])

    towards = -gradient(*fitted.failures)
    for row in (0, 40):
        own = gradient(case.inputs[row : row + 1], case.labels[row : row + 1])
        assert product[row] == pytest.approx(float(own @ towards), rel=1e-3, abs=1e-4)


# -- the runner -------------------------------------------------------------------------------


def test_the_runner_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    calls = []

    def run(setting, seed):
        calls.append(seed)
        return {"value": 0.123456, "list": [(1, 2.0)], "none": None}

    monkeypatch.setattr(evaluate_scores, "PROTOCOLS", {"toy": {"only": run}})
    results = tmp_path / "results" / "toy.jsonl"
    for seeds in ("1", "2"):
        command = ["evaluate_scores.py", "--seeds", seeds, "--datasets", "digits"]
        monkeypatch.setattr(sys, "argv", [*command, "--results", str(results)])
        evaluate_scores.main()
    assert calls == [0, 1]
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert lines[0]["found"] == {"value": 0.1235, "list": [[1, 2.0]], "none": None}


def test_tables_and_figures_of_every_protocol(found, tmp_path):
    lines = []
    for protocol, each in found.items():
        variant = "10% flipped, plain" if protocol == "mislabels" else "any"
        line = {"protocol": protocol, "variant": variant, "dataset": "digits"}
        as_read = json.loads(json.dumps(evaluate_scores.rounded(each)))
        lines += [{**line, "seed": seed, "found": as_read} for seed in (0, 1)]
    text = summary.tables(lines)
    for name in ("Mislabels", "Removal", "Steps, mixes", "Repair", "Ways to remove", "Libraries"):
        assert name in text
    assert "nan" not in text
    paths = figures.draw(lines, tmp_path)
    drawn = {f"evaluate_{name}.png" for name in found if name != "libraries"}
    assert {path.name for path in paths} == drawn


def test_over_seeds_is_mean_and_t_interval():
    found = {0: 1.0, 1: 2.0, 2: 3.0, 3: None}
    # t(0.975, 2) = 4.3027, standard error = 1 / sqrt(3)
    assert summary.over_seeds(found, lambda each: each, 3) == "2.000 ± 2.484 (3 of 4)"
    assert summary.over_seeds({0: 1.0}, lambda each: each, 1) == "1.0"
    assert summary.over_seeds({0: None}, lambda each: each, 1) == "–"
