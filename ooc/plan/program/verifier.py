# SPDX-License-Identifier: Apache-2.0
"""The proof that a plan can run, made from the plan alone and independent of how it was found.

Every program is replayed instruction by instruction. The replay checks that no region overlaps another or a block in
use, that no block is used before it is in its frame, that no block is dropped that is needed again and is not on the
SSD, that no frame lies outside the arena, and that the arena and everything beside it keep both budgets. If the device
has memory of its own, the program of the host's frames is replayed, too; its transfers must be those that the device's
program requests, in order. The trainer runs no plan that fails.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from ooc.plan.layout.layout import Region
from ooc.plan.layout.passes import (
    ColumnPass,
    RowPass,
    ShufflePass,
    blocks_of,
    direct_slabs,
    matching_slabs,
    slabs_nbytes,
    streaming_memory,
    sweeps_of,
)
from ooc.plan.program.plan import Plan
from ooc.plan.program.program import Program
from ooc.plan.program.sequence import Use, brought_blocks
from ooc.plan.program.staging import CopyTo, Staging
from ooc.plan.workload import Kind

_USES = tuple(Use)


def verify_plan(plan: Plan) -> None:
    """Raise AssertionError, which says what is wrong, if the plan cannot be trusted; this would be a bug in the
    planner."""
    _verify_budgets(plan)
    _verify_order(plan)
    for name, shuffle in plan.shuffles.items():
        _require(not plan.matrices[name].whole and not plan.has_tiers, f"{name} cannot be shuffled")
        _require(shuffle.bucket_rows % plan.step_rows == 0, f"{name}: a step lies in several buckets")
    _verify_partial_sums(plan)
    _verify_bucketed_rows(plan)
    for name, program in plan.unrolled.items():
        _verify_regions(plan, name)
        _verify_slabs(plan, name)
        _verify_low_blocks(plan, name)
        _Replay(plan, name, program, plan.frames, plan.regions[name]).run()
    if plan.has_tiers:
        _require(plan.staged.keys() == plan.unrolled.keys(), "not every program has its program of host frames")
    for name, staging in plan.staged.items():
        _verify_transfers(plan, name, staging)
        _Replay(plan, f"{name}, host", staging.program, plan.host_frames, ()).run()
    _verify_homes(plan.unrolled)
    _verify_homes({name: staging.program for name, staging in plan.staged.items()})


def _require(true: bool, otherwise: str) -> None:
    if not true:
        raise AssertionError(otherwise)


def _verify_budgets(plan: Plan) -> None:
    for what, peak, limit in (
        ("device", plan.device_peak_bytes, plan.device_limit_bytes),
        ("host", plan.host_peak_bytes, plan.host_limit_bytes),
    ):
        _require(peak <= limit, f"{what}: {peak} bytes planned, {limit} allowed")
    beside = plan.fixed_device_bytes + plan.fixed_host_bytes + plan.scratch_bytes + plan.retained_bytes
    total = plan.device_peak_bytes + plan.host_peak_bytes
    frames = plan.frames + plan.host_frames
    _require(total == beside + frames * plan.frame_bytes, "the peaks leave something out")


def _verify_order(plan: Plan) -> None:
    lasting = {name for name, m in plan.matrices.items() if m.matrix.kind in (Kind.STORE, Kind.LEARNT)}
    for program, passes in plan.programs.items():
        written = set(lasting)
        for item in passes:
            reads, writes = set(item.reads), set(item.stores)
            for name in sorted(reads - written):
                raise AssertionError(f"{program}: pass {item.index} reads {name} before it is written")
            replaced = item.replaced if isinstance(item, RowPass) else frozenset()
            for name in replaced:
                later = {read for behind in passes[item.index + 1 :] for read in behind.reads}
                learnt = plan.matrices[name].matrix.kind is Kind.LEARNT and name not in later and not plan.has_tiers
                _require(learnt, f"{program}: pass {item.index} replaces {name}, which is not for it to do")
            both = reads & writes - replaced
            if item.sweeps is not None:  # it reads some slabs of this matrix, and writes another
                both.discard(item.sweeps.output)
            _require(not both, f"{program}: pass {item.index} reads and writes {both}")
            written |= writes
        for before, behind in pairwise((None, *passes, None)):
            left = behind is not None and behind.sweeps is not None
            if isinstance(before, ColumnPass):
                every = before.slabs == plan.matrices[before.pull.source].grid.slabs
                _require(every != left, f"{program}: pass {before.index} leaves a slab to nobody, or none")
            if behind is not None and left:
                _require(behind.sweeps is before, f"{program}: pass {behind.index} pulls a slab that nobody has left")
        lasting |= {name for name in written if plan.matrices[name].matrix.kind is Kind.CONSTANT}


def _verify_partial_sums(plan: Plan) -> None:
    """Check that partial sums are written by one pass that scatters, and read by a later one."""
    for name in plan.partial_sums:
        for program, passes in plan.programs.items():
            writers = [item for item in passes if name in item.stores]
            readers = [item for item in passes if name in item.reads]
            _require(len(writers) == len(readers) <= 1, f"{program}: {name} is not written and read once")
            for writer, reader in zip(writers, readers, strict=True):
                is_scattered = writer.pull is not None and name in writer.pull.added_to and writer.spills_sums
                is_loaded = isinstance(reader, RowPass) and name in reader.loads
                _require(is_scattered and is_loaded, f"{program}: {name} is no sum of what is scattered")


def _verify_bucketed_rows(plan: Plan) -> None:
    """Check that rows are shuffled after all of them have been written, and gathered before their source is written
    again."""
    for name, shuffle in plan.bucketed_rows.items():
        _require(shuffle.buckets * shuffle.bucket_rows >= shuffle.targets, f"{name}: some targets are in no bucket")
    for program, passes in plan.programs.items():
        shuffled: dict[str, str] = {}  # by source: how its rows lie now
        written: dict[str, int] = {}
        for item in passes:
            if item.bucketed is not None:
                assert item.pull is not None
                _require(
                    shuffled.get(item.pull.source) == item.bucketed,
                    f"{program}: {item.bucketed} is gathered before it is shuffled",
                )
                shuffle = plan.bucketed_rows[item.bucketed]
                _require(
                    item.rows <= shuffle.targets, f"{program}: {item.bucketed} is not shuffled to all that gather it"
                )
                _require(item.pull.is_opaque, f"{program}: pass {item.index} does not gather")
            for name in item.stores:
                shuffled.pop(name, None)
                written[name] = max(item.rows, written.get(name, 0))
            if isinstance(item, ShufflePass):
                assert item.pull is not None
                source = item.pull.source
                shuffle = plan.bucketed_rows[item.pull.output]
                _require(shuffle.rows == item.rows == written[source], f"{program}: not all of {source} is shuffled")
                shuffled[source] = item.pull.output


def _verify_regions(plan: Plan, program: str) -> None:
    regions = plan.regions[program]
    for i, one in enumerate(regions):
        _require(one.frame >= 0 and one.stop <= plan.frames, f"{program}: the region of {one.matrix} leaves the arena")
        for other in regions[i + 1 :]:
            disjoint = one.stop <= other.frame or other.stop <= one.frame
            disjoint = disjoint or one.last < other.first or other.last < one.first
            _require(disjoint, f"{program}: the regions of {one.matrix} and {other.matrix} overlap")
    for item in plan.programs[program]:
        needed = {n: plan.matrices[n].region_nbytes for n in (*item.reads, *item.stores) if plan.matrices[n].whole}
        needed |= streaming_memory(item, plan.matrices)
        sweeps = sweeps_of(item)
        if sweeps is not None:
            needed[sweeps.pull.source] = slabs_nbytes(sweeps, plan.programs[program], plan.matrices, plan.share)
        for name, nbytes in needed.items():
            held = [r for r in regions if r.matrix == name and r.first <= item.index <= r.last]
            enough = any(r.count * plan.frame_bytes >= nbytes for r in held)
            _require(enough, f"{program}: {name} is not in memory during pass {item.index}")


def _verify_slabs(plan: Plan, program: str) -> None:
    """Check that slabs not computed right into their buffers are copied there, every written row of them, before they
    are pulled and after the slab that had the buffer before."""
    passes, unrolled = plan.programs[program], plan.unrolled[program]
    for item in passes:
        if not isinstance(item, ColumnPass):
            continue
        if item.processes > 1:
            _verify_sharded_slabs(plan, program, item)
            continue
        name = item.pull.source
        grid, base = plan.matrices[name].grid, plan.blocks.base(name)
        first, stop = unrolled.bounds[item.index]
        sweep = (stop - first) // item.slabs
        written = next((one.rows for one in passes if name in one.stores), grid.rows)
        blocks = grid.blocks_with(plan.own(name, written))
        copied: dict[int, int] = {}
        for step in range(first, first + (grid.slabs - 1) * sweep + 1):
            copied |= dict.fromkeys((block for block, _ in unrolled.fill.get(step, ())), step)
        for slab in range(direct_slabs(passes, item), grid.slabs):
            begins, free = first + slab * sweep, first + max(0, slab - item.slab_buffers + 1) * sweep
            at = base + slab * grid.blocks
            if not all(free <= copied.get(at + block, -1) <= begins for block in blocks):
                raise AssertionError(f"{program}: slab {slab} of {name} is not in its buffer when it is pulled")


def _verify_sharded_slabs(plan: Plan, program: str, item: ColumnPass) -> None:
    """Check that every slab of this process is pulled for all rows that need it, in the order in which the other
    processes expect theirs. The blocks of a turn's pulled rows must be in use with the process's own rows. Copies to
    the buffers of a turn must come after the turn that had them before."""
    passes, unrolled, name = plan.programs[program], plan.unrolled[program], item.pull.source
    assert plan.share is not None, "columns are sharded among several processes"
    rank, source, target = plan.share.rank, plan.matrices[name].grid, plan.matrices[item.output].grid
    every = item.slabs == source.slabs and item.slabs % item.processes == 0 and item.processes == plan.share.count
    _require(every, f"{program}: not every process has as many slabs of {name}")
    *others, own = plan.share.in_turn(item.space, item.rows)
    rows = next(one.rows for one in passes if name in one.stores)
    blocks = source.blocks_with(plan.own(name, rows))
    first, stop = unrolled.bounds[item.index]
    writes = (span for span in unrolled.uses.spans if span.use is Use.WRITE and first <= span.first < stop)
    written = {(span.block, at) for span in writes for at in range(span.first, span.last + 1)}
    brought = {plan.blocks.base(one) + block for one, block in brought_blocks(item, plan.matrices, plan.share)}
    at_first = {block for block, _ in unrolled.fill.get(first, ())}
    _require(at_first >= brought, f"{program}: rows lack what they bring to the pull of {name}")
    number, direct, begun = first, direct_slabs(passes, item), [first] * item.turns_at_once
    for slab in range(rank, item.slabs, item.processes):
        begun.append(number)
        bases = [plan.blocks.base(name) + each * source.blocks for each in item.turn(slab) if slab >= direct]
        filled = {block for block, _ in unrolled.fill.get(begun[-item.turns_at_once], ())}
        _require(
            filled >= {base + block for base in bases for block in blocks}, f"{program}: slabs of {name} are missing"
        )
        for expected in (*filter(None, others), own):
            at = expected.start
            while at < expected.stop or not expected:
                _require(number < stop, f"{program}: not all rows of {item.output} are pulled")
                step = unrolled.steps[number]
                as_expected = step.slab == slab and step.start == at and at <= step.stop <= expected.stop
                _require(as_expected, f"{program}: step {number} pulls other rows of {item.output} than others expect")
                for block in target.blocks_with(range(at, step.stop)) if expected is own else ():
                    for each in item.turn(slab):
                        there = (plan.blocks.base(item.output) + each * target.blocks + block, number) in written
                        _require(there, f"{program}: step {number} lacks some of its rows of {item.output}")
                at, number = step.stop, number + 1
                if at == expected.stop:
                    break
    _require(number == stop, f"{program}: more rows of {item.output} are pulled than others expect")
    filled_at = {step for step in range(first, stop) if step in unrolled.fill}
    _require(filled_at <= {*begun}, f"{program}: slabs of {name} lose their buffers amid a turn")


def _verify_low_blocks(plan: Plan, program: str) -> None:
    """Check that, if blocks are lower than steps, a step uses all blocks that its rows lie in."""
    low = {name: m for name, m in plan.matrices.items() if m.in_frames and m.grid.block_rows < plan.step_rows}
    if not low:
        return
    passes, unrolled = plan.programs[program], plan.unrolled[program]
    firsts, lasts, blocks, uses = unrolled.uses.spans.columns
    at = 0
    for item in passes:
        used: dict[int, int] = {}  # block → the last step that uses it
        for number in range(*unrolled.bounds[item.index]):
            used = {block: last for block, last in used.items() if last >= number}
            while at < len(firsts) and firsts[at] <= number:
                if uses[at] != Use.COPY:
                    used[blocks[at]] = max(lasts[at], used.get(blocks[at], -1))
                at += 1
            _, slab, start, stop, _ = unrolled.steps[number]
            if isinstance(item, RowPass):
                slabs = [(name, some) for name, some, _ in blocks_of(item, plan.matrices, passes) if name in low]
            elif item.processes > 1:
                continue
            else:
                source = plan.matrices[item.pull.source].grid
                slabs = [(name, matching_slabs(source, low[name].grid, slab)) for name in item.pull.own if name in low]
                slabs += [(item.output, range(slab, slab + 1))] * (item.output in low)
            for name, several in slabs:
                grid, base = low[name].grid, plan.blocks.base(name)
                for block in grid.blocks_with(range(start, min(stop, grid.rows))):
                    for one in several:
                        if base + one * grid.blocks + block not in used:
                            raise AssertionError(f"{program}: step {number} lacks some of its rows of {name}")


def _verify_homes(programs: Mapping[str, Program]) -> None:
    """Check that what one program leaves in memory lies where all others look for it."""
    frame_of: dict[int, int] = {}
    for name, program in programs.items():
        for block, frame in (*program.warm, *program.leaves):
            _require(frame_of.setdefault(block, frame) == frame, f"{name}: what stays between programs lies elsewhere")


def _verify_transfers(plan: Plan, name: str, staging: Staging) -> None:
    """Check that the transfers over PCIe are those the device's program requests, neither later nor earlier."""
    program = plan.unrolled[name]
    last = {stop - 1 for _, stop in program.bounds}
    before = 0
    up: dict[int, list[int]] = {}
    down: dict[int, list[int]] = {}
    for step, block, direction in staging.transfers:
        to_device = direction is CopyTo.DEVICE
        (up if to_device else down).setdefault(step, []).append(block)
        # Loads of step t, then stores of step t - 1, then loads of step t + 1; at a pass's end the stores come first.
        order = 2 * step if to_device else 2 * step + (1 if step in last else 3)
        if order < before:
            raise AssertionError(f"{name}: a transfer of step {step} comes too late")
        before = order
    for t, (acquired, stored) in enumerate(zip(program.acquire, program.store, strict=True)):
        asked = [block for block, _, load in acquired if load]
        asked += [block for block, in_frame in program.fill.get(t, ()) if not in_frame]
        for moved, to, blocks in ((up, CopyTo.DEVICE, asked), (down, CopyTo.HOST, list(stored))):
            if moved.pop(t, []) != blocks:
                raise AssertionError(f"{name}: step {t} does not get what it asks for {to.value}")
    _require(not up and not down, f"{name}: something is transferred that no step asks for")
    spans = staging.program.uses.spans
    as_used = len(spans) == len(staging.transfers) and all(
        first == last == at and block == moved and (use == Use.WRITE) == (direction is CopyTo.HOST)
        for at, ((first, last, block, use), (_, moved, direction)) in enumerate(
            zip(zip(*spans.columns, strict=True), staging.transfers, strict=True)
        )
    )
    _require(as_used, f"{name}: its host frames are used otherwise than by its transfers")


