# SPDX-License-Identifier: Apache-2.0
"""Tables of nodes and edges of several types: a folder with ``nodes/TYPE.*`` and ``edges/SOURCE__RELATION__TARGET.*``,
CSV, Parquet or JSON lines.

Columns are told as those of one table of nodes and one of edges are. One table of nodes has labels; one without columns
of features is of a type without features. Edges name nodes by the column of ids in the tables of the types they are
between, or by row numbers where there is none; which nodes these are is found out once, on the disk (``id_join``).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ooc.errors import SourceError
from ooc.events import Listener
from ooc.sources.columns import EDGES, LABEL, NODES, NodeTables, as_argument, check_all_found
from ooc.sources.edge_options import EdgeColumns
from ooc.sources.files.cells import Cells, NoWholeNumber
from ooc.sources.files.lines import plain_suffix
from ooc.sources.files.npy import NpyArray, edges_between
from ooc.sources.files.tables import Table, is_table, open_table, width
from ooc.sources.files.text_file import TextFile, encoded
from ooc.sources.formats.edges.edge_table import column_edges, edge_columns
from ooc.sources.id_join import Keys, join, keys_of_numbers, keys_of_texts
from ooc.sources.node_data import NodeFeatures, NodeLabels, node_features, node_labels
from ooc.sources.node_ids import write_ids
from ooc.sources.reading import COLUMNS, SPLIT, Reader, Request
from ooc.sources.source import EdgeBlock, EdgeData, Ids, RelationSource, Source, fingerprint_of, with_data
from ooc.sources.typed import nodes_alone, typed_source
from ooc.storage.array import flush, replace_file
from ooc.storage.types import EdgeType

_BLOCK_ROWS = 1 << 16
_COUNTS = "counts.json"
_ID, _NODE = np.dtype("<i8"), np.dtype("<u4")


@dataclass(frozen=True)
class _Nodes:
    """The table of the nodes of one type: ``ids`` its column of those, if it has one; ``labels`` of the one type that
    has such."""

    kind: str
    table: Table
    ids: str | None
    features: NodeFeatures
    labels: NodeLabels | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Edges:
    """The table of the edges of one type, and the columns of their ends and of what they carry."""

    kind: EdgeType
    table: Table
    ends: tuple[str, str]
    carried: EdgeColumns
    note: str


@dataclass(frozen=True)
class _Tables:
    """All of a folder's. ``budget_bytes``: to work in."""

    name: str
    nodes: dict[str, _Nodes]
    edges: dict[EdgeType, _Edges]
    labelled: str
    budget_bytes: int

    def source(self, nodes: dict[str, int], edges: dict[EdgeType, RelationSource], names: list[str]) -> Source:
        """The graph of so many ``nodes``, classes of these ``names``."""
        alone = {kind: _alone(one, nodes[kind]) for kind, one in self.nodes.items()}
        own, labels = alone.pop(self.labelled), self.nodes[self.labelled].labels
        assert labels is not None, "the type that is labelled has labels"
        count, class_names = own.num_nodes, tuple(names)
        source = replace(
            own,
            name=self.name,
            format="typed-tables",
            num_classes=len(names) or labels.num_classes,
            class_names=class_names,
            task=labels.task,
            labels=lambda size: labels.blocks(count, size, class_names),
            fingerprint=fingerprint_of(
                *(n.table.path for n in self.nodes.values()), *(e.table.path for e in self.edges.values())
            ),
            description={"split": labels.split} if labels.split else {},
            notes=(
                *(note for one in self.nodes.values() for note in one.notes),
                *(e.note for e in self.edges.values()),
            ),
        )
        return typed_source(source, self.labelled, alone, edges)

    def prepared(self, folder: Path, listener: Listener) -> Source:
        """The graph with everything counted; what is found out goes to ``folder``, and is taken from there."""
        if not (path := folder / _COUNTS).exists():
            replace_file(path, json.dumps(self._counted(folder, listener)).encode())
        counts = json.loads(path.read_text())
        edges = {
            one.kind: _relation(one, folder / f"edges-{at}", counts["edges"][at])
            for at, one in enumerate(self.edges.values())
        }
        source = self.source(dict(zip(self.nodes, counts["nodes"], strict=True)), edges, counts["class_names"])
        if self.nodes[self.labelled].ids is None:
            return source
        ids = folder / f"ids-{[*self.nodes].index(self.labelled)}"
        if width := counts["width"]:
            return replace(source, ids=TextFile(ids, rows=source.num_nodes, width=width).padded, id_bytes=width)
        return replace(source, ids=NpyArray(ids, raw=((source.num_nodes,), _ID)).values)

    def _counted(self, folder: Path, listener: Listener) -> dict[str, object]:
        """Write ids of nodes, and which nodes edges are between; how many there are."""
        called = {kind: _Called(self, one, folder / f"ids-{at}") for at, (kind, one) in enumerate(self.nodes.items())}
        edges = []
        for at, one in enumerate(self.edges.values()):
            counts = []
            for end, (kind, column) in enumerate(zip((one.kind.source, one.kind.target), one.ends, strict=True)):
                counts.append(called[kind].write_ends(one, column, folder / f"edges-{at}.{end}", listener))
            edges.append(counts[0])
        labels = self.nodes[self.labelled].labels
        names = None if labels is None else labels.class_names
        return {
            "nodes": [one.count for one in called.values()],
            "edges": edges,
            "width": called[self.labelled].width,
            "class_names": list(names()) if names is not None else [],
        }


