# SPDX-License-Identifier: Apache-2.0
"""A model that cannot be run exactly is refused by naming the module and the reason."""

import inspect
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import (
    APPNP,
    ChebConv,
    GATConv,
    GCNConv,
    GINEConv,
    HANConv,
    HypergraphConv,
    LayerNorm,
    MessageNorm,
    MessagePassing,
    ResGatedGraphConv,
    SAGEConv,
    SGConv,
    SimpleConv,
    SuperGATConv,
    TransformerConv,
)
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.nn.models import GCN, LINKX, GraphSAGE, GraphUNet
from torch_geometric.utils import add_self_loops, degree, dropout_edge, to_undirected, trim_to_layer

import ooc
from ooc.errors import ModelError
from ooc.storage.store import Store
from tests.exactness.comparison import store_of
from tests.graphs import GraphCase, random_data

GRAPH = GraphCase()
F_IN, C = GRAPH.features, GRAPH.classes


class Between(nn.Module):
    """Two convolutions with something between."""

    def __init__(self, between: Callable[..., Tensor], *, edges: bool = False, without_gradients: bool = False) -> None:
        super().__init__()
        self.first, self.second = GCNConv(F_IN, 8), GCNConv(8, C)
        self.between, self.edges, self.without_gradients = between, edges, without_gradients

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x, edge_index)
        with torch.set_grad_enabled(not self.without_gradients):
            x = self.between(x, edge_index) if self.edges else self.between(x)
        return self.second(x, edge_index)


class Given(nn.Module):
    """A convolution that is given more than rows and edges, some of it made of rows."""

    def __init__(self, conv: nn.Module, **arguments: Any) -> None:
        super().__init__()
        self.conv, self.arguments = conv, arguments

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        made = {name: one(x) if callable(one) else one for name, one in self.arguments.items()}
        return self.conv(x, edge_index, **made)


class OfTypes(nn.Module):
    """A layer of types on a graph without."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = HANConv(8, 8, (["a"], [("a", "to", "a")]))

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        return self.conv({"a": x}, {("a", "to", "a"): edge_index})["a"]


def given(conv: nn.Module, **arguments: Any) -> Callable[[], nn.Module]:
    return lambda: Between(Given(conv, **arguments), edges=True)


def changed(part: nn.Module, **attributes: Any) -> Any:
    """``part`` with other attributes than its class gives it."""
    for name, value in attributes.items():
        if isinstance(value, Tensor):
            delattr(part, name)
        setattr(part, name, value)
    return part


class Kept(MessagePassing):
    """Goes by edges of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.edges = torch.tensor([[0, 1], [1, 2]])

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.propagate(self.edges, x=x)
        return found


class Handed(nn.Module):
    """Gives data to its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = GivenData()

    def forward(self, data: Data) -> Tensor:
        found: Tensor = self.layer(data)
        return found


class GivenData(MessagePassing):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(C))

    def forward(self, data: Data) -> Tensor:
        found: Tensor = self.propagate(data.edge_index, x=data.x[:, :C] * self.scale)
        return found


class WithAttentionLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = SuperGATConv(F_IN, C)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.conv(x, edge_index)
        return x + self.conv.get_attention_loss()


class Last(nn.Module):
    """Does something to its output, and something else with it that nothing comes of."""

    def __init__(self, last: Callable[[Tensor], Tensor], beside: nn.Module | None = None) -> None:
        super().__init__()
        self.conv, self.last, self.beside = GCNConv(F_IN, C), last, beside or nn.Identity()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.conv(x, edge_index)
        self.beside(x)
        return self.last(x)


class Later(Last):
    """What comes of it is looked at in evaluation alone."""

    def __init__(self) -> None:
        super().__init__(lambda x: x, nn.BatchNorm1d(C))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.conv(x, edge_index)
        normed = self.beside(x)
        return x if self.training else normed


class InPlaceTwice(nn.Module):
    """Overwrites what it looks at again."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act = GCNConv(F_IN, C), nn.ReLU(inplace=True)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.conv(x, edge_index)
        return self.act(h) + h


def branching(x: Tensor) -> Tensor:
    """Takes another way for other values."""
    return x if x.sum() > 0 else -x


