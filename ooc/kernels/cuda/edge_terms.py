# SPDX-License-Identifier: Apache-2.0
"""Terms of edges' features as a GPU's programs take them, and the features of added self-loops.

Shapes: R rows of the tile, E edges of it, K features, T columns of the term.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ooc.kernels.cuda import sums
from ooc.kernels.cuda.choice import Shape, power_of_two
from ooc.kernels.edge_terms import EdgeTerms, LoopFeatures
from ooc.kernels.edges import SelfLoops, TileEdges, rows_in_line

_NUMBERS_OF_A_THREAD = 8
"""Numbers of the map's gradient that a thread keeps in registers; with 16 the compiler spills some. Not yet tried on a
GPU."""


@dataclass(frozen=True, slots=True)
class Terms:
    """The arguments of programs for terms: features, those of self-loops, weight and bias of the map. ``mapped``: rows
    of the map with its bias, 0 without a map."""

    operands: tuple[Tensor, Tensor, Tensor, Tensor]
    mapped: int
    constants: dict[str, Any]

    @classmethod
    def of(cls, terms: EdgeTerms | None, tile: TileEdges, instead: Tensor) -> "Terms":
        """Return the terms of a tile's edges; ``instead`` is passed where nothing is read."""
        features = loops = weight = bias = instead
        count, has_map, has_bias = 0, False, False
        if terms is not None:
            assert tile.features_EK is not None
            features = loops = weight = bias = rows_in_line(tile.features_EK)
            count = features.shape[1]
            if terms.loop_RK is not None:
                loops = rows_in_line(terms.loop_RK)
            if terms.weight_KT is not None:
                has_map, has_bias = True, terms.bias_T is not None
                weight = terms.weight_KT.contiguous()
                bias = weight if terms.bias_T is None else terms.bias_T
        constants = {"FEATURES": count, "HAS_BIAS": has_bias}
        constants |= {"FEATURE_STRIDE": features.stride(0), "LOOP_STRIDE": loops.stride(0)}
        return cls((features, loops, weight, bias), count + has_bias if has_map else 0, constants)


def map_block(mapped: int, shape: Shape, columns: int) -> int:
    """Return how many rows of the map's gradient a program takes: all, or as many as registers hold."""
    most = _NUMBERS_OF_A_THREAD * 32 * shape.warps // (shape.rows * columns)
    return min(power_of_two(max(1, mapped)), max(1, most))


def loop_features(loops: LoopFeatures, tile: TileEdges, dtype: torch.dtype) -> Tensor:
    """Return [R, K]: for the rows of a tile of in-edges, the sum or mean over the edges from other rows."""
    assert tile.features_EK is not None and loops.constant_K is None
    features_EK, offsets = tile.features_EK.to(dtype), tile.offsets_here_R1.long()
    edges, place = len(features_EK), tile.indices_E.device
    own_E = torch.repeat_interleave(
        torch.arange(tile.start, tile.start + tile.rows, device=place), offsets.diff(), output_size=edges
    )
    is_other_E = (tile.indices_E != own_E).to(dtype)
    places_E = torch.arange(edges, device=place)
    own_edges = replace(tile, indices_E=places_E, nodes=edges, features_EK=None, self_loops=SelfLoops.AS_STORED)
    out_RK = sums.pull_tile(replace(own_edges, weight_E=is_other_E), features_EK)
    if not loops.is_mean:
        return out_RK
    count_R1 = sums.pull_tile(own_edges, is_other_E[:, None])
    return out_RK.div_(count_R1.clamp_(min=1))
