# SPDX-License-Identifier: Apache-2.0
"""What is written is what is read, aligned or not; failures name matrix, file and offset."""

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ooc.errors import BudgetError, SpillError
from ooc.prefetch.arena import Arena
from ooc.prefetch.engine import PIECE_BYTES, ChunkFile, DirectEngine, OpenFile, Span
from ooc.prefetch.spill import create_spill, free_bytes
from ooc.prefetch.stream import ReadStream, Request, WriteStream

MIB = 1 << 20


@pytest.fixture
def engine() -> Iterator[DirectEngine]:
    made = DirectEngine()
    yield made
    made.close()


@pytest.fixture
def spill(tmp_path: Path) -> Iterator[OpenFile]:
    file = create_spill(tmp_path, "m", 12 * MIB)
    yield file
    file.close()


def fill(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    offset=st.integers(0, 3 * 4096) | st.integers(0, 3).map(lambda pages: pages * 4096),
    nbytes=st.integers(1, 3 * 4096) | st.just(PIECE_BYTES + 5000) | st.just(2 * PIECE_BYTES),
    shift=st.sampled_from([0, 1, 512]),
)
def test_any_range_comes_back_as_written(
    engine: DirectEngine, spill: OpenFile, offset: int, nbytes: int, shift: int
) -> None:
    arena = Arena(nbytes + 4096)
    data = arena.view(0, nbytes + 4096)[shift : shift + nbytes]
    data[:] = fill(nbytes)
    engine.write([Span(spill, offset, nbytes, "m")], data).wait()
    back = Arena(nbytes + 4096).view(0, nbytes + 4096)[shift : shift + nbytes]
    engine.read([Span(spill, offset, nbytes, "m")], back).wait()
    assert np.array_equal(back, data)


def test_several_spans_are_laid_one_behind_the_other(engine: DirectEngine, tmp_path: Path) -> None:
    parts = [fill(n, seed=n) for n in (8192, 100, 4096)]
    spans = []
    for i, part in enumerate(parts):
        path = tmp_path / str(i)
        path.write_bytes(part.tobytes())
        spans.append(Span(ChunkFile(path), 0, len(part), "x"))
    out = Arena(MIB).view(0, 8192 + 100 + 4096)
    engine.read(spans, out).wait()
    assert np.array_equal(out, np.concatenate(parts))
    assert engine.counters.read_bytes == len(out)


def test_many_threads_share_an_engine(engine: DirectEngine, spill: OpenFile) -> None:
    def work(i: int) -> None:
        data = Arena(65536).view(0, 65536)
        data[:] = i
        for _ in range(20):
            engine.write([Span(spill, i * 65536, 65536, "m")], data).wait()
            out = Arena(65536).view(0, 65536)
            engine.read([Span(spill, i * 65536, 65536, "m")], out).wait()
            results.append(bool((out == i).all()))

    results: list[bool] = []
    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 160
    assert all(results)


def test_a_short_file_is_an_error_that_names_matrix_file_and_offset(engine: DirectEngine, tmp_path: Path) -> None:
    path = tmp_path / "chunk"
    path.write_bytes(bytes(5000))
    out = Arena(8192).view(0, 8192)
    with pytest.raises(SpillError, match=r"z1: .*chunk ends at byte 5000, 3192 bytes are missing"):
        engine.read([Span(ChunkFile(path), 0, 8192, "z1")], out).wait()


def test_a_missing_file_is_an_error(engine: DirectEngine, tmp_path: Path) -> None:
    with pytest.raises(SpillError, match=r"x: reading .*gone at byte 0 failed: No such file"):
        engine.read([Span(ChunkFile(tmp_path / "gone"), 0, 10, "x")], Arena(4096).view(0, 10)).wait()


def test_short_reads_and_writes_are_continued(
    engine: DirectEngine, spill: OpenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_read, real_write = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: real_read(fd, [views[0][: max(512, len(views[0]) // 2)]], at))
    monkeypatch.setattr(
        os, "pwritev", lambda fd, views, at: real_write(fd, [views[0][: max(512, len(views[0]) // 2)]], at)
    )
    data, back = Arena(65536).view(0, 65536), Arena(65536).view(0, 65536)
    data[:] = fill(65536)
    engine.write([Span(spill, 0, 65536, "m")], data).wait()
    engine.read([Span(spill, 0, 65536, "m")], back).wait()
    assert np.array_equal(back, data)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_io_errors_surface_once_waited_for(
    engine: DirectEngine, spill: OpenFile, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def broken(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwritev", broken)
    ticket = engine.write([Span(spill, 4096, 4096, "z2")], Arena(4096).view(0, 4096))
    with pytest.raises(SpillError, match=rf"z2: writing .* at byte 4096 failed: {os.strerror(code)}"):
        ticket.wait()


def test_spill_files_have_no_name_and_leave_nothing(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    file = create_spill(tmp_path, "m", 4 * MIB)
    assert list(tmp_path.iterdir()) == []
    file.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_disk_too_small_says_so_at_once(tmp_path: Path) -> None:
    with pytest.raises(SpillError, match="no room for the .* of z1"):
        create_spill(tmp_path, "z1", free_bytes(tmp_path) * 2 + (1 << 50))


def test_a_folder_that_cannot_be_written_is_named() -> None:
    with pytest.raises(SpillError, match="cannot create spill files"):
        create_spill(Path("/proc"), "z1", 4096)


def test_an_engine_leaves_no_thread_and_no_descriptor(tmp_path: Path) -> None:
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    made = DirectEngine()
    path = tmp_path / "chunk"
    path.write_bytes(bytes(65536))
    made.read([Span(ChunkFile(path), 0, 65536, "x")], Arena(65536).view(0, 65536)).wait()
    made.close()
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_an_arena_gives_nothing_outside_itself() -> None:
    arena = Arena(8192)
    assert len(arena.view(4096, 4096)) == 4096
    with pytest.raises(BudgetError):
        arena.view(4096, 4097)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_streams_keep_the_order_of_blocks(engine: DirectEngine, spill: OpenFile, slots: int) -> None:
    blocks = [Request((Span(spill, i * 8192, 8192, "m"),), ((0, 8192),)) for i in range(9)]
    ring = [Arena(8192).view(0, 8192) for _ in range(slots)]
    writes = WriteStream(engine, ring)
    for i, block in enumerate(blocks):
        writes.slot()[:] = i
        writes.put(block)
    writes.drain()
    reads = ReadStream(engine, blocks[::-1], [Arena(8192).view(0, 8192) for _ in range(slots)])
    assert [int(reads.take()[77]) for _ in blocks] == list(range(9))[::-1]
