"""The study of r against r_hat: a tiny run, and its pieces against what they stand for."""

import importlib.util
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mixval.closed_form import LinearRegression

FILE = Path(__file__).parent.parent / "experiments" / "exact_and_first_order.py"


@pytest.fixture(scope="module")
def study():
    spec = importlib.util.spec_from_file_location("exact_and_first_order", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def network(study):
    return study.trained(0, epochs=5)


def test_the_estimates_of_gaussian_losses_are_the_cumulants(study):
    # log E[exp H] of a Gaussian H is mean + variance / 2: the second order is all there is.
    noise = torch.from_numpy(np.random.default_rng(0).standard_normal(400_000))
    got = study.estimates(2 + 0.5 * noise, 1 + 0.8 * noise)
    assert got["r_hat"] == pytest.approx(1, abs=0.01)
    assert got["second"] == pytest.approx(1 + (0.25 - 0.64) / 2, abs=0.01)
    assert got["monte_carlo"] == pytest.approx(1 + (0.25 - 0.64) / 2, abs=0.01)
    assert got["spread"] == pytest.approx(0.8, abs=0.01)
    assert got["effective"] == pytest.approx(math.exp(-0.64), abs=0.01)  # 1 / (1 + cv^2)


def test_the_first_order_is_the_slope_of_r_in_the_weight_of_the_set(study):
    # sqrt(eps) (x, y) is the set weighed by eps, but for the constant, which cancels in r.
    rng = np.random.default_rng(0)
    inputs, outputs = rng.normal(size=(30, 3)), rng.normal(size=30)
    both = (
        LinearRegression.given(inputs, outputs),
        LinearRegression.given(inputs[:20], outputs[:20]),
    )
    noise, eps = rng.normal(size=(400_000, 3)), 1e-5
    found = study.linear_set(both, inputs[:4], outputs[:4], noise)
    weighed = math.sqrt(eps) * inputs[:4], math.sqrt(eps) * outputs[:4]
    slope = (both[0].log_mean_exp(*weighed) - both[1].log_mean_exp(*weighed)) / eps
    assert found.r_hat == pytest.approx(slope, abs=0.01)
    assert found.monte_carlo == pytest.approx(found.r, abs=0.02)
    assert abs(found.second - found.r) < abs(found.r_hat - found.r)


def test_the_sets_of_a_regression_become_infinite_as_they_grow(study):
    sets = study.linear_sets(0, sets=2, draws=50)
    assert all(math.isfinite(f.r) for size in (1, 2, 5, 10) for f in sets[size])
    assert all(math.isnan(f.r) and f.bend >= 1 for f in sets[100])


def test_failures_are_mistakes_on_samples_that_were_held_out(study, network):
    logits = torch.nn.functional.pad(network.failures.double(), (0, 1), value=1.0) @ network.mean.T
    assert 0 < len(network.labels) < 200
    assert (logits.argmax(1) != network.labels).all()


def test_the_losses_of_the_mean_alone_are_those_of_the_network(study, network):
    rows = network.rows["mixes"]
    features = torch.cat([rows.features.double(), torch.ones(300, 1)], dim=1)
    expected = torch.nn.functional.cross_entropy(
        features @ network.mean.T, rows.targets, reduction="none"
    )
    torch.testing.assert_close(study.losses_of(network.mean[None], rows), expected[None])


@pytest.mark.parametrize("kind", ["samples", "mixes"])
def test_a_narrow_prior_makes_all_estimates_one(study, network, kind):
    # At a large delta H is all but constant: r, its draws and both orders agree.
    sets = study.digit_sets(network, kind, 1000.0, seed=0, sets=1, draws=400)
    for size in (1, 5, 20):
        (found,) = sets[size]
        tolerance = 0.02 * size**0.5
        for value in (found.monte_carlo, found.r_hat, found.second):
            assert value == pytest.approx(found.r, abs=tolerance)
        assert found.effective > 0.7
        assert size <= 5 or found.again == pytest.approx(found.r, abs=0.01)


@pytest.mark.slow
def test_the_whole_study_ends_with_a_figure(study, monkeypatch, tmp_path, capsys):
    words = ["study", "--seeds", "1", "--sets", "2", "--draws", "50"]
    monkeypatch.setattr(sys, "argv", [*words, "--out", str(tmp_path / "figure.png")])
    study.main()
    with Image.open(tmp_path / "figure.png") as image:
        assert image.width > 800
    said = capsys.readouterr().out
    assert said.count("|r̂−r|") == 5
    assert "infinite for 2 of 2" in said
