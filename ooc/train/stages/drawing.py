# SPDX-License-Identifier: Apache-2.0
"""How a stage has the rows of some values for a tile: a recipe, with what is the same for every tile looked up once.

Tiles are small and there are thousands of them in an epoch: whatever is asked anew for each is paid for in Python.
"""

from collections.abc import Collection
from typing import NamedTuple

from torch import Tensor

from ooc.train.lowering.per_edge import EdgeAggregate
from ooc.train.lowering.values import Aggregate, Moments, Rows, Value
from ooc.train.stages.ground import Ground
from ooc.train.stages.names import Names
from ooc.train.stages.schedule import Recipe
from ooc.train.stages.tile import Tile
from ooc.train.tensors import shaped, typed

Known = dict[Value, Tensor]
"""Rows of values, or of their gradients, at hand."""


class _Loaded(NamedTuple):
    """A value and the matrix that it is loaded from, in tiles that begin before row ``stop``."""

    value: Value
    name: str
    stop: int


class _Computed(NamedTuple):
    """A value and what it is computed of, in tiles that begin before row ``stop``. ``record``: for its backward."""

    value: Value
    sources: tuple[Value, ...]
    stop: int
    record: bool


class Drawing:
    """The values of ``recipe``, in a stage that begins with ``pulled``; ``recorded``: those whose backward follows.

    Called with a tile: the rows of all these values, as far as they are needed. A tile lies whole within the rows that
    reach the loss, or whole beyond them.
    """

    def __init__(
        self,
        ground: Ground,
        names: Names,
        recipe: Recipe,
        pulled: Aggregate | None,
        recorded: Collection[Value] = (),
    ) -> None:
        self._ground = ground
        self._dtype = ground.network.dtype
        self._pulled = pulled if recipe.pulled else None
        self._sums = "" if pulled is None or not recipe.pulled else names.sums(pulled, recipe.repeated)

        def stop(value: Value) -> int:
            reach = recipe.reach.get(value)
            return ground.active.nodes if reach is None else ground.active.training_rows(reach)

        self._loaded = [_Loaded(v, names.value(v, recipe.again.get(v)), stop(v)) for v in recipe.leaves]
        self._computed = [
            _Computed(v, tuple(s for s in v.inputs if not isinstance(s, Moments)), stop(v), v in recorded)
            for v in recipe.order
        ]

    def __call__(self, tile: Tile, rows: Rows) -> Known:
        known: Known = {}
        start, inputs = tile.start, tile.inputs
        for value, name, stop in self._loaded:
            if start < stop:
                loaded = inputs[name]
                known[value] = loaded if value.packed else shaped(typed(loaded, self._dtype), value.tail)
        if self._pulled is not None:
            result = inputs[self._sums]
            is_scaled = not isinstance(self._pulled, EdgeAggregate)
            known[self._pulled] = self._ground.after(result, tile, self._pulled.scaling) if is_scaled else result
        for value, sources, stop, record in self._computed:
            if start < stop:
                known[value] = value.compute([known[source] for source in sources], rows, record=record)
        return known
