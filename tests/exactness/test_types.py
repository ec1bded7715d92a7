# SPDX-License-Identifier: Apache-2.0
"""Graphs with types of nodes and edges against PyG's HeteroData, full batch."""

import copy
import itertools
import re
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import HeteroData
from torch_geometric.nn import (
    BatchNorm,
    GATConv,
    GATv2Conv,
    GINConv,
    GraphConv,
    HANConv,
    HeteroConv,
    HeteroDictLinear,
    HGTConv,
    ResGatedGraphConv,
    SAGEConv,
    TransformerConv,
    to_hetero,
)
from torch_geometric.transforms import AddMetaPaths
from torch_geometric.utils import coalesce

import ooc
from ooc.conversion.reorder import reorder
from ooc.errors import BudgetError, ModelError, OocError
from ooc.kernels.dropout.rows import keep_scale
from ooc.model.layers.per_edge import EdgeAggregate
from ooc.model.lowering.network import values_of
from ooc.model.lowering.values import Sum
from ooc.models import Relational, RelationalAttention
from ooc.plan.planner import Chosen, make_plan
from ooc.stages.recomputation import read_backward
from ooc.storage.verification import verify
from ooc.train.setup import Saving, Tuning
from tests.exactness import comparison

HIDDEN, CLASSES, EPOCHS = 9, 4, 2
pytestmark = pytest.mark.filterwarnings("ignore:There exist node types", "ignore:The type 'written by'")
TOLERANCE = 1e-10
Make = Callable[[HeteroData], nn.Module]


def graph(*, topics_reached: bool = False) -> HeteroData:
    """3 types of nodes with 7, 5 and 3 features; edges within a type, between types, both ways and of a type without
    any; the last nodes have none, and no edge leads to a topic unless they are reached."""
    random = torch.Generator().manual_seed(1)
    counts, data = {"paper": 90, "author": 61, "topic": 20}, HeteroData()
    for (kind, count), width in zip(counts.items(), (7, 5, 3), strict=True):
        data[kind].x = torch.randn(count, width, generator=random, dtype=torch.float64)
    data["paper"].y = torch.randint(CLASSES, (90,), generator=random)
    part = torch.rand(90, generator=random)
    data["paper"].train_mask, data["paper"].val_mask, data["paper"].test_mask = part < 0.5, part > 0.8, part < 0
    relations = {
        ("author", "writes", "paper"): 200,
        ("paper", "cites", "paper"): 300,
        ("paper", "written by", "author"): 150,
        ("topic", "covers", "paper"): 60,
    }
    relations[("paper", "about", "topic") if topics_reached else ("paper", "edits", "author")] = 40 * topics_reached
    for (source, name, target), edges in relations.items():
        ends = [torch.randint(counts[end] * 4 // 5, (edges,), generator=random) for end in (source, target)]
        data[source, name, target].edge_index = torch.stack(ends)
    return data


class Relations(nn.Module):
    """Two layers of ``HeteroConv`` between linear maps; what no edge leads to stays as it was."""

    def __init__(self, data: HeteroData, conv: Callable[[], nn.Module], group: str = "sum", norm: bool = False) -> None:
        super().__init__()
        self.lift = HeteroDictLinear({kind: data[kind].x.shape[1] for kind in data.node_types}, HIDDEN)
        self.convs = nn.ModuleList(HeteroConv({kind: conv() for kind in data.edge_types}, group) for _ in range(2))
        self.norm = nn.ModuleDict({kind: BatchNorm(HIDDEN) for kind in data.node_types} if norm else {})
        self.out = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[tuple[str, str, str], Tensor]) -> Tensor:
        x_dict = self.lift(x_dict)
        for conv in self.convs:
            found = conv(x_dict, edge_index_dict)
            if len(self.norm) and conv is self.convs[0]:
                found = {kind: self.norm[kind](rows) for kind, rows in found.items()}
            x_dict = {**x_dict, **{kind: rows.relu() for kind, rows in found.items()}}
        return self.out(x_dict["paper"])


class FeaturesFirst(nn.Module):
    """Sums of features as they are in the first layer."""

    def __init__(self, data: HeteroData, first: str = "mean") -> None:
        super().__init__()
        widths = {kind: data[kind].x.shape[1] for kind in data.node_types}
        convs = {one: SAGEConv((widths[one[0]], widths[one[2]]), HIDDEN, aggr=first) for one in data.edge_types}
        self.first, self.topic = HeteroConv(convs), nn.Linear(widths["topic"], HIDDEN)
        self.second = HeteroConv({one: GraphConv((HIDDEN, HIDDEN), CLASSES) for one in data.edge_types})

    def forward(
        self, x_dict: dict[str, Tensor], edge_index_dict: dict[tuple[str, str, str], Tensor]
    ) -> dict[str, Tensor]:
        found = {kind: F.relu(rows) for kind, rows in self.first(x_dict, edge_index_dict).items()}
        found["topic"] = self.topic(x_dict["topic"])
        result: dict[str, Tensor] = self.second(found, edge_index_dict)
        return result


class Layers(nn.Module):
    """A homogeneous model, for ``to_hetero``."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(SAGEConv((-1, -1), HIDDEN) for _ in range(layers - 1))
        self.last = SAGEConv((-1, -1), CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x, edge_index).relu()
        found: Tensor = self.last(x, edge_index)
        return found


def hidden_sage(aggr: str = "mean", **options: Any) -> Callable[[], nn.Module]:
    return lambda: SAGEConv((HIDDEN, HIDDEN), HIDDEN, aggr=aggr, **options)


def attention(conv: type[nn.Module] = GATConv, **options: Any) -> Callable[[], nn.Module]:
    return lambda: conv((HIDDEN, HIDDEN), HIDDEN, heads=2, concat=False, add_self_loops=False, **options)


def relational(data: HeteroData, **options: Any) -> nn.Module:
    widths = {kind: data[kind].x.shape[1] for kind in data.node_types}
    return Relational(widths, data.edge_types, HIDDEN, 3, CLASSES, target="paper", **options)


def attending(data: HeteroData, **options: Any) -> nn.Module:
    """With weights that are drawn, where PyG begins with ones."""
    widths = {kind: data[kind].x.shape[1] for kind in data.node_types}
    model = RelationalAttention(widths, data.edge_types, 6, 2, CLASSES, target="paper", heads=2, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def in_turn(*convs: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Of types of edges in turn: of five, so that a type has another one in the second layer."""
    turns = itertools.cycle(convs)
    return lambda: next(turns)()


def pairs(conv: Callable[..., nn.Module]) -> Callable[[], nn.Module]:
    return lambda: conv((HIDDEN, HIDDEN), HIDDEN)


def gin() -> nn.Module:
    return GINConv(nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU()))


