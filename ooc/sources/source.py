# SPDX-License-Identifier: Apache-2.0
"""What every format is read as: a graph that hands out edges, features and labels in blocks.

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
    """What some edges carry: ``weight`` [n], ``features`` [n, F], numbers of any type; not yet checked."""

    weight: AnyArray | None = None
    features: AnyArray | None = None


class EdgeBlock(NamedTuple):
    """Some edges: node ids ``sources`` and ``targets``, [n] each, and what they carry; not yet checked.

    Ids are int64, or texts (objects) before nodes are numbered.
    """

    sources: AnyArray
    targets: AnyArray
    data: EdgeData = EdgeData()


class LabelBlock(NamedTuple):
    """Some rows' labels ``y``, of the shape and type that the task says (see ``Task``), and membership in
    the splits, [n] each; not yet checked."""

    y: AnyArray
    train: Mask
    valid: Mask
    test: Mask


@dataclass(frozen=True)
class RelationSource:
    """``num_edges`` edges of one type, whose ends are numbered within the types of their nodes.

    ``edges(n)`` yields them as a ``Source`` does. ``has_edge_weight``, ``num_edge_features`` (0: none): what every
    block of edges has in its ``data``.
    """

    num_edges: int
    edges: Callable[[int], Iterator[EdgeBlock]]
    has_edge_weight: bool = False
    num_edge_features: int = 0


def nothing(size: int) -> Iterator[Any]:
    """No blocks."""
    return iter(())


@dataclass(frozen=True, kw_only=True)
class Source(RelationSource):
    """A graph to convert. The three callables start afresh each time and yield blocks in order.

    Neither side writes to a block that was yielded. The callables run in a thread of their own, one at a time.
    ``edges(n)`` and ``features(n)`` yield at most about n edges or rows at a time (a generator may keep
    to blocks of its own, smaller ones), ``labels(n)`` likewise. ``num_edges`` counts entries as given.
    ``num_classes`` None: one more than the largest label; for tasks other than ``CLASSES`` it is the number
    of columns of ``y`` and must be given. ``resident_bytes`` is what the source itself holds in memory, to
    be counted against the budget. ``description`` goes into the store's ``source``. ``unlabelled``: no node has a
    label, or is in a split. The nodes of one type of several need no edges, and no labels where another type has them.

    With ``weight_unless_ones`` weights that all come out as 1 are none.

    ``graph_offsets``, of many graphs, G: where the rows of each begin, and N, [G + 1] int64, held meanwhile. Then
    labels and splits are of graphs, and an edge's ends are of one.

    ``symmetrize``, ``drop_duplicates`` (None: just when symmetrising): what is usual for the format; the caller
    may choose otherwise.

    ``ids(n)``, where the source calls its nodes otherwise than 0 … N-1: what it calls them, whole numbers [n], or texts
    as rows of UTF-8 with zeros after them [n, ``id_bytes``]. ``class_names``: what it calls the classes, by their
    numbers; none where they are numbers.

    Features may come without their zeros; then there are ``feature_entries``, or fewer.

    ``prepare``, for a source that must put something on the disk before it can stream: called once, before
    all else, with a folder of the partial store and a listener; gives the source to convert, whose own
    ``prepare`` is None. Until then ``num_nodes`` and ``num_edges`` may be upper bounds. The folder outlives a
    killed conversion, and ``prepare`` is called with it again: what it finds there under its final name is
    whole, because it writes under another name and renames. ``prepare_bytes``: disk it takes.

    ``fingerprint`` says which input this is, as JSON: for files their path, size and time of change (see
    :func:`fingerprint_of`). A conversion goes on with what another process left only if it is the same;
    with an empty one it starts over.

    ``types``: of a graph with several types of nodes and edges; the rest is then that of the nodes that have labels,
    and ``num_edges`` counts the edges of all types.
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
        """The nodes of each type; "" where there is but one."""
        return {"": self} if self.types is None else self.types.nodes

    @property
    def edges_of(self) -> "Mapping[EdgeType, RelationSource]":
        """The edges of each type; ``ONLY`` where there is but one."""
        return {ONLY: self} if self.types is None else self.types.edges

    @property
    def labelled_type(self) -> str:
        """The type of nodes that has labels and splits; "" where there is but one."""
        return "" if self.types is None else self.types.labelled

    @property
    def num_labelled(self) -> int:
        """How many there are of what labels and splits are of: nodes, or graphs."""
        return self.num_nodes if self.graph_offsets is None else len(self.graph_offsets) - 1

    @property
    def labelled(self) -> str:
        """What one of these is called."""
        return "node" if self.graph_offsets is None else "graph"


@dataclass(frozen=True)
class SourceTypes:
    """``nodes``: by type, of which sources give the features alone; ``edges`` by type; ``labelled``: the type of nodes
    that has labels and splits."""

    nodes: Mapping[str, Source]
    edges: Mapping[EdgeType, RelationSource]
    labelled: str


def fingerprint_of(*paths: Path) -> dict[str, Any]:
    """Size and time of change of each of the files ``paths`` and of all files in those that are folders."""
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
    """``(start, stop)`` pieces of ``range(total)``, ``step`` long but for the last."""
    for start in range(0, total, step):
        yield start, min(start + step, total)


def with_data(
    edges: Iterator[EdgeBlock],
    *,
    weight: Iterator[AnyArray] | None = None,
    features: Iterator[AnyArray] | None = None,
    name: str,
) -> Iterator[EdgeBlock]:
    """``edges`` with weights [n] and features [n, F] that come in blocks of their own, in the same order, beside what
    they carry already.

    SourceError, saying ``name``, where there are not as many.
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
    """Rows that come in ``blocks``, taken as many at a time as is wanted."""

    def __init__(self, blocks: Iterable[AnyArray]) -> None:
        self._blocks = iter(blocks)
        self._left: AnyArray | None = None

    def take(self, count: int) -> AnyArray:
        """The next ``count`` rows, fewer where there are no more."""
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
        """All of them, ``size`` at a time but for the last."""
        while len(rows := self.take(size)):
            yield rows
