# SPDX-License-Identifier: Apache-2.0
"""Arrays: raw rows in chunk files, readable by zarr, and loud about damage."""

import json
import os
import threading
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.core.buffer import Buffer

from ooc.errors import StoreError
from ooc.storage.array import DTYPES, Array, chunk_rows, open_array
from ooc.storage.store import write_group
from ooc.storage.writer import ArrayWriter
from tests.examples import examples


def _write(folder: Path, rows: np.ndarray, *, chunk_bytes: int = 1 << 14, step: int = 700) -> Array:
    write_group(folder, {})
    with ArrayWriter(folder, "a", rows.shape, rows.dtype, chunk_bytes=chunk_bytes) as writer:
        for start in range(0, len(rows), step):
            writer.append(rows[start : start + step])
    return open_array(folder, "a")


@settings(max_examples=examples(40), deadline=None)
@given(
    rows=st.integers(0, 5000),
    columns=st.sampled_from([None, 1, 3, 7, 128]),
    dtype=st.sampled_from(DTYPES),
    step=st.integers(1, 3000),
    chunk_bytes=st.sampled_from([1 << 12, 1 << 15, 4 << 20]),
)
def test_rows_come_back_and_zarr_reads_the_same(
    tmp_path_factory: pytest.TempPathFactory, rows: int, columns: int | None, dtype: str, step: int, chunk_bytes: int
) -> None:
    """Whatever shape, dtype, chunk size and pieces they were written in."""
    folder = tmp_path_factory.mktemp("array")
    shape = (rows,) if columns is None else (rows, columns)
    values = np.random.default_rng(rows).integers(0, 100, shape).astype(dtype)
    array = _write(folder, values, chunk_bytes=chunk_bytes, step=step)
    np.testing.assert_array_equal(array.read(), values)
    np.testing.assert_array_equal(zarr.open(folder, mode="r")["a"][...], values)
    low, high = rows // 3, rows - rows // 4
    np.testing.assert_array_equal(array.read(low, high), values[low:high])
    assert array.chunk_bytes % 4096 == 0
    assert array.chunks[0] >= 1024 and array.chunks[0].bit_count() == 1
    assert all(path.stat().st_size == array.chunk_bytes for path in (folder / "a" / "c").rglob("*") if path.is_file())


def test_extents_are_the_raw_bytes_in_order_and_reach_into_the_padding(tmp_path: Path) -> None:
    values = np.arange(3000 * 4, dtype=np.float32).reshape(3000, 4)
    array = _write(tmp_path, values)
    assert array.padded_rows == 3072 and array.chunks == (1024, 4)
    extents = array.extents(1000, 3072)
    data = b"".join(extent.path.read_bytes()[extent.offset :][: extent.nbytes] for extent in extents)
    got = np.frombuffer(data, dtype=np.float32).reshape(-1, 4)
    np.testing.assert_array_equal(got[:2000], values[1000:])
    assert not got[2000:].any()
    assert len(extents) == 3 and array.extents(5, 5) == []
    with pytest.raises(ValueError):
        array.extents(0, 3073)
    with pytest.raises(ValueError, match="rows 0:3001 of 3000 asked for"):
        array.read(0, 3001)


def test_chunk_heights_follow_the_target_but_stay_aligned() -> None:
    assert chunk_rows(10**9, 512) == 8192  # 4 MiB of 128 float32 features
    assert chunk_rows(10**9, 400) == 8192
    assert chunk_rows(10**9, 8) == 1 << 19
    assert chunk_rows(100, 8) == 1024
    assert chunk_rows(1500, 8) == 2048
    assert chunk_rows(100, 1) == 4096  # A bool chunk of 1024 rows would be no multiple of 4096 bytes.
    assert chunk_rows(100, 14) == 2048
    assert chunk_rows(10**9, 1 << 20) == 1024


def test_checksums_are_crc32c_of_the_chunk_files(tmp_path: Path) -> None:
    array = _write(tmp_path, np.arange(20000, dtype=np.int64))
    sums = [google_crc32c.value(array.chunk_path(index).read_bytes()) for index in range(array.num_chunks)]
    assert array.checksums().tolist() == sums == [array.checksum(index) for index in range(len(sums))]


def test_damage_is_an_error_that_names_array_and_file(tmp_path: Path) -> None:
    array = _write(tmp_path, np.arange(20000, dtype=np.int64))
    os.truncate(array.chunk_path(1), 5000)
    with pytest.raises(StoreError, match=r"a: chunk .*/c/1 ends at byte 5000"):
        array.read()
    array.chunk_path(1).unlink()
    with pytest.raises(StoreError, match=r"a: chunk .*/c/1 cannot be read at byte 0: No such file"):
        array.read()
    np.testing.assert_array_equal(array.read(0, 1024), np.arange(1024))


