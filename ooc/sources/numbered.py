# SPDX-License-Identifier: Apache-2.0
"""Numbering of nodes, whatever ids a source uses: done once, before a conversion streams, and stored on the disk.

The stored result has the nodes at both ends of each edge, in the order of the edges. An id's node is its row in a table
with a column of ids. Without such a table it is the id itself, where a file has a row for each node or a format gives
their number; otherwise it is the id's rank among all ids of edges. Nodes have one type, "", or several, which are
numbered one type after the other. N nodes, E edges.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, TypedDict

import numpy as np

from ooc.errors import SourceError
from ooc.events import Listener, reported
from ooc.sources.columns import FEATURE, ID, IGNORE, as_argument
from ooc.sources.files.cells import Cells, NoWholeNumber
from ooc.sources.files.npy import NpyArray
from ooc.sources.files.tables import Table
from ooc.sources.labels import ClassNames
from ooc.sources.node_ids import IdFile, collect, encoded, join, keys_of, take_rows
from ooc.sources.source import EdgeBlock, Ids, RelationSource, Source, ranges
from ooc.storage.array import AnyArray, replace_file

_BLOCK_ROWS = 1 << 18
_NUMBER_ROW_BYTES, _TEXT_ROW_BYTES = 512, 4096
"""Bytes of the budget for each row read at a time. Texts of 100 bytes take about a sixteenth of the budget."""
_COUNTS_FILE = "counts.json"
_NODE_DTYPE = np.dtype("<u4")
Ends = tuple[Cells | None, Cells | None]
NUMBERS: Ends = (Cells.WHOLE, Cells.WHOLE)


class EdgeReader(Protocol):
    """A function that yields blocks of about ``size`` edges, with the ids of their ends as integers or texts (objects).

    An end whose cells are None may be read as zeros. Without ``data``, the edges' weights and features may be left out.
    """

    def __call__(self, size: int, *, ids: Ends = NUMBERS, data: bool = True) -> Iterator[EdgeBlock]: ...


def of_numbers(edges: Callable[[int], Iterator[EdgeBlock]]) -> EdgeReader:
    """Return a reader of ``edges`` whose ids are integers and that are always read completely."""

    def read(size: int, *, ids: Ends = NUMBERS, data: bool = True) -> Iterator[EdgeBlock]:
        for block in edges(size):
            if Cells.TEXT in ids:
                sources, targets = (np.array([*map(str, end.tolist())], dtype=np.object_) for end in block[:2])
                block = EdgeBlock(sources, targets, block.data)
            yield block

    return read


@dataclass(frozen=True, kw_only=True)
class BareGraph:
    """Edges as a format has them, before their nodes are numbered.

    ``edges``: blocks as a source's, of ids as in ``files``. ``num_edges`` may be an estimate where it is not
    ``counted``. ``num_nodes``: None where ids may be anything. ``said``: the numbers of ``nodes`` and ``edges`` that
    the files claim, to be compared with what is found. ``features``, ``labels``: files beside the edges. ``table``: the
    table of the edges, if they are in one; ``held``: tables in memory, by their names. ``notes``: messages for the
    user.

    ``text_ids``: whether the ids of sources and of targets are texts, judging by the first rows. ``has_edge_weight``,
    ``num_edge_features``, ``weight_unless_ones``: see ``Source``.
    """

    name: str
    format: str
    files: tuple[Path, ...]
    edges: EdgeReader
    num_edges: int
    counted: bool
    num_nodes: int | None = None
    said: dict[str, int] = field(default_factory=dict)
    symmetrize: bool = False
    features: Path | None = None
    labels: Path | None = None
    has_edge_weight: bool = False
    num_edge_features: int = 0
    weight_unless_ones: bool = False
    table: Table | None = None
    held: dict[Path, Table] = field(default_factory=dict)
    text_ids: tuple[bool, bool] = (False, False)
    notes: tuple[str, ...] = ()

    @property
    def relation(self) -> RelationSource:
        """The edges with their weights and features."""
        return RelationSource(self.num_edges, self.edges, self.has_edge_weight, self.num_edge_features)


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The nodes of one type. ``ids``: the table and column of their ids; None: their ids are row numbers.

    Then there are ``count`` nodes, or one for each row of ``table``. Without either, the nodes are the ids of edges.
    """

    ids: tuple[Table, str] | None = None
    table: Table | None = None
    count: int | None = None


