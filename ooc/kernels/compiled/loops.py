# SPDX-License-Identifier: Apache-2.0
"""What every compiled loop over edges does alike: which neighbours a row has, and what dropout leaves of them.

A row's edges are taken ``EDGES`` at a time, from its own first edge on, so that what a row comes to depends on nothing
but its edges, and what is made of them at a time fits the cache, however many there are.
"""

from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from numba import njit
from numba.core.caching import FunctionCache
from torch import Tensor

from ooc.errors import StoreError
from ooc.kernels.compiled.lanes import prefetch
from ooc.kernels.dropout.edges import UNSORTED, EdgeDropout
from ooc.kernels.edges import AnyIntegers, SelfLoops, TileEdges, highest_row
from ooc.plan.workload import Direction

EDGES = 64
"""Of a row at a time: their neighbours' rows are read more than once, which takes no longer than once while they are in
the cache."""
AHEAD = 8
"""How many edges before its own turn a neighbour's row is fetched."""


def _written() -> str:
    """What tells the text of all loops from that of another version."""
    folder = Path(__file__).parent
    return sha256(b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))).hexdigest()


_WRITTEN = _written()


class _Cache(FunctionCache):
    """numba's, which looks at no text but that of the module where a function is, as to whether it has changed."""

    def _index_key(self, signature: Any, codegen: Any) -> Any:
        return *super()._index_key(signature, codegen), _WRITTEN


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A loop that other threads run beside, compiled once and kept in numba's cache. It allocates nothing and counts no
    references, which took as long as the rest: what it needs it is given."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "_nrt": False}
    dispatcher: Any = njit(**options)(function)
    with suppress(RuntimeError):  # where no folder can be written to, every process compiles for itself
        dispatcher._cache = _Cache(function)
    return cast(Callable[..., Any], dispatcher)


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """A part of loops that becomes part of those which call it. To hand over dozens of matrices took as long as half of
    what was done with them, and to compile both as long again."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "_nrt": False, "inline": "always"}
    return cast(Callable[..., Any], njit(**options)(function))


class Lists(NamedTuple):
    """A tile's edges as the loops take them: ``TileEdges``' lists. ``pulled``: rows of the pulled matrix, those at and
    beyond which are absent. ``adds_loops``: every row gets one self-loop instead of those stored."""

    indices_E: AnyIntegers
    offsets_R1: AnyIntegers
    start: int
    pulled: int
    adds_loops: bool


class Masks(NamedTuple):
    """Dropout of edges' coefficients as the loops draw it: ``EdgeDropout``'s numbers."""

    drops: bool
    pulls_in: bool
    threshold: np.uint64
    key: tuple[np.uint64, np.uint64]
    scale: float


def lists_of(tile: TileEdges, pulled: int) -> Lists:
    """Raises :class:`StoreError` where a neighbour is no row."""
    if tile.indices_E.numel():
        highest_row(tile, tile.indices_E)
    is_loop = tile.self_loops is SelfLoops.EXACTLY_ONE
    return Lists(tile.indices_E.numpy(), tile.offsets_R1.numpy(), tile.start, pulled, is_loop)


def masks_of(dropout: EdgeDropout | None, direction: Direction) -> Masks:
    pulls_in = direction is Direction.IN
    if dropout is None:
        return Masks(False, pulls_in, np.uint64(0), (np.uint64(0), np.uint64(0)), 1.0)
    low, high = dropout.key
    return Masks(True, pulls_in, np.uint64(dropout.threshold), (np.uint64(low), np.uint64(high)), dropout.kept_scale)


def check_order(is_ordered: bool) -> None:
    """Raises :class:`StoreError` for what a loop has found where dropout tells repeated edges apart."""
    if not is_ordered:
        raise StoreError(UNSORTED)


def scratch(heads: int, matrices: int, dtype: npt.DTypeLike) -> tuple[Any, Any]:
    """What a loop writes to: neighbours and places of a row's edges, and the last one before them (``gather``,
    ``draw``); and so many matrices of a number for every head and edge."""
    of_edges = np.empty(EDGES, np.int64), np.empty(EDGES, np.int64), np.empty(2, np.int64)
    return of_edges, tuple(np.empty((heads, EDGES), dtype) for _ in range(matrices))


def array(rows: Tensor) -> npt.NDArray[Any]:
    """A matrix as the loops take it, its rows one after the other; bfloat16 as int16."""
    rows = rows.contiguous()
    return (rows.view(torch.int16) if rows.dtype == torch.bfloat16 else rows).numpy()


@compiled
def gather(lists, row, cursor, near_E, places_E):
    """The row's next edges, those from ``cursor`` on that count, ``EDGES`` at most: neighbours, and which of the tile's
    edges they are; an added self-loop comes last and after all of the tile's, the row's in their order. → how many, and
    where to go on: no further than the row's end, or one behind it where self-loops are added."""
    own, stop, count = lists.start + row, lists.offsets_R1[row + 1], 0
    while cursor < stop and count < EDGES:
        other = lists.indices_E[cursor]
        if other < lists.pulled and not (lists.adds_loops and other == own):
            near_E[count], places_E[count] = other, cursor
            count += 1
        cursor += 1
    if lists.adds_loops and cursor == stop and count < EDGES:
        if own < lists.pulled:
            near_E[count], places_E[count] = own, len(lists.indices_E) + row
            count += 1
        cursor += 1
    return count, cursor


@compiled
def fetch(lists, matrix, edge):
    """Have the row of ``matrix`` fetched that the tile's edge ``edge`` pulls, if there is such an edge."""
    if edge < len(lists.indices_E) and lists.indices_E[edge] < lists.pulled:
        prefetch(matrix, lists.indices_E[edge])


@compiled
def draw(masks, lists, row, near_E, count, first_head, scale_HE, before):
    """What dropout multiplies the coefficients of these edges by, for every head. ``before``: the last of the row's
    neighbours before these (-1: none), and how many before that are the same, which are brought up to date. → whether
    neighbours are in ascending order."""
    own, low, key = lists.start + row, 0xFFFFFFFF, masks.key
    for edge in range(count):
        other = near_E[edge]
        if other < before[0] and other != own:
            return False
        before[1] = before[1] + 1 if other == before[0] else 0
        before[0] = other
        target, source = (own, other) if masks.pulls_in else (other, own)
        high = ((target >> 32) << 8 | (source >> 32)) << 16
        head = 0
        while head < len(scale_HE):
            last = (high | (first_head + head) // 4) & low
            words = _philox(
                np.uint64(target & low), np.uint64(source & low), np.uint64(before[1]), np.uint64(last), key
            )
            for lane in range((first_head + head) % 4, 4):
                if head < len(scale_HE):
                    scale_HE[head, edge] = masks.scale if words[lane] >= masks.threshold else 0.0
                    head += 1
    return True


@compiled
def _philox(c0, c1, c2, c3, key):
    """``dropout.edges.philox`` of one count, of 32-bit numbers in 64 bits each."""
    (k0, k1), low, half = key, np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(10):
        left, right = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (right >> half) ^ c1 ^ k0, right & low, (left >> half) ^ c3 ^ k1, left & low
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return c0, c1, c2, c3
