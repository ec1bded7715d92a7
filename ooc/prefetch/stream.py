# SPDX-License-Identifier: Apache-2.0
"""Streams: blocks read before they are asked for, and written after they are computed.

Both work on a ring of fixed buffers. The order of blocks is known beforehand, so a read stream always has
every free slot filling; a write stream makes its owner wait only when all slots are still on their way out.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ooc.prefetch.arena import Bytes
from ooc.prefetch.engines.seam import Engine, Span, Ticket


@dataclass(frozen=True, slots=True)
class Request:
    """Spans to be moved to or from ``places``: (start, stop) byte ranges of the slot, one for each span."""

    spans: tuple[Span, ...]
    places: tuple[tuple[int, int], ...]

    def stretches(self) -> list[tuple[list[Span], int, int]]:
        """Spans that lie one behind the other in the slot, with the bytes that they fill: one call for each."""
        found: list[tuple[list[Span], int, int]] = []
        for span, (start, stop) in zip(self.spans, self.places, strict=True):
            if found and found[-1][2] == start:
                spans, first, _ = found[-1]
                spans.append(span)
                found[-1] = (spans, first, stop)
            else:
                found.append(([span], start, stop))
        return found


class ReadStream:
    """The buffers of ``requests`` in order. ``take`` gives the next one and frees the one before."""

    def __init__(
        self, engine: Engine, requests: Sequence[Request], slots: Sequence[Bytes], *, bulk: bool = False
    ) -> None:
        self._engine = engine
        self._requests = requests
        self._slots = slots
        self._bulk = bulk
        self._pending: deque[list[Ticket]] = deque()
        self._issued = self._taken = 0
        for _ in slots:
            self._issue()

    def _issue(self) -> None:
        if self._issued == len(self._requests):
            return
        request = self._requests[self._issued]
        slot = self._slots[self._issued % len(self._slots)]
        self._pending.append(
            [self._engine.read(spans, slot[start:stop], bulk=self._bulk) for spans, start, stop in request.stretches()]
        )
        self._issued += 1

    def take(self) -> Bytes:
        """Wait for the next request; its buffer is good until the next ``take``."""
        if self._taken:
            self._issue()
        tickets = self._pending.popleft()
        for ticket in tickets:
            ticket.wait()
        slot = self._slots[self._taken % len(self._slots)]
        self._taken += 1
        return slot

    def settle(self) -> None:
        """Let everything under way end, whatever its result."""
        for tickets in self._pending:
            for ticket in tickets:
                ticket.settle()
        self._pending.clear()


class WriteStream:
    """A ring of buffers to compute into. ``slot`` gives a free one, ``put`` sends it off."""

    def __init__(self, engine: Engine, slots: Sequence[Bytes]) -> None:
        self._engine = engine
        self._slots = slots
        self._leaving: deque[list[Ticket]] = deque()
        self._count = 0

    def slot(self) -> Bytes:
        """A buffer that may be written to."""
        if len(self._leaving) == len(self._slots):
            for ticket in self._leaving.popleft():
                ticket.wait()
        return self._slots[self._count % len(self._slots)]

    def put(self, request: Request) -> None:
        """Write the buffer last given by ``slot``."""
        slot = self._slots[self._count % len(self._slots)]
        self._leaving.append(
            [self._engine.write(spans, slot[start:stop]) for spans, start, stop in request.stretches()]
        )
        self._count += 1

    def drain(self) -> None:
        """Wait until everything is written."""
        while self._leaving:
            for ticket in self._leaving.popleft():
                ticket.wait()

    def settle(self) -> None:
        """Let everything under way end, whatever its result."""
        for tickets in self._leaving:
            for ticket in tickets:
                ticket.settle()
        self._leaving.clear()
