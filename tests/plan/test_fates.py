# SPDX-License-Identifier: Apache-2.0
"""Fates cost what the best of all plans costs and keep every budget; where none do, the error says what would."""

import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ooc.errors import BudgetError
from ooc.plan.chain import Budgets, Chain, Choice, Intermediate, Load, Phase, Rates, Recomputation
from ooc.plan.fates import Fates, choose_fates
from ooc.plan.ledger import Resource, account
from ooc.plan.shortage import remedies
from ooc.plan.workload import Fate
from tests.examples import examples
from tests.plan.chains import Outcome, all_plans, chains, keeps, play

BUDGETS_PER_CHAIN = 6


@st.composite
def budgets(draw: st.DrawFn, chain: Chain) -> Budgets:
    """Up to what is needed to keep everything on one tier, often less than any plan needs."""
    most = sum(item.nbytes for item in chain.intermediates) + 30
    limit = draw(st.one_of(st.none(), st.integers(0, 2 * most)))
    return Budgets(
        device_bytes=draw(st.integers(0, most)),
        host_bytes=draw(st.integers(0, most)),
        ssd_write_bytes=limit,
        unit_bytes=draw(st.sampled_from([1, 1, 2, 5, 7])),
    )


def chosen(chain: Chain, limits: Budgets) -> Fates | None:
    try:
        return choose_fates(chain, limits)
    except BudgetError:
        return None


