# SPDX-License-Identifier: Apache-2.0
"""The level below a device's arena: which blocks wait in host memory, and which go to the SSD.

Where the device has memory of its own, a program is two programs, one on top of the other. The upper one is what
``ooc.plan.program.program`` makes for the frames of the device: it knows no host and no SSD, only a "below" that it
loads from and stores to. What it loads and stores is, read in order, a sequence of uses of blocks: known before
anything runs, like the one that it was made from. So the same replacement and the same unrolling make the lower
program, whose steps are the *transfers* over PCIe and whose frames lie in host memory. What that one loads and
stores is what the SSD reads and writes.

A block that the device keeps is not used below, and leaves its host frame to one that comes back sooner.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from ooc.plan.layout.passes import STEPS_AT_ONCE
from ooc.plan.program.columns import Columns
from ooc.plan.program.program import BlockSequence, Program
from ooc.plan.program.sequence import Span, Step, Use, spans_of

IN_TRANSFER = 2
"""Host frames of the transfer under way and of the next one: the fewest that a program runs in."""
_LEAST_AHEAD, MOST_AHEAD = 4, 32
"""Host frames for what is read ahead."""
_STEP = Step(0, -1, 0, 1)
"""A transfer has no rows: its steps are all alike."""


class CopyTo(Enum):
    """Where a transfer over PCIe goes."""

    DEVICE = "to device"
    HOST = "to host"


class Transfer(NamedTuple):
    """``block`` goes over PCIe: to a frame or slab buffer of the device for ``step`` of the upper program, or from its
    frame when that step has been computed."""

    step: int
    block: int
    direction: CopyTo


def _transfer(step: int, block: int, is_to_device: int) -> Transfer:
    return Transfer(step, block, CopyTo.DEVICE if is_to_device else CopyTo.HOST)


def transfers_of(program: Program) -> Columns[Transfer]:
    """All that the upper program moves, in order."""
    moved = ((step, block, to is CopyTo.DEVICE) for (step, block, to), _ in in_order(program))
    return Columns("iib", _transfer, moved)


@dataclass(frozen=True)
class Staging:
    """The lower program. Its step i is ``transfers[i]``, all of them in one pass.

    ``program.acquire[i]``: host frames to give before transfer i, and which blocks to start reading into them from the
    SSD; many are for later transfers. A transfer to the device waits for that read; after a transfer to the host, the
    blocks of ``program.store[i]`` are written to the SSD. A host frame comes back two transfers after its last use, and
    whoever takes it waits for what is still leaving it. ``program.warm``: what the program before has left in host
    frames.

    Host frames are alike, so ``program.moves``, there only after the last transfer, copies nothing: the two frames of a
    move swap their names, which brings what is left to the next program to where that looks for it. What is not there
    when a program begins comes from the SSD, the device's ``warm`` blocks first, by way of the last host frames, where
    nothing lies then, unless they are on the host.
    """

    transfers: Sequence[Transfer]
    program: Program


def in_order(program: Program) -> Iterator[tuple[Transfer, bool]]:
    """All that the upper program moves, in the order in which it may be asked for; with each, whether it is to a frame
    of the device.

    What step t+1 loads is asked for before step t has stored its results, as their tiles overlap; at a pass's end
    everything comes to rest.
    """
    for first, stop in program.bounds:
        for t in range(first, stop):
            for block, _, load in program.acquire[t]:
                if load:
                    yield Transfer(t, block, CopyTo.DEVICE), True
            for block, in_frame in program.fill.get(t, ()):
                if not in_frame:
                    yield Transfer(t, block, CopyTo.DEVICE), False
            if t > first:
                yield from _stores(program, t - 1)
        if stop > first:
            yield from _stores(program, stop - 1)


def _stores(program: Program, t: int) -> Iterator[tuple[Transfer, bool]]:
    for block in program.store[t]:
        yield Transfer(t, block, CopyTo.HOST), False


def room_between_uses(frames: int) -> int:
    """Of ``frames`` host frames, those for blocks that wait; the rest carries transfers and what is read ahead."""
    return max(0, frames - IN_TRANSFER - max(_LEAST_AHEAD, min(MOST_AHEAD, frames // 8)))


class PassingThrough(NamedTuple):
    """What the SSD and the device can hand one another without a host frame. ``reads``: by the transfer before which
    they set off, and their block; ``writes``: by their transfer."""

    reads: frozenset[tuple[int, int]]
    writes: frozenset[int]


def passing_through(staging: Staging, upper: Program, slab_of: Callable[[int], int]) -> PassingThrough:
    """Blocks that only pass through their host frame: one transfer uses it, and it goes to another block before the
    program ends. ``upper``: the program that ``staging`` lies under. ``slab_of`` a block.

    Slab buffers count where they are filled for a later sweep than the one under way: the buffer of the next one may be
    read by kernels until the moment that it is filled, and then nothing could be read ahead.
    """
    reads, writes = set(), set()
    held: dict[int, _Holder] = {}  # by frame
    last: dict[int, _Holder] = {}  # by block
    for index, (transfer, to_frame) in enumerate(in_order(upper)):
        for block, frame, load in staging.program.acquire[index]:
            before = held.pop(frame, None)
            if before is not None and before.passes:
                if before.load:
                    reads.add((before.since, before.block))
                else:
                    writes.add(before.used_by[0])
            held[frame] = last[block] = _Holder(block, index, load)
        holder = last.get(transfer.block)
        if holder is not None:
            holder.used_by.append(index)
            if transfer.direction is CopyTo.HOST:
                holder.passes = not holder.load and transfer.block in staging.program.store[index]
            else:
                ahead = to_frame or slab_of(transfer.block) > upper.steps[transfer.step].slab
                holder.passes = holder.load and ahead
            holder.passes = holder.passes and len(holder.used_by) == 1
    return PassingThrough(frozenset(reads), frozenset(writes))


@dataclass
class _Holder:
    """Of a host frame: its block, given it before transfer ``since``; the transfers that have used it, and whether it
    only passes through so far."""

    block: int
    since: int
    load: bool
    used_by: list[int] = field(default_factory=list)
    passes: bool = False


def sequence_of(transfers: Sequence[Transfer], frames: int) -> BlockSequence:
    """Their uses of blocks, in ``frames`` host frames at most."""
    count, uses = len(transfers), {CopyTo.DEVICE: Use.READ, CopyTo.HOST: Use.WRITE}
    spans = spans_of(Span(i, i, block, uses[direction]) for i, (_, block, direction) in enumerate(transfers))
    room = [room_between_uses(frames)] * count
    return BlockSequence([_STEP] * count, [(0, count)], spans, room, [[range(frames)]], [STEPS_AT_ONCE])
