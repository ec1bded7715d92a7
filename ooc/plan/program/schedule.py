# SPDX-License-Identifier: Apache-2.0
"""From a layout to the whole plan: blocks numbered, frames counted, every program unrolled."""

from dataclasses import replace

from ooc.plan.layout.layout import Layout, free_frames
from ooc.plan.layout.matrices import edges_name
from ooc.plan.program.capacity import Capacity, capacity_of
from ooc.plan.program.plan import Plan
from ooc.plan.program.program import Program, Unrolling
from ooc.plan.program.replacement import Uses
from ooc.plan.program.sequence import BlockTable, edge_grid, uses_of
from ooc.plan.program.staging import IN_TRANSFER, Staging, stage_below
from ooc.plan.workload import Direction, Topology, Workload


def build_plan(layout: Layout, capacity: Capacity) -> Plan:
    """Everything that follows from ``layout`` in arenas of what ``capacity`` leaves."""
    workload, frames, host_frames = capacity.workload, capacity.frames(layout), capacity.host_frames(layout)
    blocks = block_table(layout, workload)
    upper = layout if host_frames is None else replace(layout, spare_writes=False)
    unrolled = {
        name: unroll_program(name, upper, workload, blocks, frames=frames, staged=host_frames is not None)
        for name in layout.programs
    }
    regions = (r.stop for regions in layout.regions.values() for r in regions)
    staged: dict[str, Staging] = {}
    if host_frames is not None:
        staged = {
            name: stage_below(program, frames=host_frames, spare_writes=layout.spare_writes, nbytes=blocks.nbytes)
            for name, program in unrolled.items()
        }
    return Plan(
        **vars(layout),
        rows=workload.rows,
        tile_rows=workload.tile_rows,
        frames=max([*(program.frames for program in unrolled.values()), *regions], default=0),
        recomputed=workload.recomputed,
        topologies=_swept(layout, workload),
        blocks=blocks,
        unrolled=unrolled,
        fixed_device_bytes=workload.fixed_device_bytes,
        fixed_host_bytes=workload.fixed_host_bytes,
        device_limit_bytes=capacity.limits.device_bytes,
        host_limit_bytes=capacity.limits.host_bytes,
        host_frames=max([IN_TRANSFER, *(s.frames for s in staged.values())]) if staged else 0,
        staged=staged,
    )


def block_table(layout: Layout, workload: Workload) -> BlockTable:
    """Numbers for the blocks of all matrices, then of the topologies with what edges carry."""
    found = {name: (planned.grid, planned.matrix.kind.lasts) for name, planned in layout.matrices.items()}
    found |= {
        edges_name(direction, data): (edge_grid(array, topology.edges, layout.frame_bytes), True)
        for direction, topology in _swept(layout, workload).items()
        for data, array in topology.arrays.items()
    }
    return BlockTable.of(found)


def _swept(layout: Layout, workload: Workload) -> dict[Direction, Topology]:
    """The directions over whose edges some pass goes: without shuffles, none may need those out of rows."""
    passes = [item for program in layout.programs.values() for item in program]
    swept = {item.pull.direction for item in passes if item.pull is not None}
    return {direction: topology for direction, topology in workload.topologies.items() if direction in swept}


def unroll_program(
    name: str, layout: Layout, workload: Workload, blocks: BlockTable, *, frames: int, staged: bool
) -> Program:
    """The program ``name`` in an arena of ``frames`` frames; ``staged``: above one in host memory."""
    passes = layout.programs[name]
    steps, bounds, spans = uses_of(passes, layout, workload, blocks)
    available = free_frames(layout.regions[name], len(passes), frames)
    uses = Uses(
        spans=spans,
        steps=len(steps),
        capacity=capacity_of(passes, layout, workload, bounds, available, cyclic=name == "train"),
        lasting=blocks.lasts,
        cyclic=name == "train",
        spare_writes=layout.spare_writes,
    )
    return Unrolling(steps, bounds, uses, available, blocks.nbytes, paced=staged).run()
