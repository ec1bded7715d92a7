# SPDX-License-Identifier: Apache-2.0
"""Frames hold what they are told to, and nobody reads or reuses one while a request is still using it."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ooc.errors import SpillError
from ooc.prefetch.arena import Arena, Bytes
from ooc.prefetch.engine import Counters, Engine, OpenFile, Span, Ticket
from ooc.prefetch.engines.direct import DirectEngine
from ooc.prefetch.frames import HostWorkspace
from ooc.prefetch.spill import create_spill
from tests.prefetch.faults import UNCHECKED, Faults, faulty_engine

FRAME = 8192


def workspace(frames: int, engine: Engine, file: OpenFile) -> HostWorkspace:
    """So many frames for the blocks of ``file``."""

    def locate(block: int) -> tuple[list[Span], int]:
        return [Span(file, block * FRAME, FRAME, "m")], FRAME

    arena = Arena(frames * FRAME)
    return HostWorkspace(arena, FRAME, engine, locate, lambda block: FRAME, target=locate, checks=UNCHECKED, part=None)


def content(frames: HostWorkspace, block: int) -> Tensor:
    return frames.matrix(block, torch.uint8, 1, FRAME)


@pytest.mark.parametrize("faults", [None, Faults(seed=7, short=0.3, interrupted=0.2, late=0.2, late_s=0.002)])
def test_blocks_written_out_of_reused_frames_come_back(tmp_path: Path, faults: Faults | None) -> None:
    """Nine blocks go through two frames, and are read back in the opposite order through three others."""
    engine = DirectEngine() if faults is None else faulty_engine(faults)
    spill = create_spill(tmp_path, "m", 9 * FRAME)
    frames = workspace(5, engine, spill)
    for block in range(9):
        frames.acquire(block, block % 2, load=False)
        frames.await_frame(block)
        content(frames, block)[:] = block
        frames.write(block, 0)
    for block in reversed(range(9)):
        frames.acquire(block, 2 + block % 3, load=True)
        frames.await_read(block)
        assert (content(frames, block) == block).all()
    frames.settle()
    engine.close()
    spill.close()


def test_a_moved_block_takes_its_bytes_along_and_frees_its_frame(tmp_path: Path) -> None:
    engine = DirectEngine()
    spill = create_spill(tmp_path, "m", FRAME)
    frames = workspace(3, engine, spill)
    frames.acquire(7, 0, load=False)
    content(frames, 7)[:] = 7
    frames.move(7, 2)
    frames.acquire(8, 0, load=False)
    content(frames, 8)[:] = 8
    assert frames.holds(7, 2) and not frames.holds(7, 0) and frames.holds(8, 0)
    assert (content(frames, 7) == 7).all()
    frames.clear(2, 1)
    assert not frames.holds(7, 2)
    engine.close()
    spill.close()


def test_a_failed_read_is_told_where_the_block_is_awaited(tmp_path: Path) -> None:
    """And everything can still be settled."""
    engine = faulty_engine(Faults(broken=1.0))
    spill = create_spill(tmp_path, "m", 4 * FRAME)
    frames = workspace(2, engine, spill)
    for block in range(2):
        frames.acquire(block, block, load=True)
    with pytest.raises(SpillError, match=r"m: reading .* at byte 0 failed: Input/output error"):
        frames.await_read(0)
    frames.settle()
    engine.close()
    spill.close()


def test_a_failed_write_is_told_to_whoever_reuses_the_frame_or_reads_the_block(tmp_path: Path) -> None:
    engine = faulty_engine(Faults(broken=1.0))
    spill = create_spill(tmp_path, "m", 4 * FRAME)
    frames = workspace(2, engine, spill)
    for block in range(2):
        frames.acquire(block, block, load=False)
        frames.write(block, 0)
    frames.acquire(5, 0, load=False)
    with pytest.raises(SpillError, match="m: writing"):
        frames.await_frame(5)
    with pytest.raises(SpillError, match="m: writing"):
        frames.await_written(1)
    frames.settle()
    engine.close()
    spill.close()


class HeldEngine(Engine):
    """Moves nothing; a request ends when the test says so. ``sent``: what was asked for, in order."""

    name = "held"

    def __init__(self) -> None:
        self.counters = Counters()
        self.sent: list[tuple[str, Ticket]] = []

    def read(self, spans: Sequence[Span], into: Bytes, *, bulk: bool = False) -> Ticket:
        return self._keep("read")

    def write(self, spans: Sequence[Span], source: Bytes) -> Ticket:
        return self._keep("write")

    def close(self) -> None:
        pass

    def _keep(self, what: str) -> Ticket:
        self.sent.append((what, Ticket(self.counters, 1)))
        return self.sent[-1][1]


def test_a_read_into_a_frame_that_is_being_written_out_waits_its_turn_and_nobody_with_it(tmp_path: Path) -> None:
    """Whoever prefetches goes on; the read sets off when the write has ended and somebody calls."""
    engine = HeldEngine()
    spill = create_spill(tmp_path, "m", 4 * FRAME)
    frames = workspace(2, engine, spill)
    frames.acquire(0, 0, load=False)
    frames.write(0, 0)
    frames.acquire(1, 0, load=True)
    frames.acquire(2, 1, load=True)
    frames.vacate(0)
    assert [what for what, _ in engine.sent] == ["write", "read"], "the read of block 1 has to wait, that of 2 has not"
    engine.sent[0][1].part_done()
    frames.vacate(0)
    assert [what for what, _ in engine.sent] == ["write", "read", "read"]
    for _, ticket in engine.sent[1:]:
        ticket.part_done()
    frames.await_read(1)
    frames.await_read(2)
    frames.settle()
    spill.close()


def test_a_block_is_read_back_only_after_it_was_written(tmp_path: Path) -> None:
    """From another frame, too; and a failed write is told to who awaits the read that had to wait for it."""
    engine = HeldEngine()
    spill = create_spill(tmp_path, "m", 4 * FRAME)
    frames = workspace(2, engine, spill)
    frames.acquire(0, 0, load=False)
    frames.write(0, 0)
    frames.acquire(0, 1, load=True)
    frames.vacate(0)
    assert len(engine.sent) == 1
    engine.sent[0][1].part_done(SpillError("m: writing failed"))
    with pytest.raises(SpillError, match="m: writing failed"):
        frames.await_read(0)
    frames.settle()
    spill.close()
