# SPDX-License-Identifier: Apache-2.0
"""From choices to a complete plan: passes in order, buffers with lifetimes, places, and the traffic they cause.

A stage whose pulled matrix is resident becomes one row pass; otherwise a column pass followed by a row pass
that loads the pulled rows.
"""

from dataclasses import dataclass, field, replace

from ooc.plan.grid import Grid, Stretch, align_up
from ooc.plan.placement import Demand, peak, place
from ooc.plan.plan import (
    COLUMN_TILE_ROWS,
    READ_SLOTS,
    TOPOLOGY_SLOTS,
    WRITE_SLOTS,
    ColumnPass,
    MatrixPlan,
    Pass,
    Plan,
    RowPass,
    Traffic,
)
from ooc.plan.workload import Direction, Fate, Kind, Matrix, Stage, Workload


@dataclass(frozen=True)
class Choice:
    """All that the planner decides. ``resident`` maps a matrix to (tier, leading rows kept there)."""

    block_rows: int
    slab_columns: dict[str, int]
    slab_buffers: int
    resident: dict[str, tuple[Fate, int]] = field(default_factory=dict)
    topologies: dict[Direction, Fate] = field(default_factory=dict)


def pulled_sources(workload: Workload) -> dict[str, int]:
    """Columns of every matrix that some stage pulls."""
    return {
        stage.pull.source: workload.matrices[stage.pull.source].columns
        for stages in workload.programs.values()
        for stage in stages
        if stage.pull
    }


def build_plan(
    workload: Workload,
    choice: Choice,
    *,
    stretches: dict[Direction, list[Stretch]],
    device_limit_bytes: int,
    host_limit_bytes: int,
) -> Plan:
    """Everything that follows from ``choice``. Pure; whether it fits the limits is the caller's to judge."""
    matrices = {name: _plan_matrix(matrix, choice) for name, matrix in workload.matrices.items()}
    programs: dict[str, tuple[Pass, ...]] = {}
    count = 0
    for name, stages in workload.programs.items():
        passes: list[Pass] = []
        for stage in stages:
            passes += _passes(stage, count + len(passes), matrices, workload, choice)
        programs[name] = tuple(passes)
        count += len(passes)
    demands = _resident_demands(matrices, programs, workload, choice, count)
    for passes_of in programs.values():
        for step in passes_of:
            demands += _stream_demands(step, matrices, workload, choice, stretches)
    buffers = place(demands)
    scratch = max(
        (_scratch_nbytes(step, matrices, workload, stretches) for steps in programs.values() for step in steps),
        default=0,
    )
    return Plan(
        rows=workload.rows,
        tile_rows=workload.tile_rows,
        block_rows=choice.block_rows,
        matrices=matrices,
        recomputed=workload.recomputed,
        topologies={d: choice.topologies.get(d, Fate.SSD) for d in workload.topologies},
        stretches=stretches,
        programs=programs,
        buffers={b.name: b for b in buffers},
        traffic={n: _traffic(p, matrices, workload, choice, stretches) for n, p in programs.items()},
        device_arena_bytes=peak(buffers, Fate.DEVICE),
        host_arena_bytes=peak(buffers, Fate.HOST),
        scratch_bytes=scratch,
        device_peak_bytes=peak(buffers, Fate.DEVICE) + scratch + workload.fixed_device_bytes,
        host_peak_bytes=peak(buffers, Fate.HOST) + workload.fixed_host_bytes,
        device_limit_bytes=device_limit_bytes,
        host_limit_bytes=host_limit_bytes,
    )


def _plan_matrix(matrix: Matrix, choice: Choice, slab_columns: int | None = None) -> MatrixPlan:
    tier, rows = choice.resident.get(matrix.name, (Fate.SSD, 0))
    whole = rows >= matrix.rows
    width = slab_columns or choice.slab_columns.get(matrix.name, matrix.columns)
    grid = Grid(
        rows=matrix.rows,
        columns=matrix.columns,
        itemsize=matrix.itemsize,
        block_rows=choice.block_rows,
        slab_columns=matrix.columns if whole else width,
    )
    return MatrixPlan(matrix=matrix, grid=grid, tier=tier, resident_rows=min(rows, matrix.rows))


