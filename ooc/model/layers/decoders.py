# SPDX-License-Identifier: Apache-2.0
"""Models of links: an encoder of nodes, and decoders that score pairs of their embeddings.

Shapes: E pairs, C columns of an embedding.
"""

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ooc.errors import ModelError, OptionError

LinkLoss = Callable[[Tensor, Tensor], Tensor]
"""A function of scores [E] and labels [E] (1 for links, 0 for non-links) to losses [E]."""


class Dot(nn.Module):
    """⟨h, t⟩."""

    def forward(self, head_EC: Tensor, tail_EC: Tensor) -> Tensor:
        return (head_EC * tail_EC).sum(dim=-1)


class DistMult(nn.Module):
    """⟨h, r, t⟩ with a learnt vector r (Yang et al., "Embedding Entities and Relations for Learning and Inference in
    Knowledge Bases", ICLR 2015), or with one for each of ``relations``, selected by the links' types [E]."""

    def __init__(self, channels: int, relations: int = 0) -> None:
        super().__init__()
        self.relations = relations
        self.relation = nn.Parameter(_repeat_per_relation(torch.ones(channels), relations))

    def forward(self, head_EC: Tensor, tail_EC: Tensor, kind_E: Tensor | None = None) -> Tensor:
        return (head_EC * _relation(self.relation, kind_E) * tail_EC).sum(dim=-1)


