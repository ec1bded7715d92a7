# SPDX-License-Identifier: Apache-2.0
"""The simulator: a program's instructions replayed against the rates of a machine.

It follows the executor: reads are sent off when a step begins, in the program's order; a step is computed
when what it reads has arrived and the step before it is done; a step begins when the last but one is done; writes
leave in the background, and share the drive with the reads; a pass ends when all its steps are done. One epoch in
the steady state is timed: blocks that the epoch before has left in memory are there.

Where the device has memory of its own, what is sent off goes over the wire, and ``ooc.plan.mover`` times what lies
below.
"""

from ooc.plan.computing import computing_seconds
from ooc.plan.deals import Deal
from ooc.plan.hardware import Hardware
from ooc.plan.link import Link
from ooc.plan.matrices import deals_in, runs_in
from ooc.plan.mover import Mover, disk_link
from ooc.plan.passes import ColumnPass, Pass, RowPass, streamed_write_bytes
from ooc.plan.plan import Plan
from ooc.plan.program import Program
from ooc.plan.runs import Runs
from ooc.plan.sequence import Step, Use
from ooc.plan.timeline import Event, MemoryUse, PassTime, Resource, Timeline
from ooc.plan.workload import Workload

_READ, _WRITE = 0, 1
_OF_DISK = (Resource.SSD_READ, Resource.SSD_WRITE)
_OF_WIRE = (Resource.TO_DEVICE, Resource.TO_HOST)
_TILES_AHEAD = 3
"""Tiles a thread that are put out before the executor waits for one: so far does a step begin before the last ends."""
_WAITING_SHARE = 0.1
"""Of a pass's time: whoever waits longer than this is bound by what it waits for."""


def simulate(plan: Plan, workload: Workload, hardware: Hardware, program: str = "train") -> Timeline:
    """One run of ``program`` of a plan made for ``workload``, on ``hardware``."""
    return _Run(plan, workload, hardware, program).run()


