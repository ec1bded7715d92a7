# SPDX-License-Identifier: Apache-2.0
"""What passes take beside the arena."""

from dataclasses import replace

import pytest

from ooc.plan import UNMEASURED, Limits, make_plan
from ooc.plan.layout.layout import Choice, SlabChoice, lay_out, pulled_sources
from ooc.plan.layout.passes import ColumnPass, Pass, column_step_rows
from ooc.plan.layout.temporaries import PULL_TILE_ROWS, most_edges, scratch_nbytes
from ooc.plan.program.build import build_plan
from ooc.plan.program.capacity import Capacity
from ooc.plan.program.verifier import verify_plan
from ooc.plan.workload import Parts, PerEdge, Workload
from tests.plan.workloads import WITH_DEVICE_MEMORY, workload

ROWS, WIDTH, GROUPS = 40_000, 64, 4


def attending(threads: int, *, bytes_per_row: int = 100) -> Workload:
    """The loss pulls by a kernel with four groups of 16 columns."""
    work = workload(ROWS, WIDTH, layers=2)
    kernel = PerEdge(GROUPS, WIDTH, None, 16384, bytes_per_edge=100, bytes_per_row=bytes_per_row)
    *before, loss, last = work.programs["train"]
    assert loss.pull is not None
    train = (*before, replace(loss, pull=replace(loss.pull, per_edge=kernel)), last)
    return replace(work, programs=work.programs | {"train": train}, threads=threads)


