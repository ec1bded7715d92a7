# SPDX-License-Identifier: Apache-2.0
"""Layers of one's own, and PyG's without a formula, over edges within a type of nodes and between two, against PyG."""

import copy
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import HeteroData
from torch_geometric.nn import (
    CGConv,
    FiLMConv,
    GATConv,
    GCNConv,
    GENConv,
    GraphConv,
    HeteroConv,
    MessagePassing,
    MFConv,
    SAGEConv,
    to_hetero,
)
from torch_geometric.utils import degree

import ooc
from ooc.errors import ModelError
from ooc.kernels import neighbourhood
from ooc.model.layers import conformance, opaque
from ooc.model.layers.layer import Layer
from ooc.model.layers.opaque import Opaque
from ooc.model.lowering.network import values_of
from ooc.plan.layout.passes import ShufflePass
from ooc.train.setup import Tuning
from tests.exactness import test_edge_data_of_types as carried
from tests.exactness import test_types as typed
from tests.exactness.comparison import least_budgets
from tests.exactness.test_types import CLASSES, HIDDEN, assert_as_pyg, made, store_of, trained

pytestmark = typed.pytestmark


class Own(MessagePassing):
    """The plainest layer that there is, around which the others are written."""

    def __init__(self, inputs: Any = HIDDEN, outputs: int = HIDDEN, aggr: Any = "mean", **options: Any) -> None:
        super().__init__(aggr=aggr, **options)
        source, target = (inputs, inputs) if isinstance(inputs, int) else inputs
        self.neighbours, self.own = nn.Linear(source, outputs), nn.Linear(target, outputs)

    def forward(self, x: Any, edge_index: Tensor) -> Tensor:
        x = (x, x) if isinstance(x, Tensor) else x
        return self.neighbours(self.propagate(edge_index, x=x)) + self.own(x[1])


class Sized(Own):
    """Says how many nodes there are, and computes a message."""

    def forward(self, x: Any, edge_index: Tensor) -> Tensor:
        x = (x, x) if isinstance(x, Tensor) else x
        source, target = x
        return self.propagate(edge_index, x=x, scale=2.0, size=(source.size(0), target.size(0))) + self.own(target)

    def message(self, x_j: Tensor, scale: float) -> Tensor:
        return scale * F.elu(self.neighbours(x_j))


class Counted(Own):
    """Divided by the root of how many in-neighbours there are."""

    def forward(self, x: Any, edge_index: Tensor) -> Tensor:
        source, target = (x, x) if isinstance(x, Tensor) else x
        size = source.size(0), target.size(0)
        inverse = degree(edge_index[1], size[1], dtype=target.dtype).clamp(min=1).pow(-0.5)
        norm = inverse[edge_index[1]]
        found = self.propagate(edge_index, x=(self.neighbours(source), None), norm=norm, size=size)
        return found + self.own(target)

    def message(self, x_j: Tensor, norm: Tensor) -> Tensor:
        return norm.view(-1, 1) * x_j


class Symmetric(Own):
    """GCN's norm, by the degrees of sources and of targets, which may be of two types."""

    def forward(self, x: Any, edge_index: Tensor) -> Tensor:
        source, target = (x, x) if isinstance(x, Tensor) else x
        size = source.size(0), target.size(0)
        roots = [degree(edge_index[end], size[end], dtype=target.dtype).clamp(min=1).pow(-0.5) for end in (0, 1)]
        norm = roots[0][edge_index[0]] * roots[1][edge_index[1]]
        return self.propagate(edge_index, x=(self.neighbours(source), target), norm=norm, size=size) + self.own(target)

    def message(self, x_j: Tensor, norm: Tensor) -> Tensor:
        return norm.view(-1, 1) * x_j


class Differences(Own):
    """Looks at both ends."""

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return (self.own(x_i) - self.neighbours(x_j)).erf()


class Indexing(Own):
    """Takes rows by itself, and adds up by itself."""

    def forward(self, x: Any, edge_index: Tensor) -> Tensor:
        source, target = (x, x) if isinstance(x, Tensor) else x
        messages = self.neighbours(source)[edge_index[0]] * self.own(target)[edge_index[1]].sigmoid()
        return target + torch.zeros_like(target).index_add(0, edge_index[1], messages)


class Dropping(Differences):
    """Drops numbers of sources, of targets and of edges."""

    def forward(self, x: Any, edge_index: Tensor) -> Tensor:
        source, target = (x, x) if isinstance(x, Tensor) else x
        source, target = (F.dropout(one, 0.3, self.training) for one in (source, target))
        messages = self.message(target[edge_index[1]], F.dropout(source[edge_index[0]], 0.3, self.training))
        return target + torch.zeros_like(target).index_add(0, edge_index[1], messages)


