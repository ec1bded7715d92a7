# SPDX-License-Identifier: Apache-2.0
"""Aggregations that compute something for every edge: what they pull in either direction, and what they keep for it.

    forward    targets pull m = the source's rows over in-edges                  → p: the result, and what is kept
    loss, …    from the gradient of the result, p and the target's own row       → dp: what sources pull of a target
    backward   sources pull dp over out-edges, with their own row of m           → dm: the gradient of the source's rows
    targets    if the gradient of the target's own row depends on edges:
               targets pull m again, with their own row of dp                    → dt

Everything is laid out group after group (heads or single columns), so that any number of groups is a slab by itself.

Shapes: N rows of a slab, R rows of the tile, H heads and C channels of a head.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from ooc.kernels import gat, maximum, memory
from ooc.kernels.dropout.edges import EdgeDropout
from ooc.kernels.edges import EDGES_PER_PIECE, SelfLoops, TileEdges
from ooc.kernels.pulls import are_compiled, pulls_for
from ooc.model.graph import AnyScaling, RelationScaling, Scaling, ends_of
from ooc.model.lowering.values import Aggregate, Gradients, Rows, Value
from ooc.plan.workload import Direction, EdgesKey, EdgeWork, PerEdge, RelationEdges
from ooc.storage.types import EdgeType

# What pulls take on the CPU beside fetching, as so much streamed at the rate at which the profile finds attention to be
# computed: by the passes of trainings of GAT, GATv2 and maxima on graphs of 10, 20 and 50 edges a row, with two threads
# (tools/bench_plan), and by single tiles, for how it grows with columns.

_ATTENDED_BYTES = (1700, 660)
"""Bytes of GAT's attention for an edge, and for each of its heads, forward as well as backward."""
_DROPPED_BYTES = (3400, 490)
"""Further bytes for dropout, likewise."""
_ATTENDED_ROW_BYTES = 18000
"""Bytes for each head of a row, however few edges it has."""
_ATTENDED_TIMES = 40
"""How often each value of a row is streamed."""
_ATTENDED_OPERATORS = 60
"""Operators of a tile, however few edges it has: 0.9 ms, in which other threads compute nothing; as many again for
dropout."""
_LOOP_OPERATORS = 6
"""Operators of a tile if the loop is compiled."""
_LOOP_BYTES = 1700
"""Bytes of an edge in a compiled loop, however narrow it is."""
_HEAD_BYTES = 128
"""Bytes of a head's columns for which the loop takes twice as long as without columns."""
_PIECE_NBYTES = 2 << 20
"""The most bytes that a layer makes for a piece of edges, if rows have few enough edges or are cut. It does not depend
on budgets."""
_FEWEST_EDGES = 16
"""The fewest edges of a piece, whatever they take."""


class Pulling(Enum):
    """The pulls of an aggregation."""

    FORWARD = "forward"
    SOURCES = "sources"
    TARGETS = "targets"


def attention_work(row_bytes: int, heads: int, *, drops: bool = False) -> EdgeWork:
    """Return the work of GAT's attention, for rows of the result of ``row_bytes`` bytes."""
    edge, head = (one + dropped * drops for one, dropped in zip(_ATTENDED_BYTES, _DROPPED_BYTES, strict=True))
    of_row = heads * _ATTENDED_ROW_BYTES + _ATTENDED_TIMES * row_bytes
    return EdgeWork(edge, head, of_row, _LOOP_OPERATORS if are_compiled() else _ATTENDED_OPERATORS * (1 + drops))


