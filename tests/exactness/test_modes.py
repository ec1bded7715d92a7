# SPDX-License-Identifier: Apache-2.0
"""What trains in which mode: parts of a model that are frozen by ``eval()``."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv, SAGEConv

from tests.exactness.comparison import assert_agrees, make_trainer, store_of
from tests.exactness.reference import CustomCase
from tests.graphs import GraphCase, random_data

GRAPH = GraphCase(self_loops=6, isolated=7, duplicates=15, unlabelled=8)
FROZEN = ("norm", "attention", "dropout", "between")


class Parts(nn.Module):
    """Several that modes matter to, and another dropout and norm."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first, self.norm, self.dropout = SAGEConv(features, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.attention = GATConv(8, 8, dropout=0.4)
        self.between = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.trained = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.2))
        self.last = SAGEConv(8, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.dropout(self.norm(self.first(x, edge_index)).relu())
        x = self.between(self.attention(x, edge_index))
        return self.last(self.trained(x).relu(), edge_index)


def given(features: int, classes: int) -> nn.Module:
    """Frozen before it is given to the trainer."""
    model = Parts(features, classes)
    for name in FROZEN:
        getattr(model, name).eval()
    return model


class Overridden(Parts):
    """The same as a loop that calls ``model.train()`` takes it."""

    def train(self, mode: bool = True) -> "Overridden":
        super().train(mode)
        for name in FROZEN:
            getattr(self, name).eval()
        return self


def test_parts_in_eval_mode_train_in_it(tmp_path: Path) -> None:
    """Running statistics are used and kept, nothing is dropped; scores are those of evaluation."""
    data = random_data(GRAPH)
    assert_agrees(CustomCase(make=Overridden), data, tmp_path)
    found = []
    for make in (given, Overridden):
        with make_trainer(CustomCase(make=make), store_of(data, tmp_path), tmp_path) as trainer:
            modes = [module.training for module in trainer.model.modules()]
            records = trainer.fit(4, eval_every=1)
            assert [module.training for module in trainer.model.modules()] == modes
            found.append((records, trainer.model.state_dict()))
    (records, state), (expected_records, expected_state) = found
    assert [(r.loss, r.valid_acc) for r in records] == [(r.loss, r.valid_acc) for r in expected_records]
    assert all(torch.equal(state[name], value) for name, value in expected_state.items())
    assert torch.equal(state["norm.running_mean"], torch.zeros(8, dtype=torch.float64))
    assert state["trained.0.running_mean"].count_nonzero()


@pytest.mark.parametrize("when", ["all of it", "later"])
def test_a_model_in_eval_mode_trains_whole(when: str, tmp_path: Path) -> None:
    """As after ``model.train()``; and modes that are set when the trainer has been made have no part."""
    store = store_of(random_data(GRAPH), tmp_path)

    def all_in_eval(features: int, classes: int) -> nn.Module:
        return Parts(features, classes).eval()

    with make_trainer(CustomCase(make=Parts), store, tmp_path) as trainer:
        expected = [record.loss for record in trainer.fit(2)]
    make = all_in_eval if when == "all of it" else Parts
    with make_trainer(CustomCase(make=make), store, tmp_path) as trainer:
        if when == "later":
            trainer.model.norm.eval()  # type: ignore[union-attr, operator]
        assert [record.loss for record in trainer.fit(2)] == expected
