"""EpochFile: a numpy array on disk, an epoch at a time, in flat memory; and the Record in two."""

import io
import subprocess
import sys
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mixval.epoch_file import EpochFile
from mixval.errors import UserError
from mixval.record import Record

DTYPES = ("float16", "float32")


@settings(deadline=None, max_examples=60)
@given(st.data(), st.sampled_from(DTYPES), st.integers(1, 5), st.integers(1, 6))
def test_writes_in_any_order_equal_a_numpy_array(tmp_path_factory, data, dtype, epochs, rows):
    # Catches an epoch that lands in its neighbour's place, a held epoch that is read again after
    # it was written, NaN or infinities that change, and a size of 4 bytes assumed for float16.
    path = tmp_path_factory.mktemp("table") / "table.npy"
    file, expected = EpochFile.create(path, epochs, rows, dtype), np.zeros((epochs, rows), dtype)
    values = hnp.arrays(dtype, rows, elements=st.floats(width=16))
    for _ in range(data.draw(st.integers(0, 8))):
        epoch, line = data.draw(st.integers(0, epochs - 1)), data.draw(values)
        file.write(epoch, line)
        expected[epoch] = line
        seen = data.draw(st.integers(0, epochs - 1))
        rows_seen = slice(*sorted(data.draw(st.tuples(*[st.integers(0, rows)] * 2))))
        read = file.read(seen, rows_seen).numpy()
        assert read.dtype == dtype and read.tobytes() == expected[seen, rows_seen].tobytes()
    for table in (np.load(path), file.table.numpy(), EpochFile(path).table.numpy()):
        assert table.dtype == dtype and table.tobytes() == expected.tobytes()
    for epoch in range(epochs):
        assert file.checksum(epoch) == zlib.crc32(expected[epoch].tobytes())


def test_values_are_stored_in_the_type_of_the_table(tmp_path):
    # Catches bytes of float64 written into a table of float32, and strided rows.
    file = EpochFile.create(tmp_path / "t.npy", 2, 3, "float32")
    file.write(1, np.arange(6, dtype=np.float64)[::2])
    assert np.array_equal(np.load(file.path), [[0, 0, 0], [0, 2, 4]])


def test_what_was_read_does_not_change_the_file(tmp_path):
    # Catches a map that writes through: a reader's arithmetic would end up on disk.
    file = EpochFile.create(tmp_path / "t.npy", 2, 3, "float32")
    file.write(0, np.ones(3))
    file.table.mul_(5)
    assert np.array_equal(np.load(file.path), [[1, 1, 1], [0, 0, 0]])


def test_a_table_of_the_same_shape_is_gone_on_with_and_any_other_made_anew(tmp_path):
    # Catches a resume that empties what was written, and rows of another training left in it.
    path = tmp_path / "deep" / "t.npy"
    EpochFile.create(path, 2, 3, "float32").write(1, np.ones(3))
    assert EpochFile.create(path, 2, 3, "float32").read(1).tolist() == [1, 1, 1]
    for epochs, rows, dtype in ((3, 3, "float32"), (3, 2, "float32"), (3, 2, "float16")):
        made = EpochFile.create(path, epochs, rows, dtype)
        assert (made.epochs, made.rows, made.dtype) == (epochs, rows, np.dtype(dtype))
        assert not made.table.any()
        for epoch in range(epochs):
            made.write(epoch, np.ones(rows))


@pytest.mark.parametrize(("epoch", "rows"), [(2, 3), (0, 2), (0, 4)])
def test_what_does_not_fit_is_not_written(tmp_path, epoch, rows):
    # Catches a row too long that runs into the next epoch.
    file = EpochFile.create(tmp_path / "t.npy", 2, 3, "float32")
    with pytest.raises(AssertionError):
        file.write(epoch, np.ones(rows))
    assert not file.table.any()


