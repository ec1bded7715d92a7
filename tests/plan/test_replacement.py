# SPDX-License-Identifier: Apache-2.0
"""Belady's replacement reads the fewest blocks again: compared with every other choice there is, and with the rest."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.plan.program.program import found_in_memory
from ooc.plan.program.replacement import Kept, Uses, belady
from ooc.plan.program.sequence import Span, Use, spans_of
from tests.examples import examples
from tests.plan.policies import Policy, count_hits


def uses_of(blocks: list[int], capacity: list[int], *, cyclic: bool = False) -> Uses:
    """One read a step."""
    spans = [Span(i, i, block, Use.READ) for i, block in enumerate(blocks)]
    return Uses(spans_of(spans), len(blocks), capacity, lambda block: cyclic, cyclic)


def hits(uses: Uses, after: tuple[bool, ...] | list[bool]) -> int | None:
    """Uses that find their block in memory; None if more are kept than there is room for at some time."""
    count = len(uses.spans)
    held_over = [0] * count
    found = 0
    for i, then in enumerate(uses.following):
        if not after[i]:
            continue
        if then < 0:
            return None
        found += 1
        last = uses.spans[i].last
        end = uses.spans[then % count].first + (count if then >= count else 0)
        if end == last + 1 and then < count:
            continue  # in use without a break
        for step in range(last, end):
            held_over[step % count] += 1
    return found if all(h <= c for h, c in zip(held_over, uses.capacity, strict=True)) else None


sequences = st.lists(st.integers(0, 4), min_size=1, max_size=9)


@settings(max_examples=examples(300), deadline=None)
@given(data=st.data(), blocks=sequences, cyclic=st.booleans())
def test_no_other_choice_has_more_hits(data: st.DataObject, blocks: list[int], cyclic: bool) -> None:
    """Against all 2^n ways to keep or not to keep, with room that changes from step to step; a cycle too, where what
    is carried over the end is kept small enough for a steady state and may fall short of the best by that much."""
    capacity = data.draw(st.lists(st.integers(0, 3), min_size=len(blocks), max_size=len(blocks)))
    uses = uses_of(blocks, capacity, cyclic=cyclic)
    kept = belady(uses)
    mine = hits(uses, kept.after)
    assert mine is not None, "more is kept than there is room for"
    following = uses.following
    if cyclic:
        count = len(blocks)
        within = [then < count or span.block in kept.carried for then, span in zip(following, uses.spans, strict=True)]
    else:
        within = [True] * len(blocks)
    choices = [(False, True) if then >= 0 and ok else (False,) for then, ok in zip(following, within, strict=True)]
    best = max(h for after in product(*choices) if (h := hits(uses, after)) is not None)
    assert mine == best


@pytest.mark.parametrize(("frames", "stays"), [(4, 0), (5, 1), (7, 3), (9, 3)])
def test_blocks_that_are_copied_first_stay_where_the_next_pass_has_frames_for_them(frames: int, stays: int) -> None:
    """Beside the two that each of its first two steps reads: frames come back when the third one begins."""
    written = [Span(0, 0, block, Use.WRITE) for block in range(3)]
    copied = [Span(1, 1, block, Use.COPY) for block in range(3)]
    read = [Span(step, step, 2 * step + block, Use.READ) for step in range(1, 4) for block in (1, 2)]
    spans = sorted([*written, *copied, *read])
    kept = belady(Uses(spans_of(spans), 4, [0] * 4, lambda block: False, cyclic=False, frames_then={0: (4, frames)}))
    assert sum(kept.after) == stays


@settings(max_examples=examples(300), deadline=None)
@given(data=st.data(), blocks=sequences, there=st.lists(st.integers(0, 6), max_size=6, unique=True))
def test_between_two_epochs_no_other_choice_has_more_hits(
    data: st.DataObject, blocks: list[int], there: list[int]
) -> None:
    """A program that may find the blocks ``there``, used afterwards in that order: as one sequence with an epoch before
    it that uses them, and the one behind it."""
    count, before = len(blocks), len(there)
    capacity = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    spans = [Span(i, i, block, Use.READ) for i, block in enumerate(blocks)]
    afterwards = {block: count + i for i, block in enumerate(there)}
    uses = Uses(spans_of(spans), count, capacity, lambda block: True, cyclic=False, afterwards=afterwards)
    kept = belady(uses)
    assert kept.begins <= {*there} and kept.carried <= {*there}
    whole = [Span(i, i, block, Use.READ) for i, block in enumerate(there)]  # then a step without a use
    whole += [Span(before + 1 + i, before + 1 + i, block, Use.READ) for i, block in enumerate([*blocks, 99, *there])]
    room = [9] * before + [capacity[0], *capacity] + [9] * (1 + before)
    best = belady(Uses(spans_of(whole), len(room), room, lambda block: False, cyclic=False))
    assert sum(found_in_memory(uses, kept)) + len(kept.carried) == sum(best.after)


@settings(max_examples=examples(100), deadline=None)
@given(data=st.data(), blocks=st.lists(st.integers(0, 12), min_size=1, max_size=60), cyclic=st.booleans())
def test_the_policies_that_cannot_look_ahead_have_no_more_hits(
    data: st.DataObject, blocks: list[int], cyclic: bool
) -> None:
    room = data.draw(st.integers(0, 8))
    uses = uses_of(blocks, [room] * len(blocks))
    best = count_hits(uses, Policy.BELADY)
    assert best.reads == len(blocks)
    for policy in (Policy.LRU, Policy.LFU, Policy.RANDOM):
        assert count_hits(uses, policy).hits <= best.hits
    if room >= 12:
        assert best.hits == len(blocks) - len(set(blocks))


def test_a_sweep_repeated_in_one_direction_keeps_what_fits_where_lru_keeps_nothing() -> None:
    uses = uses_of(list(range(10)), [4] * 10, cyclic=True)
    assert count_hits(uses, Policy.BELADY).hits == 4
    assert count_hits(uses, Policy.LRU).hits == 0


def test_a_block_copied_past_the_frames_is_not_kept_after() -> None:
    spans = [Span(0, 0, 1, Use.COPY), Span(1, 1, 1, Use.READ)]
    assert belady(Uses(spans_of(spans), 2, [5, 5], lambda block: True, False)) == Kept(
        bytearray(2), frozenset(), frozenset()
    )
