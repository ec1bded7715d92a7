# SPDX-License-Identifier: Apache-2.0
"""From a choice to a layout: the passes in order, how matrices are cut into blocks, and the memory regions of pulled
matrices.

A stage whose pulled matrix is whole in memory becomes one row pass. Otherwise it becomes a column pass and a row pass
that loads the pulled rows, and may pull the last slab itself.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import is_

from ooc.plan.layout.bucketing import shuffle_passes
from ooc.plan.layout.grid import Grid, align_up, block_height, divisor_below, divisors
from ooc.plan.layout.passes import (
    ColumnPass,
    MatrixPlan,
    Pass,
    Passes,
    RowPass,
    column_step_rows,
    direct_slabs,
    edge_grid,
    passes_using,
    slabs_nbytes,
    streaming_memory,
)
from ooc.plan.layout.shuffle import plan_partial_sums
from ooc.plan.layout.temporaries import rows_pulled_at_once, scratch_nbytes
from ooc.plan.workload import Kind, Matrix, Pull, Stage, Workload, processes_of

_MOST_EDGES_AT_ONCE = 1 << 20
"""The most edges of a step where memory is scarce; of more, what is known of edges would take a large part of a tile's
memory."""
_PULL_MEMORY_DIVISOR = 64
"""A device's pull may take this fraction of its slabs' memory for itself (1/64)."""
_TILES_PER_THREAD = 2
"""Tiles for each thread in a step of a column pass; with only one each, threads wait at its end for the slowest."""
PULL_TILE_BYTES = 1 << 20
"""Bytes of the rows that a CPU thread pulls at a time: they are put into place while its cache holds them."""


@dataclass(frozen=True, slots=True)
class SlabChoice:
    """How a pulled matrix is held: ``columns`` columns at a time (0: whole), in ``buffers`` slab buffers.

    ``direct``: the first slabs are computed right into the buffers, which are taken from that pass on. Otherwise they
    are stored as blocks like the other slabs, and the buffers exist only during the pull.

    ``overlap_last``: the last slab is pulled by the row pass that reads the pulled rows. Its sums are then neither
    written nor read, and its buffer is taken during that pass, too.

    ``sharded``: the slabs are sharded among the processes, each of which pulls its own slabs for everyone's rows. They
    are at most ``columns`` wide, so that all processes have equally many; with two ``buffers``, the slabs of two turns
    are in memory.
    """

    columns: int
    buffers: int
    direct: bool = True
    overlap_last: bool = False
    sharded: bool = False


@dataclass(frozen=True)
class Choice:
    """Everything the planner decides; which blocks are replaced follows from it. ``cuts``: how each pulled matrix is
    held. ``spare_writes``: read from the SSD again rather than write to it (``Uses``). ``spilled_sums``: the matrices
    that are scattered to and not whole in memory. ``bucketed``: the memory for buckets, for each matrix that is
    gathered by buckets (0: the least). ``parts``: into how many blocks, a power of two, a step's rows of the widest
    matrix are cut; frames are smaller by that. ``lean``: pull no more rows at once than fit the memory other passes
    take anyway; on a device, in steps whose edges fit a frame, or in pieces. ``alone``: if a pass reads and stores rows
    of two matrices as wide as the widest, it holds one step at a time."""

    step_rows: int
    cuts: dict[str, SlabChoice] = field(default_factory=dict)
    spare_writes: bool = False
    spilled_sums: frozenset[str] = frozenset()
    bucketed: dict[str, int] = field(default_factory=dict)
    parts: int = 1
    lean: bool = False
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Region:
    """A region of memory: ``count`` frames from ``frame`` on hold ``matrix`` from pass ``first`` to pass ``last``,
    inclusive."""

    matrix: str
    frame: int
    count: int
    first: int
    last: int

    @property
    def stop(self) -> int:
        return self.frame + self.count


@dataclass(frozen=True)
class Layout:
    """The passes that a choice leads to, how matrices are cut, and the regions of memory that they take."""

    step_rows: int
    frame_bytes: int
    matrices: dict[str, MatrixPlan]
    programs: dict[str, Passes]
    regions: dict[str, tuple[Region, ...]]
    scratch_bytes: int
    spare_writes: bool = False
    heaviest: Pass | None = None
    """The pass whose temporaries ``scratch_bytes`` bounds."""


def pulled_sources(workload: Workload) -> dict[str, int]:
    """Return the columns of every matrix that some stage pulls."""
    return {pull.source: workload.matrices[pull.source].columns for pull in workload.pulls}


def widths_and_frame_bytes(workload: Workload, choice: Choice) -> tuple[dict[str, int], int]:
    """Return the slab width of each matrix, in columns, and the bytes of a frame: a step's rows, or a part of them, of
    the widest slab of any matrix, including pulled rows."""
    widths = _widths(workload, choice)
    rows = {name: widths[name] * matrix.itemsize for name, matrix in workload.matrices.items()}
    for pull in workload.pulls:
        source = workload.matrices[pull.source]
        if _in_slabs(choice.cuts[pull.source]) and pull.source not in choice.bucketed:
            into = _pull_output(pull, source.itemsize, workload.matrices)
            rows[into] = pull.output_columns(widths[pull.source], source.columns) * source.itemsize
    arrays = [array for topology in workload.topologies.values() for array in topology.arrays.values()]
    widest = max(1, *rows.values(), *(array.itemsize for array in arrays))
    widest_edge = max((array.edge_bytes for array in arrays), default=1)
    part_rows = divisor_below(choice.step_rows, choice.step_rows // choice.parts)
    return widths, align_up(max(part_rows * widest, widest_edge))


def layout_key(choice: Choice, workload: Workload) -> Hashable:
    """Return a key of everything in a choice that ``lay_out`` depends on, except ``lean``."""
    cuts: list[Hashable] = []
    widths, frame_bytes = widths_and_frame_bytes(workload, choice)
    for name, cut in sorted(choice.cuts.items()):
        width, slabs, direct = 0, 1, True
        if _in_slabs(cut):
            width = widths[name]
            slabs, direct = -(-workload.matrices[name].columns // width), cut.direct
        buffers = _buffers(cut, slabs, processes_of(workload.share))
        cuts.append((name, width, buffers, direct, cut.overlap_last and slabs > 1, cut.sharded))
    ways = choice.spare_writes, choice.spilled_sums, choice.alone, tuple(sorted(choice.bucketed.items()))
    return choice.step_rows, frame_bytes, tuple(cuts), *ways


def _widths(workload: Workload, choice: Choice) -> dict[str, int]:
    """Return the slab width of every matrix, in columns. Own rows that receive a gradient are cut like the rows pulled
    for it, even if nothing pulls them."""
    widths = {name: _width(matrix, choice, workload) for name, matrix in workload.matrices.items()}
    for pull in workload.pulls:
        kind, source = pull.per_edge, workload.matrices[pull.source]
        own = None if kind is None or kind.own in choice.cuts else workload.matrices.get(kind.own or "")
        if kind is not None and own is not None and own.columns == kind.columns:
            widths[own.name] = own.columns * widths[source.name] // source.columns
    return widths


def _in_slabs(cut: SlabChoice) -> bool:
    return cut.columns > 0 or cut.sharded


def _buffers(cut: SlabChoice, slabs: int, processes: int) -> int:
    """Return how many slabs are in memory at a time; of sharded slabs, those of one turn or two."""
    if not cut.sharded:
        return min(cut.buffers, slabs)
    return processes * (2 if cut.buffers > 1 and slabs > processes else 1)


def _width(matrix: Matrix, choice: Choice, workload: Workload) -> int:
    """Return the slab width of a matrix, in columns. Grouped columns are cut into whole groups: whole heads, or equally
    many slices of one head. Sharded columns are cut so that all processes have equally many slabs."""
    cut, grouping = choice.cuts.get(matrix.name), workload.groupings.get(matrix.name)
    columns = (cut.columns if cut else 0) or matrix.columns
    if cut is not None and cut.sharded:
        widths = workload.sharded_widths(matrix.name)
        return next((width for width in widths if width <= columns), widths[-1])
    if grouping is None:
        return min(matrix.columns, columns)
    unit, slices = matrix.columns // grouping.groups, grouping.slices
    groups = -(-columns // unit)
    if groups > slices:
        return min(matrix.columns, align_up(groups, slices) * unit)
    return unit * next(number for number in range(groups, slices + 1) if slices % number == 0)


def _pull_output(pull: Pull, itemsize: int, matrices: Mapping[str, Matrix]) -> str:
    """Return the matrix that a column pass pulls values of ``itemsize`` bytes into: the one that the stage keeps them
    in, if its values are as wide, otherwise one that lasts until the stage."""
    kept = None if pull.kept is None else matrices[pull.kept]
    return pull.output if kept is None or kept.itemsize != itemsize else kept.name


def lay_out(workload: Workload, choice: Choice) -> Layout:
    """Return the passes, grids and regions of ``choice``. Whether they fit is for the caller to check
    (``frames_needed``)."""
    return _Draft(workload, choice).layout()


class _Draft:
    """A layout under construction: passes are appended in order, some with a new matrix between two of them."""

    def __init__(self, workload: Workload, choice: Choice) -> None:
        self.workload, self.choice = workload, choice
        self.on_device = workload.parts is not None
        widths, self.frame_bytes = widths_and_frame_bytes(workload, choice)
        self.matrices = {name: self._plan_matrix(matrix, widths[name]) for name, matrix in workload.matrices.items()}
        for name in {name for pull in workload.pulls for name in pull.added_to}:
            self.matrices[name] = self._plan_sums(self.matrices[name])
        rows = (m.grid.columns * m.grid.itemsize for m in self.matrices.values() if m.in_frames)
        self.widest = max(rows, default=0)
        """Bytes of a row of the widest matrix that is kept in frames."""

    def layout(self) -> Layout:
        programs: dict[str, Passes] = {}
        for name, stages in self.workload.programs.items():
            passes: list[Pass] = []
            for stage in stages:
                passes += self._passes(stage, passes)
            programs[name] = Passes(passes)
        regions = {name: self._regions(passes) for name, passes in programs.items()}
        scratch, heaviest = self._find_heaviest_pass(programs)
        taller = {name: self._raise_pull_rows(passes, scratch) for name, passes in programs.items()}
        if any(taller[name] is not passes for name, passes in programs.items()):
            programs = taller
            scratch, heaviest = self._find_heaviest_pass(programs)
        choice, frames = self.choice, self.frame_bytes
        return Layout(
            choice.step_rows, frames, self.matrices, programs, regions, scratch, choice.spare_writes, heaviest
        )

    # ---- matrices ------------------------------------------------------------------------------------------

    def _plan_matrix(self, matrix: Matrix, width: int) -> MatrixPlan:
        """Return the plan of a matrix in slabs of ``width`` columns."""
        choice, workload = self.choice, self.workload
        cut = choice.cuts.get(matrix.name)
        height = block_height(
            step_rows=choice.step_rows, row_bytes=width * matrix.itemsize, frame_bytes=self.frame_bytes
        )
        grid = Grid(matrix.rows, matrix.columns, matrix.itemsize, height, width)
        region_itemsize = max(matrix.itemsize, workload.pulled_itemsize)
        if region_itemsize != matrix.itemsize:
            kinds = (pull.per_edge for pull in workload.pulls if pull.source == matrix.name)
            takes_narrow = all(workload.sums_as_kept if kind is None else kind.as_kept for kind in kinds)
            if matrix.kind is not Kind.SCRATCH or (cut is not None and takes_narrow):
                region_itemsize = matrix.itemsize
        whole = cut is not None and not _in_slabs(cut) and matrix.name not in choice.bucketed
        spare = self._spare_columns(matrix, region_itemsize) if whole else 0
        return MatrixPlan(matrix, grid, region_itemsize, whole=whole, spare_columns=spare)

    def _spare_columns(self, matrix: Matrix, itemsize: int) -> int:
        """Return how many unused columns follow each row of a matrix that is whole in memory, so that no two rows share
        a cache line. Only plain sums of a single process need them, and they take at most a sixteenth of a row."""
        summed = matrix.name not in self.workload.groupings and self.workload.share is None
        spare = -matrix.columns % max(1, self.workload.line_bytes // itemsize)
        return spare if summed and 16 * spare <= matrix.columns else 0

    def _plan_sums(self, planned: MatrixPlan) -> MatrixPlan:
        """Return the plan of a matrix that is scattered to."""
        matrix = planned.matrix
        if matrix.name not in self.choice.spilled_sums:
            return replace(planned, whole=True)
        sums = plan_partial_sums(
            rows=matrix.rows,
            columns=matrix.columns,
            itemsize=planned.region_itemsize,
            step_rows=self.choice.step_rows,
            tile_rows=self.workload.tile_rows,
            scatter_counts=self.workload.scatter_counts[matrix.name],
        )
        return replace(planned, shuffle=sums)

    def _pulled_matrix(self, stage: Stage, columns: int, pull: Pull, source: MatrixPlan) -> Matrix:
        """Return the matrix that a column pass pulls ``columns`` of the source's columns into."""
        into = _pull_output(pull, source.grid.itemsize, self.workload.matrices)
        planned = self.matrices.get(into)
        rows = max(stage.rows, planned.matrix.rows if planned else 0)
        if into == pull.kept:
            return replace(self.workload.matrices[into], rows=rows)
        return replace(
            source.matrix,
            name=into,
            rows=rows,
            columns=pull.output_columns(columns, source.grid.columns),
            kind=Kind.SCRATCH,
            space=stage.space,
        )

    # ---- passes --------------------------------------------------------------------------------------------

    def _passes(self, stage: Stage, before: Sequence[Pass]) -> list[Pass]:
        """Return the pass of a stage, or its two passes, to follow those in ``before``; a matrix between the two is
        added to ``matrices``."""
        workload, choice, matrices, index = self.workload, self.choice, self.matrices, len(before)
        if stage.pull is None:
            return [self._lower_steps(RowPass(index, stage, stage.loads, None))]
        source = matrices[stage.pull.source]
        spills = bool(choice.spilled_sums.intersection(stage.pull.added_to))
        loads = tuple(dict.fromkeys((*stage.loads, *stage.pull.own)))
        if source.whole:
            return [RowPass(index, stage, loads, stage.pull, spills)]
        if stage.pull.source in choice.bucketed:
            memory_bytes = choice.bucketed[stage.pull.source]
            shuffling, name = shuffle_passes(
                stage, before, matrices, workload, choice.step_rows, memory_bytes=memory_bytes
            )
            return [*shuffling, RowPass(index + len(shuffling), stage, loads, stage.pull, spills, name)]
        cut, grid = choice.cuts[stage.pull.source], source.grid
        processes = processes_of(workload.share) if cut.sharded else 1
        buffers = _buffers(cut, grid.slabs, processes)
        overlap_last = cut.overlap_last and grid.slabs > 1 and not cut.sharded
        if buffers == 1 and stage.pull.source in loads:  # its blocks would be read and copied to the buffer at once
            overlap_last = False
        columns = grid.columns - grid.width(grid.slabs - 1) * overlap_last
        pulled = self._pulled_matrix(stage, columns, stage.pull, source)
        width = stage.pull.output_columns(grid.slab_columns, grid.columns)
        matrices[pulled.name] = self._plan_matrix(pulled, width)
        summed_rows = matrices[pulled.name].grid.block_rows if self.on_device and not choice.lean else 0
        at_once = rows_pulled_at_once(stage.pull, workload.tile_rows, summed_rows)
        slabs = grid.slabs - overlap_last
        pulls = stage.rows, stage.pull, pulled.name, at_once
        sweeps = ColumnPass(index, *pulls, slabs, buffers, cut.direct, spills, stage.space, processes)
        if choice.lean and processes == 1 and self.on_device and not stage.pull.is_opaque:
            sweeps = replace(sweeps, edges_at_once=self._edges_at_once(stage.pull))
        if overlap_last:
            return [sweeps, RowPass(index + 1, stage, (*loads, pulled.name), stage.pull, sweeps=sweeps)]
        item = RowPass(index + 1, stage, (*stage.loads, pulled.name), None)
        return [sweeps, self._lower_steps(item)]

    def _lower_steps(self, item: RowPass) -> RowPass:
        """Return the row pass with lower steps, if its blocks are lower than a step and few rows are computed at a
        time, so that fewer blocks are in use at once. A step then has whole blocks, or equal parts of one. If the
        choice says ``alone``, the pass holds one step at a time."""
        step_rows, matrices = self.choice.step_rows, self.matrices
        grids = [matrices[name].grid for name in (*item.loads, *item.stores) if matrices[name].in_frames]
        rows = [grid.columns * grid.itemsize for grid in grids]
        if self.choice.alone and 2 * sum(rows) > 3 * max([self.widest, *rows]):
            item = replace(item, steps_at_once=1)
        low = [grid.block_rows for grid in grids if grid.block_rows < step_rows]
        if item.stage.rows_at_once >= step_rows or item.stage.entry_bytes or not low:
            return item
        heights = (height for height in divisors(step_rows) if height >= item.stage.rows_at_once)
        fitting = (height for height in heights if all(height % rows == 0 or rows % height == 0 for rows in low))
        return replace(item, parts=step_rows // next(fitting))

    def _edges_at_once(self, pull: Pull) -> int:
        """Return the most edges of a step: no more than fit a frame."""
        topology = self.workload.topologies[pull.direction]
        arrays = (topology.arrays[data] for data in (None, *pull.edge_data))
        of_frame = min(edge_grid(array, topology.edges, self.frame_bytes).block_rows for array in arrays)
        return max(2 * self.workload.part_edges, min(_MOST_EDGES_AT_ONCE, of_frame))

    def _find_heaviest_pass(self, programs: Mapping[str, Passes]) -> tuple[int, Pass | None]:
        """Return the most bytes of temporaries of any pass, and that pass."""
        every = (item for passes in programs.values() for item in passes)
        bounds = ((self._scratch_nbytes(item), item) for item in every)
        return max(bounds, key=lambda bound: bound[0], default=(0, None))

    def _scratch_nbytes(self, item: Pass) -> int:
        return scratch_nbytes(item, self.matrices, self.workload, self.frame_bytes)

    def _raise_pull_rows(self, passes: Passes, most: int) -> Passes:
        """Return the passes with more rows pulled at once in column passes, since launching or calling a pull costs the
        same for few rows as for many. The rows may take ``most`` bytes, which another pass takes anyway. If memory
        allows, a device takes up to a small fraction of the slabs it gathers from, and at most a step's rows. The CPU
        takes, for sums, as much as its cache holds, as long as a step has enough tiles for all threads."""
        workload, choice, matrices, on_device = self.workload, self.choice, self.matrices, self.on_device
        found: list[Pass] = []
        for item in passes:
            sums = item.pull is not None and item.pull.per_edge is None
            if isinstance(item, ColumnPass) and not item.pull.is_opaque and (on_device or sums):
                output = matrices[item.output].grid
                slabs = 0 if choice.lean else slabs_nbytes(item, passes, matrices, workload.share)
                room = max(most, slabs // (_PULL_MEMORY_DIVISOR if on_device else 1))
                most_rows = column_step_rows(item, matrices, choice.step_rows)
                if sums:  # those of several blocks would be copied there
                    most_rows = min(most_rows, output.block_rows)
                fitting = most_rows
                if not on_device:
                    width = max(matrices[item.pull.source].grid.slab_columns, output.slab_columns)
                    cached = PULL_TILE_BYTES // (width * workload.pulled_itemsize)
                    fitting = min(cached, most_rows // (_TILES_PER_THREAD * workload.threads))
                while most_rows % (2 * item.rows_at_once) == 0 and 2 * item.rows_at_once <= fitting:
                    taller = replace(item, rows_at_once=2 * item.rows_at_once)
                    if self._scratch_nbytes(taller) > room:
                        break
                    item = taller
            elif isinstance(item, RowPass) and item.sweeps is not None and item.sweeps is not found[-1]:
                last = found[-1]
                assert isinstance(last, ColumnPass)
                item = replace(item, sweeps=last)
            found.append(item)
        return passes if all(map(is_, found, passes)) else Passes(found)

    def _regions(self, passes: Passes) -> tuple[Region, ...]:
        """Return the regions of contiguous memory that passes need, with the passes they are needed for."""
        matrices, wanted = self.matrices, []
        for name, planned in matrices.items():
            if planned.whole and (users := passes_using(passes, name)):
                wanted.append((name, planned.region_nbytes, users[0], users[-1]))
        for item in passes:
            at = item.index
            wanted += [(name, nbytes, at, at) for name, nbytes in streaming_memory(item, matrices).items()]
            if isinstance(item, ColumnPass):
                name = item.pull.source
                first = passes_using(passes, name)[0] if direct_slabs(passes, item) else item.index
                nbytes = slabs_nbytes(item, passes, matrices, self.workload.share)
                last = item.index + (item.slabs < matrices[name].grid.slabs)
                wanted.append((name, nbytes, first, last))
        return _place_regions(wanted, self.frame_bytes)


def _place_regions(wanted: list[tuple[str, int, int, int]], frame_bytes: int) -> tuple[Region, ...]:
    """Place regions so that no two that are alive at once overlap: the largest first, each at the lowest frame where it
    fits."""
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
    """Return, for each pass, the ranges of frames that no region takes."""
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
