# SPDX-License-Identifier: Apache-2.0
"""Writing arrays: in order or scattered, interrupted and gone on with, refused by the disk."""

import os
from pathlib import Path

import numpy as np
import pytest
import zarr

from ooc.errors import StoreError
from ooc.storage.array import open_array
from ooc.storage.store import write_group
from ooc.storage.writer import ArrayWriter, RowScatter


def test_shrinking_keeps_the_rows_written(tmp_path: Path) -> None:
    write_group(tmp_path, {})
    writer = ArrayWriter(tmp_path, "a", (5000,), np.int32)
    writer.append(np.arange(1200, dtype=np.int32))
    writer.close(shrink=True)
    np.testing.assert_array_equal(zarr.open(tmp_path, mode="r")["a"][...], np.arange(1200))
    assert open_array(tmp_path, "a").shape == (1200,)


def test_a_refused_write_is_an_error_that_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: object, at: int) -> int:
        raise OSError(28, "No space left on device")

    writer = ArrayWriter(tmp_path, "a", (100,), np.int64)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StoreError, match=r"/a/c/0 cannot be written: No space left"), writer:
        writer.append(np.zeros(100, dtype=np.int64))


def test_misuse_of_a_writer_is_refused(tmp_path: Path) -> None:
    writer = ArrayWriter(tmp_path, "a", (3,), np.int64)
    with pytest.raises(ValueError):
        writer.append(np.zeros(3, dtype=np.int32))
    with pytest.raises(ValueError):
        writer.append(np.zeros(4, dtype=np.int64))
    writer.append(np.zeros(2, dtype=np.int64))
    with pytest.raises(ValueError):
        writer.close()
    with pytest.raises(StoreError, match="cannot be written"):
        ArrayWriter(tmp_path, "a", (3,), np.int64)
    with pytest.raises(ValueError, match=r"no array of shape .* can be made"):
        ArrayWriter(tmp_path, "b", (3, 0), np.int64)


def test_rows_are_scattered_over_chunks(tmp_path: Path) -> None:
    """Rows in any order, from any number of pieces; a row too few or of another kind is a bug."""
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 255, (5000, 3)).astype(np.int32)
    places = rng.permutation(5000)
    scatter = RowScatter(tmp_path, "x", rows.shape, rows.dtype)
    with pytest.raises(ValueError, match="int64"):
        scatter.put(np.arange(3), np.zeros((3, 3), dtype=np.int64))
    with pytest.raises(ValueError, match="3 rows put to 2 places"):
        scatter.put(np.arange(2), np.zeros((3, 3), dtype=np.int32))
    for start in range(0, 5000, 1300):
        part = np.sort(places[start : start + 1300])
        scatter.put(part, rows[part])
        if start == 0:
            with pytest.raises(ValueError, match="3700 rows were not put of 5000"):
                scatter.close()
    array = scatter.close()
    np.testing.assert_array_equal(array.read(), rows)
    assert array.chunk_path(array.num_chunks - 1).stat().st_size == array.chunk_bytes
    assert [array.checksum(index) for index in range(array.num_chunks)] == array.checksums().tolist()
