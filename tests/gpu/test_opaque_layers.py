# SPDX-License-Identifier: Apache-2.0
"""Layers that run as they are, on a GPU: what torch's allocator takes for them, the same bits again, what is refused.

All of it is torch's own there, so that nothing of it shows where there is none.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing

from ooc.errors import ModelError
from ooc.kernels.edges import TileEdges
from ooc.model.layers.opaque import Opaque
from ooc.model.layers.per_edge import Pulling
from tests.exactness.layers import MlpMessages
from tests.gpu.device import DEVICE, same_bits
from tests.model.test_opaque_memory import LAYERS, NODES, WIDTH, Key, general

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICE.type != "cuda", reason="torch computes them, on a GPU only")]

ROWS = 512


def there(conv: MessagePassing) -> Opaque:
    """``conv`` as the trainer runs it on the GPU."""
    aggregate = general(conv)
    for tensor in (*conv.parameters(), *conv.buffers()):
        tensor.data = tensor.data.to(DEVICE)
    return aggregate


def tile_of(degree: int) -> TileEdges:
    """So many edges for each row, a quarter of all of them from one node."""
    indices = torch.randint(0, NODES, (ROWS, degree), generator=torch.Generator().manual_seed(0))
    indices[::4] = 7
    indices, offsets = indices.sort().values.view(-1).int(), torch.arange(ROWS + 1, dtype=torch.int32) * degree
    return TileEdges(indices.to(DEVICE), offsets.to(DEVICE), 0, NODES)


def calls(aggregate: Opaque, tile: TileEdges) -> list[Callable[[], list[Tensor]]]:
    """Forward and backward, and what they give."""
    source = torch.randn(NODES, WIDTH, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    gradient = torch.ones(ROWS, aggregate.columns, device=DEVICE)

    def backward() -> list[Tensor]:
        found = aggregate.backward_targets(Key(), tile, source, gradient, range(1))
        return [found.rows, *(values for _, values in found.others), *(values for _, values in found.parameters)]

    return [lambda: [aggregate.forward(Key(), tile, source, source[:ROWS], range(1))], backward]


@pytest.mark.parametrize("degree", [2, 40])
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
def test_bounds(make: Callable[[], MessagePassing], degree: int) -> None:
    """What they take is within what is admitted for them, and not far below: torch's sorting included."""
    aggregate, tile = there(make()), tile_of(degree)
    pull = aggregate.per_edge(Pulling.TARGETS, WIDTH, "dp", 4, on_device=True)
    edges = len(tile.indices_E)
    bound = edges * pull.bytes_per_edge + (edges + ROWS) * pull.waiting_bytes_per_edge
    bound += ROWS * pull.bytes_per_row
    peaks = []
    for call in calls(aggregate, tile):
        call()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert bound / 6 <= max(peaks) <= bound


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
def test_the_same_bits_again(make: Callable[[], MessagePassing]) -> None:
    """Though many edges lead from one node, whose gradients are added up."""
    aggregate, tile = there(make()), tile_of(40)
    for call in calls(aggregate, tile):
        first = call()
        for _ in range(3):
            assert all(same_bits(one, other) for one, other in zip(first, call(), strict=True))
    assert not torch.are_deterministic_algorithms_enabled()


def test_what_torch_cannot_compute_in_one_order_is_refused_by_name() -> None:
    aggregate = there(MlpMessages(WIDTH, WIDTH, "mul"))
    with pytest.raises(ModelError, match=r"Layer: scatter_reduce\w*prod\w* gives other bits every time"):
        calls(aggregate, tile_of(2))[0]()
    assert not torch.are_deterministic_algorithms_enabled()
