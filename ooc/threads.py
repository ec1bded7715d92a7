# SPDX-License-Identifier: Apache-2.0
"""Wait for threads, but not for a thread that has died.

A thread that runs out of memory between two pieces of work ends, and the piece it had taken is never done. Python's
pools do not tell those that wait for it.
"""

from collections import deque
from collections.abc import Collection, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from threading import Thread
from typing import Any, TypeVar

from ooc.errors import OocError

T = TypeVar("T")

LOOK_S = 5.0
"""Seconds between checks whether the threads are alive."""
_END: Any = object()


def check_alive(threads: Collection[Thread]) -> None:
    """Raise OocError if a thread has ended, which none should while there is work."""
    for thread in threads:
        if not thread.is_alive():
            raise OocError(f"thread {thread.name} died, as one does that runs out of memory between two pieces of work")


class Threads(ThreadPoolExecutor):
    """A pool of threads, by their number and name."""

    def result(self, future: Future[T]) -> T:
        """Return, or raise, the result of work in this pool once it is done. Raises OocError if a thread has died."""
        return next(self.completed([future])).result()

    def completed(self, futures: Collection[Future[T]]) -> Iterator[Future[T]]:
        """Yield several pieces of work as they are done."""
        left = {*futures}
        while left:
            done, left = wait(left, LOOK_S, FIRST_COMPLETED)
            if not done:
                check_alive(self._threads)
            yield from done


def ahead(items: Iterable[T], *, name: str, most: int = 1) -> Generator[T]:
    """Yield ``items``, made on a thread of that ``name`` while earlier ones are in use: at most ``most`` exist beside
    the one in use, including the one being made. Inflating, sorting, copying and file I/O release the interpreter.

    An exception in making an item is raised where the item would have come. With the last item, or when the generator
    is closed or dropped, the thread ends and a generator of ``items`` is closed, however far it got.
    """
    iterator = iter(items)
    with Threads(1, name) as pool:
        made = deque(pool.submit(next, iterator, _END) for _ in range(most))
        try:
            while (item := pool.result(made.popleft())) is not _END:
                made.append(pool.submit(next, iterator, _END))
                yield item
                del item  # Not kept alive while waiting for the next.
        finally:
            for one in made:
                one.cancel()
            if isinstance(iterator, Generator):
                pool.submit(iterator.close)  # Closed in its own thread, since numpy's errstate is per thread.
