# SPDX-License-Identifier: Apache-2.0
"""Text in blocks of any size gives the rows that reading line by line gives, and the line that is wrong."""

import gzip
from functools import partial
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.errors import SourceError
from ooc.sources.files.cells import Cells
from ooc.sources.files.lines import leading_comments, line_blocks, plain_suffix
from ooc.sources.files.text_table import TextTable
from tests.examples import examples
from tests.sources.fixtures.edge_lists import compressed

_ROWS = st.lists(st.tuples(st.integers(0, 10**18 - 1), st.integers(0, 10**18 - 1)), max_size=60)
_FILLING = st.sampled_from(["", "\n", "# comment 1 2 3\n", "  \n", "% 7\n"])


def _read(
    path: Path, block_bytes: int = 1 << 16, cells: tuple[Cells, ...] = (Cells.WHOLE, Cells.WHOLE)
) -> list[list[float]]:
    table = TextTable(path, partial(line_blocks, path, block_bytes), delimiter=None, columns=len(cells))
    blocks = [
        list(zip(*(block[name].tolist() for name in table.columns), strict=True))
        for block in table.blocks(dict(zip(table.columns, cells, strict=True)), 50)
    ]
    return [list(row) for block in blocks for row in block]


@settings(deadline=None, max_examples=examples(60))
@given(
    _ROWS,
    st.lists(_FILLING, min_size=1),
    st.sampled_from(["\t", " ", "   ", " \t "]),
    st.sampled_from(["\n", "\r\n"]),
    st.sampled_from(["", ".gz", ".zst"]),
    st.integers(64, 500),
)
def test_blocks_of_any_size_give_the_same_rows(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[int, int]],
    filling: list[str],
    separator: str,
    newline: str,
    suffix: str,
    block_bytes: int,
) -> None:
    path = tmp_path_factory.mktemp("lines") / f"a.txt{suffix}"
    text = "".join(f"{filling[at % len(filling)]}{a}{separator}{b}\n" for at, (a, b) in enumerate(rows))
    path.write_bytes(compressed(text.replace("\n", newline).encode(), suffix))
    assert _read(path, block_bytes) == [list(row) for row in rows]
    assert b"".join(line_blocks(path, block_bytes)) == text.replace("\n", newline).encode()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 2\n3\n", "line 2: 1 cells for 2 columns"),
        ("1 2\n\n# c\n3 4 5\n", "line 4: 3 cells for 2"),
        ("1 2\n3 4.5\n", "line 2: the column 1 holds '4.5', not whole numbers"),
        ("1 2\n+3 4\n", "line 2: the column 0 holds '[+]3'"),
        ("1 2\n3 04\n", "line 2: the column 1 holds '04'"),
        ("1 2\n3 4e1\n", "line 2: the column 1 holds '4e1'"),
        ("1 2\n3 four\n", "line 2: the column 1 holds 'four'"),
        ("1 2 3\n4\n", "line 1: 3 cells"),
        ("1\n2 3 4\n", "line 1: 1 cells"),
        ("1 2\n3 9999999999999999999\n", "line 2: the column 1 holds '9999999999999999999', not whole numbers"),
        ("1 2\n\x00\n", "holds the control character 0x00"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(SourceError, match=message):
        _read(tmp_path / "a.txt")


def test_real_numbers_beside_whole_ones(tmp_path: Path) -> None:
    path, cells = tmp_path / "a.txt", (Cells.WHOLE, Cells.WHOLE, Cells.REAL)
    path.write_text("1 2 0.5\n3 -4 -1e-3\n")
    assert _read(path, cells=cells) == [[1, 2, 0.5], [3, -4, -1e-3]]
    for text in ("1 2 0.5\n3 4\n", "1 2 e\n", "1 2 1e\n", "1 2 1.2.3\n", "1. 2 3\n"):
        path.write_text(text)
        with pytest.raises(SourceError, match=r"line [12]"):
            _read(path, cells=cells)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_file_that_stops_early_or_is_changed_is_refused(tmp_path: Path, suffix: str) -> None:
    data = compressed(b"".join(b"%d %d\n" % (n, n * n) for n in range(5000)), suffix)
    path = tmp_path / f"a.txt{suffix}"
    for bad in (data[:-1], data[: len(data) // 2], data[:-6] + bytes([data[-6] ^ 1]) + data[-5:], b"plain text 1 2\n"):
        path.write_bytes(bad)
        with pytest.raises(SourceError, match="damaged or incomplete"):
            _read(path)


def test_files_of_several_members_are_read_to_the_end(tmp_path: Path) -> None:
    parts = [b"1 2\n3", b" 4\n", b"", b"5 6\n"]
    (tmp_path / "a.txt.gz").write_bytes(b"".join(gzip.compress(part) for part in parts))
    (tmp_path / "a.txt.zst").write_bytes(b"".join(zstandard.compress(part) for part in parts))
    for suffix in (".gz", ".zst"):
        assert _read(tmp_path / f"a.txt{suffix}") == [[1, 2], [3, 4], [5, 6]]


def test_a_bomb_of_one_line_is_refused_early(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"7" * (1 << 24)))
    with pytest.raises(SourceError, match="a line of more than 65536 bytes"):
        _read(path)


def test_leading_comments_and_suffixes(tmp_path: Path) -> None:
    path = tmp_path / "a.el.gz"
    path.write_bytes(gzip.compress(b"# Nodes: 3\n#  Edges: 4 \n1 2\n# later\n"))
    assert leading_comments(path) == (["Nodes: 3", "Edges: 4"], "1 2")
    assert plain_suffix(path) == ".el" and plain_suffix(Path("b.txt")) == ".txt"
