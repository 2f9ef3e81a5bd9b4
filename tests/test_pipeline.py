"""A whole tiny run: what it leaves behind, what it reuses, what it refuses, what it admits."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

import mixval.stages.network
from mixval import load_recipe
from mixval.checkpoints import load_weights, save_weights
from mixval.errors import UserError
from mixval.files import sealed_facts, weight_facts
from mixval.job import run_job
from mixval.pipeline import CellRun
from mixval.results import Results
from mixval.score_store import check_provenance, read_scores
from mixval.stages.cell import Cell
from mixval.store import Store

TWO_SEEDS = {"seeds": [0, 1]}
RECORD = ("record_clean.npy", "record_mixed.npy")
CELL = [
    "base/manifest.json",
    "base/metrics.jsonl",
    "base/weights.safetensors",
    "data/manifest.json",
    "data/splits.parquet",
    "failures/failures.parquet",
    "failures/manifest.json",
    *(f"results/{arm}/manifest.json" for arm in ("all", "erm", "guided", "yoked")),
    "scores/failures/manifest.json",
    "scores/failures/part-0000.parquet",
    *(
        f"students/{arm}/{name}"
        for arm in ("all", "erm", "guided", "yoked")
        for name in ("manifest.json", "metrics.jsonl", *RECORD, "weights.safetensors")
        if arm in ("guided", "yoked") or name not in RECORD
    ),
    "teachers/failures/manifest.json",
    "teachers/failures/metrics.jsonl",
    "teachers/failures/weights.safetensors",
]


@pytest.fixture(scope="module")
def finished(tiny_recipe, tmp_path_factory):
    """Return the directory of a finished run of two seeds; copy it before changing it."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    run_job(tiny_recipe(TWO_SEEDS), folder, command="mixval run tiny.yaml")
    return folder


@pytest.fixture
def run(finished, tmp_path):
    """Return a copy of the finished run."""
    return shutil.copytree(finished, tmp_path / "run")


