# SPDX-License-Identifier: Apache-2.0
"""Edge functions of the GPU and their gradients are the processor's, which are PyG's; dropout's masks are the same."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ooc.errors import ModelError
from ooc.kernels import edge_function as reference
from ooc.kernels.cuda.choice import Shape, power_of_two
from ooc.kernels.dropout.edges import EdgeDropout
from ooc.kernels.edge_function import Heads, TargetLayout, Upstream
from ooc.kernels.edge_terms import EdgeTerms, LoopFeatures
from ooc.kernels.edges import SelfLoops, TileEdges
from ooc.kernels.functions import EdgeFunction, Gatv2, GatWithFeatures, Rectified, TransformerAttention, gated
from ooc.plan.workload import Direction
from tests.examples import examples, ordinary, thorough
from tests.gpu.device import (
    DEVICE,
    EXAMPLES,
    INTERPRETED,
    MOST,
    edge_function,
    edge_terms,
    same_bits,
    shapes,
    sized,
    there,
)
from tests.kernels.kernel_cases import KernelGraph, graphs, numbers, over_edges

pytestmark = pytest.mark.gpu

HEADS, CHANNELS, FEATURES = 2, 3, 5
WIDTH = HEADS * CHANNELS
CLOSE = dict(rtol=1e-9, atol=1e-11)
SHAPE = Shape(8, 4, 1, 1)
GRAPH = KernelGraph(7, torch.tensor([[0, 1, 2, 3, 4, 5, 6, 1, 1, 2, 2, 0, 4], [3, 3, 3, 3, 3, 3, 3, 3, 0, 2, 2, 5, 1]]))
"""A hub with a repeated edge, repeated self-loops, and rows without edges in either direction."""


@dataclass(frozen=True)
class Case:
    """An edge function by its heads; columns of a group that sources, targets and terms have (no term: 0)."""

    function: Callable[[range, Tensor], EdgeFunction]
    source: int
    target: int
    message: int
    term: int = 0
    groups: int = HEADS
    mapped: bool = True
    bias: bool = False
    known: int = FEATURES

    @property
    def attends(self) -> bool:
        return self.target > 0

    @property
    def channels(self) -> int:
        return self.message if self.attends else self.groups // HEADS

    @property
    def features(self) -> int:
        return self.known if self.mapped else self.groups


def cases(c: int = CHANNELS, known: int = FEATURES) -> dict[str, Case]:
    """With ``c`` columns a head, or for GINE half a row, and so many features of an edge."""

    def scored(slope: float) -> Callable[[range, Tensor], EdgeFunction]:
        return lambda heads, att: Gatv2(att[heads.start : heads.stop], slope)

    named = {
        "GATv2": Case(scored(0.2), c, c, c),
        "GATv2, edge features": Case(scored(-0.5), c, c, c, c, bias=True),
        "Transformer": Case(lambda heads, _: TransformerAttention(len(heads)), 2 * c, c, c),
        "Transformer, edge features": Case(lambda heads, _: TransformerAttention(len(heads)), 2 * c, c, c, c),
        "GAT, edge features": Case(lambda heads, _: GatWithFeatures(len(heads), 0.2), c + 1, 1, c, 1),
        "GINE": Case(lambda groups, _: Rectified(), 1, 0, 1, 1, groups=HEADS * c, mapped=False),
        "GINE, linear": Case(lambda groups, _: Rectified(), 1, 0, 1, 1, groups=HEADS * c, bias=True),
    }
    return {name: replace(case, known=known) for name, case in named.items()}


CASES = cases()
WAYS = [(SelfLoops.EXACTLY_ONE, 2, 0), (SelfLoops.AS_STORED, 3, 2)]
"""Loops, the most edges of a part, and how many rows are absent."""


@dataclass(frozen=True)
class Rows:
    """All that takes part, of ``dtype``; ``d`` is dZ."""

    source: Tensor
    target: Tensor
    d: Tensor
    edges: Tensor | None
    att: Tensor
    weight_KT: Tensor | None
    bias_T: Tensor | None

    @classmethod
    def of(cls, case: Case, graph: KernelGraph, seed: int, dtype: torch.dtype = torch.float64) -> "Rows":
        def drawn(number: int, *shape: int) -> Tensor:
            return numbers(seed + number, *shape, dtype=dtype)

        terms = case.groups * case.term
        return cls(
            drawn(0, graph.nodes, case.groups * case.source),
            drawn(1, graph.nodes, case.groups * case.target),
            drawn(2, graph.nodes, case.groups * case.message),
            drawn(3, graph.edge_index.shape[1], case.features) if case.term else None,
            drawn(4, HEADS, case.channels),
            drawn(5, case.known, terms) if case.term and case.mapped else None,
            drawn(6, terms) if case.bias else None,
        )

    def terms(self, groups: range, case: Case, loop_RK: Tensor | None) -> EdgeTerms | None:
        if self.edges is None:
            return None
        part = slice(groups.start * case.term, groups.stop * case.term)
        weight = None if self.weight_KT is None else self.weight_KT[:, part].contiguous()
        bias = None if self.bias_T is None else self.bias_T[part]
        return EdgeTerms(groups, self.source.dtype, weight, bias, loop_RK)


def moved(value: Any) -> Any:
    """Where the kernels run."""
    if isinstance(value, Tensor):
        return value.to(DEVICE)
    if isinstance(value, TileEdges):
        features = None if value.features_EK is None else value.features_EK.to(DEVICE)
        return replace(there(value), features_EK=features)
    if isinstance(value, (EdgeTerms, Upstream)):
        names = ("weight_KT", "bias_T", "loop_RK") if isinstance(value, EdgeTerms) else ("gradient", "statistics")
        return replace(value, **{name: moved(getattr(value, name)) for name in names})
    return replace(value, att_HC=value.att_HC.to(DEVICE)) if isinstance(value, Gatv2) else value


def on_gpu(kernel: Callable[..., Any], function: EdgeFunction, tile: TileEdges, **given: Any) -> Any:
    moved_to = {name: moved(value) for name, value in given.items()}
    return over_edges(partial(sized, kernel), moved(function), moved(tile), **moved_to)


def of_groups(matrix: Tensor, groups: range, columns: int) -> Tensor:
    """Their columns, ``columns`` a group."""
    return matrix[:, groups.start * columns : groups.stop * columns]


class Pulled:
    """A case on a graph by the processor's kernels or the GPU's: forward, then either direction backward."""

    def __init__(self, case: Case, graph: KernelGraph, rows: Rows, groups: range, dropout: EdgeDropout | None) -> None:
        self.case, self.graph, self.rows, self.groups = case, graph, rows, groups
        self.function = case.function(groups, rows.att)
        self.heads = Heads(groups, dropout) if case.attends else None
        loops = rows.edges is not None and graph.self_loops is SelfLoops.EXACTLY_ONE
        self.loops = LoopFeatures(is_mean=True) if loops else None
        self.layout = TargetLayout(
            len(groups), case.target, case.message, 2 if case.attends else 0, case.features if loops else 0
        )

    def tiles(self, direction: Direction, height: int) -> Any:
        for rows, span, tile in self.graph.tiles(direction, height):
            edges = self.rows.edges
            yield rows, tile if edges is None else replace(tile, features_EK=edges[self.graph.order(direction)][span])

    def part(self, name: str) -> Tensor:
        columns = {"source": self.case.source, "target": self.case.target, "d": self.case.message}[name]
        return of_groups(getattr(self.rows, name), self.groups, columns)

    def forward(self, tile: TileEdges, rows: slice, present: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        loop_RK = self.loops.of(tile, self.rows.source.dtype) if self.loops is not None else None
        return (self.function, tile), dict(
            source_NW=self.part("source")[:present].contiguous(),
            target_RV=self.part("target")[rows],
            columns=len(self.groups) * self.case.message,
            terms=self.rows.terms(self.groups, self.case, loop_RK),
            heads=self.heads,
        )

    def above(self) -> tuple[Upstream, Tensor, Tensor | None]:
        """What flows back to all targets, packed too, with the features of their self-loops."""
        ((_, tile),) = self.tiles(Direction.IN, self.graph.nodes)
        arguments, named = self.forward(tile, slice(None), self.graph.nodes)
        reduced = over_edges(reference.pull_messages, *arguments, **named)
        above = reference.upstream(self.part("d"), *reduced)
        loop_RK = None if named["terms"] is None else named["terms"].loop_RK
        return above, self.layout.pack(self.part("target"), above, loop_RK), loop_RK

    def sources(self, tile: TileEdges, rows: slice, present: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        _, packed, loop_RK = self.above()
        return (self.function, tile), dict(
            source_RW=self.part("source")[rows].contiguous(),
            target_NP=packed[:present],
            layout=self.layout,
            terms=self.rows.terms(self.groups, self.case, None if loop_RK is None else loop_RK[rows]),
            heads=self.heads,
        )

    def targets(self, tile: TileEdges, rows: slice, present: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        above, _, loop_RK = self.above()
        target = self.part("target")[rows]
        if isinstance(self.function, Gatv2):
            parts = target.view(len(target), len(self.groups), -1), self.function.att_HC.expand(len(target), -1, -1)
            target = torch.cat(parts, dim=2).flatten(1)
        statistics = None if above.statistics is None else above.statistics[rows]
        return (self.function, tile), dict(
            source_NW=self.part("source")[:present].contiguous(),
            target_RV=target,
            upstream_R=Upstream(above.gradient[rows], statistics),
            with_map=self.rows.weight_KT is not None,
            terms=self.rows.terms(self.groups, self.case, None if loop_RK is None else loop_RK[rows]),
            heads=self.heads,
        )


ROUNDED = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2**-7, torch.float16: 2**-9}
"""Of what is rounded to a type."""


def check(pulled: Pulled, most: int, shape: Shape, present: int, dtype: torch.dtype = torch.float64) -> None:
    """Forward and backward against the processor's kernels, the last rows of the pulled matrices absent; sources and
    targets of ``dtype``, against the same numbers in float32."""
    nodes, wide = pulled.graph.nodes, pulled.rows.source.dtype
    summed, rounded = (dict(rtol=ROUNDED[each], atol=ROUNDED[each]) for each in (wide, dtype))

    def narrow(named: dict[str, Any], *names: str) -> dict[str, Any]:
        return named | {name: named[name].to(dtype) for name in names if name in named}

    def is_close(found: Tensor | None, expected: Tensor | None) -> None:
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            assert found.dtype == dtype
            torch.testing.assert_close(found.cpu().to(wide), expected, **rounded)

    ((_, tile),) = pulled.tiles(Direction.IN, nodes)
    options = dict(most=most, shape=shape)
    arguments, named = pulled.forward(tile, slice(None), present)
    expected = over_edges(reference.pull_messages, *arguments, **named)
    found = on_gpu(edge_function.pull_messages, *arguments, **narrow(named, "source_NW", "target_RV"), **options)
    is_close(found[0], expected[0])
    if expected[1] is not None:
        torch.testing.assert_close(found[1].cpu(), expected[1], **summed)

    if pulled.case.attends or pulled.rows.weight_KT is not None:
        arguments, named = pulled.targets(tile, slice(None), present)
        expected_rows = over_edges(reference.pull_target_gradients, *arguments, **named)
        named = narrow(named, "source_NW", "target_RV")
        found = on_gpu(edge_function.pull_target_gradients, *arguments, **named, **options)
        for one, other in zip(found, expected_rows, strict=True):
            is_close(one, other)

    ((_, tile),) = pulled.tiles(Direction.OUT, nodes)
    options = dict(most=most, shape=shape)
    arguments, named = pulled.sources(tile, slice(None), present)
    expected_rows = over_edges(reference.pull_source_gradients, *arguments, **named)
    found = on_gpu(edge_function.pull_source_gradients, *arguments, **narrow(named, "source_RW"), **options)
    is_close(found, expected_rows)


def graph_for(case: Case, graph: KernelGraph) -> KernelGraph:
    """A sum adds no self-loops."""
    return graph if case.attends else replace(graph, self_loops=SelfLoops.AS_STORED)


@pytest.mark.parametrize(("name", "way"), ordinary(product(CASES, WAYS), *zip(CASES, cycle(WAYS), strict=False)))
def test_outputs_and_gradients(name: str, way: tuple[SelfLoops, int, int]) -> None:
    """Of either side and of the map that makes terms, where rows are cut, and where the last ones are not there."""
    case, (self_loops, most, absent) = CASES[name], way
    graph = graph_for(case, replace(GRAPH, self_loops=self_loops))
    check(Pulled(case, graph, Rows.of(case, graph, 5), range(case.groups), None), most, SHAPE, graph.nodes - absent)


@pytest.mark.parametrize("name", CASES)
@given(st.data(), graphs(), st.integers(1, 6), st.sampled_from(list(ROUNDED)), MOST)
@settings(max_examples=examples(2 if INTERPRETED else EXAMPLES), deadline=None)
def test_any_graph_width_and_type(
    name: str, data: st.DataObject, graph: KernelGraph, channels: int, dtype: torch.dtype, most: int
) -> None:
    """And any shape, number of features, and rows that are absent."""
    case = cases(channels, data.draw(st.integers(1, 6)))[name]
    graph, present = graph_for(case, graph), max(1, graph.nodes - data.draw(st.integers(0, 5)))
    shape = data.draw(shapes(columns=power_of_two(channels if case.attends else 2 * channels)))
    rows = Rows.of(
        case, graph, data.draw(st.integers(0, 99)), torch.float64 if dtype == torch.float64 else torch.float32
    )
    rows = replace(rows, **{part: getattr(rows, part).to(dtype).to(rows.source.dtype) for part in ("source", "target")})
    check(Pulled(case, graph, rows, range(case.groups), None), most, shape, present, dtype)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.attends])
@pytest.mark.parametrize(
    ("p", "self_loops"),
    thorough([(0.3, SelfLoops.EXACTLY_ONE), (1.0, SelfLoops.AS_STORED)], (1.0, SelfLoops.AS_STORED)),
)
def test_dropout_has_the_processor_s_masks(name: str, p: float, self_loops: SelfLoops) -> None:
    """Of repeated edges too, also where a row is cut between them, and of a slab of later heads."""
    case, graph = CASES[name], replace(GRAPH, self_loops=self_loops)
    dropout = EdgeDropout(p, seed=3, epoch=2, layer=1)
    check(Pulled(case, graph, Rows.of(case, graph, 5), range(1, HEADS), dropout), 2, SHAPE, graph.nodes)


@pytest.mark.parametrize("name", CASES)
def test_tiles_and_slabs_change_no_bit(name: str) -> None:
    """Forward and backward over either list."""
    case = CASES[name]
    graph = graph_for(case, replace(GRAPH, self_loops=SelfLoops.EXACTLY_ONE))
    rows, nodes = Rows.of(case, graph, 7, torch.float32), graph.nodes
    every = Pulled(case, graph, rows, range(case.groups), None)
    last = Pulled(case, graph, rows, range(case.groups - 1, case.groups), None)
    ((_, tile),) = every.tiles(Direction.IN, nodes)
    arguments, named = every.forward(tile, slice(None), nodes)
    whole = on_gpu(edge_function.pull_messages, *arguments, **named)
    for place, part in last.tiles(Direction.IN, 3):
        arguments, named = last.forward(part, place, nodes)
        found = on_gpu(edge_function.pull_messages, *arguments, **named)
        assert same_bits(found[0], whole[0][place, -case.message :])
    ((_, tile),) = every.tiles(Direction.OUT, nodes)
    arguments, named = every.sources(tile, slice(None), nodes)
    packed = named["target_NP"].view(nodes, case.groups, -1)[:, -1]
    whole = on_gpu(edge_function.pull_source_gradients, *arguments, **named)
    for place, part in last.tiles(Direction.OUT, 3):
        arguments, named = last.sources(part, place, nodes)
        found = on_gpu(edge_function.pull_source_gradients, *arguments, **named | {"target_NP": packed})
        assert same_bits(found, whole[place, -case.source :])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["GATv2", "Transformer", "GAT, edge features", "GINE, linear"])
def test_narrow_sources(name: str, dtype: torch.dtype) -> None:
    """Sums are float32 whatever the sources' type, and so is what is kept; features may be of another type."""
    case = CASES[name]
    ends = torch.randint(0, 9, (2, 40), generator=torch.Generator().manual_seed(0))
    graph = KernelGraph(9, ends, SelfLoops.AS_STORED)
    rows = Rows.of(case, graph, 1, torch.float32)
    rows = replace(rows, source=rows.source.to(dtype).float())
    pulled = Pulled(case, graph, rows, range(case.groups), None)
    ((_, tile),) = pulled.tiles(Direction.IN, 9)
    arguments, named = pulled.forward(tile, slice(None), 9)
    expected = over_edges(reference.pull_messages, *arguments, **named)
    named["source_NW"] = named["source_NW"].to(dtype)
    found = on_gpu(edge_function.pull_messages, *arguments, **named)
    assert found[0].dtype == dtype
    torch.testing.assert_close(found[0].cpu().float(), expected[0], rtol=1e-2, atol=1e-2)
    if expected[1] is not None:
        assert found[1].dtype == torch.float32
        torch.testing.assert_close(found[1].cpu(), expected[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("channels", [4, 100, 1024])
def test_any_width(channels: int) -> None:
    """Of a head, with the shape that the table gives."""
    graph = KernelGraph(4, torch.tensor([[0, 1, 2, 3, 3, 0], [1, 1, 1, 0, 2, 2]]), SelfLoops.AS_STORED)
    function = TransformerAttention(1)
    ((_, _, tile),) = graph.tiles(Direction.IN, 4)
    source, target = numbers(1, 4, 2 * channels), numbers(2, 4, channels)
    named = dict(source_NW=source, target_RV=target, columns=channels, heads=Heads(range(1)))
    expected = over_edges(reference.pull_messages, function, tile, **named)
    found = on_gpu(edge_function.pull_messages, function, tile, **named)
    torch.testing.assert_close(found[0].cpu(), expected[0], **CLOSE)


@given(graphs(SelfLoops.EXACTLY_ONE), st.integers(0, 99), st.sampled_from([False, True]))
@settings(max_examples=examples(EXAMPLES), deadline=None)
def test_features_of_added_self_loops(graph: KernelGraph, seed: int, is_mean: bool) -> None:
    """The sum or mean over the edges from other rows."""
    features = numbers(seed, graph.edge_index.shape[1], FEATURES)[graph.order(Direction.IN)]
    for _, span, tile in graph.tiles(Direction.IN, 5):
        tile = replace(tile, features_EK=features[span])
        expected = LoopFeatures(is_mean=is_mean).of(tile, torch.float64)
        found = edge_terms.loop_features(LoopFeatures(is_mean=is_mean), moved(tile), torch.float64)
        torch.testing.assert_close(found.cpu(), expected, **CLOSE)


def test_other_functions_are_refused_by_name() -> None:
    graph = KernelGraph(2, torch.tensor([[0], [1]]))
    ((_, _, tile),) = graph.tiles(Direction.IN, 2)
    function = gated(1)
    named = dict(source_NW=numbers(0, 2, 2), target_RV=numbers(1, 2, 2), columns=2, heads=Heads(range(1)))
    with pytest.raises(ModelError, match="Product has no program for a GPU"):
        on_gpu(edge_function.pull_messages, function, tile, **named)
