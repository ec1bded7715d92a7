# SPDX-License-Identifier: Apache-2.0
"""What every compiled loop over edges does alike: it walks over the edges of one row after the other.

A row's edges are taken ``EDGES`` at a time, from its own first edge on, so that what a row comes to depends on nothing
but its edges, and what is made of them at a time fits the cache, however many there are:

    for row in range(rows):
        while gather(walk, row):
            count = walk.at[TAKEN]              # edges that ``walk`` has now
"""

import fcntl
import pickle
from collections.abc import Callable
from contextlib import ExitStack, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from numba import njit
from numba.core.caching import FunctionCache, IndexDataCacheFile
from torch import Tensor

from ooc.errors import StoreError
from ooc.kernels.compiled.lanes import TOGETHER, prefetch
from ooc.kernels.dropout.edges import UNSORTED, EdgeDropout
from ooc.kernels.edges import AnyIntegers, SelfLoops, TileEdges, highest_row
from ooc.kernels.memory import EDGES as EDGES
from ooc.plan.workload import Direction

ROW, CURSOR, FETCHED, LAST, REPEATS, TAKEN = range(6)
"""Where a walk is (``Walk.at``)."""


_WRITTEN = sha256(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))).hexdigest()
"""What tells the text of all loops from that of another version."""


class _Index(IndexDataCacheFile):
    """Which compilations a cache has."""

    def _load_index(self) -> Any:
        try:
            return super()._load_index()
        except (AttributeError, ImportError, EOFError, pickle.UnpicklingError):
            return {}  # another version's, of types that are there no longer, or a part of one


class _Cache(FunctionCache):
    """numba's, which looks at no text but that of the module where a function is, as to whether it has changed."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file = _Index(self._cache_path, self._impl.filename_base, self._impl.locator.get_source_stamp())
        self.lock_path = Path(self._cache_path, f"{self._impl.filename_base}.lock")

    def _index_key(self, signature: Any, codegen: Any) -> Any:
        return *super()._index_key(signature, codegen), _WRITTEN


_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "_nrt": False, "no_cfunc_wrapper": True}
"""A loop allocates nothing and counts no references, which took as long as the rest: what it needs it is given."""


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A loop that other threads run beside, compiled once and kept in numba's cache."""
    dispatcher: Any = njit(**_OPTIONS)(function)
    with suppress(RuntimeError):  # where no folder can be written to, every process compiles for itself
        dispatcher._cache = _Cache(function)
        dispatcher.compile = _by_one_process(dispatcher.compile, dispatcher._cache.lock_path)
    return cast(Callable[..., Any], dispatcher)


def _by_one_process(compile_loop: Callable[[Any], Any], lock_path: Path) -> Callable[[Any], Any]:
    """``compile_loop``, which finds in the cache what another process has compiled meanwhile: of several that begin
    together one compiles."""

    def compile_alone(signature: Any) -> Any:
        with ExitStack() as held:
            with suppress(OSError):  # where files cannot be locked, each compiles for itself
                # Not flock, which children hold, too, that are forked meanwhile.
                fcntl.lockf(held.enter_context(lock_path.open("w")), fcntl.LOCK_EX)
            return compile_loop(signature)

    return compile_alone


def part(function: Callable[..., Any]) -> Callable[..., Any]:
    """A part of loops, which becomes part of those that call it and is never called otherwise. To hand over dozens of
    matrices took as long as half of what was done with them."""
    options = _OPTIONS | {"no_cpython_wrapper": True, "forceinline": True}
    return cast(Callable[..., Any], njit(**options)(function))


class Masks(NamedTuple):
    """Dropout of edges' coefficients as the loops draw it: ``EdgeDropout``'s numbers, and the first of the heads."""

    drops: bool
    pulls_in: bool
    threshold: np.uint64
    key: tuple[np.uint64, np.uint64]
    scale: float
    first_head: int

    @classmethod
    def of(cls, dropout: EdgeDropout | None, direction: Direction, first_head: int) -> "Masks":
        pulls_in = direction is Direction.IN
        if dropout is None:
            return cls(False, pulls_in, np.uint64(0), (np.uint64(0), np.uint64(0)), 1.0, first_head)
        key = np.uint64(dropout.key[0]), np.uint64(dropout.key[1])
        return cls(True, pulls_in, np.uint64(dropout.threshold), key, dropout.kept_scale, first_head)


