# SPDX-License-Identifier: Apache-2.0
"""``ooc.kernels.edge_function``'s pulls as compiled loops, for the functions that have some; torch's for the others."""

from typing import Any

import torch
from torch import Tensor

from ooc.kernels import edge_function
from ooc.kernels.compiled import attention, dots, sums
from ooc.kernels.compiled.loops import Walk, array, computed
from ooc.kernels.compiled.terms import Terms, are_there, readable
from ooc.kernels.edge_function import Heads, TargetLayout, Upstream
from ooc.kernels.edge_terms import EdgeTerms
from ooc.kernels.edges import TileEdges
from ooc.kernels.functions import EdgeFunction, Gated, Gatv2, GatWithFeatures, Rectified, TransformerAttention
from ooc.kernels.tensors import typed
from ooc.plan.workload import Direction

LOOPS: dict[type, Any] = {
    Gatv2: attention,
    GatWithFeatures: attention,
    Gated: sums,
    Rectified: sums,
    TransformerAttention: dots,
}
"""By the kind of function the module of its loops: of messages, gradients of sources and gradients of targets."""


def _loops(function: EdgeFunction, tile: TileEdges, terms: EdgeTerms | None, heads: Heads | None) -> Any:
    """None where there are none for such terms, or for a function that is given no heads or others' dropout."""
    loops = LOOPS.get(type(function))
    is_sum = loops is sums and (heads is None or heads.dropout is None)
    is_made = terms is None or terms.weight_KT is not None or isinstance(function, Rectified)
    is_given = is_sum or (loops is not sums and heads is not None)
    return loops if is_given and is_made and are_there(terms, tile) else None


def _walk(tile: TileEdges, pulled: Tensor, heads: Heads | None, direction: Direction) -> Walk:
    if heads is None:
        return Walk.over(tile, pulled)
    return Walk.over(tile, pulled, heads.heads, heads.dropout, direction)


@torch.no_grad()
def pull_messages(
    function: EdgeFunction,
    tile: TileEdges,
    *,
    source_NW: Tensor,
    target_RV: Tensor,
    columns: int,
    terms: EdgeTerms | None = None,
    heads: Heads | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As ``edge_function.pull_messages``."""
    loops, dtype = _loops(function, tile, terms, heads), computed(source_NW)
    if loops is None:
        given: dict[str, Any] = {"columns": columns, "terms": terms, "heads": heads}
        return edge_function.pull_messages(function, tile, source_NW=source_NW, target_RV=target_RV, **given)
    tile = readable(tile, source_NW)
    out_RO = torch.empty(tile.rows, columns, dtype=dtype)
    lse_RH = torch.empty(tile.rows, 0 if heads is None else len(heads.heads), dtype=dtype)
    walk, made = _walk(tile, source_NW, heads, Direction.IN), Terms.of(terms, tile, source_NW)
    rows = array(source_NW), array(typed(target_RV, dtype)), array(out_RO), array(lse_RH)
    loops.messages(function, walk, made, *rows)
    return out_RO, None if heads is None else lse_RH


@torch.no_grad()
def pull_source_gradients(
    function: EdgeFunction,
    tile: TileEdges,
    *,
    source_RW: Tensor,
    target_NP: Tensor,
    layout: TargetLayout,
    terms: EdgeTerms | None = None,
    heads: Heads | None = None,
) -> Tensor:
    """As ``edge_function.pull_source_gradients``; all is computed again."""
    loops, own = _loops(function, tile, terms, heads), typed(source_RW, computed(target_NP))
    in_order = not layout.loop and layout.columns == source_RW.shape[1] * (1 if heads is None else 3)
    if loops is None or (isinstance(function, Rectified) and not in_order):
        given: dict[str, Any] = {"layout": layout, "terms": terms, "heads": heads}
        return edge_function.pull_source_gradients(function, tile, source_RW=source_RW, target_NP=target_NP, **given)
    tile = readable(tile, target_NP)
    out_RW = torch.empty_like(own, memory_format=torch.contiguous_format)
    walk, made = _walk(tile, target_NP, heads, Direction.OUT), Terms.of(terms, tile, target_NP)
    loops.source_gradients(function, walk, made, layout, array(own), array(target_NP), array(out_RW))
    return out_RW


@torch.no_grad()
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
) -> tuple[Tensor, Tensor | None]:
    """As ``edge_function.pull_target_gradients``; nothing is kept."""
    loops, dtype = _loops(function, tile, terms, heads), computed(source_NW)
    if loops is None:
        given: dict[str, Any] = {"upstream_R": upstream_R, "with_map": with_map, "terms": terms, "heads": heads}
        return edge_function.pull_target_gradients(function, tile, source_NW=source_NW, target_RV=target_RV, **given)
    tile = readable(tile, source_NW)
    gradient, statistics = typed(upstream_R.gradient, dtype), upstream_R.statistics
    statistics = gradient.new_empty(tile.rows, 0) if statistics is None else typed(statistics, dtype)
    own, maps = typed(target_RV, dtype), terms is not None and with_map
    out_RV = torch.empty_like(own, memory_format=torch.contiguous_format)
    map_RM = out_RV.new_empty(tile.rows, terms.map_columns if terms is not None and with_map else 0)
    walk, made = _walk(tile, source_NW, heads, Direction.IN), Terms.of(terms, tile, source_NW)
    above = array(gradient), array(statistics.reshape(tile.rows, -1))
    loops.target_gradients(function, walk, made, array(source_NW), array(own), *above, array(out_RV), array(map_RM))
    return out_RV, map_RM if maps else None
