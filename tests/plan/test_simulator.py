# SPDX-License-Identifier: Apache-2.0
"""The simulated epoch moves the program's bytes, keeps the plan's memory, and hides what can be hidden."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.errors import BudgetError
from ooc.plan import UNMEASURED, Hardware, Limits, Plan, Workload, make_plan
from ooc.plan.hardware import Curve, Disk
from ooc.plan.simulate.channels import Drive
from ooc.plan.simulate.simulator import simulate
from ooc.plan.simulate.timeline import Event, Resource, stretches
from tests.examples import examples
from tests.plan.test_planner import workload

WORK = workload()


def with_disk(read: float, write: float, both: float, latency_s: float = 0.0) -> Hardware:
    disk = Disk(Curve(((1.0, read),)), Curve(((1.0, write),)), both, latency_s)
    return replace(UNMEASURED, disk=disk)


def planned(device_bytes: int, work: Workload = WORK) -> Plan:
    try:
        return make_plan(work, Limits(device_bytes, 1 << 20))
    except BudgetError:
        return make_plan(work, Limits(1 << 26, 1 << 20))


def test_an_optimizers_state_is_read_and_written_after_the_passes() -> None:
    plan, state_bytes = planned(64 << 20), 10**9
    kept = replace(plan, state_bytes=state_bytes)
    before, after = (simulate(one, WORK, with_disk(2e9, 1e9, 2e9)) for one in (plan, kept))
    assert after.epoch_s == pytest.approx(before.epoch_s + 2 * state_bytes / 2e9)
    for way in (Resource.SSD_READ, Resource.SSD_WRITE):
        assert after.moved_bytes[way] == before.moved_bytes.get(way, 0) + state_bytes
    assert simulate(kept, WORK, UNMEASURED, "evaluate") == simulate(plan, WORK, UNMEASURED, "evaluate")


@settings(max_examples=examples(8), deadline=None)
@given(
    device_bytes=st.integers(8 << 20, 128 << 20),
    rows=st.integers(1, 60_000),
    degree=st.integers(0, 20),
    overlap=st.floats(0, 1),
    rate=st.floats(1e7, 1e10),
)
def test_the_bytes_are_the_programs_and_no_resource_does_two_things_at_once(
    device_bytes: int, rows: int, degree: int, overlap: float, rate: float
) -> None:
    work = workload(rows=rows, degree=degree)
    plan = planned(device_bytes, work)
    timeline = simulate(plan, work, replace(with_disk(rate, rate / 2, 1.2 * rate), overlap=overlap))
    assert timeline.moved_bytes.get(Resource.SSD_READ, 0) == plan.ssd_read_bytes
    assert timeline.moved_bytes.get(Resource.SSD_WRITE, 0) == plan.ssd_write_bytes
    for resource, busy in timeline.busy_s.items():
        assert busy <= timeline.epoch_s * (1 + 1e-9)
        own = [event for event in timeline.events if event.resource is resource]
        assert all(b.start_s >= a.end_s - 1e-9 for a, b in pairwise(own))
    moved = timeline.moved_bytes.get(Resource.SSD_READ, 0) + timeline.moved_bytes.get(Resource.SSD_WRITE, 0)
    assert timeline.epoch_s >= moved / (1.2 * rate) * (1 - 1e-9), "both ways share the drive"


@settings(max_examples=examples(8), deadline=None)
@given(device_bytes=st.integers(8 << 20, 128 << 20))
def test_memory_in_use_never_passes_the_plans_peak(device_bytes: int) -> None:
    plan = planned(device_bytes)
    (use,) = simulate(plan, WORK, UNMEASURED).memory
    assert 0 < use.peak_bytes <= plan.device_peak_bytes + plan.host_peak_bytes <= use.limit_bytes


def test_passes_follow_one_another_and_fill_the_epoch() -> None:
    timeline = simulate(planned(12 << 20), WORK, UNMEASURED)
    assert timeline.passes[0].start_s == 0
    assert all(a.end_s == b.start_s for a, b in pairwise(timeline.passes))
    assert timeline.passes[-1].end_s <= timeline.epoch_s


def test_with_a_disk_that_takes_no_time_only_computing_is_left() -> None:
    hardware = with_disk(1e18, 1e18, 1e18)
    timeline = simulate(planned(12 << 20), WORK, hardware)
    assert timeline.bottleneck is Resource.COMPUTE
    idle = timeline.epoch_s - timeline.busy_s[Resource.COMPUTE]
    moving = (timeline.moved_bytes.get(Resource.HOST_COPY, 0)) / hardware.host_copy_bytes_per_s
    blocks = sum(event.nbytes > 0 for event in timeline.events)
    assert 0 <= idle <= moving + blocks * hardware.seconds_per_block + 1e-6


def test_a_slow_disk_is_the_bottleneck_and_keeps_busy() -> None:
    timeline = simulate(planned(12 << 20), WORK, with_disk(1e7, 1e7, 1e7))
    assert timeline.bottleneck in (Resource.SSD_READ, Resource.SSD_WRITE)
    moved = sum(timeline.moved_bytes[r] for r in (Resource.SSD_READ, Resource.SSD_WRITE))
    assert timeline.epoch_s == pytest.approx(moved / 1e7, rel=0.15)
    assert any(p.bound in (Resource.SSD_READ, Resource.SSD_WRITE) for p in timeline.passes)


def test_what_is_not_hidden_costs_time() -> None:
    plan = planned(12 << 20)
    hidden, bare = (simulate(plan, WORK, replace(UNMEASURED, overlap=overlap)).epoch_s for overlap in (1.0, 0.0))
    assert hidden < bare


def test_a_drive_serves_in_order_and_shares_what_there_is() -> None:
    drive = Drive((100.0, 50.0), 75.0, latency_s=0.5)
    first, second = drive.send(0, 100, 0, 0.0), drive.send(0, 100, 0, 0.0)
    assert drive.wait(first) == 1.5
    third = drive.send(1, 25, 0, 1.0)  # both at half their rates until the third is done
    assert drive.wait(third) == pytest.approx(2.5)
    assert drive.wait(second) == pytest.approx(3.0)
    assert drive.drain() == pytest.approx(2.5)


def test_stretches_lose_no_busy_second_and_no_byte() -> None:
    events = [Event(Resource.SSD_READ, k * 1.0, k + 0.25, k // 50, 10) for k in range(100)]
    bars = list(stretches(events, shortest_s=2.0, longest_s=10.0))
    assert sum(bar.busy_s for bar in bars) == pytest.approx(25.0)
    assert sum(bar.nbytes for bar in bars) == 1000
    assert len(bars) <= 12
    assert all(bar.end_s - bar.start_s <= 10 for bar in bars)


def test_blocks_take_their_time_from_the_threads_that_compute() -> None:
    """However long a step computes, and by what they have of bytes: what moves is hidden behind nothing."""
    plan = planned(12 << 20)
    free = replace(with_disk(1e18, 1e18, 1e18), seconds_per_block=0.0, overlap=1.0)
    moved, epoch_s = plan.ssd_read_bytes + plan.ssd_write_bytes, simulate(plan, WORK, free).epoch_s
    by_byte = simulate(plan, WORK, replace(free, seconds_per_moved_byte=1e-9)).epoch_s
    assert by_byte - epoch_s == pytest.approx(1e-9 * moved, rel=0.2)
