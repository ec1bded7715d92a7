# SPDX-License-Identifier: Apache-2.0
"""A store → the same graph with its rows in hop order. Every array is rewritten in streams.

A new place a node (4 bytes) is held in memory. Arrays of rows are read once in sequence and written in
one sequence a hop, since rows of a hop keep their order; edges are sorted anew on disk.
"""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from shutil import rmtree

import numpy as np

from ooc.conversion.budget import (
    Shares,
    check_disk_for_order,
    check_folder,
    default_budget_bytes,
    divide_for_order,
)
from ooc.conversion.csr import KeyForm, cut
from ooc.conversion.edge_sort import EdgeSorter, Keys
from ooc.conversion.order import Order, Places, hop_order, parse_order
from ooc.conversion.output import SCRATCH, check_target, partial, resolved
from ooc.conversion.source import ranges
from ooc.conversion.topology import write_direction
from ooc.errors import OptionError
from ooc.events import Listener, TaskAdvanced, TaskFinished, TaskStarted, ignore
from ooc.sizes import parse_size
from ooc.storage.array import Array
from ooc.storage.reach import check_range
from ooc.storage.scatter import RowScatter
from ooc.storage.store import SPLITS, Store, open_store, write_group

_WINDOW_ROWS = 1 << 17


def reorder(
    store: Store | str | Path,
    out: str | Path | None = None,
    *,
    order: str = "hop",
    host_budget: int | str | None = None,
    force: bool = False,
    listener: Listener = ignore,
) -> Store:
    """Write ``store`` to ``out`` with its rows in ``order`` and open that; without ``out``, replace ``store``.

    The only order is ``"hop"``, see ``ooc.conversion.order``. ``perm`` goes on naming original ids.
    ``host_budget``: bytes to work in (default: half of what is available); the result does not depend on
    it. ``force``: replace an existing ``out``.

    Raises StoreError, SourceError, BudgetError or OptionError, each with one line. Until the end everything
    is in ``out`` + ``.partial``, which goes away with any error or interruption.
    """
    if parse_order(order) is not Order.HOP:
        raise OptionError(f"rows cannot be put in the order {order!r}; give 'hop', or convert again for the source's")
    opened = store if isinstance(store, Store) else open_store(store)
    budget = default_budget_bytes() if host_budget is None else parse_size(host_budget, name="host budget")
    shares = divide_for_order(
        opened.name,
        budget,
        num_nodes=opened.num_nodes,
        num_edges=opened.num_edges,
        num_features=opened.num_features,
    )
    # Where the store's path is a link, what it leads to is replaced.
    target = opened.path.resolve() if out is None else resolved(Path(out))
    force = force or out is None
    check_folder(target.parent)
    check_target(target, force=force)
    with partial(target, force=force, listener=listener) as folder:
        check_disk_for_order(opened, folder)
        name = opened.name if out is None else target.name.removesuffix(".ooc")
        write_in_order(opened, folder, name=name, scratch=folder / SCRATCH, shares=shares, listener=listener)
    return open_store(target)


def write_in_order(store: Store, folder: Path, *, name: str, scratch: Path, shares: Shares, listener: Listener) -> None:
    """Write a store called ``name``, ``store`` in hop order, to ``folder``; temporary files go to ``scratch``."""
    for group in ("split", "in") if store.undirected else ("split", "in", "out"):
        write_group(folder / group, {})
    order = hop_order(store, listener)
    for direction in ("in",) if store.undirected else ("in", "out"):
        _write_edges(store, folder, direction, order.places, scratch=scratch, shares=shares, listener=listener)
    for array in ("y", "perm", *(f"split/{split}" for split in SPLITS)):
        _write_rows(store.array(array), folder, order.places, block_rows=shares.label_rows, listener=listener)
    _write_rows(store.array("x"), folder, order.places, block_rows=shares.feature_rows, listener=listener)
    attributes = {
        **store.attributes,
        "name": name,
        "order": Order.HOP.value,
        "hops": list(order.hops),
        "train_hops": list(order.train_hops),
        "source": {**store.source, "order": Order.HOP.value},
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    write_group(folder, attributes)


def _write_edges(
    store: Store,
    folder: Path,
    direction: str,
    places: Places,
    *,
    scratch: Path,
    shares: Shares,
    listener: Listener,
) -> None:
    form = KeyForm(store.num_nodes)
    sorter = EdgeSorter(
        scratch / direction,
        largest=form.largest,
        expected=store.num_edges,
        capacity=shares.sort_keys,
        block=shares.edges,
    )
    try:
        task, done = f"reading {direction}-edges", 0
        listener(TaskStarted(task, store.num_edges, "edges"))
        for keys in _moved(store, direction, places, form, shares.edges):
            done += len(keys)
            sorter.add(keys)
            listener(TaskAdvanced(task, done))
        listener(TaskFinished(task))
        blocks = cut(sorter.sorted_blocks(), shares.edges)
        task = f"writing {direction}-edges"
        written = write_direction(folder, direction, form, blocks, most=store.num_edges, task=task, listener=listener)
    finally:
        sorter.close()
    if direction == "out" or not written.self_loops:
        rmtree(folder / direction / "self_loops")


def _moved(store: Store, direction: str, places: Places, form: KeyForm, size: int) -> Iterator[Keys]:
    """The edges of a direction as keys of their ends' new places, about ``size`` at a time."""
    indptr, indices = store.topology(direction)
    # As many rows as have one block of edges: sparse rows then do not come as many small blocks.
    window = min(_WINDOW_ROWS, max(1, size * store.num_nodes // max(1, store.num_edges)))
    unsigned = np.dtype(f"u{places.itemsize}")
    for row, stop_row in ranges(store.num_nodes, window):
        offsets = indptr.read(row, stop_row + 1)
        rows = places[row:stop_row].astype(np.uint64) << np.uint64(form.bits)
        for start in range(int(offsets[0]), int(offsets[-1]), size):
            stop = min(start + size, int(offsets[-1]))
            ends = np.clip(offsets, start, stop)
            keys = np.repeat(rows, ends[1:] - ends[:-1])
            columns = indices.read(start, stop)
            check_range(indices, columns, store.num_nodes)
            keys |= places.take(columns).view(unsigned)
            yield keys


def _write_rows(array: Array, folder: Path, places: Places, *, block_rows: int, listener: Listener) -> None:
    task = f"moving {array.name}"
    listener(TaskStarted(task, array.shape[0], "nodes"))
    scatter = RowScatter(folder, array.name, array.shape, array.dtype)
    for start, rows in array.blocks(block_rows):
        here = places[start : start + len(rows)].astype(np.int64)
        order = np.argsort(here, kind="stable")
        scatter.put(here[order], rows[order])
        listener(TaskAdvanced(task, start + len(rows)))
    scatter.close()
    listener(TaskFinished(task))
