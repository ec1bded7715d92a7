# SPDX-License-Identifier: Apache-2.0
"""What is wrong with lists of neighbours, found on a device where nobody waits for the answer.

The kernels of the CPU raise at once. On a device with memory of its own the host would have to wait for every tile, so
that findings are only noted there, in one number a kind, and asked for when a program is over, before any weight is
stepped.
"""

from enum import Enum

import torch
from torch import Tensor


class Fault(Enum):
    """What a list of neighbours can have."""

    STRAY = "a neighbour is none of the graph's rows"
    DISORDER = "neighbours of a row are not in ascending order"


class Doubts:
    """About the lists of one direction of a graph of ``nodes`` rows. Used by one thread."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self._found: dict[Fault, Tensor] = {}

    def look_for_strays(self, indices_E: Tensor) -> None:
        """Note neighbours that are none of the graph's rows."""
        self._note(Fault.STRAY, ((indices_E < 0) | (indices_E >= self._nodes)).any())

    def look_for_disorder(self, indices_E: Tensor, offsets_R1: Tensor) -> None:
        """Note rows, with edges from each of ``offsets_R1`` on, whose neighbours do not ascend."""
        edges = indices_E.numel()
        is_first = torch.zeros(edges + 1, dtype=torch.bool, device=indices_E.device)
        is_first.index_fill_(0, offsets_R1.long(), True)
        self._note(Fault.DISORDER, ((indices_E[1:] < indices_E[:-1]) & ~is_first[1:edges]).any())

    def found(self) -> list[Fault]:
        """What has been found since the last call. The host waits for the device."""
        noted, self._found = self._found, {}
        return [fault for fault, found in noted.items() if bool(found)]

    def _note(self, fault: Fault, found: Tensor) -> None:
        before = self._found.get(fault)
        self._found[fault] = found if before is None else before | found
