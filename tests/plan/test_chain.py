# SPDX-License-Identifier: Apache-2.0
"""Fates of a chain take as long as the best of all plans and keep both budgets; where none do, the error says what
would, and an integer program agrees on chains too long to try every plan."""

import re
from dataclasses import replace
from itertools import product
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

import ooc
from ooc.errors import BudgetError
from ooc.plan.chain import Saved, leanest, plan_chain
from ooc.plan.hardware import UNMEASURED, UNMEASURED_DEVICE, Curve, Disk, Hardware, Wire
from ooc.plan.workload import Fate
from ooc.sizes import parse_size
from tests.examples import examples

DISK = Disk(Curve(((1.0, 4.0),)), Curve(((1.0, 3.0),)), 5.0, 0.0)
CPU = replace(UNMEASURED, disk=DISK, overlap=0.75)
GPU = replace(UNMEASURED_DEVICE, disk=DISK, overlap=0.75, wire=Wire(10.0, 8.0))


def chain_of(random: Random, length: int) -> list[Saved]:
    """Numbers of every sort, often 0."""

    def number(most: int) -> int:
        return max(0, random.randint(-2, most))

    return [
        Saved(
            name=f"layer {i}",
            nbytes=number(9),
            recompute_s=number(8) / 4 if random.random() < 0.7 else None,
            forward_s=number(8) / 4,
            backward_s=number(8) / 4,
            kept_bytes=number(5),
            away_bytes=number(9),
            recompute_bytes=number(12),
            shared_bytes=number(3),
        )
        for i in range(length)
    ]


def play(items: list[Saved], fates: tuple[Fate, ...], hardware: Hardware) -> tuple[float, int, int] | None:
    """Seconds and the most of both memories, step by step, with what is alive in lists; None where a fate is none."""
    on_gpu = hardware is GPU
    stays = Fate.DEVICE if on_gpu else Fate.HOST
    seconds, device, host = 0.0, 0, 0
    for step in range(2 * len(items)):
        forward = step < len(items)
        i = step if forward else 2 * len(items) - 1 - step
        item, fate = items[i], fates[i]
        if (fate is Fate.DEVICE and not on_gpu) or (fate is not stays and not item.nbytes):
            return None
        work = [item.forward_s if forward else item.backward_s, 0.0, 0.0]
        if fate is Fate.RECOMPUTE:
            if item.recompute_s is None:
                return None
            work[0] += 0 if forward else item.recompute_s
        moved = item.nbytes if fate is Fate.SSD or (on_gpu and fate is Fate.HOST) else 0
        if fate is Fate.SSD:
            work[1] = moved / (3.0 if forward else 4.0)
        if on_gpu:
            work[2] = moved / (8.0 if forward else 10.0)
        seconds += max(work) + 0.25 * (sum(work) - max(work))
        kept = [one.nbytes for one, its in zip(items[: i + 1], fates, strict=False) if its is stays]
        on_host = [one.nbytes for one, its in zip(items[: i + 1], fates, strict=False) if on_gpu and its is Fate.HOST]
        own = {stays: item.kept_bytes, Fate.RECOMPUTE: item.recompute_bytes}.get(fate, item.away_bytes)
        before_is_kept = i > 0 and fates[i - 1] is stays and items[i - 1].nbytes > 0
        device = max(device, sum(kept) + own + (0 if before_is_kept else item.shared_bytes))
        host = max(host, sum(on_host) + (item.nbytes if on_gpu and fate is Fate.SSD else 0))
    return seconds, device, host


@settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_fates_take_as_long_as_the_best_of_all_plans(data: st.DataObject) -> None:
    random = Random(data.draw(st.integers(0, 10**6)))
    items, hardware = chain_of(random, random.randint(1, 4)), random.choice([CPU, GPU])
    plays = {fates: play(items, fates, hardware) for fates in product(Fate, repeat=len(items))}
    outcomes = {fates: outcome for fates, outcome in plays.items() if outcome is not None}
    for _ in range(5):
        budgets = random.randint(0, 30), random.randint(0, 15)
        room = (sum(budgets), 0) if hardware is CPU else budgets
        fitting = [out[0] for out in outcomes.values() if out[1] <= room[0] and out[2] <= room[1]]
        try:
            plan = plan_chain(items, *budgets, hardware)
        except BudgetError:
            assert not fitting
        else:
            assert plan.seconds == pytest.approx(min(fitting))
            assert (plan.seconds, plan.device_bytes, plan.host_bytes) == pytest.approx(outcomes[plan.fates])


@pytest.mark.parametrize("hardware", [CPU, GPU])
def test_an_error_says_what_would_do_and_less_does_not(hardware: Hardware) -> None:
    """Where what comes back takes no more than what stays, as it does; and no more is shared than there is."""
    for seed in range(30):
        items = chain_of(Random(seed), 6)
        items = [replace(one, away_bytes=min(one.away_bytes, one.kept_bytes + one.nbytes)) for one in items]
        before = [0, *(one.nbytes for one in items)]
        items = [replace(one, shared_bytes=min(one.shared_bytes, b)) for one, b in zip(items, before, strict=False)]
        least = leanest(items, hardware)
        if not least.device_bytes:
            continue
        with pytest.raises(BudgetError, match="with nothing kept, the chain takes") as caught:
            plan_chain(items, least.device_bytes - 1, 0 if hardware is CPU else 10**6, hardware)
        named = re.findall(r"budget='(\w+)'", str(caught.value))
        assert len(named) == (1 if hardware is CPU else 2)
        gpu, host = [*(parse_size(size, name="budget", zero=True) for size in named), 0][:2]
        assert gpu == least.device_bytes
        plan_chain(items, gpu, host, hardware)


def test_long_chains_cost_what_an_integer_program_costs() -> None:
    """A binary a fate of each item; at each depth what is kept before and what the item's fate takes fit."""
    for seed in range(12):
        random = Random(seed)
        items = [replace(item, shared_bytes=0) for item in chain_of(random, 24)]
        budget = random.randint(25, 90)
        columns: list[tuple[int, Fate, float, int, int]] = []
        for i, item in enumerate(items):
            for fate in (Fate.HOST, Fate.SSD, Fate.RECOMPUTE):
                if (outcome := play([item], (fate,), CPU)) is not None:
                    kept = item.nbytes if fate is Fate.HOST else 0
                    columns.append((i, fate, outcome[0], kept, outcome[1]))
        one_each = np.array([[float(c[0] == i) for c in columns] for i in range(len(items))])
        fits = np.array([[float(c[3] * (c[0] < i) + c[4] * (c[0] == i)) for c in columns] for i in range(len(items))])
        found = milp(
            np.array([c[2] for c in columns]),
            integrality=np.ones(len(columns)),
            bounds=Bounds(0, 1),
            constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(fits, -np.inf, budget)],
        )
        if found.status == 2:
            with pytest.raises(BudgetError):
                plan_chain(items, budget, 0, CPU)
        else:
            assert plan_chain(items, budget, 0, CPU).seconds == pytest.approx(found.fun, rel=1e-6)


def test_a_deep_chain_meets_all_four_fates_within_its_budgets() -> None:
    random = Random(1)
    items = [
        Saved(
            name=f"layer {i}",
            nbytes=(size := random.randint(1, 6) * 10**7),
            recompute_s=random.uniform(0, 0.3) if i % 3 else None,
            forward_s=0.01,
            backward_s=0.02,
            kept_bytes=10**7,
            away_bytes=10**7 + size,
            recompute_bytes=10**7 + size,
        )
        for i in range(32)
    ]
    disk = replace(UNMEASURED_DEVICE, host_memory_bytes=10**9)
    memory = sum(item.nbytes for item in items) // 8
    plan = ooc.plan_chain(items, memory, memory, disk)
    assert set(plan.fates) == set(Fate)
    assert plan.device_bytes <= memory and plan.host_bytes <= memory
