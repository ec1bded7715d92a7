# SPDX-License-Identifier: Apache-2.0
"""How large a program is: a table by the width of rows and the size of a number, and what else may be tried.

A warp of 32 threads fetches 512 bytes at once when every thread loads 16. The table gives a program as many columns
as a row has, rounded up to a power of two, and where that is less than a warp's worth, several rows. Shapes change
no result, so any of them may be tried; which is fastest has never been measured for this table.

Programs that need all columns of a row keep their sums in registers, in float32 whatever the source, so their rows are
counted as if of float32. By the source's own bytes, GAT's attention with heads of 64 bfloat16 numbers had four rows a
program and 191 registers a thread forward and 187 backward, compiled for 9.0; with two it has 90 and 95.
"""

from dataclasses import dataclass, replace

LANE_BYTES = 16
"""What a thread loads with one instruction at most."""
WARP_BYTES = 32 * LANE_BYTES
MOST_WARPS = 8
_SUMMED_BYTES = 4
"""Of a number that is added up, at least."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Segments and columns of a program (powers of two), edges whose loads are issued together, warps."""

    rows: int
    columns: int
    unroll: int
    warps: int


def usual(width: int, itemsize: int, *, whole_rows: bool = False, unroll: int = 4) -> Shape:
    """The shape for rows of so many numbers of so many bytes; ``whole_rows``: a program needs all columns of a row."""
    columns = power_of_two(width)
    if whole_rows:
        itemsize = max(itemsize, _SUMMED_BYTES)
    else:
        columns = min(columns, 2 * WARP_BYTES // itemsize)
    rows = min(32, max(1, WARP_BYTES // (columns * itemsize)))
    return Shape(rows, columns, unroll, _warps(rows * columns * itemsize))


def candidates(width: int, itemsize: int, *, whole_rows: bool = False, unroll: int = 4) -> list[Shape]:
    """Shapes worth trying, the usual one first: fewer columns, other numbers of rows, edges together and warps."""
    first = usual(width, itemsize, whole_rows=whole_rows, unroll=unroll)
    if whole_rows:
        itemsize = max(itemsize, _SUMMED_BYTES)
    tried = [replace(first, unroll=unroll) for unroll in (unroll, unroll // 2, 2 * unroll)]
    for columns in (first.columns,) if whole_rows else (first.columns, first.columns // 2):
        for rows in (1, 2, 4, 8, 16):
            block_bytes = rows * columns * itemsize
            if columns * itemsize >= LANE_BYTES and WARP_BYTES // 2 <= block_bytes <= 4 * WARP_BYTES:
                tried.append(Shape(rows, columns, first.unroll, _warps(block_bytes)))
    return list(dict.fromkeys(tried))


def power_of_two(width: int) -> int:
    """The smallest that is not below ``width``."""
    return 1 << max(0, width - 1).bit_length()


def _warps(block_bytes: int) -> int:
    return min(MOST_WARPS, power_of_two(-(-block_bytes // WARP_BYTES)))
