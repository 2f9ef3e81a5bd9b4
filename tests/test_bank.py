"""The teacher's H scored beforehand: the same students bit for bit, H itself by brute force."""

import importlib
import json
import shutil
import sys

import numpy as np
import pytest
import torch
import yaml

import mixval.stages.bank
from mixval.augmentations import crop_flip, draw_uniforms
from mixval.checkpoints import load_weights
from mixval.errors import Interrupted, UserError
from mixval.mixing import draw_plan
from mixval.pipeline import CellRun
from mixval.stages.cell import Cell
from mixval.store import Store
from mixval.training_job import Watch

N, EPOCHS = 60, 4  # of the tiny recipe
BANK = {"scores.bank": True}
ALONE = {"arms.yoked": None, "arms.guided.control": None}
CROP = {"name": "crop_flip", "pad": 1}
SMOOTH = {"name": "cross_entropy", "label_smoothing": 0.2}


@pytest.fixture
def cell_run(tiny_recipe, engine, tmp_path):
    """Return a maker of the stages of one cell in a folder of that name."""

    def make(folder, changes, watch=None):
        recipe = tiny_recipe({**ALONE, **changes})
        return CellRun(Cell(recipe, "main", 0, engine, watch or Watch()), Store(tmp_path / folder))

    return make


def banks_of(cells):
    return sorted(path.parent for path in cells.store.root.rglob("bank.npy"))


def facts_of(cells, arm="guided"):
    """Return all that must be the same with and without a bank, bit for bit."""
    student, folder = cells.student(arm), cells.store.place("main", 0, "students", arm)
    return {
        "weights": {k: v.numpy().tobytes() for k, v in student.model.network.state_dict().items()},
        "mixed": student.record.mixed.numpy().tobytes(),
        "clean": student.record.clean.numpy().tobytes(),
        "metrics": (folder / "metrics.jsonl").read_text(),
        "steps": student.cost.steps,
    }


# -- the same students --------------------------------------------------------------------

# Changes of the recipe, epochs that are scored while a student is guided, epochs with mixes.
STUDENTS = {
    "negative": ({}, 4, 4),
    "soft": ({"arms.guided.filter": {"name": "soft", "tau": 0.3}}, 4, 4),
    "top k": ({"arms.guided.filter": {"name": "top_k", "k": 7}}, 4, 4),
    "crop_flip": ({"training.augmentation": CROP}, 4, 4),
    "resized_crop": ({"training.augmentation": "resized_crop"}, 4, 4),
    "micro-batches": ({"training.accumulate": 2}, 4, 4),
    "uneven steps": ({"training.batch_size": 17, "training.accumulate": 2}, 4, 4),
    "several teachers": ({"teachers.failures.members": 2}, 8, 8),
    "out of fold": ({"teachers.failures.folds": 3}, 4, 4),
    "clean filtered": ({"arms.guided.clean": "filtered"}, 4, 4),
    "clean instead": ({"arms.guided.excluded": "clean"}, 4, 4),
    "mixup stops": ({"arms.guided.mixup_until": 3}, 3, 3),
    "guidance stops": ({"arms.guided.guide_until": 2}, 2, 4),
    "guidance fades": ({"arms.guided.guide_until": 1, "arms.guided.guide_fade": 1}, 2, 4),
    "one lambda, deranged": ({"arms.guided.same_lam": 20, "arms.guided.derange": True}, 4, 4),
    "train+failures": ({"arms.guided.data": "train+failures"}, 4, 4),
    "batch norm": ({"model": {"name": "conv_net", "width": 4}}, 4, 4),
}


@pytest.mark.parametrize("case", STUDENTS)
def test_a_student_with_a_bank_is_the_one_without(cell_run, case):
    # Catches H of another row, epoch or view, and H of a teacher that saw other batches: a bank
    # may save time and nothing else. The forward passes it saves were paid when it was made.
    changes, scored, mixing = STUDENTS[case]
    live, banked = cell_run("live", changes), cell_run("banked", {**changes, **BANK})
    assert facts_of(banked) == facts_of(live)
    assert not banks_of(live) and len(banks_of(banked)) == 1
    mine, theirs = banked.student("guided"), live.student("guided")
    rows = mine.record.mixed.shape[1]
    assert theirs.cost.forwards - mine.cost.forwards == scored * rows
    assert theirs.preparation.forwards == 0
    assert mine.preparation.forwards == mixing * rows
    assert mine.preparation.steps == 0 and mine.preparation.seconds > 0
    assert 0 < mine.record.mean("mixed") < 1  # without a filter that filters this says nothing


def test_a_finished_student_remembers_what_its_bank_cost(cell_run):
    # Catches a cost that is only known while the bank is made: a second look would be cheaper.
    first = cell_run("run", BANK).student("guided")
    again = cell_run("run", BANK).student("guided")
    assert again.preparation == first.preparation and again.cost == first.cost


