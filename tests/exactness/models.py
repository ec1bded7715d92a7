# SPDX-License-Identifier: Apache-2.0
"""Models as users write them: residuals, branches, in-place sums, PyG's Sequential, propagation."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import (
    APPNP,
    GCN2Conv,
    GCNConv,
    GINConv,
    GraphConv,
    LayerNorm,
    SAGEConv,
    SGConv,
    TAGConv,
)
from torch_geometric.nn import Sequential as GraphSequential

from tests.exactness.layers import sum_over_edges

H = 8


def sum_at_targets(x: Tensor, edge_index: Tensor) -> Tensor:
    """A helper of models elsewhere, by another one."""
    return sum_over_edges(x, edge_index)


class Residual(nn.Module):
    """Pre-norm residual SAGE, as used on heterophilous graphs."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(features, H)
        self.norms = nn.ModuleList(nn.LayerNorm(H) for _ in range(3))
        self.convs = nn.ModuleList(SAGEConv(H, H) for _ in range(3))
        self.mlps = nn.ModuleList(nn.Sequential(nn.Dropout(0.2), nn.GELU(), nn.Linear(H, H)) for _ in range(3))
        self.last_norm = nn.LayerNorm(H)
        self.last = nn.Linear(H, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = F.gelu(F.dropout(self.first(x), 0.2, self.training))
        for norm, conv, mlp in zip(self.norms, self.convs, self.mlps, strict=True):
            x = x + mlp(conv(norm(x), edge_index))
        return self.last(self.last_norm(x))


class Dense(nn.Module):
    """Every layer sees all earlier ones; in-place sums, slices, a parameter of its own."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.a, self.b = GCNConv(features, H), GCNConv(features + H, H)
        self.c = GCNConv(features + 2 * H, 2 * classes)
        self.gate = nn.Parameter(torch.randn(H))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        xs = [x]
        h = self.a(x, edge_index).relu()
        h = h * torch.sigmoid(self.gate)
        xs.append(h)
        h = F.elu(self.b(torch.cat(xs, dim=1), edge_index))
        xs.append(0.5 * h)
        h = self.c(torch.cat(xs, dim=-1), edge_index)
        left, right = h.chunk(2, dim=-1)
        out = left * 2.0
        out += torch.tanh(right) - 0.1
        return out


class Branches(nn.Module):
    """Two convolutions side by side, of the same input and of different ones, and a row-wise path around both."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.skip = nn.Linear(features, H)
        self.left, self.right = SAGEConv(features, H), SAGEConv(features, H, root_weight=False)
        self.deep, self.shallow = SAGEConv(H, H), SAGEConv(H, H)
        self.out = SAGEConv(2 * H, classes)
        self.norm = LayerNorm(H)  # over the whole graph

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        skip = torch.tanh(self.skip(x))
        left = F.relu(self.left(x, edge_index))
        right = F.relu(self.right(x, edge_index)) + skip
        deep = F.dropout(self.deep(left, edge_index), 0.3, self.training)
        shallow = self.norm(self.shallow(right, edge_index))
        both = torch.cat([deep - left, torch.maximum(shallow, skip)], dim=1)
        return self.out(both, edge_index) + F.normalize(both[:, :H], dim=-1) @ self.skip.weight[:, :1] * 0.5


class SumsAndMaxima(nn.Module):
    """Two ways to aggregate in one model, one after the other and side by side."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first, self.largest = GCNConv(features, H), SAGEConv(H, H, aggr="max")
        self.left, self.right = GCNConv(H, classes), GraphConv(H, classes, aggr="max")

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.largest(F.relu(self.first(x, edge_index)), edge_index).tanh()
        return self.left(x, edge_index) + self.right(x, edge_index)


class GCNII(nn.Module):
    """GCN2Conv as in its paper."""

    def __init__(self, features: int, classes: int, *, shared: bool = True) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(features, H), nn.Linear(H, classes)
        self.convs = nn.ModuleList(
            GCN2Conv(H, alpha=0.2, theta=0.5, layer=k + 1, shared_weights=shared) for k in range(4)
        )

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = x_0 = F.dropout(x, 0.1, self.training) @ self.first.weight.T
        x = x_0 = self.first(x_0 @ self.first.weight).relu()
        for conv in self.convs:
            x = conv(F.dropout(x, 0.3, training=self.training), x_0, edge_index).relu()
        return self.last(x)


class Predicted(nn.Module):
    """Predict, then propagate (APPNP)."""

    def __init__(self, features: int, classes: int, *, hops: int = 4, alpha: float = 0.1) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Dropout(0.2), nn.Linear(features, H), nn.ReLU(), nn.Linear(H, classes))
        self.propagate = APPNP(hops, alpha)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(self.mlp(x), edge_index)


class Simplified(nn.Module):
    """SGC: linear after K hops; or in the middle of a model."""

    def __init__(self, features: int, classes: int, *, hops: int, cached: bool = False, deep: bool = False) -> None:
        super().__init__()
        self.first = SGConv(features, H if deep else classes, K=hops, cached=cached)
        self.second = SGConv(H, classes, K=hops) if deep else None

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x, edge_index)
        return x if self.second is None else self.second(x.relu(), edge_index)


class Graphs(nn.Module):
    """GraphConv on the features and in the middle of a model."""

    def __init__(self, features: int, classes: int, *, aggr: str = "add") -> None:
        super().__init__()
        self.first, self.second = GraphConv(features, H, aggr=aggr), GraphConv(H, H, aggr=aggr, bias=False)
        self.last = GraphConv(H, classes, aggr=aggr)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        x = self.first(x, edge_index, edge_weight).relu()
        x = x + self.second(x, edge_index, edge_weight).tanh()
        return self.last(x, edge_index, edge_weight)


class Adaptive(nn.Module):
    """TAGConv on the features, growing and shrinking in the middle of a model."""

    def __init__(self, features: int, classes: int, *, hops: int = 3, normalize: bool = True) -> None:
        super().__init__()
        self.first = TAGConv(features, H, hops, normalize=normalize)
        self.wider = TAGConv(H, H + 3, hops, bias=False, normalize=normalize)
        self.last = TAGConv(H + 3, classes, hops, normalize=normalize)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        x = self.first(x, edge_index, edge_weight).tanh()
        x = self.wider(x, edge_index, edge_weight).relu()
        return self.last(x, edge_index, edge_weight)


class DeepGIN(nn.Module):
    """GINConv around a network of its own, with BatchNorm in it and after it."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()

        def mlp(inputs: int, outputs: int) -> nn.Sequential:
            return nn.Sequential(nn.Linear(inputs, H), nn.BatchNorm1d(H), nn.ReLU(), nn.Linear(H, outputs))

        self.convs = nn.ModuleList([GINConv(mlp(features, H), train_eps=True), GINConv(mlp(H, H), eps=0.1)])
        self.norm, self.last = nn.BatchNorm1d(H), nn.Linear(H, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs:
            x = self.norm(conv(x, edge_index)).relu()
        return self.last(x)


class Frozen(nn.Module):
    """Trains its last layer and one bias only."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first, self.last = SAGEConv(features, H), SAGEConv(H, classes)
        for parameter in (self.first.lin_l.weight, self.first.lin_r.weight, self.last.lin_r.weight):
            parameter.requires_grad_(False)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.last(self.first(x, edge_index).relu(), edge_index)


def graph_sequential(features: int, classes: int) -> nn.Module:
    """PyG's Sequential, with a jump over a layer."""
    return GraphSequential(
        "x, edge_index",
        [
            (nn.Dropout(0.2), "x -> x"),
            (GCNConv(features, H), "x, edge_index -> x1"),
            nn.ReLU(inplace=True),
            (GCNConv(H, H), "x1, edge_index -> x2"),
            nn.ReLU(inplace=True),
            (lambda x1, x2: torch.cat([x1, x2], dim=1), "x1, x2 -> x"),
            nn.Linear(2 * H, classes),
        ],
    )


MODELS: dict[str, Callable[[int, int], nn.Module]] = {
    "residual": Residual,
    "dense": Dense,
    "branches": Branches,
    "sums and maxima": SumsAndMaxima,
    "GCNII": GCNII,
    "GCNII, two weights": lambda f, c: GCNII(f, c, shared=False),
    "APPNP": Predicted,
    "APPNP without teleport": lambda f, c: Predicted(f, c, hops=2, alpha=0.0),
    "SGC": lambda f, c: Simplified(f, c, hops=2),
    "SGC cached": lambda f, c: Simplified(f, c, hops=3, cached=True),
    "SGC of one hop": lambda f, c: Simplified(f, c, hops=1),
    "SGC twice": lambda f, c: Simplified(f, c, hops=2, deep=True),
    "GraphConv": Graphs,
    "GraphConv, mean": lambda f, c: Graphs(f, c, aggr="mean"),
    "GraphConv, max": lambda f, c: Graphs(f, c, aggr="max"),
    "TAG": Adaptive,
    "TAG, not normalised": lambda f, c: Adaptive(f, c, hops=2, normalize=False),
    "TAG of one hop": lambda f, c: Adaptive(f, c, hops=1),
    "GIN with batch norms": DeepGIN,
    "Sequential": graph_sequential,
    "frozen weights": Frozen,
    "a bare convolution": lambda f, c: SAGEConv(f, c),
}
