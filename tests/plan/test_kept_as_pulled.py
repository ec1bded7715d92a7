# SPDX-License-Identifier: Apache-2.0
"""What a stage keeps as it has pulled it, slab by slab, is pulled right into where it is kept."""

from dataclasses import replace

import pytest

from ooc.plan import UNMEASURED, Hardware, Limits, Plan, Workload
from ooc.plan.layout.layout import SlabChoice
from ooc.plan.layout.passes import ColumnPass, RowPass
from ooc.plan.planner import plan_layout
from ooc.plan.program.sequence import Use
from ooc.plan.program.verifier import verify_plan
from tests.plan.workloads import WITH_DEVICE_MEMORY, held, keeping, workload

ROWS, WIDTH = 40_000, 64
NBYTES = ROWS * WIDTH * 4
WORK = keeping(workload(rows=ROWS, width=WIDTH))
MACHINES = pytest.mark.parametrize("machine", [UNMEASURED, WITH_DEVICE_MEMORY], ids=lambda machine: machine.name)


def made(work: Workload, machine: Hardware, m2: SlabChoice) -> Plan:
    """A plan in which m2 is pulled like this and kept in z3, and everything else is in memory whole."""
    return held(work, machine, 50_000_000, {"m2": m2})


def used(plan: Plan, name: str, at: int, use: Use) -> int:
    """Bytes of matrix ``name`` that pass ``at`` uses so."""
    program = plan.unrolled["train"]
    mine = [span for span in program.uses.spans if program.steps[span.first].at == at and span.use is use]
    return sum(plan.blocks.nbytes(span.block) for span in mine if plan.blocks.where(span.block)[0] == name)


@MACHINES
@pytest.mark.parametrize(("overlap_last", "slabs"), [(False, 4), (True, 3)])
def test_every_slab_is_written_once_by_whoever_pulls_it(machine: Hardware, overlap_last: bool, slabs: int) -> None:
    plan = made(WORK, machine, SlabChoice(16, 1, overlap_last=overlap_last))
    assert "p2" not in plan.matrices
    sweeps, stage = plan.programs["train"][2:4]
    assert isinstance(sweeps, ColumnPass)
    assert isinstance(stage, RowPass)
    assert sweeps.output == stage.pulled == "z3"
    assert used(plan, "z3", sweeps.index, Use.WRITE) == NBYTES * slabs // 4
    assert used(plan, "z3", stage.index, Use.READ) == NBYTES * slabs // 4
    assert used(plan, "z3", stage.index, Use.WRITE) == NBYTES * (4 - slabs) // 4
    assert ("z3" in stage.stores) == overlap_last


@MACHINES
def test_what_is_pulled_whole_is_stored_by_the_stage(machine: Hardware) -> None:
    plan = made(WORK, machine, SlabChoice(0, 0))
    (stage,) = [item for item in plan.programs["train"] if "z3" in item.stores]
    assert isinstance(stage, RowPass)
    assert stage.pulled is None
    assert used(plan, "z3", stage.index, Use.WRITE) == NBYTES


@MACHINES
@pytest.mark.parametrize("overlap_last", [False, True])
def test_values_that_are_kept_narrower_are_pulled_elsewhere(machine: Hardware, overlap_last: bool) -> None:
    """The stage goes by what it has pulled, in full; what it keeps is rounded."""
    narrow = replace(WORK, matrices=WORK.matrices | {"z3": replace(WORK.matrices["z3"], itemsize=2)})
    plan = made(narrow, machine, SlabChoice(16, 1, overlap_last=overlap_last))
    sweeps, stage = plan.programs["train"][2:4]
    assert isinstance(sweeps, ColumnPass)
    assert sweeps.output == "p2"
    assert used(plan, "z3", stage.index, Use.WRITE) == NBYTES // 2


def test_a_stage_of_more_rows_than_are_kept_has_them_all() -> None:
    """Of z3 the backward pass needs half the rows only; what the stage goes by is in it as well."""
    half = replace(WORK, matrices=WORK.matrices | {"z3": replace(WORK.matrices["z3"], rows=ROWS // 2)})
    assert made(half, UNMEASURED, SlabChoice(0, 0)).matrices["z3"].matrix.rows == ROWS // 2
    assert made(half, UNMEASURED, SlabChoice(16, 1)).matrices["z3"].matrix.rows == ROWS


@MACHINES
def test_less_is_written_where_memory_is_short(machine: Hardware) -> None:
    plain = workload(rows=ROWS, width=WIDTH)
    limits = Limits(12_000_000, 8_000_000)
    written = [plan_layout(work, limits, machine).plan.ssd_write_bytes for work in (WORK, plain)]
    assert written[0] < written[1]


@MACHINES
def test_a_pass_that_stores_again_what_it_reads_is_found(machine: Hardware) -> None:
    plan = made(WORK, machine, SlabChoice(16, 1, overlap_last=True))
    passes = plan.programs["train"]
    other = [
        replace(item, sweeps=None, loads=("m3",)) if isinstance(item, RowPass) and item.sweeps else item
        for item in passes
    ]
    with pytest.raises(AssertionError, match="train: pass"):
        verify_plan(replace(plan, programs=plan.programs | {"train": tuple(other)}))
