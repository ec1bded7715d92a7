# SPDX-License-Identifier: Apache-2.0
"""A device with memory of its own, as the executor sees it: one arena, one stream of kernels, one of copies each way.

Everything is asynchronous: a kernel or copy is *sent off* by the host and happens later, in the order of its stream.
Between streams nothing is ordered but by events. So whoever sends something off names the events that must have
happened before: that is the whole contract, and what a device for tests checks.

Kernels are what torch launches on the thread that uses the device, in torch's current stream; there is no method for
them.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from ooc.plan.program.staging import CopyTo
from ooc.prefetch.arena import Bytes
from ooc.prefetch.engine import Event


class Device(ABC):
    """Used by one thread. ``name`` is for people, ``place`` what torch calls it, ``overhead_bytes`` what it takes of
    its memory beside the arena and the tensors that are asked for: workspaces, and what the allocator rounds up to."""

    name: str
    place: torch.device
    overhead_bytes: int

    @abstractmethod
    def open(self, *, arena_bytes: int, limit_bytes: int, host: Bytes, graph: Sequence[Bytes] = ()) -> Tensor:
        """The arena, uint8 [arena_bytes]. Until ``close`` nothing takes more than ``limit_bytes`` of its memory.

        ``host`` is the memory that copies go to and come from, and ``graph`` what tensors are brought from without
        waiting (``Tensor.to(…, non_blocking=True)``), all of it on pages of its own. It is made known to the device
        once and must stay until ``close``. BudgetError for what cannot be had.
        """

    @abstractmethod
    def begin(self) -> None:
        """A program begins, on the thread that it runs on: its kernels are launched in the stream that is torch's
        current one now."""

    @abstractmethod
    def copy(self, target: Tensor, source: Tensor, direction: CopyTo, after: Sequence[Event]) -> Event:
        """Send off a copy between ``host`` and the arena in the stream of its direction, behind ``after`` → its end."""

    @abstractmethod
    def record(self) -> Event:
        """The end of all kernels launched so far."""

    @abstractmethod
    def hold(self, event: Event) -> None:
        """Let no kernel launched from now on begin before ``event`` has happened."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory back when everything has ended, whoever still has tensors in the arena: they are of no use
        any more. May be called twice, and ``open`` after it."""
