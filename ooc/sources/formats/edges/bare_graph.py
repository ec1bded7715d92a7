# SPDX-License-Identifier: Apache-2.0
"""Graphs that come as edges alone, with ids of any kind, joined with what ``--features`` and ``--labels`` say.

Which node an id is: its row in a table that has a column of ids; else the id itself where a file says how many
nodes there are or the format does; else its rank among all ids that edges have. What must be counted first is
counted in one pass over the edges, when the conversion prepares.

Whole numbers are looked up in memory while edges are read, where a share of the budget holds all of them. What is more
than that, and texts, are joined on the disk with the ids of the nodes (``id_join``), once, to a file of node numbers in
the order of the edges. N nodes, E edges.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, TypedDict

import numpy as np

from ooc.errors import SourceError
from ooc.events import Listener, reported
from ooc.sources.columns import EDGES, FEATURE, ID, IGNORE, NODES, NodeTables, as_argument, check_all_found
from ooc.sources.edge_options import EdgeFiles, asked_files
from ooc.sources.files.cells import Cells, NoWholeNumber
from ooc.sources.files.npy import NpyArray
from ooc.sources.files.tables import Table
from ooc.sources.files.text_file import TextFile, encoded
from ooc.sources.id_join import Joined, Keys, join, keys_of_numbers, keys_of_texts
from ooc.sources.labels import ClassNames
from ooc.sources.node_data import NONE, RANDOM, NodeFeatures, NodeLabels, node_features, node_labels
from ooc.sources.node_ids import Numbering, Same, collect, collect_texts, numbering, sorted_with_rows, write_ids
from ooc.sources.reading import COLUMNS, SPLIT, Request
from ooc.sources.source import EdgeBlock, Ids, Source, fingerprint_of
from ooc.storage.array import replace_file

_BLOCK_ROWS = 1 << 18
_TEXT_ROW_BYTES = 4096  # Of the budget for each row of texts at a time: a sixteenth of it where ids are of 100 bytes.
_IDS, _COUNTED, _COUNTS, _ENDS = "ids", "counted", "counts.json", "ends"
_LEAST_NODES, _MOST_NODES = 1, 2**32
_HELD_BYTES = {"edges": 8, "table": 32}
"""Of memory for each whole number that is looked up there; those of a table are sorted, which holds them twice."""


class EdgeReader(Protocol):
    """Reads edges, about ``size`` at a time, with their ``ids`` as whole numbers or texts (objects); None: they may be
    zeros, as what edges carry may be left out without ``data``."""

    def __call__(self, size: int, *, ids: Cells | None = Cells.WHOLE, data: bool = True) -> Iterator[EdgeBlock]: ...


def of_numbers(edges: Callable[[int], Iterator[EdgeBlock]]) -> EdgeReader:
    """Of ``edges`` whose ids are whole numbers, and that are read whole in any case."""

    def read(size: int, *, ids: Cells | None = Cells.WHOLE, data: bool = True) -> Iterator[EdgeBlock]:
        return map(_written_out, edges(size)) if ids is Cells.TEXT else edges(size)

    return read


def _written_out(block: EdgeBlock) -> EdgeBlock:
    sources, targets = (np.array([*map(str, ids.tolist())], dtype=np.object_) for ids in block[:2])
    return EdgeBlock(sources, targets, block.data)


@dataclass(frozen=True, kw_only=True)
class BareGraph:
    """Edges, as a format has them.

    ``edges``: blocks as a source's, of ids as in ``files``. ``num_edges`` may be an estimate where it is not
    ``counted``. ``num_nodes``: None where any ids may come. ``said``: the numbers of ``nodes`` and ``edges`` that
    the files claim, compared with what is found. ``features``, ``labels``: files of theirs beside the edges.
    ``table``: what the edges are in, where that is one; ``held``: tables that are no files, by their names.
    ``notes``: what the user is told.

    ``text_ids``: whether ids are texts, as far as the first rows tell. ``has_edge_weight``, ``num_edge_features``,
    ``weight_unless_ones``: see ``Source``.
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
    text_ids: bool = False
    notes: tuple[str, ...] = ()


class Counts(TypedDict):
    """What preparing found out. ``ids``: whether nodes are those of a ``"table"``, of the ``"edges"``, or row numbers
    (None). ``width``: bytes of the longest id that is a text; 0 where they are whole numbers. ``joined``: whether the
    edges' nodes are in a file."""

    nodes: int
    edges: int
    ids: str | None
    width: int
    joined: bool
    class_names: list[str]


