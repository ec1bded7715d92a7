# SPDX-License-Identifier: Apache-2.0
"""What sums over all rows, attention of every row to every other among it, is PyG's, whatever the memory."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GINConv, GPSConv, SAGEConv, global_mean_pool
from torch_geometric.nn.attention import PerformerAttention, PolynormerAttention, SGFormerAttention
from torch_geometric.nn.models import Polynormer, SGFormer

from ooc.errors import ModelError
from ooc.storage.store import Store
from tests.exactness.comparison import assert_agrees, least, make_trainer, store_of, train_epoch
from tests.exactness.reference import CustomCase, ModelCase
from tests.examples import cases
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


def polynormer(*, attends: bool = True, **options: Any) -> nn.Module:
    """``attends``: to all nodes as well, which it learns after its local part."""
    dropouts = dict.fromkeys(("in_dropout", "dropout", "global_dropout"), 0.0)
    model = Polynormer(6, 6, 5, local_layers=2, pre_ln=True, **dropouts, **options)
    model._global = attends
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


class VirtualNode(nn.Module):
    """A node that all others have an edge to and from: a row of sums, which goes from layer to layer."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.before, self.last = nn.Linear(features, 6), nn.Linear(6, classes)
        self.convs = nn.ModuleList(SAGEConv(6, 6) for _ in range(3))
        self.node = nn.Embedding(1, 6)
        self.updates = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.ReLU(), nn.Linear(9, 6)) for _ in "ab"
        )

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x, node = self.before(x), self.node.weight
        for conv, update in zip(self.convs, (*self.updates, None), strict=True):
            x = x + node
            x = x + conv(x, edge_index).relu()
            if update is not None:
                node = node + update(x.sum(dim=0, keepdim=True) / 70 + node)
        out: Tensor = self.last(x)
        return out


