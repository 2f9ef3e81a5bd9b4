"""A run directory: files whole or absent, artifacts known by what made them, one run at a time."""

import json
import os
import subprocess
import sys

import pytest

from mixval import files
from mixval.errors import UserError
from mixval.files import MANIFEST, seal, sealed_facts, write_atomically
from mixval.store import Artifact, Store

FACTS = {"made_from": {"seed": 3, "data": "abc"}, "facts": {"accuracy": 0.9375, "rows": 7}}


@pytest.fixture
def sealed(tmp_path):
    """Return a sealed folder with two files."""
    folder = tmp_path / "artifact"
    folder.mkdir()
    (folder / "weights.bin").write_bytes(bytes(range(256)))
    (folder / "metrics.jsonl").write_text('{"epoch": 0}\n')
    seal(folder, FACTS)
    return folder


# -- files that are whole or not there ----------------------------------------------------


def test_a_file_is_written_whole_and_nothing_else_is_left(tmp_path):
    # Catches a temporary file that stays, and folders that have to exist before.
    path = tmp_path / "a" / "b" / "file.json"
    write_atomically(path, b"one")
    write_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert os.listdir(path.parent) == ["file.json"]


@pytest.mark.parametrize("fails", ["replace", "fsync"])
def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch, fails):
    # Catches a file that is emptied before the new text is safely on the disk.
    path = tmp_path / "file.json"
    write_atomically(path, b"old")

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, fails, full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new, and longer than before")
    assert path.read_bytes() == b"old"


def test_a_reader_never_sees_a_part(tmp_path):
    # Catches writing in place: a reader in another process must see one text or the other.
    path = tmp_path / "file.txt"
    texts = [letter * 200_000 for letter in "ab"]
    write_atomically(path, texts[0].encode())
    code = (
        "import sys, pathlib; from mixval.files import write_atomically\n"
        "path = pathlib.Path(sys.argv[1])\n"
        "for k in range(100): write_atomically(path, b'ab'[k % 2:k % 2 + 1] * 200_000)"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(path)])
    while writer.poll() is None:
        assert path.read_text() in texts
    assert writer.returncode == 0


# -- folders that say what is in them -----------------------------------------------------


def test_a_sealed_folder_gives_its_facts_back(sealed):
    assert sealed_facts(sealed) == FACTS


def test_an_unfinished_folder_has_no_facts(sealed, tmp_path):
    # Catches a stage that counts as finished because its folder exists.
    (sealed / MANIFEST).unlink()
    assert sealed_facts(sealed) is None
    assert sealed_facts(tmp_path / "nothing") is None


@pytest.mark.parametrize("name", ["weights.bin", "metrics.jsonl"])
@pytest.mark.parametrize("damage", ["flip", "cut", "longer", "lose", "folder"])
def test_a_damaged_file_is_noticed_by_name(sealed, caplog, name, damage):
    # Catches weights with a flipped bit that load without a word.
    path = sealed / name
    data = bytearray(path.read_bytes())
    if damage in ("lose", "folder"):
        path.unlink()
    if damage == "folder":
        path.mkdir()
    if damage == "flip":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    if damage == "cut":
        path.write_bytes(data[:-1])
    if damage == "longer":
        path.write_bytes(data + b"\0")
    assert sealed_facts(sealed) is None
    assert name in caplog.text


def test_every_flipped_bit_of_a_manifest_is_noticed(sealed):
    # A result lives in its manifest: one flipped bit can turn an accuracy of 0.93 into 0.97.
    path = sealed / MANIFEST
    whole = path.read_bytes()
    unnoticed = []
    for place in range(len(whole)):
        data = bytearray(whole)
        data[place] ^= 1 << place % 7  # a bit of each byte; the eighth would leave ASCII
        path.write_bytes(data)
        if sealed_facts(sealed) not in (None, FACTS):
            unnoticed.append(place)
    assert not unnoticed, f"{len(unnoticed)} of {len(whole)} flips"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", '"text"', "{}", '{"files": []}', '{"files": {"weights.bin": 3}}']
)
def test_a_manifest_that_says_something_else_is_not_used(sealed, text):
    # Catches a crash on a manifest that is JSON, but not a manifest.
    (sealed / MANIFEST).write_text(text)
    assert sealed_facts(sealed) is None


# -- artifacts ----------------------------------------------------------------------------

MADE_FROM = {"format": 1, "seed": 3, "settings": {"lr": 0.1, "alpha": {"name": "easy"}}}


def test_an_artifact_is_found_again_by_what_made_it(tmp_path):
    # Catches work that is done twice, or facts that do not come back as they were.
    artifact = Artifact(tmp_path / "base", MADE_FROM, kind="base")
    assert artifact.facts() is None
    artifact.path("weights.bin").write_bytes(b"abc")
    artifact.finish({"accuracy": 0.5})
    assert Artifact(tmp_path / "base", MADE_FROM, kind="base").facts() == {"accuracy": 0.5}


@pytest.mark.parametrize(
    ("key", "value"),
    [("seed", 4), ("format", 2), ("settings", {"lr": 0.2, "alpha": {"name": "easy"}}), ("new", 1)],
)
def test_an_artifact_made_from_something_else_is_refused_and_kept(tmp_path, key, value):
    # Catches results of another recipe that are reused, or overwritten.
    artifact = Artifact(tmp_path / "base", MADE_FROM, kind="base")
    artifact.path("weights.bin").write_bytes(b"abc")
    artifact.finish({})
    before = (tmp_path / "base" / MANIFEST).read_bytes()
    other = Artifact(tmp_path / "base", {**MADE_FROM, key: value}, kind="base")
    with pytest.raises(UserError, match=f"was made with another {key}"):
        other.facts()
    assert (tmp_path / "base" / MANIFEST).read_bytes() == before
    assert other.fingerprint != artifact.fingerprint


