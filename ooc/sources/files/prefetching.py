# SPDX-License-Identifier: Apache-2.0
"""Prefetching in a thread: an iterator whose next item is made while the last one is in use, on another core.

Inflating, sorting, copying and file I/O all let go of the interpreter, so threads are enough.
"""

import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from ooc.threads import Threads

T = TypeVar("T")

_MOST_WORKERS = 8
_END: Any = object()


def cores() -> int:
    """Cores that this process may run on, not more than help here."""
    return min(_MOST_WORKERS, len(os.sched_getaffinity(0)))


@contextmanager
def prefetched(items: Iterable[T]) -> Iterator[Iterator[T]]:
    """``items``, produced by a thread: three exist at a time, two waiting or one of these being made, one in use.

    What producing raises is raised where the item would have come. At the end the thread is gone and a
    generator closed, however far it got.
    """
    iterator, pool = iter(items), Threads(1, "ooc-prefetched")
    made = deque(pool.submit(next, iterator, _END) for _ in range(2))

    def consume() -> Iterator[T]:
        while (item := pool.result(made.popleft())) is not _END:
            made.append(pool.submit(next, iterator, _END))
            yield item
            del item  # Not held while the next is waited for.

    try:
        yield consume()
    finally:
        for one in made:
            one.cancel()
        if isinstance(iterator, Generator):
            pool.submit(iterator.close)  # In the thread whose it is: numpy's errstate goes by that.
        pool.shutdown()