class NodeCount(TypedDict):
    """The number of nodes of a type. ``called``: whether they have ids other than their numbers; ``width``: bytes of
    the longest text id, 0 where ids are integers."""

    nodes: int
    called: bool
    width: int


class Counts(TypedDict):
    """The result of the preparation: nodes by type, edges by number of their type, and names of classes."""

    nodes: dict[str, NodeCount]
    edges: list[int]
    class_names: list[str]


OfCounts = Callable[[Mapping[str, int], Sequence[RelationSource], ClassNames], Source]
"""A function from the numbers of nodes by type, the edges, and the classes' names to the source."""


@dataclass(frozen=True, kw_only=True)
class Numbering:
    """The numbering of ``nodes`` by type and of ``edges``, each with the types of its sources and targets.
    ``class_names()``: see ``NodeLabels``."""

    nodes: Mapping[str, Nodes]
    edges: Sequence[tuple[str, str, BareGraph]]
    class_names: Callable[[], ClassNames] | None
    budget_bytes: int

    def counts(self, folder: Path, listener: Listener) -> Counts:
        """Number and count everything; results are stored in ``folder``, and taken from there if they exist."""
        if not (path := folder / _COUNTS_FILE).exists():
            edges = [0] * len(self.edges)
            nodes = {kind: _TypeNumbering(self, kind, edges, folder, listener).numbered() for kind in self.nodes}
            names = [] if self.class_names is None else list(self.class_names())
            counts: Counts = {"nodes": nodes, "edges": edges, "class_names": names}
            replace_file(path, json.dumps(counts).encode())
        found: Counts = json.loads(path.read_text())
        return found

    def preparing(self, source: Source, labelled: str, of: OfCounts) -> Source:
        """Return ``source``, whose counts may be estimates, with a ``prepare`` that numbers the nodes.

        The prepared source is made by ``of`` from the counts. It has the ids of its nodes; its own are those of type
        ``labelled``.
        """

        def prepare(folder: Path, listener: Listener) -> Source:
            counts = self.counts(folder, listener)
            nodes = {kind: found["nodes"] for kind, found in counts["nodes"].items()}
            edges = [
                replace(graph.relation, num_edges=count, edges=self._between_nodes(at, count, folder))
                for at, (count, (_, _, graph)) in enumerate(zip(counts["edges"], self.edges, strict=True))
            ]

            def called(kind: str, source: Source) -> Source:
                if not (found := counts["nodes"][kind])["called"]:
                    return source
                path = folder / f"ids-{[*self.nodes].index(kind)}"
                ids = IdFile(path, rows=found["nodes"], width=found["width"])
                return replace(source, ids=ids.stored, id_bytes=ids.width)

            made = called(labelled, of(nodes, edges, tuple(counts["class_names"])))
            if made.types is None:
                return made
            others = {kind: called(kind, one) for kind, one in made.types.nodes.items()}
            return replace(made, types=replace(made.types, nodes=others))

        nodes = sum(one.num_nodes for one in source.nodes_of.values())
        return replace(source, prepare=prepare, prepare_bytes=16 * nodes + 8 * source.num_edges)

    def _between_nodes(self, at: int, count: int, folder: Path) -> Callable[[int], Iterator[EdgeBlock]]:
        """Return a reader of the ``count`` edges of number ``at``, with their data, whose ends are nodes' numbers."""
        source, target, graph = self.edges[at]
        sides = [(0, 1)] if source == target else [(0,), (1,)]
        arrays = [NpyArray(_ends_path(at, one, folder), raw=((count, len(one)), _NODE_DTYPE)) for one in sides]

        def ends(start: int, stop: int) -> Ids:
            both = np.concatenate([array.rows(start, stop) for array in arrays], axis=1)
            return both.T.astype(np.int64, order="C")

        def edges(size: int) -> Iterator[EdgeBlock]:
            if not (graph.has_edge_weight or graph.num_edge_features):
                yield from (EdgeBlock(*ends(start, stop)) for start, stop in ranges(count, size))
                return
            done = 0
            for block in graph.edges(size, ids=(None, None)):
                stop = done + len(block.sources)
                if stop > count:
                    raise _changed_error(graph)
                sources, targets = ends(done, stop)
                yield EdgeBlock(sources, targets, block.data)
                done = stop

        return edges


