# SPDX-License-Identifier: Apache-2.0
"""What all stages of a network on a graph share: the graph's rows, which are active, widths, keys of dropout; and a
tile of rows on its way through a stage.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ooc.kernels.edges import TileEdges
from ooc.kernels.row_optimizers import RowOptimizer
from ooc.model.graph import ActiveRows, AnyScaling, GraphRows, RelationScaling, Scaling
from ooc.model.layers.per_edge import EdgeAggregate, Scattered
from ooc.model.lowering.network import Network
from ooc.model.lowering.values import Moments, Summed
from ooc.plan.workload import Direction, EdgesKey, RelationEdges, Stage

K = TypeVar("K")
_NORM_EPS = 1e-6
"""That torch adds to the norm by which it divides."""
Tensors = dict[str, Tensor]
Kernel = Callable[[TileEdges, Tensor, Tensor, range], Tensor | Scattered]
"""What a pull computes that is no plain sum: from the edges of some rows, a slab of the source, these rows of the
pull's own matrix (of the source where it names none) and the numbers of the slab's groups to [rows, columns], and where
it scatters to what other rows are to get."""
Sink = Callable[[int, Tensor], None]
"""Takes rows ``start``… of the outputs that are predicted, on any thread."""


@dataclass(slots=True, kw_only=True)
class RowStep:
    """The optimizer of an embedding, and what keys its next step: the learning rate, and its number from 1 on.
    ``diverged``: whether it has made rows that are no finite numbers. ``clip_norm`` bounds the norm of all gradients,
    those of the rows having ``squares`` as the sum of theirs: by the ``factor`` that they are scaled by."""

    optimizer: RowOptimizer
    clip_norm: float | None = None
    lr: float = 0.0
    number: int = 1
    diverged: bool = False
    squares: float = 0.0
    factor: float | None = None
    _lock: Lock = field(default_factory=Lock)

    def begin(self, *, lr: float, number: int) -> None:
        """Step ``number`` is about to be computed."""
        self.lr, self.number, self.diverged, self.squares, self.factor = lr, number, False, 0.0, None

    def scale(self, network: Network) -> float:
        """What ``torch.nn.utils.clip_grad_norm_`` scales the gradients of the rows and of the network's parameters by;
        to be asked for when all of them are there, on any thread."""
        if self.clip_norm is None:
            return 1.0
        with self._lock:
            if self.factor is None:
                network.finish_gradients()
                squares = [float(p.grad.double().square().sum()) for p in network.parameters if p.grad is not None]
                self.factor = min(1.0, self.clip_norm / (math.sqrt(sum(squares) + self.squares) + _NORM_EPS))
            return self.factor

    def clipped(self, gradient_RD: Tensor, network: Network) -> Tensor:
        """The gradient of some rows so scaled."""
        return gradient_RD if self.clip_norm is None else gradient_RD * self.scale(network)


class Inputs(dict[K, Any]):
    """A tile's rows by matrix: those at hand, and those that ``load`` takes from where they lie, or copies together,
    each time that they are asked for."""

    __slots__ = ("load",)

    def __init__(self, load: Callable[[K], Any]) -> None:
        super().__init__()
        self.load = load

    def __missing__(self, name: K) -> Any:
        return self.load(name)


def nowhere(name: str) -> None:
    """There is no place for rows of any matrix."""


@dataclass(slots=True)
class Tile:
    """Rows ``start:stop`` with their inputs by name, the factors that scale them, and what they add to sums over all
    rows.

    Inputs may be views of long-lived buffers: not to be written to, but for what is pulled where that is the tile's
    own. ``place``: where the rows of a matrix are stored, if they may be computed there (None: they are copied).
    ``edges``: of which the pull takes those of the rows, the last of which may go on behind them (None: all).
    """

    start: int
    stop: int
    inputs: dict[str, Any]
    factors: dict[tuple[AnyScaling, int], Tensor | None] = field(default_factory=dict)
    gradients: list[tuple[Summed, Tensor]] = field(default_factory=list)
    loss: Tensor | float = 0.0
    """What it adds to that, float64; where it was computed, so that nobody waits for it."""
    scores: dict[str, Any] = field(default_factory=dict)
    """What it adds to those by split, counted as the objective does."""
    moments: list[tuple[Moments, Any]] = field(default_factory=list)
    """Each with its ``TileMoments`` or ``TileTotals``."""
    moment_gradients: list[tuple[Any, ...]] = field(default_factory=list)
    """Each with the tensors of its gradient."""
    scattered: Scattered | None = None
    diverged: bool = False
    squares: float = 0.0
    edges: range | None = None
    pulled_is_own: bool = False
    place: Callable[[str], Tensor | None] = nowhere

    def room(self, name: str | None, rows: int) -> Tensor | None:
        """Where so many rows of matrix ``name`` may be computed: where they are stored, if these are all of the tile's
        and can be."""
        found = self.place(name) if name is not None else None
        return found if found is not None and found.shape[0] == rows else None

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
    kernel: Kernel | AnyScaling = Scaling.SUM


class LossAndScores(Protocol):
    """What stages need of a loss and of scores: the matrices they read of a tile, how many operators they run, the
    gradient of a tile's outputs, for which a loop may be compiled before, and sums that take in tiles in order."""

    loss_inputs: tuple[str, ...]
    score_inputs: tuple[str, ...]
    gradient_operators: int
    score_operators: int

    def rehearse(self, dtype: torch.dtype) -> None: ...

    def gradient(self, tile: Tile, outputs_RC: Tensor) -> Tensor: ...

    def score(self, tile: Tile, outputs_RC: Tensor) -> None: ...

    def reduce(self, tile: Tile) -> None: ...