@dataclass(frozen=True)
class NumberedGraph:
    """``graph`` with features and labels of its nodes. ``ids``: the table and column that name nodes, if one does."""

    graph: BareGraph
    node_features: NodeFeatures
    node_labels: NodeLabels
    ids: tuple[Table, str] | None
    budget_bytes: int

    def prepared(self, source: Source, nodes: int | None, folder: Path, listener: Listener) -> Source:
        """``source`` with everything counted; what is found out goes to ``folder``, and is taken from there."""
        path = folder / _COUNTS
        if not path.exists():
            replace_file(path, json.dumps(self._counted(nodes, folder, listener)).encode())
        counts: Counts = json.loads(path.read_text())
        if counts["width"]:
            texts = TextFile(folder / _IDS, rows=counts["nodes"], width=counts["width"])
            source = replace(source, ids=texts.padded, id_bytes=counts["width"])
        elif counts["joined"]:
            source = replace(source, ids=_numbers_in(folder, counts["nodes"]))
        if counts["joined"]:
            edges = self._from_file(source, folder / _ENDS, counts)
            return replace(self.source(source, counts["nodes"], counts["edges"], counts["class_names"]), edges=edges)
        numbers = self._numbering(folder, counts)
        # Ids that are the numbers need no keeping: a list of edges may well name all of 0 … N-1.
        if not isinstance(numbers, Same):
            source = replace(source, ids=_numbers_in(folder, counts["nodes"]))
        found_source = self.source(source, counts["nodes"], counts["edges"], counts["class_names"])
        edges = source.edges
        return replace(
            found_source, edges=lambda size: self._numbered(edges(size), numbers), resident_bytes=numbers.nbytes
        )

    def source(self, source: Source, nodes: int, edges: int, names: list[str]) -> Source:
        """``source`` of so many ``nodes`` and ``edges``, and classes of these ``names``."""
        if not _LEAST_NODES <= nodes <= _MOST_NODES:
            raise SourceError(f"{self.graph.name} has {nodes} nodes, which cannot be converted")
        features, labels = self.node_features, self.node_labels
        class_names: ClassNames = tuple(names)
        return replace(
            source,
            num_nodes=nodes,
            num_edges=edges,
            features=lambda size: features.blocks(nodes, size),
            feature_entries=features.entries,
            labels=lambda size: labels.blocks(nodes, size, class_names),
            num_classes=len(names) or source.num_classes,
            class_names=class_names,
            prepare=None,
        )

    # ---- counting ------------------------------------------------------------------------------------------

    def _counted(self, nodes: int | None, folder: Path, listener: Listener) -> Counts:
        texts = self.graph.text_ids or (self.ids is not None and self.ids[0].text_ids(self.ids[1]))
        if not texts:
            try:
                found = self._counted_numbers(nodes, folder, listener)
            except NoWholeNumber as error:
                if self.ids is None:  # A mistake would make a node of its own.
                    raise SourceError(f"{error}; ids some of which are texts need a table of nodes with them") from None
                texts = True  # Only the first rows looked like numbers.
        if texts:
            found = self._counted_texts(nodes, folder, listener)
        if not found["edges"]:
            raise SourceError(f"{self.graph.name} has no edge: it is empty, damaged or incomplete")
        names = self.node_labels.class_names
        return {**found, "class_names": list(names()) if names is not None else []}

    def _counted_numbers(self, nodes: int | None, folder: Path, listener: Listener) -> Counts:
        graph, limit = self.graph, self.budget_bytes // 4
        ids: str | None = None
        edges = 0

        def ends() -> Iterator[Ids]:
            """The ids of all edges, which are counted as they pass."""
            nonlocal edges
            edges = 0
            with reported(listener, "counting nodes and edges", graph.num_edges, "edges") as advance:
                for block in graph.edges(_BLOCK_ROWS, data=False):
                    edges += len(block.sources)
                    yield np.stack([block.sources, block.targets], axis=1).reshape(-1)
                    advance(min(edges, graph.num_edges))

        if self.ids is not None:
            named, column = self.ids
            blocks = named.blocks({column: Cells.WHOLE}, _BLOCK_ROWS)
            nodes, ids = write_ids(folder / _IDS, (block[column] for block in blocks)), "table"
        elif nodes is None and (table := self.node_features.table or self.node_labels.table) is not None:
            nodes = table.count()
        if nodes is None:
            nodes, ids = collect(ends(), folder / _IDS, limit_bytes=limit), "edges"
            _compare(graph, "nodes", nodes)
        elif "nodes" in graph.said:  # That is how many the edges have; files may have rows for others.
            found = collect(ends(), folder / _COUNTED, limit_bytes=limit)
            (folder / _COUNTED).unlink()
            _compare(graph, "nodes", found)
        joined = ids is not None and nodes * _HELD_BYTES[ids] > self.budget_bytes // 2
        if joined and _in_sequence(_numbers_in(folder, nodes)(_BLOCK_ROWS)):
            joined, ids = False, None
        if joined:
            numbers = _numbers_in(folder, nodes)(_BLOCK_ROWS)
            self._join(map(keys_of_numbers, numbers), nodes, map(keys_of_numbers, ends()), folder, listener, texts=None)
        elif not graph.counted and not edges:
            for _ in ends():
                pass
        if graph.counted and not edges:
            edges = graph.num_edges
        _compare(graph, "edges", edges)
        return {"nodes": nodes, "edges": edges, "ids": ids, "width": 0, "joined": joined, "class_names": []}

    def _counted_texts(self, nodes: int | None, folder: Path, listener: Listener) -> Counts:
        graph, rows = self.graph, max(1024, min(_BLOCK_ROWS, self.budget_bytes // _TEXT_ROW_BYTES))

        def ends(task: str) -> Iterator[list[bytes]]:
            done = 0
            with reported(listener, task, graph.num_edges, "edges") as advance:
                for block in graph.edges(rows, ids=Cells.TEXT, data=False):
                    both = np.stack([block.sources, block.targets], axis=1).reshape(-1)
                    if "" in (texts := both.tolist()):
                        raise SourceError(f"{graph.name}: edge {done + texts.index('') // 2} has an end without an id")
                    yield encoded(texts, graph.name)
                    done += len(block.sources)
                    advance(min(done, graph.num_edges))

        if self.ids is not None:
            called = TextFile.write(folder / _IDS, self._ids_of_nodes(*self.ids, rows))
        elif nodes is None and self.node_features.table is None and self.node_labels.table is None:
            limit = self.budget_bytes // 4
            called = collect_texts(ends("counting nodes and edges"), folder / _IDS, limit_bytes=limit)
        else:
            raise SourceError(f"{graph.name}: edges name nodes by texts, but {self._nodes_are()}")
        nodes_keys = map(keys_of_texts, called.blocks(rows))
        keys = map(keys_of_texts, ends("finding the edges' nodes"))
        found = self._join(nodes_keys, called.rows, keys, folder, listener, texts=called)
        edges = found.ends // 2
        _compare(graph, "edges", edges)
        ids = "table" if self.ids is not None else "edges"
        width = called.width
        return {"nodes": called.rows, "edges": edges, "ids": ids, "width": width, "joined": True, "class_names": []}

    def _ids_of_nodes(self, table: Table, column: str, size: int) -> Iterator[list[bytes]]:
        row = 0
        for block in table.blocks({column: Cells.TEXT}, size):
            texts = block[column].tolist()
            if "" in texts:
                raise SourceError(f"{table.path}: row {row + texts.index('') + 1} has no id in the column {column}")
            yield encoded(texts, f"{table.path}: the column {column}")
            row += len(texts)

    def _join(
        self,
        nodes: Iterator[Keys],
        count: int,
        ends: Iterator[Keys],
        folder: Path,
        listener: Listener,
        *,
        texts: TextFile | None,
    ) -> Joined:
        """Write the edges' nodes to their file. SourceError for an id of two nodes, and an end that is no node's."""
        limit = self.budget_bytes // 2
        found = join(nodes, count, ends, folder / _ENDS, limit_bytes=limit, listener=listener)
        if found.twice is not None:
            if texts is None:
                ids = np.memmap(folder / _IDS, dtype="<i8", mode="r")
                one = other = str(ids[found.twice[0]])
            else:
                one, other = (text.decode() for text in texts.texts_of(found.twice))
            if one != other:
                raise SourceError(
                    f"{self.graph.name}: the ids {one} and {other} have the same hash; change one of them"
                )
            raise SourceError(f"{self.graph.name} has the id {one} twice{self._no_ids()}")
        if found.absent is not None:
            raise self._no_node(found.absent // 2, Cells.WHOLE if texts is None else Cells.TEXT)
        return found

    # ---- numbering -----------------------------------------------------------------------------------------

    def _numbering(self, folder: Path, counts: Counts) -> Numbering:
        if counts["ids"] is None:
            return Same(counts["nodes"])
        ids: Ids = np.fromfile(folder / _IDS, dtype=np.int64)
        if counts["ids"] == "edges":
            return numbering(ids)
        in_order, rows = sorted_with_rows(ids, name=self.graph.name, hint=self._no_ids())
        return numbering(in_order, rows=rows)

    def _numbered(self, blocks: Iterator[EdgeBlock], numbers: Numbering) -> Iterator[EdgeBlock]:
        done = 0
        for block in blocks:
            sources, targets = numbers.numbers(block.sources), numbers.numbers(block.targets)
            absent = (sources < 0) | (targets < 0)
            if absent.any():
                at = int(absent.argmax())
                raise self._absent(done + at, block.sources[at], block.targets[at])
            done += len(sources)
            yield EdgeBlock(sources, targets, block.data)

    def _from_file(self, source: Source, path: Path, counts: Counts) -> Callable[[int], Iterator[EdgeBlock]]:
        """The edges between the nodes in the file ``path``, with what the source's edges carry."""
        ends = NpyArray(path, raw=((counts["edges"], 2), np.dtype("<u4")))
        carrying = self.graph.has_edge_weight or self.graph.num_edge_features

        def edges(size: int) -> Iterator[EdgeBlock]:
            if not carrying:
                for both in ends.row_blocks(size):
                    yield EdgeBlock(both[:, 0].astype(np.int64), both[:, 1].astype(np.int64))
                return
            done = 0
            for block in self.graph.edges(size, ids=None):
                count = len(block.sources)
                if done + count > counts["edges"]:
                    raise SourceError(f"{source.name} has other edges than when they were counted")
                both = ends.rows(done, done + count)
                yield EdgeBlock(both[:, 0].astype(np.int64), both[:, 1].astype(np.int64), block.data)
                done += count

        return edges

    # ---- what is wrong -------------------------------------------------------------------------------------

    def _no_node(self, edge: int, ids: Cells) -> SourceError:
        """The error for the ``edge`` with an end that is no node, read again up to there."""
        first = 0
        for block in self.graph.edges(_BLOCK_ROWS, ids=ids, data=False):
            if edge < first + len(block.sources):
                return self._absent(edge, block.sources[edge - first], block.targets[edge - first])
            first += len(block.sources)
        return SourceError(f"{self.graph.name} has other edges than when they were counted")

    def _absent(self, edge: int, source: object, target: object) -> SourceError:
        ends = f"{source} → {target}"
        return SourceError(f"{self.graph.name}: edge {edge} ({ends}) has an end that is no node: {self._nodes_are()}")

    def _no_ids(self) -> str:
        """What to do where the ids are wrong because the column holds others."""
        if self.ids is None:
            return ""
        table, column = self.ids
        other = " or ".join(as_argument(column, role) for role in (FEATURE, IGNORE))
        return f"; if the column {column} of {table.path} holds no ids, say {other}"

    def _nodes_are(self) -> str:
        """Which ids are nodes', for a message."""
        if self.ids is not None:
            return f"nodes are those in the column {self.ids[1]} of {self.ids[0].path}"
        table = self.node_features.table or self.node_labels.table
        if table is None:
            return "nodes are the row numbers of the files of features and labels, from 0 on"
        return (
            f"nodes are the row numbers of {table.path}, from 0 on, since it has no column of ids; if one of "
            f"{', '.join(table.columns[:20])} holds them, say {as_argument('NAME', ID)}"
        )


def _numbers_in(folder: Path, nodes: int) -> Callable[[int], Iterator[Ids]]:
    """The whole numbers that were written there for each node."""
    return NpyArray(folder / _IDS, raw=((nodes,), np.dtype("<i8"))).row_blocks


def _in_sequence(blocks: Iterator[Ids]) -> bool:
    """Whether the ids are 0, 1, 2, …"""
    done = 0
    for ids in blocks:
        if not np.array_equal(ids, np.arange(done, done + len(ids))):
            return False
        done += len(ids)
    return True


def _compare(graph: BareGraph, what: str, found: int) -> None:
    said = graph.said.get(what, found)
    if said != found:
        raise SourceError(
            f"{graph.name} says that it has {said} {what}, {found} are in it: it is damaged or incomplete"
        )


# ---- with features and labels ---------------------------------------------------------------------------------------


NODE_OPTIONS = frozenset({"features", "labels", "task", "feature_columns", SPLIT, COLUMNS})
"""What any such graph takes of nodes; ``EDGE_OPTIONS`` are those of edges."""


def _with_edge_files(graph: BareGraph, found: EdgeFiles) -> BareGraph:
    """``graph`` with what its edges have in npy files of their own besides."""
    if not found.paths:
        return graph
    if (graph.has_edge_weight and found.weight) or (graph.num_edge_features and found.features):
        raise SourceError(f"{graph.name} has edge data of its own; {found.paths[0]} would replace it")

    def edges(size: int, *, ids: Cells | None = Cells.WHOLE, data: bool = True) -> Iterator[EdgeBlock]:
        blocks = graph.edges(size, ids=ids, data=data)
        return found.joined(blocks, size) if data else blocks

    return replace(
        graph,
        files=(*graph.files, *found.paths),
        edges=edges,
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
        ("features", graph.features, "random:COLUMNS, or none, to train an embedding"),
        ("labels", graph.labels, "random:CLASSES"),
    ):
        text = request.option(part) or (str(path) if path is not None else None)
        if text is None and part in request.arrays:
            text = f"{part} from Python"
        if text is None:
            raise SourceError(
                f"{graph.name} has no {part} of its own; give {part}=FILE (npy, CSV, Parquet) or {example}"
            )
        texts[part] = text
    tables = NodeTables(request, graph.held)
    for part, text in texts.items():
        if part not in request.arrays and not _is_no_file(part, text) and tables.has(Path(text)):
            tables.open(Path(text))
    edge_tables = ((EDGES, graph.table),) if graph.table is not None else ()
    check_all_found(request, (*((NODES, table) for table in tables.tables), *edge_tables))
    features = node_features(texts["features"], tables, request)
    labels = node_labels(graph.name, texts["labels"], tables, request)
    ids = tables.ids(graph.name)
    joined = NumberedGraph(graph, features, labels, ids, request.budget_bytes)
    held = bool(graph.held or request.arrays)
    files = [] if held else [Path(text) for part, text in texts.items() if not _is_no_file(part, text)]
    known = {count for count in (graph.num_nodes, features.rows, labels.rows) if count is not None}
    if len(known) > 1:
        raise SourceError(
            f"{graph.name}: edges, features and labels are of different numbers of nodes: {sorted(known)}"
        )
    nodes = known.pop() if known else None
    about = [table.rows_about for table in tables.tables] or [min(2 * graph.num_edges, _MOST_NODES)]
    source = Source(
        name=graph.name,
        format=graph.format,
        num_nodes=nodes or graph.said.get("nodes") or max(_LEAST_NODES, *about),
        num_edges=graph.num_edges,
        num_features=features.columns,
        feature_entries=features.entries,
        num_classes=labels.num_classes,
        task=labels.task,
        edges=graph.edges,
        has_edge_weight=graph.has_edge_weight,
        num_edge_features=graph.num_edge_features,
        weight_unless_ones=graph.weight_unless_ones,
        features=lambda size: features.blocks(0, size),
        labels=lambda size: labels.blocks(0, size, ()),
        symmetrize=graph.symmetrize,
        fingerprint={} if held or not graph.files else fingerprint_of(*graph.files, *files),
        description={"features": texts["features"], "labels": texts["labels"]}
        | ({"split": labels.split} if labels.split else {}),
        notes=(*tables.notes(), *graph.notes, *labels.notes),
    )
    if graph.num_nodes is not None and ids is None and graph.counted and labels.class_names is None:
        return joined.source(source, graph.num_nodes, graph.num_edges, [])
    return replace(
        source,
        prepare=lambda folder, listener: joined.prepared(source, nodes, folder, listener),
        prepare_bytes=16 * source.num_nodes + 8 * source.num_edges,
    )


def _is_no_file(part: str, text: str) -> bool:
    """Whether what is asked for is made up, or nothing."""
    return text.startswith(RANDOM) or (part == "features" and text == NONE)
