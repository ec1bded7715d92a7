# SPDX-License-Identifier: Apache-2.0
"""Models of links: an encoder of nodes, and decoders, which score pairs of their embeddings.

Shapes: E pairs, C columns of an embedding.
"""

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ooc.errors import OptionError

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

    An encoder may give ``(embeddings [N, C], penalty [N, 1])``: the mean of these numbers over all nodes is added to
    the loss of every step.

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
        z_NC = z_NC[0] if isinstance(z_NC, tuple) else z_NC
        return cast(Tensor, self.decoder(z_NC[links_2E[0]], z_NC[links_2E[1]]))
