# SPDX-License-Identifier: Apache-2.0
"""Terms of edges' features as compiled loops read them (``EdgeTerms``: a linear map of features, or the features
themselves), and the features of added self-loops.

K features of an edge, followed by 1 if the map has a bias; T columns of a term.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ooc.kernels.compiled.lanes import TOGETHER
from ooc.kernels.compiled.loops import EDGES, Walk, array, compiled, computed, part
from ooc.kernels.edge_terms import EDGES_PER_PIECE, EdgeTerms, LoopFeatures
from ooc.kernels.edges import TileEdges

FEATURES = (torch.float32, torch.float64)
"""The types of edges' features that loops read; others are converted."""


class Terms(NamedTuple):
    """The features that terms are made of. ``are_there``: there are any: ``stored_EK`` for the tile's edges, and
    ``loop_RK`` for added self-loops. ``weight_KT``: the map, whose last row may be a bias, for ``groups`` groups;
    without it, terms are the features from ``first`` on. ``feature_KE``: those of the edges taken now."""

    are_there: bool
    first: int
    groups: int
    stored_EK: Any
    loop_RK: Any
    weight_KT: Any
    feature_KE: Any

    @classmethod
    def of(cls, terms: EdgeTerms | None, tile: TileEdges, pulled: Tensor) -> "Terms":
        none = pulled.new_empty(0, 0, dtype=computed(pulled))
        stored, loops, weight, groups = none, none, none, range(0)
        if terms is not None and tile.features_EK is not None:
            stored, groups = tile.features_EK, terms.groups
            loops = none if terms.loop_RK is None else terms.loop_RK
            weight = none if terms.weight_KT is None else terms.weight_KT
            if terms.bias_T is not None:
                weight = torch.cat((weight, terms.bias_T[None]))
        feature_KE = np.zeros((len(weight) + -len(weight) % TOGETHER, EDGES), array(none).dtype)
        numbers = terms is not None, groups.start, len(groups)
        return cls(*numbers, array(stored), array(loops), array(weight), feature_KE)


def readable(tile: TileEdges, pulled: Tensor) -> TileEdges:
    """Return the tile with features of edges in a type that loops read, or in the compute type."""
    if tile.features_EK is None or tile.features_EK.dtype in FEATURES:
        return tile
    return replace(tile, features_EK=tile.features_EK.to(computed(pulled)))


@part
def read(terms, walk, count):
    """Read the features of the edges taken now, feature by feature."""
    edges, stored = terms.stored_EK.shape
    for feature in range(len(terms.weight_KT)):
        for edge in range(count):
            place = walk.place_E[edge]
            if feature >= stored:
                terms.feature_KE[feature, edge] = 1
            elif place < edges:
                terms.feature_KE[feature, edge] = terms.stored_EK[place, feature]
            else:
                terms.feature_KE[feature, edge] = terms.loop_RK[place - edges, feature]


def loop_features(loops: LoopFeatures, tile: TileEdges, dtype: torch.dtype) -> Tensor:
    """As ``LoopFeatures.of``, with the same bits; stored edges from a row to itself do not count, even if infinite."""
    assert tile.features_EK is not None
    out_RK = torch.empty(tile.rows, tile.features_EK.shape[1], dtype=dtype)
    tile = readable(tile, out_RK)
    assert tile.features_EK is not None
    out, sum_K = array(out_RK), np.empty(out_RK.shape[1], array(out_RK).dtype)
    _loop_features(Walk.over(tile, out_RK), array(tile.features_EK), loops.is_mean, sum_K, out)
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
