# SPDX-License-Identifier: Apache-2.0
"""What pulls on a GPU allocate for a tile stays within the bounds that admission is given, and not far below them.

Launches are left out: a program allocates nothing, and Triton's interpreter would.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from ooc.train.kernels.cuda import memory
from ooc.train.kernels.edge_terms import Filling, LoopFeatures
from ooc.train.kernels.edges import SelfLoops, TileEdges
from ooc.train.kernels.gat import SOURCE_SCALARS, TARGET_SCALARS, GatHeads
from ooc.train.kernels.pulls import BY_DEVICE
from ooc.train.lowering.edge_functions import DotAttention, EdgeSum, EdgeTerm, Gatv2Attention
from ooc.train.lowering.per_edge import AttentionOptions, EdgeAggregate
from ooc.train.lowering.values import Features
from tests.gpu.device import cut, cutting, edge_function, edge_sum, gat, launch, maximum, sums
from tests.train.test_kernel_memory import peak_bytes, torch_peak_bytes

pytestmark = pytest.mark.gpu

ROWS, HEADS, CHANNELS = 256, 4, 16
WIDTH = HEADS * CHANNELS
DEGREES = [0, 2, 20, 511, 513, 1500]
"""Of every row, or of one row as much as all: where rows have no parts, and where they have as many as can be."""


class Nothing:
    """A program that is not launched."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *arguments, **options: None


@pytest.fixture(autouse=True)
def nothing_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (cutting, edge_function, edge_sum, gat, launch, maximum, sums):
        for name, program in vars(module).items():
            if hasattr(program, "arg_names"):  # of Triton, compiled or interpreted
                monkeypatch.setattr(module, name, Nothing())


def tile(degree: int, *, hub: bool) -> TileEdges:
    edges = ROWS * degree
    offsets = torch.arange(ROWS + 1) * degree
    if hub:
        offsets[1:] = edges
    return TileEdges(torch.zeros(edges, dtype=torch.int32), offsets.int(), 0, ROWS, SelfLoops.EXACTLY_ONE)


def rows(columns: int) -> Tensor:
    return torch.zeros(ROWS, columns)


def bound_of(edges: int, bounds: tuple[int, int, int]) -> int:
    """What the planner makes of a kernel's bounds."""
    at_once, per_edge, per_row = bounds
    return (min(edges, at_once) + ROWS) * per_edge + ROWS * per_row


LAYER = GatHeads(range(HEADS), 0.2)
SOURCE, TARGET = rows(WIDTH + SOURCE_SCALARS * HEADS), rows(WIDTH + TARGET_SCALARS * HEADS)
SCORES = rows(2 * HEADS)[:, ::2]
PLAIN, SHARES = rows(WIDTH), rows(2 * WIDTH)
ATTENTION = memory.attention(heads=HEADS, channels=CHANNELS, itemsize=4)
MAXIMUM = memory.maximum(columns=WIDTH, itemsize=4)

CALLS: dict[str, tuple[Callable[[TileEdges], Tensor], tuple[int, int, int]]] = {
    "attend": (lambda tile: gat.attend(LAYER, tile, source_NS=SOURCE, a_dst_RH=SCORES, keep=True), ATTENTION),
    "attend, backward": (lambda tile: gat.pull_sources(LAYER, tile, target_NS=TARGET, source_RS=SOURCE), ATTENTION),
    "maxima": (lambda tile: maximum.pull_maxima(tile, PLAIN, keep=True), MAXIMUM),
    "maxima, backward": (lambda tile: maximum.pull_sources(tile, target_NK=SHARES, source_RW=PLAIN), MAXIMUM),
}


@pytest.mark.parametrize("hub", [False, True])
@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("name", CALLS)
def test_attention_and_maxima(name: str, degree: int, hub: bool) -> None:
    call, bounds = CALLS[name]
    edges = tile(degree, hub=hub)
    taken = peak_bytes(lambda: call(edges))
    bound = bound_of(edges.indices_E.numel(), bounds)
    assert bound / 6 < taken <= bound


