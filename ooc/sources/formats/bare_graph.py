# SPDX-License-Identifier: Apache-2.0
"""Graphs that come as edges alone, with ids of any kind, joined with what ``--features`` and ``--labels`` say.

Which node an id is: its row in a table that has a column of ids; else the id itself where a file says how many
nodes there are or the format does; else its rank among all ids that edges have. What must be counted first is
counted in one pass over the edges, when the conversion prepares. N nodes, E edges.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ooc.errors import BudgetError, SourceError
from ooc.events import Listener, reported
from ooc.sizes import format_size
from ooc.sources.column_roles import EDGES, NODES, check_all_found
from ooc.sources.edge_options import EdgeFiles, asked_files
from ooc.sources.files.npy import NpyFile
from ooc.sources.files.tables import Cells, Table
from ooc.sources.labels import ClassNames
from ooc.sources.node_data import RANDOM, NodeFeatures, NodeLabels, node_features, node_labels
from ooc.sources.node_ids import Numbering, Same, collect, numbering, sorted_with_rows, write_ids
from ooc.sources.node_tables import ID_NAMES, NodeTables
from ooc.sources.reading import COLUMNS, SPLIT, Request
from ooc.sources.source import EdgeBlock, Ids, Source, fingerprint_of
from ooc.storage.array import AnyArray, flush

NODE_OPTIONS = frozenset(
    {"features", "labels", "task", "id_column", "feature_columns", "label_column", "split_column", SPLIT, COLUMNS}
)
"""What any such graph takes of nodes; ``EDGE_OPTIONS`` are those of edges."""
_BLOCK_ROWS = 1 << 18
_IDS, _COUNTED, _COUNTS = "ids", "counted", "counts.json"
_LEAST_NODES = 1
_MOST_NODES = 2**32


@dataclass(frozen=True, kw_only=True)
class BareGraph:
    """Edges, as a format has them.

    ``edges(n)``: blocks as a source's, of ids as in ``files``. ``num_edges`` may be an estimate where it is not
    ``counted``. ``num_nodes``: None where any ids may come. ``said``: the numbers of ``nodes`` and ``edges`` that
    the files claim, compared with what is found. ``features``, ``labels``: files of theirs beside the edges.
    ``table``: what the edges are in, where that is one. ``notes``: what the user is told.

    ``carrying(n)``: the same edges with what they carry, as ``has_edge_weight``, ``num_edge_features`` and
    ``weight_unless_ones`` say (see ``Source``); None where that is nothing.
    """

    name: str
    format: str
    files: tuple[Path, ...]
    edges: Callable[[int], Iterator[EdgeBlock]]
    num_edges: int
    counted: bool
    num_nodes: int | None = None
    said: dict[str, int] = field(default_factory=dict)
    symmetrize: bool = False
    features: Path | None = None
    labels: Path | None = None
    carrying: Callable[[int], Iterator[EdgeBlock]] | None = None
    has_edge_weight: bool = False
    num_edge_features: int = 0
    weight_unless_ones: bool = False
    table: Table | None = None
    notes: tuple[str, ...] = ()


def _with_edge_files(graph: BareGraph, found: EdgeFiles) -> BareGraph:
    """``graph`` with what its edges have in npy files of their own besides."""
    if not found.paths:
        return graph
    if (graph.has_edge_weight and found.weight) or (graph.num_edge_features and found.features):
        raise SourceError(f"{graph.name} has edge data of its own; {found.paths[0]} would replace it")
    edges = graph.carrying or graph.edges
    return replace(
        graph,
        files=(*graph.files, *found.paths),
        carrying=lambda size: found.joined(edges, size),
        has_edge_weight=graph.has_edge_weight or found.weight is not None,
        num_edge_features=graph.num_edge_features or found.num_features,
    )


def bare_source(graph: BareGraph, request: Request) -> Source:
    """The source of ``graph`` with the features and labels that ``request`` asks for.

    SourceError, with the remedy, where it asks for none, or for those of another number of nodes.
    """
    graph = _with_edge_files(graph, asked_files(request, graph.num_edges if graph.counted else None))
    texts = {}
    for part, path, example in (
        ("features", graph.features, "random:COLUMNS"),
        ("labels", graph.labels, "random:CLASSES"),
    ):
        text = request.option(part) or (str(path) if path is not None else None)
        if text is None:
            raise SourceError(
                f"{graph.name} has no {part} of its own; give {part}=FILE (npy, CSV, Parquet) or {example}"
            )
        texts[part] = text
    tables = NodeTables(request)
    features = node_features(texts["features"], tables)
    labels = node_labels(graph.name, texts["labels"], tables, request)
    ids = tables.ids(graph.name)
    edge_tables = ((EDGES, graph.table),) if graph.table is not None else ()
    check_all_found(request, (*((NODES, table) for table in tables.tables), *edge_tables))
    joined = _Joined(graph, features, labels, ids, request.budget_bytes)
    files = [Path(text) for text in texts.values() if not text.startswith(RANDOM)]
    known = {count for count in (graph.num_nodes, features.rows, labels.rows) if count is not None}
    if len(known) > 1:
        raise SourceError(
            f"{graph.name}: edges, features and labels are of different numbers of nodes: {sorted(known)}"
        )
    nodes = known.pop() if known else None
    source = Source(
        name=graph.name,
        format=graph.format,
        num_nodes=nodes or graph.said.get("nodes") or max(_LEAST_NODES, min(2 * graph.num_edges, _MOST_NODES)),
        num_edges=graph.num_edges,
        num_features=features.columns,
        num_classes=labels.num_classes,
        task=labels.task,
        edges=graph.carrying or graph.edges,
        has_edge_weight=graph.has_edge_weight,
        num_edge_features=graph.num_edge_features,
        weight_unless_ones=graph.weight_unless_ones,
        features=lambda size: features.blocks(0, size, 0),
        labels=lambda size: labels.blocks(0, size, ()),
        symmetrize=graph.symmetrize,
        fingerprint=fingerprint_of(*graph.files, *files),
        description={"features": texts["features"], "labels": texts["labels"]}
        | ({"split": labels.split} if labels.split else {}),
        notes=(*tables.notes(), *graph.notes, *labels.notes),
    )
    if graph.num_nodes is not None and ids is None and graph.counted and labels.class_names is None:
        return joined.source(source, graph.num_nodes, graph.num_edges, None)
    return replace(
        source,
        prepare=lambda folder, listener: joined.prepared(source, nodes, folder, listener),
        prepare_bytes=16 * source.num_nodes,
    )


@dataclass(frozen=True)
class _Joined:
    graph: BareGraph
    node_features: NodeFeatures
    node_labels: NodeLabels
    ids: tuple[Table, str] | None
    budget_bytes: int

    def prepared(self, source: Source, nodes: int | None, folder: Path, listener: Listener) -> Source:
        """``source`` with everything counted; what is found out goes to ``folder``, and is taken from there."""
        path = folder / _COUNTS
        if not path.exists():
            counts = self._counted(nodes, folder, listener)
            read_names = self.node_labels.class_names
            counts["class_names"] = list(read_names()) if read_names is not None else []
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps(counts))
            flush(partial)
            partial.rename(path)
            flush(folder)
        counts = json.loads(path.read_text())
        numbers = self._numbering(folder, counts)
        # Ids that are the numbers need no keeping: a list of edges may well name all of 0 … N-1.
        kept = None if isinstance(numbers, Same) else folder / _IDS
        names = tuple(counts["class_names"])
        return self.source(source, counts["nodes"], counts["edges"], numbers, kept, names)

    def source(
        self,
        source: Source,
        nodes: int,
        edges: int,
        numbers: Numbering | None,
        kept: Path | None = None,
        names: ClassNames = (),
    ) -> Source:
        """``source`` of so many ``nodes`` and ``edges``; the ids in the file ``kept`` become nodes by ``numbers``."""
        if not _LEAST_NODES <= nodes <= _MOST_NODES:
            raise SourceError(f"{self.graph.name} has {nodes} nodes, which cannot be converted")
        features, labels = self.node_features, self.node_labels
        ids = None if kept is None else NpyFile(kept, raw=((nodes,), np.dtype("<i8"))).row_blocks
        return replace(
            source,
            num_nodes=nodes,
            num_edges=edges,
            edges=source.edges if numbers is None else lambda size: self._numbered(source.edges(size), numbers),
            features=lambda size: features.blocks(nodes, size, 0),
            features_from=(lambda size, row: features.blocks(nodes, size, row)) if features.seeks else None,
            labels=lambda size: labels.blocks(nodes, size, names),
            num_classes=len(names) or source.num_classes,
            class_names=names,
            ids=ids,
            resident_bytes=numbers.nbytes if numbers is not None else 0,
            prepare=None,
        )

    def _counted(self, nodes: int | None, folder: Path, listener: Listener) -> dict[str, Any]:
        """``nodes``, ``edges`` and which ``ids`` there are: ``"table"``, ``"edges"`` or ``None``."""
        graph, limit = self.graph, self.budget_bytes // 4
        ids: str | None = None
        edges = 0

        def ends() -> Iterator[Ids]:
            """The ids of all edges, which are counted as they pass."""
            nonlocal edges
            with reported(listener, "counting nodes and edges", graph.num_edges, "edges") as advance:
                for block in graph.edges(_BLOCK_ROWS):
                    edges += len(block.sources)
                    yield np.concatenate([block.sources, block.targets])
                    advance(min(edges, graph.num_edges))

        if self.ids is not None:
            nodes, ids = write_ids(folder / _IDS, _column(*self.ids, Cells.WHOLE)), "table"
        elif nodes is None and (table := self.node_features.table or self.node_labels.table) is not None:
            nodes = sum(len(block) for block in _column(table, table.columns[0], Cells.TEXT))
        if nodes is None:
            nodes, ids = collect(ends(), folder / _IDS, name=graph.name, limit_bytes=limit), "edges"
            _compare(graph, "nodes", nodes)
        elif "nodes" in graph.said:  # That is how many the edges have; files may have rows for others.
            found = collect(ends(), folder / _COUNTED, name=graph.name, limit_bytes=limit)
            (folder / _COUNTED).unlink()
            _compare(graph, "nodes", found)
        elif not graph.counted:
            for _ in ends():
                pass
        if graph.counted and not edges:
            edges = graph.num_edges
        _compare(graph, "edges", edges)
        if not edges:
            raise SourceError(f"{graph.name} has no edge: it is empty, damaged or incomplete")
        return {"nodes": nodes, "edges": edges, "ids": ids}

    def _numbering(self, folder: Path, counts: dict[str, Any]) -> Numbering:
        if counts["ids"] is None:
            return Same(counts["nodes"])
        # Sorting holds the ids, their order and both again for a moment.
        need = counts["nodes"] * (8 if counts["ids"] == "edges" else 32)
        if need > self.budget_bytes // 2:
            raise BudgetError(
                f"the ids of {self.graph.name} take {format_size(need)} to number, half of the host budget of "
                f"{format_size(self.budget_bytes)} is for that; give host_budget='{-(-2 * need // 1_000_000)}M'"
            )
        ids: Ids = np.fromfile(folder / _IDS, dtype=np.int64)
        if counts["ids"] == "edges":
            return numbering(ids)
        in_order, rows = sorted_with_rows(ids, name=self.graph.name)
        return numbering(in_order, rows=rows)

    def _numbered(self, blocks: Iterator[EdgeBlock], numbers: Numbering) -> Iterator[EdgeBlock]:
        done = 0
        for block in blocks:
            sources, targets = numbers.numbers(block.sources), numbers.numbers(block.targets)
            absent = (sources < 0) | (targets < 0)
            if absent.any():
                at = int(absent.argmax())
                edge = f"{block.sources[at]} → {block.targets[at]}"
                raise SourceError(
                    f"{self.graph.name}: edge {done + at} ({edge}) has an end that is no node: {self._nodes_are()}"
                )
            done += len(sources)
            yield EdgeBlock(sources, targets, block.data)

    def _nodes_are(self) -> str:
        """Which ids are nodes', for a message."""
        if self.ids is not None:
            return f"nodes are those in the column {self.ids[1]} of {self.ids[0].path}"
        table = self.node_features.table or self.node_labels.table
        if table is None:
            return "nodes are the row numbers of the files of features and labels, from 0 on"
        return (
            f"nodes are the row numbers of {table.path}, from 0 on, since it has no column called "
            f"{' or '.join(ID_NAMES)}; if one of {', '.join(table.columns[:20])} holds ids, name it with id_column="
        )


def _column(table: Table, column: str, cells: Cells) -> Iterator[AnyArray]:
    for block in table.blocks({column: cells}, _BLOCK_ROWS):
        yield block[column]


def _compare(graph: BareGraph, what: str, found: int) -> None:
    said = graph.said.get(what, found)
    if said != found:
        raise SourceError(
            f"{graph.name} says that it has {said} {what}, {found} are in it: it is damaged or incomplete"
        )
