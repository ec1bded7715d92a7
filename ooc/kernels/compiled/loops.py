# SPDX-License-Identifier: Apache-2.0
"""What all compiled loops over edges have in common: they walk over the edges of one row after the other.

A row's edges are taken ``EDGES`` at a time, from its own first edge on. So a row's result depends only on its edges,
and the buffers for them fit the cache, however many edges there are:

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
from ooc.kernels.compiled.lanes import TOGETHER, load, load_halves, load_rows, number, prefetch_line
from ooc.kernels.dropout.edges import UNSORTED, EdgeDropout
from ooc.kernels.edges import AnyIntegers, SelfLoops, TileEdges, highest_row
from ooc.kernels.memory import EDGES as EDGES
from ooc.plan.workload import Direction

ROW, CURSOR, LAST, REPEATS, TAKEN = range(5)
"""The places of a walk's state in ``Walk.at``."""
AHEAD = 32
"""How many edges ahead neighbours' rows are prefetched."""


_SOURCE_DIGEST = sha256(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))).hexdigest()
"""A key of the source text of all loops, which differs between versions."""


class _Index(IndexDataCacheFile):
    """The index of a cache's compilations."""

    def _load_index(self) -> Any:
        try:
            return super()._load_index()
        except (AttributeError, ImportError, EOFError, pickle.UnpicklingError):
            return {}  # from another version, with missing types, or truncated


class _Cache(FunctionCache):
    """numba's cache, whose own check for changes looks only at the module that defines a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file = _Index(self._cache_path, self._impl.filename_base, self._impl.locator.get_source_stamp())
        self.lock_path = Path(self._cache_path, f"{self._impl.filename_base}.lock")

    def _index_key(self, signature: Any, codegen: Any) -> Any:
        return *super()._index_key(signature, codegen), _SOURCE_DIGEST


_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "_nrt": False, "no_cfunc_wrapper": True}
"""A loop allocates nothing and counts no references, which took as long as everything else; its buffers are
arguments."""


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``loop`` compiled, once, to be kept in numba's cache. Other threads run beside it."""
    dispatcher: Any = njit(**_OPTIONS)(function)
    with suppress(RuntimeError):  # without a writable folder every process compiles by itself
        dispatcher._cache = _Cache(function)
        dispatcher.compile = _compiled_by_one_process(dispatcher.compile, dispatcher._cache.lock_path)
    return cast(Callable[..., Any], dispatcher)


def _compiled_by_one_process(compile_loop: Callable[[Any], Any], lock_path: Path) -> Callable[[Any], Any]:
    """Return ``compile_loop`` guarded by a lock, so that of several processes that begin together one compiles, and the
    others find the result in the cache."""

    def compile_alone(signature: Any) -> Any:
        with ExitStack() as held:
            with suppress(OSError):  # without file locks every process compiles by itself
                # Not flock: children forked meanwhile would hold it, too.
                fcntl.lockf(held.enter_context(lock_path.open("w")), fcntl.LOCK_EX)
            return compile_loop(signature)

    return compile_alone


