# SPDX-License-Identifier: Apache-2.0
"""Convolutions of one model may scale their sums in different ways: results are PyG's, whatever is spilled and cut."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch_geometric.nn import APPNP, GATConv, GCNConv, GINConv, GraphConv, SAGEConv, SGConv

from ooc.plan.layout.passes import ColumnPass, RowPass
from ooc.train.prediction import Prediction
from ooc.train.resources import Resources
from tests.exactness.comparison import (
    DIRECTIONS,
    assert_agrees,
    in_turn,
    least,
    make_trainer,
    store_of,
    train_epoch,
)
from tests.exactness.conftest import Converted
from tests.exactness.reference import CustomCase, ModelCase, smooth_adam
from tests.exactness.test_savings import in_hop_order
from tests.examples import examples
from tests.graphs import GraphCase, graph_cases, random_data

EPOCHS = 2
H = 8
ROUGH = GraphCase(self_loops=9, isolated=7, duplicates=15, unlabelled=8)
UNDIRECTED = GraphCase(self_loops=9, isolated=7, duplicates=15, unlabelled=8, undirected=True)


class InTurn(nn.Module):
    """A layer of each kind after the other: normalised, mean, plain, attention."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.gcn, self.sage = GCNConv(features, H), SAGEConv(H, H)
        self.gin, self.gat, self.last = GINConv(nn.Linear(H, H)), GATConv(H, H // 2, heads=2), GCNConv(H, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.gcn(x, edge_index).relu()
        x = self.sage(x, edge_index).relu()
        x = nn.functional.dropout(self.gin(x, edge_index), 0.3, self.training)
        return self.last(self.gat(x, edge_index).relu(), edge_index)


class Beside(nn.Module):
    """The same rows summed in three ways, the features as well as what comes of them."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.gcn, self.sage, self.plain = (
            nn.ModuleList([GCNConv(f, o), SAGEConv(f, o), GraphConv(f, o)])
            for f, o in ((features, H), (H, H), (H, classes))
        )

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for convs in (self.gcn, self.sage, self.plain):
            x = sum(conv(x, edge_index).relu() for conv in convs)
        return x


class Loops(nn.Module):
    """GCN with self-loops, without any, and not normalised; nothing is added to a row without edges by the second."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first = GCNConv(features, H, add_self_loops=False)
        self.second, self.third = GCNConv(H, H), GCNConv(H, H, normalize=False)
        self.last = SAGEConv(H, classes, root_weight=False)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        start = x = self.first(x, edge_index).relu()
        x = self.second(x, edge_index) + start
        return self.last(self.third(x.relu(), edge_index) + x, edge_index)


class Hops(nn.Module):
    """Two and three hops of the features at once, of one kind and another, then propagation."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.two, self.three = SGConv(features, H, K=2), SGConv(features, H, K=3, add_self_loops=False)
        self.mean, self.last = SAGEConv(features, H), nn.Linear(H, classes)
        self.spread = APPNP(2, 0.2)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.two(x, edge_index) + self.three(x, edge_index) + self.mean(x, edge_index)
        return self.spread(self.last(x.relu()), edge_index)


class Weighted(nn.Module):
    """Weights in some layers, normalised and not, and none in others."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.gcn, self.improved = GCNConv(features, H), GCNConv(H, H, improved=True)
        self.mean, self.sum = SAGEConv(H, H), GraphConv(H, H)
        self.loopless, self.last = GCNConv(H, H, add_self_loops=False), GCNConv(H, classes)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        x = self.gcn(x, edge_index, edge_weight).relu()
        x = self.improved(x, edge_index, edge_weight) + self.mean(x, edge_index)
        x = self.sum(x.relu(), edge_index, edge_weight)
        return self.last(self.loopless(x, edge_index, edge_weight).relu(), edge_index)


MODELS: dict[str, ModelCase] = {
    "in turn": CustomCase(make=InTurn, input_dropout=0.2),
    "beside each other": CustomCase(make=Beside),
    "self-loops or none": CustomCase(make=Loops),
    "several hops": CustomCase(make=Hops),
}


@pytest.mark.parametrize(("name", "undirected"), in_turn(MODELS, DIRECTIONS))
def test_models(name: str, undirected: bool, converted: Converted, tmp_path: Path) -> None:
    """Whole in memory, and three columns at a time with the aggregations kept before."""
    data, store = converted(UNDIRECTED if undirected else ROUGH)
    assert_agrees(MODELS[name], data, tmp_path, epochs=EPOCHS, store=store)
    assert_agrees(MODELS[name], data, tmp_path, epochs=EPOCHS, store=store, slab_columns=3)


@pytest.mark.parametrize("undirected", [False, True], ids=["directed", "undirected"])
def test_weights(undirected: bool, tmp_path: Path) -> None:
    """Some sums are weighted by what edges carry, others are not: with plenty of memory, and with the least."""
    graph = GraphCase(self_loops=9, isolated=7, duplicates=15, weighted=True, undirected=undirected)
    data = random_data(graph)
    store = store_of(data, tmp_path)
    model = CustomCase(make=Weighted)
    budgets = least(model, store, tmp_path) if undirected else {}
    assert_agrees(model, data, tmp_path, epochs=EPOCHS, store=store, **budgets)


def test_float32(tmp_path: Path) -> None:
    """Single precision, to 1e-4."""
    data = random_data(ROUGH, dtype=torch.float32)
    assert_agrees(MODELS["in turn"], data, tmp_path, dtype=torch.float32, make_optimizer=smooth_adam, epochs=EPOCHS)


def test_each_first_aggregation_is_kept(tmp_path: Path) -> None:
    """Under its own name; the next run computes none of them, and one of another model finds what it shares."""
    store = store_of(random_data(ROUGH), tmp_path)
    with make_trainer(MODELS["beside each other"], store, tmp_path) as trainer:
        assert {f"ax{kind}" for kind in ("", ".mean", ".sum")} <= trainer.plan.matrices.keys()
        rows = [item for item in trainer.plan.programs["prepare"] if isinstance(item, RowPass)]
        assert len(rows) == 6, "scaled and summed, three times"
        losses = [record.loss for record in trainer.fit(epochs=2, eval_every=0)]
    assert {path.name for path in (store.path / "agg").iterdir() if path.is_dir()} == {
        "gcn_float64",
        "mean_float64",
        "sum_float64",
    }
    with make_trainer(MODELS["beside each other"], store, tmp_path) as trainer:
        assert not trainer.plan.programs["prepare"]
        assert [record.loss for record in trainer.fit(epochs=2, eval_every=0)] == losses
    with make_trainer(ModelCase(kind="sage"), store, tmp_path) as trainer:
        assert not trainer.plan.programs["prepare"]


def test_rows_that_do_not_reach_the_loss_are_left_out(tmp_path: Path) -> None:
    """In the order of hops from few training nodes; results are PyG's."""
    store, data = in_hop_order(random_data(GraphCase(nodes=150, edges=200, unlabelled=144, seed=5)), tmp_path)
    assert_agrees(MODELS["self-loops or none"], data, tmp_path, epochs=EPOCHS, store=store)
    with make_trainer(MODELS["self-loops or none"], store, tmp_path) as trainer:
        assert len({item.rows for item in trainer.plan.programs["train"]}) > 2


@pytest.mark.parametrize("name", MODELS)
def test_predictions(name: str, tmp_path: Path) -> None:
    """Logits of all nodes and of some are those of the model in PyG."""
    data = random_data(ROUGH)
    store = store_of(data, tmp_path)
    model = MODELS[name].build(store.num_features, store.num_classes).eval()
    with torch.no_grad():
        expected = model(data.x, data.edge_index)
    resources = Resources.parse("64M", "64M", spill_dir=tmp_path, tile_rows=8)
    for nodes in ([3, 17, 40], None):
        prediction = Prediction(model, store, resources, nodes=nodes)
        wanted = expected if nodes is None else expected[nodes]
        assert torch.allclose(prediction.read(), wanted, rtol=1e-9, atol=1e-11)
        prediction.close()


@pytest.mark.thorough("in turn-None", "self-loops or none-bfloat16")
@pytest.mark.parametrize(
    ("name", "spill_dtype"),
    [
        ("in turn", None),
        ("beside each other", "bfloat16"),
        ("self-loops or none", "bfloat16"),
    ],
)
def test_results_do_not_depend_on_the_plan(name: str, spill_dtype: str | None, tmp_path: Path) -> None:
    """Gradients and losses are equal to the last bit under every budget, whatever is spilled and cut."""
    graph = GraphCase(nodes=260, edges=1300, features=12, self_loops=20, isolated=20, duplicates=40, unlabelled=60)
    store = store_of(random_data(graph, dtype=torch.float32), tmp_path)
    given: dict[str, Any] = {"dtype": torch.float32, "tile_rows": 64, "spill_dtype": spill_dtype}

    def trained(**options: Any) -> tuple[list[float], dict[str, Tensor], bool, bool]:
        with make_trainer(MODELS[name], store, tmp_path, **given, **options) as trainer:
            epochs = [train_epoch(trainer) for _ in range(2)]
            columns = any(isinstance(item, ColumnPass) for item in trainer.plan.programs["train"])
            return [e.loss for e in epochs], epochs[-1].gradients, bool(trainer.plan.ssd_write_bytes), columns

    scarce = least(MODELS[name], store, tmp_path, **given)
    losses, gradients, spilled, _ = trained()
    assert not spilled
    plans: list[dict[str, Any]] = [scarce, {"block_rows": 64, "slab_columns": 1}, {"slab_columns": 5, "threads": 3}]
    outcomes = [trained(**options) for options in plans]
    for options, (other_losses, other_gradients, _, _) in zip(plans, outcomes, strict=True):
        assert other_losses == losses, options
        for parameter, gradient in other_gradients.items():
            assert torch.equal(gradient, gradients[parameter]), (options, parameter)
    assert outcomes[0][2], "the least budget spills"
    assert any(columns for _, _, _, columns in outcomes)


@given(
    graph=graph_cases(nodes=st.integers(3, 80), edges=st.integers(0, 300)),
    model=st.sampled_from(list(MODELS.values())),
    tile_rows=st.sampled_from([4, 16, 64]),
    shares=st.tuples(st.sampled_from([1.0, 1.3, 100.0]), st.sampled_from([1.0, 1.5, 100.0])),
)
@settings(
    max_examples=examples(3),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_case_is_exact(
    graph: GraphCase, model: ModelCase, tile_rows: int, shares: tuple[float, float], tmp_path: Path
) -> None:
    """Under the least budgets that the trainer itself says would do, or a multiple of them."""
    data = random_data(graph)
    store = store_of(data, tmp_path)
    budgets = least(model, store, tmp_path, tile_rows=tile_rows, block_rows=None)
    for name, share in zip(("gpu_budget", "host_budget"), shares, strict=True):
        budgets[name] = int(share * budgets[name])
    assert_agrees(model, data, tmp_path, epochs=EPOCHS, store=store, tile_rows=tile_rows, **budgets)
