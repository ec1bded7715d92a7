# SPDX-License-Identifier: Apache-2.0
"""What the features of edges add to messages and scores: a linear map of them, t = f Wᵀ + b, or the features
themselves.

The map is summed feature after feature by ``embedding_bag``, as rows are pulled. So an edge's term has the same bits
whatever edges and columns are computed with it, which a dense product does not guarantee. Its gradient is likewise
summed row by row, Σ_e dt_e f_e over a row's edges, and only then over rows.

Added self-loops have features, too, which PyG fills in: a constant, or the sum or mean over the other edges into the
row. Over in-edges a tile knows these; over out-edges rows bring them along.

Shapes: R rows of the tile, E edges of a piece, K features, T columns of the term, those of G groups.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ooc.kernels.edges import Piece, SelfLoops, TileEdges, pieces, rows_in_line
from ooc.kernels.tensors import pull

EDGES_PER_PIECE = 4096
"""Edges of a piece: several matrices of a message's width are made for them, and should stay in the cache."""


@dataclass(frozen=True, slots=True)
class LoopFeatures:
    """The features of added self-loops: ``constant_K``, or (None) the sum or mean of the other edges' features."""

    constant_K: Tensor | None = None
    is_mean: bool = False

    def of(self, tile: TileEdges, dtype: torch.dtype) -> Tensor:
        """Return [R, K] for the rows of a tile of in-edges, if they are made of other edges' features."""
        assert tile.features_EK is not None
        out_RK = torch.zeros(tile.rows, tile.features_EK.shape[1], dtype=dtype)
        count_R1 = torch.zeros(tile.rows, 1, dtype=dtype)
        stored = replace(tile, self_loops=SelfLoops.AS_STORED, edges_per_piece=EDGES_PER_PIECE)
        for piece in pieces(stored, tile.nodes):
            own_E = piece.row_E + (piece.tile_start + piece.start)
            other_E1 = (piece.neighbours_E != own_E).to(dtype)[:, None]
            out_RK[piece.rows] += piece.sums(tile.features_EK[piece.positions_E].to(dtype) * other_E1)
            count_R1[piece.rows] += piece.sums(other_E1)
        return out_RK / count_R1.clamp_(min=1) if self.is_mean else out_RK


@dataclass(frozen=True, slots=True)
class EdgeTerms:
    """The terms of a slab's groups. ``weight_KT``, ``bias_T``: the linear map; without it, the term is the features'
    columns of these groups. ``loop_RK``: the features of the tile's added self-loops."""

    groups: range
    dtype: torch.dtype
    weight_KT: Tensor | None = None
    bias_T: Tensor | None = None
    loop_RK: Tensor | None = None

    @property
    def map_columns(self) -> int:
        """The columns of the map's gradient."""
        if self.weight_KT is None:
            return 0
        return self.weight_KT.numel() + (0 if self.bias_T is None else self.bias_T.numel())

    def features(self, tile: TileEdges, piece: Piece) -> Tensor:
        """Return [E, K] in the compute dtype."""
        stored_EK, positions = tile.features_EK, piece.positions_E
        assert stored_EK is not None
        if self.loop_RK is None or isinstance(positions, slice):
            return stored_EK[positions].to(self.dtype)
        is_loop_E = positions >= len(stored_EK)
        features_EK = torch.empty(piece.edges, stored_EK.shape[1], dtype=self.dtype)
        features_EK[~is_loop_E] = stored_EK[positions[~is_loop_E]].to(self.dtype)
        features_EK[is_loop_E] = self.loop_RK[positions[is_loop_E] - len(stored_EK)]
        return features_EK

    def make(self, features_EK: Tensor) -> Tensor:
        """Return the terms [E, T]."""
        if self.weight_KT is None:
            return features_EK[:, self.groups.start : self.groups.stop].contiguous()
        edges, count = features_EK.shape
        numbers = torch.arange(count, dtype=torch.int32).repeat(edges)
        offsets = torch.arange(0, edges * count + 1, count, dtype=torch.int32)
        term_ET = pull(rows_in_line(self.weight_KT), numbers, offsets, features_EK.reshape(-1))
        return term_ET if self.bias_T is None else term_ET.add_(self.bias_T)

    def add_map_gradient(self, piece: Piece, features_EK: Tensor, gradient_ET: Tensor, into_RM: Tensor) -> None:
        """Add the gradient of the map from the piece's edges, by row: for every group the weight's K rows and the bias,
        if there is one [R, G · (K + 1) · T/G]."""
        weights: list[Tensor | None] = [weight_E.contiguous() for weight_E in features_EK.unbind(1)]
        weights += [] if self.bias_T is None else [None]
        into_PGKT = into_RM[piece.rows].view(piece.stop - piece.start, len(self.groups), len(weights), -1)
        for weight_E, into_PGT in zip(weights, into_PGKT.unbind(2), strict=True):
            into_PGT += piece.sums(gradient_ET, weight_E).view_as(into_PGT)
