# SPDX-License-Identifier: Apache-2.0
"""Any message and score per edge: gathered, computed and differentiated edge by edge.

An ``EdgeFunction`` (``functions``) computes one edge's message from the source's row, the target's row and a term made
of the edge's own features (``edge_terms``). A target sums the messages over its edges, or, if there are heads, weights
them by the softmax of the edges' scores, head by head. Forward, targets pull sources. Backward, every edge is computed
again wherever its gradient is needed: over in-edges for gradients of targets, over out-edges for those of sources. The
gradient of an edge does not depend on other edges:

    sum       dm_e = dZ_i                                      a mean is a sum whose rows are scaled
    softmax   dm_e = α_e k_e dZ_i,   ds_e = α_e (k_e dZ_i · m_e - D_i),   α_e = exp(s_e - lse_i)

for message m, score s, dropout's scale k and D_i = dZ_i · Z_i.

Shapes: N rows of a pulled matrix, R rows of the tile, E edges of a piece, W/V/T columns of sources, targets and edges'
terms, O = H·C columns of messages, head after head where there are heads.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ooc.kernels.dropout.edges import EdgeDropout
from ooc.kernels.edge_terms import EdgeTerms
from ooc.kernels.edges import Piece, RunningSoftmax, TileEdges, pieces
from ooc.kernels.functions import EdgeFunction
from ooc.kernels.tensors import gradients_of
from ooc.plan.workload import Direction


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads that are computed, by their numbers among all of the layer, with the dropout of their coefficients."""

    heads: range
    dropout: EdgeDropout | None = None


@dataclass(frozen=True, slots=True)
class EdgeMessages:
    """What is computed of a tile's edges: ``function``, with the ``terms`` of edges, and the ``heads`` of a softmax if
    there are any."""

    function: EdgeFunction
    tile: TileEdges
    terms: EdgeTerms | None = None
    heads: Heads | None = None


