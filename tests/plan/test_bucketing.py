# SPDX-License-Identifier: Apache-2.0
"""Sources that are shuffled to their targets: how buckets are cut, what memory and bytes that takes, and when."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.errors import BudgetError
from ooc.plan import UNMEASURED, Direction, Hardware, Limits, Plan, Workload, make_plan
from ooc.plan.layout.passes import RowPass, ShufflePass
from ooc.plan.layout.shuffle import plan_bucketed_rows
from ooc.plan.program.verifier import verify_plan
from ooc.plan.simulate.simulator import simulate
from ooc.plan.simulate.timeline import Resource
from ooc.plan.workload import Bucketing
from tests.examples import examples
from tests.plan.test_opaque_path import ROWS, WHOLE_BYTES
from tests.plan.test_partial_sums import least_bytes, scarce_bytes, spillable_workload
from tests.plan.workloads import WITH_DEVICE_MEMORY

PAGE_BYTES = 4096


def gathered(targets: int, rows: int, height: int) -> Sequence[Sequence[int]]:
    """Of a graph whose neighbours are mostly near: a bucket gathers 1500 rows beside its own."""
    counts: list[list[int]] = []
    while not counts or len(counts[-1]) > 1:
        step = height << len(counts)
        heights = [min(step, targets - start) for start in range(0, targets, step)]
        counts.append([min(rows, height + 1500) for height in heights])
    return counts


@cache
def bucketable_workload() -> Workload:
    """Two layers, the second as it is, whose source can be shuffled and whose gradients can be spilled."""
    return replace(spillable_workload(), bucketing={Direction.IN: Bucketing(Direction.OUT, gathered)})


def planned(device_bytes: int, work: Workload | None = None, hardware: Hardware = UNMEASURED) -> Plan:
    plan = make_plan(work or bucketable_workload(), Limits(device_bytes=device_bytes, host_bytes=1_000_000), hardware)
    verify_plan(plan)
    return plan


@cache
def least_shuffled() -> int:
    """The least for a source that may be shuffled and sums that may be spilled."""
    return least_bytes(bucketable_workload())


@cache
def scarce() -> Plan:
    """The plan within that: of many small blocks, which takes seconds."""
    return planned(least_shuffled())


@given(
    targets=st.integers(1, 50_000),
    rows=st.integers(1, 50_000),
    columns=st.integers(1, 700),
    itemsize=st.sampled_from([4, 8]),
    tiles_a_step=st.integers(1, 40),
    tile_rows=st.sampled_from([4, 64, 1024]),
    memory_bytes=st.sampled_from([0, 10**5, 10**7, 10**12]),
)
@settings(max_examples=examples(40), deadline=None)
def test_every_target_has_its_bucket(
    targets: int, rows: int, columns: int, itemsize: int, tiles_a_step: int, tile_rows: int, memory_bytes: int
) -> None:
    """Of whole steps; parts of the file are whole pages one behind the other, with room for the rows that are counted,
    and so is the memory. What is allowed is kept wherever some height can, and used as far as it helps."""
    step = tiles_a_step * tile_rows

    def cut(memory_bytes: int) -> object:
        return plan_bucketed_rows(
            rows=rows,
            targets=targets,
            columns=columns,
            itemsize=itemsize,
            step_rows=step,
            tile_rows=tile_rows,
            memory_bytes=memory_bytes,
            gathered=gathered,
        )

    shuffle, least, most = cut(memory_bytes), cut(0), cut(1 << 60)
    assert shuffle.bucket_rows % step == 0 and shuffle.bucket_rows * (shuffle.buckets - 1) < targets
    assert targets <= shuffle.bucket_rows * shuffle.buckets
    expected = next(counts for counts in gathered(targets, rows, shuffle.bucket_rows))
    assert list(shuffle.entries) == list(expected)
    entry = (columns + 1) * itemsize
    ends = [*shuffle.offsets(), shuffle.nbytes]
    for bucket, (start, stop) in enumerate(pairwise(ends)):
        assert start % PAGE_BYTES == 0 and 0 <= stop - start - shuffle.entries[bucket] * entry < PAGE_BYTES
    assert shuffle.read_nbytes(targets) == shuffle.nbytes and shuffle.read_nbytes(1) == shuffle.bucket_nbytes(0)
    assert shuffle.writing_nbytes > shuffle.buckets * shuffle.chunk_bytes and shuffle.chunk_bytes % PAGE_BYTES == 0
    assert shuffle.reading_nbytes >= min(2, shuffle.buckets) * max(shuffle.entries) * (entry + 8)
    assert most.buckets == 1
    assert least.memory_nbytes <= shuffle.memory_nbytes <= max(memory_bytes, least.memory_nbytes)


def test_sources_are_shuffled_where_they_do_not_fit_and_nowhere_else() -> None:
    """Beside what the layer makes of edges, less than the source alone takes is enough, and the plan says so; with more
    nothing is shuffled."""
    assert least_shuffled() < scarce_bytes() - WHOLE_BYTES / 2
    plan = scarce()
    assert plan.arena_bytes < WHOLE_BYTES / 2
    titles = [item.title for item in plan.programs["train"]]
    assert "loss, general path, sources shuffled" in titles
    assert "sources 2, general path, sources shuffled, sources' gradients spilled" in titles
    assert titles.count("shuffle m2") == 1, "what is shuffled forward is gathered backward, too"
    assert list(plan.bucketed_rows) == ["m2 shuffled"] and not plan.matrices["m2"].whole
    (line,) = [line for line in plan.summary() if line["matrix"] == "m2 shuffled"]
    assert line["fate"] == "ssd" and line["bytes"] > WHOLE_BYTES
    roomy = planned(400_000_000)
    assert not roomy.bucketed_rows and roomy.matrices["m2"].whole
    assert not any("shuffled" in item.title or "shuffle" in item.title for item in roomy.programs["train"])
    assert Direction.OUT in plan.topologies and Direction.OUT not in roomy.topologies, "nobody else needs these edges"


def test_nothing_is_counted_where_nothing_has_to_be_shuffled() -> None:
    """Counting reads all edges."""

    def uncounted(targets: int, rows: int, height: int) -> Sequence[Sequence[int]]:
        raise AssertionError("counted")

    work = replace(bucketable_workload(), bucketing={Direction.IN: Bucketing(Direction.OUT, uncounted)})
    assert not planned(400_000_000, work).bucketed_rows


def test_the_least_budget_does_and_less_does_not() -> None:
    """The one that the error names."""
    assert scarce().device_peak_bytes <= least_shuffled()
    with pytest.raises(BudgetError, match="gpu_budget="):
        planned(int(0.98 * least_shuffled()))


def test_more_memory_makes_buckets_higher() -> None:
    """Then fewer rows are shuffled twice: less is written and read."""
    larger = planned(least_shuffled() + WHOLE_BYTES // 3)
    shuffles = [plan.bucketed_rows.get("m2 shuffled") for plan in (scarce(), larger)]
    assert shuffles[0] is not None and shuffles[1] is not None
    assert shuffles[1].bucket_rows > shuffles[0].bucket_rows and shuffles[1].nbytes < shuffles[0].nbytes


def test_their_bytes_are_the_plans_and_the_simulators() -> None:
    """Written once, read forward and backward; and on the disk as long as the run lasts."""
    plan = scarce()
    shuffle, runs = plan.bucketed_rows["m2 shuffled"], plan.partial_sums["dm2"]
    program = plan.unrolled["train"]
    assert plan.ssd_read_bytes == program.read_bytes + 2 * shuffle.nbytes + runs.nbytes
    assert plan.ssd_write_bytes == program.write_bytes + shuffle.nbytes + runs.nbytes
    blocks = sum(plan.matrices[name].grid.file_nbytes for name in plan.spilled)
    assert plan.spill_bytes == shuffle.nbytes + runs.nbytes + blocks
    timeline = simulate(plan, bucketable_workload(), UNMEASURED)
    assert timeline.moved_bytes[Resource.SSD_READ] == plan.ssd_read_bytes
    assert timeline.moved_bytes[Resource.SSD_WRITE] == plan.ssd_write_bytes
    for resource in (Resource.SSD_READ, Resource.SSD_WRITE):
        own = [event for event in timeline.events if event.resource is resource]
        assert all(b.start_s >= a.end_s - 1e-9 for a, b in pairwise(own))


@pytest.mark.thorough  # test_partial_sums.py has one for runs alone
def test_a_limit_on_writes_counts_them() -> None:
    """Where they would pass it, the error names what would do."""
    work = bucketable_workload()
    limits = Limits(device_bytes=least_shuffled(), host_bytes=1_000_000, ssd_write_bytes=0)
    with pytest.raises(BudgetError, match=r"of which .* are (m2 shuffled|dm2), .*max_ssd_writes="):
        make_plan(work, limits, UNMEASURED)


def test_a_device_with_memory_of_its_own_gathers_from_memory() -> None:
    """Its budget must hold the source."""
    needed = least_bytes(bucketable_workload(), WITH_DEVICE_MEMORY)
    assert needed == least_bytes(spillable_workload(), WITH_DEVICE_MEMORY) > WHOLE_BYTES


def test_a_plan_that_gathers_what_it_has_not_shuffled_is_not_trusted() -> None:
    """Nor one whose buckets have no room, whose steps lie in several, or that misses some targets or some rows."""
    plan = scarce()
    shuffle, passes = plan.bucketed_rows["m2 shuffled"], plan.programs["train"]

    def with_shuffle(**changes: object) -> Plan:
        changed = replace(plan.matrices["m2 shuffled"], shuffle=replace(shuffle, **changes))
        return replace(plan, matrices=plan.matrices | {"m2 shuffled": changed})

    def with_passes(*changed: object) -> Plan:
        return replace(plan, programs=plan.programs | {"train": tuple(changed)})

    with pytest.raises(AssertionError, match="is not in memory"):
        verify_plan(with_shuffle(chunk_bytes=shuffle.chunk_bytes << 12))
    with pytest.raises(AssertionError, match="several buckets"):
        verify_plan(with_shuffle(bucket_rows=shuffle.bucket_rows + 1))
    with pytest.raises(AssertionError, match="in no bucket"):
        verify_plan(with_shuffle(entries=shuffle.entries[:-1]))
    with pytest.raises(AssertionError, match="not all of m2 is shuffled"):
        verify_plan(with_shuffle(rows=shuffle.rows - 1))
    unshuffled = [item for item in passes if not isinstance(item, ShufflePass)]
    with pytest.raises(AssertionError, match="reads m2 shuffled before it is written"):
        verify_plan(with_passes(*unshuffled))
    (shuffling,) = [item for item in passes if isinstance(item, ShufflePass)]
    later = [item for item in unshuffled if not (isinstance(item, RowPass) and item.bucketed)]
    again = next(item for item in passes if "m2" in item.stores)
    gathering = [item for item in unshuffled if isinstance(item, RowPass) and item.bucketed]
    wrong = [*passes[: shuffling.index], shuffling, again, *gathering, *later]
    with pytest.raises(AssertionError, match="gathered before it is shuffled"):
        verify_plan(with_passes(*wrong))
    assert shuffle.rows == ROWS