def _ends_path(at: int, sides: tuple[int, ...], folder: Path) -> Path:
    """Return the file of the nodes at the given ends of edges of number ``at``."""
    return folder / f"ends-{at}.{''.join(map(str, sides))}"


@dataclass(frozen=True)
class _TypeNumbering:
    """The numbering of one type's nodes and of all edges' ends of that type; the number of each type's edges goes to
    ``counts``."""

    numbering: Numbering
    kind: str
    counts: list[int]
    folder: Path
    listener: Listener

    def numbered(self) -> NodeCount:
        ids = self._nodes.ids
        texts = any(graph.text_ids[side] for _, graph, sides in self._edges() for side in sides)
        if not texts and not (ids is not None and ids[0].text_ids(ids[1])):
            try:
                return self._numbered(texts=False)
            except NoWholeNumber as error:  # Only the first rows looked like numbers.
                if ids is None:  # A mistyped id would become a separate node.
                    raise SourceError(f"{error}; ids some of which are texts need a table of nodes with them") from None
        return self._numbered(texts=True)

    def _numbered(self, *, texts: bool) -> NodeCount:
        nodes, edges = self._nodes, list(self._edges())
        count = nodes.count
        if count is None and nodes.ids is None and nodes.table is not None:
            count = nodes.table.count()
        path = self.folder / f"ids-{[*self.numbering.nodes].index(self.kind)}"
        ids: IdFile | None = None
        if nodes.ids is not None:
            ids = IdFile.write(path, self._node_ids(*nodes.ids, texts=texts))
        elif texts and count is not None:
            raise SourceError(f"{edges[0][1].name}: edges name nodes by texts, but {self._describe_node_ids()}")
        elif count is None or any("nodes" in graph.said for _, graph, _ in edges):
            ends = (block for edge in edges for block in self._ends(*edge, "counting nodes and edges", texts=texts))
            ids = collect(ends, path, limit_bytes=self.numbering.budget_bytes // 4)
            for _, graph, _ in edges:
                _check_claim(graph, "nodes", ids.rows)
        if ids is not None and (nodes.ids is not None or count is None):
            count = ids.rows
        # Ids that are the numbers need no keeping: a list of edges may well name all of 0 … N-1.
        if ids is not None and (ids.rows != count or ids.are_rows()):
            ids = None
        assert count is not None, "nodes that nothing else tells of are those of edges"
        for edge in edges:
            self._find(ids, count, *edge, texts=texts)
        return {"nodes": count, "called": ids is not None, "width": 0 if ids is None else ids.width}

    def _find(
        self, ids: IdFile | None, count: int, at: int, graph: BareGraph, sides: tuple[int, ...], *, texts: bool
    ) -> None:
        """Write the node at each end; raise SourceError for an id of two nodes, and for an end that is no node."""
        out, size = _ends_path(at, sides, self.folder), self._rows_at_once(texts)
        ends = self._ends(at, graph, sides, "finding the edges' nodes", texts=texts)
        if ids is None:
            found = take_rows(ends, count, out)
        else:
            keys, limit = map(keys_of, ids.blocks(size)), self.numbering.budget_bytes // 2
            found = join(keys, count, map(keys_of, ends), out, limit_bytes=limit, listener=self.listener)
            if found.duplicate is not None:
                one, other = ids.texts_of(found.duplicate)
                if one != other:
                    raise SourceError(f"{graph.name}: the ids {one} and {other} have the same hash; change one of them")
                raise SourceError(f"{graph.name} has the id {one} twice{self._remedy_for_ids()}")
        if found.absent is not None:
            raise self._missing_node_error(graph, found.absent // len(sides))
        self.counts[at] = found.ends // len(sides)
        _check_claim(graph, "edges", self.counts[at])

    # ---- reading -------------------------------------------------------------------------------------------

    @property
    def _nodes(self) -> Nodes:
        return self.numbering.nodes[self.kind]

    def _edges(self) -> Iterator[tuple[int, BareGraph, tuple[int, ...]]]:
        """Yield each edge type with the ends that have this node type: sources (0), targets (1) or both."""
        for at, (*kinds, graph) in enumerate(self.numbering.edges):
            if sides := tuple(side for side in (0, 1) if kinds[side] == self.kind):
                yield at, graph, sides

    def _rows_at_once(self, texts: bool) -> int:
        """Return the number of rows to read at a time."""
        row_bytes = _TEXT_ROW_BYTES if texts else _NUMBER_ROW_BYTES
        return max(1024, min(_BLOCK_ROWS, self.numbering.budget_bytes // row_bytes))

    def _node_ids(self, table: Table, column: str, *, texts: bool) -> Iterator[AnyArray]:
        """Yield the ids of the nodes."""
        row = 0
        for block in table.blocks({column: Cells.TEXT if texts else Cells.WHOLE}, self._rows_at_once(texts)):
            ids = block[column]
            if texts and "" in (listed := ids.tolist()):
                raise SourceError(f"{table.path}: row {row + listed.index('') + 1} has no id in the column {column}")
            yield encoded(ids, f"{table.path}: the column {column}") if texts else ids
            row += len(ids)

    def _ends(self, at: int, graph: BareGraph, sides: tuple[int, ...], task: str, *, texts: bool) -> Iterator[AnyArray]:
        """Yield the ids of the ends in the order of the edges."""
        cells, done = Cells.TEXT if texts else Cells.WHOLE, 0
        wanted = (cells if 0 in sides else None, cells if 1 in sides else None)
        with reported(self.listener, task, graph.num_edges, "edges") as advance:
            for block in graph.edges(self._rows_at_once(texts), ids=wanted, data=False):
                ids = np.stack([(block.sources, block.targets)[side] for side in sides], axis=1).reshape(-1)
                if texts and "" in (listed := ids.tolist()):
                    edge = done + listed.index("") // len(sides)
                    raise SourceError(f"{graph.name}: edge {edge} has an end without an id")
                yield encoded(ids, graph.name) if texts else ids
                done += len(block.sources)
                advance(min(done, graph.num_edges))

    # ---- what is wrong -------------------------------------------------------------------------------------

    def _missing_node_error(self, graph: BareGraph, edge: int) -> SourceError:
        """Return the error for the ``edge`` with an end that is no node, reading the edges again up to it."""
        first = 0
        for block in graph.edges(self._rows_at_once(True), ids=(Cells.TEXT, Cells.TEXT), data=False):
            if edge < first + len(block.sources):
                ends = f"{block.sources[edge - first]} → {block.targets[edge - first]}"
                what = f"edge {edge} ({ends}) has an end that is no node: {self._describe_node_ids()}"
                return SourceError(f"{graph.name}: {what}")
            first += len(block.sources)
        return _changed_error(graph)

    def _remedy_for_ids(self) -> str:
        """Return what to do where ids are wrong because the column holds something else."""
        assert self._nodes.ids is not None, "those of edges are distinct"
        table, column = self._nodes.ids
        other = " or ".join(as_argument(column, role) for role in (FEATURE, IGNORE))
        return f"; if the column {column} of {table.path} holds no ids, say {other}"

    def _describe_node_ids(self) -> str:
        """Return which ids are nodes, for a message."""
        nodes, called = self._nodes, f"nodes of type {self.kind}" if self.kind else "nodes"
        if nodes.ids is not None:
            return f"{called} are those in the column {nodes.ids[1]} of {nodes.ids[0].path}"
        if nodes.table is None:
            return f"{called} are the row numbers of the files of features and labels, from 0 on"
        return (
            f"{called} are the row numbers of {nodes.table.path}, from 0 on, since it has no column of ids; if one of "
            f"{', '.join(nodes.table.columns[:20])} holds them, say {as_argument('NAME', ID)}"
        )


def _changed_error(graph: BareGraph) -> SourceError:
    return SourceError(f"{graph.name} has other edges than when they were counted")


def _check_claim(graph: BareGraph, what: str, found: int) -> None:
    said = graph.said.get(what, found)
    if said != found:
        raise SourceError(
            f"{graph.name} says that it has {said} {what}, {found} are in it: it is damaged or incomplete"
        )
