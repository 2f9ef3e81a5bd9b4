"""ScoreTable <-> parquet: what comes back is what went in, or is refused."""

import itertools
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mixval.errors import UserError
from mixval.mixing import draw_plan
from mixval.pipeline import CellRun
from mixval.posteriors import point
from mixval.score_store import ScoreWriter, check_provenance, read_scores, write_scores
from mixval.stages.cell import Cell
from mixval.stages.scores import write_probe
from mixval.store import Artifact, Store
from mixval.types import ScoreTable

PROVENANCE = {"data": "d" * 16, "plan": "p" * 16, "updated": "u" * 16, "base": "b" * 16}
INTS = ("epoch", "row", "i", "j", "label_i", "label_j")


def make_table(rows=300, seed=0, **provenance):
    rng = np.random.default_rng(seed)
    columns = {
        name: rng.integers(0, 1000, rows) if name in INTS else rng.normal(size=rows)
        for name in ScoreTable.columns()
    }
    columns["std_error"] = columns["p_negative"] = columns["kept"] = np.full(rows, np.nan)
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


# -- many tables in one file --------------------------------------------------------------


def rows_of(table, rows):
    columns = {name: getattr(table, name)[rows] for name in ScoreTable.columns()}
    return ScoreTable(**columns, provenance=table.provenance)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 9), max_size=12))
def test_many_small_tables_are_one_table_in_the_order_they_came(tmp_path_factory, sizes):
    # Catches a table that is held back at the end, written twice, or sorted.
    path = tmp_path_factory.mktemp("scores") / "part-0000.parquet"
    whole, ends = make_table(sum(sizes)), np.cumsum([0, *sizes])
    with ScoreWriter(path, whole.provenance) as writer:
        for start, end in itertools.pairwise(ends):
            writer.write(rows_of(whole, slice(start, end)))
    assert_same(read_scores(path), whole)


def test_a_file_of_many_small_tables_has_few_groups_of_rows(tmp_path):
    # Catches a group for every chunk: 1500 of them take many times the space and time to read.
    path, whole = tmp_path / "part-0000.parquet", make_table(150_000)
    with ScoreWriter(path, whole.provenance) as writer:
        for start in range(0, len(whole), 100):
            writer.write(rows_of(whole, slice(start, start + 100)))
    file = pq.ParquetFile(path)
    assert file.metadata.num_row_groups <= 4
    file.close()
    assert_same(read_scores(path), whole)
    write_scores(tmp_path / "at_once.parquet", whole)
    assert path.stat().st_size < 1.1 * (tmp_path / "at_once.parquet").stat().st_size


@pytest.mark.parametrize("chunk", [1, 7, 50, 500])
@pytest.mark.parametrize("folds", [1, 2])
def test_more_rows_than_samples_are_each_scored_once(tiny_recipe, engine, tmp_path, chunk, folds):
    # 150 mixes of 60 samples: two epochs and a half. Catches rows that are lost or doubled where
    # a chunk goes over the end of an epoch, and ids or lambda of another row.
    changes = {
        "scores.rows": 150,
        "scores.chunk": chunk,
        "scores.alpha": 0.7,
        "teachers.failures.folds": folds,
    }
    cells = CellRun(Cell(tiny_recipe(changes), "main", 0, engine), Store(tmp_path))
    teachers, base, train = cells.teacher("failures"), cells.base(), cells.cell.splits.train
    artifact = Artifact(tmp_path / "scores", {}, "scores")
    kept = write_probe(cells.cell, artifact, teachers.against(base.model, "base"), epoch=3)
    table = read_scores(tmp_path / "scores")
    plans = [
        draw_plan(seed=0, epoch=e, alpha=0.7, num_samples=60, stream="probe", folds=teachers.folds)
        for e in range(3)
    ]
    first, second, lam = (
        np.concatenate([getattr(plan, name) for plan in plans])[:150]
        for name in ("first", "second", "lam")
    )
    assert np.array_equal(table.row, np.arange(150)) and set(table.epoch) == {3}
    assert np.array_equal(table.lam, lam)
    assert np.array_equal(table.i, train.ids.numpy()[first])
    assert np.array_equal(table.j, train.ids.numpy()[second])
    assert np.array_equal(table.label_i, train.labels.numpy()[first])
    assert np.array_equal(table.label_j, train.labels.numpy()[second])
    assert kept == (table.r_hat <= 0).sum() and 0 < kept < 150
    assert np.allclose(table.r_hat, table.updated - table.base, atol=1e-6)
    # One term by hand, for a row of each epoch.
    splits = cells.cell.splits
    for row in (0, 65, 149):
        x_i, x_j = (
            (train.images[k].double() / 255 - splits.mean) / splits.std
            for k in (first[row], second[row])
        )
        mixed = (lam[row] * x_i + (1 - lam[row]) * x_j)[None].float()
        with torch.no_grad():
            log_p = base.model.network(mixed)[0].double().log_softmax(0)
        expected = (
            -lam[row] * log_p[table.label_i[row]] - (1 - lam[row]) * log_p[table.label_j[row]]
        )
        assert table.base[row] == pytest.approx(float(expected), abs=1e-5)


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


