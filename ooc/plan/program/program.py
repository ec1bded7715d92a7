# SPDX-License-Identifier: Apache-2.0
"""A program unrolled: when each block is read, kept, moved and written, and in which frame it lies.

It is made once, from the sequence of uses, before anything runs. The executor runs it, the verifier
(``ooc.plan.program.verifier``) proves it, and its bytes are those an epoch moves.

When step t begins, its blocks get their frames, and as far as frames go those of later steps, in the order of first
use; their reads are started. A frame is freed when the second step after its last use begins, so that the tiles of two
steps may overlap, or the next step if the pass has one step at a time. At the end of a pass all work is complete.
"""

from array import array
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import chain
from typing import NamedTuple

from ooc.plan.program.columns import ByStep, Columns
from ooc.plan.program.replacement import Kept, Uses, belady
from ooc.plan.program.sequence import READING, WRITING, BlockTable, Span, Step, Use


class Acquire(NamedTuple):
    """Give frame ``frame`` to ``block``, and with ``load`` read the block from the SSD."""

    block: int
    frame: int
    load: bool


class Move(NamedTuple):
    """Copy a kept block out of a frame that a region is about to take."""

    block: int
    origin: int
    target: int


@dataclass(frozen=True)
class Program:
    """The ``steps`` of a program with what happens around each: ``acquire`` before it, and ``store``, the blocks to
    write, after it.

    ``bounds``: the (first, stop) step of each pass. ``moves``: before the first step of a pass. ``fill``: the blocks
    copied to a slab buffer before a step, and whether each is in a frame. ``warm``: blocks that must be in their frames
    when the program begins; ``leaves``: those that are in theirs when it ends. ``kept``: the decisions of the
    replacement.
    """

    steps: Sequence[Step]
    bounds: tuple[tuple[int, int], ...]
    uses: Uses
    kept: Kept
    warm: tuple[tuple[int, int], ...] = ()
    leaves: tuple[tuple[int, int], ...] = ()
    moves: dict[int, tuple[Move, ...]] = field(default_factory=dict)
    acquire: Sequence[tuple[Acquire, ...]] = ()
    store: Sequence[tuple[int, ...]] = ()
    fill: dict[int, tuple[tuple[int, bool], ...]] = field(default_factory=dict)
    frames: int = 0
    read_bytes: int = 0
    write_bytes: int = 0
    steps_at_once: Sequence[int] = ()
    """How many steps have tiles under way at once, by pass; the tiles of a step have ended when that many more steps
    have begun."""

    def bytes_used(self, blocks: BlockTable) -> dict[str, tuple[int, int]]:
        """Return, by matrix, the bytes that the program reads, and how many of them are found in memory."""
        used: dict[str, tuple[int, int]] = {}
        for span, is_found in zip(self.uses.spans, found_in_memory(self.uses, self.kept), strict=True):
            if span.use is not Use.WRITE:
                name, _, _ = blocks.where(span.block)
                nbytes = blocks.nbytes(span.block)
                total, found = used.get(name, (0, 0))
                used[name] = total + nbytes, found + (nbytes if is_found else 0)
        return used


def found_in_memory(uses: Uses, kept: Kept) -> bytearray:
    """Return, for each span, whether its block is still in memory from the use before."""
    count = len(uses.spans)
    found = bytearray(count)
    for is_kept, then in zip(kept.after, uses.following, strict=True):
        if is_kept and 0 <= then < count:
            found[then] = True
    for i in map(uses.first_of, kept.begins):
        if i >= 0:
            found[i] = True
    return found


def blocks_to_write(uses: Uses, kept: Kept) -> bytearray:
    """Return, for each block, whether the program writes it and needs it again after it has lost its frame."""
    _, _, blocks, used = uses.spans.columns
    written, needed = bytearray(len(uses.firsts)), bytearray(len(uses.firsts))
    for block, use in zip(blocks, used, strict=True):
        if use in WRITING and not written[block]:
            written[block] = True
            needed[block] = uses.lasting(block)
    for block, is_kept, then in zip(blocks, kept.after, uses.following, strict=True):
        if not is_kept and then >= 0 and written[block]:
            needed[block] = True
    return needed


_COOLING_STEPS = 6
"""Steps for which a frame whose block is being written is left alone if others are free, so that nobody waits for the
write."""
_FOR_EVER = 1 << 30
_NEVER = -2


