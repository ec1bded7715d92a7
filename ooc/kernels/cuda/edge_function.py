# SPDX-License-Identifier: Apache-2.0
"""Convolutions that are edge functions on a GPU: as ``ooc.kernels.edge_function``, whose ``upstream`` serves here
too, for those that have programs: GATv2's and TransformerConv's attention, GAT's with features of edges, GINE's sum.

Nothing is stored per edge, terms of features included. Gradients of parameters come row by row, as on the CPU where
rows are to be summed in one order. lse is of the summing type, everything else of the sources'.

Shapes: N rows of a pulled matrix, R rows of the tile, W/V/T columns of sources, targets and terms, K features of an
edge, O = H·C columns of messages; M columns of the map's gradient.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ooc.errors import ModelError
from ooc.kernels.cuda import edge_sum
from ooc.kernels.cuda.choice import Kernel, shape_for
from ooc.kernels.cuda.edge_terms import Terms, map_block
from ooc.kernels.cuda.launch import Pulling, add_sums, dropped_below, rows_in_line, sums_dtype
from ooc.kernels.cuda.programs.edge_attention import DOT, GATV2, SCALAR, message_segments, message_slots
from ooc.kernels.cuda.programs.edge_gradients import message_sources, message_targets
from ooc.kernels.cuda.segments import Segments, cut
from ooc.kernels.cuda.shapes import Shape, power_of_two
from ooc.kernels.edge_function import EdgeFunction, Heads, Reduced, RowGradient, TargetLayout, Upstream, upstream
from ooc.kernels.edge_terms import EdgeTerms
from ooc.kernels.edges import TileEdges
from ooc.kernels.functions import Gatv2, GatWithFeatures, Gine, TransformerAttention

__all__ = ["pull_messages", "pull_source_gradients", "pull_target_gradients", "upstream"]


def pull_messages(
    function: EdgeFunction,
    tile: TileEdges,
    *,
    source_NW: Tensor,
    target_RV: Tensor,
    columns: int,
    terms: EdgeTerms | None = None,
    heads: Heads | None = None,
    segments: Segments | None = None,
    shape: Shape | None = None,
) -> Reduced:
    """Forward: targets pull sources over in-edges, O = ``columns``. ``segments``: the tile's, if it has been cut."""
    segments = segments or cut(tile)
    if isinstance(function, Gine):
        assert terms is not None
        return Reduced(edge_sum.pull_messages(tile, source_NW, terms, segments, shape), None)
    assert heads is not None
    source_NW, target_RV = rows_in_line(source_NW), target_RV.contiguous()
    layer = _Attention.of(function, heads, columns // len(heads.heads))
    sums = sums_dtype(source_NW.dtype)
    value_RO = source_NW.new_empty(tile.rows, columns)
    lse_RH = source_NW.new_empty(tile.rows, layer.heads, dtype=sums)
    if value_RO.numel() == 0:
        return Reduced(value_RO, lse_RH)
    workspace = source_NW.new_empty(segments.slots, layer.heads, layer.channels + 2, dtype=sums)
    shape = shape or shape_for(Kernel.MESSAGES, source_NW, layer.channels)
    pulling = Pulling(tile, segments, source_NW, value_RO, workspace, shape, across=layer.heads)
    made = Terms.of(terms, tile, target_RV)
    operands = (target_RV, layer.vector(target_RV), *made.operands, lse_RH)
    constants = layer.constants(shape) | made.constants
    pulling.over_segments(message_segments, *operands, numbers=layer.numbers, **constants)
    pulling.over_long_rows(message_slots, lse_RH, CHANNELS=layer.channels, HEADS=layer.heads)
    return Reduced(value_RO, lse_RH)


def pull_source_gradients(
    function: EdgeFunction,
    tile: TileEdges,
    *,
    source_RW: Tensor,
    target_NP: Tensor,
    layout: TargetLayout,
    terms: EdgeTerms | None = None,
    heads: Heads | None = None,
    segments: Segments | None = None,
    shape: Shape | None = None,
) -> RowGradient:
    """Backward over out-edges: the gradient of the tile's rows as sources; ``target_NP`` as ``layout`` packs it."""
    assert len(source_RW) == tile.rows, "a program reads every row's own"
    segments = segments or cut(tile)
    if isinstance(function, Gine):
        assert terms is not None
        return RowGradient(edge_sum.pull_sources(tile, source_RW, target_NP, terms, segments, shape))
    assert heads is not None
    source_RW, target_NP = source_RW.contiguous(), rows_in_line(target_NP)
    layer = _Attention.of(function, heads, layout.message)
    out_RW = torch.empty_like(source_RW)
    if out_RW.numel() == 0:
        return RowGradient(out_RW)
    width = out_RW.shape[1]
    workspace = target_NP.new_empty(segments.slots, width, dtype=sums_dtype(target_NP.dtype))
    shape = shape or shape_for(Kernel.MESSAGE_SOURCES, target_NP, layer.channels)
    pulling = Pulling(tile, segments, target_NP, out_RW, workspace, shape, across=layer.heads)
    made = Terms.of(terms, tile, source_RW)
    packed = layout.columns // layout.groups
    constants = layer.constants(shape) | made.constants | {"PACKED": packed}
    operands = (source_RW, layer.vector(source_RW), *made.operands)
    pulling.over_segments(message_sources, *operands, numbers=layer.numbers, **constants)
    add_sums(segments, workspace, out_RW)
    return RowGradient(out_RW)


def pull_target_gradients(
    function: EdgeFunction,
    tile: TileEdges,
    *,
    source_NW: Tensor,
    target_RV: Tensor,
    upstream_R: Upstream,
    with_map: bool = False,
    terms: EdgeTerms | None = None,
    heads: Heads | None = None,
    segments: Segments | None = None,
    shape: Shape | None = None,
) -> RowGradient:
    """Backward over in-edges: the gradient of the tile's rows as targets; ``with_map``: and of the terms' map."""
    segments = segments or cut(tile)
    if isinstance(function, Gine):
        assert terms is not None and with_map
        d_map_RM = edge_sum.pull_map(tile, source_NW, upstream_R.gradient, terms, segments, shape)
        return RowGradient(target_RV, d_map_RM)
    assert heads is not None and upstream_R.statistics is not None
    source_NW, target_RV = rows_in_line(source_NW), target_RV.contiguous()
    gradient_RO, statistics = upstream_R.gradient.contiguous(), upstream_R.statistics.contiguous()
    layer = _Attention.of(function, heads, gradient_RO.shape[1] // len(heads.heads))
    made, result = Terms.of(terms, tile, target_RV), target_RV.shape[1] // layer.heads
    mapped = made.mapped if with_map else 0
    width = layer.heads * (result + mapped * layer.query)
    out = source_NW.new_empty(tile.rows, width)
    rows_RV = out[:, : target_RV.shape[1]]
    if out.numel():
        sums = sums_dtype(source_NW.dtype)
        workspace = source_NW.new_empty(segments.slots, width, dtype=sums)
        shape = shape or shape_for(Kernel.MESSAGE_TARGETS, source_NW, layer.channels)
        wide = layer.constants(shape)["WIDE"]
        block = map_block(mapped, shape, wide)
        blocks = max(1, -(-mapped // block))
        pulling = Pulling(tile, segments, source_NW, out, workspace, shape, across=layer.heads * blocks)
        constants = layer.constants(shape) | made.constants
        constants |= {"RESULT": result, "MAPPED": mapped, "BLOCKS": blocks, "BLOCK": block}
        operands = (target_RV, gradient_RO, statistics, layer.vector(target_RV), *made.operands)
        pulling.over_segments(message_targets, *operands, numbers=layer.numbers, **constants)
        add_sums(segments, workspace, out)
    return RowGradient(rows_RV, out[:, target_RV.shape[1] :] if with_map else None)


@dataclass(frozen=True, slots=True)
class _Attention:
    """What programs take of a layer: ``kind`` of its score; columns of a head, its ``channels``, those that sources
    bring and those of a query, key and term; ``numbers``: the first head, dropout's key as one number and below which
    of the generator's numbers a coefficient is dropped; ``scale`` of the others."""

    kind: int
    heads: int
    channels: int
    brought: int
    query: int
    slope: float
    root: float
    numbers: tuple[int, int, int]
    scale: float
    has_dropout: bool
    att_HC: Tensor | None = None

    @classmethod
    def of(cls, function: EdgeFunction, heads: Heads, channels: int) -> "_Attention":
        """ModelError for a function that has no program."""
        att_HC, slope, root = None, 0.0, 1.0
        match function:
            case Gatv2():
                kind, brought, query = GATV2.value, channels, channels
                att_HC, slope = function.att_HC.contiguous(), function.negative_slope
            case TransformerAttention():
                kind, brought, query = DOT.value, 2 * channels, channels
                root = 1.0 / math.sqrt(channels)
            case GatWithFeatures():
                kind, brought, query = SCALAR.value, channels + 1, 1
                slope = function.negative_slope
            case _:
                raise ModelError(f"{type(function).__name__} has no program for a GPU; use device='cpu'")
        key, threshold, scale = dropped_below(heads.dropout)
        numbers = (heads.heads.start, key, threshold)
        has_dropout, count = heads.dropout is not None, len(heads.heads)
        return cls(kind, count, channels, brought, query, slope, root, numbers, scale, has_dropout, att_HC)

    def vector(self, instead: Tensor) -> Tensor:
        """GATv2's attention vectors; a program of another kind reads nothing there."""
        return instead if self.att_HC is None else self.att_HC

    def constants(self, shape: Shape) -> dict[str, Any]:
        return {
            "KIND": self.kind,
            "CHANNELS": self.channels,
            "HEADS": self.heads,
            "BROUGHT": self.brought,
            "QUERY": self.query,
            "TERM": self.query,
            "SLOPE": self.slope,
            "ROOT": self.root,
            "SCALE": self.scale,
            "HAS_DROPOUT": self.has_dropout,
            "WIDE": shape.columns if self.query > 1 else power_of_two(self.query),
        }
