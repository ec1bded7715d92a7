# SPDX-License-Identifier: Apache-2.0
"""Timing work as the executor would do it: a tile a task, all threads at once, every task single-threaded.

On the CPU a rate goes by the processor time that the work takes, shared among the threads: what the clock would say
had every thread a core of its own. On a machine where others compute at the same moment the clock says several times
that, at random; processor time was within a tenth from run to run under a load of eight on two cores. On a GPU the
clock is read, when all that was sent has been done.
"""

import os
from collections.abc import Callable
from time import perf_counter, process_time
from types import TracebackType
from typing import Self

import torch

from ooc.train.team import Flow, Team

_ROUNDS = 5


class Bench:
    """``device`` computes, the CPU with ``threads`` threads. A context manager."""

    def __init__(self, device: torch.device, threads: int) -> None:
        self.device = device
        self.threads = threads
        self.cores = max(1, min(threads, len(os.sched_getaffinity(0))))
        self._team = Team(threads)

    def seconds(self, compute: Callable[[int], object], tasks: int) -> float:
        """Of ``compute(0)`` to ``compute(tasks - 1)``: the least of a few rounds, after one that warms up."""
        run = self._on_device if self.device.type == "cuda" else self._on_threads
        run(compute, tasks)
        return min(run(compute, tasks) for _ in range(_ROUNDS))

    def _on_threads(self, compute: Callable[[int], object], tasks: int) -> float:
        begun = process_time()
        with Flow(self._team, compute, lambda _: None) as flow:
            for task in range(tasks):
                flow.put(0, task)
            flow.drain()
        return (process_time() - begun) / self.cores

    @torch.no_grad()
    def _on_device(self, compute: Callable[[int], object], tasks: int) -> float:
        torch.cuda.synchronize(self.device)
        begun = perf_counter()
        for task in range(tasks):
            compute(task)
        torch.cuda.synchronize(self.device)
        return perf_counter() - begun

    def __enter__(self) -> Self:
        self._intra_op_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.set_num_threads(self._intra_op_threads)
        self._team.close()
