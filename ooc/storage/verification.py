# SPDX-License-Identifier: Apache-2.0
"""Verification of a store's contents. Everything is read once or twice, in blocks; memory is bounded."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ooc.errors import StoreError
from ooc.events import Listener, ignore, reported
from ooc.storage.array import AnyArray, Array
from ooc.storage.mixing import GOLDEN, mixed
from ooc.storage.store import SPLITS, Store
from ooc.storage.types import features_name, of_nodes

_ROWS = 1 << 14
_EDGES = 1 << 18
_BLOCK_BYTES = 8 << 20
_SEEDS = np.uint64(0xD1B54A32D192ED03), np.uint64(0x8CB92BA72F3D8DD7)

Ids = npt.NDArray[np.int64]


def verify(store: Store, listener: Listener = ignore) -> list[str]:
    """Return what is wrong with ``store``, a line each; empty when it is intact.

    Checks checksums and completeness of all arrays, labels, splits and original ids, and that features are finite. In
    each direction it checks row offsets, sorted indices in range, finite edge data, and self-loop counts. It also
    checks that both directions have the same edges with the same data, by two sums of hashes over all edges, which do
    not depend on their order. StoreError where the store is replaced meanwhile.
    """
    with store.unreplaced():
        if problems := _check_chunks(store, listener):
            return problems  # Further checks would report the same damage again.
        problems = _check_nodes(store, listener)
        for kind in store.parts.nodes:
            problems += _check_features(store, features_name(kind), listener)
        for relation in store.parts.edges:
            problems += _check_topology(store, relation.group, listener)
        return problems


def _check_topology(store: Store, group: str, listener: Listener) -> list[str]:
    """Yield what is wrong with the edges in ``group``, ``""`` or ``"edges/author__writes__paper/"``."""
    inward = _check_direction(store, f"{group}in", listener)
    problems = inward.problems
    outward = inward if store.undirected else _check_direction(store, f"{group}out", listener)
    if outward is not inward:
        problems = problems + outward.problems
    if not problems and inward.edges != outward.reversed_edges:
        sides = "in-edges and their own reverse" if store.undirected else "in-edges and out-edges"
        problems.append(f"{group or 'topology'}: {sides} are not each other's transpose")
    return problems


def _check_chunks(store: Store, listener: Listener) -> list[str]:
    arrays = [store.array(name) for name in store.arrays()]
    problems, done = [], 0
    total = sum(array.num_chunks * array.chunk_bytes for array in arrays)
    with reported(listener, "checking checksums", total, "bytes") as advance:
        for array in arrays:
            try:
                sums = array.checksums()
                for index in range(array.num_chunks):
                    if array.checksum(index) != sums[index]:
                        problems.append(f"{array.name}: chunk {array.chunk_path(index)} has another checksum")
                    done += array.chunk_bytes
                    advance(done)
            except StoreError as error:
                problems.append(str(error))
    return problems


def _check_nodes(store: Store, listener: Listener) -> list[str]:
    found: dict[str, str] = {}
    sizes = dict.fromkeys(SPLITS, 0)
    called = "graphs" if store.num_graphs else "nodes"
    with reported(listener, f"checking {called}", store.num_graphs or store.num_nodes, called) as advance:
        for start, y in store.array("y").blocks(max(1, _EDGES // store.array("y").columns)):
            stop = start + len(y)
            if not store.task.valid(y, store.num_classes).all():
                meaning = store.task.meaning(store.num_classes)
                found.setdefault("y", f"y: there are labels outside their task: {meaning}")
            elif not store.num_incomplete and store.task.incomplete(y).any():
                found.setdefault("y", f"y: {called} have some of their labels only, and the store does not say so")
            unlabelled = ~store.task.labelled(y)
            masks = {}
            for split in SPLITS:
                mask = store.array(f"split/{split}").read(start, stop)
                masks[split] = mask
                sizes[split] += int(np.count_nonzero(mask))
                if (mask & unlabelled).any():
                    found.setdefault(split, f"split/{split}: there are {called} without a label")
            if (masks["train"] & (masks["valid"] | masks["test"])).any():
                found.setdefault("overlap", "split: train overlaps with valid or test")
            advance(stop)
    if sizes != store.split_sizes:
        found["sizes"] = f"split: {sizes} {called} are in the splits, {store.split_sizes} are said to be"
    of_others = [kind for kind in store.parts.hops if kind != store.parts.labelled]
    perms = {"perm": store.num_nodes} | {of_nodes(kind, "perm"): store.node_counts[kind] for kind in of_others}
    if store.num_graphs and (problem := _offsets_problem(store.array("graphs/indptr"), store.num_nodes)):
        found["graphs"] = problem
    for name, count in perms.items():
        ids, wanted = _PairSums(), _PairSums()
        for start, perm in store.array(name).blocks(_EDGES):
            ids.add(perm, perm)
            rows = np.arange(start, start + len(perm))
            wanted.add(rows, rows)
        if ids != wanted:
            found[name] = f"{name}: the original ids are not 0 to {count - 1}, each once"
    return list(found.values())


def _check_features(store: Store, name: str, listener: Listener) -> list[str]:
    if store.sparse_features is not None:
        return _check_direction(store, name, listener).problems
    if not store.has(name):
        return []
    x = store.array(name)
    with reported(listener, "checking features", x.shape[0], "nodes") as advance:
        for start, rows in x.blocks(max(1, _BLOCK_BYTES // x.row_bytes)):
            if not (finite := np.isfinite(rows)).all():
                at, column = np.argwhere(~finite)[0]
                return [f"{name}: feature {column} of node {start + at} is {rows[at, column]}"]
            advance(start + len(rows))
    return []


@dataclass
class _PairSums:
    """Two 64-bit sums over hashes of pairs: equal for equal multisets, whatever their order."""

    totals: tuple[int, ...] = (0, 0)

    def add(self, left: AnyArray, right: AnyArray, carried: npt.NDArray[np.uint64] | None = None) -> None:
        """Add pairs; ``carried``: a hash of each pair's data."""
        pairs = mixed(left.astype(np.uint64) * GOLDEN) + right.astype(np.uint64)
        if carried is not None:
            pairs = mixed(pairs * GOLDEN) + carried
        sums = (int(mixed(pairs ^ seed).sum(dtype=np.uint64)) for seed in _SEEDS)
        self.totals = tuple((total + more) % 2**64 for total, more in zip(self.totals, sums, strict=True))


