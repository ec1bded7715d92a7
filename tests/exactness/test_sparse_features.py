# SPDX-License-Identifier: Apache-2.0
"""Features that are kept without their zeros: PyG's results on dense ones, to the bit whatever the budgets."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import FiLMConv, GINConv, SAGEConv, SGConv, TAGConv

import ooc
from ooc.errors import StoreError
from ooc.stages import panels
from ooc.storage.store import Store
from tests.exactness.comparison import assert_agrees, least, make_trainer
from tests.exactness.reference import CustomCase, ModelCase
from tests.graphs import GraphCase, random_data
from tests.processes import together

GRAPH = GraphCase(nodes=90, edges=260, features=60, self_loops=6, isolated=6, unlabelled=30)
JK = {"jk": "cat"}
MODELS = {
    "gcn": ModelCase(kind="gcn", hidden=6, dropout=0.2),
    "gcn input dropout": ModelCase(kind="gcn", hidden=6, dropout=0.2, input_dropout=0.5),
    "sage": ModelCase(kind="sage", layers=3, hidden=6, dropout=0.2),
    "sage input dropout": ModelCase(kind="sage", hidden=6, input_dropout=0.3),
    "gin": ModelCase(kind="gin", hidden=6, options=JK),
    "gat": ModelCase(kind="gat", hidden=6, dropout=0.2, input_dropout=0.3, options={"heads": 2}),
}


class Model(nn.Module):
    """``first`` (features → 6), a ReLU, and a plain layer."""

    def __init__(self, first: nn.Module, classes: int) -> None:
        super().__init__()
        self.first, self.last = first, SAGEConv(6, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x, edge_index).relu(), edge_index)
        return out


class Normed(nn.Module):
    """Moments of the features themselves."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm1d(features), SAGEConv(features, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.conv(self.norm(x), edge_index)
        return out


def custom(first: Callable[[int], nn.Module]) -> CustomCase:
    return CustomCase(make=lambda features, classes: Model(first(features), classes))


def gin(features: int) -> nn.Module:
    return GINConv(nn.Sequential(nn.Linear(features, 6), nn.ReLU(), nn.Linear(6, 6)), train_eps=True)


EXPANDED = {
    "maxima": custom(lambda features: SAGEConv(features, 6, aggr="max")),
    "a learnt share of one's own row": custom(gin),
    "a layer that is run as it is": custom(lambda features: FiLMConv(features, 6)),
    "a norm": CustomCase(make=Normed),
}
"""Something else than a product is done to features, which therefore get their zeros back, tile by tile."""


@pytest.fixture(scope="module")
def data() -> Data:
    """One entry in ten is not zero; some rows have none, and so has a whole tile."""
    found = random_data(GRAPH)
    found.x[torch.rand(found.x.shape, generator=torch.Generator().manual_seed(1)) > 1 / 10] = 0
    found.x[:16] = 0
    return found


@pytest.fixture(scope="module")
def store(data: Data, tmp_path_factory: pytest.TempPathFactory) -> Store:
    return ooc.convert(data, tmp_path_factory.mktemp("sparse") / "g.ooc", dtype="float64", feature_form="sparse")


@pytest.mark.parametrize(("name", "seed"), [*((name, 0) for name in MODELS), ("gcn input dropout", 7)])
def test_epochs_are_pygs(name: str, seed: int, data: Data, store: Store, tmp_path: Path) -> None:
    """With the least budgets."""
    case = MODELS[name]
    scarce = least(case, store, tmp_path, tile_rows=16)
    assert_agrees(case, data, tmp_path, epochs=2, seed=seed, store=store, tile_rows=16, **scarce)


@pytest.mark.parametrize("name", EXPANDED)
def test_so_they_are_where_rows_get_their_zeros_back(name: str, data: Data, store: Store, tmp_path: Path) -> None:
    assert_agrees(EXPANDED[name], data, tmp_path, epochs=2, store=store, tile_rows=32)


@pytest.mark.parametrize("name", ["sums over two hops", "powers of the neighbourhood"])
def test_only_products_are_pulled(name: str, data: Data, store: Store, tmp_path: Path) -> None:
    """Where features are summed first, and multiplied then, the other order gives the same."""
    layers = {"sums over two hops": SGConv, "powers of the neighbourhood": TAGConv}
    case = custom(lambda features: layers[name](features, 6, K=2))
    with make_trainer(case, store, tmp_path) as trainer:
        assert max(planned.matrix.columns for planned in trainer.plan.matrices.values()) < 20
    assert_agrees(case, data, tmp_path, epochs=2, store=store, tile_rows=32)


