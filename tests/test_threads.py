# SPDX-License-Identifier: Apache-2.0
"""Whoever waits for the work of a thread that has died is told; what a thread makes ahead comes in order, errors where
their item would have, no more of it exists than was said, and it is always closed."""

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from ooc import threads
from ooc.engine.workers import OrderedPipeline, WorkerPool
from ooc.errors import OocError
from ooc.threads import Threads, ahead


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
        for item in ahead(range(100), name="own", most=2):
            if item == 50:
                time.sleep(0.1)  # it waits for the next piece of work
                _dies(_of_name("own"))

    with pytest.raises(OocError, match="thread own_0 died"):
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


def _threads() -> int:
    return sum(thread.name.startswith("own") for thread in threading.enumerate())


def test_items_come_in_order_and_no_more_than_three_exist() -> None:
    alive, most = 0, 0

    class Item:
        def __init__(self, number: int) -> None:
            nonlocal alive, most
            self.number = number
            alive += 1
            most = max(most, alive)

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    found = []
    for item in ahead((Item(number) for number in range(200)), name="own", most=2):
        found.append(item.number)
        del item
    assert found == list(range(200)) and most <= 3 and _threads() == 0


def test_the_next_item_is_made_while_this_one_is_used() -> None:
    made = threading.Event()

    def items() -> Iterator[int]:
        yield 0
        made.set()
        yield 1

    with closing(ahead(items(), name="own")) as running:
        assert next(running) == 0 and made.wait(10)


def test_an_error_comes_where_the_item_would_have() -> None:
    def items() -> Iterator[int]:
        yield 0
        raise ValueError("two")

    with pytest.raises(ValueError, match="two"), closing(ahead(items(), name="own")) as running:
        assert next(running) == 0
        next(running)
    assert _threads() == 0


def test_leaving_early_closes_the_generator_and_ends_the_thread() -> None:
    closed = []

    def items() -> Iterator[int]:
        try:
            for number in range(10**9):
                time.sleep(0.001)
                yield number
        finally:
            closed.append(threading.current_thread().name)

    with pytest.raises(KeyboardInterrupt), closing(ahead(items(), name="own")) as running:
        next(running)
        raise KeyboardInterrupt
    assert closed == ["own_0"] and _threads() == 0
