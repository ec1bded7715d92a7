# SPDX-License-Identifier: Apache-2.0
"""What a kernel allocates for a tile stays within the bound that admission is given, and not far below it."""

import tracemalloc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ooc.train.kernels import edge_function, gat, maximum
from ooc.train.kernels.edge_dropout import EdgeDropout
from ooc.train.kernels.edge_function import Heads, Upstream
from ooc.train.kernels.edges import SelfLoops, TileEdges
from ooc.train.kernels.functions import Gatv2, TransformerAttention

NODES, HEADS, CHANNELS = 256, 4, 16
WIDTH = HEADS * CHANNELS


def peak_bytes(compute: Callable[[], object]) -> int:
    """The most that is allocated at once, by torch's own account, and NumPy's most on top."""
    compute()
    tracemalloc.start()
    with torch.no_grad():
        compute()
    _, numpy_peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    with torch.no_grad(), torch.profiler.profile(profile_memory=True) as profile:
        compute()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak + numpy_peak


def tile(degree: int) -> TileEdges:
    generator = torch.Generator().manual_seed(0)
    indices = torch.randint(0, NODES, (NODES, degree), generator=generator).sort().values.view(-1).int()
    offsets = torch.arange(NODES + 1, dtype=torch.int32) * degree
    return TileEdges(indices, offsets, 0, NODES, SelfLoops.EXACTLY_ONE)


def rows(columns: int, seed: int = 0) -> Tensor:
    return torch.randn(NODES, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("degree", [2, 20, 200])
@pytest.mark.parametrize("dropout", [None, EdgeDropout(0.5, 0, 0, 0)])
def test_gat(degree: int, dropout: EdgeDropout | None) -> None:
    heads = gat.GatHeads(range(HEADS), 0.2, dropout)
    edges, z, scores, statistics = tile(degree), rows(WIDTH), rows(HEADS), rows(3 * HEADS)
    calls = [
        lambda: gat.attend(heads, edges, source_NW=z, a_src_NH=scores, a_dst_RH=scores, keep_slopes=True),
        lambda: gat.pull_sources(heads, edges, dz_NW=z, statistics_NS=statistics, source_RW=z, a_src_RH=scores),
        lambda: gat.pull_targets(heads, edges, source_NW=z, a_src_NH=scores, dz_RW=z, statistics_RS=statistics),
    ]
    bound = gat.scratch_bytes(
        edges=NODES * degree, rows=NODES, heads=HEADS, channels=CHANNELS, itemsize=4, dropout=dropout is not None
    )
    peaks = [peak_bytes(call) for call in calls]
    assert bound / 2.5 < max(peaks) <= bound


@pytest.mark.parametrize("degree", [2, 20, 200])
def test_maximum(degree: int) -> None:
    edges, source, share = tile(degree), rows(WIDTH), rows(WIDTH, 1)
    peaks = [
        peak_bytes(lambda: maximum.pull_maxima(edges, source)),
        peak_bytes(lambda: maximum.pull_sources(edges, value_NW=source, share_NW=share, source_RW=source)),
    ]
    bound = maximum.scratch_bytes(edges=NODES * degree, rows=NODES, columns=WIDTH, itemsize=4)
    assert bound / 2.5 < max(peaks) <= bound


@pytest.mark.parametrize("degree", [2, 20, 200])
@pytest.mark.parametrize("function", [Gatv2(rows(CHANNELS)[:HEADS].requires_grad_(), 0.2), TransformerAttention(HEADS)])
def test_edge_functions(degree: int, function: Gatv2 | TransformerAttention) -> None:
    edges, heads = tile(degree), Heads(range(HEADS))
    source = rows(WIDTH if isinstance(function, Gatv2) else 2 * WIDTH)
    target, above = rows(WIDTH, 1), Upstream(rows(WIDTH, 2), rows(2 * HEADS))
    calls = [
        lambda: edge_function.pull_messages(
            function, edges, source_NW=source, target_RV=target, columns=WIDTH, heads=heads
        ),
        lambda: edge_function.pull_source_gradients(
            function, edges, source_RW=source, target_NV=target, upstream_N=above, with_parameters=True, heads=heads
        ),
        lambda: edge_function.pull_target_gradients(
            function, edges, source_NW=source, target_RV=target, upstream_R=above, with_parameters=True, heads=heads
        ),
    ]
    bound = edge_function.scratch_bytes(
        edges=NODES * degree,
        rows=NODES,
        source=source.shape[1],
        target=WIDTH,
        message=WIDTH,
        heads=HEADS,
        features=0,
        itemsize=4,
        live=4,
    )
    peaks = [peak_bytes(call) for call in calls]
    assert bound / 2.5 < max(peaks) <= bound