def relations(conv: Callable[[], nn.Module], group: str = "sum") -> typed.Make:
    return lambda data: typed.Relations(data, conv, group)


class Layers(nn.Module):
    """A homogeneous model, for ``to_hetero``."""

    def __init__(self, conv: type[Own]) -> None:
        super().__init__()
        self.lift, self.last = nn.LazyLinear(HIDDEN), nn.Linear(HIDDEN, CLASSES)
        self.first, self.second = conv(), conv()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(self.lift(x), edge_index).relu()
        found: Tensor = self.last(self.second(x, edge_index))
        return found


class Called(nn.Module):
    """Layers called one by one, of features as they are, which are of other widths at both ends."""

    def __init__(self, data: HeteroData, conv: type[Own] = Differences) -> None:
        super().__init__()
        width = {kind: data[kind].x.shape[1] for kind in data.node_types}
        self.writes = Own((width["author"], width["paper"]), HIDDEN, "max")
        self.cites, self.out = conv(), nn.Linear(HIDDEN, CLASSES)
        self.writes_too = Wider((width["author"], width["paper"]), HIDDEN)

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Tensor]) -> Tensor:
        paper = x_dict["paper"]
        found = self.writes((x_dict["author"], paper), edge_index_dict["author", "writes", "paper"])
        found = found + self.writes_too((x_dict["author"], paper), edge_index_dict["author", "writes", "paper"])
        cites = edge_index_dict["paper", "cites", "paper"]
        return self.out(self.cites(found.relu(), cites) + self.cites((found, found.tanh()), cites))


class OtherWay(nn.Module):
    """Layers over edges taken the other way round, between types and within one."""

    def __init__(self, data: HeteroData, conv: type[Own] = Own) -> None:
        super().__init__()
        self.lift, self.out = typed.Relations(data, Own).lift, nn.Linear(HIDDEN, CLASSES)
        self.of_features = SAGEConv((data["author"].x.shape[1], data["paper"].x.shape[1]), HIDDEN)
        self.convs = nn.ModuleList([conv(aggr="sum"), SAGEConv((HIDDEN, HIDDEN), HIDDEN), Symmetric(aggr="sum")])
        self.within = nn.ModuleList([conv(flow="target_to_source"), SAGEConv(HIDDEN, HIDDEN, flow="target_to_source")])

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Tensor]) -> Tensor:
        written, ends = edge_index_dict["paper", "written by", "author"], (x_dict["author"], x_dict["paper"])
        x_dict = self.lift(x_dict)
        author, paper = x_dict["author"], x_dict["paper"] + self.of_features(ends, written.flip(0))
        for conv in self.convs:
            paper = conv((author, paper), edge_index_dict["paper", "written by", "author"].flip(0)).relu()
            author = conv((paper, author), edge_index_dict["author", "writes", "paper"].flip(0)).tanh()
        for conv in self.within:
            paper = conv(paper, edge_index_dict["paper", "cites", "paper"]).relu()
        found: Tensor = self.out(paper)
        return found


class Wider(Own):
    """Rows of sources and of targets are not as wide."""

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return x_j * x_i.sum(dim=-1, keepdim=True).sigmoid()


class Sage(SAGEConv):
    pass


class Sums(GraphConv):
    pass


class Gat(GATConv):
    pass


SUMS: dict[str, typed.Make] = {
    "mean": relations(Own),
    "sum": relations(lambda: Own(aggr="sum"), "mean"),
    "max": relations(lambda: Own(aggr="max"), "max"),
    "sized": relations(lambda: Sized(aggr="sum")),
    "counted": relations(lambda: Counted(aggr="sum")),
    "GCN's norm": relations(lambda: Symmetric(aggr="sum")),
    "a subclass of SAGE": relations(lambda: Sage((HIDDEN, HIDDEN), HIDDEN)),
    "a subclass of GraphConv": relations(lambda: Sums((HIDDEN, HIDDEN), HIDDEN)),
    "to_hetero": lambda data: to_hetero(Layers(Own), data.metadata()),
}
GENERAL: dict[str, typed.Make] = {
    "both ends": relations(Differences),
    "both ends, max": relations(lambda: Differences(aggr="max"), "mean"),
    "indexing": relations(Indexing),
    "a subclass of GAT": relations(lambda: Gat((HIDDEN, HIDDEN), HIDDEN, heads=2, concat=False, add_self_loops=False)),
    "CGConv": relations(lambda: CGConv((HIDDEN, HIDDEN))),
    "FiLMConv": relations(lambda: FiLMConv((HIDDEN, HIDDEN), HIDDEN)),
    "GENConv": relations(lambda: GENConv((HIDDEN, HIDDEN), HIDDEN, norm=None, learn_t=True)),
    "MFConv": relations(lambda: MFConv((HIDDEN, HIDDEN), HIDDEN, max_degree=4)),
    "to_hetero": lambda data: to_hetero(Layers(Differences), data.metadata()),
    "of features, called": Called,
    "the other way round": OtherWay,
    "the other way round, both ends": lambda data: OtherWay(data, Differences),
}


