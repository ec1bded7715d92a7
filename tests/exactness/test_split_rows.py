# SPDX-License-Identifier: Apache-2.0
"""A row of many edges is taken in pieces by any layer of which that is possible: losses and gradients are PyG's."""

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import (
    ClusterGCNConv,
    FeaStConv,
    GENConv,
    GraphConv,
    MessagePassing,
    SAGEConv,
    SimpleConv,
)
from torch_geometric.nn.aggr import (
    GraphMultisetTransformer,
    QuantileAggregation,
    SetTransformerAggregation,
    SortAggregation,
)

from ooc.errors import BudgetError, ModelError
from ooc.kernels import neighbourhood
from ooc.kernels.edges import TileEdges
from ooc.kernels.pieces.caught_sums import CaughtSum
from ooc.model.layers import opaque
from ooc.model.layers.conformance import ProbeResult, probe_layer
from ooc.model.layers.layer import Graph, layer_of, sharing
from ooc.model.layers.split_rows import SplitRow
from ooc.model.lowering.values import Features
from ooc.storage.store import Store
from tests.exactness.comparison import assert_agrees, least, make_trainer, store_of, train_epoch
from tests.exactness.layers import Cosine, GatedAsItIs, MfAsItIs, MlpMessages, behind, edge_conv, principal
from tests.exactness.reference import CustomCase
from tests.exactness.test_inner_dropout import OfCoefficients
from tests.examples import cases, examples
from tests.graphs import GraphCase, random_data

ROUGH = GraphCase(nodes=32, edges=60, self_loops=5, isolated=4, duplicates=5, unlabelled=4)
HUB = 5
H = 6
EVERY = ["sum", "mean", "max", "min", "mul", "std", "var", "softmax"]


def _sparse(own: Tensor, messages: Tensor, index: Tensor) -> Tensor:
    ends = torch.stack((index, torch.arange(len(index))))
    ones = messages.new_ones(len(index))
    return torch.sparse.mm(torch.sparse_coo_tensor(ends, ones, (len(own), len(index))), messages)


def _segments(own: Tensor, messages: Tensor, index: Tensor) -> Tensor:
    lengths = torch.bincount(index, minlength=len(own))
    return torch.segment_reduce(messages, "sum", lengths=lengths) + own


def _differences(own: Tensor, messages: Tensor, index: Tensor) -> Tensor:
    ends = torch.bincount(index, minlength=len(own)).cumsum(0)
    sums = torch.cat((torch.zeros_like(own[:1]), messages.cumsum(0)))
    return sums[ends] - sums[torch.cat((ends.new_zeros(1), ends[:-1]))]


def _wide(index: Tensor, messages: Tensor) -> Tensor:
    return index[:, None].expand_as(messages)


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "highest of all": lambda own, m, i: own.scatter_reduce(0, _wide(i, m), m, "amax"),
    "lowest of all": lambda own, m, i: own.index_reduce(0, i, m, "amin"),
    "lowest": lambda own, m, i: torch.zeros_like(own).index_reduce(0, i, m, "amin", include_self=False),
    "mean of all": lambda own, m, i: own.index_reduce(0, i, m, "mean"),
    "mean": lambda own, m, i: own.scatter_reduce(0, _wide(i, m), m, "mean", include_self=False),
    "product of all": lambda own, m, i: own.index_reduce(0, i, m, "prod"),
    "put": lambda own, m, i: torch.zeros_like(own).index_put((i,), m, accumulate=True),
    "put in place": lambda own, m, i: own.clone().index_put_((i,), m, True),
    "segments": _segments,
    "a sparse product": _sparse,
}
"""Of what every row has itself, messages, and their targets."""
SOME_WAYS = ("lowest of all", "mean", "put in place", "a sparse product")


class Reducing(MessagePassing):
    """Reduces in one of these ways, or another one."""

    def __init__(self, inputs: int, outputs: int, way: str = "") -> None:
        super().__init__()
        self.linear, self.way = nn.Linear(inputs, outputs), way
        self.sorted = SortAggregation(2)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        rows, (sources, targets) = self.linear(x), edge_index
        if self.way == "sorted":
            return self.sorted(rows[sources], targets, dim_size=len(rows))  # type: ignore[no-any-return]
        return WAYS.get(self.way, _differences)(rows, rows[sources], targets)


