# SPDX-License-Identifier: Apache-2.0
"""Edges in a table, CSV or Parquet; alone, or as ``edges.*`` in a folder beside ``nodes.*`` or ``features.npy``.

Also lists of edges in text. SNAP's (https://snap.stanford.edu/data) have two ids on a line, separated by a tab or
spaces, and comments with ``#``. Further numbers on a line are edge data, in columns counted from 0. The ids are sparse.
The comments at the start give the numbers of nodes and edges, and whether the graph is undirected; then each edge is
listed once.

Also Matrix Market files (https://math.nist.gov/MatrixMarket/formats.html): the adjacency matrix of a graph. The entry
(i, j) is the edge from node i - 1 to node j - 1. A symmetric matrix is stored as one triangle. Values are weights,
unless all are 1.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from ooc.errors import OptionError, SourceError
from ooc.sources.columns import (
    EDGES,
    FEATURE,
    IGNORE,
    SOURCE_END,
    TARGET_END,
    WEIGHT,
    as_argument,
    asked_roles,
    column_note,
    usual_column,
)
from ooc.sources.files.cells import WHOLE_NUMBER, Cells
from ooc.sources.files.lines import leading_comments, line_blocks, plain_suffix, text_block_bytes
from ooc.sources.files.tables import TABLE_SUFFIXES, Table, is_table, open_table, side_by_side, width
from ooc.sources.files.text_table import TextTable
from ooc.sources.formats.edges.bare_graph import (
    EDGE_OPTIONS,
    NODE_OPTIONS,
    EdgeColumns,
    asked_columns,
    asks_for_edge_data,
    bare_source,
)
from ooc.sources.numbered import NUMBERS, BareGraph, Ends, of_numbers
from ooc.sources.reading import Reader, Request
from ooc.sources.source import EdgeBlock, EdgeData, Source

_LOOKED_AT_ROWS = 1 << 16
_SOURCES = ("source", "src", "from", "u", "source_id", "src_id", "from_id")
_TARGETS = ("target", "dst", "to", "v", "target_id", "dst_id", "to_id")
_WEIGHTS = ("weight", "edge_weight")
_COMPRESSIONS = ("", ".gz", ".zst")
_NOTHING = EdgeColumns()


def _open(path: Path, request: Request) -> Source:
    edges, name, beside = path, path.name.split(".")[0], dict[str, Path | None]()
    if path.is_dir():
        if (found := _file_beside(path, "edges")) is None:
            raise SourceError(f"the folder {path} has no edges.csv, edges.parquet or edges.jsonl")
        edges, name, nodes = found, path.resolve().name, _file_beside(path, "nodes")
        for part in ("features", "labels"):
            beside[part] = npy if (npy := path / f"{part}.npy").is_file() else nodes
    return bare_source(table_graph(open_table(edges, request.budget_bytes), name, request, **beside), request)


def table_graph(
    table: Table, name: str, request: Request, *, features: Path | None = None, labels: Path | None = None
) -> BareGraph:
    """Return the graph called ``name`` whose edges are in ``table``; ``features``, ``labels``: files beside it."""
    asked = asked_roles(request, table, EDGES)
    source, target = _ends(table, asked)
    carried, meanings = _carried(table, request, asked, (source, target))
    meanings |= {source: "src: where edges start", target: "dst: where they end"}
    meanings |= dict.fromkeys((name for name, role in asked.items() if role == IGNORE), "left out")

    return BareGraph(
        name=name,
        format="table",
        files=(table.path,),
        edges=partial(column_edges, table, source, target, carried=carried),
        has_edge_weight=carried.weight is not None,
        num_edge_features=width(table, carried.features),
        num_edges=table.rows_about,
        counted=table.rows is not None,
        features=features,
        labels=labels,
        table=table,
        text_ids=(table.text_ids(source), table.text_ids(target)),
        notes=(column_note(table, meanings),),
    )


def _ends(table: Table, asked: dict[str, str]) -> tuple[str, str]:
    """Return the columns of the edges' sources and targets."""
    rest = [name for name in table.columns if name not in asked]
    source = usual_column(table, SOURCE_END, _SOURCES, asked)
    target = usual_column(table, TARGET_END, _TARGETS, asked)
    if len(rest) == 2 and not source and not target:
        source, target = rest
        _check_named(table, rest)
    if not source or not target or source == target:
        columns = ", ".join(table.columns[:20])
        raise SourceError(
            f"{table.path} has the columns {columns}; say which ones the ends of edges are in with "
            f"{as_argument('NAME', SOURCE_END)} and {as_argument('NAME', TARGET_END)}"
        )
    return source, target


def _check_named(table: Table, names: list[str]) -> None:
    """Raise SourceError where the first line of a file, read as names of columns, may be an edge."""
    first = next(iter(table.blocks(dict.fromkeys(names, Cells.TEXT), _LOOKED_AT_ROWS)), None)
    ids = set[str]() if first is None else {*first[names[0]].tolist(), *first[names[1]].tolist()}
    if not all(map(str.isdecimal, names)) and not ids.isdisjoint(names):
        roles = f"{as_argument(names[0], SOURCE_END)} and {as_argument(names[1], TARGET_END)}"
        raise SourceError(
            f"{table.path}: the first line names the columns, and {', '.join(names)} may be an edge; put a line "
            f"src,dst above the edges, or say {roles}"
        )


