# SPDX-License-Identifier: Apache-2.0
"""Bounds, for admission, on the memory that pulls take for a tile if they compute something for every edge; results
included.

Neither numba nor Triton is needed for them. Torch's operators make several matrices for the edges of a piece. Compiled
loops make nothing for an edge: what is written for some dozens of a row's edges is reused for all rows. On a GPU, a
pull has beside its result a list of the parts of long rows (``cuda.segments``), and a workspace with one slot in the
summing type for each part. E edges make at most 2 · ⌊E / 512⌋ parts, so the workspace is bounded by a little for every
edge, whether there is one hub or a thousand.
"""

from typing import NamedTuple

from ooc.kernels.cuda.segments import EDGES_PER_SEGMENT
from ooc.plan.workload import Parts

EDGES = 64
"""Edges of a row that a loop takes at a time: their neighbours' rows are read more than once, which costs little while
they are in the cache."""
EVERY_EDGE = 1 << 62
"""All edges of a tile at once, whatever their number."""

_FIXED_BYTES = 1 << 14
"""Fixed bytes of a loop: which of a row's edges are taken, registers of their terms, and the descriptions of
matrices."""
_PART_BYTES = 16
"""Bytes of each part in a GPU's list: two numbers."""


class Bounds(NamedTuple):
    """Bounds in bytes on any pull of one kind; ``of_loop`` has one for each of its pulls.

    ``of_torch``: for every edge of a piece and every row of the tile, and for every row besides. ``of_loop``: for every
    row, forward, as sources pull, and as targets pull; ``loop_fixed`` besides. ``on_device``: on a GPU, as ``of_torch``
    with every edge of the tile.
    """

    of_torch: tuple[int, int]
    of_loop: tuple[int, ...]
    loop_fixed: int
    on_device: tuple[int, int]


def sums(itemsize: int) -> Parts:
    """Return how a GPU makes plain sums of numbers of ``itemsize`` bytes in parts."""
    return Parts(EDGES_PER_SEGMENT, _sum_itemsize(itemsize), _PART_BYTES)


def maximum(*, columns: int, itemsize: int) -> Bounds:
    """Return the bounds for a maximum and its ties in every column. Torch's operators make five matrices of the slab's
    width for the edges, and six for the rows."""
    both = 2 * columns * itemsize
    of_torch = 5 * columns * itemsize + columns + 48, 6 * columns * itemsize + columns + 32
    return Bounds(of_torch, (both,) * 3, _FIXED_BYTES + both, _device_bounds(2 * columns, 2 * columns, itemsize))


def gat(*, heads: int, slices: int, channels: int, itemsize: int, dropout: bool, signed: bool = False) -> Bounds:
    """Return the bounds for GAT; ``channels`` is for each of a head's ``slices``. Forward is the largest pull: a group
    has two matrices of its channels and three numbers.

    With torch's operators, an edge of a piece has its neighbour, row and position (at most 16 bytes each, including the
    added self-loop's copy), up to six numbers for every head, and, unless coefficients are ``signed``, two copies of
    its neighbour's row. Dropout adds four counters of 8 bytes, twice. A row has at most four matrices of the slab's
    width, and eight numbers and as many places for each group.
    """
    groups, columns = heads * slices, channels + 3
    numbers, copied = groups * (2 * channels + 3), 0 if signed else 2 * slices * columns
    per_edge = 48 + heads * (6 + copied) * itemsize + (96 + heads * (2 + 2 * itemsize) if dropout else 0)
    of_torch = per_edge, groups * ((4 * columns + 8) * itemsize + 64) + 24
    fixed = _FIXED_BYTES + EDGES * (5 * heads + groups) * itemsize
    return Bounds(of_torch, (numbers * itemsize,) * 3, fixed, _device_bounds(numbers, numbers + groups, itemsize))


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
    """Return the bounds for an edge function, with widths in columns for all ``groups`` of a softmax together (0: a
    sum).

    ``brought``: the target's own columns, with what parameters add to them; ``packed``: what sources pull of a target;
    ``pulled``: the target's gradient with that of the map. The ``features`` of an edge make a ``term`` of that many
    columns; ``loop``: those of an added self-loop, which a GPU first computes from all edges. ``heads`` of a compiled
    loop's softmax (0: one for each column, or none). ``chained``: columns of a row if a softmax continues from edge
    type to edge type.

    With torch's operators, features are gathered and numbered to be summed, and a row has its part of the map's
    gradient, which is joined with others', beside one feature's columns. A loop computes the map, joins it with its
    bias, and transposes it. A loop that makes nothing for an edge takes what a row is given, and its joined results.
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
    summed, of_loops = _sum_itemsize(itemsize), loop * itemsize + 2 * itemsize + 40 if loop else 0
    of_parts = _parts_per_edge(max(message + 2 * groups, source, pulled) * summed)
    return Bounds(
        (per_edge, per_row),
        tuple((numbers + chained) * itemsize for numbers in of_row),
        _FIXED_BYTES + (EDGES * of_edge + beside) * itemsize,
        (of_parts + of_loops, max(of_row) * summed),
    )


def _device_bounds(slot: int, row: int, itemsize: int) -> tuple[int, int]:
    """Return bounds for a GPU. ``slot``: numbers of a slot; ``row``: numbers of a row of the result, which may be
    copied once more to be rounded."""
    return _parts_per_edge(slot * _sum_itemsize(itemsize)), 2 * row * _sum_itemsize(itemsize)


def _parts_per_edge(slot_bytes: int) -> int:
    """Return the bytes of the parts of long rows and their slots for every edge: at most two parts for every 512
    edges."""
    return -(-2 * (slot_bytes + _PART_BYTES) // EDGES_PER_SEGMENT)


def _sum_itemsize(itemsize: int) -> int:
    """Return the bytes of the type in which numbers of ``itemsize`` bytes are summed."""
    return max(4, itemsize)
