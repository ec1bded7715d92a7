# SPDX-License-Identifier: Apache-2.0
"""The frames of host memory below a device at run time: what goes over PCIe, and what the SSD reads and writes.

It follows ``ooc.plan.program.staging`` and decides nothing. Transfers are requested in the order of the lower program.
Each first assigns its host frames to their blocks. Reads from the SSD start for later transfers once nothing moves
through their frames any more. The host waits in two cases only: for a block that has not arrived from the SSD when it
is sent, and for the SSD's write from a host frame that the device is to copy to.

The thread that sends transfers also launches kernels, and a block's checksum takes as long as some dozens of these. So
another thread checks arrived blocks before they are sent, and blocks being written before their frames are reused.

With an engine that reads and writes the device's own memory (GPUDirect), blocks that would only pass through a host
frame bypass it. Such a request belongs to no stream. Before it, the host waits for the last use of the device's frame,
at least two steps ago, or of the slab buffer, one step ago. After it, the host waits when the block or the frame is
needed.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from ooc.plan.program.program import Program
from ooc.plan.program.staging import CopyTo, PassingThrough, Staging, passing_through
from ooc.prefetch.arena import Bytes
from ooc.prefetch.device import Device
from ooc.prefetch.engine import Engine, Event, Ticket
from ooc.prefetch.frames import Checks, FrameTable, Locate

_NOTHING = PassingThrough(frozenset(), frozenset())


@dataclass(eq=False)
class Transfers(FrameTable):
    """Frames of ``frame_bytes`` in ``memory`` between a device and the SSD, used by one thread.

    The program uses names of frames that are swapped at its end (``Staging``); here frames are their positions.
    """

    device: Device
    memory: Bytes
    frame_bytes: int
    engine: Engine
    locate: Locate
    gpudirect: Engine | None
    slab_of: Callable[[int], int]
    checks: Checks

    def __post_init__(self) -> None:
        super().__init__()
        self.bytes_moved = dict.fromkeys(CopyTo, 0)
        """Bytes moved so far, by direction."""
        self._passing_through = _NOTHING
        self._to_read_directly: set[int] = set()  # blocks that bypass their host frames
        self._direct: list[Ticket] = []  # requests of the SSD for the device's memory
        self._sent: Event | None = None  # the last copy to the device
        self._tensor = torch.from_numpy(self.memory)
        self._frame_of_name = list(range(self.memory.nbytes // self.frame_bytes))
        self._passing: dict[int, Event] = {}  # frame → the last copy out of it or into it
        self._unsaved: dict[int, tuple[Event, int]] = {}  # block → the end of its copy, and its frame; in order
        self._leaving: dict[int, int] = {}  # frame → the block that is to be written out of it
        self._written: dict[int, Ticket] = {}  # block → its write
        self._looking = ThreadPoolExecutor(1, "ooc-check")
        self._read_seen: dict[int, Future[None]] = {}  # arriving block → its check
        self._write_seen: dict[int, Future[None]] = {}  # block being written → its check
        self._staging: Staging | None = None
        self._next = 0
        self._aside = 0

    # ---- programs ------------------------------------------------------------------------------------------

    def begin(self, staging: Staging, upper: Program) -> None:
        """Read the blocks that the program expects in host frames and no other program has left there.

        ``upper``: the device's program.
        """
        self._staging, self._next = staging, 0
        if self.gpudirect is not None:
            self._passing_through = passing_through(staging, upper, self.slab_of)
            self._to_read_directly = set()
        for block, name in staging.program.warm:
            if not self.holds(block, self._frame_of_name[name]):
                self._give(block, self._frame_of_name[name])
                self._read_now(block)

    def send(self, block: int, direction: CopyTo, memory: Tensor, after: Sequence[Event]) -> Event:
        """Enqueue the next transfer, of ``block`` from or to the device's ``memory``, after ``after``; return its
        end."""
        assert self._staging is not None
        index, program = self._next, self._staging.program
        planned = self._staging.transfers[index]
        assert (planned.block, planned.direction) == (block, direction), f"transfer {index} is of another block"
        self._next += 1
        self._save_what_has_come()
        for arriving, ticket in self._arriving.items():  # in order
            if not ticket.happened:
                break
            self._look_at(arriving)
        for taken, name, load in program.acquire[index]:
            direct = load and (index, taken) in self._passing_through.reads
            self._give(taken, self._frame_of_name[name])  # earlier copies may still use the frame; reads wait for them
            if direct:
                self._to_read_directly.add(taken)
            elif load:
                self._postponed[taken] = None
        while self._postponed and self._is_vacant(first := next(iter(self._postponed))):
            self._read_now(first)
        if block in self._to_read_directly or index in self._passing_through.writes:
            self._to_read_directly.discard(block)
            return self._move_directly(block, direction, memory, after)
        done = self._copy(block, direction, memory, after)
        for stored in program.store[index]:
            assert stored == block and direction is CopyTo.HOST and block not in self._unsaved
            frame = self._where[block]
            self._unsaved[block] = done, frame
            self._leaving[frame] = block
        return done

    def finish(self) -> None:
        """End the program after its last transfer.

        Everything that has to be on the SSD is on its way there, and frames get the names that the next run uses.
        """
        assert self._staging is not None and self._next == len(self._staging.transfers)
        names = self._frame_of_name
        for _, origin, target in self._staging.program.moves.get(len(self._staging.program.bounds), ()):
            names[origin], names[target] = names[target], names[origin]
        for event, _ in list(self._unsaved.values()):
            event.wait()
        self._save_what_has_come()
        for seen in (*self._read_seen.values(), *self._write_seen.values()):
            seen.result()
        self.leave((block, names[name]) for block, name in self._staging.program.leaves)

    def fetch(self, block: int, memory: Tensor, after: Sequence[Event]) -> Event:
        """Between programs, copy ``block`` from its host frame, or from the SSD, to the device's ``memory``."""
        if block not in self._where:
            names = len(self._frame_of_name)
            self._aside = (self._aside + 1) % min(2, names)
            self._give(block, self._frame_of_name[names - 1 - self._aside])
            self._read_now(block)
        return self._copy(block, CopyTo.DEVICE, memory, after)

    def await_saved(self, block: int) -> None:
        """Wait until the SSD has ``block`` as it was last stored."""
        while block in self._unsaved:
            next(iter(self._unsaved.values()))[0].wait()
            self._save_what_has_come()
        ticket, seen = self._written.pop(block, None), self._write_seen.pop(block, None)
        if ticket is not None:
            ticket.wait()
        if seen is not None:
            seen.result()

    def close(self) -> None:
        """End the thread that checks blocks. May be called twice."""
        self._looking.shutdown()

    def settle(self) -> None:
        """Wait for everything in progress, whatever its result."""
        for event in self._passing.values():
            event.wait()
        for ticket in (*self._direct, *self._arriving.values(), *self._written.values()):
            ticket.settle()
        wait_for([*self._read_seen.values(), *self._write_seen.values()])
        self._direct.clear()
        self._to_read_directly.clear()
        tables = self._where, self._content, self._arriving, self._passing, self._unsaved, self._leaving, self._written
        for known in (*tables, self._postponed, self._read_seen, self._write_seen):
            known.clear()

    # ---- frames --------------------------------------------------------------------------------------------

    def _copy(self, block: int, direction: CopyTo, memory: Tensor, after: Sequence[Event]) -> Event:
        """Enqueue a copy after what still moves through the host frame. The host waits for events of no stream."""
        frame = self._where[block]
        self.await_read(block)
        if direction is CopyTo.HOST and frame in self._leaving:
            self.await_saved(self._leaving.pop(frame))
        start = frame * self.frame_bytes
        staged = self._tensor[start : start + memory.nbytes]
        passing = self._passing.get(frame)
        for event in after:
            if not event.of_stream:
                event.wait()
        behind = [event for event in (*after, passing) if event is not None and event.of_stream]
        target, source = (memory, staged) if direction is CopyTo.DEVICE else (staged, memory)
        self._passing[frame] = done = self.device.copy(target, source, direction, behind)
        if direction is CopyTo.DEVICE:
            self._sent = done
        self.bytes_moved[direction] += memory.nbytes
        return done

    def _move_directly(self, block: int, direction: CopyTo, memory: Tensor, after: Sequence[Event]) -> Event:
        """Start reading ``block`` from the SSD into ``memory``, which the device no longer uses, or writing it from
        ``memory``, which the device has finished."""
        assert self.gpudirect is not None
        self.await_saved(block)
        to_device = direction is CopyTo.DEVICE
        for event in (*after, self._sent) if to_device and self._sent is not None else after:
            event.wait()
        spans, _ = self.locate(block)
        if not to_device:
            self.checks.note_write(block, None)
        ticket = (self.gpudirect.read if to_device else self.gpudirect.write)(spans, cast(Bytes, memory))
        if not to_device:
            self._written[block] = ticket
        self._direct = [one for one in self._direct if not one.happened] + [ticket]  # needed to settle everything
        self.bytes_moved[direction] += memory.nbytes
        return ticket

    def _is_vacant(self, block: int) -> bool:
        """Return whether ``block`` can be read into its frame without waiting."""
        frame = self._where[block]
        saved = {block, self._leaving.get(frame)}
        moving = self._passing.get(frame), *(self._written[one] for one in self._written.keys() & saved)
        if self._unsaved.keys() & saved or not all(one is None or one.happened for one in moving):
            return False
        return all(self._write_seen[one].done() for one in self._write_seen.keys() & saved)

    def _read_now(self, block: int) -> None:
        """Start reading ``block`` from the SSD into its frame, when nothing moves through it any more."""
        self._postponed.pop(block, None)
        frame = self._where[block]
        passing = self._passing.pop(frame, None)
        if passing is not None:
            passing.wait()
        if frame in self._leaving:
            self.await_saved(self._leaving.pop(frame))
        self.await_saved(block)
        spans, nbytes = self.locate(block)
        self._arriving[block] = self.engine.read(spans, self._view(frame, nbytes))

    def _arrived(self, block: int) -> None:
        self._look_at(block)
        self._read_seen.pop(block).result()

    def _look_at(self, block: int) -> None:
        if block not in self._read_seen:
            memory = self._view(self._where[block], self.locate(block)[1])
            self._read_seen[block] = self._looking.submit(self.checks.check_read, block, memory)

    def _save_what_has_come(self) -> None:
        """Start writing blocks to the SSD, in order, that have arrived on the host for that."""
        while self._unsaved:
            block, (event, frame) = next(iter(self._unsaved.items()))
            if not event.happened:
                return
            before = self._written.pop(block, None)
            if before is not None:
                before.wait()  # two writes of one block never overtake one another
            del self._unsaved[block]
            spans, nbytes = self.locate(block)
            memory = self._view(frame, nbytes)
            self._write_seen[block] = self._looking.submit(self.checks.note_write, block, memory)
            self._written[block] = self.engine.write(spans, memory)

    def _view(self, frame: int, nbytes: int) -> Bytes:
        start = frame * self.frame_bytes
        return self.memory[start : start + nbytes]
