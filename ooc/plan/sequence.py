# SPDX-License-Identifier: Apache-2.0
"""The order in which a program touches blocks, known before anything runs.

A program is a sequence of *steps*: some rows of a row pass, or some rows of one slab of a column pass. A *span* is
a block in use: from the first to the last step that reads it, or that adds rows to it. Blocks are numbered
throughout a plan: slab by slab within a matrix, matrix by matrix, the arrays of edges cut like matrices.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property, lru_cache
from itertools import pairwise
from math import gcd
from typing import NamedTuple

from ooc.plan.grid import ALIGNMENT_BYTES, Grid, align_up
from ooc.plan.workload import EdgeArray, Topology


class Use(IntEnum):
    """What a span does with its block."""

    READ = 0
    WRITE = 1
    COPY = 2
    """Read into a slab buffer: from a frame if the block is in memory, from the SSD straight there if it is not."""


class Span(NamedTuple):
    """Block ``block`` is in use from step ``first`` to step ``last``."""

    first: int
    last: int
    block: int
    use: Use


class Step(NamedTuple):
    """Rows ``start:stop`` of pass ``at`` of a program; ``slab`` of its source's columns, -1 in a row pass that pulls
    no slab."""

    at: int
    slab: int
    start: int
    stop: int


@dataclass(frozen=True)
class BlockTable:
    """The numbers of all blocks: those of ``names[i]`` begin at ``bases[i]``."""

    names: tuple[str, ...]
    bases: tuple[int, ...]
    grids: tuple[Grid, ...]

    @classmethod
    def of(cls, grids: dict[str, Grid]) -> "BlockTable":
        bases, at = [], 0
        for grid in grids.values():
            bases.append(at)
            at += grid.blocks * grid.slabs
        return cls(tuple(grids), tuple(bases), tuple(grids.values()))

    def base(self, name: str) -> int:
        return self.bases[self.names.index(name)]

    def where(self, block: int) -> tuple[str, int, int]:
        """(matrix, slab, row block) of ``block``."""
        at = bisect_right(self.bases, block) - 1
        slab, row_block = divmod(block - self.bases[at], self.grids[at].blocks)
        return self.names[at], slab, row_block

    def nbytes(self, block: int) -> int:
        """Bytes of ``block`` on the SSD."""
        return self._sizes[block]

    @cached_property
    def _sizes(self) -> list[int]:
        """By block; a plan asks for each many times. All blocks of a slab but the last are of one size."""
        sizes: list[int] = []
        for grid in self.grids:
            last = grid.blocks - 1
            for slab in range(grid.slabs):
                sizes += [grid.block_nbytes(slab, 0)] * last
                sizes.append(grid.block_nbytes(slab, last))
        return sizes


def edge_grid(array: EdgeArray, edges: int, frame_bytes: int) -> Grid:
    """An array of one direction's edges, padding to whole pages included, cut into frames at whole pages."""
    paged_rows = ALIGNMENT_BYTES // gcd(ALIGNMENT_BYTES, array.edge_bytes)
    height = frame_bytes // array.edge_bytes
    height -= height % paged_rows if height > paged_rows else 0
    return Grid(align_up(max(1, edges), paged_rows), array.columns, array.itemsize, height, array.columns)


def row_steps(at: int, rows: int, step_rows: int, slab: int, reverse: bool) -> list[Step]:
    """The steps of row pass ``at``, which pulls ``slab`` (-1: none)."""
    steps = [Step(at, slab, start, stop) for start, stop in pairwise(_row_bounds(rows, step_rows))]
    return steps[::-1] if reverse else steps


@lru_cache(maxsize=8)
def _row_bounds(rows: int, step_rows: int) -> tuple[int, ...]:
    """Where steps begin and end: the same numbers for all passes over as many rows, as there are thousands of them."""
    return (*range(0, rows, step_rows), rows)


def column_steps(at: int, rows: int, step_rows: int, slabs: int) -> list[Step]:
    """The steps of column pass ``at``: one sweep over the rows for each slab."""
    bounds = _row_bounds(rows, step_rows)
    return [Step(at, k, start, stop) for k in range(slabs) for start, stop in pairwise(bounds)]


def row_spans(
    grid: Grid, base: int, slabs: range, first_step: int, steps: Sequence[Step], use: Use, *, column: bool = False
) -> list[Span]:
    """Uses of the blocks of ``slabs`` by ``steps``, consecutive steps from number ``first_step`` on.

    The steps go over rows in one direction, all of one height that divides the blocks', from row 0 or down to it.
    """
    if not steps:
        return []
    height = max(step.stop - step.start for step in steps)
    count = len(steps)
    rows = min(grid.rows, max(step.stop for step in steps))
    reverse, blocks = steps[0].start > steps[-1].start, grid.blocks
    spans = []
    for block in range(-(-rows // grid.block_rows)):
        low = block * grid.block_rows // height
        high = min(count, -(-min(rows, (block + 1) * grid.block_rows) // height)) - 1
        first, last = (count - 1 - high, count - 1 - low) if reverse else (low, high)
        first, last = first_step + first, first_step + last
        spans += [Span(first, last, base + k * blocks + block, use) for k in slabs]
    return spans


def edge_spans(
    topology: Topology, grid: Grid, base: int, tile_rows: int, first_step: int, steps: Sequence[Step]
) -> list[Span]:
    """Reads of the blocks of an array of the edges by ``steps``, one sweep over the rows in one direction."""
    edges = topology.tile_edges
    last_tile = len(edges) - 1
    spans: list[Span] = []
    open_spans: dict[int, int] = {}
    for number, step in enumerate(steps, start=first_step):
        low = edges[step.start // tile_rows]
        high = edges[min(last_tile, -(-step.stop // tile_rows))]
        now = range(low // grid.block_rows, (high - 1) // grid.block_rows + 1) if high > low else range(0)
        for block in [b for b in open_spans if b not in now]:
            spans.append(Span(open_spans.pop(block), number - 1, base + block, Use.READ))
        for block in now:
            open_spans.setdefault(block, number)
    end = first_step + len(steps) - 1
    spans += [Span(first, end, base + block, Use.READ) for block, first in open_spans.items()]
    return spans


def copy_spans(grid: Grid, base: int, slab: int, step: int, rows: int) -> list[Span]:
    """The first ``rows`` rows of a slab copied to its buffer at ``step``."""
    first = base + slab * grid.blocks
    return [Span(step, step, first + block, Use.COPY) for block in range(-(-rows // grid.block_rows))]
