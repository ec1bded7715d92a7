# SPDX-License-Identifier: Apache-2.0
"""Link prediction: an encoder of nodes, a decoder of pairs of them, and the losses and scores of links as messages.

A link's loss is what its tail sends to its head, and a node's row of the output is the sum over the links that it is
the head of: a layer like any other, over links instead of edges. So a decoder is run as an opaque layer is, a tile of
heads with their tails at a time, forward and backward, and nothing has a row for every link but their losses in a tile.

Shapes: E links of a piece, C columns of an embedding.
"""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

from ooc.errors import OptionError
from ooc.kernels.edges import TileEdges
from ooc.kernels.neighbourhood import BucketRows, neighbourhood, runs, stretches
from ooc.model.layers.layer import EdgeInput, Graph
from ooc.model.layers.opaque import Opaque, lower_opaque
from ooc.model.layers.per_edge import Key
from ooc.model.lowering.assembly import Assembly
from ooc.model.lowering.values import Value
from ooc.plan.workload import Direction, EdgeData

LinkLoss = Callable[[Tensor, Tensor], Tensor]
"""(scores [E], labels [E], 1 for links and 0 for what is none) → losses [E]."""


class Dot(nn.Module):
    """⟨h, t⟩."""

    def forward(self, head_EC: Tensor, tail_EC: Tensor) -> Tensor:
        return (head_EC * tail_EC).sum(dim=-1)


