# SPDX-License-Identifier: Apache-2.0
"""The order in which a program uses blocks, which is known before anything runs.

A program is a sequence of *steps*: some rows of a row pass, or some rows of one slab in a column pass. A *span* is one
use of a block: from the first to the last step that reads it, or writes rows of it. Blocks are numbered throughout a
plan: slab by slab within a matrix, matrix by matrix; arrays of edges are cut into blocks, too.
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
    matching_slabs,
    row_step_rows,
)
from ooc.plan.program.columns import Columns
from ooc.plan.workload import EdgesKey, Kind, Share, Topology, Workload


class Use(IntEnum):
    """What a span does with its block."""

    READ = 0
    WRITE = 1
    COPY = 2
    """Read into a slab buffer: from a frame if the block is in memory, otherwise from the SSD directly."""
    UPDATE = 3
    """Read, and its rows replaced in place."""

    def __init__(self, number: int) -> None:
        """Set attributes instead of properties, since loops over spans read them for each one."""
        self.reads = number in (0, 3)
        """Whether the block is read into a frame."""
        self.writes = number in (1, 3)
        """Whether the block in the frame differs afterwards from that on the SSD."""


class Span(NamedTuple):
    """A use of ``block`` from step ``first`` to step ``last``."""

    first: int
    last: int
    block: int
    use: Use


def _span(first: int, last: int, block: int, use: int) -> Span:
    return Span(first, last, block, _USES[use])


_USES = tuple(Use)
READING, WRITING = ({int(use) for use in Use if use.reads}, {int(use) for use in Use if use.writes})
"""The uses that read, and those that write, by number as in ``Columns``."""
_FIRST, _IN_ORDER = attrgetter("first"), attrgetter("first", "use", "block")


def spans_of(spans: Iterable[Span] = ()) -> Columns[Span]:
    return Columns("iiib", _span, spans)


class Step(NamedTuple):
    """Rows ``start:stop`` of pass ``at`` of a program. ``slab``: the slab of the source, or -1 in a row pass that pulls
    no slab. ``edges``: which of the direction's edges this step pulls along (None: all edges of the rows); where rows
    are cut between steps, it may have fewer than ``part_edges`` more or less at either end."""

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
    """The numbers of all blocks. Those of matrix ``names[i]`` begin at ``bases[i]``; ``lasting[i]``: they exist in
    every epoch; ``own[i]``: the rows that this process reads and writes of a file that several share (None: all)."""

    names: tuple[str, ...]
    bases: tuple[int, ...]
    grids: tuple[Grid, ...]
    lasting: tuple[bool, ...]
    own: tuple[range | None, ...]

    @classmethod
    def of(cls, found: dict[str, tuple[Grid, bool, range | None]]) -> "BlockTable":
        """Return the table of the grids in ``found``, by name, each with whether it lasts and with its own rows."""
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
        """Return (matrix, slab, row block) of ``block``."""
        at = bisect_right(self.bases, block) - 1
        slab, row_block = divmod(block - self.bases[at], self.grids[at].blocks)
        return self.names[at], slab, row_block

    def nbytes(self, block: int) -> int:
        """Return the bytes of ``block`` that are read from the SSD or written to it."""
        return self._sizes[block]

    def memory_nbytes(self, block: int) -> int:
        """Return the bytes of ``block`` in memory, where it has a place for every row."""
        return self._memory_sizes[block]

    @cached_property
    def _sizes(self) -> list[int]:
        return self._block_bytes(self.own)

    @cached_property
    def _memory_sizes(self) -> list[int]:
        return self._block_bytes([None] * len(self.grids)) if any(own is not None for own in self.own) else self._sizes

    def _block_bytes(self, rows: Sequence[range | None]) -> list[int]:
        """Return the bytes of every block. They are listed, since a plan asks for each many times; all blocks of a slab
        but the last have one size."""
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
    """Return the numbers of the blocks of all matrices, then of topologies with the data of their edges. Links do not
    last, since they may be different in every step."""
    found: dict[str, tuple[Grid, bool, range | None]] = {}
    for name, planned in layout.matrices.items():
        kind, shared = planned.matrix.kind, workload.share is not None and planned.matrix.kind is Kind.LEARNT
        own = workload.own(planned.matrix.space, planned.grid.rows)
        found[name] = planned.grid, kind.lasts, own if shared else None
    found |= {
        edges_name(direction, data): (edge_grid(array, topology.edges, layout.frame_bytes), direction.lasts, None)
        for direction, topology in pulled_directions(layout, workload).items()
        for data, array in topology.arrays.items()
    }
    return BlockTable.of(found)


def pulled_directions(layout: Layout, workload: Workload) -> dict[EdgesKey, Topology]:
    """Return the directions along whose edges some pass pulls. Without shuffles, the out-edges may not be needed."""
    passes = [item for program in layout.programs.values() for item in program]
    names = {name for item in passes for name, _, _ in edges_swept(item, workload)}
    return {side: topology for side, topology in workload.topologies.items() if edges_name(side) in names}


@lru_cache(maxsize=64)
def _row_bounds(start: int, stop: int, step_rows: int) -> tuple[int, ...]:
    """Return where steps over rows ``start:stop`` begin and end. It is cached, since thousands of passes go over the
    same rows. All processes cut steps alike, except for steps that two of them share."""
    return (start, *range((start // step_rows + 1) * step_rows, stop, step_rows), stop)


def row_spans(
    grid: Grid, base: int, slabs: range, first_step: int, steps: Sequence[Step], height: int, use: Use
) -> Iterator[list[Span]]:
    """Yield the uses of the blocks of ``slabs`` by consecutive ``steps``, of which the first has number ``first_step``:
    one list for each row block, by first step.

    The steps go over rows in one direction. All have the same ``height``, except the first and the last; it divides the
    height of blocks or is a multiple of it.
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
    """Return the edges that a step reads. It begins up to a part before the edges the step is for, where a row may be
    cut."""
    edges, tile_rows = topology.tile_edges, workload.tile_rows
    low, high = edges[step.start // tile_rows], edges[min(len(edges) - 1, -(-step.stop // tile_rows))]
    if step.edges is None:
        return range(low, high)
    return range(max(low, step.edges.start - workload.part_edges + 1), step.edges.stop)


def edge_spans(
    topology: Topology, grid: Grid, base: int, workload: Workload, first_step: int, steps: Sequence[Step]
) -> list[Span]:
    """Return the reads of the blocks of an edge array by ``steps``, which sweep over the rows once in one direction."""
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
    """Return the steps, the (first, stop) step of each pass, and every use of a block ordered by first step."""
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
            if len(held) > _SORTED_AT_ONCE and since > before:
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


_SORTED_AT_ONCE = 4096
"""About how many uses are sorted at once; sorting all of a program's would take several times the memory of the
result."""
_SweepUses = tuple[list[Step], int, list[Span]]
"""Steps, and uses of blocks; neither these uses nor later ones begin before the given step."""


def _row_uses(
    item: RowPass, first: int, passes: Passes, layout: Layout, workload: Workload, blocks: BlockTable
) -> Iterator[_SweepUses]:
    """Yield the steps of a row pass and its uses of blocks."""
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
    item: ColumnPass, first: int, passes: Passes, layout: Layout, workload: Workload, blocks: BlockTable
) -> Iterator[_SweepUses]:
    """Yield the steps of a column pass and its uses of blocks, sweep by sweep. A slab that is left to the row pass is
    copied with that pass's first step."""
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
                slabs = matching_slabs(source, planned.grid, slab)
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
    """Return the steps into which a step's edges are divided: one, unless the edges are more than the pass has at
    once."""
    most = item.edges_at_once
    if most is None:
        return [step]
    read = edges_of_step(step, workload.topologies[item.pull.direction], workload)
    if len(read) <= most:
        return [step]
    most -= workload.part_edges - 1
    return [step._replace(edges=read[low : low + most]) for low in range(0, len(read), most)]