def files_of(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def tensors_of(folder):
    return {
        str(path.relative_to(folder)): {
            name: tensor.numpy().tobytes() for name, tensor in load_weights(path).items()
        }
        for path in sorted(folder.rglob("*.safetensors"))
    }


def times_of(folder):
    """Return when each artifact's files were last written."""
    return {
        str(path.relative_to(folder)): path.stat().st_mtime_ns
        for path in sorted(folder.rglob("seed-*/**/*"))
        if path.is_file()
    }


def results_of(folder):
    """Return the facts of every result without the seconds, which differ from run to run."""
    found = {}
    for facts in Results.read(Store(folder).recipe(), Store(folder)).facts:
        timeless = json.loads(json.dumps(facts))
        for cost in ("cost", "preparation"):
            timeless[cost].pop("seconds")
        found[facts["panel"], facts["seed"], facts["arm"]] = timeless
    return found


def leaking_arms(folder):
    return {arm for (_, _, arm), facts in results_of(folder).items() if facts["leaks_test_labels"]}


def reused_line(text):
    lines = [line for line in text.splitlines() if line.startswith("reused")]
    return lines[0] if lines else ""


# -- what a run leaves behind -------------------------------------------------------------


def test_a_run_leaves_what_it_promises_and_nothing_else(finished):
    # Catches a lost artifact, and temporary files or checkpoints that stay for ever.
    cells = [f"main/seed-{seed}/{name}" for seed in (0, 1) for name in CELL]
    top = [".lock", "environment.json", "recipe.yaml", "report.html", "status.json"]
    assert files_of(finished) == sorted(top + cells)


def test_a_run_says_how_it_was_made(finished, tiny_recipe):
    # Catches a table that nobody can make again.
    store = Store(finished)
    assert store.recipe() == tiny_recipe(TWO_SEEDS)
    status = store.read_json("status.json")
    assert status["state"] == "finished" and status["exit_code"] == 0
    assert status["seeds"] == [0, 1] and status["commands"] == ["mixval run tiny.yaml"]
    (environment,) = store.read_json("environment.json")  # one: it never changed
    assert {"python", "torch", "numpy", "timm", "mixval"} <= environment.keys()


def test_the_splits_on_record_are_those_that_were_used(finished, tiny_recipe, engine):
    # Catches a record of data that the networks never saw.
    import pyarrow.parquet as pq

    for seed in (0, 1):
        splits = Cell(tiny_recipe(TWO_SEEDS), "main", seed, engine).splits
        path = finished / "main" / f"seed-{seed}" / "data" / "splits.parquet"
        table = pq.read_table(path).to_pydict()
        for name in ("train", "val_f", "val_dev"):
            part = getattr(splits, name)
            rows = [k for k, split in enumerate(table["split"]) if split == name]
            assert [table["id"][k] for k in rows] == part.ids.tolist()
            assert [table["label"][k] for k in rows] == part.labels.tolist()
        assert not set(table["id"]) & set(splits.test.ids.tolist())


def test_the_failures_are_what_the_base_network_gets_wrong(finished, tiny_recipe, engine):
    # Catches failures of another split or network: they are worked out here again.
    import pyarrow.parquet as pq

    from mixval.training import build_model

    recipe = tiny_recipe(TWO_SEEDS)
    folder = finished / "main" / "seed-1"
    splits = Cell(recipe, "main", 1, engine).splits
    base = build_model(recipe.model, splits, 1, "base")
    base.load_state_dict(load_weights(folder / "base" / "weights.safetensors"))
    inputs = (splits.val_f.images.float() / 255 - splits.mean) / splits.std
    wrong = base(inputs).argmax(1) != splits.val_f.labels
    found = pq.read_table(folder / "failures" / "failures.parquet").to_pydict()
    assert sorted(found["id"]) == sorted(splits.val_f.ids[wrong].tolist())
    assert set(found["use"]) == {"query"}


def test_results_are_of_the_last_epoch_on_test(finished, tiny_recipe, engine):
    # Catches an accuracy of another split, another epoch or another network.
    from mixval.training import build_model

    recipe = tiny_recipe(TWO_SEEDS)
    for (_, seed, arm), facts in results_of(finished).items():
        splits = Cell(recipe, "main", seed, engine).splits
        model = build_model(recipe.model, splits, seed, "student").eval()
        weights = finished / "main" / f"seed-{seed}" / "students" / arm / "weights.safetensors"
        model.load_state_dict(load_weights(weights))
        inputs = (splits.test.images.float() / 255 - splits.mean) / splits.std
        with torch.no_grad():
            log_probs = model(inputs).log_softmax(-1)
        hits = (log_probs.argmax(1) == splits.test.labels).double().mean().item()
        assert facts["accuracy"] == pytest.approx(hits)
        nll = -log_probs.gather(1, splits.test.labels[:, None]).mean().item()
        assert facts["nll"] == pytest.approx(nll, rel=1e-5)
        assert facts["leaks_test_labels"] is False


def test_scores_can_be_joined_to_the_data_they_are_of(finished, tiny_recipe, engine):
    # Catches scores without a way to tell which samples and networks they belong to.
    for seed in (0, 1):
        cell = Cell(tiny_recipe(TWO_SEEDS), "main", seed, engine)
        folder = finished / "main" / f"seed-{seed}"
        table = read_scores(folder / "scores" / "failures")
        assert len(table) == 50 and list(table.row) == list(range(50))
        assert {"data", "plan", "updated", "base"} <= table.provenance.keys()
        check_provenance(table, {"data": cell.data_fingerprint})
        base = weight_facts(folder / "base" / "weights.safetensors")["fingerprint"]
        check_provenance(table, {"base": base})
        label = dict(
            zip(cell.splits.train.ids.tolist(), cell.splits.train.labels.tolist(), strict=True)
        )
        assert [label[k] for k in table.i] == list(table.label_i)
        assert [label[k] for k in table.j] == list(table.label_j)
        assert np.allclose(table.r_hat, table.updated - table.base, atol=1e-5)
        assert ((table.lam > 0) & (table.lam < 1)).all()
        assert np.isnan(table.std_error).all() and np.isnan(table.kept).all()


# -- what it uses again -------------------------------------------------------------------


def test_a_second_run_trains_nothing_and_says_so(run, tiny_recipe, capsys, monkeypatch):
    # Catches work that is done twice, or a table that changes by being asked for again.
    before, report = times_of(run), (run / "report.html").read_bytes()

    def never(*arguments):
        raise AssertionError("a network is trained that is there already")

    monkeypatch.setattr(mixval.stages.network, "train", never)
    run_job(tiny_recipe(TWO_SEEDS), run, command="mixval run tiny.yaml")
    output = capsys.readouterr().out
    assert times_of(run) == before
    assert (run / "report.html").read_bytes() == report
    line = reused_line(output)
    for count in ("2 base", "2 failures", "2 teachers", "2 scores", "8 students", "8 results"):
        assert count in line
    assert "estimated cost: 0 networks" in output


def test_one_lost_student_is_all_that_is_made_again(run, tiny_recipe, capsys):
    # Catches a lost folder that costs the whole run, or that stays lost.
    before, tensors = times_of(run), tensors_of(run)
    shutil.rmtree(run / "main" / "seed-1" / "students" / "guided")
    run_job(tiny_recipe(TWO_SEEDS), run)
    assert "7 students" in reused_line(capsys.readouterr().out)
    changed = {name for name, time in times_of(run).items() if before[name] != time}
    assert {name.rsplit("/", 1)[0] for name in changed} == {"main/seed-1/students/guided"}
    assert tensors_of(run) == tensors


DAMAGED = [name for name in CELL if not name.endswith("manifest.json")]


def run_cell(recipe, folder, engine, seed=0):
    """Run one cell without the report, which takes longer than all the rest."""
    CellRun(Cell(recipe, "main", seed, engine), Store(folder)).upto("run", list(recipe.arms))


@pytest.mark.parametrize("name", DAMAGED)
def test_a_flipped_byte_in_any_file_is_noticed_and_mended(run, tiny_recipe, engine, name, caplog):
    # Catches corruption that becomes part of the results.
    path = run / "main" / "seed-0" / name
    tensors, results = tensors_of(run), results_of(run)
    data = bytearray(path.read_bytes())
    data[-len(data) // 3] ^= 4
    path.write_bytes(data)
    run_cell(tiny_recipe(TWO_SEEDS), run, engine)
    assert path.name in caplog.text and "is damaged" in caplog.text
    assert tensors_of(run) == tensors
    assert results_of(run) == results
    caplog.clear()
    run_cell(tiny_recipe(TWO_SEEDS), run, engine)
    assert "damaged" not in caplog.text


def test_a_changed_digit_of_a_result_is_noticed(run, tiny_recipe, engine):
    # Results live in their manifests; a flipped bit there must not end up in the table.
    path = run / "main" / "seed-0" / "results" / "guided" / "manifest.json"
    honest = results_of(run)
    text = path.read_text()
    accuracy = str(sealed_facts(path.parent)["facts"]["accuracy"])
    assert accuracy.startswith("0.")
    path.write_text(text.replace(accuracy, "0.9" + accuracy[3:]))
    run_cell(tiny_recipe(TWO_SEEDS), run, engine)
    assert results_of(run) == honest


def test_another_recipe_is_refused_and_nothing_is_touched(run, tiny_recipe, snapshot):
    # Catches results of two recipes in one table.
    before = snapshot(run)
    for changes in ({"training.lr": 0.01}, {"arms.guided.filter": "positive"}):
        with pytest.raises(UserError, match="belongs to another recipe"):
            run_job(tiny_recipe({**TWO_SEEDS, **changes}), run)
    assert snapshot(run) == before


def test_arms_panels_and_seeds_can_be_added(run, tiny_recipe, capsys):
    # Catches a run that has to start over for one more arm, and a report that forgets the others.
    before = results_of(run)
    more = {
        "arms.late": {"alpha": 3, "control": "all"},
        "panels.noisy": {"label_noise": 0.2},
        "panels.main": {},
        "seeds": [0, 1, 2],
    }
    run_job(tiny_recipe(more), run, arms=["late", "all"])
    found = results_of(run)
    assert {key: found[key] for key in before} == before
    assert set(found) - set(before) == {
        *((panel, seed, "late") for panel in ("main", "noisy") for seed in (0, 1, 2)),
        *(("noisy", seed, "all") for seed in (0, 1, 2)),
        ("main", 2, "all"),
    }
    output = capsys.readouterr().out
    assert "guided" in output and "late" in output
    run_job(tiny_recipe(TWO_SEEDS), run)  # the first command again
    assert results_of(run) == found


def test_arms_share_one_seed_whatever_runs_beside_them(tiny_recipe, finished, tmp_path):
    # Catches a result that depends on which other arms, panels or seeds were run with it.
    run_job(tiny_recipe({"seeds": [1]}), tmp_path / "alone", arms=["all"])
    alone = results_of(tmp_path / "alone")
    assert alone == {("main", 1, "all"): results_of(finished)["main", 1, "all"]}


def test_held_out_failures_are_reported_whatever_runs_beside(tiny_recipe, tmp_path):
    # As above where failures are held back: what a result holds must not depend on the order.
    recipe = tiny_recipe({"failures.holdout": 0.5})
    run_job(recipe, tmp_path / "together")
    run_job(recipe, tmp_path / "one by one", arms=["erm"])
    run_job(recipe, tmp_path / "one by one")
    assert results_of(tmp_path / "one by one") == results_of(tmp_path / "together")


def test_a_control_brings_the_arm_that_it_replays(tiny_recipe, tmp_path):
    # Catches a control that can't be run by itself, or that comes without its guided arm.
    run_job(tiny_recipe(), tmp_path / "run", arms=["yoked"])
    assert {arm for _, _, arm in results_of(tmp_path / "run")} == {"guided", "yoked"}


def test_two_runs_at_once_are_refused(run, tiny_recipe, snapshot):
    # Catches two processes that write the same files; the lock goes with its process.
    code = (
        "import sys; from pathlib import Path; from mixval.store import Store\n"
        "with Store(Path(sys.argv[1])).locked(): print('locked', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(run)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout.readline() == "locked\n"
        before = snapshot(run)
        with pytest.raises(UserError, match="in use by another run"):
            run_job(tiny_recipe(TWO_SEEDS), run)
        assert snapshot(run) == before
        other.kill()
        other.wait()
    run_job(tiny_recipe(TWO_SEEDS), run)


@pytest.mark.slow
def test_any_number_of_workers_gives_the_same_results(finished, tiny_recipe, tmp_path):
    # Catches a result that depends on how the work was spread.
    run_job(tiny_recipe({**TWO_SEEDS, "engine.workers": 2}), tmp_path / "run")
    assert tensors_of(tmp_path / "run") == tensors_of(finished)
    assert results_of(tmp_path / "run") == results_of(finished)


# -- one stage at a time ------------------------------------------------------------------

UP_TO = {
    "base": {"data", "base"},
    "failures": {"data", "base", "failures"},
    "teacher": {"data", "base", "failures", "teachers"},
    "score": {"data", "base", "failures", "teachers", "scores"},
    "student": {"data", "base", "failures", "teachers", "students"},
}


def test_stages_one_by_one_make_the_same_run(finished, tiny_recipe, tmp_path, capsys):
    # Catches a stage that does too little or too much, or that is remade by the next one.
    folder, seen = tmp_path / "run", set()
    for stage, made in UP_TO.items():
        run_job(tiny_recipe(TWO_SEEDS), folder, stage=stage)
        seen |= made
        assert {path.name for path in (folder / "main" / "seed-0").iterdir()} == seen
        assert str(folder) in capsys.readouterr().out
    run_job(tiny_recipe(TWO_SEEDS), folder)
    assert tensors_of(folder) == tensors_of(finished)
    assert results_of(folder) == results_of(finished)


NO_FAILURES = {"scores.rows": 0, "teachers.failures.data": "train"}
ESTIMATES = [
    *((stage, {}, None) for stage in ("base", "failures", "teacher", "score", "student", "run")),
    ("run", {}, ["erm"]),
    ("student", {}, ["erm"]),
    ("run", {}, ["yoked"]),
    ("score", NO_FAILURES, None),
    ("run", NO_FAILURES, None),
    ("run", {"teachers.failures.folds": 3}, None),
    ("run", {"teachers.failures.members": 3}, None),
    ("teacher", {"teachers.unused": {"data": "train"}}, None),
    ("run", {"teachers.unused": {"data": "train"}}, None),
]


@pytest.mark.parametrize(("stage", "changes", "arms"), ESTIMATES)
def test_the_estimate_counts_the_networks_that_are_trained(
    tiny_recipe, tmp_path, capsys, stage, changes, arms
):
    # Catches a dry run that promises another cost than the run has.
    recipe = tiny_recipe({**changes, "training.epochs": 1})
    run_job(recipe, tmp_path / "run", stage=stage, arms=arms, dry_run=True)
    words = capsys.readouterr().out.split()
    promised = int(words[words.index("networks,") - 1])
    assert not (tmp_path / "run").exists()
    run_job(recipe, tmp_path / "run", stage=stage, arms=arms)
    assert len(list((tmp_path / "run").rglob("weights.safetensors"))) == promised
    capsys.readouterr()
    run_job(recipe, tmp_path / "run", stage=stage, arms=arms, dry_run=True)
    assert "estimated cost: 0 networks, 0 optimiser steps" in capsys.readouterr().out


def test_a_base_network_without_failures_is_no_error(tiny_recipe, tmp_path):
    # Catches an empty F that crashes a later stage: a good base network may fail nothing.
    recipe = tiny_recipe({"data.val_f": 1, "training.epochs": 60, "training.lr": 0.2})
    for seed in range(20):
        cell_recipe = recipe.model_copy(update={"seeds": [seed]})
        folder = tmp_path / str(seed)
        run_job(cell_recipe, folder, stage="failures")
        if sealed_facts(folder / "main" / f"seed-{seed}" / "failures")["facts"]["found"] == 0:
            run_job(cell_recipe, folder)
            assert len(results_of(folder)) == 4
            return
    pytest.fail("no seed has a base network without failures; the case needs one")


def test_a_run_that_fails_says_why(tiny_recipe, tmp_path, monkeypatch):
    # Catches a directory that looks as if the run were still going on.
    def fail(*arguments):
        raise RuntimeError("the cat is on the keyboard")

    monkeypatch.setattr(mixval.stages.network, "train", fail)
    with pytest.raises(RuntimeError, match="cat"):
        run_job(tiny_recipe(), tmp_path / "run")
    status = Store(tmp_path / "run").read_json("status.json")
    assert (status["state"], status["exit_code"]) == ("failed", 1)
    assert "the cat is on the keyboard" in status["cause"]


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"data.train": 5000}, "data"),
        ({"data.source": {"name": "npz", "path": "missing.npz"}}, "missing.npz"),
        ({"engine.device": "abacus"}, "engine.device"),
        ({"model": {"name": "timm", "architecture": "no_such_net"}}, "no_such_net"),
        ({"training.optimizer": "no_such_optimizer"}, "optimizer"),
        ({"training.class_weights": {"name": "given", "values": [1.0, 2.0]}}, "values"),
    ],
)
def test_settings_that_prove_wrong_leave_the_directory_free(
    tiny_recipe, tmp_path, changes, fragment
):
    # Catches a mistake that binds the directory: mended, the recipe would be "another recipe".
    with pytest.raises(UserError, match=fragment):
        run_job(tiny_recipe(changes), tmp_path / "run")
    run_job(tiny_recipe(), tmp_path / "run", stage="base")


