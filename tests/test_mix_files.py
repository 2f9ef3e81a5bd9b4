"""Tables and batches of mixes: read as written, in pieces of any size, or refused by row."""

import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from mixval.errors import UserError
from mixval.offline.files import BatchFiles, read_table
from mixval.types import MixPlan, Part

IDS = torch.tensor([7, 3, 100, 40, 41])


@pytest.fixture
def part():
    return Part(torch.zeros(5, 1, 2, 2, dtype=torch.uint8), torch.arange(5), IDS)


def write_csv(path, i, j, lam):
    lines = ["lam,note,i,j"] + [f"{z!r},x,{a},{b}" for a, b, z in zip(i, j, lam, strict=True)]
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("kind", ["csv", "parquet", "parquet of float32 and int32"])
def test_a_table_comes_back_as_positions_bit_by_bit(tmp_path, part, kind):
    # 100,000 rows come in several pieces. Catches ids taken for positions, and lost digits.
    rng = np.random.default_rng(0)
    first, second, lam = (
        rng.integers(0, 5, 100_000),
        rng.integers(0, 5, 100_000),
        rng.random(100_000),
    )
    i, j = IDS.numpy()[first], IDS.numpy()[second]
    path = tmp_path / f"mixes.{kind.split()[0]}"
    if kind == "csv":
        write_csv(path, i.tolist(), j.tolist(), lam.tolist())
    else:
        if "32" in kind:
            i, j, lam = i.astype(np.int32), j.astype(np.int32), lam.astype(np.float32)
        pq.write_table(pa.table({"i": i, "j": j, "lam": lam, "r_hat": lam}), path)
    plans = list(read_table(path, part, "train"))
    assert len(plans) > 1
    whole = MixPlan.join(plans)
    assert np.array_equal(whole.first, first) and np.array_equal(whole.second, second)
    assert np.array_equal(whole.lam, lam.astype(np.float64)) and whole.lam.dtype == np.float64


BAD_TABLES = {
    "i is no id": (
        "i,j,lam\n7,3,.5\n5,3,.5\n",
        "i must be the id of a sample of train (3 to 100), got 5 in row 1",
    ),
    "j is no id": (
        "i,j,lam\n7,101,.5\n",
        "j must be the id of a sample of train (3 to 100), got 101 in row 0",
    ),
    "negative": ("i,j,lam\n-1,3,.5\n", "got -1 in row 0"),
    "lam above 1": ("i,j,lam\n7,3,1.5\n", "lam must be in [0, 1], got 1.5 in row 0"),
    "lam below 0": ("i,j,lam\n7,3,.5\n7,3,-0.1\n", "lam must be in [0, 1], got -0.1 in row 1"),
    "NaN": ("i,j,lam\n7,3,nan\n", "lam must be a number in every row, got nothing in row 0"),
    "missing value": ("i,j,lam\n7,,.5\n", "j must be a number in every row"),
    "missing column": (
        "i,k,lam\n7,3,.5\n",
        "has no column 'j'; it needs i, j and lam, has i, k, lam",
    ),
    "fractions": ("i,j,lam\n7.5,3,.5\n", "not a readable table"),
    "words": ("i,j,lam\n7,3,half\n", "not a readable table"),
    "ragged": ("i,j,lam\n7,3\n", "not a readable table"),
    "no rows": ("i,j,lam\n", "has no rows"),
    "empty": ("", "has no column 'i'"),
}


@pytest.mark.parametrize("case", BAD_TABLES)
def test_bad_rows_are_refused_by_row(tmp_path, part, case):
    text, message = BAD_TABLES[case]
    path = tmp_path / "mixes.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        list(read_table(path, part, "train"))
    assert "\n" not in str(caught.value) and "mixes.csv" in str(caught.value)


def test_bad_parquet_and_other_files_are_refused(tmp_path, part):
    def refused(path, message):
        with pytest.raises(UserError, match=message):
            list(read_table(path, part, "train"))

    path = tmp_path / "mixes.parquet"
    refused(path, "no such file")
    path.write_text("text")
    refused(path, "not a readable table")
    pq.write_table(pa.table({"i": ["a"], "j": [3], "lam": [0.5]}), path)
    refused(path, "i must be whole numbers, got string")
    pq.write_table(pa.table({"i": [7], "j": [3], "lam": [np.nan]}), path)
    refused(path, r"lam must be in \[0, 1\], got nan in row 0")
    pq.write_table(pa.table({"i": [7], "lam": [0.5]}), path)
    refused(path, "has no column 'j'")
    refused(tmp_path / "mixes.json", r"must be a \.csv or \.parquet")