MODELS: dict[str, Make] = {
    "means, added up": lambda data: Relations(data, hidden_sage()),
    "sums, averaged": lambda data: Relations(data, hidden_sage("sum"), "mean"),
    "the largest": lambda data: Relations(data, hidden_sage(project=True, normalize=True), "max"),
    "batch norm": lambda data: Relations(data, hidden_sage(), norm=True),
    "features first": FeaturesFirst,
    "maxima and gin": lambda data: Relations(data, in_turn(hidden_sage("max"), gin)),
    "attention, two versions": lambda data: Relations(data, in_turn(attention(), attention(GATv2Conv))),
    "attention, residual": lambda data: Relations(data, attention(residual=True, dropout=0.0), "max"),
    "products and gates": lambda data: Relations(
        data, in_turn(pairs(partial(TransformerConv, beta=True)), pairs(ResGatedGraphConv))
    ),
    "rgcn": relational,
    "sage": lambda data: relational(data, roots=True),
    "hgt": attending,
    "han": lambda data: attending(data, by_type=True),
}


def made(make: Make, data: HeteroData) -> nn.Module:
    """The model, with the weights that this always draws."""
    torch.manual_seed(3)
    model = make(data).double()
    with torch.no_grad():
        model(data.x_dict, data.edge_index_dict)  # lazily sized parameters
    return model


def store_of(data: HeteroData, folder: Path) -> ooc.Store:
    return comparison.store_of(data, folder, linked=True)


