# SPDX-License-Identifier: Apache-2.0
"""Message-passing layers as users write them, and PyG's that nobody has taken apart, two of them a model."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import (
    AGNNConv,
    ClusterGCNConv,
    EdgeConv,
    FeaStConv,
    GCNConv,
    GENConv,
    GeneralConv,
    GINConv,
    GraphConv,
    LEConv,
    MessageNorm,
    MessagePassing,
    MFConv,
    PNAConv,
    PointNetConv,
    PointTransformerConv,
    ResGatedGraphConv,
    SAGEConv,
)
from torch_geometric.nn.aggr import AttentionalAggregation, DeepSetsAggregation, DegreeScalerAggregation, Set2Set
from torch_geometric.typing import OptTensor
from torch_geometric.utils import add_self_loops, scatter, softmax

H = 6
Make = Callable[[int, int], nn.Module]


class LeAsItIs(LEConv):
    """PyG's; but a subclass may do anything."""


class GatedAsItIs(ResGatedGraphConv):
    """PyG's own code, of which nothing is computed once a row since it is told of the edges."""

    def message(self, k_i: Tensor, q_j: Tensor, v_j: Tensor, edge_attr: Any, index: Tensor) -> Tensor:  # type: ignore[override]
        return super().message(k_i, q_j, v_j, edge_attr)


class MfAsItIs(MFConv):
    """The same."""


class MlpMessages(MessagePassing):
    """A network on every edge, of both ends, of which nothing is computed once a row since it is told of the edges;
    written for one kind of node."""

    def __init__(self, inputs: int, outputs: int, aggr: Any = "mean") -> None:
        super().__init__(aggr=aggr)
        self.mlp = nn.Sequential(nn.Linear(2 * inputs, H), nn.GELU(), nn.Linear(H, outputs))
        self.own = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.own(x) + self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor, index: Tensor) -> Tensor:
        return self.mlp(torch.cat([x_i, x_j - x_i], dim=-1))