class Key:
    """What masks are drawn for."""

    seed = epoch = 0


FEATURES = 5
LINEAR = nn.Linear(FEATURES, WIDTH)
TERM = EdgeTerm(FEATURES, CHANNELS, lambda: (LINEAR.weight, LINEAR.bias), (LINEAR.weight, LINEAR.bias))
LOOPS = replace(TERM, loops=LoopFeatures(Filling.MEAN))
OF_A_COLUMN = replace(TERM, columns=1)
OPTIONS = AttentionOptions(HEADS, CHANNELS, SelfLoops.EXACTLY_ONE, 0.0, 0)
ATT = nn.Parameter(torch.zeros(1, HEADS, CHANNELS))


def gatv2(term: EdgeTerm | None) -> EdgeAggregate:
    source, target = Features(0, WIDTH), Features(1, WIDTH)
    return Gatv2Attention(2, source, target, OPTIONS, att=ATT, negative_slope=0.2, term=term, keep=True)


AGGREGATES: dict[str, Callable[[], EdgeAggregate]] = {
    "GATv2": lambda: gatv2(None),
    "GATv2, features, self-loops": lambda: gatv2(LOOPS),
    "Transformer, features": lambda: DotAttention(
        2, Features(0, 2 * WIDTH), Features(1, WIDTH), OPTIONS, term=TERM, keep=True
    ),
    "GINE": lambda: EdgeSum(1, Features(0, WIDTH), OF_A_COLUMN, keep=True),
}


@pytest.mark.parametrize("hub", [False, True])
@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("name", AGGREGATES)
def test_edge_functions(name: str, degree: int, hub: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, with what is put together around the kernels."""
    monkeypatch.setitem(BY_DEVICE, "cpu", BY_DEVICE["cuda"])
    aggregate, edges = AGGREGATES[name](), tile(degree, hub=hub)
    count = edges.indices_E.numel()
    edges = replace(edges, features_EK=torch.zeros(count, FEATURES))
    target = rows(aggregate.target.columns if aggregate.target is not None else 0)
    source, dp = rows(aggregate.source.columns), rows(aggregate.upstream_columns)
    groups = range(aggregate.groups)
    bound = bound_of(count, aggregate.device_temporaries(4))
    taken = [
        peak_bytes(lambda: aggregate.forward(Key(), edges, source, target, groups)),
        peak_bytes(lambda: aggregate.backward_sources(Key(), edges, dp, source, groups)),
        peak_bytes(lambda: aggregate.backward_targets(Key(), edges, source, dp, groups)),
    ]
    assert bound / 6 < max(taken) <= bound, (taken, bound)


@pytest.mark.parametrize("hub", [False, True])
@pytest.mark.parametrize("degree", DEGREES)
def test_sums(degree: int, hub: bool) -> None:
    edges = tile(degree, hub=hub)
    taken = peak_bytes(lambda: sums.pull(PLAIN, edges.indices_E, edges.offsets_R1))
    parts = memory.sums(4).nbytes(edges=edges.indices_E.numel(), rows=ROWS, columns=WIDTH)
    bound = parts + ROWS * WIDTH * 4  # the result is counted among the stage's
    assert bound / 3 < taken <= bound


@pytest.mark.parametrize(
    ("rows", "edges"), [(1, 0), (1, 512), (1, 513), (3, 1600), (256, 0), (256, 5000), (9, 600_000)]
)
def test_the_cut_of_any_tile(rows: int, edges: int) -> None:
    """However few rows there are, to the byte."""
    offsets = torch.tensor([0] * rows + [edges], dtype=torch.int32)
    taken = torch_peak_bytes(lambda: cut(offsets, edges))
    bound = memory.sums(4).nbytes(edges=edges, rows=rows, columns=0)
    assert bound / 4 < taken <= bound
