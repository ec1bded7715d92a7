# SPDX-License-Identifier: Apache-2.0
"""A device with memory of its own, as the executor sees it: one arena, one stream of kernels, one of copies each way;
and a side stream, where rows go to other processes.

Everything is asynchronous: a kernel or copy is *sent off* by the host and happens later, in the order of its stream.
Between streams nothing is ordered but by events. So whoever sends something off names the events that must have
happened before: that is the whole contract, and what a device for tests checks.

Kernels are what torch launches on the thread that uses the device, in torch's current stream; there is no method for
them.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ooc.plan.program.staging import CopyTo
from ooc.prefetch.arena import Bytes
from ooc.prefetch.engine import Event


class Rows(NamedTuple):
    """Some rows of a matrix of the device: all of it, or those with these ``numbers``, ascending, in host memory."""

    matrix: Tensor
    numbers: Tensor | None = None

    def some(self, first: int, count: int) -> "Rows":
        """Up to ``count`` of them from the ``first`` on."""
        if self.numbers is None:
            return Rows(self.matrix[first : first + count])
        return Rows(self.matrix, self.numbers[first : first + count])

    @property
    def nbytes(self) -> int:
        """Of these rows."""
        count = len(self.matrix if self.numbers is None else self.numbers)
        return count * self.matrix.shape[1] * self.matrix.itemsize


class SideStream(ABC):
    """A stream of kernels and copies beside those of the device, used by one thread, another one than the device's.
    What is sent off happens in order. ``memory``: of the device, uint8."""

    memory: Tensor

    @abstractmethod
    def take(self, target: Tensor, rows: Sequence[Rows], after: Event | None) -> Event:
        """Send off, behind ``after``: ``rows``, those of one matrix behind those of another, to ``target``, uint8, in
        ``memory``, or by way of that in the host's → its end, for which this thread may wait."""

    @abstractmethod
    def put(self, rows: Sequence[Rows], source: Tensor) -> Event:
        """The way back: from there to where they belong."""

    def current(self) -> AbstractContextManager[Any]:
        """Within, this stream is the one in whose order torch sends from device to device."""
        return nullcontext()


def parts_of(memory: Tensor, rows: Sequence[Rows]) -> list[Tensor]:
    """``memory``, uint8, as the ``rows`` that lie there one behind the other."""
    sizes = [some.nbytes for some in rows]
    parts = zip(torch.split(memory[: sum(sizes)], sizes), rows, strict=True)
    return [part.view(one.matrix.dtype).view(-1, one.matrix.shape[1]) for part, one in parts]


class Device(ABC):
    """Used by one thread. ``name`` is for people, ``place`` what torch calls it, ``overhead_bytes`` what it takes of
    its memory beside the arena and the tensors that are asked for: workspaces, and what the allocator rounds up to.
    ``backend``: of torch.distributed, by which it sends to others of its kind (empty: none does)."""

    name: str
    place: torch.device
    overhead_bytes: int
    backend: str = ""

    @property
    def unit(self) -> int:
        """The number that tells it from others of its kind."""
        return 0

    @abstractmethod
    def open(self, *, arena_bytes: int, limit_bytes: int, host: Bytes, graph: Sequence[Bytes] = ()) -> Tensor:
        """The arena, uint8 [arena_bytes]. Until ``close`` nothing takes more than ``limit_bytes`` of its memory.

        ``host`` is the memory that copies go to and come from, and ``graph`` what tensors are brought from without
        waiting (``Tensor.to(…, non_blocking=True)``) and what side streams move, all of it on pages of its own. It is
        made known to the device once and must stay until ``close``. BudgetError for what cannot be had.
        """

    @abstractmethod
    def begin(self) -> None:
        """A program begins, on the thread that it runs on: its kernels are launched in the stream that is torch's
        current one now."""

    @abstractmethod
    def copy(self, target: Tensor, source: Tensor, direction: CopyTo, after: Sequence[Event]) -> Event:
        """Send off a copy between ``host`` and the arena in the stream of its direction, behind ``after`` → its end."""

    @abstractmethod
    def record(self, *, timed: bool = False) -> Event:
        """The end of all kernels launched so far; ``timed``: whose time is to be known."""

    @abstractmethod
    def hold(self, event: Event) -> None:
        """Let no kernel launched from now on begin before ``event`` has happened."""

    @abstractmethod
    def side(self, nbytes: int) -> SideStream:
        """A side stream with so much of the device's memory, which moves up to that at a time; until ``close``."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory back when everything has ended, whoever still has tensors in the arena: they are of no use
        any more. May be called twice, and ``open`` after it."""
