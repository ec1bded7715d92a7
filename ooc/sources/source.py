# SPDX-License-Identifier: Apache-2.0
"""The common interface of all formats: a graph that yields edges, features and labels in blocks.

Shapes: N nodes, E edges, F features.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ooc.errors import SourceError
from ooc.events import Listener
from ooc.storage.array import AnyArray
from ooc.storage.sparse_array import Entries
from ooc.storage.store import Task
from ooc.storage.types import ONLY, EdgeType

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class EdgeData(NamedTuple):
    """The data of a block of edges, unchecked: ``weight`` [n], ``features`` [n, F], numbers of any type."""

    weight: AnyArray | None = None
    features: AnyArray | None = None


class EdgeBlock(NamedTuple):
    """A block of edges, unchecked: node ids ``sources`` and ``targets``, [n] each, and the edges' data.

    Ids are int64, or texts (objects) before nodes are numbered.
    """

    sources: AnyArray
    targets: AnyArray
    data: EdgeData = EdgeData()


class LabelBlock(NamedTuple):
    """Labels ``y`` of a block of rows, with the task's shape and dtype (see ``Task``), and masks of the splits, [n]
    each.

    They are unchecked.
    """

    y: AnyArray
    train: Mask
    valid: Mask
    test: Mask


@dataclass(frozen=True)
class RelationSource:
    """The ``num_edges`` edges of one type, whose ends are numbered within the types of their nodes.

    ``edges(n)`` yields them as a ``Source`` does. ``has_edge_weight``, ``num_edge_features`` (0: none): what every
    block has in its ``data``.
    """

    num_edges: int
    edges: Callable[[int], Iterator[EdgeBlock]]
    has_edge_weight: bool = False
    num_edge_features: int = 0


def nothing(size: int) -> Iterator[Any]:
    """Yield no blocks."""
    return iter(())


@dataclass(frozen=True, kw_only=True)
class Source(RelationSource):
    """A graph to convert. The three callables start afresh each time and yield blocks in order.

    Neither side writes to a yielded block. The callables run in their own thread, one at a time. ``edges(n)`` and
    ``features(n)`` yield at most about n edges or rows at a time (a generator may use its own smaller blocks),
    ``labels(n)`` likewise. ``num_edges`` counts entries as given. ``num_classes`` None: one more than the largest
    label; for tasks other than ``CLASSES`` it is the number of columns of ``y`` and must be given. ``resident_bytes``
    is memory that the source itself holds, which counts against the budget. ``description`` goes into the store's
    ``source``. ``unlabelled``: no node has a label or is in a split. Of several node types, most need no edges, and
    only one needs labels.

    With ``weight_unless_ones``, weights that are all 1 are dropped.

    ``graph_offsets``, for G graphs: where the rows of each begin, and N, [G + 1] int64, held in memory. Then labels and
    splits belong to graphs, and an edge's ends are in one graph.

    ``symmetrize``, ``drop_duplicates`` (None: only when symmetrising): the format's defaults; the caller may choose
    otherwise.

    ``ids(n)``, where the source's ids are not 0 … N-1: the ids, integers [n], or UTF-8 texts padded with zeros [n,
    ``id_bytes``]. ``class_names``: the classes' names by number; empty where classes are numbers.

    Features may come as sparse entries; then there are at most ``feature_entries``.

    ``prepare`` is for a source that must write to the disk before it can stream. It is called once, before all else,
    with a folder of the partial store and a listener, and returns the source to convert, whose own ``prepare`` is None.
    Until then ``num_nodes`` and ``num_edges`` may be upper bounds. The folder outlives a killed conversion, and
    ``prepare`` is called with it again. A file there with its final name is complete, because it is written under
    another name and renamed. ``prepare_bytes``: disk that it takes.

    ``fingerprint`` identifies the input, as JSON: for files their path, size and time of change (see
    :func:`fingerprint_of`). A conversion resumes what another process left only if it is the same; with an empty one it
    starts over.

    ``types``: for a heterogeneous graph; the rest then belongs to the nodes that have labels, and ``num_edges`` counts
    the edges of all types.
    """

    name: str
    num_nodes: int
    num_features: int
    num_edges: int = 0
    edges: Callable[[int], Iterator[EdgeBlock]] = nothing
    format: str = ""
    num_classes: int | None = None
    features: Callable[[int], Iterator[AnyArray | Entries]] = nothing
    labels: Callable[[int], Iterator[LabelBlock]] = nothing
    feature_entries: int | None = None
    ids: Callable[[int], Iterator[AnyArray]] | None = None
    id_bytes: int = 0
    weight_unless_ones: bool = False
    task: Task = Task.CLASSES
    unlabelled: bool = False
    class_names: tuple[str, ...] = ()
    symmetrize: bool = False
    drop_duplicates: bool | None = None
    drop_self_loops: bool = False
    resident_bytes: int = 0
    graph_offsets: AnyArray | None = None
    prepare: Callable[[Path, Listener], "Source"] | None = None
    prepare_bytes: int = 0
    fingerprint: dict[str, Any] = field(default_factory=dict)
    description: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    types: "SourceTypes | None" = None

    @property
    def nodes_of(self) -> "Mapping[str, Source]":
        """The nodes of each type; the key is "" where there is only one."""
        return {"": self} if self.types is None else self.types.nodes

    @property
    def edges_of(self) -> "Mapping[EdgeType, RelationSource]":
        """The edges of each type; the key is ``ONLY`` where there is only one."""
        return {ONLY: self} if self.types is None else self.types.edges

    @property
    def labelled_type(self) -> str:
        """The type of nodes that has labels and splits; "" where there is only one."""
        return "" if self.types is None else self.types.labelled

    @property
    def num_labelled(self) -> int:
        """The number of things that have labels and splits: nodes, or graphs."""
        return self.num_nodes if self.graph_offsets is None else len(self.graph_offsets) - 1

    @property
    def labelled(self) -> str:
        """The word for these things."""
        return "node" if self.graph_offsets is None else "graph"


@dataclass(frozen=True)
class SourceTypes:
    """The types of a heterogeneous graph: ``nodes`` by type, of whose sources only features count; ``edges`` by type;
    ``labelled``: the type of nodes that has labels and splits."""

    nodes: Mapping[str, Source]
    edges: Mapping[EdgeType, RelationSource]
    labelled: str


def fingerprint_of(*paths: Path) -> dict[str, Any]:
    """Return size and time of change of each of the files ``paths``, and of all files in those that are folders."""
    files = [
        file
        for path in paths
        for file in (sorted(inner for inner in path.rglob("*") if inner.is_file()) if path.is_dir() else [path])
    ]
    found = {}
    for file in files:
        status = file.stat()
        found[str(file.resolve())] = [status.st_size, status.st_mtime_ns]
    return found


def ranges(total: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield ranges ``(start, stop)`` of ``range(total)``, ``step`` long except for the last."""
    for start in range(0, total, step):
        yield start, min(start + step, total)


