# SPDX-License-Identifier: Apache-2.0
"""How a conversion divides its memory, and whether memory and disk are enough, before it starts."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ooc.conversion.edge_sort import sort_bytes
from ooc.conversion.order import order_bytes
from ooc.errors import BudgetError, SourceError
from ooc.memory import available_memory_bytes
from ooc.sizes import format_size
from ooc.sources.files.ahead import cores
from ooc.sources.source import Source
from ooc.storage.array import chunk_rows
from ooc.storage.store import Store, Task

_FLOOR_BYTES = 32 << 20
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
_MOST_NUMBER_BYTES = 8  # Of what edges carry.


@dataclass(frozen=True, kw_only=True)
class Shares:
    """What fits: keys sorted at once by each of some workers, edges and rows of features and labels at once."""

    sort_keys: int
    sort_workers: int = 1
    edges: int
    feature_rows: int
    label_rows: int = _LABEL_ROWS


def default_budget_bytes() -> int:
    """Half of the memory that is available to this process now."""
    return available_memory_bytes() // 2


def least_budget_bytes(*, num_features: int, resident_bytes: int, edge_numbers: int = 0) -> int:
    """The least budget that does: what is resident, some room, and a few rows of features, of nodes or edges."""
    rows, edges = _LEAST_FEATURE_ROWS * num_features * _FEATURE_BYTES, _LEAST_EDGES * edge_numbers * _EDGE_NUMBER_BYTES
    return resident_bytes + max(_FLOOR_BYTES, 4 * rows, 4 * edges)


def divide(source: Source, budget_bytes: int) -> Shares:
    """Shares of ``budget_bytes``; BudgetError, with the least that does, when it is too small."""
    return _divide(
        f"converting {source.name}",
        budget_bytes,
        num_edges=source.num_edges,
        num_features=source.num_features,
        edge_numbers=source.num_edge_numbers,
        resident_bytes=source.resident_bytes,
        resident="the source",
    )


def divide_for_order(
    name: str,
    budget_bytes: int,
    *,
    num_nodes: int,
    num_edges: int,
    num_features: int,
    edge_numbers: int = 0,
    resident_bytes: int = 0,
) -> Shares:
    """The same for putting a store's rows in order, beside ``resident_bytes`` that somebody else holds."""
    return _divide(
        f"ordering the rows of {name}",
        budget_bytes,
        num_edges=num_edges,
        num_features=num_features,
        edge_numbers=edge_numbers,
        resident_bytes=resident_bytes + order_bytes(num_nodes),
        resident="the order" + " and the source" * (resident_bytes > 0),
    )


