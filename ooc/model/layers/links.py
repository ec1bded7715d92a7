# SPDX-License-Identifier: Apache-2.0
"""Link prediction: the losses and scores of links as messages.

A link's loss is the message from its tail to its head, and a node's row of the output is the sum over the links it is
the head of: a layer like any other, over links instead of edges. So a decoder runs like an opaque layer, a tile of
heads with their tails at a time, forward and backward, and only a tile's losses have a row for every link.

Shapes: E links of a piece, C columns of an embedding.
"""

from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

from ooc.errors import ModelError
from ooc.kernels.edges import TileEdges
from ooc.kernels.neighbourhood import BucketRows, neighbourhood, runs, stretches
from ooc.model.layers.decoders import LinkLoss, LinkPredictor, check_loss, index_place, scores_of, takes_link_types
from ooc.model.layers.layer import EdgeInput, Graph, in_modes
from ooc.model.layers.opaque import Opaque, lower_opaque
from ooc.model.layers.per_edge import Key
from ooc.model.lowering.assembly import Assembly
from ooc.model.lowering.values import Value
from ooc.plan.workload import Direction, EdgeData


class LinkLosses(MessagePassing):  # type: ignore[misc]
    """The losses of links, summed by their heads. A link whose label is NaN takes no part. ``kind``: the links' types,
    if the decoder takes them."""

    def __init__(self, decoder: nn.Module, loss: LinkLoss) -> None:
        super().__init__(aggr="sum")
        self.decoder, self.index, self.loss = decoder, index_place(decoder), loss

    def forward(self, z: Any, edge_index: Tensor, label: Tensor, kind: Any = None) -> Tensor:
        kept_E = ~label.isnan()  # removed before scoring, since their gradient may be NaN
        if not kept_E.all():
            edge_index, label, kind = edge_index[:, kept_E], label[kept_E], None if kind is None else kind[kept_E]
        return cast(Tensor, self.propagate(edge_index, z=z, label=label, kind=kind))

    def message(self, z_i: Tensor, z_j: Tensor, label: Tensor, kind: Any) -> Tensor:
        scores_E = scores_of(self.decoder, self.index, z_i, z_j, *([] if kind is None else [kind]))
        return self.loss(scores_E, (label > 0).to(scores_E.dtype))[:, None]  # for all inputs tried


class LinkLossSums(Opaque):
    """The sums of links' losses in training, at their heads."""

    direction = Direction.LINKS


class LinkScores(LinkLossSums):
    """The scores of links, each written to its place in ``scores`` [E]; ``offsets`` [N + 1]: where those of each head
    begin. The pulled values have no meaning."""

    direction = Direction.SCORED_LINKS
    scores: npt.NDArray[np.floating]
    offsets: npt.NDArray[np.signedinteger]

    @torch.no_grad()
    def forward(self, key: Key, tile: TileEdges, source: Tensor | BucketRows, own: Tensor, groups: range) -> Tensor:
        module, most = cast(LinkLosses, self._module_of_thread()), self.edges_at_once(on_device=False)
        first, (tile, source) = tile.start, self.with_own_rows(tile, source, own)
        for run in runs(tile, most):
            at = int(self.offsets[run.start - tile.start + first])
            for piece, _ in stretches(run, most) if len(run.indices_E) > most else [(run, 0)]:
                if count := len(piece.indices_E):
                    near = neighbourhood(piece, len(source))
                    z_SC, (tails_E, heads_E) = near.gather(source), near.edge_index_2E
                    kinds = [] if near.features_EK is None else [near.features_EK[:, 0].long()]
                    scores_E = scores_of(module.decoder, module.index, z_SC[heads_E], z_SC[tails_E], *kinds)
                    if near.weight_E is not None:  # NaN marks a missing pair
                        scores_E = scores_E + near.weight_E
                    self.scores[at : at + count] = scores_E.numpy()
                    at += count
        return own.new_zeros(tile.rows, self.result)


def lower_links(model: LinkPredictor, embeddings: Value, assembly: Assembly) -> Value:
    """Return, in training, the losses of links by their heads, and in evaluation their scores. Raises ModelError for a
    decoder that looks beyond a pair.

    An encoder may give a number a row beside embeddings: in training it is beside the losses.
    """
    of_edges, beside, tails = set(assembly.edge_data), assembly.result_columns, assembly.second
    penalty: list[Value] = []
    if beside:
        if beside[1:] != (1,):
            given = ", ".join(map(str, beside))
            raise ModelError(
                f"the encoder gives matrices of {given} columns: embeddings may have one column beside them, as a VGAE "
                "has in docs/links.md"
            )
        penalty = [assembly.rowwise("the encoder's results", lambda rows: rows[:, -1:], [embeddings])]
        embeddings = assembly.rowwise("the encoder's results", lambda rows: rows[:, :-1], [embeddings])
    if tails is not None and tails.tail != embeddings.tail:
        of_heads, of_tails = embeddings.columns, tails.columns
        raise ModelError(f"embeddings of heads have {of_heads} columns, those of tails {of_tails}: give them as many")
    ends = embeddings if tails is None else (tails, embeddings)
    arguments: list[Any] = [ends, Graph(), EdgeInput(EdgeData.WEIGHT)]
    if takes_link_types(model.decoder):
        arguments.append(EdgeInput(EdgeData.FEATURES, steps=(("__getitem__", ((slice(None), 0),)), ("long", ()))))
    check_loss(model.loss, assembly.setting.dtype)
    kind = LinkLossSums if assembly.setting.training else LinkScores
    module = LinkLosses(model.decoder, model.loss)
    try:
        with in_modes(modes := {part: part.training for part in module.modules()}):
            module.train(assembly.setting.training)
            if model.training:  # parts in eval mode of a model in training mode are frozen
                for part, training in modes.items():
                    part.training &= training
            losses = lower_opaque(module, f"decoder {type(model.decoder).__name__}", arguments, {}, assembly, kind=kind)
        if penalty:
            losses = assembly.rowwise("losses", lambda *rows: torch.cat(rows, dim=1), [losses, *penalty])
        return losses
    except ModelError as error:
        if " fails on " not in str(error):
            raise
        called = "a decoder is called with rows of heads and of tails [E, C], and gives their scores [E]"
        raise ModelError(f"{error}; {called}") from error
    finally:
        assembly.edge_data = of_edges  # links have labels, even where edges have no data
