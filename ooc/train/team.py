# SPDX-License-Identifier: Apache-2.0
"""Tiles computed side by side, their sums taken in order.

Operators on a tile are too small to be worth splitting over cores: the threads of a parallel operator meet at
its end, some tens of microseconds apart, and on a busy machine they wait for one another most of the time. So
every core computes a tile of its own, single-threaded, and only the results meet. What is summed over tiles is
added in the order of the tiles, so the number of threads changes no result.
"""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")


class Team:
    """``workers`` threads for tiles. Not reentrant; used by one thread."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="ooc-tile") if workers > 1 else None

    def run(self, tasks: Iterable[T], compute: Callable[[T], R], commit: Callable[[R], None]) -> None:
        """Compute every task on some thread, then ``commit`` the results on this one, in order.

        At most ``workers`` + 1 results wait at any time. Returns when all are committed; after an error, when
        none is being computed any more.
        """
        if self._pool is None:
            for task in tasks:
                commit(compute(task))
            return
        pending: deque[Future[R]] = deque()
        try:
            for task in tasks:
                pending.append(self._pool.submit(_without_gradients, compute, task))
                if len(pending) > self.workers:
                    commit(pending.popleft().result())
            while pending:
                commit(pending.popleft().result())
        finally:
            for future in pending:
                future.cancel()
            for future in pending:
                if not future.cancelled():
                    future.exception()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


def _without_gradients(compute: Callable[[T], R], task: T) -> R:
    """Gradient mode belongs to the thread: off here, on where a stage asks for it."""
    with torch.no_grad():
        return compute(task)