class Keeping(nn.Module):
    """Keeps what it has computed for the next time."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.kept = GCNConv(F_IN, C), None

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.conv(x, edge_index)
        if self.kept is None:
            self.kept = h.relu()
        return self.kept


class Growing(nn.Module):
    """Has one more layer each time."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.again, self.runs = GCNConv(F_IN, C), GCNConv(C, C), 0

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.conv(x, edge_index)
        for _ in range(self.runs):
            x = self.again(x, edge_index)
        self.runs += 1
        return x


class Chancy(Growing):
    """Leaves layers out by chance."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.conv(x, edge_index)
        return x if random.random() < 0.5 else self.again(x, edge_index)


class Counting(nn.Module):
    """Counts its runs in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(F_IN, C)
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.runs += 1
        return self.conv(x, edge_index)


class Bounding(Counting):
    """Bounds its weights in each run, by one way or another."""

    def __init__(self, bound: Callable[[nn.Module], object]) -> None:
        super().__init__()
        self.bound, self.linear = bound, nn.Linear(F_IN, F_IN)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.bound(self.linear)
        return self.conv(self.linear(x), edge_index)


def assigned(x: Tensor, key: Any) -> Tensor:
    """With zeros where ``key`` says."""
    x = x * 2
    x[key] = 0
    return x


class CountingAnew(Counting):
    """Has another buffer after each run."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.runs = self.runs + 1
        return self.conv(x, edge_index)


class Roots(nn.Module):
    """NaN of features below zero."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(F_IN, C)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = x.sqrt()
        found: Tensor = self.conv(x if type(x) is Tensor else -x, edge_index)
        return found


class Writing(Counting):
    """Writes into a tensor that is no buffer, and computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(())

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.total += 1
        return self.conv(x * self.total, edge_index)


class Weighing(Growing):
    """Takes the number of its runs as a weight, which it keeps in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = [0]

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.counts[0] += 1
        return self.conv(x, edge_index) * self.counts[0]


class Reversed(torch.autograd.Function):
    """Gradients come back with the other sign."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


def view_overwritten(x: Tensor) -> Tensor:
    """The view is used after what it is a view of has been written into."""
    view = x[:, :4]
    return torch.cat((F.relu(x, inplace=True)[:, 4:], view), 1)


def batch_overwritten(x: Tensor) -> Tensor:
    """A batch of one is a view, too."""
    return F.relu(x.unsqueeze(0), inplace=True).squeeze(0) + x


class StackOverwritten(nn.Module):
    """By a module, and looked at again."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act = GCNConv(F_IN, C), nn.ReLU(inplace=True)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.conv(x, edge_index)
        both = torch.stack((h, -h))
        return self.act(both).sum(dim=0) + both[0]


def renamed(x: Tensor) -> Tensor:
    """Dropout that drops nothing returns its input."""
    same = F.dropout(x, training=False)
    return F.relu(same, inplace=True) + x


