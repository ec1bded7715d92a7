# SPDX-License-Identifier: Apache-2.0
"""Convolutions that take the features of edges are PyG's, gradients of what makes terms of them included."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GCNConv, GENConv, GINEConv, TransformerConv

import ooc
from ooc.errors import ModelError
from ooc.plan.layout.passes import ColumnPass
from ooc.train.prediction import Prediction
from ooc.train.resources import Resources
from tests.exactness.comparison import (
    DIRECTIONS,
    assert_agrees,
    in_turn,
    least,
    least_budgets,
    make_trainer,
    store_of,
    train_epoch,
    tuned_trainer,
)
from tests.exactness.conftest import Converted
from tests.exactness.reference import CustomCase, ModelCase, adamw, smooth_adam
from tests.examples import cases, examples
from tests.graphs import GraphCase, graph_cases, random_data

EPOCHS = 2
K = 3
ROUGH = GraphCase(self_loops=9, isolated=7, duplicates=15, unlabelled=8, edge_features=K)
UNDIRECTED = GraphCase(self_loops=9, isolated=7, duplicates=15, unlabelled=8, edge_features=K, undirected=True)
H = 8


def gat(layers: int = 2, dropout: float = 0.0, **options: Any) -> ModelCase:
    """PyG's GAT of so many layers."""
    return ModelCase(kind="gat", layers=layers, dropout=dropout, options={"edge_dim": K, **options})


class Transformers(nn.Module):
    """Two layers of TransformerConv."""

    def __init__(self, features: int, classes: int, **options: Any) -> None:
        super().__init__()
        self.first = TransformerConv(features, H // 2, heads=2, edge_dim=K, **options)
        self.second = TransformerConv(H, classes, heads=3, concat=False, edge_dim=K, **options)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index, edge_attr).relu(), edge_index, edge_attr=edge_attr)


class Gines(nn.Module):
    """GINE on the features and in the middle of a model; ``edge_dim``: with a linear map of edges' features."""

    def __init__(self, features: int, classes: int, *, edge_dim: int | None = K, train_eps: bool = True) -> None:
        super().__init__()
        width = H if edge_dim is not None else K
        self.before = nn.Linear(features, width) if edge_dim is None else None
        inputs = features if edge_dim is not None else width
        self.first = GINEConv(
            nn.Sequential(nn.Linear(inputs, H), nn.ReLU(), nn.Linear(H, width)), train_eps=train_eps, edge_dim=edge_dim
        )
        self.second = GINEConv(nn.Linear(width, classes), eps=0.3, edge_dim=edge_dim)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        if self.before is not None:
            x = self.before(x).tanh()
        return self.second(self.first(x, edge_index, edge_attr).relu(), edge_index, edge_attr)


class Mixed(nn.Module):
    """Attention with features, a sum with weights, and neither, one behind the other."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.attend = GATConv(features, H // 2, heads=2, edge_dim=K, fill_value=0.5)
        self.sum = GCNConv(H, H)
        self.gine = GINEConv(nn.Linear(H, H), edge_dim=K)
        self.plain = GATConv(H, classes, heads=2, concat=False)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor, edge_attr: Tensor) -> Tensor:
        x = self.attend(x, edge_index, edge_attr).relu()
        x = self.sum(x, edge_index, edge_weight)
        return self.plain(self.gine(x, edge_index, edge_attr).relu(), edge_index)


class FrozenEdges(Gines):
    """The map of edges' features is not trained."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__(features, classes)
        for conv in (self.first, self.second):
            conv.lin.requires_grad_(False)


class Gens(nn.Module):
    """A softmax of every column over the edges, whose features add to messages."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first = GENConv(features, H, edge_dim=K, norm="layer", bias=True)
        self.second = GENConv(H, classes, edge_dim=K, t=0.5, norm=None)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index, edge_attr).relu(), edge_index, edge_attr)


MODELS = {
    "GAT": gat(3, heads=2),
    "GAT, dropout": gat(2, 0.4, heads=4),
    "GAT, no loops": gat(2, heads=2, add_self_loops=False),
    "GAT, loops of ones": gat(2, heads=2, fill_value=1.0),
    "GAT, loops summed": gat(2, heads=2, fill_value="add"),
    "GAT, loops given": gat(2, heads=2, fill_value=torch.tensor([0.5, -1.0, 2.0])),
    "GATv2": gat(3, 0.3, heads=2, v2=True),
    "GATv2, shared": gat(2, heads=4, v2=True, share_weights=True, residual=True),
    "GATv2, no loops": gat(2, heads=2, v2=True, add_self_loops=False, concat=False),
    "Transformer": CustomCase(make=Transformers),
    "Transformer, dropout": CustomCase(make=lambda f, c: Transformers(f, c, dropout=0.3, beta=True)),
    "Transformer, no root": CustomCase(make=lambda f, c: Transformers(f, c, root_weight=False)),
    "GEN": CustomCase(make=Gens),
    "GINE": CustomCase(make=Gines),
    "GINE, features as they are": CustomCase(make=lambda f, c: Gines(f, c, edge_dim=None)),
    "GINE, frozen edges": CustomCase(make=FrozenEdges),
}


@pytest.mark.thorough(
    "GAT-undirected", "GATv2-undirected", "Transformer-undirected", "GINE-undirected", "GATv2, no loops-directed"
)
@pytest.mark.parametrize(
    ("name", "undirected"), in_turn(MODELS, DIRECTIONS, all_ways={"GAT", "GATv2", "Transformer", "GINE"})
)
def test_models(name: str, undirected: bool, converted: Converted, tmp_path: Path) -> None:
    """Whole in memory on a directed graph, one head or column after the other on an undirected one; models that differ
    in an option alone on one of them."""
    data, store = converted(UNDIRECTED if undirected else ROUGH)
    slab_columns = 1 if undirected else None
    assert_agrees(MODELS[name], data, tmp_path, epochs=EPOCHS, store=store, slab_columns=slab_columns)


@pytest.mark.parametrize("v2", [False, True], ids=["GAT", "GATv2"])
def test_a_map_of_features_that_are_not_there_has_no_gradient(v2: bool, tmp_path: Path) -> None:
    """On a store without features attention is PyG's without them, and weight decay leaves the map alone."""
    assert_agrees(gat(2, heads=2, v2=v2), random_data(GraphCase()), tmp_path, make_optimizer=adamw, epochs=EPOCHS)


