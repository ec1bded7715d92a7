# SPDX-License-Identifier: Apache-2.0
"""SNAP's edge lists (https://snap.stanford.edu/data): two ids a line, tab or spaces, comments with ``#``.

More numbers on a line are data of the edge, in columns counted from 0. The ids are sparse; the comments at the start
say how many nodes and edges there are and whether the graph is undirected, in which case each edge is listed once.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from ooc.errors import SourceError
from ooc.sources.edge_options import (
    EDGE_COLUMNS_REMEDY,
    EDGE_OPTIONS,
    EdgeColumns,
    asked_columns,
    asks_for_edge_data,
)
from ooc.sources.files.lines import (
    Kind,
    leading_comments,
    line_blocks,
    plain_suffix,
    rows_of_numbers,
    text_block_bytes,
    whole_ids,
)
from ooc.sources.formats.edges.bare_graph import NODE_OPTIONS, BareGraph, bare_source, of_numbers
from ooc.sources.reading import Reader, Request
from ooc.sources.source import EdgeBlock, EdgeData, Source, ranges
from ooc.storage.array import AnyArray

_SUFFIXES = (".txt", ".el", ".edges", ".edgelist")
_COUNTS = re.compile(r"\b(nodes|edges):\s*(\d+)", re.IGNORECASE)
_MOST_COLUMNS = 8
_LEAST_LINE_BYTES = 4
_REAL = frozenset(Kind.REAL.value.decode("ascii"))


def _open(path: Path, request: Request) -> Source:
    comments, first = leading_comments(path)
    said = {word.lower(): int(number) for line in comments for word, number in _COUNTS.findall(line)}
    block_bytes = text_block_bytes(request.budget_bytes)
    width = _width(first)
    beside = range(2, _MOST_COLUMNS if width is None else width)
    carried = asked_columns(request, tuple(str(column) for column in beside), str(path))
    expected = asks_for_edge_data(request) or request.drop_edge_data
    if width is not None and width > 2 and not expected:
        raise SourceError(f"{path} has {width} numbers a line, counted from 0: edges with data; {EDGE_COLUMNS_REMEDY}")

    def edges(size: int) -> Iterator[EdgeBlock]:
        # Weights, where there may be some, need not be whole numbers.
        kind, columns = (Kind.REAL, tuple(range(2, _MOST_COLUMNS + 1))) if expected else (Kind.WHOLE, (2,))
        for rows in rows_of_numbers(line_blocks(path, block_bytes), str(path), columns=columns, kind=kind):
            if carried.names and rows.shape[1] <= max(int(name) for name in carried.names):
                raise SourceError(f"{path} has {rows.shape[1]} numbers a line; there is no column {carried.names[-1]}")
            for start, stop in ranges(len(rows), size):
                sources, targets = (whole_ids(rows[start:stop, side], path) for side in (0, 1))
                yield EdgeBlock(sources, targets, _data(rows[start:stop], carried))

    return bare_source(
        BareGraph(
            name=Path(path.stem).stem if path.suffix in (".gz", ".zst") else path.stem,
            format="snap",
            files=(path,),
            edges=of_numbers(edges),
            has_edge_weight=carried.weight is not None,
            num_edge_features=len(carried.features),
            num_edges=said.get("edges") or max(1, path.stat().st_size // _LEAST_LINE_BYTES),
            counted=False,
            said=said,
            symmetrize=any(line.lower().startswith("undirected") for line in comments),
        ),
        request,
    )


def _width(line: str) -> int | None:
    """How many numbers are in ``line``, the first with any; None where it is no row, which reading will tell."""
    words = line.split()
    if not 2 <= len(words) <= _MOST_COLUMNS or any(set(word) - _REAL for word in words):
        return None
    return len(words)


def _data(rows: AnyArray, carried: EdgeColumns) -> EdgeData:
    return EdgeData(
        weight=rows[:, int(carried.weight)] if carried.weight is not None else None,
        features=rows[:, [int(name) for name in carried.features]] if carried.features else None,
    )


def _recognises(path: Path) -> bool:
    """Text of any kind ends in .txt: the first line that is no comment must start with two ids."""
    if plain_suffix(path) not in _SUFFIXES:
        return False
    words = leading_comments(path)[1].split()
    return len(words) >= 2 and all(word.isascii() and word.isdecimal() for word in words[:2])


READER = Reader(
    needs="SNAP edge list: .txt (.el, .edges), also .gz or .zst; features and labels by options",
    folder=False,
    recognises=_recognises,
    open=_open,
    takes=NODE_OPTIONS.union(EDGE_OPTIONS),
)
