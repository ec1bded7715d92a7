# SPDX-License-Identifier: Apache-2.0
"""Buffers that live at the same time never share a byte."""

from hypothesis import given
from hypothesis import strategies as st

from ooc.plan.placement import Demand, peak, place
from ooc.plan.workload import Fate

lifetimes = st.tuples(st.integers(0, 8), st.integers(0, 8)).map(sorted)
demands = st.lists(
    st.tuples(st.sampled_from([Fate.DEVICE, Fate.HOST]), st.integers(1, 40_000), lifetimes), max_size=25
).map(lambda rows: [Demand(str(i), tier, nbytes, first, last) for i, (tier, nbytes, (first, last)) in enumerate(rows)])


@given(demands)
def test_buffers_alive_together_do_not_overlap(wanted: list[Demand]) -> None:
    buffers = place(wanted)
    assert sorted(b.name for b in buffers) == sorted(d.name for d in wanted)
    for i, one in enumerate(buffers):
        assert one.offset % 4096 == 0
        for other in buffers[:i]:
            together = one.first <= other.last and other.first <= one.last and one.tier is other.tier
            assert not (together and one.offset < other.end and other.offset < one.end)


@given(demands)
def test_the_peak_is_at_least_what_is_alive_at_once_and_at_most_everything(wanted: list[Demand]) -> None:
    buffers = place(wanted)
    for tier in (Fate.DEVICE, Fate.HOST):
        own = [b for b in buffers if b.tier is tier]
        alive = [sum(b.nbytes for b in own if b.first <= at <= b.last) for at in range(9)]
        assert max(alive) <= peak(buffers, tier) <= sum(b.nbytes for b in own)


def test_buffers_one_after_the_other_share_a_place() -> None:
    buffers = place([Demand("a", Fate.HOST, 8192, 0, 1), Demand("b", Fate.HOST, 8192, 2, 3)])
    assert peak(buffers, Fate.HOST) == 8192
