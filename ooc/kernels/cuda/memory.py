# SPDX-License-Identifier: Apache-2.0
"""What the pulls on a GPU take of its memory for a tile, results included: bounds for admission, and no Triton needed.

Beside its result a pull has a list of the parts of long rows (``segments``) and a workspace, a slot in the summing type
for each of them. E edges make at most 2 · ⌊E / 512⌋ parts, so that a workspace is so much for every edge, and small
beside what is pulled; one hub or a thousand makes no difference.
"""

from ooc.kernels.cuda.segments import EDGES_PER_SEGMENT
from ooc.plan.workload import Parts

EVERY_EDGE = 1 << 62
"""Edges at once: all of a tile, whatever their number."""

_PART_BYTES = 16
"""Of the list, for each part: two numbers."""


def sums(itemsize: int) -> Parts:
    """How plain sums of numbers of ``itemsize`` bytes are made in parts."""
    return Parts(EDGES_PER_SEGMENT, _summed(itemsize), _PART_BYTES)


def attention(*, heads: int, channels: int, itemsize: int) -> tuple[int, int, int]:
    """Of ``gat.attend`` and ``gat.pull_sources``: edges at once, bytes for each edge and row, and for each row beside.

    Forward is the larger: a slot and a row of the result have two matrices of a head's channels and its scalars.
    """
    numbers = heads * (2 * channels + 3)
    return _bounds(slot=numbers, row=numbers + heads, itemsize=itemsize)


def maximum(*, columns: int, itemsize: int) -> tuple[int, int, int]:
    """Of ``maximum.pull_maxima`` and ``maximum.pull_sources``: a maximum and its ties for every column."""
    return _bounds(slot=2 * columns, row=2 * columns, itemsize=itemsize)


def messages(
    *, groups: int, source: int, brought: int, message: int, pulled: int, packed: int, features: int, itemsize: int
) -> tuple[int, int, int]:
    """Of ``edge_function.pull_messages`` and of its gradients: widths in columns, of all ``groups`` together.

    ``brought`` by a target, with what parameters add to it; ``packed`` is what sources pull of it, and ``pulled`` its
    own gradient with that of the map. ``features`` of an added self-loop are first made of those of all edges; 0 where
    there are none.
    """
    summed = _summed(itemsize)
    rows = max(numbers_of_row(groups, source, brought, message, pulled, packed, features))
    slot = max(message + 2 * groups, source, pulled)
    of_loops = features * itemsize + 2 * itemsize + 40 if features else 0
    return EVERY_EDGE, _parts_per_edge(slot * summed) + of_loops, rows * summed


def numbers_of_row(
    groups: int, source: int, brought: int, message: int, pulled: int, packed: int, features: int
) -> tuple[int, int, int]:
    """What kernels that make nothing for an edge have of a row, as they are given it and in results that are put
    together: forward, as sources pull and as targets do; widths as ``messages`` takes them."""
    forward = 2 * message + 3 * groups + brought + (groups + 4) * features
    return forward, 2 * source + features, 2 * packed + 2 * (brought + message + 2 * groups) + 2 * pulled


def _bounds(*, slot: int, row: int, itemsize: int) -> tuple[int, int, int]:
    """``slot``, ``row``: numbers of a slot, and of a row of the result, which may be rounded, in a copy, once more."""
    summed = _summed(itemsize)
    return EVERY_EDGE, _parts_per_edge(slot * summed), 2 * row * summed


def _parts_per_edge(slot_bytes: int) -> int:
    """Bytes of the parts of long rows and their slots, for every edge; two parts for every 512 edges, at most."""
    return -(-2 * (slot_bytes + _PART_BYTES) // EDGES_PER_SEGMENT)


def _summed(itemsize: int) -> int:
    """Bytes of the type that numbers of ``itemsize`` bytes are summed in."""
    return max(4, itemsize)
