# SPDX-License-Identifier: Apache-2.0
"""Time work as the executor does it: a tile a task, all threads at once, every task single-threaded.

On the CPU a rate goes by the clock, minus the time in which threads were ready while other programs had the processors,
as the kernel counts it; but it is at least the processor time of the work. So what threads lose to one another counts,
above all waiting for the interpreter, which makes an operator cost half as much again as its processor time. The median
of several rounds counts, since an epoch meets the machine in its usual state: forecasts by the best round were a fifth
too short. On a GPU the clock is read when all work sent has been done. Tasks are sent so fast that waiting for the
first launch and the last answer hardly counts: plans count launches as operators.
"""

import math
import os
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter, process_time
from typing import NamedTuple, Self

import torch

from ooc.engine.workers import OrderedPipeline, WorkerPool
from ooc.stages.workload import TASKS_AHEAD

_ROUNDS, _MOST_ROUNDS = 5, 15
_ALIKE = 0.03
_DEVICE_ROUND_S = 0.01

Task = Callable[[int], object]
"""A function that computes a tile, by its number."""


class Round(NamedTuple):
    """The time of one round: by the clock, and processor time; on a device both are the clock's. ``waited_s``: the part
    of it in which threads were ready and had no processor."""

    clock_s: float
    cpu_s: float
    waited_s: float = 0.0

    @property
    def own_s(self) -> float:
        """The seconds without what other programs took."""
        return max(self.cpu_s, self.clock_s - self.waited_s)


def settled(rounds: Sequence[Round], *, most: int = _MOST_ROUNDS) -> bool:
    """Whether more rounds are not worth their time: the two fastest rounds took equally long, so nothing was in their
    way."""
    if len(rounds) < _ROUNDS:
        return False
    least, next_to_it = sorted(rounds)[:2]
    return len(rounds) >= most or next_to_it.clock_s <= (1 + _ALIKE) * least.clock_s


class Bench:
    """A benchmark on ``device``, or on the CPU with ``threads`` threads. A context manager."""

    def __init__(self, device: torch.device, threads: int) -> None:
        self.device = device
        self.threads = threads
        self.cores = max(1, min(threads, len(os.sched_getaffinity(0))))
        self._pool = WorkerPool(threads, TASKS_AHEAD * threads)

    def seconds(self, compute: Task, tasks: int) -> float:
        """Return the seconds of ``compute(0)`` to ``compute(tasks - 1)``: the median of a few rounds, after one that
        warms up."""
        if self.device.type == "cuda":
            self._on_device(compute, tasks)  # programs are compiled
            times = max(1, math.ceil(_DEVICE_ROUND_S / self._on_device(compute, tasks).clock_s))
            return self._median_s(self._on_device, lambda number: compute(number % tasks), times * tasks) / times
        return self._median_s(self._on_threads, compute, tasks)

    def _median_s(self, run: Callable[[Task, int], Round], compute: Task, tasks: int) -> float:
        run(compute, tasks)
        rounds: list[Round] = []
        while not settled(rounds):
            rounds.append(run(compute, tasks))
        return statistics.median(one.own_s for one in rounds)

    def _on_threads(self, compute: Task, tasks: int) -> Round:
        clock, cpu, waited = perf_counter(), process_time(), waited_s()
        with OrderedPipeline(self._pool, compute, lambda _: None) as flow:
            for task in range(tasks):
                flow.put(0, task)
            flow.drain()
        clock_s, cpu_s = perf_counter() - clock, process_time() - cpu
        return Round(clock_s, cpu_s / self.cores, max(0.0, waited_s() - waited) / self.cores)

    @torch.no_grad()
    def _on_device(self, compute: Task, tasks: int) -> Round:
        torch.cuda.synchronize(self.device)
        begun = perf_counter()
        for task in range(tasks):
            compute(task)
        torch.cuda.synchronize(self.device)
        seconds = perf_counter() - begun
        return Round(seconds, seconds)

    def __enter__(self) -> Self:
        self._intra_op_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        return self

    def __exit__(self, *raised: object) -> None:
        torch.set_num_threads(self._intra_op_threads)
        self._pool.close()


def waited_s() -> float:
    """Return how long threads of this process have been ready without a processor, all together; 0 where this is not
    counted."""
    waited_ns = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError):  # a thread that ends meanwhile
            waited_ns += int(path.read_text(encoding="ascii").split()[1])
    return waited_ns / 1e9