class EveryWay(nn.Module):
    """All of them (in an ordinary run some), side by side, and then the rows that are highest."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.ways = nn.ModuleList([Reducing(features, 2, way) for way in (*cases(SOME_WAYS, WAYS), "sorted")])
        columns = 2 * len(self.ways) + 2
        self.last = SAGEConv((2 * columns, columns), classes, aggr=SortAggregation(2))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        found = [way(x, edge_index) for way in self.ways]
        out: Tensor = self.last(torch.cat(found, dim=1).tanh(), edge_index)
        return out


class AlikeRows(nn.Module):
    """Two layers of which every row has room for as many edges as any has."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first = SAGEConv(features, H, aggr=GraphMultisetTransformer(features, k=2))
        self.second = SAGEConv(H, classes, aggr=SetTransformerAggregation(H))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x, edge_index).tanh(), edge_index)
        return out


class Chain(nn.Module):
    """Every aggregation of PyG's, and attention with self-loops of its own."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first, self.second = SAGEConv(features, H, aggr=EVERY), Cosine(H, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).tanh(), edge_index)


class Quantiles(nn.Module):
    """Two layers of which a row's entries are counted, the second twice as wide as before."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first, self.second = SAGEConv(features, H, aggr="median"), SimpleConv(aggr=QuantileAggregation([0.3, 0.8]))
        self.last = nn.Linear(2 * H, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.last(self.second(self.first(x, edge_index).tanh(), edge_index))
        return out


BY_COUNTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "more than thirty": lambda messages, counts: torch.where(counts > 30, 2 * messages, messages),
    "no more than thirty": lambda messages, counts: torch.where(counts <= 30, messages.sin(), messages),
    "at least thirty": lambda messages, counts: messages / counts.clamp(min=30),
}
"""What is made of messages by how many edges their row has."""


class Counting(nn.Module):
    """Counts the edges of a row before it adds up messages."""

    def __init__(self, inputs: int, outputs: int, way: str) -> None:
        super().__init__()
        self.linear, self.way = nn.Linear(inputs, outputs), way

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        rows, (sources, targets) = self.linear(x), edge_index
        counts = rows.new_zeros(len(rows), 1).index_add(0, targets, rows.new_ones(len(targets), 1))
        messages = BY_COUNTS[self.way](rows[sources].tanh(), counts[targets])
        return torch.zeros_like(rows).index_add(0, targets, messages)


class CountingTwice(nn.Module):
    """Of which rows reach the loss by way of a hub."""

    def __init__(self, features: int, classes: int, first: str, second: str) -> None:
        super().__init__()
        self.first, self.second = Counting(features, H, first), Counting(H, classes, second)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        found: Tensor = self.second(self.first(x, edge_index), edge_index)
        return found


LAYERS: dict[str, Callable[[int, int], MessagePassing]] = {
    "an MLP on edges": MlpMessages,
    "EdgeConv": edge_conv,
    "ClusterGCNConv": lambda i, o: ClusterGCNConv(i, o, diag_lambda=0.1),
    "FeaStConv": lambda i, o: FeaStConv(i, o, heads=2),
    "GENConv": lambda i, o: GENConv(i, o, norm=None, learn_t=True),
    "MFConv": lambda i, o: MfAsItIs(i, o, max_degree=4),
    "GraphConv, powermean": lambda i, o: GraphConv(i, o, aggr="powermean", aggr_kwargs={"learn": True}),
    "ResGatedGraphConv": GatedAsItIs,
    "SAGEConv, median": lambda i, o: SAGEConv(i, o, aggr="median"),
    "SAGEConv, sort": lambda i, o: SAGEConv((2 * i, i), o, aggr=SortAggregation(2)),
    **{
        f"quantiles, {between}": lambda i, o, between=between: SAGEConv(
            i, o, aggr=QuantileAggregation(0.3, interpolation=between)
        )
        for between in ("linear", "midpoint", "lower", "nearest")
    },
}
"""Beside those of ``Chain``, those that reduce in one of the ``WAYS``, and PNA."""