# -- what it admits -----------------------------------------------------------------------

LEAKS = {
    "teacher on test": ({"teachers.failures.data": "train+test"}, {"guided", "yoked"}),
    "failures from test": ({"failures.split": "test"}, {"guided", "yoked"}),
    "arm on test": ({"arms.erm.data": "train+test"}, {"erm"}),
    "none": ({}, set()),
}


@pytest.mark.parametrize("case", LEAKS)
def test_rows_that_saw_test_labels_say_so_everywhere(tiny_recipe, tmp_path, capsys, case):
    # Catches a number that looks honest and is not, in the table, on the page or in the files.
    changes, leaking = LEAKS[case]
    path = run_job(tiny_recipe(changes), tmp_path / "run")
    table = capsys.readouterr().out
    marked = {line.split()[0] for line in table.splitlines() if "(LEAKS TEST LABELS)" in line}
    assert marked == leaking
    shown = [row.split("</tr>")[0] for row in path.read_text().split("<tr")[1:]]
    rows = [row for row in shown if '<span class="leak">leaks test labels</span>' in row]
    assert len(rows) == len(leaking)
    for row in rows:
        assert any(f">{arm} " in row for arm in leaking)
    assert leaking_arms(path.parent) == leaking


# -- teachers from files ------------------------------------------------------------------


