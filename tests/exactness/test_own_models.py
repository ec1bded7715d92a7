# SPDX-License-Identifier: Apache-2.0
"""Models that are written in ways of their own are PyG's: layers that are no convolutions of PyG's, backwards of their
own, compiled parts, several inputs and results, parts that are called twice or share parameters."""

import copy
import inspect
import operator
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data
from torch_geometric.nn import (
    GATConv,
    GCN2Conv,
    GCNConv,
    GINEConv,
    GraphConv,
    GraphNorm,
    LayerNorm,
    MessagePassing,
    MetaLayer,
    RGCNConv,
    SAGEConv,
    TAGConv,
)
from torch_geometric.nn.models import GCN, GroupAddRev
from torch_geometric.transforms import ToSparseTensor
from torch_geometric.utils import coalesce, scatter

import ooc
from ooc.errors import ModelError
from ooc.model.layers import opaque
from ooc.model.layers.propagation import Propagation
from ooc.train.batched.batches import SampledTrainer, Sampling
from tests.exactness.comparison import assert_agrees, make_trainer, store_of, tuned_trainer
from tests.exactness.layers import Two
from tests.exactness.reference import CustomCase
from tests.graphs import GraphCase, random_data

ROUGH: dict[str, Any] = {"self_loops": 9, "isolated": 7, "duplicates": 15, "unlabelled": 8}
H, K = 6, 3
compiled = partial(torch.compile, backend="eager")
"""Nothing is compiled in the end, and torch's own backend takes long to import."""


