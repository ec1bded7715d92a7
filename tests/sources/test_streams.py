# SPDX-License-Identifier: Apache-2.0
"""Streams give the bytes that are there, from wherever they are forked; archives are read as ``zipfile`` reads them."""

import gzip
import io
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.errors import SourceError
from ooc.sources.files.lines import Kind, rows_of_numbers, stream_lines
from ooc.sources.files.npy import read_header, value_blocks
from ooc.sources.files.pickles import read_torch_dict
from ooc.sources.files.streams import Checked, FileBlob, ForwardBlob, Inflated, Limited, MemoryBlob, Stream, read_whole
from ooc.sources.files.zip_members import Archive
from ooc.storage.array import AnyArray
from tests.examples import examples

_TEXT = b"".join(b"%d," % (number * number) for number in range(40_000))


def _deflated(data: bytes) -> bytes:
    packer = zlib.compressobj(6, zlib.DEFLATED, -15)
    return packer.compress(data) + packer.flush()


def _streams(tmp_path: Path) -> dict[str, tuple[Stream, bytes]]:
    """Every kind of stream, and what it must give."""
    path = tmp_path / "data"
    path.write_bytes(_TEXT)
    memory = MemoryBlob(_TEXT, "memory")
    packed = MemoryBlob(_deflated(_TEXT), "packed")
    twice = MemoryBlob(_deflated(_deflated(_TEXT)), "twice")
    members = gzip.compress(_TEXT[:1000]) + gzip.compress(b"") + gzip.compress(_TEXT[1000:]) + b"\0" * 600
    return {
        "file": (FileBlob(path).at(0), _TEXT),
        "part of a file": (FileBlob(path).part(10, 5000, "part").at(7), _TEXT[17:5010]),
        "memory": (memory.at(3), _TEXT[3:]),
        "limited": (Limited(memory.at(0), 777), _TEXT[:777]),
        "checked": (Checked(memory.at(0), "checked", size=len(_TEXT), crc=zlib.crc32(_TEXT)), _TEXT),
        "deflated": (Inflated(packed.at(0), "deflated"), _TEXT),
        "deflated twice": (Inflated(Inflated(twice.at(0), "outer"), "inner"), _TEXT),
        "gzip of three members and padding": (Inflated(MemoryBlob(members, "gz").at(0), "gz", gzip=True), _TEXT),
        "forwards": (ForwardBlob(Inflated(packed.at(0), "deflated"), len(_TEXT), "forwards").at(99), _TEXT[99:]),
    }


@pytest.mark.parametrize("kind", list(_streams(Path("/tmp"))))
def test_a_fork_goes_on_from_the_same_place_and_leaves_the_other_there(tmp_path: Path, kind: str) -> None:
    stream, wanted = _streams(tmp_path)[kind]
    rng = np.random.default_rng(0)
    got = b""
    while piece := stream.read(int(rng.integers(1, 30_000))):
        got += piece
        if rng.random() < 0.2:
            assert read_whole(stream.fork(), 1 << 20, "fork") == wanted[len(got) :]
        if rng.random() < 0.2:
            stream = stream.fork()
    assert got == wanted and stream.read(10) == b""


@given(places=st.lists(st.integers(0, len(_TEXT)), max_size=80))
@settings(max_examples=examples(30), deadline=None)
def test_a_forward_blob_goes_to_any_place(places: list[int]) -> None:
    """Back and forth, more often than places are kept."""
    blob = ForwardBlob(Inflated(MemoryBlob(_deflated(_TEXT), "packed").at(0), "packed"), len(_TEXT), "forward")
    for place in places:
        assert blob.at(place).read(20) == _TEXT[place : place + 20]


@pytest.mark.parametrize(
    ("data", "gzipped", "message"),
    [
        (_deflated(_TEXT)[:-3], False, "it ends too early"),
        (b"\xff" + _deflated(_TEXT), False, "Error -3"),
        (gzip.compress(_TEXT)[:-5], True, "it ends too early"),
        (gzip.compress(_TEXT)[:-8] + b"\0" * 8, True, "incorrect data check"),
        (gzip.compress(_TEXT) + b"more", True, "incorrect header check"),
        (b"", True, "it ends too early"),
    ],
)
def test_damage_is_one_line(data: bytes, gzipped: bool, message: str) -> None:
    with pytest.raises(SourceError, match=message) as caught:
        read_whole(Inflated(MemoryBlob(data, "a").at(0), "a.gz", gzip=gzipped), 1 << 20, "a.gz")
    assert str(caught.value).startswith("a.gz cannot be read") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("size", "crc", "message"),
    [
        (len(_TEXT), 1, "its checksum is wrong"),
        (len(_TEXT) + 1, zlib.crc32(_TEXT), "1 bytes are missing"),
        (len(_TEXT) - 1, zlib.crc32(_TEXT[:-1]), "it is longer than it says"),
    ],
)
def test_length_and_checksum_are_checked_at_the_end(size: int, crc: int, message: str) -> None:
    stream = Checked(MemoryBlob(_TEXT, "a").at(0), "a", size=size, crc=crc)
    with pytest.raises(SourceError, match=message):
        read_whole(stream, 1 << 20, "a")


def test_a_file_that_shrinks_or_goes_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(_TEXT)
    stream = FileBlob(path).at(0)
    path.write_bytes(b"")
    with pytest.raises(SourceError, match="the file ends too early"):
        stream.read(10)
    path.unlink()
    with pytest.raises(SourceError, match="No such file"):
        stream.read(10)
    with pytest.raises(SourceError, match="No such file"):
        FileBlob(path)


