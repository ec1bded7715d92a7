# SPDX-License-Identifier: Apache-2.0
"""Forecasts of an epoch's time for a layout, from a coarse version of its program.

A pass takes as long as its busiest resource: computing, reading, writing, PCIe each way. The coarse program joins many
blocks into one, so a forecast takes as long for large graphs as for small ones.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from ooc.plan.cost import Portion, computing_of, concurrent_seconds, pcie_seconds, ssd_seconds
from ooc.plan.hardware import Hardware
from ooc.plan.layout.layout import Layout, free_frames
from ooc.plan.layout.passes import (
    ColumnPass,
    Pass,
    Passes,
    pulled_columns,
    row_step_rows,
    streamed_read_bytes,
    streamed_write_bytes,
    sweeps_of,
)
from ooc.plan.program.capacity import capacity_of
from ooc.plan.program.program import blocks_to_write, found_in_memory
from ooc.plan.program.replacement import Uses, belady
from ooc.plan.program.sequence import WRITING, BlockTable, Span, Use, block_table, spans_of, uses_of
from ooc.plan.program.staging import IN_TRANSFER, room_between_uses
from ooc.plan.workload import Workload

_STEPS = 24
"""Steps of a coarse row pass."""
_STEPS_OF_TIERS = 48
"""Steps of a coarse row pass where a device and the host have an arena each: the smaller arena's frames must not round
to none."""
_FEWEST_FRAMES = 16
"""The fewest frames of a coarse program, in the smaller arena, for blocks of a step to be joined."""
TIE = 0.01
"""Forecasts that differ by less than this fraction count as equal; they are no more exact."""


class Traffic(NamedTuple):
    """Bytes that one pass moves. Only a device with memory of its own moves bytes over PCIe."""

    ssd_read_bytes: int
    ssd_write_bytes: int
    to_device_bytes: int
    to_host_bytes: int


def forecast_traffic(
    workload: Workload, layout: Layout, *, frames: int, host_frames: int | None = None
) -> list[Traffic]:
    """Return what each pass of the training program moves, with this many frames on the device and, below it, on the
    host."""
    passes = layout.programs["train"]
    coarseness = 1
    while workload.rows > (_STEPS if host_frames is None else _STEPS_OF_TIERS) * layout.step_rows * coarseness:
        coarseness *= 2
    joined = _count_joined_blocks(layout, min(frames, frames if host_frames is None else host_frames) // coarseness)
    coarse = _coarsen(layout, coarseness, joined)
    blocks = block_table(coarse, workload)
    steps, bounds, spans = uses_of(_with_more_edges(passes, coarseness), coarse, workload, blocks)
    available = free_frames(layout.regions["train"], len(passes), frames)
    capacity = capacity_of(passes, layout, workload, bounds, available, cyclic=True, coarseness=coarseness * joined)
    uses = Uses(spans, len(steps), capacity, blocks.lasts, True, layout.spare_writes and host_frames is None)
    moved = list(_moved_blocks(uses))
    if host_frames is None:
        traffic = _sum_by_pass([(steps[step].at, block, use) for step, block, use in moved], [], len(passes), blocks)
        matrices = layout.matrices
        return [
            Traffic(read + streamed_read_bytes(item, matrices), write + streamed_write_bytes(item, matrices), 0, 0)
            for (read, write, _, _), item in zip(traffic, passes, strict=True)
        ]
    moved.sort(key=lambda m: (m[0], m[2] is Use.WRITE))
    over_pcie = [(steps[step].at, block, use) for step, block, use in moved]
    room = room_between_uses(host_frames) // (coarseness * joined)
    if len({block for _, block, _ in moved}) <= room:  # the host keeps all of them across epochs
        return _sum_by_pass([], over_pcie, len(passes), blocks)
    used = spans_of([Span(i, i, block, use) for i, (_, block, use) in enumerate(moved)])
    below = Uses(used, len(used), [room] * len(used), blocks.lasts, cyclic=True, spare_writes=layout.spare_writes)
    over_disk = [(over_pcie[i][0], block, use) for i, block, use in _moved_blocks(below)]
    return _sum_by_pass(over_disk, over_pcie, len(passes), blocks)


def _moved_blocks(uses: Uses) -> Iterator[tuple[int, int, Use]]:
    """Yield (step, block, use) for each span of uses that has to read its block, or that leaves a block to be
    written."""
    kept = belady(uses)
    to_write = blocks_to_write(uses, kept)
    for first, last, block, use, found in zip(*uses.spans.columns, found_in_memory(uses, kept), strict=True):
        if use != Use.WRITE and not found:
            yield first, block, Use.READ
        if to_write[block] and use in WRITING:
            yield last, block, Use.WRITE


def _sum_by_pass(
    over_disk: Sequence[tuple[int, int, Use]],
    over_pcie: Sequence[tuple[int, int, Use]],
    passes: int,
    blocks: BlockTable,
) -> list[Traffic]:
    """Add up the bytes of (pass, block, use) for each pass."""
    totals = [[0, 0, 0, 0] for _ in range(passes)]
    for first, moved in ((0, over_disk), (2, over_pcie)):
        for at, block, use in moved:
            totals[at][first + (use is Use.WRITE)] += blocks.nbytes(block)
    return [Traffic(*total) for total in totals]


def _with_more_edges(passes: Passes, times: int) -> Passes:
    """Return the passes with ``times`` as many edges at once."""

    def taller(item: Pass) -> Pass:
        if isinstance(item, ColumnPass) and item.edges_at_once is not None:
            return replace(item, edges_at_once=item.edges_at_once * times)
        return item

    return passes if times == 1 else Passes(map(taller, passes))


def _count_joined_blocks(layout: Layout, frames: int) -> int:
    """Return how many blocks of a step are joined into one, a power of two that leaves enough of ``frames`` frames.
    Where memory is scarcest a step has a hundred blocks, and a forecast took a second."""
    grids = (m.grid for m in layout.matrices.values() if m.in_frames)
    most, joined = max((layout.step_rows // grid.block_rows for grid in grids), default=1), 1
    while 2 * joined <= min(most, frames // _FEWEST_FRAMES):
        joined *= 2
    return joined


def _coarsen(layout: Layout, times: int, joined: int) -> Layout:
    """Return the layout with steps of ``times`` as many rows, and blocks with ``joined`` times as many again."""
    if times * joined == 1:
        return layout
    taller = times * joined
    matrices = {
        name: replace(m, grid=replace(m.grid, block_rows=m.grid.block_rows * taller))
        for name, m in layout.matrices.items()
    }
    return replace(
        layout, step_rows=layout.step_rows * times, frame_bytes=layout.frame_bytes * taller, matrices=matrices
    )


def seconds_of_computing(item: Pass, layout: Layout, workload: Workload, hardware: Hardware) -> float:
    """Return the seconds that a pass computes, wherever its data waits."""
    edges = columns = slab_columns = 0
    is_sharded = isinstance(item, ColumnPass) and item.processes > 1
    rows = range(item.rows) if is_sharded else workload.own(item.space, item.rows)
    if item.pull is not None:
        source = layout.matrices[item.pull.source]
        edges = workload.topologies[item.pull.direction].edges_of(rows, workload.tile_rows)
        columns = pulled_columns(item, source.grid)
        slab_columns = min(columns, source.grid.slab_columns)
    if isinstance(item, ColumnPass):
        steps = -(-len(rows) // max(layout.step_rows, layout.matrices[item.output].grid.block_rows))
        steps += edges // (item.edges_at_once or edges + 1)
        steps *= item.slabs // item.processes
    else:
        steps = -(-len(rows) // row_step_rows(item, layout.step_rows))
    portion = Portion(len(rows), edges, columns, slab_columns, steps)
    taken = computing_of(item, portion, workload, layout.matrices, hardware)
    return taken.together_s(workload, hardware)


def pass_seconds(item: Pass, layout: Layout, workload: Workload, hardware: Hardware, moved: Traffic) -> float:
    """Return the seconds of a pass that moves ``moved``."""
    read_bytes, write_bytes = moved.ssd_read_bytes, moved.ssd_write_bytes
    stalled = 0.0
    sweeps = sweeps_of(item)
    if sweeps is not None:
        source = layout.matrices[sweeps.pull.source]
        grid = source.grid
        is_sharded, slabs = sweeps.processes > 1, sweeps.slabs - sweeps.direct * sweeps.slab_buffers
        if is_sharded and sweeps.turns_at_once > 1:
            slabs = 0 if sweeps.direct else sweeps.processes
        if sweeps.slab_buffers == 1 < grid.slabs or is_sharded:  # a slab is read while nothing can be computed
            slabs_bytes = grid.slab_nbytes(0) * (slabs if sweeps is item else 1)
            if is_sharded:
                slabs_bytes = slabs_bytes * len(workload.own(source.matrix.space, grid.rows)) // grid.rows
            stalled = max(
                ssd_seconds(
                    hardware,
                    read_bytes=min(slabs_bytes, read_bytes) if hardware.has_device_memory else slabs_bytes,
                    write_bytes=0,
                    request_bytes=layout.frame_bytes,
                ),
                pcie_seconds(hardware, to_device_bytes=min(slabs_bytes, moved.to_device_bytes), to_host_bytes=0),
            )
    computing = seconds_of_computing(item, layout, workload, hardware)
    if not hardware.has_device_memory:  # a separate thread checks blocks there
        computing += hardware.moving_s(read_bytes + write_bytes, (read_bytes + write_bytes) / layout.frame_bytes)
    moving = ssd_seconds(hardware, read_bytes=read_bytes, write_bytes=write_bytes, request_bytes=layout.frame_bytes)
    over_pcie = pcie_seconds(hardware, to_device_bytes=moved.to_device_bytes, to_host_bytes=moved.to_host_bytes)
    if hardware.has_device_memory:
        return concurrent_seconds(hardware, computing + stalled, over_pcie)
    return concurrent_seconds(hardware, computing + stalled, moving)


def epoch_seconds(
    passes_s: Sequence[float], moved: Sequence[Traffic], layout: Layout, hardware: Hardware, *, host_frames: int | None
) -> float:
    """Return the seconds of an epoch whose passes take ``passes_s`` and move ``moved``. With a device, host memory lies
    between it and the SSD: writes go on during later passes and reads begin in earlier ones, so the SSD counts once for
    the whole epoch. If all ``host_frames`` are needed for transfers and read-ahead, the epoch waits the longer the
    fewer there are."""
    seconds = sum(passes_s)
    if host_frames is None:
        return seconds
    read_bytes, write_bytes = (sum(each) for each in list(zip(*moved, strict=True))[:2])
    moving = ssd_seconds(hardware, read_bytes=read_bytes, write_bytes=write_bytes, request_bytes=layout.frame_bytes)
    looking = hardware.moving_s(read_bytes + write_bytes, (read_bytes + write_bytes) / layout.frame_bytes)
    waited = 0.0 if room_between_uses(host_frames) else min(seconds, moving) * IN_TRANSFER / host_frames
    return waited + concurrent_seconds(hardware, seconds, moving, looking)
