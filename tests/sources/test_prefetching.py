# SPDX-License-Identifier: Apache-2.0
"""An iterator that a thread runs ahead gives the same items and errors, holds three at most, and is always closed."""

import threading
import time
from collections.abc import Iterator

import pytest

from ooc.sources.files.prefetching import prefetched


def _threads() -> int:
    return sum(thread.name.startswith("ooc-prefetched") for thread in threading.enumerate())


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
    with prefetched(Item(number) for number in range(200)) as items:
        for item in items:
            found.append(item.number)
            del item
    assert found == list(range(200)) and most <= 3 and _threads() == 0


def test_the_next_item_is_made_while_this_one_is_used() -> None:
    made = threading.Event()

    def items() -> Iterator[int]:
        yield 0
        made.set()
        yield 1

    with prefetched(items()) as running:
        assert next(running) == 0 and made.wait(10)


def test_an_error_comes_where_the_item_would_have() -> None:
    def items() -> Iterator[int]:
        yield 0
        raise ValueError("two")

    with pytest.raises(ValueError, match="two"), prefetched(items()) as running:
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

    with pytest.raises(KeyboardInterrupt), prefetched(items()) as running:
        next(running)
        raise KeyboardInterrupt
    assert closed == ["ooc-prefetched_0"] and _threads() == 0
