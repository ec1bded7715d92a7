# SPDX-License-Identifier: Apache-2.0
"""The features of added self-loops as a compiled loop. Shapes as in ``ooc.kernels.edge_terms``."""

import numpy as np
import torch
from torch import Tensor

from ooc.kernels.compiled.loops import Walk, array, compiled
from ooc.kernels.compiled.terms import readable
from ooc.kernels.edge_terms import EDGES_PER_PIECE, Filling, LoopFeatures
from ooc.kernels.edges import TileEdges


def loop_features(loops: LoopFeatures, tile: TileEdges, dtype: torch.dtype) -> Tensor:
    """As ``LoopFeatures.of``, with the same bits; what edges from a row to itself carry has no part, be it infinite."""
    assert tile.features_EK is not None
    out_RK = torch.empty(tile.rows, tile.features_EK.shape[1], dtype=dtype)
    tile = readable(tile, out_RK)
    assert tile.features_EK is not None
    out, sum_K = array(out_RK), np.empty(out_RK.shape[1], array(out_RK).dtype)
    _loop_features(Walk.over(tile, out_RK), array(tile.features_EK), loops.filling is Filling.MEAN, sum_K, out)
    return out_RK


@compiled
def _loop_features(walk, features_EK, is_mean, sum_K, out_RK):
    dtype, features = out_RK.dtype, len(sum_K)
    for row in range(len(out_RK)):
        first, others = walk.offsets_R1[row], 0
        for feature in range(features):
            out_RK[row, feature], sum_K[feature] = 0, 0
        for edge in range(first, walk.offsets_R1[row + 1]):
            if edge > first and (edge - first) % EDGES_PER_PIECE == 0:
                for feature in range(features):
                    out_RK[row, feature] += sum_K[feature]
                    sum_K[feature] = 0
            if walk.indices_E[edge] != walk.start + row:
                others += 1
                for feature in range(features):
                    sum_K[feature] += dtype.type(features_EK[edge, feature])
        count = dtype.type(max(others, 1) if is_mean else 1)
        for feature in range(features):
            out_RK[row, feature] = (out_RK[row, feature] + sum_K[feature]) / count
