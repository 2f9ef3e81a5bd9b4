"""Several processes: each row once, sums and orders as with one, and the same training."""

import json
import pickle
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mixval.processes import ALONE, Processes, start_processes
from mixval.score_store import read_scores

# -- one process --------------------------------------------------------------------------


@given(st.integers(0, 200), st.integers(1, 7))
def test_shares_cover_every_row_once_and_differ_by_at_most_one(count, world):
    # Catches a row that two processes train on, or none; and one that waits for the others.
    shares = [Processes(rank, world).share(count) for rank in range(world)]
    rows = np.arange(count)
    assert np.array_equal(np.concatenate([rows[share] for share in shares]), rows)
    sizes = [share.stop - share.start for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert all(before.stop == after.start for before, after in pairwise(shares))


def test_alone_every_method_gives_back_what_it_is_given(monkeypatch):
    # Catches one process that copies, divides or waits as if it were several.
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert start_processes("cpu") is ALONE and ALONE.is_main
    rows = torch.arange(3.0)
    assert ALONE.total(rows) is rows and ALONE.gather(rows) is rows
    assert ALONE.from_main(lambda: rows) is rows
    assert ALONE.share(5) == slice(0, 5)
    network = torch.nn.BatchNorm1d(2)
    network(torch.rand(4, 2)).sum().backward()
    before = [t.clone() for t in (*network.buffers(), network.bias.grad)]
    ALONE.wait()
    ALONE.sum_gradients(network)
    ALONE.average_buffers(network)
    assert all(map(torch.equal, before, (*network.buffers(), network.bias.grad)))


# -- two, which torchrun starts -----------------------------------------------------------


def under_torchrun(folder: Path, code: str, world: int = 2) -> list:
    """Run the code with `world` processes; return what each of them put in `found`."""
    script = folder / "script.py"
    ending = "\nwith open(f'found-{engine.processes.rank}', 'wb') as f: pickle.dump(found, f)\n"
    script.write_text(PREAMBLE + code + ending + CLOSE)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world)]
    command = [sys.executable, *launcher, str(script)]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=folder, **pipes) as process:
        try:
            errors = process.communicate(timeout=300)[1]
        except BaseException:
            process.terminate()  # it ends those who wait for each other; a kill would leave them
            raise
    assert process.returncode == 0, errors[-3000:]
    return [pickle.loads((folder / f"found-{rank}").read_bytes()) for rank in range(world)]


PREAMBLE = """
import os
import pickle
from pathlib import Path
import torch
from mixval.engine import start_engine
from mixval.recipe import EngineSettings

engine = start_engine(EngineSettings(device="cpu"))
processes, found = engine.processes, {}
"""
# Together, and then at once: gloo's threads abort a process that goes on to Python's own end.
CLOSE = """
if processes.world > 1:
    processes.wait()
    torch.distributed.destroy_process_group()
os._exit(0)
"""

EXCHANGES = """
from mixval.errors import UserError

rank = processes.rank
found["who"] = (rank, processes.world, processes.is_main, engine.described["processes"])
found["total"] = processes.total(torch.tensor([1.0, 10.0]) * (rank + 1)).tolist()
found["whole total"] = processes.total(torch.tensor(7 + rank)).item()
mine = torch.tensor([1.0, 2.0])
processes.total(mine)
found["untouched"] = mine.tolist()
rows = torch.arange(5 * 2).view(5, 2)
found["gathered"] = {}
for name, every in {
    "uneven": rows,
    "even": rows[:4],
    "a single row": rows[:1],
    "halves": rows.half(),
    "whole numbers": rows[:, 1],
}.items():
    gathered = processes.gather(every[processes.share(len(every))])
    assert gathered.dtype == every.dtype, name
    found["gathered"][name] = torch.equal(gathered, every)
with torch.inference_mode():
    found["inferred"] = processes.gather(rows[processes.share(5)].float() * 2).tolist()
made = []
found["from main"] = processes.from_main(lambda: made.append(1) or {"rank": rank, "t": rows})
found["made"] = len(made)
for error in (UserError("data: is wrong"), FloatingPointError("not finite")):
    def fail():
        assert rank == 0, "only the main process makes it"
        raise error
    try:
        processes.from_main(fail)
    except type(error) as caught:
        found[type(error).__name__] = str(caught)
processes.wait()
network = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
frozen = torch.nn.Linear(2, 2)  # has no gradients
network.add_module("frozen", frozen)
network[0].weight.grad = torch.full((2, 2), 1.0 + rank)
network[0].bias.grad = torch.tensor([1.0, -1.0]) * (rank + 1)
network[1].running_mean.fill_(rank)
network[1].num_batches_tracked.fill_(5)
processes.sum_gradients(network)
processes.average_buffers(network)
found["gradients"] = (network[0].weight.grad.tolist(), network[0].bias.grad.tolist())
found["no gradients"] = frozen.weight.grad is None
found["buffers"] = (network[1].running_mean.tolist(), int(network[1].num_batches_tracked))
"""


