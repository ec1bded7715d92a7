# SPDX-License-Identifier: Apache-2.0
"""Attention of every row to every other by sums over all rows is PyG's, whatever the memory."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GINConv, GPSConv, SAGEConv
from torch_geometric.nn.attention import PerformerAttention, PolynormerAttention, SGFormerAttention
from torch_geometric.nn.models import Polynormer, SGFormer

from ooc.errors import ModelError
from ooc.storage.store import Store
from tests.exactness.comparison import assert_agrees, least_budgets, make_trainer, store_of, train_epoch
from tests.exactness.reference import CustomCase, ModelCase
from tests.graphs import GraphCase, random_data

ROUGH = GraphCase(nodes=70, self_loops=9, isolated=7, duplicates=15, unlabelled=8)


@pytest.fixture(autouse=True)
def in_double_precision() -> Iterator[None]:
    """SGFormerAttention makes ones of the default type."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class OfModel(nn.Module):
    """A model that is told of what graph each row is, between linear maps."""

    def __init__(self, features: int, classes: int, model: nn.Module) -> None:
        super().__init__()
        self.before, self.model, self.after = nn.Linear(features, 6), model, nn.Linear(5, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        batch = torch.zeros(x.size(0), dtype=torch.long, device=x.device)
        out: Tensor = self.after(self.model(self.before(x), edge_index, batch))
        return out


class Attending(nn.Module):
    """Attentions as they are, of several heads, and a norm over all rows."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.before, self.conv, self.last = nn.Linear(features, 5), SAGEConv(5, 6), nn.Linear(8, classes)
        self.norm = nn.BatchNorm1d(6)
        self.first = SGFormerAttention(6, heads=2, head_channels=8, qkv_bias=True)
        self.second = PolynormerAttention(8, heads=2, head_channels=4, qk_shared=False)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.norm(self.conv(self.before(x), edge_index))
        x = self.first(x.unsqueeze(0)).squeeze(0)
        out: Tensor = self.last(self.second(x.unsqueeze(0)).squeeze(0))
        return out


def polynormer() -> nn.Module:
    dropouts = dict.fromkeys(("in_dropout", "dropout", "global_dropout"), 0.0)
    model = Polynormer(6, 6, 5, local_layers=2, pre_ln=True, post_bn=False, **dropouts)
    model._global = True
    return model


def sgformer(**options: Any) -> nn.Module:
    return SGFormer(6, 6, 5, trans_dropout=0.0, gnn_dropout=0.0, **options)


class General(nn.Module):
    """GraphGPS: attention of all nodes beside a convolution, told of the graph of each row, and alone."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        options = {"heads": 2, "attn_type": "performer", "attn_kwargs": {"head_channels": 8, "qkv_bias": True}}
        self.before, self.last = nn.Linear(features, 6), nn.Linear(6, classes)
        self.first = GPSConv(6, GINConv(nn.Linear(6, 6)), norm="graph_norm", **options)
        self.second = GPSConv(6, None, norm="batch_norm", act="elu", **options)
        kernel = nn.Softmax(dim=-1)
        self.third = PerformerAttention(6, heads=3, head_channels=4, kernel=kernel, attn_out_bias=False)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        batch = torch.zeros(x.size(0), dtype=torch.long, device=x.device)
        x = self.second(self.first(self.before(x), edge_index, batch), edge_index)
        out: Tensor = self.last(self.third(x.unsqueeze(0)).squeeze(0))
        return out


CASES: dict[str, ModelCase] = {
    "SGFormer": CustomCase(make=lambda f, c: OfModel(f, c, sgformer(trans_num_heads=2, aggregate="cat"))),
    "Polynormer": CustomCase(make=lambda f, c: OfModel(f, c, polynormer())),
    "attentions": CustomCase(make=Attending),
    "GPSConv": CustomCase(make=General),
}


@pytest.mark.parametrize("name", CASES)
def test_models(name: str, tmp_path: Path) -> None:
    """Losses, gradients and scores; of attentions behind each other in the least memory, and with more the same
    bits."""
    case, data = CASES[name], random_data(ROUGH)
    store, least = store_of(data, tmp_path), {}
    if name in ("attentions", "GPSConv"):
        gpu, host = least_budgets(
            lambda gpu, host: make_trainer(case, store, tmp_path, gpu_budget=gpu, host_budget=host)
        )
        least = {"gpu_budget": gpu, "host_budget": host}
        found = [_epoch(case, store, tmp_path, **budgets) for budgets in (least, {"gpu_budget": "64M"})]
        assert found[0] == found[1]
    assert_agrees(case, data, tmp_path, epochs=2, store=store, **least)


def _epoch(case: ModelCase, store: Store, folder: Path, **budgets: Any) -> list[Any]:
    with make_trainer(case, store, folder, **budgets) as trainer:
        found = train_epoch(trainer)
    return [found.loss, *(part.tolist() for part in found.gradients.values())]


def test_a_model_that_must_be_told_of_batches_is(tmp_path: Path) -> None:
    """All rows are of one graph."""
    store = store_of(random_data(ROUGH, dtype=torch.float32), tmp_path)
    model = SGFormer(store.num_features, 8, store.num_classes, trans_dropout=0.0, gnn_dropout=0.0).float()
    with make_trainer(CustomCase(make=lambda f, c: model), store, tmp_path, dtype=torch.float32) as trainer:
        train_epoch(trainer)


class Grouped(OfModel):
    """Says that rows are of several graphs."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.after(self.model(self.before(x), edge_index, x[:, 0].long()))
        return out


def test_several_graphs_are_refused(tmp_path: Path) -> None:
    store = store_of(random_data(ROUGH), tmp_path)
    with pytest.raises(ModelError, match=r"SGFormer: batch must be torch.zeros\(x.size\(0\), dtype=torch.long\)"):
        make_trainer(CustomCase(make=lambda f, c: Grouped(f, c, sgformer())), store, tmp_path)


class Learnt(nn.Module):
    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.attention, self.last = PerformerAttention(features, 2, kernel=nn.PReLU()), nn.Linear(features, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.last(self.attention(x.unsqueeze(0)).squeeze(0))
        return out


class Pairs(nn.Module):
    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.conv = GPSConv(features, GINConv(nn.Linear(features, features)), heads=2)
        self.last = nn.Linear(features, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.last(self.conv(x, edge_index))
        return out


@pytest.mark.parametrize(
    ("make", "told"),
    [(Learnt, "kernel with parameters"), (Pairs, "by N² pairs; with attn_type='performer' by sums over all nodes")],
)
def test_attention_without_sums_is_refused(make: Any, told: str, tmp_path: Path) -> None:
    store = store_of(random_data(GraphCase(nodes=30, features=6)), tmp_path)
    with pytest.raises(ModelError, match=told):
        make_trainer(CustomCase(make=make), store, tmp_path)
