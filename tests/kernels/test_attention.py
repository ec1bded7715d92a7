# SPDX-License-Identifier: Apache-2.0
"""GAT's kernels give PyG's outputs and gradients, and the same bits however a graph is cut."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch_geometric.nn import GATConv
from torch_geometric.nn.conv import gat_conv
from torch_geometric.utils import add_self_loops, remove_self_loops

from ooc.errors import StoreError
from ooc.kernels import gat
from ooc.kernels.dropout.edges import EdgeDropout
from ooc.kernels.edges import SelfLoops, TileEdges
from ooc.plan.workload import Direction
from tests.examples import examples
from tests.kernels.kernel_cases import HEIGHTS, PIECES, KernelGraph, by_tiles, graphs, numbers, small_pieces
from tests.kernels.test_edge_dropout import scale_of_edges

HEADS, CHANNELS = 3, 2
WIDTH = HEADS * CHANNELS


class Layer:
    """One GAT layer by the kernels, from z, the attention vectors [H, C] and the gradient of Z."""

    def __init__(
        self, graph: KernelGraph, z: Tensor, att: tuple[Tensor, Tensor], dz: Tensor, heads: gat.GatHeads
    ) -> None:
        self.graph, self.z, self.dz, self.heads = graph, z, dz, heads
        by_head = z.view(len(z), len(heads.groups), -1)
        self.a_src, self.a_dst = ((by_head * vector).sum(-1) for vector in att)

    def run(self, height: int, *, scored: int | None = None, workers: int = 1) -> tuple[Tensor, ...]:
        """Z, lse, dz, da_src, da_dst; Z and what depends on it only for the first ``scored`` rows."""
        heads, dz = self.heads, self.dz[:scored]
        count = len(heads.groups)
        source = torch.cat((self.z.view(len(self.z), count, -1), self.a_src[:, :, None]), dim=2).flatten(1)

        def forward(rows: slice, _: slice, tile: TileEdges) -> tuple[Tensor, ...]:
            kept = gat.attend(heads, tile, source_NS=source, a_dst_RG=self.a_dst[rows], keep=True)
            value = gat.attend(heads, tile, source_NS=source, a_dst_RG=self.a_dst[rows], keep=False)
            kept_by_head = kept.view(len(kept), count, -1)
            channels = value.shape[1] // count
            assert torch.equal(kept_by_head[:, :, :channels].flatten(1), value)
            return value, kept_by_head[:, :, channels], *gat.upstream(dz[rows], kept, self.a_dst[rows])

        value, lse, target, da_dst = by_tiles(self.graph.tiles(Direction.IN, height, scored), forward, workers=workers)

        def sources(rows: slice, _: slice, tile: TileEdges) -> tuple[Tensor, ...]:
            found = gat.pull_sources(heads, tile, target_NS=target, source_RS=source[rows])
            by_head = found.view(len(found), count, -1)
            return by_head[:, :, :-1].flatten(1), by_head[:, :, -1]

        message_gradient, da_src = by_tiles(self.graph.tiles(Direction.OUT, height), sources, workers=workers)
        return value, lse, message_gradient, da_src, da_dst


def layer(graph: KernelGraph, seed: int, slope: float = 0.2, dropout: EdgeDropout | None = None) -> Layer:
    z, dz = numbers(seed, graph.nodes, WIDTH), numbers(seed + 1, graph.nodes, WIDTH)
    att = (numbers(seed + 2, HEADS, CHANNELS), numbers(seed + 3, HEADS, CHANNELS))
    return Layer(graph, z, att, dz, gat.GatHeads(range(HEADS), slope, dropout))


def pyg(graph: KernelGraph, seed: int, slope: float, dropout: EdgeDropout | None, scored: int) -> tuple[Tensor, ...]:
    """Output, and gradients of z and both attention vectors, by PyG with the masks of ``dropout``."""
    loops = graph.self_loops is SelfLoops.EXACTLY_ONE
    conv = GATConv(WIDTH, CHANNELS, HEADS, negative_slope=slope, bias=False, add_self_loops=loops).double()
    z = numbers(seed, graph.nodes, WIDTH).requires_grad_()
    with torch.no_grad():
        conv.lin.weight.copy_(torch.eye(WIDTH))
        conv.att_src[0] = numbers(seed + 2, HEADS, CHANNELS)
        conv.att_dst[0] = numbers(seed + 3, HEADS, CHANNELS)
    edge_index = graph.edge_index
    if loops:
        edge_index, _ = add_self_loops(remove_self_loops(edge_index)[0], num_nodes=graph.nodes)
    scale = torch.ones(edge_index.shape[1], HEADS).double()
    if dropout is not None:
        scale = scale_of_edges(dropout, edge_index, range(HEADS))
    fixed = SimpleNamespace(leaky_relu=F.leaky_relu, dropout=lambda alpha, **_: alpha * scale)
    with mock.patch.object(gat_conv, "F", fixed):
        out = conv(z, graph.edge_index)[:scored]
    out.backward(numbers(seed + 1, graph.nodes, WIDTH)[:scored])
    assert z.grad is not None and conv.att_src.grad is not None and conv.att_dst.grad is not None
    return out.detach(), z.grad, conv.att_src.grad[0], conv.att_dst.grad[0]


@given(
    graphs(),
    st.integers(0, 999),
    st.sampled_from([0.2, 0.0, 1.0, -0.5]),
    st.sampled_from([None, 0.0, 0.3, 0.8]),
    HEIGHTS,
    PIECES,
    st.integers(0, 12),
)
@settings(max_examples=examples(20), deadline=None)
def test_output_and_gradients_are_pyg_s(
    graph: KernelGraph,
    seed: int,
    slope: float,
    p: float | None,
    height: int,
    edges_per_piece: int,
    unscored: int,
) -> None:
    """Whatever the graph, the slope and the dropout; also where only some leading rows have a gradient."""
    scored = max(1, graph.nodes - unscored)
    dropout = None if p is None else EdgeDropout(p, seed=5, epoch=2, layer=1)
    case = layer(graph, seed, slope, dropout)
    with small_pieces(edges_per_piece):
        value, _, message_gradient, da_src, da_dst = case.run(height, scored=scored)
    expected, dz, d_att_src, d_att_dst = pyg(graph, seed, slope, dropout, scored)
    z = case.z.view(-1, HEADS, CHANNELS)
    att_src, att_dst = numbers(seed + 2, HEADS, CHANNELS), numbers(seed + 3, HEADS, CHANNELS)
    own = message_gradient.view_as(z) + da_src[:, :, None] * att_src
    own[:scored] += da_dst[:, :, None] * att_dst
    close = dict(rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(value, expected, **close)
    torch.testing.assert_close(own.view_as(dz), dz, **close)
    torch.testing.assert_close((da_src[:, :, None] * z).sum(0), d_att_src, **close)
    torch.testing.assert_close((da_dst[:, :, None] * z[:scored]).sum(0), d_att_dst, **close)


@given(graphs(), st.integers(0, 999), HEIGHTS, PIECES, st.sampled_from([None, 0.5]))
@settings(max_examples=examples(20), deadline=None)
def test_tiles_and_threads_change_no_bit(
    graph: KernelGraph, seed: int, height: int, edges_per_piece: int, p: float | None
) -> None:
    case = layer(graph, seed, dropout=None if p is None else EdgeDropout(p, 0, 0, 0))
    case.z, case.dz, case.a_src, case.a_dst = (matrix.float() for matrix in (case.z, case.dz, case.a_src, case.a_dst))
    with small_pieces(edges_per_piece):
        whole = case.run(graph.nodes)
        for one, other in zip(whole, case.run(height, workers=3), strict=True):
            assert torch.equal(one, other)


@given(graphs(), st.integers(0, 999), st.integers(0, HEADS - 1), st.integers(1, HEADS))
@settings(max_examples=examples(20), deadline=None)
def test_heads_computed_apart_have_the_same_bits(graph: KernelGraph, seed: int, first: int, count: int) -> None:
    """A slab of some heads gives their columns, masks included."""
    dropout = EdgeDropout(0.5, 0, 0, 0)
    some = range(first, min(HEADS, first + count))
    whole = layer(graph, seed, dropout=dropout)
    heads = slice(some.start, some.stop)
    columns = slice(some.start * CHANNELS, some.stop * CHANNELS)
    z, dz = whole.z[:, columns].contiguous(), whole.dz[:, columns].contiguous()
    att = (numbers(seed + 2, HEADS, CHANNELS)[heads], numbers(seed + 3, HEADS, CHANNELS)[heads])
    part = Layer(graph, z, att, dz, gat.GatHeads(some, 0.2, dropout)).run(4)
    cuts = (columns, heads, columns, heads, heads)
    for result, own, cut in zip(whole.run(4), part, cuts, strict=True):
        assert torch.equal(result[:, cut], own)


@given(
    graphs(),
    st.integers(0, 999),
    st.sampled_from([(2, 1), (2, 2), (1, 4), (3, 2)]),
    st.sampled_from([2, 16, 43, 64]),
    PIECES,
    st.sampled_from([None, 0.5]),
    st.sampled_from([torch.float32, torch.float64]),
    st.data(),
)
@settings(max_examples=examples(40), deadline=None)
def test_slices_of_heads_are_the_head_s_channels(
    graph: KernelGraph,
    seed: int,
    cut: tuple[int, int],
    channels: int,
    edges_per_piece: int,
    p: float | None,
    dtype: torch.dtype,
    data: st.DataObject,
) -> None:
    """Slices give what whole heads do, gradients of scores as parts that add up; and the same bits whichever slices are
    computed together, masks included."""
    count, slices = cut
    groups, dropout = count * slices, None if p is None else EdgeDropout(p, 0, 0, 0)
    z, dz = (numbers(seed + place, graph.nodes, groups * channels) for place in range(2))
    a_src, a_dst = (numbers(seed + place, graph.nodes, count) for place in (2, 3))

    def run(some: range, slices: int) -> tuple[Tensor, ...]:
        columns = slice(some.start * z.shape[1] // (count * slices), some.stop * z.shape[1] // (count * slices))
        none = (torch.zeros(1, 1).double(),) * 2
        case = Layer(
            graph, z[:, columns].to(dtype), none, dz[:, columns].to(dtype), gat.GatHeads(some, 0.2, dropout, slices)
        )
        heads = [group // slices for group in some]
        case.a_src, case.a_dst = a_src[:, heads].to(dtype), a_dst[:, heads].to(dtype)
        with small_pieces(edges_per_piece):
            return case.run(4)

    whole, heads = run(range(groups), slices), run(range(count), 1)
    close = dict(rtol=1e-10, atol=1e-10) if dtype == torch.float64 else dict(rtol=1e-3, atol=1e-3)
    parts = [each.view(graph.nodes, count, slices) for each in whole[1::2] + whole[4:]]
    for found, expected in zip((whole[0], whole[2]), (heads[0], heads[2]), strict=True):
        torch.testing.assert_close(found, expected, **close)
    lse, da_src, da_dst = parts
    assert torch.equal(lse, heads[1][:, :, None].expand_as(lse))
    torch.testing.assert_close(da_src.sum(2), heads[3], **close)
    torch.testing.assert_close(da_dst.sum(2), heads[4], **close)
    start = data.draw(st.integers(0, groups - 1))
    some = range(start, data.draw(st.integers(start + 1, groups)))
    wide, narrow = slice(some.start * channels, some.stop * channels), slice(some.start, some.stop)
    for result, own, cut_out in zip(whole, run(some, slices), (wide, narrow, wide, narrow, narrow), strict=True):
        assert torch.equal(result[:, cut_out], own)


def test_scores_beyond_the_range_of_exponentials_are_exact() -> None:
    """Softmax is shifted by every row's own maximum, across the pieces of a long row as well."""
    graph = KernelGraph(6, torch.tensor([[0, 1, 2, 3, 4, 5, 0], [0, 0, 0, 0, 0, 0, 1]]))
    z = numbers(0, 6, 2)
    scores = torch.tensor([-5000.0, 3000.0, -100.0, 3001.0, 0.0, 2999.0]).double()[:, None]
    case = Layer(graph, z, (z.new_zeros(1, 2),) * 2, z, gat.GatHeads(range(1), 0.2))
    case.a_src, case.a_dst = scores, torch.zeros_like(scores)
    with small_pieces(2):
        value = case.run(6)[0]
    share = torch.softmax(F.leaky_relu(scores[:, 0], 0.2), 0)
    torch.testing.assert_close(value[0], share @ z)
    torch.testing.assert_close(value[1], z[0])
    assert not value[2:].any()


@pytest.mark.parametrize("neighbour", [-1, 3])
def test_a_neighbour_outside_the_graph_is_refused(neighbour: int) -> None:
    tile = TileEdges(torch.tensor([0, neighbour]), torch.tensor([0, 2]), 0, nodes=3)
    one = torch.ones(3, 1)
    with pytest.raises(StoreError, match="damaged"):
        gat.attend(gat.GatHeads(range(1), 0.2), tile, source_NS=torch.ones(3, 2), a_dst_RG=one[:1], keep=False)
