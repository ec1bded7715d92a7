# SPDX-License-Identifier: Apache-2.0
"""The simulator: replay a program's instructions against the rates of a machine.

It times one epoch in the steady state, in which blocks left by the epoch before are in memory. It follows the executor,
which on the CPU waits for what a step needs (``ooc.plan.simulate.replay``).

On a device with memory of its own, the host launches kernels and copies without waiting for them. In a stream, each
begins when the one before it has ended, and when those of other streams it depends on have
(``ooc.prefetch.device_frames`` says which). A step's kernels take as long as its computing, and end no sooner than the
host has launched them. The host waits for the drive if it needs a block to send next, or a frame (``HostTier``).
Another thread computes the checksums of blocks.
"""

from ooc.plan.hardware import Hardware
from ooc.plan.layout.passes import Pass
from ooc.plan.program.plan import Plan
from ooc.plan.program.sequence import Span, Use
from ooc.plan.program.staging import CopyTo, Staging
from ooc.plan.simulate.channels import READ, WRITE, Drive, Pcie
from ooc.plan.simulate.replay import Replay
from ooc.plan.simulate.timeline import Event, MemoryUse, Resource, Timeline
from ooc.plan.workload import Workload

_COPY_OPERATORS = 5
"""Operators that the host launches in the time it takes to start a copy: with a stand-in device that took 9 us, and
there are three calls of a driver besides."""
_REQUEST_SHARE = 0.2
"""The fraction of the processor's time for moving a block that goes into requesting it; the rest is for checksums in
another thread. For blocks of 8 MB, the requesting thread took 0.21 ms, instead of 1.07 ms with the checksums."""


def simulate(plan: Plan, workload: Workload, hardware: Hardware, program: str = "train") -> Timeline:
    """Return the timeline of one run of ``program``, of a plan made for ``workload``, on ``hardware``."""
    replay = DeviceReplay if plan.has_tiers else Replay
    return replay(plan, workload, hardware, program).run()


