# SPDX-License-Identifier: Apache-2.0
"""Scattered rows of an array as few long accesses: neighbouring rows go together."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ooc.storage.array import AnyArray, Array

GAP_BYTES = 1 << 16  # Rows nearer than this are read in one go: about what a disk reads in the time of a request.
READ_BYTES = 4 << 20


def read_rows(array: Array, rows: AnyArray, *, gap_bytes: int = GAP_BYTES, read_bytes: int = READ_BYTES) -> AnyArray:
    """``rows`` [n] of ``array``, in that order, repeated where they are.

    Rows at most ``gap_bytes`` apart are read together with what lies between them, ``read_bytes`` at most at a time.
    """
    wanted, where = np.unique(rows, return_inverse=True)
    out = np.empty((len(wanted), *array.shape[1:]), dtype=array.dtype)
    gap, border = (max(1, size // array.row_bytes) for size in (gap_bytes, read_bytes))
    for first, last in runs(wanted, gap=gap, border=border):
        run = wanted[first:last]
        out[first:last] = array.read(int(run[0]), int(run[-1]) + 1)[run - run[0]]
    return out[where]


def runs(places: npt.NDArray[np.integer[Any]], *, gap: int = 1, border: int | None = None) -> Iterator[tuple[int, int]]:
    """Cuts the ascending ``places`` [n] where one is more than ``gap`` after the last, and at each multiple of
    ``border``: first and last + 1 of each piece, of at least one place."""
    apart = np.diff(places) > gap
    if border is not None:
        apart |= np.diff(places // border) != 0
    for first, last in pairwise([0, *(np.flatnonzero(apart) + 1).tolist(), len(places)]):
        if first < last:
            yield first, last