def _divide(
    work: str,
    budget_bytes: int,
    *,
    num_edges: int,
    num_features: int,
    edge_numbers: int,
    resident_bytes: int,
    resident: str,
) -> Shares:
    feature_row_bytes = num_features * _FEATURE_BYTES
    # A block of features takes no more than a quarter of all.
    least = least_budget_bytes(num_features=num_features, edge_numbers=edge_numbers, resident_bytes=resident_bytes)
    if budget_bytes < least:
        held = f", {format_size(resident_bytes)} of it to hold {resident}" * (resident_bytes > 0)
        raise BudgetError(
            f"{work} needs {format_size(least)}{held}, the host budget is "
            f"{format_size(budget_bytes)}; give host_budget='{-(-least // 1_000_000)}M'"
        )
    free = budget_bytes - resident_bytes
    workers = cores()
    key_bytes = sort_bytes(edge_numbers * _MOST_NUMBER_BYTES)
    return Shares(
        sort_keys=min(max(_SORT_KEYS, 2 * num_edges // _SORT_PARTS), free // 2 // key_bytes // (workers + 1)),
        sort_workers=workers,
        edges=min(1 << 20, free // 4 // (_EDGE_BYTES + edge_numbers * _EDGE_NUMBER_BYTES)),
        feature_rows=min(1 << 16, free // 4 // feature_row_bytes),
    )


def check_disk(
    source: Source,
    folder: Path,
    *,
    dtype: str,
    symmetrize: bool,
    self_loops: bool,
    twice: bool = False,
    written_bytes: int = 0,
) -> None:
    """BudgetError when ``folder``'s disk has no room for the store or, before it, the keys being sorted.

    ``twice``: for the store, and then for all that once more, to write the store again in order. ``written_bytes``:
    what an earlier process has written of that.
    """
    need = disk_bytes(source, dtype=dtype, symmetrize=symmetrize, self_loops=self_loops, twice=twice)
    _check_room(f"converting {source.name}", need - written_bytes, folder)


def disk_bytes(source: Source, *, dtype: str, symmetrize: bool, self_loops: bool, twice: bool) -> int:
    """The most that converting ``source`` has on the disk at a time."""
    columns = 1 if source.task is Task.CLASSES else source.num_classes or 1
    return disk_bytes_for(
        num_nodes=source.num_nodes,
        num_edges=source.num_edges,
        feature_row_bytes=source.num_features * np.dtype(dtype).itemsize,
        label_row_bytes=source.task.dtype.itemsize * columns,
        symmetrize=symmetrize,
        self_loops=self_loops,
        twice=twice,
        prepare_bytes=source.prepare_bytes,
        edge_row_bytes=source.num_edge_numbers * max(4, np.dtype(dtype).itemsize),
    )


def disk_bytes_for(
    *,
    num_nodes: int,
    num_edges: int,
    feature_row_bytes: int,
    label_row_bytes: int,
    symmetrize: bool,
    self_loops: bool,
    twice: bool,
    prepare_bytes: int,
    edge_row_bytes: int = 0,
) -> int:
    """The same of a source that is not opened."""
    nodes, keys, sides = num_nodes, 2 * num_edges, 1 if symmetrize else 2
    entries = keys // sides + (nodes if self_loops else 0)
    index_bytes = 4 if nodes <= 2**31 else 8
    carried = _stored(entries, edge_row_bytes) if edge_row_bytes else 0
    topology = sides * (_stored(nodes + 1, 8) + _stored(nodes, 4) + _stored(entries, index_bytes) + carried)
    labels = _stored(nodes, 8) + _stored(nodes, label_row_bytes) + 3 * _stored(nodes, 1)
    features = _stored(nodes, feature_row_bytes)
    need = labels + max(keys * (8 + edge_row_bytes) + topology // 2, topology + features)
    if twice:
        need += labels + topology + features
    return need + prepare_bytes + _METADATA_BYTES * (1 + twice)


def check_disk_for_order(store: Store, folder: Path, *, written_bytes: int = 0) -> None:
    """BudgetError when ``folder``'s disk has no room for the store again, or the keys of one direction before."""
    sizes = {name: store.array(name).num_chunks * store.array(name).chunk_bytes for name in store.arrays()}
    rows = sum(size for name, size in sizes.items() if not name.startswith(("in/", "out/")))
    topology = sum(sizes.values()) - rows
    carried = sum(array.row_bytes for array in store.edge_data("in"))
    need = topology + max(rows, store.num_edges * (8 + carried))
    _check_room(f"ordering the rows of {store.name}", need - written_bytes, folder)


def _check_room(work: str, need: int, folder: Path) -> None:
    have = shutil.disk_usage(folder).free
    if need > have:
        raise BudgetError(
            f"{work} needs {format_size(need)} of disk in {folder}, "
            f"{format_size(have)} are free; free some, or give an output on another disk"
        )


def _stored(rows: int, row_bytes: int) -> int:
    """Bytes of an array's chunk files, padding included, and of their checksums."""
    height = chunk_rows(rows, row_bytes)
    return -(-rows // height) * (height * row_bytes + _CHECKSUM_BYTES)


def check_folder(folder: Path) -> None:
    """SourceError when nothing can be made in ``folder``."""
    if not folder.is_dir():
        raise SourceError(f"the output folder {folder} does not exist")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SourceError(f"the output folder {folder} is not writable")