class DeviceReplay(Replay):
    """The executor on a device. ``now`` is the host's clock; ``kernels_s``: when the kernels launched so far end."""

    def __init__(self, plan: Plan, workload: Workload, hardware: Hardware, name: str) -> None:
        super().__init__(plan, workload, hardware, name)
        self.host = HostTier(plan, plan.staged[name], hardware)
        self.pcie = self.host.pcie
        self.kernels_s = 0.0
        self._held: tuple[float, Resource] = (0.0, Resource.COMPUTE)
        """Until when the next kernels are held, and what they wait for."""
        self._vacant_s = 0.0
        """When the kernels end that have used frames which are given away now."""
        self._copying_s = 0.0
        self._beside_bytes = 0  # blocks on the host are not in this memory

    def _drain(self) -> float:
        below_s = self.host.drain()
        self.events += self.pcie.events() + self.host.disk.events()
        return max(self.now, self.kernels_s, below_s)

    def _memory(self) -> tuple[MemoryUse, ...]:
        plan, below = self.plan, tuple(self.host.samples)
        return (
            MemoryUse("device memory", plan.device_limit_bytes, tuple(self.samples)),
            MemoryUse("host memory", plan.host_limit_bytes, below or ((0.0, plan.fixed_host_bytes),)),
        )

    # ---- passes and steps ---------------------------------------------------------------------------------

    def _clock(self) -> float:
        return self.kernels_s

    def _launched_s(self) -> float:
        """Return when a copy may begin that waits for all kernels launched so far and for what they are held for."""
        return max(self.kernels_s, self._held[0])

    def _step(self, t: int, first: int, item: Pass) -> float:
        if t == first:
            self._vacant_s = self._launched_s()
        ended = t - item.steps_at_once
        if ended >= first:
            self._end(ended, item.index)
            self._vacant_s = self.done.pop(ended)
        self.unhidden = 0.0
        self._begin(t, item)
        taken = self._computing(item, self.program.steps[t])
        start_s = self._start_s()
        computed_s = start_s + taken.shared_s + self.unhidden
        self.now += taken.alone_s
        self.kernels_s = self.done[t] = max(computed_s, self.now)
        self.events.append(Event(Resource.COMPUTE, start_s, self.kernels_s, item.index, 0))
        copying_s, self._copying_s = self._copying_s, 0.0
        return copying_s + self.kernels_s - start_s

    def _start_s(self) -> float:
        """Return when the next kernels begin; what they wait for is recorded."""
        idle_s = self.now - self.kernels_s
        for resource, seconds in self.host.blocked_s.items():
            if idle_s > 0:
                self.waits[resource] = self.waits.get(resource, 0.0) + min(seconds, idle_s)
        self.host.blocked_s.clear()
        ready_s, (held_s, resource) = max(self.kernels_s, self.now), self._held
        if held_s > ready_s:
            self.waits[resource] = self.waits.get(resource, 0.0) + held_s - ready_s
        return max(ready_s, held_s)

    def _finish_pass(self, first: int, stop: int, item: Pass) -> None:
        for t in range(max(first, stop - item.steps_at_once), stop):
            self._end(t, item.index)
        self.done.clear()

    def _acquire(self, block: int, frame: int, at: int, *, load: bool) -> None:
        self.where[block] = frame
        if load:
            behind_s = self._vacant_s
            leaving = self.leaving.pop(frame, None)
            if leaving is not None:
                behind_s = max(behind_s, self.pcie.served[leaving])
            self._await_written(block)
            self.arriving[block] = self._send(READ, self.plan.blocks.nbytes(block), at, behind_s)

    def _use(self, span: Span) -> None:
        super()._use(span)
        if span.use is Use.WRITE:
            self._await(self.leaving.pop(self.where[span.block], None))

    def _store(self, block: int, t: int, at: int) -> int:
        return self._send(WRITE, self.plan.blocks.nbytes(block), at, self.done[t])

    # ---- what moves ---------------------------------------------------------------------------------------

    def _send(self, direction: int, nbytes: int, at: int, behind_s: float | None = None) -> int:
        """Send a copy that waits until ``behind_s``, or, if that is None, for all kernels launched so far."""
        before_s = self.host.issued_s
        ticket = self.host.transfer(self.now, at, self._launched_s() if behind_s is None else behind_s)
        self.now = max(self.now, self.host.now) + _COPY_OPERATORS * self.hardware.processor.seconds_per_operator
        busy_s = self.host.issued_s - before_s + nbytes / self.pcie.rates[direction]
        self.unhidden += (1 - self.hardware.overlap) * busy_s
        return ticket

    def _await(self, ticket: int | None) -> None:
        """Hold the next kernels for a copy."""
        if ticket is not None and self.pcie.served[ticket] > self._held[0]:
            late = ticket in self.host.waited_for_disk
            self._held = self.pcie.served[ticket], Resource.SSD_READ if late else self.pcie.resource(ticket)

    def _await_written(self, block: int) -> None:
        """Copies of one block pass through one host frame, one after the other, so there is nothing to wait for."""
        self.on_their_way.pop(block, None)

    def _copy(self, nbytes: int, at: int) -> None:
        """Copy within the device, which is a kernel."""
        start_s = max(self._launched_s(), self.now)
        self.kernels_s = start_s + 2 * nbytes / self.hardware.processor.stream_bytes_per_s
        self.events.append(Event(Resource.COMPUTE, start_s, self.kernels_s, at, 0))
        self._copying_s += self.kernels_s - start_s


