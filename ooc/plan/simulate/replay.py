# SPDX-License-Identifier: Apache-2.0
"""A program's instructions replayed in simulated time, as the executor follows them on the CPU.

Reads start when a step begins, in the program's order. A step is computed when its reads have arrived and the step
before is done. A step begins when the last but one is done. Writes go on in the background and share the drive with
reads. A pass ends when all its steps are done.
"""

from ooc.plan.cost import Computing, Portion, computing_of, ssd_seconds
from ooc.plan.hardware import Hardware
from ooc.plan.layout.passes import ColumnPass, Pass, shuffles_in, streamed_write_bytes
from ooc.plan.layout.shuffle import Shuffle
from ooc.plan.program.plan import Plan
from ooc.plan.program.program import Program
from ooc.plan.program.sequence import Span, Step
from ooc.plan.simulate.channels import READ, WRITE, Drive
from ooc.plan.simulate.timeline import Event, MemoryUse, PassTime, Resource, Timeline
from ooc.plan.workload import Workload

_TILES_AHEAD = 3
"""Tiles for each thread that are queued before the executor waits for one, which is how far a step begins before the
last ends."""
_STEP_BYTES = 1 << 19
"""Bytes of a request for optimizer state."""
_WAITING_SHARE = 0.1
"""A pass that waits for longer than this fraction of its time is bound by what it waits for."""


