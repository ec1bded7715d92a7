# SPDX-License-Identifier: Apache-2.0
"""Where memory is scarcest the first slabs of what is pulled are no longer computed right into their buffers, which
then take no room while they are computed: blocks stay taller, and less memory will do."""

import re
from functools import cache

import pytest

from ooc.errors import BudgetError
from ooc.plan import UNMEASURED, Limits, Plan, make_plan
from ooc.plan.layout.layout import Choice, Layout, SlabChoice, lay_out
from ooc.plan.layout.passes import ColumnPass, direct_slabs
from ooc.plan.program.capacity import frames_needed
from ooc.plan.program.sequence import Use
from ooc.plan.program.verifier import verify_plan
from ooc.sizes import parse_size
from tests.plan.workloads import WITH_DEVICE_MEMORY, workload

WORK = workload(width=256)
MACHINES = pytest.mark.parametrize(
    "on_device",
    [
        pytest.param(False, id=UNMEASURED.name, marks=pytest.mark.thorough),
        pytest.param(True, id=WITH_DEVICE_MEMORY.name),
    ],
)


def laid_out(*, direct: bool) -> Layout:
    return lay_out(WORK, Choice(1024, dict.fromkeys(["m1", "m2", "m3", "dp2", "dp3"], SlabChoice(64, 1, direct))))


@cache
def scarcest(*, on_device: bool) -> Plan:
    """In the least memory of the device that the planner names; on the CPU the host has nothing to spare."""
    machine = WITH_DEVICE_MEMORY if on_device else UNMEASURED
    host = 10**8 if on_device else WORK.fixed_host_bytes
    with pytest.raises(BudgetError) as error:
        make_plan(WORK, Limits(1, host), machine)
    named = re.search(r"gpu_budget='(\w+)", str(error.value))
    assert named is not None
    return make_plan(WORK, Limits(parse_size(named[1]), host), machine)


def test_slab_buffers_are_taken_for_the_pull_alone() -> None:
    """And not in the pass before, where every other slab has its blocks: together that is most of the memory."""
    direct, apart = laid_out(direct=True), laid_out(direct=False)
    assert {region.last - region.first for region in direct.regions["train"]} == {1}
    assert {region.last - region.first for region in apart.regions["train"]} == {0}
    assert frames_needed(apart, WORK) < frames_needed(direct, WORK)


@MACHINES
def test_the_least_memory_holds_no_plan_with_the_first_slabs_computed_in_place(on_device: bool) -> None:
    made = scarcest(on_device=on_device)
    verify_plan(made)
    cuts = {name: SlabChoice(m.grid.slab_columns, 1) for name, m in made.matrices.items() if name[0] in "md"}
    in_place = lay_out(WORK, Choice(made.step_rows, cuts))
    assert frames_needed(in_place, WORK) * in_place.frame_bytes > made.frames * made.frame_bytes


@MACHINES
def test_every_slab_is_copied_where_none_is_computed_in_place(on_device: bool) -> None:
    made = scarcest(on_device=on_device)
    passes = made.programs["train"]
    copied: dict[str, set[int]] = {}
    for span in made.unrolled["train"].uses.spans:
        if span.use is Use.COPY:
            name, slab, _ = made.blocks.where(span.block)
            copied.setdefault(name, set()).add(slab)
    apart = [item for item in passes if isinstance(item, ColumnPass) and not direct_slabs(passes, item)]
    assert apart
    for item in apart:
        assert copied[item.pull.source] == set(range(made.matrices[item.pull.source].grid.slabs))
