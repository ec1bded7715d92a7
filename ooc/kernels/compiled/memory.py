# SPDX-License-Identifier: Apache-2.0
"""What the compiled loops take for a tile, results included: bounds for admission, and no numba needed.

Nothing is made for an edge. What is written of some dozens of a row's edges is the same for all rows.
"""

EDGES = 64
"""Of a row at a time: their neighbours' rows are read more than once, which takes no longer than once while they are in
the cache."""
_FIXED_BYTES = 1 << 14
"""Which of a row's edges they are, registers of their terms, and what describes matrices to the loops."""


def attention(*, heads: int, groups: int, channels: int, itemsize: int) -> tuple[int, int]:
    """Of ``gat.attend`` and ``gat.pull_sources``: bytes of a row, of all groups, and of what is fixed.

    Forward is the larger: two matrices of a group's channels and three numbers.
    """
    return groups * (2 * channels + 3) * itemsize, _FIXED_BYTES + EDGES * (5 * heads + groups) * itemsize


def maximum(*, columns: int, itemsize: int) -> tuple[int, int]:
    """Of ``maximum.pull_maxima`` and ``maximum.pull_sources``, likewise: a maximum and its ties for every column."""
    return 2 * columns * itemsize, _FIXED_BYTES + 2 * columns * itemsize


def messages(
    *, row: int, heads: int, message: int, pulled: int, features: int, term: int, itemsize: int
) -> tuple[int, int]:
    """Of ``edge_function.pull_messages`` and of its gradients, likewise; ``row``: numbers of one.

    ``heads`` that a softmax has of the ``message`` (0: every column has its own, or there is none). A row's gradient
    has ``pulled`` columns. Of ``features`` of an edge a map makes a ``term`` of so many columns: the map is computed,
    put together with its bias, and turned over.
    """
    mapped = features + 1 if features else 0
    of_edge = mapped + 3 + (8 * heads + message // heads if heads else 0)
    beside = 2 * message + pulled + 4 * heads * mapped + 6 * mapped * term
    return row * itemsize, _FIXED_BYTES + (EDGES * of_edge + beside) * itemsize
