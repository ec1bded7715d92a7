# SPDX-License-Identifier: Apache-2.0
"""Archives in archives are read as ``zipfile`` reads them, from any place; damage is told in a line."""

import gzip
import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.errors import SourceError
from ooc.sources.files.cells import Cells
from ooc.sources.files.lines import text_lines
from ooc.sources.files.npy import NpyArray
from ooc.sources.files.pickles import read_torch_dict
from ooc.sources.files.streams import Blob, gunzipped, read_exactly
from ooc.sources.files.text_table import TextTable
from ooc.sources.files.zip_members import Archive
from ooc.storage.array import AnyArray
from tests.examples import examples

_STORED, _DEFLATED = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED
_TEXT = b"".join(b"%d," % (number * number) for number in range(40_000))


def _blob(data: bytes, name: str) -> Blob:
    return Blob(name, len(data), lambda: io.BytesIO(data))


def _read(blob: Blob) -> bytes:
    return read_exactly(blob.open(), blob.size, blob.name)


def test_a_member_that_ends_before_its_length_is_damaged() -> None:
    packed = bytearray(_zip({"text": _TEXT}, _DEFLATED))
    for at in (22, packed.index(b"PK\x01\x02") + 24):  # in its header and in the directory
        packed[at : at + 4] = (len(_TEXT) + 9).to_bytes(4, "little")
    member = Archive(_blob(bytes(packed), "a.zip")).member("text")
    assert member is not None and member.inside is not None
    file = member.inside()
    assert file.read(len(_TEXT)) == _TEXT
    with pytest.raises(EOFError, match="it ends too early"):
        file.read(9)


@given(places=st.lists(st.integers(0, len(_TEXT)), max_size=80), method=st.sampled_from([_STORED, _DEFLATED]))
@settings(max_examples=examples(30), deadline=None)
def test_inside_of_a_member_any_place_is_gone_to(places: list[int], method: int) -> None:
    """Back and forth, more often than places are kept."""
    member = Archive(_blob(_zip({"before": b"x" * 99, "text": _TEXT}, method), "a.zip")).member("text")
    assert member is not None and member.inside is not None
    file = member.inside()
    for place in places:
        file.seek(place)
        assert file.read(20) == _TEXT[place : place + 20]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (gzip.compress(_TEXT)[:-5], "Compressed file ended"),
        (gzip.compress(_TEXT)[:-8] + b"\0" * 8, "CRC check failed"),
        (gzip.compress(_TEXT) + b"more", "Not a gzipped file"),
        (b"", "it ends too early"),
    ],
)
def test_damage_of_gzip_is_one_line(data: bytes, message: str) -> None:
    with pytest.raises(SourceError, match=message) as caught:
        list(text_lines(_blob(data, "a.gz"), len(_TEXT)))
    assert str(caught.value).startswith("a.gz cannot be read") and "\n" not in str(caught.value)


def test_gzip_has_any_number_of_members_and_padding() -> None:
    data = gzip.compress(_TEXT[:1000]) + gzip.compress(b"") + gzip.compress(_TEXT[1000:]) + b"\0" * 600
    assert gunzipped(_blob(data, "a.gz")).read() == _TEXT


@pytest.mark.parametrize("method", [_STORED, _DEFLATED])
@pytest.mark.parametrize("field", [16, 20, 24], ids=["checksum", "packed size", "size"])
@pytest.mark.parametrize("change", [-1, 1])
def test_length_and_checksum_are_checked_at_the_end(method: int, field: int, change: int) -> None:
    """A packed size that is wrong does no harm where all is read before its end."""
    data = bytearray(_zip({"a": _TEXT}, method))
    at = data.rindex(b"PK\1\2") + field
    data[at] = (data[at] + change) % 256
    member = Archive(_blob(bytes(data), "a.zip")).member("a")
    assert member is not None
    try:
        found = _read(member)
    except SourceError as error:
        assert str(error).startswith("a.zip: a cannot be read, it is damaged") and "\n" not in str(error)
    else:
        assert field == 20 and found == _TEXT