class HostTier:
    """The level below a device in simulated time: transfers over PCIe, and the drive behind the host's frames.

    Transfers are requested and sent in the order of the lower program (``ooc.plan.program.staging``). One to the device
    waits until its block is in its host frame, and so does the host. A block that came to the host only for the drive
    is written when it has arrived. Copies through one frame wait for one another, and reads into it are postponed until
    then.

    ``now`` is the host's clock. ``waited_for_disk``: the PCIe tickets that had to wait for a read. ``blocked_s``: how
    long the host has waited, and for what, since it was last cleared.
    """

    def __init__(self, plan: Plan, staging: Staging, hardware: Hardware) -> None:
        assert hardware.wire is not None
        rates = hardware.wire.to_device_bytes_per_s, hardware.wire.to_host_bytes_per_s
        self.pcie = Pcie(rates)
        self.disk = Drive.of(hardware, plan.frame_bytes)
        self.now = 0.0
        self.waited_for_disk: set[int] = set()
        self.blocked_s: dict[Resource, float] = {}
        self.issued_s = 0.0
        self.checked_s = 0.0
        """When the checksum thread is done with all blocks it has been given."""
        self.samples: list[tuple[float, int]] = []
        self._plan, self._staging = plan, staging
        self._hardware = hardware
        self._index = 0
        self._where = dict(staging.program.warm)
        self._arriving: dict[int, int] = {}  # block → ticket of its read
        self._written: dict[int, int] = {}  # block → ticket of its write
        self._summed_s: dict[int, float] = {}  # block → when its checksum is known
        self._passing: dict[int, int] = {}  # frame → ticket of PCIe
        self._leaving: dict[int, int] = {}  # frame → block being written from it
        self._unsaved: dict[int, tuple[int, int]] = {}  # block → ticket of PCIe, and pass; in order
        self._postponed: dict[int, int] = {}  # block to be read → pass; in order

    def transfer(self, now_s: float, at: int, behind_s: float) -> int:
        """Send the next transfer, requested at ``now_s`` in pass ``at``, to begin no sooner than ``behind_s``; return
        its ticket."""
        index, program = self._index, self._staging.program
        self._index += 1
        _, block, direction = self._staging.transfers[index]
        self.now = max(self.now, now_s)
        self._write_arrived_blocks()
        for taken, frame, load in program.acquire[index]:
            self._where[taken] = frame
            if load:
                self._postponed[taken] = at
        while self._postponed and self._is_vacant(first := next(iter(self._postponed))):
            self._read(first)
        late = False
        if block in self._postponed:
            self._read(block)
        if block in self._arriving:
            arrives = self._check(block, self.disk.wait(self._arriving.pop(block)))
            late = arrives > self.now
            self._wait(arrives, Resource.SSD_READ)
        frame = self._where[block]
        if direction is CopyTo.HOST and frame in self._leaving:
            self._wait_written(self._leaving.pop(frame))
        behind_s = max(behind_s, self.now)
        if frame in self._passing:
            behind_s = max(behind_s, self.pcie.served[self._passing[frame]])
        ticket = self.pcie.send(0 if direction is CopyTo.DEVICE else 1, self._plan.blocks.nbytes(block), at, behind_s)
        if late:
            self.waited_for_disk.add(ticket)
        self._passing[frame] = ticket
        for stored in program.store[index]:
            self._leaving[self._where[stored]] = stored
            self._unsaved[stored] = ticket, at
        plan = self._plan
        self.samples.append((self.now, plan.fixed_host_bytes + len(self._where) * plan.frame_bytes))
        if not program.kept.after[index]:
            del self._where[block]
        return ticket

    def drain(self) -> float:
        """Return when everything is done."""
        for ticket, _ in list(self._unsaved.values()):
            self.now = max(self.now, self.pcie.served[ticket])
            self._write_arrived_blocks()
        return max(self.now, self.pcie.drain(), self.disk.drain())

    def _write_arrived_blocks(self) -> None:
        while self._unsaved:
            block, (ticket, at) = next(iter(self._unsaved.items()))
            if self.pcie.served[ticket] > self.now:
                return
            del self._unsaved[block]
            self._summed_s[block] = self._check(block, self.now)
            self._written[block] = self._send(WRITE, block, at)

    def _is_vacant(self, block: int) -> bool:
        """Whether ``block`` can be read into its frame without waiting."""
        frame = self._where[block]
        saved = {block, self._leaving.get(frame)}
        passing = frame in self._passing and self.pcie.served[self._passing[frame]] > self.now
        if passing or self._unsaved.keys() & saved:
            return False
        self.disk.advance(self.now)
        written = self._written.keys() & saved
        served = (
            max(self.disk.served[self._written[one]] + self.disk.latency_s, self._summed_s[one]) for one in written
        )
        return all(one <= self.now for one in served)

    def _read(self, block: int) -> None:
        """Read ``block`` as soon as nothing moves through its frame any more."""
        frame = self._where[block]
        if frame in self._passing:
            self._wait(self.pcie.served[self._passing.pop(frame)], Resource.TO_DEVICE)
        if frame in self._leaving:
            self._wait_written(self._leaving.pop(frame))
        self._wait_written(block)
        self._arriving[block] = self._send(READ, block, self._postponed.pop(block))

    def _wait_written(self, block: int) -> None:
        self._write_arrived_blocks()
        if block in self._written:
            saved_s = max(self.disk.wait(self._written.pop(block)), self._summed_s.pop(block))
            self._wait(saved_s, Resource.SSD_WRITE)

    def _wait(self, until_s: float, resource: Resource) -> None:
        """Make the host wait."""
        if until_s > self.now:
            self.blocked_s[resource] = self.blocked_s.get(resource, 0.0) + until_s - self.now
            self.now = until_s

    def _send(self, direction: int, block: int, at: int) -> int:
        nbytes = self._plan.blocks.nbytes(block)
        ticket = self.disk.send(direction, nbytes, at, self.now)
        self.issued_s += nbytes / self.disk.rates[direction]
        self.now += _REQUEST_SHARE * self._hardware.moving_s(nbytes)
        return ticket

    def _check(self, block: int, there_s: float) -> float:
        """Return when the checksum of ``block``, whose bytes are there from ``there_s`` on, has been computed, after
        those of other blocks."""
        looking_s = (1 - _REQUEST_SHARE) * self._hardware.moving_s(self._plan.blocks.nbytes(block))
        self.checked_s = max(self.checked_s, there_s) + looking_s
        return self.checked_s