def _passes(
    stage: Stage, index: int, matrices: dict[str, MatrixPlan], workload: Workload, choice: Choice
) -> list[Pass]:
    """One pass, or two; the matrix between the two is added to ``matrices``."""
    if stage.pull is None:
        return [RowPass(index, stage, stage.loads, None)]
    source = matrices[stage.pull.source]
    if source.resident:
        return [RowPass(index, stage, stage.loads, stage.pull)]
    planned = matrices.get(stage.pull.output)
    pulled = replace(
        source.matrix,
        name=stage.pull.output,
        rows=max(stage.rows, planned.matrix.rows if planned else 0),
        itemsize=workload.pulled_itemsize,
        kind=Kind.SCRATCH,
    )
    matrices[pulled.name] = _plan_matrix(pulled, choice, source.grid.slab_columns)
    return [
        ColumnPass(index, stage.rows, stage.pull, min(choice.slab_buffers, source.grid.slabs)),
        RowPass(index + 1, stage, (*stage.loads, pulled.name), None),
    ]


def touched(step: Pass) -> set[str]:
    """The matrices that ``step`` reads or writes."""
    if isinstance(step, ColumnPass):
        return {step.pull.source, step.pull.output}
    pulled = {step.pull.source} if step.pull else set()
    return pulled | set(step.loads) | set(step.stage.stores)


def _resident_demands(
    matrices: dict[str, MatrixPlan],
    programs: dict[str, tuple[Pass, ...]],
    workload: Workload,
    choice: Choice,
    passes: int,
) -> list[Demand]:
    demands = []
    for name, planned in matrices.items():
        nbytes = planned.resident_rows * planned.matrix.columns * planned.matrix.itemsize
        if not nbytes:
            continue
        if planned.matrix.kind is not Kind.SCRATCH:
            demands.append(Demand(f"resident/{name}", planned.tier, nbytes, 0, passes - 1))
            continue
        for program, steps in programs.items():
            uses = [step.index for step in steps if name in touched(step)]
            if uses:
                demands.append(Demand(f"resident/{name}/{program}", planned.tier, nbytes, min(uses), max(uses)))
    for direction, tier in choice.topologies.items():
        nbytes = align_up(max(1, workload.topologies[direction].nbytes))
        demands.append(Demand(f"topology/{direction.value}", tier, nbytes, 0, passes - 1))
    return demands


def _stream_demands(
    step: Pass,
    matrices: dict[str, MatrixPlan],
    workload: Workload,
    choice: Choice,
    stretches: dict[Direction, list[Stretch]],
) -> list[Demand]:
    """Rings of blocks, slabs and topology that pass ``step`` works with, all on the device."""
    at = step.index

    def ring(purpose: str, slots: int, nbytes: int) -> list[Demand]:
        return [Demand(f"{at}/{purpose}/{slot}", Fate.DEVICE, nbytes, at, at) for slot in range(slots)]

    demands: list[Demand] = []
    reads, writes = (step.loads, step.stage.stores) if isinstance(step, RowPass) else ((), (step.pull.output,))
    for name in reads:
        if not matrices[name].resident:
            demands += ring(f"read/{name}", READ_SLOTS, row_block_nbytes(matrices[name].grid))
    for name in writes:
        if not matrices[name].resident:
            grid = matrices[name].grid
            full = min(grid.rows, grid.block_rows) * grid.slab_columns * grid.itemsize
            nbytes = full if isinstance(step, ColumnPass) else row_block_nbytes(grid)
            demands += ring(f"write/{name}", WRITE_SLOTS, nbytes)
    pull = step.pull
    if pull is not None and choice.topologies.get(pull.direction, Fate.SSD) is Fate.SSD:
        itemsize = workload.topologies[pull.direction].index_itemsize
        longest = _longest(stretches[pull.direction], rows_of(step))
        demands += ring("topology", TOPOLOGY_SLOTS, align_up(longest * itemsize) + 2 * 4096)
    if isinstance(step, ColumnPass):
        grid = matrices[step.pull.source].grid
        demands += ring(f"slab/{step.pull.source}", step.slab_buffers, grid.slab_nbytes(0))
    return demands


