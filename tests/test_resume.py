"""A run that was stopped anywhere goes on to the same weights, bit for bit."""

import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import yaml

from mixval import filter_policies, make_recipe
from mixval.checkpoints import Checkpoints
from mixval.errors import Interrupted, UserError
from mixval.files import sealed_facts
from mixval.guidance import Guidance
from mixval.job import run_job
from mixval.pipeline import CellRun
from mixval.results import Results
from mixval.stages.cell import Cell
from mixval.store import Store
from mixval.training import Watch, train

POLLS = 12  # 4 epochs of 3 steps: the loop asks whether to stop after each


def stop_at(poll: int) -> Watch:
    """Return a watch that asks a training to stop the `poll`-th time it asks."""
    asked = iter(range(1, 10**9))
    return Watch(should_stop=lambda: next(asked) >= poll)


def record_folder(checkpoints):
    return checkpoints.folder.with_name(f"record of {checkpoints.folder.name}")


def resumable(job, engine, checkpoints, watch):
    """Train with the record where the next try finds it."""
    return train(replace(job, folder=record_folder(checkpoints)), engine, checkpoints, watch)


def facts_of(trained):
    """Return all that must be the same of two trainings, bit for bit."""
    record = trained.record
    return {
        "weights": {k: v.numpy().tobytes() for k, v in trained.model.network.state_dict().items()},
        "record": record and [record.mixed.numpy().tobytes(), record.clean.numpy().tobytes()],
        "metrics": trained.metrics,
        "steps": trained.cost.steps,
        "forwards": trained.cost.forwards,
    }


# -- one training, stopped after every step -----------------------------------------------

MODELS = {
    "dropout": {"model": {"name": "mlp", "hidden": [16], "dropout": 0.3}},
    "batch norm": {"model": {"name": "conv_net", "width": 4}},
}


@pytest.fixture
def jobs(make_job, scorer, splits, engine):
    """Return the job of each kind of network that a run trains, by name."""

    def guided(policy=filter_policies.negative, changes=None, excluded="drop", **options):
        guidance = Guidance(policy=policy, scorer=scorer, num_teachers=1, **options)
        return make_job(changes, guidance=guidance, excluded=excluded)

    def yoked():
        record = train(guided(), engine, None, Watch()).record
        policy = partial(filter_policies.yoked, of="guided", within_lam_deciles=True)
        return make_job(guidance=Guidance(policy=policy, replay=record))

    adam = {"training.optimizer": "adamw", "training.lr": 0.01, "training.warmup_epochs": 1}
    return {
        "base": lambda: make_job({"arms.all.clean": "none"}, stream="base"),
        "erm": lambda: make_job({"arms.all.alpha": 0}),
        "teacher of a fold": lambda: make_job(
            part=splits.train.take(np.arange(0, 60, 2)), stream="teacher/fold-0"
        ),
        "guided until it overtakes": lambda: guided(overtake=0.2, fade=1),
        "refill": lambda: guided(excluded="refill", refill_draws=3),
        "relabel, clean filtered": lambda: guided(
            filter_policies.low_fraction, excluded="relabel", relabels=True, filters_clean=True
        ),
        "yoked": yoked,
        "schedule, then no mixup": lambda: make_job(
            {"arms.all.alpha": "easy", "arms.all.mixup_until": 3}
        ),
        "adamw, warm-up": lambda: make_job(adam),
        "augmented": lambda: make_job(
            {"training.augmentation": {"name": "crop_flip", "pad": 1}, **MODELS["batch norm"]}
        ),
        "micro-batches": lambda: guided(changes={"training.accumulate": 2}),
        "dropout": lambda: guided(changes=MODELS["dropout"]),
        "batch norm": lambda: guided(changes=MODELS["batch norm"]),
        "top k": lambda: guided(partial(filter_policies.top_k, k=7)),
    }


