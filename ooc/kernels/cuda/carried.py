# SPDX-License-Identifier: Apache-2.0
"""The state of a row whose edges come in several pieces, passed from one piece to the next.

A row is cut between parts (``ooc.kernels.cuda.segments``), and its parts are added up in order. So the next piece
continues from the sum of the parts before, and results do not depend on where rows are cut.
"""

import torch
from torch import Tensor


class Carried:
    """The state of the row within which a piece ends, for the pulls of one sweep over the rows: the sums of its parts,
    for every launch that adds parts up; and its last neighbour, with the number of the row's edges to it so far, by
    which dropout counts repeated edges."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []
        self._launch = self._turn = 0
        self.before: Tensor | None = None
        """The last neighbour before this piece, and how many edges led to it [1, 2]; None if a row begins with the
        piece."""
        self._last: Tensor | None = None

    def begin(self, indices_E: Tensor, *, goes_on: bool, left_open: int) -> None:
        """Begin to pull a piece's edges. ``goes_on``: its first row has begun before; ``left_open``: how many of its
        last edges belong to a row that continues behind them."""
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
        """Return, for the next launch that adds up such parts, the sums so far and where the new sums are kept, [S]
        each."""
        if self._launch == len(self._sums):
            self._sums.append(workspace_PS.new_empty(2, workspace_PS.shape[1]))
        both = self._sums[self._launch]
        self._launch += 1
        return both[self._turn], both[1 - self._turn]
