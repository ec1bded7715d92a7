# SPDX-License-Identifier: Apache-2.0
"""The dynamic program: choices from the outermost depth to the innermost, the best for every state that can matter.

A state after depth k is what deeper phases must know: how the intermediate of depth k waits (the next phase may read
it), from which kept ancestor a recomputation would start, and the units of device, host and SSD writes that are gone.
Of two states alike but for cost and units, the one that has no less of either is dropped; so is every state that a
lower bound on the rest takes past a plan known already. Neither loses the optimum.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from ooc.plan.bounds import Bound, Prices, improve
from ooc.plan.chain import Choice
from ooc.plan.levels import Level, Levels

_BOUNDS = 6
"""Lower bounds that every state is held against; the more, the fewer states remain and the longer each takes."""
_STEPS = 24
"""Subgradient steps before and after the first narrow search."""
_WIDTHS = (20, 400, 4000, None)
"""States kept at each depth, search after search: a narrow one finds a good plan soon, which prunes the next."""
_HEIRS = 3
"""States that one state leads to, of either kind, in a narrow search, so that those kept do not all come of a few."""
_ALIKE = 0.1
"""Bounds whose prices all differ by less than this part prune much the same."""


class State(NamedTuple):
    """After a depth is decided. ``waits``: the number of its choice; ``ancestor`` is kept as ``ancestor_waits``.

    ``device``, ``host`` and ``written`` count what is kept until the backward phase; ``handed_device`` and
    ``handed_host`` what is there for the next phase only. ``least``: no completion costs less.
    """

    least: float
    cost: float
    device: int
    host: int
    written: int
    waits: int
    ancestor: int
    ancestor_waits: int
    handed_device: int
    handed_host: int
    before: "State | None"


_ROOT = State(0.0, 0.0, 0, 0, 0, 0, -1, 0, 0, 0, None)


class Found(NamedTuple):
    """What a search came to: the cheapest choices (None: none cost less than asked), and the states it looked at.

    Nothing costs less than ``bound``.
    """

    choices: tuple[Choice, ...] | None
    states: int
    bound: float


def cheapest(levels: Levels, *, cost: float, enough: float = 0.0, most_states: int | None = None) -> Found:
    """The choices that cost least, if they cost less than ``cost``; any that cost no more than ``enough`` will do.

    After ``most_states`` states the search gives up: then there may be cheaper ones, down to the bound.
    """
    bounds = improve(levels, Bound(levels, Prices.free(levels.chain.depth)), cost=cost, steps=_STEPS)
    best: State | None = None
    states = 0
    complete = False
    for width in _WIDTHS:
        bounds.sort(key=attrgetter("total"), reverse=True)
        search = _Search(levels, _different(bounds), cost)
        state, complete = search.run(width, None if most_states is None else most_states - states)
        states += search.states
        if state is not None:
            best, cost = state, state.cost
        if complete or cost <= enough or (most_states is not None and states >= most_states):
            break
        bounds += improve(levels, bounds[0], cost=cost, steps=_STEPS)[1:]
    bound = levels.better(cost) if complete else max(bound.total for bound in bounds)
    return Found(None if best is None else _choices(levels, best), states, min(bound, cost))


def _different(bounds: Sequence[Bound]) -> list[Bound]:
    """The best of ``bounds``, and the next best whose prices differ."""
    chosen: list[Bound] = []
    for bound in bounds:
        if len(chosen) < _BOUNDS and not any(_alike(bound, other) for other in chosen):
            chosen.append(bound)
    return chosen


def _alike(one: Bound, other: Bound) -> bool:
    pairs = ((one.device[0], other.device[0]), (one.host[0], other.host[0]), (one.writes[0], other.writes[0]))
    return all(abs(a - b) <= _ALIKE * max(a, b) for a, b in pairs)


def _choices(levels: Levels, last: State) -> tuple[Choice, ...]:
    """What led to ``last``."""
    choices = []
    state: State | None = last
    for k in range(levels.chain.depth - 1, -1, -1):
        assert state is not None
        level = levels.levels[k]
        waits = level.choices[state.waits] if state.waits != level.nothing else Choice(0, 0, 0)
        recompute = state.ancestor != k
        choices.append(Choice(waits.device, waits.host, waits.ssd, recompute))
        state = state.before
    return tuple(reversed(choices))


class _Search:
    """One sweep over the depths for something cheaper than ``cost``."""

    def __init__(self, levels: Levels, bounds: Sequence[Bound], cost: float) -> None:
        self.levels = levels
        self.main, self.others = bounds[0], bounds[1:]
        self.ceiling = levels.better(cost)
        self.states = 0
        self.ordered: dict[tuple[int, int], list[tuple[float, int]]] = {}

    def run(self, width: int | None, most_states: int | None) -> tuple[State | None, bool]:
        """The best last state, and whether none was left out that could have been better.

        ``width`` states are kept at each depth; the search gives up after ``most_states``. None: no limit.
        """
        complete, limited = True, self.levels.write_room is not None
        states = [_ROOT]
        for k in range(self.levels.chain.depth):
            last = k + 1 == self.levels.chain.depth
            groups: dict[object, list[State]] = {}
            for state in states:
                if most_states is not None and self.states >= most_states:
                    return None, False
                children, all_of_them = self._children(state, k, None if width is None else _HEIRS)
                complete = complete and all_of_them
                for child in children:
                    self.states += 1
                    if last:
                        self.ceiling = min(self.ceiling, self.levels.better(child.cost))
                    groups.setdefault(self._alike(child, k), []).append(child)
            states = [state for group in groups.values() for state in _undominated(group, limited=limited)]
            states.sort(key=attrgetter("least"))
            if width is not None and len(states) > width:
                states, complete = states[:width], False
        return min(states, key=attrgetter("cost"), default=None), complete

    def _alike(self, state: State, k: int) -> object:
        """States with the same key have the same future, but for what their units allow."""
        waits = self._row(k + 1, state.waits) if k + 1 < self.levels.chain.depth else None
        if self.levels.recomputation(k + 1) is None:
            return waits, state.handed_device, state.handed_host
        return waits, state.handed_device, state.handed_host, state.ancestor, state.ancestor_waits

    def _children(self, state: State, k: int, heirs: int | None) -> tuple[list[State], bool]:
        """States after depth k that follow ``state``, at most ``heirs`` of either kind, and whether that is all."""
        kinds = [list(self._kept(state, k))]
        if self.levels.recomputation(k) is not None:
            kinds.append(list(self._recomputed(state, k)))
        if heirs is None or all(len(kind) <= heirs for kind in kinds):
            return [child for kind in kinds for child in kind], True
        return [child for kind in kinds for child in sorted(kind, key=attrgetter("least"))[:heirs]], False

    def _kept(self, state: State, k: int) -> Iterator[State]:
        level, main = self.levels.levels[k], self.main
        base = state.cost + main.offset[k] + main.device[k] * state.device + main.host[k] * state.host
        base += main.writes[k] * state.written
        device_room = min(level.device_room, level.forward_device_room - state.handed_device) - state.device
        host_room = min(level.host_room, level.forward_host_room - state.handed_host) - state.host
        write_room = self.levels.write_room
        row = level.forward[state.waits]
        for rest, y in self._by_least(k, state.waits):
            least = base + rest
            if least >= self.ceiling:
                return
            if level.device[y] > device_room or level.host[y] > host_room:
                continue
            written = state.written + level.written[y]
            if write_room is not None and written > write_room:
                continue
            device, host = state.device + level.device[y], state.host + level.host[y]
            cost = state.cost + row[y] + level.backward[y]
            for bound in self.others:
                held = bound.device[k + 1] * device + bound.host[k + 1] * host + bound.writes[k + 1] * written
                least = max(least, cost + bound.kept[k + 1][y] + bound.offset[k + 1] + held)
                if least >= self.ceiling:
                    break
            else:
                yield State(least, cost, device, host, written, y, k, y, 0, 0, state)

    def _by_least(self, k: int, waits: int) -> list[tuple[float, int]]:
        """The choices of depth k, those first that look best at the main bound's prices."""
        level, waits = self.levels.levels[k], self._row(k, waits)
        order = self.ordered.get((k, waits))
        if order is None:
            row, value = level.forward[waits], self.main.value[k]
            order = sorted((row[y] + value[y], y) for y in range(level.nothing))
            self.ordered[k, waits] = order
        return order

    def _row(self, k: int, waits: int) -> int:
        """The number of a choice before depth k, or of one that costs the forward phase the same."""
        forward = self.levels.levels[k].forward
        return 0 if forward[0] is forward[-1] else waits

    def _recomputed(self, state: State, k: int) -> Iterator[State]:
        levels, level = self.levels, self.levels.levels[k]
        device_left, host_left = levels.again_room(state.ancestor, k)
        if state.device > device_left or state.host > host_left:
            return
        again = state.cost + levels.again(state.ancestor, state.ancestor_waits, k)
        row = level.forward[state.waits]
        if self._least(again + row[-1], state, k, None, state.written) >= self.ceiling:
            return
        device_room = level.forward_device_room - state.device - state.handed_device
        host_room = level.forward_host_room - state.host - state.handed_host
        for z in self._handed_over(level):
            device, host, written = level.device[z], level.host[z], state.written + level.written[z]
            if device > device_room or host > host_room:
                continue
            if levels.write_room is not None and written > levels.write_room:
                continue
            cost = again + row[z]
            least = self._least(cost, state, k, z, written)
            if least < self.ceiling:
                yield State(
                    least, cost, state.device, state.host, written, z, state.ancestor, state.ancestor_waits, device,
                    host, state,
                )  # fmt: skip

    def _handed_over(self, level: Level) -> Sequence[int]:
        return range(level.nothing) if level.item.read_next else (level.nothing,)

    def _least(self, cost: float, state: State, k: int, waits: int | None, written: int) -> float:
        """No completion costs less if depth k is recomputed, handed over as ``waits`` (None: at no cost)."""
        levels = self.levels
        least = 0.0
        for bound in (self.main, *self.others):
            rest = bound.recomputed[k + 1][state.ancestor][state.ancestor_waits]
            if waits is not None and k + 1 < levels.chain.depth:
                rest = bound.after[k + 1][waits]
                if levels.recomputation(k + 1) is not None:
                    again = levels.again(state.ancestor, state.ancestor_waits, k + 1)
                    again += bound.recomputed[k + 2][state.ancestor][state.ancestor_waits]
                    rest = min(rest, levels.levels[k + 1].forward[waits][-1] + again)
            held = bound.device[k + 1] * state.device + bound.host[k + 1] * state.host + bound.writes[k + 1] * written
            least = max(least, cost + rest + bound.offset[k + 1] + held)
            if least >= self.ceiling:
                break
        return least


def _undominated(states: list[State], *, limited: bool) -> list[State]:
    """Those of states alike that no other, or at least none of a few others, matches in cost and all units."""
    if len(states) == 1:
        return states
    states.sort(key=lambda s: (s.cost, s.device, s.host, s.written))
    if not limited:
        return list(_staircase(states))
    front: dict[tuple[int, int, int], State] = {}
    for state in states:
        front.setdefault((state.device, state.host, state.written), state)
    return list(front.values())


def _staircase(states: list[State]) -> Iterator[State]:
    """Of states by rising cost, those that take less of the device or less of the host than all before."""
    devices: list[int] = []  # rising, and the least host units of any state with no more of the device, falling
    hosts: list[int] = []
    for state in states:
        at = bisect_right(devices, state.device)
        if at and hosts[at - 1] <= state.host:
            continue
        at = bisect_left(devices, state.device)
        stop = at
        while stop < len(devices) and hosts[stop] >= state.host:
            stop += 1
        devices[at:stop], hosts[at:stop] = [state.device], [state.host]
        yield state
