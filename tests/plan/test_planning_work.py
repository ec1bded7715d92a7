# SPDX-License-Identifier: Apache-2.0
"""What planning has to do, counted: how long it takes goes by these numbers, on any processor."""

from dataclasses import replace
from functools import cached_property
from itertools import combinations, product
from math import inf
from typing import Any

import pytest

from ooc.errors import BudgetError
from ooc.plan import UNMEASURED, Hardware, Limits, Workload, forecast, make_plan, problem, solver
from ooc.plan.forecast import Traffic
from ooc.plan.layout import layout, passes
from ooc.plan.layout.layout import Choice, Layout
from ooc.plan.moves import MOST_STEPS, Beginning, Moves
from ooc.plan.planner import plan_layout
from ooc.plan.problem import WHOLE, Problem, State
from ooc.plan.program import program
from ooc.plan.program.capacity import block_uses, frames_needed
from ooc.plan.program.replacement import Uses
from ooc.plan.program.sequence import block_table, uses_of
from ooc.plan.solver import minimum_memory, others
from tests.examples import ordinary, thorough
from tests.plan.test_bucketing import bucketable_workload
from tests.plan.workloads import WITH_DEVICE_MEMORY, in_groups, large_gcn, new_workload, workload

IGB260M = (269_346_174, 3_995_777_033, 1024, 19)
MACHINES = {"processor": UNMEASURED, "device": WITH_DEVICE_MEMORY}
WORKS = {
    "plain": new_workload(layers=2),
    "groups": in_groups(workload(layers=2), 4),
    "small": large_gcn(2000, 30_000, 256, 19),
}
A5000 = Limits(21_600_000_000, 115_200_000_000)
"""Nine tenths of 24 GB and of 128 GB: igb260m's narrowest slab of eight columns takes 8.6 GB."""


class Counted:
    """Stands for a function and counts: calls, and what ``size`` says of their first arguments."""

    def __init__(self, function: Any, size: Any) -> None:
        self.function, self.size = function, size
        self.sizes: list[int] = []

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.sizes.append(self.size(*arguments))
        return self.function(*arguments, **options)


@pytest.fixture(scope="module")
def largest() -> State:
    return plan_layout(large_gcn(*IGB260M), A5000, WITH_DEVICE_MEMORY)


def test_the_largest_graph_on_a_small_device_has_few_steps_and_uses(largest: State) -> None:
    """Of all its programs together: unrolling, proving and simulating go through all of them."""
    work, layout = largest.problem.workload, largest.layout
    blocks = block_table(layout, work)
    unrolled = [uses_of(passes, layout, work, blocks) for passes in layout.programs.values()]
    assert sum(len(steps) for steps, _, _ in unrolled) < 100_000
    assert sum(len(spans) for _, _, spans in unrolled) < 130_000
    assert work.rows / layout.step_rows < MOST_STEPS


def test_a_candidate_is_forecast_from_few_uses_whatever_the_graph_s_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def uses_in(uses: Uses) -> int:
        return len(uses.spans)

    found = {}
    for rows in (2_000_000, 250_000_000):
        counted = Counted(forecast.belady, uses_in)
        monkeypatch.setattr(forecast, "belady", counted)
        plan_layout(large_gcn(rows, 15 * rows, 256, 19), Limits(10**9 + rows * 80, rows * 430), WITH_DEVICE_MEMORY)
        monkeypatch.undo()
        found[rows] = counted.sizes
    assert max(map(max, found.values())) < 2500
    assert max(map(len, found.values())) < 100


def test_no_layout_is_forecast_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the widths that are tried most come to the same, where slabs hold whole groups."""
    laid_out: list[Layout] = []

    def forecast_traffic(work: Workload, layout: Layout, **frames: Any) -> list[Traffic]:
        laid_out.append(layout)
        return forecast.forecast_traffic(work, layout, **frames)

    monkeypatch.setattr(problem, "forecast_traffic", forecast_traffic)
    plan_layout(in_groups(workload(), 4), Limits(20_000_000, 30_000_000), WITH_DEVICE_MEMORY)
    assert len(laid_out) > 10
    assert not any(one == other for one, other in combinations(laid_out, 2))


def test_temporaries_are_bounded_once_where_nothing_becomes_taller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of every pass, as a layout is made."""
    work, counted = workload(), Counted(layout.scratch_nbytes, lambda item, *_: item.index)
    monkeypatch.setattr(layout, "scratch_nbytes", counted)
    made = layout.lay_out(work, Choice(1024, dict.fromkeys(layout.pulled_sources(work), WHOLE)))
    assert counted.sizes == [item.index for passes in made.programs.values() for item in passes]


