# SPDX-License-Identifier: Apache-2.0
"""Frames that passes work in, and what that leaves for blocks that wait."""

from collections.abc import Sequence

from ooc.plan.layout import Layout
from ooc.plan.passes import ColumnPass, Pass
from ooc.plan.sequence import edge_grid
from ooc.plan.slabs import column_step_rows, loaded_slabs, slabs_beside, stored_slabs
from ooc.plan.temporaries import most_edges
from ooc.plan.workload import Workload


def blocks_at_once(item: Pass, layout: Layout, workload: Workload, passes: Sequence[Pass]) -> int:
    """A bound on the frames in use while two neighbouring steps of a pass are computed."""
    count = 0
    if isinstance(item, ColumnPass):
        count += 2
        height = column_step_rows(item, layout.matrices)
        for name in item.pull.own:
            planned = layout.matrices[name]
            source = layout.matrices[item.pull.source].grid
            slabs = max(len(slabs_beside(source, planned.grid, slab)) for slab in range(item.slabs))
            count += 0 if planned.whole else 2 * slabs
    else:
        height = layout.step_rows
        for name in item.loads:
            planned = layout.matrices[name]
            count += 2 * len(loaded_slabs(name, item, planned.grid)) if planned.in_frames else 0
        for name in item.stores:
            planned = layout.matrices[name]
            slabs = len(stored_slabs(name, item.index, layout.matrices, passes))
            count += 2 * slabs if planned.in_frames else 0
    if item.pull is not None:
        topology = workload.topologies[item.pull.direction]
        most = most_edges(topology, workload.tile_rows, item.rows, height)
        for data in (None, *item.pull.edge_data):
            grid = edge_grid(topology.arrays[data], topology.edges, layout.frame_bytes)
            count += 2 * (-(-most // grid.block_rows) + 1)
    return count


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
