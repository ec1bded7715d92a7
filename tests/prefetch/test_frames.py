# SPDX-License-Identifier: Apache-2.0
"""Frames hold what they are told to, and nobody reads or reuses one while a request is still using it."""

from pathlib import Path

import pytest

from ooc.errors import SpillError
from ooc.prefetch.arena import Arena
from ooc.prefetch.engine import DirectEngine, OpenFile, Span
from ooc.prefetch.frames import Frames
from ooc.prefetch.spill import create_spill
from tests.prefetch.faults import Faults, faulty_engine

FRAME = 8192


def span(file: OpenFile, block: int) -> list[Span]:
    return [Span(file, block * FRAME, FRAME, "m")]


@pytest.mark.parametrize("faults", [None, Faults(seed=7, short=0.3, interrupted=0.2, late=0.2, late_s=0.002)])
def test_blocks_written_out_of_reused_frames_come_back(tmp_path: Path, faults: Faults | None) -> None:
    """Nine blocks go through two frames, and are read back in the opposite order through three others."""
    engine = DirectEngine() if faults is None else faulty_engine(faults)
    spill = create_spill(tmp_path, "m", 9 * FRAME)
    frames = Frames(Arena(5 * FRAME), FRAME, engine)
    for block in range(9):
        frames.acquire(block, block % 2)
        frames.view(block, FRAME)[:] = block
        frames.write(block, span(spill, block), FRAME)
    for block in reversed(range(9)):
        frames.acquire(block, 2 + block % 3)
        frames.read(block, span(spill, block), FRAME)
        frames.await_read(block)
        assert (frames.view(block, FRAME) == block).all()
    frames.settle()
    engine.close()
    spill.close()


def test_a_moved_block_takes_its_bytes_along_and_frees_its_frame(tmp_path: Path) -> None:
    engine = DirectEngine()
    frames = Frames(Arena(3 * FRAME), FRAME, engine)
    frames.acquire(7, 0)
    frames.view(7, FRAME)[:] = 7
    frames.move(7, 2, FRAME)
    frames.acquire(8, 0)
    frames.view(8, FRAME)[:] = 8
    assert frames.holds(7, 2) and not frames.holds(7, 0) and frames.holds(8, 0)
    assert (frames.view(7, FRAME) == 7).all()
    frames.clear(2, 1)
    assert not frames.holds(7, 2)
    engine.close()


def test_a_failed_read_is_told_where_the_block_is_awaited(tmp_path: Path) -> None:
    """And everything can still be settled."""
    engine = faulty_engine(Faults(broken=1.0))
    spill = create_spill(tmp_path, "m", 4 * FRAME)
    frames = Frames(Arena(2 * FRAME), FRAME, engine)
    for block in range(2):
        frames.acquire(block, block)
        frames.read(block, span(spill, block), FRAME)
    with pytest.raises(SpillError, match=r"m: reading .* at byte 0 failed: Input/output error"):
        frames.await_read(0)
    frames.settle()
    engine.close()
    spill.close()


def test_a_failed_write_is_told_to_whoever_reuses_the_frame_or_reads_the_block(tmp_path: Path) -> None:
    engine = faulty_engine(Faults(broken=1.0))
    spill = create_spill(tmp_path, "m", 4 * FRAME)
    frames = Frames(Arena(2 * FRAME), FRAME, engine)
    for block in range(2):
        frames.acquire(block, block)
        frames.write(block, span(spill, block), FRAME)
    with pytest.raises(SpillError, match="m: writing"):
        frames.acquire(5, 0)
    with pytest.raises(SpillError, match="m: writing"):
        frames.await_written(1)
    frames.settle()
    engine.close()
    spill.close()
