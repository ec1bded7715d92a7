# SPDX-License-Identifier: Apache-2.0
"""Breadth-first search from rows backwards over in-edges, which stay on disk.

Layer K of a GNN computes the scored rows, layer K-1 also their in-neighbours, and so on; rows further away cannot reach
the loss. Each row's in-edges are read at most once, when it is newly reached; memory is a byte per node and a few
megabytes.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ooc.errors import StoreError
from ooc.events import Listener, ignore, reported
from ooc.storage.array import Array
from ooc.storage.store import Store

Mask = npt.NDArray[np.bool_]
Hops = npt.NDArray[np.unsignedinteger[Any]]
Ids = npt.NDArray[np.int64]

_ROWS = 1 << 17
_EDGES = 1 << 19
_GAP_EDGES = 1 << 15
"""Edges of unwanted rows that are read along instead of skipped: a read costs about as much as 128 KiB."""


def nearest(store: Store, seeds: Sequence[Mask], most: int, listener: Listener = ignore) -> Hops:
    """Return the distance and the set of the nearest seed: ``d * len(seeds) + k`` for rows d steps backwards over
    in-edges.

    ``seeds`` are masks, each ``[N]``; k is the first of them with a row at this distance. With one mask it is the
    distance. The result is ``[N]`` in the smallest unsigned dtype; its largest value stands for rows more than ``most``
    steps away.
    """
    return nearest_by_type(store, seeds, most, listener)[""]


def nearest_by_type(store: Store, seeds: Sequence[Mask], most: int, listener: Listener = ignore) -> dict[str, Hops]:
    """Return the same for the rows of every node type, with seeds of the labelled type; "" in a homogeneous store."""
    if any(mask.shape != (store.num_nodes,) for mask in seeds) or most < 0:
        raise ValueError(f"seeds of shapes {[mask.shape for mask in seeds]}, {most} steps, {store.num_nodes} rows")
    nodes, kinds = store.node_counts, len(seeds)
    type_ = np.min_scalar_type(kinds * (most + 1))
    unreached = np.iinfo(type_).max
    found: dict[str, Hops] = {name: np.full(count, unreached, dtype=type_) for name, count in nodes.items()}
    for kind in reversed(range(kinds)):
        found[store.parts.labelled][seeds[kind]] = kind
    edges = [(one.target, one.source, *store.topology(f"{one.group}in")) for one in store.parts.edges]

    def count(hop: int) -> int:
        return sum(_count_between(rows, kinds * hop, kinds * (hop + 1)) for rows in found.values())

    reached, done = count(0), 0
    with reported(listener, "following in-edges", store.num_edges, "edges") as advance:
        for hop in range(1, most + 1):
            if reached == sum(nodes.values()):
                break
            for kind in range(kinds):  # The first mask's rows come first, and what they reach stays theirs.
                value = kinds * hop + kind
                for target, source, indptr, indices in edges:
                    into = found[source]
                    for sources in _source_blocks(indptr, indices, found[target], value - kinds, len(into)):
                        into[sources[into.take(sources) == unreached]] = value
                        done += len(sources)
                        advance(done)
            newly = count(hop)
            if not newly:
                break
            reached += newly
        advance(store.num_edges)
    return found


def farthest_of(hops: Hops) -> int:
    """Return the largest distance in ``hops`` of any reached row; 0 if there is none."""
    return int(hops.max(where=hops != np.iinfo(hops.dtype).max, initial=0))


def check_range(array: Array, entries: npt.NDArray[np.integer[Any]], rows: int) -> None:
    """Raise StoreError where ``entries`` of a topology are no rows of the store, since they would be used as
    offsets."""
    if len(entries) and (int(entries.min()) < 0 or int(entries.max()) >= rows):
        raise StoreError(f"{array.name}: there are indices outside 0 to {rows - 1} (ooc verify finds more)")


def _count_between(found: Hops, low: int, high: int) -> int:
    blocks = (found[start : start + _ROWS] for start in range(0, len(found), _ROWS))
    return sum(int(np.count_nonzero((block >= low) & (block < high))) for block in blocks)


def _source_blocks(
    indptr: Array, indices: Array, found: Hops, value: int, sources: int
) -> Iterator[npt.NDArray[np.integer[Any]]]:
    """Yield the sources, below ``sources``, of all in-edges of the rows found as ``value``, in pieces."""
    for start in range(0, len(found), _ROWS):
        wanted = found[start : start + _ROWS] == value
        here = np.flatnonzero(wanted)
        if not len(here):
            continue
        first, last = int(here[0]), int(here[-1])
        offsets: Ids = indptr.read(start + first, start + last + 2)
        yield from _entries(wanted[first : last + 1], offsets, indices, sources)


def _entries(wanted: Mask, offsets: Ids, indices: Array, rows_in_all: int) -> Iterator[npt.NDArray[np.integer[Any]]]:
    """Yield entries of the ``wanted`` rows ``[n]``, which are between the ``offsets`` ``[n + 1]``."""
    rows = np.flatnonzero(wanted & (offsets[1:] > offsets[:-1]))
    if not len(rows):
        return
    borders = np.flatnonzero(offsets[rows[1:]] - offsets[rows[:-1] + 1] > _GAP_EDGES) + 1
    for run in np.split(rows, borders):
        first, stop = int(run[0]), int(run[-1]) + 1
        bounds, dense = offsets[first : stop + 1], len(run) == stop - first
        for low in range(int(bounds[0]), int(bounds[-1]), _EDGES):
            high = min(low + _EDGES, int(bounds[-1]))
            entries = indices.read(low, high)
            check_range(indices, entries, rows_in_all)
            if dense:
                yield entries
            else:
                # Only the rows that have entries here: a long run would otherwise be gone through for each piece.
                begin = int(np.searchsorted(bounds, low, side="right")) - 1
                end = int(np.searchsorted(bounds, high, side="left"))
                ends = np.clip(bounds[begin : end + 1], low, high)
                yield entries[np.repeat(wanted[first + begin : first + end], ends[1:] - ends[:-1])]
