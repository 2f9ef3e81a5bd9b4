"""ScoreTable <-> parquet: what comes back is what went in, or is refused."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mixval.errors import UserError
from mixval.score_store import check_provenance, read_scores, write_scores
from mixval.types import ScoreTable

PROVENANCE = {"data": "d" * 16, "plan": "p" * 16, "updated": "u" * 16, "base": "b" * 16}
INTS = ("epoch", "row", "i", "j", "label_i", "label_j")


def make_table(rows=300, seed=0, **provenance):
    rng = np.random.default_rng(seed)
    columns = {
        name: rng.integers(0, 1000, rows) if name in INTS else rng.normal(size=rows)
        for name in ScoreTable.columns()
    }
    columns["std_error"] = columns["kept"] = np.full(rows, np.nan)
    return ScoreTable(**columns, provenance={**PROVENANCE, **provenance})


def assert_same(one, other):
    for name in ScoreTable.columns():
        mine, theirs = getattr(one, name), getattr(other, name)
        assert mine.dtype == theirs.dtype
        assert mine.tobytes() == theirs.tobytes(), name  # bits, so NaN equals NaN
    assert one.provenance == other.provenance


@pytest.mark.parametrize("rows", [0, 1, 300, 70_000])
def test_a_table_reads_back_bit_for_bit(tmp_path, rows):
    # Catches a lost digit, a type that changes on the way, and NaN that becomes null or 0.
    table = make_table(rows)
    write_scores(tmp_path / "part-0000.parquet", table)
    assert_same(read_scores(tmp_path / "part-0000.parquet"), table)


@settings(deadline=None, max_examples=30)
@given(hnp.arrays(np.float64, 5, elements=st.floats(allow_nan=True, allow_infinity=True)))
def test_any_float_survives(tmp_path_factory, values):
    # As above, for infinities, negative zero, subnormals and NaN.
    path = tmp_path_factory.mktemp("scores") / "part-0000.parquet"
    table = replace(make_table(5), r_hat=values)
    write_scores(path, table)
    assert read_scores(path).r_hat.tobytes() == values.tobytes()


def test_parts_of_a_folder_are_joined_in_order(tmp_path):
    # Catches parts that are read in the order of the file system, or read twice.
    parts = [make_table(4, seed) for seed in range(3)]
    for number in (2, 0, 1):
        write_scores(tmp_path / f"part-{number:04d}.parquet", parts[number])
    (tmp_path / "other.txt").write_text("not a part")
    assert_same(read_scores(tmp_path), ScoreTable.join(parts))


def test_parts_of_other_data_are_not_joined(tmp_path):
    # Catches scores of two datasets in one table, under the name of the first.
    write_scores(tmp_path / "part-0000.parquet", make_table(4))
    write_scores(tmp_path / "part-0001.parquet", make_table(4, data="another"))
    with pytest.raises(UserError, match="data"):
        read_scores(tmp_path)


def test_a_folder_without_parts_is_refused_by_name(tmp_path):
    # Catches an IndexError where the folder's name would help.
    with pytest.raises(UserError, match=str(tmp_path)):
        read_scores(tmp_path)


@pytest.mark.parametrize("key", PROVENANCE)
def test_scores_of_something_else_are_refused(key):
    # Catches r_hat joined to samples, plans or networks it does not belong to.
    check_provenance(make_table(), PROVENANCE)
    with pytest.raises(UserError, match=f"made with another {key}.*score again"):
        check_provenance(make_table(**{key: "x"}), PROVENANCE)
    table = make_table()
    missing = replace(table, provenance={k: v for k, v in PROVENANCE.items() if k != key})
    with pytest.raises(UserError, match=f"another {key}"):
        check_provenance(missing, PROVENANCE)


# -- damage -------------------------------------------------------------------------------


def read_or_refuse(path, whole):
    """Return whether a damaged file was refused; if it was read, it must be the same."""
    try:
        table = read_scores(path)
    except UserError:
        return True
    for name in ScoreTable.columns():
        assert getattr(table, name).tobytes() == getattr(whole, name).tobytes(), name
    return False


def test_flipped_bits_never_change_a_score(tmp_path):
    # Without page checksums, parquet returns other numbers for 97 of 100 flips in its pages.
    path = tmp_path / "part-0000.parquet"
    table = make_table(60)
    write_scores(path, table)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    places = rng.choice(len(whole), 400, replace=False)
    refused = 0
    for place in places:
        data = bytearray(whole)
        data[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(data)
        refused += read_or_refuse(path, table)
    assert refused > 200  # the others are in what is not read: statistics, and the like


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_file_that_was_cut_is_refused(tmp_path, share):
    # Catches a disk that was full.
    path = tmp_path / "part-0000.parquet"
    write_scores(path, make_table())
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(UserError, match=r"part-0000\.parquet"):
        read_scores(path)


def test_other_tables_are_refused_by_name(tmp_path):
    # Catches a KeyError on somebody's own parquet file.
    path = tmp_path / "own.parquet"
    pq.write_table(pa.table({"a": [1, 2]}), path)
    with pytest.raises(UserError, match=r"own\.parquet"):
        read_scores(path)
    columns = {name: getattr(make_table(2), name) for name in ScoreTable.columns()}
    pq.write_table(pa.table(columns), path)  # without where it comes from
    with pytest.raises(UserError, match=r"own\.parquet"):
        read_scores(path)
    with pytest.raises(UserError, match="missing"):
        read_scores(tmp_path / "missing.parquet")
