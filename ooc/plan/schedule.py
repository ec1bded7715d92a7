# SPDX-License-Identifier: Apache-2.0
"""From choices to a complete plan: passes in order, regions, frames, programs unrolled.

A stage whose pulled matrix is in memory whole becomes one row pass; otherwise a column pass followed by a row pass
that loads the pulled rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import sub

from ooc.plan.grid import Grid, align_up, block_height
from ooc.plan.plan import ColumnPass, MatrixPlan, Pass, Plan, Region, RowPass, edges_name, passes_using
from ooc.plan.program import Program, unroll
from ooc.plan.replacement import Uses
from ooc.plan.sequence import (
    BlockTable,
    Span,
    Step,
    Use,
    column_steps,
    copy_spans,
    edge_grid,
    edge_spans,
    row_spans,
    row_steps,
)
from ooc.plan.staging import IN_TRANSFER, Staging, stage_below
from ooc.plan.workload import EdgeData, Kind, Matrix, Pull, Stage, Topology, Workload

PULL_TILE_ROWS = 2048
"""Rows of a slab that one thread pulls at a time; sums of different rows are independent, so any number would do."""
_BYTES_PER_TILE_EDGE = 32
"""What a tile's edges take besides: the neighbours beyond a source's rows left out (a mask, a running count, the
indices kept), and indices that lie in two frames put together."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How a pulled matrix is held: ``columns`` at a time (0: whole), in ``buffers`` slab buffers."""

    columns: int
    buffers: int


@dataclass(frozen=True)
class Choice:
    """All that the planner decides; replacement follows from it. ``cuts``: by pulled matrix. ``spare_writes``: rather
    read from the SSD again than write to it (``Uses``)."""

    step_rows: int
    cuts: dict[str, Cut] = field(default_factory=dict)
    spare_writes: bool = False


@dataclass(frozen=True)
class Layout:
    """The passes that a choice leads to, how matrices are cut, and the memory that is spoken for."""

    step_rows: int
    frame_bytes: int
    matrices: dict[str, MatrixPlan]
    programs: dict[str, tuple[Pass, ...]]
    regions: dict[str, tuple[Region, ...]]
    scratch_bytes: int
    spare_writes: bool = False
    heaviest: Pass | None = None
    """The pass of which ``scratch_bytes`` bounds the temporaries."""


def pulled_sources(workload: Workload) -> dict[str, int]:
    """Columns of every matrix that some stage pulls."""
    return {
        stage.pull.source: workload.matrices[stage.pull.source].columns
        for stages in workload.programs.values()
        for stage in stages
        if stage.pull
    }


