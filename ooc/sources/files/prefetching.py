# SPDX-License-Identifier: Apache-2.0
"""Prefetching in a thread: an iterator whose next item is made while the last one is in use, on another core.

Inflating, sorting, copying and file I/O all let go of the interpreter, so threads are enough.
"""

import os
import queue
import threading
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

_MOST_WORKERS = 8


def cores() -> int:
    """Cores that this process may run on, not more than help here."""
    return min(_MOST_WORKERS, len(os.sched_getaffinity(0)))


@dataclass(frozen=True)
class _End:
    error: BaseException | None


@contextmanager
def prefetched(items: Iterable[T]) -> Iterator[Iterator[T]]:
    """``items``, produced by a thread: three exist at a time, one being made, one waiting, one in use.

    What producing raises is raised where the item would have come. At the end the thread is gone and a
    generator closed, however far it got.
    """
    waiting: queue.Queue[T | _End] = queue.Queue(maxsize=1)
    stopped = threading.Event()

    def put(item: T | _End) -> None:
        while not stopped.is_set():
            try:
                waiting.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def produce() -> None:
        error: BaseException | None = None
        try:
            iterator = iter(items)
            try:
                for item in iterator:
                    put(item)
                    del item  # Not held while the next is made.
                    if stopped.is_set():
                        break
            finally:
                if isinstance(iterator, Generator):
                    iterator.close()
        except BaseException as caught:
            error = caught
        put(_End(error))

    def consume() -> Iterator[T]:
        while True:
            item = waiting.get()
            if isinstance(item, _End):
                if item.error is not None:
                    raise item.error
                return
            yield item
            del item

    thread = threading.Thread(target=produce, name="ooc-prefetched", daemon=True)
    thread.start()
    try:
        yield consume()
    finally:
        stopped.set()
        thread.join()
