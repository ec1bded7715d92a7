# SPDX-License-Identifier: Apache-2.0
"""What tiles contribute to gradients is added up, also where a parameter gets two gradients of a tile."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import SAGEConv

from tests.exactness.comparison import make_trainer, store_of
from tests.exactness.reference import CustomCase, Reference, smooth_adam
from tests.graphs import GraphCase, random_data


class Mixed(nn.Module):
    """A convolution, and two layers of rows behind it, or one of them twice."""

    def __init__(self, features: int, classes: int, *, twice: bool) -> None:
        super().__init__()
        self.first, self.last = SAGEConv(features, 6), nn.Linear(6, classes)
        self.second = nn.Linear(6, 6)
        self.third = self.second if twice else nn.Linear(6, 6)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        hidden = self.second(self.first(x, edge_index).relu()).relu()
        out: Tensor = self.last(self.third(hidden))
        return out


@pytest.mark.parametrize("twice", [False, True])
def test_gradients_are_pygs(twice: bool, tmp_path: Path) -> None:
    """Each by an operator of its own: one over several tensors would add to the same twice at once on a GPU."""
    data = random_data(GraphCase(nodes=70))
    case = CustomCase(make=partial(Mixed, twice=twice))
    with make_trainer(case, store_of(data, tmp_path), tmp_path, tile_rows=32) as trainer:
        expected = Reference(case, trainer.model, data, smooth_adam).train()
        (record,) = trainer.fit(epochs=1, eval_every=0)
    gradients = {name: p.grad for name, p in trainer.model.named_parameters()}
    assert record.loss == pytest.approx(expected.loss, rel=1e-12)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected.gradients[name], rtol=1e-9, atol=1e-12)
