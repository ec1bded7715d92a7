# SPDX-License-Identifier: Apache-2.0
"""The division of a conversion's memory, and checks that memory and disk suffice, before it starts."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from ooc.conversion.edge_sort import sort_bytes
from ooc.conversion.held_out_links import HeldOut
from ooc.conversion.order import order_bytes
from ooc.errors import BudgetError, SourceError
from ooc.memory import available_memory_bytes
from ooc.sizes import format_size, parse_size, too_small
from ooc.sources.source import Source
from ooc.storage.array import CHUNK_BYTES, chunk_rows
from ooc.storage.sparse_array import PARTS
from ooc.storage.store import Store, Task
from ooc.storage.types import EDGES

_FLOOR_BYTES = 32 << 20
_MOST_WORKERS = 8
_SORT_KEYS = 1 << 22  # Fewer sort no faster, more leave the processor's caches, ...
_SORT_PARTS = 48  # ... unless that many more buckets would need a second level.
_EDGE_BYTES = 256  # A block being read, one waiting, one being spread, and what comes of it on the way.
_EDGE_NUMBER_BYTES = 128  # More for each number that an edge carries: up to 16 copies of 8 bytes, as those above.
_FEATURE_BYTES = 48  # Three such blocks of float64, and up to three copies of the one at work.
_LEAST_FEATURE_ROWS = 16
_LEAST_EDGES = 16
_METADATA_BYTES = 32 << 10  # A zarr.json for each of up to 16 arrays and their groups, and the journal.
_CHECKSUM_BYTES = 4
_LABEL_ROWS = 1 << 16
_START_BYTES = 8  # Of a row, when its entries are moved.
_MOST_NUMBER_BYTES = 8  # Of what edges carry.
_ID_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a conversion: for edges, then for features.

    Edges: add their reverse, drop duplicates, add missing self-loops. The reverse has the edge's data. Of duplicates
    with data, the sum is kept, and a self-loop is then its own reverse. Added self-loops have the data 1.
    """

    symmetrize: bool
    drop_duplicates: bool
    self_loops: bool
    row_normalize: bool
    dtype: str
    sparse_features: bool = False
    """Whether features are stored as sparse."""
    hold_out: HeldOut | None = None


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a graph on which a conversion's memory, disk and time depend.

    ``packed_bytes``: of its files (0: as large as their arrays). ``resident_bytes``: memory that it holds meanwhile;
    ``prepare_bytes``: additional disk; ``edge_numbers``: numbers of data per edge; ``feature_entries``: entries of
    sparse features; ``feature_numbers``: numbers of the features of all types in a heterogeneous graph.
    """

    name: str
    num_nodes: int
    num_edges: int
    num_features: int
    feature_bytes: int = 4
    packed_bytes: int = 0
    label_columns: int = 1
    label_bytes: int = 8
    resident_bytes: int = 0
    prepare_bytes: int = 0
    edge_numbers: int = 0
    feature_entries: int | None = None
    feature_numbers: int | None = None

    @classmethod
    def of(cls, source: Source) -> Self:
        """Return the sizes of an opened source; for a heterogeneous one, the total of nodes, and the most edge data of
        any type."""
        parts, edges = source.nodes_of.values(), source.edges_of.values()
        return cls(
            name=source.name,
            num_nodes=sum(part.num_nodes for part in parts),
            num_edges=source.num_edges,
            num_features=max(part.num_features for part in parts),
            packed_bytes=sum(int(status[0]) for status in source.fingerprint.values() if isinstance(status, list)),
            label_columns=1 if source.task is Task.CLASSES else source.num_classes or 1,
            label_bytes=source.task.dtype("float64").itemsize,
            resident_bytes=source.resident_bytes,
            prepare_bytes=source.prepare_bytes,
            edge_numbers=max(part.has_edge_weight + part.num_edge_features for part in edges),
            feature_entries=source.feature_entries,
            feature_numbers=None if source.types is None else sum(one.num_nodes * one.num_features for one in parts),
        )

    @property
    def raw_edge_bytes(self) -> int:
        return (2 * _ID_BYTES + 4 * self.edge_numbers) * self.num_edges

    @property
    def raw_feature_bytes(self) -> int:
        if self.feature_entries is not None:
            return self.feature_entries * (4 + self.feature_bytes)
        return self._feature_numbers * self.feature_bytes

    @property
    def _feature_numbers(self) -> int:
        return self.num_nodes * self.num_features if self.feature_numbers is None else self.feature_numbers

    @property
    def raw_bytes(self) -> int:
        return self.raw_edge_bytes + self.raw_feature_bytes + self.num_nodes * self.label_columns * 4

    def stored_feature_bytes(self, options: Options) -> int:
        """Return the bytes of features in a store; those of dense ones if the number of entries is unknown."""
        itemsize = np.dtype(options.dtype).itemsize
        if options.sparse_features and self.feature_entries is not None:
            return (4 + itemsize) * self.feature_entries + 8 * self.num_nodes
        return self._feature_numbers * itemsize

    @property
    def input_bytes(self) -> int:
        return self.packed_bytes or self.raw_bytes

    @property
    def label_row_bytes(self) -> int:
        return self.label_columns * self.label_bytes

    @property
    def index_bytes(self) -> int:
        return 4 if self.num_nodes <= 2**31 else 8

    def edge_row_bytes(self, dtype: str) -> int:
        """Return the bytes of an edge's data in a store of this ``dtype``, and during the conversion."""
        return self.edge_numbers * max(4, np.dtype(dtype).itemsize)


