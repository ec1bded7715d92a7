# SPDX-License-Identifier: Apache-2.0
"""The one thing that looks across rows: target rows pull the rows of their neighbours and sum them.

On the CPU the fastest sum over a CSR is torch's ``embedding_bag``; a bag is a row's list of neighbours. Sums
run in the order of the list and each column for itself, so the result of a row is the same to the bit whatever
rows and columns are computed with it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def pull(source_NW: Tensor, indices_E: Tensor, offsets_R1: Tensor) -> Tensor:
    """Sum of ``source_NW[indices_E[offsets[i]:offsets[i+1]]]`` for each of R rows → [R, W].

    N nodes, W width of the slab, E edges of these rows, R rows; indices and offsets of one integer type.
    """
    if indices_E.numel() == 0:
        return source_NW.new_zeros(offsets_R1.numel() - 1, source_NW.shape[1])
    return F.embedding_bag(indices_E, source_NW, offsets_R1, mode="sum", include_last_offset=True)


def within(indices_E: Tensor, offsets_R1: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Indices and offsets without the neighbours at or beyond ``rows``."""
    inside = indices_E < rows
    kept = torch.zeros(len(indices_E) + 1, dtype=offsets_R1.dtype)
    torch.cumsum(inside, 0, out=kept[1:])
    return indices_E[inside], kept[offsets_R1.long()]
