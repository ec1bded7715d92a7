# SPDX-License-Identifier: Apache-2.0
"""Plans for the largest public graphs take seconds and little memory: their blocks grow with them."""

import json
import re
import subprocess
import sys

import pytest

from ooc.errors import BudgetError
from ooc.plan import UNMEASURED, Limits, make_plan, moves
from ooc.plan.moves import FEW_STEPS, LINE_BYTES, MOST_STEPS
from ooc.plan.planner import plan_layout
from ooc.sizes import parse_size
from tests.examples import thorough
from tests.plan.workloads import WITH_DEVICE_MEMORY, large_gcn

IGB260M = (269_346_174, 3_995_777_033, 1024, 19)
MAG240M = (121_751_666, 1_297_748_926, 768, 153)

MEASURE = f"""
import json, re, time
from ooc.plan import Limits, make_plan
from ooc.plan.program.verifier import verify_plan
from tests.plan.workloads import WITH_DEVICE_MEMORY, large_gcn
work = large_gcn(*{IGB260M})
start = time.process_time()
made = make_plan(work, Limits(80 * 10**9, 512 * 10**9), WITH_DEVICE_MEMORY)
seconds = time.process_time() - start
verify_plan(made)
fates = {{row["matrix"]: row["fate"] for row in made.summary()}}
moved = [made.ssd_write_bytes, made.ssd_read_bytes, made.to_device_bytes]
# Not getrusage's peak: a process is born with its parent's.
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
print(json.dumps([seconds, peak * 1024, made.step_rows, moved, fates]))
"""


def test_igb260m_plans_in_ten_seconds_and_500_megabytes() -> None:
    """In a process of its own, whose peak memory is the planner's and the verifier's. All three tiers hold some."""
    done = subprocess.run([sys.executable, "-c", MEASURE], check=True, capture_output=True, text=True, timeout=120)
    seconds, peak_bytes, step_rows, (written, read, lifted), fates = json.loads(done.stdout)
    assert seconds < 10
    assert peak_bytes < 500_000_000
    assert IGB260M[0] / step_rows <= FEW_STEPS
    assert 0 < written < read < lifted
    assert fates["m3"] == "device", "narrow enough to stay whole"
    assert "host" in fates["z2"] and "ssd" in fates["ax"]


@pytest.mark.parametrize("rows", [3_000_000, 100_000_000])
def test_no_pass_has_more_steps_than_it_takes_to_unroll_it_soon(rows: int) -> None:
    """On the CPU as well, where blocks are small as long as there are few."""
    work = large_gcn(rows, 10 * rows, 64, 16, hidden=64)
    made = make_plan(work, Limits(100 * 10**9, 60 * 10**9), UNMEASURED)
    assert rows / made.step_rows <= FEW_STEPS


@pytest.mark.thorough
def test_where_memory_is_scarcest_blocks_are_lower_again() -> None:
    """The least budget is not that of the few steps that are usual."""
    rows = 7_000_000
    work = large_gcn(rows, 10 * rows, 16, 8, hidden=16)
    with pytest.raises(BudgetError) as error:
        make_plan(work, Limits(1, 10**9), WITH_DEVICE_MEMORY)
    named = re.search(r"gpu_budget='(\w+)", str(error.value))
    assert named is not None
    made = make_plan(work, Limits(parse_size(named[1]), 10**9), WITH_DEVICE_MEMORY)
    assert FEW_STEPS < rows / made.step_rows <= MOST_STEPS


@pytest.mark.parametrize(
    "graph", thorough([pytest.param(MAG240M, id="MAG240M"), pytest.param(IGB260M, id="igb260m")], "igb260m")
)
def test_on_a_device_no_forecast_is_longer_for_whole_cache_lines(
    graph: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slabs of equal parts are tried there as well, whatever they are rounded to."""
    work, memory = large_gcn(*graph), Limits(21_600_000_000, 115_200_000_000)
    found = plan_layout(work, memory, WITH_DEVICE_MEMORY)
    monkeypatch.setattr(moves, "LINE_BYTES", 1)
    as_they_are = plan_layout(work, memory, WITH_DEVICE_MEMORY)
    assert found.seconds <= 1.001 * as_they_are.seconds


@pytest.mark.parametrize("columns", [153, 300])
def test_on_a_processor_wide_slabs_are_whole_cache_lines(columns: int) -> None:
    work = large_gcn(200_000, 2_000_000, columns, columns, hidden=columns)
    cuts = plan_layout(work, Limits(1_060_000_000, 4_000_000 + 400_000 * columns), UNMEASURED).choice.cuts
    line = LINE_BYTES // 4
    split = [cut.columns for cut in cuts.values() if line < cut.columns < columns]
    assert split
    assert not any(width % line for width in split)