def test_the_fingerprint_does_not_depend_on_the_order_of_keys():
    # Catches a run that is remade because a dictionary was built in another order.
    turned = dict(reversed(MADE_FROM.items()))
    one, other = (Artifact(None, made, kind="base") for made in (MADE_FROM, turned))
    assert one.fingerprint == other.fingerprint


def test_a_damaged_artifact_is_made_again(tmp_path):
    # Catches a damaged artifact that stops the run, or that is used.
    artifact = Artifact(tmp_path / "base", MADE_FROM, kind="base")
    artifact.path("weights.bin").write_bytes(b"abc")
    artifact.finish({"n": 1})
    (tmp_path / "base" / "weights.bin").write_bytes(b"abd")
    assert artifact.facts() is None
    artifact.path("weights.bin").write_bytes(b"abc")
    artifact.finish({"n": 2})
    assert artifact.facts() == {"n": 2}


# -- the directory of a run ---------------------------------------------------------------


def test_places_do_not_meet(tmp_path):
    # Catches two artifacts in one folder.
    store = Store(tmp_path)
    places = {
        store.place(panel, seed, *names)
        for panel in ("main", "noisy")
        for seed in (1, 11)
        for names in (("base",), ("students", "all"), ("results", "all"), ("teachers", "all"))
    }
    assert len(places) == 16


def test_only_whole_artifacts_are_results(tmp_path):
    # Catches a damaged or unfinished result in the table.
    store = Store(tmp_path)
    for seed in (0, 1, 2):
        folder = store.place("main", seed, "results", "all")
        folder.mkdir(parents=True)
        (folder / "rows.txt").write_text("x")
        Artifact(folder, {}, kind="results").finish({"seed": seed})
    store.place("main", 1, "results", "all", "rows.txt").write_text("y")
    store.place("main", 2, "results", "all", MANIFEST).unlink()
    found = list(store.finished("*/seed-*/results/*"))
    assert found == [(("main", "seed-0", "results", "all"), {"seed": 0})]
    assert store.is_finished("main", 0, "results", "all")
    assert not store.is_finished("main", 2, "results", "all")


def test_a_directory_is_bound_to_its_recipe(tmp_path, tiny_recipe, snapshot):
    # Catches two recipes in one table.
    store = Store(tmp_path / "run")
    store.check(tiny_recipe())
    store.bind(tiny_recipe())
    store.check(tiny_recipe())
    assert store.recipe() == tiny_recipe()
    before = snapshot(tmp_path)
    with pytest.raises(UserError, match=r"belongs to another recipe \(it differs in training.lr\)"):
        store.check(tiny_recipe({"training.lr": 0.5}))
    with pytest.raises(UserError, match="another recipe"):
        store.bind(tiny_recipe({"training.lr": 0.5}))
    assert snapshot(tmp_path) == before


def test_what_was_run_before_stays_known(tmp_path, tiny_recipe):
    # Catches a second command with fewer arms that makes the report forget the others.
    store = Store(tmp_path / "run")
    store.bind(tiny_recipe({"arms.extra": {"alpha": 3}, "panels.noisy": {"label_noise": 0.1}}))
    store.bind(tiny_recipe({"arms.other": {"alpha": 4}}))
    recipe = store.recipe()
    assert {"extra", "other", "all"} <= set(recipe.arms)
    assert "noisy" in recipe.panels


def test_a_directory_that_is_no_run_is_refused(tmp_path, tiny_recipe, snapshot):
    # Catches a run that scatters its files over someone's home directory.
    (tmp_path / "thesis.tex").write_text("years of work")
    before = snapshot(tmp_path)
    with pytest.raises(UserError, match="is not empty and holds no run; choose another"):
        Store(tmp_path).check(tiny_recipe())
    assert snapshot(tmp_path) == before


def test_a_file_where_the_directory_should_be_is_refused(tmp_path, tiny_recipe):
    # Catches an error of the operating system where one line would do.
    (tmp_path / "run").write_text("a file")
    with pytest.raises(UserError, match="--out"):
        Store(tmp_path / "run").check(tiny_recipe())


@pytest.mark.parametrize(
    "data",
    [b"", b"name: [", b"\xff\xfe\x00", b"- a", b"name: x\ntraining: {epoks: 3}"],
    ids=["empty", "malformed", "not text", "a list", "unknown key"],
)
def test_a_damaged_recipe_of_a_run_is_refused_by_name(tmp_path, tiny_recipe, data):
    # Catches a traceback, or a run that starts over on top of the old one.
    (tmp_path / "recipe.yaml").write_bytes(data)
    with pytest.raises(UserError, match=r"recipe\.yaml"):
        Store(tmp_path).check(tiny_recipe())


def test_one_run_at_a_time(tmp_path):
    # Catches two processes that write the same files.
    first, second = Store(tmp_path), Store(tmp_path)
    with (
        first.locked(),
        pytest.raises(UserError, match="in use by another run"),
        second.locked(),
    ):
        pytest.fail("both hold the lock")
    with second.locked():  # released
        pass


def test_the_lock_is_released_when_a_run_fails(tmp_path):
    # Catches a run that has to be unlocked by hand.
    with pytest.raises(ZeroDivisionError), Store(tmp_path).locked():
        raise ZeroDivisionError
    with Store(tmp_path).locked():
        pass


def test_json_of_a_run_reads_back(tmp_path):
    store = Store(tmp_path)
    assert store.read_json("status.json") is None
    store.write_json("status.json", {"state": "finished", "seeds": [0, 1]})
    assert store.read_json("status.json") == {"state": "finished", "seeds": [0, 1]}
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "finished"
