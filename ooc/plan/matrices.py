# SPDX-License-Identifier: Apache-2.0
"""How each matrix of a plan is cut, and which of them have no blocks, but are spilled as runs or dealt out."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ooc.plan.deals import Deal
from ooc.plan.grid import Grid, align_up
from ooc.plan.runs import Runs
from ooc.plan.workload import Direction, EdgeData, Matrix


@dataclass(frozen=True, slots=True)
class MatrixPlan:
    """How one matrix is cut, and whether it waits whole in a region, never touching the SSD.

    Regions hold values of ``region_itemsize`` bytes, those that are pulled; blocks may hold narrower ones. ``runs``: it
    has no blocks, and is the sums of what is spilled like that. ``deal``: nor has this one, it is another one's rows,
    dealt out like that.
    """

    matrix: Matrix
    grid: Grid
    region_itemsize: int
    whole: bool = False
    runs: Runs | None = None
    deal: Deal | None = None

    @property
    def in_frames(self) -> bool:
        """Whether its blocks lie in frames where they are used."""
        return not self.whole and self.runs is None and self.deal is None

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


def runs_in(names: Iterable[str], matrices: Mapping[str, MatrixPlan]) -> dict[str, Runs]:
    """Those of ``names`` that are sums of runs."""
    planned = ((name, matrices[name].runs) for name in names)
    return {name: runs for name, runs in planned if runs is not None}


def deals_in(names: Iterable[str], matrices: Mapping[str, MatrixPlan]) -> dict[str, Deal]:
    """Those of ``names`` that are rows dealt out."""
    planned = ((name, matrices[name].deal) for name in names)
    return {name: deal for name, deal in planned if deal is not None}


def streamed_in(names: Iterable[str], matrices: Mapping[str, MatrixPlan]) -> dict[str, Runs | Deal]:
    """Those of ``names`` that have no blocks: sums of runs, and rows dealt out."""
    planned = ((name, matrices[name].runs or matrices[name].deal) for name in names)
    return {name: one for name, one in planned if one is not None}
