# SPDX-License-Identifier: Apache-2.0
"""Mean and variance of columns over all rows, from tiles, and the gradients of both.

Tiles give count, mean and sum of squared deviations; two such are one by the formulas of Chan, Golub and LeVeque
("Updating formulae and a pairwise algorithm for computing sample variances", 1979), which lose no digits however far
the mean is from zero. Sums are held in float64 and added in the order of the tiles, so results do not depend on
plans, budgets or threads.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

MOMENTS_BYTES = 8
"""That ``tile_moments`` takes for every number."""


@dataclass(frozen=True, slots=True)
class TileMoments:
    """Of one tile's rows: their number, mean [C] and sum of squared deviations from it [C]; float64."""

    count: int
    mean: Tensor
    deviations: Tensor


def tile_moments(rows_RC: Tensor) -> TileMoments:
    """The moments of the rows at hand. Takes one copy of them in float64 (``MOMENTS_BYTES``)."""
    rows = rows_RC.double()
    mean = rows.mean(dim=0)
    centred = rows - mean if rows is rows_RC else rows.sub_(mean)
    return TileMoments(rows_RC.shape[0], mean, centred.square_().sum(dim=0))


class Statistics:
    """The moments of one matrix of C columns, as far as its tiles are there.

    ``update`` is told the moments when they are complete: mean, biased variance, number of rows. Tiles are added by
    one thread, moments are read by many, after the last tile.
    """

    def __init__(self, columns: int, update: Callable[[Tensor, Tensor, int], None] | None) -> None:
        self._columns = columns
        self._update = update
        self.begin()

    def begin(self) -> None:
        """Forget all tiles."""
        self._count = 0
        self._mean, self._deviations, self._d_mean, self._d_variance = (
            torch.zeros(self._columns, dtype=torch.float64) for _ in range(4)
        )

    @property
    def nbytes(self) -> int:
        return 4 * 8 * self._columns

    def add(self, tile: TileMoments, *, rows: int) -> None:
        """Take in a tile; ``rows`` is how many there will be in all."""
        self._go_to(tile.mean.device)
        total = self._count + tile.count
        delta = tile.mean - self._mean
        self._mean = self._mean + delta * (tile.count / total)
        self._deviations = self._deviations + tile.deviations + delta.square() * (self._count * tile.count / total)
        self._count = total
        if total == rows and self._update is not None:
            self._update(self._mean, self._deviations / total, total)

    def add_gradients(self, d_mean: Tensor, d_variance: Tensor) -> None:
        """Take in what a tile found for the gradients of both moments."""
        self._go_to(d_mean.device)
        self._d_mean += d_mean.double()
        self._d_variance += d_variance.double()

    def _go_to(self, place: torch.device) -> None:
        """Be where tiles are computed."""
        if self._mean.device != place:
            self._mean, self._deviations = self._mean.to(place), self._deviations.to(place)
            self._d_mean, self._d_variance = self._d_mean.to(place), self._d_variance.to(place)

    def moments(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Mean and biased variance, [C] each."""
        return self._mean.to(dtype), (self._deviations / self._count).to(dtype)

    def gradient(self, rows_RC: Tensor) -> Tensor:
        """What the gradients of both moments add to those of some rows of the matrix itself, [R, C]."""
        dtype = rows_RC.dtype
        slope = (2 * self._d_variance / self._count).to(dtype)
        level = (self._d_mean / self._count).to(dtype)
        return (rows_RC - self._mean.to(dtype)) * slope + level
