"""mixval score --base: equal to a loop over rows, the same however often it is stopped."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import mixval.score_store
from mixval import MixPlan, read_scores, score_mixes
from mixval.cli import main
from mixval.errors import UserError
from mixval.mixing import draw_plan
from mixval.offline.sources import Layout
from mixval.types import ScoreTable

SHAPE, CLASSES = (1, 6, 6), 3


def make_net(seed, outputs=CLASSES):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(36, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, outputs)
    )


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    labels = np.arange(40) % CLASSES
    return rng.integers(0, 256, (40, 6, 6), dtype=np.uint8), labels


@pytest.fixture
def here(tmp_path, monkeypatch, arrays):
    """Go to a folder with data, weights, a table of mixes, batches, and own code."""
    monkeypatch.chdir(tmp_path)
    images, labels = arrays
    test = {"images_test": images[:10] // 2, "labels_test": labels[:10]}
    np.savez("data.npz", images=images, labels=labels, **test)
    for seed in range(4):
        torch.save(make_net(seed).state_dict(), f"w{seed}.pt")
    (tmp_path / "mine_offline.py").write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import torch\n"
        "import test_offline as t\n"
        "def net(*, seed=0): return t.make_net(seed)\n"
        "def wide(): return t.make_net(0, 5)\n"
        "def narrow(): return t.make_net(0, 2)\n"
        "def colour(): return torch.nn.Conv2d(3, 1, 1)\n"
        "def picture(): return torch.nn.Identity()\n"
        "def broken():\n"
        "    net = t.make_net(0)\n"
        "    net[1].weight.data[0] = float('nan')\n"
        "    return net\n"
        "def data(): return t.OwnData()\n"
        "def nothing(): return 5\n"
    )
    yield tmp_path
    sys.modules.pop("mine_offline", None)


class OwnData(torch.utils.data.Dataset):
    """(image, label) of uint8 arrays."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.images = rng.integers(0, 256, (40, 6, 6), dtype=np.uint8)

    def __len__(self):
        return 40

    def __getitem__(self, place):
        if not 0 <= place < 40:
            raise IndexError(place)
        return self.images[place], place % CLASSES


DATA = {"name": "npz", "path": "data.npz"}
WORDS = ["--data", "{name: npz, path: data.npz}", "--chunk", "16", "--device", "cpu"]
OWN = ["--base", "mine_offline:net", "--updated", "{name: 'mine_offline:net', seed: 1}"]


def score(*words):
    return main(["score", *OWN, *WORDS, "--threads", "1", *words])


def parts(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.glob("part-*.parquet"))}


def losses(nets, x, y_i, y_j, lam):
    """H of one mix under each network, by the definition."""
    found = []
    for net in nets:
        with torch.no_grad():
            log_p = net.eval()(x[None].float()).double().log_softmax(1)[0]
        found.append(float(-lam * log_p[y_i] - (1 - lam) * log_p[y_j]))
    return np.array(found)


def assert_row(table, row, base, updated, x):
    h_base = losses(base, x, table.label_i[row], table.label_j[row], table.lam[row])
    h_updated = losses(updated, x, table.label_i[row], table.label_j[row], table.lam[row])
    assert table.base[row] == pytest.approx(h_base.mean(), abs=2e-5)
    assert table.updated[row] == pytest.approx(h_updated.mean(), abs=2e-5)
    assert table.r_hat[row] == pytest.approx(h_updated.mean() - h_base.mean(), abs=2e-5)
    if len(h_base) == len(h_updated) and len(h_base) > 1:
        error = (h_updated - h_base).std(ddof=1) / np.sqrt(len(h_base))
        assert table.std_error[row] == pytest.approx(error, abs=2e-5)


