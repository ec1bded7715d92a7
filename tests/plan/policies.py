# SPDX-License-Identifier: Apache-2.0
"""What other policies of replacement would keep, to hold Belady's against."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ooc.plan.program.replacement import Uses, belady
from ooc.plan.program.sequence import Use


class Policy(Enum):
    """What to give up when frames run out."""

    BELADY = "belady"
    LRU = "lru"
    LFU = "lfu"
    RANDOM = "random"


@dataclass(frozen=True, slots=True)
class Hits:
    """Of ``reads`` in one epoch, ``hits`` found their block in memory. ``writes``: blocks that had to be written."""

    reads: int
    hits: int
    writes: int

    @property
    def rate(self) -> float:
        return self.hits / self.reads if self.reads else 1.0


def count_hits(uses: Uses, policy: Policy, *, seed: int = 0) -> Hits:
    """One epoch under ``policy``, in the steady state (the second of two for the policies that cannot look ahead)."""
    following, count = uses.following, len(uses.spans)
    if policy is Policy.BELADY:
        kept = belady(uses)
        found = [False] * count
        given_up: set[int] = set()
        for i, then in enumerate(following):
            if then >= 0 and kept.after[i]:
                found[then % count] = True
            elif then >= 0:
                given_up.add(uses.spans[i].block)
    else:
        found, given_up = _online(uses, following, policy, seed)
    reads = [i for i, span in enumerate(uses.spans) if span.use is not Use.WRITE]
    writes = sum(not uses.lasting(block) for block in given_up)
    return Hits(len(reads), sum(found[i] for i in reads), writes)


def _online(uses: Uses, following: Sequence[int], policy: Policy, seed: int) -> tuple[list[bool], set[int]]:
    """LRU, LFU or random replacement: every block used is kept, and one pays for it. Dead blocks go for free.

    For each span whether its block was there, and the blocks given up that were needed again.
    """
    spans, count = uses.spans, len(uses.spans)
    drawn = seed
    frequency: dict[int, int] = defaultdict(int)
    held: dict[int, int] = {}  # block → last span; in order of last use
    found = [False] * count
    given_up: set[int] = set()
    for _ in range(2 if uses.cyclic else 1):
        given_up = set()
        unbroken: set[int] = set()
        position = 0
        for step in range(uses.steps):
            passed_by: set[int] = set()
            while position < count and spans[position].first == step:
                span = spans[position]
                found[position] = held.pop(span.block, None) is not None or position in unbroken
                if span.use is Use.COPY and not found[position]:
                    passed_by.add(span.block)
                position += 1
            for i in uses.ending(step):
                frequency[spans[i].block] += 1
                then = following[i]
                if 0 <= then < count and spans[then].first == step + 1 and spans[i].block not in passed_by:
                    unbroken.add(then)
                elif then >= 0 and spans[i].block not in passed_by:
                    held[spans[i].block] = i
                elif then >= 0:
                    given_up.add(spans[i].block)
            while len(held) > uses.capacity[step]:
                match policy:
                    case Policy.LRU:
                        victim = next(iter(held))
                    case Policy.LFU:
                        victim = min(held, key=lambda block: frequency[block])
                    case Policy.RANDOM | Policy.BELADY:
                        drawn = (1_103_515_245 * drawn + 12_345) % (1 << 31)  # as in the C standard's rand
                        victim = list(held)[(drawn >> 8) % len(held)]
                del held[victim]
                given_up.add(victim)
    return found, given_up
