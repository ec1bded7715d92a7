# SPDX-License-Identifier: Apache-2.0
"""Pulls on a power-law graph: our kernels, torch's CSR product and PyG's gather and scatter, taking turns.

Bytes are counted as if every edge fetched its neighbour's row once, with its index, and every row were written once:
E · (W · itemsize + 4) + R · W · itemsize. Caches hold some of those rows, so the rate may pass that of a copy; the
bytes that must move at least, every matrix once, are told beside it.
"""

import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gpu_parts.clock import interleaved, rounds_on, seconds_of
from gpu_parts.report import Failed, LeftOut

ROUNDS = 7
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Lists:
    """Neighbours of N rows: indices int32 [E], offsets int32 (int64 from 2³¹ edges on) [N + 1]."""

    indices_E: Tensor
    offsets_N1: Tensor

    @property
    def row_E(self) -> Tensor:
        rows = torch.arange(len(self.offsets_N1) - 1, device=self.indices_E.device)
        return torch.repeat_interleave(rows, self.offsets_N1.diff().long(), output_size=len(self.indices_E))


@dataclass(frozen=True)
class PowerLaw:
    """A directed graph whose in- and out-degrees both fall with the square root of a node's rank."""

    into: Lists
    out: Lists

    @classmethod
    def draw(cls, nodes: int, edges: int, device: torch.device) -> "PowerLaw":
        generator = torch.Generator(device).manual_seed(0)

        def ends() -> Tensor:
            rank = (torch.rand(edges, generator=generator, device=device, dtype=torch.float64) ** 2 * nodes).long()
            return torch.randperm(nodes, generator=generator, device=device)[rank]

        source, target = ends(), ends()
        return cls(_lists(target, source, nodes), _lists(source, target, nodes))

    @property
    def nodes(self) -> int:
        return len(self.into.offsets_N1) - 1

    @property
    def edges(self) -> int:
        return len(self.into.indices_E)

    def describe(self) -> dict[str, int]:
        degrees = self.into.offsets_N1.diff()
        return {"nodes": self.nodes, "edges": self.edges, "largest_in_degree": int(degrees.max())}


def _lists(rows: Tensor, neighbours: Tensor, nodes: int) -> Lists:
    """Edges by row, and within a row in ascending order."""
    keys, _ = torch.sort(rows * nodes + neighbours)
    offsets = torch.zeros(nodes + 1, dtype=torch.int64, device=rows.device)
    torch.cumsum(torch.bincount(rows, minlength=nodes), 0, out=offsets[1:])
    dtype = torch.int32 if len(rows) < 2**31 else torch.int64
    return Lists((keys % nodes).int(), offsets.to(dtype))


def needs_triton() -> str:
    """The version; ``LeftOut`` where there is none."""
    try:
        import triton
    except ImportError:
        raise LeftOut("triton cannot be imported") from None
    return str(triton.__version__)


def compare_sums(graph: PowerLaw, width: int, dtype_name: str, device: torch.device) -> dict[str, Any]:
    """Forward and backward of a plain sum by all ways: seconds, counted bytes, the shape chosen.

    Raises ``Failed`` where our sum is not torch's, to what float32 allows.
    """
    needs_triton()
    from gpu_parts import shapes
    from ooc.kernels.cuda import choice
    from ooc.kernels.cuda.sums import pull_tile

    dtype = DTYPES[dtype_name]
    generator = torch.Generator(device).manual_seed(width)
    x = torch.randn(graph.nodes, width, generator=generator, device=device).to(dtype)
    into, out = _tiles(graph)

    def ours(tile: Any) -> Callable[[], Tensor]:
        return lambda: pull_tile(tile, x)

    shape = shapes.measure(
        choice.choices(str(device)),
        choice.Case(choice.Kernel.SUM, width, x.itemsize),
        lambda _: seconds_of(device, ours(into)),
        rounds=rounds_on(device, shapes.ROUNDS),
    )
    _check(x, graph, ours(into)())
    name, scatter = _scatter()
    found: dict[str, Any] = {"shape": asdict(shape), "pyg": name, "counted_bytes": _bytes(graph, x)}
    for direction, lists, ready in (("forward", graph.into, into), ("backward", graph.out, out)):
        csr, row_E = _csr(lists, dtype), lists.row_E
        ways = {
            "ooc": ours(ready),
            "torch.sparse CSR": lambda csr=csr: csr @ x,
            "PyG": lambda lists=lists, row_E=row_E: scatter(x, lists.indices_E, row_E),
        }
        seconds, refused = interleaved(device, ways, ROUNDS)
        found[direction] = {"seconds": seconds, "left_out": refused}
    return found


