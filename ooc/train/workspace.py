# SPDX-License-Identifier: Apache-2.0
"""The memory that is computed in: frames and regions of an arena, and what moves blocks in and out of it.

There are two kinds. On the CPU the arena is host memory, blocks come from the SSD straight into it, and whoever waits
for one waits on the host. Where the device has memory of its own, the arena is the device's; a wait is then an order to
the device, and the host goes on (``ooc.train.device_workspace``). Programs and passes are run alike in both.

One thread uses a workspace; ``matrix`` may be called by any.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from ooc.plan.program import Program
from ooc.plan.staging import Staging
from ooc.prefetch.engine import Engine, Ticket
from ooc.prefetch.frames import Frames
from ooc.prefetch.transfers import Locate

Nbytes = Callable[[int], int]
"""The bytes of a block."""


class Filling(ABC):
    """A block on its way into a slab buffer."""

    @abstractmethod
    def wait(self) -> None:
        """From here on it is there, for what is computed."""

    @abstractmethod
    def settle(self) -> None:
        """Return when nothing is written to the buffer any more, whatever the result."""


class Workspace(ABC):
    """``place`` is where its tensors are."""

    place: torch.device

    # ---- programs and passes -------------------------------------------------------------------------------

    @abstractmethod
    def begin(self, program: Program, staging: Staging | None) -> None:
        """Have in their frames the blocks that the run before has left there; the first run reads them."""

    @abstractmethod
    def move(self, block: int, target: int) -> None:
        """Copy ``block`` to the frame ``target``."""

    @abstractmethod
    def clear(self, first: int, count: int) -> None:
        """Forget what ``count`` frames from ``first`` on hold: they are about to become a region."""

    @abstractmethod
    def entered(self) -> None:
        """Moves and regions of a pass are done: its steps begin."""

    @abstractmethod
    def finish(self) -> None:
        """After the last step of the program, and the moves behind it."""

    # ---- steps ---------------------------------------------------------------------------------------------

    @abstractmethod
    def vacate(self, step: int) -> None:
        """Frames that were last used in ``step`` are given away from now on."""

    @abstractmethod
    def acquire(self, block: int, frame: int, *, load: bool) -> None:
        """Give ``frame`` to ``block``; ``load``: and start reading it from below."""

    @abstractmethod
    def await_read(self, block: int) -> None:
        """From here on what is read of ``block`` is there, for what is computed."""

    @abstractmethod
    def await_frame(self, block: int) -> None:
        """From here on the frame of ``block`` may be filled."""

    @abstractmethod
    def fill(self, block: int, memory: Tensor) -> Filling:
        """Start reading ``block`` from below into ``memory``, uint8, of a region."""

    @abstractmethod
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


class HostWorkspace(Workspace):
    """Host memory, with the SSD right below it."""

    place = torch.device("cpu")

    def __init__(self, frames: Frames, engine: Engine, locate: Locate, nbytes: Nbytes) -> None:
        self._frames = frames
        self._engine = engine
        self._locate = locate
        self._nbytes = nbytes

    def begin(self, program: Program, staging: Staging | None) -> None:
        for block, frame in program.warm:
            if not self._frames.holds(block, frame):
                self.acquire(block, frame, load=True)

    def move(self, block: int, target: int) -> None:
        self._frames.move(block, target, self._nbytes(block))

    def clear(self, first: int, count: int) -> None:
        self._frames.clear(first, count)

    def entered(self) -> None:
        """Whoever moved something has waited for it."""

    def finish(self) -> None:
        """Writes go on into the next program."""

    def vacate(self, step: int) -> None:
        self._frames.advance()

    def acquire(self, block: int, frame: int, *, load: bool) -> None:
        self._frames.acquire(block, frame)
        if load:
            self._frames.read(block, *self._locate(block))

    def await_read(self, block: int) -> None:
        self._frames.await_read(block)

    def await_frame(self, block: int) -> None:
        self._frames.await_frame(block)

    def fill(self, block: int, memory: Tensor) -> Filling:
        self._frames.await_written(block)
        return _Read(self._engine.read(self._locate(block)[0], memory.numpy(), bulk=True))

    def launched(self, step: int) -> None:
        """Its tiles are waited for where they are put out."""

    def write(self, block: int, step: int) -> None:
        self._frames.write(block, *self._locate(block))

    def matrix(self, block: int, dtype: torch.dtype, rows: int, columns: int) -> Tensor:
        memory = torch.from_numpy(self._frames.view(block, rows * columns * dtype.itemsize))
        return memory.view(dtype).view(rows, columns)

    def region(self, frame: int, nbytes: int) -> Tensor:
        return torch.from_numpy(self._frames.region(frame, nbytes))

    def await_written(self, block: int) -> None:
        self._frames.await_written(block)

    def settle(self) -> None:
        self._frames.settle()


class _Read(Filling):
    """From the SSD straight into the buffer."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket

    def wait(self) -> None:
        self._ticket.wait()

    def settle(self) -> None:
        self._ticket.settle()
