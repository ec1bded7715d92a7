# SPDX-License-Identifier: Apache-2.0
"""What an epoch learns is read, replaced where it lies by the last pass that reads it, and written, whatever fits."""

from dataclasses import replace

import pytest

from ooc.plan import UNMEASURED, Direction, Kind, Limits, Matrix, Plan, Pull, Stage, Workload
from ooc.plan.planner import plan_layout
from ooc.plan.program.sequence import Use
from ooc.plan.program.verifier import verify_plan
from ooc.plan.simulate.simulator import simulate
from tests.plan.workloads import workload

ROWS, WIDTH = 40_000, 64
NBYTES = ROWS * WIDTH * 4
LEARNT = ("emb", "emb.exp_avg")


def learning(*, last: bool = True) -> Workload:
    """A chain whose first stage reads an embedding, which its last one steps; or its second, before others read it."""
    work = workload(rows=ROWS, width=WIDTH)
    matrices = {name: Matrix(name, ROWS, WIDTH, 4, Kind.LEARNT) for name in LEARNT}
    first, *others = work.programs["train"]
    pull = Pull("dp1", "dm1", Direction.OUT)
    stages = [replace(first, loads=("emb",)), *others]
    stages.insert(len(stages) if last else 1, Stage("step", ROWS, LEARNT, pull if last else None, LEARNT, 1000, True))
    if not last:
        stages[-1] = replace(stages[-1], loads=(*stages[-1].loads, "emb"))
    evaluate = (replace(first, loads=("emb",)), *others[: len(work.programs["evaluate"]) - 1])
    programs = {"prepare": (), "train": tuple(stages), "evaluate": evaluate}
    return replace(work, matrices=work.matrices | matrices, programs=programs)


def planned(memory_bytes: int) -> Plan:
    limits = Limits(memory_bytes // 3, memory_bytes * 2 // 3, one_memory=True)
    plan = plan_layout(learning(), limits, UNMEASURED).plan
    verify_plan(plan)
    return plan


def moved(plan: Plan, use: Use) -> int:
    """Bytes of what is learnt that an epoch uses so."""
    spans = [span for span in plan.unrolled["train"].uses.spans if span.use is use]
    return sum(plan.blocks.nbytes(s.block) for s in spans if plan.blocks.where(s.block)[0] in LEARNT)


@pytest.mark.parametrize("memory_bytes", [9_000_000, 20_000_000, 60_000_000, 400_000_000])
def test_every_block_is_replaced_and_written_once(memory_bytes: int) -> None:
    plan = planned(memory_bytes)
    assert moved(plan, Use.UPDATE) == 2 * NBYTES
    assert plan.ssd_write_bytes >= 2 * NBYTES
    assert not plan.spilled.intersection(LEARNT)
    assert simulate(plan, learning(), UNMEASURED, "train").epoch_s > 0


def test_what_fits_is_not_read_again() -> None:
    """It is there from the epoch before; where little fits, all of it is read: the rows twice, forward and backward."""
    roomy, tight = planned(400_000_000), planned(9_000_000)
    assert (roomy.ssd_read_bytes, roomy.ssd_write_bytes) == (0, 2 * NBYTES)
    assert roomy.filling_bytes("train", after=None) > 2 * NBYTES
    assert tight.ssd_read_bytes > 2.5 * NBYTES


def test_rows_are_replaced_by_the_last_pass_that_reads_them() -> None:
    """Until then the version before is read, which has to be the one on the disk."""
    work = learning(last=False)
    with pytest.raises(AssertionError, match="replaces emb"):
        verify_plan(plan_layout(work, Limits(10**8, 10**8), UNMEASURED).plan)


def test_what_is_not_written_is_no_plan() -> None:
    plan = planned(400_000_000)
    program = plan.unrolled["train"]
    stored = tuple(() for _ in program.store)
    with pytest.raises(AssertionError, match="is replaced, and not on the SSD in the end"):
        verify_plan(replace(plan, unrolled=plan.unrolled | {"train": replace(program, store=stored, write_bytes=0)}))
