# SPDX-License-Identifier: Apache-2.0
"""Models that PyG's layers make and PyG itself has none of; plain modules, which need nothing else of ooc."""

from typing import Any

import torch
from torch_geometric.nn import MessagePassing, TransformerConv
from torch_geometric.nn.models.basic_gnn import BasicGNN
from torch_geometric.nn.resolver import normalization_resolver


class Transformer(BasicGNN):  # type: ignore[misc]  # PyG is not typed
    """``TransformerConv`` in the frame of PyG's other models: heads side by side, averaged where a layer's output is
    the model's."""

    supports_edge_weight = False
    supports_edge_attr = True

    def init_conv(self, in_channels: int | tuple[int, int], out_channels: int, **kwargs: Any) -> MessagePassing:
        """A convolution of ``out_channels`` columns, whatever ``heads`` are."""
        heads = int(kwargs.pop("heads", 1))
        concat = not getattr(self, "_is_conv_to_out", False)
        channels = out_channels // heads if concat else out_channels
        return TransformerConv(in_channels, channels, heads, concat=concat, dropout=self.dropout.p, **kwargs)


class Residual(torch.nn.Module):
    """Layers that add to what they are given: h + dropout(act(conv(norm(h)))), between two linear maps.

    Deep models of this shape hold their own on heterophilous graphs, where plain ones do not (Platonov et al., ICLR
    2023, whose layers are wider within). ``gnn`` gives convolutions, activation and dropout: a model of PyG's whose
    input, hidden and output columns are all of one width H; its own norms are not used. Rows [N, ``in_channels``]
    become [N, ``out_channels``]. ``norm`` is as PyG's models take it; one more goes before the output.
    """

    def __init__(
        self,
        gnn: BasicGNN,
        in_channels: int,
        out_channels: int,
        *,
        norm: str | None = None,
        norm_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        width = gnn.hidden_channels
        if not gnn.in_channels == gnn.out_channels == width:
            raise ValueError("a residual model adds a layer's output to its input, so all are of one width")

        def norm_of_rows() -> torch.nn.Module:
            if norm is None:
                return torch.nn.Identity()
            made = normalization_resolver(norm, width, **(norm_kwargs or {}))
            assert isinstance(made, torch.nn.Module)
            return made

        self.lin_in = torch.nn.Linear(in_channels, width)
        self.norms = torch.nn.ModuleList(norm_of_rows() for _ in gnn.convs)
        self.convs = gnn.convs
        self.act = gnn.act
        self.dropout = gnn.dropout
        self.supports_edge_weight, self.supports_edge_attr = gnn.supports_edge_weight, gnn.supports_edge_attr
        self.norm_out = norm_of_rows()
        self.lin_out = torch.nn.Linear(width, out_channels)

    def forward(
        self,
        x: torch.Tensor,
        edge_index: torch.Tensor,
        edge_weight: torch.Tensor | None = None,
        edge_attr: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``x`` [N, in], ``edge_index`` [2, E] → [N, out]; what edges carry goes to layers that take it."""
        carried: dict[str, torch.Tensor | None] = {}
        if self.supports_edge_weight:
            carried["edge_weight"] = edge_weight
        if self.supports_edge_attr:
            carried["edge_attr"] = edge_attr
        x = self.lin_in(x)
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = x + self.dropout(self.act(conv(norm(x), edge_index, **carried)))
        out: torch.Tensor = self.lin_out(self.norm_out(x))
        return out