class _Run:
    """The executor's clock (``now``), the computation's, the drive's, and which frames are in use."""

    def __init__(self, plan: Plan, workload: Workload, hardware: Hardware, name: str) -> None:
        self.plan, self.workload, self.hardware = plan, workload, hardware
        self.name = name
        self.program: Program = plan.unrolled[name]
        self.mover = Mover(plan, plan.staged[name], hardware) if plan.has_tiers else None
        self.link: Link = self.mover.wire if self.mover else disk_link(hardware, plan.frame_bytes)
        self.ways = _OF_WIRE if self.mover else _OF_DISK
        self.sent: list[tuple[Resource, int, int]] = []  # by ticket: (resource, pass, bytes)
        self.kinds: dict[tuple[Resource, int, int], tuple[Resource, int, int]] = {}  # there are few
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
        self.computing: dict[tuple[int, int, int], float] = {}  # (rows, edges, columns) of this pass → seconds
        self.buckets: dict[tuple[str, int, int], int] = {}  # (matrix, pass, bucket) of what has no blocks → ticket
        self.streaming: list[int] = []  # tickets of what this pass has written of such
        self.issued = 0.0  # seconds of the drive sent off in this step
        self.waits: dict[Resource, float] = {}  # seconds that this pass has waited

    def run(self) -> Timeline:
        for item in self.plan.programs[self.name]:
            self._pass(item)
        self._move(len(self.program.bounds))
        below_s = self.mover.drain() if self.mover else self.link.drain()
        epoch_s = max(self.now, below_s)
        for ticket, (resource, at, nbytes) in enumerate(self.sent):
            self.events.append(Event(resource, self.link.started[ticket], self.link.served[ticket], at, nbytes))
        if self.mover:
            self.events += self.mover.events()
        self.events.sort(key=lambda event: (event.start_s, event.end_s))
        memory = self._memory()
        return Timeline(self.name, epoch_s, tuple(self.events), tuple(self.passes), memory)

    def _memory(self) -> tuple[MemoryUse, ...]:
        plan, samples = self.plan, tuple(self.samples)
        if self.mover is None:
            return (MemoryUse("memory", plan.device_limit_bytes + plan.host_limit_bytes, samples),)
        below = tuple(self.mover.samples)
        return (
            MemoryUse("device memory", plan.device_limit_bytes, samples),
            MemoryUse("host memory", plan.host_limit_bytes, below or ((0.0, plan.fixed_host_bytes),)),
        )

    # ---- passes and steps ---------------------------------------------------------------------------------

    def _pass(self, item: Pass) -> None:
        first, stop = self.program.bounds[item.index]
        began = self.now
        self.waits.clear()
        self.computing.clear()
        self._move(item.index)
        for region in self.plan.regions[self.name]:
            if region.first == item.index:
                for frame in range(region.frame, region.stop):
                    self._await(self.leaving.pop(frame, None))
        computing = 0.0
        for t in range(first, stop):
            step = self.program.steps[t]
            if isinstance(item, ColumnPass) and t > first and step.slab != self.program.steps[t - 1].slab:
                self.now = max(self.now, self.done[t - 1])
            if t - 2 >= first:
                self.now = max(self.now, self.done.pop(t - 2))
            beginning = self.now
            if t - 2 >= first:
                self._end(t - 2, item.index)
            self.issued = 0.0
            self._begin(t, item)
            seconds = self._seconds(item, step) + (1 - self.hardware.overlap) * self.issued
            start = self.now
            if t > first:
                seconds += self._idle_seconds(t - 1, beginning)
                start = max(start, self.done[t - 1])
            self.done[t] = start + seconds
            computing += seconds
            self.events.append(Event(Resource.COMPUTE, start, start + seconds, item.index, 0))
            tiles = -(-(step.stop - step.start) // self.plan.tile_rows)
            behind = min(1.0, _TILES_AHEAD * self.workload.threads / tiles) * seconds
            self.now = max(self.now, self.done[t] - behind)
        if stop > first:
            self.now = max(self.now, self.done[stop - 1])
        for t in range(max(first, stop - 2), stop):
            self._end(t, item.index)
        while self.streaming:
            self._await(self.streaming.pop())
        waited = max(0.0, self.now - began - computing)
        bound = Resource.COMPUTE
        if self.waits and waited > _WAITING_SHARE * (self.now - began):
            bound = max(self.waits, key=lambda resource: self.waits[resource])
        self.passes.append(PassTime(item.index, item.title, began, self.now, waited, bound))

    def _idle_seconds(self, t: int, beginning: float) -> float:
        """What the workers lose since ``beginning``, at which the next step began to begin, while step ``t`` has fewer
        tiles than there are workers; nothing on a device, which one thread feeds."""
        if self.hardware.has_device_memory:
            return 0.0
        step = self.program.steps[t]
        tiles, workers = -(-(step.stop - step.start) // self.plan.tile_rows), self.workload.threads
        return max(0.0, 1 - tiles / workers) * max(0.0, min(self.now, self.done[t]) - beginning)

    def _begin(self, t: int, item: Pass) -> None:
        """Send off the reads due before step ``t``, then wait for those it needs."""
        for block, frame, load in self.program.acquire[t]:
            self._await(self.leaving.pop(frame, None))
            self.where[block] = frame
            if load:
                self._await(self.on_their_way.pop(block, None))
                self.arriving[block] = self._send(_READ, self.plan.blocks.nbytes(block), item.index)
        spans, read = self.program.uses.spans, Use.READ
        while self.begun < len(spans) and (span := spans[self.begun]).first == t:
            if span.use is read:
                self._await(self.arriving.pop(span.block, None))
            self.begun += 1
        self._fill(t, item.index)
        for name, runs in runs_in(item.reads, self.plan.matrices).items():
            self._bucket(name, runs, runs.rows, self.program.steps[t], item)
        for name, deal in deals_in(item.reads, self.plan.matrices).items():
            self._bucket(name, deal, item.rows, self.program.steps[t], item)
        self._sample(item.index)

    def _fill(self, t: int, at: int) -> None:
        """Blocks on their way to a slab buffer: out of frames now, from the drive by the time the slab is pulled."""
        for block, in_frame in self.program.fill.get(t, ()):
            nbytes = self.plan.blocks.nbytes(block)
            if in_frame:
                self._await(self.arriving.pop(block, None))
                self._copy(nbytes, at)
                continue
            self._await(self.on_their_way.pop(block, None))
            name, slab, _ = self.plan.blocks.where(block)
            planned = self.plan.matrices[name]
            widened = nbytes if planned.region_itemsize > planned.matrix.itemsize else 0
            self.filling.setdefault(slab, []).append((self._send(_READ, nbytes, at), widened))
        for ticket, widened in self.filling.pop(self.program.steps[t].slab, ()):
            self._await(ticket)
            if widened:
                self._copy(widened, at)

    def _bucket(self, name: str, of: Runs | Deal, rows: int, step: Step, item: Pass) -> None:
        """The bucket of ``rows`` rows that a step lies in has been read, and the next one of the pass is on its way."""
        here, count = step.start // of.bucket_rows, -(-rows // of.bucket_rows)
        if step.start >= rows:
            return
        following = here - 1 if isinstance(item, RowPass) and item.stage.reverse else here + 1
        for bucket in (here, following):
            key = name, item.index, bucket
            if 0 <= bucket < count and key not in self.buckets:
                self.buckets[key] = self._send(_READ, of.bucket_nbytes(bucket), item.index)
        self._await(self.buckets[name, item.index, here])

    def _stream(self, step: Step, item: Pass) -> None:
        """What a step writes of what has no blocks goes to the drive: as much for every row."""
        nbytes = streamed_write_bytes(item, self.plan.matrices)
        if nbytes:
            nbytes = nbytes * step.stop // item.rows - nbytes * step.start // item.rows
            self.streaming.append(self._send(_WRITE, nbytes, item.index))

    def _end(self, t: int, at: int) -> None:
        """Send off the writes due after step ``t``, and give back what was in use for the last time."""
        for block in self.program.store[t]:
            ticket = self._send(_WRITE, self.plan.blocks.nbytes(block), at)
            self.leaving[self.where[block]] = ticket
            self.on_their_way[block] = ticket
        item = self.plan.programs[self.name][at]
        self._stream(self.program.steps[t], item)
        kept = self.program.kept.after
        for i in self.program.uses.ending(t):
            if not kept[i]:
                self.where.pop(self.program.uses.spans[i].block, None)

    def _seconds(self, item: Pass, step: Step) -> float:
        """Of computing one step."""
        edges = width = 0
        if item.pull is not None:
            source = self.plan.matrices[item.pull.source]
            tile_edges, tile = self.workload.topologies[item.pull.direction].tile_edges, self.plan.tile_rows
            last = len(tile_edges) - 1
            edges = tile_edges[min(last, -(-step.stop // tile))] - tile_edges[min(last, step.start // tile)]
            width = source.matrix.columns if step.slab < 0 else source.grid.width(step.slab)
        rows = step.stop - step.start
        seconds = self.computing.get((rows, edges, width))
        if seconds is None:
            seconds = self.computing[rows, edges, width] = computing_seconds(
                item,
                self.workload,
                self.plan.matrices,
                self.hardware,
                rows=rows,
                edges=edges,
                columns=width,
                slab_columns=width,
                steps=1,
            )
        return seconds

    # ---- what moves ---------------------------------------------------------------------------------------

    def _send(self, way: int, nbytes: int, at: int) -> int:
        if self.mover is None:
            ticket = self.link.send(way, nbytes, self.now)
        else:
            before_s = self.mover.issued_s
            ticket = self.mover.transfer(self.now, at)
            self.issued += self.mover.issued_s - before_s
        kind = (self.ways[way], at, nbytes)
        self.sent.append(self.kinds.setdefault(kind, kind))
        self.issued += nbytes / self.link.rates[way]
        self.now += self.hardware.seconds_per_block
        return ticket

    def _await(self, ticket: int | None) -> None:
        if ticket is not None:
            waited = self.link.wait(ticket) - self.now
            if waited > 0:
                resource = self.sent[ticket][0]
                if self.mover is not None and ticket in self.mover.waited_for_disk:
                    resource = Resource.SSD_READ
                self.waits[resource] = self.waits.get(resource, 0.0) + waited
                self.now += waited

    def _copy(self, nbytes: int, at: int) -> None:
        """Within the memory that is computed in."""
        if self.mover is not None:  # the device's, of which nothing else is drawn
            self.now += 2 * nbytes / self.hardware.processor.stream_bytes_per_s
            return
        seconds = nbytes / self.hardware.host_copy_bytes_per_s
        self.events.append(Event(Resource.HOST_COPY, self.now, self.now + seconds, at, nbytes))
        self.now += seconds

    def _move(self, p: int) -> None:
        """Blocks out of the way of regions, or home for the next epoch."""
        for block, _, target in self.program.moves.get(p, ()):
            self._await(self.arriving.pop(block, None))
            self._await(self.leaving.pop(target, None))
            self.where[block] = target
            self._copy(self.plan.blocks.nbytes(block), min(p, len(self.program.bounds) - 1))

    def _sample(self, p: int) -> None:
        """Note the memory in use now."""
        regions = sum(r.count for r in self.plan.regions[self.name] if r.first <= p <= r.last)
        beside = self.plan.scratch_bytes + self.plan.fixed_device_bytes
        beside += 0 if self.mover else self.plan.fixed_host_bytes
        self.samples.append((self.now, beside + (regions + len(self.where)) * self.plan.frame_bytes))
