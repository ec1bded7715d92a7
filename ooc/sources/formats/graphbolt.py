# SPDX-License-Identifier: Apache-2.0
"""GraphBolt's on-disk datasets with one node type and one edge type, before GraphBolt preprocesses them.

``metadata.yaml`` (https://www.dgl.ai/dgl_docs/stochastic_training/ondisk-dataset-specification.html) says where edges
(CSV without a header, or npy [2, E]), features and the splits' nodes and labels are. The result of preprocessing is a
pickled object of DGL's, which is never loaded. The nodes' features are those called ``feat``, or the only ones. So are
the edges', in the order of the edges, where ``weight`` or ``edge_weight`` is one number for each. The task is the first
one of node classification.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ooc.errors import BudgetError, SourceError
from ooc.events import Listener
from ooc.sizes import format_size
from ooc.sources.files.lines import optional
from ooc.sources.files.npy import NpyArray
from ooc.sources.files.tables import Table, open_table
from ooc.sources.formats.edges.bare_graph import EdgeFiles, edge_files
from ooc.sources.formats.edges.edge_table import column_edges
from ooc.sources.labels import IndexSplits, whole_labels
from ooc.sources.reading import Reader, Request
from ooc.sources.source import EdgeBlock, Ids, LabelBlock, Source, fingerprint_of, ranges

_METADATA = "metadata.yaml"
_PREPROCESSED = "graph_topology"
_MOST_METADATA_BYTES = 1 << 20
_SETS = {"train": "train_set", "valid": "validation_set", "test": "test_set"}
_SEED_NAMES = ("seeds", "seed_nodes", "nodes")
_WEIGHTS = ("weight", "edge_weight")
_LABELLED_BYTES = 24  # Of memory for each node of a split: its id, twice while sorted, and its label.
_LEAST_LINE_BYTES = 4
_NO_HEADER = ("0", "1")
"""Names of the columns of a table whose first line is numbers."""


def _open(path: Path, request: Request) -> Source:
    metadata = _Metadata(path)
    nodes = metadata.nodes()
    edges, count = _edges(metadata, request)
    carried = metadata.edge_data(request, count)
    features = NpyArray(metadata.features())
    rows, columns = features.matrix("[nodes, features]")
    if rows != nodes:
        raise SourceError(f"{features.name} has {rows} rows for {nodes} nodes")
    classes, lists = metadata.task()
    labels = _Labels(lists, nodes, request.budget_bytes)
    source = Source(
        name=metadata.name,
        format="graphbolt",
        num_nodes=nodes,
        num_edges=max(1, metadata.edges()[0].stat().st_size // _LEAST_LINE_BYTES) if count is None else count,
        num_features=columns,
        num_classes=classes,
        edges=(lambda size: carried.joined(edges(size), size)) if carried.paths else edges,
        has_edge_weight=carried.weight is not None,
        num_edge_features=carried.num_features,
        features=features.row_blocks,
        labels=labels.blocks,
        resident_bytes=labels.nbytes,
        fingerprint=fingerprint_of(metadata.path, metadata.edges()[0], features.path, *carried.paths, *labels.paths),
    )

    def prepare(folder: Path, listener: Listener) -> Source:
        return replace(source, num_edges=sum(len(block.sources) for block in edges(1 << 18)), prepare=None)

    return source if count is not None else replace(source, prepare=prepare)


class _Metadata:
    """``metadata.yaml`` of the folder ``path``, and the files that it names, all of which must be inside."""

    def __init__(self, path: Path) -> None:
        self._folder = path
        self.path = path / _METADATA
        try:
            size = self.path.stat().st_size
            text = self.path.read_text() if size <= _MOST_METADATA_BYTES else ""
        except (OSError, UnicodeDecodeError) as error:
            raise SourceError(f"{self.path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
        yaml = optional("yaml", self.path)
        try:
            found = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise SourceError(f"{self.path} is no YAML: {' '.join(str(error).split())[:200]}") from error
        if not isinstance(found, dict):
            raise SourceError(f"{self.path} says nothing")
        if _PREPROCESSED in found or "graph" not in found:
            raise SourceError(
                f"{self.path} describes what GraphBolt's preprocessing made, a pickled object that is never loaded; "
                f"convert the folder above, with the dataset as it was published"
            )
        self._found = found
        self.name = str(found.get("dataset_name") or path.resolve().name)

    def nodes(self) -> int:
        """Return the number of nodes."""
        (kind,) = self._one(self._part(self._found, "graph", dict), "nodes")
        count = kind.get("num")
        if not isinstance(count, int) or not 0 < count <= 2**32:
            raise SourceError(f"{self.path}: graph.nodes.num is {count!r}, no number of nodes")
        return count

    def edges(self) -> tuple[Path, str]:
        """Return ``(file, format)`` of the edges."""
        (kind,) = self._one(self._part(self._found, "graph", dict), "edges")
        return self._file(kind), str(kind.get("format"))

    def features(self) -> Path:
        """Return the npy file of the nodes' features."""
        path = self._feat(self._entries("node"), "nodes")
        if path is None:
            raise SourceError(f"{self.path} has no features for nodes; one, or one called feat, is wanted")
        return path

    def edge_data(self, request: Request, edges: int | None) -> EdgeFiles:
        """Return the npy files of the edges' data, checked against the number of ``edges`` if known; none if data is
        dropped."""
        found = [] if request.drop_edge_data else self._entries("edge")
        weights = [entry for entry in found if entry.get("name") in _WEIGHTS]
        features = [entry for entry in found if entry.get("name") not in _WEIGHTS]
        what = "edges (drop_edge_data=True converts without)"
        return edge_files(self._feat(weights, what), self._feat(features, what), num_edges=edges)

    def _feat(self, entries: list[dict[str, Any]], what: str) -> Path | None:
        """Return the npy file of the only one of ``entries``, or of the one called feat."""
        chosen = [entry for entry in entries if entry.get("name") == "feat"] or entries
        if len(chosen) > 1:
            names = ", ".join(str(entry.get("name")) for entry in entries)
            raise SourceError(f"{self.path} has the features {names} for {what}; one, or one called feat, is wanted")
        return self._numpy(chosen[0]) if chosen else None

    def _entries(self, domain: str) -> list[dict[str, Any]]:
        """Return the entries of ``feature_data`` for nodes or edges."""
        entries = self._found.get("feature_data") or []
        return [entry for entry in entries if isinstance(entry, dict) and entry.get("domain") == domain]

    def task(self) -> tuple[int | None, dict[str, tuple[Path, Path]]]:
        """Return ``(number of classes if given, {split: (npy file of nodes, npy file of labels)})``."""
        tasks = [task for task in self._found.get("tasks") or [] if isinstance(task, dict)]
        task = next((task for task in tasks if "node" in str(task.get("name"))), tasks[0] if tasks else None)
        if task is None:
            raise SourceError(f"{self.path} has no tasks, hence no labels and no split")
        classes = task.get("num_classes")
        found = {}
        for split, name in _SETS.items():
            if not task.get(name):
                continue
            (kind,) = self._one(task, name)
            data = {
                str(entry.get("name")): entry for entry in self._part(kind, "data", list) if isinstance(entry, dict)
            }
            seeds = next((data[seed] for seed in _SEED_NAMES if seed in data), None)
            if seeds is None or "labels" not in data:
                raise SourceError(f"{self.path}: the {name} has {', '.join(data)}; seeds and labels are wanted")
            found[split] = (self._numpy(seeds), self._numpy(data["labels"]))
        return classes if isinstance(classes, int) and classes > 0 else None, found

    def _part(self, value: dict[str, Any], name: str, kind: type) -> Any:
        part = value.get(name)
        if not isinstance(part, kind):
            raise SourceError(f"{self.path} has no {name}, or it is no {kind.__name__}")
        return part

    def _one(self, value: dict[str, Any], name: str) -> list[dict[str, Any]]:
        found = self._part(value, name, list)
        if len(found) != 1 or not isinstance(found[0], dict) or ":" in str(found[0].get("type")):
            raise SourceError(f"{self.path}: {name} is of {len(found)} kinds; only graphs of one kind can be converted")
        return list(found)

    def _numpy(self, entry: dict[str, Any]) -> Path:
        if entry.get("format") != "numpy":
            raise SourceError(f"{self.path}: {entry.get('path')} is of the format {entry.get('format')}, not numpy")
        return self._file(entry)

    def _file(self, entry: dict[str, Any]) -> Path:
        try:
            path = (self._folder / str(entry.get("path"))).resolve()
            there = path.is_file()
        except (OSError, RuntimeError) as error:  # of links to one another, and of names too long
            raise SourceError(f"{self.path} names {entry.get('path')}, which leads nowhere") from error
        if not path.is_relative_to(self._folder.resolve()):
            raise SourceError(f"{self.path} names {entry.get('path')}, which is outside of its folder")
        if not there:
            raise SourceError(f"{self.path} names {entry.get('path')}, which is not there")
        return path


