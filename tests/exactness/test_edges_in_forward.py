# SPDX-License-Identifier: Apache-2.0
"""What a model computes of edges in its own forward is exact, also of a node of many edges, which come in pieces."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import (
    GATConv,
    GCNConv,
    GINEConv,
    MaxAggregation,
    MedianAggregation,
    MessagePassing,
    MetaLayer,
    SAGEConv,
)
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import (
    add_self_loops,
    degree,
    dropout_edge,
    get_laplacian,
    remove_self_loops,
    scatter,
    softmax,
    sort_edge_index,
    to_undirected,
)

from ooc.errors import ModelError
from ooc.kernels import neighbourhood
from ooc.model.layers import opaque
from ooc.storage.store import Store
from tests.exactness import models
from tests.exactness.comparison import FLOOR, TOLERANCE, assert_agrees, least, make_trainer, store_of, train_epoch
from tests.exactness.reference import CustomCase, Reference, adam, disagreement
from tests.examples import every_other
from tests.graphs import GraphCase, random_data

H, K, HUB = 6, 3, 5
Forward = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
"""The net, rows [N, H], edges [2, E] and rows of edges [E, H] → rows [N, H]."""


class EdgeModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(3 * H, H)

    def forward(self, source: Tensor, target: Tensor, e: Tensor, u: None, batch: None) -> Tensor:
        found: Tensor = self.map(torch.cat((source, target, e), dim=1))
        return found.relu()


class NodeModel(nn.Module):
    def forward(self, x: Tensor, edge_index: Tensor, e: Tensor, u: None, batch: None) -> Tensor:
        found: Tensor = scatter(e, edge_index[1], dim=0, dim_size=x.size(0), reduce="mean")
        return x + found


class Processor(MessagePassing):
    """Gives rows of nodes and of edges, as simulators on meshes are written."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")
        self.map, self.root = nn.Linear(3 * H, H), nn.Linear(2 * H, H)

    def forward(self, x: Tensor, edge_index: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        found, e = self.propagate(edge_index, x=x, e=e)
        return x + self.root(torch.cat((x, found), dim=1)).tanh(), e

    def message(self, x_i: Tensor, x_j: Tensor, e: Tensor) -> Tensor:
        found: Tensor = e + self.map(torch.cat((x_i, x_j, e), dim=1)).tanh()
        return found

    def aggregate(
        self,
        inputs: Tensor,
        index: Tensor,
        dim_size: Optional[int] = None,  # noqa: UP045  # PyG knows no unions by |
    ) -> tuple[Tensor, Tensor]:
        return scatter(inputs, index, dim=0, dim_size=dim_size, reduce="mean"), inputs


class Net(nn.Module):
    def __init__(self, features: int, classes: int, between: Forward) -> None:
        super().__init__()
        self.nodes, self.edges, self.out = nn.Linear(features, H), nn.Linear(K, H), nn.Linear(H, classes)
        self.map, self.norm = nn.Sequential(nn.Linear(3 * H, H), nn.ReLU(), nn.LayerNorm(H)), nn.BatchNorm1d(H)
        self.scale, self.score = nn.Parameter(torch.ones(H)), nn.Linear(2 * H, 1)
        self.plain, self.gcn, self.sage = GCNConv(H, H, normalize=False), GCNConv(H, H), SAGEConv(H, H)
        self.gat, self.gine = GATConv(H, H, edge_dim=H), GINEConv(nn.Linear(H, H))
        self.highest, self.median = MaxAggregation(), MedianAggregation()
        self.meta = nn.ModuleList(MetaLayer(EdgeModel(), NodeModel()) for _ in range(2))
        self.processors = nn.ModuleList(Processor() for _ in range(2))
        self.between = [between]

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        found: Tensor = self.out(self.between[0](self, self.nodes(x).tanh(), edge_index, self.edges(edge_attr)))
        return found


def means(net: Net, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
    return scatter(x[edge_index[0]] * e * net.scale.exp(), edge_index[1], dim=0, dim_size=x.size(0), reduce="mean")


def maxima_at_sources(net: Net, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
    return scatter(x[edge_index[1]] * e, edge_index[0], dim=0, dim_size=x.size(0), reduce="max")


def attention(net: Net, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
    row, col = edge_index
    scores = F.leaky_relu(net.score(torch.cat((x[row], x[col] + e), dim=1))).squeeze(-1)
    return x + torch.zeros_like(x).index_add_(0, col, softmax(scores, col, num_nodes=x.size(0))[:, None] * x[row])


def added_at_sources(net: Net, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
    row, col = edge_index
    found = torch.zeros(x.size(0), H, dtype=x.dtype)
    return found.scatter_add_(0, row.unsqueeze(-1).expand_as(e), x[col] + e)


def both_ways(net: Net, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
    row, col = edge_index
    found = scatter(x.index_select(0, row) + e, col, dim=0, dim_size=x.size(0))
    return found - scatter(x[col], row, dim=0, dim_size=x.size(0), reduce="mean")


def normalizing_again(net: Net, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
    return net.gcn(x * means(net, x, edge_index, e), remove_self_loops(edge_index)[0])  # type: ignore[no-any-return]


def ends_stacked(net: Net, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
    """They are the graph's edges as they are, and the other way round: for formulas, and for a softmax over edges from
    a node."""
    row, col = edge_index
    x, back = net.gcn(x, torch.stack((row, col))).tanh(), torch.stack([col, row], dim=0)
    shares = softmax(net.score(torch.cat((x[back[0]], x[back[1]]), dim=1)), back[1], num_nodes=x.size(0))
    return net.sage(x, back) + scatter(shares * (x[back[0]] + e), back[1], dim=0, dim_size=x.size(0))  # type: ignore[no-any-return]


def norms_of_degrees(net: Net, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
    row, col = edge_index
    roots = degree(col, x.size(0), dtype=x.dtype).pow(-0.5)
    roots.masked_fill_(roots == torch.inf, 0)
    weight = roots[row] * roots[col] * e.mean(dim=1).exp()
    return net.plain(net.plain(x, edge_index, weight).tanh(), edge_index, weight)  # type: ignore[no-any-return]


def norms_of_pyg(net: Net, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
    edge_index, weight = gcn_norm(edge_index, e.mean(dim=1).exp(), x.size(0))
    return net.plain(net.plain(x, edge_index, weight).tanh(), edge_index, weight)  # type: ignore[no-any-return]


def laplacian(net: Net, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
    """Whose function asks, as this one does, whether stand-ins are tensors."""
    assert isinstance(x, Tensor) and torch.is_tensor(e) and isinstance(x.max(dim=1), tuple)
    edge_index, weight = get_laplacian(edge_index, e.mean(dim=1).exp(), "sym", num_nodes=x.size(0))
    return net.plain(net.plain(x, edge_index, weight).tanh(), edge_index, weight)  # type: ignore[no-any-return]


def whole_numbers(net: Net, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
    """Of edges, which become rows when they are made numbers of their type."""
    row, col = edge_index
    x = x + torch.bincount(col, minlength=x.size(0)).to(x.dtype)[:, None]
    x = x * row.bincount(minlength=x.size(0)).view(-1, 1).double().sqrt()
    kinds = degree(row, x.size(0)).long().clamp(max=2)
    return net.gine(x, edge_index, e) + F.one_hot(kinds, H) + degree(col, x.size(0), dtype=torch.int).unsqueeze(-1)  # type: ignore[no-any-return]


def self_loops(net: Net, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
    edge_index, e = remove_self_loops(edge_index, e)
    edge_index, e = add_self_loops(edge_index, e, fill_value=1.0, num_nodes=x.size(0))
    return net.gine(net.sage(x, edge_index), edge_index, e)  # type: ignore[no-any-return]


def in_order(net: Net, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
    edge_index, e = sort_edge_index(edge_index, e)
    return scatter(x[edge_index[0]] * e, edge_index[1], dim=0, dim_size=x.size(0))


def weights_by_ends(net: Net, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
    weight = F.cosine_similarity(x[edge_index[0]] + e, x[edge_index[1]], dim=-1).clamp(min=0)
    return net.plain(x, edge_index, weight)  # type: ignore[no-any-return]


def constants_and_helpers(net: Net, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
    """Tensors that forward makes, in weights of a layer and as an index; PyG's functions by other names and in another
    module's helper."""
    from torch_geometric import utils

    back = edge_index[torch.tensor([1, 0])]
    x = x + utils.scatter(x[back[0]] * (e * torch.tensor(0.5, dtype=x.dtype)), back[1], dim=0, dim_size=x.size(0))
    weight = (e.mean(dim=1).exp() + torch.tensor([0.1])) * torch.tensor(2.0)
    x = torch.index_select(x.tanh(), 1, torch.arange(H - 1, -1, -1))  # PyG has put a function of its own in torch
    return models.sum_at_targets(net.plain(x, edge_index, weight), edge_index)


def states(net: Net, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
    row, col = edge_index
    for _ in range(2):
        e = e + net.map(torch.cat((e, x[row], x[col]), dim=-1))
        x = x + scatter(e, col, dim=0, dim_size=x.size(0), reduce="mean")
    return x


def states_for_layers(net: Net, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
    x = net.gine(x, edge_index, e).tanh()
    e = e + net.map(torch.cat((e, x[edge_index[0]], x[edge_index[1]]), dim=-1))
    return net.gat(x, edge_index, e)  # type: ignore[no-any-return]


def aggregators(net: Net, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
    messages = x[edge_index[0]] + e
    found: Tensor = net.highest(messages, edge_index[1], dim_size=x.size(0), dim=0)
    return found + net.median(messages, edge_index[1], dim_size=x.size(0), dim=0)  # type: ignore[no-any-return]


def meta_layers(net: Net, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
    for layer in net.meta:
        x, e, _ = layer(x, edge_index, e)
    return x


def processors(net: Net, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
    for layer in net.processors:
        x, e = layer(x, edge_index, e)
    return x


def matrices(net: Net, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
    edge_index, weight = gcn_norm(edge_index, e[:, 0].abs(), x.size(0), add_self_loops=False, dtype=x.dtype)
    row, col = edge_index
    matrix = torch.sparse_coo_tensor(torch.stack([col, row]), weight, (x.size(0), x.size(0))).coalesce()
    for turned in (edge_index.flip(0), edge_index[[1, 0]]):
        same = torch.sparse_coo_tensor(turned, weight, (x.size(0), x.size(0))).to(x.dtype)
        x = x + torch.spmm(same.t(), x) / torch.tensor(x.shape[1]).sqrt()
    return torch.sparse.mm(matrix, matrix @ x.tanh())


def no_edges_dropped(net: Net, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
    edge_index, kept = dropout_edge(edge_index, p=0.0, training=net.training)
    edge_index, _ = dropout_edge(edge_index, training=False)
    return net.sage(x, edge_index) + scatter(e * kept[:, None], edge_index[1], dim=0, dim_size=x.size(0))  # type: ignore[no-any-return]


MODELS: list[Forward] = [
    *(means, maxima_at_sources, attention, added_at_sources, both_ways, norms_of_degrees, norms_of_pyg, laplacian),
    matrices,
    *(
        normalizing_again,
        ends_stacked,
        whole_numbers,
        self_loops,
        in_order,
        weights_by_ends,
        constants_and_helpers,
        states,
        states_for_layers,
        aggregators,
        meta_layers,
        processors,
        no_edges_dropped,
    ),
]


def case_of(between: Forward) -> CustomCase:
    return CustomCase(make=lambda features, classes: Net(features, classes, between))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Data, Store]:
    """A graph of which one node has edges from and to 40 others; three features an edge."""
    data = random_data(
        GraphCase(nodes=48, edges=90, self_loops=5, isolated=4, duplicates=5, unlabelled=4, edge_features=K)
    )
    others = torch.arange(8, 48)
    hub = torch.full_like(others, HUB)
    more = torch.cat((torch.stack((others, hub)), torch.stack((hub, others))), dim=1)
    data.edge_index = torch.cat((data.edge_index, more), dim=1)
    data.edge_attr = torch.cat((data.edge_attr, torch.linspace(-1, 1, K * more.shape[1]).double().view(-1, K)))
    return data, store_of(data, tmp_path_factory.mktemp("hub"))


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbourhood, "EDGES_AT_ONCE", 16)
    monkeypatch.setattr(opaque, "_WAITING_BYTES", 1 << 10)


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.thorough("norms_of_degrees", "norms_of_pyg", "meta_layers", "added_at_sources", "states")
@pytest.mark.parametrize("between", MODELS, ids=lambda one: one.__name__)
def test_losses_and_gradients_are_pygs(between: Forward, shared: tuple[Data, Store], tmp_path: Path) -> None:
    data, store = shared
    assert_agrees(case_of(between), data, tmp_path, store=store, tile_rows=16)


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.thorough("norms_of_pyg", "processors")
@pytest.mark.parametrize("between", [norms_of_pyg, states, processors], ids=lambda one: one.__name__)
def test_the_same_bits_in_the_least_memory(between: Forward, shared: tuple[Data, Store], tmp_path: Path) -> None:
    """Which are PyG's but for rounding."""
    data, store = shared
    case, found = case_of(between), []
    for options in ({}, least(case, store, tmp_path, tile_rows=16)):
        with make_trainer(case, store, tmp_path, tile_rows=16, **options) as trainer:
            reference = Reference(case, trainer.model, data, adam)
            found.append([train_epoch(trainer) for _ in range(2)])
            assert bool(options) == (trainer.plan.ssd_write_bytes > 0)
    for epoch in found[0]:
        difference, whose = disagreement(epoch, reference.train(), floor=FLOOR[torch.float64])
        assert difference <= TOLERANCE[torch.float64], whose
    assert [one.loss for one in found[0]] == [one.loss for one in found[1]]
    for name, gradient in found[0][-1].gradients.items():
        assert torch.equal(gradient, found[1][-1].gradients[name])


def dropped(net: Net, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
    e = F.dropout(e + x[edge_index[0]], 0.5, net.training)
    return scatter(e, edge_index[1], dim=0, dim_size=x.size(0))


def noise(net: Net, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
    return scatter(x[edge_index[0]] * torch.rand_like(e), edge_index[1], dim=0, dim_size=x.size(0))


def other_edges(net: Net, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
    return net.sage(x, dropout_edge(edge_index, training=net.training)[0])  # type: ignore[no-any-return]


def norm_of_edges(net: Net, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
    return scatter(net.norm(e + x[edge_index[0]]), edge_index[1], dim=0, dim_size=x.size(0))


def mean_of_edges(net: Net, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
    return scatter(e - e.mean(dim=0), edge_index[1], dim=0, dim_size=x.size(0)) + x


def reversed_edges(net: Net, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
    return net.sage(x, to_undirected(edge_index, num_nodes=x.size(0)))  # type: ignore[no-any-return]


def ends_turned(net: Net, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
    return net.sage(x, torch.stack(edge_index.unbind()[::-1]))  # type: ignore[no-any-return]


def of_unknown_number(net: Net, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
    return scatter(e, edge_index[1], dim=0)


def flipped_too(net: Net, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
    messages = x[edge_index[0]] - x[edge_index.flip(0)[0]]
    return scatter(messages, edge_index[1], dim=0, dim_size=x.size(0))


def put_by_edges(net: Net, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
    found = torch.zeros_like(x)
    found[edge_index[1]] = e
    return found


def view_of_sums(net: Net, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
    found = torch.zeros_like(x)
    view = found.view(-1, 2, H // 2)
    found.index_add_(0, edge_index[1], e)
    return view.flatten(1)


def product(net: Net, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
    return torch.spmm(edge_index, x)


def matrix_of_known_size(net: Net, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(edge_index, e[:, 0], (48, 48)) @ x


def power_of_a_matrix(net: Net, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
    matrix = torch.sparse_coo_tensor(edge_index, e[:, 0], (x.size(0), x.size(0)))
    return (matrix @ matrix) @ x


def sum_of_a_matrix(net: Net, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
    return x * torch.sparse.sum(torch.sparse_coo_tensor(edge_index, e[:, 0], (x.size(0), x.size(0))))


def matrix_for_a_layer(net: Net, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
    return net.sage(x, torch.sparse_coo_tensor(edge_index, e[:, 0], (x.size(0), x.size(0))))  # type: ignore[no-any-return]


REFUSED: dict[Forward, tuple[str, ...]] = {
    product: ("mm takes the edges for a matrix; its product with rows is SimpleConv(aggr='sum')",),
    matrix_of_known_size: ("sparse_coo_tensor takes the edges for a matrix", "(x.size(0), x.size(0))"),
    power_of_a_matrix: ("a product with something else than a matrix of rows is not supported",),
    sum_of_a_matrix: ("sparse_sum is not supported",),
    matrix_for_a_layer: ("a layer that is given it", "layers take edge_index and edge_weight"),
    dropped: ("dropout of what edges carry", "line"),
    noise: ("rand_like: dropout of what edges carry",),
    other_edges: ("dropout_edge: other edges in every epoch are not supported",),
    norm_of_edges: ("its buffer", "running_mean"),
    mean_of_edges: ("depends on more than the node, its in-neighbours",),
    ends_turned: ("SAGEConv (sage): what it gives for a node depends on more",),
    reversed_edges: ("SAGEConv (sage): what it gives for a node depends on more",),
    flipped_too: ("the edges both ways round",),
    put_by_edges: ("item assignment is given the edges; scatter and index_add",),
    view_of_sums: ("index_add_ writes into a matrix that is used again",),
    of_unknown_number: ("not one row of numbers a node", "dim_size=x.size(0)"),
}


@pytest.mark.parametrize("between", REFUSED, ids=lambda one: one.__name__)
def test_what_is_not_exact_is_refused(between: Forward, shared: tuple[Data, Store], tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        make_trainer(case_of(between), shared[1], tmp_path)
    assert all(part in str(caught.value) for part in REFUSED[between]), str(caught.value)


class Categories(nn.Module):
    """Looks up what edges are, the one column of what they carry, as this ``asks`` for it."""

    def __init__(self, features: int, classes: int, asks: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.kinds, self.nodes = nn.Embedding(4, H), nn.Linear(features, H)
        self.conv, self.out = GINEConv(nn.Linear(H, H)), nn.Linear(H, classes)
        self.asks = [asks]

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        found: Tensor = self.out(self.conv(self.nodes(x), edge_index, self.kinds(self.asks[0](edge_attr))))
        return found


def of_categories() -> Data:
    data = random_data(GraphCase(nodes=40, edges=150, edge_features=1))
    data.edge_attr = torch.randint(4, data.edge_attr.shape, generator=torch.Generator().manual_seed(1)).double()
    return data


@pytest.mark.thorough(*every_other(["squeeze", "whole first", "view", "int"], ["matrix", "vector"]))
@pytest.mark.parametrize("is_vector", [False, True], ids=["matrix", "vector"])
@pytest.mark.parametrize(
    "asks",
    [
        lambda e: e.squeeze(-1).long(),
        lambda e: e.to(torch.long).squeeze(),
        lambda e: e.view(-1).type(torch.int64),
        lambda e: e.flatten().int(),
    ],
    ids=["squeeze", "whole first", "view", "int"],
)
def test_categories_of_edges_are_looked_up(asks: Callable[[Tensor], Tensor], is_vector: bool, tmp_path: Path) -> None:
    case, data = CustomCase(make=lambda features, classes: Categories(features, classes, asks)), of_categories()
    if is_vector:
        data.edge_attr = data.edge_attr[:, 0]
    assert_agrees(case, data, tmp_path, epochs=1)


def test_categories_that_are_no_whole_numbers_are_named(tmp_path: Path) -> None:
    case = CustomCase(make=lambda features, classes: Categories(features, classes, lambda e: e[:, 0]))
    with pytest.raises(ModelError, match=r"Embedding \(kinds\): .* by edge_attr\[:, 0\]\.long\(\)"):
        make_trainer(case, store_of(of_categories(), tmp_path), tmp_path)


class Keeping(nn.Module):
    """Keeps the normalized matrix that it has made of the edges."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(H, H)
        self.kept: Any = None

    def forward(self, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
        if self.kept is None:
            row, col = edge_index
            weight = (1 + degree(row, x.size(0), dtype=x.dtype))[row].rsqrt() * e[:, 0]
            self.kept = torch.sparse_coo_tensor(torch.stack([col, row]), weight, (x.size(0), x.size(0)))
        found: Tensor = self.map(self.kept @ x)
        return found


class Nothing(nn.Module):
    """Gives two matrices of rows and nothing, of what is added up in one that is made of rows of edges."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(2 * H + 2, H)

    def forward(self, x: Tensor, edge_index: Tensor, e: Tensor) -> tuple[Tensor, Tensor, None]:
        row, col = edge_index
        messages = self.map(torch.cat((x[row], x[col], e), dim=1)).tanh()
        index = row.unsqueeze(-1).expand(-1, messages.size(1))
        found, counts = (messages.new_full((x.size(0), messages.size(1)), 0) for _ in range(2))
        found.scatter_add_(0, index, messages)
        counts.scatter_add_(0, index, torch.ones_like(messages))
        return x + found / counts.clamp(min=1), found, None


class Bonds(nn.Module):
    """Sums what it looks up by each column."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.ModuleList(nn.Embedding(count, H) for count in (3, 2))

    def forward(self, e: Tensor) -> Tensor:
        e = e.long()
        found: Tensor = sum(kind(e[:, at]) for at, kind in enumerate(self.kinds))
        return found


class Bonded(MessagePassing):
    def __init__(self) -> None:
        super().__init__(aggr="add")
        self.bonds, self.map = Bonds(), nn.Sequential(nn.Linear(H, H), nn.BatchNorm1d(H))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        found: Tensor = self.map(x + self.propagate(edge_index, x=x, e=self.bonds(edge_attr)))
        return found

    def message(self, x_j: Tensor, e: Tensor) -> Tensor:
        return (x_j + e).relu()


class Around(nn.Module):
    def __init__(self, features: int, classes: int, layer: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(features, H), layer(), nn.Linear(H, classes)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        found = self.layer(self.first(x), edge_index, edge_attr)
        found = found[0] if isinstance(self.layer, Nothing) else found
        out: Tensor = self.last(found.relu())
        return out


@pytest.mark.parametrize("layer", [Keeping, Nothing, Bonded])
def test_layers_of_edges_as_people_write_them(layer: type[nn.Module], tmp_path: Path) -> None:
    data = random_data(GraphCase(nodes=40, edges=150, isolated=3, edge_features=2))
    data.edge_attr = torch.stack((torch.arange(len(data.edge_attr)) % 3, torch.arange(len(data.edge_attr)) % 2), 1)
    data.edge_attr = data.edge_attr.double()
    case = CustomCase(make=lambda features, classes: Around(features, classes, layer))
    assert_agrees(case, data, tmp_path, tile_rows=16)


def longer(net: Net, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
    for layer in (*net.processors, *net.processors):
        x, e = layer(x, edge_index, e)
    return x


def test_rows_of_edges_that_each_layer_computes_anew_are_told_of(shared: tuple[Data, Store], tmp_path: Path) -> None:
    _, store = shared
    for between, told in ((longer, 1), (processors, 0)):
        with warnings.catch_warnings(record=True) as found, make_trainer(case_of(between), store, tmp_path):
            pass
        texts = {str(one.message) for one in found if issubclass(one.category, RuntimeWarning)}
        assert len(texts) == told
        assert all("14 calls of modules instead of 5; " in text for text in texts), texts