def _blocks_where(use: Use, program: Program) -> set[int]:
    _, _, blocks, uses = program.uses.spans.columns
    return {block for block, found in zip(blocks, uses, strict=True) if found == use}


class _Replay:
    """One replay of a program. It tracks which block each frame holds and which blocks are on the level below: the SSD,
    or the host for the device's program."""

    def __init__(self, plan: Plan, name: str, program: Program, frames: int, regions: Sequence[Region]) -> None:
        self.plan, self.name, self.program, self.frames, self.regions = plan, name, program, frames, regions
        self.content: dict[int, int] = dict((frame, block) for block, frame in program.warm)
        self.where: dict[int, int] = dict(program.warm)
        self.stored: set[int] = set()
        self.written = _blocks_where(Use.WRITE, program)
        self.beginning = zip(*program.uses.spans.columns, strict=True)  # by first step
        self.next = next(self.beginning, None)  # the first use that has not begun
        self.ending: dict[int, list[int]] = {}  # by last step: the blocks of spans that have not ended
        self.open: list[Region] = []  # of the running pass
        self.busy: dict[int, int] = {}  # block → spans that use it
        self.filled: set[int] = {block for block, _ in program.warm}

    def run(self) -> None:
        read = written = 0
        nbytes = self.plan.blocks.nbytes
        acquired, stored = iter(self.program.acquire), iter(self.program.store)
        for p, (first, stop) in enumerate(self.program.bounds):
            self._enter(p)
            at_once = self.program.steps_at_once[p]
            for t in range(first, stop):
                if t - at_once >= first:
                    self._end(t - at_once)
                for block, frame, load in next(acquired):
                    self._put(block, frame)
                    if load:
                        if not self._on_ssd(block):
                            raise self._block_error(block, "is read from the SSD and is not there")
                        self.filled.add(block)
                        read += nbytes(block)
                for block, in_frame in self.program.fill.get(t, ()):
                    if in_frame:
                        if block not in self.where or block not in self.filled:
                            raise self._block_error(block, "is not in a frame")
                    else:
                        if not self._on_ssd(block):
                            raise self._block_error(block, "is copied from the SSD and is not there")
                        read += nbytes(block)
                self._begin(t)
                for block in next(stored):
                    if block not in self.where:
                        raise self._block_error(block, "is written out of no frame")
                    self.stored.add(block)
                    written += nbytes(block)
            for t in range(max(first, stop - at_once), stop):
                self._end(t)
        if self.next is not None:
            raise self._block_error(self.next[2], "is used after the program ends")
        for block in _blocks_where(Use.UPDATE, self.program) - self.stored:
            raise self._block_error(block, "is replaced, and not on the SSD in the end")
        self._move(len(self.program.bounds))
        for block, frame in self.program.leaves:
            if self.content.get(frame) != block:
                raise self._block_error(block, "is not where the next program looks for it")
        stated = self.program.read_bytes, self.program.write_bytes
        _require((read, written) == stated, f"{self.name}: its bytes are not as stated")

    def _block_error(self, block: int, how: str) -> AssertionError:
        """Return an AssertionError with its message, which is made only on failure, as a plan has millions of
        claims."""
        matrix, slab, row_block = self.plan.blocks.where(block)
        return AssertionError(f"{self.name}: block {row_block} of slab {slab} of {matrix} {how}")

    def _on_ssd(self, block: int) -> bool:
        """Whether a block is on the SSD: stored in this run, part of the store, or a part that no stage computes and no
        row needs."""
        return block in self.stored or block not in self.written

    def _put(self, block: int, frame: int) -> None:
        if not 0 <= frame < self.frames:
            raise self._block_error(block, "lies outside the arena")
        if self.plan.blocks.memory_nbytes(block) > self.plan.frame_bytes:
            raise self._block_error(block, "is larger than a frame")
        for region in self.open:
            if region.frame <= frame < region.stop:
                raise self._block_error(block, "lies in a region")
        self._vacate(frame)
        self.content[frame] = block
        self.where[block] = frame

    def _vacate(self, frame: int) -> None:
        block = self.content.pop(frame, None)
        if block is not None and self.where.get(block) == frame:
            if self.busy.get(block):
                raise self._block_error(block, "is in use and loses its frame")
            del self.where[block]
            self.filled.discard(block)

    def _begin(self, t: int) -> None:
        where, filled, busy, ending = self.where, self.filled, self.busy, self.ending
        while self.next is not None and self.next[0] <= t:
            first, last, block, number = self.next
            self.next = next(self.beginning, None)
            use = _USES[number]
            if first < t:
                raise self._block_error(block, "is used before the program begins")
            if use is Use.COPY:
                continue
            if block not in where:
                raise self._block_error(block, "is used and has no frame")
            if use.reads and block not in filled:
                raise self._block_error(block, "is used before it is read")
            if use.writes:
                filled.add(block)
                self.written.add(block)
                self.stored.discard(block)  # the copy below is outdated
            busy[block] = busy.get(block, 0) + 1
            ending.setdefault(last, []).append(block)

    def _end(self, t: int) -> None:
        busy = self.busy
        for block in self.ending.pop(t, ()):
            busy[block] -= 1
            if not busy[block]:
                del busy[block]

    def _move(self, p: int) -> None:
        for block, origin, target in self.program.moves.get(p, ()):
            if self.where.get(block) != origin:
                raise self._block_error(block, "is moved from where it is not")
            self._vacate(target)
            self.content[target] = block
            self.where[block] = target

    def _enter(self, p: int) -> None:
        self._move(p)
        self.open = [region for region in self.regions if region.first <= p <= region.last]
        for region in self.open:
            if region.first == p:
                for frame in range(region.frame, region.stop):
                    self._vacate(frame)
