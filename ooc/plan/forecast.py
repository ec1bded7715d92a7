# SPDX-License-Identifier: Apache-2.0
"""How long an epoch of a layout would take, from a coarse version of its program.

A pass takes as long as the busiest of its resources: computing, reading, writing. Its blocks are taken many at a
time, so that a forecast costs the same whatever the graph's size.
"""

from dataclasses import replace

from ooc.plan.cost import local_seconds, pull_seconds, ssd_seconds, together_seconds
from ooc.plan.hardware import Hardware
from ooc.plan.plan import ColumnPass, MatrixPlan, Pass
from ooc.plan.program import blocks_to_write, found_in_memory
from ooc.plan.replacement import Uses, belady
from ooc.plan.schedule import Layout, block_table, capacity_of, free_frames, lasting_blocks, uses_of
from ooc.plan.sequence import Use
from ooc.plan.workload import Workload

_STEPS = 24
"""Steps of a coarse row pass."""


def forecast_seconds(workload: Workload, layout: Layout, hardware: Hardware, *, frames: int) -> float:
    """Seconds of one training epoch in an arena of ``frames`` frames; an estimate, to compare layouts by."""
    passes = layout.programs["train"]
    traffic = forecast_traffic(workload, layout, frames=frames)
    return sum(
        _pass_seconds(item, layout, workload, hardware, read_bytes=read, write_bytes=write)
        for item, (read, write) in zip(passes, traffic, strict=True)
    )


def forecast_traffic(workload: Workload, layout: Layout, *, frames: int) -> list[tuple[int, int]]:
    """(read, written) bytes of the SSD by pass of the training program."""
    passes = layout.programs["train"]
    coarseness = 1
    while workload.rows > _STEPS * layout.step_rows * coarseness:
        coarseness *= 2
    coarse = _coarser(layout, coarseness)
    blocks = block_table(coarse, workload)
    steps, bounds, spans = uses_of(passes, coarse, workload, blocks)
    available = free_frames(layout.regions["train"], len(passes), frames)
    capacity = capacity_of(passes, layout, workload, bounds, available, cyclic=True, coarseness=coarseness)
    uses = Uses(spans, len(steps), capacity, lasting_blocks(coarse, blocks), cyclic=True)
    kept = belady(uses)
    to_write = blocks_to_write(uses, kept)
    traffic = [[0, 0] for _ in passes]
    for span, found in zip(spans, found_in_memory(uses, kept), strict=True):
        if span.use is Use.WRITE:
            if span.block in to_write:
                traffic[steps[span.last].at][1] += blocks.nbytes(span.block)
        elif not found:
            traffic[steps[span.first].at][0] += blocks.nbytes(span.block)
    return [(read, write) for read, write in traffic]


def _coarser(layout: Layout, times: int) -> Layout:
    """The same with blocks of ``times`` as many rows."""
    matrices = {
        name: MatrixPlan(m.matrix, replace(m.grid, block_rows=m.grid.block_rows * times), m.region_itemsize, m.whole)
        for name, m in layout.matrices.items()
    }
    return replace(
        layout, step_rows=layout.step_rows * times, frame_bytes=layout.frame_bytes * times, matrices=matrices
    )


def _pass_seconds(
    item: Pass, layout: Layout, workload: Workload, hardware: Hardware, *, read_bytes: int, write_bytes: int
) -> float:
    computing = 0.0
    steps = -(-item.rows // layout.step_rows)
    stalled = 0.0
    if item.pull is not None:
        source = layout.matrices[item.pull.source]
        edges = workload.topologies[item.pull.direction].tile_edges
        count = edges[min(len(edges) - 1, -(-item.rows // workload.tile_rows))]
        computing += pull_seconds(
            hardware, count, source.matrix.columns, source.grid.slab_columns, source.region_itemsize
        )
    if isinstance(item, ColumnPass):
        grid = layout.matrices[item.pull.source].grid
        steps = -(-item.rows // layout.matrices[item.pull.output].grid.block_rows) * grid.slabs
        if item.slab_buffers == 1 < grid.slabs:  # a slab is read while nothing can be computed
            stalled = ssd_seconds(
                hardware,
                read_bytes=grid.slab_nbytes(0) * (grid.slabs - 1),
                write_bytes=0,
                request_bytes=layout.frame_bytes,
            )
    else:
        columns = sum(layout.matrices[name].matrix.columns for name in (*item.loads, *item.stores))
        computing += local_seconds(
            hardware,
            moved_bytes=item.rows * columns * workload.pulled_itemsize,
            multiplies=item.rows * item.stage.multiplies_per_row,
            dtype=workload.dtype,
        )
    blocks = (read_bytes + write_bytes) / layout.frame_bytes
    computing += steps * hardware.processor.seconds_per_step + blocks * hardware.seconds_per_block
    moving = ssd_seconds(hardware, read_bytes=read_bytes, write_bytes=write_bytes, request_bytes=layout.frame_bytes)
    return together_seconds(hardware, computing + stalled, moving)