def added_to(x: Tensor) -> Tensor:
    """What Python calls the same matrix under two names."""
    other = x
    other += 1
    return x * 2 + other


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "a softmax over nodes": (lambda: Between(lambda x: x.softmax(dim=0)), ("softmax", "across rows")),
    "a largest row": (lambda: Between(lambda x: x / x.amax(dim=0)), ("amax", "across rows")),
    "a sort of nodes": (lambda: Between(lambda x: x.sort(dim=0).values), ("sort",)),
    "noise": (lambda: Between(torch.rand_like), ("rand_like", "it draws random numbers; F.dropout does")),
    "a mask": (
        lambda: Between(lambda x: x * torch.zeros_like(x).bernoulli_(0.5)),
        ("bernoulli_", "ones_like(x) for a"),
    ),
    "nodes in another order": (lambda: Between(lambda x: x[torch.randperm(x.size(0))]), ("randperm", "it draws")),
    "other edges": (
        lambda: Between(lambda x, e: x * dropout_edge(e)[0].sum(), edges=True),
        ("dropout_edge: other edges in every epoch are not supported; F.dropout of messages is",),
    ),
    "norm by hand": (
        lambda: Between(lambda x, e: x * gcn_norm(e, num_nodes=x.size(0))[1].sum(), edges=True),
        ("scatter: it does not give one row of numbers a node",),
    ),
    "values decide": (lambda: Between(branching), ("Between", "cannot be taken apart")),
    "values for numbers": (
        lambda: Between(lambda x: x * int(x.sum())),
        ("cannot be taken apart: it takes a tensor's values for a Python number", "test_refused_models.py line"),
    ),
    "self-loops by hand": (
        lambda: Between(lambda x, e: x * add_self_loops(e, num_nodes=x.size(0))[0].sum(), edges=True),
        ("depends on more than the node, its in-neighbours",),
    ),
    "reverse edges by hand": (
        lambda: Between(lambda x, e: x * to_undirected(e).sum(), edges=True),
        ("depends on more",),
    ),
    "degrees by hand": (
        lambda: Between(lambda x, e: x * degree(e[0])[:, None], edges=True),
        ("mul: it fails",),
    ),
    "a layer made on the way": (
        lambda: Between(lambda x: nn.BatchNorm1d(x.size(1), affine=False).double()(x)),
        ("BatchNorm1d is made in forward; make it in __init__",),
    ),
    "sizes": (given(SAGEConv(8, 8), size=(50, 50)), ("SAGEConv (between.conv): size is not supported",)),
    "attention asked for": (
        given(TransformerConv(8, 8), return_attention_weights=True),
        ("return_attention_weights is not supported: nothing is kept for an edge",),
    ),
    "features of edges that are not given": (
        given(ResGatedGraphConv(8, 8, edge_dim=3)),
        ("ResGatedGraphConv (between.conv): it is not given the features of edges",),
    ),
    "features of edges that are none": (
        given(GINEConv(nn.Linear(8, 8)), edge_attr=None),
        ("GINEConv (between.conv): it is not given the features of edges",),
    ),
    "an explanation": (given(changed(SAGEConv(8, 8), explain=True)), ("run as it is because of its explain",)),
    "weights of hyperedges": (
        given(HypergraphConv(8, 8), hyperedge_weight=lambda x: x[:, 0]),
        ("HypergraphConv (between.conv): weights of hyperedges are not supported",),
    ),
    "dropout of hyperedges": (
        given(HypergraphConv(8, 8, use_attention=True, dropout=0.5), hyperedge_attr=lambda x: x),
        ("dropout=0.5 drops alike from two sums in opposite directions; set it to 0",),
    ),
    "hyperedges the other way round": (
        given(changed(HypergraphConv(8, 8), flow="target_to_source")),
        ("HypergraphConv (between.conv): flow='target_to_source' is not supported",),
    ),
    "a row of weights for each node": (
        lambda: LINKX(GRAPH.nodes, F_IN, 8, C, 2),
        ("SparseLinear (edge_lin) has a row of weights for every node", "Trainer(embedding=…)"),
    ),
    "a bias that is no parameter": (
        lambda: Between(changed(nn.Linear(8, 8), bias=torch.ones(8))),
        ("Linear (between): its weight or bias is no parameter; F.linear takes any",),
    ),
    "a norm of a third kind": (
        lambda: Between(changed(LayerNorm(8), mode="edge")),
        ("norm LayerNorm (between): mode='edge' is not supported",),
    ),
    "dropout of truths": (
        lambda: Between(lambda x: x * F.dropout(x > 0, 0.5, True)),
        ("dropout of something that is no matrix of rows",),
    ),
    "what gradients do not see": (lambda: Between(lambda x: x + x.data), ("the attribute data of a matrix of rows",)),
    "another type": (lambda: Between(lambda x: x.double()), ("double: another type than the model's, torch.float32",)),
    "noise in evaluation": (
        lambda: Between(lambda x: x + torch.randn_like(x)),
        ("randn_like in evaluation is not supported; draw noise if self.training",),
    ),
    "a row for several": (
        lambda: Between(lambda x: x[:, None]),
        ("is given values of shape [nodes, 1, 8] instead of a matrix",),
    ),
    "fewer columns": (
        lambda: Between(lambda x: x[:, :6]),
        ("a linear map of 8 columns is given values of shape [nodes, 6]",),
    ),
    "no parameters": (SimpleConv, ("model SimpleConv has no parameters to train",)),
    "parameters that are nowhere": (
        lambda: GCN(F_IN, 8, 2, C).to("meta"),
        ("parameters must be on the CPU, not on meta: leave out .to(device)",),
    ),
    "types of a graph without": (
        lambda: Between(OfTypes(), edges=True),
        ("HANConv (between.conv) is for graphs with types of nodes or edges",),
    ),
    "no columns": (lambda: Between(lambda x: torch.cat((x[:, 8:], x), dim=1)), ("getitem gives rows of no columns",)),
    "edges by hand": (lambda: Between(lambda x, e: x + e.sum(), edges=True), ("edges",)),
    "dropout in evaluation": (lambda: Between(lambda x: F.dropout(x, 0.5)), ("dropout", "evaluation")),
    "dropout of whole columns": (lambda: Between(nn.Dropout1d()), ("Dropout1d", "between")),
    "a dropout of another kind": (lambda: Between(F.alpha_dropout), ("alpha_dropout", "draws random numbers; F.drop")),
    "a bare assertion": (
        lambda: Between(lambda x, e: trim_to_layer(1, None, None, x, e)[0], edges=True),
        ("trim_to_layer is for sampled batches", "leave it out (in Between.forward"),
    ),
    "a loss of edges drawn anew": (
        WithAttentionLoss,
        ("attention loss is of edges that are drawn anew",),
    ),
    "pooled nodes": (
        lambda: GraphUNet(F_IN, 8, C, depth=1),
        ("TopKPooling (pools.0): which nodes are kept", "ooc.GraphTrainer"),
    ),
    "rows one by one": (lambda: Between(lambda x: torch.stack([*x])), ("rows of a matrix one by one",)),
    "message norm": (lambda: Between(MessageNorm()), ("MessageNorm", "missing", "msg")),
    "a sparse matrix": (
        lambda: Between(lambda x: torch.eye(6).to_sparse() @ x),
        ("is a sparse matrix that the model keeps", "edge_index", "line"),
    ),
    "edges of its own": (lambda: Between(Kept()), ("Kept (between)", "come as an argument, edge_index")),
    "data for a layer": (Handed, ("layer(data.x, data.edge_index)",)),
    "the number of rows": (lambda: Between(lambda x: x / len(x)), ("Between", "number of rows by len()", "line")),
    "overwritten and used": (InPlaceTwice, ("ReLU (act)", "writes into")),
    "attention that does not sum": (lambda: GATConv(F_IN, C, aggr="max"), ("GATConv", "aggr='max'")),
    "attention of two kinds of node": (lambda: GATConv((F_IN, F_IN), C), ("GATConv", "apart")),
    "all coefficients dropped": (lambda: GATConv(F_IN, C, dropout=1.0), ("dropout=1.0",)),
    "keys of edges": (lambda: TransformerConv(F_IN, C, edge_dim=3), ("TransformerConv", "without edge_attr")),
    "a Laplacian of another kind": (lambda: ChebConv(F_IN, C, 3, normalization=None), ("ChebConv", "None")),
    "dropped edges": (lambda: Between(APPNP(2, 0.1, dropout=0.5), edges=True), ("APPNP (between)", "drops edges")),
    "cached while features are dropped": (lambda: SGConv(F_IN, C, K=2, cached=True), ("SGConv", "cached")),
    "neighbours in order": (lambda: GraphSAGE(F_IN, 8, 2, C, aggr="lstm"), ("SAGEConv (convs.0)", "order of edges")),
    "a weight of weights": (
        lambda: Between(torch.nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))),
        ("ParametrizedLinear (between)",),
    ),
    "some rows": (lambda: Between(lambda x: x[:6]), ("getitem", "across rows")),
    "some rows and columns": (lambda: Between(lambda x: x[1:, :8]), ("getitem", "across rows")),
    "sums of no neighbours": (lambda: SGConv(F_IN, C, K=0), ("SGConv", "K=0")),
    "an earlier result": (Keeping, ("Keeping", "relu is kept from an earlier forward pass")),
    "layers by what it counts": (Growing, ("Growing", "changes its attribute runs")),
    "weights by what it counts": (Weighing, ("Weighing", "with other numbers, each time")),
    "layers by chance": (Chancy, ("Chancy", "random numbers")),
    "noise without rows": (lambda: Between(lambda x: x + torch.randn(8)), ("Between", "random numbers")),
    "counting its runs": (Counting, ("Counting", "changes its buffer runs")),
    "weights bounded": (
        lambda: Bounding(lambda m: m.bias.data.clamp_(0, 1)),
        ("its forward changes its linear.bias", "not in every epoch"),
    ),
    "weights set": (
        lambda: Bounding(lambda m: setattr(m.weight, "data", m.weight.data.abs())),
        ("its forward sets data of linear_weight", "not in every epoch"),
    ),
    "weights made": (
        lambda: Bounding(lambda m: nn.init.constant_(m.bias, 0.5)),
        ("its forward changes its linear.bias",),
    ),
    "a weight assigned to": (
        lambda: Bounding(lambda m: m.bias.data.__setitem__(0, 1.0)),
        ("its forward changes its linear.bias",),
    ),
    "a row assigned to": (lambda: Between(lambda x: assigned(x, 0)), ("item assignment is not supported but",)),
    "some rows assigned to": (lambda: Between(lambda x: assigned(x, (slice(3), 0))), ("item assignment", "rows")),
    "columns counted from the last": (
        lambda: Between(lambda x: assigned(x, (..., 0, 0))),
        ("item assignment is not supported but",),
    ),
    "another buffer": (CountingAnew, ("CountingAnew", "changes its buffer runs")),
    "a tensor written into": (Writing, ("Writing", "changes its attribute total")),
    "asking for tensors": (lambda: Between(lambda x: x if type(x) is Tensor else -x), ("type(x)",)),
    "asking for tensors, of roots": (Roots, ("type(x)",)),
    "gradients off": (
        lambda: Between(lambda x: x.relu_(), without_gradients=True),
        ("relu_", "gradients off", "detach()"),
    ),
    "a backward of its own": (lambda: Between(lambda x: Reversed.apply(x)), ("Reversed", "autograd.Function")),
    "a backward under another name": (lambda: Between(Reversed.apply), ("gradients", "backward of its own")),
    "a view overwritten": (lambda: Between(view_overwritten), ("writes into",)),
    "a batch overwritten": (lambda: Between(batch_overwritten), ("writes into",)),
    "a stack overwritten": (StackOverwritten, ("ReLU (act)", "writes into")),
    "overwritten under another name": (lambda: Between(renamed), ("writes into",)),
    "added to under another name": (lambda: Between(added_to), ("+=",)),
    "nothing with a gradient": (lambda: Last(lambda x: x.detach()), ("Last", "gets a gradient")),
    "a norm that nothing comes of but in evaluation": (
        Later,
        ("Later", "does not depend on BatchNorm1d (beside), whose running statistics", "by its eval()"),
    ),
    "fewer outputs than classes": (lambda: GCN(F_IN, 8, 2, C - 1), ("outputs", "classes")),
    "other features": (lambda: SAGEConv(F_IN + 2, C), (f"{F_IN + 2} features",)),
}


