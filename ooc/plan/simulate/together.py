# SPDX-License-Identifier: Apache-2.0
"""The epochs of several processes that train one graph together: all have ended a pass before any begins the next one,
and what one receives of the others is not hidden behind what it computes."""

from collections.abc import Sequence

from ooc.plan.simulate.timeline import Event, PassTime, Resource, Timeline


def together(
    timelines: Sequence[Timeline], received_bytes: Sequence[Sequence[int]], link_bytes_per_s: float
) -> list[Timeline]:
    """The same epochs on one clock. ``received_bytes``: by process and pass. Memory is left out."""
    begins = [0.0]
    for passes, received in zip(
        zip(*(one.passes for one in timelines), strict=True), zip(*received_bytes, strict=True), strict=True
    ):
        taken = (item.end_s - item.start_s + got / link_bytes_per_s for item, got in zip(passes, received, strict=True))
        begins.append(begins[-1] + max(taken))
    written = max(one.epoch_s - one.passes[-1].end_s for one in timelines)
    return [
        _on_one_clock(one, received, begins, begins[-1] + written, link_bytes_per_s)
        for one, received in zip(timelines, received_bytes, strict=True)
    ]


def _on_one_clock(
    timeline: Timeline, received: Sequence[int], begins: Sequence[float], epoch_s: float, rate: float
) -> Timeline:
    passes, events = [], []
    for item, got, begin, end in zip(timeline.passes, received, begins, begins[1:], strict=False):
        computed = begin + item.end_s - item.start_s
        waited = item.waited_s + end - computed
        bound = Resource.LINK if got / rate > item.end_s - item.start_s else item.bound
        passes.append(PassTime(item.at, item.title, begin, end, waited, bound))
        if got:
            events.append(Event(Resource.LINK, computed, computed + got / rate, item.at, got))
    for event in timeline.events:
        later = begins[event.at] - timeline.passes[event.at].start_s
        events.append(event._replace(start_s=event.start_s + later, end_s=event.end_s + later))
    return Timeline(timeline.program, epoch_s, tuple(sorted(events, key=lambda e: e.start_s)), tuple(passes), ())
