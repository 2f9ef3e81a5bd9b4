"""What `mixval top` shows, against hand-made tables and loops."""

import numpy as np
import pytest

from mixval.cli import main
from mixval.score_store import write_scores
from mixval.top import top
from mixval.types import ScoreTable


def make_table(rows=40, seed=0, *, draws=True):
    rng = np.random.default_rng(seed)
    columns = {
        "epoch": np.zeros(rows, np.int32),
        "row": np.arange(rows),
        "i": rng.integers(0, 12, rows),
        "j": rng.integers(0, 12, rows),
        "lam": rng.random(rows),
        "label_i": rng.integers(0, 3, rows),
        "label_j": rng.integers(0, 3, rows),
        "updated": rng.random(rows),
        "base": rng.random(rows),
        "std_error": rng.random(rows) if draws else np.full(rows, np.nan),
        "p_negative": rng.random(rows) if draws else np.full(rows, np.nan),
        "kept": np.full(rows, np.nan),
    }
    columns["r_hat"] = columns["updated"] - columns["base"]
    return ScoreTable(**columns, provenance={"data": "d", "plan": "p", "updated": "u"})


def section(text, title):
    """Return the lines of one table below its title and its head."""
    below = text.split(f"{title}\n")[1].split("\n\n")[0]
    return [line.split() for line in below.split("\n")[1:]]


def test_mixes_stand_at_both_ends_in_order():
    table = make_table()
    text = top(table, count=5)
    order = sorted(range(40), key=lambda k: table.r_hat[k])
    assert [int(row[0]) for row in section(text, "most helpful mixes")] == order[:5]
    assert [int(row[0]) for row in section(text, "most harmful mixes")] == order[::-1][:5]


def test_parents_are_ordered_by_the_mean_of_all_their_mixes():
    table = make_table()
    means, sizes = {}, {}
    for parent in range(12):
        of = [table.r_hat[k] for k in range(40) for p in (table.i[k], table.j[k]) if p == parent]
        means[parent], sizes[parent] = np.mean(of), len(of)
    expected = sorted((p for p in means if sizes[p] > 1), key=means.get)
    found = section(top(table, count=4), "most helpful parents")
    assert [int(row[0]) for row in found] == expected[:4]
    for row in found:
        assert float(row[1]) == pytest.approx(means[int(row[0])], abs=1e-4)
        assert int(row[3]) == sizes[int(row[0])]


def test_a_pair_counts_both_orders_of_its_classes_and_has_names():
    table = make_table()
    found = section(top(table, ["ant", "bee", "cat"], count=1), "most harmful class pairs")[0]
    pair = {"ant": 0, "bee": 1, "cat": 2}[found[0]], {"ant": 0, "bee": 1, "cat": 2}[found[2]]
    of = [
        table.r_hat[k] for k in range(40) if sorted((table.label_i[k], table.label_j[k])) == [*pair]
    ]
    assert int(found[-1]) == len(of) and float(found[3]) == pytest.approx(np.mean(of), abs=1e-4)


def test_one_draw_says_nothing_of_stability():
    assert "can't be said" in top(make_table(draws=False))
    table = make_table()
    stable = np.maximum(table.p_negative, 1 - table.p_negative).mean()
    assert f"{stable:.1%}" in top(table)


def test_the_command_reads_a_file_and_refuses_what_is_not_there(tmp_path, capsys):
    write_scores(tmp_path / "part-0000.parquet", make_table())
    assert main(["top", str(tmp_path), "--rows", "2"]) == 0
    assert "most harmful parents" in capsys.readouterr().out
    assert main(["top", str(tmp_path / "none")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main(["top", str(tmp_path), "--rows", "0"]) == 2
    assert "--rows: must be at least 1" in capsys.readouterr().err
