# SPDX-License-Identifier: Apache-2.0
"""Writing arrays: in order or scattered, interrupted and gone on with, refused by the disk."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.errors import StoreError
from ooc.storage.array import open_array
from ooc.storage.store import write_group
from ooc.storage.writer import ArrayWriter, RowScatter
from tests.examples import examples


def test_shrinking_keeps_the_rows_written(tmp_path: Path) -> None:
    write_group(tmp_path, {})
    writer = ArrayWriter(tmp_path, "a", (5000,), np.int32)
    writer.append(np.arange(1200, dtype=np.int32))
    writer.close(shrink=True)
    np.testing.assert_array_equal(zarr.open(tmp_path, mode="r")["a"][...], np.arange(1200))
    assert open_array(tmp_path, "a").shape == (1200,)


def test_a_refused_write_is_an_error_that_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: object) -> int:
        raise OSError(28, "No space left on device")

    writer = ArrayWriter(tmp_path, "a", (100,), np.int64)
    monkeypatch.setattr(os, "write", full)
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


@given(
    rows=st.integers(0, 6000),
    columns=st.sampled_from([None, 1, 3]),
    marked=st.floats(0, 1),
    later=st.floats(0, 1),
)
@settings(max_examples=examples(40), deadline=None)
def test_a_writer_goes_on_where_another_had_flushed(
    tmp_path_factory: pytest.TempPathFactory, rows: int, columns: int | None, marked: float, later: float
) -> None:
    """Whatever that one wrote after it told of its progress; the files are those of a writer never interrupted."""
    shape = (rows,) if columns is None else (rows, columns)
    values = np.arange(rows * (columns or 1), dtype=np.int32).reshape(shape)
    first, folder = int(marked * rows), tmp_path_factory.mktemp("writer")
    second = first + int(later * (rows - first))
    with ArrayWriter(folder, "whole", shape, np.int32) as whole:
        whole.append(values)
    killed = ArrayWriter(folder, "a", shape, np.int32)
    killed.append(values[:first])
    killed.flush()
    progress = json.loads(json.dumps(killed.progress()))
    killed.append(values[first:second])
    killed.abandon()
    with ArrayWriter(folder, "a", shape, np.int32, progress=progress) as writer:
        assert writer.rows == first
        writer.append(values[first:])
    writer.flush()
    files = [
        {
            str(file.relative_to(folder / name)): file.read_bytes()
            for file in (folder / name).rglob("*")
            if file.is_file()
        }
        for name in ("whole", "a")
    ]
    assert files[0] == files[1]


def test_a_writer_does_not_go_on_after_rows_that_are_lost(tmp_path: Path) -> None:
    writer = ArrayWriter(tmp_path, "a", (5000,), np.int32)
    writer.append(np.arange(100, dtype=np.int32))
    writer.abandon()
    os.truncate(writer.array.chunk_path(0), 399)
    with pytest.raises(StoreError, match="shorter than it was when the work on it was interrupted"):
        ArrayWriter(tmp_path, "a", (5000,), np.int32, progress=writer.progress())


def test_rows_are_scattered_over_chunks(tmp_path: Path) -> None:
    """Rows in any order, from any number of pieces; a row too few or of another kind is a bug."""
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 255, (5000, 3)).astype(np.int32)
    places = rng.permutation(5000)
    scatter = RowScatter(tmp_path, "x", rows.shape, rows.dtype)
    with pytest.raises(ValueError, match="int64"):
        scatter.put(np.arange(3), np.zeros((3, 3), dtype=np.int64))
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


def test_a_scatter_goes_on_where_another_had_flushed(tmp_path: Path) -> None:
    """Rows that were put after it told of its progress are put again; the files are those of one never interrupted."""
    rows = np.random.default_rng(0).standard_normal((5000, 256))
    places = np.random.default_rng(1).permutation(5000)
    pieces = [np.sort(places[start : start + 700]) for start in range(0, 5000, 700)]
    whole, killed = (
        RowScatter(tmp_path, "whole", rows.shape, rows.dtype),
        RowScatter(tmp_path, "a", rows.shape, rows.dtype),
    )
    for piece in pieces:
        whole.put(piece, rows[piece])
    for piece in pieces[:3]:
        killed.put(piece, rows[piece])
    killed.flush()
    progress = json.loads(json.dumps(killed.progress()))
    killed.put(pieces[3], rows[pieces[3]])
    scatter = RowScatter(tmp_path, "a", rows.shape, rows.dtype, progress=progress)
    for piece in pieces[3:]:
        scatter.put(piece, rows[piece])
    for made in (whole.close(), scatter.close()):
        np.testing.assert_array_equal(made.read(), rows)
    names = [file.relative_to(tmp_path / "a") for file in (tmp_path / "a").rglob("*") if file.is_file()]
    assert len(names) == 5, "three chunks, checksums, metadata"
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