# -- numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize("draws", [(1, 1), (3, 3), (1, 2)])
def test_scores_are_those_of_a_loop_over_rows(here, arrays, draws):
    # Catches another normalisation, swapped models, and unpaired draws.
    base = [make_net(k) for k in range(draws[0])]
    updated = [make_net(10 + k) for k in range(draws[1])]
    done = score_mixes(base, updated, OwnData(), out="s", rows=100, alpha=0.4, seed=7, chunk=16)
    assert base[0].training  # the caller's networks are as they were
    table = read_scores("s")
    pixels = torch.from_numpy(arrays[0]).double()[:, None] / 255
    scaled = (pixels - pixels.mean()) / pixels.std()
    plans = [
        draw_plan(seed=7, epoch=e, alpha=0.4, num_samples=40, stream="probe") for e in range(3)
    ]
    plan = MixPlan.join(plans).keep(slice(100))
    assert np.array_equal(table.row, np.arange(100)) and np.array_equal(table.lam, plan.lam)
    assert np.array_equal(table.i, plan.first) and np.array_equal(table.j, plan.second)
    assert np.array_equal(table.label_i, arrays[1][plan.first])
    for row in range(100):
        x = table.lam[row] * scaled[table.i[row]] + (1 - table.lam[row]) * scaled[table.j[row]]
        assert_row(table, row, base, updated, x)
    assert np.isnan(table.p_negative).all() == (max(draws) == 1)
    assert (done.rows, done.share) == (100, (table.r_hat <= 0).mean())


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_table_of_ids_is_scored_in_its_order(here, arrays, suffix):
    # Of the test split, whose ids begin at 40. Catches ids taken for positions.
    rng = np.random.default_rng(1)
    i, j, lam = rng.integers(40, 50, 70), rng.integers(40, 50, 70), rng.random(70)
    lam[:2] = 0, 1
    if suffix == "csv":
        rows = [f"{a},{b},{z!r}" for a, b, z in zip(i, j, lam.tolist(), strict=True)]
        (here / "mixes.csv").write_text("\n".join(["i,j,lam", *rows]))
    else:
        pq.write_table(pa.table({"i": i, "j": j, "lam": lam}), "mixes.parquet")
    words = ("--mixes", f"mixes.{suffix}", "--split", "test", "--mean", "0.5", "--std", "0.25")
    assert score(*words, "--out", "s") == 0
    table = read_scores(here / "s")
    assert [*table.i] == [*i] and [*table.j] == [*j] and [*table.lam] == [*lam]
    pixels = torch.from_numpy(arrays[0][:10] // 2).double()[:, None] / 255
    for row in range(70):
        x_i, x_j = ((pixels[k[row] - 40] - 0.5) / 0.25 for k in (i, j))
        x = lam[row] * x_i + (1 - lam[row]) * x_j
        assert_row(table, row, [make_net(0)], [make_net(1)], x)


def test_batches_are_scored_as_they_are(here):
    # 37 rows in two files, chunks of 16 over the end of the first.
    rng = np.random.default_rng(2)
    every = []
    for number, rows in enumerate((20, 17)):
        batch = {
            "x": rng.normal(size=(rows, *SHAPE)).astype(np.float32),
            "y_a": rng.integers(0, 3, rows),
            "y_b": rng.integers(0, 3, rows),
            "lam": rng.random(rows),
        }
        np.savez(f"b{number}.npz", **batch)
        every.append(batch)
    words = ["--batches", "b0.npz", "b1.npz", "--out", "s", "--chunk", "16", "--device", "cpu"]
    assert main(["score", *OWN, *words]) == 0
    table = read_scores(here / "s")
    x, y_a, y_b, lam = (np.concatenate([b[k] for b in every]) for k in ("x", "y_a", "y_b", "lam"))
    assert set(table.i) == set(table.j) == {-1} and np.array_equal(table.lam, lam)
    assert np.array_equal(table.label_i, y_a) and np.array_equal(table.label_j, y_b)
    for row in range(37):
        assert_row(table, row, [make_net(0)], [make_net(1)], torch.from_numpy(x[row]))


def test_a_plan_of_ones_own_is_scored_by_positions(here):
    plan = draw_plan(seed=0, epoch=0, alpha=1.0, num_samples=40)
    score_mixes(make_net(0), make_net(1), OwnData(), plan, out="s")
    assert np.array_equal(read_scores("s").i, plan.first)
    wrong = draw_plan(seed=0, epoch=0, alpha=1.0, num_samples=41)
    with pytest.raises(UserError, match="positions in train, 0 to 39"):
        score_mixes(make_net(0), make_net(1), OwnData(), wrong, out="s2")
    assert not (here / "s2").exists()


def test_a_model_may_know_more_classes_than_the_data(here):
    score_mixes(make_net(0, 5), make_net(1, 5), OwnData(), out="s", rows=20)
    table = read_scores("s")
    pixels = torch.from_numpy(OwnData().images).double()[:, None] / 255
    scaled = (pixels - pixels.mean()) / pixels.std()
    x = table.lam[3] * scaled[table.i[3]] + (1 - table.lam[3]) * scaled[table.j[3]]
    assert_row(table, 3, [make_net(0, 5)], [make_net(1, 5)], x)


def test_the_default_normalisation_is_of_train_for_every_split(here, arrays):
    # The test images are half as bright. Catches statistics of the split that is scored.
    assert score("--split", "test", "--out", "s") == 0
    table = read_scores("s")
    train = torch.from_numpy(arrays[0]).double() / 255
    pixels = torch.from_numpy(arrays[0][:10] // 2).double()[:, None] / 255
    scaled = (pixels - train.mean()) / train.std()
    for row in range(10):
        x_i, x_j = (scaled[k[row] - 40] for k in (table.i, table.j))
        x = table.lam[row] * x_i + (1 - table.lam[row]) * x_j
        assert_row(table, row, [make_net(0)], [make_net(1)], x)


def test_parts_of_several_chunks_hold_the_same_rows(here):
    # 200 chunks of one row, three to a part. Catches a chunk that is written twice in a part.
    nets = make_net(0), make_net(1)
    for out, chunk in (("one", 1), ("many", 50)):
        score_mixes(*nets, OwnData(), out=out, rows=200, chunk=chunk, device="cpu")
    one, many = read_scores("one"), read_scores("many")
    assert len(parts(here / "one")) == 67 and len(parts(here / "many")) == 4
    for name in ("row", "i", "j", "lam", "label_i", "label_j"):
        assert np.array_equal(getattr(one, name), getattr(many, name)), name
    assert np.allclose(one.r_hat, many.r_hat, atol=1e-5)


def test_words_and_objects_give_the_same_bytes(here):
    # Same data by name, by own code, and as an object; the same networks as files and modules.
    score_mixes([make_net(0)], [make_net(1)], OwnData(), out="a", rows=60, device="cpu")
    words = ["--base", "mine_offline:net@w0.pt", "--updated", "mine_offline:net@w1.pt"]
    where = ["--data", "mine_offline:data", "--rows", "60", "--device", "cpu"]
    assert main(["score", *words, *where, "--out", "b"]) == 0
    one, other = read_scores("a"), read_scores("b")
    for name in ScoreTable.columns():
        assert getattr(one, name).tobytes() == getattr(other, name).tobytes(), name
    assert one.provenance["data"] == other.provenance["data"]


# -- layout, stopping and going on ------------------------------------------------------------


@given(st.integers(1, 10**9), st.integers(1, 4096))
def test_parts_hold_every_row_once_in_whole_chunks(count, chunk):
    layout = Layout(count, chunk)
    assert layout.part_rows % chunk == 0 and layout.part_rows <= 256 * chunk
    last = layout.num_parts - 1
    assert layout.rows(0).start == 0 and layout.rows(last).stop == count and len(layout.rows(last))
    middle = last // 2
    assert middle == last or layout.rows(middle).stop == layout.rows(middle + 1).start
    assert layout.num_parts >= min(64, -(-count // chunk))  # enough to share


@pytest.mark.parametrize("stop", range(7))
def test_stopped_at_any_chunk_and_given_again_leaves_the_same_bytes(here, monkeypatch, stop):
    # Seven chunks. Catches a part that looks whole and is not, and rows scored twice.
    assert score("--rows", "100", "--out", "whole") == 0
    written = []

    class Stopping(mixval.score_store.ScoreWriter):
        def write(self, table):
            if len(written) == stop:
                raise KeyboardInterrupt
            written.append(len(table))
            super().write(table)

    with monkeypatch.context() as patch:
        patch.setattr("mixval.offline.ScoreWriter", Stopping)
        assert score("--rows", "100", "--out", "s") == 130
    assert len(parts(here / "s")) == stop
    assert "share r_hat <= 0" not in json.loads((here / "s" / "scores.json").read_text())
    (here / "s" / ".part-00006.parquet.part").write_text("what a kill leaves")
    kept = {name: (here / "s" / name).stat().st_mtime_ns for name in parts(here / "s")}
    assert score("--rows", "100", "--out", "s") == 0
    assert parts(here / "s") == parts(here / "whole")
    assert all((here / "s" / name).stat().st_mtime_ns == time for name, time in kept.items())
    assert {p.name for p in (here / "s").iterdir()} - {".lock"} == {
        *parts(here / "s"),
        "scores.json",
    }


def test_a_damaged_part_is_made_again(here):
    assert score("--rows", "100", "--out", "s") == 0
    before = parts(here / "s")
    (here / "s" / "part-00002.parquet").write_bytes(before["part-00002.parquet"][:-9])
    assert score("--rows", "100", "--out", "s") == 0
    assert parts(here / "s") == before


CHANGES = {
    "mixes": ["--seed", "1"],
    "base": ["--base", "{name: 'mine_offline:net', seed: 2}"],
    "updated": ["--updated", "{name: 'mine_offline:net', seed: 2}"],
    "data": ["--data", "{name: npz, path: other.npz}"],
    "normalisation": ["--mean", "0.4"],
    "chunk": ["--chunk", "8"],
    "threads": ["--threads", "2"],
    "precision": ["--precision", "bf16"],
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_folder_of_something_else_is_refused_and_kept(here, arrays, snapshot, capsys, what):
    images = arrays[0].copy()
    images[0, 0, 0] ^= 1
    np.savez("other.npz", images=images, labels=arrays[1])
    assert score("--rows", "40", "--out", "s") == 0
    before = snapshot(here / "s")
    capsys.readouterr()
    assert score("--rows", "40", "--out", "s", *CHANGES[what]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"mixval: --out: s was made with another {what} (")
    assert error.count("\n") == 1 and snapshot(here / "s") == before


def test_threads_and_device_of_before_are_taken_again(here):
    # `auto` is resolved once and written down.
    words = [*OWN, *WORDS[:4], "--rows", "40", "--out", "s"]
    assert main(["score", *words, "--threads", "2", "--device", "cpu"]) == 0
    assert main(["score", *words]) == 0
    assert torch.get_num_threads() == 1


# -- several processes --------------------------------------------------------------------


def launch(script, folder, world, *words):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world)]
    command = [sys.executable, *launcher, script, "score", *OWN, *WORDS, "--threads", "1", *words]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.slow
def test_two_processes_leave_the_files_of_one(here, mixval_script):
    assert score("--rows", "150", "--out", "one") == 0
    done = launch(mixval_script, here, 2, "--rows", "150", "--out", "two")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("next: mixval top two") == 1
    assert parts(here / "two") == parts(here / "one")
    (here / "two" / "part-00004.parquet").unlink()
    assert score("--rows", "150", "--out", "two") == 0  # one goes on where two were
    assert parts(here / "two") == parts(here / "one")
    done = launch(mixval_script, here, 2, "--rows", "10", "--out", "two")
    assert done.returncode != 0 and done.stderr.count("mixval: --out: two was made with") == 1


# -- the command --------------------------------------------------------------------------


def test_the_command_says_where_scores_are_and_top_reads_them(here, capsys):
    assert score("--rows", "200", "--out", "s") == 0
    said = capsys.readouterr()
    share = (read_scores(here / "s").r_hat <= 0).mean()
    assert said.out.splitlines() == [
        "scores: s (200 mixes)",
        f"share r_hat <= 0: {share:.1%}",
        "next: mixval top s",
    ]
    assert said.err == ""  # no progress bar where nobody looks
    assert main(["top", "s", "--rows", "1"]) == 0
    assert "most harmful parents" in capsys.readouterr().out
    said = json.loads((here / "s" / "scores.json").read_text())
    assert said["command"].startswith("mixval score --base") and said["rows"] == 200
    (here / "s" / "part-00000.parquet").unlink()


def test_top_of_batches_names_no_parents(here, capsys):
    rng = np.random.default_rng(2)
    x, labels = rng.normal(size=(20, *SHAPE)), np.arange(20) % 3
    np.savez("b.npz", x=x, y_a=labels, y_b=labels[::-1], lam=np.array(0.3))
    assert main(["score", *OWN, "--batches", "b.npz", "--out", "s"]) == 0
    assert main(["top", "s"]) == 0
    shown = capsys.readouterr().out
    assert "most harmful class pairs" in shown and "parents" not in shown


BAD = {
    "no updated": (["--base", "mine_offline:net", *WORDS], "--updated: must be given"),
    "no data": (OWN, "--data: must be given"),
    "recipe's setting": ([*OWN, *WORDS, "--base.alpha", "1"], "--base.alpha: is a recipe's"),
    "recipe": (["digits", *OWN, *WORDS], "unknown argument 'digits'"),
    "mixes and rows": ([*OWN, *WORDS, "--mixes", "a.csv", "--rows", "3"], "--rows: does not go"),
    "batches and data": (
        [*OWN, *WORDS, "--batches", "a.npz"],
        "--data: does not go with --batches",
    ),
    "no rows": ([*OWN, *WORDS, "--rows", "0"], "--rows: must be at least 1, got 0"),
    "no chunk": ([*OWN, *WORDS, "--chunk", "0"], "--chunk: must be at least 1, got 0"),
    "alpha": ([*OWN, *WORDS, "--alpha", "nan"], "--alpha: must be finite and >= 0, got nan"),
    "seed": ([*OWN, *WORDS, "--seed", "-1"], "--seed: must be at least 0, got -1"),
    "no number": ([*OWN, *WORDS, "--rows", "many"], "argument --rows: invalid int value: 'many'"),
    "precision": ([*OWN, *WORDS, "--precision", "fp16"], "--precision: must be"),
    "device": ([*OWN, *WORDS, "--device", "abacus"], "--device: must"),
    "no dataset": ([*OWN, "--data", "fashon_mnist"], "did you mean 'fashion_mnist'?"),
    "no file": ([*OWN, "--data", "{name: npz, path: no.npz}"], "no file 'no.npz'"),
    "no Dataset": ([*OWN, "--data", "mine_offline:nothing"], "--data: must be a dataset's name"),
    "split": ([*OWN, *WORDS, "--split", "val"], "--split: the data has no 'val'"),
    "mean": ([*OWN, *WORDS, "--mean", "1", "2"], "--mean: must be one finite number, or one for"),
    "std": ([*OWN, *WORDS, "--std", "0"], "--std: must be above 0, got 0"),
    "mixes": ([*OWN, *WORDS, "--mixes", "bad.csv"], "bad.csv: i must be the id of a sample"),
    "batches": ([*OWN, "--batches", "bad.npz"], "bad.npz: there is no such file"),
    "no model": (["--updated", *OWN[3:], "--base", "resnet81@w0.pt", *WORDS], "'resnet18'?"),
    "weights": (["--updated", *OWN[3:], "--base", "mlp@w0.pt", *WORDS], "w0.pt does not fit mlp"),
    "narrow": (
        ["--base", "mine_offline:narrow", "--updated", "mine_offline:net", *WORDS],
        "--base mine_offline:narrow: has 2 outputs, the data 3 classes",
    ),
    "disagree": (
        ["--base", "mine_offline:net", "--updated", "mine_offline:wide", *WORDS],
        "--updated mine_offline:wide: has 5 outputs, --base mine_offline:net has 3",
    ),
    "NaN logits": (
        ["--base", "mine_offline:net", "--updated", "mine_offline:broken", *WORDS],
        "--updated mine_offline:broken: gives NaN or infinite logits",
    ),
    "other inputs": (
        ["--base", "mine_offline:colour", "--updated", "mine_offline:net", *WORDS],
        "--base mine_offline:colour: can't take inputs of (1, 6, 6)",
    ),
    "no logits": (
        ["--base", "mine_offline:picture", "--updated", "mine_offline:net", *WORDS],
        "--base mine_offline:picture: must return logits (B, K), got (2, 1, 6, 6)",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_exit_2_and_nothing_written(here, snapshot, capsys, case):
    words, message = BAD[case]
    (here / "bad.csv").write_text("i,j,lam\n400,0,0.5\n")
    before = {name for name in snapshot(here) if "__pycache__" not in name}
    assert main(["score", *words, "--out", "s"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and re.match(r"mixval: .*\n\Z", said.err), said.err
    assert message in said.err
    assert {name for name in snapshot(here) if "__pycache__" not in name} == before


def test_folders_that_hold_something_else_are_refused(here, snapshot, capsys):
    (here / "home").mkdir()
    (here / "home" / "thesis.tex").write_text("years of work")
    (here / "odd").mkdir()
    (here / "odd" / "scores.json").write_text("[1]")
    for out, message in (
        ("home", "--out: home is not empty and has no scores.json"),
        ("data.npz", "--out: data.npz is a file"),
        ("odd", "odd/scores.json is damaged or not ours"),
    ):
        before = snapshot(here / "home")
        assert score("--out", out) == 2
        assert message in capsys.readouterr().err
        assert snapshot(here / "home") == before
    assert score("--rows", "40", "--out", "s") == 0
    (here / "s" / "part-77777.parquet").write_bytes(b"")
    assert score("--rows", "40", "--out", "s") == 2
    assert "part-77777.parquet is not of these scores" in capsys.readouterr().err


def test_logits_that_turn_nan_later_stop_with_the_models_name(here, capsys):
    class Later(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls, self.net = 0, make_net(0)

        def forward(self, x):
            self.calls += 1
            return self.net(x) * (float("nan") if self.calls > 3 else 1.0)

    with pytest.raises(UserError, match="--updated Later: gives NaN or infinite logits"):
        score_mixes(make_net(1), Later(), OwnData(), out="s", rows=100, chunk=16)
    left = {path.name for path in (here / "s").iterdir()} - {".lock", "scores.json"}
    assert left == {f"part-0000{k}.parquet" for k in range(len(left))} and 0 < len(left) < 7
    assert main(["top", "s"]) == 0
    assert "most harmful" in capsys.readouterr().out


# -- the stage ----------------------------------------------------------------------------


def test_a_run_directory_is_scored_by_its_own_recipe(
    tiny_description, tmp_path, monkeypatch, capsys
):
    import yaml

    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny_description()))
    assert main(["score", "tiny.yaml", "--out", "out"]) == 0
    folder = tmp_path / "out" / "main" / "seed-0" / "scores" / "failures"
    before = read_scores(folder)
    (folder / "manifest.json").unlink()
    (folder / "part-0000.parquet").unlink()
    assert main(["score", "out"]) == 0
    assert not (tmp_path / "runs").exists()
    assert read_scores(folder).r_hat.tobytes() == before.r_hat.tobytes()
    assert main(["score", "nowhere"]) == 2
    assert "no packaged recipe and no file 'nowhere'" in capsys.readouterr().err


if importlib.util.find_spec("duckdb") is not None:

    def test_the_queries_of_the_docs_run_and_agree(here):
        import duckdb

        nets = [make_net(k) for k in range(6)]
        score_mixes(nets[:3], nets[3:], OwnData(), out="scores", rows=400)
        table = read_scores("scores")
        text = (Path(__file__).parents[1] / "docs" / "offline_scoring.md").read_text()
        queries = text.split("```sql\n")[1].split("```")[0].split(";\n")
        found = [duckdb.sql(query) for query in queries if query.strip()]
        pairs, tenths, parents, stability, _ = [f and f.fetchall() for f in found]
        a, b, mean, kept, mixes = pairs[0]
        of = (np.minimum(table.label_i, table.label_j) == a) & (
            np.maximum(table.label_i, table.label_j) == b
        )
        assert mixes == of.sum() and mean == pytest.approx(table.r_hat[of].mean(), abs=1e-6)
        assert kept == pytest.approx((table.r_hat[of] <= 0).mean())
        assert len(tenths) == 10 and tenths[0][1] == table.lam.min()
        with_parent = np.concatenate(
            [table.r_hat[table.i == parents[0][0]], table.r_hat[table.j == parents[0][0]]]
        )
        assert parents[0][1] == pytest.approx(with_parent.mean(), abs=1e-6)
        assert sum(row[1] for row in stability) == 400
        assert pq.read_table("kept.parquet").num_rows == (table.p_negative > 0.9).sum()
