# SPDX-License-Identifier: Apache-2.0
"""Streams keep the order of blocks, however few their buffers and however the disk behaves."""

from pathlib import Path

import pytest

from ooc.errors import SpillError
from ooc.prefetch.arena import Arena
from ooc.prefetch.engine import DirectEngine, Span
from ooc.prefetch.spill import create_spill
from ooc.prefetch.stream import ReadStream, Request, WriteStream
from tests.prefetch.faults import Faults, faulty_engine

MIB = 1 << 20


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("faults", [None, Faults(seed=7, short=0.3, interrupted=0.2, late=0.1, late_s=0.002)])
def test_streams_keep_the_order_of_blocks(tmp_path: Path, slots: int, faults: Faults | None) -> None:
    engine = DirectEngine() if faults is None else faulty_engine(faults)
    spill = create_spill(tmp_path, "m", MIB)
    blocks = [Request((Span(spill, i * 8192, 8192, "m"),), ((0, 8192),)) for i in range(9)]
    ring = [Arena(8192).view(0, 8192) for _ in range(slots)]
    writes = WriteStream(engine, ring)
    for i, block in enumerate(blocks):
        writes.slot()[:] = i
        writes.put(block)
    writes.drain()
    reads = ReadStream(engine, blocks[::-1], [Arena(8192).view(0, 8192) for _ in range(slots)])
    assert [int(reads.take()[77]) for _ in blocks] == list(range(9))[::-1]
    engine.close()
    spill.close()


def test_a_failed_block_is_told_where_it_is_taken(tmp_path: Path) -> None:
    """And the stream can still be settled."""
    engine = faulty_engine(Faults(broken=1.0))
    spill = create_spill(tmp_path, "m", MIB)
    blocks = [Request((Span(spill, i * 8192, 8192, "m"),), ((0, 8192),)) for i in range(4)]
    reads = ReadStream(engine, blocks, [Arena(8192).view(0, 8192) for _ in range(2)])
    with pytest.raises(SpillError, match=r"m: reading .* at byte 0 failed: Input/output error"):
        reads.take()
    reads.settle()
    engine.close()
    spill.close()
