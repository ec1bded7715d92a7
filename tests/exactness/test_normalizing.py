# SPDX-License-Identifier: Apache-2.0
"""Convolutions that weigh edges by the degrees of both ends and do more than sum are PyG's, in the least memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import (
    APPNP,
    ChebConv,
    DNAConv,
    FAConv,
    GCN2Conv,
    GCNConv,
    GraphConv,
    LEConv,
    LGConv,
    PDNConv,
    SGConv,
    SSGConv,
    TAGConv,
)

from ooc.errors import ModelError
from tests.exactness.comparison import assert_agrees, least, make_trainer, store_of
from tests.exactness.layers import Carrying
from tests.exactness.reference import CustomCase
from tests.examples import cases
from tests.graphs import GraphCase, random_data

EPOCHS = 2
HUB: dict[str, Any] = {"nodes": 60, "edges": 140, "self_loops": 9, "isolated": 7, "duplicates": 15, "unlabelled": 8}
WIDTH, K = 6, 3


class Stacked(nn.Module):
    """Layers that look back at what all before them gave, and at their first input."""

    def __init__(self, features: int, classes: int, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(features, WIDTH), nn.Linear(WIDTH, classes)
        self.first, self.second = make(), make()

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        carried = {} if edge_weight is None else {"edge_weight": edge_weight}
        start = self.before(x)
        rows = [start]
        for conv in (self.first, self.second):
            given = [torch.stack(rows, dim=1)] if isinstance(conv, DNAConv) else [rows[-1], start]
            rows.append(conv(*given, edge_index, **carried).tanh())
        out: Tensor = self.after(rows[-1])
        return out


class Wide(nn.Module):
    """One layer of more columns than a slice has."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.before, self.conv, self.after = nn.Linear(features, 97), FAConv(97, dropout=0.2), nn.Linear(97, classes)
        dropping(self.conv)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        start = self.before(x)
        out: Tensor = self.after(self.conv(start, start, edge_index).tanh())
        return out


class Weighing(nn.Module):
    """Weights of edges that are learnt, of what these carry or of rows at their ends, for layers that normalise."""

    def __init__(self, features: int, classes: int, make: Callable[[], nn.Module], of_rows: bool) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(features, WIDTH), nn.Linear(WIDTH, classes)
        self.first, self.second, self.of_rows = make(), make(), of_rows
        self.weigh = nn.Linear(2 * WIDTH if of_rows else K, 1)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None) -> Tensor:
        start = x = self.before(x)
        for conv in (self.first, self.second):
            of_edges = torch.cat((x[edge_index[0]], x[edge_index[1]]), dim=-1) if self.of_rows else edge_attr
            weight = self.weigh(of_edges).sigmoid()
            given = [x, start] if isinstance(conv, GCN2Conv) else [x]
            x = conv(*given, edge_index, edge_weight=weight if self.of_rows else weight.squeeze(-1)).tanh()
        out: Tensor = self.after(x)
        return out


class OfColumns(nn.Module):
    """Layers that take something each of the features of edges for their weights."""

    def __init__(self, features: int, classes: int, asks: list[tuple[Any, Callable[[Tensor], Tensor]]]) -> None:
        super().__init__()
        (first, _), (second, _) = asks
        self.first, self.second, self.asks = first(features, WIDTH), second(WIDTH, classes), [ask for _, ask in asks]

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        x = self.first(x, edge_index, self.asks[0](edge_attr)).tanh()
        out: Tensor = self.second(x, edge_index, self.asks[1](edge_attr))
        return out


def weighing(make: Callable[[], nn.Module], of_rows: bool = False) -> CustomCase:
    return CustomCase(make=lambda features, classes: Weighing(features, classes, make, of_rows))


def stacked(make: Callable[[], nn.Module]) -> CustomCase:
    return CustomCase(make=lambda features, classes: Stacked(features, classes, make))


def carrying(make: Callable[[int, int], nn.Module]) -> CustomCase:
    return CustomCase(make=lambda features, classes: Carrying(features, classes, make))


def dropping(conv: Any) -> nn.Module:
    """Says that it drops coefficients."""
    conv.drops_inside = True
    made: nn.Module = conv
    return made


