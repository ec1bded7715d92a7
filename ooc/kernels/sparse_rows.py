# SPDX-License-Identifier: Apache-2.0
"""Sparse rows (CSR), stored without their zeros, and their products with a weight.

A product is a sum of the weight's rows, one for each entry of a row. The weight's gradient is a sum of the rows'
gradients for every column, once the entries are sorted by column. Both are ``embedding_bag``, which adds a bag's terms
in order, so results depend on the rows alone.

Shapes: R rows with E entries of F columns, O columns of a product, U columns that have an entry.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ooc.kernels.dropout.rows import keep_scale
from ooc.kernels.tensors import pull, typed

ENTRY_BYTES = 80
"""Bytes that a tile takes for each of its entries besides the store's blocks: joined, converted, dropped out of, sorted
by column and brought into that order."""
DRAWN_NUMBERS, DRAWN_BYTES = 1 << 17, 16
"""How many numbers dropout draws at a time, at least those of a row, and the bytes each takes."""
_RADIX_COLUMNS = 1 << 16  # Numbers of 16 bits are sorted in a fifth of the time.


@dataclass(frozen=True, slots=True)
class SparseRows:
    """Where the entries of each row begin, counted from the first [R + 1], and their columns [E], ascending within a
    row, both int32 or int64; the values [E]; ``width``: F."""

    offsets_R1: Tensor
    columns_E: Tensor
    values_E: Tensor
    width: int

    @property
    def rows(self) -> int:
        return len(self.offsets_R1) - 1

    def typed(self, dtype: torch.dtype) -> "SparseRows":
        """Return the rows with values in ``dtype``."""
        return SparseRows(self.offsets_R1, self.columns_E, typed(self.values_E, dtype), self.width)

    def dense(self) -> Tensor:
        """Return the rows with their zeros [R, F], on any device."""
        out_RF = self.values_E.new_zeros(self.rows, self.width)
        counts_R = self.offsets_R1.diff().long()
        rows_R = torch.arange(0, self.rows * self.width, self.width, device=out_RF.device)
        place_E = torch.repeat_interleave(rows_R, counts_R, output_size=len(self.columns_E))
        place_E += self.columns_E.clamp(0, self.width - 1)  # a device finds damage later
        out_RF.view(-1)[place_E] = self.values_E
        return out_RF

    def times(self, weight_FO: Tensor) -> Tensor:
        """Return rows · weight [R, O]."""
        return pull(weight_FO, self.columns_E, self.offsets_R1, self.values_E)

    def transposed_times(self, gradient_RO: Tensor) -> tuple[Tensor, Tensor]:
        """Return rowsᵀ · gradient: the columns that have entries [U], ascending, and their sums [U, O]."""
        columns = self.columns_E.numpy()
        if not len(columns):
            return self.columns_E.long(), gradient_RO.new_empty(0, gradient_RO.shape[1])
        short = columns.astype(np.uint16) if self.width <= _RADIX_COLUMNS else columns
        order = np.argsort(short, kind="stable")
        in_order = short[order]
        firsts = np.append(0, np.flatnonzero(in_order[1:] != in_order[:-1]) + 1)
        rows = np.repeat(np.arange(self.rows, dtype=columns.dtype), self.offsets_R1.diff().numpy())
        offsets = torch.from_numpy(np.append(firsts, len(in_order)).astype(columns.dtype))
        values = self.values_E[torch.from_numpy(order)]
        sums_UO = pull(gradient_RO.contiguous(), torch.from_numpy(rows[order]), offsets, values)
        return torch.from_numpy(in_order[firsts].astype(np.int64)), sums_UO

    def dropped(self, seed: int, epoch: int, site: int, row_start: int, p: float) -> "SparseRows":
        """Return the rows after dropout, with the masks of dense rows from ``row_start`` on; a few rows are drawn at a
        time."""
        scale_E = torch.empty_like(self.values_E)
        at_once = max(1, DRAWN_NUMBERS // self.width)
        offsets = self.offsets_R1.numpy()
        for first in range(0, self.rows, at_once):
            last = min(first + at_once, self.rows)
            here = slice(int(offsets[first]), int(offsets[last]))
            like = self.values_E.new_empty(1).expand(last - first, self.width)
            scale_RF = keep_scale(seed, epoch, site, row_start + first, like, p)
            row_E = np.repeat(np.arange(last - first), np.diff(offsets[first : last + 1]))
            scale_E[here] = scale_RF[torch.from_numpy(row_E), self.columns_E[here].long()]
        return SparseRows(self.offsets_R1, self.columns_E, self.values_E * scale_E, self.width)
