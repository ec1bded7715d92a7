# SPDX-License-Identifier: Apache-2.0
"""Where everything fits, what is only read stays where it is from program to program, and is read once."""

from dataclasses import replace

import pytest

from ooc.plan import UNMEASURED, Hardware, Limits, Plan, make_plan
from ooc.plan.program.verifier import verify_plan
from tests.plan.workloads import WITH_DEVICE_MEMORY, workload

WORK = workload()
ROOMY = 1 << 30


def planned(hardware: Hardware, device_bytes: int, host_bytes: int = ROOMY) -> Plan:
    return make_plan(WORK, Limits(device_bytes, host_bytes), hardware)


@pytest.mark.parametrize(("hardware", "device_bytes"), [(UNMEASURED, ROOMY), (WITH_DEVICE_MEMORY, ROOMY)])
def test_an_evaluation_between_epochs_costs_no_reading(hardware: Hardware, device_bytes: int) -> None:
    plan = planned(hardware, device_bytes)
    for name in ("train", "evaluate"):
        assert plan.bytes_read(name) == plan.filling_bytes(name, first=False) == 0
        assert plan.filling_bytes(name, first=True) > 0
    train, evaluate = (dict(plan.unrolled[name].warm) for name in ("train", "evaluate"))
    assert any(train[block] == frame for block, frame in evaluate.items() if block in train)


def test_what_fits_the_host_alone_stays_there() -> None:
    """The device loads it over PCIe, and the SSD reads nothing."""
    plan = planned(WITH_DEVICE_MEMORY, 6 << 20)
    assert plan.to_device_bytes > 0
    assert plan.staged["train"].program.uses.resident and not plan.unrolled["train"].uses.resident
    assert plan.bytes_read("train") == plan.filling_bytes("train", first=False) == 0


def test_where_not_everything_fits_nothing_is_resident() -> None:
    """Frames are for what Belady's rule keeps then."""
    plan = planned(UNMEASURED, 4 << 20, 4 << 20)
    assert plan.ssd_read_bytes > 0
    assert not any(program.uses.resident for program in plan.unrolled.values())


def test_a_resident_block_that_lies_elsewhere_is_no_plan() -> None:
    plan = planned(UNMEASURED, ROOMY)
    program = plan.unrolled["evaluate"]
    (block, first), (other, second), *rest = program.warm
    swapped = replace(program, warm=((block, second), (other, first), *rest))
    with pytest.raises(AssertionError, match="a resident block lies elsewhere"):
        verify_plan(replace(plan, unrolled=plan.unrolled | {"evaluate": swapped}))
