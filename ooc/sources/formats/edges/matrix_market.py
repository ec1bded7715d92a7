# SPDX-License-Identifier: Apache-2.0
"""Matrix Market files (https://math.nist.gov/MatrixMarket/formats.html): the adjacency matrix of a graph.

The entry (i, j) is the edge from node i - 1 to node j - 1. Of a symmetric matrix the file has one triangle.
Values are weights, unless all are 1.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ooc.errors import SourceError
from ooc.sources.files.lines import Kind, line_blocks, plain_suffix, rows_of_numbers, text_block_bytes, whole_ids
from ooc.sources.formats.edges.bare_graph import NODE_OPTIONS, BareGraph, bare_source, of_numbers
from ooc.sources.reading import Reader, Request
from ooc.sources.source import EdgeBlock, EdgeData, Source, ranges

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
    block_bytes = text_block_bytes(request.budget_bytes)
    kind = Kind.WHOLE if header.columns == 2 else Kind.REAL
    weighted = header.columns == 3 and not request.drop_edge_data

    def edges(size: int) -> Iterator[EdgeBlock]:
        done = 0
        blocks = line_blocks(path, block_bytes)
        for rows in rows_of_numbers(blocks, str(path), columns=(header.columns,), kind=kind, skip=header.lines):
            done += len(rows)
            for start, stop in ranges(len(rows), size):
                ends = (whole_ids(rows[start:stop, 0], path) - 1, whole_ids(rows[start:stop, 1], path) - 1)
                for side, column in enumerate(ends):
                    outside = (column < 0) | (column >= header.nodes)
                    if outside.any():
                        place = f"{'row' if side == 0 else 'column'} {column[int(outside.argmax())] + 1}"
                        raise SourceError(f"{path} has an entry in {place} of a matrix of {header.nodes}")
                yield EdgeBlock(*ends, EdgeData(weight=rows[start:stop, 2] if weighted else None))
        if done != header.entries:
            raise SourceError(f"{path} has {done} entries, its header says {header.entries}: it is incomplete")

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
