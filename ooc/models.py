# SPDX-License-Identifier: Apache-2.0
"""Models made of PyG's layers that PyG itself does not have; plain modules that need nothing else of ooc."""

import warnings
from typing import Any

import torch
from torch_geometric.nn import (
    HANConv,
    HeteroConv,
    HeteroDictLinear,
    HGTConv,
    MessagePassing,
    SAGEConv,
    TransformerConv,
    global_add_pool,
    global_max_pool,
    global_mean_pool,
)
from torch_geometric.nn.models.basic_gnn import BasicGNN
from torch_geometric.nn.resolver import normalization_resolver


class Transformer(BasicGNN):  # type: ignore[misc]  # PyG is not typed
    """``TransformerConv`` in the frame of PyG's other models: heads side by side, or averaged in a layer that gives the
    model's output."""

    supports_edge_weight = False
    supports_edge_attr = True

    def init_conv(self, in_channels: int | tuple[int, int], out_channels: int, **kwargs: Any) -> MessagePassing:
        """Return a convolution of ``out_channels`` columns, whatever ``heads`` are."""
        heads = int(kwargs.pop("heads", 1))
        concat = not getattr(self, "_is_conv_to_out", False)
        channels = out_channels // heads if concat else out_channels
        return TransformerConv(in_channels, channels, heads, concat=concat, dropout=self.dropout.p, **kwargs)