@dataclass(kw_only=True, eq=False)
class StageContext:
    """``epoch`` keys the dropout masks. ``columns`` are those of every matrix that a stage names; stages add theirs.
    ``place`` is where tiles are computed, ``on_device`` whether the machine that is planned for has memory of its own
    there: it may be another one than this. ``sparse``: the matrix that comes without its zeros. ``packed``: those of
    bits, whose columns are bytes. ``read_rows``: how many rows of a matrix stages load. ``panels_held``: how many
    panels' sums of a stage are held at once, beside those of tiles. ``embedding``: how the rows of an embedding are
    stepped, where they are trained."""

    network: Network
    rows: GraphRows
    objective: LossAndScores
    columns: dict[str, int]
    active: ActiveRows
    backward_direction: Direction
    seed: int
    place: torch.device
    on_device: bool
    sparse: str | None = None
    epoch: int = 0
    panels_held: int = 1
    packed: set[str] = field(default_factory=set)
    read_rows: dict[str, int] = field(default_factory=dict)
    embedding: "RowStep | None" = None

    def direction(self, scaling: AnyScaling, *, backward: bool = False) -> EdgesKey:
        """Of the edges that are summed over; of those that its gradient is, with ``backward``."""
        if isinstance(scaling, RelationScaling):
            return RelationEdges(
                scaling.relation.folder, Direction.IN if scaling.basic.reversed == backward else Direction.OUT
            )
        return Direction.IN if scaling.basic.reversed == backward else self.backward_direction

    def along(self, aggregate: EdgeAggregate) -> EdgesKey:
        """The edges that targets pull along."""
        return self.direction(aggregate.scaling) if aggregate.scaling.basic.reversed else aggregate.direction

    def scale(self, rows: Tensor, tile: Tile, scaling: AnyScaling, *, after: bool) -> Tensor | None:
        """The factors of the tile's first rows, as many as ``rows`` has, before a sum or after it [R, 1], where these
        are: brought to a device once. None: they are not scaled."""
        known, asked = self.rows.scaled(scaling), (scaling, rows.shape[0])
        if not (known.after if after else known.before):
            return None
        if asked not in tile.factors:
            tile.factors[asked] = known.scale(tile.start, rows)
        return tile.factors[asked]

    def scaled(
        self, rows: Tensor, tile: Tile, scaling: AnyScaling, out: Tensor | None = None, *, after: bool = False
    ) -> Tensor:
        """s · rows, or t · rows ``after`` the sum; in ``out``, where there is an s, or a t."""
        scale = self.scale(rows, tile, scaling, after=after)
        return rows if scale is None else torch.mul(rows, scale, out=out)
