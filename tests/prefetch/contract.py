# SPDX-License-Identifier: Apache-2.0
"""What every engine promises, as tests to inherit: a class an engine, which says how to make one."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ooc.errors import SpillError
from ooc.prefetch.arena import Arena, Bytes
from ooc.prefetch.engine import ChunkFile, Engine, OpenFile, Span, open_file
from ooc.prefetch.spill import create_spill
from tests.examples import examples
from tests.prefetch.faults import Faults
from tests.prefetch.held import assert_no_more_held, held

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


def random_bytes(nbytes: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def aligned(nbytes: int) -> Bytes:
    return Arena(nbytes).view(0, nbytes)


class EngineContract:
    """Inherited by ``Test…`` classes; ``make`` gives the engine on a disk with the given faults."""

    piece_bytes = MIB

    def make(self, faults: Faults | None = None) -> Engine:
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def leaves_nothing(self) -> Iterator[None]:
        """Threads and descriptors are counted around every test."""
        before = held()
        yield
        assert_no_more_held(before)

    @pytest.fixture
    def engine(self, leaves_nothing: None) -> Iterator[Engine]:
        made = self.make()
        yield made
        made.close()

    @pytest.fixture
    def spill(self, leaves_nothing: None, tmp_path: Path) -> Iterator[OpenFile]:
        file = create_spill(tmp_path, "m", 12 * MIB)
        yield file
        file.close()

    def put(self, engine: Engine, span: Span, data: Bytes) -> None:
        """Write by the engine."""
        engine.write([span], data).wait()

    # ---- the same bytes ----------------------------------------------------------------------------------

    @settings(max_examples=examples(30), deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        offset=st.integers(0, 3 * 4096) | st.integers(0, 3).map(lambda pages: pages * 4096),
        nbytes=st.integers(1, 3 * 4096) | st.sampled_from([MIB + 5000, 2 * MIB, 4 * MIB + 1, 5 * MIB]),
        shift=st.sampled_from([0, 1, 512]),
        bulk=st.booleans(),
    )
    def test_any_range_comes_back_as_written(
        self, engine: Engine, spill: OpenFile, offset: int, nbytes: int, shift: int, bulk: bool
    ) -> None:
        """Aligned or not, in one request or several; and not a byte around it is touched."""
        data, back = (aligned(nbytes + 4096)[shift : shift + nbytes] for _ in range(2))
        data[:] = random_bytes(nbytes)
        os.pwrite(spill.buffered, b"<" * offset + b">" * (nbytes + 4096), 0)
        self.put(engine, Span(spill, offset, nbytes, "m"), data)
        engine.read([Span(spill, offset, nbytes, "m")], back, bulk=bulk).wait()
        assert np.array_equal(back, data)
        around = os.pread(spill.buffered, offset, 0), os.pread(spill.buffered, 4096, offset + nbytes)
        assert around == (b"<" * offset, b">" * 4096)

    def test_spans_of_several_files_are_laid_one_behind_the_other(self, engine: Engine, tmp_path: Path) -> None:
        """Whole pages, tails, and files smaller than a page."""
        parts = [random_bytes(n, seed=n) for n in (8192, 100, 4096, 3 * MIB + 7)]
        spans = []
        for i, part in enumerate(parts):
            (tmp_path / str(i)).write_bytes(part.tobytes())
            spans.append(Span(ChunkFile(tmp_path / str(i)), 0, len(part), "x"))
        out = aligned(sum(map(len, parts)))
        engine.read(spans, out).wait()
        assert np.array_equal(out, np.concatenate(parts))
        assert engine.counters.read_bytes == len(out)

    def test_neighbours_and_gaps_in_one_file(self, engine: Engine, spill: OpenFile) -> None:
        """Adjacent ranges may be moved as one; the order and the gaps stay."""
        data = random_bytes(MIB)
        os.pwrite(spill.buffered, data.tobytes(), 0)
        ranges = [(0, 4096), (4096, 8192), (12288, 4096), (65536, 4096), (32768, 100), (32868, 3000)]
        out = aligned(sum(nbytes for _, nbytes in ranges))
        engine.read([Span(spill, *r, "m") for r in ranges], out).wait()
        assert np.array_equal(out, np.concatenate([data[o : o + n] for o, n in ranges]))

    def test_what_is_written_may_be_read_only(self, engine: Engine, spill: OpenFile) -> None:
        data, back = aligned(8192), aligned(8192)
        data[:] = random_bytes(8192)
        data.flags.writeable = False
        self.put(engine, Span(spill, 0, 8192, "m"), data)
        engine.read([Span(spill, 0, 8192, "m")], back).wait()
        assert np.array_equal(back, data)

    def test_nothing_to_move_is_done_at_once(self, engine: Engine, spill: OpenFile) -> None:
        engine.read([], aligned(4096)).wait()
        engine.read([Span(spill, 0, 0, "m")], aligned(4096)[:0]).wait()
        assert engine.counters.read_bytes == 0

    @pytest.mark.thorough
    def test_a_range_over_2_gib(self, engine: Engine, tmp_path: Path, huge: Arena) -> None:
        """In one call, across 2 and 4 GiB of a sparse file: no 32-bit number anywhere."""
        start, nbytes = 2 * GIB - 4096, 2 * GIB + 12388
        path = tmp_path / "sparse"
        marks = {start: 1, 2 * GIB - 1: 2, 2 * GIB: 3, 4 * GIB - 1: 4, 4 * GIB: 5, start + nbytes - 1: 6}
        with path.open("wb") as file:
            for at, mark in marks.items():
                file.seek(at)
                file.write(bytes([mark]))
        out = huge.view(0, nbytes)
        out.fill(255)
        engine.read([Span(ChunkFile(path), start, nbytes, "x")], out).wait()
        assert {at: int(out[at - start]) for at in marks} == marks
        assert int(np.count_nonzero(out)) == len(marks)

    def test_many_threads_share_an_engine(self, engine: Engine, spill: OpenFile) -> None:
        def work(i: int) -> None:
            data, out = aligned(64 * KIB), aligned(64 * KIB)
            for turn in range(20):
                data[:] = i * 20 + turn
                self.put(engine, Span(spill, i * 64 * KIB, 64 * KIB, "m"), data)
                engine.read([Span(spill, i * 64 * KIB, 64 * KIB, "m")], out, bulk=turn % 2 == 0).wait()
                results.append(bool((out == data).all()))

        results: list[bool] = []
        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == 160
        assert all(results)
        assert engine.counters.read_bytes == 160 * 64 * KIB

    # ---- when things go wrong ----------------------------------------------------------------------------

    @pytest.mark.parametrize("length", [8192, 5000, 4096, 100, 0])
    def test_a_short_file_is_an_error_that_names_matrix_file_and_offset(
        self, engine: Engine, tmp_path: Path, length: int
    ) -> None:
        path = tmp_path / "chunk"
        path.write_bytes(bytes(length))
        with pytest.raises(SpillError, match=rf"z1: .*chunk ends at byte {length}, {12288 - length} bytes are missing"):
            engine.read([Span(ChunkFile(path), 0, 12288, "z1")], aligned(12288)).wait()

    def test_a_missing_file_is_an_error(self, engine: Engine, tmp_path: Path) -> None:
        for nbytes in (10, 8192):
            with pytest.raises(SpillError, match=r"x: reading .*gone at byte 0 failed: No such file"):
                engine.read([Span(ChunkFile(tmp_path / "gone"), 0, nbytes, "x")], aligned(nbytes)).wait()

    def test_a_closed_file_is_an_error(self, engine: Engine, tmp_path: Path) -> None:
        path = tmp_path / "chunk"
        path.write_bytes(bytes(8192))
        file = open_file(path)
        file.close()
        file.close()
        with pytest.raises(SpillError, match=r"x: reading .*chunk at byte 4096 failed: Bad file descriptor"):
            engine.read([Span(file, 4096, 4096, "x")], aligned(4096)).wait()

    def test_short_reads_and_writes_are_continued(self, spill: OpenFile) -> None:
        data, back = aligned(3 * MIB + 77), aligned(3 * MIB + 77)
        data[:] = random_bytes(len(data))
        faults = Faults(seed=1, short=0.7)
        engine = self.make(faults)
        self.put(engine, Span(spill, 0, len(data), "m"), data)
        engine.read([Span(spill, 0, len(data), "m")], back).wait()
        engine.close()
        assert np.array_equal(back, data)
        assert faults.struck
        assert engine.counters.read_bytes == len(data)

    def test_interruptions_and_a_busy_kernel_are_ridden_out(self, spill: OpenFile) -> None:
        data, back = aligned(3 * MIB + 77), aligned(3 * MIB + 77)
        data[:] = random_bytes(len(data))
        faults = Faults(seed=1, interrupted=0.9, late=0.2)
        engine = self.make(faults)
        self.put(engine, Span(spill, 0, len(data), "m"), data)
        engine.read([Span(spill, 0, len(data), "m")], back).wait()
        engine.close()
        assert np.array_equal(back, data)
        assert faults.struck

    def test_a_read_error_surfaces_once_waited_for(self, spill: OpenFile) -> None:
        engine = self.make(Faults(broken=1.0))
        ticket = engine.read([Span(spill, 4096, 8192, "z2")], aligned(8192))
        for _ in range(2):
            with pytest.raises(SpillError, match=r"z2: reading .* at byte 4096 failed: .*Input/output error"):
                ticket.wait()
        engine.close()
        assert engine.counters.read_bytes == 0

    def test_a_full_disk_surfaces_once_waited_for(self, spill: OpenFile) -> None:
        engine = self.make(Faults(full=1.0))
        ticket = engine.write([Span(spill, 4096, 8192, "z2")], aligned(8192))
        with pytest.raises(SpillError, match=r"z2: writing .* at byte 4096 failed: .*No space left on device"):
            ticket.wait()
        engine.close()
        assert engine.counters.write_bytes == 0

    def test_one_line_tells_of_many_failures(self, spill: OpenFile) -> None:
        """Whatever else fails beside it."""
        engine = self.make(Faults(seed=3, broken=0.5, late=0.3))
        ticket = engine.read([Span(spill, 0, 12 * MIB, "z3"), Span(spill, 0, 1000, "z4")], aligned(12 * MIB + 1000))
        ticket.settle()
        try:
            ticket.wait()
        except SpillError as error:
            assert str(error).startswith(("z3: reading", "z4: reading")) and "\n" not in str(error)
        engine.close()

    def test_a_closed_engine_refuses(self, spill: OpenFile) -> None:
        engine = self.make()
        engine.read([Span(spill, 0, 4096, "m")], aligned(4096)).wait()
        engine.close()
        engine.close()
        with pytest.raises(SpillError, match=r"m: reading .* failed: the engine is closed"):
            engine.read([Span(spill, 0, 4096, "m")], aligned(4096)).wait()

    def test_closing_leaves_nobody_waiting(self, spill: OpenFile) -> None:
        """Requests under way end, those not begun fail; every ticket is told."""
        engine = self.make(Faults(late=1.0, late_s=0.002))
        tickets = [engine.read([Span(spill, 0, 8 * MIB, "m")], aligned(8 * MIB), bulk=i % 2 == 0) for i in range(8)]
        engine.close()
        for ticket in tickets:
            ticket.settle()
