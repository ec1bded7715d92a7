# SPDX-License-Identifier: Apache-2.0
"""Some rows of a matrix, which are all that a bucket of targets gathers from it: seen as if they were the matrix."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ooc.errors import StoreError


@dataclass(frozen=True, slots=True)
class BucketRows:
    """Rows ``numbers_M``, ascending, int64, of a matrix of ``height`` rows: ``values_MC``, whose rows may lie apart."""

    height: int
    numbers_M: Tensor
    values_MC: Tensor

    def __len__(self) -> int:
        """Rows of the matrix."""
        return self.height

    def __getitem__(self, rows: slice) -> Tensor:
        """Consecutive rows, which must all be there."""
        start, stop, _ = rows.indices(self.height)
        first = int(torch.searchsorted(self.numbers_M, start))
        self._check(self.numbers_M[first : first + stop - start], torch.arange(start, stop))
        return self.values_MC[first : first + stop - start]

    def index_select(self, dim: int, rows_S: Tensor) -> Tensor:
        """Any rows, which must be there; as of the matrix."""
        assert dim == 0
        places_S = torch.searchsorted(self.numbers_M, rows_S)
        if len(rows_S):
            self._check(self.numbers_M[places_S.clamp(max=len(self.numbers_M) - 1)], rows_S)
        return self.values_MC.index_select(0, places_S)

    def new_zeros(self, rows: int, columns: int) -> Tensor:
        """As of the matrix."""
        return self.values_MC.new_zeros(rows, columns)

    @staticmethod
    def _check(found: Tensor, wanted: Tensor) -> None:
        if not torch.equal(found, wanted):
            raise StoreError(
                "rows that have an edge into others have not been dealt out to them: the edges of both directions are "
                "not alike; ooc verify tells where; convert again"
            )
