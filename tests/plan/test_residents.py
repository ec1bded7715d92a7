# SPDX-License-Identifier: Apache-2.0
"""What is kept from program to program: all that is only read where it fits, otherwise what saves the most reading."""

from dataclasses import replace

import pytest

from ooc.plan import UNMEASURED, Hardware, Limits, Plan, Workload, make_plan
from ooc.plan.program.verifier import verify_plan
from tests.plan.workloads import WITH_DEVICE_MEMORY, workload

WORK = workload()
ROOMY = 1 << 30


def planned(hardware: Hardware, device_bytes: int, host_bytes: int = ROOMY, work: Workload = WORK) -> Plan:
    plan = make_plan(work, Limits(device_bytes, host_bytes), hardware)
    verify_plan(plan)
    return plan


@pytest.mark.parametrize(("hardware", "device_bytes"), [(UNMEASURED, ROOMY), (WITH_DEVICE_MEMORY, ROOMY)])
def test_an_evaluation_between_epochs_costs_no_reading(hardware: Hardware, device_bytes: int) -> None:
    """Nor does one that needs what epochs do not: they keep it for the next one."""
    first, *others = WORK.programs["evaluate"]
    evaluation = replace(first, loads=(*first.loads, "y")), *others
    matrices = WORK.matrices | {"y": replace(WORK.matrices["x"], name="y")}
    for work in (WORK, replace(WORK, matrices=matrices, programs=WORK.programs | {"evaluate": evaluation})):
        plan = planned(hardware, device_bytes, work=work)
        for name, other in (("train", "evaluate"), ("evaluate", "train")):
            assert plan.bytes_read(name) == plan.filling_bytes(name, after=other) == 0
            assert plan.filling_bytes(name, after=None) > 0


def test_what_fits_the_host_alone_stays_there() -> None:
    """The device loads it over PCIe, and the SSD reads nothing."""
    plan = planned(WITH_DEVICE_MEMORY, 6 << 20)
    assert plan.to_device_bytes > 0
    assert plan.staged["train"].program.leaves and plan.staged["evaluate"].program.leaves
    assert plan.bytes_read("train") == plan.filling_bytes("train", after="evaluate") == 0


@pytest.mark.parametrize("budget", [50 << 19, 60 << 19])
def test_where_not_everything_fits_an_epoch_leaves_what_evaluations_begin_with(budget: int) -> None:
    """And finds that again after them: of all that is read in a turn of both, as little as if both were one program."""
    plan = planned(UNMEASURED, budget, budget)
    train, evaluate = plan.unrolled["train"], plan.unrolled["evaluate"]
    assert plan.bytes_read("train") > 0 and evaluate.warm and {*evaluate.warm} <= {*train.leaves}
    assert plan.filling_bytes("evaluate", after="train") == 0
    between = plan.bytes_read("evaluate") + plan.filling_bytes("train", after="evaluate")
    cold = sum(plan.blocks.nbytes(block) for block in {span.block for span in evaluate.uses.spans if span.use.reads})
    assert between < cold and plan.filling_bytes("train", after="evaluate") < plan.filling_bytes("train", after=None)


def test_a_block_that_lies_elsewhere_is_no_plan() -> None:
    plan = planned(UNMEASURED, ROOMY)
    program = plan.unrolled["evaluate"]
    (block, first), (other, second), *rest = program.warm
    swapped = replace(program, warm=((block, second), (other, first), *rest))
    with pytest.raises(AssertionError, match=r"lies elsewhere|not where"):
        verify_plan(replace(plan, unrolled=plan.unrolled | {"evaluate": swapped}))
