# SPDX-License-Identifier: Apache-2.0
"""The level below a device's arena: which blocks wait in host memory, and which go to the SSD.

If the device has memory of its own, a program becomes two, one above the other. The upper one is made by
``ooc.plan.program.program`` for the frames of the device. It knows neither host nor SSD, only a level below that it
loads from and stores to. Its loads and stores, in order, are again a known sequence of uses of blocks. So the same
replacement and the same unrolling make the lower program: its steps are the *transfers* over PCIe, its frames lie in
host memory, and its loads and stores are what the SSD reads and writes.

A block that the device keeps is not used below, so its host frame goes to a block that comes back sooner.
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
"""Host frames for the transfer under way and the next one: the fewest in which a program runs."""
_LEAST_AHEAD, MOST_AHEAD = 4, 32
"""The fewest and the most host frames for read-ahead."""
_STEP = Step(0, -1, 0, 1)
"""The step of a transfer: transfers have no rows, so all their steps are alike."""


class CopyTo(Enum):
    """The direction of a transfer over PCIe."""

    DEVICE = "to device"
    HOST = "to host"


class Transfer(NamedTuple):
    """A transfer of ``block`` over PCIe: to a frame or slab buffer of the device before ``step`` of the upper program,
    or from its frame after that step."""

    step: int
    block: int
    direction: CopyTo


def _transfer(step: int, block: int, is_to_device: int) -> Transfer:
    return Transfer(step, block, CopyTo.DEVICE if is_to_device else CopyTo.HOST)


def transfers_of(program: Program) -> Columns[Transfer]:
    """Return all transfers of the upper program, in order."""
    moved = ((step, block, to is CopyTo.DEVICE) for (step, block, to), _ in in_order(program))
    return Columns("iib", _transfer, moved)


@dataclass(frozen=True)
class Staging:
    """The lower program. Its step i is ``transfers[i]``; all of them form one pass.

    ``program.acquire[i]``: host frames to give before transfer i, and which blocks to start reading into them from the
    SSD; many are for later transfers. A transfer to the device waits for its read. After a transfer to the host, the
    blocks of ``program.store[i]`` are written to the SSD. A host frame is freed two transfers after its last use, and
    whoever takes it waits until its content has been written. ``program.warm``: blocks that the program before has left
    in host frames.

    Host frames are interchangeable, so ``program.moves``, which exist only after the last transfer, copy nothing: the
    two frames of a move swap names, which puts blocks where the next program looks for them. Blocks missing when a
    program begins come from the SSD, the device's ``warm`` blocks first; those pass through the last host frames, which
    hold nothing then, unless they are on the host already.
    """

    transfers: Sequence[Transfer]
    program: Program


def in_order(program: Program) -> Iterator[tuple[Transfer, bool]]:
    """Yield the transfers of the upper program in the order in which it may request them, each with whether it goes to
    a frame of the device.

    The loads of step t+1 are requested before step t has stored its results, as the tiles of both overlap. At the end
    of a pass all work is complete.
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
    """Return how many of ``frames`` host frames are for waiting blocks; the others carry transfers and read-ahead."""
    return max(0, frames - IN_TRANSFER - max(_LEAST_AHEAD, min(MOST_AHEAD, frames // 8)))


class PassingThrough(NamedTuple):
    """Reads and writes between SSD and device that need no host frame. ``reads``: the transfer before which they start,
    and their block; ``writes``: their transfer."""

    reads: frozenset[tuple[int, int]]
    writes: frozenset[int]


def passing_through(staging: Staging, upper: Program, slab_of: Callable[[int], int]) -> PassingThrough:
    """Return the blocks that only pass through their host frame: a single transfer uses it, and the frame goes to
    another block before the program ends. ``upper``: the program above ``staging``. ``slab_of`` returns the slab of a
    block.

    Reads into slab buffers count if they are for a later sweep than the one under way. Kernels may read the buffer of
    the next sweep until the moment it is filled, so nothing could be read ahead.
    """
    reads, writes = set(), set()
    held: dict[int, _HostFrameUse] = {}  # by frame
    last: dict[int, _HostFrameUse] = {}  # by block
    for index, (transfer, to_frame) in enumerate(in_order(upper)):
        for block, frame, load in staging.program.acquire[index]:
            before = held.pop(frame, None)
            if before is not None and before.passes:
                if before.load:
                    reads.add((before.since, before.block))
                else:
                    writes.add(before.used_by[0])
            held[frame] = last[block] = _HostFrameUse(block, index, load)
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
class _HostFrameUse:
    """The use of a host frame by ``block``, which has it from transfer ``since`` on: the transfers that have used it,
    and whether the block has only passed through so far."""

    block: int
    since: int
    load: bool
    used_by: list[int] = field(default_factory=list)
    passes: bool = False


def sequence_of(transfers: Sequence[Transfer], frames: int) -> BlockSequence:
    """Return the uses of blocks by ``transfers``, in at most ``frames`` host frames."""
    count, uses = len(transfers), {CopyTo.DEVICE: Use.READ, CopyTo.HOST: Use.WRITE}
    spans = spans_of(Span(i, i, block, uses[direction]) for i, (_, block, direction) in enumerate(transfers))
    room = [room_between_uses(frames)] * count
    return BlockSequence([_STEP] * count, [(0, count)], spans, room, [[range(frames)]], [STEPS_AT_ONCE])
