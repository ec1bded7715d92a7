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


def pieces(*bounds: tuple[AnyArray, int]) -> Iterator[tuple[int, int]]:
    """From which to which thing they are within all ``bounds`` together, or one alone: what each takes with those
    before it [n], and the most that some may take."""
    first, count = 0, len(bounds[0][0])
    while first < count:
        stop = count
        for ends, most in bounds:
            before = int(ends[first - 1]) if first else 0
            stop = min(stop, int(np.searchsorted(ends, before + most, side="right")))
        stop = max(first + 1, stop)
        yield first, stop
        first = stop