def _edges(metadata: _Metadata, request: Request) -> tuple[Callable[[int], Iterator[EdgeBlock]], int | None]:
    """Return ``(blocks, number of edges if known)``."""
    path, kind = metadata.edges()
    if kind == "numpy":
        array = NpyArray(path)
        return array.edge_blocks, array.num_edges()
    if kind != "csv":
        raise SourceError(f"{metadata.path}: edges are of the format {kind}; csv and numpy can be read")
    table: Table = open_table(path, request.budget_bytes)
    if len(table.columns) != 2:
        raise SourceError(f"{path} has {len(table.columns)} columns; sources and targets are wanted, nothing else")
    if table.columns != _NO_HEADER:
        raise SourceError(f"{path} begins with {','.join(table.columns)[:60]!r}, no edge; GraphBolt's have no header")
    return partial(column_edges, table, *_NO_HEADER), None


class _Labels:
    """The splits' nodes and labels, sorted by node. Nodes in no split have no label."""

    def __init__(self, lists: dict[str, tuple[Path, Path]], nodes: int, budget_bytes: int) -> None:
        self.paths = [path for pair in lists.values() for path in pair]
        self._nodes = nodes
        files = {split: (NpyArray(seeds), NpyArray(labels)) for split, (seeds, labels) in lists.items()}
        count = sum(seeds.shape[0] if seeds.shape else 0 for seeds, _ in files.values())
        if count * _LABELLED_BYTES > budget_bytes // 2:
            raise BudgetError(
                f"the splits' {count} nodes take {format_size(count * _LABELLED_BYTES)}, half of the host budget of "
                f"{format_size(budget_bytes)} is for them; give "
                f"host_budget='{-(-2 * count * _LABELLED_BYTES // 1_000_000)}M'"
            )
        ids, labels = {}, {}
        for split, (seeds, values) in files.items():
            if len(seeds.shape) != 1 or values.shape not in ((seeds.shape[0],), (seeds.shape[0], 1)):
                raise SourceError(f"{seeds.name} and {values.name} are not one node and one label after another")
            ids[split] = seeds.rows(0, seeds.shape[0])
            labels[split] = whole_labels(values.rows(0, values.shape[0]).reshape(-1), 0, values.name)
        self._splits = IndexSplits(ids, nodes=nodes, name=str(self.paths[0].parent) if self.paths else "no split")
        in_splits = [np.zeros(0, dtype=np.int64), *(found.astype(np.int64) for found in ids.values())]
        everything: Ids = np.concatenate(in_splits)
        order = np.argsort(everything, kind="stable")
        self._ids = everything[order]
        self._y: Ids = np.concatenate([np.zeros(0, dtype=np.int64), *labels.values()])[order]
        twice = np.flatnonzero(self._ids[1:] == self._ids[:-1])
        if len(twice):
            raise SourceError(f"the splits name the node {self._ids[twice[0]]} twice")
        self.nbytes = self._ids.nbytes + self._y.nbytes + self._splits.nbytes

    def blocks(self, size: int) -> Iterator[LabelBlock]:
        """Yield blocks of labels, as a source does."""
        for start, stop in ranges(self._nodes, size):
            y = np.full(stop - start, -1, dtype=np.int64)
            first, last = np.searchsorted(self._ids, (start, stop))
            y[self._ids[first:last] - start] = self._y[first:last]
            yield LabelBlock(y, *self._splits.masks(start, stop))


READER = Reader(
    needs="GraphBolt folder: metadata.yaml of one kind of node and edge, before preprocessing",
    folder=True,
    recognises=lambda path: (path / _METADATA).is_file(),
    open=_open,
)
