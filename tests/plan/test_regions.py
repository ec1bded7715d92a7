# SPDX-License-Identifier: Apache-2.0
"""In which type what is pulled lies in memory, and what that takes."""

from dataclasses import replace

import pytest

from ooc.plan import UNMEASURED, Limits, Workload, make_plan
from ooc.plan.layout.layout import Choice, SlabChoice, lay_out
from ooc.plan.layout.passes import MatrixPlan
from ooc.plan.workload import PerEdge
from tests.plan.workloads import workload


def kept_in_half(work: Workload, *, sums_as_kept: bool) -> Workload:
    """``work`` with intermediates of two bytes a value, as a run in float32 has them."""
    matrices = {n: replace(m, itemsize=2) if n != "x" else m for n, m in work.matrices.items()}
    return replace(work, matrices=matrices, sums_as_kept=sums_as_kept)


def planned(work: Workload, name: str, slab_columns: int = 16) -> MatrixPlan:
    pulled = {s.pull.source for stages in work.programs.values() for s in stages if s.pull}
    return lay_out(work, Choice(1024, dict.fromkeys(pulled, SlabChoice(slab_columns, 2)))).matrices[name]


@pytest.mark.parametrize(("width", "spare"), [(64, 0), (47, 1), (121, 7), (40, 0), (15, 0)])
def test_rows_in_memory_whole_are_whole_cache_lines_where_that_takes_little(width: int, spare: int) -> None:
    """A sixteenth more at most, of what plain sums pull where kernels ask for it; and counted."""
    work = replace(workload(width=width), line_bytes=64)
    whole = planned(work, "m1", 0)
    assert (whole.whole, whole.spare_columns) == (True, spare)
    assert whole.region_nbytes == work.rows * (width + spare) * 4
    assert planned(work, "m1", width).spare_columns == planned(replace(work, line_bytes=1), "m1", 0).spare_columns == 0


def test_what_is_summed_lies_there_as_it_is_kept() -> None:
    """Half the bytes of a slab; unless sums are taken in the type of the model alone."""
    narrow = planned(kept_in_half(workload(), sums_as_kept=True), "m1")
    wide = planned(kept_in_half(workload(), sums_as_kept=False), "m1")
    assert (narrow.region_itemsize, wide.region_itemsize) == (2, 4)
    assert narrow.slab_stride() < 0.51 * wide.slab_stride()
    assert 2 * narrow.region_nbytes == wide.region_nbytes == planned(workload(), "m1").region_nbytes


def test_other_kernels_get_the_models_own_type() -> None:
    """One pull per edge is enough: a matrix lies in memory in one way; unless they say that they take any."""
    work = kept_in_half(workload(), sums_as_kept=True)
    wide = PerEdge(groups=1, columns=64, own=None, edges_at_once=64, bytes_per_edge=64, bytes_per_row=64)

    def per_edge(name: str, kernel: PerEdge = wide) -> Workload:
        stages = tuple(
            replace(s, pull=replace(s.pull, per_edge=kernel)) if s.pull and s.pull.source == name else s
            for s in work.programs["train"]
        )
        return replace(work, programs=work.programs | {"train": stages})

    assert planned(per_edge("m1"), "m1").region_itemsize == 4
    assert planned(per_edge("m1"), "m2").region_itemsize == 2
    assert planned(per_edge("m1", replace(wide, as_kept=True)), "m1").region_itemsize == 2


def test_slabs_are_twice_as_wide_in_the_same_memory() -> None:
    """The sum of columns held at once, over all pulled matrices, that the planner chooses when memory is scarce."""
    budget = Limits(device_bytes=6_000_000, host_bytes=4_000_000)

    def columns(work: Workload) -> int:
        plan = make_plan(work, budget, UNMEASURED)
        sources = {s.pull.source for s in work.programs["train"] if s.pull}
        return sum(plan.matrices[n].grid.slab_columns for n in sources)

    narrow, wide = (columns(kept_in_half(workload(), sums_as_kept=kept)) for kept in (True, False))
    assert narrow >= 1.5 * wide