def with_data(
    edges: Iterator[EdgeBlock],
    *,
    weight: Iterator[AnyArray] | None = None,
    features: Iterator[AnyArray] | None = None,
    name: str,
) -> Iterator[EdgeBlock]:
    """Yield ``edges`` with weights [n] and features [n, F] from separate blocks in the same order, beside their own
    data.

    SourceError, with ``name``, where the numbers of rows differ.
    """
    given = [None if blocks is None else Rows(blocks) for blocks in (weight, features)]
    for block in edges:
        if not (count := len(block.sources)):
            continue
        data = [own if rows is None else rows.take(count) for rows, own in zip(given, block.data, strict=True)]
        if any(array is not None and len(array) < count for array in data):
            raise SourceError(f"{name} ends before the edges do")
        yield EdgeBlock(block.sources, block.targets, EdgeData(*data))
    if any(rows is not None and len(rows.take(1)) for rows in given):
        raise SourceError(f"{name} has more rows than there are edges")


class Rows:
    """Rows that come in ``blocks`` and are taken in any number."""

    def __init__(self, blocks: Iterable[AnyArray]) -> None:
        self._blocks = iter(blocks)
        self._left: AnyArray | None = None

    def take(self, count: int) -> AnyArray:
        """Return the next ``count`` rows, fewer at the end."""
        parts, missing = list[AnyArray](), count
        while missing and (block := next(self._blocks, None) if self._left is None else self._left) is not None:
            fits = len(block) <= missing
            parts.append(block if fits else block[:missing])
            self._left = None if fits else block[missing:]
            missing -= len(parts[-1])
        if len(parts) < 2:
            return parts[0] if parts else np.empty(0)
        return np.concatenate(parts)

    def blocks(self, size: int) -> Iterator[AnyArray]:
        """Yield all rows, ``size`` at a time except for the last."""
        while len(rows := self.take(size)):
            yield rows