def column_units(workload: Workload) -> dict[str, int]:
    """Columns that stay together in a slab, by matrix: those of a group, where one is pulled by groups."""
    pulls = [stage.pull for stages in workload.programs.values() for stage in stages if stage.pull]
    return {p.source: workload.matrices[p.source].columns // p.per_edge.groups for p in pulls if p.per_edge}


def summed_sources(workload: Workload) -> frozenset[str]:
    """The matrices of which every pull is a plain sum."""
    pulls = [stage.pull for stages in workload.programs.values() for stage in stages if stage.pull]
    return frozenset(p.source for p in pulls) - {p.source for p in pulls if p.per_edge}


def scattered_matrices(workload: Workload) -> frozenset[str]:
    """The matrices that some pull scatters to, which are always in memory whole."""
    pulls = [stage.pull for stages in workload.programs.values() for stage in stages if stage.pull]
    return frozenset(name for pull in pulls for name in pull.added_to)


def widest_row_bytes(workload: Workload) -> int:
    """Bytes of the widest row that a block may hold, what is pulled included."""
    stored = [m.columns * m.itemsize for m in workload.matrices.values()]
    pulled = [
        stage.pull.per_edge.columns * workload.matrices[stage.pull.source].itemsize
        for stages in workload.programs.values()
        for stage in stages
        if stage.pull and stage.pull.per_edge
    ]
    return max([*stored, *pulled], default=1)


def lay_out(workload: Workload, choice: Choice) -> Layout:
    """Passes, grids and regions. Pure; whether it fits is for ``frames_needed`` and the caller."""
    arrays = [array for t in workload.topologies.values() for array in t.arrays.values()]
    values = max((array.itemsize for array in arrays), default=1)
    widest_edge = max((array.edge_bytes for array in arrays), default=1)
    frame_bytes = align_up(max(choice.step_rows * max(widest_row_bytes(workload), values), widest_edge))
    units, scattered = column_units(workload), scattered_matrices(workload)
    matrices = {
        name: _plan_matrix(matrix, choice, frame_bytes, workload, _width(matrix, choice, units.get(name, 1)))
        for name, matrix in workload.matrices.items()
    }
    matrices |= {name: replace(matrices[name], whole=True) for name in scattered}
    programs: dict[str, tuple[Pass, ...]] = {}
    for name, stages in workload.programs.items():
        passes: list[Pass] = []
        for stage in stages:
            passes += _passes(stage, len(passes), matrices, workload, choice, frame_bytes)
        programs[name] = tuple(passes)
    regions = {name: _place(_wanted(passes, matrices), frame_bytes) for name, passes in programs.items()}
    scratch, heaviest = 0, None
    for item in (item for passes in programs.values() for item in passes):
        nbytes = _scratch_nbytes(item, matrices, workload, frame_bytes)
        if nbytes > scratch:
            scratch, heaviest = nbytes, item
    return Layout(choice.step_rows, frame_bytes, matrices, programs, regions, scratch, choice.spare_writes, heaviest)


def _width(matrix: Matrix, choice: Choice, unit: int) -> int:
    """Columns of a slab, in whole units."""
    cut = choice.cuts.get(matrix.name)
    return min(matrix.columns, align_up((cut.columns if cut else 0) or matrix.columns, unit))


def _plan_matrix(matrix: Matrix, choice: Choice, frame_bytes: int, workload: Workload, width: int) -> MatrixPlan:
    cut = choice.cuts.get(matrix.name)
    height = block_height(step_rows=choice.step_rows, row_bytes=width * matrix.itemsize, frame_bytes=frame_bytes)
    grid = Grid(matrix.rows, matrix.columns, matrix.itemsize, height, width)
    as_kept = matrix.kind is not Kind.SCRATCH or (workload.sums_as_kept and matrix.name in summed_sources(workload))
    region_itemsize = matrix.itemsize if as_kept else max(matrix.itemsize, workload.pulled_itemsize)
    return MatrixPlan(matrix, grid, region_itemsize, whole=cut is not None and cut.columns == 0)


def _passes(
    stage: Stage, index: int, matrices: dict[str, MatrixPlan], workload: Workload, choice: Choice, frame_bytes: int
) -> list[Pass]:
    """One pass, or two; the matrix between the two is added to ``matrices``."""
    if stage.pull is None:
        return [RowPass(index, stage, stage.loads, None)]
    source = matrices[stage.pull.source]
    if source.whole:
        return [RowPass(index, stage, tuple(dict.fromkeys((*stage.loads, *stage.pull.own))), stage.pull)]
    planned = matrices.get(stage.pull.output)
    pulled = replace(
        source.matrix,
        name=stage.pull.output,
        rows=max(stage.rows, planned.matrix.rows if planned else 0),
        columns=stage.pull.output_columns(source.matrix.columns, source.matrix.columns),
        kind=Kind.SCRATCH,
    )
    width = stage.pull.output_columns(source.grid.slab_columns, source.matrix.columns)
    matrices[pulled.name] = _plan_matrix(pulled, choice, frame_bytes, workload, width)
    buffers = min(choice.cuts[stage.pull.source].buffers, source.grid.slabs)
    return [
        ColumnPass(index, stage.rows, stage.pull, buffers),
        RowPass(index + 1, stage, (*stage.loads, pulled.name), None),
    ]


# ---- regions ---------------------------------------------------------------------------------------------


def direct_slabs(passes: Sequence[Pass], column_pass: ColumnPass) -> int:
    """How many slabs the writer of a column pass's source computes right into the slab buffers."""
    users = [index for index in passes_using(passes, column_pass.pull.source) if index < column_pass.index]
    written = bool(users) and column_pass.pull.source in passes[users[0]].stores
    return column_pass.slab_buffers if written and len(users) == 1 else 0


def _wanted(passes: Sequence[Pass], matrices: dict[str, MatrixPlan]) -> list[tuple[str, int, int, int]]:
    """(matrix, bytes, first pass, last pass) of every region."""
    wanted = []
    for name, planned in matrices.items():
        uses = passes_using(passes, name)
        if planned.whole and uses:
            wanted.append((name, planned.region_nbytes, uses[0], uses[-1]))
    for item in passes:
        if isinstance(item, ColumnPass):
            name = item.pull.source
            first = passes_using(passes, name)[0] if direct_slabs(passes, item) else item.index
            nbytes = item.slab_buffers * matrices[name].slab_stride()
            wanted.append((name, nbytes, first, item.index))
    return wanted


def _place(wanted: list[tuple[str, int, int, int]], frame_bytes: int) -> tuple[Region, ...]:
    """Frames for regions such that no two alive at once overlap: the largest first, each as low as it can lie."""
    placed: list[Region] = []
    for name, nbytes, first, last in sorted(wanted, key=lambda w: (-w[1], w[2], w[0])):
        count = -(-nbytes // frame_bytes)
        frame = 0
        alive = (r for r in placed if r.first <= last and first <= r.last)
        for other in sorted(alive, key=lambda r: r.frame):
            if other.frame - frame >= count:
                break
            frame = max(frame, other.stop)
        placed.append(Region(name, frame, count, first, last))
    return tuple(placed)


def free_frames(regions: Sequence[Region], passes: int, frames: int) -> list[list[range]]:
    """By pass: the frames that no region takes."""
    free = []
    for p in range(passes):
        pieces, at = [], 0
        for region in sorted((r for r in regions if r.first <= p <= r.last), key=lambda r: r.frame):
            if region.frame > at:
                pieces.append(range(at, min(region.frame, frames)))
            at = max(at, region.stop)
        if at < frames:
            pieces.append(range(at, frames))
        free.append(pieces)
    return free


# ---- what a pass needs -----------------------------------------------------------------------------------


def _scratch_nbytes(item: Pass, matrices: dict[str, MatrixPlan], workload: Workload, frame_bytes: int) -> int:
    """A bound on the temporaries of a pass, all threads together."""
    if isinstance(item, ColumnPass):
        tile = pull_tile_rows(item.pull, workload.tile_rows)
        grid = matrices[item.pull.source].grid
        width = max(grid.slab_columns, matrices[item.pull.output].grid.slab_columns)
        nbytes = 2 * min(item.rows, tile) * width * workload.pulled_itemsize
        nbytes += frame_bytes  # a block being widened on its way into a slab buffer
    else:
        tile = workload.tile_rows
        nbytes = min(item.rows, tile) * item.stage.scratch_bytes_per_row
    if item.pull is not None:
        edges = _most_edges(workload.topologies[item.pull.direction], workload.tile_rows, item.rows, tile)
        nbytes += (_BYTES_PER_TILE_EDGE + _edge_data_bytes(item.pull, workload)) * edges
        grid = matrices[item.pull.source].grid
        share = grid.slab_columns if isinstance(item, ColumnPass) else grid.columns
        nbytes += -(-_kernel_nbytes(item.pull, edges, min(item.rows, tile)) * share // grid.columns)
    return workload.threads * nbytes


def _edge_data_bytes(pull: Pull, workload: Workload) -> int:
    """What a tile's edges carry, put together from several frames, and converted weights with a part left out."""
    topology = workload.topologies[pull.direction]
    weights = 2 * workload.pulled_itemsize if EdgeData.WEIGHT in pull.edge_data else 0
    return weights + topology.edge_bytes(pull.edge_data) - topology.index_itemsize


def _kernel_nbytes(pull: Pull, edges: int, rows: int) -> int:
    """A bound on the temporaries of one call of a pull's kernel, all groups together."""
    kind = pull.per_edge
    if kind is None:
        return 0
    at_once = (min(edges, kind.edges_at_once) + rows) * kind.bytes_per_edge + rows * kind.bytes_per_row
    return at_once + (edges + rows) * kind.waiting_bytes_per_edge


def pull_tile_rows(pull: Pull, tile_rows: int) -> int:
    """Rows that one thread pulls at a time in a column pass: whole tiles, one where what it gives depends on it."""
    return tile_rows if pull.is_general else max(1, PULL_TILE_ROWS // tile_rows) * tile_rows


@lru_cache(maxsize=4096)
def _most_edges(topology: Topology, tile_rows: int, rows: int, height: int) -> int:
    """The most edges of ``height`` rows, whole tiles, that one step or task takes, of the first ``rows`` rows."""
    edges, stride = topology.tile_edges, height // tile_rows
    end = min(-(-rows // height) * stride, len(edges) - 1)
    at = [*edges[:end:stride], edges[end]]
    return max(map(sub, at[1:], at), default=0)


def blocks_at_once(item: Pass, layout: Layout, workload: Workload, passes: Sequence[Pass]) -> int:
    """A bound on the frames in use while two neighbouring steps of a pass are computed."""
    count = 0
    if isinstance(item, ColumnPass):
        count += 2
        height = column_step_rows(item.pull, layout.matrices)
        for name in item.pull.own:
            planned = layout.matrices[name]
            source = layout.matrices[item.pull.source].grid
            slabs = max(len(slabs_beside(source, planned.grid, slab)) for slab in range(source.slabs))
            count += 0 if planned.whole else 2 * slabs
    else:
        height = layout.step_rows
        for name in item.loads:
            planned = layout.matrices[name]
            count += 0 if planned.whole else 2 * planned.grid.slabs
        for name in item.stores:
            planned = layout.matrices[name]
            count += 0 if planned.whole else 2 * len(stored_slabs(name, item.index, layout.matrices, passes))
    if item.pull is not None:
        topology = workload.topologies[item.pull.direction]
        most = _most_edges(topology, workload.tile_rows, item.rows, height)
        for data in (None, *item.pull.edge_data):
            grid = edge_grid(topology.arrays[data], topology.edges, layout.frame_bytes)
            count += 2 * (-(-most // grid.block_rows) + 1)
    return count


def column_step_rows(pull: Pull, matrices: Mapping[str, MatrixPlan]) -> int:
    """Rows of a step of a column pass: a block of the output, or of the own rows that go with it."""
    heights = [matrices[name].grid.block_rows for name in pull.own if not matrices[name].whole]
    return min([matrices[pull.output].grid.block_rows, *heights])


def slabs_beside(source: Grid, own: Grid, slab: int) -> range:
    """The slabs of ``own`` that hold the groups in slab ``slab`` of ``source``."""
    first = slab * source.slab_columns
    last = first + source.width(slab)
    return range(
        first * own.columns // source.columns // own.slab_columns,
        -(-(last * own.columns // source.columns) // own.slab_columns),
    )


def stored_slabs(name: str, index: int, matrices: Mapping[str, MatrixPlan], passes: Sequence[Pass]) -> range:
    """The slabs of matrix ``name`` that row pass ``index`` computes into frames: those only a column pass reads need
    none if they are computed right into its slab buffers."""
    grid = matrices[name].grid
    readers = [passes[p] for p in passes_using(passes, name) if p > index]
    if len(readers) == 1 and isinstance(readers[0], ColumnPass) and readers[0].pull.source == name:
        return range(direct_slabs(passes, readers[0]), grid.slabs)
    return range(grid.slabs)


def ahead_frames(at_once: int) -> int:
    """Frames worth having beyond those in use, so that reads and writes go on while a step is computed."""
    return max(4, at_once // 2)


def frames_needed(layout: Layout, workload: Workload) -> int:
    """The fewest frames that every pass can run in, reading nothing ahead."""
    most = 0
    for name, passes in layout.programs.items():
        for item in passes:
            taken = max((r.stop for r in layout.regions[name] if r.first <= item.index <= r.last), default=0)
            most = max(most, taken + blocks_at_once(item, layout, workload, passes))
    return most


# ---- the whole plan --------------------------------------------------------------------------------------


def build_plan(
    workload: Workload,
    layout: Layout,
    *,
    frames: int,
    host_frames: int | None = None,
    device_limit_bytes: int,
    host_limit_bytes: int,
) -> Plan:
    """Everything that follows from ``layout`` in an arena of ``frames`` frames at most.

    ``host_frames``: the most of a second arena in host memory; None where both budgets are of one memory.
    """
    blocks = block_table(layout, workload)
    upper = layout if host_frames is None else replace(layout, spare_writes=False)
    unrolled = {name: unroll_program(name, upper, workload, blocks, frames=frames) for name in layout.programs}
    used = max(
        [p.frames for p in unrolled.values()] + [r.stop for regions in layout.regions.values() for r in regions] + [0]
    )
    staged: dict[str, Staging] = {}
    if host_frames is not None:
        lasting = lasting_blocks(layout, blocks)
        for name, program in unrolled.items():
            cyclic = program.uses.cyclic
            staged[name] = stage_below(
                program,
                frames=host_frames,
                lasting=lasting,
                cyclic=cyclic,
                spare_writes=layout.spare_writes,
                nbytes=blocks.nbytes,
            )
    return Plan(
        rows=workload.rows,
        tile_rows=workload.tile_rows,
        step_rows=layout.step_rows,
        frame_bytes=layout.frame_bytes,
        frames=used,
        matrices=layout.matrices,
        recomputed=workload.recomputed,
        topologies=workload.topologies,
        blocks=blocks,
        programs=layout.programs,
        regions=layout.regions,
        unrolled=unrolled,
        scratch_bytes=layout.scratch_bytes,
        fixed_device_bytes=workload.fixed_device_bytes,
        fixed_host_bytes=workload.fixed_host_bytes,
        device_limit_bytes=device_limit_bytes,
        host_limit_bytes=host_limit_bytes,
        host_frames=max([IN_TRANSFER, *(s.frames for s in staged.values())]) if staged else 0,
        staged=staged,
    )


def block_table(layout: Layout, workload: Workload) -> BlockTable:
    """Numbers for the blocks of all matrices, then of the topologies with what edges carry."""
    grids = {name: planned.grid for name, planned in layout.matrices.items()}
    grids |= {
        edges_name(direction, data): edge_grid(array, topology.edges, layout.frame_bytes)
        for direction, topology in workload.topologies.items()
        for data, array in topology.arrays.items()
    }
    return BlockTable.of(grids)


def unroll_program(name: str, layout: Layout, workload: Workload, blocks: BlockTable, *, frames: int) -> Program:
    """The program ``name`` in an arena of ``frames`` frames."""
    passes = layout.programs[name]
    steps, bounds, spans = uses_of(passes, layout, workload, blocks)
    available = free_frames(layout.regions[name], len(passes), frames)
    uses = Uses(
        spans=spans,
        steps=len(steps),
        capacity=capacity_of(passes, layout, workload, bounds, available, cyclic=name == "train"),
        lasting=lasting_blocks(layout, blocks),
        cyclic=name == "train",
        spare_writes=layout.spare_writes,
    )
    return unroll(steps, bounds, uses, available=available, nbytes=blocks.nbytes)


def lasting_blocks(layout: Layout, blocks: BlockTable) -> "_Lasting":
    """The blocks that are there in every epoch."""
    scratch = {name for name, planned in layout.matrices.items() if not planned.matrix.kind.lasts}
    ends = [*blocks.bases[1:], 1 << 62]
    return _Lasting(
        frozenset(
            block
            for name, base, end, grid in zip(blocks.names, blocks.bases, ends, blocks.grids, strict=True)
            if name not in scratch
            for block in range(base, min(end, base + grid.blocks * grid.slabs))
        )
    )


@dataclass(frozen=True, slots=True)
class _Lasting:
    blocks: frozenset[int]

    def __call__(self, block: int) -> bool:
        return block in self.blocks


def capacity_of(
    passes: Sequence[Pass],
    layout: Layout,
    workload: Workload,
    bounds: Sequence[tuple[int, int]],
    available: Sequence[Sequence[range]],
    *,
    cyclic: bool,
    coarseness: int = 1,
) -> list[int]:
    """By step: frames left for blocks that wait, beside those that a pass works in and reads ahead into.

    ``bounds`` may be those of a program with blocks ``coarseness`` times as tall as the layout's.
    """
    room = []
    for item, pieces in zip(passes, available, strict=True):
        at_once = blocks_at_once(item, layout, workload, passes)
        free = sum(map(len, pieces)) - at_once
        room.append(max(0, free - ahead_frames(at_once)) // coarseness)
    capacity: list[int] = []
    for p, (first, stop) in enumerate(bounds):
        capacity += [room[p]] * (stop - first)
        if stop > first:
            then = p + 1 if p + 1 < len(bounds) else 0
            if p + 1 < len(bounds) or cyclic:
                capacity[-1] = min(room[p], room[then])
    return capacity


def uses_of(
    passes: Sequence[Pass], layout: Layout, workload: Workload, blocks: BlockTable
) -> tuple[list[Step], list[tuple[int, int]], list[Span]]:
    """Steps, the (first, stop) step of each pass, and every use of a block, by first step."""
    steps: list[Step] = []
    bounds: list[tuple[int, int]] = []
    spans: list[Span] = []
    for item in passes:
        first = len(steps)
        if isinstance(item, ColumnPass):
            mine, used = _column_uses(item, first, passes, layout, workload, blocks)
        else:
            mine, used = _row_uses(item, first, passes, layout, workload, blocks)
        steps += mine
        spans += used
        bounds.append((first, len(steps)))
    spans.sort(key=lambda s: (s.first, s.use, s.block))
    return steps, bounds, spans


def _row_uses(
    item: RowPass, first: int, passes: Sequence[Pass], layout: Layout, workload: Workload, blocks: BlockTable
) -> tuple[list[Step], list[Span]]:
    steps = row_steps(item.index, item.rows, layout.step_rows, reverse=item.stage.reverse)
    spans: list[Span] = []
    for name in item.loads:
        planned = layout.matrices[name]
        if not planned.whole:
            spans += row_spans(planned.grid, blocks.base(name), range(planned.grid.slabs), first, steps, Use.READ)
    for name in item.stores:
        planned = layout.matrices[name]
        if not planned.whole:
            slabs = stored_slabs(name, item.index, layout.matrices, passes)
            spans += row_spans(planned.grid, blocks.base(name), slabs, first, steps, Use.WRITE)
    if item.pull is not None:
        spans += _edges(item.pull, first, steps, layout, workload, blocks)
    return steps, spans


def _column_uses(
    item: ColumnPass, first: int, passes: Sequence[Pass], layout: Layout, workload: Workload, blocks: BlockTable
) -> tuple[list[Step], list[Span]]:
    source, target = layout.matrices[item.pull.source].grid, layout.matrices[item.pull.output].grid
    steps = column_steps(item.index, item.rows, column_step_rows(item.pull, layout.matrices), source.slabs)
    sweep = len(steps) // source.slabs
    rows = next((p.rows for p in passes if item.pull.source in p.stores), source.rows)
    spans: list[Span] = []
    for slab in range(source.slabs):
        at = first + slab * sweep
        mine = steps[slab * sweep : (slab + 1) * sweep]
        spans += row_spans(target, blocks.base(item.pull.output), range(slab, slab + 1), at, mine, Use.WRITE)
        spans += _edges(item.pull, at, mine, layout, workload, blocks)
        for name in item.pull.own:
            planned = layout.matrices[name]
            if not planned.whole:
                slabs = slabs_beside(source, planned.grid, slab)
                spans += row_spans(planned.grid, blocks.base(name), slabs, at, mine, Use.READ)
        if slab >= direct_slabs(passes, item):
            when = first + max(0, slab - item.slab_buffers + 1) * sweep
            spans += copy_spans(source, blocks.base(item.pull.source), slab, when, rows)
    return steps, spans


def _edges(
    pull: Pull, first: int, steps: Sequence[Step], layout: Layout, workload: Workload, blocks: BlockTable
) -> list[Span]:
    topology = workload.topologies[pull.direction]
    spans: list[Span] = []
    for data in (None, *pull.edge_data):
        grid = edge_grid(topology.arrays[data], topology.edges, layout.frame_bytes)
        base = blocks.base(edges_name(pull.direction, data))
        spans += edge_spans(topology, grid, base, workload.tile_rows, first, steps)
    return spans