def test_an_aggregation_is_computed_once_and_kept(data: Data, store: Store, tmp_path: Path) -> None:
    """Where the model needs that of the features themselves: of a weight wider than they are, nothing else pays."""
    case = CustomCase(make=lambda features, classes: SAGEConv(features, 2 * features + classes))
    for _ in range(2):  # as it is computed, and as it is found
        assert_agrees(case, data, tmp_path, epochs=2, store=store, tile_rows=32)
    with make_trainer(case, store, tmp_path) as trainer:
        assert any(name.startswith("ax") for name in trainer.plan.matrices)
        assert not trainer.plan.programs["prepare"]


@pytest.mark.parametrize("name", ["gcn input dropout", "gat"])
def test_budgets_and_threads_change_no_bit(name: str, store: Store, tmp_path: Path) -> None:
    case, found = MODELS[name], []
    scarce = least(case, store, tmp_path, dtype=torch.float32, tile_rows=16, threads=2)
    plans: list[dict[str, Any]] = [
        {**scarce, "threads": 2},
        {"gpu_budget": int(1.3 * scarce["gpu_budget"]), "host_budget": 2 * scarce["host_budget"], "threads": 1},
        {"threads": 2},
    ]
    for plan in plans:
        with make_trainer(case, store, tmp_path, dtype=torch.float32, tile_rows=16, **plan) as trainer:
            records = trainer.fit(epochs=2, eval_every=2)
            read = trainer.plan.ssd_read_bytes, trainer.plan.ssd_write_bytes
            assert (records[-1].ssd_read_bytes, records[-1].ssd_write_bytes) == read
            found.append(([one.loss for one in records], [p.tolist() for p in trainer.model.parameters()]))
    assert found[0] == found[1] == found[2]


def test_the_plan_knows_what_they_take(data: Data, store: Store, tmp_path: Path) -> None:
    assert store.sparse_features is not None
    entries = int((data.x != 0).sum())
    with make_trainer(MODELS["sage"], store, tmp_path) as trainer:
        fates = {row["matrix"]: row for row in trainer.plan.fates()}
    assert "x" not in fates
    assert [fates[name]["bytes"] for name in ("x/indices", "x/values")] == [4 * entries, 8 * entries]


def test_tiles_are_as_low_as_dense_ones_only_where_rows_are_made_dense(tmp_path: Path) -> None:
    data = random_data(GraphCase(nodes=40, edges=60, features=8192))
    data.x[:, 9:] = 0
    store = ooc.convert(data, tmp_path / "g.ooc", feature_form="sparse")
    heights = {}
    for name, case in {"sage": MODELS["sage"], "a norm": EXPANDED["a norm"]}.items():
        with make_trainer(case, store, tmp_path, dtype=torch.float32, tile_rows=None) as trainer:
            heights[name] = trainer.plan.tile_rows
    assert heights == {"sage": 2048, "a norm": 96}


def test_predictions_are_the_models(data: Data, store: Store, tmp_path: Path) -> None:
    case = MODELS["gcn"]
    with make_trainer(case, store, tmp_path) as trainer:
        trainer.fit(epochs=1)
        found = torch.as_tensor(trainer.predict("logits"))
        expected = trainer.model.eval()(data.x, data.edge_index)
    assert torch.allclose(found.double(), expected, atol=1e-6)


def test_a_column_outside_the_matrix_is_refused(data: Data, tmp_path: Path) -> None:
    store = ooc.convert(data, tmp_path / "g.ooc", dtype="float64", feature_form="sparse")
    assert store.sparse_features is not None
    path = store.sparse_features.indices.chunk_path(0)
    path.write_bytes((60).to_bytes(4, "little") + path.read_bytes()[4:])
    with make_trainer(MODELS["gcn"], store, tmp_path) as trainer, pytest.raises(StoreError, match="x/indices"):
        trainer.fit(epochs=1)


def test_several_processes_train_what_one_does(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They send each other what panels of rows find for a weight's gradient, of columns that are not zero there."""
    monkeypatch.setattr(panels, "PANELS", 8)
    case = MODELS["gcn input dropout"]

    def work(rank: int) -> list[Any]:
        with make_trainer(case, store, tmp_path, gpu_budget="20M", host_budget="200M", threads=1) as trainer:
            return [trainer.fit(2, progress=False)[-1].loss, *trainer.model.state_dict().values()]

    (alone,) = together(1, tmp_path, work)
    for found in together(2, tmp_path, work):
        assert all(
            torch.equal(torch.as_tensor(one), torch.as_tensor(two)) for one, two in zip(found, alone, strict=True)
        )