class Context(nn.Module):
    """Sums, means, norms and deviations of all rows: taken off, as a gate, beside the rows, one after the other."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.before, self.conv, self.last = nn.Linear(features, 6), SAGEConv(6, 6), nn.Linear(18, classes)
        self.gate = nn.Linear(6, 6)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.conv(self.before((x - x.mean(0)) / torch.std(x, 0)), edge_index)
        mean = torch.mean(x, dim=0, keepdim=True)
        x = (x - mean) / (((x - mean) ** 2).mean(dim=-2, keepdim=True) + 1e-5).sqrt()
        x = x / ((x * torch.eye(6)[0]).std(0, correction=0) + x.var(dim=0, unbiased=False) + 0.5)
        gated = x * torch.sigmoid(self.gate(x.relu().sum(0)) * 0.1)
        context = self.gate(global_mean_pool(gated, None)).softmax(-1)
        beside = context.repeat(x.size(0), 1), (gated.mean(0).unsqueeze(0) ** 2).expand(x.size(0), -1)
        x = torch.cat([gated, *beside], dim=1)
        mean, root = x.mean(0), x.shape[0] ** 0.5
        x = x / torch.linalg.norm(x) + x / x.std() + (x - x.mean()) / x.sum(0).size(0) * x.norm(p=1, dim=0).dim() / root
        x = x + (mean.unsqueeze(1) * torch.ones(18, 18)).sum(-2) + (mean[:, None] @ mean[None]).diagonal()
        x = x + torch.stack([mean, x.sum(0) / x.size(0)], 1).sum(-1) + x.mean(0, keepdim=True).squeeze()
        pair = torch.stack([x, x.relu()])
        out: Tensor = self.last(pair[0] + pair.mean(1)[1] + (x > 0).double().mean(0))
        return out


class ByHand(nn.Module):
    """Linear attention as papers' own programs have it: keys and values multiplied over all nodes."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(features, 8) for _ in range(3))
        self.conv, self.rows, self.last = SAGEConv(8, 8), nn.Linear(8, 8), nn.Linear(8, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        q, k, v = (one(x).reshape(-1, 2, 4) for one in (self.q, self.k, self.v))
        q, k = q / torch.norm(q, p=2), k / torch.linalg.vector_norm(k, ord=2)  # SGFormer, DIFFormer
        nodes, ones = q.shape[0], torch.ones([k.shape[0]], dtype=x.dtype)
        above = torch.einsum("nhm,hmd->nhd", q, torch.einsum("lhm,lhd->hmd", k, v)) + nodes * v
        above += torch.einsum("l,lhd->hd", ones, v).unsqueeze(0).repeat(v.shape[0], 1, 1)
        below = torch.einsum("nhm,hm->nh", q, torch.einsum("lhm,l->hm", k, ones))
        below = torch.unsqueeze(below, len(below.shape))
        x = (above / (below + torch.ones_like(below) * nodes)).mean(dim=1).repeat(1, 2)
        x = self.conv(x, edge_index)
        key = x.sigmoid()
        x = x + key @ (key.t() @ x) / (key @ key.T.sum(1, keepdim=True))
        heads = x.view(x.size(0), 2, 4).permute(1, 0, 2)
        heads = heads @ (heads.transpose(-2, -1) @ heads / nodes).softmax(-1)
        x = x + heads.transpose(0, 1).flatten(1)
        one = self.rows(F.normalize(x, dim=-1).unsqueeze(0))
        x = x + torch.bmm(one, torch.matmul(one.mT, one)).squeeze(0)
        x = x / torch.dot(x[:, 0], x[:, 0]).sqrt()
        x = torch.addmm(x, x, torch.tensordot(x, x, dims=([0], [0])))
        out: Tensor = self.last(x @ torch.linalg.inv(torch.eye(8, dtype=x.dtype) + x.T @ x))
        return out


CASES: dict[str, ModelCase] = {
    "SGFormer": CustomCase(make=lambda f, c: OfModel(f, c, sgformer(trans_num_heads=2, aggregate="cat"))),
    "Polynormer": CustomCase(make=lambda f, c: OfModel(f, c, polynormer(post_bn=False))),
    "Polynormer's local part": CustomCase(make=lambda f, c: OfModel(f, c, polynormer(attends=False))),
    "attentions": CustomCase(make=Attending),
    "GPSConv": CustomCase(make=General),
    "virtual node": CustomCase(make=VirtualNode),
    "context": CustomCase(make=Context),
    "by hand": CustomCase(make=ByHand),
}


@pytest.mark.parametrize("name", CASES)
def test_models(name: str, tmp_path: Path) -> None:
    """Losses, gradients and scores; of several sums behind each other in the least memory, and with more the same
    bits."""
    case, data = CASES[name], random_data(ROUGH)
    store, scarce = store_of(data, tmp_path), dict[str, Any]()
    if name in cases(["by hand"], ("attentions", "GPSConv", "virtual node", "context", "by hand")):
        scarce = least(case, store, tmp_path)
        assert _epoch(case, store, tmp_path, **scarce) == _epoch(case, store, tmp_path)
    assert_agrees(case, data, tmp_path, epochs=1 if scarce else 2, store=store, **scarce)


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


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "dropout": (lambda x: x + F.dropout(x.mean(0)), "dropout of what all rows share, as sums"),
    "a mask of columns": (lambda x: x * F.dropout(torch.ones(8, dtype=x.dtype)), r"a mask .* torch.ones_like\(x\)"),
    "noise": (lambda x: x + torch.randn_like(x.mean(0)), "randn_like is not supported: it draws random numbers"),
    "noise of its own": (lambda x: x + torch.randn_like(torch.ones(8)), "or another thread has drawn some"),
    "of truths": (lambda x: x * (x > 0).sum(0), "sum over all rows is supported .* in the model's type"),
    "of pairs of rows": (lambda x: x @ torch.einsum("nd,me->de", x, x), "einsum .* is no sum over them"),
    "all pairs": (lambda x: (x @ x.T) @ x, "matmul looks across rows"),
    "largest": (lambda x: x - x.norm(p=torch.inf, dim=0), "norm looks across rows"),
    "one row for all": (lambda x: x.mean(0, keepdim=True), "is not one row of numbers a node"),
}


class Summing(nn.Module):
    def __init__(self, features: int, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.function = SAGEConv(features, 8), function

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.function(self.conv(x, edge_index))


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_sum_over_all_rows_is_refused(name: str, tmp_path: Path) -> None:
    function, told = REFUSED[name]
    store = store_of(random_data(GraphCase(nodes=30, classes=8)), tmp_path)
    with pytest.raises(ModelError, match=told):
        make_trainer(CustomCase(make=lambda f, c: Summing(f, function)), store, tmp_path)
