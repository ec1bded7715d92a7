# SPDX-License-Identifier: Apache-2.0
"""What of an epoch's copies lies under its computing: every copy and every stretch of kernels, timed in its stream.

A copy begins where its stream has got behind all that the copy waits for, and ends with it: two events around it. The
kernels' stream is cut where it is held for a copy: from there on it computes until it is held again. Such a stretch has
the gaps between kernels in it, those where the GPU waits for the host to launch the next one too. So by events one
learns at most how much is hidden. Where torch's profiler sees single kernels (by CUPTI), ``kernels_of`` has them.
"""

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, supported_activities

from ooc.events import Event as Told
from ooc.events import TaskAdvanced
from ooc.plan.program.staging import CopyTo
from ooc.plan.simulate.timeline import Event, PassTime, Resource, Timeline, trace
from ooc.prefetch import device
from ooc.prefetch.arena import Bytes

SecondsBetween = Callable[[Any, Any], float]
"""Of two events of a device that have happened, the earlier one first."""
_COPIES = {CopyTo.DEVICE: Resource.TO_DEVICE, CopyTo.HOST: Resource.TO_HOST}


class _Stretch(NamedTuple):
    """``resource`` is busy between two events, with ``nbytes`` bytes for pass ``at``."""

    resource: Resource
    begun: device.Event
    ended: device.Event
    at: int
    nbytes: int


class Watch(device.Device):
    """``inner``, which does the work. Between ``start`` and ``stop`` it is asked for events around everything.

    ``told`` listens to what a trainer says of its passes, so that copies are known by the pass that has sent them off.
    """

    def __init__(self, inner: device.Device, seconds_between: SecondsBetween) -> None:
        self.name, self.place, self.overhead_bytes = inner.name, inner.place, inner.overhead_bytes
        self._inner = inner
        self._seconds_between = seconds_between
        self._watching = False
        self._at = 0
        self._found: list[_Stretch] = []
        self._origin = self._since = inner.record()

    def start(self) -> None:
        """Watch from here on."""
        self._found, self._at, self._watching = [], 0, True
        self._origin = self._since = self._inner.record()

    def stop(self) -> list[Event]:
        """What was busy since ``start``, in seconds from there, in order. Waits until all of it has happened."""
        self._end_kernels()
        self._watching = False
        for stretch in self._found:
            stretch.ended.wait()
        events = [self._event(stretch) for stretch in self._found]
        return sorted(events, key=lambda event: (event.start_s, event.end_s))

    def told(self, event: Told) -> None:
        """A listener."""
        if isinstance(event, TaskAdvanced):
            self._at = event.done

    def open(self, *, arena_bytes: int, limit_bytes: int, host: Bytes, graph: Sequence[Bytes] = ()) -> Tensor:
        return self._inner.open(arena_bytes=arena_bytes, limit_bytes=limit_bytes, host=host, graph=graph)

    def begin(self) -> None:
        self._inner.begin()

    def copy(self, target: Tensor, source: Tensor, direction: CopyTo, after: Sequence[device.Event]) -> device.Event:
        if not self._watching:
            return self._inner.copy(target, source, direction, after)
        nothing = target[:0], source[:0]  # for which the stream waits as it would have
        begun = self._inner.copy(*nothing, direction, after)
        ended = self._inner.copy(target, source, direction, (begun,))
        self._found.append(_Stretch(_COPIES[direction], begun, ended, self._at, target.nbytes))
        return ended

    def record(self, *, timed: bool = False) -> device.Event:
        return self._inner.record(timed=timed)

    def hold(self, event: device.Event) -> None:
        if not self._watching:
            self._inner.hold(event)
            return
        self._end_kernels()
        self._inner.hold(event)
        self._since = self._inner.record()

    def side(self, nbytes: int) -> device.SideStream:
        return self._inner.side(nbytes)

    def close(self) -> None:
        self._inner.close()

    def _end_kernels(self) -> None:
        self._found.append(_Stretch(Resource.COMPUTE, self._since, self._inner.record(), self._at, 0))

    def _event(self, stretch: _Stretch) -> Event:
        start_s, end_s = (self._seconds_between(self._origin, event) for event in (stretch.begun, stretch.ended))
        return Event(stretch.resource, start_s, end_s, stretch.at, stretch.nbytes)


