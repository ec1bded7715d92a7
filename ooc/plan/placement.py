# SPDX-License-Identifier: Apache-2.0
"""Static placement: every buffer of a run gets its offset in one of two arenas before anything is allocated.

Buffers have known lifetimes (pass numbers), so this is offline dynamic storage allocation; large buffers
first, each at the lowest offset free for its whole life. The largest ``offset + nbytes`` is the arena's size.
"""

from dataclasses import dataclass

from ooc.plan.grid import align_up
from ooc.plan.workload import Fate


@dataclass(frozen=True, slots=True)
class Demand:
    """``nbytes`` wanted in arena ``tier`` from pass ``first`` to pass ``last``, both included."""

    name: str
    tier: Fate
    nbytes: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Buffer:
    """A demand with its place: ``offset`` bytes into the arena of its tier, 4 KiB aligned."""

    name: str
    tier: Fate
    offset: int
    nbytes: int
    first: int
    last: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


def place(demands: list[Demand]) -> list[Buffer]:
    """Give every demand an offset such that no two buffers alive at once overlap."""
    placed: dict[Fate, list[Buffer]] = {Fate.DEVICE: [], Fate.HOST: []}
    longest_lived_first = sorted(demands, key=lambda d: (-(d.last - d.first > 0) * d.nbytes, -d.nbytes, d.name))
    for demand in longest_lived_first:
        nbytes = align_up(demand.nbytes)
        offset = 0
        alive = (b for b in placed[demand.tier] if b.first <= demand.last and demand.first <= b.last)
        for other in sorted(alive, key=lambda b: b.offset):
            if other.offset - offset >= nbytes:
                break
            offset = max(offset, other.end)
        placed[demand.tier].append(Buffer(demand.name, demand.tier, offset, nbytes, demand.first, demand.last))
    return placed[Fate.DEVICE] + placed[Fate.HOST]


def peak(buffers: list[Buffer], tier: Fate) -> int:
    """Bytes the arena of ``tier`` must have."""
    return max((b.end for b in buffers if b.tier is tier), default=0)