def with_teacher_file(path, **changes):
    return {"teachers.failures.weights": str(path), **changes}


def teacher_file(folder, seed=0):
    return folder / "main" / f"seed-{seed}" / "teachers" / "failures" / "weights.safetensors"


def test_a_teacher_from_a_file_guides_as_it_did_in_its_own_run(finished, tiny_recipe, tmp_path):
    # Catches a teacher that is loaded with other weights, and an honest one that is marked.
    run_job(tiny_recipe(with_teacher_file(teacher_file(finished))), tmp_path / "run")
    ours, theirs = tensors_of(tmp_path / "run"), tensors_of(finished)
    name = "main/seed-0/students/guided/weights.safetensors"
    assert ours[name] == theirs[name]
    assert leaking_arms(tmp_path / "run") == set()


def test_a_teacher_of_another_seed_may_know_the_test_split(finished, tiny_recipe, tmp_path):
    # Every seed draws its own test split: another seed's teacher has trained on some of it.
    run_job(tiny_recipe(with_teacher_file(teacher_file(finished, seed=1))), tmp_path / "run")
    assert leaking_arms(tmp_path / "run") == {"guided", "yoked"}


def marked_or_refused(recipe, folder):
    try:
        run_job(recipe, folder)
    except UserError:
        return True
    return leaking_arms(folder) >= {"guided", "yoked"}


