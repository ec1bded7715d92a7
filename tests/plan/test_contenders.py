# SPDX-License-Identifier: Apache-2.0
"""Arrangements that are forecast to be about as fast are told apart by the simulator."""

from contextlib import suppress
from dataclasses import replace
from functools import cache

import pytest

from ooc.errors import BudgetError
from ooc.plan import UNMEASURED, Limits, Plan, contenders
from ooc.plan.contenders import fastest_plan
from ooc.plan.planner import Arrangement, arrange, seconds_like
from ooc.plan.simulator import simulate
from ooc.plan.verifier import verify_plan
from tests.plan.workloads import WITH_DEVICE_MEMORY, large_gcn, workload

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


@pytest.mark.parametrize("budgets", [(1_042_000_000, 170_000_000), (1_050_000_000, 50_000_000)])
def test_slabs_of_one_width_are_tried_together(budgets: tuple[int, int]) -> None:
    """One source at a time, a wide one takes the memory that the others would need: an epoch was forecast to take up to
    1.9 times as long as with slabs that are all alike."""
    work = large_gcn(100_000, 1_000_000, 32, 40, hidden=64)
    best = arrange(work, Limits(*budgets), WITH_DEVICE_MEMORY)
    for width in (64, 32, 22, 16, 8):
        with suppress(BudgetError):
            alike = arrange(work, Limits(*budgets, slab_columns=width), WITH_DEVICE_MEMORY)
            assert best.seconds <= 1.001 * alike.seconds
