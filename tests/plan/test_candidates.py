# SPDX-License-Identifier: Apache-2.0
"""Candidates that are forecast to be about as fast are told apart by the simulator."""

from dataclasses import replace
from functools import cache

import pytest

from ooc.plan import UNMEASURED, Limits, Plan, solver
from ooc.plan.planner import plan_layout
from ooc.plan.problem import State
from ooc.plan.program.verifier import verify_plan
from ooc.plan.simulate.simulator import simulate
from ooc.plan.simulate.timeline import merge_timelines
from ooc.plan.solver import from_one_width, others, simulated_best
from ooc.plan.workload import Share
from tests.examples import cases, ordinary
from tests.plan.workloads import WITH_DEVICE_MEMORY, workload

WORK = workload()
ROWS = 45_056
BUDGETS = [(20_000_000, 20_000_000), (24_000_000, 20_000_000), (20_000_000, 1 << 32), (40_000_000, 40_000_000)]
SMALL = 16_000_000, 16_000_000
EACH = ordinary(map(pytest.param, BUDGETS), BUDGETS[0], BUDGETS[2])


@cache
def planned(device: int, host: int, **limits: int) -> State:
    return plan_layout(WORK, Limits(device, host, **limits), WITH_DEVICE_MEMORY)


@cache
def next_best(budgets: tuple[int, int]) -> list[State]:
    """As long as nothing else has been tried."""
    return [*others(planned(*budgets))]


@cache
def fastest(budgets: tuple[int, int]) -> Plan:
    assert next_best(budgets)
    return simulated_best(planned(*budgets)).plan


def seconds(plan: Plan) -> float:
    return simulate(plan, WORK, WITH_DEVICE_MEMORY).epoch_s


@pytest.mark.parametrize("budgets", EACH)
def test_no_candidate_is_faster_by_the_simulator(budgets: tuple[int, int]) -> None:
    """And what is chosen fits: it passes the verifier."""
    best = planned(*budgets)
    chosen = fastest(budgets)
    verify_plan(chosen)
    assert seconds(chosen) <= min(seconds(one.plan) for one in (best, *next_best(budgets)))


def test_simulating_shortens_some_epochs() -> None:
    """Where forecasts prefer steps of another height, by much."""
    tried = [*cases([BUDGETS[0], BUDGETS[2]], BUDGETS), SMALL]
    gains = [seconds(planned(*budgets).plan) / seconds(fastest(budgets)) for budgets in tried]
    assert max(gains) > 1.2
    assert min(gains) >= 1


def test_of_a_process_what_it_waits_for_others_counts() -> None:
    """By slow links what computes least is not what takes least."""
    quarters = [range(at, at + ROWS // 4) for at in range(0, ROWS, ROWS // 4)]
    work = replace(workload(ROWS, 64), share=Share(0, {"": quarters}))
    limits = Limits(20_000_000, 40_000_000, link_bytes_per_s=10**9)

    def epoch_s(plan: Plan) -> float:
        alone = simulate(plan, work, WITH_DEVICE_MEMORY)
        return merge_timelines([alone], [plan.received("train")], limits.link_bytes_per_s)[0].epoch_s

    best = plan_layout(work, limits, WITH_DEVICE_MEMORY)
    plans = [one.plan for one in (best, *others(best))]
    chosen = simulated_best(best).plan
    computes_least = min(plans, key=lambda plan: simulate(plan, work, WITH_DEVICE_MEMORY).epoch_s)
    assert epoch_s(chosen) <= min(map(epoch_s, plans))
    assert epoch_s(chosen) < 0.95 * epoch_s(computes_least)


@pytest.mark.parametrize("budgets", EACH)
def test_the_descent_begins_twice(budgets: tuple[int, int]) -> None:
    """What the second one ends in fits, and is not faster than what is taken."""
    first = planned(*budgets)
    other = from_one_width(first)
    if other is None:
        assert budgets == BUDGETS[1], "slabs of that width fit"
        return
    verify_plan(other.plan)
    assert seconds(fastest(budgets)) <= min(seconds(first.plan), seconds(other.plan))


@pytest.mark.parametrize(("share", "taken"), [(0.98, "second"), (0.995, "first"), (1.02, "first")])
def test_programs_too_long_to_be_simulated_go_by_forecasts(
    share: float, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two that are about equal, by the first descent's."""
    first = planned(*BUDGETS[0])
    second = replace(next_best(BUDGETS[0])[-1], score=(0, share * first.seconds))
    monkeypatch.setattr(solver, "from_one_width", lambda planned: second)
    monkeypatch.setattr(solver, "_SIMULATED_STEPS", 0)
    assert first.plan.unrolled["train"].steps != second.plan.unrolled["train"].steps
    assert simulated_best(first) is (second if taken == "second" else first)


def test_slabs_of_a_width_that_was_asked_for_are_descended_to_once() -> None:
    assert from_one_width(planned(*BUDGETS[3], slab_columns=16)) is None


def test_candidates_are_in_order_hardly_slower_and_differ() -> None:
    best, following = planned(*BUDGETS[0]), next_best(BUDGETS[0])
    forecasts = [best.seconds, *(one.seconds for one in following)]
    assert forecasts == sorted(forecasts) and len(set(forecasts)) == len(forecasts)
    heights = [one.layout.step_rows for one in (best, *following)]
    assert all(
        forecast <= 1.25 * best.seconds or heights.index(height) == at
        for at, (forecast, height) in enumerate(zip(forecasts, heights, strict=True))
    )


@pytest.mark.parametrize("budgets", EACH)
def test_steps_of_every_height_that_was_forecast_are_among_the_candidates(budgets: tuple[int, int]) -> None:
    """Which is best, forecasts tell least of all: they know nothing of the beginnings and ends of passes."""
    best, following = planned(*budgets), next_best(budgets)
    heights = {one.layout.step_rows for one in best.problem.states()}
    assert len(heights) > 1
    assert {one.layout.step_rows for one in (best, *following)} == heights


def test_forecasts_stand_on_the_cpu_with_a_limit_on_writes_and_with_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = plan_layout(WORK, Limits(8_000_000, 12_000_000), UNMEASURED)
    assert simulated_best(on_cpu) is on_cpu
    limited = planned(*BUDGETS[0], ssd_write_bytes=1 << 40)
    assert simulated_best(limited) is limited
    many = planned(*BUDGETS[0])
    monkeypatch.setattr(solver, "_SIMULATED_STEPS", len(many.plan.unrolled["train"].steps))
    assert simulated_best(many) is many
