# SPDX-License-Identifier: Apache-2.0
"""Whoever waits for the work of a thread that has died is told."""

import ctypes
import threading
import time

import pytest

from ooc import threads
from ooc.engine.workers import OrderedPipeline, WorkerPool
from ooc.errors import OocError
from ooc.sources.files.prefetching import prefetched
from ooc.threads import Threads


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "LOOK_S", 0.05)
    monkeypatch.setattr("ooc.engine.workers.LOOK_S", 0.05)
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)


def _dies(thread: threading.Thread) -> None:
    """The next time that it executes Python: as it has taken what is to be done, and not begun with it."""
    assert thread.ident is not None
    number = ctypes.c_ulong(thread.ident)
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(number, ctypes.py_object(MemoryError)) == 1


def _of_name(name: str) -> threading.Thread:
    return next(one for one in threading.enumerate() if one.name.startswith(name))


def test_work_of_a_pool() -> None:
    with Threads(1, "own") as pool:
        assert pool.result(pool.submit(lambda: 5)) == 5
        _dies(_of_name("own"))
        with pytest.raises(OocError, match="thread own_0 died"):
            pool.result(pool.submit(lambda: 5))


def test_slow_work_is_waited_for() -> None:
    with Threads(2, "own") as pool:
        slow = [pool.submit(time.sleep, 0.2) for _ in range(2)]
        assert {*pool.completed(slow)} == {*slow}


def test_items_that_a_thread_produces() -> None:
    def take() -> None:
        with prefetched(iter(range(100))) as items:
            for item in items:
                if item == 50:
                    time.sleep(0.1)  # it waits for the next piece of work
                    _dies(_of_name("ooc-prefetched"))

    with pytest.raises(OocError, match="thread ooc-prefetched_0 died"):
        take()


@pytest.mark.parametrize("deaths", [1, 2])
def test_tiles(deaths: int) -> None:
    pool, reduced = WorkerPool(2), list[int]()

    def compute(task: int) -> int:
        time.sleep(0.02)  # so that both threads have something to do
        return task * task

    with OrderedPipeline(pool, compute, reduced.append) as pipeline:
        pipeline.put(0, 3)
        pipeline.drain()
    time.sleep(0.1)
    for thread in pool.threads[:deaths]:
        _dies(thread)
    with (
        pytest.raises(OocError, match=r"thread ooc-tile_\d died"),
        OrderedPipeline(pool, compute, reduced.append) as new,
    ):
        for number in range(8):
            new.put(0, number)
        new.drain()
    pool.close()
    assert reduced[0] == 9
