# SPDX-License-Identifier: Apache-2.0
"""Features far wider than the layers: the narrow side is gathered, tiles have fewer rows, and results are PyG's."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import FiLMConv, TAGConv

import ooc
from ooc.plan.layout.passes import RowPass
from ooc.stages import builder
from ooc.train.resources import usual_tile_rows
from tests.exactness.comparison import assert_agrees, least, make_trainer, store_of
from tests.exactness.layers import LeAsItIs
from tests.exactness.reference import CustomCase, ModelCase
from tests.graphs import GraphCase, random_data

GRAPH = GraphCase(nodes=150, edges=200, features=1200, undirected=True, self_loops=3, isolated=4)


@pytest.mark.thorough("gcn", "sage")
@pytest.mark.parametrize("kind", ["gcn", "sage", "gin", "gat"])
def test_epochs_are_pygs(kind: str, tmp_path: Path) -> None:
    """With the least budgets and with plenty."""
    case, data = ModelCase(kind=kind, layers=2, hidden=6, dropout=0.2), random_data(GRAPH)
    store = store_of(data, tmp_path)
    for budgets in (least(case, store, tmp_path, tile_rows=16), {}):
        assert_agrees(case, data, tmp_path, store=store, tile_rows=16, **budgets)


@pytest.mark.parametrize("kind", ["gcn", "sage"])
def test_what_is_wide_is_neither_gathered_nor_kept(kind: str, tmp_path: Path) -> None:
    case = ModelCase(kind=kind, layers=2, hidden=6)
    with make_trainer(case, store_of(random_data(GRAPH), tmp_path), tmp_path) as trainer:
        widths = {name: planned.matrix.columns for name, planned in trainer.plan.matrices.items()}
    assert {name for name, columns in widths.items() if columns > 100} == {"x"}


def test_narrow_features_are_aggregated_once_as_ever(tmp_path: Path) -> None:
    data = random_data(GraphCase(nodes=150, edges=200, features=12))
    with make_trainer(ModelCase(kind="gcn", layers=2, hidden=6), store_of(data, tmp_path), tmp_path) as trainer:
        assert any(name.startswith("ax") for name in trainer.plan.matrices)


@pytest.mark.thorough("sage")
@pytest.mark.parametrize("kind", ["gcn", "sage"])
def test_features_are_scaled_in_low_steps(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory is scarcest, of fewer rows than a tile has, and results are PyG's; with plenty in usual ones."""
    data, width = random_data(GraphCase(nodes=300, edges=3000, features=200)), 200
    case, store = ModelCase(kind=kind, layers=2, hidden=100), store_of(data, tmp_path)
    monkeypatch.setattr(builder, "_SCALED_NUMBERS", 4 * width)
    options = {"tile_rows": 64, "threads": 1}
    scarce = least(case, store, tmp_path, **options)
    with make_trainer(case, store, tmp_path, **options) as trainer:
        roomy = trainer.plan
    plans = assert_agrees(case, data, tmp_path, epochs=1, store=store, **options, **scarce), roomy
    found = [{item.parts for item in plan.programs["prepare"] if isinstance(item, RowPass)} for plan in plans]
    assert max(found[0]) > 1 and found[1] == {1}


class Hops(nn.Module):
    """Sums over one hop and over two are kept."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.conv = TAGConv(features, classes, K=2)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, edge_index)


@pytest.mark.thorough("sage")
@pytest.mark.parametrize(
    "case", [ModelCase(kind="sage", layers=2, hidden=40), CustomCase(make=Hops)], ids=["sage", "hops"]
)
def test_features_are_aggregated_in_parts_where_memory_is_scarcest(case: ModelCase, tmp_path: Path) -> None:
    """Some columns after the others, by passes some of which have one step at a time: losses are those with plenty, bit
    for bit."""
    data = random_data(GraphCase(nodes=150, edges=400, features=300, self_loops=9, isolated=5))
    scarce = least(case, store_of(data, tmp_path), tmp_path)
    found = list[list[float]]()
    for number, budgets in enumerate((scarce, {})):
        folder = tmp_path / str(number)  # what is aggregated is kept in the store
        folder.mkdir()
        with make_trainer(case, store_of(data, folder), folder, **budgets) as trainer:
            found.append([record.loss for record in trainer.fit(epochs=1, progress=False)])
            parts = {name for name in trainer.plan.matrices if name.startswith("sx.")}
            assert len(parts) == (0 if number else 7)
            at_once = {item.steps_at_once for passes in trainer.plan.programs.values() for item in passes}
            assert at_once == ({2} if number else {1, 2})
    assert found[0] == found[1]


def test_tiles_are_lower_the_wider_rows_are() -> None:
    """Of whole pages where these are about as many; on a device it is the stages' rows that bound them."""
    heights = {wide: usual_tile_rows(64 + wide, 10**8, features=wide, on_device=False) for wide in (128, 192, 200, 602)}
    assert heights == {128: 4096, 192: 4096, 200: 3968, 602: 1536}
    wider = [usual_tile_rows(64 + wide, 10**8, features=wide, on_device=False) for wide in (1024, 1025, 8415, 10**6)]
    assert wider == [960, 896, 128, 16]
    on_device = {usual_tile_rows(wide, 10**8, features=wide, on_device=True) for wide in (128, 256, 1024, 8192)}
    assert on_device == {65536}


class Opaque(nn.Module):
    """Two layers that are run as they are."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first, self.second = FiLMConv(features, 24, aggr="max"), LeAsItIs(24, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x, edge_index).relu(), edge_index)
        return out


def test_an_opaque_layer_s_tiles_have_few_edges(tmp_path: Path) -> None:
    """Eight mebibytes of numbers at most on average, as wide as the widest parameter: 48 columns of float64."""
    data = random_data(GraphCase(nodes=1500, edges=24_000, features=24, classes=24))
    with ooc.Trainer(
        Opaque(24, 24).double(), store_of(data, tmp_path), gpu_budget="48M", host_budget="10M", spill_dir=tmp_path
    ) as trainer:
        assert trainer.plan.tile_rows == 1024
    budgets = {"gpu_budget": "48M", "host_budget": "10M"}
    assert_agrees(CustomCase(make=Opaque), data, tmp_path, epochs=1, tile_rows=1024, **budgets)


def test_the_same_model_in_float32_has_twice_the_rows(tmp_path: Path) -> None:
    data = random_data(GraphCase(nodes=1500, edges=24_000, features=24, classes=24), dtype=torch.float32)
    with ooc.Trainer(Opaque(24, 24), store_of(data, tmp_path), spill_dir=tmp_path) as trainer:
        assert trainer.plan.tile_rows == 2048