def test_only_plain_arrays_are_opened(tmp_path: Path) -> None:
    """A compressed array, as zarr makes by default, is no raw rows."""
    zarr.open_group(tmp_path, mode="w").create_array("a", shape=(5000,), dtype="int64")
    with pytest.raises(StoreError, match="not stored as raw rows"):
        open_array(tmp_path, "a")
    (tmp_path / "a" / "zarr.json").write_text('{"shape": [3')
    with pytest.raises(StoreError, match="damaged"):
        open_array(tmp_path, "a")
    with pytest.raises(StoreError, match="no array 'b'"):
        open_array(tmp_path, "b")


@pytest.mark.parametrize(
    ("dtype", "fill_value"), [("bool", False), ("int32", 0), ("int64", 0), ("float16", 0), ("float32", 0)]
)
def test_arrays_with_the_metadata_of_earlier_versions_are_opened(
    tmp_path: Path, dtype: str, fill_value: object
) -> None:
    """Those were written by hand: an endianness even for single bytes, a fill value that is an integer."""
    values = np.random.default_rng(0).integers(0, 2, (3000, 2)).astype(dtype)
    array = _write(tmp_path, values)
    metadata = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [3000, 2],
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(array.chunks)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": fill_value,
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "attributes": {},
        "storage_transformers": [],
    }
    (tmp_path / "a" / "zarr.json").write_text(json.dumps(metadata, indent=2))
    earlier = open_array(tmp_path, "a")
    assert (earlier.shape, earlier.chunks, earlier.dtype) == (array.shape, array.chunks, array.dtype)
    np.testing.assert_array_equal(earlier.read(), values)


@pytest.mark.parametrize(
    "change",
    [
        {"codecs": [{"name": "bytes", "configuration": {"endian": "big"}}]},
        {"codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]},
        {"chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}}},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1024, 2]}}},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1000, 4]}}},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1 << 40, 4]}}},
        {"data_type": "complex64", "fill_value": [0, 0]},
    ],
    ids=["big endian", "checksummed", "other names", "parts of rows", "parts of pages", "far too tall", "complex"],
)
def test_chunks_in_another_form_are_refused(tmp_path: Path, change: dict[str, object]) -> None:
    """Arrays that zarr could read, but a direct read would not find the rows where they are expected."""
    _write(tmp_path, np.zeros((3000, 4), dtype=np.float32))
    path = tmp_path / "a" / "zarr.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    zarr.open_array(tmp_path / "a", mode="r")
    with pytest.raises(StoreError, match="not stored as raw rows"):
        open_array(tmp_path, "a")


def test_no_thread_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zarr's own calls start one, and wait for it for ever where it cannot be started or has died."""
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (_ for _ in ()).throw(RuntimeError("no thread")))
    assert _write(tmp_path, np.zeros((5, 2), dtype=np.int32)).shape == (5, 2)


@pytest.mark.skipif(zarr.__version__ < "3.1", reason="before 3.1 zarr wrote other words of the same meaning")
@pytest.mark.parametrize("dtype", DTYPES)
def test_documents_are_those_that_zarr_writes(tmp_path: Path, dtype: str) -> None:
    _write(tmp_path, np.zeros((3000, 4), dtype=dtype))
    written, form = dict[str, Buffer](), {"filters": None, "compressors": None, "zarr_format": 3}
    zarr.create_array(written, shape=(3000, 4), chunks=open_array(tmp_path, "a").chunks, dtype=np.dtype(dtype), **form)
    assert json.loads((tmp_path / "a" / "zarr.json").read_bytes()) == json.loads(written["zarr.json"].to_bytes())
    write_group(tmp_path, {"a": 1, "\u00fc": [1, None, 1e300]})
    group = zarr.create_group({}, attributes={"a": 1, "\u00fc": [1, None, 1e300]}, zarr_format=3)
    assert json.loads((tmp_path / "zarr.json").read_bytes()) == group.metadata.to_dict() | {"node_type": "group"}


def test_documents_without_end_are_not_read(tmp_path: Path) -> None:
    _write(tmp_path, np.zeros((5, 2), dtype=np.int32))
    os.truncate(tmp_path / "a" / "zarr.json", 1 << 40)
    with pytest.raises(StoreError, match="damaged: it has more than"):
        open_array(tmp_path, "a")
