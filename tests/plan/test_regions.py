# SPDX-License-Identifier: Apache-2.0
"""In which type what is pulled lies in memory, and what that takes."""

from dataclasses import replace

from ooc.plan import UNMEASURED, Limits, Workload, make_plan
from ooc.plan.layout.layout import Choice, SlabChoice, lay_out
from ooc.plan.layout.passes import MatrixPlan
from ooc.plan.workload import PerEdge
from tests.plan.workloads import workload


def kept_in_half(work: Workload, *, sums_as_kept: bool) -> Workload:
    """``work`` with intermediates of two bytes a value, as a run in float32 has them."""
    matrices = {n: replace(m, itemsize=2) if n != "x" else m for n, m in work.matrices.items()}
    return replace(work, matrices=matrices, sums_as_kept=sums_as_kept)


def planned(work: Workload, name: str) -> MatrixPlan:
    pulled = {s.pull.source for stages in work.programs.values() for s in stages if s.pull}
    return lay_out(work, Choice(1024, dict.fromkeys(pulled, SlabChoice(16, 2)))).matrices[name]


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
