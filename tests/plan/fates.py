# SPDX-License-Identifier: Apache-2.0
"""What a chain of layers saves for its backward pass: kept on the device, on the host, on the SSD, or recomputed.

A chain of L items has 2L phases: forward 0 … L-1, then backward in reverse. Item i is saved by phase i and read by the
phase that mirrors it, 2L-1-i, so lifetimes are nested: at *depth* k, in phases k and 2L-1-k, items 0 … k are alive and
no others. ``choose_fates`` finds the fates of least time within the budgets by dynamic programming over depths, for
whatever chain of (bytes, seconds, lifetimes) it is given.

The idea of choosing the four together over nested lifetimes is FlexGNN's (KDD 2025), there layer by layer. Here an item
is cut into blocks, each of which may wait elsewhere, recomputation starts from wherever the nearest kept item waits,
and the result is the optimum.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from operator import add
from typing import NamedTuple

from ooc.errors import BudgetError
from ooc.plan.workload import Fate
from ooc.sizes import format_size


@dataclass(frozen=True, slots=True)
class Load:
    """What a phase does: seconds of computing, bytes from host to device (up) and back (down), bytes of the SSD."""

    compute_s: float = 0.0
    up_bytes: int = 0
    down_bytes: int = 0
    ssd_read_bytes: int = 0
    ssd_write_bytes: int = 0

    def __add__(self, other: "Load") -> "Load":
        return Load(*map(add, astuple(self), astuple(other)))


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast the machine is. ``math.inf`` where there is nothing to cross, as between host and device of a CPU.

    ``ssd_both_bytes_per_s`` is what the SSD moves when it reads and writes at once. ``overlap`` is the measured part
    of the shorter work that hides behind the longest, 0 to 1.
    """

    up_bytes_per_s: float = math.inf
    down_bytes_per_s: float = math.inf
    ssd_read_bytes_per_s: float = math.inf
    ssd_write_bytes_per_s: float = math.inf
    ssd_both_bytes_per_s: float = math.inf
    overlap: float = 1.0

    def seconds(self, load: Load) -> float:
        """Seconds of a phase: its longest work, and what of the other work does not hide behind it."""
        read, written = load.ssd_read_bytes, load.ssd_write_bytes
        ssd_s = max(
            read / self.ssd_read_bytes_per_s,
            written / self.ssd_write_bytes_per_s,
            (read + written) / self.ssd_both_bytes_per_s,
        )
        busy = load.compute_s, load.up_bytes / self.up_bytes_per_s, load.down_bytes / self.down_bytes_per_s, ssd_s
        longest = max(busy)
        return longest + (1 - self.overlap) * (sum(busy) - longest)


@dataclass(frozen=True, slots=True)
class Phase:
    """``load`` and memory of a phase whatever becomes of the items: inputs, parameters, temporaries."""

    name: str
    load: Load
    device_bytes: int = 0
    host_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Recomputation:
    """What it takes to compute an item again from the one before it, once that is at hand: ``load`` without traffic of
    the two items, and memory beside the phase's own meanwhile."""

    load: Load
    device_bytes: int = 0
    host_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Saved:
    """``blocks`` blocks of ``block_bytes`` bytes. ``recomputation``: None where it cannot be had again."""

    name: str
    blocks: int
    block_bytes: int
    recomputation: Recomputation | None = None

    @property
    def nbytes(self) -> int:
        return self.blocks * self.block_bytes


@dataclass(frozen=True, slots=True)
class Chain:
    """L items and 2L phases. ``source`` is one read of the input, where recomputation starts from it."""

    items: tuple[Saved, ...]
    phases: tuple[Phase, ...]
    rates: Rates
    source: Load = Load()

    def __post_init__(self) -> None:
        assert len(self.phases) == 2 * len(self.items) > 0, "two phases an item"
        assert all(item.blocks > 0 for item in self.items), "an item has blocks"

    def mirror(self, phase: int) -> int:
        """The backward phase of a forward one, and the other way round."""
        return len(self.phases) - 1 - phase


