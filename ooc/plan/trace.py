# SPDX-License-Identifier: Apache-2.0
"""A timeline in Chrome's trace event format, for Perfetto (ui.perfetto.dev)."""

from typing import Any

from ooc.plan.timeline import Resource, Timeline


def trace(timeline: Timeline) -> dict[str, Any]:
    """One thread a resource, one for passes, memory as counters."""
    events: list[dict[str, Any]] = [_named("process_name", 0, f"ooc {timeline.program}")]
    threads = {resource: number for number, resource in enumerate(Resource, start=1)}
    events.append(_named("thread_name", 0, "passes"))
    events += [_named("thread_name", threads[resource], resource.value) for resource in timeline.busy_s]
    for item in timeline.passes:
        extra = {"waited_s": item.waited_s, "bound": item.bound.value}
        events.append(_complete(item.title, 0, item.start_s, item.end_s, extra))
    titles = {item.at: item.title for item in timeline.passes}
    for event in timeline.events:
        extra = {"bytes": event.nbytes} if event.nbytes else {}
        events.append(_complete(titles[event.at], threads[event.resource], event.start_s, event.end_s, extra))
    for use in timeline.memory:
        events += [
            {"name": use.tier, "ph": "C", "pid": 1, "ts": time_s * 1e6, "args": {"bytes": nbytes}}
            for time_s, nbytes in use.samples
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(kind: str, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": 1, "tid": thread, "args": {"name": name}}


def _complete(name: str, thread: int, start_s: float, end_s: float, args: dict[str, Any]) -> dict[str, Any]:
    micros = start_s * 1e6, (end_s - start_s) * 1e6
    return {"name": name, "ph": "X", "pid": 1, "tid": thread, "ts": micros[0], "dur": micros[1], "args": args}
