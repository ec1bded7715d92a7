# SPDX-License-Identifier: Apache-2.0
"""Plans keep their budgets, use what they are given, and say what would do when it is too little."""

import re
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.errors import BudgetError
from ooc.plan import Limits, Plan, Workload, make_plan
from ooc.plan.program.program import Program
from ooc.plan.program.sequence import Use
from ooc.plan.program.verifier import verify_plan
from ooc.sizes import parse_size
from tests.examples import examples
from tests.plan.policies import Policy, count_hits
from tests.plan.workloads import workload

WORK = workload()
EVERYTHING = 1 << 32


def plan(device: int, host: int, work: Workload = WORK) -> Plan:
    return make_plan(work, Limits(device, host))


@cache
def scarcest() -> Plan:
    return plan(*least())


@cache
def least() -> tuple[int, int]:
    """The least budgets, as the error states them."""
    with pytest.raises(BudgetError) as error:
        plan(1, 1)
    device, host = re.findall(r"(?:gpu|host)_budget='(\w+)", str(error.value))[::-1]
    return parse_size(device), parse_size(host)


def test_with_plenty_nothing_touches_the_disk() -> None:
    made = plan(EVERYTHING, EVERYTHING)
    assert made.ssd_read_bytes == made.ssd_write_bytes == 0
    assert all(row["resident"] == 100 for row in made.summary() if row["matrix"] != "dp1"), "which nobody reads"
    assert made.arena_bytes < 2 * sum(m.matrix.nbytes for m in made.matrices.values()), "no more than there is use for"


def test_a_printed_plan_is_one_short_line() -> None:
    assert re.fullmatch(
        r"<Plan of \d+ matrices: peaks .* SSD an epoch 0 B read, 0 B written.*>", repr(plan(EVERYTHING, EVERYTHING))
    )


def test_the_least_budgets_that_the_error_states_do_plan() -> None:
    verify_plan(scarcest())


def test_less_than_the_least_does_not_plan() -> None:
    (device, host), exact = least(), scarcest()
    with pytest.raises(BudgetError):
        plan(exact.device_peak_bytes - exact.frame_bytes, host)
    with pytest.raises(BudgetError):
        plan(device, WORK.fixed_host_bytes - 1)


def test_a_hundredth_less_than_the_least_does_not_plan() -> None:
    device, host = least()
    for less in ((device * 99 // 100, host), (device, host * 99 // 100)):
        with pytest.raises(BudgetError):
            plan(*less)


def test_what_one_budget_lacks_the_other_may_give() -> None:
    """On the CPU both are the same memory: all that the device must hold itself are the computation's temporaries."""
    device, host = least()
    made = plan(device - 1_000_000, host + 1_000_000)
    verify_plan(made)
    assert made.host_peak_bytes > host


@settings(max_examples=examples(8), deadline=None)
@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 4))
def test_every_plan_keeps_its_budgets_and_passes_the_verifier(
    device_part: float, host_part: float, layers: int
) -> None:
    work = workload(layers=layers)
    device = int(2_000_000 + device_part**3 * 60_000_000)
    host = int(100_000 + host_part**3 * 60_000_000)
    try:
        made = plan(device, host, work)
    except BudgetError:
        return
    verify_plan(made)
    assert made.device_peak_bytes <= device
    assert made.host_peak_bytes <= host


@settings(max_examples=examples(15), deadline=None)
@given(
    budget=st.floats(0, 1),
    rows=st.integers(1, 9000),
    block_rows=st.sampled_from([None, 1024, 4096]),
    slab_columns=st.sampled_from([None, 1, 7, 16, 64]),
    reverse=st.lists(st.booleans(), min_size=5, max_size=5),
)
def test_programs_of_any_shape_pass_the_verifier(
    budget: float, rows: int, block_rows: int | None, slab_columns: int | None, reverse: list[bool]
) -> None:
    """Few rows, narrow slabs, passes in either direction."""
    work = workload(rows=rows)
    stages = [replace(s, reverse=r) for s, r in zip(work.programs["train"], reverse + [True] * 9, strict=False)]
    work = replace(work, programs={**work.programs, "train": tuple(stages)})
    limits = Limits(int(8_000_000 + budget**2 * 90_000_000), 1_000_000, block_rows, slab_columns)
    try:
        made = make_plan(work, limits)
    except BudgetError:
        return
    verify_plan(made)


