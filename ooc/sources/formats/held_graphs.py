# SPDX-License-Identifier: Apache-2.0
"""Graphs held by a Python program: frames of pandas or polars, networkx's graphs, sparse matrices of scipy.

They are recognised by the modules of their classes; none of these packages is imported here. Their memory is the
caller's, outside the budget, and blocks are copied from it as from a file.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ooc.errors import SourceError
from ooc.sources.columns import ID, SOURCE_END, TARGET_END, NodeTables
from ooc.sources.files.cells import ColumnKind
from ooc.sources.files.tables import Column, HeldTable, Table, Values
from ooc.sources.formats.edges.bare_graph import EDGE_OPTIONS, NODE_OPTIONS, bare_source
from ooc.sources.formats.edges.edge_table import table_graph
from ooc.sources.numbered import BareGraph, of_numbers
from ooc.sources.reading import Request, check_taken
from ooc.sources.source import EdgeBlock, EdgeData, Source, ranges

_NODES, _EDGES = "nodes", "edges"
_NODE, _FROM, _TO = "node", "from", "to"


def is_held_graph(source: object) -> bool:
    """Return whether ``source`` looks like one of these, or like a dictionary of frames called ``nodes`` and
    ``edges``."""
    if isinstance(source, Mapping) and not _is_sparse(source):  # one of scipy's is both
        return _EDGES in source and _is_frame(source[_EDGES])
    return _is_frame(source) or _package(source) == "networkx" or _is_sparse(source)


def held_source(source: Any, request: Request) -> Source:
    """Return the graph of ``source``; raise SourceError where it is none, or cannot be converted."""
    if _is_sparse(source):
        check_taken(NODE_OPTIONS.union(EDGE_OPTIONS), "scipy", replace(request, columns={}))
        return bare_source(_matrix_source(source), request)
    check_taken(NODE_OPTIONS.union(EDGE_OPTIONS), _package(source), request)
    if _package(source) == "networkx":
        return _networkx_source(source, request)
    frames = dict(source) if isinstance(source, Mapping) else {_EDGES: source}
    if unknown := [name for name in frames if name not in (_NODES, _EDGES)]:
        raise SourceError(f"frames are called nodes and edges, not {', '.join(map(str, unknown))}")
    tables: dict[str, Table] = {name: _table_of_frame(name, frame) for name, frame in frames.items()}
    if _NODES in tables:
        _check_index(frames[_NODES], tables[_NODES], request)
    return _tables_source(tables, request, "frames")


def _tables_source(tables: dict[str, Table], request: Request, name: str, *, symmetrize: bool = False) -> Source:
    nodes = Path(_NODES) if _NODES in tables else None
    held = {Path(called): table for called, table in tables.items()}
    graph = table_graph(tables[_EDGES], name, request, features=nodes, labels=nodes)
    return bare_source(replace(graph, format=name, files=(), held=held, symmetrize=symmetrize), request)


# ---- frames ---------------------------------------------------------------------------------------------------


def _package(source: object) -> str:
    return type(source).__module__.partition(".")[0]


def _is_frame(source: object) -> bool:
    return _package(source) in ("pandas", "polars") and type(source).__name__ in ("DataFrame", "LazyFrame")


def _table_of_frame(name: str, frame: Any) -> HeldTable:
    if not _is_frame(frame):
        raise SourceError(f"{name} is a {type(frame).__name__}, not a frame of pandas or polars")
    if type(frame).__name__ == "LazyFrame":
        raise SourceError(f"{name} is a LazyFrame; give {name}.collect()")
    if _package(frame) == "pandas":
        frame = _with_index(frame)
    names = [str(column) for column in frame.columns]
    if len(set(names)) < len(names):
        raise SourceError(f"the frame {name} has two columns of one name: {', '.join(names)}")
    columns = {text: _column(frame[column]) for text, column in zip(names, frame.columns, strict=True)}
    return HeldTable(Path(name), columns, len(frame))


def _with_index(frame: Any) -> Any:
    """Return ``frame`` with an index that has a name, or unnamed texts (``id``), as columns: ids are often there."""
    index = frame.index
    if len(index.names) == 1 and index.name is None:
        if index.dtype.kind in "iu" or "id" in frame.columns:
            return frame
        return frame.rename_axis("id").reset_index()
    new = [name for name in index.names if name is not None and name not in frame.columns]
    return frame.reset_index(level=new) if new else frame


def _check_index(frame: Any, table: Table, request: Request) -> None:
    """Raise SourceError where edges may refer to an integer index that differs from row numbers.

    Such an index remains when rows were removed or reordered.
    """
    index, nodes = getattr(frame, "index", None), NodeTables(request, {table.path: table})
    nodes.open(table.path)
    if nodes.ids(_NODES) is None and index is not None and (index != np.arange(len(frame))).any():
        raise SourceError(
            f"the frame {table.path} has no ids but an index that does not count its rows; if edges go by it, give "
            'nodes.rename_axis("id"), if by rows, nodes.reset_index(drop=True)'
        )


def _column(series: Any) -> Column:
    of_pandas, kind = _package(series) == "pandas", series.dtype
    if of_pandas:
        plain = isinstance(kind, np.dtype) and kind.kind in "biuf"
        category, time = kind.name == "category", getattr(kind, "kind", "") in "Mm"
    else:
        plain = kind.is_numeric() and not series.null_count()
        category, time = type(kind).__name__ in ("Categorical", "Enum"), kind.is_temporal()

    def values(start: int, stop: int) -> Values:
        part = series.iloc[start:stop] if of_pandas else series.slice(start, stop - start)
        found: Values = part.to_numpy() if plain else part.tolist() if of_pandas else part.to_list()
        return found

    return Column(values, ColumnKind.TIMES if time else ColumnKind.CATEGORIES if category else None)


# ---- networkx -------------------------------------------------------------------------------------------------


def _networkx_source(graph: Any, request: Request) -> Source:
    """Return its nodes by their ids, with attributes as columns, and its edges; undirected edges in both directions."""
    if graph.is_multigraph() and not graph.is_directed():  # Edges between the same two nodes stay as many.
        graph = graph.to_directed(as_view=True)
    nodes, edges = list(graph.nodes(data=True)), list(graph.edges(data=True))
    if not nodes or not edges:
        raise SourceError(f"the networkx graph has {len(nodes)} nodes and {len(edges)} edges, nothing to train on")
    wrong = next((node for node, _ in nodes if isinstance(node, bool) or not isinstance(node, str | int)), None)
    if wrong is not None:
        raise SourceError(
            f"a node of the networkx graph is {wrong!r:.60}, neither a text nor a whole number; rename the nodes with "
            "networkx.convert_node_labels_to_integers or relabel_nodes"
        )
    called = {_NODE: [node for node, _ in nodes]} | _attributes([attributes for _, attributes in nodes], (_NODE,))
    ends = {_FROM: [edge[0] for edge in edges], _TO: [edge[1] for edge in edges]}
    ends |= _attributes([edge[2] for edge in edges], (_FROM, _TO))
    roles = {f"{_NODES}.{_NODE}": ID, f"{_EDGES}.{_FROM}": SOURCE_END, f"{_EDGES}.{_TO}": TARGET_END}
    tables: dict[str, Table] = {_NODES: _table_of_lists(_NODES, called), _EDGES: _table_of_lists(_EDGES, ends)}
    request = replace(request, columns={**roles, **request.columns})
    return _tables_source(tables, request, "networkx", symmetrize=not graph.is_directed())


def _attributes(rows: list[dict[Any, Any]], taken: tuple[str, ...]) -> dict[str, list[Any]]:
    """Return the attributes by name, with ``None`` where a node or edge lacks one."""
    names = dict.fromkeys(name for row in rows for name in row)
    for name in names:
        if str(name) in taken:
            raise SourceError(f"an attribute of the networkx graph is called {name}; give it another name")
    return {str(name): [row.get(name) for row in rows] for name in names}


def _table_of_lists(name: str, columns: dict[str, list[Any]]) -> HeldTable:
    def column(values: list[Any]) -> Column:
        return Column(lambda start, stop: values[start:stop])

    rows = len(next(iter(columns.values())))
    return HeldTable(Path(name), {text: column(values) for text, values in columns.items()}, rows)


# ---- scipy ----------------------------------------------------------------------------------------------------


def _is_sparse(source: object) -> bool:
    return type(source).__module__.startswith("scipy.sparse") and hasattr(source, "tocoo")


def _matrix_source(matrix: Any) -> BareGraph:
    """Return the graph of an adjacency matrix: entry (i, j) is the edge from node i to node j.

    The values are weights, unless all of them are 1.
    """
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise SourceError(f"the sparse matrix has the shape {matrix.shape}; a graph's is square")
    entries = matrix.tocoo()
    if entries.data.dtype.kind not in "biuf":
        raise SourceError(f"the sparse matrix holds {entries.data.dtype} values, not plain numbers")

    def edges(size: int) -> Iterator[EdgeBlock]:
        for start, stop in ranges(entries.nnz, size):
            sources, targets = (end[start:stop].astype(np.int64) for end in (entries.row, entries.col))
            yield EdgeBlock(sources, targets, EdgeData(weight=entries.data[start:stop]))

    return BareGraph(
        name="the sparse matrix",
        format="scipy",
        files=(),
        edges=of_numbers(edges),
        has_edge_weight=True,
        weight_unless_ones=True,
        num_edges=int(entries.nnz),
        num_nodes=int(matrix.shape[0]),
        counted=True,
    )
