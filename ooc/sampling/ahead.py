# SPDX-License-Identifier: Apache-2.0
"""An iterator whose next items are made on a thread of their own while the last one is used."""

import threading
import weakref
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Generic, Self, TypeVar

T = TypeVar("T")


class Ahead(Generic[T]):
    """The items of ``items``, one of which is made before it is asked for.

    What making one raises is raised when it is asked for. ``close`` ends the thread and closes ``items``; so does the
    last item, and so does dropping this object.
    """

    def __init__(self, items: Iterator[T], *, name: str) -> None:
        self._made: SimpleQueue[T | BaseException] = SimpleQueue()
        self._wanted = threading.Semaphore(1)
        self._stop = threading.Event()
        thread = threading.Thread(
            target=_make, args=(items, self._made, self._wanted, self._stop), name=name, daemon=True
        )
        self._end = weakref.finalize(self, _end, thread, self._wanted, self._stop)
        thread.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        if not self._end.alive:
            raise StopIteration
        item = self._made.get()
        if isinstance(item, BaseException):
            self.close()
            raise item
        self._wanted.release()
        return item

    def close(self) -> None:
        """May be called twice."""
        self._end()


def _make(
    items: Iterator[T], made: "SimpleQueue[T | BaseException]", wanted: threading.Semaphore, stop: threading.Event
) -> None:
    try:
        while wanted.acquire() and not stop.is_set():
            made.put(next(items))
    except BaseException as error:  # StopIteration, too: whoever waits must be told
        made.put(error)
    finally:
        close = getattr(items, "close", None)
        if close is not None:
            close()


def _end(thread: threading.Thread, wanted: threading.Semaphore, stop: threading.Event) -> None:
    stop.set()
    wanted.release()
    if thread is not threading.current_thread():
        thread.join()
