# SPDX-License-Identifier: Apache-2.0
"""Reordering of a store's rows in hop order. Every array is rewritten in streams.

Memory holds a new place per node (4 bytes). Arrays of rows are read once in sequence and written in one sequence per
hop, since rows of a hop keep their order; edges are sorted anew on disk.
"""

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ooc.conversion.budget import (
    Shares,
    Sizes,
    budget_bytes_of,
    check_disk,
    check_folder,
    disk_bytes_for_order,
    divide,
    least_budget_bytes,
)
from ooc.conversion.edge_sort import parts_for
from ooc.conversion.edges import Edges, KeyForm, ValueForm
from ooc.conversion.order import ORDERS, HopOrder, Places, hop_order
from ooc.conversion.output import ON_CANCEL, Workplace, check_target, digest, resolved, workplace
from ooc.conversion.topology import Direction, Pieces, link, spread, write_direction
from ooc.errors import OptionError
from ooc.events import Listener, ignore, reported
from ooc.sources.source import ranges
from ooc.storage.array import AnyArray, Array
from ooc.storage.sparse_array import SparseArray
from ooc.storage.store import SPLITS, Store, open_store, write_groups
from ooc.storage.traversal import check_range
from ooc.storage.types import features_name, of_nodes
from ooc.storage.writer import ArrayWriter, RowScatter
from ooc.storage.zarr_json import METADATA_FILE
from ooc.suggestions import check_choice
from ooc.threads import ahead
from ooc.version import __version__

_WINDOW_ROWS = 1 << 17
_ID_BLOCK_BYTES = 1 << 20


def reorder(
    store: Store | str | Path,
    out: str | Path | None = None,
    *,
    order: str = "hop",
    host_budget: int | str | None = None,
    force: bool = False,
    on_cancel: str = "keep",
    listener: Listener = ignore,
) -> Store:
    """Write ``store`` to ``out`` with its rows in ``order`` and open that; without ``out``, replace ``store``.

    The only order is ``"hop"``, see ``ooc.conversion.order``. ``perm`` continues to name original ids. ``host_budget``:
    bytes to work in (default: half of what is available); the result does not depend on it. ``force``: replace an
    existing ``out``. ``on_cancel``: whether Ctrl-C keeps the work so far (``"keep"``) or removes it (``"remove"``).

    Raises StoreError, SourceError, BudgetError or OptionError, each with one line. Until the end everything is in
    ``out`` + ``.partial``, which is removed with any error; after a kill or cancellation, the same call resumes there.
    """
    check_choice("on_cancel", on_cancel, ON_CANCEL)
    opened = store if isinstance(store, Store) else open_store(store)
    opened.check_one_graph("an order by hops", takes_types=True)
    target, budget = _check_request(opened, out, order, host_budget)
    shares = divide(_sizes(opened), budget, ordering=True)
    force = force or out is None
    key = {
        "ooc": __version__,
        "input": {"store": str(opened.path.resolve()), "metadata": digest(opened.path)},
        "options": {"order": order},
    }
    with workplace(target, key=key, force=force, in_place=out is None, on_cancel=on_cancel, listener=listener) as work:
        if not work.written:
            need = disk_bytes_for_order(opened) - work.written_bytes()
            check_disk(f"ordering the rows of {opened.name}", need, work.folder)
            name = opened.name if out is None else target.name.removesuffix(".ooc")
            write_in_order(opened, work, name=name, shares=shares)
    return open_store(target)


def demand(
    store: str | Path,
    out: str | Path | None = None,
    *,
    order: str = "hop",
    host_budget: int | str | None = None,
    force: bool = False,
) -> dict[str, Any]:
    """Return what ``reorder`` with these arguments would take: bytes on the disk of ``target``, besides the store, and
    memory.

    Raises as that would, except where the disk or the budget is too small.
    """
    opened = open_store(store)
    target, budget = _check_request(opened, out, order, host_budget)
    if out is not None:
        check_target(target, force=force)
    return {
        "target": str(target),
        "disk_bytes": disk_bytes_for_order(opened),
        "disk_free_bytes": shutil.disk_usage(target.parent).free,
        "least_memory_bytes": least_budget_bytes(_sizes(opened), ordering=True),
        "memory_bytes": budget,
    }


def _check_request(store: Store, out: str | Path | None, order: str, host_budget: int | str | None) -> tuple[Path, int]:
    """Return the target, and the bytes to work in; raise for invalid arguments."""
    check_choice("order", order, ORDERS)
    if order != "hop":
        raise OptionError(f"rows cannot be put in the order {order!r}; give 'hop', or convert again for the source's")
    # Where the store's path is a link, what it leads to is replaced.
    target = store.path.resolve() if out is None else resolved(Path(out))
    check_folder(target.parent)
    return target, budget_bytes_of(host_budget)