def test_more_memory_never_means_much_more_traffic_and_far_more_means_less() -> None:
    device, host = least()
    lean, rich = scarcest(), plan(4 * device, host + 30_000_000)
    assert rich.ssd_bytes < lean.ssd_bytes / 2


def test_fixed_slabs_and_blocks_are_used() -> None:
    made = make_plan(WORK, Limits(EVERYTHING, EVERYTHING, block_rows=2048, slab_columns=24))
    assert made.step_rows == 2048
    assert made.matrices["m1"].grid.slab_columns == 24
    assert made.matrices["m1"].grid.slabs == 3


def test_the_bytes_of_a_program_are_those_its_replacement_does_not_save() -> None:
    """Reads that hit plus reads that are sent off are all reads, and the hits are Belady's."""
    made = plan(12_000_000, 12_000_000)
    program = made.unrolled["train"]
    counted = count_hits(program.uses, Policy.BELADY)
    loads = sum(a.load for step in program.acquire for a in step)
    loads += sum(not in_frame for blocks in program.fill.values() for _, in_frame in blocks)
    reads = sum(span.use is not Use.WRITE for span in program.uses.spans)
    assert counted.reads == reads
    assert counted.hits == reads - loads > 0
    assert counted.writes == sum(map(len, program.store)) > 0


def broken(made: Plan, program: Program) -> Plan:
    return replace(made, unrolled={**made.unrolled, "train": program})


def test_the_verifier_sees_what_is_wrong_with_a_program() -> None:
    made = plan(12_000_000, 12_000_000)
    program = made.unrolled["train"]
    verify_plan(made)

    def without(step: int) -> Program:
        acquire = list(program.acquire)
        acquire[step] = acquire[step][1:]
        return replace(program, acquire=tuple(acquire))

    busiest = max(range(len(program.acquire)), key=lambda t: len(program.acquire[t]))
    with pytest.raises(AssertionError, match=r"has no frame|before it is read|out of no frame"):
        verify_plan(broken(made, without(busiest)))
    unsaved = replace(program, store=tuple(() for _ in program.store))
    with pytest.raises(AssertionError, match="is not there"):
        verify_plan(broken(made, unsaved))
    one_frame = tuple(tuple(a._replace(frame=made.frames - 1) for a in step) for step in program.acquire)
    with pytest.raises(AssertionError, match=r"in use and loses its frame|has no frame"):
        verify_plan(broken(made, replace(program, acquire=one_frame)))
    outside = tuple(tuple(a._replace(frame=made.frames) for a in step) for step in program.acquire)
    with pytest.raises(AssertionError, match="outside the arena"):
        verify_plan(broken(made, replace(program, acquire=outside)))
    with pytest.raises(AssertionError, match="not as stated"):
        verify_plan(broken(made, replace(program, read_bytes=program.read_bytes + 1)))


def test_the_verifier_sees_overlap_excess_and_missing_matrices() -> None:
    made = plan(30_000_000, 30_000_000)
    region = made.regions["train"][0]
    twice = (*made.regions["train"], replace(region, matrix="another"))
    with pytest.raises(AssertionError, match="overlap"):
        verify_plan(replace(made, regions={**made.regions, "train": twice}))
    with pytest.raises(AssertionError, match="not in memory"):
        verify_plan(replace(made, regions={**made.regions, "train": made.regions["train"][1:]}))
    with pytest.raises(AssertionError, match="allowed"):
        verify_plan(replace(made, host_limit_bytes=made.host_peak_bytes - 1))
    with pytest.raises(AssertionError, match="before it is written"):
        verify_plan(replace(made, programs={"train": made.programs["train"][1:]}))