def trained(model: nn.Module, store: ooc.Store | HeteroData, folder: Path, **options: Any) -> list[float]:
    """Losses by epoch; the gradients are left in the model."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with ooc.Trainer(model, store, optimizer=optimizer, spill_dir=folder / "spill", **options) as trainer:
        return [record.loss for record in trainer.fit(epochs=EPOCHS)]


def reference(model: nn.Module, data: HeteroData) -> list[float]:
    """PyG's."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        output = model(data.x_dict, data.edge_index_dict)
        output = output["paper"] if isinstance(output, dict) else output
        mask = data["paper"].train_mask
        loss = F.cross_entropy(output[mask], data["paper"].y[mask])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_as_pyg(make: Make, data: HeteroData, folder: Path, **options: Any) -> None:
    model = made(make, data)
    expected = copy.deepcopy(model)
    losses = trained(model, store_of(data, folder), folder, **options)
    torch.testing.assert_close(losses, reference(expected, data), rtol=TOLERANCE, atol=TOLERANCE)
    for (name, found), wanted in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=TOLERANCE, atol=TOLERANCE, msg=name)
        assert (found.grad is None) == (wanted.grad is None), name
        if found.grad is not None:
            torch.testing.assert_close(found.grad, wanted.grad, rtol=TOLERANCE, atol=TOLERANCE, msg=name)
    for (name, found), wanted in zip(model.named_buffers(), expected.buffers(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=TOLERANCE, atol=TOLERANCE, msg=name)


class AllNormed(nn.Module):
    """Norms of all types behind each layer, as one writes them, though the last one is asked for papers alone."""

    def __init__(self, data: HeteroData) -> None:
        super().__init__()
        widths = {kind: data[kind].x.shape[1] for kind in data.node_types}
        self.maps = nn.ModuleDict({kind: nn.Linear(width, HIDDEN) for kind, width in widths.items()})
        self.convs = nn.ModuleList(
            HeteroConv({kind: SAGEConv((HIDDEN, HIDDEN), HIDDEN) for kind in data.edge_types}) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.ModuleDict({kind: BatchNorm(HIDDEN) for kind in widths}) for _ in range(2))
        self.out = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Tensor]) -> Tensor:
        x_dict = {kind: self.maps[kind](x) for kind, x in x_dict.items()}
        for conv, norms in zip(self.convs, self.norms, strict=True):
            x_dict = {kind: norms[kind](x).relu() for kind, x in conv(x_dict, edge_index_dict).items()}
        out: Tensor = self.out(x_dict["paper"])
        return out


def test_norms_that_no_output_depends_on_stay_as_they_are(tmp_path: Path) -> None:
    """With a warning; all else is PyG's."""
    data = graph(topics_reached=True)
    model = made(AllNormed, data)
    expected, before = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    with pytest.warns(RuntimeWarning, match=r"^running statistics of .*norms\.1\..* stay as they are"):
        losses = trained(model, store_of(data, tmp_path), tmp_path)
    torch.testing.assert_close(losses, reference(expected, data), rtol=TOLERANCE, atol=TOLERANCE)
    state, stayed = model.state_dict(), []
    for name, wanted in expected.state_dict().items():
        if "paper" in name or not name.startswith("norms.1"):
            torch.testing.assert_close(state[name], wanted, rtol=TOLERANCE, atol=TOLERANCE, msg=name)
        elif "running_mean" in name:
            stayed.append(torch.equal(state[name], before[name]) and not torch.equal(wanted, before[name]))
    assert stayed and all(stayed)


class InTurn(nn.Module):
    """Goes by the places that types have, and by what the data has, whoever has it."""

    def __init__(self, data: HeteroData, of_data: bool) -> None:
        super().__init__()
        widths = [data[kind].x.shape[1] for kind in data.node_types]
        self.maps, self.scales = nn.ModuleList(nn.Linear(one, HIDDEN) for one in widths), nn.Parameter(torch.ones(3))
        self.conv = HeteroConv({kind: SAGEConv((HIDDEN, HIDDEN), HIDDEN) for kind in data.edge_types})
        self.out = nn.Linear(HIDDEN, CLASSES)
        if of_data:
            self.forward = self.of_data  # type: ignore[method-assign,assignment]

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Tensor]) -> Tensor:
        scaled = [(number + 1) * scale for number, scale in enumerate(self.scales.unbind())]
        x_dict = {
            kind: map_(x) * scale for (kind, x), map_, scale in zip(x_dict.items(), self.maps, scaled, strict=True)
        }
        out: Tensor = self.out(self.conv(x_dict, edge_index_dict)["paper"].relu())
        return out

    def of_data(self, data: HeteroData) -> Tensor:
        has_labels = "y" in data["paper"] and data["paper"].y is not None and "y" not in data["author"]
        x = InTurn.forward(self, data.x_dict, data.edge_index_dict)
        return x * (1 + data.node_types.index("paper")) * (2 if has_labels else 1)


