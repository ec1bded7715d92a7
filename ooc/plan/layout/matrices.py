# SPDX-License-Identifier: Apache-2.0
"""How each matrix of a plan is cut, and which of them have no blocks, but are shuffled."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ooc.plan.layout.grid import Grid, align_up
from ooc.plan.layout.shuffle import Shuffle
from ooc.plan.workload import Direction, EdgeData, Matrix


@dataclass(frozen=True, slots=True)
class MatrixPlan:
    """How one matrix is cut, and whether it waits whole in a region, never touching the SSD.

    Regions hold values of ``region_itemsize`` bytes, those that are pulled; blocks may hold narrower ones. ``shuffle``:
    it has no blocks, and goes through a file like that, as partial sums of its rows or as another matrix's rows.
    """

    matrix: Matrix
    grid: Grid
    region_itemsize: int
    whole: bool = False
    shuffle: Shuffle | None = None

    @property
    def in_frames(self) -> bool:
        """Whether its blocks lie in frames where they are used."""
        return not self.whole and self.shuffle is None

    @property
    def region_nbytes(self) -> int:
        """Bytes of the matrix whole in a region."""
        return self.matrix.rows * self.matrix.columns * self.region_itemsize

    def slab_stride(self) -> int:
        """Bytes from one slab buffer to the next."""
        return align_up(self.grid.rows * self.grid.width(0) * self.region_itemsize)


def edges_name(direction: Direction, data: EdgeData | None = None) -> str:
    """What the topology of ``direction`` is called among the matrices, ``in-edges``, ``out-edges``, and what edges
    carry: ``in-weight``, ``in-features``, …"""
    return f"{direction.value}-{'edges' if data is None else data.value}"


def shuffles_in(names: Iterable[str], matrices: Mapping[str, MatrixPlan]) -> dict[str, Shuffle]:
    """Those of ``names`` that have no blocks."""
    planned = ((name, matrices[name].shuffle) for name in names)
    return {name: shuffle for name, shuffle in planned if shuffle is not None}
