"""Posteriors of a run: fitted once, reused, refused where they do not belong, scored."""

import json

import numpy as np
import pytest
import torch

from mixval.errors import UserError
from mixval.pipeline import CellRun
from mixval.score_store import read_scores
from mixval.stages.cell import Cell
from mixval.store import Store

FITS = {
    "ewc": {"name": "ewc", "steps": 5},
    "laplace": {"name": "laplace", "draws": 4},
    "deep": {"name": "deep_ensemble", "members": 2},
}


@pytest.fixture
def cells(tiny_recipe, engine, tmp_path):
    def make(changes=None):
        recipe = tiny_recipe({"posteriors": FITS, **(changes or {})})
        return CellRun(Cell(recipe, "main", 0, engine), Store(tmp_path))

    return make


def read(cells, name):
    return read_scores(cells.store.place("main", 0, "scores", name))


def test_every_pair_is_scored_on_the_same_mixes(cells):
    run = cells()
    run.upto("score", [])
    tables = {name: read(run, name) for name in ("failures", *FITS)}
    for table in tables.values():
        assert np.array_equal(table.i, tables["failures"].i)
        assert np.array_equal(table.lam, tables["failures"].lam)
    base = tables["failures"].base
    np.testing.assert_allclose(tables["ewc"].base, base, rtol=1e-6)  # the same network
    assert np.isnan(tables["ewc"].std_error).all()
    for name in ("laplace", "deep"):
        assert (tables[name].std_error > 0).all()
        assert ((tables[name].p_negative >= 0) & (tables[name].p_negative <= 1)).all()


def test_what_is_fitted_is_reused_bit_by_bit(cells):
    first = cells()
    pairs = [first.posteriors(name) for name in FITS]
    again = cells()
    inputs = torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    for pair, name in zip(pairs, FITS, strict=True):
        other = again.posteriors(name)
        assert pair.updated_fingerprint == other.updated_fingerprint != other.base_fingerprint
        assert torch.equal(pair.base(inputs), other.base(inputs))
        assert torch.equal(pair.updated(inputs), other.updated(inputs))
    assert again.cell.reused["posteriors"] == len(FITS)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"failures.holdout": 0.5}, "failures"),
        ({"base.alpha": 0}, "base"),
        ({"posteriors.ewc.ridge": 3.0}, "posteriors/ewc"),
    ],
)
def test_draws_of_other_failures_another_base_or_other_settings_are_refused(cells, change, where):
    cells().posteriors("ewc")
    with pytest.raises(UserError, match=f"{where}: was made with another settings"):
        cells(change).posteriors("ewc")


def test_members_are_pairs_that_differ_by_the_failures_only(cells):
    run = cells()
    run.posteriors("deep")
    places = {p.name for p in run.store.place("main", 0, "posteriors", "deep").iterdir()}
    assert places >= {"train-0", "train-1", "train+failures-0", "train+failures-1"}
    pair = run.posteriors("deep")
    inputs = torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert not torch.allclose(*pair.base(inputs))  # other initial weights


def test_without_failures_the_line_says_so(cells):
    with pytest.raises(UserError, match=r"posteriors\.ewc: needs failures"):
        cells({"failures.holdout": 0.999}).posteriors("ewc")


def test_failures_of_test_mark_the_scores_as_leaking(cells):
    run = cells({"failures.split": "test"})
    assert run.posteriors("ewc").leaks
    run.upto("score", [])
    assert read(run, "ewc").provenance["leaks test labels"] == "yes"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"posteriors": {"failures": "ewc"}}, "named otherwise than teachers"),
        ({"posteriors": {"a b": "ewc"}}, "letters, digits"),
        ({"posteriors": {"x": "laplase"}}, "did you mean 'laplace'"),
        ({"posteriors": {"x": {"name": "ewc", "rigde": 1}}}, "ridge"),
        ({"posteriors": {"x": {"name": "laplace", "draws": 0}}}, "draws"),
        ({"posteriors": {"x": {"name": "ewc", "ridge": -1}}}, "ridge"),
    ],
)
def test_a_wrong_section_is_one_line(tiny_recipe, changes, said):
    with pytest.raises(UserError, match=said) as caught:
        tiny_recipe(changes)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_the_verb_fits_and_says_where(mixval, tiny_description, tmp_path):
    (tmp_path / "tiny.json").write_text(json.dumps(tiny_description({"posteriors": FITS})))
    (tmp_path / "tiny.yaml").write_text((tmp_path / "tiny.json").read_text())
    done = mixval("posteriors", "tiny.yaml")
    assert done.returncode == 0, done.stderr
    for name in FITS:
        assert f"posteriors/{name}: draws" in done.stdout
    again = mixval("score", "tiny.yaml")
    assert f"{len(FITS)} posteriors" in again.stdout and "scores/laplace" in again.stdout
    top = mixval("top", "runs/tiny", "--teacher", "laplace")
    assert top.returncode == 0, top.stderr