class _Frames:
    """The free frames, grouped by the passes in which no region takes them; frames of one group are interchangeable."""

    def __init__(self, available: Sequence[Sequence[range]]) -> None:
        self.passes = len(available)
        count = max((r.stop for ranges in available for r in ranges), default=0)
        free_in = [[False] * self.passes for _ in range(count)]
        for p, ranges in enumerate(available):
            for piece in ranges:
                for frame in piece:
                    free_in[frame][p] = True
        patterns: dict[tuple[bool, ...], int] = {}
        self.group_of = [patterns.setdefault(tuple(row), len(patterns)) for row in free_in]
        self.members: list[list[int]] = [[] for _ in patterns]
        for frame, group in enumerate(self.group_of):
            self.members[group].append(frame)
        self.patterns = list(patterns)
        self.stay = [[self._free_until(pattern, p) for p in range(self.passes)] for pattern in self.patterns]
        self.clean: list[list[int]] = [[] for _ in patterns]  # heaps: lowest first, so that an arena stays small
        self.cooling: list[deque[tuple[int, int]]] = [deque() for _ in patterns]  # (step since when, frame)
        self.open: set[int] = set()
        self.highest = 0

    def _free_until(self, pattern: tuple[bool, ...], start: int) -> int:
        """Return the last pass until which such a frame stays free from pass ``start`` on, counting on into the next
        epoch."""
        if all(pattern):
            return _FOR_EVER
        p = start
        while pattern[p % self.passes]:
            p += 1
        return p - 1

    def enter(self, p: int, taken: Collection[int] = ()) -> set[int]:
        """Open and close groups for pass ``p``, in which only ``taken`` frames are in use; return the groups that are
        closed."""
        now = {g for g, pattern in enumerate(self.patterns) if pattern[p]}
        closed = {*range(len(self.patterns))} - now
        for g in closed:
            self.clean[g].clear()
            self.cooling[g].clear()
        for g in now - self.open:
            self.clean[g] = [frame for frame in self.members[g] if frame not in taken]  # ascending: a heap already
        self.open = now
        return closed

    def take(self, p: int, until: int) -> int | None:
        """Take a frame for use from pass ``p`` to pass ``until``, if possible one that is free for just that long."""
        best, rank = -1, (1, 1, 0)
        for g in self.open:
            clean = self.clean[g]
            if clean or self.cooling[g]:
                stay = self.stay[g][p]
                mine = (0, 0 if clean else 1, stay) if stay >= until else (1, 0 if clean else 1, -stay)
                if best < 0 or mine < rank:
                    best, rank = g, mine
        if best < 0:
            return None
        frame = heappop(self.clean[best]) if self.clean[best] else self.cooling[best].popleft()[1]
        self.highest = max(self.highest, frame + 1)
        return frame

    def has(self, p: int, until: int) -> bool:
        """Whether some free frame stays free until pass ``until``."""
        for g in self.open:  # noqa: SIM110  (asked for every block and step: any() of a generator takes twice as long)
            if self.stay[g][p] >= until and (self.clean[g] or self.cooling[g]):
                return True
        return False

    def give(self, frame: int, step: int, *, being_written: bool) -> None:
        group = self.group_of[frame]
        if group not in self.open:
            return
        if being_written:
            self.cooling[group].append((step, frame))
        else:
            heappush(self.clean[group], frame)

    def cool(self, step: int) -> None:
        for g in self.open:
            queue = self.cooling[g]
            while queue and queue[0][0] + _COOLING_STEPS < step:
                heappush(self.clean[g], queue.popleft()[1])


class BlockSequence(NamedTuple):
    """The uses of blocks by a program, and its frames. ``capacity`` is as in ``Uses``; ``available[p]``: the frames of
    pass p that no region takes; ``steps_at_once[p]``: as in ``Program``."""

    steps: Sequence[Step]
    bounds: Sequence[tuple[int, int]]
    spans: Columns[Span]
    capacity: Sequence[int]
    available: Sequence[Sequence[range]]
    steps_at_once: Sequence[int]

    @property
    def frames_then(self) -> dict[int, tuple[int, int]]:
        """The number of frames of each later pass, as in ``Uses``."""
        passes = zip(self.bounds, self.available, strict=True)
        return {first - 1: (stop, sum(map(len, pieces))) for (first, stop), pieces in passes if 0 < first < stop}


