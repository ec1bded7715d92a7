# SPDX-License-Identifier: Apache-2.0
"""What running a layer of unknown insides allocates stays within the bound that trying it has told, and near it."""

import copy
import math
import tracemalloc
from collections.abc import Callable
from functools import cache
from itertools import cycle, product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GENConv, MessagePassing, PNAConv, ResGatedGraphConv, SAGEConv
from torch_geometric.nn.aggr import GraphMultisetTransformer

from ooc.kernels.dropout.edges import EdgeDropout
from ooc.kernels.dropout.opaque import Dropped, DroppedRows, InnerDropout
from ooc.kernels.edges import Retained, Spare, TileEdges
from ooc.kernels.neighbourhood import neighbourhood
from ooc.model.layers.conformance import Watch, probe_layer
from ooc.model.layers.layer import Graph, layer_of, sharing
from ooc.model.layers.opaque import Opaque
from ooc.model.layers.per_edge import Pulling
from ooc.model.lowering.projection import Linear
from ooc.model.lowering.values import Features
from tests.exactness.layers import MlpMessages
from tests.exactness.test_inner_dropout import OfCoefficients, OfMessages, OfNodes
from tests.examples import ordinary
from tests.kernels.test_kernel_memory import peak_bytes

ROWS, NODES, WIDTH = 128, 4096, 32


