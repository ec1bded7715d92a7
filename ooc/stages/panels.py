# SPDX-License-Identifier: Apache-2.0
"""Sums over all rows in one order, whatever the plan, the budgets and the number of processes.

Tiles are added up within a panel of rows, in the order of the stage; then the panels' sums are added in the same order.
The size of a panel depends on the number of rows alone. Several processes compute whole panels each, exchange their
sums and add them up alike. With few tiles, each tile is a panel.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ooc.model.lowering.network import Network, values_of
from ooc.model.lowering.projection import Projection
from ooc.model.lowering.values import Moments, Summed
from ooc.stages.context import Tile

PANELS = 32
"""The most panels."""
_MESSAGE_BYTES = 1 << 18
"""Bytes of panels' gradients sent to another process at once, since every message waits until all processes run. With
four processes on two busy cores, 32 messages of 32 KB took 0.26 s, four of 256 KB 0.01 s."""
EXCHANGE_BYTES = 4 * _MESSAGE_BYTES
"""The most bytes this takes beside one panel at a time: packed and unpacked, twice each."""


def panel_rows(rows: int, tile_rows: int) -> int:
    """Return the rows of a panel, for ``rows`` in all: the fewest tiles such that there are at most ``PANELS``."""
    return tile_rows * -(-rows // (tile_rows * PANELS))


class PanelSums:
    """An accumulator that takes the tiles of a pass in order and passes the sums of whole panels to ``add``.

    ``rows``: of a panel, by node type. ``gather``: with several processes, exchanges panels: it takes this process's
    panels, some at a time and in order, and yields those of all processes.
    """

    def __init__(
        self,
        add: Callable[[Tile], None],
        rows: Mapping[str, int],
        network: Network | None = None,
        gather: Callable[[Sequence[Any], bool], Iterable[Any]] | None = None,
    ) -> None:
        self._add, self._rows_of, self._gather = add, rows, gather
        self._rows = 0
        self._sum: Tile | None = None
        self._found: list[Tile] = []
        self._known: list[Any] = []
        """What sums belong to, in the same order in all processes."""
        if network is not None and gather is not None:
            made = [v.made.sums for v in values_of(network.training) if isinstance(v, Projection) and v.own_trains]
            every = [*values_of(network.training), *values_of(network.evaluation)]
            moments = (value for value in every if isinstance(value, Moments))
            self._known = [*network.parameters, *chain.from_iterable(made), *moments]

    def begin_pass(self, space: str) -> None:
        """Begin a pass whose tiles are nodes of this type."""
        self._rows = self._rows_of[space]

    def reduce(self, tile: Tile) -> None:
        """Add the next tile."""
        before = self._sum
        if before is None or before.start // self._rows != tile.start // self._rows:
            del before
            self._close()
            tile.inputs = {}
            tile.factors = {}
            self._sum = tile
            if tile.stop - tile.start < self._rows:  # more tiles follow, and gradients may be views
                for at, (summed, gradient) in enumerate(tile.gradients):  # one at a time, to save memory
                    tile.gradients[at] = summed, gradient.clone()
            return
        before.start, before.stop = min(before.start, tile.start), max(before.stop, tile.stop)
        before.diverged |= tile.diverged
        before.squares += tile.squares
        before.loss = before.loss + tile.loss
        _add_gradients(before.gradients, tile.gradients)
        tile.gradients.clear()
        for split, tally in tile.scores.items():
            if split in before.scores:
                before.scores[split].add(tally)
            else:
                before.scores[split] = tally
        _add_moments(before, tile)

    def end_pass(self, *, reverse: bool) -> None:
        """End a pass, in which all tiles have been added, so that moments and sums are complete.

        ``reverse``: the pass went over the rows in descending order.
        """
        self._close()
        if self._gather is None:
            return
        found, self._found = self._found, []
        numbers = {id(one): number for number, one in enumerate(self._known)}
        told: list[list[Tile]] = []
        room = 0
        for panel in found:
            gradients = (one._values() if one.is_sparse else one for _, one in panel.gradients)
            nbytes = sum(one.nbytes for one in gradients)
            if not told or nbytes > room:
                told.append([])
                room = _MESSAGE_BYTES
            told[-1].append(_renamed(panel, lambda one: numbers[id(one)]))
            room -= nbytes
        for panels in self._gather(told, reverse):
            for panel in panels:
                self._add(_renamed(panel, self._known.__getitem__))

    def _close(self) -> None:
        panel, self._sum = self._sum, None
        if panel is None:
            return
        if self._gather is None:
            self._add(panel)
            return
        of_rows = panel.squares, panel.diverged, panel.loss, panel.scores
        if panel.gradients or panel.moments or panel.moment_gradients or any(of_rows):
            self._found.append(panel)


def _renamed(panel: Tile, name: Callable[[Any], Any]) -> Tile:
    """Return the panel with ``name`` of what each sum belongs to: its number, as sent to other processes, or back."""
    return replace(
        panel,
        gradients=[(name(one), gradient) for one, gradient in panel.gradients],
        moments=[(name(one), found) for one, found in panel.moments],
        moment_gradients=[(name(one), *found) for one, *found in panel.moment_gradients],
    )


def _add_gradients(sums: list[tuple[Summed, Tensor]], found: Sequence[tuple[Summed, Tensor]]) -> None:
    """Add gradients to those of the same parameter, in order if it has several; by one operator where tiles match."""
    if len(sums) == len(found) and all(one is other for (one, _), (other, _) in zip(sums, found, strict=True)):
        if sums:
            torch._foreach_add_([total for _, total in sums], [gradient for _, gradient in found])
        return
    places: dict[int, list[Tensor]] = {}
    for summed, total in reversed(sums):
        places.setdefault(id(summed), []).append(total)
    for summed, gradient in found:
        if places.get(id(summed)):
            places[id(summed)].pop().add_(gradient)
        else:
            sums.append((summed, gradient.clone()))


def _add_moments(panel: Tile, tile: Tile) -> None:
    """Add a tile's moments to its panel's. A tile of rows that reach no loss has no gradients of them."""
    moments = {id(one): (one, found) for one, found in panel.moments}
    for one, more in tile.moments:
        known = moments.get(id(one))
        moments[id(one)] = one, more if known is None else known[1].joined(more)
    panel.moments = [*moments.values()]
    gradients = {id(one): (one, found) for one, *found in panel.moment_gradients}
    for one, *more in tile.moment_gradients:
        _, before = gradients.get(id(one), (one, None))
        if before is not None:
            more = [total.double() + part.double() for total, part in zip(before, more, strict=True)]
        gradients[id(one)] = one, more
    panel.moment_gradients = [(one, *found) for one, found in gradients.values()]
