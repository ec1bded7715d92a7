# SPDX-License-Identifier: Apache-2.0
"""Larger graphs than an interpreter can walk, on a GPU alone; and that launches there wait for nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from ooc.kernels import aggregate
from ooc.kernels import gat as gat_reference
from ooc.kernels import maximum as maximum_reference
from ooc.kernels.edges import SelfLoops, TileEdges
from tests.gpu.device import DEVICE, INTERPRETED, cut, gat, maximum, same_bits, sums, there

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(INTERPRETED, reason="needs an NVIDIA GPU: the interpreter would take hours"),
]

NODES = 20_000
EDGES = 400_000


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def power_law(self_loops: SelfLoops = SelfLoops.AS_STORED) -> TileEdges:
    """All rows in one tile; the first have thousands of edges, and neighbours are in ascending order."""
    generator = torch.Generator().manual_seed(0)
    rows = (torch.rand(EDGES, generator=generator) ** 3 * NODES).long()
    neighbours = torch.randint(0, NODES, (EDGES,), generator=generator)
    keys, _ = torch.sort(rows * NODES + neighbours)
    offsets = torch.zeros(NODES + 1, dtype=torch.int32)
    offsets[1:] = torch.bincount(rows, minlength=NODES).cumsum(0)
    return TileEdges((keys % NODES).int(), offsets, 0, NODES, self_loops)


@contextmanager
def nothing_waits() -> Iterator[None]:
    """Torch raises where the processor would wait for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [4, 100, 256])
def test_sums(width: int, dtype: torch.dtype) -> None:
    """Rows that are not cut have the processor's bits; the others differ by what float32 allows."""
    tile, source = power_law(), draw(NODES, width).to(dtype)
    expected = aggregate.pull(source.float(), tile.indices_E, tile.offsets_R1)
    device_tile, device_source = there(tile), source.to(DEVICE)
    device_tile = replace(device_tile, parts_P2=cut(device_tile).parts_P2)  # which training has at hand
    sums.pull_tile(device_tile, device_source)  # compiles
    with nothing_waits():
        found = sums.pull_tile(device_tile, device_source)
    whole = tile.offsets_R1.diff() <= 512
    assert 0 < int(whole.sum()) < NODES
    assert same_bits(found[whole.to(DEVICE)], expected[whole].to(dtype))
    close = 2**-7 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.cpu().float(), expected, rtol=close, atol=100 * close)


def test_maxima() -> None:
    tile, source = power_law(), (draw(NODES, 64) * 4).round()
    expected = maximum_reference.pull_maxima(tile, source, keep=True)
    assert same_bits(maximum.pull_maxima(there(tile), source.to(DEVICE), keep=True), expected)
    target = maximum_reference.upstream(draw(NODES, 64), expected)
    own = maximum_reference.pull_sources(tile, target_NK=target, source_RW=source)
    found = maximum.pull_sources(there(tile), target_NK=target.to(DEVICE), source_RW=source.to(DEVICE))
    torch.testing.assert_close(found.cpu(), own, rtol=1e-4, atol=1e-4)


def test_attention() -> None:
    tile, layer = power_law(SelfLoops.EXACTLY_ONE), gat_reference.GatHeads(range(4), 0.2)
    source, a_dst = draw(NODES, 4 * 33), draw(NODES, 4)
    expected = gat_reference.attend(layer, tile, source_NS=source, a_dst_RG=a_dst, keep=True)
    found = gat.attend(layer, there(tile), source_NS=source.to(DEVICE), a_dst_RG=a_dst.to(DEVICE), keep=True)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)
    target, _ = gat_reference.upstream(draw(NODES, 128), expected, a_dst)
    own = gat_reference.pull_sources(layer, tile, target_NS=target, source_RS=source)
    found = gat.pull_sources(layer, there(tile), target_NS=target.to(DEVICE), source_RS=source.to(DEVICE))
    torch.testing.assert_close(found.cpu(), own, rtol=1e-3, atol=1e-3)
