# SPDX-License-Identifier: Apache-2.0
"""Tiles computed side by side, their sums taken in order.

Operators on a tile are too small to be worth splitting over cores: the threads of a parallel operator meet at
its end, some tens of microseconds apart, and on a busy machine they wait for one another most of the time. So
every core computes a tile of its own, single-threaded, and only the results meet. What is summed over tiles is
added in the order of the tiles, so the number of threads changes no result.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from time import perf_counter
from types import TracebackType
from typing import Generic, Self, TypeVar

import torch

_AHEAD = 3
"""Tasks under way or waiting, by worker: what keeps workers busy while this thread moves blocks for the next step."""

T = TypeVar("T")
R = TypeVar("R")


class Team:
    """``workers`` threads for tiles. ``busy_s``: what all of them together have spent on tasks."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.busy_s = 0.0
        self._lock = Lock()
        self.pool = ThreadPoolExecutor(workers, thread_name_prefix="ooc-tile") if workers > 1 else None

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown(wait=True, cancel_futures=True)

    def timed(self, compute: Callable[[T], R], task: T) -> R:
        """``compute(task)``, its time added to ``busy_s``."""
        begun = perf_counter()
        try:
            return compute(task)
        finally:
            spent = perf_counter() - begun
            with self._lock:
                self.busy_s += spent


class Flow(Generic[T, R]):
    """Tasks put one after the other, computed on any thread of a team, committed on this one in order.

    Every task belongs to a ``step``, and steps only grow. At most three results a worker wait at any time. A
    context manager: after an error it leaves when no task is being computed any more.
    """

    def __init__(self, team: Team, compute: Callable[[T], R], commit: Callable[[R], None]) -> None:
        self._team = team
        self._compute = compute
        self._commit = commit
        self._pending: deque[tuple[int, Future[R]]] = deque()

    def put(self, step: int, task: T) -> None:
        """Have ``task`` computed, and commit what is ready to make room."""
        if self._team.pool is None:
            self._commit(self._team.timed(self._compute, task))
            return
        self._pending.append((step, self._team.pool.submit(_without_gradients, self._team, self._compute, task)))
        if len(self._pending) > _AHEAD * self._team.workers:
            self._commit_first()

    def finish(self, step: int) -> None:
        """Return when all tasks of steps up to ``step`` are committed."""
        while self._pending and self._pending[0][0] <= step:
            self._commit_first()

    def drain(self) -> None:
        """Return when everything is committed."""
        while self._pending:
            self._commit_first()

    def _commit_first(self) -> None:
        _, future = self._pending.popleft()
        self._commit(future.result())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _, future in self._pending:
            future.cancel()
        for _, future in self._pending:
            if not future.cancelled():
                future.exception()
        self._pending.clear()


def _without_gradients(team: Team, compute: Callable[[T], R], task: T) -> R:
    """Gradient mode belongs to the thread: off here, on where a stage asks for it."""
    with torch.no_grad():
        return team.timed(compute, task)