def test_a_teacher_file_that_saw_test_is_refused_or_marked(tiny_recipe, tmp_path):
    # Catches a leak that a file washes off.
    run_job(tiny_recipe({"teachers.failures.data": "train+test"}), tmp_path / "leaking")
    file = teacher_file(tmp_path / "leaking")
    for data in ("train", "train+failures", "train+test"):
        changes = with_teacher_file(file, **{"teachers.failures.data": data})
        assert marked_or_refused(tiny_recipe(changes), tmp_path / data.replace("+", "_"))


def test_a_student_of_a_leaking_teacher_does_not_become_an_honest_teacher(tiny_recipe, tmp_path):
    # As above, at second hand: the file of a guided student, used as a teacher.
    run_job(tiny_recipe({"teachers.failures.data": "train+test"}), tmp_path / "leaking")
    file = tmp_path / "leaking" / "main" / "seed-0" / "students" / "guided" / "weights.safetensors"
    changes = with_teacher_file(file, **{"teachers.failures.data": "train"})
    assert marked_or_refused(tiny_recipe(changes), tmp_path / "run")


def test_a_teacher_file_that_changed_is_noticed(finished, tiny_recipe, tmp_path):
    # The header says whose weights these are, but a header is not the weights. safetensors
    # does not notice flipped bits.
    file = tmp_path / "teacher.safetensors"
    shutil.copy(teacher_file(finished), file)
    run_job(tiny_recipe(with_teacher_file(file)), tmp_path / "run", arms=["guided"])
    facts, tensors = weight_facts(file), load_weights(file)
    save_weights(file, {name: tensor * 1.5 for name, tensor in tensors.items()}, facts)
    with pytest.raises(UserError, match="teacher"):
        run_job(tiny_recipe(with_teacher_file(file)), tmp_path / "run", arms=["guided"])


