# SPDX-License-Identifier: Apache-2.0
"""What all stages of a network on a graph share: the graph's rows, which are active, widths, keys of dropout."""

import torch
from torch import Tensor

from ooc.plan.workload import Direction
from ooc.train.graph import ActiveRows, GraphRows, Scaling
from ooc.train.lowering.network import Network
from ooc.train.objective import Objective
from ooc.train.stages.tile import Tile

CPU = torch.device("cpu")


class Ground:
    """``epoch`` keys the dropout masks. ``columns`` are those of every matrix that a stage names; stages add theirs.
    ``place`` is where tiles are computed, ``on_device`` whether the machine that is planned for has memory of its own
    there: it may be another one than this.
    ``packed``: the matrices of bits, whose columns are bytes. ``read_rows``: how many rows of a matrix stages load."""

    def __init__(
        self,
        network: Network,
        rows: GraphRows,
        *,
        undirected: bool,
        objective: Objective,
        num_columns: dict[str, int],
        active: ActiveRows,
        seed: int,
        place: torch.device = CPU,
        on_device: bool = False,
    ) -> None:
        self.network = network
        self.rows = rows
        self.objective = objective
        self.columns = dict(num_columns)
        self.packed: set[str] = set()
        self.read_rows: dict[str, int] = {}
        self.active = active
        self.seed = seed
        self.place = place
        self.on_device = on_device
        self.epoch = 0
        self.backward_direction = Direction.IN if undirected else Direction.OUT

    def zeros(self, rows: int, columns: int) -> Tensor:
        """[rows, columns] in the compute dtype."""
        return torch.zeros(rows, columns, dtype=self.network.dtype, device=self.place)

    def before(self, rows: Tensor, tile: Tile, scaling: Scaling) -> Tensor:
        """s · rows."""
        scale = self._scale(rows, tile, scaling) if self.rows.scaled(scaling).before else None
        return rows if scale is None else rows * scale

    def after(self, rows: Tensor, tile: Tile, scaling: Scaling) -> Tensor:
        """t · rows."""
        scale = self._scale(rows, tile, scaling)
        return rows if scale is None else rows * scale

    def without_after(self, rows: Tensor, tile: Tile, scaling: Scaling) -> Tensor:
        """rows / t, where t is nowhere zero."""
        scale = self._scale(rows, tile, scaling)
        return rows if scale is None else rows / scale

    def _scale(self, rows: Tensor, tile: Tile, scaling: Scaling) -> Tensor | None:
        """The factors of the tile's first rows, as many as ``rows`` has, where these are: brought to a device once."""
        asked = scaling, rows.shape[0]
        if asked not in tile.factors:
            tile.factors[asked] = self.rows.scaled(scaling).scale(tile.start, rows)
        return tile.factors[asked]