def with_hook() -> nn.Module:
    """A model that somebody listens to."""
    model = GCN(F_IN, 8, 2, C)
    model.convs[0].register_forward_hook(lambda *_: None)
    return model


MODELS["hooks"] = (with_hook, ("GCNConv (convs.0)", "hooks"))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """One small store for all."""
    return store_of(random_data(GRAPH, dtype=torch.float32), tmp_path_factory.mktemp("store"))


@pytest.mark.parametrize(("build", "said"), MODELS.values(), ids=MODELS.keys())
def test_models_are_refused_by_name(
    build: Callable[[], nn.Module], said: tuple[str, ...], store: Store, tmp_path: Path
) -> None:
    """One line that says which part it is and why; the model's modes are left alone and nothing is written."""
    model = build()
    modes = [module.training for module in model.modules()]
    with pytest.raises(ModelError) as caught:
        ooc.Trainer(model, store, gpu_budget="64M", host_budget="64M", input_dropout=0.1, spill_dir=tmp_path)
    assert all(part in str(caught.value) for part in said), str(caught.value)
    assert "\n" not in str(caught.value)
    assert [module.training for module in model.modules()] == modes
    assert list(tmp_path.iterdir()) == []


def test_a_norm_of_one_node_is_refused(tmp_path: Path) -> None:
    """As by torch: one row has no variance."""
    store = store_of(random_data(GraphCase(nodes=1, edges=0), dtype=torch.float32), tmp_path)
    with pytest.raises(ModelError, match="BatchNorm"):
        ooc.Trainer(GCN(F_IN, 8, 2, C, norm="batch_norm"), store, gpu_budget="64M", host_budget="64M")