PREPARATION, EPOCH = "prepare", "train"
EPOCHS = EPOCH, "train_and_score"
"""The programs that run again and again. Other programs, except the preparation, run between them."""


def unroll(
    sequences: Mapping[str, BlockSequence],
    blocks: BlockTable,
    *,
    spare_writes: bool,
    paced: bool,
    epoch_only: bool = False,
) -> dict[str, Program]:
    """Return all programs in the frames of one arena, or only the epoch's. Blocks that a program leaves lie where the
    next one looks for them: an epoch leaves what the next epoch, and other programs, want; a program between two epochs
    leaves what the second one wants."""
    firsts = {
        name: _first_steps_of_lasting_blocks(sequence.spans, blocks)
        for name, sequence in sequences.items()
        if name != PREPARATION
    }
    homes: dict[int, int] = {}
    programs: dict[str, Program] = {}
    for name in (EPOCH,) if epoch_only else sorted(sequences, key=lambda name: name not in EPOCHS):
        sequence, is_epoch, afterwards = sequences[name], name in EPOCHS, dict[int, int]()
        count = len(sequence.steps)
        if is_epoch and count:
            others = chain(*(used.items() for used in firsts.values()))
            afterwards = {block: 2 * count + first for block, first in others if block not in firsts[name]}
        elif name != PREPARATION and count:
            then = len(sequences[EPOCH].steps)
            afterwards = {block: count + firsts[EPOCH].get(block, then) for block, _ in programs[EPOCH].leaves}
        uses = Uses(
            sequence.spans,
            count,
            sequence.capacity,
            blocks.lasts,
            is_epoch,
            spare_writes,
            afterwards,
            sequence.frames_then,
        )
        programs[name] = Unrolling(sequence, uses, blocks.nbytes, homes, paced=paced).run()
        homes |= dict(programs[name].warm)
    return {name: programs[name] for name in sequences if name in programs}


def _first_steps_of_lasting_blocks(spans: Columns[Span], blocks: BlockTable) -> dict[int, int]:
    """Return the first step that uses each block, of those that exist in every epoch."""
    firsts, _, used, _ = spans.columns
    lasting = set(filter(blocks.lasts, {*used}))
    return {block: first for first, block in zip(reversed(firsts), reversed(used), strict=True) if block in lasting}


