# SPDX-License-Identifier: Apache-2.0
"""Sums weighted by what the store's edges carry are PyG's, whatever is spilled and cut."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import APPNP, GATConv, GCN2Conv, GCNConv, SGConv
from torch_geometric.nn import Sequential as GraphSequential
from torch_geometric.nn.models import GCN, GraphSAGE

import ooc
from ooc.errors import ModelError, OptionError
from ooc.plan.layout.passes import ColumnPass
from ooc.train.batched.batches import SampledTrainer, Sampling
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
from tests.exactness.models import Adaptive, Graphs
from tests.exactness.reference import CustomCase, ModelCase, smooth_adam
from tests.examples import examples
from tests.graphs import GraphCase, graph_cases, random_data

EPOCHS = 2
ROUGH = GraphCase(self_loops=9, isolated=7, duplicates=15, unlabelled=8, weighted=True)
UNDIRECTED = GraphCase(self_loops=9, isolated=7, duplicates=15, unlabelled=8, weighted=True, undirected=True)
H = 8


class Propagated(nn.Module):
    """Convolutions that propagate and nothing else, with the weights: a user's own model."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(features, H), nn.Linear(H, classes)
        self.deep = nn.ModuleList(GCN2Conv(H, alpha=0.2, theta=0.5, layer=k + 1) for k in range(2))
        self.spread = APPNP(3, 0.2)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        x = start = self.first(x).relu()
        for conv in self.deep:
            x = conv(x, start, edge_index, edge_weight).relu()
        return self.spread(self.last(x), edge_index, edge_weight=edge_weight)


class Simplified(nn.Module):
    """SGC with the weights, in the middle of a model and at its start."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first, self.second = SGConv(features, H, K=2), SGConv(H, classes, K=2)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index, edge_weight).relu(), edge_index, edge_weight)


def in_sequence(features: int, classes: int) -> nn.Module:
    """PyG's Sequential, told of the weights."""
    return GraphSequential(
        "x, edge_index, edge_weight",
        [
            (GCNConv(features, H), "x, edge_index, edge_weight -> x"),
            nn.ReLU(),
            (GCNConv(H, classes), "x, edge_index, edge_weight -> x"),
        ],
    )


MODELS = {
    "gcn": ModelCase(kind="gcn", layers=3, dropout=0.3, input_dropout=0.2),
    "gcn improved": ModelCase(kind="gcn", layers=3, options={"improved": True}),
    "gcn without added loops": ModelCase(kind="gcn", layers=3, options={"add_self_loops": False}),
    "gcn not normalised": ModelCase(kind="gcn", layers=3, options={"normalize": False}),
    "gcn wider than its input": ModelCase(kind="gcn", layers=3, hidden=21),
    "gcn, jumping": ModelCase(kind="gcn", layers=3, options={"jk": "cat"}),
    "GCNII and APPNP": CustomCase(make=Propagated),
    "SGC": CustomCase(make=Simplified),
    "in sequence": CustomCase(make=in_sequence),
    "GraphConv": CustomCase(make=Graphs),
    "TAG": CustomCase(make=Adaptive),
    "TAG, not normalised": CustomCase(make=lambda f, c: Adaptive(f, c, hops=2, normalize=False)),
}


@pytest.mark.thorough("gcn-undirected", "TAG, not normalised-undirected", "gcn wider than its input-directed")
@pytest.mark.parametrize(("name", "undirected"), in_turn(MODELS, DIRECTIONS, all_ways={"gcn"}))
def test_models(name: str, undirected: bool, converted: Converted, tmp_path: Path) -> None:
    """Whole in memory on a directed graph, three columns at a time on an undirected one; and GCN either way, the second
    time with the aggregation kept before."""
    data, store = converted(UNDIRECTED if undirected else ROUGH)
    for slab_columns in (None, 3) if name == "gcn" else (3 if undirected else None,):
        assert_agrees(MODELS[name], data, tmp_path, epochs=EPOCHS, store=store, slab_columns=slab_columns)


def test_an_undirected_store_reads_its_weights_once(tmp_path: Path) -> None:
    """The graph is undirected with its weights: one direction serves both passes."""
    assert store_of(random_data(UNDIRECTED), tmp_path).undirected
    store = store_of(random_data(ROUGH), tmp_path)
    assert not store.undirected
    with make_trainer(MODELS["gcn"], store, tmp_path) as trainer:
        names = {str(line["matrix"]) for line in trainer.plan.summary()}
    assert {"in-edges", "in-weight", "out-edges", "out-weight"} <= names


