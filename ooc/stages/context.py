# SPDX-License-Identifier: Apache-2.0
"""The data shared by all stages of a network on a graph, and a tile of rows on its way through a stage."""

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
"""The number that torch adds to the norm it divides by."""
Tensors = dict[str, Tensor]
Kernel = Callable[[TileEdges, Tensor, Tensor, range], Tensor | Scattered]
"""A pull that is no plain sum: a function from the edges of some rows, a slab of the source, these rows of the pull's
own matrix (of the source where it has none) and the numbers of the slab's groups to [rows, columns], with what other
rows are to get where it scatters."""
Sink = Callable[[int, Tensor], None]
"""A function that takes rows of predicted outputs from row ``start`` on, on any thread."""


@dataclass(slots=True, kw_only=True)
class RowStep:
    """The optimizer of an embedding, with the learning rate and the number (from 1 on) of its next step.

    ``diverged``: whether it has produced rows that are not finite. ``clip_norm`` bounds the norm of all gradients, of
    which ``squares`` is the rows' sum of squares; ``factor`` is the resulting scale.
    """

    optimizer: RowOptimizer
    clip_norm: float | None = None
    lr: float = 0.0
    number: int = 1
    diverged: bool = False
    squares: float = 0.0
    factor: float | None = None
    _lock: Lock = field(default_factory=Lock)

    def begin(self, *, lr: float, number: int) -> None:
        """Prepare to compute step ``number``."""
        self.lr, self.number, self.diverged, self.squares, self.factor = lr, number, False, 0.0, None

    def scale(self, network: Network) -> float:
        """Return the scale that ``torch.nn.utils.clip_grad_norm_`` applies to the gradients of the rows and of all
        parameters.

        To be called after all gradients are complete, on any thread.
        """
        if self.clip_norm is None:
            return 1.0
        with self._lock:
            if self.factor is None:
                network.finish_gradients()
                squares = [float(p.grad.double().square().sum()) for p in network.parameters if p.grad is not None]
                self.factor = min(1.0, self.clip_norm / (math.sqrt(sum(squares) + self.squares) + _NORM_EPS))
            return self.factor

    def clipped(self, gradient_RD: Tensor, network: Network) -> Tensor:
        """Return the gradient of some rows scaled by it."""
        return gradient_RD if self.clip_norm is None else gradient_RD * self.scale(network)


class Inputs(dict[K, Any]):
    """A tile's rows by matrix: those present, and others that ``load`` views or copies on each access."""

    __slots__ = ("load",)

    def __init__(self, load: Callable[[K], Any]) -> None:
        super().__init__()
        self.load = load

    def __missing__(self, name: K) -> Any:
        return self.load(name)


def nowhere(name: str) -> None:
    """Return None: no rows of any matrix may be computed in place."""


@dataclass(slots=True)
class Tile:
    """Rows ``start:stop`` with their inputs by name, their scale factors, and what they add to sums over all rows.

    Inputs may be views of long-lived buffers and must not be written to, except for pulled rows that the tile owns.
    ``place``: returns where the rows of a matrix are stored, if they may be computed there (None: they are copied).
    ``edges``: the range from which the pull takes the edges of the rows, the last of which may have further ones (None:
    all).
    """

    start: int
    stop: int
    inputs: dict[str, Any]
    factors: dict[tuple[AnyScaling, int], Tensor | None] = field(default_factory=dict)
    gradients: list[tuple[Summed, Tensor]] = field(default_factory=list)
    loss: Tensor | float = 0.0
    """The tile's part of the loss, float64; on its device, so that nothing waits for it."""
    scores: dict[str, Any] = field(default_factory=dict)
    """The tile's part of the scores by split, counted as the objective does."""
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
        """Return the memory of matrix ``name`` where this number of rows may be computed, if it has just as many rows;
        else None."""
        found = self.place(name) if name is not None else None
        return found if found is not None and found.shape[0] == rows else None

    def take(self, pulled: Tensor | Scattered) -> Tensor:
        """Return the rows of a kernel's result; the rest of it is kept here until the tile is reduced."""
        if isinstance(pulled, Tensor):
            return pulled
        self.scattered = pulled
        self.gradients += pulled.parameters
        return pulled.rows


@dataclass(slots=True)
class Step:
    """A stage, the function that computes it, and what it pulls with: a kernel, or the scaling of a sum of rows."""

    spec: Stage
    compute: Callable[[Tile], Tensors]
    kernel: Kernel | AnyScaling = Scaling.SUM


class LossAndScores(Protocol):
    """The interface of a loss with scores, as stages use it.

    It names the matrices it reads of a tile and the number of its operators, computes the gradient of a tile's outputs,
    for which a loop may be compiled beforehand, and adds up tiles in order.
    """

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
    """The data that all stages of a network share.

    ``epoch`` is part of the key of dropout masks. ``columns``: those of every matrix that a stage names; stages add
    theirs. ``place``: the device that computes tiles; ``on_device``: whether the planned machine, possibly another one
    than this, computes on a device with its own memory. ``sparse``: the sparse matrix; ``packed``: matrices of bits,
    whose columns are bytes. ``read_rows``: how many rows of a matrix stages load. ``panels_held``: how many panels'
    sums of a stage are held at once, beside those of tiles. ``embedding``: how the rows of a trained embedding are
    stepped.
    """

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
        """Return the direction of the edges that are summed over; with ``backward``, in the gradient."""
        if isinstance(scaling, RelationScaling):
            return RelationEdges(
                scaling.relation.folder, Direction.IN if scaling.basic.reversed == backward else Direction.OUT
            )
        return Direction.IN if scaling.basic.reversed == backward else self.backward_direction

    def along(self, aggregate: EdgeAggregate) -> EdgesKey:
        """Return the direction of the edges along which targets pull."""
        return self.direction(aggregate.scaling) if aggregate.scaling.basic.reversed else aggregate.direction

    def scale(self, rows: Tensor, tile: Tile, scaling: AnyScaling, *, after: bool) -> Tensor | None:
        """Return the factors [R, 1] of the tile's first ``len(rows)`` rows before or ``after`` a sum, on the rows'
        device.

        They are copied to the device once. None: the rows are not scaled.
        """
        known, asked = self.rows.scaled(scaling), (scaling, rows.shape[0])
        if not (known.after if after else known.before):
            return None
        if asked not in tile.factors:
            tile.factors[asked] = known.scale(tile.start, rows)
        return tile.factors[asked]

    def scaled(
        self, rows: Tensor, tile: Tile, scaling: AnyScaling, out: Tensor | None = None, *, after: bool = False
    ) -> Tensor:
        """Return s · rows, or t · rows ``after`` the sum; in ``out``, if there is a factor."""
        scale = self.scale(rows, tile, scaling, after=after)
        return rows if scale is None else torch.mul(rows, scale, out=out)
