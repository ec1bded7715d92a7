# SPDX-License-Identifier: Apache-2.0
"""Timing work as the executor would do it: a tile a task, all threads at once, every task single-threaded.

On the CPU a rate goes by the processor time that the work takes, shared among the threads: what the clock would say
had every thread a core of its own. On a machine where others compute at the same moment the clock says several times
that, at random. But it says in which of several rounds the others were least in the way, and that one counts: beside
others the same work was seen to take less processor time than on an idle machine, an operator 4.4 µs instead of 7.5
(perhaps since threads that wait for the interpreter need not be woken from idle processors). On a GPU the clock is
read, when all that was sent has been done.
"""

import os
from collections.abc import Callable, Sequence
from time import perf_counter, process_time
from types import TracebackType
from typing import NamedTuple, Self

import torch

from ooc.train.team import Flow, Team

_ROUNDS, _MOST_ROUNDS = 5, 15
_ALIKE = 0.03


class Round(NamedTuple):
    """What one round took: by the clock, and in processor time; on a device both are the clock's."""

    clock_s: float
    cpu_s: float


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
        self._team = Team(threads)

    def seconds(self, compute: Callable[[int], object], tasks: int) -> float:
        """Of ``compute(0)`` to ``compute(tasks - 1)``: the least of a few rounds, after one that warms up."""
        run = self._on_device if self.device.type == "cuda" else self._on_threads
        run(compute, tasks)
        rounds: list[Round] = []
        while not settled(rounds):
            rounds.append(run(compute, tasks))
        return min(rounds).cpu_s

    def _on_threads(self, compute: Callable[[int], object], tasks: int) -> Round:
        clock, cpu = perf_counter(), process_time()
        with Flow(self._team, compute, lambda _: None) as flow:
            for task in range(tasks):
                flow.put(0, task)
            flow.drain()
        return Round(perf_counter() - clock, (process_time() - cpu) / self.cores)

    @torch.no_grad()
    def _on_device(self, compute: Callable[[int], object], tasks: int) -> Round:
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.set_num_threads(self._intra_op_threads)
        self._team.close()
