# SPDX-License-Identifier: Apache-2.0
"""Attention of the GPU and its gradients are the processor's, which are PyG's; dropout's masks are the same."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ooc.kernels import gat as reference
from ooc.kernels.cuda.choice import Kernel, Shape, power_of_two, shape_for
from ooc.kernels.dropout.edges import EdgeDropout
from ooc.kernels.edges import SelfLoops, TileEdges
from ooc.plan.workload import Direction
from tests.examples import examples
from tests.gpu.device import DEVICE, EXAMPLES, MOST, gat, same_bits, shapes, sized, there
from tests.kernels.kernel_cases import KernelGraph, graphs, numbers

pytestmark = pytest.mark.gpu

HEADS, CHANNELS = 3, 3
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}
"""Of what is rounded to a type; what is summed in float32 has its bound whatever the sources' type."""


def sources(
    graph: KernelGraph, seed: int, dtype: torch.dtype = torch.float64, channels: int = CHANNELS
) -> tuple[Tensor, Tensor]:
    """z beside a_src, and a_dst."""
    return (
        numbers(seed, graph.nodes, HEADS * (channels + 1), dtype=dtype),
        numbers(seed + 1, graph.nodes, HEADS, dtype=dtype),
    )


def check(
    graph: KernelGraph,
    heads: reference.GatHeads,
    seed: int,
    most: int,
    shape: Shape,
    present: int,
    channels: int = CHANNELS,
    dtype: torch.dtype = torch.float64,
) -> None:
    """Forward and backward against the processor's kernels, the last sources and targets absent; where sources are
    narrower than float32, against those of the same numbers in float32."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    close, rounded = (dict(rtol=CLOSE[each], atol=CLOSE[each]) for each in (wide, dtype))
    source, a_dst = (each.to(wide) for each in sources(graph, seed, channels=channels))
    narrow = source.to(dtype)
    source = narrow.to(wide)
    if heads.slices > 1:  # those of a head have its scores
        scores = narrow.view(graph.nodes, HEADS, -1)[:, :, -1]
        for each in (scores, a_dst):
            each[:, 1:] = each[:, :1]
        source = narrow.to(wide)
    _, _, tile = next(graph.tiles(Direction.IN, graph.nodes))
    arguments = dict(source_NS=narrow[:present].to(DEVICE), a_dst_RG=a_dst.to(DEVICE))
    options = dict(most=most, shape=shape)
    expected = reference.attend(heads, tile, source_NS=source[:present], a_dst_RG=a_dst, keep=True)
    kept = sized(gat.attend, heads, there(tile), keep=True, **arguments, **options)
    torch.testing.assert_close(kept.cpu(), expected, **close)
    alone = sized(gat.attend, heads, there(tile), keep=False, **arguments, **options)
    assert same_bits(alone, kept.view(graph.nodes, HEADS, -1)[:, :, :channels].flatten(1).to(dtype))

    gradient = numbers(seed + 2, graph.nodes, HEADS * channels).to(wide)
    target, da_dst = reference.upstream(gradient, expected, a_dst)
    found = gat.upstream(gradient.to(DEVICE), expected.to(DEVICE), a_dst.to(DEVICE))
    for each, other in zip(found, (target, da_dst), strict=True):
        torch.testing.assert_close(each.cpu(), other, **close)
    _, _, tile = next(graph.tiles(Direction.OUT, graph.nodes))
    expected = reference.pull_sources(heads, tile, target_NS=target[:present], source_RS=source)
    options = dict(most=most, shape=shape)
    found = sized(
        gat.pull_sources,
        heads,
        there(tile),
        target_NS=target[:present].to(DEVICE),
        source_RS=narrow.to(DEVICE),
        **options,
    )
    assert found.dtype == dtype
    torch.testing.assert_close(found.cpu().to(wide), expected, **rounded)


@given(st.data(), graphs(), st.integers(1, 9), st.sampled_from(list(CLOSE)), MOST)
@settings(max_examples=examples(EXAMPLES), deadline=None)
def test_outputs_and_gradients(
    data: st.DataObject, graph: KernelGraph, channels: int, dtype: torch.dtype, most: int
) -> None:
    """Whatever the graph, its self-loops, the slope, the width of a head, the type, and where rows are cut."""
    heads = reference.GatHeads(range(HEADS), data.draw(st.sampled_from([0.2, 0.0, 1.0, -0.5])))
    shape, absent = data.draw(shapes(columns=power_of_two(channels))), data.draw(st.integers(0, 5))
    present = max(1, graph.nodes - absent)
    check(graph, heads, data.draw(st.integers(0, 99)), most, shape, present, channels, dtype)


@given(
    graphs(),
    st.integers(0, 99),
    st.sampled_from([0.3, 1.0]),
    st.sampled_from([2, 64]),
    st.integers(0, 4),
    st.sampled_from([1, 2, HEADS]),
)
@settings(max_examples=examples(EXAMPLES // 2), deadline=None)
def test_dropout_has_the_processor_s_masks(
    graph: KernelGraph, seed: int, p: float, most: int, first: int, slices: int
) -> None:
    """Of repeated edges too, also where a row is cut between them, of a slab of later heads, and of slices of heads."""
    dropout = EdgeDropout(p, seed=seed, epoch=2, layer=1)
    heads = reference.GatHeads(range(first, first + HEADS), 0.2, dropout, slices)
    check(graph, heads, seed, most, Shape(2, 4, 1, 1), graph.nodes)


@given(graphs(), st.integers(0, 99), st.sampled_from([1, 3]), st.sampled_from([1, 4]))
@settings(max_examples=examples(EXAMPLES), deadline=None)
def test_tiles_shapes_and_slabs_of_heads_change_no_bit(graph: KernelGraph, seed: int, height: int, unroll: int) -> None:
    source, a_dst = sources(graph, seed, torch.float32)
    target = numbers(seed + 2, graph.nodes, HEADS * (CHANNELS + 3), dtype=torch.float32)
    source, a_dst, target = source.to(DEVICE), a_dst.to(DEVICE), target.to(DEVICE)
    every, last = reference.GatHeads(range(HEADS), 0.2), reference.GatHeads(range(HEADS - 1, HEADS), 0.2)
    _, _, tile = next(graph.tiles(Direction.IN, graph.nodes))
    attended = gat.attend(every, there(tile), source_NS=source, a_dst_RG=a_dst, keep=True)
    pulled = gat.pull_sources(every, there(tile), target_NS=target, source_RS=source)
    usual = shape_for(Kernel.ATTEND_SOURCES, target, CHANNELS)
    shape = Shape(usual.rows, usual.columns, unroll, usual.warps)
    own = slice(-(CHANNELS + 1), None)
    for rows, _, part in graph.tiles(Direction.IN, height):
        found = sized(
            gat.attend, last, there(part), source_NS=source[:, own], a_dst_RG=a_dst[rows, -1:], keep=True, shape=shape
        )
        assert same_bits(found, attended[rows, -(2 * CHANNELS + 2) :])
        found = sized(
            gat.pull_sources,
            last,
            there(part),
            target_NS=target[:, -(CHANNELS + 3) :],
            source_RS=source[rows, own],
            shape=shape,
        )
        assert same_bits(found, pulled[rows, own])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("channels", [5, 64])
def test_narrow_sources(dtype: torch.dtype, channels: int) -> None:
    """Sums are float32 whatever the sources' type, and so is what is kept."""
    heads = reference.GatHeads(range(2), 0.2)
    generator = torch.Generator().manual_seed(0)
    indices, offsets = torch.randint(0, 9, (40,), generator=generator), torch.tensor([0, 3, 3, 40])
    tile = TileEdges(indices, offsets, 0, nodes=9, self_loops=SelfLoops.EXACTLY_ONE)
    source, a_dst = numbers(1, 9, 2 * (channels + 1)).to(dtype), numbers(2, 3, 2, dtype=torch.float32)
    expected = reference.attend(heads, tile, source_NS=source.float(), a_dst_RG=a_dst, keep=True)
    arguments = dict(source_NS=source.to(DEVICE), a_dst_RG=a_dst.to(DEVICE))
    kept = gat.attend(heads, there(tile), keep=True, **arguments)
    assert kept.dtype == torch.float32
    torch.testing.assert_close(kept.cpu(), expected, rtol=1e-5, atol=1e-5)
    alone = gat.attend(heads, there(tile), keep=False, **arguments)
    assert same_bits(alone, kept.view(3, 2, -1)[:, :, :channels].flatten(1).to(dtype))


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("channels", [1, 5, 64])
def test_what_flows_back_need_not_lie_in_line(rows: int, channels: int) -> None:
    """Gradients and scalars may be parts of wider matrices."""
    heads = 3
    gradient, kept = numbers(0, rows, 2 * heads * channels), numbers(1, rows, heads * (2 * channels + 2))
    given = gradient[:, ::2].to(DEVICE), kept.to(DEVICE), numbers(2, rows, 2 * heads)[:, 1::2].to(DEVICE)
    expected = reference.upstream(*(one.cpu() for one in given))
    for found, other in zip(gat.upstream(*given), expected, strict=True):
        torch.testing.assert_close(found.cpu(), other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("most", [1, 2, 64])
def test_scores_beyond_the_range_of_exponentials_are_exact(most: int) -> None:
    """Softmax is shifted by every row's own maximum, across the parts of a cut row as well."""
    scores = torch.tensor([-5000.0, 3000.0, -100.0, 3001.0, 0.0, 2999.0])
    z = numbers(0, 6, 2, dtype=torch.float32)
    tile = TileEdges(torch.arange(6), torch.tensor([0, 6, 6]), 0, nodes=6)
    source = torch.cat((z, scores[:, None]), dim=1).to(DEVICE)
    found = sized(
        gat.attend,
        reference.GatHeads(range(1), 0.2),
        there(tile),
        source_NS=source,
        a_dst_RG=torch.zeros(2, 1, device=DEVICE),
        keep=False,
        most=most,
    ).cpu()
    torch.testing.assert_close(found[0], torch.softmax(F.leaky_relu(scores, 0.2), 0) @ z)
    assert not found[1].any()