@pytest.mark.parametrize("of_data", [False, True])
def test_types_are_in_the_order_of_the_data(of_data: bool, tmp_path: Path) -> None:
    """The one that is labelled is not the first."""
    one, data = graph(), HeteroData()
    for kind in ("topic", "author", "paper"):
        data[kind].update(one[kind])
    for relation in one.edge_types[::-1]:
        data[relation].edge_index = one[relation].edge_index
    model = InTurn(data, of_data).double()
    given = (data,) if of_data else (data.x_dict, data.edge_index_dict)
    with torch.no_grad():
        mask, y = data["paper"].train_mask, data["paper"].y
        expected = F.cross_entropy(model(*given)[mask], y[mask]).item()
    assert trained(model, data, tmp_path)[0] == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize("use", [lambda out, y: out * y[:, None], lambda out, y: torch.cat((out, y), dim=1)])
def test_labels_of_data_with_types_are_not_given(use: Callable[[Tensor, Tensor], Tensor], tmp_path: Path) -> None:
    class Asking(InTurn):
        def of_data(self, data: HeteroData) -> Tensor:
            return use(super().of_data(data), data["paper"].y)

    with pytest.raises(ModelError, match="asks data for y, which it is not given"):
        trained(Asking(graph(), True).double(), graph(), tmp_path)


@pytest.mark.thorough("attention, residual", "features first", "means, added up")
@pytest.mark.parametrize("name", MODELS)
def test_losses_gradients_and_weights_are_pygs(name: str, tmp_path: Path) -> None:
    assert_as_pyg(MODELS[name], graph(), tmp_path, _tuning=Tuning(tile_rows=16))


class Several(nn.Module):
    """Gives what it is scored by, and another matrix by type."""

    def __init__(self, data: HeteroData) -> None:
        super().__init__()
        self.inner = MODELS["means, added up"](data)
        self.beside = nn.Linear(data["paper"].x.shape[1], 2)

    def forward(self, x_dict: Any, edge_index_dict: Any) -> Any:
        return self.inner(x_dict, edge_index_dict), {"paper": self.beside(x_dict["paper"])}


