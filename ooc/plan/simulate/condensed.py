# SPDX-License-Identifier: Apache-2.0
"""A timeline in bounded memory: for equal pieces of time, how busy every resource was and how much memory was in use.

There are at most ``PIECES`` pieces. They begin very short. An epoch that outgrows them makes them twice as long and
half as many, so it ends with between half of them and all, and its length need not be known in advance.
``Condenser.as_dict`` is the form on disk (docs/reports.md), for planned and measured epochs alike.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ooc.plan.simulate.timeline import Event, MemoryUse, PassTime, Resource, Timeline

PIECES = 1024
_FIRST_PIECE_S = 10e-6
_FULL = 1000
"""Shares are stored in per mille, which is finer than anything that is drawn."""
_NEARLY_FULL = 0.98
"""A piece busier than this is drawn as one with its neighbours."""


class Lane:
    """The seconds that a resource is busy and the bytes that it moves, by piece of time. For one thread."""

    __slots__ = ("busy_s", "nbytes", "piece_s")

    def __init__(self) -> None:
        self.piece_s = _FIRST_PIECE_S
        self.busy_s = [0.0] * PIECES
        self.nbytes = [0] * PIECES

    def add(self, start_s: float, end_s: float, nbytes: int = 0) -> None:
        """Add a busy stretch from ``start_s`` to ``end_s`` after the beginning; its bytes count where it ends."""
        if end_s >= self.piece_s * PIECES:
            self.widen(end_s)
        piece_s, busy_s = self.piece_s, self.busy_s
        first, last = int(start_s / piece_s), int(end_s / piece_s)
        if first == last:
            busy_s[first] += end_s - start_s
        else:
            busy_s[first] += (first + 1) * piece_s - start_s
            for piece in range(first + 1, last):
                busy_s[piece] += piece_s
            busy_s[last] += end_s - last * piece_s
        self.nbytes[last] += nbytes

    def widen(self, end_s: float) -> None:
        """Make pieces reach beyond ``end_s``."""
        while end_s >= self.piece_s * PIECES:
            self.busy_s, self.nbytes = _merge_pairs(self.busy_s, sum), _merge_pairs(self.nbytes, sum)
            self.piece_s *= 2


class Peaks:
    """The peak memory in use, by piece of time; 0 if none was recorded. For one thread."""

    __slots__ = ("nbytes", "piece_s")

    def __init__(self) -> None:
        self.piece_s = _FIRST_PIECE_S
        self.nbytes = [0] * PIECES

    def add(self, time_s: float, nbytes: int) -> None:
        """Record that ``nbytes`` are in use at ``time_s`` after the beginning."""
        if time_s >= self.piece_s * PIECES:
            self.widen(time_s)
        piece = int(time_s / self.piece_s)
        if nbytes > self.nbytes[piece]:
            self.nbytes[piece] = nbytes

    def widen(self, end_s: float) -> None:
        """Make pieces reach beyond ``end_s``."""
        while end_s >= self.piece_s * PIECES:
            self.nbytes = _merge_pairs(self.nbytes, max)
            self.piece_s *= 2


class Condenser:
    """The condensed timeline of an epoch of ``program``, put together from lanes. If n lanes belong to one resource,
    each counts as an n-th of it."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._lanes: dict[Resource, list[Lane]] = {}
        self._memory: dict[str, tuple[int, Peaks]] = {}
        self._passes: list[dict[str, Any]] = []

    def lane(self, resource: Resource) -> Lane:
        """Return a new lane for a resource, or for a part of it."""
        lane = Lane()
        self._lanes.setdefault(resource, []).append(lane)
        return lane

    def memory(self, tier: str, limit_bytes: int) -> Peaks:
        """Return the record of the memory ``tier``, with its limit."""
        peaks = Peaks()
        self._memory[tier] = limit_bytes, peaks
        return peaks

    def add_pass(self, title: str, start_s: float, end_s: float, waited_s: float, bound: str) -> None:
        """Add the next pass."""
        times = {"start_s": start_s, "end_s": end_s, "waited_s": waited_s}
        self._passes.append({"name": title, **times, "bound": bound})

    def as_dict(self, epoch_s: float) -> dict[str, Any]:
        """Return plain data: shares in per mille, bytes, and memory, by piece. Trailing zeros are left out."""
        parts: list[Lane | Peaks] = [lane for lanes in self._lanes.values() for lane in lanes]
        parts += [peaks for _, peaks in self._memory.values()]
        end_s = epoch_s
        for _ in range(2):  # to hold the epoch, and so that all pieces are equally long
            for part in parts:
                part.widen(end_s)
            end_s = max((part.piece_s for part in parts), default=0.0) * PIECES / 2
        piece_s = max([_FIRST_PIECE_S, *(part.piece_s for part in parts)])
        return {
            "program": self._program,
            "epoch_s": epoch_s,
            "piece_s": piece_s,
            "passes": self._passes,
            "resources": [_resource(resource, lanes, piece_s) for resource, lanes in self._lanes.items()],
            "memory": [
                {"tier": tier, "limit_bytes": limit, "bytes": _fill_gaps(peaks.nbytes)}
                for tier, (limit, peaks) in self._memory.items()
            ],
        }