class Cosine(MessagePassing):
    """Attention by angles, with self-loops of its own, and its last coefficients left lying about."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(aggr="add")
        self.linear = nn.Linear(inputs, outputs, bias=False)
        self.sharpness = nn.Parameter(torch.ones(1))
        self.last: Tensor | None = None

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        edges, _ = add_self_loops(edges, num_nodes=nodes.size(0))
        return self.propagate(edges, h=self.linear(nodes))

    def message(self, h_i: Tensor, h_j: Tensor, index: Tensor, size_i: int) -> Tensor:
        cosine = torch.cosine_similarity(h_i, h_j, dim=-1, eps=1e-6)
        self.last = softmax(self.sharpness * cosine, index, num_nodes=size_i)
        return self.last[:, None] * h_j


class Distances(MessagePassing):
    """By the distance of both ends, which has no gradient where they are the same."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(aggr="add")
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.linear(x)) + self.linear(x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return x_j / (x_i - x_j).square().sum(dim=-1, keepdim=True).sqrt()


class WeighedMessages(MessagePassing):
    """Takes weights or features of edges, whichever it is given."""

    def __init__(self, inputs: int, outputs: int, edge_dim: int | None = None) -> None:
        super().__init__(aggr="max" if edge_dim is None else "add")
        self.linear = nn.Linear(inputs, outputs)
        self.of_edges = None if edge_dim is None else nn.Linear(edge_dim, outputs)

    def forward(
        self, x: Tensor, edge_index: Tensor, edge_weight: OptTensor = None, edge_attr: OptTensor = None
    ) -> Tensor:
        return self.propagate(edge_index, x=self.linear(x), edge_weight=edge_weight, edge_attr=edge_attr)

    def message(self, x_j: Tensor, edge_weight: OptTensor, edge_attr: OptTensor) -> Tensor:
        if edge_weight is not None:
            x_j = x_j * edge_weight[:, None].tanh()
        return x_j if edge_attr is None or self.of_edges is None else x_j * self.of_edges(edge_attr).sigmoid()


class Two(nn.Module):
    """Two layers that ``make`` makes, and ReLU between them."""

    def __init__(self, features: int, classes: int, make: Make) -> None:
        super().__init__()
        self.first, self.second = make(features, H), make(H, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


class Carrying(nn.Module):
    """The same with what edges carry."""

    def __init__(self, features: int, classes: int, make: Make) -> None:
        super().__init__()
        self.first, self.second = make(features, H), make(H, classes)

    def forward(
        self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None, edge_attr: Tensor | None = None
    ) -> Tensor:
        carried = {"edge_weight": edge_weight} if edge_attr is None else {"edge_attr": edge_attr}
        return self.second(self.first(x, edge_index, **carried).tanh(), edge_index, **carried)


class Behind(nn.Module):
    """One such layer behind a linear map: its rows have gradients, and it is tried for rows of one width alone."""

    def __init__(self, features: int, classes: int, make: Make) -> None:
        super().__init__()
        self.before, self.layer = nn.Linear(features, H), make(H, classes)

    def forward(
        self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None, edge_attr: Tensor | None = None
    ) -> Tensor:
        carried = {} if edge_weight is None else {"edge_weight": edge_weight}
        carried |= {} if edge_attr is None else {"edge_attr": edge_attr}
        return self.layer(self.before(x).tanh(), edge_index, **carried)


class AmongOthers(nn.Module):
    """Layers of unknown insides between known ones, side by side, twice of the same rows, and around them."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first = GCNConv(features, H)
        self.left, self.right = MlpMessages(H, H), GatedAsItIs(H, H)
        self.far, self.sum = FeaStConv(H, H, heads=2), GCNConv(H, H, bias=False)
        self.norm = nn.BatchNorm1d(H)
        self.last = LeAsItIs(H, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        start = self.first(x, edge_index).relu()
        left, right = self.left(start, edge_index), self.right(start, edge_index)
        x = self.norm(self.sum(left.tanh() + start, edge_index)) + right
        x = F.dropout(x, 0.3, self.training)
        return self.last(x + self.far(start, edge_index), edge_index)


class NothingBetween(nn.Module):
    """One right after the other, and the first on rows that are computed from the features alone."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.before = nn.Linear(features, H)
        self.layers = nn.ModuleList([MlpMessages(H, H, "max"), LeAsItIs(H, H), SAGEConv(H, H), Cosine(H, classes)])

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.before(x)
        for layer in self.layers:
            x = layer(x, edge_index)
        return x


class PartlyFrozen(nn.Module):
    """The first layer is not trained, the second has a part that nothing comes of."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first, self.second = MlpMessages(features, H), MlpMessages(H, classes)
        self.first.requires_grad_(False)
        self.second.idle = nn.Linear(3, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


class Angles(nn.Module):
    """PyG's AGNN, which keeps the width, behind a linear map."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear, self.conv = nn.Linear(inputs, outputs), AGNNConv()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(self.linear(x), edge_index)


def edge_conv(inputs: int, outputs: int) -> nn.Module:
    """PyG's EdgeConv around a linear map."""
    return EdgeConv(nn.Sequential(nn.Linear(2 * inputs, outputs), nn.Tanh()))


DEGREES = torch.tensor([3, 8, 10, 4, 2, 1])
"""Of some other graph."""


class PnaAsItIs(PNAConv):
    """PyG's own code, as above."""


def principal(inputs: int, outputs: int) -> nn.Module:
    """PyG's PNA as it is."""
    return PnaAsItIs(inputs, outputs, ["mean", "std", "max"], ["identity", "amplification", "linear"], DEGREES)


def of_towers(inputs: int, outputs: int) -> nn.Module:
    """PyG's PNA with all that its formula knows: several inputs a tower, or a part of them each."""
    aggregators, towers = ["sum", "mean", "min", "max", "var", "std"], math.gcd(inputs, outputs)
    scalers = ["identity", "amplification", "attenuation", "linear", "inverse_linear"]
    options: dict[str, Any] = {"towers": towers, "divide_input": inputs == H, "post_layers": 2, "train_norm": True}
    return PNAConv(inputs, outputs, aggregators, scalers, DEGREES, **options)


def twice(make: Make) -> Make:
    """A model of two such layers."""
    return lambda features, classes: Two(features, classes, make)


def behind(make: Make) -> Make:
    """A model of one, behind a linear map."""
    return lambda features, classes: Behind(features, classes, make)


class Placed(nn.Module):
    """Layers that are given positions beside features, and a norm of what they give beside what they were given."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first = PointTransformerConv(features, H)
        self.norm, self.wider = MessageNorm(learn_scale=True), nn.Linear(features, H)
        self.second = PointNetConv(nn.Sequential(nn.Linear(H + 3, H), nn.Tanh()))
        self.head = nn.Linear(H, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        position, wide = x[:, :3], self.wider(x)
        h = wide + self.norm(wide, self.first(x, position, edge_index))
        return self.head(self.second(h, position, edge_index))


def scaled(inputs: int, outputs: int) -> nn.Module:
    """Extremes and more, each three times, by degrees."""
    inner, by = ["min", "max", "std", "sum"], ["identity", "amplification", "inverse_linear"]
    aggregation = DegreeScalerAggregation(inner, by, torch.tensor([0, 3, 5, 2, 1]), train_norm=True)
    return SAGEConv((12 * inputs, inputs), outputs, aggr=aggregation)


def squashed(width: int) -> nn.Module:
    """A network that works row by row."""
    return nn.Sequential(nn.Linear(width, width), nn.Tanh())


LAYERS: dict[str, Make] = {
    "an MLP on edges, mean": MlpMessages,
    "an MLP on edges, softmax": lambda i, o: MlpMessages(i, o, "softmax"),
    "an MLP on edges, std": lambda i, o: MlpMessages(i, o, "std"),
    "self-loops of its own": Cosine,
    "SAGEConv, softmax": lambda i, o: SAGEConv(i, o, aggr="softmax", aggr_kwargs={"learn": True}),
    "SAGEConv, several": lambda i, o: SAGEConv(i, o, aggr=["mean", "std"], project=True),
    "GraphConv, min": lambda i, o: GraphConv(i, o, aggr="min"),
    "SAGEConv, scaled by degrees": scaled,
    "GINConv, var": lambda i, o: GINConv(nn.Linear(i, o), train_eps=True, aggr="var"),
    "ResGatedGraphConv": ResGatedGraphConv,
    "GeneralConv": lambda i, o: GeneralConv(i, o, heads=2, l2_normalize=True),
    "SAGEConv, attentional": lambda i, o: SAGEConv(i, o, aggr=AttentionalAggregation(nn.Linear(i, 1), nn.Linear(i, i))),
    "SAGEConv, networks of sums": lambda i, o: SAGEConv(i, o, aggr=DeepSetsAggregation(squashed(i), nn.Linear(i, i))),
    "SAGEConv, sets": lambda i, o: SAGEConv((2 * i, i), o, aggr=Set2Set(i, processing_steps=3, num_layers=2)),
    "GeneralConv, attention": lambda i, o: GeneralConv(i, o, attention=True, heads=2, l2_normalize=True),
    "FeaStConv": lambda i, o: FeaStConv(i, o, heads=2),
    "LEConv": LeAsItIs,
    "PNAConv": of_towers,
    "PNAConv as it is": principal,
    "EdgeConv": edge_conv,
    "ClusterGCNConv": lambda i, o: ClusterGCNConv(i, o, diag_lambda=0.1),
    "MFConv": lambda i, o: MfAsItIs(i, o, max_degree=4),
    "GENConv": lambda i, o: GENConv(i, o, norm=None, learn_t=True),
    "AGNNConv": Angles,
    "SAGEConv, median": lambda i, o: SAGEConv(i, o, aggr="median"),
}

MODELS: dict[str, Make] = {
    "among others": AmongOthers,
    "nothing between": NothingBetween,
    "partly frozen": PartlyFrozen,
    "positions": Placed,
}


def sum_over_edges(x: Tensor, edge_index: Tensor) -> Tensor:
    return scatter(x[edge_index[0]], edge_index[1], dim_size=x.size(0))