def kinds_of(model: nn.Module, store: ooc.Store, folder: Path) -> list[type]:
    with ooc.Trainer(model, store, spill_dir=folder / "spill") as trainer:
        return [type(value) for value in values_of(trainer._prepared.network.training)]


@pytest.mark.thorough("mean", "sum", "counted", "a subclass of GraphConv", "sized", "to_hetero")
@pytest.mark.parametrize("name", SUMS)
def test_messages_of_sources_alone_are_sums(name: str, tmp_path: Path) -> None:
    data = typed.graph(topics_reached=True)
    assert_as_pyg(SUMS[name], data, tmp_path, _tuning=Tuning(tile_rows=16))
    assert Opaque not in kinds_of(made(SUMS[name], data), ooc.open(tmp_path / "graph.ooc"), tmp_path)


@pytest.mark.thorough("GENConv", "MFConv", "FiLMConv", "CGConv", "both ends", "both ends, max", "the other way round")
@pytest.mark.parametrize("name", GENERAL)
def test_any_others_run_as_they_are(name: str, tmp_path: Path) -> None:
    data = typed.graph(topics_reached=name == "to_hetero")
    if name != "to_hetero":
        del data["topic", "covers", "paper"]
    assert_as_pyg(GENERAL[name], data, tmp_path, _tuning=Tuning(tile_rows=16))


class Weighing(Own):
    """Weights by another name."""

    def forward(self, x: Any, edge_index: Tensor, edge_weight: Any = None) -> Tensor:
        x = (x, x) if isinstance(x, Tensor) else x
        return self.propagate(edge_index, x=(self.neighbours(x[0]), x[1]), w=edge_weight) + self.own(x[1])

    def message(self, x_j: Tensor, w: Any) -> Tensor:
        return x_j if w is None else x_j * w[:, None]


class OfEdges(Own):
    """What edges carry is mapped, and added to both ends."""

    def __init__(self, kind: Any) -> None:
        super().__init__(carried.WIDTH, carried.WIDTH)
        self.edge = nn.Linear(carried.FEATURES.get(kind, 1), carried.WIDTH)

    def forward(self, x: Any, edge_index: Tensor, edge_attr: Any = None) -> Tensor:
        x = (x, x) if isinstance(x, Tensor) else x
        return self.propagate(edge_index, x=x, e=None if edge_attr is None else self.edge(edge_attr)) + self.own(x[1])

    def message(self, x_i: Tensor, x_j: Tensor, e: Any) -> Tensor:
        x_j = self.neighbours(x_j) * x_i
        return x_j if e is None else (x_j + e).relu()


CARRIED: dict[str, tuple[type[carried.Net], Callable[[Any], nn.Module], str]] = {
    "weights": (carried.Weighted, lambda kind: Weighing(carried.WIDTH, carried.WIDTH, "sum"), "features"),
    "features": (carried.Featured, OfEdges, "weight"),
    "norm within a type": (
        carried.Weighted,
        carried.within(lambda: type("Gcn", (GCNConv,), {})(carried.WIDTH, carried.WIDTH)),
        "features",
    ),
}


@pytest.mark.parametrize("name", CARRIED)
def test_edges_may_carry_something(name: str, tmp_path: Path) -> None:
    kind, make, ignored = CARRIED[name]
    data = carried.graph()
    torch.manual_seed(3)
    model = kind(data, make).double()
    expected = copy.deepcopy(model)
    losses = carried.trained(model, store_of(data, tmp_path), tmp_path, ignore_edge_data=ignored)
    torch.testing.assert_close(losses, carried.reference(expected, data), rtol=1e-10, atol=1e-10)
    for found, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-10, atol=1e-10)


WIDE = 48