# -- batches ------------------------------------------------------------------------------


def make_batch(rows=4, seed=0, shape=(1, 2, 2)):
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(rows, *shape)).astype(np.float32),
        "y_a": rng.integers(0, 3, rows),
        "y_b": rng.integers(0, 3, rows),
        "lam": rng.random(rows),
    }


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 20), st.integers(1, 9))
def test_any_stretch_of_rows_is_that_of_all_files_joined(tmp_path_factory, sizes, start, length):
    folder = tmp_path_factory.mktemp("batches")
    batches = [make_batch(size, seed) for seed, size in enumerate(sizes)]
    for number, batch in enumerate(batches):
        np.savez(folder / f"{number}.npz", **batch)
    files = BatchFiles([folder / f"{number}.npz" for number in range(len(sizes))])
    start = min(start, sum(sizes) - 1)
    found = files.read(start, start + length)
    whole = {name: np.concatenate([b[name] for b in batches]) for name in batches[0]}
    for name, column in (("inputs", "x"), ("label_i", "y_a"), ("label_j", "y_b"), ("lam", "lam")):
        assert np.array_equal(getattr(found, name).numpy(), whole[column][start : start + length])
    assert files.num_labels == max(whole["y_a"].max(), whole["y_b"].max()) + 1
    assert len(files) == sum(sizes)


def test_safetensors_and_one_lambda_for_all(tmp_path):
    batch = {name: torch.from_numpy(value) for name, value in make_batch().items()}
    batch["lam"], batch["x"] = torch.tensor(0.25), batch["x"].bfloat16()
    save_file(batch, tmp_path / "b.safetensors")
    found = BatchFiles([tmp_path / "b.safetensors"]).read(0, 4)
    assert torch.equal(found.inputs, batch["x"].float()) and found.inputs.dtype == torch.float32
    assert found.lam.tolist() == [0.25] * 4 and found.lam.dtype == torch.float64


def changed(name, change):
    def make():
        batch = make_batch()
        batch[name] = change(batch[name])
        return batch

    return make


def poisoned(x):
    x[2, 0, 1, 1] = np.nan
    return x


BAD_BATCHES = {
    "NaN in x": (changed("x", poisoned), "x must be finite, got NaN or infinity in row 2"),
    "x of bytes": (changed("x", lambda x: x.astype(np.uint8)), "x must be floats (B, ...)"),
    "lam above 1": (changed("lam", lambda v: v + 1), "lam must be in [0, 1]"),
    "lam of NaN": (changed("lam", lambda v: v * np.nan), "lam must be in [0, 1], got nan in row 0"),
    "lam too short": (changed("lam", lambda v: v[:3]), "lam must be a float or floats (4,)"),
    "labels too short": (changed("y_a", lambda v: v[:3]), "y_a must be whole numbers (4,)"),
    "soft labels": (changed("y_b", lambda v: v / 2), "y_b must be whole numbers (4,)"),
    "negative label": (changed("y_b", lambda v: v - 9), "y_b must be at least 0"),
}


@pytest.mark.parametrize("case", BAD_BATCHES)
def test_bad_batches_are_refused(tmp_path, case):
    make, message = BAD_BATCHES[case]
    np.savez(tmp_path / "b.npz", **make())
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        BatchFiles([tmp_path / "b.npz"])
    assert "b.npz" in str(caught.value)


def test_files_that_are_no_batches_are_refused(tmp_path):
    def refused(name, message):
        with pytest.raises(UserError, match=message):
            BatchFiles([tmp_path / name])

    refused("none.npz", "no such file")
    refused("b.pt", r"must be a \.npz or \.safetensors")
    for name in ("text.npz", "text.safetensors"):
        (tmp_path / name).write_text("text")
        refused(name, "not a readable batch")
    batch = make_batch()
    del batch["lam"]
    np.savez(tmp_path / "few.npz", **batch)
    refused("few.npz", "has no 'lam'")
    np.savez(tmp_path / "objects.npz", **{**make_batch(), "x": np.array([{}], dtype=object)})
    refused("objects.npz", "not a readable batch")
    for number, shape in enumerate([(1, 2, 2), (1, 3, 3)]):
        np.savez(tmp_path / f"{number}.npz", **make_batch(shape=shape))
    with pytest.raises(UserError, match=r"1\.npz: a row of x must be \(1, 2, 2\)"):
        BatchFiles([tmp_path / "0.npz", tmp_path / "1.npz"])