class BothEnds(MessagePassing):
    """A network of both ends of an edge, which may be of two types."""

    def __init__(self, sources: int, targets: int) -> None:
        super().__init__(aggr="max")
        self.lin = nn.Linear(sources + targets, WIDTH)

    def forward(self, x: Any, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.lin(torch.cat((x_i, x_j), dim=-1)).relu()


class Key:
    """What masks are drawn for."""

    seed = epoch = 0


def general(conv: MessagePassing) -> Opaque:
    """``conv`` as the trainer runs it, on rows that have a gradient."""
    source = Linear(1, Features(0, WIDTH), nn.Parameter(torch.randn(WIDTH, WIDTH)))
    layer, _ = layer_of(conv, "Layer", [source, Graph()], {})
    module = sharing(conv, "Layer")
    findings = probe_layer(layer, module, edge_features=0, dtype=torch.float32, record=True)
    return Opaque(2, source, layer, module, findings, site=1, keep=True, most_edges=0, all_edges=math.inf)


LAYERS: dict[str, Callable[[], MessagePassing]] = {
    "an MLP on edges, softmax": lambda: MlpMessages(WIDTH, WIDTH, "softmax"),
    "ResGatedGraphConv": lambda: ResGatedGraphConv(WIDTH, WIDTH),
    "PNAConv": lambda: PNAConv(
        WIDTH, WIDTH, ["mean", "std", "max"], ["identity", "linear"], torch.tensor([1, 4, 2]), towers=2
    ),
    "GENConv": lambda: GENConv(WIDTH, WIDTH, norm=None),
    "dropout of nodes": lambda: OfNodes(WIDTH, WIDTH),
    "dropout of messages": lambda: OfMessages(WIDTH, WIDTH),
    "dropout of coefficients": lambda: OfCoefficients(WIDTH, WIDTH, "removed, added"),
}


@cache
def known(name: str) -> Opaque:
    """That of a layer's name, tried once."""
    return general(LAYERS[name]())


@pytest.mark.parametrize(
    ("name", "degree"), ordinary(product(LAYERS, (2, 40)), *zip(LAYERS, cycle((2, 40)), strict=False))
)
def test_bounds(name: str, degree: int) -> None:
    """Forward and backward, on rows of few neighbours and of many; torch's own account."""
    aggregate = known(name)
    generator = torch.Generator().manual_seed(0)
    indices = torch.randint(0, NODES, (ROWS, degree), generator=generator).sort().values.view(-1).int()
    tile = TileEdges(indices, torch.arange(ROWS + 1, dtype=torch.int32) * degree, 0, NODES)
    source = torch.randn(NODES, WIDTH, generator=generator)
    gradient = torch.randn(ROWS, aggregate.columns, generator=generator)
    pull = aggregate.per_edge(Pulling.TARGETS, WIDTH, "dp", source.element_size())
    edges = ROWS * degree
    bound = min(edges, pull.edges_at_once) * pull.bytes_per_edge + ROWS * pull.bytes_per_row
    bound += (edges + ROWS) * pull.waiting_bytes_per_edge
    forward = peak_bytes(lambda: aggregate.forward(Key(), tile, source, source[:ROWS], range(1)))
    backward = peak_bytes(lambda: aggregate.backward_targets(Key(), tile, source, gradient, range(1)))
    assert forward <= bound and bound / 5 <= backward <= bound, (forward, backward, bound)


@pytest.mark.parametrize(("of_targets", "degree"), [(WIDTH, 2), (WIDTH, 40), (2 * WIDTH, 2), (WIDTH // 4, 40)])
def test_bounds_of_two_types(of_targets: int, degree: int) -> None:
    """Rows of targets beside those of sources, as wide as these or not."""
    source, target = (Linear(1, Features(0, c), nn.Parameter(torch.randn(c, c))) for c in (WIDTH, of_targets))
    target.space = "targets"
    conv = BothEnds(WIDTH, of_targets)
    layer, _ = layer_of(conv, "Layer", [(source, target), Graph()], {})
    module = sharing(conv, "Layer")
    findings = probe_layer(layer, module, edge_features=0, dtype=torch.float32, record=True)
    options: dict[str, Any] = {"site": 1, "keep": True, "most_edges": 0, "all_edges": math.inf}
    aggregate = Opaque(2, source, layer, module, findings, target=target, **options)
    indices = torch.randint(0, NODES, (ROWS, degree)).sort().values.view(-1).int()
    tile = TileEdges(indices, torch.arange(ROWS + 1, dtype=torch.int32) * degree, 0, NODES)
    rows, own = torch.randn(NODES, WIDTH), torch.randn(ROWS, of_targets)
    brought = torch.cat((torch.randn(ROWS, aggregate.columns), own), dim=1)
    pull = aggregate.per_edge(Pulling.TARGETS, of_targets, "dp", rows.element_size())
    bound = min(len(indices), pull.edges_at_once) * pull.bytes_per_edge + ROWS * pull.bytes_per_row
    bound += (len(indices) + ROWS) * pull.waiting_bytes_per_edge
    forward = peak_bytes(lambda: aggregate.forward(Key(), tile, rows, own, range(1)))
    backward = peak_bytes(lambda: aggregate.backward_targets(Key(), tile, rows, brought, range(1)))
    assert forward <= bound and bound / 5 <= backward <= bound, (forward, backward, bound)


@pytest.mark.parametrize(
    ("name", "run_bytes"),
    [("an MLP on edges, softmax", 8 << 20), ("dropout of nodes", 12 << 20)],
    ids=["most is made for edges", "most is made for nodes"],
)
def test_runs_of_small_graphs_have_more_edges(name: str, run_bytes: int) -> None:
    """Where all edges take so little memory that nobody lacks it; those of links are not counted, nor a device's."""
    made = copy.copy(known(name))
    of_edge = made.temporaries(4)[1]
    found = []
    for edges in (1, (512 << 20) // of_edge, (512 << 20) // of_edge + 1, math.inf):
        made.all_edges = edges
        found.append((made.edges_at_once(on_device=False), made.edges_at_once(on_device=True)))
    usual, on_device = run_bytes // of_edge, (64 << 20) // of_edge
    assert found == [((16 << 20) // of_edge, on_device)] * 2 + [(usual, on_device)] * 2


def test_rows_of_few_and_of_many_edges() -> None:
    """Where each has room for the edges of any, those of as many are run together."""
    aggregate = general(SAGEConv(WIDTH, WIDTH, aggr=GraphMultisetTransformer(WIDTH, k=2)))
    degrees = torch.ones(ROWS, dtype=torch.int32).index_fill(0, torch.arange(9, ROWS, 20), 600)
    offsets = torch.cat((degrees.new_zeros(1), degrees.cumsum(0, dtype=torch.int32)))
    indices = torch.cat([torch.randint(0, NODES, (int(degree),)).sort().values for degree in degrees]).int()
    tile, source = TileEdges(indices, offsets, 0, NODES), torch.randn(NODES, WIDTH)
    pull = aggregate.per_edge(Pulling.TARGETS, WIDTH, "dp", source.element_size())
    bound = pull.edges_at_once * pull.bytes_per_edge + ROWS * pull.bytes_per_row
    bound += (len(indices) + ROWS) * pull.waiting_bytes_per_edge
    gradient = torch.randn(ROWS, aggregate.columns)
    assert peak_bytes(lambda: aggregate.backward_targets(Key(), tile, source, gradient, range(1))) <= bound


@pytest.mark.parametrize("name", LAYERS)
def test_what_is_retained(name: str) -> None:
    """What a forward pass leaves for the backward pass takes no more than it has been given."""
    aggregate, spare = known(name), Spare(1 << 40)
    indices = torch.randint(0, NODES, (ROWS, 20)).sort().values.view(-1).int()
    tile = TileEdges(indices, torch.arange(ROWS + 1, dtype=torch.int32) * 20, 0, NODES, retained=Retained(spare))
    source = torch.randn(NODES, WIDTH)
    saved = dict[int, int]()

    def note(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        aggregate.forward(Key(), tile, source, source[:ROWS], range(1))
    taken = (1 << 40) - spare.left
    assert sum(saved.values()) <= taken <= 8 * sum(saved.values())
    aggregate.backward_targets(Key(), tile, source, torch.randn(ROWS, aggregate.columns), range(1))
    assert 16 * len(indices) < (1 << 40) - spare.left <= 24 * len(indices)  # the graphs of runs


@pytest.mark.parametrize("columns", [1, 64])
@pytest.mark.parametrize("rows", [rows for rows in DroppedRows if rows is not DroppedRows.TARGETS])
def test_masks(rows: DroppedRows, columns: int) -> None:
    """What drawing a mask takes outside of torch, by Python's account, is within its bound and near it."""
    indices = torch.randint(0, NODES, (ROWS, 40)).sort().values.view(-1).int()
    near = neighbourhood(TileEdges(indices, torch.arange(ROWS + 1, dtype=torch.int32) * 40, 0, NODES), NODES)
    heights = {
        DroppedRows.NODES: ROWS + len(near.others_S),
        DroppedRows.SOURCES: len(near.others_S),
        DroppedRows.EDGES: len(indices),
        DroppedRows.OTHER_EDGES: int((near.edge_index_2E[0] != near.edge_index_2E[1]).sum()),
    }
    heights[DroppedRows.EDGES_AND_LOOPS] = heights[DroppedRows.EDGES] + heights[DroppedRows.NODES]
    heights[DroppedRows.OTHER_EDGES_AND_LOOPS] = heights[DroppedRows.OTHER_EDGES] + heights[DroppedRows.NODES]
    values, dropped = torch.ones(heights[rows], columns), Dropped(rows, columns)
    tracemalloc.start()
    try:
        with InnerDropout(near, [dropped], lambda call, p: EdgeDropout(p, 1, 1, 1), "Layer"):
            F.dropout(values, 0.5)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= len(values) * dropped.row_nbytes <= 4 * peak


def test_what_operators_make_is_counted_while_it_lives() -> None:
    """And what was there before is not."""
    given = torch.zeros(1000)

    def compute() -> Tensor:
        one = given + 1
        two = one + 1
        del one
        return two + given.view(10, 100).view(-1)

    assert Watch.of(compute, [given]).peak_bytes == 2 * given.nbytes


def test_copies_share_what_a_convolution_knows_of_its_functions() -> None:
    """Which takes longer to copy than all the rest of it; tensors they share as well, and nothing else."""
    conv = MlpMessages(WIDTH, WIDTH)
    copied = sharing(conv, "Layer")
    assert copied.inspector is conv.inspector
    assert all(one is other for one, other in zip(copied.parameters(), conv.parameters(), strict=True))
    assert all(one is not other for one, other in zip(copied.modules(), conv.modules(), strict=True))