def test_a_file_that_shrinks_or_goes_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(_TEXT)
    blob = Blob.of_file(path)
    path.write_bytes(b"")
    with pytest.raises(SourceError, match=f"{len(_TEXT)} bytes are missing"):
        _read(blob)
    path.unlink()
    with pytest.raises(SourceError, match="No such file"):
        _read(blob)
    with pytest.raises(SourceError, match="No such file"):
        Blob.of_file(path)


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
    archive = Archive(Blob.of_file(path))
    if outer is not None:
        inner_zip = archive.member("inner.zip")
        assert inner_zip is not None
        archive = Archive(inner_zip)
    for name in [*reversed(members), *members]:
        member = archive.member(name)
        assert member is not None
        assert _read(member) == members[name]
    assert sorted(archive.names()) == sorted(members)
    assert archive.member("absent") is None


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
@pytest.mark.parametrize("dtype", ["<f4", ">f8", "<i8", "|b1", "<f2", "|u1"])
def test_npy_files_are_read_as_numpy_reads_them(version: tuple[int, int], dtype: str) -> None:
    array = (np.arange(3000) % 2).astype(dtype).reshape(60, 50)
    out = io.BytesIO()
    np.lib.format.write_array(out, array, version=version)
    found = NpyArray(_blob(out.getvalue(), "a.npy"))
    assert (found.shape, found.dtype, found.count) == (array.shape, array.dtype, 3000)
    np.testing.assert_array_equal(np.concatenate(list(found.values(77))), array.ravel())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"PK\3\4" * 9, "no npy file"),
        (b"\x93NUMPY\x01\x00\x10\x00" + b"{'a': 1}        ", "its header is not numpy's"),
        (b"\x93NUMPY\x02\x00" + b"\xff" * 4, "its header is not numpy's"),
        (b"\x93NUMPY\x01\x00\x10\x00__import__('os')", "its header is not numpy's"),
    ],
)
def test_npy_headers_that_are_none_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        NpyArray(_blob(data, "a"))


@given(
    rows=st.lists(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=3, max_size=3), min_size=1),
    ending=st.sampled_from(["\n", "\r\n"]),
    last=st.booleans(),
)
@settings(max_examples=examples(60), deadline=None)
def test_text_is_parsed_as_python_parses_it(rows: list[list[float]], ending: str, last: bool) -> None:
    text = ending.join(",".join(repr(value) for value in row) for row in rows) + (ending if last else "")
    blob = _blob(text.encode(), "a.csv")
    np.testing.assert_array_equal(np.vstack(_csv_rows(blob, Cells.REAL, 3)), np.array(rows))


def _csv_rows(blob: Blob, cells: Cells, columns: int) -> list[AnyArray]:
    table = TextTable(Path(blob.name), lambda: text_lines(blob, 1 << 20), columns=columns)
    return list(table.rows_of(cells, 1 << 18))


def test_text_of_many_blocks_names_the_right_line() -> None:
    lines = [b"%d,%d" % (number, number + 1) for number in range(400_000)]
    blocks = _csv_rows(_blob(b"\n".join(lines), "a.csv"), Cells.WHOLE, 2)
    assert len(blocks) > 3
    np.testing.assert_array_equal(np.vstack(blocks)[:, 0], np.arange(len(lines)))
    lines[345_678] = b"1,,2"
    with pytest.raises(SourceError, match=r"a\.csv, line 345679: 3 cells for 2 columns"):
        _csv_rows(_blob(b"\n".join(lines), "a.csv"), Cells.WHOLE, 2)


@pytest.mark.parametrize("dtype", ["int64", "int32", "int16", "uint8", "bool", "float32", "float64", "float16"])
def test_saved_dictionaries_are_those_that_torch_loads(tmp_path: Path, dtype: str) -> None:
    import torch

    array = (np.arange(12) % 2).astype(dtype).reshape(3, 4)
    tensor = torch.from_numpy(array)
    saved = {"array": array, "tensor": tensor, "part": tensor[1:2], "empty": tensor[:0], "count": 7}
    torch.save(saved, tmp_path / "d.pt")
    found = read_torch_dict(Blob.of_file(tmp_path / "d.pt"))
    assert list(found) == list(saved) and found["count"] == 7
    for name in ("array", "tensor", "part", "empty"):
        read = found[name]
        assert isinstance(read, np.ndarray) and read.dtype == array.dtype
        np.testing.assert_array_equal(read, np.asarray(saved[name]))