def part(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a part of loops that is inlined in its callers and never called otherwise. Passing dozens of matrices took
    half as long as what was done with them."""
    options = _OPTIONS | {"no_cpython_wrapper": True, "forceinline": True}
    return cast(Callable[..., Any], njit(**options)(function))


class Masks(NamedTuple):
    """Dropout of edges' coefficients for the loops: ``EdgeDropout``'s numbers, and the first of the heads."""

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
    """A tile's edges (``TileEdges``' lists), and the state of a walk over them. ``pulled``: the rows of the pulled
    matrix; neighbours at and beyond are absent. ``adds_loops``: every row gets one self-loop instead of those stored.

    The edges taken now: their neighbours, which of the tile's edges they are (added self-loops follow the tile's edges,
    in the order of rows), their dropout factors, and as many neighbours of later edges, whose rows are to be prefetched
    (``pull``). ``at``: the row, where its edges continue, the last neighbour, how many before it are the same, and how
    many edges are taken now.
    """

    indices_E: AnyIntegers
    offsets_R1: AnyIntegers
    start: int
    pulled: int
    adds_loops: bool
    masks: Masks
    near_E: npt.NDArray[np.int64]
    place_E: npt.NDArray[np.int64]
    scale_HE: npt.NDArray[Any]
    ahead_E: npt.NDArray[np.int64]
    at: npt.NDArray[np.int64]

    @classmethod
    def over(
        cls, tile: TileEdges, pulled: Tensor, heads: range = range(0), dropout: EdgeDropout | None = None,
        direction: Direction = Direction.IN,
    ) -> "Walk":  # fmt: skip
        """Return a walk over a tile whose edges pull rows of a matrix. Raises :class:`StoreError` if a neighbour is not
        a row."""
        if tile.indices_E.numel():
            highest_row(tile, tile.indices_E)
        return cls(
            *(tile.indices_E.numpy(), tile.offsets_R1.numpy(), tile.start, len(pulled)),
            tile.self_loops is SelfLoops.EXACTLY_ONE,
            Masks.of(dropout, direction, heads.start),
            *(np.empty(EDGES, np.int64), np.empty(EDGES, np.int64)),
            torch.empty(len(heads), EDGES, dtype=computed(pulled)).numpy(),
            np.empty(EDGES, np.int64),
            np.full(5, -1),
        )


def matrices(walk: Walk, count: int) -> tuple[npt.NDArray[Any], ...]:
    """Return buffers of this many numbers for every head and every edge taken at a time."""
    return tuple(np.empty_like(walk.scale_HE) for _ in range(count))


def computed(pulled: Tensor) -> torch.dtype:
    """Return the type in which rows of a matrix are computed with, which results have, too."""
    return torch.float32 if pulled.dtype == torch.bfloat16 else pulled.dtype


def array(rows: Tensor) -> npt.NDArray[Any]:
    """Return a matrix as loops take it, with contiguous rows; bfloat16 as int16."""
    rows = rows.contiguous()
    return (rows.view(torch.int16) if rows.dtype == torch.bfloat16 else rows).numpy()


@part
def gather(walk, row):
    """Take the next edges of ``row`` that count, at most ``EDGES``, with an added self-loop last; return whether there
    are any. The last one's neighbour is repeated up to a multiple of ``TOGETHER``. Raises StoreError if dropout must
    tell repeated edges apart and neighbours do not ascend."""
    at, near_E, own, count = walk.at, walk.near_E, walk.start + row, 0
    if at[ROW] != row:
        at[ROW], at[CURSOR], at[LAST] = row, walk.offsets_R1[row], -1
    cursor = first = at[CURSOR]
    stop = walk.offsets_R1[row + 1]
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
    last = len(walk.indices_E) - 1
    for edge in range(count):
        walk.ahead_E[edge] = walk.indices_E[min(first + edge + AHEAD, last)]
    for edge in range(count, -(-count // TOGETHER) * TOGETHER):
        near_E[edge], walk.ahead_E[edge] = near_E[count - 1], walk.ahead_E[count - 1]
    if walk.masks.drops:
        draw(walk, own, count)
    return count > 0


@part
def pull(walk, matrix, edge, column, limit):
    """Load ``Lanes`` of the row of ``matrix`` that an edge taken now pulls, and prefetch the same columns of the row
    that the edge ``AHEAD`` behind it pulls. So memory is always busy, and never so busy that loads from the cache
    wait."""
    prefetch_line(matrix, walk.ahead_E[edge], column)
    return load(matrix, walk.near_E[edge], column, limit)


@part
def pull_number(walk, matrix, edge, column):
    """As ``pull``, for one number."""
    prefetch_line(matrix, walk.ahead_E[edge], column)
    return number(matrix, walk.near_E[edge], column)


@part
def pull_rows(walk, matrix, edge, column, limit):
    """As ``pull``, for the ``TOGETHER`` edges from ``edge`` on."""
    for one in range(TOGETHER):
        prefetch_line(matrix, walk.ahead_E[edge + one], column)
    return load_rows(matrix, walk.near_E, edge, column, limit)


@part
def pull_halves(walk, matrix, edge, halves, like):
    """As ``pull``, for ``load_halves``."""
    fetch_halves(walk, matrix, edge, halves)
    return load_halves(matrix, walk.near_E[edge], halves, like)


@part
def fetch_halves(walk, matrix, edge, halves):
    """Prefetch what ``pull_halves`` prefetches."""
    prefetch_line(matrix, walk.ahead_E[edge], halves[0])
    prefetch_line(matrix, walk.ahead_E[edge], halves[1])


@part
def draw(walk, own, count):
    """Compute the dropout factors of the edges' coefficients, for every head."""
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
    """Return ``dropout.edges.philox`` of one count, as 32-bit numbers in 64 bits each."""
    (k0, k1), low, half = key, np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(10):
        left, right = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (right >> half) ^ c1 ^ k0, right & low, (left >> half) ^ c3 ^ k1, left & low
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return c0, c1, c2, c3


@part
def clear(out, row):
    """Set a row to zeros."""
    for column in range(out.shape[1]):
        out[row, column] = 0