def condense(timeline: Timeline) -> dict[str, Any]:
    """Return ``timeline`` in the same form."""
    condenser = Condenser(timeline.program)
    lanes = {resource: condenser.lane(resource) for resource in timeline.busy_s}
    for event in timeline.events:
        lanes[event.resource].add(event.start_s, event.end_s, event.nbytes)
    for use in timeline.memory:
        peaks = condenser.memory(use.tier, use.limit_bytes)
        for time_s, nbytes in use.samples:
            peaks.add(time_s, nbytes)
    for item in timeline.passes:
        condenser.add_pass(item.title, item.start_s, item.end_s, item.waited_s, item.bound.value)
    return condenser.as_dict(timeline.epoch_s)


def expand(found: Mapping[str, Any]) -> Timeline:
    """Return the timeline that `Condenser.as_dict` has written, as exact as a piece. Raises KeyError, TypeError or
    ValueError for anything else."""
    piece_s = float(found["piece_s"])
    passes = tuple(
        PassTime(
            at,
            str(item["name"]),
            float(item["start_s"]),
            float(item["end_s"]),
            float(item["waited_s"]),
            Resource(item["bound"]),
        )
        for at, item in enumerate(found["passes"])
    )
    events: list[Event] = []
    for lane in found["resources"]:
        events += _events(Resource(lane["resource"]), lane["busy"], lane["bytes"], piece_s, passes)
    memory = tuple(
        MemoryUse(
            str(use["tier"]), int(use["limit_bytes"]), tuple((k * piece_s, int(n)) for k, n in enumerate(use["bytes"]))
        )
        for use in found["memory"]
    )
    events.sort(key=lambda event: (event.start_s, event.end_s))
    return Timeline(str(found["program"]), float(found["epoch_s"]), tuple(events), passes, memory)


def _events(
    resource: Resource, busy: Sequence[int], nbytes: Sequence[int], piece_s: float, passes: Sequence[PassTime]
) -> list[Event]:
    """Return one event for each run of fully busy pieces, and one for each other piece."""
    events: list[Event] = []
    at = 0
    open_end = False
    for piece, share in enumerate(busy):
        start_s = piece * piece_s
        while at + 1 < len(passes) and start_s >= passes[at].end_s:
            at += 1
        moved = nbytes[piece] if piece < len(nbytes) else 0
        if not share and not moved:
            open_end = False
            continue
        full = share >= _NEARLY_FULL * _FULL
        end_s = start_s + piece_s * min(share, _FULL) / _FULL
        if open_end and events[-1].at == at:
            events[-1] = events[-1]._replace(end_s=end_s, nbytes=events[-1].nbytes + moved)
        else:
            events.append(Event(resource, start_s, end_s, at, moved))
        open_end = full
    return events


def _resource(resource: Resource, lanes: Sequence[Lane], piece_s: float) -> dict[str, Any]:
    busy_s = [sum(pieces) / len(lanes) for pieces in zip(*(lane.busy_s for lane in lanes), strict=True)]
    moved = [sum(pieces) for pieces in zip(*(lane.nbytes for lane in lanes), strict=True)]
    shares = [min(_FULL, round(_FULL * seconds / piece_s)) for seconds in busy_s]
    return {
        "resource": resource.value,
        "busy_s": sum(busy_s),
        "moved_bytes": sum(moved),
        "busy": _trim_zeros(shares),
        "bytes": _trim_zeros(moved),
    }


def _fill_gaps(nbytes: list[int]) -> list[int]:
    """Return the memory by piece, where a piece without a record has the memory of the piece before."""
    held: list[int] = []
    last = next((n for n in nbytes if n), 0)
    for n in _trim_zeros(nbytes):
        last = n or last
        held.append(last)
    return held


def _trim_zeros(numbers: list[int]) -> list[int]:
    return numbers[: max((end for end, number in enumerate(numbers, start=1) if number), default=0)]


def _merge_pairs(numbers: list[Any], together: Callable[[Any], Any]) -> list[Any]:
    return [together(pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)] + [0] * (PIECES // 2)