@pytest.mark.parametrize("excluded", ["relabel", "refill"])
def test_arms_that_ask_for_more_than_h_ask_the_teacher_live(cell_run, excluded):
    # Catches soft labels that a bank does not hold, and H of the planned mix for one that was
    # drawn in its place.
    changes = {"arms.guided.excluded": excluded}
    live, banked = cell_run("live", changes), cell_run("banked", {**changes, **BANK})
    assert facts_of(banked) == facts_of(live)
    assert not banks_of(banked)
    mine, theirs = banked.student("guided"), live.student("guided")
    assert mine.cost.forwards == theirs.cost.forwards and mine.preparation.forwards == 0


# -- the numbers --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [{}, {"training.augmentation": CROP}, {"teachers.failures.folds": 3}, {"scores.loss": SMOOTH}],
    ids=["plain", "augmented", "out of fold", "smooth"],
)
def test_a_bank_holds_h_of_each_mix_made_alone(cell_run, changes):
    # By a loop over rows, from pixels to H, with the network in plain torch.
    cells = cell_run("run", {**BANK, "arms.guided.alpha": 0.4, **changes})
    cells.student("guided")
    teachers, splits = cells.teacher("failures"), cells.cell.splits
    table = np.load(banks_of(cells)[0] / "bank.npy")
    assert table.shape == (EPOCHS, N) and table.dtype == np.float32
    for epoch in range(EPOCHS):
        plan = draw_plan(
            seed=0, epoch=epoch, alpha=0.4, num_samples=N, stream="student", folds=teachers.folds
        )
        uniforms = draw_uniforms(0, epoch, splits.train.ids)

        def seen(position, uniforms=uniforms):
            image = splits.train.images[position][None]
            if "training.augmentation" in changes:
                image = crop_flip(image, uniforms[position][None], pad=1)
            return (image.double() / 255 - splits.mean) / splits.std

        rows = zip(plan.first.tolist(), plan.second.tolist(), plan.lam.tolist(), strict=True)
        for row, (i, j, lam) in enumerate(rows):
            which = 0 if teachers.folds is None else int(teachers.folds[i])
            network = teachers.networks[which].model.network
            mixed = lam * seen(i) + (1 - lam) * seen(j)
            with torch.no_grad():
                log_p = network(mixed.float()).double().log_softmax(1)[0]
            label_i, label_j = splits.train.labels[[i, j]].tolist()
            expected = -lam * log_p[label_i] - (1 - lam) * log_p[label_j]
            if "scores.loss" in changes:
                expected = 0.8 * expected - 0.2 * log_p.mean()
            assert table[epoch, row] == pytest.approx(float(expected), abs=1e-5), (epoch, row)


def test_epochs_without_mixes_are_not_scored(cell_run, monkeypatch):
    # Catches a teacher that is run on rows which nobody mixes.
    scored = []
    original = mixval.stages.bank._epoch_losses
    monkeypatch.setattr(
        mixval.stages.bank,
        "_epoch_losses",
        lambda *arguments: scored.append(arguments[-1]) or original(*arguments),
    )
    cell_run("run", {**BANK, "arms.guided.mixup_until": 2}).student("guided")
    assert scored == [0, 1]


# -- one bank for many --------------------------------------------------------------------

MORE = {
    "arms.softly": {"teacher": "failures", "filter": "soft"},
    "arms.wider": {"teacher": "failures", "filter": "negative", "alpha": 2},
}


def test_arms_of_one_plan_share_a_bank_and_another_alpha_has_its_own(cell_run):
    # Catches H of alpha = 1 used at alpha = 2, and a teacher that scores the same mixes twice.
    cells = cell_run("run", {**BANK, **MORE})
    for arm in ("guided", "softly", "wider"):
        cells.student(arm)
    assert len(banks_of(cells)) == 2
    assert cells.cell.reused["banks"] == 1
    for arm in ("softly", "wider"):
        assert facts_of(cells, arm) == facts_of(cell_run("live", MORE), arm)