def saved(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


DAMAGED = {
    "cut": saved(np.zeros((2, 3)))[:-1],
    "cut in the header": saved(np.zeros((2, 3)))[:50],
    "text": b"not a table",
    "of one dimension": saved(np.zeros(3)),
    "of objects": saved(np.array([[None]])),
    "missing": None,
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_table_is_refused_by_name(tmp_path, case):
    # Catches numpy's own exceptions, which name no file.
    path = tmp_path / "bank.npy"
    if DAMAGED[case] is not None:
        path.write_bytes(DAMAGED[case])
    with pytest.raises(UserError, match=r"bank\.npy: not a readable table"):
        EpochFile(path)


MEMORY = """
import resource, sys
import numpy as np
from pathlib import Path
from mixval.epoch_file import EpochFile

def resident():
    # Pages that are mapped count too, as a batch system counts them.
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

EPOCHS, ROWS = 200, 250_000
warm = EpochFile.create(Path(sys.argv[1]) / "warm.npy", 2, ROWS, "float32")
warm.write(0, np.zeros(ROWS, np.float32)); warm.checksum(0); del warm
before, most = resident(), 0
file = EpochFile.create(Path(sys.argv[1]) / "table.npy", EPOCHS, ROWS, "float32")
line = np.arange(ROWS, dtype=np.float32)
for epoch in range(EPOCHS):
    file.write(epoch, line + epoch)
    most = max(most, resident())
for epoch in range(EPOCHS):
    assert float(file.read(epoch, slice(7, 8))) == 7 + epoch
    file.checksum(epoch)
    most = max(most, resident())
print(most - before)
"""


@pytest.mark.slow
def test_200_mb_are_written_and_read_in_a_few_mb_of_memory(tmp_path):
    # Catches a table held whole, or mapped pages that stay: 200 epochs of 250 000 rows.
    command = [sys.executable, "-c", MEMORY, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    (tmp_path / "table.npy").unlink()
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 20e6  # 20 epochs' worth would already be more


# -- the record ---------------------------------------------------------------------------


def test_a_record_holds_what_was_written_and_nan_elsewhere(tmp_path):
    # Catches weights of one epoch that are left over in the next, and clean taken for mixed.
    record = Record.create(tmp_path, 3, 4)
    record.write(slice(0, 2), torch.tensor([1.0, 0.5]), torch.tensor([0.0, 1.0]))
    record.write(slice(2, 4), None, torch.tensor([1.0, 1.0]))
    record.end_epoch(0)
    record.write(slice(2, 4), torch.ones(2), torch.zeros(2))
    record.end_epoch(1)
    nan = np.nan
    mixed = ([1, 0.5, nan, nan], [nan, nan, 1, 1])
    clean = ([0, 1, 1, 1], [nan, nan, 0, 0])
    np.testing.assert_array_equal(record.mixed[:2].numpy(), mixed)
    np.testing.assert_array_equal(record.clean[:2].numpy(), clean)
    assert Record.is_in(tmp_path)
    again = Record(tmp_path)
    assert again.mixed.numpy().tobytes() == record.mixed.numpy().tobytes()


def test_the_mean_of_a_record_is_over_rows_that_have_a_weight(tmp_path):
    # Catches NaN of unmixed epochs that count as 0, or that swallow the mean.
    record = Record.create(tmp_path, 2, 4)
    record.write(slice(0, 4), torch.tensor([1.0, 0.0, 0.0, 0.5]), torch.ones(4))
    record.end_epoch(0)
    record.end_epoch(1)
    assert record.mean("mixed") == pytest.approx(0.375)
    nothing = Record.create(tmp_path / "nothing", 1, 4)
    nothing.end_epoch(0)
    assert nothing.mean("mixed") == 1.0


@pytest.mark.parametrize("name", ["mixed", "clean"])
def test_a_record_goes_on_only_where_its_epochs_are_whole(tmp_path, name):
    # Catches a control that replays weights which no filter ever gave.
    record = Record.create(tmp_path, 3, 4)
    for epoch in (0, 1):
        record.write(slice(0, 4), torch.full((4,), epoch / 2), torch.ones(4))
        record.end_epoch(epoch)
    record.write(slice(0, 2), torch.zeros(2), torch.ones(2))
    state = record.state()
    again = Record.create(tmp_path, 3, 4)
    assert again.resume(state) and again.current["mixed"][:2].tolist() == [0, 0]
    again.files[name].write(0, np.full(4, 0.25))
    assert not Record.create(tmp_path, 3, 4).resume(state)


def test_a_record_without_a_folder_leaves_nothing_behind():
    # Catches temporary folders that pile up.
    record = Record.create(None, 1, 4)
    folder = record.files["mixed"].path.parent
    assert folder.is_dir()
    del record
    assert not folder.exists()


@pytest.mark.parametrize("left", [0, 60, 128, 500])
def test_a_file_cut_while_it_was_made_is_made_anew(tmp_path, left):
    # Killed between the header and the numbers, every resume would end with an error.
    path = tmp_path / "table.npy"
    EpochFile.create(path, 4, 100, "float32").write(1, np.ones(100))
    path.write_bytes(path.read_bytes()[:left])
    file = EpochFile.create(path, 4, 100, "float32")
    file.write(3, np.arange(100))
    assert torch.equal(file.read(3), torch.arange(100.0))
    assert [entry.name for entry in tmp_path.iterdir()] == ["table.npy"]
