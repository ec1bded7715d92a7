# SPDX-License-Identifier: Apache-2.0
"""Plans of layers that run as they are: what they scatter to, how rows are cut, what their edges take."""

from dataclasses import replace
from functools import cache

import pytest

from ooc.errors import BudgetError
from ooc.plan import UNMEASURED, Direction, Kind, Limits, Matrix, Plan, Pull, Stage, Workload, make_plan
from ooc.plan.hardware import Hardware
from ooc.plan.layout.passes import ColumnPass
from ooc.plan.layout.temporaries import PULL_TILE_ROWS, rows_pulled_at_once
from ooc.plan.program.verifier import verify_plan
from ooc.plan.workload import PerEdge
from ooc.sizes import parse_size
from tests.plan.workloads import WITH_DEVICE_MEMORY, workload

ROWS, WIDTH = 40_000, 64
WHOLE_BYTES = ROWS * WIDTH * 4
GENERAL = PerEdge(1, WIDTH, None, 16384, 2000, 1000, opaque=True)


@cache
def general_workload(edge_bytes: int = 2000) -> Workload:
    """Two layers, the second as it is: backward its rows are scattered to ``dm2`` before a stage reads them."""
    kernel = replace(GENERAL, bytes_per_edge=edge_bytes)
    work = workload(ROWS, WIDTH, layers=2)
    first, second, loss, _ = work.programs["train"]
    assert loss.pull is not None
    pull = Pull("m2", "pt2", Direction.IN, replace(kernel, own="dp2", waiting_bytes_per_edge=1024), scattered="dm2")
    train = (
        first,
        second,
        replace(loss, pull=replace(loss.pull, per_edge=kernel)),
        Stage("sources 2", ROWS, (), pull, ("dt2",), 1000),
        Stage("backward 1", ROWS, ("z1", "z2", "dt2", "dm2"), None, ("dp1",), 1000, reverse=True),
    )
    added = {name: Matrix(name, ROWS, WIDTH, 4, Kind.SCRATCH) for name in ("dm2", "dt2")}
    return replace(work, matrices=work.matrices | added, programs=work.programs | {"train": train})


def planned(
    device_bytes: int, host_bytes: int, hardware: Hardware = UNMEASURED, *, slab_columns: int | None = None
) -> Plan:
    limits = Limits(device_bytes=device_bytes, host_bytes=host_bytes, slab_columns=slab_columns)
    plan = make_plan(general_workload(), limits, hardware)
    verify_plan(plan)
    return plan


@pytest.mark.parametrize("hardware", [UNMEASURED, WITH_DEVICE_MEMORY], ids=["one memory", "with a wire"])
@pytest.mark.parametrize("device_bytes", [150_000_000, 400_000_000])
def test_what_is_scattered_to_is_in_memory_from_its_writer_to_its_reader(device_bytes: int, hardware: Hardware) -> None:
    """And no longer; it never touches the SSD, and its source is pulled in full width."""
    plan = planned(device_bytes, 50_000_000, hardware)
    writer, reader = (
        next(p.index for p in plan.programs["train"] if "dm2" in names(p))
        for names in (lambda p: p.stores, lambda p: p.reads)
    )
    (region,) = [region for region in plan.regions["train"] if region.matrix == "dm2"]
    assert (region.first, region.last) == (writer, reader)
    assert region.count * plan.frame_bytes >= WHOLE_BYTES
    assert plan.matrices["dm2"].whole and "dm2" not in plan.spilled
    assert plan.matrices["m2"].grid.slabs == 1


def test_passes_of_a_layer_say_so_and_take_one_tile_at_a_time() -> None:
    """Whether its source is whole in memory or comes in a slab; other pulls take several tiles."""
    whole, slabs = planned(400_000_000, 50_000_000), planned(400_000_000, 50_000_000, slab_columns=8)
    for plan in (whole, slabs):
        titles = [item.title for item in plan.programs["train"] if item.pull is not None and item.pull.is_opaque]
        assert len(titles) == 2 and all(title.endswith(", general path") for title in titles)
    pulls = [item.pull for item in slabs.programs["train"] if isinstance(item, ColumnPass) and item.pull.is_opaque]
    assert pulls and all(rows_pulled_at_once(pull, 256, 1024) == 256 for pull in pulls)
    plain = Pull("m", "p", Direction.IN)
    assert rows_pulled_at_once(plain, 256, 0) == PULL_TILE_ROWS
    assert rows_pulled_at_once(plain, 256, 8192) == 8192


def test_what_a_layer_makes_of_its_edges_is_named_where_it_does_not_fit() -> None:
    """It is most of the memory then, and the error says of which pass."""
    with pytest.raises(BudgetError, match=r"GB temporaries of tiles \(.*general path\).* give gpu_budget="):
        make_plan(general_workload(100_000), Limits(device_bytes=10_000_000, host_bytes=10_000_000))


def test_matrices_that_are_too_large_are_refused_with_the_bytes_that_would_do() -> None:
    """Source and sums of one layer; the budget that is named is enough."""
    with pytest.raises(BudgetError, match="gpu_budget=") as caught:
        planned(1_000_000, 1_000_000)
    named = parse_size(str(caught.value).rsplit("gpu_budget='", 1)[1].rstrip("'"))
    assert named >= 2 * WHOLE_BYTES
    assert planned(named, 1_000_000).device_peak_bytes <= named
