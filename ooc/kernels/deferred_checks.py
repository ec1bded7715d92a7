# SPDX-License-Identifier: Apache-2.0
"""Checks of neighbour lists whose findings are asked for later, on a device where nobody waits for the answer.

The kernels of the CPU raise at once. On a device with memory of its own the host would have to wait for every tile, so
that findings are only noted there, in a number or two a kind, and asked for when a program is over, before any weight
is stepped. A program whose lists have been found valid once does not look at them again: that would be four launches
for every pull.
"""

from enum import Enum

import torch
from torch import Tensor


class Fault(Enum):
    """What a list of neighbours can have."""

    OUT_OF_RANGE = "a neighbour is none of the graph's rows"
    UNSORTED = "neighbours of a row are not in ascending order"


class DeferredChecks:
    """About the lists of one direction of a graph of ``nodes`` rows. Used by one thread."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self._lowest_and_highest: tuple[Tensor, Tensor] | None = None
        self._is_unsorted: Tensor | None = None
        self._program = ""
        self._valid: set[str] = set()

    def begin(self, program: str) -> None:
        """``program`` is about to be run; what one noted that came to no end is forgotten."""
        self._program = program
        self._lowest_and_highest = self._is_unsorted = None

    def check_range(self, indices_E: Tensor) -> None:
        """Note neighbours that are none of the graph's rows. For every pull: so in as few launches as there may be."""
        if indices_E.numel() == 0 or self._program in self._valid:
            return
        lowest, highest = torch.aminmax(indices_E)
        if self._lowest_and_highest is not None:
            before = self._lowest_and_highest
            lowest, highest = torch.minimum(before[0], lowest), torch.maximum(before[1], highest)
        self._lowest_and_highest = lowest, highest

    def check_order(self, indices_E: Tensor, offsets_R1: Tensor, before: Tensor | None = None) -> None:
        """Note rows, with edges from each of ``offsets_R1`` on, whose neighbours do not ascend. ``before`` [1, 2]: the
        one before the first of them, where that is not the first of its row."""
        if self._program in self._valid:
            return
        edges = indices_E.numel()
        is_first = torch.zeros(edges + 1, dtype=torch.bool, device=indices_E.device)
        is_first.index_fill_(0, offsets_R1.long(), True)
        found = ((indices_E[1:] < indices_E[:-1]) & ~is_first[1:edges]).any()
        if before is not None and edges:
            found = found | (indices_E[0] < before[0, 0])
        self._is_unsorted = found if self._is_unsorted is None else self._is_unsorted | found

    def found(self) -> list[Fault]:
        """What has been found since the last call. The host waits for the device, once a kind."""
        noted, self._lowest_and_highest = self._lowest_and_highest, None
        is_unsorted, self._is_unsorted = self._is_unsorted, None
        faults = []
        if noted is not None and bool((noted[0] < 0) | (noted[1] >= self._nodes)):
            faults.append(Fault.OUT_OF_RANGE)
        if is_unsorted is not None and bool(is_unsorted):
            faults.append(Fault.UNSORTED)
        if self._program and not faults:
            self._valid.add(self._program)
        return faults
