# SPDX-License-Identifier: Apache-2.0
"""The epochs of several processes that train one graph together: all have ended a pass before any begins the next one,
and what one receives of the others meanwhile is hidden behind what it computes, as far as that can be."""

from collections.abc import Sequence

from ooc.plan.program.received import Received, exposed_s
from ooc.plan.simulate.timeline import Event, PassTime, Resource, Timeline


def together(
    timelines: Sequence[Timeline], received: Sequence[Sequence[Sequence[Received]]], link_bytes_per_s: float
) -> list[Timeline]:
    """The same epochs on one clock. ``received``: by process and pass. Memory is left out."""
    begins = [0.0]
    for at, passes in enumerate(zip(*(one.passes for one in timelines), strict=True)):
        computed = [item.end_s - item.start_s for item in passes]
        waits = (exposed_s(one[at], s, link_bytes_per_s) for one, s in zip(received, computed, strict=True))
        begins.append(begins[-1] + max(s + wait for s, wait in zip(computed, waits, strict=True)))
    written = max(one.epoch_s - one.passes[-1].end_s for one in timelines)
    return [
        _on_one_clock(timeline, one, begins, begins[-1] + written, link_bytes_per_s)
        for timeline, one in zip(timelines, received, strict=True)
    ]


def _on_one_clock(
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
