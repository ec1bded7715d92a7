# SPDX-License-Identifier: Apache-2.0
"""What passes take beside the arena."""

from dataclasses import replace

import pytest

from ooc.plan import UNMEASURED, Limits, make_plan
from ooc.plan.slabs import pulled_columns
from ooc.plan.temporaries import scratch_nbytes
from ooc.plan.workload import PerEdge, Workload
from tests.plan.workloads import workload

ROWS, WIDTH, GROUPS = 40_000, 64, 4


def attending(apart: tuple[int, ...], threads: int) -> Workload:
    """The loss pulls by a kernel with four groups of 16 columns, of which some are set apart."""
    work = workload(ROWS, WIDTH, layers=2)
    kernel = PerEdge(GROUPS, WIDTH, None, 16384, bytes_per_edge=100, bytes_per_row=100, apart=apart)
    *before, loss, last = work.programs["train"]
    assert loss.pull is not None
    train = (*before, replace(loss, pull=replace(loss.pull, per_edge=kernel)), last)
    return replace(work, programs=work.programs | {"train": train}, threads=threads)


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("slab_columns", [16, 32, 64])
def test_columns_set_apart_count_once_for_all_threads(threads: int, slab_columns: int) -> None:
    """For every row of the slab and every group in it, in the plan that is verified before anything runs."""
    plain, apart = attending((), threads), attending((-3, -1), threads)
    limits = Limits(10**9, 10**9, slab_columns=slab_columns)
    plan = make_plan(plain, limits, UNMEASURED)
    pulling = [item for item in plan.programs["train"] if item.pull is not None and item.pull.per_edge is not None]
    assert pulling
    for item in pulling:
        assert item.pull is not None and item.pull.per_edge is not None
        pull = replace(item.pull, per_edge=replace(item.pull.per_edge, apart=(-3, -1)))
        copying = replace(item, pull=pull)
        scratch, more = (scratch_nbytes(one, plan.matrices, plain, plan.frame_bytes) for one in (item, copying))
        grid = plan.matrices[item.pull.source].grid
        width = min(grid.slab_columns, pulled_columns(item, grid))
        assert more - scratch == ROWS * (width // 16) * 2 * plain.pulled_itemsize
    assert make_plan(apart, limits, UNMEASURED).scratch_bytes > plan.scratch_bytes
