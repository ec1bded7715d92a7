# SPDX-License-Identifier: Apache-2.0
"""A drive and PCIe in simulated time: requests in one direction are served in order."""

from collections import deque
from math import inf

from ooc.plan.hardware import Hardware
from ooc.plan.simulate.timeline import Event, Resource

READ, WRITE = 0, 1
"""The directions of the drive."""


class _Channel:
    """A channel with two directions (0 and 1), each with a resource and a rate. ``started`` and ``served`` hold the
    times of each request, by ticket."""

    resources: tuple[Resource, Resource]

    def __init__(self, rates: tuple[float, float]) -> None:
        self.rates = rates
        self.started: list[float] = []
        self.served: list[float] = []
        self._sent: list[tuple[Resource, int, int]] = []  # (resource, pass, bytes)
        self._kinds: dict[tuple[Resource, int, int], tuple[Resource, int, int]] = {}  # there are few

    def _note(self, direction: int, nbytes: int, at: int, starts_s: float, ends_s: float) -> int:
        """Record a request of pass ``at``, and return its ticket."""
        kind = (self.resources[direction], at, nbytes)
        self._sent.append(self._kinds.setdefault(kind, kind))
        self.started.append(starts_s)
        self.served.append(ends_s)
        return len(self.served) - 1

    def resource(self, ticket: int) -> Resource:
        """Return the resource that a ticket's request uses."""
        return self._sent[ticket][0]

    def events(self) -> list[Event]:
        """Return all events, once they have happened."""
        times = zip(self.started, self.served, self._sent, strict=True)
        return [Event(what, start_s, end_s, at, nbytes) for start_s, end_s, (what, at, nbytes) in times]


class Pcie(_Channel):
    """Copies in both directions, each at full rate. A copy begins when the one before it has ended and everything it
    waits for has happened."""

    resources = (Resource.TO_DEVICE, Resource.TO_HOST)

    def __init__(self, rates: tuple[float, float]) -> None:
        super().__init__(rates)
        self._free = [0.0, 0.0]

    def send(self, direction: int, nbytes: int, at: int, behind_s: float) -> int:
        """Queue ``nbytes`` in ``direction`` for pass ``at``, to begin no sooner than ``behind_s``; return the
        ticket."""
        begins = max(self._free[direction], behind_s)
        self._free[direction] = begins + nbytes / self.rates[direction]
        return self._note(direction, nbytes, at, begins, self._free[direction])

    def drain(self) -> float:
        """Return when everything is done."""
        return max(self._free)


class Drive(_Channel):
    """Reads and writes that share the drive.

    Requests in one direction are served one after the other, at the drive's full rate, or less while both directions
    are in use. The clock trails the caller's, so that requests sent later cannot change what was served before.
    ``started`` and ``served`` are infinite until then.
    """

    resources = (Resource.SSD_READ, Resource.SSD_WRITE)

    def __init__(self, rates: tuple[float, float], together: float, latency_s: float) -> None:
        super().__init__(rates)
        self.shared = min(1.0, together / sum(rates))
        self.latency_s = latency_s
        self.clock = 0.0
        self.waiting: tuple[deque[int], deque[int]] = (deque(), deque())
        self.left: dict[int, float] = {}

    @classmethod
    def of(cls, hardware: Hardware, request_bytes: int) -> "Drive":
        """Return the drive of ``hardware``, for requests of this size."""
        disk = hardware.disk
        rates = disk.read_bytes_per_s.at(request_bytes), disk.write_bytes_per_s.at(request_bytes)
        return cls(rates, disk.both_ways_bytes_per_s, disk.latency_s)

    def send(self, direction: int, nbytes: int, at: int, now_s: float) -> int:
        """Queue ``nbytes`` in ``direction`` for pass ``at`` at ``now_s``; return the ticket to wait for."""
        self.advance(now_s)
        ticket = self._note(direction, nbytes, at, inf, inf)
        self.waiting[direction].append(ticket)
        self.left[ticket] = float(nbytes)
        return ticket

    def wait(self, ticket: int) -> float:
        """Return when ``ticket`` is done."""
        while self.served[ticket] == inf:
            self._serve(float("inf"))
        return self.served[ticket] + self.latency_s

    def advance(self, until_s: float) -> None:
        while self.clock < until_s:
            self._serve(until_s)

    def drain(self) -> float:
        """Return when everything is done."""
        while any(self.waiting):
            self._serve(float("inf"))
        return self.clock

    def _serve(self, until_s: float) -> None:
        """Advance to the end of the next request, or to ``until_s``."""
        both = self.waiting[0] and self.waiting[1]
        directions = (0, 1) if both else (0,) if self.waiting[0] else (1,) if self.waiting[1] else ()
        if not directions:
            self.clock = until_s
            return
        share = self.shared if both else 1.0
        seconds, first = inf, -1
        for direction in directions:
            ticket = self.waiting[direction][0]
            if self.started[ticket] == inf:
                self.started[ticket] = self.clock
            needed = self.left[ticket] / (self.rates[direction] * share)
            if needed < seconds or (needed == seconds and ticket < first):
                seconds, first = needed, ticket
        ends = self.clock + seconds
        if ends > until_s:
            first, seconds, ends = -1, until_s - self.clock, until_s
        for direction in directions:
            ticket = self.waiting[direction][0]
            if ticket == first:
                self.waiting[direction].popleft()
                self.served[ticket] = ends
                del self.left[ticket]
            else:
                self.left[ticket] -= self.rates[direction] * share * seconds
        self.clock = ends