def test_what_a_pass_uses_in_frames_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who counts frames, who counts uses and who lists them ask for it."""
    work, counted = workload(), Counted(passes.stored_slabs, lambda *_: 1)
    monkeypatch.setattr(passes, "stored_slabs", counted)
    made = layout.lay_out(work, Choice(1024, dict.fromkeys(layout.pulled_sources(work), WHOLE)))
    frames_needed(made, work)
    found = len(counted.sizes)
    for program_passes in made.programs.values():
        block_uses(made, work, program_passes)
        uses_of(program_passes, made, work, block_table(made, work))
    assert len(counted.sizes) == found


@pytest.mark.parametrize(
    ("machine", "mb"), thorough(product(MACHINES, (12, 30, 1000)), ("processor", 30), ("device", 12))
)
def test_what_computes_longer_than_the_best_takes_is_not_forecast(
    machine: str, mb: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the plan is the one that comes of forecasting everything."""
    limits, forecasts, plans = Limits(mb * 1_000_000, mb * 1_000_000), [], []
    hardware = MACHINES[machine]
    for is_known in (True, False):
        with monkeypatch.context() as patched:
            counted = Counted(forecast.forecast_traffic, lambda *_: 1)
            patched.setattr(problem, "forecast_traffic", counted)
            if not is_known:
                patched.setattr(problem.Problem, "_compute_only_seconds", lambda *_: 0.0)
            plans.append(plan_layout(workload(), limits, hardware))
        forecasts.append(len(counted.sizes))
    few, all_of_them = forecasts
    assert few <= all_of_them and (mb < 1000 or few < all_of_them / 2)
    assert plans[0].layout == plans[1].layout and _forecasts(plans[0]) == _forecasts(plans[1])
    for one in plans[1].problem.states():
        assert plans[0].problem._compute_only_seconds(one.layout) <= one.seconds


def _forecasts(best: State) -> list[tuple[Layout, float]]:
    """Of the next best, which count on a device alone."""
    return [(one.layout, one.seconds) for one in others(best)] if best.problem.on_device else []


