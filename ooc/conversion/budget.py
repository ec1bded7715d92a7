# SPDX-License-Identifier: Apache-2.0
"""How a conversion divides its memory, and whether memory and disk are enough, before it starts."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from ooc.conversion.order import order_bytes
from ooc.conversion.source import Source
from ooc.errors import BudgetError, SourceError
from ooc.sizes import format_size
from ooc.storage.array import chunk_rows
from ooc.storage.store import Store

_FLOOR_BYTES = 32 << 20
_SORT_KEYS = 1 << 22  # Fewer sort no faster, more leave the processor's caches, ...
_SORT_PARTS = 48  # ... unless that many more buckets would need a second level.
_EDGE_BYTES = 192
_FEATURE_BYTES = 24
_LEAST_FEATURE_ROWS = 16
_LABEL_ROWS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Shares:
    """What fits: keys sorted at once, edges and rows of features and labels handled at once."""

    sort_keys: int
    edges: int
    feature_rows: int
    label_rows: int = _LABEL_ROWS


def default_budget_bytes() -> int:
    """Half of the memory that is available now."""
    return int(psutil.virtual_memory().available) // 2


def divide(source: Source, budget_bytes: int) -> Shares:
    """Shares of ``budget_bytes``; BudgetError, with the least that does, when it is too small."""
    return _divide(
        f"converting {source.name}",
        budget_bytes,
        num_edges=source.num_edges,
        num_features=source.num_features,
        resident_bytes=source.resident_bytes,
        resident="the source",
    )


def divide_for_order(
    name: str, budget_bytes: int, *, num_nodes: int, num_edges: int, num_features: int, resident_bytes: int = 0
) -> Shares:
    """The same for putting a store's rows in order, beside ``resident_bytes`` that somebody else holds."""
    return _divide(
        f"ordering the rows of {name}",
        budget_bytes,
        num_edges=num_edges,
        num_features=num_features,
        resident_bytes=resident_bytes + order_bytes(num_nodes),
        resident="the order" + " and the source" * (resident_bytes > 0),
    )


def _divide(
    work: str, budget_bytes: int, *, num_edges: int, num_features: int, resident_bytes: int, resident: str
) -> Shares:
    feature_row_bytes = num_features * _FEATURE_BYTES
    # A row of features takes up to three float64 copies on its way, a block no more than a quarter of all.
    floor = max(_FLOOR_BYTES, 4 * _LEAST_FEATURE_ROWS * feature_row_bytes)
    least = resident_bytes + floor
    if budget_bytes < least:
        held = f", {format_size(resident_bytes)} of it to hold {resident}" * (resident_bytes > 0)
        raise BudgetError(
            f"{work} needs {format_size(least)}{held}, the host budget is "
            f"{format_size(budget_bytes)}; give --host-budget {-(-least // 1_000_000)}M"
        )
    free = budget_bytes - resident_bytes
    return Shares(
        sort_keys=min(max(_SORT_KEYS, 2 * num_edges // _SORT_PARTS), free // 2 // 8),
        edges=min(1 << 20, free // 4 // _EDGE_BYTES),
        feature_rows=min(1 << 16, free // 4 // feature_row_bytes),
    )


def check_disk(
    source: Source, folder: Path, *, dtype: str, symmetrize: bool, self_loops: bool, twice: bool = False
) -> None:
    """BudgetError when ``folder``'s disk has no room for the store or, before it, the keys being sorted.

    ``twice``: for the store, and then for all that once more, to write the store again in order.
    """
    nodes, keys, sides = source.num_nodes, 2 * source.num_edges, 1 if symmetrize else 2
    entries = keys // sides + (nodes if self_loops else 0)
    index_bytes = 4 if nodes <= 2**31 else 8
    topology = sides * (_stored(nodes + 1, 8) + _stored(nodes, 4) + _stored(entries, index_bytes))
    labels = 2 * _stored(nodes, 8) + 3 * _stored(nodes, 1)
    features = _stored(nodes, source.num_features * np.dtype(dtype).itemsize)
    need = labels + max(keys * 8 + topology // 2, topology + features)
    if twice:
        need += labels + topology + features
    _check_room(f"converting {source.name}", need, folder)


def check_disk_for_order(store: Store, folder: Path) -> None:
    """BudgetError when ``folder``'s disk has no room for the store again, or the keys of one direction before."""
    sizes = {name: store.array(name).num_chunks * store.array(name).chunk_bytes for name in store.arrays()}
    rows = sum(size for name, size in sizes.items() if not name.startswith(("in/", "out/")))
    topology = sum(sizes.values()) - rows
    need = topology + max(rows, store.num_edges * 8)
    _check_room(f"ordering the rows of {store.name}", need, folder)


def _check_room(work: str, need: int, folder: Path) -> None:
    have = shutil.disk_usage(folder).free
    if need > have:
        raise BudgetError(
            f"{work} needs {format_size(need)} of disk in {folder}, "
            f"{format_size(have)} are free; free some, or give an output on another disk"
        )


def _stored(rows: int, row_bytes: int) -> int:
    """Bytes of an array's chunk files, padding included."""
    height = chunk_rows(rows, row_bytes)
    return -(-rows // height) * height * row_bytes


def check_folder(folder: Path) -> None:
    """SourceError when nothing can be made in ``folder``."""
    if not folder.is_dir():
        raise SourceError(f"the output folder {folder} does not exist")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SourceError(f"the output folder {folder} is not writable")