class Walk(NamedTuple):
    """A tile's edges, ``TileEdges``' lists, and where a walk over them is. ``pulled``: rows of the pulled matrix, those
    at and beyond which are absent. ``adds_loops``: every row gets one self-loop instead of those stored.

    Of the row's edges that it has now: neighbours, which of the tile's edges they are (an added self-loop is one behind
    these, the row's in their order), and what dropout multiplies their coefficients by. ``at`` is that row, where its
    edges go on, up to where the tile's neighbours have been fetched, the last neighbour, how many before that are the
    same, and how many edges there are now."""

    indices_E: AnyIntegers
    offsets_R1: AnyIntegers
    start: int
    pulled: int
    adds_loops: bool
    masks: Masks
    near_E: npt.NDArray[np.int64]
    place_E: npt.NDArray[np.int64]
    scale_HE: npt.NDArray[Any]
    at: npt.NDArray[np.int64]

    @classmethod
    def over(
        cls, tile: TileEdges, pulled: Tensor, heads: range = range(0), dropout: EdgeDropout | None = None,
        direction: Direction = Direction.IN,
    ) -> "Walk":  # fmt: skip
        """Over a tile whose edges pull rows of a matrix. Raises :class:`StoreError` where a neighbour is no row."""
        if tile.indices_E.numel():
            highest_row(tile, tile.indices_E)
        return cls(
            *(tile.indices_E.numpy(), tile.offsets_R1.numpy(), tile.start, len(pulled)),
            tile.self_loops is SelfLoops.EXACTLY_ONE,
            Masks.of(dropout, direction, heads.start),
            *(np.empty(EDGES, np.int64), np.empty(EDGES, np.int64)),
            torch.empty(len(heads), EDGES, dtype=computed(pulled)).numpy(),
            np.full(6, -1),
        )


def matrices(walk: Walk, count: int) -> tuple[npt.NDArray[Any], ...]:
    """So many of a number for every head and every edge that there is at a time."""
    return tuple(np.empty_like(walk.scale_HE) for _ in range(count))


def computed(pulled: Tensor) -> torch.dtype:
    """The type that rows of a matrix are computed with, and results have."""
    return torch.float32 if pulled.dtype == torch.bfloat16 else pulled.dtype


def array(rows: Tensor) -> npt.NDArray[Any]:
    """A matrix as the loops take it, its rows one after the other; bfloat16 as int16."""
    rows = rows.contiguous()
    return (rows.view(torch.int16) if rows.dtype == torch.bfloat16 else rows).numpy()


@part
def gather(walk, row):
    """Have the next edges of ``row`` that count, ``EDGES`` at most, an added self-loop the last of them. The last one's
    neighbour comes again until there are whole ``TOGETHER``. → whether there are any. StoreError where dropout tells
    repeated edges apart and neighbours are not in ascending order."""
    at, near_E, own, count = walk.at, walk.near_E, walk.start + row, 0
    if at[ROW] != row:
        at[ROW], at[CURSOR], at[LAST] = row, walk.offsets_R1[row], -1
    cursor, stop = at[CURSOR], walk.offsets_R1[row + 1]
    while cursor < stop and count < EDGES:
        other = walk.indices_E[cursor]
        if other < walk.pulled and not (walk.adds_loops and other == own):
            near_E[count], walk.place_E[count] = other, cursor
            count += 1
        cursor += 1
    if walk.adds_loops and cursor == stop and count < EDGES:
        if own < walk.pulled:
            near_E[count], walk.place_E[count] = own, len(walk.indices_E) + row
            count += 1
        cursor += 1
    at[CURSOR], at[TAKEN] = cursor, count
    for edge in range(count, -(-count // TOGETHER) * TOGETHER):
        near_E[edge] = near_E[count - 1]
    if walk.masks.drops:
        draw(walk, own, count)
    return count > 0


@part
def fetch(walk, matrix, times):
    """While a row's edges are computed with, have rows of ``matrix`` fetched that the ``EDGES`` behind them pull; now
    as many as leave the others to as many of these calls. So memory has something to do all the time."""
    at = walk.at
    begin = max(at[FETCHED], at[CURSOR])
    end = begin + (min(at[CURSOR] + EDGES, len(walk.indices_E)) - begin) // times
    for place in range(begin, end):
        if walk.indices_E[place] < walk.pulled:
            prefetch(matrix, walk.indices_E[place], matrix.shape[1])
    at[FETCHED] = max(begin, end)


@part
def draw(walk, own, count):
    """What dropout multiplies the coefficients of the edges by, for every head."""
    at, masks, scale_HE, low = walk.at, walk.masks, walk.scale_HE, 0xFFFFFFFF
    for edge in range(count):
        other = walk.near_E[edge]
        if other < at[LAST] and other != own:
            raise StoreError(UNSORTED)
        at[REPEATS] = at[REPEATS] + 1 if other == at[LAST] else 0
        at[LAST] = other
        target, source = (own, other) if masks.pulls_in else (other, own)
        high = ((target >> 32) << 8 | (source >> 32)) << 16
        head = 0
        while head < len(scale_HE):
            last = (high | (masks.first_head + head) // 4) & low
            words = _philox(
                np.uint64(target & low), np.uint64(source & low), np.uint64(at[REPEATS]), np.uint64(last), masks.key
            )
            for lane in range((masks.first_head + head) % 4, 4):
                if head < len(scale_HE):
                    scale_HE[head, edge] = masks.scale if words[lane] >= masks.threshold else 0.0
                    head += 1


@part
def _philox(c0, c1, c2, c3, key):
    """``dropout.edges.philox`` of one count, of 32-bit numbers in 64 bits each."""
    (k0, k1), low, half = key, np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(10):
        left, right = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (right >> half) ^ c1 ^ k0, right & low, (left >> half) ^ c3 ^ k1, left & low
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return c0, c1, c2, c3


@part
def clear(out, row):
    """Have a row of zeros."""
    for column in range(out.shape[1]):
        out[row, column] = 0
