# SPDX-License-Identifier: Apache-2.0
"""Columns that are sharded among processes: every row of every slab is pulled once, by whom others expect it of, what
each is sent is that of both forms, and the planner takes the one that takes less time."""

from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from ooc.plan import UNMEASURED, Limits, Plan, Workload, make_plan
from ooc.plan.layout.layout import Choice, SlabChoice, lay_out, pulled_sources
from ooc.plan.layout.passes import ColumnPass
from ooc.plan.program.build import build_plan
from ooc.plan.program.capacity import Capacity, ExchangeForm
from ooc.plan.program.verifier import verify_plan
from ooc.plan.workload import Share, sharded_widths
from tests.plan.workloads import WITH_DEVICE_MEMORY, workload

WIDTH, ROWS = 64, 40_000
SHARES = range(11_264), range(11_264, 22_528), range(22_528, 31_744), range(31_744, ROWS)
"""Some begin amid a step, and amid a block."""


def of_rank(rank: int) -> Workload:
    return replace(workload(ROWS, WIDTH), share=Share(rank, {"": SHARES}))


@cache
def sharded(columns: int, buffers: int = 1, *, direct: bool, on_device: bool = False) -> list[Plan]:
    """By rank: slabs of so many columns, of so many turns at once."""
    cuts = dict.fromkeys(["m1", "m2", "m3", "dp2", "dp3"], SlabChoice(columns, buffers, direct, sharded=True))
    machine, plans = WITH_DEVICE_MEMORY if on_device else UNMEASURED, []
    for rank in range(len(SHARES)):
        work = of_rank(rank)
        plans.append(build_plan(lay_out(work, Choice(2048, cuts)), Capacity(work, Limits(10**9, 10**9), machine)))
    return plans


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize(("columns", "buffers"), [(0, 1), (4, 2)])
def test_every_row_of_every_slab_is_pulled_by_one_process(
    columns: int, buffers: int, direct: bool, on_device: bool
) -> None:
    plans = sharded(columns, buffers, direct=direct, on_device=on_device)
    for plan in plans:
        verify_plan(plan)
    for item in plans[0].programs["train"]:
        if isinstance(item, ColumnPass):
            steps = (plan.unrolled["train"].steps[at] for plan in plans for at in range(*bounds_of(plan, item)))
            pulled = sorted((step.slab, step.start, step.stop) for step in steps)
            assert {slab for slab, _, _ in pulled} == {*range(item.slabs)}
            assert sum(stop - start for _, start, stop in pulled) == item.slabs * ROWS
            assert all(a[0] != b[0] or a[2] == b[1] for a, b in pairwise(pulled))


def bounds_of(plan: Plan, item: ColumnPass) -> tuple[int, int]:
    return plan.unrolled["train"].bounds[item.index]


def test_what_is_sent_is_a_slab_of_all_rows_and_what_others_have_pulled() -> None:
    pulls, row_bytes = 5, WIDTH * 4
    for plan, share in zip(sharded(0, direct=True), SHARES, strict=True):
        forms = plan.forms("train")
        both = (ROWS - len(share)) * row_bytes // 4 + len(share) * row_bytes * 3 // 4
        assert len(forms) == pulls and {(one.halo_bytes, one.columns_bytes, one.is_sharded) for one in forms} == {
            ((ROWS - len(share)) * row_bytes, both, True)
        }
        assert plan.received_bytes("train") == pulls * both


def test_what_others_do_not_expect_is_no_proof() -> None:
    plan = sharded(4, direct=True)[1]
    item = next(one for one in plan.programs["train"] if isinstance(one, ColumnPass))
    first, _ = bounds_of(plan, item)
    program = plan.unrolled["train"]

    def with_program(**changed: Any) -> Plan:
        return replace(plan, unrolled={**plan.unrolled, "train": replace(program, **changed)})

    steps = list(program.steps)
    steps[first], steps[first + 1] = steps[first + 1], steps[first]
    with pytest.raises(AssertionError, match="pulls other rows of p1 than others expect"):
        verify_plan(with_program(steps=tuple(steps)))
    with pytest.raises(AssertionError, match="slabs of m1 are missing"):
        verify_plan(with_program(fill={}))
    with pytest.raises(AssertionError, match="than others expect"):
        others = Share(1, {"": (*SHARES[:2], range(22_528, 33_792), range(33_792, ROWS))})
        verify_plan(replace(plan, share=others))


def test_who_has_no_rows_of_a_stage_needs_none_of_their_blocks() -> None:
    """Where there are fewer panels than processes, or fewer rows that are needed than all; of blocks lower than steps,
    which end where the rows do."""
    rows = 2460
    work = replace(workload(rows, WIDTH), share=Share(2, {"": (range(1024), range(1024, rows), range(rows, rows))}))
    layout = lay_out(work, Choice(1024, dict.fromkeys(pulled_sources(work), SlabChoice(0, 0)), parts=4))
    assert layout.matrices["x"].grid.block_rows == 256 and rows % 256
    verify_plan(build_plan(layout, Capacity(work, Limits(10**9, 10**9), UNMEASURED)))


def test_heads_of_several_slices_are_sharded_out_whole_or_slice_by_slice() -> None:
    assert sharded_widths(12, 2, 4) == (2, 1)  # three heads: a half each, or a quarter
    assert sharded_widths(16, 2, 4) == (8, 4, 2, 1)


@pytest.mark.parametrize(("columns", "count"), [(256, 4), (13, 3), (47, 8), (16, 3), (9, 4), (5, 5), (1, 2)])
def test_all_have_as_many_slabs(columns: int, count: int) -> None:
    for width in sharded_widths(columns, count):
        assert -(-columns // width) % count == 0 and width <= -(-columns // count)
    assert bool(sharded_widths(columns, count)) == ((columns, count) not in [(9, 4), (1, 2)])


def test_the_planner_sends_what_takes_less_time() -> None:
    work, room = of_rank(0), 10**9
    scattered = {side: replace(one, halo_rows=ROWS - len(SHARES[0])) for side, one in work.topologies.items()}
    nearby = {side: replace(one, halo_rows=100) for side, one in work.topologies.items()}

    def sent(found: dict[Any, Any], **limits: Any) -> set[bool]:
        plan = make_plan(replace(work, topologies=found), Limits(room, room, **limits), UNMEASURED)
        return {one.is_sharded for one in plan.forms("train")}

    assert sent(scattered, link_bytes_per_s=10**7) == {True}
    assert sent(nearby, link_bytes_per_s=10**7) == {False}
    assert sent(scattered, link_bytes_per_s=10**7, exchange=ExchangeForm.HALO) == {False}
    assert sent(nearby, link_bytes_per_s=10**12, exchange=ExchangeForm.COLUMNS) == {True}