def test_with_weights_beside(tmp_path: Path) -> None:
    """A store with both: attention takes features, sums take weights, and one that takes neither may follow."""
    graph = GraphCase(self_loops=9, isolated=7, duplicates=15, edge_features=K, weighted=True)
    assert_agrees(CustomCase(make=Mixed), random_data(graph), tmp_path, epochs=EPOCHS)


@pytest.mark.parametrize("name", ["GAT, dropout", "GINE"])
def test_float32(name: str, tmp_path: Path) -> None:
    """Single precision, to 1e-4."""
    data = random_data(ROUGH, dtype=torch.float32)
    assert_agrees(MODELS[name], data, tmp_path, dtype=torch.float32, make_optimizer=smooth_adam, epochs=EPOCHS)


@pytest.mark.parametrize("name", ["GAT", "GINE"])
def test_half_precision_is_of_the_store_alone(name: str, tmp_path: Path) -> None:
    """Features of nodes and edges kept in float16 are computed with in the model's type."""
    data = random_data(ROUGH)
    data.x, data.edge_attr = data.x.half().double(), data.edge_attr.half().double()
    store = ooc.convert(data, tmp_path / "g.ooc", dtype="float16")
    assert store.edge_features("in").dtype == "float16"
    assert_agrees(MODELS[name], data, tmp_path, epochs=EPOCHS, store=store, slab_columns=1)


@pytest.mark.thorough("GATv2")
@pytest.mark.parametrize("name", ["GAT, dropout", "GATv2", "Transformer", "GINE"])
def test_results_do_not_depend_on_the_plan(name: str, tmp_path: Path) -> None:
    """Gradients and losses are equal to the last bit under every budget, whatever is spilled and cut."""
    graph = GraphCase(
        nodes=300, edges=1500, features=12, self_loops=30, isolated=30, duplicates=60, unlabelled=90, edge_features=K
    )
    store = store_of(random_data(graph, dtype=torch.float32), tmp_path)
    model = MODELS[name]

    def trained(**options: Any) -> tuple[list[float], dict[str, Tensor], int, bool]:
        with make_trainer(model, store, tmp_path, dtype=torch.float32, tile_rows=64, **options) as trainer:
            epochs = [train_epoch(trainer) for _ in range(2)]
            columns = any(
                isinstance(item, ColumnPass) and trainer.plan.matrices[item.pull.source].grid.slabs > 1
                for item in trainer.plan.programs["train"]
            )
            return [e.loss for e in epochs], epochs[-1].gradients, trainer.plan.ssd_write_bytes, columns

    scarce = least(model, store, tmp_path, dtype=torch.float32, tile_rows=64)
    plans: list[dict[str, Any]] = [scarce, {"slab_columns": 5, "threads": 3}]
    plans += cases([], [{"gpu_budget": 3 * scarce["gpu_budget"]}, {"block_rows": 64, "slab_columns": 1}])
    losses, gradients, written, _ = trained()
    assert not written
    outcomes = [(options, trained(**options)) for options in plans]
    for options, (other_losses, other_gradients, _, _) in outcomes:
        assert other_losses == losses, options
        for parameter, gradient in other_gradients.items():
            assert torch.equal(gradient, gradients[parameter]), (options, parameter)
    assert outcomes[0][1][2], "the least budget spills"
    assert any(columns for _, (_, _, _, columns) in outcomes)