class Wide(nn.Module):
    """Wide rows are gathered, by each layer over edges as they are or the other way round (``flipped``)."""

    def __init__(self, data: HeteroData, conv: Callable[..., nn.Module], flipped: Sequence[bool]) -> None:
        super().__init__()
        self.lift = nn.ModuleDict({kind: nn.Linear(data[kind].x.shape[1], WIDE) for kind in data.node_types})
        kinds = [[kind[::-1] if is_flipped else kind for kind in data.edge_types] for is_flipped in flipped]
        self.convs = nn.ModuleList(HeteroConv({kind: conv((WIDE, WIDE), WIDE) for kind in one}) for one in kinds)
        self.out, self.flipped = nn.Linear(WIDE, CLASSES), flipped

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Tensor]) -> Tensor:
        other_way = {kind[::-1]: edge_index.flip(0) for kind, edge_index in edge_index_dict.items()}
        x_dict = {kind: self.lift[kind](x).relu() for kind, x in x_dict.items()}
        for conv, is_flipped in zip(self.convs, self.flipped, strict=True):
            found = conv(x_dict, other_way if is_flipped else edge_index_dict)
            x_dict = x_dict | {kind: x.relu() for kind, x in found.items()}
        out: Tensor = self.out(x_dict["paper"])
        return out


