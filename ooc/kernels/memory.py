# SPDX-License-Identifier: Apache-2.0
"""What pulls that compute something for every edge take for a tile, results included: bounds for admission, and neither
numba nor Triton needed.

Torch's operators make several matrices for the edges of a piece. Compiled loops make nothing for an edge: what is
written of some dozens of a row's edges is the same for all rows. On a GPU a pull has beside its result a list of the
parts of long rows (``cuda.segments``) and a workspace, a slot in the summing type for each of them. E edges make at
most 2 · ⌊E / 512⌋ parts, so that a workspace is so much for every edge, and small beside what is pulled; one hub or a
thousand makes no difference.
"""

from typing import NamedTuple

from ooc.kernels.cuda.segments import EDGES_PER_SEGMENT
from ooc.plan.workload import Parts

EDGES = 64
"""Of a row at a time in a loop: their neighbours' rows are read more than once, which takes no longer than once while
they are in the cache."""
EVERY_EDGE = 1 << 62
"""Edges at once: all of a tile, whatever their number."""

_FIXED_BYTES = 1 << 14
"""Of a loop: which of a row's edges they are, registers of their terms, and what describes matrices to it."""
_PART_BYTES = 16
"""Of the list on a GPU, for each part: two numbers."""


class Bounds(NamedTuple):
    """Bytes, of any of the pulls of one kind but for ``of_loop``.

    ``of_torch``: for every edge of a piece and every row of the tile, and for every row beside that. ``of_loop``: for
    every row, forward and as sources and targets pull; ``loop_fixed`` beside. ``on_device``, a GPU: as ``of_torch``, of
    every edge of the tile.
    """

    of_torch: tuple[int, int]
    of_loop: tuple[int, ...]
    loop_fixed: int
    on_device: tuple[int, int]


def sums(itemsize: int) -> Parts:
    """How plain sums of numbers of ``itemsize`` bytes are made in parts on a GPU."""
    return Parts(EDGES_PER_SEGMENT, _summed(itemsize), _PART_BYTES)


def maximum(*, columns: int, itemsize: int) -> Bounds:
    """A maximum and its ties for every column; of torch's operators five matrices of the slab's width for the edges,
    six for the rows."""
    both = 2 * columns * itemsize
    of_torch = 5 * columns * itemsize + columns + 48, 6 * columns * itemsize + columns + 32
    return Bounds(of_torch, (both,) * 3, _FIXED_BYTES + both, _on_device(2 * columns, 2 * columns, itemsize))


def gat(*, heads: int, slices: int, channels: int, itemsize: int, dropout: bool, signed: bool = False) -> Bounds:
    """``channels``: of each of a head's ``slices``. Forward is the largest pull: a group has two matrices of its
    channels and three numbers.

    Of torch's operators an edge of a piece has its neighbour, row and position (16 bytes at most each, the added
    self-loop's copy included), up to six numbers for every head, and where coefficients are not ``signed`` its
    neighbour's row, twice; dropout adds four counters of 8 bytes, twice. A row has four matrices of the slab's width at
    most, and eight numbers and as many places a group.
    """
    groups, columns = heads * slices, channels + 3
    numbers, copied = groups * (2 * channels + 3), 0 if signed else 2 * slices * columns
    per_edge = 48 + heads * (6 + copied) * itemsize + (96 + heads * (2 + 2 * itemsize) if dropout else 0)
    of_torch = per_edge, groups * ((4 * columns + 8) * itemsize + 64) + 24
    fixed = _FIXED_BYTES + EDGES * (5 * heads + groups) * itemsize
    return Bounds(of_torch, (numbers * itemsize,) * 3, fixed, _on_device(numbers, numbers + groups, itemsize))


def messages(
    *,
    groups: int,
    source: int,
    brought: int,
    message: int,
    packed: int,
    pulled: int,
    itemsize: int,
    features: int = 0,
    term: int = 0,
    loop: int = 0,
    heads: int = 0,
    chained: int = 0,
) -> Bounds:
    """Of an edge function: widths in columns, of all ``groups`` of a softmax together (0: a sum).

    ``brought`` by a target, with what parameters add to it; ``packed`` is what sources pull of it, and ``pulled`` its
    own gradient with that of the map. ``features`` of an edge make a ``term`` of so many columns; ``loop``: those of an
    added self-loop, which a GPU first makes of those of all edges. ``heads`` that a compiled loop's softmax has (0:
    every column has its own, or there is none). ``chained``: columns of a row where a softmax goes from type to type.

    Of torch's operators features are gathered and numbered to be summed, and a row has its part of the map's gradient,
    which is put together with others', and a feature's columns beside it. In a loop the map is computed, put together
    with its bias, and turned over. What makes nothing for an edge has of a row what it is given, and results that are
    put together.
    """
    per_edge = (2 * source + 2 * brought + 3 * message + 4 * groups) * itemsize + 200
    per_row = (2 * max(source, brought) + 5 * message + 6 * groups + chained) * itemsize + 32
    mapped = features + 1 if features else 0
    if features:
        per_edge += features * (3 * itemsize + 16) + 4 * term * itemsize + 64
        per_row += ((2 * mapped + 1) * term + 3 * features) * itemsize
    of_edge = mapped + 3 + (8 * heads + message // heads if heads else 0)
    beside = 2 * message + pulled + 4 * heads * mapped + 6 * mapped * term
    forward = 2 * message + 3 * groups + brought + (groups + 4) * loop
    of_targets = 2 * packed + 2 * (brought + message + 2 * groups) + 2 * pulled
    of_row = forward, 2 * source + loop, of_targets
    summed, of_loops = _summed(itemsize), loop * itemsize + 2 * itemsize + 40 if loop else 0
    of_parts = _parts_per_edge(max(message + 2 * groups, source, pulled) * summed)
    return Bounds(
        (per_edge, per_row),
        tuple((numbers + chained) * itemsize for numbers in of_row),
        _FIXED_BYTES + (EDGES * of_edge + beside) * itemsize,
        (of_parts + of_loops, max(of_row) * summed),
    )


def _on_device(slot: int, row: int, itemsize: int) -> tuple[int, int]:
    """``slot``, ``row``: numbers of a slot, and of a row of the result, which may be rounded, in a copy, once more."""
    return _parts_per_edge(slot * _summed(itemsize)), 2 * row * _summed(itemsize)


def _parts_per_edge(slot_bytes: int) -> int:
    """Bytes of the parts of long rows and their slots, for every edge; two parts for every 512 edges, at most."""
    return -(-2 * (slot_bytes + _PART_BYTES) // EDGES_PER_SEGMENT)


def _summed(itemsize: int) -> int:
    """Bytes of the type that numbers of ``itemsize`` bytes are summed in."""
    return max(4, itemsize)
