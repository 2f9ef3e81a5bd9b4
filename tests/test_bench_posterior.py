"""The benchmark of last-layer posteriors: its four ways score alike. Nothing is timed here."""

import importlib.util
import sys
import time
from pathlib import Path

import pytest
import torch

from mixval.bench.case import Case
from mixval.engine import start_engine
from mixval.recipe import Choice, EngineSettings

FILE = Path(__file__).parent.parent / "experiments" / "bench_posterior.py"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_posterior", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_one_pass_scores_as_two_do_and_every_way_runs(bench, monkeypatch):
    engine = start_engine(EngineSettings(device="cpu"))
    case = Case(Choice(name="conv_net", width=4), 8, engine, samples=300)
    found = []
    plain = bench.timed

    def kept(clock, work):
        found.append(work().clone())
        return plain(clock, work)

    monkeypatch.setattr(bench, "timed", kept)
    ways = bench.candidates(case, 5, time.process_time)
    assert all(steps(1) >= 0 for steps in ways.values())
    scores = dict(zip(ways, found, strict=True))
    torch.testing.assert_close(scores[bench.DRAWS], scores[bench.APART], atol=1e-5, rtol=1e-4)
    assert scores[bench.DRAWS].abs().max() > 1e-3  # the failures move the posterior
    assert scores[bench.NETWORKS].abs().max() == 0  # the same network on both sides
    assert {
        name for quotient, _ in bench.ASKED.values() for part in quotient for name in part
    } == set(ways)