def test_a_teacher_file_with_other_classes_is_refused(tiny_recipe, tmp_path, finished):
    # Catches a shape error deep inside the student's first step.
    file = tmp_path / "teacher.safetensors"
    facts = weight_facts(teacher_file(finished))
    save_weights(file, load_weights(teacher_file(finished)), {**facts, "classes": "7"})
    with pytest.raises(UserError, match="7 classes"):
        run_job(tiny_recipe(with_teacher_file(file)), tmp_path / "run")


@pytest.mark.parametrize("key", ["classes", "content", "splits", "labels", "leaks"])
def test_a_teacher_file_that_says_too_little_is_refused_or_marked(
    tiny_recipe, tmp_path, finished, key
):
    # Catches a KeyError, and a file from elsewhere that is taken on trust.
    file = tmp_path / "teacher.safetensors"
    facts = weight_facts(teacher_file(finished))
    facts.pop(key)
    save_weights(file, load_weights(teacher_file(finished)), facts)
    assert marked_or_refused(tiny_recipe(with_teacher_file(file)), tmp_path / "run")


# -- the claim itself ---------------------------------------------------------------------


@pytest.mark.slow
def test_on_digits_keeping_negative_r_hat_beats_keeping_positive(tmp_path):
    # Catches a sign error anywhere between the teacher and the student's loss.
    recipe = load_recipe("digits", {"engine.device": "cpu"})
    arms = ["guided_failures", "opposite_failures"]
    run_job(recipe, tmp_path / "run", arms=arms, panels=["clean"])
    results = Results.read(recipe, Store(tmp_path / "run"))
    difference = results.differences("clean", *arms)["accuracy"]
    assert difference.n == 10
    assert difference.mean > 0


