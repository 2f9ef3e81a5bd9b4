"""The command line: help without torch, errors of one line, nothing written by mistake."""

import json
import resource
import subprocess
import sys

import pytest
import yaml

from mixval import choose, load_recipe
from mixval.arguments import VERBS
from mixval.cli import CHOICE_MODULES, main

BASELINE = [sys.executable, "-c", "import pydantic, yaml"]


def processor_seconds():
    """Return what commands have used so far; time on the wall is also of whatever else runs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def seconds_of(command, cwd=None):
    before = processor_seconds()
    subprocess.run(command, cwd=cwd, capture_output=True, check=False, timeout=60)
    return processor_seconds() - before


@pytest.fixture
def recipe_file(tiny_description, tmp_path):
    """Return a writer of the tiny recipe as a file in the folder where commands run."""

    def write(changes=None, name="tiny.yaml"):
        path = tmp_path / name
        path.write_text(yaml.safe_dump(tiny_description(changes)))
        return path

    return write


@pytest.fixture
def main_here(tmp_path, monkeypatch, capsys):
    """Return a caller of `main` in this process, which has torch already: code, stdout, stderr."""

    def call(*words):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["mixval", *words])
        code = main()
        return code, *capsys.readouterr()

    return call


# -- help ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [["--help"], ["run", "--help"], ["list"], ["report", "--help"], ["datasets", "--root", "."]],
)
def test_help_loads_no_torch(words):
    # Catches an import that makes `--help` take seconds.
    code = (
        "import sys\n"
        "from mixval.cli import main\n"
        f"try: code = main({words!r})\n"
        "except SystemExit as error: code = error.code\n"
        "assert not code, code\n"
        "heavy = {'torch', 'numpy', 'scipy', 'sklearn', 'matplotlib', 'timm'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["datasets"]])
def test_help_answers_in_half_a_second(mixval_script, words):
    # Catches a help that users stop asking for. A busy machine is compared with itself.
    # The least of several tries in turn: what others do meanwhile only adds.
    tries = [(seconds_of([mixval_script, *words]), seconds_of(BASELINE)) for _ in range(5)]
    taken, bare = map(min, zip(*tries, strict=True))
    assert taken < max(0.5, 3 * bare)


def test_help_names_every_verb(mixval):
    done = mixval("--help")
    assert done.returncode == 0 and done.stderr == ""
    for group, verbs in VERBS.items():
        assert f"{group}:" in done.stdout
        for verb, text in verbs.items():
            assert verb in done.stdout and text in done.stdout


@pytest.mark.parametrize("verb", [verb for verbs in VERBS.values() for verb in verbs])
def test_every_verb_has_help(mixval, verb):
    # Catches a verb that is listed and does not exist.
    done = mixval(verb, "--help")
    assert done.returncode == 0 and done.stderr == ""
    assert "--debug" in done.stdout


def test_help_of_run_shows_every_setting_with_its_default_in_groups(mixval):
    # Catches a setting without help, and a default other than the one that is used.
    text = mixval("run", "--help").stdout
    lines = [" ".join(line.split()) for line in text.splitlines()]
    whole = " ".join(lines)
    recipe = load_recipe("digits")
    for section in ("data", "training", "base", "failures", "scores", "engine"):
        assert any(line.startswith((f"{section} ", f"{section}:")) for line in lines)
        for key in type(getattr(recipe, section)).model_fields:
            assert f"--{section}.{key} " in whole
    assert f"passes over the training data (default: {recipe.training.epochs})" in whole
    assert f"peak learning rate; cosine to 0 (default: {recipe.training.lr})" in whole
    for flag in ("--out", "--arms", "--panels", "--seeds", "--dry-run", "--quiet"):
        assert flag in whole


def test_without_a_verb_there_is_help_and_no_failure(mixval):
    # Catches exit code 1, which means that a run failed.
    done = mixval()
    assert done.returncode in (0, 2)
    assert "mixval run" in done.stdout + done.stderr or "run  " in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_version(mixval):
    done = mixval("--version")
    assert done.returncode == 0 and done.stdout.startswith("mixval 0.")


def test_datasets_are_listed_with_what_is_here_and_what_is_missing(main_here, tmp_path):
    # Catches a dataset that is an option and not listed, and a copy that is not seen.
    (tmp_path / "root" / "cifar-10-batches-py").mkdir(parents=True)
    code, out, _ = main_here("datasets", "--root", str(tmp_path / "root"))
    assert code == 0
    rows = {line.split()[0]: line for line in out.splitlines()}
    assert set(choose.options("datasets")) - {"npz", "image_folder"} <= set(rows)
    assert rows["cifar10"].endswith(str(tmp_path / "root" / "cifar-10-batches-py"))
    assert "no: put stl10_binary or" in rows["stl10"]
    for word in ("47", "1,880", "research use"):
        assert word in rows["dtd"]
    assert "image_folder" in out and "from_dataset" in out


def test_list_shows_every_option_with_its_parameters(mixval):
    # Catches an option that users can't find.
    done = mixval("list")
    assert done.returncode == 0
    for module in CHOICE_MODULES:
        assert f"\n{module}\n" in f"\n{done.stdout}"
        for option in choose.options(module).values():
            assert option.signature in done.stdout and option.summary in done.stdout
    assert "digits" in done.stdout
    one = mixval("list", "filter_policies").stdout
    assert "negative(" in one and "cross_entropy(" not in one


# -- bad input ----------------------------------------------------------------------------

RUN = ["run", "tiny.yaml", "--out", "out"]
BAD = {
    "unknown verb": (["rum"], ["rum", "'run'"]),
    "unknown verb for list": (["list", "filters"], ["filters", "filter_policies"]),
    "unknown flag": ([*RUN, "--out-dir", "x"], ["--out-dir", "--out"]),
    "unknown key": ([*RUN, "--training.epoch", "3"], ["training.epoch", "'epochs'"]),
    "unknown section": ([*RUN, "--trainin.epochs", "3"], ["trainin", "'training'"]),
    "key without a value": ([*RUN, "--arms.all.alpha"], ["arms.all.alpha", "needs a value"]),
    "unknown option": ([*RUN, "--arms.all.alpha", "eazy"], ["arms.all.alpha", "'easy'"]),
    "out of range": ([*RUN, "--training.lr", "-1"], ["training.lr", "greater than 0"]),
    "not a number": ([*RUN, "--training.lr", "fast"], ["training.lr", "number", "'fast'"]),
    "nan": ([*RUN, "--training.lr", ".nan"], ["training.lr", "finite"]),
    "unknown arm": ([*RUN, "--arms", "gided"], ["arms", "'gided'", "'guided'"]),
    "unknown panel": ([*RUN, "--panels", "mian"], ["panels", "'mian'", "'main'"]),
    "bad seeds": ([*RUN, "--seeds", "one"], ["--seeds", "0 1 2", "'one'"]),
    "negative seed": ([*RUN, "--seeds=-3"], ["--seeds"]),
    "empty range of seeds": ([*RUN, "--seeds", "9-0"], ["seeds"]),
    "no such recipe": (["run", "nothing.yaml"], ["nothing.yaml"]),
    "misspelt recipe": (["run", "digit"], ["'digit'", "'digits'"]),
    "malformed YAML": (["run", "malformed.yaml"], ["malformed.yaml", "YAML"]),
    "python in YAML": (["run", "python.yaml"], ["python.yaml", "YAML"]),
    "not a mapping": (["run", "list.yaml"], ["list.yaml", "mapping"]),
    "code in a file": (["run", "code.yaml"], ["arms.all.alpha", "names code", "command line"]),
    "a folder as recipe": (["run", "."], ["'.'"]),
    "folder of another recipe": (["run", "tiny.yaml", "--out", "other"], ["other", "training.lr"]),
    "folder that is no run": (["run", "tiny.yaml", "--out", "home"], ["home", "not empty"]),
    "file as folder": (["run", "tiny.yaml", "--out", "tiny.yaml"], ["--out"]),
    "no teacher file": ([*RUN, "--teachers.failures.weights", "no.st"], ["weights", "no.st"]),
    "teacher file of text": (
        [*RUN, "--teachers.failures.weights", "tiny.yaml"],
        ["tiny.yaml", "safetensors"],
    ),
    "teacher of other data": (
        [*RUN, "--teachers.failures.weights", "data.safetensors"],
        ["weights", "data.safetensors", "dataset", "cifar10", "digits"],
    ),
    "teacher of another model": (
        [*RUN, "--teachers.failures.weights", "model.safetensors"],
        ["weights", "model.safetensors", "model"],
    ),
    "report of nothing": (["report", "home"], ["home", "recipe.yaml"]),
    "report of no folder": (["report", "nowhere"], ["nowhere"]),
    "report without a run": (["report"], ["run"]),
    "epochs too few": (
        [*RUN, "--arms.all.alpha", "easy", "--training.epochs", "2"],
        ["epochs", "at least 4"],
    ),
    "batch too large": ([*RUN, "--training.batch_size", "61"], ["batch_size", "at most"]),
}


@pytest.fixture
def surroundings(recipe_file, tmp_path):
    """Fill the folder where a command runs with what the bad inputs name."""
    from safetensors.numpy import save_file

    recipe_file()
    (tmp_path / "malformed.yaml").write_text("name: [\n")
    (tmp_path / "python.yaml").write_text("name: !!python/object/apply:os.mkdir [hacked]\n")
    (tmp_path / "list.yaml").write_text("- a\n")
    recipe_file({"arms.all.alpha": {"name": "own:steps"}}, name="code.yaml")
    (tmp_path / "other").mkdir()
    recipe_file({"training.lr": 0.7}, name="other/recipe.yaml")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    facts = {
        "dataset": "digits",
        "classes": "10",
        "model": json.dumps({"name": "conv_net", "width": 64}, sort_keys=True),
        "labels": "train+failures of val_f",
        "splits": "",
        "fingerprint": "0" * 16,
    }
    save_file({}, tmp_path / "model.safetensors", metadata=facts)
    mlp = json.dumps({"name": "mlp", "hidden": [16], "dropout": 0.0}, sort_keys=True)
    changed = {**facts, "model": mlp, "dataset": "cifar10"}
    save_file({}, tmp_path / "data.safetensors", metadata=changed)


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_exit_2_at_once_and_nothing_written(
    mixval, surroundings, tmp_path, snapshot, case
):
    # Catches tracebacks, errors without the field or the fix, and traces of what never ran.
    words, fragments = BAD[case]
    before = snapshot(tmp_path)
    start = processor_seconds()
    done = mixval(*words)
    taken = processor_seconds() - start
    assert done.returncode == 2, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("mixval: ")
    assert done.stdout == ""
    for fragment in fragments:
        assert fragment in lines[0]
    assert snapshot(tmp_path) == before
    assert taken < max(2.0, 8 * seconds_of(BASELINE))


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        (["--data.train", "5000"], "data"),
        (["--engine.device", "abacus"], "engine.device"),
        (["--data.source", "{name: npz, path: none.npz}"], "none.npz"),
        (["--data.source", "{name: cifar10, root: none}"], "no cifar10 under 'none'"),
        (["--data.source", "{name: image_folder, path: none}"], "no folder 'none'"),
    ],
    ids=["too many samples", "no such device", "no such file", "no such data", "no such folder"],
)
def test_bad_input_that_only_torch_can_tell_is_one_line_and_leaves_no_run(
    main_here, surroundings, tmp_path, snapshot, words, fragment
):
    # As above, where it takes longer. A directory bound to a mistake could not be used again.
    before = snapshot(tmp_path)
    code, _, errors = main_here(*RUN, *words)
    assert code == 2
    assert len(errors.strip().splitlines()) == 1 and fragment in errors
    left = {name for name in snapshot(tmp_path) if name not in before}
    assert left <= {"out", "out/.lock"}


@pytest.mark.parametrize("flag", ["--debug", "--quiet"])
def test_flags_may_stand_before_the_verb(mixval, flag):
    # Catches a flag that is known only in one place; at least it must not crash.
    done = mixval(flag, "list", "losses")
    assert done.returncode in (0, 2)
    assert "AttributeError" not in done.stderr
    assert "did you mean '--" not in done.stderr or flag not in done.stderr.split("did you mean")[1]


def test_debug_shows_the_traceback(mixval, surroundings):
    # Catches a --debug that hides what it is for.
    done = mixval(*RUN, "--training.epoch", "3", "--debug")
    assert done.returncode == 2
    assert "Traceback (most recent call last)" in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("mixval: ")


def test_settings_of_named_parts_need_no_recipe_before_them(mixval, tmp_path, snapshot):
    # `mixval run --arms.all.alpha -1` must refuse alpha, not look for a recipe called -1.
    done = mixval("run", "--arms.all.alpha", "-1")
    assert done.returncode == 2
    assert done.stderr.startswith("mixval: arms.all.alpha: constant: value: ")
    done = mixval("run", "--arms.all.mixup_until", "100", "digits")
    assert done.stderr.startswith("mixval: arms.all.mixup_until: ")
    assert snapshot(tmp_path) == {}


def test_later_settings_win_and_both_spellings_work(mixval, surroundings):
    # Catches an override that is dropped because it was given with `=`, or twice.
    done = mixval(*RUN, "--training.lr", "0.5", "--training.lr=-2")
    assert "training.lr" in done.stderr and "-2" in done.stderr
    done = mixval(*RUN, "--arms.all.alpha", "1", "--arms.all.alpha=-2")
    assert "arms.all.alpha" in done.stderr and "-2" in done.stderr


# -- real runs ----------------------------------------------------------------------------


def test_a_run_from_the_command_line(mixval, recipe_file, tmp_path, snapshot):
    # Catches what only the whole way shows: exit code, table, report, the arm that is replayed.
    recipe_file()
    done = mixval("run", "tiny.yaml", "--arms", "yoked", "--out", "out", "--seeds", "3")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "estimated cost: 4 networks" in done.stdout  # base, teacher, guided, yoked
    assert "no verdict from one seed" in done.stdout
    assert "report: out/report.html" in done.stdout
    students = tmp_path / "out" / "main" / "seed-3" / "students"
    assert sorted(path.name for path in students.iterdir()) == ["guided", "yoked"]
    status = json.loads((tmp_path / "out" / "status.json").read_text())
    assert status["commands"][-1] == "mixval run tiny.yaml --arms yoked --out out --seeds 3"
    page = (tmp_path / "out" / "report.html").read_bytes()
    assert status["commands"][-1].encode() in page

    (tmp_path / "out" / "report.html").unlink()
    again = mixval("report", "out")
    assert again.returncode == 0 and again.stdout.strip() == "out/report.html"
    assert (tmp_path / "out" / "report.html").read_bytes() == page


def test_quiet_says_only_what_went_wrong(main_here, recipe_file):
    # Catches a --quiet that is accepted and ignored.
    recipe_file()
    assert main_here("run", "tiny.yaml", "--out", "out", "--quiet") == (0, "", "")
    code, output, errors = main_here("run", "tiny.yaml", "--seeds", "x", "--quiet")
    assert (code, output) == (2, "") and "--seeds" in errors


def test_a_dry_run_estimates_and_writes_nothing(main_here, recipe_file, tmp_path, snapshot):
    # Catches a trial that leaves a directory behind, or that checks nothing.
    recipe_file()
    before = snapshot(tmp_path)
    code, output, _ = main_here("run", "tiny.yaml", "--dry-run", "--seeds", "0-3")
    assert code == 0
    assert "estimated cost: 24 networks, 288 optimiser steps, about " in output
    assert "dry run" in output
    assert snapshot(tmp_path) == before
    code, _, errors = main_here("run", "tiny.yaml", "--dry-run", "--data.train", "5000")
    assert code == 2 and "data" in errors


def test_a_run_that_explodes_exits_1_and_names_the_remedy(main_here, recipe_file):
    # Catches NaN that passes for a result, and a failure that passes for bad input.
    recipe_file({"training.lr": 1e20})
    code, _, errors = main_here("base", "tiny.yaml", "--out", "out")
    assert code == 1
    lines = errors.strip().splitlines()
    assert len(lines) == 1 and "lower training.lr (1e+20)" in lines[0]


def test_a_bug_exits_1_and_offers_the_traceback(main_here, recipe_file, monkeypatch):
    # Catches a bug of ours that looks like a mistake of the user, or that says nothing.
    import mixval.runner

    def fail(*arguments):
        raise RuntimeError("not expected")

    monkeypatch.setattr(mixval.runner, "run_cells", fail)
    recipe_file()
    code, _, errors = main_here("run", "tiny.yaml", "--out", "out")
    assert code == 1
    assert errors.strip() == (
        "mixval: RuntimeError: not expected; run again with --debug for the traceback"
    )
    _, _, errors = main_here("run", "tiny.yaml", "--out", "out", "--debug")
    assert "Traceback (most recent call last)" in errors


def test_a_reader_that_leaves_early_is_no_error(mixval_script):
    # Catches a traceback after `mixval list | head -1`.
    command = f"{mixval_script} list | head -1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False
    )
    assert done.stdout == "recipes\n"
    assert done.stderr == ""


@pytest.mark.parametrize("seeds", ["0-999999999", "5-2"])
def test_a_range_of_seeds_is_neither_endless_nor_empty(main_here, seeds):
    # Catches a list of a thousand million seeds, and a run of none.
    code, _, errors = main_here("run", "--seeds", seeds)
    assert code == 2
    assert "--seeds: a range must hold 1 to 10000 seeds" in errors