def _zip(members: dict[str, bytes], method: int) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, data in members.items():
            with archive.open(name, "w", force_zip64=len(data) % 2 == 0) as file:
                file.write(data)
    return out.getvalue()


@given(
    members=st.dictionaries(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1), st.binary()),
    inner=st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]),
    outer=st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, None]),
)
@settings(max_examples=examples(60), deadline=None)
def test_members_are_those_that_zipfile_finds(
    tmp_path_factory: pytest.TempPathFactory, members: dict[str, bytes], inner: int, outer: int | None
) -> None:
    """Plain, zip64 headers and an archive in an archive, stored or deflated, in any order."""
    members = {name.replace("\\", "/"): data for name, data in members.items()}
    path = tmp_path_factory.mktemp("zip") / "a.zip"
    data = _zip(members, inner)
    path.write_bytes(data if outer is None else _zip({"before": b"x" * 99, "inner.zip": data}, outer))
    blob = FileBlob(path) if outer is None else _blob_of(Archive(FileBlob(path)), "inner.zip")
    archive = Archive(blob)
    for name in [*reversed(members), *members]:
        member = archive.member(name)
        assert member is not None
        assert read_whole(member.open(), 1 << 20, name) == members[name]
    assert sorted(archive.names()) == sorted(members)
    assert archive.member("absent") is None


def _blob_of(archive: Archive, name: str) -> Any:
    member = archive.member(name)
    assert member is not None
    return member.blob()


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
@pytest.mark.parametrize("dtype", ["<f4", ">f8", "<i8", "|b1", "<f2", "|u1"])
def test_npy_files_are_read_as_numpy_reads_them(version: tuple[int, int], dtype: str) -> None:
    array = (np.arange(3000) % 2).astype(dtype).reshape(60, 50)
    out = io.BytesIO()
    np.lib.format.write_array(out, array, version=version)
    blob = MemoryBlob(out.getvalue(), "a.npy")
    stream = blob.at(0)
    header = read_header(stream, size=blob.size, name="a.npy")
    assert (header.shape, header.dtype, header.count) == (array.shape, array.dtype, 3000)
    np.testing.assert_array_equal(np.concatenate(list(value_blocks(stream, header, 77, "a.npy"))), array.ravel())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"PK\3\4" * 9, "no npy file"),
        (b"\x93NUMPY\x01\x00\x10\x00" + b"{'a': 1}        ", "its header is not numpy's"),
        (b"\x93NUMPY\x02\x00" + b"\xff" * 4, "its header claims 4294967295 bytes"),
        (b"\x93NUMPY\x01\x00\x10\x00__import__('os')", "its header is not numpy's"),
    ],
)
def test_npy_headers_that_are_none_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        read_header(MemoryBlob(data, "a").at(0), size=len(data), name="a")


@given(
    rows=st.lists(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=3, max_size=3), min_size=1),
    ending=st.sampled_from(["\n", "\r\n"]),
    last=st.booleans(),
)
@settings(max_examples=examples(60), deadline=None)
def test_text_is_parsed_as_python_parses_it(rows: list[list[float]], ending: str, last: bool) -> None:
    text = ending.join(",".join(repr(value) for value in row) for row in rows) + (ending if last else "")
    blob = MemoryBlob(text.encode(), "a.csv")
    np.testing.assert_array_equal(np.vstack(_csv_rows(blob, Kind.CSV_REAL, 3)), np.array(rows))


def _csv_rows(blob: MemoryBlob, kind: Kind, columns: int) -> list[AnyArray]:
    return list(rows_of_numbers(stream_lines(blob.at(0), blob.name), blob.name, columns=(columns,), kind=kind))


def test_text_of_many_blocks_names_the_right_line() -> None:
    lines = [b"%d,%d" % (number, number + 1) for number in range(400_000)]
    blocks = _csv_rows(MemoryBlob(b"\n".join(lines), "a.csv"), Kind.CSV_WHOLE, 2)
    assert len(blocks) > 3
    np.testing.assert_array_equal(np.vstack(blocks)[:, 0], np.arange(len(lines)))
    lines[345_678] = b"1,,2"
    with pytest.raises(SourceError, match=r"a\.csv, line 345679: '1,,2' where 2 whole numbers are wanted"):
        _csv_rows(MemoryBlob(b"\n".join(lines), "a.csv"), Kind.CSV_WHOLE, 2)


@pytest.mark.parametrize("dtype", ["int64", "int32", "int16", "uint8", "bool", "float32", "float64", "float16"])
def test_saved_dictionaries_are_those_that_torch_loads(tmp_path: Path, dtype: str) -> None:
    import torch

    array = (np.arange(12) % 2).astype(dtype).reshape(3, 4)
    tensor = torch.from_numpy(array)
    saved = {"array": array, "tensor": tensor, "part": tensor[1:2], "empty": tensor[:0], "count": 7}
    torch.save(saved, tmp_path / "d.pt")
    found = read_torch_dict(FileBlob(tmp_path / "d.pt"))
    assert list(found) == list(saved) and found["count"] == 7
    for name in ("array", "tensor", "part", "empty"):
        read = found[name]
        assert isinstance(read, np.ndarray) and read.dtype == array.dtype
        np.testing.assert_array_equal(read, np.asarray(saved[name]))
    torch.save({"view": tensor.t()}, tmp_path / "d.pt")
    with pytest.raises(SourceError, match="a view of another one"):
        read_torch_dict(FileBlob(tmp_path / "d.pt"))