def hidden(events: Iterable[Event]) -> dict[str, Any]:
    """By way, and both ways together: seconds and bytes of copies, and how much of these seconds lies under computing.

    ``of_the_possible`` is that of what could lie there: copies that take longer than all computing cannot be hidden.
    """
    events = list(events)
    computing = merged((event.start_s, event.end_s) for event in events if event.resource is Resource.COMPUTE)
    computing_s = sum(stop - start for start, stop in computing)
    found: dict[str, Any] = {"computing_s": computing_s}
    for name, ways in {**{way.value: [way] for way in _COPIES.values()}, "both": list(_COPIES.values())}.items():
        copies = [event for event in events if event.resource in ways]
        seconds = sum(event.end_s - event.start_s for event in copies)
        under = sum(_under(event, computing) for event in copies)
        found[name] = {
            "copies": len(copies),
            "bytes": sum(event.nbytes for event in copies),
            "seconds": seconds,
            "under_computing_s": under,
            "hidden": under / seconds if seconds else None,
            "of_the_possible": under / min(seconds, len(ways) * computing_s) if seconds and computing_s else None,
        }
    return found


@contextmanager
def seen_by_profiler() -> Iterator[Callable[[], list[Event]]]:
    """What runs on the GPU meanwhile, to be asked for afterwards; nothing where torch's profiler sees no GPU."""
    if ProfilerActivity.CUDA not in supported_activities():
        yield list
        return
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        yield lambda: kernels_of(profiler.events())


def kernels_of(profiled: Iterable[Any]) -> list[Event]:
    """Kernels, and copies from and to locked host memory, out of what torch's profiler has seen (``FunctionEvent``), in
    seconds from the first of them. Kernels without a gap between them are one event.

    Other copies, the small ones that the host makes of memory which is not locked, are neither.
    """
    found: dict[Resource, list[tuple[float, float]]] = {
        resource: [] for resource in (Resource.COMPUTE, *_COPIES.values())
    }
    for one in profiled:
        if one.device_type is not DeviceType.CUDA or getattr(one, "is_user_annotation", False):
            continue
        resource = Resource.COMPUTE
        if one.name.startswith("Memcpy"):
            if "Pinned" not in one.name:
                continue
            resource = Resource.TO_DEVICE if "HtoD" in one.name else Resource.TO_HOST
        found[resource].append((one.time_range.start / 1e6, one.time_range.end / 1e6))
    found[Resource.COMPUTE] = merged(found[Resource.COMPUTE])
    first_s = min((start for spans in found.values() for start, _ in spans), default=0.0)
    events = [
        Event(name, start - first_s, stop - first_s, 0, 0) for name, spans in found.items() for start, stop in spans
    ]
    return sorted(events, key=lambda event: (event.start_s, event.end_s))


def merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same seconds in spans that do not meet, in order."""
    found: list[tuple[float, float]] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


def _under(copy: Event, computing: Sequence[tuple[float, float]]) -> float:
    """Seconds of ``copy`` that lie in one of the spans, which are in order and do not meet."""
    seconds = 0.0
    for start, stop in computing[bisect_right(computing, copy.start_s, key=lambda span: span[1]) :]:
        if start >= copy.end_s:
            break
        seconds += min(copy.end_s, stop) - max(copy.start_s, start)
    return seconds


def write_trace(events: Sequence[Event], titles: Sequence[str], path: Path) -> None:
    """For Perfetto; ``titles`` of the passes. A pass lasts from the first of its events to the last."""
    passes = []
    for at, of_pass in groupby(sorted(events, key=lambda event: event.at), key=lambda event: event.at):
        held = list(of_pass)
        start_s, end_s = min(event.start_s for event in held), max(event.end_s for event in held)
        title = titles[at] if at < len(titles) else "after the last pass"
        passes.append(PassTime(at, title, start_s, end_s, 0.0, Resource.COMPUTE))
    epoch_s = max((event.end_s for event in events), default=0.0)
    path.write_text(json.dumps(trace(Timeline("train, measured", epoch_s, tuple(events), tuple(passes), ()))) + "\n")
