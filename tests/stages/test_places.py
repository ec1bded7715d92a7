# SPDX-License-Identifier: Apache-2.0
"""Rows are computed over others that nobody needs any more, and where they are stored."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GCNConv, SAGEConv

from ooc.engine.operands import Output
from ooc.model.lowering.projection import Linear
from ooc.model.lowering.rectified import Rectified, Signs
from ooc.model.lowering.values import Features, Sum, Value
from ooc.stages.places import Place, places_of
from ooc.stages.schedule import Recipe
from tests.exactness.comparison import assert_agrees, make_trainer, store_of
from tests.exactness.reference import CustomCase, ModelCase
from tests.graphs import GraphCase, random_data

H = 6


@pytest.mark.parametrize("nodes", [640, 3000])
def test_nothing_that_an_epoch_stores_is_copied(nodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what products, sums and rectifiers give nor what of it is scaled, before a pull of its own or in it."""
    put, stored = Output.put, list[bool]()

    def watched(output: Output, start: int, stop: int, rows: Tensor) -> None:
        place = output.place(start, stop, rows.dtype)
        stored.append(place is not None and place.data_ptr() == rows.data_ptr())
        put(output, start, stop, rows)

    data = random_data(GraphCase(nodes=nodes, edges=5 * nodes, features=20), dtype=torch.float32)
    case = ModelCase(kind="gcn", layers=3, hidden=32)
    with make_trainer(case, store_of(data, tmp_path), tmp_path, dtype=torch.float32, tile_rows=64) as trainer:
        trainer.fit(1, eval_every=0)  # aggregates the features
        monkeypatch.setattr(Output, "put", watched)
        trainer.fit(1, eval_every=0)
    assert len(stored) >= 5 * nodes // 64
    assert all(stored)


class Reused(nn.Module):
    """Rows that several others are made of, one of them a view, and sums of what is the same."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(features, H), nn.Linear(features, H, bias=False)
        self.conv, self.last = SAGEConv(H, H), GCNConv(H, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.first(x)
        same = h.view(-1, H)
        rectified = h.relu()
        twice = self.second(x)
        y = same + rectified + (twice + twice)
        z = self.conv(y, edge_index)
        return self.last((z - 2 * z.relu()).relu() + y, edge_index)  # type: ignore[no-any-return]


@pytest.mark.parametrize("budget", ["64M", "300K"])
def test_what_is_needed_again_is_not_overwritten(budget: str, tmp_path: Path) -> None:
    data = random_data(GraphCase(nodes=50, edges=200, features=5))
    assert_agrees(CustomCase(make=Reused), data, tmp_path, gpu_budget=budget, host_budget=budget)


def test_a_product_goes_where_what_is_made_of_it_ends() -> None:
    """Unless somebody else needs it, or what is between is no sum or rectifier."""
    x = Features(0, H)
    product = Linear(1, x, nn.Parameter(torch.zeros(H, H)))
    total = Sum(2, [(1.0, product)], [nn.Parameter(torch.zeros(H))])
    signs = Signs(3, total, not_a_number=True)
    result = Rectified(4, total, signs, None)

    def found(*order: Value, also: tuple[Value, ...] = ()) -> list[Place | None]:
        recipe = Recipe((x,), order, pulled=False, targets=(order[-1], *also))
        places = places_of(recipe, None, {order[-1]: "z"})
        return [places.get(value) for value in order]

    over, there = Place(over=True, matrix=None), Place(over=False, matrix="z")
    assert found(product) == [there]
    assert found(product, total, result) == [there, over, over]
    assert found(product, total, result, also=(total,)) == [None, over, there]
    other = Sum(5, [(1.0, result), (1.0, product)], [])
    assert found(product, total, result, other) == [None, None, over, Place(over=True, matrix="z")]
    assert found(total, result) == [None, Place(over=True, matrix="z")]