def _csr(lists: Lists, dtype: torch.dtype) -> Tensor:
    """Its lists as torch's matrix of ones."""
    nodes = len(lists.offsets_N1) - 1
    ones_E = torch.ones(len(lists.indices_E), dtype=dtype, device=lists.indices_E.device)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*[Ss]parse")  # CSR is beta: known
        return torch.sparse_csr_tensor(lists.offsets_N1, lists.indices_E, ones_E, size=(nodes, nodes))


def _bytes(graph: PowerLaw, x: Tensor) -> dict[str, int]:
    rows = graph.nodes * x.shape[1] * x.itemsize
    return {
        "a_row_an_edge": graph.edges * (x.shape[1] * x.itemsize + 4) + rows,
        "every_matrix_once": 2 * rows + 4 * graph.edges,
    }


def _check(x: Tensor, graph: PowerLaw, found: Tensor) -> None:
    """Some two thousand rows against float64."""
    offsets = graph.into.offsets_N1
    rows = torch.arange(0, graph.nodes, max(1, graph.nodes // 2000), device=x.device)
    starts, stops = offsets[rows].long(), offsets[rows + 1].long()
    for row, start, stop in zip(rows.tolist(), starts.tolist(), stops.tolist(), strict=True):
        neighbours = x[graph.into.indices_E[start:stop].long()].double()
        exact = neighbours.sum(0)
        scale = neighbours.abs().sum(0) * 1e-6 + exact.abs() * (2.0**-8 if x.dtype == torch.bfloat16 else 1e-6) + 1e-6
        if bool(((found[row].double() - exact).abs() > scale).any()):
            raise Failed(f"the sum of row {row} is off by {float((found[row].double() - exact).abs().max()):.3g}")


def _scatter() -> tuple[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """PyG's aggregation of gathered rows; where PyG is not installed, the two operators of torch it is made of."""
    try:
        from torch_geometric.utils import scatter
    except ImportError:
        return "index_select and scatter_add_, of which PyG's is made; it is not installed", _gather_and_add

    def pyg(x: Tensor, source_E: Tensor, target_E: Tensor) -> Tensor:
        summed: Tensor = scatter(x.index_select(0, source_E), target_E, dim=0, dim_size=len(x), reduce="sum")
        return summed

    return "torch_geometric.utils.scatter", pyg


def _gather_and_add(x: Tensor, source_E: Tensor, target_E: Tensor) -> Tensor:
    index = target_E[:, None].expand(-1, x.shape[1])
    return torch.zeros_like(x).scatter_add_(0, index, x.index_select(0, source_E))


def time_others(graph: PowerLaw, width: int, heads: int, device: torch.device) -> dict[str, Any]:
    """Seconds and counted bytes of our maxima, of GAT's and GATv2's attention with ``heads`` heads of ``width`` columns
    together, of GINE's sums and of masks, float32, by the fastest shapes."""
    needs_triton()
    from gpu_parts import shapes
    from ooc.kernels.cuda import choice

    generator = torch.Generator(device).manual_seed(width)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    calls = _maxima(graph, width, draw) | _attention(graph, width, heads, draw) | _gatv2(graph, width, heads, draw)
    calls |= _gine(graph, width, draw)
    chosen, ways = {}, {}
    for kernel, columns, call, _ in calls.values():
        chosen[kernel.title] = shapes.measure(
            choice.choices(str(device)),
            choice.Case(kernel, columns, 4),
            lambda _, call=call: seconds_of(device, call),
            rounds=rounds_on(device, shapes.ROUNDS),
        )
    for name, (_, _, call, _) in calls.items():
        ways[name] = call
    moved = {
        name: 4 * (graph.edges * (an_edge + 1) + graph.nodes * a_row) for name, (*_, (an_edge, a_row)) in calls.items()
    }
    for name, (call, counted) in _masks(graph, width, draw).items():
        ways[name], moved[name] = call, counted
    seconds, refused = interleaved(device, ways, ROUNDS)
    of_kernels = {name: asdict(shape) for name, shape in chosen.items()}
    told = {"shapes": of_kernels, "seconds": seconds, "counted_bytes": moved, "left_out": refused}
    return {"width": width, "heads": heads, **told}


Draw = Callable[..., Tensor]
Numbers = tuple[int, int]
"""That a call moves of every edge, each fetched once, and of every row."""
Calls = dict[str, tuple[Any, int, Callable[[], Any], Numbers]]
"""By name: the kernel, columns that a program's shape goes by, the call, and what it moves."""


def _maxima(graph: PowerLaw, width: int, draw: Draw) -> Calls:
    from ooc.kernels import maximum as between
    from ooc.kernels.cuda import maximum
    from ooc.kernels.cuda.choice import Kernel

    into, out = _tiles(graph)
    x, gradient = draw(graph.nodes, width), draw(graph.nodes, width)

    def forward() -> Tensor:
        return maximum.pull_maxima(into, x, keep=True)

    shares = between.upstream(gradient, forward())

    def backward() -> Tensor:
        return maximum.pull_sources(out, target_NK=shares, source_RW=x)

    return {
        "maximum forward": (Kernel.MAXIMUM, width, forward, (width, 2 * width)),
        "maximum backward": (Kernel.MAXIMUM_SOURCES, width, backward, (2 * width, 2 * width)),
    }


def _attention(graph: PowerLaw, width: int, heads: int, draw: Draw) -> Calls:
    from ooc.kernels.cuda import gat
    from ooc.kernels.cuda.choice import Kernel
    from ooc.kernels.gat import GatHeads

    into, out = _tiles(graph)
    layer = GatHeads(range(heads), 0.2)
    source, a_dst = draw(graph.nodes, width + heads), draw(graph.nodes, heads)

    def forward() -> Tensor:
        return gat.attend(layer, into, source_NS=source, a_dst_RG=a_dst, keep=True)

    target, _ = gat.upstream(draw(graph.nodes, width), forward(), a_dst)

    def backward() -> Tensor:
        return gat.pull_sources(layer, out, target_NS=target, source_RS=source)

    return {
        "attention forward": (Kernel.ATTEND, width // heads, forward, (width + heads, 2 * width + 3 * heads)),
        "attention backward": (
            *(Kernel.ATTEND_SOURCES, width // heads, backward),
            (width + 3 * heads, 2 * (width + heads)),
        ),
    }


def _gatv2(graph: PowerLaw, width: int, heads: int, draw: Draw) -> Calls:
    from ooc.kernels import edge_function as between
    from ooc.kernels.cuda import edge_function
    from ooc.kernels.cuda.choice import Kernel
    from ooc.kernels.edge_function import EdgeMessages, Heads, TargetLayout
    from ooc.kernels.functions import Gatv2

    into, out = _tiles(graph)
    layer, every, channels = Gatv2(draw(heads, width // heads), 0.2), Heads(range(heads)), width // heads
    source, target = draw(graph.nodes, width), draw(graph.nodes, width)
    along, back = (EdgeMessages(layer, edges, heads=every) for edges in (into, out))

    def forward() -> Any:
        return edge_function.pull_messages(along, source_NW=source, target_RV=target, columns=width)

    reduced = forward()
    above = between.upstream(draw(graph.nodes, width), *reduced)
    layout = TargetLayout(heads, channels, channels, 2)
    packed = layout.pack(target, above)
    del reduced

    def sources() -> Any:
        return edge_function.pull_source_gradients(back, source_RW=source, target_NP=packed, layout=layout)

    def targets() -> Any:
        return edge_function.pull_target_gradients(along, source_NW=source, target_RV=target, upstream_R=above)

    return {
        "GATv2 forward": (Kernel.MESSAGES, channels, forward, (width, 2 * width + heads)),
        "GATv2 backward, sources": (Kernel.MESSAGE_SOURCES, channels, sources, (layout.columns, 2 * width)),
        "GATv2 backward, targets": (
            *(Kernel.MESSAGE_TARGETS, channels, targets),
            (width, 4 * width + 2 * heads),
        ),
    }


EDGE_FEATURES = 2


def _gine(graph: PowerLaw, width: int, draw: Draw) -> Calls:
    """The gradients of GINEConv's sum: its forward is that of sources with ones for gradients."""
    from ooc.kernels.cuda import edge_function
    from ooc.kernels.cuda.choice import Kernel
    from ooc.kernels.edge_function import EdgeMessages, TargetLayout, Upstream
    from ooc.kernels.edge_terms import EdgeTerms
    from ooc.kernels.functions import Rectified

    into, out = _tiles(graph)
    features = draw(graph.edges, EDGE_FEATURES)
    into, out = replace(into, features_EK=features), replace(out, features_EK=features)
    source, above = draw(graph.nodes, width), draw(graph.nodes, width)
    terms = EdgeTerms(range(width), torch.float32, draw(EDGE_FEATURES, width))
    along, back = (EdgeMessages(Rectified(), edges, terms) for edges in (into, out))
    layout = TargetLayout(width, 0, 1, 0)

    def forward() -> Any:
        return edge_function.pull_messages(along, source_NW=source, target_RV=source[:, :0], columns=width)

    def sources() -> Any:
        return edge_function.pull_source_gradients(back, source_RW=source, target_NP=above, layout=layout)

    def of_map() -> Any:
        flows_back = Upstream(above, None)
        return edge_function.pull_target_gradients(
            along, source_NW=source, target_RV=source[:, :0], upstream_R=flows_back, with_map=True
        )

    an_edge = width + EDGE_FEATURES
    return {
        "GINE forward": (Kernel.RECTIFIED, width, forward, (an_edge, width)),
        "GINE backward, sources": (Kernel.RECTIFIED, width, sources, (an_edge, 2 * width)),
        "GINE backward, map": (Kernel.RECTIFIED_MAP, width, of_map, (an_edge, (1 + EDGE_FEATURES) * width)),
    }


def _masks(graph: PowerLaw, width: int, draw: Draw) -> dict[str, tuple[Callable[[], Any], int]]:
    """Dropout's, of rows: a byte a number, which nothing is read for."""
    from ooc.kernels.cuda import dropout

    like = draw(graph.nodes, width)
    drawn = {"key": 1 << 100, "threshold": 1 << 31, "row_start": 0}
    return {"masks of rows": (lambda: dropout.keep_mask(like, **drawn), graph.nodes * width)}


def _tiles(graph: PowerLaw) -> list[Any]:
    """All rows as one tile with the parts of long ones, in-edges and out-edges."""
    from ooc.kernels.cuda.segments import cut
    from ooc.kernels.edges import TileEdges

    tiles = [TileEdges(lists.indices_E, lists.offsets_N1, 0, graph.nodes) for lists in (graph.into, graph.out)]
    return [replace(tile, parts_P2=cut(tile)[0]) for tile in tiles]