def large() -> HeteroData:
    """Of more nodes than edges, and a few nodes of many edges."""
    random, data = torch.Generator().manual_seed(4), HeteroData()
    counts = {"paper": 270, "author": 210}
    for (kind, count), width in zip(counts.items(), (7, 5), strict=True):
        data[kind].x = torch.randn(count, width, generator=random, dtype=torch.float64)
    data["paper"].y = torch.randint(CLASSES, (270,), generator=random)
    part = torch.rand(270, generator=random)
    data["paper"].train_mask, data["paper"].val_mask, data["paper"].test_mask = part < 0.5, part > 0.8, part < 0
    relations = {("author", "writes", "paper"): 270, ("paper", "written by", "author"): 180}
    for (source, name, target), edges in relations.items():
        ends = [torch.randint(counts[end] * 4 // 5, (edges,), generator=random) for end in (source, target)]
        ends[1][:40] = 7
        data[source, name, target].edge_index = torch.stack(ends)
    return data


@pytest.mark.thorough("sums", "both ends")
@pytest.mark.parametrize(
    ("conv", "flipped"),
    [(Own, (True, True)), (Differences, (False, False)), (Dropping, (False, True))],
    ids=["sums", "both ends", "dropping"],
)
def test_budgets_change_no_bit_and_what_is_gathered_need_not_fit(
    conv: type[Own], flipped: tuple[bool, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbourhood, "EDGES_AT_ONCE", 32)  # so that rows of more edges come in pieces
    monkeypatch.setattr(opaque, "EDGES_AT_ONCE", 32)
    monkeypatch.setattr(opaque, "_FEWEST_EDGES", 32)
    data, options = large(), {"_tuning": Tuning(tile_rows=32), "threads": 1}
    model = made(lambda data: Wide(data, conv, flipped), data)
    store, again = store_of(data, tmp_path), copy.deepcopy(model)
    pyg = copy.deepcopy(model)
    expected = trained(model, store, tmp_path, **options)
    if conv is not Dropping:
        torch.testing.assert_close(expected, typed.reference(pyg, data), rtol=1e-10, atol=1e-10)
        for found, wanted in zip(model.parameters(), pyg.parameters(), strict=True):
            torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-10, atol=1e-10)
    low = options | {"block_rows": 32}
    gpu, host = least_budgets(
        lambda gpu, host: ooc.Trainer(copy.deepcopy(again), store, gpu_budget=gpu, host_budget=host, **low)
    )
    scarce = {"gpu_budget": gpu, "host_budget": host, "block_rows": 32}
    for way in (scarce, {"block_rows": 64, "threads": 2}):
        other = copy.deepcopy(again)
        optimizer = torch.optim.SGD(other.parameters(), lr=0.5)
        with ooc.Trainer(other, store, optimizer=optimizer, spill_dir=tmp_path / "spill", **options | way) as trainer:
            shuffled = [item for item in trainer.plan.programs["train"] if isinstance(item, ShufflePass)]
            assert [record.loss for record in trainer.fit(epochs=len(expected), eval_every=0)] == expected
        assert bool(shuffled) == (way is scarce and conv is not Own)
        for found, wanted in zip(other.parameters(), model.parameters(), strict=True):
            assert torch.equal(found, wanted)


def test_layers_over_types_of_edges_are_tried_once_if_they_are_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of five types one leads to nodes of its own; how many edges there are is asked of each."""
    tried, sized = list[tuple[bool, bool]](), list[tuple[Any, ...]]()

    def probe(layer: Layer, module: nn.Module, **options: Any) -> conformance.ProbeResult:
        tried.append((bool(layer.own), module.training))
        return conformance.probe_layer(layer, module, **options)

    def check(layer: Layer, module: nn.Module, *given: Any, **options: Any) -> None:
        sized.append((layer.relation, module.training))
        conformance.check_sizes(layer, module, *given, **options)

    monkeypatch.setattr(opaque, "probe_layer", probe)
    monkeypatch.setattr(opaque, "check_sizes", check)
    data = typed.graph()
    ooc.Trainer(made(GENERAL["both ends"], data), store_of(data, tmp_path), spill_dir=tmp_path).close()
    assert sorted(tried) == [*itertools.product((False, True), repeat=2)]
    assert len(sized) == len({*sized}) == 2 * len(data.edge_types)


class OfDegrees(Counted):
    """Divided by how many out-neighbours sources have, of those of the graph."""

    def forward(self, x: Any, edge_index: Tensor) -> Tensor:
        source, target = (x, x) if isinstance(x, Tensor) else x
        count = torch.zeros(source.size(0), dtype=target.dtype).index_add(0, edge_index[0], target[edge_index[1]][:, 0])
        return self.propagate(edge_index, x=(source, target), norm=count[edge_index[0]], size=None)


class OfOtherEdges(nn.Module):
    """Gives layers rows or edges that do not belong together."""

    def __init__(self, data: HeteroData, edges: str = "covers") -> None:
        super().__init__()
        self.lift, self.conv = typed.Relations(data, Own).lift, Differences()
        self.edges, self.out = edges, nn.Linear(HIDDEN, CLASSES)

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Tensor]) -> Tensor:
        x_dict = self.lift(x_dict)
        author, paper = x_dict["author"], x_dict["paper"]
        kinds = {kind[1]: edge_index for kind, edge_index in edge_index_dict.items()}
        if self.edges == "flipped":
            return self.out(self.conv((author, paper), kinds["writes"].flip(0)))
        return self.out(self.conv(author if self.edges == "writes" else (author, paper), kinds[self.edges]))


REFUSED: dict[str, tuple[typed.Make, str]] = {
    "degrees of sources": (
        relations(OfDegrees),
        r"OfDegrees \(.*\): what it gives for a node depends on more than the node, its in-neighbours",
    ),
    "rows of others": (OfOtherEdges, "'author' where the edges topic covers paper have 'topic'"),
    "one matrix": (lambda data: OfOtherEdges(data, "writes"), "it is given no rows of 'paper'"),
    "edges the other way round": (lambda data: OfOtherEdges(data, "flipped"), "x.0 has rows of 'author'"),
    "against the edges": (
        relations(lambda: Differences(flow="target_to_source")),
        "PyG's flow is for nodes of one type",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_exact_is_refused_by_name(name: str, tmp_path: Path) -> None:
    make, told = REFUSED[name]
    torch.manual_seed(3)
    with pytest.raises(ModelError, match=told):
        ooc.Trainer(make(typed.graph()).double(), store_of(typed.graph(), tmp_path))


@pytest.mark.thorough("as they are")
@pytest.mark.parametrize("make", [relations(Differences), OtherWay], ids=["as they are", "the other way round"])
def test_in_hop_order_losses_are_the_same(make: typed.Make, tmp_path: Path) -> None:
    """Where rows that reach no labelled node are not computed."""
    data = typed.graph()
    model = made(make, data)
    ordered = ooc.convert(data, tmp_path / "hops.ooc", dtype="float64", order="hop")
    expected = trained(copy.deepcopy(model), store_of(data, tmp_path), tmp_path, _tuning=Tuning(tile_rows=8))
    found = trained(model, ordered, tmp_path, _tuning=Tuning(tile_rows=8))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_edges_of_a_type_that_has_none_are_gathered_from_files(tmp_path: Path) -> None:
    """Where a layer that goes by the general path has the least memory."""
    data = typed.graph()
    for kind in data.edge_types[2:]:
        del data[kind]
    data["author", "writes", "paper"].edge_index = torch.empty(2, 0, dtype=torch.long)
    store, options = store_of(data, tmp_path), {"_tuning": Tuning(tile_rows=16), "threads": 1, "block_rows": 16}
    model = made(GENERAL["both ends"], data)
    pyg = copy.deepcopy(model)
    gpu, host = least_budgets(
        lambda gpu, host: ooc.Trainer(copy.deepcopy(model), store, gpu_budget=gpu, host_budget=host, **options)
    )
    losses = trained(model, store, tmp_path, gpu_budget=gpu, host_budget=host, **options)
    torch.testing.assert_close(losses, typed.reference(pyg, data), rtol=1e-10, atol=1e-10)