HOOKS = [
    f"{name}_{when}"
    for name in ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
    for when in ("forward_pre_hook", "forward_hook")
]


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_of_pyg_are_refused_by_name(name: str, store: Store, tmp_path: Path) -> None:
    """Also on convolutions that are computed by formula."""
    model = GCN(F_IN, 8, 2, C)
    getattr(model.convs[0], f"register_{name}")(lambda *_: None)
    with pytest.raises(ModelError, match=rf"^GCNConv \(convs.0\): {name}s are not supported$"):
        ooc.Trainer(model, store, gpu_budget="64M", host_budget="64M", spill_dir=tmp_path)


@pytest.mark.parametrize("name", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_parameters_are_refused_by_name(name: str, store: Store, tmp_path: Path) -> None:
    """Autograd never adds up a gradient that they could see."""
    model = GCN(F_IN, 8, 2, C)
    getattr(model.convs[0].lin.weight, name)(lambda *_: None)
    with pytest.raises(ModelError, match=r"^parameter convs\.0\.lin\.weight of GCN: hooks on parameters"):
        ooc.Trainer(model, store, gpu_budget="64M", host_budget="64M", spill_dir=tmp_path)


class AcrossRows(torch.nn.Module):
    """A module of a user's own, whose second line looks across rows."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lin(x)
        return x.cumsum(dim=0)


class Branching(torch.nn.Module):
    """What it computes depends on what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) if x.sum() > 0 else x


