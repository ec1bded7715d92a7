# SPDX-License-Identifier: Apache-2.0
"""The level below a device in simulated time: transfers over PCIe, and the drive behind the host's frames.

Transfers are asked for in the order of the lower program (``ooc.plan.program.staging``) and sent off in it: one to the
device waits until its block is in its host frame, and the host with it; a block that came to the host for the drive's
sake is written when it has come. Copies through one frame wait for one another; before the drive reads into one, the
host does.
"""

from collections import deque

from ooc.plan.hardware import Hardware
from ooc.plan.program.plan import Plan
from ooc.plan.program.staging import Staging, Way
from ooc.plan.simulate.channels import READ, WRITE, Drive, Pcie
from ooc.plan.simulate.timeline import Resource


class HostTier:
    """``now`` is the host's clock. ``waited_for_disk``: the tickets of PCIe that had to wait for a read.
    ``blocked_s``: how long the host has waited, and for whom, since somebody cleared it."""

    def __init__(self, plan: Plan, staging: Staging, hardware: Hardware) -> None:
        assert hardware.wire is not None
        rates = hardware.wire.to_device_bytes_per_s, hardware.wire.to_host_bytes_per_s
        self.pcie = Pcie(rates)
        self.disk = Drive.of(hardware, plan.frame_bytes)
        self.now = 0.0
        self.waited_for_disk: set[int] = set()
        self.blocked_s: dict[Resource, float] = {}
        self.issued_s = 0.0
        self.samples: list[tuple[float, int]] = []
        self._plan, self._staging = plan, staging
        self._seconds_per_block = hardware.seconds_per_block
        self._index = 0
        self._where = dict(staging.program.warm)
        self._arriving: dict[int, int] = {}  # block → ticket of its read
        self._written: dict[int, int] = {}  # block → ticket of its write
        self._passing: dict[int, int] = {}  # frame → ticket of PCIe
        self._leaving: dict[int, int] = {}  # frame → block that is written out of it
        self._unsaved: deque[tuple[int, int, int]] = deque()  # (ticket of PCIe, block, pass)

    def transfer(self, now_s: float, at: int, behind_s: float) -> int:
        """Send off the next transfer, asked for at ``now_s`` in pass ``at``, not to begin before ``behind_s``; its
        ticket of PCIe."""
        index, program = self._index, self._staging.program
        self._index += 1
        _, block, way = self._staging.transfers[index]
        self.now = max(self.now, now_s)
        self._write_what_has_come()
        for taken, frame, load in program.acquire[index]:
            self._where[taken] = frame
            if load:
                self._free(frame)
                self._wait_written(taken)
                self._arriving[taken] = self._send(READ, taken, at)
        late = False
        if block in self._arriving:
            arrives = self.disk.wait(self._arriving.pop(block))
            late = arrives > self.now
            self._wait(arrives, Resource.SSD_READ)
        frame = self._where[block]
        if way is Way.TO_HOST and frame in self._leaving:
            self._wait_written(self._leaving.pop(frame))
        behind_s = max(behind_s, self.now)
        if frame in self._passing:
            behind_s = max(behind_s, self.pcie.served[self._passing[frame]])
        ticket = self.pcie.send(0 if way is Way.TO_DEVICE else 1, self._plan.blocks.nbytes(block), at, behind_s)
        if late:
            self.waited_for_disk.add(ticket)
        self._passing[frame] = ticket
        for stored in program.store[index]:
            self._leaving[self._where[stored]] = stored
            self._unsaved.append((ticket, stored, at))
        self._sample()
        if not program.kept.after[index]:
            del self._where[block]
        return ticket

    def drain(self) -> float:
        """When everything is done."""
        while self._unsaved:
            self.now = max(self.now, self.pcie.served[self._unsaved[0][0]])
            self._write_what_has_come()
        return max(self.now, self.pcie.drain(), self.disk.drain())

    def _write_what_has_come(self) -> None:
        while self._unsaved and self.pcie.served[self._unsaved[0][0]] <= self.now:
            _, block, at = self._unsaved.popleft()
            self._written[block] = self._send(WRITE, block, at)

    def _free(self, frame: int) -> None:
        """Wait until nothing moves through ``frame``."""
        if frame in self._passing:
            self._wait(self.pcie.served[self._passing.pop(frame)], Resource.TO_DEVICE)
        if frame in self._leaving:
            self._wait_written(self._leaving.pop(frame))

    def _wait_written(self, block: int) -> None:
        self._write_what_has_come()
        if block in self._written:
            self._wait(self.disk.wait(self._written.pop(block)), Resource.SSD_WRITE)

    def _wait(self, until_s: float, resource: Resource) -> None:
        """Have the host wait."""
        if until_s > self.now:
            self.blocked_s[resource] = self.blocked_s.get(resource, 0.0) + until_s - self.now
            self.now = until_s

    def _send(self, direction: int, block: int, at: int) -> int:
        nbytes = self._plan.blocks.nbytes(block)
        ticket = self.disk.send(direction, nbytes, at, self.now)
        self.issued_s += nbytes / self.disk.rates[direction]
        self.now += self._seconds_per_block
        return ticket

    def _sample(self) -> None:
        used = len(self._where) * self._plan.frame_bytes
        self.samples.append((self.now, self._plan.fixed_host_bytes + used))
