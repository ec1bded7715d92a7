# SPDX-License-Identifier: Apache-2.0
"""What of a row whose edges come in several pieces goes from one piece to the next.

A row is cut between parts (``ooc.kernels.cuda.segments``), and a row's parts are added up in order. So the sum of those
of one piece is what the next one goes on from, and results do not depend on where rows are cut.
"""

import torch
from torch import Tensor


class Carried:
    """Of the row that a piece ends within, for the pulls of one sweep over the rows: what its parts came to, for every
    launch of a pull that adds parts up; and its last neighbour with how many edges of the row up to there lead to it,
    by which dropout counts repeated edges."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []
        self._launch = self._turn = 0
        self.before: Tensor | None = None
        """The last neighbour before this piece and how many edges led to it [1, 2]; None where a row begins with it."""
        self._last: Tensor | None = None

    def begin(self, indices_E: Tensor, *, goes_on: bool, left_open: int) -> None:
        """A piece's edges are about to be pulled. ``goes_on``: its first row has begun before; ``left_open``: how many
        of its last edges are of a row that goes on behind them."""
        self._launch, self._turn = 0, 1 - self._turn
        self.before, self._last = self._last if goes_on else None, None
        if not left_open:
            return
        last, edges_E = indices_E[-1:], indices_E[len(indices_E) - left_open :]
        count = (edges_E == last).sum(dtype=last.dtype).view(1)
        if self.before is not None and left_open == len(indices_E):
            count = torch.where(self.before[:, 0] == last, count + self.before[:, 1], count)
        self._last = torch.stack((last, count), dim=1)

    def sums(self, workspace_PS: Tensor) -> tuple[Tensor, Tensor]:
        """For the next launch that adds up parts like those: what they have come to, and where it is kept what they
        then come to, [S] each."""
        if self._launch == len(self._sums):
            self._sums.append(workspace_PS.new_empty(2, workspace_PS.shape[1]))
        both = self._sums[self._launch]
        self._launch += 1
        return both[self._turn], both[1 - self._turn]
