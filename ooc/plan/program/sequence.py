# SPDX-License-Identifier: Apache-2.0
"""The order in which a program touches blocks, known before anything runs.

A program is a sequence of *steps*: some rows of a row pass, or some rows of one slab of a column pass. A *span* is
a block in use: from the first to the last step that reads it, or that adds rows to it. Blocks are numbered
throughout a plan: slab by slab within a matrix, matrix by matrix, the arrays of edges cut like matrices.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property, lru_cache
from heapq import merge
from itertools import accumulate, chain, pairwise
from operator import attrgetter
from typing import NamedTuple

from ooc.plan.layout.grid import Grid
from ooc.plan.layout.layout import Layout
from ooc.plan.layout.passes import (
    ColumnPass,
    MatrixPlan,
    Pass,
    Passes,
    RowPass,
    blocks_of,
    column_step_rows,
    direct_slabs,
    edge_grid,
    edges_name,
    edges_swept,
    row_step_rows,
    slabs_beside,
)
from ooc.plan.program.columns import Columns
from ooc.plan.workload import EdgesKey, Kind, Share, Topology, Workload


class Use(IntEnum):
    """What a span does with its block."""

    READ = 0
    WRITE = 1
    COPY = 2
    """Read into a slab buffer: from a frame if the block is in memory, from the SSD straight there if it is not."""
    UPDATE = 3
    """Read, and its rows replaced where they lie."""

    def __init__(self, number: int) -> None:
        """Attributes, no properties: whoever goes through spans asks each."""
        self.reads = number in (0, 3)
        """Whether its block is read into a frame."""
        self.writes = number in (1, 3)
        """Whether it leaves its block in a frame as the SSD does not have it."""


class Span(NamedTuple):
    """Block ``block`` is in use from step ``first`` to step ``last``."""

    first: int
    last: int
    block: int
    use: Use


def _span(first: int, last: int, block: int, use: int) -> Span:
    return Span(first, last, block, _USES[use])


_USES = tuple(Use)
READING, WRITING = ({int(use) for use in Use if use.reads}, {int(use) for use in Use if use.writes})
"""By number, as columns have them."""
_FIRST, _IN_ORDER = attrgetter("first"), attrgetter("first", "use", "block")


def spans_of(spans: Iterable[Span] = ()) -> Columns[Span]:
    return Columns("iiib", _span, spans)


class Step(NamedTuple):
    """Rows ``start:stop`` of pass ``at`` of a program; ``slab`` of its source's columns, -1 in a row pass that pulls
    no slab. ``edges``: of a direction's edges those that are pulled along in this step, but for fewer than a part's at
    either end, where rows are cut between parts (None: all of the rows)."""

    at: int
    slab: int
    start: int
    stop: int
    edges: range | None = None


def _step(at: int, slab: int, start: int, stop: int, low: int, high: int) -> Step:
    return Step(at, slab, start, stop, None if low < 0 else range(low, high))


def _numbers_of(step: Step) -> tuple[int, ...]:
    at, slab, start, stop, edges = step
    return (at, slab, start, stop, *((-1, -1) if edges is None else (edges.start, edges.stop)))


@dataclass(frozen=True)
class BlockTable:
    """The numbers of all blocks: those of ``names[i]`` begin at ``bases[i]``, and ``lasting[i]``: they are there in
    every epoch. ``own[i]``: the rows that are read and written, where a file is of several processes (None: all)."""

    names: tuple[str, ...]
    bases: tuple[int, ...]
    grids: tuple[Grid, ...]
    lasting: tuple[bool, ...]
    own: tuple[range | None, ...]

    @classmethod
    def of(cls, found: dict[str, tuple[Grid, bool, range | None]]) -> "BlockTable":
        """By name: the grid, whether it lasts, and the own rows."""
        grids, lasting, own = zip(*found.values(), strict=True)
        bases = accumulate((grid.blocks * grid.slabs for grid in grids[:-1]), initial=0)
        return cls(tuple(found), tuple(bases), grids, lasting, own)

    def base(self, name: str) -> int:
        return self._base[name]

    @cached_property
    def _base(self) -> dict[str, int]:
        return dict(zip(self.names, self.bases, strict=True))

    def lasts(self, block: int) -> bool:
        return self.lasting[bisect_right(self.bases, block) - 1]

    def where(self, block: int) -> tuple[str, int, int]:
        """(matrix, slab, row block) of ``block``."""
        at = bisect_right(self.bases, block) - 1
        slab, row_block = divmod(block - self.bases[at], self.grids[at].blocks)
        return self.names[at], slab, row_block

    def nbytes(self, block: int) -> int:
        """Bytes of ``block`` that are read from the SSD, or written there."""
        return self._sizes[block]

    def memory_nbytes(self, block: int) -> int:
        """Bytes of ``block`` in memory, where it has a place for every row."""
        return self._memory_sizes[block]

    @cached_property
    def _sizes(self) -> list[int]:
        return self._counted(self.own)

    @cached_property
    def _memory_sizes(self) -> list[int]:
        return self._counted([None] * len(self.grids)) if any(own is not None for own in self.own) else self._sizes

    def _counted(self, rows: Sequence[range | None]) -> list[int]:
        """By block; a plan asks for each many times. All blocks of a slab but the last are of one size."""
        sizes: list[int] = []
        for grid, own in zip(self.grids, rows, strict=True):
            last = grid.blocks - 1
            for slab in range(grid.slabs):
                if own is not None:
                    sizes += [len(grid.part(block, own)) * grid.row_bytes(slab) for block in range(grid.blocks)]
                    continue
                sizes += [grid.block_nbytes(slab, 0)] * last
                sizes.append(grid.block_nbytes(slab, last))
        return sizes


def block_table(layout: Layout, workload: Workload) -> BlockTable:
    """Numbers for the blocks of all matrices, then of the topologies with what edges carry. Links do not last: they may
    be others in every step."""
    found: dict[str, tuple[Grid, bool, range | None]] = {}
    for name, planned in layout.matrices.items():
        kind, shared = planned.matrix.kind, workload.share is not None and planned.matrix.kind is Kind.LEARNT
        own = workload.own(planned.matrix.space, planned.grid.rows)
        found[name] = planned.grid, kind.lasts, own if shared else None
    found |= {
        edges_name(direction, data): (edge_grid(array, topology.edges, layout.frame_bytes), direction.lasts, None)
        for direction, topology in swept(layout, workload).items()
        for data, array in topology.arrays.items()
    }
    return BlockTable.of(found)


def swept(layout: Layout, workload: Workload) -> dict[EdgesKey, Topology]:
    """The directions over whose edges some pass goes: without shuffles, none may need those out of rows."""
    passes = [item for program in layout.programs.values() for item in program]
    names = {name for item in passes for name, _, _ in edges_swept(item, workload)}
    return {side: topology for side, topology in workload.topologies.items() if edges_name(side) in names}


@lru_cache(maxsize=64)
def _row_bounds(start: int, stop: int, step_rows: int) -> tuple[int, ...]:
    """Where steps over rows ``start:stop`` begin and end, at least one: the same numbers for all passes over the same
    rows, as there are thousands of them. Steps of all processes are cut alike, but for those that two of them share."""
    return (start, *range((start // step_rows + 1) * step_rows, stop, step_rows), stop)


def row_spans(
    grid: Grid, base: int, slabs: range, first_step: int, steps: Sequence[Step], height: int, use: Use
) -> Iterator[list[Span]]:
    """Uses of the blocks of ``slabs`` by ``steps``, consecutive steps from number ``first_step`` on: those of some rows
    after those of others, by first step.

    The steps go over rows in one direction. They are of one ``height``, which divides the blocks' or is a multiple of
    it, but for the first and the last rows.
    """
    start, count = min(steps[0].start, steps[-1].start), len(steps)
    rows = min(grid.rows, max(steps[0].stop, steps[-1].stop))
    if rows <= start or not slabs:
        return
    reverse, blocks, before = steps[0].start > steps[-1].start, grid.blocks, start // height
    of_rows = range(start // grid.block_rows, -(-rows // grid.block_rows))
    for block in reversed(of_rows) if reverse else of_rows:
        low = max(start, block * grid.block_rows) // height - before
        high = min(count, -(-min(rows, (block + 1) * grid.block_rows) // height) - before) - 1
        first, last = (count - 1 - high, count - 1 - low) if reverse else (low, high)
        first, last = first_step + first, first_step + last
        yield [Span(first, last, base + k * blocks + block, use) for k in slabs]


def edges_of_step(step: Step, topology: Topology, workload: Workload) -> range:
    """Those that it reads: from up to a part's before those that it is for, where a row may have been cut."""
    edges, tile_rows = topology.tile_edges, workload.tile_rows
    low, high = edges[step.start // tile_rows], edges[min(len(edges) - 1, -(-step.stop // tile_rows))]
    if step.edges is None:
        return range(low, high)
    return range(max(low, step.edges.start - workload.part_edges + 1), step.edges.stop)


def edge_spans(
    topology: Topology, grid: Grid, base: int, workload: Workload, first_step: int, steps: Sequence[Step]
) -> list[Span]:
    """Reads of the blocks of an array of the edges by ``steps``, one sweep over the rows in one direction."""
    spans: list[Span] = []
    open_spans: dict[int, int] = {}
    for number, step in enumerate(steps, start=first_step):
        read = edges_of_step(step, topology, workload)
        low, high = read.start, read.stop
        now = range(low // grid.block_rows, (high - 1) // grid.block_rows + 1) if high > low else range(0)
        for block in [b for b in open_spans if b not in now]:
            spans.append(Span(open_spans.pop(block), number - 1, base + block, Use.READ))
        for block in now:
            open_spans.setdefault(block, number)
    end = first_step + len(steps) - 1
    spans += [Span(first, end, base + block, Use.READ) for block, first in open_spans.items()]
    return spans


def uses_of(
    passes: Passes, layout: Layout, workload: Workload, blocks: BlockTable
) -> tuple[Columns[Step], list[tuple[int, int]], Columns[Span]]:
    """Steps, the (first, stop) step of each pass, and every use of a block, by first step."""
    steps, spans = Columns("iiqqqq", _step), spans_of()
    bounds: list[tuple[int, int]] = []
    held: list[Span] = []
    before = 0
    for item in passes:
        first = len(steps)
        if not isinstance(item, ColumnPass):
            sweeps = _row_uses(item, first, passes, layout, workload, blocks)
        elif item.processes == 1:
            sweeps = _column_uses(item, first, passes, layout, workload, blocks)
        else:
            sweeps = iter([_sharded_uses(item, first, passes, layout, workload, blocks)])
        for mine, since, used in sweeps:
            if len(held) > _AT_ONCE and since > before:
                held.sort(key=_IN_ORDER)
                done, before = bisect_left(held, since, key=_FIRST), since
                spans.extend(held[:done])
                del held[:done]
            steps.extend(list(map(_numbers_of, mine)))
            held += used
        bounds.append((first, len(steps)))
    held.sort(key=_IN_ORDER)
    spans.extend(held)
    return steps, bounds, spans


_AT_ONCE = 4096
"""Uses that are put in order at once, about: all of a program's would take several times what is made of them."""
_Swept = tuple[list[Step], int, list[Span]]
"""Steps, and uses of blocks, of which none is before the step that is given, nor are those that come later."""


def _row_uses(
    item: RowPass, first: int, passes: Passes, layout: Layout, workload: Workload, blocks: BlockTable
) -> Iterator[_Swept]:
    """Rows after rows."""
    slab = item.sweeps.slabs if item.sweeps else -1
    own = workload.own(item.space, item.rows)
    height = row_step_rows(item, layout.step_rows)
    bounds = _row_bounds(own.start, own.stop, height)
    steps = [Step(item.index, slab, *each) for each in pairwise(bounds)]
    if item.reverse:
        steps.reverse()
    yield steps, first, _edges(item, first, steps, layout, workload, blocks)
    by_step: list[Iterator[list[Span]]] = []
    for name, slabs, is_stored in blocks_of(item, layout.matrices, passes):
        use = Use.READ if not is_stored else Use.UPDATE if name in item.replaced else Use.WRITE
        by_step.append(row_spans(layout.matrices[name].grid, blocks.base(name), slabs, first, steps, height, use))
    for spans in merge(*by_step, key=lambda spans: spans[0].first):
        yield [], spans[0].first, spans


def _column_uses(
    item: ColumnPass, first: int, passes: Sequence[Pass], layout: Layout, workload: Workload, blocks: BlockTable
) -> Iterator[_Swept]:
    """Sweep by sweep; a slab that is left to the row pass is copied with that one's first step."""
    source, target = layout.matrices[item.pull.source].grid, layout.matrices[item.output].grid
    height = column_step_rows(item, layout.matrices, layout.step_rows)
    own = workload.own(item.space, item.rows)
    whole = [Step(item.index, 0, *bounds) for bounds in pairwise(_row_bounds(own.start, own.stop, height))]
    pieces = [_pieces(step, item, workload) for step in whole]
    begins = [*accumulate(map(len, pieces), initial=0)]
    sweep = begins[-1]
    copies, direct = _written_blocks(item, passes, layout, workload), direct_slabs(passes, item)
    copied_in: dict[int, list[int]] = {}  # by sweep: slabs
    for slab in range(direct, source.slabs):
        copied_in.setdefault(max(0, slab - item.slab_buffers + 1), []).append(slab)
    for slab in range(item.slabs):
        at = first + slab * sweep
        mine = [piece._replace(slab=slab) for of_step in pieces for piece in of_step]
        of_rows = [row_spans(target, blocks.base(item.output), range(slab, slab + 1), 0, whole, height, Use.WRITE)]
        for name in item.pull.own:
            planned = layout.matrices[name]
            if not planned.whole:
                slabs = slabs_beside(source, planned.grid, slab)
                of_rows.append(row_spans(planned.grid, blocks.base(name), slabs, 0, whole, height, Use.READ))
        spans = [
            Span(at + begins[low], at + begins[high + 1] - 1, block, use)
            for low, high, block, use in chain.from_iterable(chain.from_iterable(of_rows))
        ]
        spans += _edges(item, at, mine, layout, workload, blocks)
        for begun in (slab, item.slabs) if slab + 1 == item.slabs else (slab,):
            when = first + begun * sweep
            bases = (blocks.base(item.pull.source) + copied * source.blocks for copied in copied_in.get(begun, ()))
            spans += [Span(when, when, base + block, Use.COPY) for base in bases for block in copies]
        yield mine, at, spans


def _pieces(step: Step, item: ColumnPass, workload: Workload) -> list[Step]:
    """The steps that a step's edges come in: one, unless they are more than the pass has at once."""
    most = item.edges_at_once
    if most is None:
        return [step]
    read = edges_of_step(step, workload.topologies[item.pull.direction], workload)
    if len(read) <= most:
        return [step]
    most -= workload.part_edges - 1
    return [step._replace(edges=read[low : low + most]) for low in range(0, len(read), most)]


def _sharded_uses(
    item: ColumnPass, first: int, passes: Sequence[Pass], layout: Layout, workload: Workload, blocks: BlockTable
) -> _Swept:
    """Slabs that are sharded: one for the rows of all, own ones last, with which those of all slabs are stored."""
    source, target = layout.matrices[item.pull.source].grid, layout.matrices[item.output].grid
    height = column_step_rows(item, layout.matrices, layout.step_rows)
    assert workload.share is not None, "columns are sharded among several processes"
    *others, own = workload.share.in_turn(item.space, item.rows)
    copies, direct = _written_blocks(item, passes, layout, workload), direct_slabs(passes, item)
    steps: list[Step] = []
    spans: list[Span] = []
    begun = [first] * item.turns_at_once  # the first steps of this turn, and before it of the one before
    for slab in range(workload.share.rank, item.slabs, item.processes):
        begun, stored = [*begun[1:], first + len(steps)], item.turn(slab)
        for rows in (*filter(None, others), own):
            at = first + len(steps)
            mine = [Step(item.index, slab, *bounds) for bounds in pairwise(_row_bounds(rows.start, rows.stop, height))]
            spans += _edges(item, at, mine, layout, workload, blocks)
            steps += mine
        spans += chain.from_iterable(row_spans(target, blocks.base(item.output), stored, at, mine, height, Use.WRITE))
        for each in stored if slab >= direct else ():
            copied = blocks.base(item.pull.source) + each * source.blocks
            spans += [Span(begun[0], begun[0], copied + block, Use.COPY) for block in copies]
    for name, block in brought_blocks(item, layout.matrices, workload.share):
        spans.append(Span(first, first, blocks.base(name) + block, Use.COPY))
    return steps, first, spans


def brought_blocks(item: ColumnPass, matrices: Mapping[str, MatrixPlan], share: Share) -> Iterator[tuple[str, int]]:
    """What is read at the beginning of a pass whose slabs are sharded: of the matrices of which rows bring their own
    the blocks with this process's, counted from the first of each matrix."""
    for name in item.pull.own:
        planned = matrices[name]
        for block in () if planned.whole else planned.grid.blocks_with(share.own(planned.matrix.space, item.rows)):
            yield from ((name, slab * planned.grid.blocks + block) for slab in range(planned.grid.slabs))


def _written_blocks(item: ColumnPass, passes: Sequence[Pass], layout: Layout, workload: Workload) -> range:
    """The row blocks of a column pass's source that this process has rows of."""
    source = layout.matrices[item.pull.source]
    rows = next((one.rows for one in passes if item.pull.source in one.stores), source.grid.rows)
    return source.grid.blocks_with(workload.own(source.matrix.space, rows))


def _edges(
    item: Pass, first: int, steps: Sequence[Step], layout: Layout, workload: Workload, blocks: BlockTable
) -> list[Span]:
    spans: list[Span] = []
    for name, topology, array in edges_swept(item, workload):
        grid = edge_grid(array, topology.edges, layout.frame_bytes)
        spans += edge_spans(topology, grid, blocks.base(name), workload, first, steps)
    return spans
