# SPDX-License-Identifier: Apache-2.0
"""A plan's own lists are admitted as buffers are."""

import gc
import tracemalloc
from dataclasses import replace

import pytest

from ooc.plan import Limits, Workload
from ooc.plan.layout.layout import Choice, SlabChoice, lay_out, pulled_sources
from ooc.plan.program import capacity, sequence
from ooc.plan.program.build import build_plan
from ooc.plan.program.capacity import Capacity, block_uses
from ooc.plan.program.sequence import Use, block_table, uses_of
from tests.plan.workloads import UNMEASURED, workload

WORK = workload(rows=200_000)
LIMITS = Limits(60_000_000, 60_000_000)
LAYOUT = lay_out(WORK, Choice(1024, {name: SlabChoice(8, 1) for name in pulled_sources(WORK)}))


def test_lists_take_no_more_than_is_counted_for_them() -> None:
    made = Capacity(WORK, LIMITS, UNMEASURED)
    counted = sum(block_uses(LAYOUT, WORK, passes) for passes in LAYOUT.programs.values())
    gc.collect()
    tracemalloc.start()
    plan = build_plan(LAYOUT, made)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    uses = sum(len(program.uses.spans) for program in plan.unrolled.values())
    assert 0.9 * uses <= counted <= 1.2 * uses
    assert counted * capacity._USE_BYTES / 3 < peak <= counted * capacity._USE_BYTES


@pytest.mark.parametrize("work", [WORK, workload(rows=9000, width=100, layers=2)])
def test_uses_are_in_order_however_few_are_put_in_order_at_once(
    work: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of the slab that is left to the row pass after a column pass."""
    cut = SlabChoice(8, 1, direct=False, overlap_last=True)
    layout = lay_out(work, Choice(1024, dict.fromkeys(pulled_sources(work), cut)))
    blocks, passes = block_table(layout, work), layout.programs["train"]
    steps, bounds, spans = uses_of(passes, layout, work, blocks)
    monkeypatch.setattr(sequence, "_SORTED_AT_ONCE", 8)
    assert uses_of(passes, layout, work, blocks) == (steps, bounds, spans)
    assert list(spans) == sorted(spans, key=lambda span: (span.first, span.use, span.block))
    assert [step.at for step in steps] == [at for at, (first, stop) in enumerate(bounds) for _ in range(first, stop)]
    used = {span.block for span in spans if span.use is Use.COPY}
    assert used and all(0 <= span.first <= span.last < len(steps) for span in spans)


def test_what_steps_acquire_and_store_is_the_same_step_by_step_and_in_turn() -> None:
    program = build_plan(LAYOUT, Capacity(WORK, LIMITS, UNMEASURED)).unrolled["train"]
    for of_steps in (program.acquire, program.store):
        assert any(of_steps) and not all(of_steps)
        assert list(of_steps) == [of_steps[t] for t in range(len(of_steps))] == of_steps[:]
    assert program.acquire[-1] == program.acquire[len(program.steps) - 1]


def test_they_are_a_part_of_the_host_s_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "_STATED_LIST_BYTES", 0)
    made = Capacity(WORK, LIMITS, UNMEASURED)
    lists = made.parts(LAYOUT)["the plan's lists, on the host"]
    assert lists > 1_000_000
    assert build_plan(LAYOUT, made).fixed_host_bytes == WORK.fixed_host_bytes + lists
    least = made.whole_bytes(LAYOUT)
    device = made.needed_bytes(LAYOUT)
    for host, fits in ((least - device, True), (least - device - 1, False)):
        limits = replace(LIMITS, device_bytes=device, host_bytes=host)
        assert Capacity(WORK, limits, UNMEASURED).fits(LAYOUT) is fits
