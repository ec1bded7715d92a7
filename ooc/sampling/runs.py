# SPDX-License-Identifier: Apache-2.0
"""Ranges of consecutive numbers, and ranges of consecutive things whose total cost is bounded."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ooc.storage.array import AnyArray

Ints = npt.NDArray[np.int64]


def expand_ranges(first: AnyArray, counts: AnyArray) -> Ints:
    """Return the numbers of ranges that begin with ``first`` [g] and have ``counts`` [g] numbers each."""
    found: Ints = np.repeat(first - (np.cumsum(counts) - counts), counts)
    found += np.arange(len(found))
    return found


def pieces(*bounds: tuple[AnyArray, int]) -> Iterator[tuple[int, int]]:
    """Yield ranges of things that stay within all ``bounds`` together, or have one thing.

    A bound is the things' cumulative costs [n] and the largest total of a range.
    """
    first, count = 0, len(bounds[0][0])
    while first < count:
        stop = count
        for ends, most in bounds:
            before = int(ends[first - 1]) if first else 0
            stop = min(stop, int(np.searchsorted(ends, before + most, side="right")))
        stop = max(first + 1, stop)
        yield first, stop
        first = stop
