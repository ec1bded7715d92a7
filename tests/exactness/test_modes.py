# SPDX-License-Identifier: Apache-2.0
"""Parts of a model that are not trained: frozen by ``eval()``, or cut off by ``detach()``."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GINConv, SAGEConv
from torch_geometric.utils import add_remaining_self_loops, scatter

from ooc.errors import ModelError
from tests.exactness.comparison import assert_agrees, least, make_trainer, store_of, train_epoch
from tests.exactness.reference import CustomCase, Reference, adam, adamw, buffers_of, disagreement
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
    assert [(r.loss, r.valid_score) for r in records] == [(r.loss, r.valid_score) for r in expected_records]
    assert all(torch.equal(state[name], value) for name, value in expected_state.items())
    assert torch.equal(state["norm.running_mean"], torch.zeros(8, dtype=torch.float64))
    assert state["trained.0.running_mean"].count_nonzero()


@pytest.mark.parametrize("when", ["all of it", "later"])
def test_a_model_in_eval_mode_trains_whole(when: str, tmp_path: Path) -> None:
    """As after ``model.train()``; whoever scores it by hand meanwhile puts it in so. Of a part it is refused then."""
    store = store_of(random_data(GRAPH), tmp_path)

    def all_in_eval(features: int, classes: int) -> nn.Module:
        return Parts(features, classes).eval()

    with make_trainer(CustomCase(make=Parts), store, tmp_path) as trainer:
        expected = [record.loss for record in trainer.fit(2, eval_every=0)]
    make = all_in_eval if when == "all of it" else Parts
    with make_trainer(CustomCase(make=make), store, tmp_path) as trainer:
        if when == "later":
            trainer.model.eval()
        assert [record.loss for record in trainer.fit(2, eval_every=0)] == expected
        trainer.model.train().norm.eval()  # type: ignore[operator]
        with pytest.raises(ModelError, match=r"norm\.training of the model has changed"):
            trainer.fit(3, eval_every=0)


class OfComputedEdges(nn.Module):
    """A norm in a layer that is given computed edges, and a frozen part that rows of edges go through."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.conv = GINConv(nn.Sequential(nn.Linear(features, 8), nn.BatchNorm1d(8)))
        self.dropout, self.last = nn.Dropout(0.5), nn.Linear(8, classes)

    def train(self, mode: bool = True) -> "OfComputedEdges":
        super().train(mode)
        self.dropout.eval()
        return self

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        row, col = edge_index
        loops, _ = add_remaining_self_loops(edge_index, num_nodes=x.size(0))
        x = self.conv(x, loops).relu()
        return self.last(x + scatter(self.dropout(x[row] * x[col]), col, dim_size=x.size(0)))


def test_parts_that_computed_edges_go_through_keep_their_modes(tmp_path: Path) -> None:
    """Predictions go by running statistics, and leave these as they are."""
    case, data = CustomCase(make=OfComputedEdges), random_data(GRAPH)
    with make_trainer(case, store_of(data, tmp_path), tmp_path) as trainer:
        expected = Reference(case, trainer.model, data, adam).train()
        difference, whose = disagreement(train_epoch(trainer), expected, floor=1e-3)
        assert difference <= 1e-9, whose
        found = trainer.predict()
        assert found is not None
        assert torch.allclose(found, trainer.model.eval()(data.x, data.edge_index), rtol=1e-9)
        assert all(torch.allclose(now, expected.buffers[name]) for name, now in buffers_of(trainer.model).items())


class CutOff(nn.Module):
    """Parts of the output have no gradient to pass on: one behind ``detach``, with one that is made with gradients off
    in it, and one that only scales."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first, self.aside = SAGEConv(features, 8), SAGEConv(features, 8)
        self.norm, self.attention = nn.BatchNorm1d(8), GATConv(8, 8)
        self.scale, self.mixed = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.full((8,), 0.3))
        self.last = SAGEConv(8, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        with torch.no_grad():
            aside = self.norm(self.aside(x, edge_index)).relu_()
            assert aside.size(1) == 8
        aside = aside + self.attention(aside, edge_index).detach()
        x = self.first(x, edge_index).relu() * self.mixed + aside * self.scale.detach()
        return self.last(x, edge_index)


@pytest.mark.parametrize("gpu_budget", ["64M", "least"])
def test_what_is_cut_off_has_no_gradient(gpu_budget: str, tmp_path: Path) -> None:
    """Nor is it decayed by the optimizer, as it would be with a gradient of zero; its norm's statistics are kept."""
    case, data = CustomCase(make=CutOff), random_data(GRAPH)
    if gpu_budget == "least":
        store = store_of(data, tmp_path)
        assert_agrees(case, data, tmp_path, make_optimizer=adamw, **least(case, store, tmp_path))
    else:
        assert_agrees(case, data, tmp_path, make_optimizer=adamw)
    with make_trainer(case, store_of(data, tmp_path), tmp_path, make_optimizer=adamw, clip_norm=1.0) as trainer:
        before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        trainer.fit(3, eval_every=0)
        moved = {name for name, value in trainer.model.state_dict().items() if not torch.equal(value, before[name])}
    assert not any(name.startswith(("aside", "attention", "scale", "norm.weight", "norm.bias")) for name in moved)
    assert {"mixed", "norm.running_mean", "last.lin_l.weight"} <= moved
