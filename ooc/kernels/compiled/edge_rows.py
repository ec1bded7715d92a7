# SPDX-License-Identifier: Apache-2.0
"""Sums of the rows at one end of edges, and products of the rows at both ends, as compiled loops over edges. The caller
checks that indices are in range.

Shapes: E edges, S and R rows at their ends, H heads of as many columns each.
"""

from typing import Any

import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided
from torch import Tensor

from ooc.kernels.compiled.lanes import NBYTES, fma, load, prefetch, spread, store, total
from ooc.kernels.compiled.loops import compiled

_AHEAD = 32
"""How many edges ahead rows are prefetched."""


def add_weighted(into_RC: Tensor, into_E: Tensor, rows_SC: Tensor, from_E: Tensor, weight_EH: Tensor) -> Tensor:
    """Add, for every edge, the row at one end to the row at the other, each head times its number."""
    given = into_E.numpy(), _rows_with_gaps(rows_SC), from_E.numpy(), weight_EH.numpy()
    _add(into_RC.numpy(), *given, rows_SC.shape[1] // weight_EH.shape[1])
    return into_RC


def products(left_SC: Tensor, left_E: Tensor, right_RC: Tensor, right_E: Tensor, heads: int) -> Tensor:
    """Return the inner product of the rows at both ends of every edge, for each head [E, H]."""
    found_EH = left_SC.new_empty(len(left_E), heads)
    ends = _rows_with_gaps(left_SC), left_E.numpy(), _rows_with_gaps(right_RC), right_E.numpy()
    _multiply(*ends, found_EH.numpy(), left_SC.shape[1] // heads)
    return found_EH


def _rows_with_gaps(rows: Tensor) -> npt.NDArray[Any]:
    """Return rows of a wider matrix with the numbers between them: loops are compiled for one layout."""
    return rows.numpy() if rows.is_contiguous() else as_strided(rows.numpy(), (len(rows), rows.stride(0)))


@compiled
def _add(into_RC, into_E, rows_SC, from_E, weight_EH, channels):
    last, heads = len(from_E) - 1, weight_EH.shape[1]
    for edge in range(len(from_E)):
        row, near = into_E[edge], from_E[edge]
        prefetch(rows_SC, from_E[min(edge + _AHEAD, last)], heads * channels)
        prefetch(into_RC, into_E[min(edge + _AHEAD, last)], heads * channels)
        for head in range(heads):
            weight, stop = spread(weight_EH[edge, head]), (head + 1) * channels
            for column in range(head * channels, stop, NBYTES // rows_SC.itemsize):
                sums = load(into_RC, row, column, stop)
                store(into_RC, row, column, stop, fma(load(rows_SC, near, column, stop), weight, sums))


@compiled
def _multiply(left_SC, left_E, right_RC, right_E, found_EH, channels):
    last, heads, zero = len(left_E) - 1, found_EH.shape[1], spread(left_SC.dtype.type(0))
    for edge in range(len(left_E)):
        near, row = left_E[edge], right_E[edge]
        prefetch(left_SC, left_E[min(edge + _AHEAD, last)], heads * channels)
        prefetch(right_RC, right_E[min(edge + _AHEAD, last)], heads * channels)
        for head in range(heads):
            sums, stop = zero, (head + 1) * channels
            for column in range(head * channels, stop, NBYTES // left_SC.itemsize):
                sums = fma(load(left_SC, near, column, stop), load(right_RC, row, column, stop), sums)
            found_EH[edge, head] = total(sums)