@dataclass(frozen=True, slots=True)
class Upstream:
    """The gradient of targets' rows as the backward pass reads it, for the tile's rows or all N.

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
    """The columns that sources pull of a target, group after group (heads, or a single group): its own row, the
    gradient, and the statistics, with these numbers of columns for each group. ``statistics`` is 0 for a sum. ``loop``:
    features of the row's added self-loop, if any, repeated for every group."""

    groups: int
    target: int
    message: int
    statistics: int
    loop: int = 0

    @property
    def columns(self) -> int:
        return self.groups * (self.target + self.message + self.statistics + self.loop)

    def pack(self, target_RV: Tensor, upstream_R: Upstream, loop_RK: Tensor | None = None) -> Tensor:
        """Return the columns packed together [R, columns]."""
        parts = [(target_RV, self.target), (upstream_R.gradient, self.message)]
        if upstream_R.statistics is not None:
            parts.append((upstream_R.statistics, self.statistics))
        by_group = [part.reshape(len(part), self.groups, columns) for part, columns in parts]
        if loop_RK is not None:
            by_group.append(loop_RK[:, None].expand(-1, self.groups, -1))
        return torch.cat(by_group, dim=2).view(len(target_RV), -1)

    def unpack(self, packed: Tensor) -> tuple[Tensor, Upstream]:
        """Return the parts of packed columns."""
        sizes = [self.target, self.message, self.statistics, self.loop]
        by_group = torch.split(packed.view(len(packed), self.groups, -1), sizes, dim=2)
        target, gradient, statistics, _ = (part.flatten(1) for part in by_group)
        return target, Upstream(gradient, statistics if self.statistics else None)

    def loops(self, packed: Tensor) -> Tensor | None:
        """Return the packed features of the rows' added self-loops [R, loop]."""
        if not self.loop:
            return None
        return packed.view(len(packed), self.groups, self.columns // self.groups)[:, 0, -self.loop :]


@torch.no_grad()
def pull_messages(
    edges: EdgeMessages, *, source_NW: Tensor, target_RV: Tensor, columns: int
) -> tuple[Tensor, Tensor | None]:
    """Forward: targets pull sources over in-edges. Return their results [R, O = ``columns``], and lse [R, H], which the
    backward pass needs beside dZ, or nothing."""
    function, tile, terms, heads = edges.function, edges.tile, edges.terms, edges.heads
    out_RO = source_NW.new_zeros(tile.rows, columns)
    softmax = None
    if heads is not None:
        out_RHC = out_RO.view(tile.rows, len(heads.heads), -1)
        softmax = RunningSoftmax(tile.rows, len(heads.heads), source_NW, [out_RHC])
    for piece in pieces(tile, len(source_NW)):
        term_ET = None if terms is None else terms.make(terms.features(tile, piece))
        message_EO, score_EH = function(piece.gather(source_NW), piece.spread(target_RV[piece.rows]), term_ET)
        if softmax is not None:
            assert heads is not None and score_EH is not None
            weight_EH = softmax.weigh(piece, score_EH)
            if heads.dropout is not None:
                weight_EH *= heads.dropout.scale(piece, Direction.IN, heads.heads, weight_EH.dtype)
            message_EHC, weight_EH1 = message_EO.view(*weight_EH.shape, -1), weight_EH[:, :, None]
            message_EO = (message_EHC * weight_EH1).flatten(1)
        out_RO[piece.rows] += piece.sums(message_EO)
    lse_RH = None if softmax is None else softmax.finish()
    return out_RO, lse_RH


def upstream(gradient_RO: Tensor, value_RO: Tensor, kept: Tensor | None) -> Upstream:
    """Return what the backward pulls read of a tile's rows, from dZ and the result of the forward pull."""
    if kept is None:
        return Upstream(gradient_RO, None)
    d_RH = (gradient_RO * value_RO).view(*kept.shape, -1).sum(-1)
    return Upstream(gradient_RO, torch.stack((kept, d_RH), dim=2).view(len(kept), -1))


def merge_softmaxes(
    value_RO: Tensor, lse_RH: Tensor, before_RO: Tensor, before_lse_RH: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the softmax over two sets of edges from the softmax over each, with the logarithms of their sums of
    exponentials (-∞ without edges). Overwrites the first."""
    highest_RH = torch.maximum(lse_RH, before_lse_RH)
    highest_RH.masked_fill_(highest_RH == -torch.inf, 0.0)
    share_RH, before_share_RH = (lse_RH - highest_RH).exp_(), (before_lse_RH - highest_RH).exp_()
    sum_RH = share_RH + before_share_RH
    inverse_RH = sum_RH.clamp(min=torch.finfo(sum_RH.dtype).tiny).reciprocal_()
    value_RHC, before_RHC = (one.reshape(*lse_RH.shape, -1) for one in (value_RO, before_RO))
    value_RHC.mul_(share_RH.mul_(inverse_RH)[:, :, None])
    value_RHC.addcmul_(before_RHC, before_share_RH.mul_(inverse_RH)[:, :, None])
    return value_RHC.view_as(value_RO), sum_RH.log_().add_(highest_RH)


@torch.no_grad()
def pull_source_gradients(edges: EdgeMessages, *, source_RW: Tensor, target_NP: Tensor, layout: TargetLayout) -> Tensor:
    """Backward over out-edges: the gradient of the tile's rows as sources.

    ``target_NP``: the targets' rows with their gradients, as ``layout`` packs them.
    """
    tile, terms = edges.tile, edges.terms
    out_RW = torch.zeros_like(source_RW, memory_format=torch.contiguous_format)
    for piece in pieces(tile, len(target_NP)):
        target_EV, upstream_E = layout.unpack(piece.gather(target_NP))
        term_ET = None if terms is None else terms.make(terms.features(tile, piece))
        given = piece.spread(source_RW[piece.rows]).requires_grad_(), target_EV, term_ET
        (d_source_EW,) = _gradients(edges, piece, given, upstream_E, Direction.OUT)
        out_RW[piece.rows] += piece.sums(d_source_EW)
        del target_EV, upstream_E, term_ET, given, d_source_EW  # freed before the next edges' rows exist
    return out_RW


@torch.no_grad()
def pull_target_gradients(
    edges: EdgeMessages, *, source_NW: Tensor, target_RV: Tensor, upstream_R: Upstream, with_map: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Backward over in-edges: the gradient of the tile's rows as targets; ``with_map``: also, by row, that of the
    terms' linear map (``EdgeTerms.add_map_gradient``)."""
    tile, terms = edges.tile, edges.terms
    map_RM = None if terms is None or not with_map else target_RV.new_zeros(len(target_RV), terms.map_columns)
    out_RV = torch.zeros_like(target_RV, memory_format=torch.contiguous_format)
    for piece in pieces(tile, len(source_NW)):
        features_EK = None if terms is None else terms.features(tile, piece)
        term_ET = None if terms is None or features_EK is None else terms.make(features_EK).requires_grad_(with_map)
        given = piece.gather(source_NW), piece.spread(target_RV[piece.rows]).requires_grad_(), term_ET
        upstream_E = upstream_R.select(piece.row_E + piece.start)
        d_target_EV, *d_term_ET = _gradients(edges, piece, given, upstream_E, Direction.IN)
        out_RV[piece.rows] += piece.sums(d_target_EV)
        if map_RM is not None and terms is not None and features_EK is not None:
            terms.add_map_gradient(piece, features_EK, d_term_ET[0], map_RM)
        del features_EK, term_ET, given, upstream_E, d_target_EV, d_term_ET  # freed before the next edges' rows exist
    return out_RV, map_RM


def _gradients(
    edges: EdgeMessages,
    piece: Piece,
    given: tuple[Tensor, Tensor, Tensor | None],
    upstream_E: Upstream,
    direction: Direction,
) -> list[Tensor]:
    """Return the gradients for a piece's edges of the ``given`` rows of sources and targets, and of terms, that need
    one."""
    heads = edges.heads
    with torch.enable_grad():
        message, score_EH = edges.function(*given)
    d_message, statistics = upstream_E.gradient.view_as(message), upstream_E.statistics
    outputs, above = [message], [d_message]
    if heads is not None and score_EH is not None and statistics is not None:
        lse_EH, d_EH = statistics.view(*score_EH.shape, 2).unbind(2)
        share_EH = (score_EH.detach() - lse_EH).exp_()
        d_message_EHC = d_message.view(*score_EH.shape, -1)
        d_score_EH = (d_message_EHC * message.detach().view_as(d_message_EHC)).sum(-1)
        kept_EH = share_EH
        if heads.dropout is not None:
            keep_EH = heads.dropout.scale(piece, direction, heads.heads, share_EH.dtype)
            d_score_EH.mul_(keep_EH)
            kept_EH = share_EH * keep_EH
        d_message = (d_message_EHC * kept_EH[:, :, None]).view_as(message)
        outputs, above = [message, score_EH], [d_message, d_score_EH.sub_(d_EH).mul_(share_EH)]
    wanted = [rows for rows in given if rows is not None and rows.requires_grad]
    found = zip(wanted, gradients_of(outputs, wanted, above), strict=True)
    return [torch.zeros_like(rows) if part is None else part for rows, part in found]