def test_of_several_results_ones_own_loss_gets_all(tmp_path: Path) -> None:
    data = graph()
    model = made(Several, data)
    expected, mask = copy.deepcopy(model), data["paper"].train_mask

    def loss(results: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
        return F.cross_entropy(results[0], labels, reduction="none") + results[1].square().mean(dim=1)

    found = trained(model, store_of(data, tmp_path), tmp_path, loss=loss)
    optimizer, losses = torch.optim.SGD(expected.parameters(), lr=0.5), []
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        out, other = expected(data.x_dict, data.edge_index_dict)
        out = out["paper"] if isinstance(out, dict) else out
        total = loss((out[mask], other["paper"][mask]), data["paper"].y[mask]).mean()
        total.backward()
        optimizer.step()
        losses.append(total.item())
    torch.testing.assert_close(found, losses, rtol=TOLERANCE, atol=TOLERANCE)
    for own, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(own, wanted, rtol=TOLERANCE, atol=TOLERANCE)


def test_edges_along_metapaths_are_a_type_like_others(tmp_path: Path) -> None:
    data = graph()
    for edges in data.edge_stores:  # once: of edges that are there twice PyG's product takes memory that is not its own
        edges.edge_index = coalesce(edges.edge_index)
    data = AddMetaPaths(
        [[("paper", "written by", "author"), ("author", "writes", "paper")]], drop_orig_edge_types=True
    )(data)
    assert_as_pyg(lambda data: attending(data, by_type=True), data, tmp_path)


@pytest.mark.parametrize("savings", [(), (Saving.FIRST_AGGREGATION,)], ids=["none", "first aggregation"])
@pytest.mark.parametrize("first", ["mean", "sum"])
def test_savings_change_nothing(first: str, savings: Collection[Saving], tmp_path: Path) -> None:
    assert_as_pyg(lambda data: FeaturesFirst(data, first), graph(), tmp_path, _tuning=Tuning(savings=savings))


@pytest.mark.thorough("2")
@pytest.mark.parametrize("layers", [2, 3])
def test_to_hetero_is_pygs(layers: int, tmp_path: Path) -> None:
    data = graph(topics_reached=True)
    assert_as_pyg(lambda data: to_hetero(Layers(layers), data.metadata()), data, tmp_path)


@pytest.mark.thorough("means, added up", "han")
@pytest.mark.parametrize("name", ["means, added up", "features first", "hgt", "han"])
def test_the_same_bits_whatever_the_budgets(name: str, tmp_path: Path) -> None:
    """Memory, blocks, slabs, stages that are recomputed, and a first aggregation that was kept."""
    data = graph()
    model, tuning = made(MODELS[name], data), Tuning(tile_rows=16)
    expected = trained(copy.deepcopy(model), store_of(data, tmp_path), tmp_path, _tuning=tuning)
    store = ooc.open(tmp_path / "graph.ooc")
    with pytest.raises(BudgetError) as too_small:
        trained(copy.deepcopy(model), store, tmp_path, memory=1, block_rows=16, _tuning=tuning)
    told = re.search(r"memory='?(\w+)", str(too_small.value))
    assert told is not None
    least = {"memory": told.group(1), "block_rows": 16}
    ways: list[dict[str, Any]] = [least, {"block_rows": 32, "slab_columns": 2, "memory": "40M"}]
    for way in ways:
        again = copy.deepcopy(model)
        assert trained(again, store, tmp_path, _tuning=tuning, **way) == expected, way


def test_what_is_not_kept_is_computed_again_to_the_same_bits(tmp_path: Path) -> None:
    data = graph()
    store, found = store_of(data, tmp_path), []
    for forced in (frozenset[int](), None):
        with pytest.MonkeyPatch.context() as patch:
            if forced is None:
                patch.setattr("ooc.train.job.choose_workload", _recompute_all)
            model = made(MODELS["rgcn"], data)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            with ooc.Trainer(model, store, optimizer=optimizer, spill_dir=tmp_path / "spill") as trainer:
                found.append([record.loss for record in trainer.fit(epochs=EPOCHS)])
                again = any("for backward" in item.title for item in trainer.plan.programs["train"])
                assert again == (forced is None)
    assert found[0] == found[1]


def _recompute_all(variants: Callable[[frozenset[int]], Any], *machine: Any) -> Chosen:
    recomputed = frozenset(kept.stage for kept in variants(frozenset()).kept if kept.recomputable)
    return Chosen(recomputed, make_plan(variants(recomputed), *machine))


DROPPING: dict[str, Callable[[HeteroData, float], nn.Module]] = {
    "of rows": lambda data, p: relational(data, dropout=p),
    "of edges": lambda data, p: attending(data, by_type=True, dropout=p),
}


@pytest.mark.parametrize("name", DROPPING)
def test_dropout_of_types_differs_and_not_with_budgets(name: str, tmp_path: Path) -> None:
    data, make = graph(), DROPPING[name]
    store, model = store_of(data, tmp_path), made(lambda data: make(data, 0.5), data)
    ways: list[dict[str, Any]] = [{}, {"slab_columns": 2, "block_rows": 32}]
    one, other = (trained(copy.deepcopy(model), store, tmp_path, _tuning=Tuning(tile_rows=16), **way) for way in ways)
    assert one == other
    assert one != pytest.approx(reference(made(lambda data: make(data, 0.0), data), data), rel=1e-6)


def test_dropout_on_the_features_is_each_type_s_own(tmp_path: Path) -> None:
    """PyG's with the same masks, of which every type of nodes has its own."""
    data, p = graph(), 0.4
    model = made(MODELS["features first"], data)
    expected, names = copy.deepcopy(model), data.node_types
    losses = trained(model, store_of(data, tmp_path), tmp_path, input_dropout=p, _tuning=Tuning(tile_rows=16))
    optimizer, wanted = torch.optim.SGD(expected.parameters(), lr=0.5), []
    for epoch in range(EPOCHS):
        drawn = {kind: keep_scale(0, epoch, -names.index(kind), 0, data[kind].x, p) for kind in names}
        optimizer.zero_grad()
        output = expected({kind: x * drawn[kind] for kind, x in data.x_dict.items()}, data.edge_index_dict)["paper"]
        mask = data["paper"].train_mask
        loss = F.cross_entropy(output[mask], data["paper"].y[mask])
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    torch.testing.assert_close(losses, wanted, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.thorough("hgt")
@pytest.mark.parametrize("name", ["hgt", "features first"])
def test_rows_that_reach_no_labelled_node_are_left_out(name: str, tmp_path: Path) -> None:
    """Of every type of nodes, in hop order: losses, gradients, predictions and embeddings are those of the source."""
    data = graph(topics_reached=True)
    data["paper"].train_mask[8:], data["paper"].val_mask[:], data["paper"].test_mask[:] = False, False, False
    data["paper"].val_mask[80] = True
    make, tuning = MODELS[name], Tuning(tile_rows=4)
    plain = store_of(data, tmp_path)
    once = ooc.convert(data, tmp_path / "once.ooc", dtype="float64", order="hop")
    store = reorder(plain, tmp_path / "hop.ooc")
    assert verify(store) == [] and once.types == store.types
    for array in store.arrays():
        assert (once.array(array).read() == store.array(array).read()).all(), array
    assert store.types is not None
    hops, nodes = store.types.hops, store.types.nodes
    assert hops["author"][1][:2] == (0, hops["author"][1][1]) and 0 < hops["author"][1][1] < nodes["author"]
    expected = made(make, data)
    models = [copy.deepcopy(expected) for _ in range(2)]
    wanted = reference(expected, data)
    for model, savings in zip(models, [(), tuple(Saving)], strict=True):
        losses = trained(model, store, tmp_path, _tuning=Tuning(tile_rows=4, savings=savings))
        torch.testing.assert_close(losses, wanted, rtol=TOLERANCE, atol=TOLERANCE)
        for found, other in zip(model.parameters(), expected.parameters(), strict=True):
            assert (found.grad is None) == (other.grad is None)
            if found.grad is not None:
                torch.testing.assert_close(found.grad, other.grad, rtol=TOLERANCE, atol=TOLERANCE)
    with ooc.Trainer(models[1], store, spill_dir=tmp_path / "spill", _tuning=tuning) as trainer:
        stages = {stage.name: stage.rows for stage in trainer._prepared.workload.programs["train"]}
        assert stages["loss"] == 4 and max(stages.values()) < nodes["paper"]
        predicted = torch.as_tensor(trainer.predict())
    with torch.no_grad():
        rows = expected.eval()(data.x_dict, data.edge_index_dict)
    rows = rows["paper"] if isinstance(rows, dict) else rows
    torch.testing.assert_close(predicted, rows, rtol=TOLERANCE, atol=TOLERANCE)


def test_stages_are_over_one_type_and_relays_pull_for_others(tmp_path: Path) -> None:
    data = graph()
    with ooc.Trainer(made(MODELS["means, added up"], data), store_of(data, tmp_path), spill_dir=tmp_path) as trainer:
        schedule = trainer._prepared.builder._training.schedule
        for stage, barrier in enumerate(schedule.barriers):
            assert barrier is None or barrier.space == schedule.spaces[stage]
            pulled = schedule.pulled(stage)
            if pulled is not None and pulled.source.trains:
                assert schedule.spaces[stage - 1] == pulled.source.space
        relays = [stage for stage in range(schedule.first_stages, schedule.last) if schedule.barriers[stage] is None]
        assert relays
        titles = [item.title for item in trainer.plan.programs["train"]]
        assert not any(trainer._prepared.builder._training.names.forward(relay) in titles for relay in relays)
        assert {value.space for value in values_of(schedule.output)} == {"paper", "author", "topic"}


def test_what_is_joined_over_types_of_edges_does_not_wait_type_by_type(tmp_path: Path) -> None:
    """A softmax goes on from type to type, of which the backward pass reads the last; a sum gets one term at a time."""
    data = graph()
    with ooc.Trainer(made(MODELS["hgt"], data), store_of(data, tmp_path), spill_dir=tmp_path) as trainer:
        schedule = trainer._prepared.builder._training.schedule
        barriers = [barrier for barrier in schedule.barriers if isinstance(barrier, EdgeAggregate)]
        read = [value for value in read_backward(schedule) if isinstance(value, EdgeAggregate)]
        last = [barrier for barrier in barriers if barrier.after is None]
        assert len(barriers) == 8 and len(last) == 3 and set(read) < set(last)
        for barrier in barriers:
            assert schedule.stage[barrier.source] == schedule.stage[barrier] - 1
        found = [name for name in trainer._prepared.workload.matrices if re.fullmatch(r"dp\w+", name)]
        assert len(found) == len(last)
    with ooc.Trainer(made(MODELS["means, added up"], data), store_of(data, tmp_path), spill_dir=tmp_path) as trainer:
        schedule = trainer._prepared.builder._training.schedule
        sums = [value for value in schedule.values if isinstance(value, Sum)]
        assert sums and all(len({schedule.stage[one] for one in value.inputs}) <= 2 for value in sums)


# ---- what is refused ------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    def __init__(self, data: HeteroData) -> None:
        super().__init__()
        self.lin = nn.ModuleDict({kind: nn.Linear(data[kind].x.shape[1], CLASSES) for kind in data.node_types})

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[tuple[str, str, str], Tensor]) -> Tensor:
        return self.lin["paper"](x_dict["paper"]) + self.lin["author"](x_dict["author"]).sum(dim=0)


class OfAuthors(nn.Module):
    def __init__(self, data: HeteroData) -> None:
        super().__init__()
        self.conv = SAGEConv((7, 5), CLASSES)

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[tuple[str, str, str], Tensor]) -> Tensor:
        found: Tensor = self.conv((x_dict["paper"], x_dict["author"]), edge_index_dict["paper", "written by", "author"])
        return found