class _Called:
    """What the nodes of one type are called: whole numbers, texts (``width`` bytes of the longest; else 0), or their
    row numbers; written to ``path``. ``count``: how many there are."""

    def __init__(self, tables: _Tables, nodes: _Nodes, path: Path) -> None:
        self._tables, self._nodes, self._path = tables, nodes, path
        self._texts = nodes.ids is not None and any(table.text_ids(column) for table, column in self._columns())
        self.width = 0
        try:
            self.count = self._write()
        except NoWholeNumber:
            if nodes.ids is None:
                raise
            self._texts = True  # Only the first rows looked like numbers.
            self.count = self._write()

    def _columns(self) -> Iterator[tuple[Table, str]]:
        """All columns that name these nodes."""
        assert self._nodes.ids is not None
        yield self._nodes.table, self._nodes.ids
        for one in self._tables.edges.values():
            kinds = one.kind.source, one.kind.target
            yield from ((one.table, end) for end, kind in zip(one.ends, kinds, strict=True) if kind == self._nodes.kind)

    def _write(self) -> int:
        table, column = self._nodes.table, self._nodes.ids
        if column is None:
            return table.rows if table.rows is not None else table.count()
        if not self._texts:
            return write_ids(self._path, _cells(table, column, Cells.WHOLE))
        where = f"{table.path}: the column {column}"
        written = TextFile.write(self._path, _encoded(table, column, where))
        self.width = written.width
        return written.rows

    def _keys(self) -> Iterator[Keys]:
        if self._texts:
            return map(keys_of_texts, TextFile(self._path, rows=self.count, width=self.width).blocks(_BLOCK_ROWS))
        return map(keys_of_numbers, NpyArray(self._path, raw=((self.count,), _ID)).values(_BLOCK_ROWS))

    def write_ends(self, edges: _Edges, column: str, path: Path, listener: Listener) -> int:
        """Write the nodes that a ``column`` of edges names to ``path``; how many there are. SourceError for what names
        none, and for an id of two nodes."""
        table = edges.table
        if self._nodes.ids is None:
            return self._write_rows(edges, column, path)
        where = f"{table.path}: the column {column}"
        ends: Iterator[Keys]
        if self._texts:
            ends = map(keys_of_texts, _encoded(table, column, where))
        else:
            ends = map(keys_of_numbers, _cells(table, column, Cells.WHOLE))
        limit = self._tables.budget_bytes // 2
        found = join(self._keys(), self.count, ends, path, limit_bytes=limit, listener=listener)
        if found.twice is not None:
            rows = " and ".join(str(row + 1) for row in found.twice)
            raise SourceError(f"{self._nodes.table.path} has one id twice, in the rows {rows}")
        if found.absent is not None:
            raise self._absent(edges, column, found.absent)
        return found.ends

    def _write_rows(self, edges: _Edges, column: str, path: Path) -> int:
        partial, done = path.with_name(path.name + ".partial"), 0
        with partial.open("wb") as file:
            for ids in _cells(edges.table, column, Cells.WHOLE):
                wrong = (ids < 0) | (ids >= self.count)
                if wrong.any():
                    raise self._absent(edges, column, done + int(wrong.argmax()))
                file.write(ids.astype(_NODE).data)
                done += len(ids)
        flush(partial)
        partial.rename(path)
        return done

    def _absent(self, edges: _Edges, column: str, row: int) -> SourceError:
        """The error for the end in a ``row``, read again up to there."""
        done, shown = 0, ""
        for block in edges.table.blocks({column: Cells.TEXT}, _BLOCK_ROWS):
            if row < done + len(block[column]):
                shown = f" ({str(block[column][row - done])[:60]})"
                break
            done += len(block[column])
        nodes = self._nodes
        known = f"the column {nodes.ids}" if nodes.ids is not None else f"the row numbers 0 to {self.count - 1}"
        return SourceError(
            f"{edges.table.path}: the {column} of row {row + 1}{shown} is no node: nodes of type {nodes.kind} are "
            f"{known} of {nodes.table.path}"
        )


