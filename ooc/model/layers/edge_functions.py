# SPDX-License-Identifier: Apache-2.0
"""Aggregations of any message per edge, differentiated edge by edge: attention whose scores are no sum of scalars, and
layers that take edge features.

Every row keeps its lse. The gradients of what targets bring, and of parameters that act on edges, take a pull of their
own over in-edges. Gradients of parameters come row by row in the pulled matrix, so that they are summed in one order
however rows and columns were cut.

Shapes: R rows of the tile, G groups, K features of an edge, T columns of its term in a group.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ooc.kernels import edge_function, memory
from ooc.kernels.edge_function import EdgeMessages, Heads, TargetLayout, Upstream
from ooc.kernels.edge_terms import EdgeTerms, LoopFeatures
from ooc.kernels.edges import TileEdges
from ooc.kernels.functions import EdgeFunction, Gatv2, GatWithFeatures, Product, Rectified, TransformerAttention
from ooc.kernels.pulls import pulls_for
from ooc.model.layers.per_edge import Attention, AttentionOptions, EdgeAggregate, Key, Pulling
from ooc.model.lowering.projection import Weights, through_weights
from ooc.model.lowering.values import Value
from ooc.plan.workload import EdgeData

Parameters = list[tuple[nn.Parameter, Tensor]]


@dataclass(frozen=True)
class EdgeTerm:
    """What the ``features`` of an edge add to its message or score, ``columns`` numbers a group: a linear map made of
    ``parameters``, or (None) the features themselves; nothing without features. ``loops``: the features of added
    self-loops, if there are any."""

    features: int
    columns: int
    weights: Weights | None = None
    parameters: tuple[nn.Parameter, ...] = ()
    loops: LoopFeatures | None = None

    @property
    def trains(self) -> bool:
        return any(parameter.requires_grad for parameter in self.parameters)

    @property
    def loop_columns(self) -> int:
        """The columns of a row's self-loop features, which every group keeps."""
        return self.features if self.loops is not None else 0

    @property
    def gradient_columns(self) -> int:
        """The columns of the map's gradient in a group."""
        if self.weights is None or not self.trains:
            return 0
        with torch.no_grad():
            _, bias = self.weights()
        return (self.features + (bias is not None)) * self.columns

    def of(self, groups: range, dtype: torch.dtype, loop_RK: Tensor | None) -> EdgeTerms:
        """Return the terms of a slab's groups."""
        if self.weights is None:
            return EdgeTerms(groups, dtype, loop_RK=loop_RK)
        part = slice(groups.start * self.columns, groups.stop * self.columns)
        with torch.no_grad():
            weight, bias = self.weights()
        bias_T = None if bias is None else bias.detach()[part]
        return EdgeTerms(groups, dtype, weight.detach()[part].t().contiguous(), bias_T, loop_RK)

    def loop_features(self, tile: TileEdges, like: Tensor) -> Tensor | None:
        """Return the self-loop features of a tile's rows [R, K], with the type and place of ``like``; None if no loops
        are added."""
        if self.loops is None:
            return None
        if self.loops.constant_K is None:
            return pulls_for(like).loops(self.loops, tile, like.dtype)
        return like.new_zeros(tile.rows, self.features) + self.loops.constant_K.to(like.device, like.dtype)

    def gradients(self, pulled_RGM: Tensor) -> Parameters:
        """Return the gradients of the parameters, from that of the map row by row."""
        if self.weights is None or not self.trains:
            return []
        by_row = pulled_RGM.sum(0).view(len(pulled_RGM[0]), -1, self.columns)
        weight = by_row[:, : self.features].transpose(1, 2).reshape(-1, self.features)
        bias = by_row[:, self.features].reshape(-1) if by_row.shape[1] > self.features else None
        return through_weights(self.weights, self.parameters, weight, bias)


