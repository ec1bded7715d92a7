# SPDX-License-Identifier: Apache-2.0
"""Fates take as long as the best of all plans and keep both budgets; where none do, the error says what would."""

import math
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ooc.errors import BudgetError
from ooc.plan.workload import Fate
from tests.examples import examples
from tests.plan.chains import Outcome, all_plans, chains, keeps, play
from tests.plan.fates import (
    RECOMPUTED,
    Budgets,
    Chain,
    Choice,
    Fates,
    Load,
    Phase,
    Rates,
    Recomputation,
    Saved,
    account,
    choose_fates,
)

BUDGETS_PER_CHAIN = 6


@st.composite
def budgets(draw: st.DrawFn, chain: Chain) -> Budgets:
    """Up to what is needed to keep everything on one tier, often less than any plan needs."""
    most = sum(item.nbytes for item in chain.items) + 30
    unit = draw(st.sampled_from([1, 1, 2, 5, 7]))
    return Budgets(draw(st.integers(0, most)), draw(st.integers(0, most)), unit)


def chosen(chain: Chain, limits: Budgets) -> Fates | None:
    try:
        return choose_fates(chain, limits)
    except BudgetError:
        return None


@settings(max_examples=examples(200), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_fates_take_as_long_as_the_best_of_all_plans(data: st.DataObject) -> None:
    """Each example is six instances: the plans of a chain are played once for every unit, and held to six budgets."""
    chain = data.draw(chains())
    plans = all_plans(chain)
    played: dict[int, list[Outcome]] = {}
    for _ in range(BUDGETS_PER_CHAIN):
        limits = data.draw(budgets(chain))
        unit = limits.unit_bytes
        if unit not in played:
            played[unit] = [play(chain, plan, unit) for plan in plans]
        best = min((outcome.seconds for outcome in played[unit] if keeps(outcome, limits)), default=None)
        fates = chosen(chain, limits)
        assert (fates is None) == (best is None)
        if fates is not None and best is not None:
            assert fates.seconds == pytest.approx(best, rel=1e-9, abs=1e-9)
            assert keeps(play(chain, fates.choices, unit), limits)


@settings(max_examples=examples(200), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_the_account_says_what_playing_the_epoch_through_shows(data: st.DataObject) -> None:
    """For any plan, not the best only."""
    chain = data.draw(chains())
    plan = data.draw(st.sampled_from(all_plans(chain)))
    unit = data.draw(st.integers(1, 6))
    found = account(chain, plan, Budgets(0, 0, unit))
    played = play(chain, plan, unit)
    assert found.seconds == pytest.approx(played.seconds)
    assert (found.device_units, found.host_units) == played[1:]


@settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_more_memory_never_takes_longer(data: st.DataObject) -> None:
    chain = data.draw(chains())
    limits = data.draw(budgets(chain))
    fates = chosen(chain, limits)
    more = data.draw(st.integers(1, 20))
    raises: list[Callable[[Budgets], Budgets]] = [
        lambda b: replace(b, device_bytes=b.device_bytes + more),
        lambda b: replace(b, host_bytes=b.host_bytes + more),
    ]
    for raised in raises:
        richer = chosen(chain, raised(limits))
        if fates is not None:
            assert richer is not None
            assert richer.seconds <= fates.seconds * (1 + 1e-9)


def test_a_deep_chain_is_planned_in_few_seconds_and_keeps_its_budgets() -> None:
    """64 layers of whole matrices, a quarter of which fits, in 32 units a budget: all four fates are met."""
    random = Random(1)
    items = tuple(
        Saved(f"z{i}", 1, random.randint(1, 6) * 10**7, Recomputation(Load(random.uniform(0, 0.3))) if i % 3 else None)
        for i in range(64)
    )
    phases = tuple(Phase(f"phase {p}", Load(random.uniform(0, 0.02)), 10**7, 10**7) for p in range(128))
    chain = Chain(items, phases, Rates(12e9, 12e9, 2e9, 2e9, 3e9, overlap=0.9))
    memory = sum(item.nbytes for item in items) // 8
    limits = Budgets(memory, memory, memory // 32)
    fates = choose_fates(chain, limits)
    assert keeps(play(chain, fates.choices, limits.unit_bytes), limits)
    assert {fate for choice in fates.choices for fate in choice.shares()} == set(Fate)
    assert fates.seconds < 0.9 * account(chain, [Choice(0, 0, 1)] * 64, limits).seconds


# ---- one chain, by hand ------------------------------------------------------------------------------------

SLOW_SSD = Rates(math.inf, math.inf, 10.0, 10.0, 10.0, overlap=1.0)


def three(*, again_s: float | None = None, rates: Rates = SLOW_SSD, compute_s: float = 1.0) -> Chain:
    """Three matrices of 4 blocks of 10 bytes; every phase computes for ``compute_s`` and takes a byte of each tier."""
    again = None if again_s is None else Recomputation(Load(compute_s=again_s))
    items = tuple(Saved(f"z{i}", 4, 10, again) for i in range(3))
    return Chain(items, tuple(Phase(f"phase {p}", Load(compute_s), 1, 1) for p in range(6)), rates)


def test_what_fits_the_device_stays_there() -> None:
    fates = choose_fates(three(compute_s=0.0), Budgets(121, 1))
    assert [choice.shares() for choice in fates.choices] == [{Fate.DEVICE: 1.0}] * 3
    assert fates.seconds == 0


def test_a_part_of_a_matrix_waits_where_there_is_room_for_a_part() -> None:
    """30 bytes of the device and 20 of the host leave 70 bytes for the SSD; 1 s of computing hides 10 each way."""
    fates = choose_fates(three(), Budgets(31, 21))
    assert sum(choice.ssd for choice in fates.choices) == 7
    assert fates.device_units <= 31
    assert fates.host_units <= 21
    assert fates.seconds == pytest.approx(2 * 7.0)


def test_a_chain_of_recomputations_is_paid_for_in_every_phase_that_needs_it() -> None:
    """With nothing kept, z0 is computed once, z1 after z0 again, z2 after both: six times for three matrices."""
    fates = choose_fates(three(again_s=0.1), Budgets(1, 1))
    assert fates.choices == (RECOMPUTED,) * 3
    assert [choice.shares() for choice in fates.choices] == [{Fate.RECOMPUTE: 1.0}] * 3
    assert fates.seconds == pytest.approx(6.6)


def test_with_room_for_one_the_middle_is_kept_where_recomputing_is_dear() -> None:
    """From a kept z1 both others are one recomputation away; from any other, three are needed in all."""
    fates = choose_fates(three(again_s=2.0, rates=replace(SLOW_SSD, ssd_write_bytes_per_s=1.0)), Budgets(41, 1))
    assert [choice.shares() for choice in fates.choices] == [
        {Fate.RECOMPUTE: 1.0},
        {Fate.DEVICE: 1.0},
        {Fate.RECOMPUTE: 1.0},
    ]
    assert fates.seconds == pytest.approx(6 + 2 + 2)


def test_reading_and_writing_share_the_ssd() -> None:
    rates = Rates(math.inf, math.inf, 10.0, 20.0, 12.0, overlap=1.0)
    assert rates.seconds(Load(ssd_read_bytes=60)) == 6
    assert rates.seconds(Load(ssd_write_bytes=60)) == 5
    assert rates.seconds(Load(ssd_read_bytes=60, ssd_write_bytes=60)) == 10


def test_what_does_not_hide_behind_the_longest_work_is_added() -> None:
    rates = Rates(10.0, 10.0, 10.0, 10.0, 10.0, overlap=0.75)
    assert rates.seconds(Load(compute_s=4, up_bytes=20, down_bytes=10, ssd_read_bytes=10)) == 4 + 0.25 * (2 + 1 + 1)


def test_a_phase_that_does_not_fit_is_named_with_its_need() -> None:
    chain = three()
    big = replace(chain.phases[4], name="backward 1", device_bytes=5_000)
    chain = replace(chain, phases=(*chain.phases[:4], big, chain.phases[5]))
    with pytest.raises(BudgetError, match=r"phase backward 1 needs 5.00 KB on the device, and its budget is 100 B$"):
        choose_fates(chain, Budgets(100, 100))
    assert chosen(chain, Budgets(5000, 100)) is not None
