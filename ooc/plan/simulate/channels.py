# SPDX-License-Identifier: Apache-2.0
"""A drive and PCIe in simulated time: what is sent off in one direction is served in order."""

from collections import deque
from math import inf

from ooc.plan.hardware import Hardware


def drive_of(hardware: Hardware, frame_bytes: int) -> "Drive":
    """The drive, for requests of a frame."""
    disk = hardware.disk
    rates = disk.read_bytes_per_s.at(frame_bytes), disk.write_bytes_per_s.at(frame_bytes)
    return Drive(rates, disk.both_ways_bytes_per_s, disk.latency_s)


class Pcie:
    """Copies in both directions, each at full rate: one begins when the one before it has ended, and what it
    has to wait for has happened. ``started`` and ``served`` say when, by ticket."""

    def __init__(self, rates: tuple[float, float]) -> None:
        self.rates = rates
        self.started: list[float] = []
        self.served: list[float] = []
        self._free = [0.0, 0.0]

    def send(self, direction: int, nbytes: int, behind_s: float) -> int:
        """Queue ``nbytes`` in ``direction`` (0 or 1), not to begin before ``behind_s``; the ticket."""
        ticket = len(self.served)
        begins = max(self._free[direction], behind_s)
        self._free[direction] = begins + nbytes / self.rates[direction]
        self.started.append(begins)
        self.served.append(self._free[direction])
        return ticket

    def drain(self) -> float:
        """When everything is done."""
        return max(self._free)


class Drive:
    """Reads and writes, which share the drive.

    Those of one direction are served one after the other at its full rate, less while both are in use. The clock
    trails the caller's, so that what is sent off later cannot change what was served before. ``started`` and
    ``served`` say when, by ticket; infinity: not yet.
    """

    def __init__(self, rates: tuple[float, float], together: float, latency_s: float) -> None:
        self.rates = rates
        self.shared = min(1.0, together / sum(rates))
        self.latency_s = latency_s
        self.clock = 0.0
        self.waiting: tuple[deque[int], deque[int]] = (deque(), deque())
        self.left: dict[int, float] = {}
        self.started: list[float] = []
        self.served: list[float] = []

    def send(self, direction: int, nbytes: int, now_s: float) -> int:
        """Queue ``nbytes`` in ``direction`` (0 or 1) at ``now_s``; the ticket to wait for."""
        self.advance(now_s)
        ticket = len(self.served)
        self.started.append(inf)
        self.served.append(inf)
        self.waiting[direction].append(ticket)
        self.left[ticket] = float(nbytes)
        return ticket

    def wait(self, ticket: int) -> float:
        """When ``ticket`` is done."""
        while self.served[ticket] == inf:
            self._serve(float("inf"))
        return self.served[ticket] + self.latency_s

    def advance(self, until_s: float) -> None:
        while self.clock < until_s:
            self._serve(until_s)

    def drain(self) -> float:
        """When everything is done."""
        while any(self.waiting):
            self._serve(float("inf"))
        return self.clock

    def _serve(self, until_s: float) -> None:
        """Go on to the end of the next request, or to ``until_s``."""
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
