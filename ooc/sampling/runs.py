# SPDX-License-Identifier: Apache-2.0
"""Things one behind the other: their numbers in runs, and as many at a time as cost so much."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ooc.storage.array import AnyArray

Ints = npt.NDArray[np.int64]


def run_numbers(first: AnyArray, counts: AnyArray) -> Ints:
    """The numbers in runs that begin with ``first`` [g] and have so many each [g]."""
    found: Ints = np.repeat(first - (np.cumsum(counts) - counts), counts)
    found += np.arange(len(found))
    return found


def pieces(ends: AnyArray, most: int) -> Iterator[tuple[int, int]]:
    """From which to which thing they take ``most`` together at most, or one alone. ``ends`` [n]: what each takes, with
    those before it."""
    first = 0
    while first < len(ends):
        before = int(ends[first - 1]) if first else 0
        stop = max(first + 1, int(np.searchsorted(ends, before + most, side="right")))
        yield first, stop
        first = stop
