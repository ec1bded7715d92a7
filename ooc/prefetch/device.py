# SPDX-License-Identifier: Apache-2.0
"""The interface of a device with its own memory: one arena, a stream of kernels, a stream of copies for each direction,
and a side stream from which rows go to other processes.

Everything is asynchronous: the host *enqueues* a kernel or copy, which runs later, in the order of its stream. Streams
are ordered only by events. Therefore each call that enqueues something names the events that must happen before it.
That is the whole contract, and what the tests' device checks.

Kernels are launched by torch on the thread that uses the device, in torch's current stream; there is no method for
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
    """Some rows of a matrix on the device: all of it, or those with these ascending ``numbers``, in host memory."""

    matrix: Tensor
    numbers: Tensor | None = None

    def some(self, first: int, count: int) -> "Rows":
        """Return up to ``count`` of them from the ``first`` on."""
        if self.numbers is None:
            return Rows(self.matrix[first : first + count])
        return Rows(self.matrix, self.numbers[first : first + count])

    @property
    def nbytes(self) -> int:
        """The bytes of these rows."""
        count = len(self.matrix if self.numbers is None else self.numbers)
        return count * self.matrix.shape[1] * self.matrix.itemsize


class SideStream(ABC):
    """A stream of kernels and copies beside the device's streams, used by one thread, another one than the device's.

    Operations run in the order in which they are enqueued. ``memory``: the stream's device memory, uint8.
    """

    memory: Tensor

    @abstractmethod
    def take(self, target: Tensor, rows: Sequence[Rows], after: Event | None) -> Event:
        """Enqueue, after ``after``, packing ``rows`` of several matrices one after another into ``target``, uint8.

        ``target`` is in ``memory``, or in host memory, to which rows go through ``memory``. Returns the end, for which
        this thread may wait.
        """

    @abstractmethod
    def put(self, rows: Sequence[Rows], source: Tensor) -> Event:
        """Enqueue the reverse: unpacking rows to where they belong."""

    def current(self) -> AbstractContextManager[Any]:
        """Within this context, this is the stream in whose order torch sends from device to device."""
        return nullcontext()


def parts_of(memory: Tensor, rows: Sequence[Rows]) -> list[Tensor]:
    """Return ``memory``, uint8, as the ``rows`` that are packed in it."""
    sizes = [some.nbytes for some in rows]
    parts = zip(torch.split(memory[: sum(sizes)], sizes), rows, strict=True)
    return [part.view(one.matrix.dtype).view(-1, one.matrix.shape[1]) for part, one in parts]


class Device(ABC):
    """A device, used by one thread. ``name`` is for people; ``place`` is torch's device.

    ``overhead_bytes``: memory it takes beside the arena and requested tensors, for workspaces and the allocator's
    rounding. ``backend``: the backend of torch.distributed by which it sends to other devices of its kind (empty:
    none).
    """

    name: str
    place: torch.device
    overhead_bytes: int
    backend: str = ""

    @property
    def unit(self) -> int:
        """The number that distinguishes it from others of its kind."""
        return 0

    @abstractmethod
    def open(self, *, arena_bytes: int, limit_bytes: int, host: Bytes, graph: Sequence[Bytes] = ()) -> Tensor:
        """Return the arena, uint8 [arena_bytes]. Until ``close``, at most ``limit_bytes`` of the device's memory are
        used.

        ``host`` is the memory that copies go to and come from. ``graph`` is memory from which tensors are copied
        without waiting (``Tensor.to(…, non_blocking=True)``) and which side streams use. All of it is on its own pages;
        it is registered with the device once and must stay allocated until ``close``. BudgetError where memory is
        missing.
        """

    @abstractmethod
    def begin(self) -> None:
        """Begin a program on this thread: its kernels are launched in torch's current stream."""

    @abstractmethod
    def copy(self, target: Tensor, source: Tensor, direction: CopyTo, after: Sequence[Event]) -> Event:
        """Enqueue a copy between ``host`` and the arena in its direction's stream, after ``after``; return its end."""

    @abstractmethod
    def record(self, *, timed: bool = False) -> Event:
        """Return the end of all kernels launched so far; ``timed``: its time is recorded."""

    @abstractmethod
    def hold(self, event: Event) -> None:
        """Make all kernels launched from now on wait for ``event``."""

    @abstractmethod
    def side(self, nbytes: int) -> SideStream:
        """Return a side stream with ``nbytes`` of device memory, which moves at most that at a time; until
        ``close``."""

    @abstractmethod
    def close(self) -> None:
        """Release the memory when everything has ended; tensors in the arena become invalid.

        May be called twice, and ``open`` may follow.
        """