class DistMult(nn.Module):
    """⟨h, r, t⟩ of a learnt vector r (Yang et al., "Embedding Entities and Relations for Learning and Inference in
    Knowledge Bases", ICLR 2015)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.relation = nn.Parameter(torch.ones(channels))

    def forward(self, head_EC: Tensor, tail_EC: Tensor) -> Tensor:
        return (head_EC * self.relation * tail_EC).sum(dim=-1)


class ComplEx(nn.Module):
    """Re ⟨h, r, t̄⟩, where the two halves of a row are real and imaginary parts: it tells directions apart (Trouillon
    et al., "Complex Embeddings for Simple Link Prediction", ICML 2016)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        if channels % 2:
            raise OptionError(f"decoder complex needs an even number of channels, not {channels}")
        self.relation = nn.Parameter(torch.cat((torch.ones(channels // 2), torch.zeros(channels // 2))))

    def forward(self, head_EC: Tensor, tail_EC: Tensor) -> Tensor:
        (h, h_i), (r, r_i), (t, t_i) = (rows.chunk(2, dim=-1) for rows in (head_EC, self.relation, tail_EC))
        return ((h * r - h_i * r_i) * t + (h * r_i + h_i * r) * t_i).sum(dim=-1)


class Bilinear(nn.Module):
    """h W tᵀ."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(channels))

    def forward(self, head_EC: Tensor, tail_EC: Tensor) -> Tensor:
        return ((head_EC @ self.weight) * tail_EC).sum(dim=-1)


class MLP(nn.Module):
    """A perceptron with one hidden layer on h ∘ t, as OGB's link predictors have it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(channels, channels), nn.Linear(channels, 1)

    def forward(self, head_EC: Tensor, tail_EC: Tensor) -> Tensor:
        return cast(Tensor, self.out(self.hidden(head_EC * tail_EC).relu())).squeeze(-1)


DECODERS: dict[str, Callable[[int], nn.Module]] = {
    "dot": lambda channels: Dot(),
    "distmult": DistMult,
    "complex": ComplEx,
    "bilinear": Bilinear,
    "mlp": MLP,
}
"""By name; given the columns of an embedding."""


def binary_cross_entropy(scores_E: Tensor, labels_E: Tensor) -> Tensor:
    """Of every link, with logits."""
    return F.binary_cross_entropy_with_logits(scores_E, labels_E, reduction="none")


class LinkPredictor(nn.Module):
    """``encoder``, a PyG model whose outputs are embeddings [N, C], and ``decoder``: ``"dot"``, ``"distmult"``,
    ``"complex"``, ``"bilinear"``, ``"mlp"``, or a module that takes rows of heads and of tails [E, C] and gives scores
    [E], each of its pair alone. ``channels`` is C, which all but ``"dot"`` need.

    ``loss`` gives each link's loss [E] for scores and labels [E], by default binary cross-entropy with logits; that of
    a step is their mean.
    """

    def __init__(
        self,
        encoder: nn.Module,
        decoder: str | nn.Module = "dot",
        channels: int | None = None,
        loss: LinkLoss = binary_cross_entropy,
    ) -> None:
        super().__init__()
        channels = channels or getattr(encoder, "out_channels", None)
        if isinstance(decoder, str):
            if decoder not in DECODERS:
                raise OptionError(f"decoder {decoder!r} is not one of {', '.join(DECODERS)}")
            if channels is None and decoder != "dot":
                raise OptionError(f"decoder {decoder} needs to know channels=, the columns of an embedding")
            decoder = DECODERS[decoder](channels or 0)
        self.encoder, self.decoder, self.loss, self.channels = encoder, decoder, loss, channels

    def forward(self, x: Tensor, edge_index: Tensor, links_2E: Tensor, **edge_data: Tensor) -> Tensor:
        """Scores [E] of the pairs ``links_2E``, heads above tails; in memory, as any PyG model."""
        z_NC = self.encoder(x, edge_index, **edge_data)
        return cast(Tensor, self.decoder(z_NC[links_2E[0]], z_NC[links_2E[1]]))


class LinkLosses(MessagePassing):  # type: ignore[misc]
    """The losses of links, added up by their heads. A label that is NaN: the link has no part in it."""

    def __init__(self, decoder: nn.Module, loss: LinkLoss) -> None:
        super().__init__(aggr="sum")
        self.decoder, self.loss = decoder, loss

    def forward(self, z: Tensor, edge_index: Tensor, label: Tensor) -> Tensor:
        return cast(Tensor, self.propagate(edge_index, z=z, label=label))

    def message(self, z_i: Tensor, z_j: Tensor, label: Tensor) -> Tensor:
        left_out_E = label.isnan()
        losses_E = self.loss(self.decoder(z_i, z_j), label.masked_fill(left_out_E, 0))
        return losses_E.masked_fill(left_out_E, 0)[:, None]


class OfLinks(Opaque):
    """What links in training add to their heads' losses."""

    direction = Direction.LINKS


class OfScoredLinks(Opaque):
    """The scores of links, each put in its place in ``scores`` [E]; ``offsets`` [N + 1]: where those of each head
    begin. What is pulled says nothing."""

    direction = Direction.SCORED_LINKS
    scores: npt.NDArray[np.floating]
    offsets: npt.NDArray[np.signedinteger]

    @torch.no_grad()
    def forward(self, key: Key, tile: TileEdges, source: Tensor | BucketRows, own: Tensor, groups: range) -> Tensor:
        decoder, most = cast(nn.Module, self._own_module().decoder), self.edges_at_once(on_device=False)
        for run in runs(tile, most):
            at = int(self.offsets[run.start])
            for piece, _ in stretches(run, most) if len(run.indices_E) > most else [(run, 0)]:
                if count := len(piece.indices_E):
                    near = neighbourhood(piece, len(source))
                    z_SC, (tails_E, heads_E) = near.gather(source), near.edge_index_2E
                    self.scores[at : at + count] = decoder(z_SC[heads_E], z_SC[tails_E]).numpy()
                    at += count
        return source.new_zeros(tile.rows, self.result)


def lower_links(model: LinkPredictor, embeddings: Value, assembly: Assembly) -> Value:
    """In training the losses of links by their heads, in evaluation their scores; ModelError for a decoder that looks
    further than a pair."""
    of_edges = set(assembly.edge_data)
    arguments: list[Any] = [embeddings, Graph(), EdgeInput(EdgeData.WEIGHT)]
    kind = OfLinks if assembly.setting.training else OfScoredLinks
    module = LinkLosses(model.decoder, model.loss)
    modes = [(part, part.training) for part in model.decoder.modules()]
    module.train(model.training and assembly.setting.training)
    try:
        return lower_opaque(module, f"decoder {type(model.decoder).__name__}", arguments, {}, assembly, kind=kind)
    finally:
        assembly.edge_data = of_edges  # links have labels whatever edges carry
        for part, training in modes:
            part.training = training