class Relational(torch.nn.Module):
    """Layers for graphs with types: the sum of a map of the mean over neighbours, one for each edge type, and a map of
    the node's own row: R-GCN (Schlichtkrull et al., ESWC 2018), by PyG's ``HeteroConv``.

    ``in_channels``: columns by node type; ``edge_types``: (source, relation, target). Of the last layer only rows of
    type ``target``, or of several types, are computed, and before that the rows these depend on. ``roots``: every edge
    type has a map of the row itself (``SAGEConv``) instead of one for all.
    """

    def __init__(
        self,
        in_channels: dict[str, int],
        edge_types: list[tuple[str, str, str]],
        hidden_channels: int,
        num_layers: int,
        out_channels: int,
        *,
        target: str | tuple[str, ...],
        dropout: float = 0.0,
        roots: bool = False,
    ) -> None:
        super().__init__()
        wanted = [{target} if isinstance(target, str) else {*target}]
        while len(wanted) < num_layers:
            sources = {source for source, _, to in edge_types if to in wanted[0]}
            wanted.insert(0, wanted[0] | sources)
        self.target, self.convs, self.own = target, torch.nn.ModuleList(), torch.nn.ModuleList()
        self.alone: list[list[str]] = []
        self.dropout = torch.nn.Dropout(dropout)
        widths = dict(in_channels)
        for layer, types in enumerate(wanted, start=1):
            columns = out_channels if layer == num_layers else hidden_channels
            relations = [one for one in edge_types if one[2] in types]
            convs = {
                one: SAGEConv((widths[one[0]], widths[one[2]]), columns, root_weight=roots, bias=roots)
                for one in relations
            }
            # For node types that are no target, which have separate maps.
            with warnings.catch_warnings(action="ignore"):
                self.convs.append(HeteroConv(convs, aggr="sum"))
            alone = types.difference(one[2] for one in relations) if roots else types
            self.alone.append(sorted(alone))
            self.own.append(torch.nn.ModuleList(torch.nn.Linear(widths[name], columns) for name in sorted(alone)))
            widths = dict.fromkeys(types, columns)

    def forward(
        self, x_dict: dict[str, torch.Tensor], edge_index_dict: dict[tuple[str, str, str], torch.Tensor]
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Map rows by node type and [2, E] by edge type to [N, out] of type ``target``; by type if there are
        several."""
        layers = zip(self.convs, self.alone, self.own, strict=True)
        for layer, (conv, names, own) in enumerate(layers, start=1):
            found = conv(x_dict, edge_index_dict)
            for name, linear in zip(names, own.children(), strict=True):
                rows = linear(x_dict[name])
                found[name] = found[name] + rows if name in found else rows
            x_dict = found
            if layer < len(self.convs):
                x_dict = {name: self.dropout(rows.relu()) for name, rows in found.items()}
        return x_dict[self.target] if isinstance(self.target, str) else {name: x_dict[name] for name in self.target}


class RelationalAttention(torch.nn.Module):
    """Attention over edges of several types: layers of ``HGTConv`` (Hu et al., WWW 2020), or with ``by_type`` of
    ``HANConv`` (Wang et al., WWW 2019), between linear maps. A node type without in-edges keeps its rows.

    ``in_channels``: columns by node type; ``edge_types``: (source, relation, target). The output has rows of type
    ``target``, or of several types. ``hidden_channels`` is the width of all ``heads`` together.
    """

    def __init__(
        self,
        in_channels: dict[str, int],
        edge_types: list[tuple[str, str, str]],
        hidden_channels: int,
        num_layers: int,
        out_channels: int,
        *,
        target: str | tuple[str, ...],
        heads: int = 1,
        dropout: float = 0.0,
        by_type: bool = False,
    ) -> None:
        super().__init__()
        self.target = target
        self.lift = HeteroDictLinear(in_channels, hidden_channels)
        self.dropout = torch.nn.Dropout(dropout)
        metadata, options = ([*in_channels], edge_types), {"dropout": dropout} if by_type else {}
        kind = HANConv if by_type else HGTConv
        self.convs = torch.nn.ModuleList(
            kind(hidden_channels, hidden_channels, metadata, heads=heads, **options) for _ in range(num_layers)
        )
        self.out = torch.nn.Linear(hidden_channels, out_channels)

    def forward(
        self, x_dict: dict[str, torch.Tensor], edge_index_dict: dict[tuple[str, str, str], torch.Tensor]
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Map rows by node type and [2, E] by edge type to [N, out] of type ``target``; by type if there are
        several."""
        x_dict = {name: rows.relu() for name, rows in self.lift(x_dict).items()}
        for conv in self.convs:
            x_dict = {name: self.dropout(rows) for name, rows in x_dict.items()}
            found = conv(x_dict, edge_index_dict)
            x_dict = x_dict | {name: rows for name, rows in found.items() if rows is not None}
        if not isinstance(self.target, str):
            return {name: self.out(x_dict[name]) for name in self.target}
        out: torch.Tensor = self.out(x_dict[self.target])
        return out


class Residual(torch.nn.Module):
    """Residual layers, h + dropout(act(conv(norm(h)))), between two linear maps.

    Deep models of this form hold their own on heterophilous graphs, where plain ones do not (Platonov et al., ICLR
    2023, whose layers are wider within). ``gnn`` gives convolutions, activation and dropout: one of PyG's models whose
    input, hidden and output columns all have one width H; its own norms are not used. Rows [N, ``in_channels``] become
    [N, ``out_channels``]. ``norm`` is as in PyG's models; one more is applied before the output.
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
        """Map ``x`` [N, in] and ``edge_index`` [2, E] to [N, out]; edge data goes to layers that take it."""
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


POOLS = {"add": global_add_pool, "mean": global_mean_pool, "max": global_max_pool}


class PathConv(torch.nn.Module):
    """Messages along paths of ``edges`` edges, two or three: the last node p of v0 → … → p gets W Σ relu(Σ W_t h(v_t))
    over the paths that end there. Rows [N, ``channels``] and ``path_index`` [edges + 1, P] become [N, ``channels``]."""

    def __init__(self, channels: int, edges: int) -> None:
        super().__init__()
        self.lins = torch.nn.ModuleList(torch.nn.Linear(channels, channels, bias=not at) for at in range(edges + 1))
        self.lin_out = torch.nn.Linear(channels, channels)

    def forward(self, x: torch.Tensor, path_index: torch.Tensor) -> torch.Tensor:
        """Compute the messages; see the class."""
        messages = self.lins[0](x).index_select(0, path_index[0])
        for lin, nodes in zip(self.lins[1:], path_index[1:], strict=True):
            messages = messages + lin(x).index_select(0, nodes)
        out: torch.Tensor = self.lin_out(torch.zeros_like(x).index_add(0, path_index[-1], messages.relu()))
        return out


class Pooled(torch.nn.Module):
    """A row of outputs for each graph, in four steps. ``gnn`` gives rows as wide as its ``out_channels``. With
    ``paths`` of two or three edges, a ``PathConv`` of these rows is added; with pairs of nodes ``hops`` apart, a
    ``SAGEConv`` along these pairs. Their sum, mean or maximum over a graph follows (``pool``: add, mean, max), then a
    linear map to ``out_channels``."""

    def __init__(
        self,
        gnn: torch.nn.Module,
        width: int,
        out_channels: int,
        *,
        pool: str = "mean",
        paths: int = 0,
        hops: int = 0,
    ) -> None:
        super().__init__()
        self.gnn, self.pool = gnn, pool
        self.path_conv = PathConv(width, paths) if paths else None
        self.hop_conv = SAGEConv(width, width) if hops else None
        self.lin_out = torch.nn.Linear(width, out_channels)

    def forward(
        self,
        x: torch.Tensor,
        edge_index: torch.Tensor,
        batch: torch.Tensor,
        edge_weight: torch.Tensor | None = None,
        edge_attr: torch.Tensor | None = None,
        path_index: torch.Tensor | None = None,
        batch_size: int | None = None,
        hop_index: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Map ``x`` [N, in], ``edge_index`` [2, E] and ``batch`` [N] to [graphs, out]. Raises ValueError for arguments
        that no part takes."""
        given: dict[str, Any] = {"batch": batch, "batch_size": batch_size} if isinstance(self.gnn, BasicGNN) else {}
        for name, value in (("edge_weight", edge_weight), ("edge_attr", edge_attr)):
            if value is not None:
                if not getattr(self.gnn, f"supports_{name}", False):
                    raise ValueError(f"{type(self.gnn).__name__} takes no {name}; leave it out with ignore_edge_data=")
                given[name] = value
        h = self.gnn(x, edge_index, **given)
        for made, conv in ((path_index, self.path_conv), (hop_index, self.hop_conv)):
            if (made is None) != (conv is None):
                raise ValueError("paths or hops are given to a model that has no part for them, or the other way round")
        if self.path_conv is not None:
            h = h + self.path_conv(h, path_index)
        if self.hop_conv is not None:
            h = h + self.hop_conv(h, hop_index)
        out: torch.Tensor = self.lin_out(POOLS[self.pool](h, batch, batch_size))
        return out