def test_own_code_that_changed_is_not_reused(tiny_recipe, tmp_path, monkeypatch):
    # Catches one mean over the results of two functions of the same name.
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "my_changing_schedule.py"
    source.write_text("def flat(progress):\n    return 1.0\n")
    recipe = tiny_recipe({"arms.all.alpha": "my_changing_schedule:flat"})
    run_job(recipe, tmp_path / "run", stage="student", arms=["all"])
    source.write_text("def flat(progress):\n    return 0.5\n")
    with pytest.raises(UserError, match="was made with another own code"):
        run_job(recipe, tmp_path / "run", stage="student", arms=["all"])


def test_the_page_names_every_command_and_the_recipe_every_seed(tiny_recipe, tmp_path):
    # Catches a page of two seeds that says it was made by a command for one.
    for seed in (0, 1):
        recipe = tiny_recipe({"seeds": [seed]})
        run_job(recipe, tmp_path / "run", arms=["all"], command=f"mixval run --seeds {seed}")
    page = (tmp_path / "run" / "report.html").read_text()
    assert "mixval run --seeds 0\nmixval run --seeds 1" in page
    assert Store(tmp_path / "run").recipe().seeds == [0, 1]


@pytest.mark.parametrize(("data", "leaks"), [("train+test", True), ("train+val_f", False)])
def test_a_stage_says_of_its_networks_whether_they_leak(tiny_recipe, tmp_path, data, leaks):
    # Catches a teacher that saw the test labels and is summed up like any other.
    said = []
    recipe = tiny_recipe({"teachers.failures.data": data})
    run_job(recipe, tmp_path / "run", stage="teacher", say=said.append)
    assert ("teachers/failures" in said[-1]) and ("leaks test labels" in said[-1]) == leaks
    assert "leaks_test_labels" not in said[-1]