@dataclass(frozen=True, slots=True)
class Budgets:
    """Memory, counted in units of ``unit_bytes``: sizes are rounded up, budgets down. At 1 nothing is rounded."""

    device_bytes: int
    host_bytes: int
    unit_bytes: int = 1

    def units(self, nbytes: int) -> int:
        """Units that ``nbytes`` take."""
        return -(-nbytes // self.unit_bytes)


class Choice(NamedTuple):
    """What becomes of one item: how many of its blocks wait on the device, on the host and on the SSD; all 0: it is
    recomputed."""

    device: int
    host: int
    ssd: int

    def written(self, block_bytes: int) -> Load:
        """The traffic of saving it."""
        return Load(down_bytes=(self.host + self.ssd) * block_bytes, ssd_write_bytes=self.ssd * block_bytes)

    def read(self, block_bytes: int) -> Load:
        """The traffic of reading it once."""
        return Load(up_bytes=(self.host + self.ssd) * block_bytes, ssd_read_bytes=self.ssd * block_bytes)

    def shares(self) -> dict[Fate, float]:
        """The part of it that meets each fate; they add up to 1."""
        if self == RECOMPUTED:
            return {Fate.RECOMPUTE: 1.0}
        by_fate = zip((Fate.DEVICE, Fate.HOST, Fate.SSD), self, strict=True)
        return {fate: count / sum(self) for fate, count in by_fate if count}


RECOMPUTED = Choice(0, 0, 0)


@dataclass(frozen=True)
class Fates:
    """The choices of least time, one an item, that time, and the peaks in units."""

    choices: tuple[Choice, ...]
    seconds: float
    device_units: int
    host_units: int


def choose_fates(chain: Chain, budgets: Budgets) -> Fates:
    """The fates of least time within ``budgets``; BudgetError where a phase alone takes more than there is."""
    for tier, limit in (("device", budgets.device_bytes), ("host", budgets.host_bytes)):
        needs = {phase.name: phase.device_bytes if tier == "device" else phase.host_bytes for phase in chain.phases}
        name = max(needs, key=lambda name: needs[name])
        if budgets.units(needs[name]) > limit // budgets.unit_bytes:
            raise BudgetError(
                f"phase {name} needs {format_size(needs[name])} on the {tier}, and its budget is {format_size(limit)}"
            )
    fronts = {(-1, RECOMPUTED): [_State(0.0, 0, 0, RECOMPUTED, None)]}
    depths = _Depths(chain, budgets)
    for depth in range(len(chain.items)):
        fronts = depths.next_fronts(depth, fronts)
    best: _State | None = min(state for front in fronts.values() for state in front)
    choices: list[Choice] = []
    while best is not None and best.before is not None:
        choices.append(best.choice)
        best = best.before
    return account(chain, choices[::-1], budgets)


class _State(NamedTuple):
    """After a depth is decided: seconds of its phases and all outer ones, units of what is kept."""

    seconds: float
    device: int
    host: int
    choice: Choice
    before: "_State | None"


_Fronts = dict[tuple[int, Choice], list[_State]]
"""By the nearest kept item (-1: the input) and its choice, which is all that inner depths must know: states of which
none takes no more seconds and no more of both tiers than another."""


class _Depths:
    """The recurrence. A phase's load depends on the choice of its own item and of the nearest kept one, and the memory
    of both phases of a depth on totals: what was decided before is alive until after. So the best completion of a state
    does not depend on what led there."""

    def __init__(self, chain: Chain, budgets: Budgets) -> None:
        self.chain, self.budgets = chain, budgets
        self.recompute_s = lru_cache(maxsize=None)(self._recompute_s)

    def next_fronts(self, depth: int, fronts: _Fronts) -> _Fronts:
        item = self.chain.items[depth]
        reached: _Fronts = {}
        for choice in _ways(item.blocks):
            seconds = self._kept_s(depth, choice)
            taken = [self.budgets.units(count * item.block_bytes) for count in choice[:2]]
            device_room, host_room = (room - units for room, units in zip(self._room(depth), taken, strict=True))
            states = (
                _State(s.seconds + seconds, s.device + taken[0], s.host + taken[1], choice, s)
                for front in fronts.values()
                for s in front
                if s.device <= device_room and s.host <= host_room
            )
            reached[depth, choice] = _undominated(states)
        for (ancestor, waits), front in fronts.items() if item.recomputation is not None else ():
            seconds = self.recompute_s(depth, ancestor, waits)
            device_room, host_room = self._room(depth, ancestor)
            reached[ancestor, waits] = [
                _State(s.seconds + seconds, s.device, s.host, RECOMPUTED, s)
                for s in front
                if s.device <= device_room and s.host <= host_room
            ]
        return {key: front for key, front in reached.items() if front}

    def _kept_s(self, depth: int, choice: Choice) -> float:
        phases, size = self.chain.phases, self.chain.items[depth].block_bytes
        forward, backward = phases[depth].load, phases[self.chain.mirror(depth)].load
        seconds = self.chain.rates.seconds
        return seconds(forward + choice.written(size)) + seconds(backward + choice.read(size))

    def _recompute_s(self, depth: int, ancestor: int, waits: Choice) -> float:
        phases, seconds = self.chain.phases, self.chain.rates.seconds
        backward = phases[self.chain.mirror(depth)].load + _recomputing(self.chain, ancestor, waits, depth)
        return seconds(phases[depth].load) + seconds(backward)

    def _room(self, depth: int, ancestor: int | None = None) -> tuple[int, int]:
        """Units of device and host that both phases of a depth leave; ``ancestor``: beside recomputing from there."""
        forward, backward = self.chain.phases[depth], self.chain.phases[self.chain.mirror(depth)]
        device, host = _recomputing_units(self.chain, ancestor, depth, self.budgets) if ancestor is not None else (0, 0)
        units = self.budgets.units
        device = max(units(forward.device_bytes), units(backward.device_bytes) + device)
        host = max(units(forward.host_bytes), units(backward.host_bytes) + host)
        unit = self.budgets.unit_bytes
        return self.budgets.device_bytes // unit - device, self.budgets.host_bytes // unit - host


def account(chain: Chain, choices: Sequence[Choice], budgets: Budgets) -> Fates:
    """What ``choices`` come to, phase by phase; of ``budgets`` only the unit matters."""
    seconds, peaks, depths = 0.0, [0, 0], len(chain.items)
    for number, phase in enumerate(chain.phases):
        depth = min(number, chain.mirror(number))
        choice, size = choices[depth], chain.items[depth].block_bytes
        units = [budgets.units(phase.device_bytes), budgets.units(phase.host_bytes)]
        load = phase.load
        if number < depths:
            load += choice.written(size)
        elif choice != RECOMPUTED:
            load += choice.read(size)
        else:
            ancestor = max((at for at in range(depth) if choices[at] != RECOMPUTED), default=-1)
            load += _recomputing(chain, ancestor, choices[ancestor], depth)
            units = [a + b for a, b in zip(units, _recomputing_units(chain, ancestor, depth, budgets), strict=True)]
        for tier in range(2):
            alive = zip(choices[: depth + 1], chain.items, strict=False)
            units[tier] += sum(budgets.units(kept[tier] * item.block_bytes) for kept, item in alive)
            peaks[tier] = max(peaks[tier], units[tier])
        seconds += chain.rates.seconds(load)
    return Fates(tuple(choices), seconds, *peaks)


def _ways(blocks: int) -> Iterator[Choice]:
    """To keep ``blocks`` blocks."""
    for device in range(blocks, -1, -1):
        for host in range(blocks - device, -1, -1):
            yield Choice(device, host, blocks - device - host)


def _recomputing(chain: Chain, ancestor: int, waits: Choice, depth: int) -> Load:
    """Reading the nearest kept item, and recomputing all after it up to ``depth``, one after the other."""
    start = chain.source if ancestor < 0 else waits.read(chain.items[ancestor].block_bytes)
    work = (item.recomputation for item in chain.items[ancestor + 1 : depth + 1])
    return sum((one.load for one in work if one is not None), start)


def _recomputing_units(chain: Chain, ancestor: int, depth: int, budgets: Budgets) -> tuple[int, int]:
    """What the neediest of them takes meanwhile."""
    work = [one for item in chain.items[ancestor + 1 : depth + 1] if (one := item.recomputation) is not None]
    return max(budgets.units(w.device_bytes) for w in work), max(budgets.units(w.host_bytes) for w in work)


def _undominated(states: Iterator[_State]) -> list[_State]:
    """By rising seconds, those that take less of the device or less of the host than all before."""
    found: list[_State] = []
    devices: list[int] = []  # rising, and the least host units of any state with no more of the device, falling
    hosts: list[int] = []
    for state in sorted(states, key=lambda s: s[:3]):
        at = bisect_right(devices, state.device)
        if at and hosts[at - 1] <= state.host:
            continue
        at = bisect_left(devices, state.device)
        stop = at
        while stop < len(devices) and hosts[stop] >= state.host:
            stop += 1
        devices[at:stop], hosts[at:stop] = [state.device], [state.host]
        found.append(state)
    return found