@st.composite
def featured(draw: st.DrawFn) -> ModelCase:
    """GAT and GATv2 with any options of edges, graph transformers, GINE."""
    kind = draw(st.sampled_from(["gat", "gat", "gatv2", "transformer", "gine"]))
    dropout = draw(st.sampled_from([0.0, 0.3]))
    if kind == "transformer":
        options: dict[str, Any] = {"dropout": dropout, "beta": draw(st.booleans()), "root_weight": True}
        return CustomCase(make=lambda f, c: Transformers(f, c, **options))
    if kind == "gine":
        edge_dim = draw(st.sampled_from([None, K]))
        return CustomCase(make=lambda f, c: Gines(f, c, edge_dim=edge_dim))
    options = {
        "heads": draw(st.sampled_from([1, 2, 4])),
        "concat": draw(st.booleans()),
        "add_self_loops": draw(st.booleans()),
        "fill_value": draw(st.sampled_from(["mean", "add", 0.7])),
        "residual": draw(st.booleans()),
        "v2": kind == "gatv2",
    }
    return gat(draw(st.integers(1, 3)), dropout, **options)


@given(
    graph=graph_cases(
        edges=st.integers(20, 200),  # without any, PyG's GATConv leaves its map of features out of the graph
        isolated=st.just(0),
        edge_features=st.just(K),
        unlabelled=st.just(0),
    ),
    model=featured(),
    tile_rows=st.sampled_from([4, 16, 64]),
    slab_columns=st.sampled_from([None, 1, 4]),
    share=st.sampled_from([1.0, 1.2, 100.0]),
)
@settings(
    max_examples=examples(3),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_case_is_exact(
    graph: GraphCase, model: ModelCase, tile_rows: int, slab_columns: int | None, share: float, tmp_path: Path
) -> None:
    """Under the least budgets that the trainer itself says would do, or a multiple of them."""
    data = random_data(graph)
    store = store_of(data, tmp_path)
    cut = {"tile_rows": tile_rows, "slab_columns": slab_columns}
    gpu, host = least_budgets(
        lambda gpu, host: make_trainer(model, store, tmp_path, gpu_budget=gpu, host_budget=host, **cut)
    )
    budgets = {"gpu_budget": int(gpu * share), "host_budget": host}
    assert_agrees(model, data, tmp_path, epochs=EPOCHS, store=store, **budgets, **cut)


@pytest.mark.parametrize("name", ["GAT", "GATv2, shared", "Transformer", "GINE"])
def test_predictions_take_the_features(name: str, tmp_path: Path) -> None:
    """Logits of all nodes and of some are those of the model in PyG, called with the features."""
    data = random_data(ROUGH)
    store = store_of(data, tmp_path)
    model = MODELS[name].build(store.num_features, store.num_classes).eval()
    with torch.no_grad():
        expected = model(data.x, data.edge_index, edge_attr=data.edge_attr)
    resources = Resources.parse("64M", "64M", spill_dir=tmp_path, tile_rows=8)
    for nodes in (None, [3, 17, 40]):
        prediction = Prediction(model, store, resources, nodes=nodes)
        wanted = expected if nodes is None else expected[nodes]
        assert torch.allclose(prediction.read(), wanted, rtol=1e-9, atol=1e-11)
        prediction.close()


def test_what_cannot_be_meant_is_refused_by_name(tmp_path: Path) -> None:
    """Features without a part in the model, of another number, or not given where they are needed."""
    store = store_of(random_data(ROUGH), tmp_path)
    (tmp_path / "plain").mkdir()
    plain = store_of(random_data(GraphCase()), tmp_path / "plain")

    def refused(case: ModelCase, message: str, store: Any = store) -> None:
        with pytest.raises(ModelError, match=message):
            tuned_trainer(case.build(store.num_features, store.num_classes), store)

    refused(ModelCase(kind="gat"), "edges carry features, of which model GAT takes none")
    refused(ModelCase(kind="gcn"), "edges carry features, of which model GCN takes none")
    refused(gat(edge_dim=K + 1), r"GATConv \(convs.0\): it takes 4 features of edges, the store has 3")
    refused(CustomCase(make=lambda f, c: GINEConv(nn.Linear(f, c))), "nodes have 9 features here, edges 3")
    refused(CustomCase(make=Gines), "its forward must take .*edge_attr where the store has them, here neither", plain)


@pytest.mark.parametrize("name", ["GINE", "GCN"])
def test_a_narrower_spill_is_the_same_under_any_plan(name: str, tmp_path: Path) -> None:
    """What edges carry is never rounded; what is kept is, wherever it is kept."""
    weighted = GraphCase(self_loops=9, duplicates=15, weighted=True)
    data = random_data(ROUGH if name == "GINE" else weighted, dtype=torch.float32)
    model = MODELS["GINE"] if name == "GINE" else ModelCase(kind="gcn", layers=3)
    store = store_of(data, tmp_path)

    def losses(**options: Any) -> list[float]:
        with make_trainer(model, store, tmp_path, dtype=torch.float32, **options) as trainer:
            return [train_epoch(trainer).loss for _ in range(2)]

    plain = losses()
    narrow = losses(spill_dtype="bfloat16")
    assert narrow != plain and narrow == pytest.approx(plain, rel=1e-2)
    for cut in ({"slab_columns": 1}, {"slab_columns": 3, "block_rows": 8, "threads": 3}):
        assert losses(spill_dtype="bfloat16", **cut) == narrow
