# SPDX-License-Identifier: Apache-2.0
"""Matrix Market files (https://math.nist.gov/MatrixMarket/formats.html): the adjacency matrix of a graph.

The entry (i, j) is the edge from node i - 1 to node j - 1. Of a symmetric matrix the file has one triangle.
Values are weights, unless all are 1.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ooc.errors import SourceError
from ooc.sources.edge_options import EdgeColumns
from ooc.sources.files.lines import line_blocks, plain_suffix, text_block_bytes
from ooc.sources.files.text_table import TextTable
from ooc.sources.formats.edges.bare_graph import NODE_OPTIONS, bare_source
from ooc.sources.formats.edges.edge_table import column_edges
from ooc.sources.numbered import BareGraph, of_numbers
from ooc.sources.reading import Reader, Request
from ooc.sources.source import EdgeBlock, Source

_BANNER = "%%matrixmarket"
_FIELDS = {"pattern": 2, "integer": 3, "real": 3}
_SYMMETRIES = ("general", "symmetric")
_LEAST_LINE_BYTES = 4
_HEAD_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class _Header:
    columns: int
    symmetric: bool
    nodes: int
    entries: int
    lines: int


def _open(path: Path, request: Request) -> Source:
    header = _header(path)
    lines = partial(line_blocks, path, text_block_bytes(request.budget_bytes))
    table = TextTable(path, lines, delimiter=None, columns=header.columns, skip=header.lines)
    weighted = header.columns == 3 and not request.drop_edge_data

    def edges(size: int) -> Iterator[EdgeBlock]:
        for rows in column_edges(table, "0", "1", size, carried=EdgeColumns("2" if weighted else None)):
            yield EdgeBlock(rows.sources - 1, rows.targets - 1, rows.data)

    return bare_source(
        BareGraph(
            name=path.name.split(".")[0],
            format="matrix-market",
            files=(path,),
            edges=of_numbers(edges),
            num_edges=header.entries,
            counted=True,
            num_nodes=header.nodes,
            symmetrize=header.symmetric,
            has_edge_weight=weighted,
            weight_unless_ones=weighted,
        ),
        request,
    )


def _header(path: Path) -> _Header:
    lines = next(line_blocks(path, _HEAD_BYTES), b"").decode("utf-8", "replace").split("\n")
    words = lines[0].lower().split()
    if words[:3] != [_BANNER, "matrix", "coordinate"] or len(words) != 5:
        raise SourceError(f"{path} does not start as a sparse Matrix Market file: {lines[0][:60]!r}")
    field, symmetry = words[3:]
    if field not in _FIELDS or symmetry not in _SYMMETRIES:
        raise SourceError(
            f"{path} holds a matrix that is {field} and {symmetry}; a graph is {', '.join(_FIELDS)} "
            f"and {' or '.join(_SYMMETRIES)}"
        )
    at = next((number for number, line in enumerate(lines) if line.strip() and not line.startswith("%")), None)
    sizes = lines[at].split() if at is not None else []
    if at is None or len(sizes) != 3 or not all(size.isascii() and size.isdecimal() for size in sizes):
        raise SourceError(f"{path} has no line of rows, columns and entries after its comments")
    rows, columns, entries = (int(size) for size in sizes)
    if rows != columns or not 0 < rows <= 2**32:
        raise SourceError(f"{path} holds a matrix of {rows} × {columns}, which is no graph's")
    size = path.stat().st_size
    if plain_suffix(path) == path.suffix and entries * _LEAST_LINE_BYTES > size:
        raise SourceError(f"{path} is of {size} bytes, too few for {entries} entries: it is damaged or incomplete")
    return _Header(columns=_FIELDS[field], symmetric=symmetry == "symmetric", nodes=rows, entries=entries, lines=at + 1)


READER = Reader(
    needs="Matrix Market .mtx, also .gz or .zst; features and labels by options",
    folder=False,
    recognises=lambda path: plain_suffix(path) == ".mtx",
    open=_open,
    takes=NODE_OPTIONS,
)