class Transformed(nn.Module):
    """Of types of edges in another order: PyG takes them for sorted, and gives something else than HGT."""

    def __init__(self, data: HeteroData) -> None:
        super().__init__()
        widths = {kind: data[kind].x.shape[1] for kind in data.node_types}
        self.conv = HGTConv(widths, CLASSES, (data.node_types, data.edge_types[::-1]))

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[tuple[str, str, str], Tensor]) -> Any:
        return self.conv(x_dict, edge_index_dict)["paper"]


class Han(nn.Module):
    """Given something else than rows and edges by type, or made of other ``parts``."""

    def __init__(self, data: HeteroData, x: Any = dict, edges: Any = dict, asks: bool = False, **parts: Any) -> None:
        super().__init__()
        widths = {kind: data[kind].x.shape[1] for kind in data.node_types}
        self.conv, self.x, self.edges, self.asks = HANConv(widths, CLASSES, data.metadata()), x, edges, asks
        for name, part in parts.items():
            setattr(self.conv, name, part)

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[tuple[str, str, str], Tensor]) -> Any:
        x, edges = self.x(x_dict), self.edges(edge_index_dict)
        found = self.conv(edge_index_dict=edges, x_dict=x, return_semantic_attention_weights=self.asks)
        return (found[0] if self.asks else found)["paper"]


