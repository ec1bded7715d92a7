# SPDX-License-Identifier: Apache-2.0
"""The memory in which programs compute: frames that blocks are read into ahead of time and written from afterwards.

There are two kinds. On the CPU the arena is host memory, blocks come from the SSD directly into it, and a thread that
needs a block waits on the host. With a device that has its own memory, the arena is the device's; a wait is then
enqueued on the device while the host continues (``ooc.prefetch.device_frames``). Programs and passes run alike with
both.

Workspaces follow instructions and decide nothing. One thread uses them; ``matrix`` may be called by any.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ooc.plan.program.program import Program
from ooc.plan.program.staging import Staging
from ooc.prefetch.arena import Arena, Bytes
from ooc.prefetch.engine import Engine, Event, Span

Locate = Callable[[int], tuple[Sequence[Span], int]]
"""A function that returns where a block is on the SSD, and its bytes."""
Nbytes = Callable[[int], int]
"""A function that returns the bytes of a block."""


class Checks(Protocol):
    """The interface of a check of blocks' bytes in host memory; raises an OocError where they differ from those
    stored."""

    def check_read(self, block: int, memory: Bytes) -> None:
        """Check bytes that have come from the SSD."""

    def note_write(self, block: int, memory: Bytes | None) -> None:
        """Note bytes that are about to be written; None: they cannot be seen."""


class FrameTable:
    """A table of the block in each frame, and of the request or device copy in progress into it."""

    def __init__(self) -> None:
        self._where: dict[int, int] = {}  # block → frame
        self._content: dict[int, int] = {}  # frame → block
        self._postponed: dict[int, None] = {}  # blocks to be read, in order
        self._arriving: dict[int, Event] = {}  # by block

    def holds(self, block: int, frame: int) -> bool:
        """Return whether ``block`` is in ``frame``, or on its way into it."""
        return self._where.get(block) == frame

    def hold(self, transfer: Event) -> None:
        """Make later computation wait for ``transfer``."""
        transfer.wait()

    def await_read(self, block: int) -> None:
        """Make later computation wait until ``block`` has been read."""
        if block in self._postponed:
            self._read_now(block)
        transfer = self._arriving.pop(block, None)
        if transfer is not None:
            self.hold(transfer)
            self._arrived(block)

    def _read_now(self, block: int) -> None:
        """Start a postponed read of ``block``, as soon as its frame is free."""

    def _arrived(self, block: int) -> None:
        """Process a block whose read has been waited for."""

    def forget(self, blocks: range) -> None:
        """Forget these ``blocks`` in all frames, as the data below them has changed; only while no program runs."""
        for block in [block for block in self._where if block in blocks]:
            self._forget(self._where[block])

    def leave(self, kept: Iterable[tuple[int, int]]) -> None:
        """After a program, forget what frames hold, except the blocks ``kept``, as plans expect."""
        frames = dict(kept)
        for block, frame in list(self._where.items()):
            if frames.get(block) != frame:
                self._forget(frame)

    def _give(self, block: int, frame: int) -> None:
        """Assign ``frame`` to ``block``; its old content is forgotten, although it may still be on its way out."""
        self._forget(frame)
        self._where[block] = frame
        self._content[frame] = block

    def _forget(self, frame: int) -> None:
        block = self._content.pop(frame, None)
        if block is not None and self._where.get(block) == frame:
            self.await_read(block)
            del self._where[block]


class Workspace(FrameTable, ABC):
    """The frames that a program computes in; ``place`` is the device of its tensors."""

    place: torch.device

    def __init__(self, nbytes: Nbytes) -> None:
        super().__init__()
        self._nbytes = nbytes
        self._leaving: dict[int, Event] = {}  # by frame

    # ---- programs and passes -------------------------------------------------------------------------------

    @abstractmethod
    def begin(self, program: Program, staging: Staging | None) -> None:
        """Read the blocks that the program expects in frames and no other program has left there."""

    def move(self, block: int, target: int) -> None:
        """Copy ``block`` to the frame ``target``."""
        self.await_read(block)
        source = self._memory(block)
        del self._content[self._where[block]]
        self._give(block, target)
        self.await_frame(block)
        self._memory(block).copy_(source)

    def clear(self, first: int, count: int) -> None:
        """Forget what ``count`` frames from ``first`` on hold: they become a region."""
        for frame in range(first, first + count):
            self._forget(frame)
            self._await_left(frame)

    def entered(self) -> None:
        """Note that the moves and regions of a pass are done, and its steps begin."""

    def finish(self, program: Program) -> None:
        """End ``program``, after its last step and the moves after it."""
        self.leave(program.leaves)

    # ---- steps ---------------------------------------------------------------------------------------------

    @abstractmethod
    def vacate(self, step: int) -> None:
        """Allow the frames that were last used in ``step`` to be reassigned from now on."""

    @abstractmethod
    def acquire(self, block: int, frame: int, *, load: bool) -> None:
        """Assign ``frame`` to ``block``; ``load``: start reading the block from below."""

    def await_frame(self, block: int) -> None:
        """Make later computation wait until the frame of ``block`` may be filled."""
        self._await_left(self._where[block])

    @abstractmethod
    def fill(self, block: int, memory: Tensor) -> Event:
        """Start reading ``block`` from below into ``memory``, uint8, of a region."""

    def filled(self, block: int, memory: Tensor) -> None:
        """Check a block that was read by ``fill`` and has been waited for."""

    def launched(self, step: int) -> None:
        """Note that all tiles of ``step`` have been queued, or, on a device with its own memory, launched."""

    @abstractmethod
    def write(self, block: int, step: int) -> None:
        """Start writing ``block``, as ``step`` has left it, to the tier below."""

    # ---- memory --------------------------------------------------------------------------------------------

    @abstractmethod
    def matrix(self, block: int, dtype: torch.dtype, rows: int, columns: int) -> Tensor:
        """Return the memory of ``block`` as [rows, columns] of ``dtype``."""

    @abstractmethod
    def region(self, frame: int, nbytes: int) -> Tensor:
        """Return ``nbytes`` of contiguous memory from ``frame`` on, uint8."""

    @abstractmethod
    def await_written(self, block: int) -> None:
        """Wait until the SSD has ``block`` as it was last written."""

    @abstractmethod
    def settle(self) -> None:
        """Wait for everything in progress, whatever its result, and forget what frames hold."""

    def _memory(self, block: int) -> Tensor:
        return self.region(self._where[block], self._nbytes(block))

    def _await_left(self, frame: int) -> None:
        transfer = self._leaving.pop(frame, None)
        if transfer is not None:
            self.hold(transfer)


@dataclass(eq=False)
class HostWorkspace(Workspace):
    """Frames of ``frame_bytes`` in ``arena``, host memory with the SSD directly below it.

    ``locate``: where a block is read from; ``target``: where it is written to; ``part``: which of its bytes are on the
    SSD, if not all. A frame may be assigned to its next block while the last one is still being written from it. The
    read then starts when that write has ended (``vacate``), and only code that needs the frame now waits
    (``await_frame``, ``await_read``). Every wait ends with its request, and a failed one raises SpillError.
    """

    place = torch.device("cpu")

    arena: Arena
    frame_bytes: int
    engine: Engine
    locate: Locate
    nbytes: Nbytes
    target: Locate
    checks: Checks
    part: Callable[[int], slice] | None

    def __post_init__(self) -> None:
        super().__init__(self.nbytes)
        self._on_their_way: dict[int, Event] = {}  # writes by block

    def begin(self, program: Program, staging: Staging | None) -> None:
        for block, frame in program.warm:
            if not self.holds(block, frame):
                self.acquire(block, frame, load=True)

    def vacate(self, step: int) -> None:
        for block in list(self._postponed):
            self._read(block)

    def acquire(self, block: int, frame: int, *, load: bool) -> None:
        self._give(block, frame)
        if load:
            self._postponed[block] = None
            self._read(block)

    def _read(self, block: int) -> None:
        """Start reading ``block``, unless a write of it, or from its frame, is in progress."""
        writes = self._leaving.get(self._where[block]), self._on_their_way.get(block)
        if all(write is None or write.happened for write in writes):
            self._read_now(block)

    def _read_now(self, block: int) -> None:
        del self._postponed[block]
        self.await_frame(block)
        self.await_written(block)
        self._arriving[block] = self.engine.read(self.locate(block)[0], self._view(block))

    def _arrived(self, block: int) -> None:
        self.checks.check_read(block, self._view(block))

    def fill(self, block: int, memory: Tensor) -> Event:
        self.await_written(block)
        return self.engine.read(self.locate(block)[0], memory.numpy(), bulk=True)

    def filled(self, block: int, memory: Tensor) -> None:
        self.checks.check_read(block, memory.numpy())

    def write(self, block: int, step: int) -> None:
        self.await_written(block)  # two writes of one block never overtake one another
        memory = self._view(block)
        self.checks.note_write(block, memory)
        ticket = self.engine.write(self.target(block)[0], memory)
        self._leaving[self._where[block]] = self._on_their_way[block] = ticket

    def _view(self, block: int) -> Bytes:
        memory = self.arena.view(self._where[block] * self.frame_bytes, self.nbytes(block))
        return memory if self.part is None else memory[self.part(block)]

    def matrix(self, block: int, dtype: torch.dtype, rows: int, columns: int) -> Tensor:
        return self.region(self._where[block], rows * columns * dtype.itemsize).view(dtype).view(rows, columns)

    def region(self, frame: int, nbytes: int) -> Tensor:
        return torch.from_numpy(self.arena.view(frame * self.frame_bytes, nbytes))

    def await_written(self, block: int) -> None:
        ticket = self._on_their_way.pop(block, None)
        if ticket is not None:
            ticket.wait()

    def settle(self) -> None:
        for known in (self._arriving, self._leaving, self._on_their_way):
            for ticket in known.values():
                ticket.settle()
            known.clear()
        for table in (self._postponed, self._where, self._content):
            table.clear()