class NotByConvention(torch.nn.Module):
    """Its own name for ``self``."""

    def forward(m, x: Tensor) -> Tensor:
        return x - x.cumsum(dim=0)


@pytest.mark.parametrize(("kind", "line"), [(AcrossRows, 2), (Branching, 1), (NotByConvention, 1)])
def test_a_refusal_names_module_and_line_of_the_model(kind: type[torch.nn.Module], line: int, tmp_path: Path) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = GCNConv(9, 4)
            self.part = kind()

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            out: Tensor = self.part(self.conv(x, edge_index))
            return out

    store = store_of(random_data(GraphCase(), dtype=torch.float32), tmp_path)
    first = inspect.getsourcelines(kind.forward)[1]
    place = rf"\(in {kind.__name__}\.forward, test_refused_models\.py line {first + line}\)$"
    with pytest.raises(ModelError, match=place):
        ooc.Trainer(Net(), store)


@pytest.mark.parametrize(
    ("trained", "said"),
    [
        (True, r"between.rows has a row for each node: embedding=8 trains such, and gives them in x$"),
        (False, r"between.rows has a row for each node, and belongs into the data, as columns of x$"),
    ],
)
def test_a_matrix_with_a_row_for_each_node_is_told(trained: bool, said: str, tmp_path: Path) -> None:
    """Learnt features, FLAG's perturbation, positions: in PyG a part of the model."""
    store = store_of(random_data(GRAPH, dtype=torch.float32), tmp_path)

    class Adding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Parameter(torch.ones(store.num_nodes, 8), requires_grad=trained)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.rows

    with pytest.raises(ModelError, match=said):
        ooc.Trainer(Between(Adding()), store)


@pytest.mark.parametrize(
    "rows_of",
    [
        lambda table, x: table.weight,
        lambda table, x: table(torch.arange(table.num_embeddings)),
        lambda table, x: table(torch.arange(x.size(0))),
    ],
    ids=["its weight", "by all numbers", "by numbers of rows"],
)
def test_an_embedding_of_the_models_own_is_told(
    rows_of: Callable[[nn.Embedding, Tensor], Tensor], tmp_path: Path
) -> None:
    store = store_of(random_data(GRAPH, dtype=torch.float32), tmp_path)

    class Learnt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.conv = nn.Embedding(store.num_nodes, 6), GCNConv(6, 4)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            out: Tensor = self.conv(rows_of(self.table, x), edge_index)
            return out

    with pytest.raises(ModelError, match=r"; table.weight has a row for each node: embedding=6 trains such") as raised:
        ooc.Trainer(Learnt(), store)
    assert "what it is given of edges" not in str(raised.value)


@pytest.mark.parametrize("asked", ["rows", "edges", "whether there are edges"])
def test_a_small_graph_is_asked_for_as_it_is(asked: str, tmp_path: Path) -> None:
    """Which may have fewer rows and edges than what a model is tried on."""
    edges = 0 if asked == "whether there are edges" else 4
    store = store_of(random_data(GraphCase(nodes=5, edges=edges), dtype=torch.float32), tmp_path)

    def doubled(x: Tensor, edge_index: Tensor) -> Tensor:
        holds = {
            "rows": lambda: x.size(0) > 10,
            "edges": lambda: edge_index.size(1) > 30,
            "whether there are edges": lambda: edge_index.numel() > 0,
        }[asked]
        return x * 2 if holds() else x

    with pytest.raises(ModelError, match="how many rows or edges there are"):
        ooc.Trainer(Between(doubled, edges=True), store, memory="64M")
