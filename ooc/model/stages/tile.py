# SPDX-License-Identifier: Apache-2.0
"""A tile of rows on its way through a stage."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ooc.kernels.edges import TileEdges
from ooc.model.graph import Scaling
from ooc.model.layers.opaque import Scattered
from ooc.model.lowering.statistics import TileMoments
from ooc.model.lowering.values import Moments, Summed
from ooc.plan.workload import Stage

Tensors = dict[str, Tensor]
Kernel = Callable[[TileEdges, Tensor, Tensor, range], Tensor | Scattered]
"""What a pull computes that is no plain sum: from the edges of some rows, a slab of the source, these rows of the
pull's own matrix (of the source where it names none) and the numbers of the slab's groups to [rows, columns], and where
it scatters to what other rows are to get."""
Sink = Callable[[int, Tensor], None]
"""Takes rows ``start``… of the outputs that are predicted, on any thread."""


@dataclass(slots=True)
class Contribution:
    """What one tile adds to the loss, and to the scores by split, counted as the objective does."""

    loss: Tensor | float = 0.0
    """float64; where it was computed, so that nobody waits for it."""
    scores: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Tile:
    """Rows ``start:stop`` with their inputs by name, the factors that scale them, and what they add to sums over all
    rows.

    Inputs may be views of long-lived buffers: not to be written to.
    """

    start: int
    stop: int
    inputs: Tensors
    factors: dict[tuple[Scaling, int], Tensor | None] = field(default_factory=dict)
    gradients: list[tuple[Summed, Tensor]] = field(default_factory=list)
    contribution: Contribution = field(default_factory=Contribution)
    moments: list[tuple[Moments, TileMoments]] = field(default_factory=list)
    moment_gradients: list[tuple[Moments, Tensor, Tensor]] = field(default_factory=list)
    scattered: Scattered | None = None

    def take(self, pulled: Tensor | Scattered) -> Tensor:
        """The rows of what a kernel gave for this tile; the rest waits here until the tile is reduced."""
        if isinstance(pulled, Tensor):
            return pulled
        self.scattered = pulled
        self.gradients += pulled.parameters
        return pulled.rows


@dataclass(slots=True)
class Step:
    """A stage, the function that computes it, and what it pulls with: a kernel, or a sum of rows scaled so."""

    spec: Stage
    compute: Callable[[Tile], Tensors]
    kernel: Kernel | Scaling = Scaling.SUM