def _sharded_uses(
    item: ColumnPass, first: int, passes: Passes, layout: Layout, workload: Workload, blocks: BlockTable
) -> _SweepUses:
    """Return the steps and uses of a pass with sharded slabs. Each slab of this process is pulled for everyone's rows,
    its own last; with those, the rows of all slabs are stored."""
    source, target = layout.matrices[item.pull.source].grid, layout.matrices[item.output].grid
    height = column_step_rows(item, layout.matrices, layout.step_rows)
    assert workload.share is not None, "columns are sharded among several processes"
    *others, own = workload.share.in_turn(item.space, item.rows)
    copies, direct = _written_blocks(item, passes, layout, workload), direct_slabs(passes, item)
    steps: list[Step] = []
    spans: list[Span] = []
    begun = [first] * item.turns_at_once  # the first steps of this turn and of the one before
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
    """Yield the blocks read at the beginning of a pass with sharded slabs: the blocks of own rows that hold this
    process's rows, counted from the first block of each matrix."""
    for name in item.pull.own:
        planned = matrices[name]
        for block in () if planned.whole else planned.grid.blocks_with(share.own(planned.matrix.space, item.rows)):
            yield from ((name, slab * planned.grid.blocks + block) for slab in range(planned.grid.slabs))


def _written_blocks(item: ColumnPass, passes: Passes, layout: Layout, workload: Workload) -> range:
    """Return the row blocks of a column pass's source that hold rows of this process."""
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