def edges_at_once(bytes_per_edge: int) -> int:
    """Return the edges of a piece, if each takes ``bytes_per_edge``."""
    return min(EDGES_PER_PIECE, max(_PIECE_NBYTES // bytes_per_edge, _FEWEST_EDGES))


class Key(Protocol):
    """What dropout's masks are keyed by, beside edges."""

    seed: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Scattered:
    """The gradients that a tile scatters. ``rows``: the gradient of its own rows [R, C]; ``others``: ascending rows of
    the source without repeats, with what is added to their gradients [S, C], part after part, computed as they are
    taken if they are many; ``parameters``: the gradients of parameters."""

    rows: Tensor
    others: Iterable[tuple[Tensor, Tensor]]
    parameters: list[tuple[nn.Parameter, Tensor]]


class EdgeAggregate(Aggregate):
    """The base of aggregations that compute something for every edge. ``groups`` are independent of one another. A row
    of the value is p: in every group, the result's ``result`` columns first, which alone have a gradient. ``target``:
    the own rows that a target brings. ``keep``: there is a backward pass. ``before``: the aggregation over other edges
    that it continues; ``after``: the one that continues it."""

    before: "EdgeAggregate | None" = None
    after: "EdgeAggregate | None" = None
    joint = False
    """Whether another aggregation continues it, so that nothing else uses its result."""

    direction: EdgesKey = Direction.IN
    """The edges along which targets pull."""
    of_one_space = False
    pulls_targets = False
    """Whether the gradient of the target's own rows takes a pull of its own."""
    edge_features = 0
    """The number of edge features that it takes."""
    p = 0.0
    """The dropout probability."""
    slices = 1
    """How many successive groups share what is computed of an edge."""

    def __init__(
        self, index: int, source: Value, target: Value | None, *, groups: int, result: int, kept: int, keep: bool
    ) -> None:
        inputs = (source,) if target is None else (source, target)
        Value.__init__(self, index, inputs, (groups * (result + kept * keep),))
        self.scaling: AnyScaling = Scaling.SUM
        self.once = False
        self.hops = 1
        self.target = target
        self.groups = groups
        self.result = result
        self.keep = keep
        self._known: dict[int, memory.Bounds] = {}

    def over(self, relation: EdgeType) -> None:
        """Make it an aggregation over the edges of one type, in a graph with several."""
        self.scaling = scaling = RelationScaling(self.scaling.basic, relation)
        self.direction = RelationEdges(relation.folder, Direction.OUT if scaling.basic.reversed else Direction.IN)
        self.space = ends_of(scaling)[1]

    @property
    def takes_gradient(self) -> bool:
        return self.trains

    @property
    def upstream_of(self) -> Aggregate:
        return self if self.after is None else self.after.upstream_of

    def needs(self) -> tuple[Value, ...]:
        return (self,) if self.target is None else (self, self.target)

    def rehearse(self, key: Key, dtype: torch.dtype, kept: torch.dtype) -> None:
        """Pull a row without edges, so that loops are compiled before they are timed. ``kept``: the type of values kept
        between passes, instead of ``dtype``."""
        if self.before is not None or self.after is not None:
            return
        features = torch.zeros(0, self.edge_features, dtype=dtype) if self.edge_features else None
        nothing, offsets = torch.zeros(0, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
        tile, groups = TileEdges(nothing, offsets, 0, 1, features_EK=features), range(self.groups)
        widths = self.source.columns, 0 if self.target is None else self.target.columns
        pulled = kept if self.takes_narrow and dtype == torch.float32 else dtype
        source, target = (torch.zeros(1, columns, dtype=dtype) for columns in widths)
        found = self.forward(key, tile, source.to(pulled), target, groups)
        if self.keep:
            gradient = torch.zeros(1, self.groups * self.result, dtype=dtype)
            upstream, _ = self.upstream(gradient, found, None if self.target is None else target)
            self.backward_sources(key, tile, upstream.to(pulled), source, groups)
            if self.pulls_targets:
                self.backward_targets(key, tile, source.to(pulled), upstream, groups)

    @property
    def pulled_target_columns(self) -> int:
        """The columns that targets pull in the backward pass."""
        raise NotImplementedError

    @property
    def trains_target(self) -> bool:
        """Whether the rows that targets bring, or parameters that come with them, have a gradient."""
        return self.own_trains or (self.brought is not None and self.brought.trains)

    @property
    def brought(self) -> Value | None:
        """The value whose rows targets bring."""
        return self.target

    @property
    def own_values(self) -> tuple[Value, ...]:
        """The values whose own row a target needs to pull."""
        return tuple(value for value in (self.target, self.before) if value is not None)

    def forward(self, key: Key, tile: TileEdges, source: Tensor, own: Tensor, groups: range) -> Tensor:
        """Return p of a tile's rows; ``own`` are the target's."""
        raise NotImplementedError

    def upstream(self, gradient: Tensor, kept: Tensor, target: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return dp of a tile's rows from the gradient of the result; and the gradient of the target's rows, if that
        determines it."""
        raise NotImplementedError

    def backward_sources(self, key: Key, tile: TileEdges, source: Tensor, own: Tensor, groups: range) -> Tensor:
        """Return dm of a tile's rows from a slab of dp; ``own`` are the rows of m."""
        raise NotImplementedError

    def backward_targets(
        self, key: Key, tile: TileEdges, source: Tensor, own: Tensor, groups: range
    ) -> Tensor | Scattered:
        """Return what targets pull of m in the backward pass; ``own`` are the rows of dp."""
        raise NotImplementedError

    def target_gradient(self, pulled: Tensor) -> tuple[Tensor, list[tuple[nn.Parameter, Tensor]]]:
        """Return the gradients of the target's own rows, and of parameters, from what targets pulled."""
        raise NotImplementedError

    def bounds(self, itemsize: int) -> memory.Bounds:
        """Return bounds on the memory of the pulls."""
        raise NotImplementedError

    def _bounds(self, itemsize: int) -> memory.Bounds:
        """The same bounds, cached, since every tile asks for them."""
        if itemsize not in self._known:
            self._known[itemsize] = self.bounds(itemsize)
        return self._known[itemsize]

    def temporaries(self, itemsize: int) -> tuple[int, int, int]:
        """Return edges at once, bytes for each of them and for each row, and further bytes a row, for any of the
        pulls."""
        per_edge, per_row = self._bounds(itemsize).of_torch
        return edges_at_once(per_edge), per_edge, per_row

    def device_temporaries(self, itemsize: int) -> tuple[int, int, int]:
        """Return the same for a device with memory of its own."""
        return memory.EVERY_EDGE, *self._bounds(itemsize).on_device

    @property
    def in_loops(self) -> bool:
        """Whether the CPU's pulls of it are compiled loops."""
        return are_compiled()

    @property
    def takes_narrow(self) -> bool:
        """Whether the loops compute in float32 with rows of bfloat16; terms of edges would be made in the rows'
        type."""
        return self.in_loops and self.edge_features == 0

    def per_edge(
        self, pulling: Pulling, columns: int, own: str | None, itemsize: int, *, on_device: bool = False
    ) -> PerEdge:
        """Return how the planner should model one of the pulls; ``on_device``: on a device with memory of its own."""
        if on_device:  # every group is computed separately
            return PerEdge(self.groups, columns, own, *self.device_temporaries(itemsize))
        work = self.work(pulling, itemsize)
        if self.in_loops:
            bounds = self._bounds(itemsize)
            numbers = self.groups, columns, own, 0, 0, bounds.of_loop[list(Pulling).index(pulling)]
            as_kept = self.takes_narrow and itemsize == torch.float32.itemsize
            return PerEdge(*numbers, fixed_bytes=bounds.loop_fixed, slices=self.slices, work=work, as_kept=as_kept)
        numbers = self.groups, columns, own, *self.temporaries(itemsize)
        return PerEdge(*numbers, slices=self.slices, work=work)

    times_streamed: ClassVar[Mapping[Pulling, float]] = {}
    """How often a pull's temporaries of an edge are written or read."""
    edge_bytes = 3800
    """Return the bytes of an edge, if something as wide as a row is computed for it, however narrow that is."""

    @property
    def times_compiled(self) -> Mapping[Pulling, float]:
        """How often an edge's columns of the result could be moved in the time of its compiled loop beside fetching:
        for 500,000 nodes, 20 edges a node and 128 columns (tools/bench_roofline), relative to GAT's measured time and
        count; 0 if unknown."""
        return {}

    def work(self, pulling: Pulling, itemsize: int) -> EdgeWork:
        """Return how long the CPU takes for one of the pulls, without fetching."""
        if self.in_loops and self.times_compiled:
            of_all = int(self.times_compiled[pulling] * self.groups * self.result * itemsize)
            return EdgeWork(_LOOP_BYTES, of_all // (self.groups // self.slices))
        _, bytes_per_edge, _ = self.temporaries(itemsize)
        of_head = int(self.times_streamed[pulling] * bytes_per_edge) // (self.groups // self.slices)
        return EdgeWork(self.edge_bytes, of_head)

    def _edges(self, tile: TileEdges, itemsize: int) -> TileEdges:
        """Return a tile's edges as the kernels take them."""
        return replace(tile, edges_per_piece=self.temporaries(itemsize)[0])


class Maximum(EdgeAggregate):
    """The largest of the neighbours' values, column by column; 0 for a row without edges."""

    times_streamed: ClassVar[Mapping[Pulling, float]] = {Pulling.FORWARD: 3, Pulling.SOURCES: 4.75}

    @property
    def times_compiled(self) -> Mapping[Pulling, float]:
        return {Pulling.FORWARD: 10, Pulling.SOURCES: 4.9}

    def __init__(self, index: int, source: Value, *, keep: bool) -> None:
        super().__init__(index, source, None, groups=source.columns, result=1, kept=1, keep=keep)

    @property
    def upstream_columns(self) -> int:
        return 2 * self.groups

    def forward(self, key: Key, tile: TileEdges, source: Tensor, own: Tensor, groups: range) -> Tensor:
        return pulls_for(source).maxima(self._edges(tile, source.itemsize), source, keep=self.keep)

    def upstream(self, gradient: Tensor, kept: Tensor, target: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return maximum.upstream(gradient, kept), None

    def backward_sources(self, key: Key, tile: TileEdges, source: Tensor, own: Tensor, groups: range) -> Tensor:
        return pulls_for(source).maxima_sources(self._edges(tile, source.itemsize), target_NK=source, source_RW=own)

    def bounds(self, itemsize: int) -> memory.Bounds:
        return memory.maximum(columns=self.groups, itemsize=itemsize)


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """The common options of attentions. ``site`` keys the masks of their dropout; ``slices``: into how many groups of
    channels each head is cut."""

    heads: int
    channels: int
    self_loops: SelfLoops = SelfLoops.AS_STORED
    p: float = 0.0
    site: int = 0
    slices: int = 1


class Attention(EdgeAggregate):
    """A softmax over every target's edges, head by head."""

    options: AttentionOptions

    def work(self, pulling: Pulling, itemsize: int) -> EdgeWork:
        """Return the work of a loop, including a softmax's work for a row however few edges it has, and for an edge
        however narrow a head is: as much as ``_HEAD_BYTES`` of its columns."""
        work = super().work(pulling, itemsize)
        if not self.in_loops:
            return work
        of_row = attention_work(self.groups * self.result * itemsize, self.groups // self.slices).bytes_per_row
        times = (1 + _HEAD_BYTES / (self.slices * self.result * itemsize)) / 2
        return replace(work, bytes_per_edge_and_head=int(times * work.bytes_per_edge_and_head), bytes_per_row=of_row)

    def _dropout(self, key: Key) -> EdgeDropout | None:
        options = self.options
        return EdgeDropout(options.p, key.seed, key.epoch, options.site) if options.p else None

    def _edges(self, tile: TileEdges, itemsize: int) -> TileEdges:
        if self.options.p and tile.checks is not None:
            before = None if tile.carried is None else tile.carried.before
            tile.checks.check_order(tile.indices_E, tile.offsets_here_R1, before)
        return replace(super()._edges(tile, itemsize), self_loops=self.options.self_loops)


class GatAttention(Attention):
    """GAT's attention: sources bring z and a_src, targets a_dst. Without a ``negative_slope``, coefficients are signed
    and have no softmax."""

    def __init__(
        self,
        index: int,
        source: Value,
        target: Value,
        options: AttentionOptions,
        *,
        negative_slope: float | None,
        keep: bool,
    ) -> None:
        groups, width = options.heads * options.slices, options.channels // options.slices
        super().__init__(index, source, target, groups=groups, result=width, kept=width + 2, keep=keep)
        self.options, self.slices, self.p = options, options.slices, options.p
        self.negative_slope = negative_slope

    def work(self, pulling: Pulling, itemsize: int) -> EdgeWork:
        return attention_work(self.groups * self.result * itemsize, self.groups // self.slices, drops=self.p > 0)

    @property
    def upstream_columns(self) -> int:
        return self.groups * (self.result + gat.TARGET_SCALARS)

    def _heads(self, key: Key, groups: range) -> gat.GatHeads:
        return gat.GatHeads(groups, self.negative_slope, self._dropout(key), self.slices)

    def forward(self, key: Key, tile: TileEdges, source: Tensor, own: Tensor, groups: range) -> Tensor:
        heads, edges = self._heads(key, groups), self._edges(tile, source.itemsize)
        return pulls_for(source).attend(heads, edges, source_NS=source, a_dst_RG=own, keep=self.keep)

    def upstream(self, gradient: Tensor, kept: Tensor, target: Tensor | None) -> tuple[Tensor, Tensor | None]:
        assert target is not None
        return pulls_for(gradient).attend_upstream(gradient, kept, target)

    def backward_sources(self, key: Key, tile: TileEdges, source: Tensor, own: Tensor, groups: range) -> Tensor:
        heads, edges = self._heads(key, groups), self._edges(tile, source.itemsize)
        return pulls_for(source).attend_sources(heads, edges, target_NS=source, source_RS=own)

    def bounds(self, itemsize: int) -> memory.Bounds:
        return memory.gat(
            heads=self.options.heads,
            slices=self.slices,
            channels=self.result,
            itemsize=itemsize,
            dropout=self.p > 0,
            signed=self.negative_slope is None,
        )


class Result(Value):
    """The result among the columns of an ``EdgeAggregate`` [R, groups · result]."""

    def __init__(self, index: int, aggregate: EdgeAggregate) -> None:
        super().__init__(index, (aggregate,), (aggregate.groups * aggregate.result,))
        self._aggregate = aggregate

    @property
    def makes_rows(self) -> bool:
        """Whether it is always a new tensor: several groups of several columns, with others between them."""
        aggregate = self._aggregate
        return self.columns < aggregate.columns and min(aggregate.groups, aggregate.result) > 1

    def compute(self, inputs: Sequence[Tensor], rows: Rows, *, record: bool) -> Tensor:
        by_group = inputs[0].reshape(len(inputs[0]), self._aggregate.groups, -1)
        return by_group[:, :, : self._aggregate.result].reshape(len(by_group), -1)

    def backward(self, gradient: Tensor, operands: Sequence[Tensor | None], rows: Rows) -> Gradients:
        return Gradients([gradient])
