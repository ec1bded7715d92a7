# SPDX-License-Identifier: Apache-2.0
"""Convolutions that are edge functions, on a GPU. As ``ooc.kernels.edge_function``, whose ``upstream`` is used here,
too, for those that have programs: GATv2's and TransformerConv's attention, GAT's with features of edges, GINE's sum.

Nothing is stored for an edge, including terms of features. Gradients of parameters come row by row, as on the CPU if
rows are to be summed in one order. lse has the summing type, everything else that of the sources.

Shapes: N rows of a pulled matrix, R rows of the tile, W/V/T columns of sources, targets and terms, K features of an
edge, O = H·C columns of messages; M columns of the map's gradient, for GINE a column's numbers side by side.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ooc.errors import ModelError
from ooc.kernels.cuda.choice import Kernel, Shape, power_of_two, shape_for
from ooc.kernels.cuda.edge_terms import Terms, map_block
from ooc.kernels.cuda.launch import Pulling, ceil_div, dropped_below, sums_dtype
from ooc.kernels.cuda.programs.edge_attention import DOT, GATV2, SCALAR, message_segments, message_slots
from ooc.kernels.cuda.programs.edge_gradients import message_sources, message_targets
from ooc.kernels.cuda.programs.edge_sums import rectified_map, rectified_segments
from ooc.kernels.edge_function import EdgeMessages, Heads, TargetLayout, Upstream
from ooc.kernels.edge_terms import EdgeTerms
from ooc.kernels.edges import TileEdges, rows_in_line
from ooc.kernels.functions import EdgeFunction, Gatv2, GatWithFeatures, TransformerAttention


def pull_messages(
    edges: EdgeMessages, *, source_NW: Tensor, target_RV: Tensor, columns: int
) -> tuple[Tensor, Tensor | None]:
    """Forward: targets pull sources over in-edges, O = ``columns``."""
    tile, terms, heads = edges.tile, edges.terms, edges.heads
    source_NW, target_RV = rows_in_line(source_NW), target_RV.contiguous()
    value_RO = source_NW.new_empty(tile.rows, columns)
    if heads is None:
        _rectify(tile, source_NW, source_NW, terms, value_RO, backward=False)
        return value_RO, None
    layer, made = Attention.of(edges.function, heads, columns // len(heads.heads)), Terms.of(terms, tile, target_RV)
    return value_RO, attend_targets(Kernel.MESSAGES, layer, made, tile, source_NW, target_RV, value_RO)


def attend_targets(
    kernel: Kernel,
    layer: "Attention",
    made: Terms,
    tile: TileEdges,
    source_NW: Tensor,
    target_RV: Tensor,
    out: Tensor,
    *,
    keep: bool = False,
) -> Tensor:
    """Write a softmax's sums to ``out``, with ``keep`` all that ``ooc.kernels.gat.attend`` keeps; otherwise return
    lse."""
    channels, heads = layer.channels, layer.heads
    lse_RH = source_NW.new_empty(0 if keep else tile.rows, heads, dtype=sums_dtype(source_NW.dtype))
    slot = heads * (2 * channels + 3 if keep else channels + 2)
    pulling = Pulling(kernel, tile, source_NW, out, width=channels, slot=slot, across=heads)
    operands = (target_RV, layer.vector(target_RV), *made.operands, lse_RH)
    constants = layer.constants(pulling.shape) | made.constants
    pulling.over_segments(message_segments, *operands, KEEP=keep, **constants)
    pulling.over_long_rows(message_slots, lse_RH, CHANNELS=channels, HEADS=heads, KEEP=keep)
    return lse_RH


def pull_source_gradients(edges: EdgeMessages, *, source_RW: Tensor, target_NP: Tensor, layout: TargetLayout) -> Tensor:
    """Backward over out-edges: the gradient of the tile's rows as sources; ``target_NP`` is packed by ``layout``."""
    tile, terms, heads = edges.tile, edges.terms, edges.heads
    assert len(source_RW) == tile.rows, "a program reads every row's own"
    if heads is None:
        source_RW = source_RW.contiguous()
        out_RW = torch.empty_like(source_RW)
        _rectify(tile, rows_in_line(target_NP), source_RW, terms, out_RW, backward=True)
        return out_RW
    layer, made = Attention.of(edges.function, heads, layout.message), Terms.of(terms, tile, source_RW)
    return attend_sources(Kernel.MESSAGE_SOURCES, layer, made, tile, target_NP, source_RW)


