# SPDX-License-Identifier: Apache-2.0
"""From a layout to the plan: number the blocks, and unroll the programs in the frames that the budgets leave."""

from ooc.plan.layout.layout import Layout, free_frames
from ooc.plan.program.capacity import Capacity, capacity_of
from ooc.plan.program.plan import Plan
from ooc.plan.program.program import EPOCHS, BlockSequence, Program, unroll
from ooc.plan.program.sequence import BlockTable, block_table, pulled_directions, uses_of
from ooc.plan.program.staging import IN_TRANSFER, Staging, sequence_of, transfers_of
from ooc.plan.workload import Workload


def build_plan(layout: Layout, capacity: Capacity, *, epoch_only: bool = False) -> Plan:
    """Return the plan that follows from ``layout``, in arenas as large as ``capacity`` allows; with ``epoch_only``, of
    the training epoch alone."""
    workload, blocks = capacity.workload, block_table(layout, capacity.workload)
    device_limit_bytes, host_limit_bytes = capacity.budgets(layout)
    unrolled = _unroll_arena(layout, capacity, blocks, epoch_only=epoch_only)
    staged = _stage_host_arena(unrolled, layout, capacity, blocks)
    stops = [region.stop for regions in layout.regions.values() for region in regions]
    return Plan(
        **vars(layout),
        rows=workload.rows,
        tile_rows=workload.tile_rows,
        frames=max([*(program.frames for program in unrolled.values()), *stops], default=0),
        recomputed=workload.recomputed,
        topologies=pulled_directions(layout, workload),
        blocks=blocks,
        unrolled=unrolled,
        fixed_device_bytes=workload.fixed_device_bytes,
        fixed_host_bytes=capacity.host_bytes(layout),
        device_limit_bytes=device_limit_bytes,
        host_limit_bytes=host_limit_bytes,
        state_bytes=workload.state_bytes,
        share=workload.share,
        host_frames=max((_host_frames(staging.program) for staging in staged.values()), default=0),
        staged=staged,
        retainable_bytes=0 if staged or workload.share is not None else _retainable_bytes(layout, workload),
    )


def _unroll_arena(layout: Layout, capacity: Capacity, blocks: BlockTable, *, epoch_only: bool) -> dict[str, Program]:
    """Return the programs of the arena that is computed in."""
    workload, frames, has_tiers = capacity.workload, capacity.frames(layout), capacity.has_tiers
    sequences: dict[str, BlockSequence] = {}
    for name, passes in layout.programs.items():
        steps, bounds, spans = uses_of(passes, layout, workload, blocks)
        available = free_frames(layout.regions[name], len(passes), frames)
        room = capacity_of(passes, layout, workload, bounds, available, cyclic=name in EPOCHS)
        at_once = [item.steps_at_once for item in passes]
        sequences[name] = BlockSequence(steps, bounds, spans, room, available, at_once)
    spare_writes = layout.spare_writes and not has_tiers
    return unroll(sequences, blocks, spare_writes=spare_writes, paced=has_tiers, epoch_only=epoch_only)


def _stage_host_arena(
    unrolled: dict[str, Program], layout: Layout, capacity: Capacity, blocks: BlockTable
) -> dict[str, Staging]:
    """Return the programs of the host's arena below them, if there is one."""
    frames = capacity.host_frames(layout)
    if frames is None:
        return {}
    transfers = {name: transfers_of(program) for name, program in unrolled.items()}
    sequences = {name: sequence_of(moved, frames) for name, moved in transfers.items()}
    below = unroll(sequences, blocks, spare_writes=layout.spare_writes, paced=False)
    return {name: Staging(transfers[name], program) for name, program in below.items()}


def _host_frames(program: Program) -> int:
    """Return the host frames that a program needs: those it works in, and after those of blocks to be kept on the
    device, the last ones, through which these blocks arrive."""
    return max(program.frames, max((frame + 1 for _, frame in program.warm), default=0) + IN_TRANSFER)


def _retainable_bytes(layout: Layout, workload: Workload) -> int:
    """Return a bound on the bytes that opaque layers retain in a training epoch, if they retain everything."""
    pulls = ((item.rows, item.pull) for item in layout.programs.get("train", ()) if item.pull is not None)
    return sum(
        (rows + workload.topologies[pull.direction].edges) * pull.per_edge.bytes_per_edge
        for rows, pull in pulls
        if pull.per_edge is not None and pull.is_opaque and pull.direction.of_edges and pull.per_edge.own is not None
    )
