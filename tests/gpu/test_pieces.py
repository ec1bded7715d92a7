# SPDX-License-Identifier: Apache-2.0
"""Edges that come in pieces, which begin and end within long rows, give the bits that all of them together give."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ooc.engine import pull_run
from ooc.engine.pull_run import EdgeSweep
from ooc.kernels import maximum as processor_maximum
from ooc.kernels.cuda.carried import Carried
from ooc.kernels.cuda.segments import long_parts
from ooc.kernels.deferred_checks import DeferredChecks, Fault
from ooc.kernels.dropout.edges import EdgeDropout
from ooc.kernels.edge_terms import LoopFeatures
from ooc.kernels.edges import SelfLoops, TileEdges
from ooc.kernels.gat import GatHeads, upstream
from ooc.plan.program.sequence import Step
from ooc.plan.workload import Direction, EdgeData, Pull
from tests.examples import examples, ordinary, thorough
from tests.gpu.device import DEVICE, INTERPRETED, edge_function, edge_terms, gat, maximum, same_bits, sized, sums
from tests.gpu.test_edge_functions import CASES, Pulled, Rows, graph_for, moved
from tests.kernels.kernel_cases import KernelGraph, graphs, numbers, over_edges

pytestmark = pytest.mark.gpu

MOST = 3
"""Edges of a part."""
PIECE = 5
"""That a step is for: it may have two more."""
HUB = [0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 3, 3, 3, 4, 5, 6, 6]
"""Neighbours of one row: some so often that a piece has no other."""
ENDS = [*((one, 3) for one in HUB), (1, 0), (2, 2), (2, 2), *((0, row) for row in (5, 5, 5, 5)), (4, 1), (6, 6)]
GRAPH = KernelGraph(7, torch.tensor(ENDS).t().contiguous())
"""Rows without edges, a hub between others, and in the other direction two more."""


class OneArray:
    """What there is of edges, [E, columns]."""

    def __init__(self, values_EC: Tensor) -> None:
        self.values_EC = values_EC
        self.opened = range(0)

    def open(self, first: int, last: int) -> None:
        self.opened = range(first, last)

    def tile(self, first: int, last: int) -> Tensor:
        assert self.opened.start <= first <= last <= self.opened.stop
        return self.values_EC[first:last]


def pieces(tile: TileEdges, edges: int, most: int = MOST, checks: DeferredChecks | None = None) -> Iterator[TileEdges]:
    """The edges of all rows as a sweep over them takes them, in steps for so many."""
    offsets, arrays = tile.offsets_R1.cpu().numpy(), {"in-edges": tile.indices_E[:, None]}
    features, data = tile.features_EK, tuple[EdgeData, ...]()
    if features is not None:
        arrays["in-features"], data = features, (EdgeData.FEATURES,)
    runtime: Any = SimpleNamespace(
        rows=SimpleNamespace(offsets={Direction.IN: offsets}, parts={Direction.IN: long_parts(offsets, 0, most)}),
        store=SimpleNamespace(neighbours=lambda name: tile.nodes),
        retained={},
        kept={},
        checks={Direction.IN: checks},
        matrices=arrays,
        workspace=None,
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pull_run, "EDGES_PER_SEGMENT", most)
        patched.setattr(pull_run, "Input", lambda array, *_, **__: OneArray(array))
        sweep = EdgeSweep(runtime, Pull("x", "p", Direction.IN, edge_data=data))
        for first in range(0, len(tile.indices_E), edges):
            step = Step(0, 0, 0, tile.rows, range(first, min(first + edges, len(tile.indices_E))))
            rows, taken = sweep.open(step)
            assert taken is not None and len(taken) < edges + most
            if rows:
                yield replace(sweep.take(rows.start, rows.stop, taken), self_loops=tile.self_loops)


def put_together(tile: TileEdges, edges: int, most: int, pull: Callable[[TileEdges, slice], Any]) -> list[Tensor]:
    """What ``pull`` gives for every row that a piece ends."""
    found: list[list[Tensor]] = []
    ended = 0
    for piece in pieces(tile, edges, most):
        results = pull(piece, slice(piece.start, piece.start + piece.rows))
        whole = piece.rows - (int(piece.offsets_R1[-1]) > piece.indices_E.numel())
        assert piece.start == ended
        ended += whole
        some = [one for one in (results if isinstance(results, tuple) else (results,)) if one is not None]
        found.append([one[:whole] for one in some])
    assert ended == tile.rows
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


def check(tile: TileEdges, pull: Callable[[TileEdges, slice], Any], edges: int = PIECE, most: int = MOST) -> None:
    tile = moved(tile)
    whole = sized(pull, tile, slice(0, tile.rows), most=most)
    found = put_together(tile, edges, most, lambda piece, rows: sized(pull, piece, rows, most=most))
    expected = [one for one in (whole if isinstance(whole, tuple) else (whole,)) if one is not None]
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert same_bits(one, other)


def tile_of(graph: KernelGraph, direction: Direction) -> TileEdges:
    _, _, tile = next(graph.tiles(direction, graph.nodes))
    return tile


@given(graphs(), st.integers(3, 9), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 99))
@settings(max_examples=examples(4 if INTERPRETED else 24), deadline=None)
def test_sums_of_any_graph(graph: KernelGraph, edges: int, dtype: torch.dtype, seed: int) -> None:
    """Rounded once, each with its self-loop where there is one."""
    assume(graph.edge_index.numel())  # a step without edges is one
    source = numbers(seed, graph.nodes, 2, dtype=dtype).to(DEVICE)
    check(tile_of(graph, Direction.IN), lambda tile, rows: sums.pull_tile(tile, source), edges)


@pytest.mark.parametrize(
    ("direction", "self_loops"),
    ordinary(
        product([Direction.IN, Direction.OUT], SelfLoops),
        *((Direction.IN, SelfLoops.EXACTLY_ONE), (Direction.OUT, SelfLoops.AS_STORED)),
    ),
)
def test_maxima(self_loops: SelfLoops, direction: Direction) -> None:
    tile = tile_of(replace(GRAPH, self_loops=self_loops), direction)
    source = numbers(1, GRAPH.nodes, 3).mul(2).round().to(DEVICE)
    check(tile, lambda tile, rows: maximum.pull_maxima(tile, source, keep=True))
    kept = sized(maximum.pull_maxima, moved(tile), source, keep=True)
    shares = processor_maximum.upstream(numbers(2, GRAPH.nodes, 3).to(DEVICE), kept)
    check(tile, lambda tile, rows: maximum.pull_sources(tile, target_NK=shares, source_RW=source[rows]))


@pytest.mark.parametrize(("p", "self_loops"), [(0.0, SelfLoops.EXACTLY_ONE), (0.4, SelfLoops.AS_STORED)])
def test_attention(p: float, self_loops: SelfLoops) -> None:
    """With masks that go by how often an edge is repeated."""
    heads, channels = GatHeads(range(2), 0.2, EdgeDropout(p, 7, 1, 0) if p else None), 3
    graph = replace(GRAPH, self_loops=self_loops)
    source, a_dst = numbers(1, 7, 2 * (channels + 1)).to(DEVICE), numbers(2, 7, 2).to(DEVICE)

    def attend(tile: TileEdges, rows: slice) -> Tensor:
        return gat.attend(heads, tile, source_NS=source, a_dst_RG=a_dst[rows], keep=True)

    tile = tile_of(graph, Direction.IN)
    check(tile, attend)
    kept = sized(attend, moved(tile), slice(0, 7), most=MOST)
    target, _ = upstream(numbers(3, 7, 2 * channels).to(DEVICE), kept, a_dst)

    def pull_sources(tile: TileEdges, rows: slice) -> Tensor:
        return gat.pull_sources(heads, tile, target_NS=target, source_RS=source[rows])

    check(tile_of(graph, Direction.OUT), pull_sources)


@pytest.mark.parametrize("name", thorough(["GATv2", "Transformer, edge features", "GINE, linear"], "GATv2"))
def test_edge_functions(name: str) -> None:
    """Either way, with features of edges and of self-loops, and the gradients of their map."""
    case = CASES[name]
    graph = graph_for(case, replace(GRAPH, self_loops=SelfLoops.EXACTLY_ONE))
    pulled = Pulled(case, graph, Rows.of(case, graph, 5), range(case.groups), None)
    kernels = {
        edge_function.pull_messages: (Direction.IN, pulled.forward),
        edge_function.pull_target_gradients: (Direction.IN, pulled.targets),
        edge_function.pull_source_gradients: (Direction.OUT, pulled.sources),
    }
    for kernel, (direction, given_for) in kernels.items():
        ((_, tile),) = pulled.tiles(direction, graph.nodes)
        (function, _), named = given_for(tile, slice(None), graph.nodes)

        def pull(tile: TileEdges, rows: slice, kernel: Any = kernel, of: Any = function, named: Any = named) -> Any:
            given = {name: moved(of_rows(name, value, rows)) for name, value in named.items()}
            return over_edges(kernel, moved(of), tile, **given)

        check(tile, pull)


def of_rows(name: str, value: Any, rows: slice) -> Any:
    """Of what a kernel is given that of some rows of a tile."""
    if name in ("target_RV", "source_RW"):
        return value[rows]
    parts = {"terms": ["loop_RK"], "upstream_R": ["gradient", "statistics"]}.get(name, [])
    if value is None or not parts:
        return value
    found = {part: getattr(value, part) for part in parts}
    return replace(value, **{part: some if some is None else some[rows] for part, some in found.items()})


@pytest.mark.parametrize("is_mean", [False, True])
def test_features_of_self_loops(is_mean: bool) -> None:
    """Two sums of the same pieces."""
    tile = tile_of(GRAPH, Direction.IN)
    tile = replace(tile, features_EK=numbers(3, len(tile.indices_E), 2))
    loops = LoopFeatures(is_mean=is_mean)
    check(tile, lambda tile, rows: edge_terms.loop_features(loops, tile, torch.float64))


@pytest.mark.parametrize("damaged", [False, True])
def test_neighbours_out_of_order_are_found_between_pieces(damaged: bool) -> None:
    """A row's last edge of one piece, and its first one of the next."""
    indices = torch.arange(9, dtype=torch.int32)
    if damaged:
        indices[6] = 2
    tile, checks = TileEdges(indices, torch.tensor([0, 9]), 0, 9), DeferredChecks(9)
    for piece in pieces(tile, 3, most=3, checks=checks):
        before = None if piece.carried is None else piece.carried.before
        checks.check_order(piece.indices_E, piece.offsets_here_R1, before)
    assert (Fault.UNSORTED in checks.found()) is damaged


def test_repeats_of_a_neighbour_are_counted_over_several_pieces() -> None:
    carried = Carried()
    counts = []
    for piece, goes_on, left_open in [([4, 7, 7], False, 2), ([7, 7], True, 2), ([7, 9], True, 2), ([3], False, 0)]:
        carried.begin(torch.tensor(piece), goes_on=goes_on, left_open=left_open)
        counts.append(None if carried.before is None else carried.before.tolist())
    assert counts == [None, [[7, 2]], [[7, 4]], None]