@dataclass
class _Direction:
    """The sums over one direction's (row, column) and (column, row)."""

    problems: list[str] = field(default_factory=list)
    edges: _PairSums = field(default_factory=_PairSums)
    reversed_edges: _PairSums = field(default_factory=_PairSums)


def _check_direction(store: Store, side: str, listener: Listener) -> _Direction:
    """Return the sums of a direction's edges; or, with ``side`` x, of features' entries, each column at most once in a
    row."""
    result = _Direction()
    indptr, indices = store.topology(side)
    of_features = side == "x"
    height, columns_in_all = indptr.shape[0] - 1, store.neighbours(side)
    if problem := _offsets_problem(indptr, indices.shape[0]):
        result.problems.append(problem)
        return result
    found: dict[str, str] = {}
    data = store.edge_data(side)
    most = min(_EDGES, *(max(1, _BLOCK_BYTES // array.row_bytes) for array in data)) if data else _EDGES
    last: tuple[int, int] = (-1, -1)
    known = None if of_features else store.self_loops(side)
    counted = store.array(f"{side}/self_loops") if known and side.rpartition("/")[2] == "in" else None
    loops_total = done = 0
    graphs = store.array("graphs/indptr").read() if store.num_graphs and not of_features else None
    task = ("checking features", "entries") if of_features else (f"checking {side}-edges", "edges")
    with reported(listener, task[0], indices.shape[0], task[1]) as advance:
        for start in range(0, height, _ROWS):
            stop = min(start + _ROWS, height)
            loops = np.zeros(stop - start, dtype=np.int64)
            for rows, columns in _edge_blocks(indptr.read(start, stop + 1), indices, start, most):
                if ((columns < 0) | (columns >= columns_in_all)).any():
                    found.setdefault("range", f"{indices.name}: there are indices outside 0 to {columns_in_all - 1}")
                if graphs is not None and (_graph_of(graphs, rows) != _graph_of(graphs, columns)).any():
                    found.setdefault("graphs", f"{indices.name}: there are edges from one graph to another")
                falls = (columns[1:] < columns[:-1] + of_features) & (rows[1:] == rows[:-1])
                if falls.any() or (last[0] == rows[0] and columns[0] < last[1] + of_features):
                    found.setdefault("sorted", f"{indices.name}: there are rows whose indices are not sorted")
                last = (int(rows[-1]), int(columns[-1]))
                if known is not None:
                    loops += np.bincount(rows[rows == columns] - start, minlength=len(loops))
                carried = _hash_edge_data(data, done, done + len(rows), found) if data else None
                result.edges.add(rows, columns, carried)
                result.reversed_edges.add(columns, rows, carried)
                done += len(rows)
                advance(done)
            loops_total += int(loops.sum())
            if counted is not None and not np.array_equal(loops, counted.read(start, stop)):
                found.setdefault("loops", f"{counted.name}: the numbers do not agree with the edges")
    if known is not None and loops_total != known:
        found["total"] = f"{side}: {loops_total} self-loops found, {known} are said to be"
    result.problems = list(found.values())
    return result


def _offsets_problem(indptr: Array, entries: int) -> str | None:
    before = 0
    for start, ends in indptr.blocks(_EDGES):
        if start == 0 and ends[0] != 0:
            return f"{indptr.name}: it starts at {ends[0]}, not at 0"
        if ends[0] < before or (np.diff(ends) < 0).any():
            return f"{indptr.name}: it falls somewhere after row {start}"
        before = int(ends[-1])
    if before != entries:
        return f"{indptr.name}: it ends at {before}, the store has {entries} of them"
    return None


def _graph_of(graphs: AnyArray, rows: AnyArray) -> AnyArray:
    """Return the graph of each of the ``rows`` [n]."""
    return np.searchsorted(graphs, rows, side="right")


def _hash_edge_data(data: list[Array], start: int, stop: int, found: dict[str, str]) -> npt.NDArray[np.uint64]:
    """Return a hash [n] of the data of each of the edges ``start:stop``; numbers that are not finite are reported to
    ``found``."""
    hashes = np.zeros(stop - start, dtype=np.uint64)
    for array in data:
        values = array.read(start, stop)
        if not (finite := np.isfinite(values)).all():
            at = np.argwhere(~finite)[0]
            what = "entry" if array.name.startswith("x/") else "edge"
            found.setdefault(array.name, f"{array.name}: {what} {start + at[0]} has {values[tuple(at)]}")
        for bits in values.view(f"u{array.itemsize}").reshape(len(values), -1).T:
            hashes = mixed(hashes * GOLDEN + bits.astype(np.uint64))
    return hashes


def _edge_blocks(offsets: Ids, indices: Array, first_row: int, most: int) -> Iterator[tuple[Ids, Ids]]:
    """Yield ``(rows, columns)`` of the edges between the ``offsets``, at most ``most`` at a time."""
    row_ids = np.arange(first_row, first_row + len(offsets) - 1)
    for start in range(int(offsets[0]), int(offsets[-1]), most):
        stop = min(start + most, int(offsets[-1]))
        ends = np.clip(offsets, start, stop)
        yield np.repeat(row_ids, ends[1:] - ends[:-1]), indices.read(start, stop).astype(np.int64)
