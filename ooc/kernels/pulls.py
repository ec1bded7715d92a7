# SPDX-License-Identifier: Apache-2.0
"""Which kernels pull a tensor's rows: those of the device it is on.

Sums, attention, maxima and edge functions have one signature on all devices. The steps between forward and backward are
plain torch and the same everywhere (``maximum.upstream``, ``edge_function.upstream``), except for GAT's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ooc.kernels import aggregate, edge_function, gat, maximum
from ooc.kernels.edge_terms import LoopFeatures
from ooc.kernels.edges import TileEdges


@dataclass(frozen=True, slots=True)
class Pulls:
    """The pulls of one kind of device, each with the signature of the CPU's function. ``loops``: features of added
    self-loops that are made of other edges' features [R, K]."""

    sums: Callable[..., Tensor]
    attend: Callable[..., Tensor]
    attend_upstream: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    attend_sources: Callable[..., Tensor]
    maxima: Callable[..., Tensor]
    maxima_sources: Callable[..., Tensor]
    messages: Callable[..., tuple[Tensor, Tensor | None]]
    message_sources: Callable[..., Tensor]
    message_targets: Callable[..., tuple[Tensor, Tensor | None]]
    loops: Callable[[LoopFeatures, TileEdges, torch.dtype], Tensor]


def _of(sums: Callable[..., Tensor], gat: Any, maximum: Any, edge_function: Any, loops: Callable[..., Tensor]) -> Pulls:
    """Return the pulls of modules that use the same names."""
    return Pulls(
        sums,
        *(gat.attend, gat.upstream, gat.pull_sources),
        *(maximum.pull_maxima, maximum.pull_sources),
        *(edge_function.pull_messages, edge_function.pull_source_gradients, edge_function.pull_target_gradients),
        loops,
    )


def of_torch() -> Pulls:
    """Return the pulls made of torch's operators."""
    return _of(aggregate.pull_tile, gat, maximum, edge_function, LoopFeatures.of)


@cache
def _of_cpu() -> Pulls:
    try:
        from ooc.kernels.compiled import edge_function as functions  # need numba
        from ooc.kernels.compiled import gat as attention
        from ooc.kernels.compiled import maximum as maxima
        from ooc.kernels.compiled import neighbour_sums
        from ooc.kernels.compiled.terms import loop_features
    except ImportError:
        return of_torch()
    return _of(neighbour_sums.pull_tile, attention, maxima, functions, loop_features)


@cache
def _of_cuda() -> Pulls:
    from ooc.kernels.cuda import edge_function, edge_terms, gat, maximum, sums  # need triton

    return _of(sums.pull_tile, gat, maximum, edge_function, edge_terms.loop_features)


BY_DEVICE: dict[str, Callable[[], Pulls]] = {"cpu": _of_cpu, "cuda": _of_cuda}
"""The pulls of each kind of device, by torch's name of it."""


def are_compiled() -> bool:
    """Whether the CPU's pulls of edges are compiled loops, which make nothing for an edge."""
    return BY_DEVICE["cpu"]() != of_torch()


def rehearse(columns: int, dtype: torch.dtype) -> None:
    """Sum a row without edges, so that the loop for this many columns, if there is one, is compiled before it is
    timed."""
    tile = TileEdges(torch.zeros(0, dtype=torch.int32), torch.zeros(2, dtype=torch.int32), 0, 1)
    source = torch.zeros(1, columns, dtype=dtype)
    pulls_for(source).sums(tile, source)


def pulls_for(source: Tensor) -> Pulls:
    """Return the pulls for rows of ``source`` where it is."""
    return BY_DEVICE[source.device.type]()
