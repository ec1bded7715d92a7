# SPDX-License-Identifier: Apache-2.0
"""The memory that is computed in: frames that blocks are read into ahead of time and written out of behind it.

There are two kinds. On the CPU the arena is host memory, blocks come from the SSD right into it, and whoever waits for
one waits on the host. Where the device has memory of its own, the arena is the device's; a wait is then an order to the
device, and the host goes on (``ooc.prefetch.device_frames``). Programs and passes are run alike in both.

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
"""Where a block lies on the SSD, and its bytes."""
Nbytes = Callable[[int], int]
"""The bytes of a block."""


class Checks(Protocol):
    """What looks at a block's bytes in host memory. Raises an OocError where they are others than were stored."""

    def check_read(self, block: int, memory: Bytes) -> None:
        """They have come from the SSD."""

    def note_write(self, block: int, memory: Bytes | None) -> None:
        """They are about to be written; None: from where they cannot be seen."""


class FrameTable:
    """Which block each frame holds, and what is under way into it: a request of the SSD, or a copy to or from a
    device."""

    def __init__(self) -> None:
        self._where: dict[int, int] = {}  # block → frame
        self._content: dict[int, int] = {}  # frame → block
        self._postponed: dict[int, None] = {}  # blocks to be read, in order
        self._arriving: dict[int, Event] = {}  # by block

    def holds(self, block: int, frame: int) -> bool:
        """Whether ``block`` is in ``frame``, or on its way into it."""
        return self._where.get(block) == frame

    def hold(self, transfer: Event) -> None:
        """From here on, for what is computed, ``transfer`` has ended."""
        transfer.wait()

    def await_read(self, block: int) -> None:
        """From here on what is read of ``block`` is there."""
        if block in self._postponed:
            self._read_now(block)
        transfer = self._arriving.pop(block, None)
        if transfer is not None:
            self.hold(transfer)
            self._arrived(block)

    def _read_now(self, block: int) -> None:
        """Start reading ``block``, which was postponed, as soon as its frame is free."""

    def _arrived(self, block: int) -> None:
        """What was read of ``block`` has been waited for."""

    def forget(self, blocks: range) -> None:
        """What is below has changed: frames hold none of these ``blocks`` any more. While no program runs."""
        for block in [block for block in self._where if block in blocks]:
            self._forget(self._where[block])

    def leave(self, kept: Iterable[tuple[int, int]]) -> None:
        """A program is over: what frames hold beside the blocks ``kept`` is forgotten, as plans have it."""
        frames = dict(kept)
        for block, frame in list(self._where.items()):
            if frames.get(block) != frame:
                self._forget(frame)

    def _give(self, block: int, frame: int) -> None:
        """``frame`` is the frame of ``block``; what was in it is forgotten, though it may still be on its way out."""
        self._forget(frame)
        self._where[block] = frame
        self._content[frame] = block

    def _forget(self, frame: int) -> None:
        block = self._content.pop(frame, None)
        if block is not None and self._where.get(block) == frame:
            self.await_read(block)
            del self._where[block]


class Workspace(FrameTable, ABC):
    """``place`` is where its tensors are."""

    place: torch.device

    def __init__(self, nbytes: Nbytes) -> None:
        super().__init__()
        self._nbytes = nbytes
        self._leaving: dict[int, Event] = {}  # by frame

    # ---- programs and passes -------------------------------------------------------------------------------

    @abstractmethod
    def begin(self, program: Program, staging: Staging | None) -> None:
        """Have in their frames the blocks that the program is to find there: read those that no other has left."""

    def move(self, block: int, target: int) -> None:
        """Copy ``block`` to the frame ``target``."""
        self.await_read(block)
        source = self._memory(block)
        del self._content[self._where[block]]
        self._give(block, target)
        self.await_frame(block)
        self._memory(block).copy_(source)

    def clear(self, first: int, count: int) -> None:
        """Forget what ``count`` frames from ``first`` on hold: they are about to become a region."""
        for frame in range(first, first + count):
            self._forget(frame)
            self._await_left(frame)

    def entered(self) -> None:
        """Moves and regions of a pass are done: its steps begin."""

    def finish(self, program: Program) -> None:
        """After the last step of ``program``, and the moves behind it."""
        self.leave(program.leaves)

    # ---- steps ---------------------------------------------------------------------------------------------

    @abstractmethod
    def vacate(self, step: int) -> None:
        """Frames that were last used in ``step`` are given away from now on."""

    @abstractmethod
    def acquire(self, block: int, frame: int, *, load: bool) -> None:
        """Give ``frame`` to ``block``; ``load``: and start reading it from below."""

    def await_frame(self, block: int) -> None:
        """From here on the frame of ``block`` may be filled."""
        self._await_left(self._where[block])

    @abstractmethod
    def fill(self, block: int, memory: Tensor) -> Event:
        """Start reading ``block`` from below into ``memory``, uint8, of a region."""

    def filled(self, block: int, memory: Tensor) -> None:
        """What is under way since ``fill`` has been waited for."""

    def launched(self, step: int) -> None:
        """All tiles of ``step`` have been put out, and on a device with memory of its own, launched."""

    @abstractmethod
    def write(self, block: int, step: int) -> None:
        """Start writing ``block``, as ``step`` has left it, to what lies below."""

    # ---- memory --------------------------------------------------------------------------------------------

    @abstractmethod
    def matrix(self, block: int, dtype: torch.dtype, rows: int, columns: int) -> Tensor:
        """The memory of ``block`` as [rows, columns] of ``dtype``."""

    @abstractmethod
    def region(self, frame: int, nbytes: int) -> Tensor:
        """``nbytes`` of contiguous memory from ``frame`` on, uint8."""

    @abstractmethod
    def await_written(self, block: int) -> None:
        """Return when the SSD has ``block`` as it was last written."""

    @abstractmethod
    def settle(self) -> None:
        """Let everything under way end, whatever its result, and forget what is where."""

    def _memory(self, block: int) -> Tensor:
        return self.region(self._where[block], self._nbytes(block))

    def _await_left(self, frame: int) -> None:
        transfer = self._leaving.pop(frame, None)
        if transfer is not None:
            self.hold(transfer)


@dataclass(eq=False)
class HostWorkspace(Workspace):
    """Frames of ``frame_bytes`` in ``arena``, host memory with the SSD right below it. ``locate``: where a block is
    read from, ``target``: where it is written to. ``part``: which of its bytes lie on the SSD, if not all.

    A frame may be given to its next block while the last one is still being written out of it: the read into it is sent
    off when that write has ended (``vacate``), and only who needs the frame now waits (``await_frame``,
    ``await_read``). Every wait ends with its request, and a failed one raises SpillError.
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
        """Start reading ``block`` unless a write of it, or out of its frame, is under way."""
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