def with_hub() -> Data:
    """Every node has an edge into one of them, some several, and it has loops of its own."""
    data = random_data(ROUGH)
    sources = torch.cat((torch.arange(data.num_nodes), torch.full((7,), 20), torch.full((2,), HUB)))
    into_one = torch.stack((sources, torch.full_like(sources, HUB)))
    return data.update({"edge_index": torch.cat((data.edge_index, into_one), dim=1)}).sort(sort_by_row=False)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Data, Store]:
    data = with_hub()
    return data, store_of(data, tmp_path_factory.mktemp("hub"))


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a few edges; what they find for others does not wait."""
    monkeypatch.setattr(neighbourhood, "EDGES_AT_ONCE", 8)
    monkeypatch.setattr(opaque, "_WAITING_BYTES", 1 << 10)


def probed(conv: MessagePassing) -> ProbeResult:
    layer, _ = layer_of(conv, "Layer", [Features(0, 4), Graph()], {})
    module = sharing(conv, "Layer")
    return probe_layer(layer, module, edge_features=0, dtype=torch.float32, record=True)


@pytest.mark.thorough("quantiles, lower", "quantiles, midpoint", "quantiles, nearest")
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
def test_layers_may_be_split(make: Callable[[int, int], MessagePassing]) -> None:
    """Trying them has shown that pieces give what the whole gives."""
    assert probed(make(4, 6)).calls


class Product(MessagePassing):
    """Adds up by a matrix of all rows and edges."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        sources, targets = edge_index
        ends_here = targets == torch.arange(len(x))[:, None]
        return ends_here.to(x.dtype) @ self.linear(x)[sources]


def test_a_matrix_of_rows_and_edges_is_refused() -> None:
    """It would grow as the square of what is computed at once, which nobody counts."""
    with pytest.raises(ModelError, match="memory for every row times every edge"):
        probed(Product(4, 6))


def test_levels() -> None:
    """A softmax over a row takes three runs, many sums at once only one."""
    assert [call.level for call in probed(Cosine(4, 6)).calls] == [1, 2, 3]
    assert {call.level for call in probed(principal(4, 6)).calls} == {1}


@pytest.mark.parametrize("make", [Chain, Quantiles, EveryWay])
def test_hubs_are_exact(
    make: Callable[[int, int], nn.Module], shared: tuple[Data, Store], tmp_path: Path, pieces: None
) -> None:
    """Losses, gradients and scores."""
    data, store = shared
    assert_agrees(CustomCase(make=make), data, tmp_path, epochs=2, store=store, tile_rows=16)


@pytest.mark.parametrize(
    "ways", cases([("more than thirty", "at least thirty")], itertools.product(BY_COUNTS, repeat=2))
)
def test_what_is_told_by_the_number_of_edges(
    ways: tuple[str, str], shared: tuple[Data, Store], tmp_path: Path, pieces: None
) -> None:
    """Rows of a small graph are all told the same way, and so would a hub be, of which no count is complete."""
    data, store = shared
    case = CustomCase(make=lambda features, classes: CountingTwice(features, classes, *ways))
    assert_agrees(case, data, tmp_path, epochs=1, store=store, tile_rows=16)


@pytest.mark.parametrize("way", (*WAYS, "sorted"))
@settings(max_examples=examples(4))
@given(
    sources=st.lists(st.integers(0, 6), min_size=2, max_size=14),
    numbers=st.lists(st.integers(-2, 2), min_size=21, max_size=21),
    at_once=st.integers(1, 6),
)
def test_pieces_are_the_whole(way: str, sources: list[int], numbers: list[int], at_once: int) -> None:
    """Whatever is equal, be it the row's own: values, and gradients of rows and parameters. Trying the layer has shown
    that it may be split."""
    assert calls_of(way)
    conv = Reducing(3, 2, way).double()
    with torch.no_grad():
        conv.linear.weight.copy_(torch.tensor([[1.0, -1, 0], [0, 1, 2]]))
        conv.linear.bias.zero_()
    layer, _ = layer_of(conv, "Layer", [Features(0, 3), Graph()], {})
    module, parameters = sharing(conv, "Layer"), list(conv.parameters())
    x_NC = torch.tensor(numbers, dtype=torch.float64).view(7, 3)
    tile = TileEdges(torch.tensor(sorted(sources)), torch.tensor([0, len(sources)]), 0, 7)
    near = neighbourhood.neighbourhood(tile, 7)
    x_SC = near.gather(x_NC)
    expected = layer.forward(module, x_SC, near)
    gradient = torch.arange(1, 1 + expected.shape[1], dtype=torch.float64)[None]
    d_x, d_parameters = layer.backward(module, x_SC, near, gradient, parameters, trains=True)
    split = SplitRow(layer, module, calls_of(way), lambda _: nullcontext(), tile, at_once, x_NC)
    torch.testing.assert_close(split.forward(), expected)
    found_x, found = torch.zeros_like(x_NC), [torch.zeros_like(one) for one in parameters]
    for own, others, of_parameters in split.backward(gradient, parameters, trains=True):
        found_x[:1] += own
        if others is not None:
            found_x[others[0]] += others[1]
        for total, part in zip(found, of_parameters, strict=False):
            total += 0 if part is None else part
    assert d_x is not None
    torch.testing.assert_close(near.gather(found_x), d_x)
    for total, part in zip(found, d_parameters, strict=True):
        assert part is not None
        torch.testing.assert_close(total, part)