OTHERS = {
    "plan": {"arms.guided.alpha": 2},
    "teacher": {"teachers.failures.alpha": 2},
    "data": {"data.label_noise": 0.2},
    "loss": {"scores.loss": SMOOTH},
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_bank_in_anothers_place_is_refused_by_what_differs(cell_run, what):
    # Catches H of another plan, teacher or dataset, of the same shape and with whole files.
    ours, other = cell_run("ours", BANK), cell_run("other", {**BANK, **OTHERS[what]})
    for cells in (ours, other):
        cells.student("guided")
    (mine,), (theirs,) = banks_of(ours), banks_of(other)
    assert mine.name != theirs.name
    shutil.rmtree(mine)
    shutil.copytree(theirs, mine)
    shutil.rmtree(ours.store.place("main", 0, "students", "guided"))
    with pytest.raises(UserError, match=f"{mine.name}: was made with another {what}; ") as caught:
        cell_run("ours", BANK).student("guided")
    assert "\n" not in str(caught.value)


def test_a_damaged_bank_is_made_again(cell_run, caplog):
    # Catches a flipped bit that would decide about a mix.
    cells = cell_run("run", BANK)
    whole = facts_of(cells)
    path = banks_of(cells)[0] / "bank.npy"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    shutil.rmtree(cells.store.place("main", 0, "students", "guided"))
    assert facts_of(cell_run("run", BANK)) == whole
    assert "bank.npy" in caplog.text


# -- interrupted --------------------------------------------------------------------------


def stop_at(poll):
    asked = iter(range(1, 10**9))
    return Watch(should_stop=lambda: next(asked) >= poll)


@pytest.mark.parametrize("damaged", [False, True])
def test_an_interrupted_bank_goes_on_and_scores_damaged_epochs_again(
    cell_run, monkeypatch, damaged
):
    # Catches a bank that starts from the beginning, that leaves an epoch of zeros, or that trusts
    # what a crash has left.
    whole = cell_run("whole", BANK)
    expected = facts_of(whole)
    cell_run("cut", BANK).teacher("failures")
    with pytest.raises(Interrupted):
        cell_run("cut", BANK, stop_at(8)).student("guided")  # 3 steps an epoch: in the third
    cells = cell_run("cut", BANK)
    folder = banks_of(cells)[0]
    assert not (folder / "manifest.json").exists()
    assert set(json.loads((folder / "epochs.json").read_text())["sums"]) == {"0", "1"}
    if damaged:
        table = np.load(folder / "bank.npy", mmap_mode="r+")
        table[0, 7] += 1
        table.flush()
        del table
    scored = []
    original = mixval.stages.bank._epoch_losses
    monkeypatch.setattr(
        mixval.stages.bank,
        "_epoch_losses",
        lambda *arguments: scored.append(arguments[-1]) or original(*arguments),
    )
    assert facts_of(cells) == expected
    assert scored == ([0, 2, 3] if damaged else [2, 3])
    assert (folder / "bank.npy").read_bytes() == (banks_of(whole)[0] / "bank.npy").read_bytes()
    # What the first try has scored is part of the cost.
    assert cells.student("guided").preparation.forwards == EPOCHS * N


# -- the command --------------------------------------------------------------------------


def tensors_of(folder):
    return {
        (str(path.relative_to(folder)), name): tensor.numpy().tobytes()
        for path in sorted(folder.rglob("*.safetensors"))
        for name, tensor in load_weights(path).items()
    }


@pytest.mark.slow
def test_a_run_with_banks_has_the_results_of_one_without(mixval, tiny_description, tmp_path):
    # Catches a setting that does not reach the students, or that changes a yoked control.
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny_description()))
    for words in (["--out", "live"], ["--out", "banked", "--scores.bank", "true"]):
        done = mixval("run", "tiny.yaml", *words)
        assert done.returncode == 0, done.stderr
    live, banked = tmp_path / "live", tmp_path / "banked"
    assert not list(live.rglob("bank.npy")) and len(list(banked.rglob("bank.npy"))) == 1
    assert tensors_of(banked) == tensors_of(live)
    assert len({path for path, _ in tensors_of(live)}) == 6


OWN_LOSS = """
from mixval.losses import cross_entropy

def own(logits, targets, class_weight=None):
    return {factor} * cross_entropy(logits, targets, class_weight)
"""


@pytest.fixture
def own_loss(tmp_path, monkeypatch):
    """Return a writer of a loss of the user's own, as the recipe names it, times a factor."""
    monkeypatch.chdir(tmp_path)
    name = f"own_loss_{tmp_path.name}"

    def write(factor):
        (tmp_path / f"{name}.py").write_text(OWN_LOSS.format(factor=factor))
        monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()
        return {**BANK, "scores.loss": f"{name}:own"}

    return write


def test_a_bank_of_code_that_has_changed_is_refused(cell_run, own_loss):
    # Catches H of the old loss, used silently once the student's folder is removed.
    changes = own_loss(1.0)
    cells = cell_run("run", changes)
    cells.student("guided")
    own_loss(2.0)
    shutil.rmtree(cells.store.place("main", 0, "students", "guided"))
    with pytest.raises(UserError, match=r"banks.*another own code"):
        cell_run("run", changes).student("guided")


def test_an_unfinished_bank_of_other_code_is_begun_again(cell_run, own_loss, tmp_path):
    # Catches a bank that is half of the old loss and half of the new one.
    changes = own_loss(1.0)
    cell_run("stopped", changes).teacher("failures")
    with pytest.raises(Interrupted):
        cell_run("stopped", changes, stop_at(8)).student("guided")
    assert len(json.loads(next(tmp_path.rglob("epochs.json")).read_text())["sums"]) >= 1
    own_loss(2.0)
    resumed, fresh = (cell_run(folder, changes) for folder in ("stopped", "fresh"))
    for cells in (resumed, fresh):
        cells.student("guided")
    one, other = (np.load(banks_of(cells)[0] / "bank.npy") for cells in (resumed, fresh))
    assert np.array_equal(one, other)
