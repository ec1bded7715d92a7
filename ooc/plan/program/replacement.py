# SPDX-License-Identifier: Apache-2.0
"""Which blocks stay in memory between two uses, if not all of them can.

The sequence of uses is known. So the fewest blocks are read again if the block given up is always the one used furthest
in the future (L. A. Belady, IBM Systems Journal 5(2), 1966), where the block just used is a candidate, too (bypass).
That is optimal for blocks of one size, which frames give ours. The sequence is a cycle: an epoch begins with what the
one before has left. A program between two epochs forms one sequence with the epoch that follows it, so what it begins
with may stay for that.

A block that is used in two consecutive steps stays in use and takes no room from waiting blocks. The exception is a
block that one pass uses last and the next one copies to a slab buffer first, since that pass works in more frames than
these.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush
from itertools import accumulate

from ooc.plan.program.columns import Columns
from ooc.plan.program.sequence import Span, Use


@dataclass(frozen=True)
class Uses:
    """The spans of one program, ordered by first step, and the frames for blocks between two uses.

    ``capacity[t]``: frames that may be held across the end of step t. ``lasting(block)``: the block exists in every
    epoch (store and constants); if the program is ``cyclic``, such a block's last use is followed by its first use in
    the next epoch. ``spare_writes``: give up blocks that are on the SSD anyway before those that would have to be
    written. ``afterwards``: lasting blocks that may be in memory when the program begins because other programs use
    them, with the steps, counted on from this program's, in which they do. These are blocks the program does not use
    itself, or, if it is not cyclic, all blocks it may leave. ``frames_then``: by the last step of a pass, where the
    next pass stops and how many frames it has for all its blocks (missing: enough).
    """

    spans: Columns[Span]
    steps: int
    capacity: Sequence[int]
    lasting: Callable[[int], bool] = field(compare=False)
    cyclic: bool
    spare_writes: bool = False
    afterwards: Mapping[int, int] = field(default_factory=dict)
    frames_then: Mapping[int, tuple[int, int]] = field(default_factory=dict)

    @cached_property
    def following(self) -> Sequence[int]:
        """The index of the next span with the same block; in the next epoch, plus the number of spans; -1 if there is
        none. Replacement, unrolling and counting all use it."""
        _, _, blocks, _ = self.spans.columns
        count, firsts = len(blocks), self.firsts
        following, last_of = array("i", [-1]) * count, array("i", [-1]) * len(firsts)
        for i, block in enumerate(blocks):
            before = last_of[block]
            if before >= 0:
                following[before] = i
            last_of[block] = i
        for block, i in enumerate(last_of):
            if i >= 0 and (block in self.afterwards or (self.cyclic and self.lasting(block))):
                following[i] = count + firsts[block]
        return following

    def ending(self, step: int) -> Sequence[int]:
        """Return the indices of the spans whose last step is ``step``, ascending."""
        by_end, begins = self.endings
        return by_end[begins[step] : begins[step + 1]]

    @cached_property
    def firsts(self) -> Sequence[int]:
        """The index of each block's first span; -1 if the program does not use the block."""
        _, _, blocks, _ = self.spans.columns
        firsts = array("i", [-1]) * (max(blocks, default=-1) + 1)
        for i, block in zip(range(len(blocks) - 1, -1, -1), reversed(blocks), strict=True):
            firsts[block] = i
        return firsts

    def first_of(self, block: int) -> int:
        """Return the index of the block's first span; -1 if the program does not use it."""
        return self.firsts[block] if block < len(self.firsts) else -1

    @cached_property
    def endings(self) -> tuple[Sequence[int], Sequence[int]]:
        """The indices of all spans ordered by last step, and where those of each step begin."""
        _, lasts, _, _ = self.spans.columns
        stops = array("i", [0]) * (self.steps + 1)
        for step in lasts:
            stops[step + 1] += 1
        begins = array("i", accumulate(stops))
        free, by_end = begins[:], array("i", [0]) * len(lasts)
        for i, step in enumerate(lasts):
            by_end[free[step]] = i
            free[step] += 1
        return by_end, begins


@dataclass(frozen=True, slots=True)
class Kept:
    """The decisions of a replacement policy. ``after[i]``: the block of span i stays until its next use. ``begins``:
    blocks in memory when the program begins; ``carried``: blocks kept beyond its end."""

    after: bytearray
    begins: frozenset[int]
    carried: frozenset[int]


def belady(uses: Uses) -> Kept:
    """Return the decisions with which the fewest blocks are read again, in the steady state from one epoch to the next;
    for a program between two epochs, in it and at the beginning of the following epoch.

    With ``uses.spare_writes`` fewer blocks are written, even if more must be read. A block that was given up once has
    cost its write; from then on it is given up as easily as a block of the store.
    """
    begins = others = frozenset(uses.afterwards)
    may_carry = None if uses.cyclic else others
    while True:
        kept = _belady_epoch(uses, begins, may_carry)
        stays = kept.carried if uses.cyclic else kept.begins
        if stays == begins:
            return kept
        begins = stays  # from the second time on this can only become less, so it ends
        may_carry = begins if uses.cyclic else others


