# SPDX-License-Identifier: Apache-2.0
"""The order of a store's rows.

Hop order sorts them by the number of steps, backwards over in-edges, from the scored nodes (those of any split). Among
rows of equal distance, those that are no further from a training node come first; then the old order decides. So the
rows that reach a scored one within d steps are the first ``hops[d]`` rows of every array. The first ``train_hops[d]``
contain all that reach a training row within d steps, and besides only rows that are less than d steps from another
scored one.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ooc.events import Listener
from ooc.storage.store import SPLITS, Store
from ooc.storage.traversal import farthest_of, nearest_by_type

ORDERS = ("none", "hop")
"""The orders: as in the source, or hop order."""

MOST_HOPS = 126
"""Rows further away than this count as never reached; for models deeper than that, all rows are active."""

_KEY_COUNT = 256
_ROWS = 1 << 17

Places = npt.NDArray[np.signedinteger[Any]]


@dataclass(frozen=True)
class HopOrder:
    """``places`` [N]: the new place of each row; and how many of the first rows are active.

    ``hops[d]``: the rows within d steps of a scored row, exactly. ``train_hops[d]``: rows that contain all within d
    steps of a training row, at most ``hops[d]``. All in-neighbours of the first ``hops[d]`` rows are among the first
    ``hops[d + 1]``, and likewise for ``train_hops``. The last elements hold for any further steps.
    """

    places: Places
    hops: tuple[int, ...]
    train_hops: tuple[int, ...]


def order_bytes(num_nodes: int) -> int:
    """Return the most memory that :func:`hop_order` takes, including its result: places and keys, or two masks."""
    return num_nodes * (_place_type(num_nodes).itemsize + 2)


def hop_order(store: Store, listener: Listener) -> dict[str, HopOrder]:
    """Return the hop order of ``store`` by node type, "" in a homogeneous one, reading its edges in streams."""
    masks = [store.array("split/train").read(), _split_members(store)]
    keys = nearest_by_type(store, masks, MOST_HOPS, listener)  # 2 d, or 2 d + 1 where no training row is so near
    del masks
    ended = max(map(farthest_of, keys.values())) // 2 == MOST_HOPS
    return {name: _order_rows(rows, ended=ended) for name, rows in keys.items()}


def _order_rows(keys: npt.NDArray[np.unsignedinteger[Any]], *, ended: bool) -> HopOrder:
    """Return the order by the key of each row [N]; ``ended``: the search stopped before it had reached all rows."""
    counts = np.zeros(_KEY_COUNT, dtype=np.int64)
    for start in range(0, len(keys), _ROWS):
        counts += np.bincount(keys[start : start + _ROWS], minlength=_KEY_COUNT)
    hops, train_hops = _active(counts, farthest_of(keys) // 2, ended=ended)
    places = np.empty(len(keys), dtype=_place_type(len(keys)))
    following = np.cumsum(counts) - counts  # The place of the next row of each key.
    for start in range(0, len(keys), _ROWS):
        block = keys[start : start + _ROWS]
        order = np.argsort(block, kind="stable")
        here = np.bincount(block, minlength=_KEY_COUNT)
        # In key order, the i-th row of the block is the (i - rows before its key)-th of its key.
        shift = (following - (np.cumsum(here) - here))[block[order]]
        places[start + order] = shift + np.arange(len(order))
        following += here
    return HopOrder(places, hops, train_hops)


def _active(counts: npt.NDArray[np.int64], farthest: int, *, ended: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return ``(hops, train_hops)`` from the number of rows of each key."""
    shells = counts[: 2 * (farthest + 1)].reshape(-1, 2)
    hops = np.cumsum(shells.sum(axis=1)).tolist()
    train_hops = [before + int(count) for before, count in zip([0, *hops[:-1]], shells[:, 0], strict=True)]
    # Other rows of the last shell may be further from the training rows than that.
    train_hops += [hops[-1]] * (train_hops[-1] < hops[-1])
    if ended:  # further rows were not looked for
        hops += [hops[-1]] * (MOST_HOPS - farthest)
        train_hops += [hops[-1]] * (len(hops) - len(train_hops))
        hops.append(int(counts.sum()))
        train_hops.append(hops[-1])
    return tuple(hops), tuple(train_hops)


def _place_type(num_nodes: int) -> np.dtype[Any]:
    return np.dtype(np.int32 if num_nodes <= 2**31 else np.int64)


def _split_members(store: Store) -> npt.NDArray[np.bool_]:
    member = store.array(f"split/{SPLITS[0]}").read()
    for split in SPLITS[1:]:
        for start, rows in store.array(f"split/{split}").blocks(_ROWS):
            member[start : start + len(rows)] |= rows
    return member