def _sizes(store: Store) -> Sizes:
    parts = store.parts
    return Sizes(
        name=store.name,
        num_nodes=sum(parts.nodes.values()),
        num_edges=store.num_edges,
        num_features=max(parts.features.values()),
        edge_numbers=store.has_edge_weight + max(parts.edge_features.values(), default=0),
        feature_entries=store.sparse_features.entries if store.sparse_features is not None else None,
    )


def write_in_order(store: Store, work: Workplace, *, name: str, shares: Shares) -> None:
    """Write ``store`` in hop order, as a store called ``name``, to that of ``work``."""
    parts, x = store.parts, store.sparse_features
    orders = _hop_order(store, work)
    labelled = orders[parts.labelled]
    _write_relations(store, orders, work, shares)
    for kind, order in orders.items():
        of_labelled = ["y", "perm", "ids", *(f"split/{split}" for split in SPLITS)]
        of_kind = of_labelled if kind == parts.labelled else [of_nodes(kind, "perm"), of_nodes(kind, "ids")]
        for array in (*of_kind, features_name(kind)):
            if store.has(array):
                rows = _rows_of(store.array(array))
            elif array.endswith("/perm"):  # of another type than the labelled one, in the source's order so far
                rows = Rows(array, order.places.shape, np.dtype(np.int64), np.arange)
            else:
                continue
            most = shares.feature_rows if array == features_name(kind) else min(shares.label_rows, rows.rows_at_once())
            _write_moved([rows], _row_moves(order.places, most), work, f"moving {array}")
    if x is not None:
        starts = _write_starts(x, labelled.places, work)
        moves = _row_moves(labelled.places, shares.feature_rows, x, starts)
        _write_moved([_rows_of(x.indices), _rows_of(x.values)], moves, work, "moving x")
    hops = {kind: (order.hops, order.train_hops) for kind, order in orders.items()}
    attributes = {
        **store.attributes,
        **({} if store.types is None else replace(store.types, hops=hops).attributes()),
        "name": name,
        "order": "hop",
        "hops": list(labelled.hops),
        "train_hops": list(labelled.train_hops),
        "source": {**store.source, "order": "hop"},
        "created": work.journal.created,
    }
    write_groups(work.store, attributes)


def _hop_order(store: Store, work: Workplace) -> dict[str, HopOrder]:
    """Return the hop order by node type, from an earlier process's file if it exists."""
    path = work.scratch / "places.npz"
    if (found := work.journal.result("hop order")) is not None:
        with np.load(path) as places:
            return {
                kind: HopOrder(places[f"arr_{number}"], tuple(hops), tuple(train_hops))
                for number, (kind, hops, train_hops) in enumerate(found["types"])
            }
    orders = hop_order(store, work.listener)
    work.scratch.mkdir(exist_ok=True)
    with path.open("wb") as file:
        np.savez(file, *(order.places for order in orders.values()))
    found = {"types": [(kind, order.hops, order.train_hops) for kind, order in orders.items()]}
    work.journal.finish("hop order", found)
    return orders


def _write_relations(store: Store, orders: Mapping[str, HopOrder], work: Workplace, shares: Shares) -> None:
    """Write both directions of the edges of all types; directions that share files share them again."""
    written: dict[tuple[int, int], str] = {}
    for relation, edges in store.parts.edges.items():
        for side, (rows, columns) in (("in", relation[::-2]), ("out", relation[::2]))[: 1 if store.undirected else 2]:
            direction = f"{relation.group}{side}"
            file = (store.topology(direction)[1].path / METADATA_FILE).stat()
            key = file.st_dev, file.st_ino
            if key in written:
                link(work.store / written[key], work.store / direction)
                continue
            written[key] = direction
            _write_edges(store, direction, orders[rows].places, orders[columns].places, edges, work, shares)


def _write_edges(
    store: Store, direction: str, rows: Places, columns: Places, edges: int, work: Workplace, shares: Shares
) -> None:
    """Write the ``edges`` of a direction, whose ends move to these places."""
    form, values = KeyForm(max(len(rows), len(columns)), len(rows)), ValueForm.of_store(store, direction)
    called = direction.replace("/", " ")
    spread_stage, stage = f"moved {called}-edges", f"ordered {called}-edges"
    # Not the folder of the conversion before, which tidies up whenever it is called.
    to = Direction(work.store, direction, stage, work.scratch / spread_stage, form)
    moved = _count_edges(_moved_edges(store, direction, rows, columns, form, values, shares.edges, edges))
    task, parts = f"reading {called}-edges", parts_for(edges, shares.sort_keys)
    found = spread(work, spread_stage, moved, {"buckets": to}, task=task, total=edges, parts=parts)
    write_direction(work, to, found["buckets"], values, shares)
    if not store.has(f"{direction}/self_loops"):
        shutil.rmtree(work.store / direction / "self_loops", ignore_errors=True)


