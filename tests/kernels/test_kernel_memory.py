# SPDX-License-Identifier: Apache-2.0
"""What a kernel allocates for a tile stays within the bound that admission is given, and not far below it."""

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ooc.kernels import edge_function, gat, maximum, memory
from ooc.kernels.dropout.edges import EdgeDropout
from ooc.kernels.edge_function import EdgeMessages, Heads, TargetLayout, Upstream
from ooc.kernels.edge_terms import EdgeTerms
from ooc.kernels.edges import EDGES_PER_PIECE, SelfLoops, TileEdges
from ooc.kernels.functions import Gatv2, TransformerAttention
from tests.examples import thorough

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
    return numpy_peak + torch_peak_bytes(compute)


def torch_peak_bytes(compute: Callable[[], object]) -> int:
    """The most that tensors hold at once."""
    with torch.no_grad(), torch.profiler.profile(profile_memory=True) as profile:
        compute()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def tile(degree: int) -> TileEdges:
    generator = torch.Generator().manual_seed(0)
    indices = torch.randint(0, NODES, (NODES, degree), generator=generator).sort().values.view(-1).int()
    offsets = torch.arange(NODES + 1, dtype=torch.int32) * degree
    return TileEdges(indices, offsets, 0, NODES, SelfLoops.EXACTLY_ONE)


def rows(columns: int, seed: int = 0) -> Tensor:
    return torch.randn(NODES, columns, generator=torch.Generator().manual_seed(seed))


def bound_of(degree: int, edges_at_once: int, bounds: tuple[int, int]) -> int:
    """What the planner makes of a kernel's bounds."""
    per_edge, per_row = bounds
    return min(NODES * (degree + 1), edges_at_once + 1) * per_edge + NODES * per_row


@pytest.mark.parametrize("degree", [2, 20, 200])
@pytest.mark.parametrize("dropout", [None, EdgeDropout(0.5, 0, 0, 0)])
@pytest.mark.parametrize("slices", [1, HEADS])
def test_gat(degree: int, dropout: EdgeDropout | None, slices: int) -> None:
    heads = gat.GatHeads(range(HEADS), 0.2, dropout, slices)
    edges, scores = tile(degree), rows(HEADS)
    source, target = rows(WIDTH + gat.SOURCE_SCALARS * HEADS), rows(WIDTH + gat.TARGET_SCALARS * HEADS)
    calls = [
        lambda: gat.attend(heads, edges, source_NS=source, a_dst_RG=scores, keep=True),
        lambda: gat.pull_sources(heads, edges, target_NS=target, source_RS=source),
    ]
    options = dict(channels=CHANNELS, itemsize=4, dropout=dropout is not None)
    bounds = memory.gat(heads=HEADS // slices, slices=slices, **options)
    bound = bound_of(degree, EDGES_PER_PIECE, bounds.of_torch)
    peaks = [peak_bytes(call) for call in calls]
    assert bound / 2.5 < max(peaks) <= bound


@pytest.mark.parametrize("degree", [2, 20, 200])
def test_maximum(degree: int) -> None:
    edges, source, target = tile(degree), rows(WIDTH), rows(2 * WIDTH)
    peaks = [
        peak_bytes(lambda: maximum.pull_maxima(edges, source, keep=True)),
        peak_bytes(lambda: maximum.pull_sources(edges, target_NK=target, source_RW=source)),
    ]
    bound = bound_of(degree, EDGES_PER_PIECE, memory.maximum(columns=WIDTH, itemsize=4).of_torch)
    assert bound / 2.5 < max(peaks) <= bound


@pytest.mark.parametrize("degree", thorough([2, 20, 200], 2))
@pytest.mark.parametrize("function", [Gatv2(rows(CHANNELS)[:HEADS].requires_grad_(), 0.2), TransformerAttention(HEADS)])
@pytest.mark.parametrize("features", [0, 8])
def test_edge_functions(degree: int, function: Gatv2 | TransformerAttention, features: int) -> None:
    edges, heads = tile(degree), Heads(range(HEADS))
    terms = None
    if features:
        edges = replace(edges, features_EK=torch.ones(NODES * degree, features))
        terms = EdgeTerms(range(HEADS), torch.float32, rows(WIDTH)[:features].clone(), None, rows(features))
    source = rows(WIDTH if isinstance(function, Gatv2) else 2 * WIDTH)
    target, above = rows(WIDTH, 1), Upstream(rows(WIDTH, 2), rows(2 * HEADS))
    layout = TargetLayout(HEADS, CHANNELS, CHANNELS, 2)
    packed = layout.pack(target, above)
    messages = EdgeMessages(function, edges, terms, heads)
    given: dict[str, Any] = {"source_NW": source, "target_RV": target}
    calls = [
        lambda: edge_function.pull_messages(messages, **given, columns=WIDTH),
        lambda: edge_function.pull_source_gradients(messages, source_RW=source, target_NP=packed, layout=layout),
        lambda: edge_function.pull_target_gradients(messages, **given, upstream_R=above, with_map=terms is not None),
    ]
    bounds = memory.messages(
        groups=HEADS,
        source=source.shape[1],
        brought=WIDTH,
        message=WIDTH,
        packed=layout.columns,
        pulled=WIDTH,
        itemsize=4,
        features=features,
        term=WIDTH if features else 0,
    )
    bound = bound_of(degree, EDGES_PER_PIECE, bounds.of_torch)
    peaks = [peak_bytes(call) for call in calls]
    assert bound / (3 if features else 2.5) < max(peaks) <= bound