@dataclass(frozen=True, kw_only=True)
class Shares:
    """A division of memory: keys that each worker sorts at once, edges at once, and rows of features and labels at
    once."""

    sort_keys: int
    sort_workers: int = 1
    edges: int
    feature_rows: int
    label_rows: int = _LABEL_ROWS


def budget_bytes_of(host_budget: int | str | None) -> int:
    """Return the bytes of a host budget; by default half of the memory that is available to this process now."""
    return available_memory_bytes() // 2 if host_budget is None else parse_size(host_budget, name="host budget")


def least_budget_bytes(sizes: Sizes, *, ordering: bool = False) -> int:
    """Return the least sufficient budget: resident memory, some room, and a few rows of features, of nodes or edges."""
    rows = _LEAST_FEATURE_ROWS * sizes.num_features * _FEATURE_BYTES
    edges = _LEAST_EDGES * sizes.edge_numbers * _EDGE_NUMBER_BYTES
    return _resident_bytes(sizes, ordering) + max(_FLOOR_BYTES, 4 * rows, 4 * edges)


def _resident_bytes(sizes: Sizes, ordering: bool) -> int:
    starts = _START_BYTES * (sizes.num_nodes + 1) if sizes.feature_entries is not None else 0
    return sizes.resident_bytes + (order_bytes(sizes.num_nodes) + starts if ordering else 0)


def cores() -> int:
    """Return the cores that this process may use, up to the number that helps a conversion."""
    return min(_MOST_WORKERS, len(os.sched_getaffinity(0)))


