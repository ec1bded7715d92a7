# SPDX-License-Identifier: Apache-2.0
"""Tables of nodes and edges of several types: a folder with ``nodes/TYPE.*`` and ``edges/SOURCE__RELATION__TARGET.*``,
CSV, Parquet or JSON lines.

Columns get their roles as in one table of nodes and one of edges. One table of nodes has labels. A table without
feature columns is of a type without features. Edges refer to nodes by the column of ids in the tables of their types,
or by row numbers where there is none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ooc.errors import SourceError
from ooc.sources.columns import EDGES, LABEL, NODES, NodeTables, as_argument, check_all_found
from ooc.sources.files.lines import plain_suffix
from ooc.sources.files.tables import Table, is_table, open_table
from ooc.sources.formats.edges.edge_table import table_graph
from ooc.sources.labels import ClassNames
from ooc.sources.node_data import NodeFeatures, NodeLabels, node_features, node_labels
from ooc.sources.numbered import Nodes, Numbering
from ooc.sources.reading import COLUMNS, SPLIT, Reader, Request
from ooc.sources.source import RelationSource, Source, fingerprint_of
from ooc.sources.typed import nodes_alone, typed_source
from ooc.storage.types import EdgeType


@dataclass(frozen=True)
class _Nodes:
    """The table of one type's nodes: ``ids``, its column of ids, if it has one; ``labels``, of the one type that has
    them."""

    table: Table
    ids: tuple[Table, str] | None
    features: NodeFeatures
    labels: NodeLabels | None
    notes: tuple[str, ...]

    def alone(self, count: int) -> Source:
        """Return that many nodes with their features."""
        blocks = self.features.blocks
        return nodes_alone(str(self.table.path), count, self.features.columns, lambda size: blocks(count, size))


def _open(path: Path, request: Request) -> Source:
    """Return the graph in the folder ``path``."""
    files = {part: _by_type(path / part) for part in (NODES, EDGES)}
    tables = {
        part: {kind: open_table(file, request.budget_bytes) for kind, file in found.items()}
        for part, found in files.items()
    }
    _check_roles(request, tables)
    of_types = {  # Columns may be written TYPE.NAME.
        kind: replace(request, columns={t.removeprefix(f"{kind}."): role for t, role in request.columns.items()})
        for part in files.values()
        for kind in part
    }
    edges = {}
    for name, table in tables[EDGES].items():
        if len(parts := name.split("__")) != 3:
            raise SourceError(f"{table.path} is not called SOURCE__RELATION__TARGET")
        edges[EdgeType(*parts)] = table_graph(table, str(table.path), of_types[name])
    opened = {kind: NodeTables(of_types[kind], {table.path: table}) for kind, table in tables[NODES].items()}
    labelled = _labelled(path, opened, tables[NODES])
    nodes = {
        kind: _nodes(kind, table, opened[kind], of_types[kind], labelled=kind == labelled)
        for kind, table in tables[NODES].items()
    }
    own = nodes[labelled]
    labels = own.labels
    assert labels is not None, "the type that is labelled has labels"

    def of(counts: Mapping[str, int], relations: Sequence[RelationSource], names: ClassNames) -> Source:
        alone = {kind: one.alone(counts[kind]) for kind, one in nodes.items()}
        source = replace(
            alone.pop(labelled),
            name=path.resolve().name,
            format="typed-tables",
            num_classes=len(names) or labels.num_classes,
            class_names=names,
            task=labels.task,
            labels=lambda size: labels.blocks(counts[labelled], size, names),
            fingerprint=fingerprint_of(*(table.path for found in tables.values() for table in found.values())),
            description={"split": labels.split} if labels.split else {},
            notes=(
                *(note for one in nodes.values() for note in one.notes),
                *(note for graph in edges.values() for note in graph.notes),
            ),
        )
        return typed_source(source, labelled, alone, dict(zip(edges, relations, strict=True)))

    numbering = Numbering(
        nodes={kind: Nodes(ids=one.ids, table=one.table, count=one.table.rows) for kind, one in nodes.items()},
        edges=[(kind.source, kind.target, graph) for kind, graph in edges.items()],
        class_names=labels.class_names,
        budget_bytes=request.budget_bytes,
    )

    about = {kind: max(1, one.table.rows_about) for kind, one in nodes.items()}
    return numbering.preparing(of(about, [graph.relation for graph in edges.values()], ()), labelled, of)


def _nodes(kind: str, table: Table, tables: NodeTables, request: Request, *, labelled: bool) -> _Nodes:
    tables.of_types(labelled=labelled)
    features = node_features(str(table.path), tables, request)
    labels = node_labels(kind, str(table.path), tables, request) if labelled else None
    ids = tables.ids(kind)
    notes = (*tables.notes(), *(() if labels is None else labels.notes))
    return _Nodes(table, ids, features, labels, notes)


def _labelled(path: Path, opened: dict[str, NodeTables], tables: dict[str, Table]) -> str:
    """Return the type whose table has labels: a column with that role or name."""
    found = [kind for kind, table in tables.items() if opened[kind].has_labels(table)]
    if len(found) != 1:
        told = ", ".join(found) or "none"
        example = as_argument(f"{next(iter(tables))}.NAME", LABEL)
        raise SourceError(
            f"one table in {path / NODES} has to have labels, a column label or y, or {example}: {told} has"
        )
    return found[0]


def _by_type(folder: Path) -> dict[str, Path]:
    """Return the tables in the folder by the part of their name before the suffix; raise SourceError for a repeated
    name."""
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


def _check_roles(request: Request, tables: dict[str, dict[str, Table]]) -> None:
    """Raise SourceError for a column that is given a role and is in no table."""
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