def test_float32(tmp_path: Path) -> None:
    """Single precision, to 1e-4."""
    data = random_data(ROUGH, dtype=torch.float32)
    assert_agrees(MODELS["gcn"], data, tmp_path, dtype=torch.float32, make_optimizer=smooth_adam, epochs=EPOCHS)


@pytest.mark.thorough("gcn")
@pytest.mark.parametrize("model", [MODELS["gcn"], MODELS["GCNII and APPNP"]], ids=["gcn", "GCNII and APPNP"])
def test_results_do_not_depend_on_the_plan(model: ModelCase, tmp_path: Path) -> None:
    """Gradients and losses are equal to the last bit under every budget, whatever is spilled and cut."""
    graph = GraphCase(
        nodes=500, edges=3000, features=12, self_loops=30, isolated=30, duplicates=60, unlabelled=90, weighted=True
    )
    store = store_of(random_data(graph, dtype=torch.float32), tmp_path)

    def trained(**options: Any) -> tuple[list[float], dict[str, Tensor], int, bool]:
        with make_trainer(model, store, tmp_path, dtype=torch.float32, tile_rows=64, **options) as trainer:
            epochs = [train_epoch(trainer) for _ in range(2)]
            columns = any(isinstance(item, ColumnPass) for item in trainer.plan.programs["train"])
            return [e.loss for e in epochs], epochs[-1].gradients, trainer.plan.ssd_write_bytes, columns

    scarce = least(model, store, tmp_path, dtype=torch.float32, tile_rows=64)
    plans: list[dict[str, Any]] = [scarce, {**scarce, "gpu_budget": 3 * scarce["gpu_budget"], "block_rows": None}]
    plans += [{"slab_columns": 1}, {"slab_columns": 5, "threads": 3}]
    losses, gradients, written, _ = trained()
    assert not written
    outcomes = [(options, trained(**options)) for options in plans]
    for options, (other_losses, other_gradients, _, _) in outcomes:
        assert other_losses == losses, options
        for name, gradient in other_gradients.items():
            assert torch.equal(gradient, gradients[name]), (options, name)
    assert outcomes[0][1][2], "the least budget spills"
    assert any(columns for _, (_, _, _, columns) in outcomes)


@given(
    graph=graph_cases(
        nodes=st.integers(2, 60),
        isolated=st.integers(0, 20),
        weighted=st.just(True),
        unlabelled=st.just(0),
    ),
    kind=st.sampled_from([{}, {"improved": True}, {"add_self_loops": False}, {"normalize": False}]),
    layers=st.integers(1, 3),
    dropout=st.sampled_from([0.0, 0.3]),
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
    graph: GraphCase,
    kind: dict[str, Any],
    layers: int,
    dropout: float,
    tile_rows: int,
    slab_columns: int | None,
    share: float,
    tmp_path: Path,
) -> None:
    """Under the least budgets that the trainer itself says would do, or a multiple of them."""
    data = random_data(graph)
    model = ModelCase(kind="gcn", layers=layers, dropout=dropout, options=kind)
    store = store_of(data, tmp_path)
    cut = {"tile_rows": tile_rows, "slab_columns": slab_columns}
    gpu, host = least_budgets(
        lambda gpu, host: make_trainer(model, store, tmp_path, gpu_budget=gpu, host_budget=host, **cut)
    )
    budgets = {"gpu_budget": int(gpu * share), "host_budget": host}
    assert_agrees(model, data, tmp_path, epochs=EPOCHS, store=store, **budgets, **cut)


def test_predictions_take_the_weights(tmp_path: Path) -> None:
    """Logits are those of the model in PyG, called with the weights; and without, where they are left out."""
    data = random_data(ROUGH)
    store = store_of(data, tmp_path)
    model = MODELS["gcn"].build(store.num_features, store.num_classes).eval()
    resources = Resources.parse("64M", "64M", spill_dir=tmp_path, tile_rows=8)
    for ignored, arguments in (("none", {"edge_weight": data.edge_weight}), ("weight", {}), ("all", {})):
        prediction = Prediction(model, store, resources, ignore_edge_data=ignored)
        with torch.no_grad():
            expected = model(data.x, data.edge_index, **arguments)
        assert torch.allclose(prediction.read(), expected, rtol=1e-9, atol=1e-12)
        prediction.close()


