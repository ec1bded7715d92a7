# SPDX-License-Identifier: Apache-2.0
"""Checks of neighbour lists on a device, with results that are read later so that nobody waits for the device.

On the CPU kernels raise at once. On a device with memory of its own, the host would have to wait for every tile. So
faults are only recorded there, in a number or two for each kind, and read when a program is over, before any weight is
stepped. A program whose lists have been found valid once does not check them again, which would be four launches for
every pull.
"""

from enum import Enum

import torch
from torch import Tensor


class Fault(Enum):
    """The kinds of faults in a list of neighbours."""

    OUT_OF_RANGE = "a neighbour is none of the graph's rows"
    UNSORTED = "neighbours of a row are not in ascending order"


class DeferredChecks:
    """Checks of the lists of one direction, of a graph with ``nodes`` rows. For one thread."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self._lowest_and_highest: tuple[Tensor, Tensor] | None = None
        self._is_unsorted: Tensor | None = None
        self._program = ""
        self._valid: set[str] = set()

    def begin(self, program: str) -> None:
        """Begin a run of ``program``, and forget records of a run that did not end."""
        self._program = program
        self._lowest_and_highest = self._is_unsorted = None

    def check_range(self, indices_E: Tensor) -> None:
        """Record neighbours that are not rows of the graph. It runs for every pull, so it takes as few launches as
        possible."""
        if indices_E.numel() == 0 or self._program in self._valid:
            return
        lowest, highest = torch.aminmax(indices_E)
        if self._lowest_and_highest is not None:
            before = self._lowest_and_highest
            lowest, highest = torch.minimum(before[0], lowest), torch.maximum(before[1], highest)
        self._lowest_and_highest = lowest, highest

    def check_order(self, indices_E: Tensor, offsets_R1: Tensor, before: Tensor | None = None) -> None:
        """Record rows, whose edges begin at ``offsets_R1``, with neighbours that do not ascend. ``before`` [1, 2]: the
        neighbour before the first one, if that is not the first of its row."""
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
        """Return the faults found since the last call. The host waits for the device once for each kind."""
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