def divide(sizes: Sizes, budget_bytes: int, *, ordering: bool = False) -> Shares:
    """Return the division of ``budget_bytes`` for a conversion, or for ``ordering`` the rows of a store.

    BudgetError, with the least sufficient budget, when it is too small.
    """
    resident, least = _resident_bytes(sizes, ordering), least_budget_bytes(sizes, ordering=ordering)
    if budget_bytes < least:
        work = "ordering the rows of" if ordering else "converting"
        holding = " and ".join(["the order"] * ordering + ["the source"] * (sizes.resident_bytes > 0))
        held = f", {format_size(resident)} of it to hold {holding}" if holding else ""
        raise too_small(f"{work} {sizes.name}", least, budget_bytes, held)
    free, workers = budget_bytes - resident, cores()
    key_bytes = sort_bytes(sizes.edge_numbers * _MOST_NUMBER_BYTES)
    return Shares(
        sort_keys=min(max(_SORT_KEYS, 2 * sizes.num_edges // _SORT_PARTS), free // 2 // key_bytes // (workers + 1)),
        sort_workers=workers,
        edges=min(1 << 20, free // 4 // (_EDGE_BYTES + sizes.edge_numbers * _EDGE_NUMBER_BYTES)),
        # A block of features takes no more than a quarter of all.
        feature_rows=min(1 << 16, free // 4 // (max(1, sizes.num_features) * _FEATURE_BYTES)),
    )


def disk_bytes(sizes: Sizes, options: Options, *, ordered: bool) -> int:
    """Return the most disk that a conversion takes at a time: the store or, before it, the keys that are sorted into
    it.

    ``ordered``: first the store, and then all that once more, to write the store again in order.
    """
    nodes, keys, sides = sizes.num_nodes, 2 * sizes.num_edges, 1 if options.symmetrize else 2
    entries, edge_row_bytes = keys // sides + nodes * options.self_loops, sizes.edge_row_bytes(options.dtype)
    carried = _stored(entries, edge_row_bytes) if edge_row_bytes else 0
    topology = sides * (_stored(nodes + 1, 8) + _stored(nodes, 4) + _stored(entries, sizes.index_bytes) + carried)
    labels = _stored(nodes, 8) + _stored(nodes, sizes.label_row_bytes) + 3 * _stored(nodes, 1)
    row_bytes = -(-sizes.stored_feature_bytes(options) // nodes)
    features = _stored(nodes, row_bytes) if row_bytes else 0
    features += options.sparse_features * len(PARTS) * CHUNK_BYTES
    sorting = keys * (8 + edge_row_bytes)  # Of a direction whose edges are written all keys are kept until they are.
    need = labels + max(sorting + topology // sides, sorting // sides + topology, topology + features)
    if ordered:
        need += labels + topology + features
    return need + sizes.prepare_bytes + _METADATA_BYTES * (1 + ordered)


def disk_bytes_for_order(store: Store) -> int:
    """Return the most disk for ordering the rows of ``store``: the store again, or before that the keys of one
    direction."""
    sizes = {name: store.array(name).num_chunks * store.array(name).chunk_bytes for name in store.arrays()}
    rows = sum(size for name, size in sizes.items() if not name.startswith(("in/", "out/", f"{EDGES}/")))
    carried = max(sum(array.row_bytes for array in store.edge_data(f"{one.group}in")) for one in store.parts.edges)
    if store.types is not None:  # of which each gets its original ids
        rows += sum(_stored(count, 8) for count in store.types.nodes.values())
    return sum(sizes.values()) - rows + max(rows, store.num_edges * (8 + carried))


def _stored(rows: int, row_bytes: int) -> int:
    """Return the bytes of an array's chunk files, including padding, and of their checksums."""
    height = chunk_rows(rows, row_bytes)
    return -(-rows // height) * (height * row_bytes + _CHECKSUM_BYTES)


def describe_demand(
    target: str | Path, disk_bytes: int, disk_free_bytes: int, least_memory_bytes: int, memory_bytes: int
) -> list[str]:
    """Return lines that describe what writing ``target`` takes, and what is available."""
    missing, disk, free = disk_bytes - disk_free_bytes, format_size(disk_bytes), format_size(disk_free_bytes)
    room = f", {format_size(missing)} too little" if missing > 0 else ""
    short = "" if memory_bytes >= least_memory_bytes else ": too little"
    return [
        f"disk: {disk} at most in {Path(target).parent}, {free} are free{room}",
        f"memory: at least {format_size(least_memory_bytes)}; it would keep to {format_size(memory_bytes)}{short}",
    ]


def check_disk(work: str, need: int, folder: Path) -> None:
    """Raise BudgetError when ``folder``'s disk has no room for ``need`` bytes."""
    have = shutil.disk_usage(folder).free
    if need > have:
        raise BudgetError(
            f"{work} needs {format_size(need)} of disk in {folder}, "
            f"{format_size(have)} are free; free some, or give an output on another disk"
        )


def check_folder(folder: Path) -> None:
    """Raise SourceError when ``folder`` is not writable."""
    if not folder.is_dir():
        raise SourceError(f"the output folder {folder} does not exist")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SourceError(f"the output folder {folder} is not writable")