@pytest.mark.parametrize(
    ("bytes_per_row", "room", "blocks"), [(40_000, 0, 0.0), (100, 0, 0.5), (100, 64 << 20, 1.0), (7000, 64 << 20, 0.25)]
)
def test_a_device_pulls_as_many_rows_at_once_as_others_leave_room_for(
    bytes_per_row: int, room: int, blocks: float
) -> None:
    """Of a kernel that makes something of every edge: tiles until they take more than another pass does, or are a
    step's. What passes take at most is the same as if it pulled the fewest."""
    work = attending(1, bytes_per_row=bytes_per_row)
    work = replace(work, parts=Parts(edges=512, itemsize=4, bytes_each=16))
    first, *others = work.programs["train"]
    greedy = replace(first, scratch_bytes_per_row=room // work.tile_rows)
    work = replace(work, programs=work.programs | {"train": (greedy, *others)})
    plan = make_plan(work, Limits(10**9, 10**9, slab_columns=16, block_rows=8 * PULL_TILE_ROWS), WITH_DEVICE_MEMORY)
    verify_plan(plan)
    (pull,) = (i for i in plan.programs["train"] if isinstance(i, ColumnPass) and i.pull.per_edge is not None)

    def scratch(rows_at_once: int) -> int:
        return scratch_nbytes(replace(pull, rows_at_once=rows_at_once), plan.matrices, work, plan.frame_bytes)

    def scratch_of(item: Pass) -> int:
        return scratch_nbytes(item, plan.matrices, work, plan.frame_bytes)

    step_rows, height = column_step_rows(pull, plan.matrices, plan.step_rows), pull.rows_at_once
    assert height == max(PULL_TILE_ROWS, int(blocks * step_rows))
    assert scratch(height) <= plan.scratch_bytes
    assert height == step_rows or scratch(2 * height) > plan.scratch_bytes
    assert scratch(PULL_TILE_ROWS) <= plan.scratch_bytes == max(room, *(scratch_of(i) for i in plan.programs["train"]))


@pytest.mark.parametrize("kernel", [True, False])
def test_a_lean_plan_pulls_few_edges_in_what_other_passes_take(kernel: bool) -> None:
    """Of a step as many as fit a frame, and of others a piece after the other; and no more rows at once than take what
    other passes take. The plan is proved."""
    work = attending(1) if kernel else workload(ROWS, WIDTH, layers=2)
    work = replace(work, parts=Parts(edges=512, itemsize=4, bytes_each=16))
    cuts = {name: SlabChoice(16, 1, direct=False) for name in pulled_sources(work)}
    lean = lay_out(work, Choice(2 * PULL_TILE_ROWS, cuts, parts=64, lean=True))
    plan = build_plan(lean, Capacity(work, Limits(10**9, 10**9), WITH_DEVICE_MEMORY))
    verify_plan(plan)
    pulls = [item for item in lean.programs["train"] if isinstance(item, ColumnPass)]
    assert all(item.edges_at_once is not None and 4 * item.edges_at_once <= lean.frame_bytes for item in pulls)
    pieces = [step for step in plan.unrolled["train"].steps if step.edges is not None]
    assert pieces
    every = [item for passes in lean.programs.values() for item in passes]
    fewest = [replace(item, rows_at_once=PULL_TILE_ROWS) if isinstance(item, ColumnPass) else item for item in every]
    assert lean.scratch_bytes == max(scratch_nbytes(one, lean.matrices, work, lean.frame_bytes) for one in fewest)


def test_a_processor_pulls_the_same_rows_whatever_room_there_is() -> None:
    """By a kernel over edges: its threads share the tiles of a step."""
    work = attending(2)
    first, *others = work.programs["train"]
    work = replace(work, programs=work.programs | {"train": (replace(first, scratch_bytes_per_row=1 << 16), *others)})
    plan = make_plan(work, Limits(10**9, 10**9, slab_columns=16, block_rows=8 * PULL_TILE_ROWS), UNMEASURED)
    pulls = [i for i in plan.programs["train"] if isinstance(i, ColumnPass) and i.pull.per_edge is not None]
    assert pulls and all(item.rows_at_once == PULL_TILE_ROWS for item in pulls)


@pytest.mark.parametrize(("width", "tiles"), [(32, 4), (64, 2), (128, 1)])
def test_a_processor_sums_more_rows_of_narrow_slabs_at_once(width: int, tiles: int) -> None:
    """As many as a cache holds and leave every thread some tiles of a step. In the leanest layout only what takes no
    more than other passes do."""
    work = replace(workload(256 * PULL_TILE_ROWS, 128, layers=2), threads=1)
    cuts = {name: SlabChoice(width, 1, direct=False) for name in pulled_sources(work)}
    choice = Choice(16 * PULL_TILE_ROWS, cuts)
    tall, lean = lay_out(work, choice), lay_out(work, replace(choice, lean=True))
    heights = {item.rows_at_once for item in tall.programs["train"] if isinstance(item, ColumnPass)}
    assert heights == {tiles * PULL_TILE_ROWS}
    every = [item for passes in lean.programs.values() for item in passes]
    fewest = [replace(item, rows_at_once=PULL_TILE_ROWS) if isinstance(item, ColumnPass) else item for item in every]
    assert lean.scratch_bytes == max(scratch_nbytes(one, lean.matrices, work, lean.frame_bytes) for one in fewest)


@pytest.mark.parametrize(("threads", "ahead", "results"), [(1, 3, 1), (2, 1, 4), (2, 3, 5)])
def test_what_waits_to_be_added_counts_once_for_each_tile_that_waits(threads: int, ahead: int, results: int) -> None:
    """One where tiles are computed one after the other; with threads those under way and waiting, and a copy of one."""
    work = replace(attending(threads), tasks_ahead=ahead)
    plan = make_plan(work, Limits(10**9, 10**9), UNMEASURED)
    (item,) = (i for i in plan.programs["train"] if i.pull is not None and i.pull.per_edge is not None)
    assert item.pull is not None and item.pull.per_edge is not None
    kind = replace(item.pull.per_edge, waiting_bytes_per_edge=8)
    waiting = replace(item, pull=replace(item.pull, per_edge=kind))
    scratch, more = (scratch_nbytes(one, plan.matrices, work, plan.frame_bytes) for one in (item, waiting))
    edges = most_edges(work.topologies[item.pull.direction], work.tile_rows, item.rows, work.tile_rows)
    assert more - scratch == results * kind.waiting_nbytes(edges, work.tile_rows)


@pytest.mark.parametrize(("threads", "results"), [(1, 1), (2, 3)])
def test_of_a_tile_with_more_edges_than_wait_none_wait(threads: int, results: int) -> None:
    """But those of others do, and with threads, while it is computed once more, a piece of its own; where a row comes
    in several pieces each thread has what it holds of all."""
    work = replace(attending(threads), tasks_ahead=1)
    plan = make_plan(work, Limits(10**9, 10**9), UNMEASURED)
    (item,) = (i for i in plan.programs["train"] if i.pull is not None and i.pull.per_edge is not None)
    assert item.pull is not None and item.pull.per_edge is not None
    topology = work.topologies[item.pull.direction]
    heavy, others, few = 10**6, 4000, 1000
    tile_edges = [0, *range(heavy, heavy + others * (len(topology.tile_edges) - 1), others)]
    hub = replace(topology, tile_edges=tile_edges)
    work = replace(work, topologies=work.topologies | {item.pull.direction: hub})
    plain = replace(item.pull.per_edge, edges_at_once=few, opaque=True)

    def scratch(kind: PerEdge) -> int:
        pull = replace(item.pull, per_edge=kind)
        return scratch_nbytes(replace(item, pull=pull), plan.matrices, work, plan.frame_bytes)

    rows, before = work.tile_rows, scratch(plain)
    waiting = replace(plain, waiting_bytes_per_edge=8, waiting_edges=10_000)
    more = scratch(waiting) - before
    of_others = results * waiting.waiting_nbytes(others, rows)
    if threads == 1:
        assert more == of_others
    else:
        assert of_others + waiting.waiting_nbytes(few, rows) < more < of_others + 8 * heavy
    assert scratch(replace(plain, held_bytes=7777)) - before == 7777 * threads
