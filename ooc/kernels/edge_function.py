# SPDX-License-Identifier: Apache-2.0
"""Any message and score per edge: gathered, computed as the user's torch code, and differentiated edge by edge.

An ``EdgeFunction`` says what one edge gives, from the source's row, the target's row and a term made of the edge's own
features (``edge_terms``). A target sums that over its edges or, where there are heads, weights it by the softmax of the
edges' scores, head by head. Forward, targets pull sources.
Backward, every edge is computed again where its gradient is wanted: over out-edges for what belongs to sources, over
in-edges for what belongs to targets. What flows back to an edge is known without the others:

    sum       dm_e = dZ_i                                      a mean is a sum whose rows are scaled
    softmax   dm_e = α_e k_e dZ_i,   ds_e = α_e (k_e dZ_i · m_e - D_i),   α_e = exp(s_e - lse_i)

for message m, score s, dropout's scale k and D_i = dZ_i · Z_i; what lies between rows and (m, s) is autograd's.

Shapes: N rows of a pulled matrix, R rows of the tile, E edges of a piece, W/V/T columns of sources, targets and
edges' terms, O = H·C columns of messages, head after head where there are heads.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ooc.kernels import dot_attention
from ooc.kernels.bags import RunningSoftmax
from ooc.kernels.dropout.edges import EdgeDropout
from ooc.kernels.edge_terms import EDGES_PER_PIECE as EDGES_PER_PIECE
from ooc.kernels.edge_terms import EdgeTerms
from ooc.kernels.edges import Piece, TileEdges, pieces
from ooc.kernels.functions import TransformerAttention
from ooc.kernels.tensors import gradients_of
from ooc.plan.workload import Direction

EdgeFunction = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor | None]]
"""From rows of sources [E, W] and targets [E, V] and terms [E, T] to messages [E, O] and, where these are weighted by a
softmax, scores [E, H]: rows independent of one another, nothing drawn at random, inputs not written to.

An edge's message has the same bits however many edges are computed with it, which elementwise operators promise and
dense products do not."""


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads computed, by their numbers among all of the layer, and what drops their coefficients."""

    heads: range
    dropout: EdgeDropout | None = None


@dataclass(frozen=True, slots=True)
class Upstream:
    """The gradient of targets' rows as the backward pass reads it, of the tile's rows or of all N.

    ``gradient``: dZ [·, O]. ``statistics``: lse and D of every head [·, H·2]; ``None`` for a sum. :func:`upstream`
    makes it of a tile's rows.
    """

    gradient: Tensor
    statistics: Tensor | None

    def select(self, index_E: Tensor) -> "Upstream":
        statistics = None if self.statistics is None else self.statistics.index_select(0, index_E)
        return Upstream(self.gradient.index_select(0, index_E), statistics)


