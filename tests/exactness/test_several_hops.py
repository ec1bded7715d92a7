# SPDX-License-Identifier: Apache-2.0
"""Convolutions of several hops in one layer, and those with a norm over all rows inside, are PyG's."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import (
    AntiSymmetricConv,
    ARMAConv,
    ChebConv,
    ClusterGCNConv,
    DirGNNConv,
    EGConv,
    GATConv,
    GatedGraphConv,
    GCNConv,
    GENConv,
    GraphConv,
    HypergraphConv,
    LEConv,
    LGConv,
    MFConv,
    MixHopConv,
    ResGatedGraphConv,
    SAGEConv,
    SGConv,
    SimpleConv,
    SSGConv,
    WLConvContinuous,
)
from torch_geometric.nn.aggr import VariancePreservingAggregation
from torch_geometric.nn.models import GCN

import ooc
from ooc.errors import ModelError
from tests.exactness.comparison import DIRECTIONS, assert_agrees, in_turn, least, make_trainer, store_of
from tests.exactness.layers import Two
from tests.exactness.reference import CustomCase
from tests.exactness.test_savings import in_hop_order
from tests.examples import cases
from tests.graphs import GraphCase, random_data

EPOCHS = 2
HUB: dict[str, Any] = {"nodes": 60, "edges": 140, "self_loops": 9, "isolated": 7, "duplicates": 15, "unlabelled": 8}


class Light(nn.Module):
    """What LightGCN does: the layers' outputs added up."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.before, self.first, self.second = nn.Linear(features, 6), LGConv(), LGConv(normalize=False)
        self.after = nn.Linear(6, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        start = self.before(x)
        once = self.first(start, edge_index)
        out: Tensor = self.after(start + once + self.second(once, edge_index))
        return out


class Chebyshev(nn.Module):
    """With PyG's λ and with another one."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first, self.third = ChebConv(features, 6, 4), ChebConv(6, 6, 3, normalization="rw")
        self.second = ChebConv(6, 6, 2, bias=False, normalization="rw")
        self.fourth = ChebConv(6, 6, 3, normalization=None)
        self.after = nn.Linear(6, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x, edge_index).relu()
        x = self.third(self.second(x, edge_index, lambda_max=1.7).relu(), edge_index)
        x = self.fourth(x.tanh(), edge_index, lambda_max=9, batch=torch.zeros(x.size(0), dtype=torch.long))
        out: Tensor = self.after(x)
        return out


class Mixed(nn.Module):
    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first = MixHopConv(features, 5, powers=[1, 0, 3, 1])
        self.second = MixHopConv(20, classes, powers=[2], bias=False, add_self_loops=False)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x, edge_index).relu(), edge_index)
        return out


class Gated(nn.Module):
    """Wider than its input, and of maxima."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first, self.second = GatedGraphConv(features + 3, 2), GatedGraphConv(features + 3, 1, aggr="max")
        self.after = nn.Linear(features + 3, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.after(self.second(self.first(x, edge_index), edge_index))
        return out


class Antisymmetric(nn.Module):
    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first, self.after = AntiSymmetricConv(features, num_iters=2), nn.Linear(features, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.after(self.first(x, edge_index))
        return out


class Sums(nn.Module):
    """Of one hop each, in all ways."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first, self.second, self.third = LEConv(features, 6), SimpleConv(combine_root="cat"), WLConvContinuous()
        self.fourth, self.last = (
            SimpleConv("mean", combine_root="self_loop"),
            SAGEConv(12, classes, aggr=VariancePreservingAggregation()),
        )

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.third(self.second(self.first(x, edge_index).tanh(), edge_index), edge_index)
        out: Tensor = self.last(self.fourth(x, edge_index), edge_index)
        return out


class Attending(nn.Module):
    """Hyperedges with features of their own, which nodes attend to, or are attended by."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        options = {"use_attention": True, "heads": 2}
        self.first = HypergraphConv(features, 4, attention_mode="node", **options)
        self.last = HypergraphConv(8, classes, attention_mode="edge", concat=False, **options)
        self.of_hyperedges = nn.Linear(features, 8)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        first = self.first(x, edge_index, hyperedge_attr=x).tanh()
        out: Tensor = self.last(first, edge_index, None, self.of_hyperedges(x))
        return out


def twice(make: Any) -> CustomCase:
    return CustomCase(make=lambda features, classes: Two(features, classes, make))


CASES = {
    "LGConv": CustomCase(make=Light),
    "SSGConv": twice(lambda i, o: SSGConv(i, o, alpha=0.2, K=3)),
    "SSGConv, no loops": twice(lambda i, o: SSGConv(i, o, alpha=0.0, K=2, add_self_loops=False, bias=False)),
    "ChebConv": CustomCase(make=Chebyshev),
    "MixHopConv": CustomCase(make=Mixed),
    "ARMAConv": twice(lambda i, o: ARMAConv(i, o, num_stacks=3, num_layers=2, dropout=0.3)),
    "ARMAConv, shared": twice(lambda i, o: ARMAConv(i, o, num_layers=3, shared_weights=True, act=None, bias=False)),
    "GatedGraphConv": CustomCase(make=Gated),
    "EGConv": twice(lambda i, o: EGConv(i, o, num_heads=2, num_bases=3)),
    "EGConv, several": twice(
        lambda i, o: EGConv(i, o, num_heads=2, aggregators=["symnorm", "std", "min", "mean"], add_self_loops=False)
    ),
    "EGConv as it is": twice(lambda i, o: EGConv(i, o, num_heads=2, num_bases=2, aggregators=["std", "symnorm"])),
    "GENConv with batch norm": twice(lambda i, o: GENConv(i, o, learn_t=True)),
    "GENConv": twice(lambda i, o: GENConv(i, o, norm="layer", t=0.7, msg_norm=True)),
    "AntiSymmetricConv": CustomCase(make=Antisymmetric),
    "HypergraphConv": twice(HypergraphConv),
    "HypergraphConv, attention": CustomCase(make=Attending),
    "MFConv": twice(lambda i, o: MFConv(i, o, max_degree=4)),
    "ClusterGCNConv": twice(ClusterGCNConv),
    "ClusterGCNConv as it is": twice(lambda i, o: ClusterGCNConv(i, o, diag_lambda=0.3)),
    "sums": CustomCase(make=Sums),
    "ARMAConv, an activation across columns": twice(
        lambda i, o: ARMAConv(i, o, num_stacks=2, act=nn.Sequential(nn.LayerNorm(o), nn.Softmax(dim=-1)))
    ),
}
IN_LEAST_MEMORY = ("LGConv", "ChebConv", "MixHopConv", "GatedGraphConv", "HypergraphConv")


@pytest.mark.thorough(
    "SSGConv, no loops-directed",
    "ARMAConv, shared-directed",
    "GENConv with batch norm-undirected",
    "ClusterGCNConv as it is-directed",
    "EGConv as it is-directed",
    "ChebConv-undirected",
    "GatedGraphConv-undirected",
    "HypergraphConv-directed",
)
@pytest.mark.parametrize(
    ("name", "undirected"), in_turn(CASES, DIRECTIONS, all_ways={"ChebConv", "GatedGraphConv", "HypergraphConv"})
)
def test_layers(name: str, undirected: bool, tmp_path: Path) -> None:
    """Losses, gradients, buffers and scores; on a directed graph some in the least memory, on another by slabs."""
    data = random_data(GraphCase(**HUB, undirected=undirected))
    store = store_of(data, tmp_path)
    options: dict[str, Any] = {"slab_columns": 3} if undirected else {}
    if not undirected and name in cases(IN_LEAST_MEMORY, CASES):
        options = least(CASES[name], store, tmp_path)
    assert_agrees(CASES[name], data, tmp_path, epochs=EPOCHS, store=store, **options)


def test_weights_of_edges(tmp_path: Path) -> None:
    """Go to those that sum by them."""

    class Weighted(nn.Module):
        def __init__(self, features: int, classes: int) -> None:
            super().__init__()
            self.first, self.second = SSGConv(features, 6, alpha=0.1, K=2), GatedGraphConv(6, 2)
            self.third, self.last = ARMAConv(6, 6), MixHopConv(6, classes, powers=[1])
            self.fourth = nn.ModuleList([ChebConv(6, 6, 3), ChebConv(6, 6, 2, normalization="rw")])
            self.fifth = LEConv(6, 6)
            self.sixth, self.seventh = SimpleConv(combine_root="self_loop"), WLConvContinuous()
            self.means = nn.ModuleList([SimpleConv("mean"), SimpleConv("max", combine_root="sum")])

        def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
            for conv in (
                self.first,
                self.second,
                self.third,
                *self.fourth,
                self.fifth,
                self.sixth,
                self.seventh,
                *self.means,
            ):
                x = conv(x, edge_index, edge_weight).tanh()
            out: Tensor = self.last(x, edge_index, edge_weight)
            return out

    assert_agrees(CustomCase(make=Weighted), random_data(GraphCase(**HUB, weighted=True)), tmp_path, epochs=EPOCHS)


def test_a_laplacian_of_weights_below_zero_is_refused(tmp_path: Path) -> None:
    """PyG's λ would be twice its largest entry, which need not be 1 then."""

    class Weighted(nn.Module):
        def __init__(self, features: int, classes: int) -> None:
            super().__init__()
            self.conv = ChebConv(features, classes, 3)

        def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
            out: Tensor = self.conv(x, edge_index, edge_weight)
            return out

    data = random_data(GraphCase(weighted=True))
    data.edge_weight[3] = -1e-3
    with pytest.raises(ModelError, match="has a weight below 0: ChebConv"):
        make_trainer(CustomCase(make=Weighted), store_of(data, tmp_path), tmp_path)


REFUSED = [
    (lambda i, o: ChebConv(i, o, 3, normalization=None), "with a number as lambda_max"),
    (lambda i, o: SSGConv(i, o, alpha=0.2, K=2, cached=True), "cached=True keeps the first epoch's"),
    (lambda i, o: GatedGraphConv(2, 1), "The number of input channels is not allowed to be larger"),
    (lambda i, o: ChebConv(i, o, 3, aggr="mean"), "aggr='mean' is not supported"),
    (lambda i, o: SSGConv(i, o, alpha=0.1, aggr="max"), "aggr='max' is not supported"),
    (
        lambda i, o: EGConv(i, o, ["std", "sum"], num_heads=2),
        "PyG adds none to the last ones where these have no edges",
    ),
    (lambda i, o: HypergraphConv(i, o, use_attention=True), "hyperedge_attr must be one matrix of rows"),
]


@pytest.mark.parametrize(("make", "reason"), REFUSED, ids=[reason[:20] for _, reason in REFUSED])
def test_what_is_refused_is_named(make: Any, reason: str, tmp_path: Path) -> None:
    store = store_of(random_data(GraphCase()), tmp_path)
    with pytest.raises(ModelError, match=reason):
        make_trainer(twice(make), store, tmp_path)


def test_loops_are_not_rounded_away(tmp_path: Path) -> None:
    """A Laplacian's self-loops are taken off its sum: not where that is kept in half the bytes."""
    store = store_of(random_data(GraphCase(**HUB), dtype=torch.float32), tmp_path)
    with pytest.raises(ooc.OptionError, match="ChebConv on a graph with self-loops"):
        make_trainer(CASES["ChebConv"], store, tmp_path, dtype=torch.float32, spill_dtype="bfloat16")


class Directed(nn.Module):
    """Both ways along the edges."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first = DirGNNConv(SAGEConv(features, 6), alpha=0.3)
        self.second = DirGNNConv(GCNConv(6, 6), root_weight=False)
        self.last = DirGNNConv(GraphConv(6, classes, aggr="add"))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x, edge_index).relu()
        x = F.dropout(self.second(x, edge_index).tanh(), 0.3, self.training)
        out: Tensor = self.last(x, edge_index)
        return out


class Backwards(nn.Module):
    """Layers that flow from targets to sources, and edges that the model turns round itself."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first = GCNConv(features, 6, flow="target_to_source")
        self.second = SAGEConv(6, 6, aggr=["mean", "std"], flow="target_to_source")
        self.third = SGConv(6, classes, K=2)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.second(self.first(x, edge_index).relu(), edge_index).relu()
        out: Tensor = self.third(x, torch.flip(edge_index, dims=[0]))
        return out


class BackwardsAsTheyAre(nn.Module):
    """The same of layers that run as they are, some of them because of that."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first, self.second = GATConv(features, 6, flow="target_to_source"), SAGEConv(6, 6, "max")
        self.last = ResGatedGraphConv(6, classes, flow="target_to_source")

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.second(self.first(x, edge_index).relu(), edge_index[[1, 0]])
        out: Tensor = self.last(x.tanh(), edge_index)
        return out


AGAINST = {
    "DirGNNConv": CustomCase(make=Directed),
    "flow": CustomCase(make=Backwards),
    "as they are": CustomCase(make=BackwardsAsTheyAre),
}


@pytest.mark.thorough("DirGNNConv-True-none", "flow-True-hop")
@pytest.mark.parametrize(
    ("name", "undirected", "order"),
    [
        ("DirGNNConv", False, "hop"),
        ("DirGNNConv", True, "none"),
        ("flow", False, "none"),
        ("flow", True, "hop"),
        ("as they are", False, "hop"),
    ],
)
def test_against_the_edges(name: str, undirected: bool, order: str, tmp_path: Path) -> None:
    """In hop order, too, which goes along them: what lies before such a sum is needed of every row."""
    data = random_data(GraphCase(**HUB | {"unlabelled": 40}, undirected=undirected))
    store, data = in_hop_order(data, tmp_path) if order == "hop" else (store_of(data, tmp_path), data)
    options = least(AGAINST[name], store, tmp_path)
    assert_agrees(AGAINST[name], data, tmp_path, epochs=EPOCHS, store=store, **options)


def test_weighted_sums_go_with_the_edges(tmp_path: Path) -> None:
    store = store_of(random_data(GraphCase(weighted=True)), tmp_path)
    case = CustomCase(make=lambda f, c: GCN(f, 6, 2, c, flow="target_to_source"))
    with pytest.raises(ModelError, match="edges the other way round are supported for sums"):
        make_trainer(case, store, tmp_path)
