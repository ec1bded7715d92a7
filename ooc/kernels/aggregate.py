# SPDX-License-Identifier: Apache-2.0
"""The one thing that looks across rows: target rows pull the rows of their neighbours and sum them.

Of torch's operators the fastest sum over a CSR on the CPU is ``embedding_bag``; a bag is a row's list of neighbours.
Sums run in the order of the list and each column for itself, so the result of a row is the same to the bit whatever
rows and columns are computed with it. ``kernels.pulls`` has the same for other devices, and as a compiled loop.

Rows of bfloat16 are half the bytes to fetch, and fetching is what a pull's time goes into: 128 columns of them take
about half as long as of float32. They are summed in float32 and rounded once, at the end; where a sum lies halfway
between two bfloat16, away from zero (that is FBGEMM's rounding; processors without AVX2 take the even one).
"""

import torch
from torch import Tensor

from ooc.kernels.edges import SelfLoops, TileEdges, counted
from ooc.kernels.tensors import pull as pull

Own = Tensor | float | None
"""What each row is multiplied by as one of its own summands, of a tile [R, 1] or one number; None: it is no summand."""


def sums_rows_of(kept: torch.dtype, computed: torch.dtype) -> bool:
    """Whether ``pull`` sums rows of type ``kept`` no worse than if they were ``computed`` first and the sum rounded."""
    return kept == computed or (kept == torch.bfloat16 and computed == torch.float32)


def pull_tile(
    tile: TileEdges, source_NW: Tensor, *, has_loops: bool = True, own: Own = None, out: Tensor | None = None
) -> Tensor:
    """``pull`` for the rows of ``tile``; neighbours beyond the end of a source shorter than the graph add nothing.

    Where the tile asks for self-loops, each row that the source has is the last of its own neighbours, once: those in
    its list, which there are only if ``has_loops``, do not count. ``own``: what such a row is multiplied by, and added
    in the end. ``out``, where a kernel may put the rows, is of no use to torch's.
    """
    weight_E = tile.weight_E
    assert weight_E is None or tile.self_loops is SelfLoops.AS_STORED, "an added self-loop has no weight"
    indices_E, offsets_R1, places_E = counted(tile, len(source_NW), has_loops=has_loops)
    weight_E = weight_E if weight_E is None or places_E is None else weight_E[places_E]
    pulled_RW = pull(source_NW, indices_E, offsets_R1, weight_E)
    add_own(pulled_RW, source_NW, tile.start, own)
    return pulled_RW


def add_own(pulled_RW: Tensor, source_NW: Tensor, start: int, own: Own) -> None:
    """Add the rows from ``start`` on that the source has, times their ``own``."""
    rows_RW = source_NW[start : start + len(pulled_RW)]
    if own is None or not len(rows_RW):
        return
    pulled_RW = pulled_RW[: len(rows_RW)]
    if isinstance(own, Tensor):
        pulled_RW.addcmul_(rows_RW, own[: len(rows_RW)])
    else:
        pulled_RW.add_(rows_RW, alpha=own)
