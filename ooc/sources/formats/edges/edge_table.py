# SPDX-License-Identifier: Apache-2.0
"""Edges in a table, CSV or Parquet; alone, or as ``edges.*`` in a folder beside ``nodes.*`` or ``features.npy``."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from ooc.errors import SourceError
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
from ooc.sources.edge_options import (
    EDGE_OPTIONS,
    EdgeColumns,
    asked_columns,
    asks_for_edge_data,
)
from ooc.sources.files.cells import Cells
from ooc.sources.files.tables import TABLE_SUFFIXES, Table, is_table, open_table, side_by_side, width
from ooc.sources.formats.edges.bare_graph import NODE_OPTIONS, bare_source
from ooc.sources.numbered import NUMBERS, BareGraph, Ends
from ooc.sources.reading import Reader, Request
from ooc.sources.source import EdgeBlock, EdgeData, Source

_SOURCES = ("source", "src", "from", "u", "source_id", "src_id", "from_id")
_TARGETS = ("target", "dst", "to", "v", "target_id", "dst_id", "to_id")
_WEIGHTS = ("weight", "edge_weight")
_COMPRESSIONS = ("", ".gz", ".zst")
_NOTHING = EdgeColumns()


def _open(path: Path, request: Request) -> Source:
    if not path.is_dir():
        return bare_source(
            table_graph(open_table(path, request.budget_bytes), path.name.split(".")[0], request), request
        )
    edges, nodes = _beside(path, "edges"), _beside(path, "nodes")
    if edges is None:
        raise SourceError(f"the folder {path} has no edges.csv, edges.parquet or edges.jsonl")
    features, labels = (npy if (npy := path / f"{part}.npy").is_file() else nodes for part in ("features", "labels"))
    table = open_table(edges, request.budget_bytes)
    return bare_source(table_graph(table, path.resolve().name, request, features=features, labels=labels), request)


def table_graph(
    table: Table, name: str, request: Request, *, features: Path | None = None, labels: Path | None = None
) -> BareGraph:
    """The graph called ``name`` whose edges are in ``table``; ``features``, ``labels``: files of theirs beside it."""
    asked = asked_roles(request, table, EDGES)
    source, target = _ends(table, asked)
    carried, meanings = _carried(table, request, asked, (source, target))
    meanings |= {source: "src: where edges start", target: "dst: where they end"}
    meanings |= dict.fromkeys((name for name, role in asked.items() if role == IGNORE), "left out, as asked")

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
    """The columns of the edges' sources and targets."""
    rest = [name for name in table.columns if name not in asked]
    source = usual_column(table, SOURCE_END, _SOURCES, asked)
    target = usual_column(table, TARGET_END, _TARGETS, asked)
    if len(rest) == 2 and not source and not target:
        source, target = rest
    if not source or not target or source == target:
        columns = ", ".join(table.columns[:20])
        raise SourceError(
            f"{table.path} has the columns {columns}; say which ones the ends of edges are in with "
            f"{as_argument('NAME', SOURCE_END)} and {as_argument('NAME', TARGET_END)}"
        )
    return source, target


def _carried(
    table: Table, request: Request, asked: dict[str, str], ends: tuple[str, str]
) -> tuple[EdgeColumns, dict[str, str]]:
    """The columns of what edges carry, and what the others beside the ends were taken for.

    SourceError for one of which nobody says what it is.
    """
    other = tuple(column for column in table.columns if column not in ends and asked.get(column) != IGNORE)
    chosen = asked_columns(request, other, str(table.path))
    if request.drop_edge_data:
        return _NOTHING, dict.fromkeys(other, "left out: edges are to carry nothing")
    if not asks_for_edge_data(request):
        weight = next((name for name, role in asked.items() if role == WEIGHT), None)
        usual = [name for name in other if name.lower() in _WEIGHTS and name not in asked]
        if weight is None and len(usual) == 1:
            weight = usual[0]
        chosen = EdgeColumns(weight, tuple(name for name in other if asked.get(name) == FEATURE))
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
    """Edges from the ids in the column ``source`` to those in ``target``, with what they carry; see `EdgeReader`."""
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


def _beside(folder: Path, stem: str) -> Path | None:
    paths = (folder / f"{stem}{suffix}{more}" for suffix in TABLE_SUFFIXES for more in _COMPRESSIONS)
    return next((path for path in paths if path.is_file()), None)


READER = Reader(
    needs="edges in a CSV, Parquet or JSON-lines table, or a folder of edges.* and nodes.* (or features.npy)",
    folder=None,
    recognises=lambda path: _beside(path, "edges") is not None if path.is_dir() else is_table(path),
    open=_open,
    takes=NODE_OPTIONS.union(EDGE_OPTIONS),
)