def attend_sources(
    kernel: Kernel, layer: "Attention", made: Terms, tile: TileEdges, target_NP: Tensor, source_RW: Tensor
) -> Tensor:
    """Return the gradient of the tile's rows as sources."""
    source_RW, target_NP = rows_in_line(source_RW), rows_in_line(target_NP)
    out_RW = source_RW.new_empty(source_RW.shape)
    sizes = {"width": layer.channels, "slot": out_RW.shape[1], "across": layer.heads}
    pulling = Pulling(kernel, tile, target_NP, out_RW, **sizes)
    constants = layer.constants(pulling.shape) | made.constants
    constants |= {"PACKED": target_NP.shape[1] // layer.heads, "SOURCE_STRIDE": source_RW.stride(0)}
    operands = (source_RW, layer.vector(source_RW), *made.operands)
    pulling.over_segments(message_sources, *operands, **constants)
    pulling.add_sums()
    return out_RW


def pull_target_gradients(
    edges: EdgeMessages, *, source_NW: Tensor, target_RV: Tensor, upstream_R: Upstream, with_map: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Backward over in-edges: the gradient of the tile's rows as targets; ``with_map``: also that of the terms' map."""
    tile, terms, heads = edges.tile, edges.terms, edges.heads
    source_NW, target_RV = rows_in_line(source_NW), target_RV.contiguous()
    gradient_RO, statistics = upstream_R.gradient.contiguous(), upstream_R.statistics
    if heads is None:
        assert with_map
        return target_RV, _rectified_map(tile, source_NW, gradient_RO, terms)
    assert statistics is not None
    layer = Attention.of(edges.function, heads, gradient_RO.shape[1] // len(heads.heads))
    made, result = Terms.of(terms, tile, target_RV), target_RV.shape[1] // layer.heads
    mapped = made.mapped if with_map else 0
    width = layer.heads * (result + mapped * layer.query)
    out = source_NW.new_empty(tile.rows, width)
    shape = shape_for(Kernel.MESSAGE_TARGETS, source_NW, layer.channels)
    constants = layer.constants(shape) | made.constants
    block = map_block(mapped, shape, constants["WIDE"])
    blocks = max(1, ceil_div(mapped, block))
    sizes = {"width": layer.channels, "slot": width, "across": layer.heads * blocks}
    pulling = Pulling(Kernel.MESSAGE_TARGETS, tile, source_NW, out, **sizes)
    constants |= {"RESULT": result, "MAPPED": mapped, "BLOCKS": blocks, "BLOCK": block}
    operands = (target_RV, gradient_RO, statistics.contiguous(), layer.vector(target_RV), *made.operands)
    pulling.over_segments(message_targets, *operands, **constants)
    pulling.add_sums()
    return out[:, : target_RV.shape[1]], out[:, target_RV.shape[1] :] if with_map else None


def _rectify(
    tile: TileEdges,
    pulled_NW: Tensor,
    own_RW: Tensor,
    terms: EdgeTerms | None,
    out_RW: Tensor,
    *,
    backward: bool,
) -> None:
    """GINE's relu(x + t) of sources, pulled by targets; ``backward``: the gradients of targets, pulled by sources where
    relu lets their own x + t through."""
    assert terms is not None
    width, made = out_RW.shape[1], Terms.of(terms, tile, pulled_NW)
    pulling = Pulling(Kernel.RECTIFIED, tile, pulled_NW, out_RW, width=width, slot=width)
    constants = made.constants | {"BACKWARD": backward, "HAS_MAP": made.mapped > 0}
    first = (terms.groups.start,)
    operands = (own_RW, *made.operands)
    pulling.over_segments(rectified_segments, *operands, numbers=first, WIDTH=width, BLOCKS=pulling.across, **constants)
    pulling.add_sums()


def _rectified_map(tile: TileEdges, source_NW: Tensor, gradient_RW: Tensor, terms: EdgeTerms | None) -> Tensor:
    """The gradient of GINE's map, row by row over in-edges [R, M]."""
    made, width = Terms.of(terms, tile, source_NW), source_NW.shape[1]
    out_RM = source_NW.new_empty(tile.rows, width * made.mapped)
    shape = shape_for(Kernel.RECTIFIED_MAP, source_NW)
    block = map_block(made.mapped, shape, shape.columns)
    blocks, column_blocks = ceil_div(made.mapped, block), ceil_div(width, shape.columns)
    sizes = {"width": width, "slot": width * made.mapped, "across": blocks * column_blocks}
    pulling = Pulling(Kernel.RECTIFIED_MAP, tile, source_NW, out_RM, **sizes)
    constants = made.constants | {"WIDTH": width, "COLUMN_BLOCKS": column_blocks, "BLOCKS": blocks, "BLOCK": block}
    pulling.over_segments(rectified_map, gradient_RW, *made.operands, MAPPED=made.mapped, **constants)
    pulling.add_sums()
    return out_RM


@dataclass(frozen=True, slots=True)
class Attention:
    """What programs take of an attention layer: columns of a head, its ``channels`` and those of a query, key and
    term."""

    heads: int
    channels: int
    query: int
    of_layer: dict[str, Any]
    att_HC: Tensor | None = None

    @classmethod
    def of(cls, function: EdgeFunction, heads: Heads, channels: int, slices: int = 1) -> "Attention":
        """Return this for a function. Each of the ``slices`` of a head is a head of its own, except for dropout. Raises
        ModelError for a function that has no program."""
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
        count = len(heads.heads)
        columns = {"CHANNELS": channels, "HEADS": count, "BROUGHT": brought, "QUERY": query, "SLICES": slices}
        of_layer = {"KIND": kind, "SLOPE": slope, "ROOT": root, **columns}
        of_layer |= {"numbers": (heads.heads.start, *dropped_below(heads.dropout))}
        scale = 1.0 if heads.dropout is None else heads.dropout.kept_scale
        of_layer |= {"HAS_DROPOUT": heads.dropout is not None, "SCALE": scale}
        return cls(count, channels, query, of_layer, att_HC)

    def vector(self, instead: Tensor) -> Tensor:
        """GATv2's attention vectors; programs of other kinds read nothing there."""
        return instead if self.att_HC is None else self.att_HC

    def constants(self, shape: Shape) -> dict[str, Any]:
        return self.of_layer | {"WIDE": shape.columns if self.query > 1 else power_of_two(self.query)}
