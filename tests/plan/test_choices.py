# SPDX-License-Identifier: Apache-2.0
"""Whatever the search may choose: a choice that fits can be unrolled, and is proven to run in its budgets."""

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ooc.memory import divide_memory
from ooc.plan import UNMEASURED, Hardware, Limits, Workload
from ooc.plan.layout.layout import Choice, SlabChoice, lay_out, layout_key, pulled_sources
from ooc.plan.program.build import build_plan
from ooc.plan.program.capacity import Capacity
from ooc.plan.program.verifier import verify_plan
from tests.examples import examples
from tests.plan.workloads import WITH_DEVICE_MEMORY, in_groups, keeping, workload

CUTS = st.builds(SlabChoice, st.sampled_from([0, 8, 16, 24, 32, 64]), st.integers(1, 2), st.booleans(), st.booleans())
BLOCK_IN_USE_BETWEEN_PASSES = (
    SlabChoice(64, 2, direct=False),
    SlabChoice(24, 2),
    SlabChoice(64, 1),
    SlabChoice(24, 2, overlap_last=True),
    SlabChoice(0, 1),
)
"""Of m1, m2, m3, dp3 and dp2: a pass once read more ahead for the next one than that has frames for."""


def also_loading(work: Workload, loaded: bool) -> Workload:
    """Stages that load what they pull, as those of a GraphSAGE with its own rows in the sum do."""
    if not loaded:
        return work
    programs = {
        name: tuple(replace(s, loads=(*s.loads, s.pull.source)) if s.pull else s for s in stages)
        for name, stages in work.programs.items()
    }
    return replace(work, programs=programs)


@pytest.mark.parametrize("machine", [UNMEASURED, WITH_DEVICE_MEMORY], ids=lambda machine: machine.name)
@settings(max_examples=examples(25), deadline=None)
@given(
    cuts=st.tuples(*[CUTS] * 5),
    rows=st.sampled_from([12_000, 24_000]),
    height=st.sampled_from([1024, 2048]),
    loaded=st.booleans(),
    kept=st.booleans(),
    share=st.floats(1.0, 3.0),
    parts=st.sampled_from([*[1] * 12, 4, 4, 4, 16]),  # of small frames there are many
)
@example(
    cuts=BLOCK_IN_USE_BETWEEN_PASSES,
    rows=24_000,
    height=1024,
    loaded=True,
    kept=False,
    share=1.534488108718917,
    parts=1,
)
def test_what_fits_can_run(
    machine: Hardware,
    cuts: tuple[SlabChoice, ...],
    rows: int,
    height: int,
    loaded: bool,
    kept: bool,
    share: float,
    parts: int,
) -> None:
    work = also_loading(workload(rows=rows, width=64), loaded)
    work = keeping(work) if kept else work
    choice = Choice(height, dict(zip(pulled_sources(work), cuts, strict=True)), parts=parts)
    layout = lay_out(work, choice)
    needed = Capacity(work, Limits(1, 1), machine).needed_bytes(layout)
    limits = Limits(int(share * needed), 10**9 if machine.has_device_memory else work.fixed_host_bytes)
    capacity = Capacity(work, limits, machine)
    assert capacity.fits(layout)
    verify_plan(build_plan(layout, capacity))


@settings(max_examples=examples(50), deadline=None)
@given(
    cuts=st.lists(CUTS, min_size=2, max_size=2),
    groups=st.sampled_from([1, 2, 4]),
    beside=st.booleans(),
    kept=st.booleans(),
)
def test_choices_that_come_to_the_same_are_laid_out_alike(
    cuts: list[SlabChoice], groups: int, beside: bool, kept: bool
) -> None:
    """And others are not: of every two choices the one is known by the other, or they differ."""
    work = in_groups(keeping(workload(rows=12_000)) if kept else workload(rows=12_000), groups)
    choices = [Choice(1024, dict.fromkeys(pulled_sources(work), replace(cut, overlap_last=beside))) for cut in cuts]
    keys, layouts = zip(*[(layout_key(choice, work), lay_out(work, choice)) for choice in choices], strict=True)
    assert keys[0] != keys[1] or layouts[0] == layouts[1]
    assert layouts[0] != layouts[1] or keys[0] == keys[1]


def test_processes_share_one_memory_to_the_last_byte() -> None:
    """Of 10 MB, two processes' parts of both budgets, each rounded down, were a byte less than 5 MB together: what an
    error named as the least for two was then refused."""
    for memory, count in [(10_000_000, 2), (12_345_678, 3)]:
        given = Limits(*divide_memory(memory), one_memory=True)
        assert given.share(count).memory_bytes == memory // count
    two = Limits(10, 11)
    assert two.share(2) == Limits(10, 5), "a GPU's memory is each process's own"
