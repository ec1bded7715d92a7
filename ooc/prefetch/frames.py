# SPDX-License-Identifier: Apache-2.0
"""The frames of an arena at run time: which block each holds, what is on its way in, and on its way out.

Follows instructions and decides nothing. A frame may be given to its next block while the last one is still being
written out of it: the read into it is sent off when that write has ended (``advance``), and only who needs the frame
now waits (``await_frame``, ``await_read``). Every wait ends with its request, and a failed one raises SpillError.
"""

from collections.abc import Sequence

from ooc.prefetch.arena import Arena, Bytes
from ooc.prefetch.engine import Engine, Span, Ticket


class Frames:
    """Frames of ``frame_bytes`` in ``arena``, used by one thread; ``view`` may be called by any."""

    def __init__(self, arena: Arena, frame_bytes: int, engine: Engine) -> None:
        self._arena = arena
        self._frame_bytes = frame_bytes
        self._engine = engine
        self._where: dict[int, int] = {}
        self._content: dict[int, int] = {}
        self._arriving: dict[int, Ticket] = {}
        self._postponed: dict[int, tuple[Sequence[Span], int]] = {}  # reads by block, in order
        self._leaving: dict[int, Ticket] = {}  # by frame
        self._on_their_way: dict[int, Ticket] = {}  # writes by block

    def holds(self, block: int, frame: int) -> bool:
        """Whether ``block`` is in ``frame``, or being read into it."""
        return self._where.get(block) == frame

    def acquire(self, block: int, frame: int) -> None:
        """Give ``frame`` to ``block``; what was in it is forgotten, though it may still be on its way to the SSD."""
        self._forget(frame)
        self._where[block] = frame
        self._content[frame] = block

    def await_frame(self, block: int) -> None:
        """Return when nothing is written out of the frame of ``block`` any more: it may be filled."""
        self._await_left(self._where[block])

    def read(self, block: int, spans: Sequence[Span], nbytes: int) -> None:
        """Start reading ``block`` into its frame, or see to it that ``advance`` does."""
        self._postponed[block] = (spans, nbytes)
        self._start(block)

    def advance(self) -> None:
        """Start the reads that had to wait for a write which has ended meanwhile."""
        for block in list(self._postponed):
            self._start(block)

    def _start(self, block: int) -> None:
        """Read ``block`` unless a write of it, or out of its frame, is under way."""
        writes = self._leaving.get(self._where[block]), self._on_their_way.get(block)
        if all(write is None or write.ended for write in writes):
            self._start_now(block)

    def _start_now(self, block: int) -> None:
        spans, nbytes = self._postponed.pop(block)
        self.await_frame(block)
        self.await_written(block)
        self._arriving[block] = self._engine.read(spans, self.view(block, nbytes))

    def await_read(self, block: int) -> None:
        """Return when what is read of ``block`` has arrived."""
        if block in self._postponed:
            self._start_now(block)
        ticket = self._arriving.pop(block, None)
        if ticket is not None:
            ticket.wait()

    def write(self, block: int, spans: Sequence[Span], nbytes: int) -> None:
        """Start writing ``block`` out of its frame; two writes of one block never overtake one another."""
        self.await_written(block)
        ticket = self._engine.write(spans, self.view(block, nbytes))
        self._leaving[self._where[block]] = ticket
        self._on_their_way[block] = ticket

    def await_written(self, block: int) -> None:
        """Return when the SSD has ``block`` as it was last written."""
        ticket = self._on_their_way.pop(block, None)
        if ticket is not None:
            ticket.wait()

    def view(self, block: int, nbytes: int) -> Bytes:
        """The memory of ``block``."""
        return self._arena.view(self._where[block] * self._frame_bytes, nbytes)

    def region(self, frame: int, nbytes: int) -> Bytes:
        """``nbytes`` of contiguous memory from ``frame`` on."""
        return self._arena.view(frame * self._frame_bytes, nbytes)

    def move(self, block: int, target: int, nbytes: int) -> None:
        """Copy ``block`` to the frame ``target``."""
        self.await_read(block)
        source = self.view(block, nbytes)
        del self._content[self._where[block]]
        self.acquire(block, target)
        self.await_frame(block)
        self.view(block, nbytes)[:] = source

    def clear(self, first: int, count: int) -> None:
        """Forget what ``count`` frames from ``first`` on hold: they are about to become a region."""
        for frame in range(first, first + count):
            self._forget(frame)
            self._await_left(frame)

    def _forget(self, frame: int) -> None:
        block = self._content.pop(frame, None)
        if block is not None and self._where.get(block) == frame:
            self.await_read(block)
            del self._where[block]

    def _await_left(self, frame: int) -> None:
        ticket = self._leaving.pop(frame, None)
        if ticket is not None:
            ticket.wait()

    def settle(self) -> None:
        """Let everything under way end, whatever its result."""
        for ticket in (*self._arriving.values(), *self._leaving.values(), *self._on_their_way.values()):
            ticket.settle()
        self._arriving.clear()
        self._postponed.clear()
        self._leaving.clear()
        self._on_their_way.clear()
        self._where.clear()
        self._content.clear()