class Unrolling:
    """The unrolling of one program: it tracks the frame of every live block and the blocks to come. ``homes``: the
    frames of blocks with which programs begin.

    ``paced``: a step requests no more blocks for later steps than the next than the pass loads in a step on average.
    This is for programs that may have to wait before a load is passed on, while a step is there to compute.
    """

    def __init__(
        self,
        sequence: BlockSequence,
        uses: Uses,
        nbytes: Callable[[int], int],
        homes: Mapping[int, int],
        *,
        paced: bool = False,
    ) -> None:
        self.steps, self.bounds, _, _, available, self.steps_at_once = sequence
        self.uses, self.nbytes = uses, nbytes
        self.homes = dict(homes)
        self.kept, self.endings = belady(uses), uses.endings
        self.found = found_in_memory(uses, self.kept)
        self.to_write = blocks_to_write(uses, self.kept)
        self.frames = _Frames(available)
        self.pass_of = array("i", (step.at for step in self.steps))
        self.pace = self._loads_per_step() if paced else None
        self.until = self._last_passes()
        self.where: dict[int, int] = {}
        self.acquired, self.stored = Columns("iib", Acquire), array("i")
        self.acquire, self.store = ByStep(self.acquired), ByStep(self.stored)
        self.moves: dict[int, tuple[Move, ...]] = {}
        self.fill: dict[int, tuple[tuple[int, bool], ...]] = {}
        self.room_ahead = [
            sum(map(len, available[p]))
            - (uses.capacity[first] + self._count_unbroken_uses(first) if stop > first else 0)
            for p, (first, stop) in enumerate(self.bounds)
        ]
        self.stored_at = array("i", [_NEVER]) * len(uses.firsts)
        self.next = 0
        self.ahead = 0
        self.read_bytes = self.write_bytes = 0

    def run(self) -> Program:
        if self.kept.begins:
            self._place()
        warm = tuple(sorted(self.where.items()))
        for p, (first, stop) in enumerate(self.bounds):
            self._enter(p)
            for t in range(first, stop):
                self._begin(p, t, first)
            for t in range(max(first, stop - self.steps_at_once[p]), stop):
                self._release(t, first)
        leaves = {block: self.homes[block] for block in sorted(self.kept.carried)}
        if leaves:
            self._return_home(leaves)
        return Program(
            steps=self.steps,
            bounds=tuple(self.bounds),
            uses=self.uses,
            kept=self.kept,
            warm=warm,
            leaves=tuple(leaves.items()),
            moves=self.moves,
            acquire=self.acquire,
            store=self.store,
            fill=self.fill,
            frames=self.frames.highest,
            read_bytes=self.read_bytes,
            write_bytes=self.write_bytes,
            steps_at_once=self.steps_at_once,
        )

    def _count_unbroken_uses(self, first: int) -> int:
        """Return the number of blocks in use both in step ``first`` and the step before it, which no capacity
        counts."""
        (firsts, *_), kept, following = self.uses.spans.columns, self.kept.after, self.uses.following
        ended = self.uses.ending(first - 1) if first else ()
        return sum(kept[i] and following[i] < len(firsts) and firsts[following[i]] == first for i in ended)

    # ---- before the first step and after the last -------------------------------------------------------

    def _place(self) -> None:
        """Give frames to the blocks that are there at the beginning: their homes, or new frames in the order of first
        use."""
        begins, last = self.kept.begins, len(self.uses.spans)
        firsts = {block: i for block in begins if (i := self.uses.first_of(block)) >= 0}
        self.where = {block: self.homes[block] for block in begins if block in self.homes}
        self.frames.enter(0, {*self.where.values()})
        self.frames.highest = max((frame + 1 for frame in self.where.values()), default=0)
        for block in sorted(begins - self.where.keys(), key=lambda block: (firsts.get(block, last), block)):
            until = self.until[firsts[block]] if block in firsts else _FOR_EVER
            self.homes[block] = self.where[block] = self._must_take(0, until)

    def _return_home(self, home: dict[int, int]) -> None:
        """Append moves that put carried blocks where the next program expects them; a block in the way moves first."""
        taken = {self.where[block]: block for block in home if self.where[block] != home[block]}
        wanted = {home[block]: block for block in taken.values()}
        moves: list[Move] = []

        def follow(free: int) -> None:
            """Fill frame ``free``, then the frame that this empties, and so on."""
            while free in wanted:
                block = wanted.pop(free)
                origin = self.where[block]
                moves.append(Move(block, origin, free))
                self.where[block] = free
                free = origin

        for frame in [frame for frame in wanted if frame not in taken]:
            follow(frame)
        lying = {*self.where.values(), *home.values()}
        while wanted:  # the rest are cycles: one block moves aside
            block = next(iter(wanted.values()))
            origin = self.where[block]
            aside = next(f for f in range(len(self.frames.group_of)) if f not in lying)
            self.frames.highest = max(self.frames.highest, aside + 1)
            moves.append(Move(block, origin, aside))
            self.where[block] = aside
            follow(origin)
        self.moves[len(self.bounds)] = tuple(moves)

    # ---- passes and steps ---------------------------------------------------------------------------------

    def _enter(self, p: int) -> None:
        """Leave the frames that regions take, moving blocks that must be kept, and free the others."""
        self.ahead = 0
        closed = self.frames.enter(p)
        if not closed:
            return
        moves = []
        for block, frame in list(self.where.items()):
            if self.frames.group_of[frame] in closed:
                target = self._must_take(p, p)
                moves.append(Move(block, frame, target))
                self.where[block] = target
        if moves:
            self.moves[p] = tuple(moves)

    def _begin(self, p: int, t: int, first: int) -> None:
        self._release(t - self.steps_at_once[p], first)
        self.frames.cool(t)
        (firsts, _, blocks, uses), found = self.uses.spans.columns, self.found
        count, pace = len(firsts), self.pace
        acquired, frames_of, loaded = (column.append for column in self.acquired.columns)
        copy, read, reading = int(Use.COPY), int(Use.READ), READING
        early = 0
        i = self.next
        while i < count:
            if not found[i] and (use := uses[i]) != copy:
                first_step, block = firsts[i], blocks[i]
                if first_step > t and not self._may_prefetch(p, i, t):
                    break
                if pace is not None and first_step > t + 1 and use == read:
                    if early >= pace[self.pass_of[first_step]]:
                        break
                    early += 1
                self.ahead += self.pass_of[first_step] != p
                frame = self._must_take(p, self.until[i])
                load = use in reading
                acquired(block)
                frames_of(frame)
                loaded(load)
                self.where[block] = frame
                if load:
                    self.read_bytes += self.nbytes(block)
            i += 1
        self.next = i
        self.acquire.end_step()
        self._finish(t)

    def _finish(self, t: int) -> None:
        """Record what step ``t`` copies to slab buffers, and what is written after it."""
        filled: list[tuple[int, bool]] = []
        stored, copy = self.stored, int(Use.COPY)
        _, _, blocks, uses = self.uses.spans.columns
        by_end, begins = self.endings
        for i in by_end[begins[t] : begins[t + 1]]:
            block, use = blocks[i], uses[i]
            if use == copy:
                filled.append((block, bool(self.found[i])))
                self.read_bytes += 0 if self.found[i] else self.nbytes(block)
            elif use in WRITING and self.to_write[block]:
                stored.append(block)
                self.stored_at[block] = t
                self.write_bytes += self.nbytes(block)
        if filled:
            self.fill[t] = tuple(filled)
        self.store.end_step()

    def _may_prefetch(self, p: int, i: int, t: int) -> bool:
        """Whether span ``i`` of a later step, which needs a frame, can have it at step ``t`` already."""
        firsts, _, blocks, uses = self.uses.spans.columns
        first, block = firsts[i], blocks[i]
        if block in self.where:
            return False  # still in use elsewhere
        if self.pass_of[first] != p:
            written = self.stored_at[block]
            if written == _NEVER and self.to_write[block]:
                written = t
            if uses[i] == Use.WRITE or self.pass_of[first] != p + 1 or written >= t - 1:
                return False
            if self.ahead >= self.room_ahead[p + 1]:
                return False
        return self.frames.has(p, self.until[i])

    def _release(self, t: int, first: int) -> None:
        """Free the frames of blocks whose last use, or last for long, was step ``t`` of this pass."""
        if t < first:
            return
        after, copy, (_, _, blocks, uses) = self.kept.after, int(Use.COPY), self.uses.spans.columns
        by_end, begins = self.endings
        for i in by_end[begins[t] : begins[t + 1]]:
            if after[i]:
                continue
            block = blocks[i]
            if uses[i] == copy and not self.found[i]:
                continue
            frame = self.where.pop(block, None)
            if frame is not None:
                self.frames.give(frame, t, being_written=self.stored_at[block] == t)

    def _loads_per_step(self) -> list[int]:
        """Return the average number of loads in a step, by pass and rounded up."""
        loads = [0] * len(self.bounds)
        firsts, _, _, uses = self.uses.spans.columns
        for first, use, found in zip(firsts, uses, self.found, strict=True):
            if use == Use.READ and not found:
                loads[self.pass_of[first]] += 1
        return [-(-count // max(1, stop - first)) for count, (first, stop) in zip(loads, self.bounds, strict=True)]

    def _last_passes(self) -> Sequence[int]:
        """Return, for each span, the pass in which its frame is freed, counted on into the next epoch but no
        further."""
        (_, lasts, _, _), following, after = self.uses.spans.columns, self.uses.following, self.kept.after
        count, passes = len(lasts), len(self.bounds)

        def ends(epoch: int) -> "array[int]":
            return array("i", (self.pass_of[last] + epoch * passes for last in lasts))

        def untils(epoch: int, beyond: Sequence[int]) -> Sequence[int]:
            """Return the same for the run of the program ``epoch`` epochs later; ``beyond`` is for the run after
            that."""
            until = ends(epoch)
            for i in range(count - 1, -1, -1):
                if after[i]:
                    then = following[i]
                    until[i] = until[then] if then < count else beyond[then - count]
            return until

        if not self.kept.carried:
            return untils(0, ())
        return untils(0, untils(1, ends(2)))

    def _must_take(self, p: int, until: int) -> int:
        frame = self.frames.take(p, until)
        assert frame is not None, "the planner has left too few frames for a pass"
        return frame
