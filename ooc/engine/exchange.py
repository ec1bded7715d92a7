# SPDX-License-Identifier: Apache-2.0
"""Several processes that train one full graph: each computes a share of the rows, and they send each other what rows
of other shares need.

A share is a run of panels (``ooc.model.stages.panels``). Whatever is gathered along edges, a matrix or a slab of its
columns, is sent row block by row block to all processes before it is pulled; a row's sum then runs over its edges as
it does in one process. Sums over rows are told panel by panel and added up in one order. What tiles scatter to rows of
anybody is added up by one process after the other, in the order of the tiles.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ooc.ranks import Ranks


def divide_rows(weights: Sequence[float], panel_rows: int, rows: int, count: int) -> list[range]:
    """Rows for ``count`` processes, whole panels one behind the other, of about equal ``weights``, those of panels."""
    bounds, before, total = [0], 0.0, sum(weights)
    for panel, weight in enumerate(weights):
        middle = before + weight / 2
        while len(bounds) < count and middle >= total * len(bounds) / count:
            bounds.append(panel)
        before += weight
    bounds += [len(weights)] * (count + 1 - len(bounds))
    for at in range(1, count):  # everybody gets one
        bounds[at] = min(max(bounds[at], bounds[at - 1] + 1), len(weights) - count + at)
    stops = [min(rows, panel * panel_rows) for panel in bounds]
    return [range(start, stop) for start, stop in pairwise(stops)]


class Exchange:
    """What the processes of one training tell each other while a program runs; ``shares``: the rows of each."""

    def __init__(self, ranks: Ranks, shares: Sequence[range]) -> None:
        self._ranks, self._shares = ranks, shares
        self.received_bytes = 0

    @property
    def own(self) -> range:
        """The rows that this process computes."""
        return self._shares[self._ranks.rank]

    def rows(self, matrix_NC: Tensor, *, counted: bool = True) -> None:
        """Of a matrix of which every process has its own rows, have those of all. ``counted``: a program's."""
        for rank, share in enumerate(self._shares):
            rows = matrix_NC[share.start : share.stop]
            if rows.numel():
                self._ranks.broadcast(rows.view(torch.uint8), rank)
                self.received_bytes += rows.nbytes * (counted and rank != self._ranks.rank)

    def panels(self, found: Sequence[Any], reverse: bool) -> Iterator[Any]:
        """What every process has ``found``, in the order of the rows, one at a time."""
        ranks = self._ranks
        counts = [int(count) for count in ranks.gathered(torch.tensor([len(found)]))]
        for rank in reversed(range(ranks.count)) if reverse else range(ranks.count):
            for number in range(counts[rank]):
                yield ranks.sent(found[number] if rank == ranks.rank else None, rank)

    def in_turn(self, sums_NC: Tensor) -> Callable[[], None]:
        """Wait until all processes before this one have added to a matrix, and have what they came to. Returns what
        hands it on, then waits for what it comes to in the end."""
        ranks = self._ranks
        if ranks.rank:
            ranks.receive(sums_NC, ranks.rank - 1)
            self.received_bytes += sums_NC.nbytes

        def hand_on() -> None:
            if ranks.rank + 1 < ranks.count:
                ranks.send(sums_NC, ranks.rank + 1)
                self.received_bytes += sums_NC.nbytes
            ranks.broadcast(sums_NC.view(torch.uint8), ranks.count - 1)

        return hand_on
