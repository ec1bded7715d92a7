# SPDX-License-Identifier: Apache-2.0
"""What pulls on a GPU allocate for a tile stays within the bounds that admission is given, and not far below them.

Launches are left out: a program allocates nothing, and Triton's interpreter would.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from ooc.kernels import memory
from ooc.kernels.edge_terms import LoopFeatures
from ooc.kernels.edges import SelfLoops, TileEdges
from ooc.kernels.functions import Gatv2, Rectified, TransformerAttention
from ooc.kernels.gat import SOURCE_SCALARS, TARGET_SCALARS, GatHeads
from ooc.kernels.pulls import BY_DEVICE
from ooc.model.layers.edge_functions import NO_TERM, EdgeTerm, FunctionAttention, FunctionSum
from ooc.model.layers.per_edge import AttentionOptions, EdgeAggregate
from ooc.model.lowering.values import Features
from tests.gpu.device import cut, edge_function, gat, launch, maximum, sums
from tests.kernels.test_kernel_memory import peak_bytes, torch_peak_bytes

pytestmark = pytest.mark.gpu

ROWS, HEADS, CHANNELS = 256, 4, 16
WIDTH = HEADS * CHANNELS
NEARLY_LONG = 511
DEGREES = [0, 2, 20, NEARLY_LONG, 513, 1500]
"""Of every row, or of one row as much as all: where rows have no parts, and where they have as many as can be."""


class Nothing:
    """A program that is not launched."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *arguments, **options: None


@pytest.fixture(autouse=True)
def nothing_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (edge_function, gat, launch, maximum, sums):
        for name, program in vars(module).items():
            if hasattr(program, "arg_names"):  # of Triton, compiled or interpreted
                monkeypatch.setattr(module, name, Nothing())


def tile(degree: int, *, hub: bool) -> TileEdges:
    edges = ROWS * degree
    offsets = torch.arange(ROWS + 1) * degree
    if hub:
        offsets[1:] = edges
    made = TileEdges(torch.zeros(edges, dtype=torch.int32), offsets.int(), 0, ROWS, SelfLoops.EXACTLY_ONE)
    return replace(made, parts_P2=cut(made)[0])


def listed_bytes(edges: TileEdges) -> int:
    """Of the list that the tile brings."""
    assert edges.parts_P2 is not None
    return edges.parts_P2.nbytes


def rows(columns: int) -> Tensor:
    return torch.zeros(ROWS, columns)


def is_within(taken: int, bound: int, least: float, *, degree: int, hub: bool) -> bool:
    """And not far below, unless no row of many edges is long: the bound cannot know."""
    return taken <= bound and (taken > bound / least or (degree == NEARLY_LONG and not hub))


def bound_of(edges: int, bounds: tuple[int, int, int]) -> int:
    """What the planner makes of a kernel's bounds."""
    at_once, per_edge, per_row = bounds
    return (min(edges, at_once) + ROWS) * per_edge + ROWS * per_row


LAYER = GatHeads(range(HEADS), 0.2)
SOURCE, TARGET = rows(WIDTH + SOURCE_SCALARS * HEADS), rows(WIDTH + TARGET_SCALARS * HEADS)
SCORES = rows(2 * HEADS)[:, ::2]
PLAIN, SHARES = rows(WIDTH), rows(2 * WIDTH)
OF_GAT = memory.gat(heads=HEADS, slices=1, channels=CHANNELS, itemsize=4, dropout=False)
ATTENTION = memory.EVERY_EDGE, *OF_GAT.on_device
MAXIMUM = memory.EVERY_EDGE, *memory.maximum(columns=WIDTH, itemsize=4).on_device

CALLS: dict[str, tuple[Callable[[TileEdges], Tensor], tuple[int, int, int]]] = {
    "attend": (lambda tile: gat.attend(LAYER, tile, source_NS=SOURCE, a_dst_RG=SCORES, keep=True), ATTENTION),
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
    taken = peak_bytes(lambda: call(edges)) + listed_bytes(edges)
    bound = bound_of(edges.indices_E.numel(), bounds)
    assert is_within(taken, bound, 6, degree=degree, hub=hub), (taken, bound)


class Key:
    """What masks are drawn for."""

    seed = epoch = 0


FEATURES = 5
LINEAR = nn.Linear(FEATURES, WIDTH)
TERM = EdgeTerm(FEATURES, CHANNELS, lambda: (LINEAR.weight, LINEAR.bias), (LINEAR.weight, LINEAR.bias))
LOOPS = replace(TERM, loops=LoopFeatures(is_mean=True))
OF_A_COLUMN = replace(TERM, columns=1)
OPTIONS = AttentionOptions(HEADS, CHANNELS, SelfLoops.EXACTLY_ONE, 0.0, 0)
ATT = nn.Parameter(torch.zeros(1, HEADS, CHANNELS))


def gatv2(term: EdgeTerm = NO_TERM) -> EdgeAggregate:
    source, target = Features(0, WIDTH), Features(1, WIDTH)

    def functions(groups: range) -> Gatv2:
        return Gatv2(ATT.detach()[0, groups.start : groups.stop], 0.2)

    return FunctionAttention(2, source, target, options=OPTIONS, functions=functions, att=ATT, term=term, keep=True)


AGGREGATES: dict[str, Callable[[], EdgeAggregate]] = {
    "GATv2": gatv2,
    "GATv2, features, self-loops": lambda: gatv2(LOOPS),
    "Transformer, features": lambda: FunctionAttention(
        2,
        Features(0, 2 * WIDTH),
        Features(1, WIDTH),
        options=OPTIONS,
        functions=lambda groups: TransformerAttention(len(groups)),
        term=TERM,
        keep=True,
    ),
    "GINE": lambda: FunctionSum(
        1, Features(0, WIDTH), channels=1, functions=lambda groups: Rectified(), term=OF_A_COLUMN, keep=True
    ),
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
    assert is_within(max(taken) + listed_bytes(edges), bound, 6, degree=degree, hub=hub), (taken, bound)


@pytest.mark.parametrize("hub", [False, True])
@pytest.mark.parametrize("degree", DEGREES)
def test_sums(degree: int, hub: bool) -> None:
    edges = tile(degree, hub=hub)
    edges = replace(edges, self_loops=SelfLoops.AS_STORED)
    taken = torch_peak_bytes(lambda: sums.pull_tile(edges, PLAIN)) + listed_bytes(edges)
    parts = memory.sums(4).nbytes(edges=edges.indices_E.numel(), columns=WIDTH)
    bound = parts + ROWS * WIDTH * 4  # the result is counted among the stage's
    assert is_within(taken, bound, 3, degree=degree, hub=hub), (taken, bound)


@pytest.mark.parametrize(
    ("rows", "edges"), [(1, 0), (1, 512), (1, 513), (3, 1600), (256, 0), (256, 5000), (9, 600_000)]
)
def test_the_list_of_parts_of_any_tile(rows: int, edges: int) -> None:
    """One hub, or as many rows that are barely long as there can be."""
    offsets = torch.tensor([0] * rows + [edges]), torch.arange(0, edges + 513, 513)
    for offsets_R1 in offsets:
        tile = TileEdges(torch.zeros(int(offsets_R1[-1]), dtype=torch.int32), offsets_R1, 0, ROWS)
        bound = memory.sums(4).nbytes(edges=tile.indices_E.numel(), columns=0)
        parts, _ = cut(tile)
        assert parts.nbytes <= bound
        assert parts.nbytes >= bound / 3 or not len(parts)
