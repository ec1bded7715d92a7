# SPDX-License-Identifier: Apache-2.0
"""The sum aggregation: target rows pull the rows of their neighbours and add them up.

The fastest of torch's operators for a sum over a CSR on the CPU is ``embedding_bag``; a bag is a row's list of
neighbours. Sums run in the order of the list, each column by itself, so a row's result has the same bits whatever rows
and columns are computed with it. ``kernels.pulls`` has the same sum for other devices, and as a compiled loop.

Rows of bfloat16 are half as many bytes to fetch, and fetching takes most of a pull's time: 128 columns take about half
as long as in float32. They are summed in float32 and rounded once, at the end. A sum halfway between two bfloat16
numbers is rounded away from zero (FBGEMM's rounding; processors without AVX2 round to even).
"""

import torch
from torch import Tensor

from ooc.kernels.edges import SelfLoops, TileEdges, counted
from ooc.kernels.tensors import pull as pull

Own = Tensor | float | None
"""The factor of each row as one of its own summands: a tile [R, 1] or one number; None if rows are not summed
themselves."""


def sums_rows_of(kept: torch.dtype, computed: torch.dtype) -> bool:
    """Whether ``pull`` sums rows of type ``kept`` as exactly as if they were converted to ``computed`` first and the
    sum rounded."""
    return kept == computed or (kept == torch.bfloat16 and computed == torch.float32)


def pull_tile(
    tile: TileEdges, source_NW: Tensor, *, has_loops: bool = True, own: Own = None, out: Tensor | None = None
) -> Tensor:
    """``pull`` for the rows of ``tile``. Neighbours beyond the end of a source that is shorter than the graph add
    nothing.

    If the tile asks for self-loops, each row that the source has is the last of its own neighbours, once; self-loops in
    its list, which exist only if ``has_loops``, do not count. ``own``: the factor with which such a row is added, in
    the end. ``out``, where a kernel may put the rows, is not used by torch's operators.
    """
    weight_E = tile.weight_E
    assert weight_E is None or tile.self_loops is SelfLoops.AS_STORED, "an added self-loop has no weight"
    indices_E, offsets_R1, places_E = counted(tile, len(source_NW), has_loops=has_loops)
    weight_E = weight_E if weight_E is None or places_E is None else weight_E[places_E]
    pulled_RW = pull(source_NW, indices_E, offsets_R1, weight_E)
    add_own(pulled_RW, source_NW, tile.start, own)
    return pulled_RW


def add_own(pulled_RW: Tensor, source_NW: Tensor, start: int, own: Own) -> None:
    """Add the rows from ``start`` on, as far as the source has them, times ``own``."""
    rows_RW = source_NW[start : start + len(pulled_RW)]
    if own is None or not len(rows_RW):
        return
    pulled_RW = pulled_RW[: len(rows_RW)]
    if isinstance(own, Tensor):
        pulled_RW.addcmul_(rows_RW, own[: len(rows_RW)])
    else:
        pulled_RW.add_(rows_RW, alpha=own)