class Replay:
    """The executor on the CPU: its clock (``now``), the clocks of computation and drive, and the frames in use.

    A device with memory of its own has the clocks of its streams (``ooc.plan.simulate.simulator``).
    """

    def __init__(self, plan: Plan, workload: Workload, hardware: Hardware, name: str) -> None:
        self.plan, self.workload, self.hardware = plan, workload, hardware
        self.name = name
        self.program: Program = plan.unrolled[name]
        self.drive = Drive.of(hardware, plan.frame_bytes)
        self.now = 0.0
        self.done: dict[int, float] = {}  # step → when it is computed; of the last two
        self.events: list[Event] = []
        self.passes: list[PassTime] = []
        self.arriving: dict[int, int] = {}  # block → ticket
        self.leaving: dict[int, int] = {}  # frame → ticket
        self.on_their_way: dict[int, int] = {}  # block → ticket of its write
        self.filling: dict[int, list[tuple[int, int]]] = {}  # slab → (ticket, bytes to widen)
        self.where = dict(self.program.warm)
        self.samples: list[tuple[float, int]] = []
        self.begun = 0  # spans that have begun
        self.computing: dict[Portion, Computing] = {}  # of this pass
        self.retained = plan.retained_bytes / max(1, plan.retainable_bytes)
        self.buckets: dict[tuple[str, int, int], int] = {}  # (matrix, pass, bucket) of what has no blocks → ticket
        self.streaming: list[int] = []  # tickets of this pass's writes of such matrices
        self.unhidden = 0.0  # seconds that enqueued requests add to the next step
        self.waits: dict[Resource, float] = {}  # seconds that this pass has waited
        self._beside_bytes = plan.fixed_host_bytes

    def run(self) -> Timeline:
        for item in self.plan.programs[self.name]:
            self._pass(item)
        self._move(len(self.program.bounds))
        epoch_s = self._step_optimizer(self._drain())
        self.events.sort(key=lambda event: (event.start_s, event.end_s))
        return Timeline(self.name, epoch_s, tuple(self.events), tuple(self.passes), self._memory())

    def _step_optimizer(self, now: float) -> float:
        """Advance to the end of the optimizer's step, in which only moving its state takes time."""
        nbytes = self.plan.stepped_bytes(self.name)
        if not nbytes:
            return now
        end_s = now + ssd_seconds(self.hardware, read_bytes=nbytes, write_bytes=nbytes, request_bytes=_STEP_BYTES)
        last = len(self.plan.programs[self.name]) - 1
        self.events += [Event(way, now, end_s, last, nbytes) for way in (Resource.SSD_READ, Resource.SSD_WRITE)]
        return end_s

    def _drain(self) -> float:
        """Let everything under way end, record what has moved among the events, and return when it has ended."""
        end_s = max(self.now + self.unhidden, self.drive.drain())
        self.events += self.drive.events()
        return end_s

    def _memory(self) -> tuple[MemoryUse, ...]:
        plan = self.plan
        return (MemoryUse("memory", plan.device_limit_bytes + plan.host_limit_bytes, tuple(self.samples)),)

    # ---- passes and steps ---------------------------------------------------------------------------------

    def _pass(self, item: Pass) -> None:
        first, stop = self.program.bounds[item.index]
        began = self._clock()
        self.waits.clear()
        self.computing.clear()
        self._move(item.index)
        for region in self.plan.regions[self.name]:
            if region.first == item.index:
                for frame in range(region.frame, region.stop):
                    self._await(self.leaving.pop(frame, None))
        computing = sum(self._step(t, first, item) for t in range(first, stop))
        self._finish_pass(first, stop, item)
        ended = self._clock()
        waited = max(0.0, ended - began - computing)
        bound = Resource.COMPUTE
        if self.waits and waited > _WAITING_SHARE * (ended - began):
            bound = max(self.waits, key=lambda resource: self.waits[resource])
        self.passes.append(PassTime(item.index, item.title, began, ended, waited, bound))

    def _clock(self) -> float:
        """Return when a pass ends and the next one begins."""
        return self.now

    def _step(self, t: int, first: int, item: Pass) -> float:
        """Replay step ``t`` of a pass that begins with step ``first``; return the seconds that it computes."""
        step = self.program.steps[t]
        if t > first and step.slab != self.program.steps[t - 1].slab:
            self.now = max(self.now, self.done[t - 1])
        ended = t - item.steps_at_once
        if ended >= first:
            self.now = max(self.now, self.done[ended])
            self.done.pop(ended - 1, None)
            self._end(ended, item.index)
        self._begin(t, item)
        seconds = self._computing(item, step).together_s(self.workload, self.hardware) + self.unhidden
        self.unhidden = 0.0
        start = max(self.now, self.done[t - 1]) if t > first else self.now
        self.done[t] = start + seconds
        self.events.append(Event(Resource.COMPUTE, start, start + seconds, item.index, 0))
        tiles = max(1, -(-(step.stop - step.start) // self.plan.tile_rows))
        behind = min(1.0, _TILES_AHEAD * self.workload.threads / tiles) * seconds
        self.now = max(self.now, self.done[t] - behind)
        return seconds

    def _finish_pass(self, first: int, stop: int, item: Pass) -> None:
        """Handle the end of a pass, when all its steps have begun."""
        if stop > first:
            self.now = max(self.now, self.done[stop - 1])
        for t in range(max(first, stop - item.steps_at_once), stop):
            self._end(t, item.index)
        while self.streaming:
            self._await(self.streaming.pop())

    def _begin(self, t: int, item: Pass) -> None:
        """Start the reads due before step ``t``, then wait for those it needs."""
        for block, frame, load in self.program.acquire[t]:
            self._acquire(block, frame, item.index, load=load)
        spans = self.program.uses.spans
        while self.begun < len(spans) and (span := spans[self.begun]).first == t:
            self._use(span)
            self.begun += 1
        self._fill(t, item.index)
        for name, shuffle in shuffles_in(item.reads, self.plan.matrices).items():
            self._bucket(name, shuffle, self.program.steps[t], item)
        self._sample(item.index)

    def _acquire(self, block: int, frame: int, at: int, *, load: bool) -> None:
        """Give ``frame`` to ``block``."""
        self._await(self.leaving.pop(frame, None))
        self.where[block] = frame
        if load:
            self._await_written(block)
            self.arriving[block] = self._send(READ, self.plan.blocks.nbytes(block), at)

    def _use(self, span: Span) -> None:
        """Prepare for a step that uses a block and is about to be computed."""
        if span.use.reads:
            self._await(self.arriving.pop(span.block, None))

    def _fill(self, t: int, at: int) -> None:
        """Handle blocks that go to a slab buffer: copied from frames now, or arriving from the drive before the slab is
        pulled."""
        for block, in_frame in self.program.fill.get(t, ()):
            nbytes = self.plan.blocks.nbytes(block)
            if in_frame:
                self._await(self.arriving.pop(block, None))
                self._copy(nbytes, at)
                continue
            self._await_written(block)
            name, slab, _ = self.plan.blocks.where(block)
            planned = self.plan.matrices[name]
            widened = nbytes if planned.region_itemsize > planned.matrix.itemsize else 0
            self.filling.setdefault(slab, []).append((self._send(READ, nbytes, at), widened))
        item, slab = self.plan.programs[self.name][at], self.program.steps[t].slab
        for each in item.turn(slab) if isinstance(item, ColumnPass) else (slab,):
            for ticket, widened in self.filling.pop(each, ()):
                self._await(ticket)
                if widened:
                    self._copy(widened, at)

    def _bucket(self, name: str, of: Shuffle, step: Step, item: Pass) -> None:
        """Wait for the bucket that a step lies in, and start reading the next one of the pass."""
        rows = of.rows_read(item.rows)
        here, count = step.start // of.bucket_rows, -(-rows // of.bucket_rows)
        if step.start >= rows:
            return
        following = here - 1 if item.reverse else here + 1
        for bucket in (here, following):
            key = name, item.index, bucket
            if 0 <= bucket < count and key not in self.buckets:
                self.buckets[key] = self._send(READ, of.bucket_nbytes(bucket), item.index)
        self._await(self.buckets[name, item.index, here])

    def _end(self, t: int, at: int) -> None:
        """Start the writes due after step ``t``, and free the frames that were used for the last time."""
        for block in self.program.store[t]:
            ticket = self._store(block, t, at)
            self.leaving[self.where[block]] = ticket
            self.on_their_way[block] = ticket
        item, step = self.plan.programs[self.name][at], self.program.steps[t]
        nbytes = streamed_write_bytes(item, self.plan.matrices)  # for matrices without blocks: the same for every row
        if nbytes:
            nbytes = nbytes * step.stop // item.rows - nbytes * step.start // item.rows
            self.streaming.append(self._send(WRITE, nbytes, at))
        kept = self.program.kept.after
        for i in self.program.uses.ending(t):
            if not kept[i]:
                self.where.pop(self.program.uses.spans[i].block, None)

    def _computing(self, item: Pass, step: Step) -> Computing:
        """Return the seconds that a step computes."""
        rows, edges, width, retained = step.stop - step.start, 0, 0, min(1.0, self.retained)
        if item.pull is not None:
            source = self.plan.matrices[item.pull.source]
            topology, tile = self.workload.topologies[item.pull.direction], self.plan.tile_rows
            edges = topology.edges_of(range(step.start, step.stop), tile)
            if step.edges is not None:
                rows, edges = -(-rows * len(step.edges) // edges), len(step.edges)
            width = source.matrix.columns if step.slab < 0 else source.grid.width(step.slab)
        portion = Portion(rows, edges, width, width, 1, retained)
        known = self.computing.get(portion)
        if known is None:
            known = computing_of(item, portion, self.workload, self.plan.matrices, self.hardware)
            self.computing[portion] = known
        return known

    # ---- what moves ---------------------------------------------------------------------------------------

    def _store(self, block: int, t: int, at: int) -> int:
        """Write what step ``t`` has filled."""
        return self._send(WRITE, self.plan.blocks.nbytes(block), at)

    def _send(self, direction: int, nbytes: int, at: int) -> int:
        hardware = self.hardware  # processor time spent on a block is lost to computing threads
        self.unhidden += hardware.moving_s(nbytes) + (1 - hardware.overlap) * nbytes / self.drive.rates[direction]
        return self.drive.send(direction, nbytes, at, self.now)

    def _await(self, ticket: int | None) -> None:
        if ticket is not None:
            waited = self.drive.wait(ticket) - self.now
            if waited > 0:
                resource = self.drive.resource(ticket)
                self.waits[resource] = self.waits.get(resource, 0.0) + waited
                self.now += waited

    def _await_written(self, block: int) -> None:
        """Wait until a block that is being written can be read again."""
        self._await(self.on_their_way.pop(block, None))

    def _copy(self, nbytes: int, at: int) -> None:
        """Copy within the memory that is computed in."""
        seconds = nbytes / self.hardware.host_copy_bytes_per_s
        self.events.append(Event(Resource.HOST_COPY, self.now, self.now + seconds, at, nbytes))
        self.now += seconds

    def _move(self, p: int) -> None:
        """Move blocks out of the way of regions, or to where the next epoch looks for them."""
        for block, _, target in self.program.moves.get(p, ()):
            self._await(self.arriving.pop(block, None))
            self._await(self.leaving.pop(target, None))
            self.where[block] = target
            self._copy(self.plan.blocks.nbytes(block), min(p, len(self.program.bounds) - 1))

    def _sample(self, p: int) -> None:
        """Record the memory in use now."""
        regions = sum(r.count for r in self.plan.regions[self.name] if r.first <= p <= r.last)
        beside = self.plan.scratch_bytes + self.plan.fixed_device_bytes + self._beside_bytes
        self.samples.append((self._clock(), beside + (regions + len(self.where)) * self.plan.frame_bytes))
