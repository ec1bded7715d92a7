# SPDX-License-Identifier: Apache-2.0
"""What becomes of a tile when its turn comes."""

from collections.abc import Callable

from ooc.train.operands import Sums
from ooc.train.spilled_sums import RunWriter
from ooc.train.stages import Tile


class Committing:
    """Hands tiles on in their order, and adds what they scatter before that."""

    def __init__(self, sums: Sums | RunWriter | None, commit: Callable[[Tile], None]) -> None:
        self._sums, self._commit = sums, commit

    def __call__(self, tile: Tile | None) -> None:
        if tile is None:
            return
        found = tile.scattered
        if self._sums is not None and found is not None:
            for rows_S, values_SC in found.others:
                self._sums.add(rows_S, values_SC)
        tile.scattered = None
        self._commit(tile)

    def finish(self) -> None:
        """The last tile has been committed."""
        if self._sums is not None:
            self._sums.finish()
