# SPDX-License-Identifier: Apache-2.0
"""Models with attention and maxima: losses, gradients and accuracies are PyG's, however their heads are cut."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch_geometric.nn import (
    AGNNConv,
    GATConv,
    GATv2Conv,
    GINConv,
    ResGatedGraphConv,
    SAGEConv,
    TransformerConv,
)

from ooc.errors import OptionError
from ooc.model.layers import attention
from ooc.plan.layout.passes import ColumnPass
from tests.exactness.comparison import (
    DIRECTIONS,
    assert_agrees,
    in_turn,
    least,
    least_budgets,
    make_trainer,
    store_of,
    train_epoch,
)
from tests.exactness.conftest import Converted
from tests.exactness.reference import CustomCase, ModelCase, smooth_adam
from tests.examples import examples
from tests.graphs import GraphCase, graph_cases, random_data

ROUGH = GraphCase(self_loops=6, isolated=7, duplicates=15, unlabelled=8)
EPOCHS = 2


class Chain(nn.Module):
    """Two convolutions and what lies between."""

    def __init__(self, first: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.first, self.last = first, last

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x, edge_index)), edge_index)


def transformer(features: int, classes: int, **options: Any) -> nn.Module:
    width = 4 if options.get("concat") is False else 12
    return Chain(
        TransformerConv(features, 4, 3, **options), TransformerConv(width, classes, 2, **options | {"concat": False})
    )


class Products(nn.Module):
    """Attention by products of rows, and gates."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first, self.cosine = TransformerConv(features, 8, 3), AGNNConv()
        self.last = ResGatedGraphConv(24, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.cosine(torch.tanh(self.first(x, edge_index)), edge_index)
        return self.last(x, edge_index)


class Mixed(nn.Module):
    """Attention, mean and maximum in one model, branches of both kinds side by side."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.gat, self.gatv2 = GATConv(features, 4, 2, dropout=0.2), GATv2Conv(8, 4, 2)
        self.mean, self.largest = SAGEConv(8, 8), SAGEConv(16, 8, aggr="max")
        self.last = GATConv(8, classes, 3, concat=False)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.gat(x, edge_index).relu()
        both = torch.cat([self.gatv2(x, edge_index), self.mean(x, edge_index)], dim=1)
        x = self.largest(both.relu(), edge_index) + x
        return self.last(x, edge_index)


class Widest(nn.Module):
    """GIN over maxima; many exact zeros, which tie."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first = GINConv(nn.Sequential(nn.Linear(features, 8), nn.ReLU()), aggr="max", train_eps=True)
        self.last = GINConv(nn.Linear(8, classes), aggr="max")

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.last(self.first(x.relu(), edge_index), edge_index)


class Frozen(nn.Module):
    """Of every attention some parameters take no gradient."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.gat, self.gatv2 = GATConv(features, 4, 2), GATv2Conv(8, 4, 2)
        self.dots = TransformerConv(8, classes, 2, concat=False)
        for parameter in (self.gat.lin.weight, self.gat.att_dst, *self.gatv2.lin_l.parameters(), self.gatv2.att):
            parameter.requires_grad_(False)
        for parameter in (*self.dots.lin_query.parameters(), self.dots.lin_key.weight):
            parameter.requires_grad_(False)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.gat(x, edge_index).relu()
        return self.dots(self.gatv2(x, edge_index).relu(), edge_index)


class Wide(nn.Module):
    """Heads that are cut into slices, side by side and of different layers."""

    def __init__(self, features: int, classes: int, dropout: float = 0.3) -> None:
        super().__init__()
        self.first = GATConv(features, 67, 2, dropout=dropout, residual=True)
        self.mean = GATConv(134, 130, 1, add_self_loops=False, negative_slope=-0.2)
        self.last = GATConv(130, classes, 2, concat=False)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = torch.tanh(self.first(x, edge_index))
        return self.last(torch.tanh(self.mean(x, edge_index)), edge_index)


def gat(layers: int = 2, dropout: float = 0.0, **options: Any) -> ModelCase:
    return ModelCase(kind="gat", layers=layers, dropout=dropout, options=options)


MODELS = {
    "GAT of one layer": gat(1, heads=3),
    "GAT": gat(heads=4),
    "GAT of three layers": gat(3, heads=2),
    "GAT, one head": gat(3),
    "GAT with dropout": gat(3, 0.4, heads=4),
    "GAT, loops as stored": gat(heads=2, add_self_loops=False),
    "GAT, heads averaged": gat(heads=3, concat=False),
    "GAT with a residual": gat(3, heads=2, residual=True, bias=False),
    "GAT, other slope": gat(heads=2, negative_slope=-0.3),
    "GAT, jumps": gat(3, 0.2, heads=2, jk="cat", norm="layer_norm", norm_kwargs={"mode": "node"}),
    "GAT, batch norm": gat(3, heads=2, norm="batch_norm"),
    "GATv2": gat(heads=4, v2=True),
    "GATv2 of three layers with dropout": gat(3, 0.4, heads=2, v2=True),
    "GATv2, shared weights": gat(3, heads=2, v2=True, share_weights=True),
    "GATv2, heads averaged, residual": gat(heads=3, v2=True, concat=False, residual=True, add_self_loops=False),
    "GATv2 without bias": gat(heads=2, v2=True, bias=False),
    "Transformer": CustomCase(make=transformer),
    "Transformer, gated": CustomCase(make=lambda f, c: transformer(f, c, beta=True)),
    "Transformer, averaged, dropout": CustomCase(make=lambda f, c: transformer(f, c, concat=False, dropout=0.3)),
    "Transformer without bias": CustomCase(make=lambda f, c: transformer(f, c, bias=False)),
    "GAT of wide heads": CustomCase(make=Wide),
    "products of rows": CustomCase(make=Products),
    "SAGE of maxima": ModelCase(kind="sage", layers=3, dropout=0.3, options={"aggr": "max"}),
    "SAGE of maxima, projected": ModelCase(kind="sage", options={"aggr": "max", "project": True}),
    "GIN of maxima": CustomCase(make=Widest),
    "all kinds in one": CustomCase(make=Mixed),
    "frozen parameters": CustomCase(make=Frozen),
}


EITHER_WAY = {"GAT", "GAT with dropout", "GATv2", "Transformer", "SAGE of maxima", "all kinds in one"}


@pytest.mark.thorough(
    "GAT with dropout-undirected",
    "GATv2-undirected",
    "Transformer-undirected",
    "SAGE of maxima-undirected",
    "all kinds in one-directed",
    "GAT of three layers-directed",
    "GATv2 without bias-undirected",
    "Transformer without bias-undirected",
    "GAT with a residual-undirected",
    "GAT, heads averaged-directed",
    "GATv2, heads averaged, residual-directed",
    "GATv2, shared weights-undirected",
    "GAT, loops as stored-undirected",
    "GAT, other slope-directed",
    "GAT, one head-undirected",
)
@pytest.mark.parametrize(("name", "undirected"), in_turn(MODELS, DIRECTIONS, all_ways=EITHER_WAY))
def test_models(name: str, undirected: bool, converted: Converted, tmp_path: Path) -> None:
    """Whole in memory on a directed graph, one head after the other on an undirected one; models that differ in an
    option alone on one of them."""
    graph = GraphCase(self_loops=6, isolated=7, duplicates=15, unlabelled=8, undirected=undirected)
    data, store = converted(graph)
    assert_agrees(MODELS[name], data, tmp_path, epochs=EPOCHS, store=store, slab_columns=1 if undirected else None)


PLANNED = {
    "GAT": gat(3, 0.3, heads=4),
    "GAT of wide heads": CustomCase(make=Wide),
    "GATv2": gat(2, 0.3, heads=2, v2=True),
    "products of rows": CustomCase(make=Products),
    "all kinds in one": CustomCase(make=Mixed),
}
CUTS: list[dict[str, Any]] = [
    {"block_rows": 64},
    {"block_rows": 256},
    {"slab_columns": 1},
    {"slab_columns": 7},
    {"slab_columns": 80},
    {"slab_columns": 1000},
    {"block_rows": 128, "slab_columns": 5},
    {"threads": 3, "slab_columns": 4},
]


@pytest.mark.thorough("GAT", "all kinds in one")
@pytest.mark.parametrize("model", PLANNED.values(), ids=PLANNED.keys())
def test_results_do_not_depend_on_the_plan(model: ModelCase, tmp_path: Path) -> None:
    """Gradients and losses are equal to the last bit under every budget, whatever is spilled and cut; every model has
    the least budgets and every third of the other plans, in turn."""
    graph = GraphCase(nodes=220, edges=1100, features=12, self_loops=20, isolated=20, duplicates=40, unlabelled=40)
    store = store_of(random_data(graph, dtype=torch.float32), tmp_path)

    def trained(**options: Any) -> tuple[list[float], dict[str, Tensor], int, bool]:
        with make_trainer(model, store, tmp_path, dtype=torch.float32, tile_rows=64, **options) as trainer:
            epochs = [train_epoch(trainer) for _ in range(2)]
            columns = any(
                isinstance(item, ColumnPass) and trainer.plan.matrices[item.pull.source].grid.slabs > 1
                for item in trainer.plan.programs["train"]
            )
            return [e.loss for e in epochs], epochs[-1].gradients, trainer.plan.ssd_write_bytes, columns

    scarce = least(model, store, tmp_path, dtype=torch.float32, tile_rows=64)
    gpu, host = scarce["gpu_budget"], scarce["host_budget"]
    shares = [(1.0, 1.5), (1.3, 1.0), (3.0, 1.0)]
    plans: list[dict[str, Any]] = [{"gpu_budget": int(gpu * g), "host_budget": int(host * h)} for g, h in shares]
    losses, gradients, written, _ = trained()
    assert not written
    number = list(PLANNED.values()).index(model)
    outcomes = [(options, trained(**options)) for options in [scarce, *(plans + CUTS)[number % 3 :: 3]]]
    for options, (other_losses, other_gradients, _, _) in outcomes:
        assert other_losses == losses, options
        for name, gradient in other_gradients.items():
            assert torch.equal(gradient, gradients[name]), (options, name)
    assert outcomes[0][1][2], "the least budget spills"
    assert any(columns for _, (_, _, _, columns) in outcomes), "heads are pulled apart"


@pytest.mark.parametrize("model", [PLANNED["GAT"], PLANNED["all kinds in one"]], ids=["GAT", "all kinds in one"])
def test_float32(model: ModelCase, tmp_path: Path) -> None:
    """Single precision, to 1e-4."""
    data = random_data(ROUGH, dtype=torch.float32)
    assert_agrees(model, data, tmp_path, dtype=torch.float32, make_optimizer=smooth_adam, epochs=EPOCHS)


@st.composite
def attentive(draw: st.DrawFn) -> ModelCase:
    """PyG's GAT and GATv2 and SAGE of maxima with any options."""
    layers, dropout = draw(st.integers(1, 3)), draw(st.sampled_from([0.0, 0.3]))
    if draw(st.integers(0, 3)) == 0:
        options: dict[str, Any] = {"aggr": "max", "project": draw(st.booleans()), "root_weight": draw(st.booleans())}
        return ModelCase(kind="sage", layers=layers, dropout=dropout, options=options)
    v2 = draw(st.booleans())
    options = {
        "v2": v2,
        "heads": draw(st.sampled_from([1, 2, 4])),
        "concat": draw(st.booleans()),
        "add_self_loops": draw(st.booleans()),
        "negative_slope": draw(st.sampled_from([0.2, 0.0, 0.7])),
        "bias": draw(st.booleans()),
        "residual": draw(st.booleans()),
        "jk": draw(st.sampled_from([None, None, "cat", "max"])),
    }
    return ModelCase(
        kind="gat",
        layers=layers,
        dropout=dropout,
        input_dropout=draw(st.sampled_from([0.0, 0.2])),
        options=options | ({"share_weights": draw(st.booleans())} if v2 else {}),
    )


@given(
    graph=graph_cases(nodes=st.integers(2, 60), isolated=st.integers(0, 20), unlabelled=st.just(0)),
    model=attentive(),
    tile_rows=st.sampled_from([4, 16, 64]),
    slab_columns=st.sampled_from([None, 1, 4]),
    widest=st.sampled_from([1, 2, 64]),
    share=st.sampled_from([1.0, 1.0, 1.2, 3.0, 100.0]),
)
@settings(
    max_examples=examples(3),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_case_is_exact(
    graph: GraphCase,
    model: ModelCase,
    tile_rows: int,
    slab_columns: int | None,
    widest: int,
    share: float,
    tmp_path: Path,
) -> None:
    """Under the least budgets that the trainer itself says would do, or a multiple of them; heads in slices of at most
    ``widest`` channels."""
    data = random_data(graph)
    store = store_of(data, tmp_path)
    cut = {"tile_rows": tile_rows, "slab_columns": slab_columns}
    with mock.patch.multiple(attention, _WIDEST_SLICE=widest, _NARROWEST_SLICE=1):
        gpu, host = least_budgets(
            lambda gpu, host: make_trainer(model, store, tmp_path, gpu_budget=gpu, host_budget=host, **cut)
        )
        budgets = {"gpu_budget": int(gpu * share), "host_budget": host}
        assert_agrees(model, data, tmp_path, epochs=EPOCHS, store=store, **budgets, **cut)


@pytest.mark.parametrize(
    ("channels", "slices"), [(8, 1), (32, 1), (33, 2), (47, 2), (64, 2), (65, 3), (94, 2), (96, 3), (172, 4), (256, 8)]
)
def test_wide_heads_are_cut_into_slices(channels: int, slices: int) -> None:
    """Of 32 channels, or up to 48 where that is even: 172 are four times 43, and 65 three times 22 but for one."""
    assert attention.slices_of_head(channels, nodes=2_000_000, itemsize=4) == slices


@pytest.mark.parametrize(
    ("nodes", "itemsize", "widest"),
    [(114_000_000, 4, 32), (115_000_000, 4, 16), (111_059_956, 4, 32), (111_059_956, 8, 16), (1_000_000_000, 4, 16)],
)
def test_slices_are_narrower_the_more_nodes_there_are(nodes: int, itemsize: int, widest: int) -> None:
    """A slab of one takes 16 GB, until they are as narrow as they get: papers100M's fits a GPU of 24 GB."""
    assert attention.slices_of_head(256, nodes=nodes, itemsize=itemsize) == 256 // widest
    assert widest == 16 or nodes * (widest + 3) * itemsize <= 16e9


def test_a_narrower_spill_is_refused(tmp_path: Path) -> None:
    """Coefficients cannot be recomputed from a rounded logarithm."""
    store = store_of(random_data(ROUGH, dtype=torch.float32), tmp_path)
    with pytest.raises(OptionError, match="attention keeps logarithms"):
        make_trainer(gat(heads=2), store, tmp_path, dtype=torch.float32, spill_dtype="bfloat16")
