# SPDX-License-Identifier: Apache-2.0
"""Worker threads that compute tiles in parallel, while their results are reduced in order.

Operators on a tile are too small to be divided among cores. The threads of a parallel operator meet at its end, some
tens of microseconds apart, and on a busy machine they wait for one another most of the time. So every core computes its
own tile, single-threaded, and only the results meet. Sums over tiles are added in the order of the tiles, so the number
of threads does not change any result.

An epoch has thousands of tiles of a few milliseconds each, and the thread that hands them out shares the cores. So a
task is a queue entry and one lock, not a future with its condition. Results are taken several at a time, so that the
thread that takes them need not wake for each. With few and small tiles most of the work is the interpreter's, which one
thread does at a time. Handing them out may then be slower than computing them in place, so short passes are tried both
ways.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread
from time import perf_counter
from typing import Any, Generic, Self, TypeVar, cast

import torch

from ooc.errors import OocError
from ooc.plan.simulate.condensed import Lane
from ooc.threads import LOOK_S, check_alive

_SHORT_PASS_S, _TRIALS = 20e-3, 3
"""The longest pass that is tried both ways, and how often each way is tried."""
T = TypeVar("T")
R = TypeVar("R")


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Within this context, operators called on this thread use no other threads.

    Those would wait for more work without sleeping, for milliseconds, on a core that the next tiles need.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class WorkerPool:
    """``workers`` threads for tiles, of which at most ``ahead`` (or one per worker) are in progress or waiting."""

    def __init__(self, workers: int, ahead: int = 1) -> None:
        self.workers, self.ahead = workers, max(workers, ahead)
        self._took_s: dict[Hashable, list[deque[float]]] = {}
        """By pass, the durations of its last runs whose tasks were computed in place, and of those whose tasks were
        handed out."""
        self._busy_s = [0.0] * workers
        """Busy seconds by worker; only that worker adds to its own."""
        self._lanes: list[Lane] | None = None
        self._since_s = 0.0
        self.tasks: SimpleQueue[_Task[Any] | None] | None = SimpleQueue() if workers > 1 else None
        self.threads: list[Thread] = []
        if self.tasks is not None:
            try:
                for number in range(workers):
                    work = (self.tasks, number)
                    thread = Thread(target=self._work, args=work, name=f"ooc-tile_{number}", daemon=True)
                    thread.start()
                    self.threads.append(thread)
            except BaseException:  # the system may refuse another thread
                self.close()
                raise

    @property
    def busy_s(self) -> float:
        """Seconds that all workers together have spent on tasks."""
        return sum(self._busy_s)

    def close(self) -> None:
        """End the threads. May be called twice."""
        for _ in self.threads:
            assert self.tasks is not None
            self.tasks.put(None)
        for thread in self.threads:
            thread.join()
        self.threads.clear()

    def watch(self, lanes: list[Lane] | None, since_s: float) -> None:
        """From now on, record when each worker computes, in its own lane, in seconds from ``since_s``; None: stop
        recording.

        No task may be in progress.
        """
        self._lanes, self._since_s = lanes, since_s

    def timed(self, compute: Callable[[], R], worker: int = 0) -> R:
        """Call ``compute`` and add its time to ``busy_s``."""
        begun = perf_counter()
        try:
            return compute()
        finally:
            ended = perf_counter()
            self._busy_s[worker] += ended - begun
            if self._lanes is not None:
                self._lanes[worker].add(begun - self._since_s, ended - self._since_s)

    def way(self, name: Hashable) -> tuple[bool, deque[float]]:
        """Return whether tasks of pass ``name`` are to be handed out in its next run, and where to append that run's
        duration."""
        ways = alone_s, handed_s = self._took_s.setdefault(name, [deque(maxlen=_TRIALS), deque(maxlen=_TRIALS)])
        is_tried = len(handed_s) == _TRIALS and min(handed_s) < _SHORT_PASS_S
        handed_out = not is_tried or (len(alone_s) == _TRIALS and min(handed_s) < min(alone_s))
        return handed_out, ways[handed_out]

    def _work(self, tasks: "SimpleQueue[_Task[Any] | None]", worker: int) -> None:
        torch.set_grad_enabled(False)  # grad mode is per thread; recording stages enable it
        while (task := tasks.get()) is not None:
            self.timed(task.run, worker)
            del task  # do not keep the task's result alive


class OrderedPipeline(Generic[T, R]):
    """Tasks queued in order, computed on any thread of a pool (on this one unless ``handed_out``), and reduced on this
    one in order.

    Every task belongs to a ``step``, and steps only grow. A context manager: after an error it waits until no task is
    in progress.
    """

    def __init__(
        self, pool: WorkerPool, compute: Callable[[T], R], reduce: Callable[[R], None], *, handed_out: bool = True
    ) -> None:
        self._pool, self._tasks = pool, pool.tasks if handed_out else None
        self._compute = compute
        self._reduce = reduce
        self._pending: deque[_Task[R]] = deque()

    def put(self, step: int, task: T) -> None:
        """Queue ``task``, and reduce finished tasks if there are too many."""
        compute = partial(self._compute, task)
        if self._tasks is None:
            self._reduce(self._pool.timed(compute))
            return
        handed = _Task(step, compute)
        self._pending.append(handed)
        self._tasks.put(handed)
        if len(self._pending) > self._pool.ahead:
            self._reduce_first(self._pool.workers)

    def finish(self, step: int) -> None:
        """Wait until all tasks of steps up to ``step`` are reduced."""
        self._reduce_first(sum(task.step <= step for task in self._pending))

    def drain(self) -> None:
        """Wait until all tasks are reduced."""
        self._reduce_first(len(self._pending))

    def _reduce_first(self, count: int) -> None:
        """Reduce the first ``count`` tasks; wait for the last of them first, since the others are then done, or
        nearly."""
        if count:
            self._pending[count - 1].wait(self._pool.threads)
        for _ in range(count):
            self._reduce(self._pending.popleft().result(self._pool.threads))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        for task in self._pending:
            task.left_out = True
        for task in self._pending:
            with contextlib.suppress(OocError):  # a dead thread has been reported already
                task.wait(self._pool.threads)
        self._pending.clear()


class _Task(Generic[R]):
    """A computation handed to another thread; skipped if it is ``left_out`` before it starts."""

    __slots__ = ("_compute", "_done", "_error", "_result", "left_out", "step")

    def __init__(self, step: int, compute: Callable[[], R]) -> None:
        self.step = step
        self.left_out = False
        self._compute: Callable[[], R] | None = compute
        self._result: R | None = None
        self._error: BaseException | None = None
        self._done = Lock()
        self._done.acquire()

    def run(self) -> None:
        """Compute the task, once, on a thread of the pool."""
        compute, self._compute = self._compute, None
        try:
            if compute is not None and not self.left_out:
                self._result = compute()
        except BaseException as error:
            self._error = error
        finally:
            self._done.release()

    def wait(self, threads: Collection[Thread]) -> None:
        """Wait until the task has run; raise OocError where one of ``threads`` has died."""
        while not self._done.acquire(timeout=LOOK_S):
            check_alive(threads)
        self._done.release()

    def result(self, threads: Collection[Thread]) -> R:
        """Wait, then return or raise what ``compute`` returned or raised; OocError as in :meth:`wait`."""
        self.wait(threads)
        if self._error is not None:
            raise self._error
        return cast(R, self._result)
