# SPDX-License-Identifier: Apache-2.0
"""Sums that are spilled as runs: how they are cut, what memory and bytes that takes, and when the planner does it."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.errors import BudgetError
from ooc.plan import UNMEASURED, Hardware, Limits, Plan, Workload, make_plan
from ooc.plan.layout.grid import align_up
from ooc.plan.layout.shuffle import plan_partial_sums
from ooc.plan.program.verifier import verify_plan
from ooc.plan.simulate.simulator import simulate
from ooc.plan.simulate.timeline import Resource
from ooc.sizes import parse_size
from tests.examples import examples
from tests.plan.test_opaque_path import ROWS, WHOLE_BYTES, general_workload
from tests.plan.workloads import WITH_DEVICE_MEMORY

HANDED_PER_ROW = 3
PAGE_BYTES = 4096


@cache
def spillable_workload() -> Workload:
    """The same, where it is known how often something is handed to a row."""
    work = general_workload()
    tiles = -(-ROWS // work.tile_rows)
    return replace(
        work, scatter_counts={"dm2": [HANDED_PER_ROW * min(ROWS, i * work.tile_rows) for i in range(tiles + 1)]}
    )


def planned(device_bytes: int, hardware: Hardware = UNMEASURED, *, writes: int | None = None) -> Plan:
    limits = Limits(device_bytes=device_bytes, host_bytes=1_000_000, ssd_write_bytes=writes)
    plan = make_plan(spillable_workload(), limits, hardware)
    verify_plan(plan)
    return plan


def least_bytes(work: Workload, hardware: Hardware = UNMEASURED) -> int:
    """The least device budget that the planner names."""
    with pytest.raises(BudgetError, match="gpu_budget=") as caught:
        make_plan(work, Limits(device_bytes=20_000, host_bytes=1_000_000), hardware)
    return parse_size(str(caught.value).rsplit("gpu_budget='", 1)[1].rstrip("'"))


@cache
def scarce_bytes() -> int:
    """The least for sums that may be spilled."""
    return least_bytes(spillable_workload())


@cache
def scarce() -> Plan:
    """The plan within that: of many small blocks, which takes seconds."""
    return planned(scarce_bytes())


@given(
    rows=st.integers(1, 50_000),
    columns=st.integers(1, 700),
    itemsize=st.sampled_from([4, 8]),
    tiles_a_step=st.integers(1, 40),
    tile_rows=st.sampled_from([4, 64, 1024]),
    data=st.data(),
)
@settings(max_examples=examples(25), deadline=None)
def test_every_entry_has_its_place(
    rows: int, columns: int, itemsize: int, tiles_a_step: int, tile_rows: int, data: st.DataObject
) -> None:
    """In one bucket; buckets are whole steps, chunks whole pages that hold whole entries."""
    handed = [0]
    for _ in range(-(-rows // tile_rows)):
        handed.append(handed[-1] + (data.draw(st.integers(0, 5000)) if len(handed) < 50 else 7))
    runs = plan_partial_sums(
        rows=rows,
        columns=columns,
        itemsize=itemsize,
        step_rows=tiles_a_step * tile_rows,
        tile_rows=tile_rows,
        scatter_counts=handed,
    )
    assert sum(runs.entries) == handed[-1]
    assert runs.bucket_rows % (tiles_a_step * tile_rows) == 0
    assert sum(runs.height(bucket) for bucket in range(runs.buckets)) == rows
    entry = (columns + 1) * itemsize
    assert runs.chunk_bytes % PAGE_BYTES == 0 and runs.filled_bytes >= entry and runs.filled_bytes % entry == 0
    assert align_up(runs.filled_bytes) == runs.chunk_bytes
    assert handed[-1] * entry <= runs.nbytes
    for bucket, entries in enumerate(runs.entries):
        in_chunk = runs.filled_bytes // entry
        chunks = [in_chunk] * (entries // in_chunk) + [entries % in_chunk]
        assert runs.bucket_nbytes(bucket) == sum(align_up(count * entry) for count in chunks)


def test_memory_grows_with_the_root_of_the_matrix() -> None:
    """A hundred times the rows take about ten times the memory, in chunks large enough for a disk."""

    def memory(rows: int) -> int:
        tiles = -(-rows // 1024)
        runs = plan_partial_sums(
            rows=rows, columns=64, itemsize=4, step_rows=1024, tile_rows=1024, scatter_counts=[0] * (tiles + 1)
        )
        assert runs.chunk_bytes >= 1 << 17
        return max(runs.writing_nbytes, runs.reading_nbytes)

    sizes = [memory(rows) for rows in (10**6, 10**8)]
    assert 5 <= sizes[1] / sizes[0] <= 20
    assert sizes[1] <= 10**8 * 64 * 4 / 50


def test_sums_are_spilled_where_they_do_not_fit_and_nowhere_else() -> None:
    """Less memory than both matrices take is enough, and the plan says so; with more nothing is spilled."""
    assert scarce_bytes() < least_bytes(general_workload()) - WHOLE_BYTES / 2
    plan = scarce()
    titles = [item.title for item in plan.programs["train"]]
    assert "pull m2, general path, sources' gradients spilled" in titles
    assert list(plan.partial_sums) == ["dm2"] and not plan.matrices["dm2"].whole
    (line,) = [line for line in plan.summary() if line["matrix"] == "dm2"]
    assert line["fate"] == "ssd"
    roomy = planned(400_000_000)
    assert not roomy.partial_sums and roomy.matrices["dm2"].whole
    assert not any("spilled" in item.title for item in roomy.programs["train"])


def test_their_memory_is_set_aside_only_while_it_is_used() -> None:
    """Chunks in the pass that writes runs, sums in the one that reads them."""
    plan = scarce()
    runs = plan.partial_sums["dm2"]
    regions = [region for region in plan.regions["train"] if region.matrix == "dm2"]
    assert all(region.first == region.last for region in regions)
    by_pass = {region.first: region.count * plan.frame_bytes for region in regions}
    (writer,) = [item.index for item in plan.programs["train"] if "dm2" in item.stores]
    (reader,) = [item.index for item in plan.programs["train"] if "dm2" in item.reads]
    assert by_pass.keys() == {writer, reader}
    assert by_pass[writer] >= runs.writing_nbytes and by_pass[reader] >= runs.reading_nbytes


def test_their_bytes_are_the_plans_and_the_simulators() -> None:
    """Written once, read once, whatever else an epoch moves; and on the disk as long as the run lasts."""
    plan = scarce()
    nbytes = plan.partial_sums["dm2"].nbytes
    assert nbytes >= HANDED_PER_ROW * ROWS * 65 * 4
    program = plan.unrolled["train"]
    assert plan.ssd_read_bytes == program.read_bytes + nbytes
    assert plan.ssd_write_bytes == program.write_bytes + nbytes
    assert plan.spill_bytes == nbytes + sum(plan.matrices[name].grid.file_nbytes for name in plan.spilled)
    timeline = simulate(plan, spillable_workload(), UNMEASURED)
    assert timeline.moved_bytes[Resource.SSD_READ] == plan.ssd_read_bytes
    assert timeline.moved_bytes[Resource.SSD_WRITE] == plan.ssd_write_bytes
    for resource in (Resource.SSD_READ, Resource.SSD_WRITE):
        own = [event for event in timeline.events if event.resource is resource]
        assert all(b.start_s >= a.end_s - 1e-9 for a, b in pairwise(own))


def test_a_limit_on_writes_counts_them() -> None:
    """Where they would pass it, the error names what is written."""
    with pytest.raises(BudgetError, match=r"are dm2, .*max_ssd_writes="):
        planned(scarce_bytes(), writes=0)
    named = scarce().ssd_write_bytes
    assert planned(scarce_bytes(), writes=named).ssd_write_bytes <= named


def test_a_device_with_memory_of_its_own_sums_in_memory() -> None:
    """Its budget must hold the sums."""
    assert least_bytes(spillable_workload(), WITH_DEVICE_MEMORY) == least_bytes(general_workload(), WITH_DEVICE_MEMORY)


def test_a_plan_whose_runs_have_no_room_is_not_trusted() -> None:
    """Nor one whose steps lie in several buckets, or which reads what it has not spilled."""
    plan = scarce()
    runs = plan.partial_sums["dm2"]

    def with_runs(**changes: int) -> Plan:
        changed = replace(plan.matrices["dm2"], shuffle=replace(runs, **changes))
        return replace(plan, matrices=plan.matrices | {"dm2": changed})

    with pytest.raises(AssertionError, match="is not in memory"):
        verify_plan(with_runs(chunk_bytes=runs.chunk_bytes << 10))
    with pytest.raises(AssertionError, match="several buckets"):
        verify_plan(with_runs(bucket_rows=plan.step_rows + 1))
    passes = tuple(item for item in plan.programs["train"] if "dm2" not in item.reads)
    with pytest.raises(AssertionError, match="dm2 is not written and read once"):
        verify_plan(replace(plan, programs=plan.programs | {"train": passes}))
