# SPDX-License-Identifier: Apache-2.0
"""A condensed timeline is small however long the epoch was, and keeps its seconds, bytes and peaks."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.plan import UNMEASURED, Limits, make_plan
from ooc.plan.program.replacement import belady, lru_hits
from ooc.plan.simulate.condensed import PIECES, Condenser, condense, expand
from ooc.plan.simulate.simulator import simulate
from ooc.plan.simulate.timeline import Resource
from tests.examples import examples
from tests.plan.policies import Policy, count_hits
from tests.plan.test_planner import WORK
from tests.plan.test_replacement import uses_of

TIMELINE = simulate(make_plan(WORK, Limits(12 << 20, 1 << 20)), WORK, UNMEASURED)


def test_an_epoch_comes_back_as_exact_as_a_piece() -> None:
    found = json.loads(json.dumps(condense(TIMELINE)))
    again = expand(found)
    assert TIMELINE.epoch_s <= found["piece_s"] * PIECES
    for resource, busy_s in TIMELINE.busy_s.items():
        assert again.busy_s[resource] == pytest.approx(busy_s, rel=0.02)
    assert again.moved_bytes == TIMELINE.moved_bytes
    assert again.passes == TIMELINE.passes
    assert [use.peak_bytes for use in again.memory] == [use.peak_bytes for use in TIMELINE.memory]
    starts = [event.start_s for event in again.events]
    assert starts == sorted(starts) and again.events[-1].end_s <= TIMELINE.epoch_s + found["piece_s"]


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0, 2), st.integers(0, 10**9)), min_size=1, max_size=40))
def test_nothing_is_lost_however_long_it_takes(moved: list[tuple[float, float, int]]) -> None:
    """Seconds, bytes and the peak stay; what is kept does not grow."""
    condenser = Condenser("train")
    lane, peaks = condenser.lane(Resource.SSD_READ), condenser.memory("memory", 1)
    now = busy = 0.0
    for pause, seconds, nbytes in moved:
        now += pause
        lane.add(now, now + seconds, nbytes)
        peaks.add(now, nbytes)
        busy, now = busy + seconds, now + seconds
    found = condenser.as_dict(now)
    (resource,) = found["resources"]
    assert resource["busy_s"] == pytest.approx(busy) and resource["moved_bytes"] == sum(n for *_, n in moved)
    assert max([*found["memory"][0]["bytes"], 0]) == max(n for *_, n in moved)
    assert len(resource["busy"]) <= PIECES and len(found["memory"][0]["bytes"]) <= PIECES
    assert max([*resource["busy"], 0]) <= 1000


def test_threads_share_a_resource() -> None:
    """Two of which one computes are half of what there is."""
    condenser = Condenser("train")
    lanes = [condenser.lane(Resource.COMPUTE) for _ in range(2)]
    lanes[0].add(0.0, 1.0)
    assert condenser.as_dict(2.0)["resources"][0]["busy_s"] == pytest.approx(0.5)


@settings(max_examples=examples(100), deadline=None)
@given(blocks=st.lists(st.integers(0, 5), min_size=1, max_size=30), room=st.integers(0, 4), cyclic=st.booleans())
def test_a_cache_that_does_not_know_the_future_finds_no_more(blocks: list[int], room: int, cyclic: bool) -> None:
    """As another writing of it counts, and never more than Belady's."""
    uses = uses_of(blocks, [room] * len(blocks), cyclic=cyclic)
    assert lru_hits(uses) == count_hits(uses, Policy.LRU).hits
    if not cyclic:  # the steady state of a cycle may fall short of the best
        assert lru_hits(uses) <= sum(belady(uses).after)