REFUSED: dict[str, tuple[Make, str]] = {
    "rows of no authors": (
        lambda data: Han(data, x=lambda x: {"paper": x["paper"]}),
        r"HANConv \(conv\): x_dict has no rows of 'author'",
    ),
    "rows of papers for topics": (
        lambda data: Han(data, x=lambda x: x | {"topic": x["paper"]}),
        "x_dict must have rows by their type of nodes",
    ),
    "edges turned": (
        lambda data: Han(data, edges=lambda edges: {kind: one.flip(0) for kind, one in edges.items()}),
        "edge_index_dict must have the model's own edges by their type",
    ),
    "weights asked for": (lambda data: Han(data, asks=True), "return_semantic_attention_weights is not supported"),
    "another k_lin": (
        lambda data: Han(data, k_lin=nn.Sequential(nn.Linear(CLASSES, CLASSES))),
        "k_lin is not supported as another module than a linear map",
    ),
    "another proj": (
        lambda data: Han(data, proj=nn.ModuleDict({kind: nn.Identity() for kind in data.node_types})),
        "proj has no linear map with a bias for 'paper'",
    ),
    "rows of two types": (Mixed, "rows of .paper. and of .author. at once"),
    "rows of another type": (OfAuthors, "gives rows of 'author', needed are those of 'paper'"),
    "one matrix for all": (lambda data: nn.Linear(7, CLASSES), r"must take \(x_dict, edge_index_dict\)"),
    "hgt": (Transformed, r"HGTConv .* types of edges, or in another order, .* data\.metadata\(\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_are_not_exact_are_refused_by_name(name: str, tmp_path: Path) -> None:
    make, told = REFUSED[name]
    with pytest.raises(ModelError, match=told):
        ooc.Trainer(make(graph()).double(), store_of(graph(), tmp_path))


def test_what_graphs_with_types_do_not_have_is_refused(tmp_path: Path) -> None:
    store = store_of(graph(), tmp_path)
    refused: list[Callable[[], Any]] = [
        lambda: ooc.NeighborLoader(store, [2], batch_size=4),
        lambda: ooc.remote_backend(store),
    ]
    for call in refused:
        with pytest.raises(OocError, match="3 types of nodes and 5 of edges"):
            call()


def test_predictions_are_those_of_the_type_with_labels(tmp_path: Path) -> None:
    data = graph()
    store, model = store_of(data, tmp_path), made(MODELS["features first"], data)
    with ooc.Trainer(model, store, spill_dir=tmp_path / "spill") as trainer:
        trainer.fit(epochs=1)
        found = trainer.predict()
    with torch.no_grad():
        expected = model.eval()(data.x_dict, data.edge_index_dict)["paper"]
    torch.testing.assert_close(torch.as_tensor(found), expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_a_hetero_data_is_trained_as_it_is(tmp_path: Path) -> None:
    """In its own precision, and with one type of nodes and several of edges as well."""
    data = graph()
    for kind in ("author", "topic"):
        del data[kind]
    for kind in [one for one in data.edge_types if one != ("paper", "cites", "paper")]:
        del data[kind]
    data["paper", "follows", "paper"].edge_index = data["paper", "cites", "paper"].edge_index.flip(0)[:, :100]
    model = made(lambda data: to_hetero(Layers(2), data.metadata()), data)
    expected = copy.deepcopy(model)
    (tmp_path / "spill").mkdir()
    losses = trained(model, data, tmp_path)
    torch.testing.assert_close(losses, reference(expected, data), rtol=TOLERANCE, atol=TOLERANCE)


def test_what_is_kept_in_half_the_bytes_is_the_same_whatever_the_slabs(tmp_path: Path) -> None:
    data = graph()
    store, model = store_of(data, tmp_path), made(MODELS["means, added up"], data)
    ways: list[dict[str, Any]] = [{}, {"slab_columns": 2, "block_rows": 32}]
    options: dict[str, Any] = {"spill_dtype": "bfloat16", "_tuning": Tuning(tile_rows=16)}
    one, other = (trained(copy.deepcopy(model), store, tmp_path, **options, **way) for way in ways)
    assert one == other
    assert one != pytest.approx(reference(model, data), rel=100 * TOLERANCE)


# ---- drawn at random ------------------------------------------------------------------------------------------------


class Drawn(nn.Module):
    """Layers of relations, each with a convolution of some kind; what a layer gives is put beside what it was given, or
    takes its place; the output is of the last layer or of all."""

    def __init__(self, data: HeteroData, random: Random) -> None:
        super().__init__()
        widths = [{kind: data[kind].x.shape[1] for kind in data.node_types}]
        self.layers, self.beside, self.jumps = nn.ModuleList(), [], random.random() < 0.5
        for _ in range(random.randint(1, 3)):
            now, columns, convs = widths[-1], random.randint(2, 6), {}
            for kind in data.edge_types:
                if random.random() < 0.8 or kind[2] == "paper":
                    ends = now[kind[0]], now[kind[2]]
                    summed = SAGEConv(ends, columns, aggr=random.choice(["mean", "sum", "max"]))
                    others = GraphConv(ends, columns), GATConv(ends, columns, add_self_loops=False)
                    convs[kind] = random.choice([summed, *others, TransformerConv(ends, columns)])
            self.layers.append(HeteroConv(convs, random.choice(["sum", "mean", "max", "cat"])))
            self.beside.append(random.random() < 0.5)
            found = {kind: sum(one[2] == kind for one in convs) for kind in now}
            each = {kind: columns * (n if self.layers[-1].aggr == "cat" else n > 0) for kind, n in found.items()}
            put = {kind: each[kind] + now[kind] * self.beside[-1] for kind in now}
            widths.append({kind: put[kind] if found[kind] else now[kind] for kind in now})
        wide = sum(one["paper"] for one in widths) if self.jumps else widths[-1]["paper"]
        self.out = nn.Linear(wide, CLASSES)

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[tuple[str, str, str], Tensor]) -> Tensor:
        seen = [x_dict["paper"]]
        for conv, beside in zip(self.layers, self.beside, strict=True):
            found = {kind: rows.tanh() for kind, rows in conv(x_dict, edge_index_dict).items()}
            if beside:
                found = {kind: torch.cat([rows, x_dict[kind]], dim=1) for kind, rows in found.items()}
            x_dict = {**x_dict, **found}
            seen.append(x_dict["paper"])
        result: Tensor = self.out(torch.cat(seen, dim=1) if self.jumps else seen[-1])
        return result


@pytest.mark.thorough("1", "3", "4", "5")
@pytest.mark.parametrize("seed", range(6))
def test_drawn_models_are_pygs(seed: int, tmp_path: Path) -> None:
    """300 of them, on graphs drawn as well, were compared when this was written."""
    random = Random(seed)
    way = random.choice([{}, {"slab_columns": 1}, {"slab_columns": 2, "block_rows": 16}])
    savings = random.choice([(), tuple(Saving)])
    tuning = Tuning(tile_rows=16, savings=savings)
    data = graph(topics_reached=random.random() < 0.5)
    assert_as_pyg(lambda data: Drawn(data, random), data, tmp_path, _tuning=tuning, **way)
