# SPDX-License-Identifier: Apache-2.0
"""A table of rows replaces another one at once, and takes over what a killed process has left."""

import errno
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import zarr

from ooc.errors import OptionError
from ooc.train.rows_file import RowsFile

ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)


def write(path: Path, rows: np.ndarray = ROWS) -> None:
    with RowsFile(path, rows.shape, rows.dtype, force=True) as table:
        table.put(np.arange(4), rows, np.arange(4))
        table.finish(["a", "b", "c"], block_bytes=100)


@pytest.mark.parametrize("ending", ["npy", "csv", "zarr", "parquet"])
def test_what_a_killed_process_left_is_taken_over(tmp_path: Path, ending: str) -> None:
    write(tmp_path / f"a.{ending}")
    left = tmp_path / f"b.{ending}.partial"
    left.with_name(left.name + ".rows").write_bytes(b"x" * 500)
    if ending == "zarr":
        (left / "c").mkdir(parents=True)
    else:
        left.write_bytes(b"x" * 500)
    write(tmp_path / f"b.{ending}")
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"a.{ending}", f"b.{ending}"]
    if ending != "zarr":
        assert (tmp_path / f"a.{ending}").read_bytes() == (tmp_path / f"b.{ending}").read_bytes()


def test_two_processes_do_not_write_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    with RowsFile(path, ROWS.shape, ROWS.dtype) as table:
        table.put(np.arange(4), ROWS, np.arange(4))
        with pytest.raises(OptionError, match=rf"another process \({os.getpid()}\) is writing .*a\.npy"):
            RowsFile(path, ROWS.shape, ROWS.dtype)
        table.finish(["a", "b", "c"], block_bytes=100)
    np.testing.assert_array_equal(np.load(path), ROWS)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("written_by", ["write_at", "flush_all"])
def test_a_full_disk_is_told_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written_by: str) -> None:
    """Of which the system tells no name where it writes to what is open."""
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(f"ooc.train.rows_file.{written_by}", full)
    with pytest.raises(OptionError, match=r"a\.npy: No space left on device"):
        write(tmp_path / "a.npy")
    assert not [*tmp_path.iterdir()]


def test_what_cannot_be_written_is_told_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(OptionError, match=r"writing parquet needs pyarrow; pip install pyarrow, or give \.npy"):
        write(tmp_path / "a.parquet")
    monkeypatch.setattr("ooc.train.rows_file.shutil.disk_usage", lambda folder: SimpleNamespace(free=50))
    for ending, needed in (("npy", 48), ("zarr", 96)):
        refused = pytest.raises(OptionError, match=f"{ending} takes {needed} B while it is written, 50 B are free")
        with refused if needed > 50 else nullcontext():
            write(tmp_path / f"a.{ending}")
    assert [path.name for path in tmp_path.iterdir()] == ["a.npy"]


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_folder_is_replaced_by_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    """At once, where the system can: the old array or the new one is there at every moment."""
    if not can_exchange:
        monkeypatch.setattr("ooc.train.rows_file.exchanged", lambda first, second: False)
    path = tmp_path / "a.zarr"
    path.write_text("a file at first")
    for rows in (ROWS, ROWS + 1):
        write(path, rows)
        np.testing.assert_array_equal(zarr.open(path, mode="r")[...], rows)
        assert list(tmp_path.iterdir()) == [path]