NO_TERM = EdgeTerm(0, 0)
"""No term, for functions that take no edge features."""
_LOOP_TIMES: dict[type, tuple[float, float, float]] = {
    Gatv2: (11, 24, 17),
    GatWithFeatures: (11, 10, 17),
    TransformerAttention: (6, 16, 3),
    Product: (34, 42, 41),
    Rectified: (19, 20, 37),
}
"""How often a message could be moved in the time of a compiled loop, without a softmax's work on rows: forward, as
sources pull, and as targets pull."""
_LOOP_TIMES_OF_SOFTMAX = (37, 57, 51)
"""The same for rectified messages in which every column has a softmax of its own."""


class FunctionAggregate(EdgeAggregate):
    """Messages by an edge function, which may take a term of edge features; summed, or weighted by a softmax."""

    times_streamed: ClassVar[Mapping[Pulling, float]] = {
        Pulling.FORWARD: 2.75,
        Pulling.TARGETS: 4.7,
        Pulling.SOURCES: 6.3,
    }
    """The figures are measured, as ``per_edge`` says, for GATv2 with 4 heads of 4 to 32 channels; others were not
    measured."""
    edge_bytes = 6000
    function: Callable[[range], EdgeFunction]
    """Return the message and score of some groups."""
    term: EdgeTerm
    att: nn.Parameter | None = None
    """What comes with the target's rows so that its gradient is found row by row as theirs is: [1, G, C]."""
    target_columns = 0
    """The columns of a group that a target brings."""
    statistics = 0
    """The columns of a group, beside the gradient, that the backward pass needs of a target."""

    @property
    def times_compiled(self) -> Mapping[Pulling, float]:
        kind = type(self.function(range(1)))
        times = _LOOP_TIMES_OF_SOFTMAX if self.statistics and kind is Rectified else _LOOP_TIMES[kind]
        return dict(zip((Pulling.FORWARD, Pulling.SOURCES, Pulling.TARGETS), times, strict=True))

    @property
    def edge_data(self) -> tuple[EdgeData, ...]:
        return (EdgeData.FEATURES,) if self.term.features else ()

    @property
    def edge_features(self) -> int:  # type: ignore[override]  # the others have none
        return self.term.features

    @property
    def message(self) -> int:
        """The columns of a group's messages."""
        return self.result

    @property
    def upstream_columns(self) -> int:
        return self._layout(self.groups).columns

    @property
    def brought_columns(self) -> int:
        """The columns of a group that have a gradient of the target's own: what it brings, and parameters with it."""
        return self.target_columns * (1 if self.att is None else 2)

    @property
    def pulls_targets(self) -> bool:  # type: ignore[override]  # the others know it of their kind
        return self.pulled_target_columns > 0

    @property
    def pulled_target_columns(self) -> int:
        return self.groups * (self.brought_columns + self.term.gradient_columns)

    def _heads(self, key: Key, groups: range) -> Heads | None:
        """Return the heads of a softmax; None for a sum."""
        return None

    def _layout(self, groups: int) -> TargetLayout:
        return TargetLayout(groups, self.target_columns, self.message, self.statistics, self.term.loop_columns)

    def _messages(
        self, key: Key, tile: TileEdges, pulled: Tensor, groups: range, loop_RK: Tensor | None
    ) -> EdgeMessages:
        """Return what some groups compute of a tile's edges, which pull these rows."""
        terms = self.term.of(groups, pulled.dtype, loop_RK) if self.term.features else None
        return EdgeMessages(self.function(groups), self._edges(tile, pulled.itemsize), terms, self._heads(key, groups))

    def forward(self, key: Key, tile: TileEdges, source: Tensor, own: Tensor, groups: range) -> Tensor:
        loop_RK = self.term.loop_features(tile, source)
        target, before = _split(own, groups, self.target_columns) if self.before is not None else (own, None)
        value_RO, lse_RG = pulls_for(source).messages(
            self._messages(key, tile, source, groups, loop_RK),
            source_NW=source,
            target_RV=target if self.target_columns else source.new_empty(tile.rows, 0),
            columns=len(groups) * self.message,
        )
        if lse_RG is not None and (self.joint or before is not None):  # a row without edges takes no part in a softmax
            lse_RG.masked_fill_((tile.offsets_R1.diff() == 0)[:, None], -torch.inf)
        if lse_RG is not None and before is not None:
            value_RO, lse_RG = edge_function.merge_softmaxes(value_RO, lse_RG, *_split(before, groups, self.message))
        if lse_RG is None or not (self.keep or self.joint):
            return value_RO
        parts = [value_RO.view(tile.rows, len(groups), -1), lse_RG[:, :, None]]
        if loop_RK is not None:
            parts.append(loop_RK[:, None].expand(-1, len(groups), -1))
        return torch.cat(parts, dim=2).view(tile.rows, -1)

    def upstream(self, gradient: Tensor, kept: Tensor, target: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if target is None:
            return gradient, None
        return self._layout(self.groups).pack(target, Upstream(gradient, None)), None

    def backward_sources(self, key: Key, tile: TileEdges, source: Tensor, own: Tensor, groups: range) -> Tensor:
        layout = self._layout(len(groups))
        loop_RK = layout.loops(source[tile.start : tile.start + tile.rows])
        messages = self._messages(key, tile, source, groups, loop_RK)
        return pulls_for(source).message_sources(messages, source_RW=own.contiguous(), target_NP=source, layout=layout)

    def backward_targets(self, key: Key, tile: TileEdges, source: Tensor, own: Tensor, groups: range) -> Tensor:
        layout, prior = self._layout(len(groups)), None
        if self.after is not None:
            own, prior = _split(own, groups, self.upstream_columns // self.groups)
        own = own.contiguous()
        target_RV, above = layout.unpack(own)
        if self.att is not None:  # beside the term it is added to, so that its gradient is computed row by row
            target_RHC = target_RV.view(len(own), len(groups), -1)
            att_RHC = self.att.detach()[:, groups.start : groups.stop].expand_as(target_RHC)
            target_RV = torch.cat((target_RHC, att_RHC), dim=2).view(len(own), -1)
        found = pulls_for(source).message_targets(
            self._messages(key, tile, source, groups, layout.loops(own)),
            source_NW=source,
            target_RV=target_RV,
            upstream_R=above,
            with_map=self.term.gradient_columns > 0,
        )
        parts = [part for part in found if part is not None and part.shape[1]]
        if len(parts) == 1:
            return parts[0] if prior is None else parts[0].add_(prior)
        return torch.cat([part.view(len(own), len(groups), -1) for part in parts], dim=2).view(len(own), -1)

    def target_gradient(self, pulled: Tensor) -> tuple[Tensor, Parameters]:
        by_group, parameters = pulled.view(len(pulled), self.groups, -1), list[tuple[nn.Parameter, Tensor]]()
        rows_RGV = by_group[:, :, : self.brought_columns]
        if self.att is not None:
            rows_RGV, d_att = rows_RGV.chunk(2, dim=2)
            parameters += [(self.att, d_att.sum(0, keepdim=True))] if self.att.requires_grad else []
        parameters += self.term.gradients(by_group[:, :, self.brought_columns :])
        return rows_RGV.flatten(1), parameters

    def bounds(self, itemsize: int) -> memory.Bounds:
        by_head = self.statistics and not isinstance(self.function(range(1)), Rectified)
        return memory.messages(
            groups=self.groups if self.statistics else 0,
            source=self.source.columns,
            brought=self.groups * self.brought_columns,
            message=self.groups * self.message,
            packed=self.upstream_columns,
            pulled=self.pulled_target_columns,
            itemsize=itemsize,
            features=self.term.features,
            term=self.groups * self.term.columns,
            loop=self.term.loop_columns,
            heads=self.groups if by_head else 0,
            # Of a softmax over several types: own rows of two matrices side by side, and apart again.
            chained=0 if self.before is None is self.after else 3 * (self.upstream_columns + self.columns),
        )


class FunctionAttention(Attention, FunctionAggregate):
    """Attention by an edge function; ``functions`` gives that of some groups. Without ``target``, sources alone decide.

    A softmax over edges of several types continues from type to type: ``before`` is its result over the types before.
    ``joint``: it continues, so the logarithm of its sum of exponentials (-∞ without edges) is part of the result. The
    weight of an edge is exp(s_e - lse_i) with the last lse, and D_i is that of the last result, so the backward pass
    needs only the last one: sources of all types pull the same matrix, and targets add up their gradients type by type.
    """

    statistics = 2

    def __init__(
        self,
        index: int,
        source: Value,
        target: Value | None = None,
        before: "FunctionAttention | None" = None,
        *,
        options: AttentionOptions,
        functions: Callable[[range], EdgeFunction],
        att: nn.Parameter | None = None,
        term: EdgeTerm = NO_TERM,
        joint: bool = False,
        keep: bool,
    ) -> None:
        assert not (term.loop_columns and (joint or before)), "self-loops are not added to edges of several types"
        widths = {"result": options.channels + joint, "kept": term.loop_columns + (not joint)}
        super().__init__(index, source, target, groups=options.heads, keep=keep, **widths)
        self.options, self.p = options, options.p
        self.joint = joint
        self.function = functions
        self.att = att
        self.term = term
        self.target_columns = 0 if target is None else target.columns // options.heads
        self.before = before
        if before is not None:
            assert before.joint and before.target is target
            self.inputs, before.after = (*self.inputs, before), self
        self.parameters = term.parameters if att is None else (att, *term.parameters)

    @property
    def message(self) -> int:
        return self.result - self.joint

    def _heads(self, key: Key, groups: range) -> Heads:
        return Heads(groups, self._dropout(key))

    def upstream(self, gradient: Tensor, kept: Tensor, target: Tensor | None) -> tuple[Tensor, Tensor | None]:
        target = gradient.new_empty(len(gradient), 0) if target is None else target
        kept_RHK = kept.view(len(kept), self.groups, -1)
        value, lse = kept_RHK[:, :, : self.message].reshape(len(kept), -1), kept_RHK[:, :, self.message]
        above = edge_function.upstream(gradient, value, lse)
        layout = self._layout(self.groups)
        loop_RK = kept_RHK[:, 0, self.message + 1 :] if layout.loop else None
        return layout.pack(target, above, loop_RK), None


def dot_product_attention(*values: Any, **options: Any) -> FunctionAttention:
    """Return attention by dot products: sources bring key and value, targets the query."""
    return FunctionAttention(*values, functions=lambda groups: TransformerAttention(len(groups)), **options)


class FunctionSum(FunctionAggregate):
    """A sum by an edge function, in groups of ``channels`` columns. ``columns``: its columns in all, by default those
    that targets or sources bring. Without ``target``, sources alone decide."""

    def __init__(
        self,
        index: int,
        source: Value,
        target: Value | None = None,
        *,
        channels: int,
        functions: Callable[[range], EdgeFunction],
        term: EdgeTerm = NO_TERM,
        keep: bool,
        columns: int | None = None,
    ) -> None:
        groups = (columns or (target or source).columns) // channels
        super().__init__(index, source, target, groups=groups, result=channels, kept=0, keep=keep)
        self.function, self.term = functions, term
        self.target_columns = 0 if target is None else target.columns // groups
        self.parameters = term.parameters


def _split(rows: Tensor, groups: range, columns: int) -> tuple[Tensor, Tensor]:
    """Return the first ``columns`` of every group, and the rest."""
    by_group = rows.view(len(rows), len(groups), -1)
    first, others = by_group[:, :, :columns], by_group[:, :, columns:]
    return first.reshape(len(rows), -1), others.reshape(len(rows), -1)
