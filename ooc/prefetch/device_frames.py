# SPDX-License-Identifier: Apache-2.0
"""Frames and regions in a device's own memory, and the events between kernels and copies.

Three streams use the arena: kernels, copies to the device, and copies to the host. These rules separate them:

- a kernel waits for the copies of what it reads (``await_read``, ``hold``), and for the copies out of what it
  overwrites (``await_frame``, ``move``, ``clear``);
- a copy into a frame waits for the kernels of the step in which the frame was last used (``vacate``), for all before
  it, and for the copy out of the frame, if there is one;
- a copy into a slab buffer waits for every kernel so far, since those of the sweep before have read it;
- a copy out of a frame waits for the kernels of the step that has filled it (``write``).

Copies of one direction are in one stream, hence in order. Only ``Transfers``, for host frames, and requests of
GPUDirect, which belong to no stream, block the host; for the latter the host waits instead of a kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ooc.plan.program.program import Program
from ooc.plan.program.staging import CopyTo, Staging
from ooc.prefetch.device import Device
from ooc.prefetch.engine import Event
from ooc.prefetch.frames import Nbytes, Workspace
from ooc.prefetch.transfers import Transfers

_STEPS_KNOWN = 4
"""Steps whose ends are remembered: a step's results are written, and its frames reassigned, two steps later."""


@dataclass(eq=False)
class DeviceWorkspace(Workspace):
    """Frames of ``frame_bytes`` in ``arena``, uint8, of ``device``, with host frames and the SSD below them."""

    device: Device
    arena: Tensor
    frame_bytes: int
    transfers: Transfers
    nbytes: Nbytes

    def __post_init__(self) -> None:
        super().__init__(self.nbytes)
        self.place = self.device.place
        self._typed: dict[torch.dtype, Tensor] = {}
        self._launched: dict[int, Event] = {}  # step of this pass → the end of its kernels
        self._vacant: Event = self.device.record()
        """The end of the kernels that have used the frames being reassigned now."""

    def hold(self, transfer: Event) -> None:
        """Make kernels wait for the event; where a stream cannot, the host waits."""
        if transfer.of_stream:
            self.device.hold(transfer)
        else:
            transfer.wait()

    # ---- programs and passes -------------------------------------------------------------------------------

    def begin(self, program: Program, staging: Staging | None) -> None:
        assert staging is not None, "the plan is of a machine whose CPU computes"
        self.device.begin()
        self._vacant = self.device.record()
        for block, frame in program.warm:
            if not self.holds(block, frame):
                self._give(block, frame)
                self._arriving[block] = self.transfers.fetch(block, self._memory(block), self._behind(frame))
        self.transfers.begin(staging, program)

    def entered(self) -> None:
        self._launched.clear()
        self._vacant = self.device.record()

    def finish(self, program: Program) -> None:
        super().finish(program)
        self.transfers.finish()

    # ---- steps ---------------------------------------------------------------------------------------------

    def vacate(self, step: int) -> None:
        self._vacant = self._launched.get(step, self._vacant)

    def acquire(self, block: int, frame: int, *, load: bool) -> None:
        self._give(block, frame)
        if load:
            behind = self._behind(frame)
            self._arriving[block] = self.transfers.send(block, CopyTo.DEVICE, self._memory(block), behind)

    def fill(self, block: int, memory: Tensor) -> Event:
        return self.transfers.send(block, CopyTo.DEVICE, memory, [self.device.record()])

    def launched(self, step: int) -> None:
        self._launched[step] = self.device.record()
        self._launched.pop(step - _STEPS_KNOWN, None)

    def write(self, block: int, step: int) -> None:
        behind = [self._launched[step]]
        self._leaving[self._where[block]] = self.transfers.send(block, CopyTo.HOST, self._memory(block), behind)

    # ---- memory --------------------------------------------------------------------------------------------

    def matrix(self, block: int, dtype: torch.dtype, rows: int, columns: int) -> Tensor:
        start = self._where[block] * self.frame_bytes
        assert start + rows * columns * dtype.itemsize <= self.arena.nbytes
        return self._of_type(dtype).as_strided((rows, columns), (columns, 1), start // dtype.itemsize)

    def region(self, frame: int, nbytes: int) -> Tensor:
        start = frame * self.frame_bytes
        return self.arena[start : start + nbytes]

    def await_written(self, block: int) -> None:
        self.transfers.await_saved(block)

    def settle(self) -> None:
        self.transfers.settle()
        for known in (self._where, self._content, self._arriving, self._leaving, self._launched):
            known.clear()

    # ---- frames --------------------------------------------------------------------------------------------

    def _of_type(self, dtype: torch.dtype) -> Tensor:
        """Return the arena as numbers of a dtype.

        A matrix is then one torch operator, where from bytes it would be five, and the host takes 2 µs instead of 10.
        """
        found = self._typed.get(dtype)
        if found is None:
            whole = self.arena.nbytes // dtype.itemsize * dtype.itemsize
            found = self._typed[dtype] = self.arena[:whole].view(dtype)
        return found

    def _behind(self, frame: int) -> Sequence[Event]:
        """Return the events that a copy into ``frame`` has to wait for."""
        leaving = self._leaving.pop(frame, None)
        return [self._vacant] if leaving is None else [self._vacant, leaving]
