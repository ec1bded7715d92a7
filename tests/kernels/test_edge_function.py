# SPDX-License-Identifier: Apache-2.0
"""Edge functions under every reduction give the outputs and gradients of PyG's own layers."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch_geometric.nn import GATv2Conv, GINEConv, MessagePassing, ResGatedGraphConv, TransformerConv
from torch_geometric.nn.conv import gatv2_conv, transformer_conv
from torch_geometric.utils import add_self_loops, remove_self_loops

from ooc.kernels import functions
from ooc.kernels.dropout.edges import EdgeDropout
from ooc.kernels.edge_function import (
    EdgeMessages,
    Heads,
    TargetLayout,
    Upstream,
    pull_messages,
    pull_source_gradients,
    pull_target_gradients,
    upstream,
)
from ooc.kernels.edge_terms import EdgeTerms, LoopFeatures
from ooc.kernels.edges import SelfLoops, TileEdges
from ooc.kernels.functions import EdgeFunction, Gatv2, Product, Rectified, TransformerAttention
from ooc.plan.workload import Direction
from tests.examples import examples
from tests.kernels.kernel_cases import HEIGHTS, PIECES, KernelGraph, by_tiles, graphs, numbers, over_edges, small_pieces
from tests.kernels.test_edge_dropout import scale_of_edges

HEADS, CHANNELS, FEATURES = 3, 2, 4
WIDTH = HEADS * CHANNELS
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


class Case:
    """A function with what maps features of edges to its terms, and a layer of PyG's with the same parameters."""

    def __init__(
        self,
        function: EdgeFunction,
        layer: MessagePassing,
        *,
        source: int,
        target: int,
        features: int = 0,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        self.function, self.layer = function, layer.double()
        self.columns = (source, target, features)
        self.map = tuple(part for part in (weight, bias) if part is not None)

    def terms(self, groups: int, loop_RK: Tensor | None) -> EdgeTerms | None:
        """The terms of all groups; a weight [T, K] as PyG has it."""
        if not self.columns[2]:
            return None
        weight, bias = ([part.detach() for part in self.map] + [None, None])[:2]
        return EdgeTerms(range(groups), torch.float64, None if weight is None else weight.t(), bias, loop_RK)

    def map_gradient(self, map_RM: Tensor, groups: int) -> list[Tensor]:
        """Of weight and bias."""
        by_row = map_RM.sum(0).view(groups, -1, len(self.map[0]) // groups)
        weight = by_row[:, : self.columns[2]].transpose(1, 2).flatten(0, 1)
        return [weight, by_row[:, self.columns[2] :].flatten()][: len(self.map)]

    def expected(self, graph: KernelGraph, inputs: "Inputs", scale: Tensor | None) -> Tensor:
        """PyG's output, its dropout replaced by ``scale``."""
        ends = (inputs.source, inputs.target if inputs.target.shape[1] else None)
        edge_index, edge_attr = with_loops(graph, inputs.edges)
        edges = () if edge_attr is None else (edge_attr,)
        drop = SimpleNamespace(
            leaky_relu=F.leaky_relu, dropout=lambda alpha, **_: alpha if scale is None else alpha * scale
        )
        with mock.patch.object(gatv2_conv, "F", drop), mock.patch.object(transformer_conv, "F", drop):
            out = self.layer(ends, edge_index, *edges)
        assert isinstance(out, Tensor)
        return out


@dataclass(frozen=True)
class Inputs:
    """Rows of both sides, which take gradients, features of the edges, and the gradient of the scored rows."""

    source: Tensor
    target: Tensor
    edges: Tensor | None
    gradient: Tensor


def make_inputs(case: Case, graph: KernelGraph, seed: int, scored: int, dtype: torch.dtype = torch.float64) -> Inputs:
    source, target, features = case.columns
    count = graph.edge_index.shape[1]
    return Inputs(
        numbers(seed, graph.nodes, source, dtype=dtype).requires_grad_(),
        numbers(seed + 1, graph.nodes, target, dtype=dtype).requires_grad_(),
        numbers(seed + 2, count, features, dtype=dtype) if features else None,
        numbers(seed + 3, scored, WIDTH, dtype=dtype),
    )


def with_loops(graph: KernelGraph, edge_attr: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Edges and their features, those of added self-loops the mean of the others'."""
    if graph.self_loops is SelfLoops.AS_STORED:
        return graph.edge_index, edge_attr
    others = remove_self_loops(graph.edge_index, edge_attr)
    edges: tuple[Tensor, Tensor | None] = add_self_loops(*others, fill_value="mean", num_nodes=graph.nodes)
    return edges


def plant(module: nn.Module, name: str, value: Tensor) -> None:
    """Make ``value`` what the module computes with in place of its parameter."""
    del module._parameters[name]
    setattr(module, name, value)


def leaf(seed: int, *shape: int) -> Tensor:
    return numbers(seed, *shape).requires_grad_()


def gatv2(*, features: int) -> Case:
    att, edge = leaf(90, HEADS, CHANNELS), leaf(91, WIDTH, features) if features else None
    layer = GATv2Conv((WIDTH, WIDTH), CHANNELS, HEADS, bias=False, add_self_loops=False, edge_dim=features or None)
    plant(layer, "att", att[None])
    plant(layer.lin_l, "weight", torch.eye(WIDTH).double())
    plant(layer.lin_r, "weight", torch.eye(WIDTH).double())
    if edge is not None:
        plant(layer.lin_edge, "weight", edge)
    return Case(Gatv2(att, 0.2), layer, source=WIDTH, target=WIDTH, features=features, weight=edge)


def transformer(*, features: int) -> Case:
    edge = leaf(91, WIDTH, features) if features else None
    layer = TransformerConv(
        (2 * WIDTH, WIDTH), CHANNELS, HEADS, bias=False, root_weight=False, edge_dim=features or None
    )
    columns = torch.eye(2 * WIDTH).double().view(HEADS, 2, CHANNELS, 2 * WIDTH)
    plant(layer.lin_key, "weight", columns[:, 0].reshape(WIDTH, -1))
    plant(layer.lin_value, "weight", columns[:, 1].reshape(WIDTH, -1))
    plant(layer.lin_query, "weight", torch.eye(WIDTH).double())
    for linear in (layer.lin_key, layer.lin_value, layer.lin_query):
        linear.bias = None  # PyG before 2.7 has them all the same
    if edge is not None:
        plant(layer.lin_edge, "weight", edge)
    return Case(TransformerAttention(HEADS), layer, source=2 * WIDTH, target=WIDTH, features=features, weight=edge)


def gine() -> Case:
    return Case(Rectified(), GINEConv(nn.Identity()), source=WIDTH, target=0, features=WIDTH)


def gine_through_linear() -> Case:
    lin = nn.Linear(FEATURES, WIDTH).double()
    layer = GINEConv(nn.Linear(WIDTH, WIDTH), edge_dim=FEATURES)
    layer.nn, layer.lin = nn.Identity(), lin
    return Case(Rectified(), layer, source=WIDTH, target=0, features=FEATURES, weight=lin.weight, bias=lin.bias)


def gated() -> Case:
    layer = ResGatedGraphConv((2 * WIDTH, WIDTH), WIDTH, bias=False, root_weight=False)
    columns = torch.eye(2 * WIDTH).double().view(HEADS, 2, CHANNELS, 2 * WIDTH)
    for number, linear in enumerate((layer.lin_query, layer.lin_value)):
        plant(linear, "weight", columns[:, number].reshape(WIDTH, -1))
    plant(layer.lin_key, "weight", torch.eye(WIDTH).double())
    for linear in (layer.lin_key, layer.lin_query, layer.lin_value):
        plant(linear, "bias", torch.zeros(WIDTH).double())
    return Case(functions.gated(HEADS), layer, source=2 * WIDTH, target=WIDTH)


CASES: dict[str, Callable[[], Case]] = {
    "GATv2": lambda: gatv2(features=0),
    "GATv2, edge features": lambda: gatv2(features=FEATURES),
    "Transformer": lambda: transformer(features=0),
    "Transformer, edge features": lambda: transformer(features=FEATURES),
    "GINE": gine,
    "GINE, linear": gine_through_linear,
    "gated sum": gated,
}


@dataclass(frozen=True)
class Pulled:
    """What the kernels make of a case, tiles put together, and gradients of what makes terms of features."""

    rows: tuple[Tensor, Tensor, Tensor]
    of_map: list[Tensor]


def pull(
    case: Case, graph: KernelGraph, inputs: Inputs, height: int, dropout: EdgeDropout | None, workers: int = 1
) -> Pulled:
    function, scored = case.function, len(inputs.gradient)
    source, target, gradient = inputs.source.detach(), inputs.target.detach(), inputs.gradient
    heads = Heads(range(HEADS), dropout) if not isinstance(function, (Product, Rectified)) else None
    edges = {
        direction: inputs.edges if inputs.edges is None else inputs.edges[graph.order(direction)]
        for direction in Direction
    }

    loops = inputs.edges is not None and graph.self_loops is SelfLoops.EXACTLY_ONE
    groups = HEADS if heads is not None else WIDTH

    def carrying(direction: Direction, span: slice, tile: TileEdges) -> TileEdges:
        found = edges[direction]
        return tile if found is None else replace(tile, features_EK=found[span])

    def loop_features(tile: TileEdges) -> Tensor | None:
        mean = LoopFeatures(is_mean=True)
        return mean.of(tile, torch.float64) if loops else None

    def forward(rows: slice, span: slice, tile: TileEdges) -> tuple[Tensor, ...]:
        tile = carrying(Direction.IN, span, tile)
        loop_RK = loop_features(tile)
        reduced = over_edges(
            pull_messages,
            function,
            tile,
            source_NW=source,
            target_RV=target[rows],
            columns=WIDTH,
            terms=case.terms(groups, loop_RK),
            heads=heads,
        )
        above = upstream(gradient[rows], *reduced)
        statistics = gradient[rows] if above.statistics is None else above.statistics
        return reduced[0], above.gradient, statistics, gradient[rows] if loop_RK is None else loop_RK

    value, shared, statistics, loop_NK = by_tiles(graph.tiles(Direction.IN, height, scored), forward, workers=workers)
    above = Upstream(shared, None if heads is None else statistics)
    packs = HEADS if heads is not None else 1
    sizes = (target.shape[1], WIDTH, 0 if above.statistics is None else above.statistics.shape[1])
    layout = TargetLayout(packs, *(columns // packs for columns in sizes), loop=loop_NK.shape[1] if loops else 0)
    packed = layout.pack(target[:scored], above, loop_NK if loops else None)
    of_map: list[Tensor] = []

    def sources(rows: slice, span: slice, tile: TileEdges) -> tuple[Tensor, ...]:
        found = over_edges(
            pull_source_gradients,
            function,
            carrying(Direction.OUT, span, tile),
            source_RW=source[rows],
            target_NP=packed,
            layout=layout,
            terms=case.terms(groups, layout.loops(packed[rows])),
            heads=heads,
        )
        return (found,)

    def targets(rows: slice, span: slice, tile: TileEdges) -> tuple[Tensor, ...]:
        own = Upstream(above.gradient[rows], None if above.statistics is None else above.statistics[rows])
        found, map_RM = over_edges(
            pull_target_gradients,
            function,
            carrying(Direction.IN, span, tile),
            source_NW=source,
            target_RV=target[rows],
            upstream_R=own,
            with_map=bool(case.map),
            terms=case.terms(groups, layout.loops(packed[rows])),
            heads=heads,
        )
        if map_RM is not None:
            of_map.append(map_RM)
        return (found,)

    (d_source,) = by_tiles(graph.tiles(Direction.OUT, height), sources, workers=workers)
    (d_target,) = by_tiles(graph.tiles(Direction.IN, height, scored), targets, workers=workers)
    return Pulled((value, d_source, d_target), case.map_gradient(torch.cat(of_map), groups) if case.map else [])


@pytest.mark.parametrize("name", CASES)
@given(
    st.data(),
    st.integers(0, 999),
    HEIGHTS,
    PIECES,
    st.integers(0, 11),
    st.sampled_from([None, 0.4]),
)
@settings(max_examples=examples(12), deadline=None)
def test_output_and_gradients_are_pyg_s(
    name: str, data: st.DataObject, seed: int, height: int, edges_per_piece: int, unscored: int, p: float | None
) -> None:
    """Of both sides' rows, in either direction, also where only some leading rows are scored."""
    case = CASES[name]()
    graph = data.draw(graphs())
    scored = max(1, graph.nodes - unscored)
    inputs = make_inputs(case, graph, seed, scored)
    drops = not isinstance(case.function, (Product, Rectified))
    dropout = EdgeDropout(p, 1, 2, 3) if p is not None and drops else None
    scale = None if dropout is None else scale_of_edges(dropout, with_loops(graph)[0], range(HEADS))
    out = case.expected(graph, inputs, scale).reshape(graph.nodes, WIDTH)[:scored]
    wanted = [inputs.source, inputs.target, *case.map]
    expected = torch.autograd.grad(out, wanted, inputs.gradient, allow_unused=True) if out.requires_grad else []
    with small_pieces(edges_per_piece):
        found = pull(case, graph, inputs, height, dropout)
    value, d_source, d_target = found.rows
    torch.testing.assert_close(value, out.detach(), **CLOSE)
    reference = [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, expected, strict=True)]
    torch.testing.assert_close(d_source, reference[0], **CLOSE)
    torch.testing.assert_close(d_target, reference[1][:scored], **CLOSE)
    for one, other in zip(found.of_map, reference[2:], strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


@pytest.mark.parametrize("name", CASES)
@given(st.data(), st.integers(0, 999), HEIGHTS, PIECES)
@settings(max_examples=examples(5), deadline=None)
def test_tiles_and_threads_change_no_bit(
    name: str, data: st.DataObject, seed: int, height: int, edges_per_piece: int
) -> None:
    """Where messages and scores are elementwise, so are all results of rows; terms of features are as good."""
    case = CASES[name]()
    graph = data.draw(graphs())
    inputs = make_inputs(case, graph, seed, graph.nodes)
    with small_pieces(edges_per_piece):
        whole = pull(case, graph, inputs, graph.nodes, None)
        for one, other in zip(whole.rows, pull(case, graph, inputs, height, None, 3).rows, strict=True):
            assert torch.equal(one, other)


@given(graphs(), st.integers(0, 999), st.booleans())
@settings(max_examples=examples(20), deadline=None)
def test_gradients_of_parameters_row_by_row(graph: KernelGraph, seed: int, drops: bool) -> None:
    """Where targets bring GATv2's vectors along, the gradients of every row's add up to those of the vectors."""
    case = gatv2(features=0)
    inputs = make_inputs(case, graph, seed, graph.nodes)
    dropout = EdgeDropout(0.4, 1, 2, 3) if drops else None
    expected = pull(case, graph, inputs, graph.nodes, dropout)
    heads = Heads(range(HEADS), dropout)
    ((rows, _, tile),) = graph.tiles(Direction.IN, graph.nodes)
    source, target = inputs.source.detach(), inputs.target.detach()
    edges = EdgeMessages(case.function, tile, heads=heads)
    reduced = pull_messages(edges, source_NW=source, target_RV=target[rows], columns=WIDTH)
    above = upstream(inputs.gradient, *reduced)
    assert isinstance(case.function, Gatv2)
    att = case.function.att_HC.detach().expand(graph.nodes, HEADS, CHANNELS)
    brought = torch.cat((target.view(-1, HEADS, CHANNELS), att), dim=2).flatten(1)
    found, _ = pull_target_gradients(edges, source_NW=source, target_RV=brought, upstream_R=above)
    d_target, d_att = found.view(-1, HEADS, 2 * CHANNELS).chunk(2, dim=2)
    torch.testing.assert_close(d_target.flatten(1), expected.rows[2], **CLOSE)
    scale = None if dropout is None else scale_of_edges(dropout, with_loops(graph)[0], range(HEADS))
    out = case.expected(graph, inputs, scale).reshape(graph.nodes, WIDTH)
    if out.requires_grad:
        (wanted,) = torch.autograd.grad(out, [case.function.att_HC], inputs.gradient, allow_unused=True)
        torch.testing.assert_close(d_att.sum(0), torch.zeros_like(d_att[0]) if wanted is None else wanted, **CLOSE)