@pytest.mark.parametrize(("machine", "rows"), thorough(product(MACHINES, (2000, 2_000_000)), ("processor", 2000)))
def test_what_gathers_from_more_than_the_least_memory_is_not_laid_out(
    machine: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the least is the one that comes of laying everything out."""
    found, numbers = [], []
    for is_known in (True, False):
        with monkeypatch.context() as patched:
            counted = Counted(layout.lay_out, lambda *_: 1)
            patched.setattr(problem, "lay_out", counted)
            if not is_known:
                patched.setattr(Moves, "_bound_bytes", lambda *_: 0)
            found.append(minimum_memory(Problem(large_gcn(rows, 15 * rows, 256, 19), Limits(0, 0), MACHINES[machine])))
        numbers.append(len(counted.sizes))
    few, all_of_them = numbers
    assert few <= all_of_them and (rows < 2_000_000 or few < all_of_them / 2)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("machine", "kind"),
    ordinary(product(MACHINES, WORKS), ("processor", "small"), ("device", "plain"), ("device", "groups")),
)
def test_no_layout_takes_less_than_its_bound(machine: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all that the search for the least memory tries; and where that is known, few are laid out."""
    hardware, work = MACHINES[machine], WORKS[kind]
    problem, bound, choices = Problem(work, Limits(0, 0), hardware), Moves._bound_bytes, list[Choice]()
    with monkeypatch.context() as patched:
        patched.setattr(Moves, "_bound_bytes", lambda _, choice: choices.append(choice) or 0)
        minimum_memory(problem)
    assert len(choices) > 100
    for choice in choices:
        assert bound(Moves(problem), choice) <= problem.capacity.least(problem.layout(choice))[0]
    work.leanest.clear()
    again = Problem(work, Limits(0, 0), hardware)
    minimum_memory(again)
    assert len(again._layouts) < 0.8 * len(problem._layouts)


def test_no_layout_that_gathers_by_buckets_takes_less_than_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one of fewer buckets, of which the same bound is taken."""
    work = bucketable_workload()
    problem, tried = Problem(work, Limits(0, 0), UNMEASURED), list[Choice]()
    moves, lay_out, bound = Moves(problem), problem.layout, Moves._bound_bytes
    with monkeypatch.context() as patched:
        patched.setattr(moves, "_bound_bytes", lambda _: 0)
        patched.setattr(problem, "layout", lambda choice: tried.append(choice) or lay_out(choice))
        tallest, *_, lowest = moves.heights(MOST_STEPS)
        for height, parts, alone in ((tallest, 1, False), (lowest, 8, True)):
            moves.minimum_memory(height, Beginning(MOST_STEPS, True, parts, alone, moves.bucketable), inf)
    assert len(tried) > 60 and all(choice.bucketed for choice in tried)
    for choice in tried:
        for one in choice, replace(choice, bucketed={}):
            assert bound(moves, choice) <= problem.capacity.least(lay_out(one))[0]


@pytest.mark.parametrize(
    ("machine", "kind", "limits"), [("processor", "plain", Limits(1, 1)), ("device", "groups", Limits(1, 10**6))]
)
def test_what_is_named_as_enough_is_found_among_few_layouts(
    machine: str, kind: str, limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What takes more than the least that budgets lack so far is not laid out; what is said is the same."""
    told, numbers, leanest = [], [], solver._leanest
    for most in (lambda _: inf, lambda most: most):
        WORKS[kind].leanest.clear()
        with monkeypatch.context() as patched:
            patched.setattr(solver, "_leanest", lambda *given, most=most: leanest(*given[:-1], most(given[-1])))
            patched.setattr(problem, "lay_out", counted := Counted(layout.lay_out, lambda *_: 1))
            with pytest.raises(BudgetError) as raised:
                plan_layout(WORKS[kind], limits, MACHINES[machine])
        told.append(str(raised.value))
        numbers.append(len(counted.sizes))
    assert told[0] == told[1] and numbers[1] < 0.6 * numbers[0]


@pytest.mark.parametrize("hardware", [UNMEASURED, WITH_DEVICE_MEMORY], ids=["processor", "device"])
def test_the_least_memory_of_a_workload_is_looked_for_once(hardware: Hardware, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the budgets; and the plans are those of workloads that nobody has planned before."""
    known, numbers, plans = new_workload(), [], []
    limits = [Limits(mb * 1_000_000, mb * 1_000_000) for mb in (9, 8)]
    for one in limits:
        with monkeypatch.context() as patched:
            counted = Counted(layout.lay_out, lambda *_: 1)
            patched.setattr(problem, "lay_out", counted)
            plans.append(plan_layout(known, one, hardware))
        numbers.append(len(counted.sizes))
    assert plans[0].layout == plan_layout(new_workload(), limits[0], hardware).layout
    assert plans[1].layout == plan_layout(new_workload(), limits[1], hardware).layout
    assert numbers[1] < numbers[0]


def test_only_the_plan_that_is_returned_is_unrolled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program once, for the device and for the host."""
    work = workload()
    counted = Counted(program.Unrolling, lambda sequence, *_: len(sequence.steps))
    monkeypatch.setattr(program, "Unrolling", counted)
    made = make_plan(work, Limits(20_000_000, 30_000_000), WITH_DEVICE_MEMORY)
    assert len(counted.sizes) == 2 * len(work.programs)
    assert sum(counted.sizes) == sum(
        len(one.steps) for one in (*made.unrolled.values(), *(staged.program for staged in made.staged.values()))
    )


def test_what_several_ask_of_the_uses_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which span uses a block next: replacement, unrolling and what is found in memory all go by it."""
    counted = Counted(Uses.following.func, lambda uses: 1)
    following = cached_property(counted)
    following.__set_name__(Uses, "following")
    monkeypatch.setattr(Uses, "following", following)
    made = make_plan(workload(), Limits(20_000_000, 30_000_000), WITH_DEVICE_MEMORY)
    before = len(counted.sizes)
    for unrolled in made.unrolled.values():
        assert unrolled.bytes_used(made.blocks) or not unrolled.steps
    assert made.hit_rate >= 0
    assert len(counted.sizes) == before
