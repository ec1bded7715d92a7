# SPDX-License-Identifier: Apache-2.0
"""A recorder of one epoch: what each resource did when, what memory was in use, and how many bytes of each matrix
moved.

The record's size is bounded, however large the graph: times by at most 1,024 pieces (``ooc.plan.simulate.condensed``),
bytes by matrix. Recording decides nothing and changes no result.
"""

import resource
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import Any

from ooc.engine.record import PassRecord
from ooc.engine.runtime import Runtime
from ooc.plan.program.plan import Plan
from ooc.plan.program.sequence import Use
from ooc.plan.simulate.condensed import Condenser
from ooc.plan.simulate.timeline import Resource
from ooc.prefetch.engine import Span, Ticket

_STATM = Path("/proc/self/statm")
_SAMPLING_INTERVAL_S = 25e-3
"""The least time between two looks at the process's memory: one takes ten microseconds, in a sandbox two hundred."""
_WAITING_SHARE = 0.1
"""The share of a pass's time: a pass that waited longer was bound by what it waited for, as in the simulator."""


class EpochRecorder:
    """A recorder of one run of ``program``: from ``start`` to ``finish``, or to ``stop`` where the run fails."""

    def __init__(self, program: str) -> None:
        self.program = program
        self._condenser = Condenser(program)
        self._under_way: deque[tuple[Ticket, float, int, bool]] = deque()
        self._sending = Lock()  # workers write, and the main thread reads
        self._busy_until = [0.0, 0.0]
        self._moved: dict[str, list[int]] = {}
        self._found: dict[str, Any] | None = None
        self._runtime: Runtime | None = None

    def start(self, runtime: Runtime) -> None:
        """Begin recording, as the program begins."""
        condenser, plan = self._condenser, runtime.plan
        self._runtime = runtime
        self._names = {m.array.name: name for name, m in runtime.matrices.items() if m.array is not None}
        self._drive = condenser.lane(Resource.SSD_READ), condenser.lane(Resource.SSD_WRITE)
        self._unrolled, self._regions = plan.unrolled[self.program], plan.regions[self.program]
        self._held = {block for block, _ in self._unrolled.warm}
        self._beside_bytes = plan.scratch_bytes + plan.fixed_device_bytes
        if plan.has_tiers:
            self._arena = condenser.memory("device memory", plan.device_limit_bytes)
            self._host = condenser.memory("host memory", plan.host_limit_bytes)
        else:
            self._arena = condenser.memory("memory", plan.device_limit_bytes + plan.host_limit_bytes)
            self._beside_bytes += plan.fixed_host_bytes
        self._process = condenser.memory("process", 0)
        self._looked_s = -_SAMPLING_INTERVAL_S
        self._began_s = perf_counter()
        if not plan.has_tiers:  # on a device a task ends when its kernels are launched
            runtime.workers.watch(
                [condenser.lane(Resource.COMPUTE) for _ in range(runtime.workers.workers)], self._began_s
            )
        runtime.engine.watch = self._sent

    def begin(self, step: int, index: int) -> None:
        """Record the memory in use after step ``step``, of pass ``index``, has given frames to its blocks.

        The arena's use is counted as the simulator counts it, the process's as the system does.
        """
        assert self._runtime is not None, "the program has begun"
        plan, now_s = self._runtime.plan, perf_counter() - self._began_s
        self._held.update(block for block, _, _ in self._unrolled.acquire[step])
        frames = len(self._held) + sum(r.count for r in self._regions if r.first <= index <= r.last)
        self._arena.add(now_s, self._beside_bytes + frames * plan.frame_bytes)
        if now_s - self._looked_s < _SAMPLING_INTERVAL_S:
            return
        self._looked_s = now_s
        self._process.add(now_s, int(_STATM.read_text().split()[1]) * resource.getpagesize())
        if plan.has_tiers:
            self._host.add(now_s, plan.host_peak_bytes)  # the arena is counted as a whole

    def end(self, step: int) -> None:
        """Record that all tasks of the step have ended."""
        kept, spans = self._unrolled.kept.after, self._unrolled.uses.spans
        self._held.difference_update(spans[i].block for i in self._unrolled.uses.ending(step) if not kept[i])

    def _sent(self, spans: Sequence[Span], writing: bool, ticket: Ticket) -> None:
        now_s = perf_counter() - self._began_s
        nbytes = sum(span.nbytes for span in spans)
        with self._sending:
            moved = self._moved.setdefault(self._names.get(spans[0].label, spans[0].label), [0, 0, 0, 0])
            moved[2 * writing] += 1
            moved[2 * writing + 1] += nbytes
            self._under_way.append((ticket, now_s, nbytes, writing))
            while self._under_way and self._under_way[0][0].happened:
                self._ended(self._under_way[0][0].ended_s - self._began_s)

    def _ended(self, end_s: float) -> None:
        """Record that the first request in progress has ended. Overlapping requests count once: the drive is busy or it
        is not."""
        _, start_s, nbytes, writing = self._under_way.popleft()
        end_s = max(end_s, start_s)
        busy_until = self._busy_until[writing]
        self._drive[writing].add(min(end_s, max(start_s, busy_until)), end_s, nbytes)
        self._busy_until[writing] = max(busy_until, end_s)

    def stop(self) -> None:
        """Stop recording. May be called twice, and before ``start``."""
        if self._runtime is not None:
            self._runtime.engine.watch = None
            self._runtime.workers.watch(None, 0.0)

    def finish(self, passes: Sequence[PassRecord]) -> None:
        """Record that the program has ended; ``passes`` are what its passes took."""
        assert self._runtime is not None, "the program has begun"
        epoch_s = perf_counter() - self._began_s
        while self._under_way:
            ticket = self._under_way[0][0]
            self._ended(min(epoch_s, ticket.ended_s - self._began_s) if ticket.happened else epoch_s)
        self.stop()
        at_s = 0.0
        for item in passes:
            bound = Resource.SSD_READ if item.wait_s > _WAITING_SHARE * item.time_s else Resource.COMPUTE
            self._condenser.add_pass(item.name, at_s, at_s + item.time_s, item.wait_s, bound.value)
            at_s += item.time_s
        plan = self._runtime.plan
        blocked, spans = set(plan.blocks.names), plan.lowest(self.program).uses.spans
        read = sum(moved[0] for name, moved in self._moved.items() if name in blocked)
        self._found = {
            **self._condenser.as_dict(epoch_s),
            "threads": self._runtime.workers.workers,
            "matrices": self._matrices(plan),
            # How often a block was needed from the tier above the SSD, and how often from the SSD.
            "block_reads": {"uses": sum(span.use is not Use.WRITE for span in spans), "read": read},
        }

    def as_dict(self, epoch: int) -> dict[str, Any]:
        """Return the record of ``epoch``, which has finished, as plain data."""
        assert self._found is not None, "the program has finished"
        return {"epoch": epoch, **self._found}

    def _matrices(self, plan: Plan) -> list[dict[str, Any]]:
        """Return by matrix what the SSD moved of it, as measured, and how much an epoch reads of it and finds in
        memory."""
        used = plan.lowest(self.program).bytes_used(plan.blocks)
        found = []
        for name in dict.fromkeys((*used, *self._moved)):
            _, read_bytes, _, write_bytes = self._moved.get(name, (0, 0, 0, 0))
            needed, in_memory = used.get(name, (read_bytes, 0))
            moved = {"ssd_read_bytes": read_bytes, "ssd_write_bytes": write_bytes}
            found.append({"matrix": name, "used_bytes": needed, "found_bytes": in_memory} | moved)
        return found
