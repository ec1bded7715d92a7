# SPDX-License-Identifier: Apache-2.0
"""Which kernels pull the rows that a tensor has: those of the device where it is.

Sums, attention, maxima and edge functions, with one signature on all devices. What comes between forward and backward
is plain torch and the same everywhere (``maximum.upstream``, ``edge_function.upstream``) but for GAT's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from ooc.train import aggregate
from ooc.train.kernels import edge_function, gat, maximum
from ooc.train.kernels.edge_function import EdgeFunction, Heads, Reduced, RowGradient, TargetLayout, Upstream
from ooc.train.kernels.edge_terms import EdgeTerms, LoopFeatures
from ooc.train.kernels.edges import TileEdges
from ooc.train.kernels.gat import GatHeads


class Sums(Protocol):
    """``aggregate.pull_tile``."""

    def __call__(
        self, tile: TileEdges, source_NW: Tensor, *, has_loops: bool = True, out: Tensor | None = None
    ) -> Tensor: ...


class Attend(Protocol):
    """``gat.attend``."""

    def __call__(
        self, gat: GatHeads, tile: TileEdges, *, source_NS: Tensor, a_dst_RG: Tensor, keep: bool
    ) -> Tensor: ...


class AttendUpstream(Protocol):
    """``gat.upstream``."""

    def __call__(self, dz_RW: Tensor, kept_RK: Tensor, a_dst_RG: Tensor) -> tuple[Tensor, Tensor]: ...


class AttendSources(Protocol):
    """``gat.pull_sources``."""

    def __call__(self, gat: GatHeads, tile: TileEdges, *, target_NS: Tensor, source_RS: Tensor) -> Tensor: ...


class Maxima(Protocol):
    """``maximum.pull_maxima``."""

    def __call__(self, tile: TileEdges, source_NW: Tensor, *, keep: bool) -> Tensor: ...


class MaximaSources(Protocol):
    """``maximum.pull_sources``."""

    def __call__(self, tile: TileEdges, *, target_NK: Tensor, source_RW: Tensor) -> Tensor: ...


class Messages(Protocol):
    """``edge_function.pull_messages``."""

    def __call__(
        self,
        function: EdgeFunction,
        tile: TileEdges,
        *,
        source_NW: Tensor,
        target_RV: Tensor,
        columns: int,
        terms: EdgeTerms | None = None,
        heads: Heads | None = None,
    ) -> Reduced: ...


class MessageSources(Protocol):
    """``edge_function.pull_source_gradients``."""

    def __call__(
        self,
        function: EdgeFunction,
        tile: TileEdges,
        *,
        source_RW: Tensor,
        target_NP: Tensor,
        layout: TargetLayout,
        with_parameters: bool,
        terms: EdgeTerms | None = None,
        heads: Heads | None = None,
    ) -> RowGradient: ...


class MessageTargets(Protocol):
    """``edge_function.pull_target_gradients``."""

    def __call__(
        self,
        function: EdgeFunction,
        tile: TileEdges,
        *,
        source_NW: Tensor,
        target_RV: Tensor,
        upstream_R: Upstream,
        with_parameters: bool,
        with_map: bool = False,
        terms: EdgeTerms | None = None,
        heads: Heads | None = None,
    ) -> RowGradient: ...


class Loops(Protocol):
    """Features of added self-loops that are made of those of other edges [R, K]."""

    def __call__(self, loops: LoopFeatures, tile: TileEdges, dtype: torch.dtype) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Pulls:
    """What a kind of device pulls with."""

    sums: Sums
    attend: Attend
    attend_upstream: AttendUpstream
    attend_sources: AttendSources
    maxima: Maxima
    maxima_sources: MaximaSources
    messages: Messages
    message_sources: MessageSources
    message_targets: MessageTargets
    loops: Loops


def _loops_on_cpu(loops: LoopFeatures, tile: TileEdges, dtype: torch.dtype) -> Tensor:
    return loops.of(tile, dtype, edge_function.EDGES_PER_PIECE)


_CPU = Pulls(
    aggregate.pull_tile,
    gat.attend,
    gat.upstream,
    gat.pull_sources,
    maximum.pull_maxima,
    maximum.pull_sources,
    edge_function.pull_messages,
    edge_function.pull_source_gradients,
    edge_function.pull_target_gradients,
    _loops_on_cpu,
)


@cache
def _of_cuda() -> Pulls:
    from ooc.train.kernels.cuda import edge_function, edge_terms, gat, maximum, sums  # need triton

    return Pulls(
        sums.pull_tile,
        gat.attend,
        gat.upstream,
        gat.pull_sources,
        maximum.pull_maxima,
        maximum.pull_sources,
        edge_function.pull_messages,
        edge_function.pull_source_gradients,
        edge_function.pull_target_gradients,
        edge_terms.loop_features,
    )


BY_DEVICE: dict[str, Callable[[], Pulls]] = {"cpu": lambda: _CPU, "cuda": _of_cuda}
"""By torch's name of a kind of device."""


def pulls_for(source: Tensor) -> Pulls:
    """Those that take rows of ``source`` where it is."""
    return BY_DEVICE[source.device.type]()
