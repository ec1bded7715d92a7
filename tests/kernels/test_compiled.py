# SPDX-License-Identifier: Apache-2.0
"""Compiled loops give what torch's operators do."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ooc.errors import StoreError
from ooc.kernels import gat
from ooc.kernels.compiled import gat as compiled_gat
from ooc.kernels.dropout.edges import EdgeDropout
from ooc.kernels.edges import SelfLoops, TileEdges

DTYPES = {torch.float32: 2e-5, torch.float64: 1e-12}


def same(found: Tensor, expected: Tensor) -> None:
    """To rounding, of sums of numbers as large as the largest."""
    rtol = DTYPES[expected.dtype]
    atol = rtol * max(1.0, float(expected.abs().max())) if expected.numel() else 0.0
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, equal_nan=True)


@st.composite
def tiles(draw: st.DrawFn) -> tuple[TileEdges, int]:
    """A tile with rows of no edges, of many, of repeated ones and of loops; and how many rows there are to pull."""
    nodes, rows = draw(st.integers(2, 40)), draw(st.integers(1, 12))
    start = draw(st.integers(0, max(0, nodes - rows)))
    rows = min(rows, nodes - start)
    counts = draw(st.lists(st.sampled_from([0, 1, 3, 17, 63, 64, 65, 200]), min_size=rows, max_size=rows))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    lists = [torch.randint(0, nodes, (count,), generator=generator).sort().values for count in counts]
    indices = torch.cat(lists).to(draw(st.sampled_from([torch.int32, torch.int64])))
    offsets = torch.tensor([0, *counts]).cumsum(0).to(indices.dtype)
    loops = draw(st.sampled_from(list(SelfLoops)))
    pulled = nodes - draw(st.sampled_from([0, 0, 1])) * (nodes > start + rows)
    return TileEdges(indices, offsets, start, nodes, loops), pulled


@given(
    tiles(), st.sampled_from(list(DTYPES)), st.integers(1, 5), st.integers(1, 40), st.booleans(), st.booleans(),
    st.sampled_from([(1, 0), (2, 0), (2, 1), (3, 3)]), st.sampled_from([0.2, 0.0, -0.5, 1.0]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_gat(
    tile: tuple[TileEdges, int], dtype: torch.dtype, groups: int, channels: int, keep: bool, drops: bool,
    sliced: tuple[int, int], slope: float,
) -> None:  # fmt: skip
    edges, pulled = tile
    slices, first = sliced
    groups *= slices
    dropout = EdgeDropout(0.4, 1, 2, 3) if drops else None
    heads = gat.GatHeads(range(first * slices, first * slices + groups), slope, dropout, slices)
    torch.manual_seed(0)
    source = torch.randn(pulled, groups * (channels + 1), dtype=dtype)
    target = torch.randn(edges.rows, groups // slices, dtype=dtype).repeat_interleave(slices, dim=1)
    found = compiled_gat.attend(heads, edges, source_NS=source, a_dst_RG=target, keep=keep)
    same(found, gat.attend(heads, edges, source_NS=source, a_dst_RG=target, keep=keep))

    source = torch.randn(edges.rows, groups, channels + 1, dtype=dtype)
    target = torch.randn(pulled, groups, channels + 3, dtype=dtype)
    for scalars in (source[..., -1:], target[..., -3:-1]):  # slices of a head have the same
        scalars.copy_(scalars[:, ::slices].repeat_interleave(slices, dim=1))
    given = {"target_NS": target.view(pulled, -1), "source_RS": source.view(edges.rows, -1)}
    same(compiled_gat.pull_sources(heads, edges, **given), gat.pull_sources(heads, edges, **given))


def test_damaged_lists_are_named() -> None:
    heads, source, target = gat.GatHeads(range(1), 0.2), torch.randn(3, 2), torch.randn(2, 1)
    edges = TileEdges(torch.tensor([0, 7]), torch.tensor([0, 1, 2]), 0, 3)
    with pytest.raises(StoreError, match="indices are damaged"):
        compiled_gat.attend(heads, edges, source_NS=source, a_dst_RG=target, keep=False)
    edges = TileEdges(torch.tensor([2, 1]), torch.tensor([0, 2, 2]), 0, 3)
    dropping = gat.GatHeads(range(1), 0.2, EdgeDropout(0.5, 0, 0, 0))
    with pytest.raises(StoreError, match="ascending order"):
        compiled_gat.attend(dropping, edges, source_NS=source, a_dst_RG=target, keep=False)
