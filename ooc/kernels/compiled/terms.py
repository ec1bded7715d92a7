# SPDX-License-Identifier: Apache-2.0
"""What features of edges add, as compiled loops read them: ``EdgeTerms``, a linear map of features or themselves.

K features of an edge, behind them 1 where the map has a bias; T columns of a term.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ooc.kernels.compiled.lanes import TOGETHER
from ooc.kernels.compiled.loops import EDGES, array, computed, part
from ooc.kernels.edge_terms import EdgeTerms
from ooc.kernels.edges import TileEdges

FEATURES = (torch.float32, torch.float64)
"""Types of edges' features that loops read; others are converted."""


class Terms(NamedTuple):
    """``are_there``: of ``stored_EK``, features of the tile's edges, and ``loop_RK``, of added self-loops; they are
    made by ``weight_KT``, whose last row may be a bias, for so many ``groups``, or without one are the features from
    ``first`` on. ``feature_KE``: those of the edges that there are at a time."""

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
    """The tile with features of edges in a type that loops read, or in that which is computed in."""
    if tile.features_EK is None or tile.features_EK.dtype in FEATURES:
        return tile
    return replace(tile, features_EK=tile.features_EK.to(computed(pulled)))


@part
def read(terms, walk, count):
    """Have the features of the edges that there are, of which terms are made, feature by feature."""
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