@dataclass(frozen=True, slots=True)
class TargetLayout:
    """What sources pull of a target, group after group (heads; one group where there are none): its own row, the
    gradient, and the statistics, of so many columns a group. ``statistics`` is 0 for a sum. ``loop``: the features of
    the row's added self-loop, if there is one, which every group has."""

    groups: int
    target: int
    message: int
    statistics: int
    loop: int = 0

    @property
    def columns(self) -> int:
        return self.groups * (self.target + self.message + self.statistics + self.loop)

    def pack(self, target_RV: Tensor, upstream_R: Upstream, loop_RK: Tensor | None = None) -> Tensor:
        """[R, columns]."""
        parts = [(target_RV, self.target), (upstream_R.gradient, self.message)]
        if upstream_R.statistics is not None:
            parts.append((upstream_R.statistics, self.statistics))
        by_group = [part.reshape(len(part), self.groups, columns) for part, columns in parts]
        if loop_RK is not None:
            by_group.append(loop_RK[:, None].expand(-1, self.groups, -1))
        return torch.cat(by_group, dim=2).view(len(target_RV), -1)

    def unpack(self, packed: Tensor) -> tuple[Tensor, Upstream]:
        """What was packed."""
        by_group = packed.view(len(packed), self.groups, -1)

        def part(first: int, columns: int) -> Tensor:
            return by_group[:, :, first : first + columns].reshape(len(packed), self.groups * columns)

        gradient = part(self.target, self.message)
        statistics = part(self.target + self.message, self.statistics) if self.statistics else None
        return part(0, self.target), Upstream(gradient, statistics)

    def loops(self, packed: Tensor) -> Tensor | None:
        """The features of the rows' added self-loops that were packed [R, loop]."""
        if not self.loop:
            return None
        return packed.view(len(packed), self.groups, self.columns // self.groups)[:, 0, -self.loop :]


def pull_messages(
    function: EdgeFunction,
    tile: TileEdges,
    *,
    source_NW: Tensor,
    target_RV: Tensor,
    columns: int,
    terms: EdgeTerms | None = None,
    heads: Heads | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Forward: targets pull sources over in-edges → what they make of their edges [R, O = ``columns``], and what the
    backward pass needs of it beside dZ: lse [R, H], or nothing. ``terms`` of the tile's edges, ``heads`` of a softmax.
    """
    if heads is not None and is_dot_product(function, terms):
        return dot_attention.attend(tile, heads.heads, heads.dropout, source_NS=source_NW, query_RV=target_RV)
    out_RO = source_NW.new_zeros(tile.rows, columns)
    softmax = None
    if heads is not None:
        out_RHC = out_RO.view(tile.rows, len(heads.heads), -1)
        softmax = RunningSoftmax(tile.rows, len(heads.heads), source_NW, [out_RHC])
    for piece in pieces(tile, len(source_NW), EDGES_PER_PIECE):
        source_EW = source_NW.index_select(0, piece.neighbours_E)
        target_EV = target_RV[piece.rows].index_select(0, piece.row_E)
        with torch.no_grad():
            term_ET = None if terms is None else terms.make(terms.features(tile, piece))
            message_EO, score_EH = function(source_EW, target_EV, term_ET)
            if softmax is not None:
                assert heads is not None and score_EH is not None
                weight_EH = softmax.weigh(piece, score_EH.clone())
                if heads.dropout is not None:
                    weight_EH *= heads.dropout.scale(piece, Direction.IN, heads.heads, weight_EH.dtype)
                message_EO = _weighted(message_EO, weight_EH)
            out_RO[piece.rows] += piece.sums(message_EO)
    lse_RH = None if softmax is None else softmax.finish()
    return out_RO, lse_RH


def upstream(gradient_RO: Tensor, value_RO: Tensor, kept: Tensor | None) -> Upstream:
    """What the backward pulls read of a tile's rows, from dZ and what the forward pull gave."""
    if kept is None:
        return Upstream(gradient_RO, None)
    d_RH = (gradient_RO * value_RO).view(*kept.shape, -1).sum(-1)
    return Upstream(gradient_RO, torch.stack((kept, d_RH), dim=2).view(len(kept), -1))


def joined(value_RO: Tensor, lse_RH: Tensor, before_RO: Tensor, before_lse_RH: Tensor) -> tuple[Tensor, Tensor]:
    """The softmax over two sets of edges, from those over each, with the logarithms of their sums of exponentials (-∞
    without edges); overwrites the first."""
    highest_RH = torch.maximum(lse_RH, before_lse_RH)
    highest_RH.masked_fill_(highest_RH == -torch.inf, 0.0)
    share_RH, before_share_RH = (lse_RH - highest_RH).exp_(), (before_lse_RH - highest_RH).exp_()
    sum_RH = share_RH + before_share_RH
    inverse_RH = sum_RH.clamp(min=torch.finfo(sum_RH.dtype).tiny).reciprocal_()
    value_RHC, before_RHC = (one.reshape(*lse_RH.shape, -1) for one in (value_RO, before_RO))
    value_RHC.mul_(share_RH.mul_(inverse_RH)[:, :, None])
    value_RHC.addcmul_(before_RHC, before_share_RH.mul_(inverse_RH)[:, :, None])
    return value_RHC.view_as(value_RO), sum_RH.log_().add_(highest_RH)


def pull_source_gradients(
    function: EdgeFunction,
    tile: TileEdges,
    *,
    source_RW: Tensor,
    target_NP: Tensor,
    layout: TargetLayout,
    terms: EdgeTerms | None = None,
    heads: Heads | None = None,
) -> Tensor:
    """Backward over out-edges: the gradient of the tile's rows as sources.

    ``target_NP`` are the targets' rows with what flows back to them, as ``layout`` packs them.
    """
    if heads is not None and is_dot_product(function, terms):
        return dot_attention.pull_sources(tile, heads.heads, heads.dropout, target_NP=target_NP, source_RS=source_RW)
    backward = _Backward(function, tile, heads, Direction.OUT, terms, torch.zeros_like(source_RW))
    for piece in pieces(tile, len(target_NP), EDGES_PER_PIECE):
        source_EW = source_RW[piece.rows].index_select(0, piece.row_E).requires_grad_()
        target_EV, upstream_E = layout.unpack(target_NP.index_select(0, piece.neighbours_E))
        backward.add(piece, source_EW, target_EV, source_EW, upstream_E)
    return backward.rows_RW


def pull_target_gradients(
    function: EdgeFunction,
    tile: TileEdges,
    *,
    source_NW: Tensor,
    target_RV: Tensor,
    upstream_R: Upstream,
    with_map: bool = False,
    terms: EdgeTerms | None = None,
    heads: Heads | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Backward over in-edges: the gradient of the tile's rows as targets; ``with_map``: and row by row that of the
    terms' linear map (``EdgeTerms.map_gradient``)."""
    if heads is not None and is_dot_product(function, terms):
        assert upstream_R.statistics is not None
        found_RV = dot_attention.pull_targets(
            *(tile, heads.heads, heads.dropout),
            source_NS=source_NW,
            query_RV=target_RV,
            gradient_RO=upstream_R.gradient,
            statistics=upstream_R.statistics,
        )
        return found_RV, None
    map_RM = None if terms is None or not with_map else target_RV.new_zeros(len(target_RV), terms.map_columns)
    backward = _Backward(function, tile, heads, Direction.IN, terms, torch.zeros_like(target_RV), map_RM)
    for piece in pieces(tile, len(source_NW), EDGES_PER_PIECE):
        own_E = piece.row_E + piece.start
        source_EW = source_NW.index_select(0, piece.neighbours_E)
        target_EV = target_RV.index_select(0, own_E).requires_grad_()
        backward.add(piece, source_EW, target_EV, target_EV, upstream_R.select(own_E))
    return backward.rows_RW, map_RM


def is_dot_product(function: EdgeFunction, terms: EdgeTerms | None) -> bool:
    """Whether it is computed by ``dot_attention``, without autograd."""
    return terms is None and isinstance(function, TransformerAttention)


def scratch_bytes(
    *, source: int, target: int, message: int, heads: int, itemsize: int, live: int, features: int = 0, term: int = 0
) -> tuple[int, int]:
    """Bounds on what one call allocates at a time, results included: for every edge of a piece and every row of the
    tile, and for every row beside that; widths in columns.

    ``live``: how many matrices of the wider side's width the function has alive at once per edge, forward and
    backward together; for autograd that is about twice the number of its operators. ``features`` of an edge make a
    ``term`` of so many columns: they are gathered and numbered to be summed, and a row has its part of the map's
    gradient, where it is put together three times.
    """
    widest = max(source, target, message)
    per_edge = (2 * source + 3 * target + 5 * message + 5 * heads + live * widest) * itemsize + 200
    per_row = (2 * max(source, target) + 5 * message + 6 * heads) * itemsize + 32
    if features:
        per_edge += features * (3 * itemsize + 16) + 4 * term * itemsize + 64
        per_row += (3 * (features + 1) * term + 3 * features) * itemsize
    return per_edge, per_row


@dataclass(frozen=True, slots=True)
class _Backward:
    """The gradient of one side's rows and of the terms' map, to which that of piece after piece is added."""

    function: EdgeFunction
    tile: TileEdges
    heads: Heads | None
    direction: Direction
    terms: EdgeTerms | None
    rows_RW: Tensor
    map_RM: Tensor | None = None

    def add(self, piece: Piece, source_EW: Tensor, target_EV: Tensor, leaf_EW: Tensor, upstream_E: Upstream) -> None:
        """Differentiate the function with respect to ``leaf_EW``, the own side's rows at every edge."""
        features_EK = None if self.terms is None else self.terms.features(self.tile, piece)
        term_ET = None if self.terms is None or features_EK is None else self.terms.make(features_EK)
        inputs = [leaf_EW]
        if self.map_RM is not None and term_ET is not None:
            inputs.append(term_ET.requires_grad_())
        with torch.enable_grad():
            message_EO, score_EH = self.function(source_EW, target_EV, term_ET)
        gradients = self._output_gradients(piece, message_EO.detach(), score_EH, upstream_E)
        outputs = [message_EO] if score_EH is None else [message_EO, score_EH]
        found = gradients_of(outputs, inputs, gradients)
        with torch.no_grad():
            if found[0] is not None:
                self.rows_RW[piece.rows] += piece.sums(found[0])
            if self.map_RM is not None and self.terms is not None and features_EK is not None and found[-1] is not None:
                self.map_RM[piece.rows] += self.terms.map_gradient(piece, features_EK, found[-1])

    @torch.no_grad()
    def _output_gradients(
        self, piece: Piece, message_EO: Tensor, score_EH: Tensor | None, upstream_E: Upstream
    ) -> tuple[Tensor, ...]:
        """Of the messages, and of the scores where there are any."""
        gradient_EO, statistics = upstream_E.gradient, upstream_E.statistics
        if self.heads is None:
            return (gradient_EO,)
        assert statistics is not None and score_EH is not None
        lse_EH, d_EH = statistics.view(*score_EH.shape, 2).unbind(2)
        share_EH = (score_EH.detach() - lse_EH).exp_()
        dot_EH = (gradient_EO * message_EO).view(*score_EH.shape, -1).sum(-1)
        keep = self.heads.dropout
        if keep is None:
            return _weighted(gradient_EO, share_EH), dot_EH.sub_(d_EH).mul_(share_EH)
        keep_EH = keep.scale(piece, self.direction, self.heads.heads, share_EH.dtype)
        score_gradient_EH = dot_EH.mul_(keep_EH).sub_(d_EH).mul_(share_EH)
        return _weighted(gradient_EO, share_EH.mul_(keep_EH)), score_gradient_EH


def _weighted(matrix_EO: Tensor, weight_EH: Tensor) -> Tensor:
    """Every head's columns times its weight."""
    return (matrix_EO.view(*weight_EH.shape, -1) * weight_EH[:, :, None]).view_as(matrix_EO)
