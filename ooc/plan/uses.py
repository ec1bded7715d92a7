# SPDX-License-Identifier: Apache-2.0
"""The steps of a program of passes, and every use that they make of a block."""

from collections.abc import Sequence

from ooc.plan.layout import Layout
from ooc.plan.matrices import edges_name
from ooc.plan.passes import ColumnPass, Pass, RowPass
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
from ooc.plan.slabs import column_step_rows, direct_slabs, loaded_slabs, slabs_beside, stored_slabs
from ooc.plan.workload import Pull, Workload


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
    steps = row_steps(item.index, item.rows, layout.step_rows, item.rest.slabs if item.rest else -1, item.stage.reverse)
    spans: list[Span] = []
    for name in item.loads:
        planned = layout.matrices[name]
        if planned.in_frames:
            slabs = loaded_slabs(name, item, planned.grid)
            spans += row_spans(planned.grid, blocks.base(name), slabs, first, steps, Use.READ)
    for name in item.stores:
        planned = layout.matrices[name]
        if planned.in_frames:
            slabs = stored_slabs(name, item.index, layout.matrices, passes)
            spans += row_spans(planned.grid, blocks.base(name), slabs, first, steps, Use.WRITE)
    if item.pull is not None:
        spans += _edges(item.pull, first, steps, layout, workload, blocks)
    return steps, spans


def _column_uses(
    item: ColumnPass, first: int, passes: Sequence[Pass], layout: Layout, workload: Workload, blocks: BlockTable
) -> tuple[list[Step], list[Span]]:
    source, target = layout.matrices[item.pull.source].grid, layout.matrices[item.output].grid
    steps = column_steps(item.index, item.rows, column_step_rows(item, layout.matrices), item.slabs)
    sweep = len(steps) // item.slabs
    rows = next((p.rows for p in passes if item.pull.source in p.stores), source.rows)
    spans: list[Span] = []
    for slab in range(item.slabs):
        at = first + slab * sweep
        mine = steps[slab * sweep : (slab + 1) * sweep]
        spans += row_spans(target, blocks.base(item.output), range(slab, slab + 1), at, mine, Use.WRITE)
        spans += _edges(item.pull, at, mine, layout, workload, blocks)
        for name in item.pull.own:
            planned = layout.matrices[name]
            if not planned.whole:
                slabs = slabs_beside(source, planned.grid, slab)
                spans += row_spans(planned.grid, blocks.base(name), slabs, at, mine, Use.READ)
    for slab in range(direct_slabs(passes, item), source.slabs):  # one that is left to the row pass with its first step
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
