# SPDX-License-Identifier: Apache-2.0
"""The one thing that looks across rows: target rows pull the rows of their neighbours and sum them.

On the CPU the fastest sum over a CSR is torch's ``embedding_bag``; a bag is a row's list of neighbours. Sums
run in the order of the list and each column for itself, so the result of a row is the same to the bit whatever
rows and columns are computed with it. ``kernels.pulls`` has the same for other devices.

Rows of bfloat16 are half the bytes to fetch, and fetching is what a pull's time goes into: 128 columns of them take
about half as long as of float32. They are summed in float32 and rounded once, at the end; where a sum lies halfway
between two bfloat16, away from zero (that is FBGEMM's rounding; processors without AVX2 take the even one).
"""

import torch
from torch import Tensor

from ooc.kernels.edges import SelfLoops, TileEdges, are_others, only, with_self
from ooc.kernels.tensors import pull as pull


def sums_rows_of(kept: torch.dtype, computed: torch.dtype) -> bool:
    """Whether ``pull`` sums rows of type ``kept`` no worse than if they were ``computed`` first and the sum rounded."""
    return kept == computed or (kept == torch.bfloat16 and computed == torch.float32)


def pull_tile(tile: TileEdges, source_NW: Tensor, *, has_loops: bool = True, out: Tensor | None = None) -> Tensor:
    """``pull`` for the rows of ``tile``; neighbours beyond the end of a source shorter than the graph add nothing.

    Where the tile asks for self-loops, each row that the source has is the last of its own neighbours, once: those in
    its list, which there are only if ``has_loops``, do not count. ``out``, where a kernel may put the rows, is of no
    use to torch's.
    """
    indices, offsets, weight = tile.indices_E, tile.offsets_R1, tile.weight_E
    if len(source_NW) < tile.nodes:
        indices, offsets, weight = within(indices, offsets, len(source_NW), weight)
    if tile.self_loops is SelfLoops.EXACTLY_ONE:
        assert weight is None, "an added self-loop has no weight"
        if has_loops:
            indices, offsets = without_self(indices, offsets, tile.start)
        indices, offsets, _ = with_self(indices, offsets, tile.start, min(tile.start + tile.rows, len(source_NW)))
    return pull(source_NW, indices, offsets, weight)


def within(
    indices_E: Tensor, offsets_R1: Tensor, rows: int, weight_E: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Indices, offsets and weights without the neighbours at or beyond ``rows``."""
    if not len(indices_E) or indices_E.numpy().max() < rows:
        return indices_E, offsets_R1, weight_E  # as always forward, in an order by hops: a tenth of the time of looking
    indices, offsets, kept = only(indices_E < rows, indices_E, offsets_R1)
    return indices, offsets, None if weight_E is None else weight_E[kept]


def without_self(indices_E: Tensor, offsets_R1: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Indices and offsets of rows ``start…`` without edges from a row to itself."""
    return only(are_others(indices_E, offsets_R1, start), indices_E, offsets_R1)[:2]