@pytest.mark.parametrize("ignored", ["none", "weight"])
def test_a_trainer_predicts_as_it_was_trained(ignored: str, tmp_path: Path) -> None:
    """With the weights, or without where it was told to leave them out; so it is of pairs, too."""
    data = random_data(ROUGH)
    given = {} if ignored == "weight" else {"edge_weight": data.edge_weight}
    gcn = GCN(ROUGH.features, H, 2, ROUGH.classes).double()
    options: dict[str, Any] = {"memory": "64M", "ignore_edge_data": ignored, "spill_dir": tmp_path}
    with ooc.Trainer(gcn, store_of(data, tmp_path), **options) as trainer:
        logits = trainer.predict()
    with ooc.LinkTrainer(ooc.LinkPredictor(gcn), trainer.store, ooc.Links(), **options) as of_links:
        scores = of_links.score(data.edge_index[:, :20])
    with torch.no_grad():
        expected = gcn.eval()(data.x, data.edge_index, **given)
    heads, tails = expected[data.edge_index[:, :20]]
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(scores, (heads * tails).sum(dim=1), rtol=1e-9, atol=1e-11)


def test_an_aggregation_with_other_weights_is_not_taken_for_this_one(tmp_path: Path) -> None:
    """What is kept of the first aggregation is kept for weights and no weights apart."""
    data = random_data(ROUGH)
    store = store_of(data, tmp_path)
    case = MODELS["gcn improved"]
    kept = {}
    for ignored in ("none", "weight"):
        with make_trainer(case, store, tmp_path, ignore_edge_data=ignored) as trainer:
            train_epoch(trainer)
        kept[ignored] = sorted(path.name for path in (store.path / "agg").iterdir() if path.is_dir())
    assert kept["none"] == ["weighted_gcn_improved_float64"]
    assert kept["weight"] == ["gcn_float64", "weighted_gcn_improved_float64"]


class Named(nn.Module):
    """Convolutions whose weights go by the name of features, or by their own."""

    def __init__(self, name: str = "edge_attr", conv: type[nn.Module] = GCNConv) -> None:
        super().__init__()
        self.first, self.last, self.name = conv(ROUGH.features, H), conv(H, ROUGH.classes), name

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.last(self.first(x, edge_index, edge_attr).relu(), edge_index, edge_attr)


class OfData(Named):
    def forward(self, data: Data) -> Tensor:  # type: ignore[override]
        return super().forward(data.x, data.edge_index, getattr(data, self.name))


@pytest.mark.parametrize("kind", [Named, OfData])
def test_weights_that_pygs_data_calls_edge_attr_are_called_so(kind: type[Named], tmp_path: Path) -> None:
    """By models that read them under this name, in sampled batches, too; what reads edge_weight gets none."""
    data = random_data(ROUGH)
    data.edge_attr = data.edge_weight
    del data.edge_weight
    model = kind().double()
    given = (data,) if kind is OfData else (data.x, data.edge_index, data.edge_attr)
    with torch.no_grad():
        expected = F.cross_entropy(model(*given)[data.train_mask], data.y[data.train_mask]).item()
    options: dict[str, Any] = {"memory": "64M", "spill_dir": tmp_path}
    every = Sampling(fanouts=[-1, -1], batch_size=1000)
    for trainer in (tuned_trainer(model, data, **options), SampledTrainer(kind().double(), data, every, **options)):
        with trainer:
            trainer.model.load_state_dict(model.state_dict())
            (record,) = trainer.fit(1, eval_every=0, progress=False)
        model.load_state_dict(trainer.model.state_dict())
        assert record.loss == pytest.approx(expected, rel=1e-10)
        with torch.no_grad():
            expected = F.cross_entropy(model(*given)[data.train_mask], data.y[data.train_mask]).item()
    with pytest.raises(ModelError, match="edges carry weights, of which model OfData takes none"):
        tuned_trainer(OfData("edge_weight").double(), data, **options)
    with pytest.raises(ModelError, match=r"edge_attr must be the model's own edge_attr, \[E, F\]; give data with such"):
        tuned_trainer(kind(conv=partial(GATConv, edge_dim=1)).double(), data, **options)


def test_what_cannot_be_meant_is_refused_by_name(tmp_path: Path) -> None:
    """A model that takes no weights, weights that have no root, an option that is none."""
    data = random_data(ROUGH)
    store = store_of(data, tmp_path)
    sage = GraphSAGE(ROUGH.features, H, 2, ROUGH.classes).double()
    with pytest.raises(ModelError, match="of which model GraphSAGE takes none; give ignore_edge_data='weight'"):
        tuned_trainer(sage, store)
    tuned_trainer(sage, store, ignore_edge_data="weight").close()
    with pytest.raises(OptionError, match="'some' is not one of none, weight, features, all"):
        tuned_trainer(sage, store, ignore_edge_data="some")
    data.edge_weight = data.edge_weight - 5
    gcn = GCN(ROUGH.features, H, 2, ROUGH.classes).double()
    with pytest.raises(ModelError, match=r"sum to -.*PyG gives NaN; use normalize=False"):
        tuned_trainer(gcn, store_of(data, tmp_path))
