# SPDX-License-Identifier: Apache-2.0
"""``ooc.kernels.edge_function``'s pulls as compiled loops. Shapes as there."""

from typing import Any

import torch
from torch import Tensor

from ooc.kernels.compiled import attention, dots, sums
from ooc.kernels.compiled.loops import Walk, array, computed
from ooc.kernels.compiled.terms import Terms, readable
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
    rows, heads, dtype = edges.tile.rows, edges.heads, computed(source_NW)
    out_RO = torch.empty(rows, columns, dtype=dtype)
    lse_RH = torch.empty(rows, 0 if heads is None else len(heads.heads), dtype=dtype)
    given = array(source_NW), array(typed(target_RV, dtype)), array(out_RO), array(lse_RH)
    LOOPS[type(edges.function)].messages(edges.function, *_opened(edges, source_NW, Direction.IN), *given)
    return out_RO, None if heads is None else lse_RH


@torch.no_grad()
def pull_source_gradients(edges: EdgeMessages, *, source_RW: Tensor, target_NP: Tensor, layout: TargetLayout) -> Tensor:
    """As ``edge_function.pull_source_gradients``; all is computed again."""
    own = typed(source_RW, computed(target_NP))
    out_RW = torch.empty_like(own, memory_format=torch.contiguous_format)
    given = layout, array(own), array(target_NP), array(out_RW)
    LOOPS[type(edges.function)].source_gradients(edges.function, *_opened(edges, target_NP, Direction.OUT), *given)
    return out_RW


@torch.no_grad()
def pull_target_gradients(
    edges: EdgeMessages, *, source_NW: Tensor, target_RV: Tensor, upstream_R: Upstream, with_map: bool = False
) -> tuple[Tensor, Tensor | None]:
    """As ``edge_function.pull_target_gradients``; nothing is kept."""
    rows, dtype, terms = edges.tile.rows, computed(source_NW), edges.terms if with_map else None
    gradient, statistics = typed(upstream_R.gradient, dtype), upstream_R.statistics
    statistics = gradient.new_empty(rows, 0) if statistics is None else typed(statistics, dtype)
    own = typed(target_RV, dtype)
    out_RV = torch.empty_like(own, memory_format=torch.contiguous_format)
    map_RM = out_RV.new_empty(rows, 0 if terms is None else terms.map_columns)
    matrices = source_NW, own, gradient, statistics.reshape(rows, -1), out_RV, map_RM
    opened = _opened(edges, source_NW, Direction.IN)
    LOOPS[type(edges.function)].target_gradients(edges.function, *opened, *map(array, matrices))
    return out_RV, None if terms is None else map_RM
