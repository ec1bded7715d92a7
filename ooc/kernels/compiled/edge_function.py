# SPDX-License-Identifier: Apache-2.0
"""``ooc.kernels.edge_function``'s pulls as compiled loops, for the functions that have some; torch's for the others."""

from typing import Any

import torch
from torch import Tensor

from ooc.kernels import edge_function
from ooc.kernels.compiled import attention, dots, sums
from ooc.kernels.edges import TileEdges
from ooc.kernels.functions import EdgeFunction, Gated, Gatv2, GatWithFeatures, Rectified, TransformerAttention

LOOPS: dict[type, Any] = {
    Gatv2: attention,
    GatWithFeatures: attention,
    Gated: sums,
    Rectified: sums,
    TransformerAttention: dots,
}
"""By the kind of function the module of its loops, which names them as ``edge_function`` does."""


def _loops(function: EdgeFunction, pulled: Tensor) -> Any:
    return LOOPS.get(type(function), edge_function) if pulled.dtype != torch.bfloat16 else edge_function


def pull_messages(
    function: EdgeFunction, tile: TileEdges, *, source_NW: Tensor, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """As ``edge_function.pull_messages``."""
    messages, lse = _loops(function, source_NW).pull_messages(function, tile, source_NW=source_NW, **options)
    return messages, lse


def pull_source_gradients(function: EdgeFunction, tile: TileEdges, *, target_NP: Tensor, **options: Any) -> Tensor:
    """As ``edge_function.pull_source_gradients``."""
    gradient: Tensor = _loops(function, target_NP).pull_source_gradients(function, tile, target_NP=target_NP, **options)
    return gradient


def pull_target_gradients(
    function: EdgeFunction, tile: TileEdges, *, source_NW: Tensor, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """As ``edge_function.pull_target_gradients``."""
    rows, of_map = _loops(function, source_NW).pull_target_gradients(function, tile, source_NW=source_NW, **options)
    return rows, of_map