def test_a_file_is_not_there_until_it_is_whole(tmp_path):
    # A part that looks whole after an error would be read, and sealed, as all there is.
    path = tmp_path / "part-0000.parquet"

    def write_and_fail():
        with ScoreWriter(path, {}) as writer:
            writer.write(make_table(4))
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        write_and_fail()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_every_row_is_scored_once_by_any_number_of_processes(splits, engine, teacher_model, world):
    from mixval.losses import cross_entropy
    from mixval.mixing import RowMaker, draw_plan
    from mixval.processes import Processes
    from mixval.rhat import Scorer
    from mixval.scoring import score_plans

    maker = RowMaker.of(splits.train, splits, engine.device)
    teacher, base = point([teacher_model]), point([torch.nn.Sequential(*_plain(splits))])

    def scored(rank, of):
        plans = [draw_plan(seed=0, epoch=k, alpha=1.0, num_samples=60) for k in range(2)]
        tables = score_plans(
            maker,
            plans,
            Scorer(teacher, cross_entropy),
            base,
            chunk=13,
            processes=Processes(rank, of),
        )
        return list(tables)

    whole = ScoreTable.join(scored(0, 1))
    parts = ScoreTable.join([table for rank in range(world) for table in scored(rank, world)])
    assert parts.row.tolist() == list(range(120))
    assert_same(parts, whole)


def _plain(splits):
    torch.manual_seed(0)
    size = splits.train.images[0].numel()
    return [torch.nn.Flatten(), torch.nn.Linear(size, splits.num_classes)]


def test_what_stands_beside_r_hat_is_that_of_the_same_rows(tiny_recipe, engine, tmp_path):
    # By a loop over rows, from the networks themselves; through the file and back.
    cells = CellRun(
        Cell(tiny_recipe({"scores.rows": 70, "scores.chunk": 30}), "main", 0, engine),
        Store(tmp_path),
    )
    base, teachers = cells.base(), cells.teacher("failures")
    artifact = Artifact(tmp_path / "scores", {}, "scores")
    write_probe(cells.cell, artifact, teachers.against(base.model, "base"))
    table = read_scores(tmp_path / "scores")
    train = cells.cell.splits.train
    maker = cells.cell.rows(train)
    place = {int(key): at for at, key in enumerate(train.ids)}
    for row in (0, 1, 29, 30, 69):
        i, j = place[int(table.i[row])], place[int(table.j[row])]
        pair = maker.inputs(torch.tensor([i, j]))
        lam = float(table.lam[row])
        mixed = (lam * pair[0] + (1 - lam) * pair[1])[None]
        wanted = np.zeros(10)
        wanted[int(train.labels[i])] += lam
        wanted[int(train.labels[j])] += 1 - lam
        own, other = (
            torch.softmax(network(mixed), 1)[0].detach().double().numpy()
            for network in (base.model, teachers.networks[0].model)
        )
        labelled = int(wanted.argmax())
        rivals = np.delete(own, labelled)
        clean = torch.softmax(base.model(pair), 1).detach().double().numpy()
        hard = np.eye(10)[[int(train.labels[i]), int(train.labels[j])]]
        expected = {
            "margin": np.log(own[labelled]) - np.log(rivals.max()),
            "entropy": -(own * np.log(own)).sum(),
            "teacher_entropy": -(other * np.log(other)).sum(),
            "el2n": np.linalg.norm(own - wanted),
            "el2n_i": np.linalg.norm(clean[0] - hard[0]),
            "el2n_j": np.linalg.norm(clean[1] - hard[1]),
        }
        assert set(table.beside) == set(expected)
        for name, value in expected.items():
            assert table.beside[name][row] == pytest.approx(value, abs=2e-5), name