CASES: dict[str, tuple[CustomCase, dict[str, Any]]] = {
    "FAConv": (stacked(lambda: dropping(FAConv(WIDTH, eps=0.3, dropout=0.3))), {}),
    "FAConv, no loops": (stacked(lambda: FAConv(WIDTH, add_self_loops=False, cached=True)), {"undirected": True}),
    "FAConv of weights": (stacked(lambda: FAConv(WIDTH, normalize=False)), {"weighted": True}),
    "DNAConv": (stacked(lambda: DNAConv(WIDTH, heads=2, groups=2)), {"weighted": True}),
    "PDNConv": (carrying(lambda i, o: PDNConv(i, o, K, 4)), {"edge_features": K}),
    "PDNConv, no loops": (carrying(lambda i, o: PDNConv(i, o, K, 4, add_self_loops=False)), {"edge_features": K}),
    "GCNConv of computed weights": (weighing(lambda: GCNConv(WIDTH, WIDTH)), {"edge_features": K}),
    "GCNConv of weights computed of rows": (weighing(lambda: GCNConv(WIDTH, WIDTH, improved=True), of_rows=True), {}),
    "GCNConv of computed weights, no loops": (
        weighing(lambda: GCNConv(WIDTH, WIDTH, add_self_loops=False, flow="target_to_source")),
        {"edge_features": K},
    ),
    "GCN2Conv of computed weights": (weighing(lambda: GCN2Conv(WIDTH, 0.2)), {"edge_features": K}),
    "LGConv of computed weights": (weighing(lambda: LGConv()), {"edge_features": K}),
    "TAGConv of computed weights": (weighing(lambda: TAGConv(WIDTH, WIDTH)), {"edge_features": K}),
    "SGConv of weights computed of rows": (weighing(lambda: SGConv(WIDTH, WIDTH, 2), of_rows=True), {}),
    "SSGConv of computed weights": (weighing(lambda: SSGConv(WIDTH, WIDTH, 0.2, 2)), {"edge_features": K}),
    "APPNP of computed weights": (weighing(lambda: APPNP(2, 0.1)), {"edge_features": K}),
    "ChebConv of computed weights": (weighing(lambda: ChebConv(WIDTH, WIDTH, 3)), {"edge_features": K}),
}
IN_LEAST_MEMORY = cases(["GCNConv of computed weights"], ["PDNConv", "GCNConv of computed weights"])


COLUMNS: dict[int, list[tuple[Any, Callable[[Tensor], Tensor]]]] = {
    2: [(GCNConv, lambda e: e[:, 1]), (LEConv, lambda e: e[:, 0])],
    1: [(GraphConv, lambda e: e.squeeze()), (lambda i, o: TAGConv(i, o, K=1), lambda e: e.view(-1))],
}
"""By how many features edges have."""


@pytest.mark.parametrize("features", COLUMNS)
def test_columns_of_features_are_weights(features: int, tmp_path: Path) -> None:
    data = random_data(GraphCase(**HUB, edge_features=features))
    data.edge_attr = data.edge_attr.abs()
    case = CustomCase(make=lambda i, o: OfColumns(i, o, COLUMNS[features]))
    assert_agrees(case, data, tmp_path, epochs=EPOCHS)


@pytest.mark.thorough(
    "PDNConv, no loops",
    "GCNConv of computed weights, no loops",
    "LGConv of computed weights",
    "GCN2Conv of computed weights",
    "APPNP of computed weights",
    "TAGConv of computed weights",
    "SGConv of weights computed of rows",
    "SSGConv of computed weights",
)
@pytest.mark.parametrize("name", CASES)
def test_layers(name: str, tmp_path: Path) -> None:
    case, form = CASES[name]
    data = random_data(GraphCase(**HUB, **form))
    store, options = store_of(data, tmp_path), {}
    if name in IN_LEAST_MEMORY:
        options = least(case, store, tmp_path)
    assert_agrees(case, data, tmp_path, epochs=EPOCHS, store=store, **options)


def test_slices_of_signed_coefficients_are_the_same_in_the_least_memory(tmp_path: Path) -> None:
    """Of a matrix that is cut into slices, each by its own copy of the scores."""
    wide = CustomCase(make=lambda features, classes: Wide(features, classes))
    store = store_of(random_data(GraphCase(**HUB)), tmp_path)

    def trained(**options: Any) -> list[Tensor]:
        with make_trainer(wide, store, tmp_path, tile_rows=16, **options) as trainer:
            trainer.fit(epochs=EPOCHS, progress=False)
            return [parameter.detach().clone() for parameter in trainer.model.parameters()]

    pairs = zip(trained(), trained(**least(wide, store, tmp_path, tile_rows=16)), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert_agrees(wide, random_data(GraphCase(**HUB)), tmp_path, epochs=EPOCHS, store=store)


def test_nothing_is_dropped_in_evaluation(tmp_path: Path) -> None:
    """Though training has been asked about the same layer before."""
    data = random_data(GraphCase(**HUB))
    with make_trainer(CASES["FAConv"][0], store_of(data, tmp_path), tmp_path) as trainer:
        found = trainer.predict("logits")
        expected = trainer.model.eval()(data.x, data.edge_index)
    assert found is not None
    torch.testing.assert_close(found, expected.detach(), rtol=1e-9, atol=1e-9)


def test_weights_that_pyg_would_not_take_are_refused(tmp_path: Path) -> None:
    store = store_of(random_data(GraphCase(**HUB, weighted=True)), tmp_path)
    with pytest.raises(ModelError, match=r"FAConv \(first\): it takes edge_weight with normalize=False only"):
        make_trainer(CASES["FAConv"][0], store, tmp_path)