@pytest.mark.slow
def test_what_two_processes_exchange(tmp_path):
    # Catches rows in the order of arrival, padding that is left in, gradients that are averaged
    # though shares differ, an error that leaves the others waiting for ever, and a count of
    # batches that is halved.
    both = under_torchrun(tmp_path, EXCHANGES)
    for rank, found in enumerate(both):
        assert found["who"] == (rank, 2, rank == 0, 2)
        assert found["total"] == [3.0, 30.0] and found["whole total"] == 15
        assert found["untouched"] == [1.0, 2.0]
        assert all(found["gathered"].values()), found["gathered"]
        assert found["inferred"] == (2.0 * torch.arange(10.0).view(5, 2)).tolist()
        assert found["from main"]["rank"] == 0 and found["made"] == (rank == 0)
        assert found["UserError"] == "data: is wrong"
        assert found["FloatingPointError"] == "not finite"
        assert found["gradients"] == ([[3.0, 3.0], [3.0, 3.0]], [3.0, -3.0])
        assert found["no gradients"]
        assert found["buffers"] == ([0.5, 0.5], 5)


# -- the same training --------------------------------------------------------------------

TRAININGS = {
    "plain": ({}, {}),
    "micro-batches": ({"training.accumulate": 2}, {}),
    "odd steps": ({"training.batch_size": 17}, {"policy": "negative"}),
    "negative": ({}, {"policy": "negative"}),
    "top k": ({"training.batch_size": 15}, {"policy": "top_k", "k": 5}),
    "negative, micro-batches": (
        {"training.accumulate": 2, "training.batch_size": 17},
        {"policy": "negative"},
    ),
    "top k, micro-batches": ({"training.accumulate": 2}, {"policy": "top_k", "k": 7}),
    "what is kept": ({"arms.all.normalise": "kept"}, {"policy": "negative"}),
    "clean filtered": ({}, {"policy": "low_fraction", "filters_clean": True}),
    "relabel": ({}, {"policy": "negative", "relabels": True, "excluded": "relabel"}),
    "refill": ({}, {"policy": "negative", "refill_draws": 3, "excluded": "refill"}),
    "augmented, balanced": (
        {
            "training.augmentation": {"name": "crop_flip", "pad": 1},
            "training.class_weights": "balanced",
        },
        {"policy": "negative"},
    ),
    "stopped": ({"training.batch_size": 17}, {"policy": "negative"}),
}

TRAIN = """
import sys
sys.path.insert(0, {tests!r})
from dataclasses import replace
from functools import partial
from conftest import TINY, lay_over
from mixval import filter_policies, make_recipe
from mixval.checkpoints import Checkpoints
from mixval.datasets import digits
from mixval.errors import Interrupted
from mixval.guidance import Guidance
from mixval.losses import cross_entropy
from mixval.posteriors import point
from mixval.rhat import Scorer
from mixval.splits import load_splits
from mixval.training import Job, Watch, train
from mixval.types import Part

splits = load_splits(digits(), seed=0, train=60, val_f=40, val_dev=41, label_noise=0.0)


def job_of(changes, **fields):
    recipe = make_recipe(lay_over(TINY, changes))
    arm = recipe.arms["all"]
    job = Job(arm, recipe.training, recipe.model, recipe.epochs_of(arm), splits.train, splits, 0,
              "student")
    return replace(job, **fields)


# Every process has its own teacher, trained without the others.
from mixval.engine import Engine
alone = Engine(engine.device, 1)
more = Part.join([splits.train, splits.val_f])
sure = {{"arms.all.alpha": 0, "arms.all.epochs": 40, "training.lr": 0.2}}
teacher = train(job_of(sure, part=more, stream="teacher"), alone, None, Watch()).model
for name, (changes, options) in {trainings!r}.items():
    options = dict(options)
    job = replace(job_of(changes), folder=Path(f"record {{name}}"))
    if options:
        policy = getattr(filter_policies, options.pop("policy"))
        policy = partial(policy, k=options.pop("k")) if "k" in options else policy
        excluded = options.pop("excluded", "drop")
        guidance = Guidance(policy, Scorer(point([teacher]), cross_entropy), 1, **options)
        job = replace(job, guidance=guidance, excluded=excluded)
    checkpoints = Checkpoints(Path("checkpoints"), "made from this") if name == "stopped" else None
    if checkpoints is not None:
        asked, last = iter(range(100)), processes.rank == processes.world - 1
        try:  # in the middle of the third epoch, by one process alone
            train(job, engine, checkpoints, Watch(lambda: last and next(asked) == 9))
        except Interrupted:
            found["was stopped"] = True
    trained = train(job, engine, checkpoints, Watch())
    record = trained.record
    found[name] = {{
        "weights": {{k: v.numpy() for k, v in trained.model.network.state_dict().items()}},
        "metrics": trained.metrics,
        "record": record and (record.mixed.numpy().copy(), record.clean.numpy().copy()),
        "cost": (trained.cost.steps, trained.cost.forwards),
    }}
"""