def lru_hits(uses: Uses) -> int:
    """Return how many reads would find their block in the steady state under the policy of giving up the least recently
    used block, which a cache without foreknowledge follows. Blocks that are not needed again take no room here,
    either."""
    spans, count, following = uses.spans, len(uses.spans), uses.following
    held: dict[int, None] = {}  # in order of last use
    hits = 0
    for _ in range(2 if uses.cyclic else 1):
        hits, position = 0, 0
        unbroken: set[int] = set()
        for step in range(uses.steps):
            passed_by = set()
            while position < count and (span := spans[position]).first == step:
                found = span.block in held or position in unbroken
                held.pop(span.block, None)
                hits += found and span.use is not Use.WRITE
                if span.use is Use.COPY and not found:
                    passed_by.add(span.block)
                position += 1
            for i in uses.ending(step):
                block, then = spans[i].block, following[i]
                if then < 0 or block in passed_by:
                    continue
                if then < count and spans[then].first == step + 1:
                    unbroken.add(then)
                else:
                    held[block] = None
            while len(held) > uses.capacity[step]:
                del held[next(iter(held))]
    return hits


_END = -1, -1, -1


def _belady_epoch(uses: Uses, begins: frozenset[int], may_carry: frozenset[int] | None) -> Kept:
    """Return the decisions for one epoch that begins with ``begins`` in memory, as far as there is room. Only blocks in
    ``may_carry`` are kept beyond its end (None: any)."""
    first, _, blocks, use = uses.spans.columns
    steps, count, copy = uses.steps, len(first), int(Use.COPY)
    following, capacity = uses.following, uses.capacity
    by_end, starts = uses.endings
    after = bytearray(count)
    held: dict[int, int] = dict.fromkeys(begins, -1)  # block → the span after which it is kept (-1: there before)
    heap: list[tuple[bool, int, int, int]] = []  # (costs a write, - step of next use, span, block)
    for block in begins:
        i = uses.first_of(block)
        at = first[i] if i >= 0 else uses.afterwards[block]
        heappush(heap, (False, -at, -1, block))
    dropped: set[int] = set()
    to_write: set[int] = set()
    unbroken: set[int] = set()
    passed_by: set[int] = set()
    copied: list[int] = []  # spans of a pass's last step whose blocks the next one's first copies
    position = 0

    def evict(room: int) -> None:
        while len(held) > room:
            _, _, since, block = heappop(heap)
            if held.get(block) == since:
                del held[block]
                if uses.spare_writes:
                    to_write.add(block)
                if since < 0:
                    dropped.add(block)
                else:
                    after[since] = False

    def evict_for_copied(stop: int, frames: int) -> None:
        """Give up the blocks for which the pass until step ``stop`` has no frames beside waiting blocks and those of
        its first two steps; a frame is freed when the third step begins."""
        at_work = set()
        for i in range(position, count):
            if first[i] >= min(step + 3, stop):
                break
            if use[i] != copy:
                at_work.add(blocks[i])
        room = max(0, frames - len(at_work | held.keys()))
        for i in copied[room:]:
            after[i] = False
            unbroken.discard(following[i])
            to_write.add(blocks[i])

    beginning = zip(first, blocks, use, strict=True)
    begins_at, begun, used = next(beginning, _END)
    if steps:
        evict(capacity[-1 if uses.cyclic else 0])
    for step in range(steps):
        if passed_by:
            passed_by.clear()
        while begins_at == step:
            present = held.pop(begun, None) is not None or position in unbroken
            if used == copy and not present:
                passed_by.add(begun)
            position += 1
            begins_at, begun, used = next(beginning, _END)
        for i in by_end[starts[step] : starts[step + 1]]:
            then = following[i]
            if then < 0:
                continue
            block = blocks[i]
            if then >= count and may_carry is not None and block not in may_carry:
                continue
            if block in passed_by:
                continue  # was never in a frame
            if then < count:
                at = first[then]
            else:
                at = uses.afterwards[block] if block in uses.afterwards else steps + first[then - count]
            after[i] = True
            if at == step + 1 and then < count:
                unbroken.add(then)
                if step in uses.frames_then and use[then] == copy:
                    copied.append(i)
                continue  # in use without a break
            held[block] = i
            costs_write = uses.spare_writes and block not in to_write and not uses.lasting(block)
            heappush(heap, (costs_write, -at, i, block))
        if len(held) > capacity[step]:
            evict(capacity[step])
        if copied:
            evict_for_copied(*uses.frames_then[step])
            copied.clear()
    return Kept(after, begins - dropped, frozenset(held) - dropped)