class ByHand(nn.Module):
    """Sums over neighbours by torch alone."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.neighbours, self.own = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        row, col = edge_index
        messages = self.neighbours(x)[row].tanh()
        return self.own(x).index_add(0, col, messages)


class Encoder(nn.Module):
    """Two of them in a module that has nothing else to do with edges, one called twice."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first, self.again = ByHand(features, H), ByHand(H, H)
        self.last = SAGEConv(H, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.again(self.again(self.first(x, edge_index), edge_index).relu(), edge_index)
        return self.last(x, edge_index)


class Within(nn.Module):
    """A module without a convolution around one that looks at edges."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.inner = nn.ModuleList([ByHand(features, H), ByHand(H, H)])
        self.norm, self.last = nn.BatchNorm1d(H), nn.Linear(H, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for layer in self.inner:
            x = self.norm(layer(x, edge_index)).relu()
        out: Tensor = self.last(x)
        return out


class Outer(nn.Module):
    """Has a class of modules for an attribute, which has a ``_version`` as tensors do."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.kind = GCNConv
        self.within, self.conv = Within(features, H), GCNConv(H, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(self.within(x, edge_index), edge_index)


class EdgeModel(nn.Module):
    def __init__(self, columns: int) -> None:
        super().__init__()
        self.mlp = nn.Linear(2 * columns + K, K)

    def forward(self, source: Tensor, target: Tensor, edge_attr: Tensor, *others: Any) -> Tensor:
        return self.mlp(torch.cat([source, target, edge_attr], dim=1)).tanh()


class NodeModel(nn.Module):
    def __init__(self, columns: int, outputs: int) -> None:
        super().__init__()
        self.messages, self.rows = nn.Linear(columns + K, H), nn.Linear(columns + H, outputs)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, *others: Any) -> Tensor:
        row, col = edge_index
        found = self.messages(torch.cat([x[row], edge_attr], dim=1)).relu()
        mean = scatter(found, col, dim=0, dim_size=x.size(0), reduce="mean")
        return self.rows(torch.cat([x, mean], dim=1))


class Nodes(nn.Module):
    """Two layers of PyG's functions alone."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first, self.second = Scattering(features, H), Scattering(H, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


class Scattering(nn.Module):
    """Sums over neighbours by PyG's ``scatter``, and a map of them and of rows."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.of_edges, self.of_rows = nn.Linear(inputs, outputs), nn.Linear(inputs + outputs, outputs)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        row, col = edge_index
        summed = scatter(self.of_edges(x[row]).tanh(), col, dim=0, dim_size=x.size(0))
        return self.of_rows(torch.cat([x, summed], dim=1))


class Meta(nn.Module):
    """Layers that give rows and features of edges, of which only the first are asked for; or both."""

    def __init__(self, features: int, classes: int, *, passes_on: bool = False) -> None:
        super().__init__()
        self.passes_on = passes_on
        self.first = MetaLayer(EdgeModel(features), NodeModel(features, H))
        self.second = MetaLayer(EdgeModel(H), NodeModel(H, classes))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        x, of_edges, _ = self.first(x, edge_index, edge_attr)
        out: Tensor = self.second(x.relu(), edge_index, of_edges if self.passes_on else edge_attr)[0]
        return out


class Masked(SAGEConv):  # type: ignore[misc]
    def forward(self, x: Tensor, edge_index: Tensor, mask: Tensor | None) -> Tensor:  # type: ignore[override]
        out: Tensor = super().forward(x if mask is None else x * mask, edge_index)
        return out


class Reversible(nn.Module):
    """A mask that all layers share, each its group's columns of it, and one of whole rows."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(features, 3 * H), nn.Linear(3 * H, classes)
        self.layer, self.next = (GroupAddRev(Masked(H, H), num_groups=3) for _ in range(2))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.before(x)
        x = x * F.dropout(torch.ones(x.size(0), 1, dtype=x.dtype), 0.3, self.training)
        mask = F.dropout(torch.ones_like(x), 0.4, self.training)
        out: Tensor = self.after(self.next(self.layer(x, edge_index, mask), edge_index, None).relu())
        return out


@compiled
def gated(x: Tensor) -> Tensor:
    return x * x.sigmoid()


class Compiled(nn.Module):
    """A compiled convolution, a compiled module of rows, and a compiled function."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.conv = compiled(GATConv(features, H))
        self.rows = compiled(nn.Sequential(nn.Linear(H, H), nn.ReLU()))
        self.last = GCNConv(H, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.last(gated(self.rows(self.conv(x, edge_index))), edge_index)


class Shared(nn.Module):
    """One weight in two layers, and one that is used twice."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first, self.second, self.third = SAGEConv(features, H), SAGEConv(H, H), SAGEConv(H, H)
        self.third.lin_l.weight = self.second.lin_l.weight
        self.last = GCNConv(H, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x, edge_index).relu()
        for conv in (self.second, self.third, self.second):
            x = conv(x, edge_index).tanh()
        return self.last(x, edge_index)


class Asking(nn.Module):
    """Goes by shapes, chooses number by number, and has modules of several inputs and results."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(SAGEConv(width, H) for width in (features, H))
        self.cell, self.pair = nn.GRUCell(H, H), nn.Bilinear(H, H, H)
        self.layers = nn.LSTM(H, H, batch_first=True, bidirectional=True)
        self.scaled = nn.utils.parametrizations.weight_norm(nn.Linear(H, H))
        self.attention, self.last = nn.MultiheadAttention(H, 2, batch_first=True), nn.Linear(2 * H, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        assert x.dim() == 2 and x.size(0) > 0 and edge_index.size(0) == 2
        seen: list[Tensor] = []
        for conv in self.convs:
            found = conv(x, edge_index)
            if found.shape == x.shape and x.size(-1) != 0:
                found = self.cell(found, x)
            else:
                found = found.to(x.dtype) + torch.zeros_like(found)
            rows, columns = found.shape
            found = found.view(rows, columns) * (found > -9).to(found.dtype)
            x = torch.where((found > 0.2) & (found < 5), found, self.pair(found, found.tanh()))
            largest = x.topk(2, dim=-1)
            gate = torch.zeros_like(x).scatter_(1, largest.indices, 1.0) + F.one_hot(x.min(1)[1], H)
            x = x + gate * x.gather(1, largest.indices).sum(-1, keepdim=True)
            x = self.scaled(torch.clone(x)) + 0.1 * torch.detach(x)
            seen.append(x.masked_fill(x < -2, 0.0) + largest.values.sum(-1, keepdim=True))
        together = torch.stack(seen, dim=1)
        together = sum(together[:, :, at : at + 1] * at for at in range(together.size(2))) + together  # [N, 2, H]
        together = together / float(together.size(-1)) ** 0.5 + (1, 2, 3, 4)[together.dim()]
        together, _ = self.attention(together, together, together)
        together, _ = self.layers(together)
        out: Tensor = self.last(together[:, -1])
        return out


class InTurns(nn.Module):
    """Takes what is in tensors one by one, calls functions by names alone, and scales what no gradient goes to."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first, self.rows, self.last = SAGEConv(features, H), nn.Linear(H, H), GCNConv(H, classes)
        self.parts = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        with torch.no_grad():
            x = x / x.norm(dim=1, keepdim=True).clamp(min=1e-6)
        x = F.leaky_relu(input=self.first(x, edge_index), negative_slope=0.1, inplace=True)
        x = F.linear(input=x, weight=self.rows.weight, bias=self.rows.bias)
        x = F.linear(x, self.rows.weight, self.rows.bias.exp())
        x = torch.cat((*x.chunk(2, dim=1),)[::-1], dim=1).reshape(*x.shape)
        several = [x, x.tanh(), torch.stack([-column for column in x.unbind(1)], dim=1)]
        together = sum(part * rows for part, rows in zip(self.parts.softmax(0), several, strict=True))
        return self.last(together, edge_index)


class Making(nn.Module):
    """Makes as many rows as there are, of numbers and of parameters, and goes along a row's numbers."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first, self.last = SAGEConv(features, H), SAGEConv(2 * H, classes)
        given = {"state": torch.randn(H), "factor": torch.randn(1, H)}
        self.given = nn.ParameterDict({name: nn.Parameter(one) for name, one in given.items()})
        self.cell, self.norm, self.along = nn.GRUCell(H, H), nn.GroupNorm(2, H), nn.Conv1d(1, 2, 3, padding=1)
        self.encoder = nn.TransformerEncoderLayer(H, 2, H, dropout=0.0, batch_first=True)
        self.plane, self.soft, self.above = nn.Conv2d(1, 2, 3, padding=1), nn.Softmin(dim=1), nn.Threshold(0.1, 0.05)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        rows = x.size(0)
        total = torch.zeros(rows, H, dtype=x.dtype) + torch.full((rows, 1), 0.5, dtype=x.dtype)
        total = self.cell(self.first(x, edge_index), self.given["state"].expand(rows, -1)) + total
        total = self.norm(total * self.given.factor.repeat(rows, 1)) * torch.ones(size=(rows, 1), dtype=x.dtype)
        total = total * x.new_full((H,), 2.0) + total.new_ones(1, H) * x.new_zeros(rows, 1)
        total = torch.column_stack(torch.hsplit(total, 2)) / (1 + torch.linalg.norm(total, dim=1, keepdim=True))
        total = F.pad(total.tensor_split(2, dim=1)[0], (H // 2, 0)) + abs(total.median(1, keepdim=True).values % 1.0)
        total = total * torch.all(total > -1, dim=1, keepdim=True)
        together = self.encoder(torch.stack(tensors=[total, total.roll(1, 1)], dim=1)).mean(1)
        alike = F.cosine_similarity(total, together, dim=-1)[:, None]
        planes = self.plane(together.unflatten(1, (1, 2, H // 2))).flatten(1).narrow(1, 1, H)
        together = self.soft(planes) + self.above(planes) * together.select(1, H - 1)[:, None]
        return self.last(self.along((alike * together)[:, None]).flatten(1), edge_index)


class Told(nn.Module):
    """Takes all that a model is given."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first, self.norm, self.last = GCNConv(features, H), GraphNorm(H), GCNConv(H, classes)
        self.other = LayerNorm(H)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor, batch: Tensor) -> Tensor:
        x = self.other(self.norm(self.first(x, edge_index, edge_weight), batch).relu(), batch)
        return self.last(x, edge_index, edge_weight)


class Untold(Told):
    """The same, as PyG's reference calls models."""

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, edge_index, edge_weight, torch.zeros(x.size(0), dtype=torch.long))


class Stacking(nn.Module):
    """Puts matrices of rows one above the other, and goes on with them in many ways."""

    def __init__(self, features: int, classes: int, joined: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.convs = nn.ModuleList(SAGEConv(features, H) for _ in range(2))
        self.weights, self.score, self.lin = nn.Parameter(torch.randn(2)), nn.Linear(H, 1), nn.Linear(H, H)
        self.lstm, self.act = nn.LSTM(H, H), nn.ELU(inplace=True)
        self.last, self.joined = SAGEConv(H, classes), joined or self.all_ways

    def all_ways(self, hs: Tensor) -> Tensor:
        """[2, N, H] → [N, H]."""
        shares = torch.softmax(self.score(hs).tanh(), dim=0)
        large = torch.where(hs > 0.1, hs, 0.5 * hs).sum(dim=0) / hs.size(0)
        found = hs.mean(dim=0) + torch.sum(shares * hs, 0) + hs.max(dim=0).values + hs[-1] + large
        found = found + (self.weights.view(-1, 1, 1) * hs).sum(0) + self.lstm(hs)[0][1] + self.act(self.lin(hs)).amax(0)
        found = found + hs.permute(1, 0, 2).flatten(1)[:, 1 : 1 + H] + sum(hs.unbind(0))
        return found + torch.einsum("k,knc->nc", self.weights, torch.cat([one[None] for one in hs]))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        hs = torch.stack([conv(x, edge_index) for conv in self.convs])
        out: Tensor = self.last(self.joined(hs), edge_index)
        return out


class Depths(nn.Module):
    """A recurrent network over layers, each a step of all rows at once, from zeros of as many: GeniePath."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(features, H), nn.Linear(H, classes)
        self.breadths = nn.ModuleList(GATConv(H, H) for _ in range(2))
        self.depths = nn.ModuleList(nn.LSTM(H, H, 1, bias=False) for _ in range(2))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.before(x)
        h = c = torch.zeros(1, x.shape[0], H, device=x.device, dtype=x.dtype)
        for breadth, depth in zip(self.breadths, self.depths, strict=True):
            x, (h, c) = depth(breadth(x, edge_index).tanh()[None, :], (h, c))
            x = x[0]
        out: Tensor = self.after(x)
        return out


def of_edges() -> nn.Module:
    return nn.Sequential(nn.Linear(K, H), nn.ReLU(inplace=True), nn.Linear(H, K))


class Encoded(nn.Module):
    """Two layers that are given the same of what edges carry, made by functions and a network."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.encoder = of_edges()
        self.first, self.last = GATConv(features, H, edge_dim=K + 1), GINEConv(nn.Linear(H, classes), edge_dim=K + 1)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        made = torch.cat([self.encoder(edge_attr), edge_attr[:, :1].abs().sqrt()], dim=-1)
        x = self.first(x, edge_index, edge_attr=made)
        out: Tensor = self.last(x.relu(), edge_index, made)
        return out


class Checkpointed(nn.Module):
    """Has torch keep less of its layers, in both of torch's ways, where there is a gradient."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.convs, self.last = nn.ModuleList([SAGEConv(features, H), SAGEConv(H, H)]), SAGEConv(H, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = checkpoint(self.convs[0], x, edge_index, use_reentrant=False)
        assert x.requires_grad == self.training and not x.detach().requires_grad
        if x.requires_grad:
            x = checkpoint(self.convs[1], x, edge_index, use_reentrant=True)
        else:
            x = self.convs[1](x, edge_index)
        out: Tensor = self.last(x.relu(), edge_index)
        return out


class Hasty(nn.Module):
    """Writes into what it has just made, and squeezes whatever has one."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first, self.last = SAGEConv(features, H), SAGEConv(H, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = F.elu_(torch.tanh_(self.first(x, edge_index)) + F.leaky_relu_(self.first(x, edge_index), 0.2))
        out: Tensor = self.last(F.relu_(x + 0.1).unsqueeze(1).squeeze(), edge_index)
        return torch.squeeze(out)


class Assigning(nn.Module):
    """Assigns to columns, and to what is chosen by truths."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first, self.last = SAGEConv(features, H), SAGEConv(H, classes)
        self.filling = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = x.clone()
        x[:, 0] = 0
        h = same = self.first(x, edge_index)
        h[..., 1:3] = self.filling
        h[:, 3] += h[:, 0]
        h[h.sum(1) < 0] = 0.5
        wide = torch.zeros(h.size(0), H, dtype=h.dtype)
        wide[:, :4] = same[:, 2:]
        out: Tensor = self.last(wide, edge_index)
        return out


class Choosing(nn.Module):
    """By truths of rows and of a tensor, whichever comes first."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first, self.last = SAGEConv(features, H), SAGEConv(H, classes)
        self.chosen = torch.arange(H) % 2 == 0

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.first(x, edge_index)
        h = h * (self.chosen & (h > 0)) - h * (self.chosen | (h > 1)) + h * ((h > 0.5) ^ self.chosen)
        out: Tensor = self.last(h * (self.chosen ^ (h > 0.2)), edge_index)
        return out


CASES: dict[str, tuple[Callable[[int, int], nn.Module], dict[str, Any]]] = {
    "by hand": (Encoder, {}),
    "by hand, within": (Outer, {}),
    "MetaLayer": (Meta, {"edge_features": K}),
    "MetaLayer, rows of edges passed on": (lambda f, c: Meta(f, c, passes_on=True), {"edge_features": K}),
    "scatter": (Nodes, {}),
    "GroupAddRev": (Reversible, {}),
    "compiled parts": (Compiled, {}),
    "compiled": (lambda f, c: compiled(Two(f, c, SAGEConv)), {}),
    "compiled, with weights": (lambda f, c: compiled(Untold(f, c)), {"weighted": True}),
    "shared": (Shared, {}),
    "asking": (Asking, {}),
    "in turns": (InTurns, {}),
    "making": (Making, {}),
    "hasty": (Hasty, {}),
    "assigning": (Assigning, {}),
    "choosing": (Choosing, {}),
    "stacking": (Stacking, {}),
    "a recurrence over layers": (Depths, {}),
    "checkpointed": (Checkpointed, {}),
    "a product with a constant": (lambda f, c: Between(f, c, times_a_constant), {"edge_features": K}),
    "overwriting": (lambda f, c: Between(f, c, overwriting), {"edge_features": K}),
    "an encoder of edges": (lambda f, c: Between(f, c, of_edges(), edges=True), {"edge_features": K}),
    "an encoder of edges, shared": (Encoded, {"edge_features": K}),
    "weights and batch": (Untold, {"weighted": True}),
}


@pytest.mark.thorough("MetaLayer, rows of edges passed on", "an encoder of edges", "by hand")
@pytest.mark.parametrize("name", CASES)
def test_models(name: str, tmp_path: Path) -> None:
    """Losses, gradients and scores are PyG's."""
    make, form = CASES[name]
    data = random_data(GraphCase(**ROUGH, **form))
    with torch.compiler.set_stance("force_eager"):  # PyG's, which is compared with
        assert_agrees(CustomCase(make=make), data, tmp_path, epochs=2)


def test_batch_is_given_to_a_model_that_must_have_it(tmp_path: Path) -> None:
    """Without being told."""
    data = random_data(GraphCase(**ROUGH, weighted=True))
    store = store_of(data, tmp_path)
    losses = []
    for kind in (Told, Untold):
        torch.manual_seed(1)
        with tuned_trainer(kind(store.num_features, store.num_classes).double(), store, memory="64M") as trainer:
            losses.append([record.loss for record in trainer.fit(epochs=2, progress=False)])
    assert losses[0] == losses[1]


class OfData(nn.Module):
    """Takes all of a graph at once, as PyG's tutorial does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, data: Data) -> Tensor:
        data = data.to("cpu")
        assert data.num_nodes == data.x.size(0) and data.edge_attr is None
        out: Tensor = self.inner(data.x, data.edge_index, data.edge_weight)
        return out


class OfNumberedEdges(nn.Module):
    def __init__(self, features: int, classes: int, of_data: bool) -> None:
        super().__init__()
        self.conv = RGCNConv(features, classes, 3)
        self.forward = self.of_data if of_data else self.of_all  # type: ignore[method-assign]

    def of_data(self, batched_data) -> Tensor:  # type: ignore[no-untyped-def]  # told by its name, which OGB gives it
        return self.of_all(batched_data.x, batched_data.edge_index, batched_data.edge_type)

    def of_all(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        out: Tensor = self.conv(x, edge_index, edge_type)
        return out


@pytest.mark.parametrize("numbered", [False, True])
def test_a_model_may_take_data_in_one(numbered: bool, tmp_path: Path) -> None:
    """The same bits as of one that takes its parts."""
    data = random_data(GraphCase(**ROUGH, weighted=not numbered))
    if numbered:
        data.edge_type = torch.arange(data.num_edges) % 3
    store, losses = store_of(data, tmp_path), []
    for of_data in (False, True):
        torch.manual_seed(1)
        model: nn.Module
        if numbered:
            model = OfNumberedEdges(store.num_features, store.num_classes, of_data)
        else:
            model = GCN(store.num_features, H, 2, store.num_classes, dropout=0.3)
            model = OfData(model) if of_data else model
        with tuned_trainer(model.double(), store, memory="64M") as trainer:
            losses.append([record.loss for record in trainer.fit(epochs=2, progress=False)])
    assert losses[0] == losses[1]


ASKED: dict[str, Callable[[Data], Any]] = {
    "train_mask": lambda data: data.train_mask,
    "val_mask": lambda data: getattr(data, "val_mask", None),
    "y": lambda data: data.y,
    "pos": lambda data: 2 if "pos" in data else 1,
    "a list of all that it has": lambda data: len(data),
}


@pytest.mark.parametrize("name", ASKED)
def test_what_data_does_not_have_is_said(name: str, tmp_path: Path) -> None:
    """Of what its user's data has; who asks whether that is there would go another way. Anything else it has not."""

    class Masked(OfData):
        def forward(self, data: Data) -> Tensor:
            assert data.time is None and getattr(data, "other", None) is None and "other" not in data
            return super().forward(data) * ASKED[name](data)

    data = random_data(GraphCase(**ROUGH))
    data.pos = torch.randn(data.num_nodes, 3)
    model = Masked(GCN(data.num_features, H, 2, GraphCase().classes)).double()
    with pytest.raises(ModelError, match=f"asks data for {name}, which it is not given: data has x, edge_index"):
        tuned_trainer(model, data, memory="64M", spill_dir=tmp_path)


def test_data_has_edges_as_adj_t_where_they_came_so(tmp_path: Path) -> None:
    class Sparse(OfData):
        def forward(self, data: Data) -> Tensor:
            out: Tensor = self.inner(data.x, data.adj_t)
            return out

    data, losses = random_data(GraphCase()), []
    data.edge_index = coalesce(data.edge_index)  # as ToSparseTensor does
    for kind, given in ((OfData, data), (Sparse, ToSparseTensor()(data.clone()))):
        torch.manual_seed(1)
        model = kind(GCN(data.num_features, H, 2, GraphCase().classes)).double()
        with tuned_trainer(model, given, memory="64M", spill_dir=tmp_path) as trainer:
            losses.append([record.loss for record in trainer.fit(2, progress=False)])
    assert losses[0] == losses[1]


class OfMatrix(nn.Module):
    """Two layers that are given ``adj_t`` alone, as in OGB's and PyG's examples."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor, adj_t: Any) -> Tensor:
        first = self.first(x, adj_t).relu()
        return self.second(first, *[first] * isinstance(self.second, GCN2Conv), adj_t)  # type: ignore[no-any-return]


class OwnSum(MessagePassing):
    def forward(self, x: Tensor, adj_t: Any) -> Tensor:
        return self.propagate(adj_t, x=x)  # type: ignore[no-any-return]


class Product(nn.Module):
    """A layer of tkipf/pygcn's kind: a product with the matrix."""

    def __init__(self, columns: int, classes: int, multiply: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(columns, classes)), nn.Parameter(torch.randn(classes))
        self.multiply = multiply

    def forward(self, x: Tensor, adj_t: Any) -> Tensor:
        return self.multiply(adj_t, torch.mm(x, self.weight)) + self.bias


def _of_matrix(first: str, second: str) -> tuple[Data, nn.Module]:
    """With weights, and without self-loops unless a layer is not to add others."""
    f, c, plain = GraphCase().features, GraphCase().classes, {"normalize": False}
    kinds: dict[str, Callable[[int], nn.Module]] = {
        "GCNConv": lambda i: GCNConv(i, c),
        "GCNConv, not normalized": lambda i: GCNConv(i, c, **plain),
        "GCN2Conv, not normalized": lambda i: GCN2Conv(i, 0.1, **plain),
        "GraphConv": lambda i: GraphConv(i, c),
        "TAGConv": lambda i: TAGConv(i, c, K=2),
        "SAGEConv": lambda i: SAGEConv(i, c),
        "GATConv": lambda i: GATConv(i, c),
        "OwnSum": lambda i: OwnSum(),
        "spmm": lambda i: Product(i, c, torch.spmm),
        "@": lambda i: Product(i, c, operator.matmul),
    }
    data = random_data(GraphCase(weighted=True, self_loops=0 if first == "GCNConv" else 9))
    data.edge_index, data.edge_weight = coalesce(data.edge_index, data.edge_weight)
    model = OfMatrix(kinds[first](f), kinds[second](c)).double()
    return ToSparseTensor(attr="edge_weight")(data), model


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("GCNConv", "GCNConv"),
        ("GCNConv, not normalized", "GCN2Conv, not normalized"),
        ("GraphConv", "TAGConv"),
        ("GraphConv", "GATConv"),
        ("spmm", "@"),
    ],
)
def test_layers_take_weights_out_of_adj_t(first: str, second: str, tmp_path: Path) -> None:
    """As PyG's do, also with self-loops in a matrix of torch's, where no layer adds others, or takes these away."""
    data, model = _of_matrix(first, second)
    reference, losses = copy.deepcopy(model), []
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, reference)]
    for _ in range(2):
        optimizers[1].zero_grad()
        loss = F.cross_entropy(reference(data.x, data.adj_t)[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizers[1].step()
        losses.append(loss.item())
    with tuned_trainer(model, data, optimizer=optimizers[0], memory="64M", spill_dir=tmp_path) as trainer:
        assert [one.loss for one in trainer.fit(2, progress=False)] == pytest.approx(losses, rel=1e-10)


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        ("GCNConv", "SAGEConv", r"SAGEConv \(second\) takes no weights, which adj_t has; ignore_edge_data='weight'"),
        ("GraphConv", "GCNConv", r"GCNConv \(second\): adj_t has self-loops, which a layer that adds such"),
        ("GraphConv", "OwnSum", r"OwnSum \(second\): adj_t has self-loops"),
    ],
)
def test_layers_that_see_other_edges_in_adj_t_are_refused(first: str, second: str, why: str, tmp_path: Path) -> None:
    data, model = _of_matrix(first, second)
    with pytest.raises(ModelError, match=why):
        tuned_trainer(model, data, memory="64M", spill_dir=tmp_path)


@pytest.mark.parametrize(
    ("layer", "why"),
    [("GCNConv", "gives edge_weight to its convolutions, beside edge_index or adj_t"), ("@", "matrix")],
)
def test_batches_have_no_matrix_with_weights_and_products(layer: str, why: str, tmp_path: Path) -> None:
    data, model = _of_matrix(layer, layer)
    with pytest.raises(ModelError, match=why):
        SampledTrainer(model, data, Sampling(fanouts=(-1, -1), batch_size=8), memory="64M", spill_dir=tmp_path)


def _line(function: Any, text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(number for number, line in enumerate(lines) if text in line)


class Scripted(nn.Module):
    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.conv, self.rows = GCNConv(features, H), torch.jit.script(nn.Linear(H, classes))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.conv(x, edge_index)
        out: Tensor = self.rows(x)
        return out


class ByScript(Scripted):
    def __init__(self, features: int, classes: int) -> None:
        super().__init__(features, classes)
        self.conv: nn.Module = ByHand(features, H)
        self.conv.neighbours, self.rows = torch.jit.script(nn.Linear(features, H)), nn.Linear(H, classes)


class Between(nn.Module):
    """Something of the rows between two layers, or of what edges carry before the second."""

    def __init__(self, features: int, classes: int, between: Callable[[Tensor], Tensor], edges: bool = False) -> None:
        super().__init__()
        self.first, self.last = SAGEConv(features, H), GINEConv(nn.Linear(H, classes), edge_dim=K)
        self.between, self.edges = between, edges

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        x = self.first(x, edge_index)
        out: Tensor = self.last(
            x if self.edges else self.between(x), edge_index, self.between(edge_attr) if self.edges else edge_attr
        )
        return out


def times_a_constant(x: Tensor) -> Tensor:
    """A tensor that is made for the type of rows."""
    return x @ torch.eye(H, dtype=x.dtype).roll(1, 0) + x @ torch.ones(H, H, dtype=x.dtype)


def overwriting(x: Tensor) -> Tensor:
    """What is written into has been used before, and is used again."""
    doubled, means = x * 2, x.mean(dim=0)
    before = doubled + 1
    doubled.relu_()
    means.clamp_(min=0)
    return before * doubled + means + x


def by_rows(x: Tensor) -> Tensor:
    return x * 2.0 if x.size(0) > 20 else x


REFUSED: dict[str, tuple[Callable[[int, int], nn.Module], dict[str, Any], tuple[str, ...]]] = {
    "a scripted part": (Scripted, {}, ("rows is scripted", _line(Scripted.forward, "self.rows"))),
    "a scripted layer": (ByScript, {}, ("ByHand (conv) has a scripted part", _line(Scripted.forward, "self.conv"))),
    "another way for more rows": (
        lambda f, c: Between(f, c, by_rows),
        {"edge_features": K},
        ("model Between cannot be taken apart", "by how many rows", _line(Between.forward, "self.between(x)")),
    ),
    "another way for as many rows": (
        lambda f, c: Between(f, c, lambda x: 2 * x if x.shape[0] == 300 else x),
        {"edge_features": K},
        ("model Between cannot be taken apart", "by how many rows", _line(Between.forward, "self.between(x)")),
    ),
    "another way for more rows below another dimension": (
        lambda f, c: Between(f, c, lambda x: 2 * x if x.unsqueeze(0).size(1) > 20 else x),
        {"edge_features": K},
        ("model Between cannot be taken apart", "by how many rows", _line(Between.forward, "self.between(x)")),
    ),
    "as many times as there are rows": (
        lambda f, c: Between(f, c, lambda x: sum(x for _ in range(x.size(0)))),
        {"edge_features": K},
        ("model Between cannot be taken apart", "by how many rows", _line(Between.forward, "self.between(x)")),
    ),
    "another way for an even number of rows": (
        lambda f, c: Between(f, c, lambda x: x if x.size(0) % 2 else 2 * x),
        {"edge_features": K},
        ("model Between cannot be taken apart", "by how many rows", _line(Between.forward, "self.between(x)")),
    ),
    "some rows of matrices one above the other": (
        lambda f, c: Stacking(f, c, lambda hs: hs[:, :20].sum(0)),
        {},
        ("getitem looks across rows: it takes some rows and leaves out others",),
    ),
    "rows in parts": (
        lambda f, c: Between(f, c, lambda x: torch.cat(torch.split(x, 20)[::-1])),
        {"edge_features": K},
        ("split looks across rows",),
    ),
    "as many as there are rows": (
        lambda f, c: Between(f, c, lambda x: x + torch.full((x.size(0), 1), x.size(0), dtype=x.dtype)),
        {"edge_features": K},
        ("full looks across rows",),
    ),
    "a row more": (
        lambda f, c: Between(f, c, lambda x: F.pad(x, (0, 0, 0, 1))[:-1]),
        {"edge_features": K},
        ("pad looks across rows",),
    ),
    "half as many rows": (
        lambda f, c: Between(f, c, lambda x: x * torch.ones(x.size(0) // 2, dtype=x.dtype).sum()),
        {"edge_features": K},
        ("floordiv computes with the number of rows",),
    ),
    "other rows, turned": (
        lambda f, c: Between(f, c, lambda x: x.roll(1, 0)),
        {"edge_features": K},
        ("roll looks across rows",),
    ),
    "dropout inside": (
        lambda f, c: Between(f, c, nn.TransformerEncoderLayer(K, 1, K)),
        {"edge_features": K},
        ("dropout=0.1 inside is not supported",),
    ),
    "truths of other rows, which few rows are": (
        lambda f, c: Between(f, c, lambda x: torch.where((x > 5).flip(0), 2 * x, x)),
        {"edge_features": K},
        ("flip looks across rows",),
    ),
    "truths of one row": (
        lambda f, c: Between(f, c, lambda x: torch.where((x == 0)[0], 2 * x, x)),
        {"edge_features": K},
        ("eq looks across rows",),
    ),
    "dropout of what edges carry": (
        lambda f, c: Between(f, c, nn.Dropout(), edges=True),
        {"edge_features": K},
        ("Dropout (between): dropout of what edges carry is not supported outside of a convolution",),
    ),
    "features of edges by all edges": (
        lambda f, c: Between(f, c, lambda e: e / e.max(), edges=True),
        {"edge_features": K},
        (
            "depends on more than the node",
            "it runs as it is, since what it is given of edges is not what the store has",
        ),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named(name: str, tmp_path: Path) -> None:
    make, form, said = REFUSED[name]
    store = store_of(random_data(GraphCase(**ROUGH, **form)), tmp_path)
    with pytest.raises(ModelError) as caught:
        make_trainer(CustomCase(make=make), store, tmp_path)
    assert all(str(part) in str(caught.value) for part in said), str(caught.value)


# ---- several results --------------------------------------------------------------------------------------


class Branching(nn.Module):
    """Gives what it is scored by, and what its rows were before that."""

    def __init__(self, features: int, classes: int, form: type = tuple) -> None:
        super().__init__()
        self.first, self.last, self.back = SAGEConv(features, H), GCNConv(H, classes), nn.Linear(H, features)
        self.form = form

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        h = self.first(x, edge_index).relu()
        out = self.last(F.dropout(h, 0.0, self.training), edge_index), self.back(h)
        return out if self.form is tuple else {"out": out[0]} if self.form is dict else [out[0], out[1].unsqueeze(-1)]


def entropy_beside_size(results: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    """A loss of both, a number a row."""
    out, back = results
    return F.cross_entropy(out, labels, reduction="none") + 0.1 * back.square().mean(dim=1)


def pyg_losses(model: nn.Module, data: Data, loss: Callable[[Any, Tensor], Tensor], epochs: int) -> list[float]:
    optimizer, found = torch.optim.Adam(model.parameters(), lr=0.01), []
    mask = data.train_mask
    for _ in range(epochs):
        optimizer.zero_grad()
        results = model(data.x, data.edge_index)
        total = loss(tuple(result[mask] for result in results), data.y[mask]).mean()
        total.backward()
        optimizer.step()
        found.append(float(total.detach()))
    return found


@pytest.mark.parametrize("of_both", [True, False])
def test_several_results(of_both: bool, tmp_path: Path) -> None:
    """A loss of one's own gets all, torch's the first, and so do scores."""
    data = random_data(GraphCase(**ROUGH))
    store = store_of(data, tmp_path)
    torch.manual_seed(1)
    models = [Branching(store.num_features, store.num_classes).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizer = torch.optim.Adam(models[0].parameters(), lr=0.01)
    loss: Any = entropy_beside_size if of_both else None
    with tuned_trainer(models[0], store, memory="64M", optimizer=optimizer, loss=loss) as trainer:
        found = [record.loss for record in trainer.fit(epochs=3, progress=False)]
        scores = trainer.evaluate()
    expected = pyg_losses(
        models[1], data, loss or (lambda results, labels: F.cross_entropy(results[0], labels)), epochs=3
    )
    assert found == pytest.approx(expected, rel=1e-9)
    right = models[1](data.x, data.edge_index)[0].argmax(dim=1) == data.y
    assert scores["valid_score"] == pytest.approx(float(right[data.val_mask].double().mean()))
    for (name, one), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-8, atol=1e-10), name


def first_only(results: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    return F.cross_entropy(results[0], labels, reduction="none")


@pytest.mark.parametrize(
    ("form", "loss", "said"),
    [
        (tuple, first_only, "loss first_only makes nothing of result 1"),
        (dict, None, "what forward of Branching gives is not one row of numbers a node; return the matrices"),
        (list, entropy_beside_size, "result 1 of forward of Branching is not one row"),
    ],
)
def test_results_that_cannot_be_taken(form: type, loss: Any, said: str, tmp_path: Path) -> None:
    store = store_of(random_data(GraphCase(**ROUGH)), tmp_path)
    with pytest.raises(ModelError, match=said):
        ooc.Trainer(Branching(store.num_features, store.num_classes, form).double(), store, memory="64M", loss=loss)


def test_what_such_a_layer_makes_of_rows_is_made_once_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for the in-neighbours of every tile, too: of edges alone it is run on the graph around some rows."""
    made: list[type[nn.Module]] = []
    run = opaque.Opaque.__init__

    def seen(self: Any, index: int, source: Any, layer: Any, module: nn.Module, *rest: Any, **options: Any) -> None:
        made.append(type(module))
        run(self, index, source, layer, module, *rest, **options)

    monkeypatch.setattr(opaque.Opaque, "__init__", seen)
    data = random_data(GraphCase(), dtype=torch.float64)
    for make in (Encoder, Nodes):
        make_trainer(CustomCase(make=make), store_of(data, tmp_path), tmp_path).close()
    assert set(made) == {Propagation}