@pytest.fixture(scope="module")
def trainings(tmp_path_factory):
    """Return what each training gives by the number of processes, one entry for each of them."""
    code = TRAIN.format(tests=str(Path(__file__).parent), trainings=TRAININGS)
    return {
        world: under_torchrun(tmp_path_factory.mktemp(f"world-{world}"), code, world)
        for world in (1, 2, 3)
    }


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("case", TRAININGS)
def test_several_processes_train_as_one_does(trainings, case, world):
    # Catches a filter that sees a share instead of the global batch, a normaliser of one process,
    # gradients averaged over uneven shares, and epochs whose totals are of one process only.
    expected = trainings[1][0][case]
    for rank, found in enumerate(every[case] for every in trainings[world]):
        for name, weights in expected["weights"].items():
            np.testing.assert_allclose(found["weights"][name], weights, rtol=1e-4, atol=1e-6)
            same = trainings[world][0][case]["weights"][name]
            assert found["weights"][name].tobytes() == same.tobytes(), rank
        assert found["cost"] == expected["cost"]
        for mine, theirs in zip(found["metrics"], expected["metrics"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5)
        if expected["record"] is None:
            assert found["record"] is None
            continue
        for mine, theirs in zip(found["record"], expected["record"], strict=True):
            np.testing.assert_array_equal(mine, theirs)
    if expected["record"] is not None:
        kept = np.nanmean(expected["record"][0].astype(np.float64))
        assert 0 < kept < 1  # without a filter that filters this says nothing


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_training_that_one_process_stops_goes_on_bit_for_bit(trainings, world):
    # Catches the others waiting for ever, and costs or totals that are counted once per process.
    for found in trainings[world]:
        assert found["was stopped"]
        one, other = found["stopped"], found["odd steps"]
        assert one["metrics"] == other["metrics"] and one["cost"] == other["cost"]
        for name, weights in other["weights"].items():
            assert one["weights"][name].tobytes() == weights.tobytes()
        for mine, theirs in zip(one["record"], other["record"], strict=True):
            assert mine.tobytes() == theirs.tobytes()


# -- the end ------------------------------------------------------------------------------


def test_one_of_several_ends_at_once_with_all_said_and_done():
    # A thread that is not a daemon would hold up Python's own end for ever.
    program = """
import atexit, sys, threading
from mixval import processes
processes.joined = lambda: "together" in sys.argv
if processes.joined():
    threading.Thread(target=threading.Event().wait).start()
atexit.register(print, "handler", end="")
print("work", end=" ")
processes.leave(3)
"""
    for words in (["alone"], ["together"]):
        done = subprocess.run(
            [sys.executable, "-c", program, *words],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert (done.returncode, done.stdout, done.stderr) == (3, "work handler", "")


# -- the whole command --------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_gives_the_same_run_with_two_processes(
    mixval_script, tiny_description, tmp_path
):
    # Base, failures, teacher, bank, scores by two, students, evaluation and report.
    described = tiny_description({"scores.bank": True, "scores.rows": 97, "scores.epochs": [2]})
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(described))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]
    words = [mixval_script, "run", "tiny.yaml", "--out"]
    for name, command in {
        "one": [*words, "one"],
        "two": [*launcher, "--nproc_per_node", "2", *words, "two"],
    }.items():
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count(f"report: {name}/report.html") == 1
    one, two = (tmp_path / name / "main" / "seed-0" for name in ("one", "two"))
    assert len(list((two / "scores" / "failures").glob("part-*.parquet"))) == 2
    tables = [read_scores(folder / "scores" / "failures") for folder in (one, two)]
    for name in ("row", "i", "j", "lam"):
        assert np.array_equal(*(getattr(table, name) for table in tables))
    np.testing.assert_allclose(tables[0].r_hat, tables[1].r_hat, atol=1e-4)
    for arm in ("all", "erm", "guided", "yoked"):
        facts = [
            json.loads((folder / "results" / arm / "manifest.json").read_text())["facts"]["facts"]
            for folder in (one, two)
        ]
        assert facts[0]["nll"] == pytest.approx(facts[1]["nll"], abs=1e-4)
        for key in ("steps", "forwards"):
            assert facts[0]["cost"][key] == facts[1]["cost"][key]
