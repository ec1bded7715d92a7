# SPDX-License-Identifier: Apache-2.0
"""Terms of edges' features as programs on a GPU take them, and the features of added self-loops.

Shapes: R rows of the tile, E edges of it, K features, T columns of the term.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ooc.kernels.cuda import sums
from ooc.kernels.cuda.launch import rows_in_line
from ooc.kernels.cuda.segments import cut
from ooc.kernels.cuda.shapes import Shape, power_of_two
from ooc.kernels.edge_terms import EdgeTerms, Filling, LoopFeatures
from ooc.kernels.edges import TileEdges

_NUMBERS_OF_A_THREAD = 8
"""Of the map's gradient that a thread keeps in registers: with 16 the compiler spills some. Never tried on a GPU."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Matrices that a program reads, others in place of those that there are not. ``mapped``: rows of the map with that
    of its bias."""

    features: Tensor
    loops: Tensor
    weight: Tensor
    bias: Tensor
    count: int
    has_bias: bool
    mapped: int

    @classmethod
    def of(cls, terms: EdgeTerms | None, tile: TileEdges, instead: Tensor) -> "Terms":
        """Those of a tile's edges; ``instead`` stands where nothing is read."""
        if terms is None:
            return cls(instead, instead, instead, instead, 0, False, 0)
        assert tile.features_EK is not None
        features = rows_in_line(tile.features_EK)
        loops = features if terms.loop_RK is None else rows_in_line(terms.loop_RK)
        count = features.shape[1]
        if terms.weight_KT is None:
            return cls(features, loops, features, features, count, False, 0)
        weight, bias = terms.weight_KT.contiguous(), terms.bias_T
        has_bias = bias is not None
        return cls(features, loops, weight, weight if bias is None else bias, count, has_bias, count + has_bias)

    @property
    def operands(self) -> tuple[Tensor, ...]:
        return self.features, self.loops, self.weight, self.bias

    @property
    def constants(self) -> dict[str, Any]:
        return self.stored_constants | {"LOOP_STRIDE": self.loops.stride(0)}

    @property
    def stored_operands(self) -> tuple[Tensor, ...]:
        """Where there are no added self-loops."""
        return self.features, self.weight, self.bias

    @property
    def stored_constants(self) -> dict[str, Any]:
        return {"FEATURES": self.count, "FEATURE_STRIDE": self.features.stride(0), "HAS_BIAS": self.has_bias}


def map_block(mapped: int, shape: Shape, columns: int) -> int:
    """Rows of the map's gradient of a program: as many as there are, or as registers hold."""
    most = _NUMBERS_OF_A_THREAD * 32 * shape.warps // (shape.rows * columns)
    return min(power_of_two(max(1, mapped)), max(1, most))


def loop_features(loops: LoopFeatures, tile: TileEdges, dtype: torch.dtype) -> Tensor:
    """[R, K]: of the rows of a tile of in-edges, the sum or mean over the edges from other rows."""
    assert tile.features_EK is not None and loops.filling is not Filling.CONSTANT
    features_EK, offsets = tile.features_EK.to(dtype), tile.offsets_R1.long()
    edges, place = len(features_EK), tile.indices_E.device
    own_E = torch.repeat_interleave(
        torch.arange(tile.start, tile.start + tile.rows, device=place), offsets.diff(), output_size=edges
    )
    is_other_E = (tile.indices_E != own_E).to(dtype)
    own_edges = TileEdges(torch.arange(edges, device=place), offsets, tile.start, edges)
    segments = cut(tile)
    out_RK = sums.pull_tile(replace(own_edges, weight_E=is_other_E), features_EK, segments=segments)
    if loops.filling is Filling.SUM:
        return out_RK
    count_R1 = sums.pull_tile(own_edges, is_other_E[:, None], segments=segments)
    return out_RK.div_(count_R1.clamp_(min=1))