KINDS = [
    "base",
    "erm",
    "teacher of a fold",
    "guided until it overtakes",
    "refill",
    "relabel, clean filtered",
    "yoked",
    "schedule, then no mixup",
    "adamw, warm-up",
    "augmented",
    "micro-batches",
    "dropout",
    "batch norm",
    "top k",
]


@pytest.mark.parametrize("kind", KINDS)
def test_stopped_after_any_step_it_ends_the_same(jobs, engine, tmp_path, kind):
    # Catches state that a checkpoint forgets: momentum, record, guidance that has stopped,
    # a half-finished epoch's totals, random numbers that depend on what was drawn before.
    assert set(jobs) == set(KINDS)
    job = jobs[kind]()
    whole = facts_of(train(job, engine, None, Watch()))
    steps = whole["steps"]
    assert steps == (8 if kind == "teacher of a fold" else POLLS)
    for poll in range(1, steps + 1):
        checkpoints = Checkpoints(tmp_path / str(poll), "made from this")
        with pytest.raises(Interrupted):
            resumable(job, engine, checkpoints, stop_at(poll))
        assert facts_of(resumable(job, engine, checkpoints, Watch())) == whole, f"after step {poll}"


@pytest.mark.parametrize("kind", ["guided until it overtakes", "dropout", "batch norm"])
def test_stopped_after_every_step_it_ends_the_same(jobs, engine, tmp_path, kind):
    # As above, with a resume from a resume from a resume.
    job = jobs[kind]()
    whole = facts_of(train(job, engine, None, Watch()))
    checkpoints = Checkpoints(tmp_path, "made from this")
    for _ in range(POLLS):
        with pytest.raises(Interrupted):
            resumable(job, engine, checkpoints, stop_at(1))
    assert facts_of(resumable(job, engine, checkpoints, Watch())) == whole


# -- damaged checkpoints ------------------------------------------------------------------


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGE = {"flip": flip, "cut": cut, "empty": lambda path: path.write_bytes(b""), "lose": os.unlink}


@pytest.fixture
def stopped(jobs, engine, tmp_path):
    """Return a training stopped after step 7, with the checkpoints of steps 6 and 7."""
    job = jobs["guided until it overtakes"]()
    checkpoints = Checkpoints(tmp_path, "made from this")
    with pytest.raises(Interrupted):
        resumable(job, engine, checkpoints, replace(stop_at(7), checkpoint_seconds=0.0))
    assert sorted(os.listdir(tmp_path)) == ["step-000000006", "step-000000007"]
    return job, checkpoints


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["weights.safetensors", "state.pt", "manifest.json"])
def test_a_damaged_checkpoint_is_noticed_and_the_one_before_it_serves(
    stopped, engine, name, damage, caplog
):
    # Catches a flipped bit in the weights, which neither safetensors nor torch would notice.
    job, checkpoints = stopped
    newest = checkpoints.folder / "step-000000007"
    DAMAGE[damage](newest / name)
    _, state = checkpoints.latest()
    assert (state["epoch"], state["step"]) == (2, 0)  # step 6, not 7
    if (name, damage) != ("manifest.json", "lose"):  # without a manifest it is just unfinished
        assert "step-000000007" in caplog.text and "is not used" in caplog.text
    resumed = facts_of(resumable(job, engine, checkpoints, Watch()))
    assert resumed == facts_of(train(job, engine, None, Watch()))


def test_with_no_whole_checkpoint_it_starts_again(stopped, engine):
    # Catches a crash, or a start from half-read weights.
    job, checkpoints = stopped
    for path in checkpoints.folder.glob("*/weights.safetensors"):
        flip(path)
    assert checkpoints.latest() is None
    resumed = facts_of(resumable(job, engine, checkpoints, Watch()))
    assert resumed == facts_of(train(job, engine, None, Watch()))


def test_a_damaged_checkpoint_does_not_keep_its_step_from_being_saved(stopped, engine):
    # Stopping where a damaged checkpoint lies must save, or "everything is saved" is untrue.
    job, checkpoints = stopped
    flip(checkpoints.folder / "step-000000007" / "weights.safetensors")
    with pytest.raises(Interrupted):
        resumable(job, engine, checkpoints, stop_at(1))
    _, state = checkpoints.latest()
    assert (state["epoch"], state["step"]) == (2, 1)