@settings(max_examples=examples(350), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_fates_cost_what_the_best_of_all_plans_costs(data: st.DataObject) -> None:
    """Each example is six instances: the plans of a chain are played once for every unit, and held to six budgets."""
    chain = data.draw(chains())
    plans = all_plans(chain)
    played: dict[int, list[Outcome]] = {}
    for _ in range(BUDGETS_PER_CHAIN):
        limits = data.draw(budgets(chain))
        unit = limits.unit_bytes
        if unit not in played:
            played[unit] = [play(chain, plan, unit) for plan in plans]
        best = min((outcome.cost for outcome in played[unit] if keeps(outcome, limits)), default=None)
        fates = chosen(chain, limits)
        assert (fates is None) == (best is None)
        if fates is not None and best is not None:
            assert fates.ledger.cost == pytest.approx(best, rel=1e-9, abs=1e-9)
            assert keeps(play(chain, fates.choices, unit), limits)


@settings(max_examples=examples(100), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data(), st.sampled_from([1e-3, 0.05, 0.3]))
def test_within_a_tolerance_fates_cost_at_most_that_part_more(data: st.DataObject, tolerance: float) -> None:
    chain = data.draw(chains())
    limits = data.draw(budgets(chain))
    exact = chosen(chain, limits)
    if exact is not None:
        near = choose_fates(chain, limits, tolerance=tolerance)
        assert near.ledger.keeps(limits)
        assert near.ledger.cost * (1 - tolerance) <= exact.ledger.cost * (1 + 1e-9)
        assert near.bound <= exact.ledger.cost * (1 + 1e-9)


@settings(max_examples=examples(100), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data(), st.sampled_from([0, 3, 20]))
def test_a_search_that_gives_up_keeps_the_budgets_and_says_how_good_it_is(data: st.DataObject, most: int) -> None:
    chain = data.draw(chains())
    limits = data.draw(budgets(chain))
    exact = chosen(chain, limits)
    if exact is not None:
        assert exact.bound == pytest.approx(exact.ledger.cost, rel=1e-9)
        early = choose_fates(chain, limits, most_states=most)
        assert early.ledger.keeps(limits)
        assert early.bound <= exact.ledger.cost * (1 + 1e-9)
        assert early.ledger.cost >= exact.ledger.cost * (1 - 1e-9)


@settings(max_examples=examples(200), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_the_ledger_says_what_playing_the_epoch_through_shows(data: st.DataObject) -> None:
    """For any plan, not the best only."""
    chain = data.draw(chains())
    plan = data.draw(st.sampled_from(all_plans(chain)))
    unit = data.draw(st.integers(1, 6))
    ledger = account(chain, plan, Budgets(0, 0, unit_bytes=unit))
    played = play(chain, plan, unit)
    assert ledger.cost == pytest.approx(played.cost)
    assert (ledger.device_units, ledger.host_units, ledger.ssd_write_units) == played[1:]


@settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_more_budget_never_costs_more(data: st.DataObject) -> None:
    chain = data.draw(chains())
    limits = data.draw(budgets(chain))
    fates = chosen(chain, limits)
    more = data.draw(st.integers(1, 20))
    raises: list[Callable[[Budgets], Budgets]] = [
        lambda b: replace(b, device_bytes=b.device_bytes + more),
        lambda b: replace(b, host_bytes=b.host_bytes + more),
        lambda b: replace(b, ssd_write_bytes=None if b.ssd_write_bytes is None else b.ssd_write_bytes + more),
    ]
    for raised in raises:
        richer = chosen(chain, raised(limits))
        if fates is not None:
            assert richer is not None
            assert richer.ledger.cost <= fates.ledger.cost * (1 + 1e-9)


@settings(max_examples=examples(200), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_the_least_budgets_do_plan_and_a_unit_less_does_not(data: st.DataObject) -> None:
    chain = data.draw(chains())
    limits = data.draw(budgets(chain))
    if chosen(chain, limits) is not None:
        return
    found = remedies(chain, limits)
    assert found, "there is always something that would do"
    for remedy in found:
        assert chosen(chain, remedy) is not None
        raised = [
            (name, have)
            for name in ("device_bytes", "host_bytes", "ssd_write_bytes")
            if (have := getattr(remedy, name)) != getattr(limits, name)
        ]
        assert raised
        for name, have in raised:
            assert have > getattr(limits, name)
            assert chosen(chain, replace(remedy, **{name: have - limits.unit_bytes})) is None


# ---- one chain, by hand ------------------------------------------------------------------------------------

FREE = math.inf
SLOW_SSD = Rates(FREE, FREE, 10.0, 10.0, 10.0, overlap=1.0)


def three(*, again_s: float | None = None, rates: Rates = SLOW_SSD, compute_s: float = 1.0) -> Chain:
    """Three matrices of 4 blocks of 10 bytes; every phase computes for ``compute_s`` and takes a byte of each tier."""
    again = None if again_s is None else Recomputation(Load(compute_s=again_s))
    items = tuple(Intermediate(f"z{i}", 4, 10, False, again) for i in range(3))
    return Chain(items, tuple(Phase(f"phase {p}", Load(compute_s), 1, 1) for p in range(6)), Load(), rates)


def test_what_fits_the_device_stays_there() -> None:
    fates = choose_fates(three(rates=replace(SLOW_SSD, written_byte_s=1e-9)), Budgets(121, 1))
    assert [w.shares for w in fates.waiting()] == [{Fate.DEVICE: 1.0}] * 3
    assert fates.ledger.seconds == 6
    assert fates.ledger.ssd_write_bytes == fates.ledger.ssd_read_bytes == 0


def test_a_part_of_a_matrix_waits_where_there_is_room_for_a_part() -> None:
    """30 bytes of the device and 20 of the host leave 70 bytes for the SSD; 1 s of computing hides 10 each way."""
    fates = choose_fates(three(), Budgets(31, 21))
    ledger = fates.ledger
    assert ledger.ssd_write_bytes == ledger.ssd_read_bytes == 70
    assert ledger.device_units <= 31
    assert ledger.host_units <= 21
    assert ledger.seconds == pytest.approx(2 * 7.0)
    assert sum(w.shares.get(Fate.SSD, 0) for w in fates.waiting()) == pytest.approx(70 / 40)


def test_a_chain_of_recomputations_is_paid_for_in_every_phase_that_needs_it() -> None:
    """With nothing kept, z0 is computed once, z1 after z0 again, z2 after both: six times for three matrices."""
    chain = three(again_s=0.1)
    dropped = (Choice(0, 0, 0, recompute=True),) * 3
    ledger = account(chain, dropped, Budgets(1, 1))
    assert [entry.seconds for entry in ledger.entries] == pytest.approx([1, 1, 1, 1.3, 1.2, 1.1])
    fates = choose_fates(chain, Budgets(1, 1))
    assert fates.choices == dropped
    assert fates.ledger.seconds == pytest.approx(6.6)
    assert all(w.shares == {Fate.RECOMPUTE: 1.0} and not w.handed_over for w in fates.waiting())


def test_with_room_for_one_the_middle_is_kept_where_recomputing_is_dear() -> None:
    """From a kept z1 both others are one recomputation away; from any other, three are needed in all."""
    fates = choose_fates(three(again_s=2.0, rates=replace(SLOW_SSD, ssd_write_bytes_per_s=1.0)), Budgets(41, 1))
    assert [w.shares for w in fates.waiting()] == [{Fate.RECOMPUTE: 1.0}, {Fate.DEVICE: 1.0}, {Fate.RECOMPUTE: 1.0}]
    assert fates.ledger.seconds == pytest.approx(6 + 2 + 2)


def test_reading_and_writing_share_the_ssd() -> None:
    rates = Rates(FREE, FREE, 10.0, 20.0, 12.0, overlap=1.0)
    assert rates.seconds(Load(ssd_read_bytes=60)) == 6
    assert rates.seconds(Load(ssd_write_bytes=60)) == 5
    assert rates.seconds(Load(ssd_read_bytes=60, ssd_write_bytes=60)) == 10


def test_what_does_not_hide_behind_the_longest_work_is_added() -> None:
    rates = Rates(10.0, 10.0, 10.0, 10.0, 10.0, overlap=0.75)
    assert rates.seconds(Load(compute_s=4, up_bytes=20, down_bytes=10, ssd_read_bytes=10)) == 4 + 0.25 * (2 + 1 + 1)


def test_of_equally_fast_plans_the_one_that_writes_less_is_preferred_if_writing_is_priced() -> None:
    """Ten seconds of computing hide all the traffic there is, so only the price tells plans apart."""
    rates = replace(SLOW_SSD, written_byte_s=1e-9)
    fates = choose_fates(three(rates=rates, compute_s=10.0), Budgets(81, 41))
    assert fates.ledger.ssd_write_bytes == 0
    assert fates.ledger.seconds == 60


def test_the_ledger_names_what_each_phase_waits_for() -> None:
    ledger = choose_fates(three(), Budgets(1, 1)).ledger
    assert {entry.busiest for entry in ledger.entries} == {Resource.SSD}
    assert {entry.busiest for entry in choose_fates(three(), Budgets(121, 1)).ledger.entries} == {Resource.COMPUTE}


def test_a_phase_that_does_not_fit_is_named_with_its_need() -> None:
    chain = three()
    big = replace(chain.phases[4], name="backward 1", device_bytes=5_000)
    chain = replace(chain, phases=(*chain.phases[:4], big, chain.phases[5]))
    with pytest.raises(BudgetError, match=r"phase backward 1 needs 5.00 KB on the device.* give --gpu-budget 5000$"):
        choose_fates(chain, Budgets(100, 100))
    assert chosen(chain, Budgets(5000, 100)) is not None


def test_too_few_writes_are_said_with_the_matrix_and_every_way_out() -> None:
    with pytest.raises(BudgetError) as error:
        choose_fates(three(), Budgets(31, 21, ssd_write_bytes=50))
    line = str(error.value)
    assert re.search(r"at least 70 B an epoch .*, \d+ B of them z\d, its budget is 50 B", line)
    assert line.endswith("give --gpu-budget 51 or --host-budget 41 or --max-ssd-writes 70")