class ComplEx(nn.Module):
    """Re ⟨h, r, t̄⟩, where the halves of a row are real and imaginary parts, so that direction matters (Trouillon et
    al., "Complex Embeddings for Simple Link Prediction", ICML 2016); ``relations`` as in ``DistMult``."""

    def __init__(self, channels: int, relations: int = 0) -> None:
        super().__init__()
        self.relations = relations
        if channels % 2:
            raise OptionError(f"decoder complex needs an even number of channels, not {channels}")
        first = torch.cat((torch.ones(channels // 2), torch.zeros(channels // 2)))
        self.relation = nn.Parameter(_repeat_per_relation(first, relations))

    def forward(self, head_EC: Tensor, tail_EC: Tensor, kind_E: Tensor | None = None) -> Tensor:
        relation = _relation(self.relation, kind_E)
        (h, h_i), (r, r_i), (t, t_i) = (rows.chunk(2, dim=-1) for rows in (head_EC, relation, tail_EC))
        return ((h * r - h_i * r_i) * t + (h * r_i + h_i * r) * t_i).sum(dim=-1)


class Bilinear(nn.Module):
    """h W tᵀ."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(channels))

    def forward(self, head_EC: Tensor, tail_EC: Tensor) -> Tensor:
        return ((head_EC @ self.weight) * tail_EC).sum(dim=-1)


class MLP(nn.Module):
    """A perceptron with one hidden layer on h ∘ t, as in OGB's link predictors."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(channels, channels), nn.Linear(channels, 1)

    def forward(self, head_EC: Tensor, tail_EC: Tensor) -> Tensor:
        return cast(Tensor, self.out(self.hidden(head_EC * tail_EC).relu())).squeeze(-1)


def _repeat_per_relation(vector_C: Tensor, relations: int) -> Tensor:
    """Return ``one`` itself, or one for each relation [R, C]."""
    return vector_C.repeat(relations, 1) if relations else vector_C


def _relation(relation: Tensor, kind_E: Tensor | None) -> Tensor:
    return relation if kind_E is None else F.embedding(kind_E, relation)


def _is_index(argument: str) -> bool:
    """Whether an argument of this name says which pairs of rows are meant."""
    return "edge" in argument and "index" in argument


def takes_link_types(decoder: nn.Module) -> bool:
    """Whether a decoder takes the links' types after heads and tails."""
    given = inspect.signature(decoder.forward).parameters.values()
    needed = [one.name for one in given if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    return (len(needed) > 2 and not _is_index(needed[2])) or getattr(decoder, "relations", 0) > 0


DECODERS: dict[str, Callable[..., nn.Module]] = {
    "dot": lambda channels: Dot(),
    "distmult": DistMult,
    "complex": ComplEx,
    "bilinear": Bilinear,
    "mlp": MLP,
}
"""Decoders by name, made from the columns of an embedding."""


def binary_cross_entropy(scores_E: Tensor, labels_E: Tensor) -> Tensor:
    """Return the binary cross-entropy of every link, with logits."""
    return F.binary_cross_entropy_with_logits(scores_E, labels_E, reduction="none")


class LinkPredictor(nn.Module):
    """A model of links: ``encoder``, a PyG model whose outputs are embeddings [N, C], and ``decoder``: ``"dot"``,
    ``"distmult"``, ``"complex"``, ``"bilinear"``, ``"mlp"``, or a module that takes rows of heads and of tails [E, C]
    and gives scores [E] or [E, 1], each for its pair alone, or that takes rows and ``edge_index`` [2, E], as PyG's
    does. ``channels`` is C, which all but ``"dot"`` need. ``relations``: the number of edge types of links;
    ``"distmult"`` and ``"complex"`` then have a vector for each, and a module may take the links' types [E] as a third
    argument.

    An encoder may return ``(embeddings [N, C], penalty [N, 1])``: the mean penalty over all nodes is added to the loss
    of every step.

    ``loss`` gives each link's loss [E] for scores and labels [E], by default binary cross-entropy with logits. The loss
    of a step is their mean, as in torch's own losses.
    """

    def __init__(
        self,
        encoder: nn.Module,
        decoder: str | nn.Module = "dot",
        channels: int | None = None,
        loss: LinkLoss = binary_cross_entropy,
        relations: int = 0,
    ) -> None:
        super().__init__()
        channels = channels or getattr(encoder, "out_channels", None)
        if isinstance(decoder, str):
            if decoder not in DECODERS:
                raise OptionError(f"decoder {decoder!r} is not one of {', '.join(DECODERS)}")
            if channels is None and decoder != "dot":
                raise OptionError(f"decoder {decoder} needs to know channels=, the columns of an embedding")
            by_kind = decoder in ("distmult", "complex")
            decoder = DECODERS[decoder](channels or 0, *([relations] if by_kind else []))
        encoder = getattr(encoder, "_orig_mod", encoder)  # torch.compile hides its arguments
        for name, module in (("encoder", encoder), ("decoder", decoder)):
            if not isinstance(module, nn.Module) or type(module).forward is nn.Module.forward:
                found = type(module).__name__ if isinstance(module, nn.Module) else repr(module)
                more = "; what it calls encode must be its forward" if hasattr(module, "encode") else ""
                raise ModelError(f"the {name} must be a torch module with a forward, not {found}{more}")
        own = type(encoder.decoder).__name__ if hasattr(encoder, "recon_loss") else "InnerProductDecoder"
        if own != "InnerProductDecoder":  # PyG's GAE, whose forward is its encoder's
            raise ModelError(f"the encoder has a decoder, {own}, which is not called: give its encoder, and decoder=")
        self.encoder, self.decoder, self.loss, self.channels = encoder, decoder, _per_link_loss(loss), channels

    def forward(self, x: Tensor, edge_index: Tensor, links_2E: Tensor, **edge_data: Tensor) -> Tensor:
        """Return scores [E] of the pairs ``links_2E``, heads above tails, or [3, E], with their types in between; in
        memory, as any PyG model."""
        z_NC = self.encoder(x, edge_index, **edge_data)
        z_NC = z_NC[0] if isinstance(z_NC, tuple) else z_NC
        ends = z_NC[links_2E[0]], z_NC[links_2E[-1]]
        return scores_of(self.decoder, index_place(self.decoder), *ends, *links_2E[1:-1])


def _per_link_loss(loss: Any) -> LinkLoss:
    """Return torch's mean loss as a loss of each link."""
    if isinstance(loss, nn.Module) and getattr(loss, "reduction", "") == "mean":
        loss = copy.copy(loss)
        loss.reduction = "none"
    elif getattr(loss, "__module__", "") == F.__name__ and "reduction" in inspect.signature(loss).parameters:
        loss = partial(loss, reduction="none")
    return cast(LinkLoss, loss)


def check_loss(loss: LinkLoss, dtype: torch.dtype) -> None:
    """Raise ModelError if a loss does not give one number for each of a few links."""
    function = loss.func if isinstance(loss, partial) else loss
    name = getattr(function, "__name__", type(function).__name__)
    # Fractions, since a decoder may give probabilities.
    scores_E, labels_E = torch.linspace(0.2, 0.8, 4, dtype=dtype), torch.tensor([0, 1, 1, 0], dtype=dtype)
    try:
        found = loss(scores_E, labels_E)
    except Exception as error:  # the user's code may raise anything
        raise ModelError(
            f"loss {name} cannot take scores and labels of links [E]: {' '.join(str(error).split())}"
        ) from error
    if found.shape != scores_E.shape:
        raise ModelError(
            f"loss {name} gives {list(found.shape)} for 4 links; it must give each link's loss by itself, [E], as with "
            "reduction='none': that of a step is their mean"
        )


def index_place(decoder: nn.Module) -> int:
    """Return the position of the decoder's argument that says which pairs of rows are meant, as in PyG's examples,
    ``(z, edge_index)`` or ``(x_user, x_movie, edge_label_index)``; 0 if there is none."""
    are_indices = [*map(_is_index, inspect.signature(decoder.forward).parameters)]
    return next((place for place in (1, 2) if are_indices[place : place + 1] == [True]), 0)


def scores_of(decoder: nn.Module, index: int, head_EC: Tensor, tail_EC: Tensor, *kinds: Tensor) -> Tensor:
    """Return the scores [E] of a decoder for rows of heads and of tails [E, C], with types [E] if it takes them; or for
    these rows with the pairs meant, at position ``index``. OGB's gives [E, 1]."""
    given: tuple[Tensor, ...] = (head_EC, tail_EC, *kinds)
    if index:
        at_E = torch.arange(len(head_EC), device=head_EC.device)
        rows, tails_E = ((torch.cat(given),), at_E + len(at_E)) if index == 1 else (given, at_E)
        given = (*rows, torch.stack((at_E, tails_E)))
    found: Tensor = decoder(*given)
    return found.squeeze(1) if found.dim() == 2 and found.shape[1] == 1 else found