def test_damaged_checkpoints_do_not_push_out_a_whole_one(stopped, engine):
    # The last two by number may both be damaged; what was just saved must stay.
    job, checkpoints = stopped
    for path in checkpoints.folder.glob("*/weights.safetensors"):
        flip(path)
    with pytest.raises(Interrupted):
        resumable(job, engine, checkpoints, stop_at(2))
    assert checkpoints.latest() is not None


def test_a_checkpoint_that_was_being_written_is_not_used(stopped, engine):
    # Catches a half-written folder that counts as the newest.
    job, checkpoints = stopped
    shutil.copytree(
        checkpoints.folder / "step-000000006", checkpoints.folder / ".step-000000008.part"
    )
    cut(checkpoints.folder / ".step-000000008.part" / "state.pt")
    _, state = checkpoints.latest()
    assert (state["epoch"], state["step"]) == (2, 1)
    resumed = facts_of(resumable(job, engine, checkpoints, Watch()))
    assert resumed == facts_of(train(job, engine, None, Watch()))


def test_a_checkpoint_of_something_else_is_not_gone_on_with(stopped, caplog):
    # Catches a training that goes on from weights of other settings, data or teachers.
    _, checkpoints = stopped
    assert Checkpoints(checkpoints.folder, "made from that").latest() is None
    assert "was made from something else" in caplog.text
    assert checkpoints.latest() is not None


def test_a_checkpoint_is_read_without_running_what_is_in_it(tmp_path):
    # Catches torch.load of a pickle that someone put there.
    checkpoints = Checkpoints(tmp_path, "made from this")
    checkpoints.save(1, {"a": torch.zeros(1)}, {"bad": partial(os.system, "true")})
    with pytest.raises(Exception, match=r"(?i)weights.only"):
        checkpoints.latest()


# -- the stages of a cell -----------------------------------------------------------------

STAGES = {
    "teachers.failures.folds": 2,
    "arms.guided.guide_until": "overtake",
    "arms.guided.clean": "filtered",
    "arms.yoked.clean": "filtered",
    "arms.refill": {"teacher": "failures", "filter": "negative", "excluded": "refill"},
    "scores.epochs": [2],
}


def run_cell(recipe, engine, folder, watch=None):
    cell = Cell(recipe, "main", 0, engine, watch or Watch())
    CellRun(cell, Store(folder)).upto("run", list(recipe.arms))


def contents(folder):
    """Return all that a run computed: tensors, metrics, tables, facts; no seconds."""
    from mixval.checkpoints import load_weights

    found = {}
    for path in sorted(folder.rglob("*")):
        place = str(path.relative_to(folder))
        if path.suffix == ".safetensors":
            found[place] = {k: v.numpy().tobytes() for k, v in load_weights(path).items()}
        elif path.suffix in (".jsonl", ".parquet"):
            found[place] = path.read_bytes()
        elif path.name == "manifest.json" and "results" in place:
            found[place] = without_seconds(sealed_facts(path.parent)["facts"])
    return found


def without_seconds(value):
    if isinstance(value, dict):
        return {k: without_seconds(v) for k, v in value.items() if k != "seconds"}
    return value


def test_a_cell_stopped_after_every_step_of_every_stage_ends_the_same(
    tiny_recipe, engine, tmp_path
):
    # Catches a stage that loses or doubles work when it goes on, or that hands on something
    # else when it was loaded than when it was trained.
    recipe = tiny_recipe({**STAGES, "training.epochs": 2})
    run_cell(recipe, engine, tmp_path / "whole")
    whole = contents(tmp_path / "whole")
    stops = 0
    while True:
        try:
            run_cell(recipe, engine, tmp_path / "cut", stop_at(1))
        except Interrupted:
            stops += 1
            assert stops < 100
        else:
            break
    # base, all students: 6 steps each; the folds' teachers train on less than two batches more.
    assert stops >= 6 * (1 + len(recipe.arms)) + 2 * 4
    assert contents(tmp_path / "cut") == whole
    assert not list((tmp_path / "cut").rglob("checkpoints"))


