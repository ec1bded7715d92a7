# SPDX-License-Identifier: Apache-2.0
"""Arrangements that are forecast to be about as fast are told apart by the simulator."""

from dataclasses import replace
from functools import cache

import pytest

from ooc.plan import UNMEASURED, Limits, Plan, contenders
from ooc.plan.contenders import fastest_plan
from ooc.plan.planner import Arrangement, arrange, arrange_from_one_width, seconds_like
from ooc.plan.simulator import simulate
from ooc.plan.verifier import verify_plan
from tests.plan.workloads import WITH_DEVICE_MEMORY, workload

WORK = workload()
BUDGETS = [(20_000_000, 20_000_000), (24_000_000, 20_000_000), (20_000_000, 1 << 32), (40_000_000, 40_000_000)]


@cache
def arranged(device: int, host: int, **limits: int) -> Arrangement:
    return arrange(WORK, Limits(device, host, **limits), WITH_DEVICE_MEMORY)


@cache
def fastest(budgets: tuple[int, int]) -> Plan:
    return fastest_plan(arranged(*budgets))


def seconds(plan: Plan) -> float:
    return simulate(plan, WORK, WITH_DEVICE_MEMORY).epoch_s


@pytest.mark.parametrize("budgets", BUDGETS)
def test_no_contender_is_faster_by_the_simulator(budgets: tuple[int, int]) -> None:
    """And what is chosen fits: it passes the verifier."""
    best = arranged(*budgets)
    chosen = fastest(budgets)
    verify_plan(chosen)
    others = [replace(best, choice=choice, layout=layout) for choice, layout in best.contenders]
    assert others
    assert seconds(chosen) == min(seconds(one.plan) for one in (best, *others))


def test_simulating_shortens_some_epochs() -> None:
    found = [arranged(*budgets) for budgets in BUDGETS]
    gains = [seconds(best.plan) / seconds(fastest(budgets)) for best, budgets in zip(found, BUDGETS, strict=True)]
    assert max(gains) > 1.1
    assert min(gains) >= 1


@pytest.mark.parametrize("budgets", BUDGETS)
def test_the_search_begins_twice(budgets: tuple[int, int]) -> None:
    """What the second one ends in fits, and is not faster than what is taken."""
    first = arranged(*budgets)
    other = arrange_from_one_width(first)
    if other is None:
        assert budgets == BUDGETS[1], "slabs of that width fit"
        return
    verify_plan(other.plan)
    assert seconds(fastest(budgets)) <= min(seconds(first.plan), seconds(other.plan))


@pytest.mark.parametrize(("share", "taken"), [(0.98, "second"), (0.995, "first"), (1.02, "first")])
def test_programs_too_long_to_be_simulated_go_by_forecasts(
    share: float, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two that are about equal, by the first search's."""
    first = arranged(*BUDGETS[0])
    choice, layout = first.contenders[-1]
    second = replace(first, choice=choice, layout=layout, seconds=share * first.seconds)
    monkeypatch.setattr(contenders, "arrange_from_one_width", lambda arranged: second)
    monkeypatch.setattr(contenders, "_MOST_STEPS", 0)
    assert first.plan.unrolled["train"].steps != second.plan.unrolled["train"].steps
    assert fastest_plan(first) is (second if taken == "second" else first).plan


def test_slabs_of_a_width_that_was_asked_for_are_searched_once() -> None:
    assert arrange_from_one_width(arranged(*BUDGETS[3], slab_columns=16)) is None


def test_contenders_are_in_order_hardly_slower_and_differ() -> None:
    best = arranged(*BUDGETS[0])
    again = (seconds_like(WORK, replace(best, choice=choice)) or 0.0 for choice, _ in best.contenders)
    forecasts = [best.seconds, *again]
    assert forecasts == sorted(forecasts) and len(set(forecasts)) == len(forecasts)
    assert forecasts[-1] <= 1.25 * best.seconds


def test_forecasts_stand_on_the_cpu_with_a_limit_on_writes_and_with_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = arrange(WORK, Limits(8_000_000, 12_000_000), UNMEASURED)
    assert fastest_plan(on_cpu) is on_cpu.plan
    limited = arranged(*BUDGETS[0], ssd_write_bytes=1 << 40)
    assert fastest_plan(limited) is limited.plan
    many = arranged(*BUDGETS[0])
    monkeypatch.setattr(contenders, "_MOST_STEPS", len(many.plan.unrolled["train"].steps))
    assert fastest_plan(many) is many.plan
