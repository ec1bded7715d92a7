# SPDX-License-Identifier: Apache-2.0
"""Timing work as the executor would do it: a tile a task, all threads at once, every task single-threaded.

On the CPU a rate goes by the clock, less what threads were ready for and other programs had the processors, as the
kernel counts that; but never by less than the processor time that the work took. So what threads lose to one another
counts, waiting for the interpreter above all: beside processor time that makes an operator cost half as much again. Of
several rounds the median counts, since an epoch meets the machine as it mostly is: forecasts by the best round were a
fifth too short. On a GPU the clock is read, when all that was sent has been done. Tasks are sent so often that waiting
for the first launch and the last answer hardly counts: plans count launches as operators.
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
"""Computes a tile, by its number."""


class Round(NamedTuple):
    """What one round took: by the clock, and in processor time; on a device both are the clock's. ``waited_s``: of the
    clock's, when threads were ready and had no processor."""

    clock_s: float
    cpu_s: float
    waited_s: float = 0.0

    @property
    def own_s(self) -> float:
        """Without what other programs took."""
        return max(self.cpu_s, self.clock_s - self.waited_s)


def settled(rounds: Sequence[Round], *, most: int = _MOST_ROUNDS) -> bool:
    """Whether more rounds are hardly worth their time: the two that the clock says took least took as long as one
    another, so that nobody else was in their way."""
    if len(rounds) < _ROUNDS:
        return False
    least, next_to_it = sorted(rounds)[:2]
    return len(rounds) >= most or next_to_it.clock_s <= (1 + _ALIKE) * least.clock_s


class Bench:
    """``device`` computes, the CPU with ``threads`` threads. A context manager."""

    def __init__(self, device: torch.device, threads: int) -> None:
        self.device = device
        self.threads = threads
        self.cores = max(1, min(threads, len(os.sched_getaffinity(0))))
        self._pool = WorkerPool(threads, TASKS_AHEAD * threads)

    def seconds(self, compute: Task, tasks: int) -> float:
        """Of ``compute(0)`` to ``compute(tasks - 1)``: the median of a few rounds, after one that warms up."""
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
    """How long threads of this process have been ready and had no processor, all together; 0 where nobody counts it."""
    waited_ns = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError):  # a thread that ends meanwhile
            waited_ns += int(path.read_text(encoding="ascii").split()[1])
    return waited_ns / 1e9