def test_a_checkpoint_of_other_data_is_not_used(tiny_recipe, engine, tmp_path):
    # The file behind `path` may have been replaced since the run was stopped. Going on would
    # give weights that no data ever gave.
    rng = np.random.default_rng(0)
    path = tmp_path / "own.npz"

    def write(labels):
        images = np.random.default_rng(1).integers(0, 256, (200, 6, 6), dtype=np.uint8)
        np.savez(path, images=images, labels=labels)

    recipe = tiny_recipe({"data.source": {"name": "npz", "path": str(path)}})
    write(np.arange(200) % 4)
    with pytest.raises(Interrupted):
        run_cell(recipe, engine, tmp_path / "run", stop_at(5))
    write(rng.permutation(np.arange(200) % 4))
    run_cell(recipe, engine, tmp_path / "fresh")
    try:
        run_cell(recipe, engine, tmp_path / "run")
    except UserError:
        return  # refused by name is as good
    assert contents(tmp_path / "run") == contents(tmp_path / "fresh")


# -- a run as a command -------------------------------------------------------------------

LONG = {
    "training.epochs": 60,
    "training.evaluate_every": 30,
    "engine.checkpoint_seconds": 0.05,
    "seeds": [0, 1],
}


@pytest.fixture(scope="module")
def long_recipe(tiny_description):
    return tiny_description(LONG)


@pytest.fixture(scope="module")
def uninterrupted(long_recipe, tmp_path_factory):
    """Return the results of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run_job(make_recipe(long_recipe), folder)
    return results_of(folder)


def results_of(folder):
    recipe = Store(folder).recipe()
    results = {
        (fact["panel"], fact["seed"], fact["arm"]): without_seconds(fact)
        for fact in Results.read(recipe, Store(folder)).facts
    }
    assert len(results) == len(recipe.arms) * len(recipe.seeds)
    return results


@pytest.fixture
def start(mixval_script, long_recipe, tmp_path):
    """Return a starter of `mixval run` in a session of its own; what is left over is killed."""
    (tmp_path / "long.yaml").write_text(yaml.safe_dump(long_recipe))
    started = []

    def begin(workers):
        command = [mixval_script, "run", "long.yaml", "--out", "run"]
        process = subprocess.Popen(
            [*command, "--engine.workers", str(workers)],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if group_is_alive(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def group_is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def wait_for_end(group: int) -> None:
    """Wait until the last process of a group is gone; Python's resource tracker goes last."""
    end = time.monotonic() + 5
    while group_is_alive(group):
        assert time.monotonic() < end, "a worker is left over"
        time.sleep(0.05)


def checkpoints_in(folder):
    """Return the checkpoints; unlike rglob, glob is not upset by one that is being renamed."""
    return glob.glob(f"{folder}/**/checkpoints/step-*", recursive=True)


def wait_until(condition, process, seconds=60):
    """Wait for something that a running process does."""
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)


