# SPDX-License-Identifier: Apache-2.0
"""A simulated epoch of a device with memory of its own moves both programs' bytes, within both budgets."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.plan import Hardware, Limits, Plan, make_plan
from ooc.plan.hardware import Curve, Disk, Wire
from ooc.plan.simulate.channels import Pcie
from ooc.plan.simulate.simulator import simulate
from ooc.plan.simulate.timeline import Resource, Timeline
from tests.examples import examples
from tests.plan.workloads import WITH_DEVICE_MEMORY, workload

WORK = workload()
SSD, WIRE = (Resource.SSD_READ, Resource.SSD_WRITE), (Resource.TO_DEVICE, Resource.TO_HOST)


def a_machine(disk: float, wire: float) -> Hardware:
    both = Disk(Curve(((1.0, disk),)), Curve(((1.0, disk),)), disk, 0.0)
    return replace(WITH_DEVICE_MEMORY, disk=both, wire=Wire(wire, wire))


@cache
def planned(device_bytes: int, host_bytes: int) -> Plan:
    return make_plan(WORK, Limits(device_bytes, host_bytes), WITH_DEVICE_MEMORY)


def moved(timeline: Timeline, *resources: Resource) -> list[int]:
    return [timeline.moved_bytes.get(resource, 0) for resource in resources]


@settings(max_examples=examples(5), deadline=None)
@given(
    budgets=st.sampled_from([(12 << 20, 4 << 20), (5 << 20, 64 << 20), (48 << 20, 11 << 20), (128 << 20, 128 << 20)]),
    disk=st.floats(1e7, 1e10),
    wire=st.floats(1e8, 1e11),
)
def test_the_bytes_are_both_programs_and_no_resource_does_two_things_at_once(
    budgets: tuple[int, int], disk: float, wire: float
) -> None:
    """Few plans on many machines: a plan is made for one of its own."""
    plan = planned(*budgets)
    timeline = simulate(plan, WORK, a_machine(disk, wire))
    assert moved(timeline, *SSD) == [plan.ssd_read_bytes, plan.ssd_write_bytes]
    assert moved(timeline, *WIRE) == [plan.to_device_bytes, plan.to_host_bytes]
    for resource in Resource:
        own = [event for event in timeline.events if event.resource is resource]
        assert all(b.start_s >= a.end_s - 1e-9 for a, b in pairwise(own))
        assert timeline.busy_s.get(resource, 0.0) <= timeline.epoch_s * (1 + 1e-9)
    device, host = timeline.memory
    assert device.peak_bytes <= plan.device_peak_bytes <= device.limit_bytes
    assert host.peak_bytes <= plan.host_peak_bytes <= host.limit_bytes


def test_what_is_slow_is_what_the_epoch_takes() -> None:
    """A slow drive, then a slow wire: the time is that of its bytes, and it is named."""
    plan = planned(12 << 20, 4 << 20)
    slow_disk, slow_wire = (simulate(plan, WORK, a_machine(*rates)) for rates in ((1e7, 1e11), (1e11, 1e7)))
    assert slow_disk.bottleneck in SSD and slow_wire.bottleneck in WIRE
    assert slow_disk.epoch_s == pytest.approx(sum(moved(slow_disk, *SSD)) / 1e7, rel=0.2)
    assert slow_wire.epoch_s >= max(moved(slow_wire, *WIRE)) / 1e7
    assert any(item.bound in SSD for item in slow_disk.passes)
    assert any(item.bound in WIRE for item in slow_wire.passes)


def test_copies_wait_for_what_they_are_behind_and_for_those_before_them() -> None:
    """Each way for itself, at its full rate."""
    streams = Pcie((100.0, 50.0))
    first, second, back = streams.send(0, 100, 0, 2.0), streams.send(0, 50, 0, 0.0), streams.send(1, 100, 0, 0.5)
    assert [streams.started[one] for one in (first, second, back)] == [2.0, 3.0, 0.5]
    assert [streams.served[one] for one in (first, second, back)] == [3.0, 3.5, 2.5]
    assert streams.drain() == 3.5


@settings(max_examples=examples(5), deadline=None)
@given(
    device_bytes=st.sampled_from([5 << 20, 12 << 20, 40 << 20]),
    wire=st.floats(1e8, 1e11),
    faster=st.floats(1, 10),
    what=st.sampled_from(["wire", "sums", "launches"]),
)
def test_an_epoch_takes_at_least_its_busiest_resource_and_no_longer_if_one_is_faster(
    device_bytes: int, wire: float, faster: float, what: str
) -> None:
    """Where the drive has nothing to do: streams wait for nothing but one another."""
    plan = planned(device_bytes, 1 << 30)
    machine = a_machine(1e9, wire)
    timeline = simulate(plan, WORK, machine)
    assert max(timeline.busy_s.values()) <= timeline.epoch_s * (1 + 1e-9)
    assert all(a.end_s == b.start_s for a, b in pairwise(timeline.passes))
    processor = machine.processor
    points = tuple((size, seconds / faster) for size, seconds in processor.pull_seconds_per_edge.points)
    other = {
        "wire": replace(machine, wire=Wire(faster * wire, faster * wire)),
        "sums": replace(machine, processor=replace(processor, pull_seconds_per_edge=Curve(points, proportional=True))),
        "launches": replace(
            machine, processor=replace(processor, seconds_per_operator=processor.seconds_per_operator / faster)
        ),
    }[what]
    assert simulate(plan, WORK, replace(other, overlap=machine.overlap)).epoch_s <= timeline.epoch_s * (1 + 1e-9)


def test_the_host_runs_ahead_of_the_kernels() -> None:
    """While a device computes, the next kernels are launched and their blocks sent: where that takes less time than
    computing and copying, the epoch is no longer for it."""
    plan = planned(12 << 20, 1 << 30)
    slow = a_machine(1e9, 1e8)
    free = replace(slow, processor=replace(slow.processor, seconds_per_operator=0.0, seconds_per_tile=0.0))
    launching = replace(slow, processor=replace(slow.processor, seconds_per_operator=1e-6))
    assert simulate(plan, WORK, launching).epoch_s < 1.01 * simulate(plan, WORK, free).epoch_s


def test_blocks_are_looked_at_beside_what_the_host_launches() -> None:
    """Another thread has most of that to do, one block after the other: of a quarter of an epoch less than half is
    seen, and the epoch is no shorter than what it has to do."""
    plan, machine = planned(12 << 20, 4 << 20), a_machine(1e12, 1e11)
    processor = replace(machine.processor, seconds_per_operator=2e-5)
    free = replace(machine, processor=processor, overlap=1.0, seconds_per_block=0.0)
    moved_bytes, epoch_s = plan.ssd_read_bytes + plan.ssd_write_bytes, simulate(plan, WORK, free).epoch_s

    def with_looks(seconds: float) -> float:
        return simulate(plan, WORK, replace(free, seconds_per_moved_byte=seconds / moved_bytes)).epoch_s

    assert with_looks(0.25 * epoch_s) < 1.125 * epoch_s
    assert with_looks(1.5 * epoch_s) >= 0.8 * 1.5 * epoch_s


def test_a_host_that_holds_everything_leaves_the_drive_alone() -> None:
    timeline = simulate(planned(12 << 20, 1 << 30), WORK, a_machine(1e7, 1e10))
    assert moved(timeline, *SSD) == [0, 0]
    assert min(moved(timeline, *WIRE)) > 0