def _count_edges(blocks: Iterator[Edges]) -> Pieces:
    """Yield ``blocks``, made by a separate thread, in the form that ``spread`` takes."""
    done = 0
    with closing(ahead(blocks, name="ooc-read", most=2)) as pieces:
        for edges in pieces:
            done += len(edges)
            yield done, [("buckets", edges)]


def _moved_edges(
    store: Store,
    direction: str,
    row_places: Places,
    places: Places,
    form: KeyForm,
    values: ValueForm,
    size: int,
    edges: int,
) -> Iterator[Edges]:
    """Yield the edges of a direction as keys of their ends' new places, with their data, about ``size`` at a time."""
    indptr, indices = store.topology(direction)
    # As many rows as have one block of edges: sparse rows then do not come as many small blocks.
    window = min(_WINDOW_ROWS, max(1, size * len(row_places) // max(1, edges)))
    unsigned = np.dtype(f"u{places.itemsize}")
    for row, stop_row in ranges(len(row_places), window):
        offsets = indptr.read(row, stop_row + 1)
        rows = row_places[row:stop_row].astype(np.uint64) << np.uint64(form.bits)
        for start in range(int(offsets[0]), int(offsets[-1]), size):
            stop = min(start + size, int(offsets[-1]))
            ends = np.clip(offsets, start, stop)
            keys = np.repeat(rows, ends[1:] - ends[:-1])
            columns = indices.read(start, stop)
            check_range(indices, columns, len(places))
            keys |= places.take(columns).view(unsigned)
            moved = values.ones(keys)
            for name, array in zip(values.names, store.edge_data(direction), strict=True):
                moved[name] = array.read(start, stop)
            yield moved


Moves = Iterator[tuple[int, int, npt.NDArray[np.int64]]]
"""Ranges of things to move, and their new places."""


def _row_moves(places: Places, block_rows: int, x: SparseArray | None = None, starts: AnyArray | None = None) -> Moves:
    """Yield the moves of all rows, or of their entries in ``x``, whose rows begin at ``starts`` in the new order."""
    for row, stop in ranges(len(places), block_rows):
        to = places[row:stop].astype(np.int64)
        if x is None or starts is None:
            yield row, stop, to
        else:
            ends = x.indptr.read(row, stop + 1)
            to = np.repeat(starts[to] - ends[:-1], np.diff(ends)) + np.arange(ends[0], ends[-1])
            yield int(ends[0]), int(ends[-1]), to


def _write_starts(x: SparseArray, places: Places, work: Workplace) -> npt.NDArray[np.int64]:
    """Write and return where each row's entries begin in the new order [N + 1]."""
    starts = np.zeros(x.shape[0] + 1, dtype=np.int64)
    for start, stop in ranges(x.shape[0], _WINDOW_ROWS):
        starts[places[start:stop].astype(np.int64) + 1] = np.diff(x.indptr.read(start, stop + 1))
    np.cumsum(starts, out=starts)
    shutil.rmtree(work.store / x.indptr.name, ignore_errors=True)
    with ArrayWriter(work.store, x.indptr.name, starts.shape, starts.dtype) as writer:
        writer.append(starts)
    return starts


class Rows(NamedTuple):
    """The rows of the array ``name`` that ``read`` returns from one row to another, to be written to other places."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[int, int], AnyArray]

    def rows_at_once(self) -> int:
        """Whether few rows are moved together, since texts may be long."""
        return max(1, _ID_BLOCK_BYTES // (math.prod(self.shape[1:]) * self.dtype.itemsize))


def _rows_of(array: Array) -> Rows:
    return Rows(array.name, array.shape, array.dtype, array.read)


def _write_moved(arrays: Sequence[Rows], moves: Moves, work: Workplace, task: str) -> None:
    """Write ``arrays`` with their rows in other places."""
    folder, journal, stage = work.store, work.journal, task.replace("/", " ")
    if journal.result(stage) is not None:
        return
    for array in arrays:
        shutil.rmtree(folder / array.name, ignore_errors=True)
    scatters = [RowScatter(folder, array.name, array.shape, array.dtype) for array in arrays]

    with reported(work.listener, task, arrays[0].shape[0], "entries" if arrays[1:] else "nodes") as advance:
        for start, stop, to in moves:
            order = np.argsort(to, kind="stable")
            for array, scatter in zip(arrays, scatters, strict=True):
                scatter.put(to[order], array.read(start, stop)[order])
            advance(stop)
        for scatter in scatters:
            scatter.close()
        journal.finish(stage, {})