def _cells(table: Table, column: str, cells: Cells) -> Iterator[Ids]:
    return (block[column] for block in table.blocks({column: cells}, _BLOCK_ROWS))


def _encoded(table: Table, column: str, where: str) -> Iterator[list[bytes]]:
    row = 0
    for texts in (block.tolist() for block in _cells(table, column, Cells.TEXT)):
        if "" in texts:
            raise SourceError(f"{where}: row {row + texts.index('') + 1} is empty")
        yield encoded(texts, where)
        row += len(texts)


def _alone(nodes: _Nodes, count: int) -> Source:
    blocks, columns = nodes.features.blocks, nodes.features.columns
    return nodes_alone(str(nodes.table.path), count, columns, lambda size: blocks(count, size))


def _relation(one: _Edges, path: Path, count: int) -> RelationSource:
    """The edges whose ends are at ``path``, with what their table has for them."""
    sources, targets = (NpyArray(path.with_name(f"{path.name}.{end}"), raw=((count,), _NODE)) for end in range(2))
    carried = one.carried

    def data(columns: EdgeColumns, size: int) -> Iterator[EdgeData]:
        blocks = column_edges(one.table, *one.ends, size, carried=columns, ids=None)
        return (block.data for block in blocks if block.data is not None)

    def edges(size: int) -> Iterator[EdgeBlock]:
        weights, rows = data(EdgeColumns(carried.weight), size), data(EdgeColumns(None, carried.features), size)
        return with_data(
            edges_between(sources, targets, size),
            weight=(part.weight for part in weights if part.weight is not None) if carried.weight else None,
            features=(part.features for part in rows if part.features is not None) if carried.features else None,
            name=str(one.table.path),
        )

    return replace(_about(one, count), edges=edges)


def _about(one: _Edges, count: int) -> RelationSource:
    """So many edges, and what they carry, not to be read."""
    features = width(one.table, one.carried.features)
    return RelationSource(count, lambda size: iter(()), one.carried.weight is not None, features)


