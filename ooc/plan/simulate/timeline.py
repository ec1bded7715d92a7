# SPDX-License-Identifier: Apache-2.0
"""The timeline of a program on a machine, as plain data: for tables, drawings and comparison with real runs, and in
Chrome's trace event format for Perfetto (ui.perfetto.dev)."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import chain, repeat
from typing import Any, NamedTuple

from ooc.plan.program.received import Received, exposed_s


class Resource(Enum):
    """What work occupies. Each resource does one thing at a time, and all of them work side by side."""

    COMPUTE = "compute"
    HOST_COPY = "host copies"
    TO_DEVICE = "to device"
    TO_HOST = "to host"
    SSD_READ = "SSD reads"
    SSD_WRITE = "SSD writes"
    LINK = "link"
    """The link from the other processes."""


class Event(NamedTuple):
    """A stretch in which ``resource`` is busy with ``nbytes`` bytes (0: with computing) for pass ``at``, in seconds
    from the start."""

    resource: Resource
    start_s: float
    end_s: float
    at: int
    nbytes: int


class PassTime(NamedTuple):
    """The time of one pass. ``waited_s``: seconds in which nothing was computed; ``bound``: what it waited for, or
    computing."""

    at: int
    title: str
    start_s: float
    end_s: float
    waited_s: float
    bound: Resource


class MemoryUse(NamedTuple):
    """The bytes of one tier in use, from each time until the next; never more than ``limit_bytes``."""

    tier: str
    limit_bytes: int
    samples: tuple[tuple[float, int], ...]

    @property
    def peak_bytes(self) -> int:
        return max((nbytes for _, nbytes in self.samples), default=0)


@dataclass(frozen=True)
class Timeline:
    """The timeline of one epoch. ``epoch_s`` is when the last byte is written."""

    program: str
    epoch_s: float
    events: tuple[Event, ...]
    passes: tuple[PassTime, ...]
    memory: tuple[MemoryUse, ...]

    @cached_property
    def busy_s(self) -> dict[Resource, float]:
        """The seconds that each resource is busy; idle ones are left out."""
        busy: dict[Resource, float] = {}
        for event in self.events:
            busy[event.resource] = busy.get(event.resource, 0.0) + event.end_s - event.start_s
        return {resource: busy[resource] for resource in Resource if resource in busy}

    @cached_property
    def moved_bytes(self) -> dict[Resource, int]:
        """The bytes that each resource moves; those that move none are left out."""
        moved: dict[Resource, int] = {}
        for event in self.events:
            if event.nbytes:
                moved[event.resource] = moved.get(event.resource, 0) + event.nbytes
        return {resource: moved[resource] for resource in Resource if resource in moved}

    @cached_property
    def ssd_busy_s(self) -> float:
        """The seconds in which the SSD is busy."""
        moving = [e for e in self.events if e.resource in (Resource.SSD_READ, Resource.SSD_WRITE)]
        busy_s, until = 0.0, 0.0
        for event in sorted(moving, key=lambda event: event.start_s):
            busy_s += max(0.0, event.end_s - max(until, event.start_s))
            until = max(until, event.end_s)
        return busy_s

    @property
    def wait_s(self) -> float:
        """The seconds in which nothing is computed."""
        return sum(item.waited_s for item in self.passes)

    @property
    def bottleneck(self) -> Resource:
        """The resource that is busy longest."""
        return max(self.busy_s, key=lambda resource: self.busy_s[resource], default=Resource.COMPUTE)


class Stretch(NamedTuple):
    """Adjacent events of one pass: busy for ``busy_s`` of the time from ``start_s`` to ``end_s``."""

    start_s: float
    end_s: float
    busy_s: float
    at: int
    nbytes: int


def stretches(events: Iterable[Event], shortest_s: float, longest_s: float) -> Iterator[Stretch]:
    """Return the events of one resource for drawing: events less than ``shortest_s`` apart are joined, up to
    ``longest_s``."""
    held: Stretch | None = None
    for event in events:
        busy = event.end_s - event.start_s
        near = held is not None and held.at == event.at and event.start_s - held.end_s < shortest_s
        if held is not None and near and (event.end_s - held.start_s < longest_s or event.start_s <= held.end_s):
            end = max(held.end_s, event.end_s)
            held = Stretch(held.start_s, end, held.busy_s + busy, held.at, held.nbytes + event.nbytes)
            continue
        if held is not None:
            yield held
        held = Stretch(event.start_s, event.end_s, busy, event.at, event.nbytes)
    if held is not None:
        yield held


def merge_timelines(
    timelines: Sequence[Timeline], received: Sequence[Sequence[Sequence[Received]]], link_bytes_per_s: float
) -> list[Timeline]:
    """Return the epochs of several processes that train one graph, on one clock. All end a pass before any begins the
    next one, and what a process receives is hidden behind its computing as far as possible. ``received`` is by process
    and pass. Memory is left out."""
    begins = [0.0]
    for at, passes in enumerate(zip(*(one.passes for one in timelines), strict=True)):
        computed = [item.end_s - item.start_s for item in passes]
        waits = (exposed_s(one[at], s, link_bytes_per_s) for one, s in zip(received, computed, strict=True))
        begins.append(begins[-1] + max(s + wait for s, wait in zip(computed, waits, strict=True)))
    written = max(one.epoch_s - one.passes[-1].end_s for one in timelines)
    return [
        _align_clocks(timeline, one, begins, begins[-1] + written, link_bytes_per_s)
        for timeline, one in zip(timelines, received, strict=True)
    ]


def _align_clocks(
    timeline: Timeline, received: Sequence[Sequence[Received]], begins: Sequence[float], epoch_s: float, rate: float
) -> Timeline:
    passes, events = [], []
    for item, came, begin, end in zip(timeline.passes, received, begins, begins[1:], strict=False):
        computed_s, got = item.end_s - item.start_s, sum(one.nbytes for one in came)
        sent_s = got / rate
        there = begin + computed_s + exposed_s(came, computed_s, rate)
        waited = item.waited_s + end - begin - computed_s
        bound = Resource.LINK if sent_s > computed_s else item.bound
        passes.append(PassTime(item.at, item.title, begin, end, waited, bound))
        if got:
            events.append(Event(Resource.LINK, max(begin, there - sent_s), there, item.at, got))
    for event in timeline.events:
        later = begins[event.at] - timeline.passes[event.at].start_s
        events.append(event._replace(start_s=event.start_s + later, end_s=event.end_s + later))
    return Timeline(timeline.program, epoch_s, tuple(sorted(events, key=lambda e: e.start_s)), tuple(passes), ())


def trace(*timelines: Timeline, names: Sequence[str] = ()) -> dict[str, Any]:
    """Return trace events by time, after the names. Each timeline is a process, called by ``names`` or its program,
    with a thread for passes, one for each resource, and memory as counters."""
    threads = {resource: number for number, resource in enumerate(Resource, start=1)}
    found: list[dict[str, Any]] = []
    for pid, (timeline, name) in enumerate(zip(timelines, chain(names, repeat("")), strict=False), start=1):

        def add(called: str, kind: str, thread: int, args: dict[str, Any], pid: int = pid, **times: float) -> None:
            found.append({"name": called, "ph": kind, "pid": pid, "tid": thread, **times, "args": args})

        add("process_name", "M", 0, {"name": name or f"ooc {timeline.program}"})
        add("thread_name", "M", 0, {"name": "passes"})
        for resource in timeline.busy_s:
            add("thread_name", "M", threads[resource], {"name": resource.value})
        for item in timeline.passes:
            args = {"waited_s": item.waited_s, "bound": item.bound.value}
            add(item.title, "X", 0, args, ts=item.start_s * 1e6, dur=(item.end_s - item.start_s) * 1e6)
        titles = {item.at: item.title for item in timeline.passes}
        for event in timeline.events:
            args, dur = {"bytes": event.nbytes} if event.nbytes else {}, (event.end_s - event.start_s) * 1e6
            add(titles.get(event.at, ""), "X", threads[event.resource], args, ts=event.start_s * 1e6, dur=dur)
        for use in timeline.memory:
            for time_s, nbytes in use.samples:
                add(use.tier, "C", 0, {"bytes": nbytes}, ts=time_s * 1e6)
    return {"traceEvents": sorted(found, key=lambda event: event.get("ts", -1.0)), "displayTimeUnit": "ms"}
