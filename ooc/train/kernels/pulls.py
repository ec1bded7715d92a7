# SPDX-License-Identifier: Apache-2.0
"""Which kernels pull the rows that a tensor has: those of the device where it is.

Attention and maxima, with one signature on all devices. What comes between forward and backward is plain torch and the
same everywhere (``gat.upstream``, ``maximum.upstream``); plain sums choose for themselves (``ooc.train.aggregate``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ooc.train.kernels import gat, maximum
from ooc.train.kernels.edges import TileEdges
from ooc.train.kernels.gat import GatHeads


class Attend(Protocol):
    """``gat.attend``."""

    def __call__(
        self, gat: GatHeads, tile: TileEdges, *, source_NS: Tensor, a_dst_RH: Tensor, keep: bool
    ) -> Tensor: ...


class AttendSources(Protocol):
    """``gat.pull_sources``."""

    def __call__(self, gat: GatHeads, tile: TileEdges, *, target_NS: Tensor, source_RS: Tensor) -> Tensor: ...


class Maxima(Protocol):
    """``maximum.pull_maxima``."""

    def __call__(self, tile: TileEdges, source_NW: Tensor, *, keep: bool) -> Tensor: ...


class MaximaSources(Protocol):
    """``maximum.pull_sources``."""

    def __call__(self, tile: TileEdges, *, target_NK: Tensor, source_RW: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Pulls:
    """What a kind of device pulls with, beside plain sums."""

    attend: Attend
    attend_sources: AttendSources
    maxima: Maxima
    maxima_sources: MaximaSources


_CPU = Pulls(gat.attend, gat.pull_sources, maximum.pull_maxima, maximum.pull_sources)


def _of_cuda() -> Pulls:
    from ooc.train.kernels.cuda import gat, maximum  # need triton

    return Pulls(gat.attend, gat.pull_sources, maximum.pull_maxima, maximum.pull_sources)


BY_DEVICE: dict[str, Callable[[], Pulls]] = {"cpu": lambda: _CPU, "cuda": _of_cuda}
"""By torch's name of a kind of device."""


def pulls_for(source: Tensor) -> Pulls:
    """Those that take rows of ``source`` where it is."""
    return BY_DEVICE[source.device.type]()
