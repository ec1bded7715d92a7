# SPDX-License-Identifier: Apache-2.0
"""The simulator: a program's instructions replayed against the rates of a machine.

One epoch in the steady state is timed: blocks that the epoch before has left in memory are there. It follows the
executor, which on the CPU waits for what a step needs (``ooc.plan.simulate.replay``).

On a device with memory of its own the host sends kernels and copies off and waits for none of them: in its stream each
begins when the one before it has ended, and so have those of other streams that it is to wait for
(``ooc.prefetch.device_frames`` says which). A step's kernels take as long as computing, and end no sooner than the host
has launched them. The host waits for the drive, and for what still moves through a frame that the drive is to read into
(``ooc.plan.simulate.host_tier``).
"""

from ooc.plan.hardware import Hardware
from ooc.plan.layout.passes import Pass
from ooc.plan.program.plan import Plan
from ooc.plan.program.sequence import Span, Use
from ooc.plan.simulate.channels import READ, WRITE
from ooc.plan.simulate.host_tier import HostTier
from ooc.plan.simulate.replay import Replay
from ooc.plan.simulate.timeline import Event, MemoryUse, Resource, Timeline
from ooc.plan.workload import Workload

_COPY_OPERATORS = 5
"""Operators that the host launches in the time in which it sends off a copy: with a device that does nothing that took
9 us, and there are three calls of a driver besides."""


def simulate(plan: Plan, workload: Workload, hardware: Hardware, program: str = "train") -> Timeline:
    """One run of ``program`` of a plan made for ``workload``, on ``hardware``."""
    replay = DeviceReplay if plan.has_tiers else Replay
    return replay(plan, workload, hardware, program).run()


class DeviceReplay(Replay):
    """``now`` is when the host has got so far; ``kernels_s`` when the kernels that it has launched by then end."""

    def __init__(self, plan: Plan, workload: Workload, hardware: Hardware, name: str) -> None:
        super().__init__(plan, workload, hardware, name)
        self.host = HostTier(plan, plan.staged[name], hardware)
        self.pcie = self.host.pcie
        self.kernels_s = 0.0
        self._held: tuple[float, Resource] = (0.0, Resource.COMPUTE)
        """Until when the next kernels are held, and for whom."""
        self._vacant_s = 0.0
        """When the kernels end that have used frames given away now."""
        self._copying_s = 0.0
        self._beside_bytes = 0  # what lies on the host is no part of this memory

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

    def _entered(self) -> None:
        self._vacant_s = self._launched_s()

    def _launched_s(self) -> float:
        """When a copy may begin that is to wait for all kernels launched, and for what they are held for."""
        return max(self.kernels_s, self._held[0])

    def _step(self, t: int, first: int, item: Pass) -> float:
        if t - 2 >= first:
            self._end(t - 2, item.index)
            self._vacant_s = self.done.pop(t - 2)
        self.issued = 0.0
        self._begin(t, item)
        taken = self._computing(item, self.program.steps[t])
        start_s = self._start_s()
        computed_s = start_s + taken.shared_s + (1 - self.hardware.overlap) * self.issued
        self.now += taken.alone_s
        self.kernels_s = self.done[t] = max(computed_s, self.now)
        self.events.append(Event(Resource.COMPUTE, start_s, self.kernels_s, item.index, 0))
        copying_s, self._copying_s = self._copying_s, 0.0
        return copying_s + self.kernels_s - start_s

    def _start_s(self) -> float:
        """When the next kernels begin; whoever they wait for is noted."""
        idle_s = self.now - self.kernels_s
        for resource, seconds in self.host.blocked_s.items():
            if idle_s > 0:
                self.waits[resource] = self.waits.get(resource, 0.0) + min(seconds, idle_s)
        self.host.blocked_s.clear()
        ready_s, (held_s, resource) = max(self.kernels_s, self.now), self._held
        if held_s > ready_s:
            self.waits[resource] = self.waits.get(resource, 0.0) + held_s - ready_s
        return max(ready_s, held_s)

    def _left(self, first: int, stop: int, item: Pass) -> None:
        for t in range(max(first, stop - 2), stop):
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
        """``behind_s``: when what it waits for has happened; None: all kernels launched so far."""
        before_s = self.host.issued_s
        ticket = self.host.transfer(self.now, at, self._launched_s() if behind_s is None else behind_s)
        self.now = max(self.now, self.host.now) + _COPY_OPERATORS * self.hardware.processor.seconds_per_operator
        self.issued += self.host.issued_s - before_s + nbytes / self.pcie.rates[direction]
        return ticket

    def _await(self, ticket: int | None) -> None:
        """Hold kernels for it."""
        if ticket is not None and self.pcie.served[ticket] > self._held[0]:
            late = ticket in self.host.waited_for_disk
            self._held = self.pcie.served[ticket], Resource.SSD_READ if late else self.pcie.resource(ticket)

    def _await_written(self, block: int) -> None:
        """Copies of one block pass through one host frame, one after the other."""
        self.on_their_way.pop(block, None)

    def _copy(self, nbytes: int, at: int) -> None:
        """A kernel."""
        start_s = max(self._launched_s(), self.now)
        self.kernels_s = start_s + 2 * nbytes / self.hardware.processor.stream_bytes_per_s
        self.events.append(Event(Resource.COMPUTE, start_s, self.kernels_s, at, 0))
        self._copying_s += self.kernels_s - start_s
