# SPDX-License-Identifier: Apache-2.0
"""The host as a device of its own: what a rehearsal trains on, two tiers and a wire included. It is not a GPU at all.

Whatever it is asked for has happened when it returns, so nothing overlaps.
"""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from ooc.plan.program.staging import CopyTo
from ooc.prefetch.arena import Bytes
from ooc.prefetch.device import Device, SideStream
from ooc.prefetch.engine import Event


class Moment(Event):
    """When it was made, by the host's clock."""

    def __init__(self) -> None:
        self.at_s = time.perf_counter()

    @property
    def happened(self) -> bool:
        return True

    def wait(self) -> None:
        """It has happened."""

    def seconds_since(self, earlier: "Moment") -> float:
        return self.at_s - earlier.at_s


class HostDevice(Device):
    """An arena in host memory beside the host's own."""

    name = "the host, rehearsing"
    place = torch.device("cpu")
    overhead_bytes = 0

    def open(self, *, arena_bytes: int, limit_bytes: int, host: Bytes, graph: Sequence[Bytes] = ()) -> Tensor:
        return torch.empty(arena_bytes, dtype=torch.uint8)

    def begin(self) -> None:
        """There are no streams."""

    def copy(self, target: Tensor, source: Tensor, direction: CopyTo, after: Sequence[Event]) -> Event:
        target.copy_(source)
        return Moment()

    def record(self, *, timed: bool = False) -> Event:
        return Moment()

    def hold(self, event: Event) -> None:
        """It has happened."""

    def side(self, nbytes: int) -> SideStream:
        """For several processes alone."""
        raise AssertionError("a rehearsal is of one process")

    def close(self) -> None:
        """Nothing was taken."""