@cache
def calls_of(way: str) -> tuple[CaughtSum, ...]:
    """What it adds up."""
    return probed(Reducing(4, 2, way)).calls


def test_dropout_on_a_hub(shared: tuple[Data, Store], tmp_path: Path, pieces: None) -> None:
    """Repeated edges of two pieces are told apart."""
    data, store = shared
    case = CustomCase(make=behind(lambda i, o: OfCoefficients(i, o, "removed, added")))
    assert_agrees(case, data, tmp_path, epochs=1, store=store, tile_rows=16)


def test_budgets_do_not_matter(shared: tuple[Data, Store], tmp_path: Path, pieces: None) -> None:
    """The same bits under the least budgets, where something is spilled, and on any threads."""
    _, store = shared
    case = CustomCase(make=Chain)
    given: dict[str, Any] = {"tile_rows": 16}
    found = []
    for options in ({"threads": 3}, {**least(case, store, tmp_path, **given), "threads": 1}):
        with make_trainer(case, store, tmp_path, **given, **options) as trainer:
            found.append(train_epoch(trainer))
            assert bool(trainer.plan.ssd_write_bytes) == ("gpu_budget" in options)
    for epoch in found[1:]:
        assert epoch.loss == found[0].loss
        assert all(torch.equal(epoch.gradients[name], part) for name, part in found[0].gradients.items())


def test_what_cannot_be_split_is_taken_whole(
    shared: tuple[Data, Store], tmp_path: Path, pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row of many edges counts against the budget, and an error names it, and what needs all of them."""
    data, store = shared
    assert not probed(Reducing(4, 6)).calls
    case = CustomCase(make=Reducing)
    assert_agrees(case, data, tmp_path, epochs=1, store=store, tile_rows=16)
    with make_trainer(case, store, tmp_path) as trainer:
        kinds = [item.pull.per_edge for item in trainer.plan.programs["train"] if item.pull is not None]
    most = int(torch.bincount(data.edge_index[1]).max())
    assert {kind.row_edges for kind in kinds if kind is not None} == {most}
    monkeypatch.setattr(opaque, "EDGES_AT_ONCE", 8)
    named = rf"{most} edges of one row, needed at once by torch.cumsum, [\d.]+ .?B a thread"
    with pytest.raises(BudgetError, match=named):
        make_trainer(case, store, tmp_path, gpu_budget="10K", host_budget="10K")


def test_rows_with_room_for_the_edges_of_any(shared: tuple[Data, Store], tmp_path: Path, pieces: None) -> None:
    """Of a hub, too, with plenty of memory and with the least, where something is spilled."""
    data, store = shared
    assert probed(SAGEConv(4, 6, aggr=GraphMultisetTransformer(4, k=2))).padding_bytes
    assert not probed(SAGEConv(4, 6, aggr="median")).padding_bytes
    case = CustomCase(make=AlikeRows)
    assert_agrees(case, data, tmp_path, epochs=1, store=store, tile_rows=16)
    scarce = least(case, store, tmp_path, tile_rows=16)
    plan = assert_agrees(case, data, tmp_path, epochs=1, store=store, tile_rows=16, threads=1, **scarce)
    assert plan.ssd_write_bytes


def test_only_rows_of_many_edges_are_reason_to_try(
    shared: tuple[Data, Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where none has more than are taken at once, whether they may come in pieces does not matter."""
    data, store = shared
    most = int(torch.bincount(data.edge_index[1]).max())
    for at_once in (most, most - 1):
        tried = []

        def watched(*given: Any, in_pieces: bool, tried: list[bool] = tried, **options: Any) -> ProbeResult:
            tried.append(in_pieces)
            return probe_layer(*given, in_pieces=in_pieces, **options)

        monkeypatch.setattr(neighbourhood, "EDGES_AT_ONCE", at_once)
        monkeypatch.setattr(opaque, "probe_layer", watched)
        make_trainer(CustomCase(make=Reducing), store, tmp_path).close()
        assert set(tried) == {at_once < most}
