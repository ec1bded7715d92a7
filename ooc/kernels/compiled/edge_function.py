# SPDX-License-Identifier: Apache-2.0
"""``ooc.kernels.edge_function``'s pulls as compiled loops, for the functions that have some; torch's for the others."""

from typing import Any

import torch
from torch import Tensor

from ooc.kernels import edge_function
from ooc.kernels.compiled import attention, dots, sums
from ooc.kernels.compiled.loops import Walk, array, computed
from ooc.kernels.compiled.terms import Terms, are_there, readable
from ooc.kernels.edge_function import EdgeMessages, TargetLayout, Upstream
from ooc.kernels.functions import Gatv2, GatWithFeatures, Product, Rectified, TransformerAttention
from ooc.kernels.tensors import typed
from ooc.plan.workload import Direction

LOOPS: dict[type, Any] = {
    Gatv2: attention,
    GatWithFeatures: attention,
    Product: sums,
    Rectified: sums,
    TransformerAttention: dots,
}
"""By the kind of function the module of its loops: of messages, gradients of sources and gradients of targets."""


def _loops(edges: EdgeMessages) -> Any:
    """None where there are none for such terms, or for a function that is given no heads or others' dropout."""
    function, terms, heads = edges.function, edges.terms, edges.heads
    loops = LOOPS.get(type(function))
    is_sum = loops is sums and (heads is None or heads.dropout is None)
    is_made = terms is None or terms.weight_KT is not None or isinstance(function, Rectified)
    is_given = is_sum or (loops is not sums and heads is not None)
    return loops if is_given and is_made and are_there(terms, edges.tile) else None


def _opened(edges: EdgeMessages, pulled: Tensor, direction: Direction) -> tuple[Walk, Terms]:
    """The edges as loops that pull these rows go over them, and their terms."""
    tile, heads = readable(edges.tile, pulled), edges.heads
    given = () if heads is None else (heads.heads, heads.dropout, direction)
    return Walk.over(tile, pulled, *given), Terms.of(edges.terms, tile, pulled)


@torch.no_grad()
def pull_messages(
    edges: EdgeMessages, *, source_NW: Tensor, target_RV: Tensor, columns: int
) -> tuple[Tensor, Tensor | None]:
    """As ``edge_function.pull_messages``."""
    loops, dtype = _loops(edges), computed(source_NW)
    if loops is None:
        return edge_function.pull_messages(edges, source_NW=source_NW, target_RV=target_RV, columns=columns)
    rows, heads = edges.tile.rows, edges.heads
    out_RO = torch.empty(rows, columns, dtype=dtype)
    lse_RH = torch.empty(rows, 0 if heads is None else len(heads.heads), dtype=dtype)
    given = array(source_NW), array(typed(target_RV, dtype)), array(out_RO), array(lse_RH)
    loops.messages(edges.function, *_opened(edges, source_NW, Direction.IN), *given)
    return out_RO, None if heads is None else lse_RH


@torch.no_grad()
def pull_source_gradients(edges: EdgeMessages, *, source_RW: Tensor, target_NP: Tensor, layout: TargetLayout) -> Tensor:
    """As ``edge_function.pull_source_gradients``; all is computed again."""
    loops, own = _loops(edges), typed(source_RW, computed(target_NP))
    in_order = not layout.loop and layout.columns == source_RW.shape[1] * (1 if edges.heads is None else 3)
    if loops is None or (isinstance(edges.function, Rectified) and not in_order):
        return edge_function.pull_source_gradients(edges, source_RW=source_RW, target_NP=target_NP, layout=layout)
    out_RW = torch.empty_like(own, memory_format=torch.contiguous_format)
    opened = _opened(edges, target_NP, Direction.OUT)
    loops.source_gradients(edges.function, *opened, layout, array(own), array(target_NP), array(out_RW))
    return out_RW


@torch.no_grad()
def pull_target_gradients(
    edges: EdgeMessages, *, source_NW: Tensor, target_RV: Tensor, upstream_R: Upstream, with_map: bool = False
) -> tuple[Tensor, Tensor | None]:
    """As ``edge_function.pull_target_gradients``; nothing is kept."""
    loops, dtype, terms = _loops(edges), computed(source_NW), edges.terms if with_map else None
    if loops is None:
        given: dict[str, Any] = {"upstream_R": upstream_R, "with_map": with_map}
        return edge_function.pull_target_gradients(edges, source_NW=source_NW, target_RV=target_RV, **given)
    rows, gradient, statistics = edges.tile.rows, typed(upstream_R.gradient, dtype), upstream_R.statistics
    statistics = gradient.new_empty(rows, 0) if statistics is None else typed(statistics, dtype)
    own = typed(target_RV, dtype)
    out_RV = torch.empty_like(own, memory_format=torch.contiguous_format)
    map_RM = out_RV.new_empty(rows, 0 if terms is None else terms.map_columns)
    matrices = source_NW, own, gradient, statistics.reshape(rows, -1), out_RV, map_RM
    loops.target_gradients(edges.function, *_opened(edges, source_NW, Direction.IN), *map(array, matrices))
    return out_RV, None if terms is None else map_RM