_FILTER_BYTES_PER_EDGE = 24
"""What leaving out the neighbours beyond a source's rows takes: a mask, a running count and the indices kept."""


def _scratch_nbytes(
    step: Pass, matrices: dict[str, MatrixPlan], workload: Workload, stretches: dict[Direction, list[Stretch]]
) -> int:
    """A bound on the temporaries of pass ``step``, all threads together."""
    nbytes = 0
    if isinstance(step, ColumnPass):
        width = matrices[step.pull.source].grid.slab_columns
        nbytes = workload.threads * 2 * min(step.rows, COLUMN_TILE_ROWS) * width * workload.pulled_itemsize
    else:
        nbytes = workload.threads * min(step.stage.rows, workload.tile_rows) * step.stage.scratch_bytes_per_row
    if step.pull is not None and matrices[step.pull.source].matrix.rows < workload.rows:
        nbytes += _FILTER_BYTES_PER_EDGE * _longest(stretches[step.pull.direction], rows_of(step))
    return nbytes


def rows_of(step: Pass) -> int:
    """Rows that ``step`` computes."""
    return step.rows if isinstance(step, ColumnPass) else step.stage.rows


def _longest(stretches: list[Stretch], rows: int) -> int:
    """Most edges of a stretch among the first ``rows`` rows."""
    return max((s.edge_stop - s.edge_start for s in stretches if s.row_start < rows), default=0)


def row_block_nbytes(grid: Grid) -> int:
    """A buffer for one row block of every slab, each piece aligned so that it can be moved directly."""
    rows = min(grid.rows, grid.block_rows)
    return sum(align_up(rows * grid.width(k) * grid.itemsize) for k in range(grid.slabs))


def _traffic(
    steps: tuple[Pass, ...],
    matrices: dict[str, MatrixPlan],
    workload: Workload,
    choice: Choice,
    stretches: dict[Direction, list[Stretch]],
) -> Traffic:
    read = write = 0

    def spilled(name: str, rows: int) -> int:
        """Bytes on the SSD of the row blocks that the first ``rows`` rows lie in."""
        planned = matrices[name]
        stop = min(planned.matrix.rows, -(-rows // choice.block_rows) * choice.block_rows)
        return max(0, stop - planned.resident_rows) * planned.matrix.columns * planned.matrix.itemsize

    for step in steps:
        rows = rows_of(step)
        if isinstance(step, ColumnPass):
            read += spilled(step.pull.source, workload.rows)
            write += spilled(step.pull.output, rows)
            sweeps = matrices[step.pull.source].grid.slabs
        else:
            read += sum(spilled(name, rows) for name in step.loads)
            write += sum(spilled(name, rows) for name in step.stage.stores)
            sweeps = 1
        if step.pull is not None and choice.topologies.get(step.pull.direction, Fate.SSD) is Fate.SSD:
            itemsize = workload.topologies[step.pull.direction].index_itemsize
            used = [s for s in stretches[step.pull.direction] if s.row_start < rows]
            read += sweeps * sum(stretch_nbytes(s, itemsize) for s in used)
    return Traffic(read_bytes=read, write_bytes=write)


def stretch_nbytes(stretch: Stretch, itemsize: int) -> int:
    """Bytes read for a stretch: its edges, widened to whole 4 KiB pages at both ends (none for no edges)."""
    if stretch.edge_stop == stretch.edge_start:
        return 0
    start = stretch.edge_start * itemsize // 4096 * 4096
    return align_up(stretch.edge_stop * itemsize) - start
