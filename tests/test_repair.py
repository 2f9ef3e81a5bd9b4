"""Repair: causes against retraining, the bookkeeping of samples, reuse, and what is refused."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from mixval.errors import UserError
from mixval.files import sealed_facts
from mixval.fisher import diagonal_fisher, precision
from mixval.job import run_job
from mixval.pipeline import CellRun
from mixval.repair_table import repair_table
from mixval.stages import repair as stage
from mixval.stages.causes import Patient, choose_causes, scores_of
from mixval.stages.cell import Cell
from mixval.store import Store
from mixval.updates import newton_deletion

SELECTORS = ["ewc", "linear", "loss", "natural_gradient", "random"]
CHANGES = {
    "failures.holdout": 0.5,
    "data.label_noise": 0.2,
    "base.alpha": 0,
    "base.clean": "full",
    "training.epochs": 20,
    "repair.selectors": SELECTORS,
    "repair.causes": 8,
    "repair.epochs": 2,
}


@pytest.fixture(scope="module")
def finished(tiny_recipe, tmp_path_factory):
    """Return the directory of a finished repair; copy it before changing it."""
    folder = tmp_path_factory.mktemp("repair") / "run"
    run_job(tiny_recipe(CHANGES), folder, stage="repair")
    return folder


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


@pytest.fixture
def patient(finished, tiny_recipe, engine):
    cell = Cell(tiny_recipe(CHANGES), "main", 0, engine)
    cells = CellRun(cell, Store(finished))
    return Patient(cell, cells.base(), cells.failures())


def facts_of(folder: Path, selector: str) -> dict:
    sealed = sealed_facts(folder / "main" / "seed-0" / "repair" / selector)
    assert sealed is not None
    return sealed["facts"]


def causes_of(folder: Path, selector: str) -> dict:
    path = folder / "main" / "seed-0" / "repair" / selector / "causes.parquet"
    return pq.read_table(path).to_pydict()


# -- which samples -------------------------------------------------------------------------------


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=20), st.integers(1, 25))
def test_causes_are_the_best_set_of_positive_scores(values, limit):
    scores = np.array(values, dtype=float)
    ids = 100 + np.arange(len(scores))
    causes = choose_causes(ids, scores, limit)
    assert len(causes.ids) == len(set(causes.ids.tolist())) <= limit
    assert (causes.scores > 0).all() and (np.diff(causes.scores) <= 0).all()
    assert np.array_equal(scores[causes.ids - 100], causes.scores)
    # Additive, so the best set of at most that size is what a greedy loop over values takes.
    best = sum(sorted((v for v in values if v > 0), reverse=True)[:limit])
    assert causes.scores.sum() == best


def test_scores_are_losses_after_minus_losses_before(patient):
    # The update and both losses by hand, from plain networks and pixels.
    from mixval.updates import ewc

    splits, network = patient.cell.splits, patient.model.network
    inputs, query = (
        (part.images.float() / 255 - splits.mean) / splits.std
        for part in (splits.train, splits.val_f)
    )
    chosen = np.isin(splits.val_f.ids.numpy(), patient.failures.query)
    fisher = diagonal_fisher(network, [(inputs, splits.train.labels)])
    held = precision(network, fisher, num_samples=60, ridge=30.0)
    updated = ewc(network, held, query[chosen], splits.val_f.labels[chosen])
    with torch.no_grad():
        after, before = (
            F.cross_entropy(net(inputs), splits.train.labels, reduction="none")
            for net in (updated, network)
        )
    expected = (after - before).numpy()
    np.testing.assert_allclose(scores_of(patient, "ewc"), expected, atol=1e-4)
    np.testing.assert_allclose(scores_of(patient, "loss"), before, atol=1e-5)
    assert (expected > 0).any() and (expected < 0).any()


def test_the_step_and_its_first_order_agree_where_the_step_is_small(patient):
    recipe = patient.cell.recipe
    held_fast = recipe.repair.model_copy(update={"ridge": 1e6})
    recipe = recipe.model_copy(update={"repair": held_fast})
    firm = replace(patient, cell=replace(patient.cell, recipe=recipe))
    linear, *others = (scores_of(firm, name) for name in ("linear", "natural_gradient", "ewc"))
    for other in others:
        # What float32 losses can show of a change this small.
        np.testing.assert_allclose(other, linear, atol=0.02 * np.abs(linear).max())


@pytest.mark.parametrize("selector", SELECTORS)
def test_the_causes_on_record_are_few_positive_and_of_train(finished, patient, selector):
    causes, facts = causes_of(finished, selector), facts_of(finished, selector)
    splits = patient.cell.splits
    assert 0 < len(causes["id"]) == facts["causes"] <= 8
    assert min(causes["score"]) > 0
    assert set(causes["id"]) <= set(splits.train.ids.tolist())
    flipped = set(splits.flipped.tolist())  # nothing else was damaged here
    assert causes["corrupted"] == [key in flipped for key in causes["id"]]
    assert facts["causes corrupted"] == sum(causes["corrupted"])
    assert facts["corrupted"] == len(flipped) == 12
    scores = dict(
        zip(splits.train.ids.tolist(), scores_of(patient, selector).tolist(), strict=True)
    )
    left_out = [value for key, value in scores.items() if key not in causes["id"]]
    assert max(left_out) <= min(causes["score"]) + 1e-6


# -- what is measured ----------------------------------------------------------------------------


def test_query_holdout_and_right_before_divide_the_split(finished, patient):
    groups = stage.divided(patient.cell, patient.failures)
    together = np.concatenate(list(groups.values()))
    assert len(together) == len(set(together.tolist())) == 40
    assert set(together.tolist()) == set(patient.cell.splits.val_f.ids.tolist())
    assert all(len(ids) for ids in groups.values())
    sizes = facts_of(finished, "ewc")["sizes"]
    assert sizes == {name: len(ids) for name, ids in groups.items()}


def test_before_a_repair_all_failures_are_wrong_and_all_others_right(finished):
    for selector in SELECTORS:
        before = facts_of(finished, selector)["removals"]["none"]
        assert (before["query"], before["holdout"], before["right before"]) == (0, 0, 1)


@pytest.mark.parametrize("selector", ["ewc", "random"])
def test_retrained_is_what_learns_from_the_other_samples_alone(finished, patient, selector):
    # The accuracies again, from a training that never heard of causes.
    from mixval.training import train
    from mixval.training_job import Job, Watch

    cell = patient.cell
    splits, recipe = cell.splits, cell.recipe
    gone = np.isin(splits.train.ids.numpy(), causes_of(finished, selector)["id"])
    part = splits.train.take(np.flatnonzero(~gone))
    job = Job(recipe.base, recipe.training, recipe.model, 20, part, splits, 0, "base")
    network = train(job, cell.engine, None, Watch()).model.network.eval()
    inputs = (splits.test.images.float() / 255 - splits.mean) / splits.std
    hits = network(inputs).argmax(1) == splits.test.labels
    measured = facts_of(finished, selector)["removals"]["retrain"]["test"]
    assert measured == pytest.approx(float(hits.double().mean()))


def test_fine_tuning_never_sees_the_causes(patient, monkeypatch):
    seen = []

    def watch(model, batches, *, lr, epochs):
        seen.extend(inputs for epoch in range(epochs) for inputs, _ in batches(epoch))
        return model

    monkeypatch.setattr(stage, "fine_tune", watch)
    ids = patient.cell.splits.train.ids.numpy()
    causes = choose_causes(ids, np.arange(60.0), 8)
    stage._removed(patient, "fine_tune", causes, None)
    every = patient.cell.rows(patient.cell.splits.train).inputs(torch.arange(60))
    places = (torch.cat(seen)[:, None] == every[None]).flatten(2).all(2).sum(0)
    assert places.tolist() == [2] * 52 + [0] * 8  # each of the others once an epoch


def test_a_deletion_that_diverges_is_on_record_and_not_the_end(
    tiny_recipe, tmp_path, caplog, capsys
):
    changes = {"repair.selectors": ["loss"], "repair.removals": ["ewc_deletion"]}
    changes["repair.deletion_ridge"] = 1e-6
    run_job(tiny_recipe({**CHANGES, **changes}), tmp_path / "run", stage="repair")
    assert facts_of(tmp_path / "run", "loss")["removals"]["ewc_deletion"] is None
    assert "repair.deletion_ridge: the update diverged" in caplog.text
    assert "diverged in 1 of 1 seeds" in capsys.readouterr().out


# -- a deletion against training without -----------------------------------------------------------


def fitted(inputs, labels, penalty: float = 1.0) -> nn.Linear:
    """Return the softmax regression that maximises log p - penalty/2 |w|^2, to the end."""
    network = nn.Linear(inputs.shape[1], 3).double()
    nn.init.zeros_(network.weight), nn.init.zeros_(network.bias)
    optimiser = torch.optim.LBFGS(
        network.parameters(), max_iter=500, tolerance_grad=1e-10, line_search_fn="strong_wolfe"
    )

    def loss():
        optimiser.zero_grad()
        size = sum(p.square().sum() for p in network.parameters())
        value = F.cross_entropy(network(inputs), labels, reduction="sum") + penalty / 2 * size
        value.backward()
        return value

    optimiser.step(loss)
    return network


@pytest.mark.parametrize("seed", range(5))
def test_newton_deletion_goes_where_retraining_without_the_causes_goes(seed):
    # Convex, so that retraining has one answer. Some labels are wrong; those are removed.
    rng = np.random.default_rng(seed)
    truth = rng.integers(0, 3, 400)
    inputs = rng.standard_normal((400, 4))
    inputs[np.arange(400), truth] += 2.0
    inputs, truth = torch.from_numpy(inputs), torch.from_numpy(truth)
    labels, wrong = truth[:200].clone(), torch.arange(20)
    labels[wrong] = (labels[wrong] + 1) % 3
    base = fitted(inputs[:200], labels)
    again = fitted(inputs[20:200], labels[20:])
    fisher = diagonal_fisher(base, [(inputs[:200], labels)])
    held = precision(base, fisher, num_samples=200, ridge=1.0)
    deleted = newton_deletion(base, held, inputs[wrong], labels[wrong])

    def moved(network):
        pairs = zip(network.parameters(), base.parameters(), strict=True)
        return torch.cat([(now - then).flatten() for now, then in pairs]).detach()

    def loss(network):  # of samples that nobody trained on
        return float(F.cross_entropy(network(inputs[200:]), truth[200:]).detach())

    # A diagonal of the Fisher information stands for the whole Hessian, so not exactly there.
    # Of 15 numbers at random the cosine has a standard deviation of 0.26.
    assert float(F.cosine_similarity(moved(deleted), moved(again), dim=0)) > 0.5
    # Which of the two is better there is luck; both are better than with the causes.
    assert max(loss(again), loss(deleted)) < loss(base)


# -- reuse, and what is refused -------------------------------------------------------------------


def test_a_finished_repair_is_reused(run, tiny_recipe, snapshot, capsys):
    before = snapshot(run / "main")
    run_job(tiny_recipe(CHANGES), run, stage="repair")
    assert "5 repair" in capsys.readouterr().out
    assert snapshot(run / "main") == before


def test_a_selector_can_be_added_to_a_run(tiny_recipe, tmp_path, capsys):
    for selectors in (["random"], ["loss"]):
        changes = {"repair.selectors": selectors, "repair.removals": ["newton"]}
        run_job(
            tiny_recipe({**CHANGES, **changes, "repair.causes": 0.1}),
            tmp_path / "run",
            stage="repair",
        )
    shown = capsys.readouterr().out
    assert "random: 6 causes" in shown and "loss: 6 causes" in shown  # a tenth of 60


def test_other_settings_in_the_same_directory_are_refused(run, tiny_recipe):
    for key, value in (("ridge", 10.0), ("causes", 5), ("removals", ["newton"])):
        other = tiny_recipe({**CHANGES, f"repair.{key}": value})
        with pytest.raises(UserError, match=rf"differs in repair\.{key}"):
            run_job(other, run, stage="repair")


def test_the_estimate_counts_what_is_retrained(tiny_recipe, tmp_path, capsys):
    run_job(tiny_recipe(CHANGES), tmp_path / "run", stage="repair", dry_run=True)
    assert "estimated cost: 6 networks" in capsys.readouterr().out  # base, and one a selector


def test_failures_of_test_leak(tiny_recipe, tmp_path, capsys):
    changes = {**CHANGES, "failures.split": "test", "repair.selectors": ["random"]}
    run_job(tiny_recipe(changes), tmp_path / "run", stage="repair")
    assert facts_of(tmp_path / "run", "random")["leaks_test_labels"] is True
    assert "leaks test labels" in capsys.readouterr().out


BAD = [
    ({"repair.causes": 60}, "repair.causes: must be below data.train (60), got 60"),
    ({"repair.causes": 0}, "repair.causes"),
    ({"repair.ridge": 0}, "repair.ridge: "),
    ({"repair.deletion_ridge": -1}, "repair.deletion_ridge: "),
    ({"repair.selectors": []}, "repair.selectors: "),
    ({"repair.selectors": ["ewc", "ewc"]}, "repair.selectors: must be all different"),
    ({"repair.removals": ["burn"]}, "repair.removals"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_bad_settings_are_refused_in_one_line(tiny_recipe, changes, message):
    with pytest.raises(UserError) as caught:
        tiny_recipe(changes)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_more_causes_than_samples_are_refused_where_the_size_is_known_late(patient):
    from mixval.stages.causes import num_causes

    settings = patient.cell.recipe.repair.model_copy(update={"causes": 60})
    recipe = patient.cell.recipe.model_copy(update={"repair": settings})
    with pytest.raises(UserError, match=r"repair\.causes: must be below the 60 train samples"):
        num_causes(replace(patient.cell, recipe=recipe))


def test_without_failures_there_is_nothing_to_repair(patient, tmp_path):
    empty = replace(patient.failures, query=np.zeros(0, np.int64))
    with pytest.raises(UserError, match=r"seed 0 has no query failure on val_f.*data\.val_f"):
        stage.repair(patient.cell, patient.base, empty, Store(tmp_path))
    assert not list(tmp_path.iterdir())


def test_the_table_has_means_and_intervals_over_seeds(tiny_recipe, tmp_path):
    changes = {**CHANGES, "seeds": [0, 1], "failures.holdout": 0.0}
    changes |= {"repair.selectors": ["random"], "repair.removals": ["newton"]}
    run_job(tiny_recipe(changes), tmp_path / "run", stage="repair")
    store = Store(tmp_path / "run")
    seeds = [facts["removals"] for _, facts in store.finished("*/seed-*/repair/*")]
    _, head, none, newton, causes = repair_table(store).splitlines()
    assert head.split()[:4] == ["causes", "by", "removed", "by"]
    assert none.split()[:3] == ["-", "none", "0.0"]
    one, two = (100 * removals["newton"]["test"] for removals in seeds)
    half = 12.706 * abs(one - two) / 2  # t with one degree of freedom
    assert newton.endswith(f"{(one + two) / 2:.1f} ± {half:.1f}")
    assert newton.split()[5] == "-"  # no hold-out
    assert "8 causes of 60 train samples, precision" in causes
