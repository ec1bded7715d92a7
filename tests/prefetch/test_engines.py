# SPDX-License-Identifier: Apache-2.0
"""Every engine keeps the contract, and what each does beyond it."""

import errno
import os
import resource
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ooc.prefetch.engine
from ooc.errors import SpillError
from ooc.prefetch.engine import ChunkFile, Counters, Engine, OpenFile, Span, Ticket
from ooc.prefetch.engines.direct import BufferedEngine, DirectEngine
from ooc.prefetch.engines.kernel_queue import Batch, KernelQueue
from ooc.prefetch.engines.kvikio import KvikioCalls, KvikioEngine
from ooc.prefetch.spill import create_spill
from tests.prefetch.contract import MIB, EngineContract, aligned, random_bytes
from tests.prefetch.fake_kvikio import CuFile, fake_kvikio
from tests.prefetch.faults import Faults, FaultyCalls, faulty_engine
from tests.prefetch.held import assert_no_more_held, held


class TestDirect(EngineContract):
    """Through the kernel's queue, with few slots, so that requests have to wait for room."""

    def make(self, faults: Faults | None = None) -> Engine:
        engine = faulty_engine(faults, depth=4, bulk_depth=2) if faults else DirectEngine(depth=4, bulk_depth=2)
        assert engine.how == "io_submit, up to 4 requests at once"
        return engine

    def test_a_queue_that_breaks_leaves_nobody_waiting(self, spill: OpenFile) -> None:
        class Broken(KernelQueue):
            def reap(self, minimum: int, maximum: int) -> list[tuple[int, int]]:
                raise OSError(errno.EINVAL, "Invalid argument")

        engine = DirectEngine(queue=Broken, depth=2)
        tickets = [engine.read([Span(spill, 0, 4 * MIB, "m")], aligned(4 * MIB)) for _ in range(3)]
        for ticket in tickets:
            with pytest.raises(SpillError, match=r"m: reading .* failed: (the kernel's queue broke: .*|the engine .*)"):
                ticket.wait()
        engine.close()

    def test_other_requests_overtake_bulk_ones(self, spill: OpenFile) -> None:
        """What the computation needs next does not queue behind a slab."""
        engine = faulty_engine(Faults(late=1.0, late_s=0.005), depth=4, bulk_depth=2, piece_bytes=64 << 10)
        bulk = engine.read([Span(spill, 0, 12 * MIB, "slab")], aligned(12 * MIB), bulk=True)
        engine.read([Span(spill, 0, 4096, "block")], aligned(4096)).wait()
        assert engine.counters.read_bytes < 6 * MIB
        bulk.wait()
        engine.close()

    def test_requests_that_the_kernel_refuses_go_the_plain_way(self, spill: OpenFile) -> None:
        class Refusing(KernelQueue):
            refused = 0

            def submit(self, requests: Batch, first: int, count: int) -> int:
                if first % 2:
                    Refusing.refused += 1
                    raise OSError(errno.EINVAL, "Invalid argument")
                return super().submit(requests, first, 1)

        data, back = random_bytes(MIB), aligned(MIB)
        os.pwrite(spill.buffered, data.tobytes(), 0)
        engine = DirectEngine(queue=Refusing, piece_bytes=64 << 10)
        engine.read([Span(spill, 0, MIB, "m")], back).wait()
        engine.close()
        assert np.array_equal(back, data)
        assert (Refusing.refused, engine.counters.read_bytes) == (8, MIB)

    def test_many_small_requests_are_few_steps(self, spill: OpenFile) -> None:
        """They are sent and collected several at a time, yet an idle disk gets the first two at once and thrice as many
        as it has with each step that follows, and no wait is for more than an eighth of what is under way."""
        sent: list[tuple[int, int]] = []
        waited: list[tuple[int, int]] = []

        class Watched(KernelQueue):
            under_way = 0

            def submit(self, requests: Batch, first: int, count: int) -> int:
                before = self.under_way
                taken = super().submit(requests, first, count)
                sent.append((before, count))
                self.under_way += taken
                return taken

            def reap(self, minimum: int, maximum: int) -> list[tuple[int, int]]:
                waited.append((minimum, self.under_way))
                ended = super().reap(minimum, maximum)
                self.under_way -= len(ended)
                return ended

        places = [Span(spill, 8192 * number, 4096, "m") for number in range(1024)]
        engine = DirectEngine(queue=Watched, depth=64)
        engine.read(places, aligned(1024 * 4096)).wait()
        engine.close()
        assert sent[:4] == [(0, 2), (2, 6), (8, 24), (32, 32)]
        assert len(sent) < 512
        assert all(1 <= minimum <= max(1, under_way // 8) for minimum, under_way in waited)
        assert max(minimum for minimum, _ in waited) > 1


class TestDirectOnThreads(EngineContract):
    """Where the kernel's queue is not to be had."""

    def make(self, faults: Faults | None = None) -> Engine:
        def refuse(depth: int) -> KernelQueue:
            raise OSError(errno.EPERM, "Operation not permitted")

        engine = DirectEngine(queue=refuse, calls=FaultyCalls(faults) if faults else None)
        assert engine.how == "4 + 2 threads, since io_submit is not to be had: Operation not permitted"
        return engine


class TestBuffered(EngineContract):
    """Over the page cache."""

    def make(self, faults: Faults | None = None) -> Engine:
        return BufferedEngine(calls=FaultyCalls(faults) if faults else None)


class TestKvikio(EngineContract):
    """Against a stand-in for the library."""

    @pytest.fixture(autouse=True)
    def stand_in(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
        with ThreadPoolExecutor(4) as pool:
            list(
                pool.map(lambda _: threading.Event().wait(0.005), range(8))
            )  # start its threads before they are counted
            module = fake_kvikio(pool)
            monkeypatch.setitem(sys.modules, "kvikio", module)
            yield module

    @pytest.fixture(autouse=True)
    def leaves_nothing(self, stand_in: Any) -> Iterator[None]:  # type: ignore[override]
        before = held()
        yield
        assert_no_more_held(before)

    def make(self, faults: Faults | None = None) -> Engine:
        return KvikioEngine(calls=FaultyCalls(faults, KvikioCalls()) if faults else None)

    def test_its_own_settings_are_made(self, stand_in: Any) -> None:
        """KvikIO's own are one thread, and reads through the page cache."""
        self.make().close()
        assert stand_in.settings == {"num_threads": 8, "task_size": 4 << 20, "auto_direct_io_read": True}

    def test_its_failures_are_one_line(self, spill: OpenFile, monkeypatch: pytest.MonkeyPatch) -> None:
        """It throws RuntimeErrors of several lines."""

        def refuse(*_: object) -> None:
            raise RuntimeError("CUDA error at: cuda.hpp:12\nlibcuda.so.1: cannot open shared object file")

        monkeypatch.setattr(CuFile, "__init__", refuse)
        engine = self.make()
        with pytest.raises(SpillError, match=r"m: reading .* at byte 0 failed: CUDA error at: cuda.hpp:12 libcuda"):
            engine.read([Span(spill, 0, 4096, "m")], aligned(4096)).wait()
        engine.close()

    def test_memory_on_the_device_is_handed_on_as_it_is(self, spill: OpenFile) -> None:
        """Anything with ``__cuda_array_interface__``, sliced, never copied through the host."""

        class OnDevice:
            def __init__(self, data: np.ndarray) -> None:
                self.data_of_test = data
                self.nbytes = len(data)
                self.__cuda_array_interface__ = {"data": (data.ctypes.data, False)}

            def __len__(self) -> int:
                return self.nbytes

            def __getitem__(self, part: slice) -> "OnDevice":
                return OnDevice(self.data_of_test[part])

        moved = []

        class Calls(KvikioCalls):
            def read_at(self, descriptor: int, memory: Any, offset: int) -> int:
                moved.append(memory)
                return super().read_at(descriptor, memory.data_of_test, offset)

        engine = KvikioEngine(calls=Calls())
        data = random_bytes(20 * MIB)
        with open(f"/proc/self/fd/{spill.buffered}", "r+b") as file:  # noqa: PTH123
            file.write(data[: 12 * MIB].tobytes())
        target = OnDevice(np.zeros(12 * MIB, dtype=np.uint8))
        engine.read([Span(spill, 0, 12 * MIB, "m")], target).wait()  # type: ignore[arg-type]
        engine.close()
        assert all(isinstance(memory, OnDevice) for memory in moved)
        assert np.array_equal(target.data_of_test, data[: 12 * MIB])


def test_a_ticket_waits_for_every_piece_before_it_tells_of_a_failure() -> None:
    """A buffer under way must not be handed out again."""
    ticket = Ticket(Counters(), 2)
    ticket.part_done(SpillError("first"))
    waiting = threading.Thread(target=ticket.settle)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    ticket.part_done(SpillError("second"))
    waiting.join()
    with pytest.raises(SpillError, match="first"):
        ticket.wait()


def test_everyone_who_waits_for_a_ticket_is_told() -> None:
    ticket = Ticket(Counters(), 2)
    waiting = [threading.Thread(target=ticket.wait) for _ in range(3)]
    for thread in waiting:
        thread.start()
    ticket.part_done()
    assert not ticket.happened
    ticket.part_done()
    for thread in waiting:
        thread.join(10)
    assert ticket.happened
    assert not any(thread.is_alive() for thread in waiting)


def test_chunk_files_are_open_only_while_they_are_read(tmp_path: Path) -> None:
    """A store may have more chunks than a process may have descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = 200
    spans = []
    for number in range(count):
        path = tmp_path / str(number)
        path.write_bytes(bytes([number]) * 8192)
        spans.append(Span(ChunkFile(path), 0, 8192, "x"))
    out = aligned(count * 8192)
    engine = DirectEngine()
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 70, hard))
    try:
        engine.read(spans, out).wait()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        engine.close()
    assert out.reshape(count, 8192).max(axis=1).tolist() == list(range(count))


@pytest.mark.parametrize("queued", [True, False])
def test_a_disk_that_stops_to_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, queued: bool) -> None:
    """By whoever waits, then and later; closing does not wait for it either."""
    spill = create_spill(tmp_path, "m", 4 * MIB)
    monkeypatch.setattr(ooc.prefetch.engine, "PATIENCE_S", 0.2)
    faults = Faults(silent_after=0)
    engine = faulty_engine(faults) if queued else DirectEngine(calls=FaultyCalls(faults), queue=None)
    tickets = [engine.read([Span(spill, 0, 4 * MIB, "m")], aligned(4 * MIB)) for _ in range(2)]
    for ticket in tickets * 2:
        with pytest.raises(SpillError, match=rf"^m: {spill.path}: the disk has not answered for 0 s$") as told:
            ticket.wait()
        assert told.value.is_unanswered
    engine.close()
    faults.answer.set()
    spill.close()


def test_a_slow_disk_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spill = create_spill(tmp_path, "m", 4 * MIB)
    monkeypatch.setattr(ooc.prefetch.engine, "PATIENCE_S", 0.3)
    engine = DirectEngine(
        calls=FaultyCalls(Faults(late=1.0, late_s=0.05)), queue=None, threads=1, piece_bytes=256 << 10
    )
    ticket = engine.read([Span(spill, 0, 4 * MIB, "m")], aligned(4 * MIB))
    ticket.wait()
    assert engine.counters.busy_seconds() > 0.3
    engine.close()
    spill.close()