def _open(path: Path, request: Request) -> Source:
    """The graph in the folder ``path``; nothing but texts of the first rows is held."""
    files = {part: _by_type(path / part) for part in (NODES, EDGES)}
    tables = {
        part: {kind: open_table(file, request.budget_bytes) for kind, file in found.items()}
        for part, found in files.items()
    }
    _check_roles(request, tables)
    of_types = {kind: _for_table(request, kind) for part in files.values() for kind in part}
    edges = {}
    for name, table in tables[EDGES].items():
        if len(parts := name.split("__")) != 3:
            raise SourceError(f"{table.path} is not called SOURCE__RELATION__TARGET")
        source, target, carried, note = edge_columns(table, of_types[name])
        edges[EdgeType(*parts)] = _Edges(EdgeType(*parts), table, (source, target), carried, note)
    opened = {kind: NodeTables(of_types[kind], {table.path: table}) for kind, table in tables[NODES].items()}
    for kind, table in tables[NODES].items():
        opened[kind].open(table.path)
    labelled = _labelled(path, opened, tables[NODES])
    nodes = {
        kind: _nodes(kind, table, opened[kind], of_types[kind], labelled=kind == labelled)
        for kind, table in tables[NODES].items()
    }
    found = _Tables(path.resolve().name, nodes, edges, labelled, request.budget_bytes)
    counts = {kind: max(1, one.table.rows_about) for kind, one in nodes.items()}
    about = {kind: _about(one, one.table.rows_about) for kind, one in edges.items()}
    total = 16 * sum(counts.values()) + 8 * sum(one.num_edges for one in about.values())
    return replace(found.source(counts, about, []), prepare=found.prepared, prepare_bytes=total)


def _nodes(kind: str, table: Table, tables: NodeTables, request: Request, *, labelled: bool) -> _Nodes:
    tables.of_types(labelled=labelled)
    ids = tables.ids(kind)
    features = node_features(str(table.path), tables, request)
    labels = node_labels(kind, str(table.path), tables, request) if labelled else None
    notes = (*tables.notes(), *(() if labels is None else labels.notes))
    return _Nodes(kind, table, None if ids is None else ids[1], features, labels, notes)


def _labelled(path: Path, opened: dict[str, NodeTables], tables: dict[str, Table]) -> str:
    """The type whose table has labels: a column that is said to be them, or is called so."""
    found = [kind for kind, table in tables.items() if opened[kind].has_labels(table)]
    if len(found) != 1:
        told = ", ".join(found) or "none"
        example = as_argument(f"{next(iter(tables))}.NAME", LABEL)
        raise SourceError(
            f"one table in {path / NODES} has to have labels, a column label or y, or {example}: {told} has"
        )
    return found[0]


def _by_type(folder: Path) -> dict[str, Path]:
    """The tables in the folder by what comes before their suffix. SourceError where there are two of one name."""
    found: dict[str, Path] = {}
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        if file.is_file() and is_table(file):
            kind = file.name.partition(plain_suffix(file))[0]
            if kind in found:
                raise SourceError(f"{found[kind]} and {file} are tables of one type")
            found[kind] = file
    if not found:
        raise SourceError(f"{folder} holds no table: CSV, Parquet or JSON lines")
    return found


def _for_table(request: Request, kind: str) -> Request:
    """The request as it is to the table of one type, whose columns may be written ``TYPE.NAME``."""
    own = {text.removeprefix(f"{kind}."): role for text, role in request.columns.items()}
    return replace(request, columns=own)


def _check_roles(request: Request, tables: dict[str, dict[str, Table]]) -> None:
    """SourceError for a column that gets a role and is in no table."""
    every = [(part, kind, table) for part, found in tables.items() for kind, table in found.items()]
    said = {t for t in request.columns for _, kind, table in every if t.removeprefix(f"{kind}.") in table.columns}
    left = {text: role for text, role in request.columns.items() if text not in said or "." not in text}
    check_all_found(replace(request, columns=left), [(part, table) for part, _, table in every])


READER = Reader(
    needs="a folder of tables by type: nodes/TYPE.* and edges/SOURCE__RELATION__TARGET.*, CSV, Parquet or JSON lines",
    folder=True,
    recognises=lambda path: all(
        (path / part).is_dir() and any(map(is_table, (path / part).iterdir())) for part in (NODES, EDGES)
    ),
    open=_open,
    takes=frozenset({"task", SPLIT, COLUMNS}),
)