def _carried(
    table: Table, request: Request, asked: dict[str, str], ends: tuple[str, str]
) -> tuple[EdgeColumns, dict[str, str]]:
    """Return the columns of edge data, and the roles of all columns beside the ends.

    SourceError for a column without a role.
    """
    other = tuple(column for column in table.columns if column not in ends and asked.get(column) != IGNORE)
    chosen = asked_columns(request, other, str(table.path))
    weight = next((name for name, role in asked.items() if role == WEIGHT), None)
    features = tuple(name for name in other if asked.get(name) == FEATURE)
    if request.drop_edge_data:
        for name in (*([] if weight is None else [weight]), *features):
            raise OptionError(f"drop_edge_data=True leaves out what {as_argument(name, asked[name])} asks for")
        return _NOTHING, dict.fromkeys(other, "left out: edges are to carry nothing")
    if asks_for_edge_data(request):
        if weight is not None and chosen.weight not in (None, weight):
            raise OptionError(f"the columns {weight} and {chosen.weight} cannot both be {WEIGHT}")
        more = tuple(name for name in features if name not in chosen.names)
        chosen = EdgeColumns(chosen.weight or weight, (*chosen.features, *more))
    else:
        usual = [name for name in other if name.lower() in _WEIGHTS and name not in asked]
        if weight is None and len(usual) == 1:
            weight = usual[0]
        chosen = EdgeColumns(weight, features)
        unknown = [name for name in other if name not in chosen.names]
        if unknown:
            raise SourceError(
                f"{table.path} has edges with data ({', '.join(unknown[:20])}); say what each column is, "
                f"{as_argument(unknown[0], FEATURE)}, {WEIGHT!r} or {IGNORE!r}, or leave out all with "
                "drop_edge_data=True"
            )
    meanings = dict.fromkeys(chosen.features, "feature of the edge")
    if chosen.weight is not None:
        meanings[chosen.weight] = "weight of the edge"
    return chosen, meanings


def column_edges(
    table: Table,
    source: str,
    target: str,
    size: int,
    *,
    carried: EdgeColumns = _NOTHING,
    ids: Ends = NUMBERS,
    data: bool = True,
) -> Iterator[EdgeBlock]:
    """Return edges from the ids in the column ``source`` to those in ``target``, with their data; see `EdgeReader`."""
    carried = carried if data else _NOTHING
    ends = {end: cells for end, cells in zip((source, target), ids, strict=True) if cells is not None}
    wanted = ends | dict.fromkeys(carried.names, Cells.REAL) or {source: Cells.TEXT}  # To count them.
    for block in table.blocks(wanted, size):
        found = EdgeData(
            weight=block[carried.weight] if carried.weight is not None else None,
            features=side_by_side(block, carried.features) if carried.features else None,
        )
        zeros = np.zeros(len(next(iter(block.values()))), dtype=np.int64)
        sources, targets = (block[end] if end in ends else zeros for end in (source, target))
        yield EdgeBlock(sources, targets, found)


def _file_beside(folder: Path, stem: str) -> Path | None:
    paths = (folder / f"{stem}{suffix}{more}" for suffix in TABLE_SUFFIXES for more in _COMPRESSIONS)
    return next((path for path in paths if path.is_file()), None)


READER = Reader(
    needs="edges in a CSV, Parquet or JSON-lines table, or a folder of edges.* and nodes.* (or features.npy)",
    folder=None,
    recognises=lambda path: _file_beside(path, "edges") is not None if path.is_dir() else is_table(path),
    open=_open,
    takes=NODE_OPTIONS.union(EDGE_OPTIONS),
)


SNAP_SUFFIXES = (".txt", ".el", ".edges", ".edgelist")
_SNAP_COUNTS = re.compile(r"\b(nodes|edges):\s*(\d+)", re.IGNORECASE)
_SNAP_ENDS = {"0": SOURCE_END, "1": TARGET_END}


def _open_snap(path: Path, request: Request) -> Source:
    comments, first = leading_comments(path)
    said = {word.lower(): int(number) for line in comments for word, number in _SNAP_COUNTS.findall(line)}
    lines = partial(line_blocks, path, text_block_bytes(request.budget_bytes))
    table = TextTable(path, lines, delimiter=None, columns=max(2, len(first.split())))
    name = Path(path.stem).stem if path.suffix in (".gz", ".zst") else path.stem
    graph = replace(
        table_graph(table, name, replace(request, columns={**request.columns, **_SNAP_ENDS})),
        format="snap",
        num_edges=said.get("edges") or table.rows_about,
        said=said,
        symmetrize=any(line.lower().startswith("undirected") for line in comments),
        text_ids=(False, False),
        notes=(),
    )
    return bare_source(graph, request)


def _is_snap(path: Path) -> bool:
    """Return whether the first line that is no comment starts with two ids, since any text may end in .txt."""
    if plain_suffix(path) not in SNAP_SUFFIXES:
        return False
    words = leading_comments(path)[1].removeprefix("\ufeff").split()
    return len(words) >= 2 and all(WHOLE_NUMBER.fullmatch(word) for word in words[:2])


SNAP_READER = Reader(
    needs="SNAP edge list: .txt (.el, .edges), also .gz or .zst; features and labels by options",
    folder=False,
    recognises=_is_snap,
    open=_open_snap,
    takes=NODE_OPTIONS.union(EDGE_OPTIONS),
)


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


def _open_matrix(path: Path, request: Request) -> Source:
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


MATRIX_READER = Reader(
    needs="Matrix Market .mtx, also .gz or .zst; features and labels by options",
    folder=False,
    recognises=lambda path: plain_suffix(path) == ".mtx",
    open=_open_matrix,
    takes=NODE_OPTIONS,
)