def interrupt(start, folder, number, workers, *, whole_group):
    """Stop a run after its first network, in the middle of another."""
    process = start(workers)
    wait_until(
        lambda: list(folder.glob("*/*/base/manifest.json")) and checkpoints_in(folder),
        process,
    )
    (os.killpg if whole_group else os.kill)(process.pid, number)
    # Not less: a worker may just be importing torch, beside other tests.
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert errors.strip().splitlines()[-1].endswith("run the same command again to go on")
    assert "Traceback" not in errors
    wait_for_end(process.pid)
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("interrupted", 128 + number)
    assert len(list(folder.rglob("results/*"))) < 8


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_same_call_goes_on(long_recipe, uninterrupted, tmp_path, number):
    # Catches a Ctrl-C, or a cluster's SIGTERM, that loses work or leads to other results.
    recipe, folder = make_recipe(long_recipe), tmp_path / "run"
    guard = signal.signal(number, lambda *received: None)  # if it came late, pytest must not end
    try:
        sender = threading.Thread(target=signal_in_the_middle, args=(folder, number), daemon=True)
        sender.start()
        with pytest.raises(Interrupted) as caught:
            run_job(recipe, folder)
        sender.join()
    finally:
        signal.signal(number, guard)
    assert caught.value.exit_code == 128 + number
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("interrupted", 128 + number)
    assert len(list(folder.rglob("results/*"))) < 8
    assert list(folder.rglob("checkpoints/step-*"))
    run_job(recipe, folder)
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"
    assert results_of(folder) == uninterrupted


def signal_in_the_middle(folder, number):
    """Send this process a signal once a student is on its way."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if list(folder.glob("*/seed-0/students/*/checkpoints/step-*")):
            os.kill(os.getpid(), number)
            return
        time.sleep(0.002)


@pytest.mark.slow
def test_ctrl_c_exits_130_and_the_same_command_goes_on(start, uninterrupted, tmp_path):
    # As above, from the command line.
    folder = tmp_path / "run"
    interrupt(start, folder, signal.SIGINT, 1, whole_group=False)
    again = start(1)
    output, errors = again.communicate(timeout=90)
    assert again.returncode == 0, errors
    assert "reused" in output
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"
    assert results_of(folder) == uninterrupted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "whole_group"), [(signal.SIGINT, True), (signal.SIGTERM, False)]
)
def test_a_signal_stops_workers_too(
    start, long_recipe, uninterrupted, tmp_path, number, whole_group
):
    # As above with two processes. Ctrl-C in a terminal reaches the workers as well, also one
    # that is just starting: they must let the parent decide.
    interrupt(start, tmp_path / "run", number, 2, whole_group=whole_group)
    run_job(make_recipe(long_recipe), tmp_path / "run")
    assert results_of(tmp_path / "run") == uninterrupted


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on_to_the_same_results(
    start, long_recipe, uninterrupted, tmp_path
):
    # Catches files that are there but not whole: nothing is saved when the power fails.
    process = start(1)
    wait_until(lambda: checkpoints_in(tmp_path / "run"), process)
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    run_job(make_recipe(long_recipe), tmp_path / "run")
    assert results_of(tmp_path / "run") == uninterrupted


def test_ctrl_c_is_safe_at_every_instant():
    # A handler that takes the lock which the loop's question holds at that instant waits for
    # ever. Here the loop does nothing but ask, so the signal comes while it asks.
    code = """
import os, signal, threading
from mixval.errors import Interrupted
from mixval.runner import _listening

for _ in range(20):
    try:
        with _listening() as received:
            threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT)).start()
            while not received:
                pass
    except Interrupted:
        print("stopped")
"""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=15, check=False
        )
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"hangs after {(error.stdout or b'').count(b'stopped')} of 20 signals")
    assert done.stdout.count("stopped") == 20, done.stderr


def test_a_damaged_record_is_noticed_and_the_training_starts_again(jobs, engine, tmp_path, caplog):
    # The record of finished epochs is not in the checkpoints: a yoked control would replay
    # weights that were never given.
    job, checkpoints = jobs["batch norm"](), Checkpoints(tmp_path, "made from this")
    with pytest.raises(Interrupted):
        resumable(job, engine, checkpoints, stop_at(8))
    path = record_folder(checkpoints) / "record_mixed.npy"
    damaged = bytearray(path.read_bytes())
    damaged[-3 * 120 + 5] ^= 1  # in the second of four epochs of 60 rows
    path.write_bytes(damaged)
    resumed = facts_of(resumable(job, engine, checkpoints, Watch()))
    assert "record of student is damaged" in caplog.text
    assert resumed == facts_of(train(job, engine, None, Watch()))
