# SPDX-License-Identifier: Apache-2.0
"""What a compiled loop allocates for a tile, with what layers put together around it, stays within the bound that
admission is given, which no edge adds to."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("numba")

from ooc.kernels import pulls
from ooc.kernels.compiled.terms import loop_features
from ooc.kernels.edge_terms import LoopFeatures
from ooc.kernels.edges import SelfLoops, TileEdges
from ooc.kernels.functions import (
    Activation,
    EdgeFunction,
    Factor,
    Gatv2,
    GatWithFeatures,
    Product,
    Rectified,
    TransformerAttention,
    gated,
)
from ooc.model.layers.edge_functions import EdgeTerm, FunctionAttention, FunctionSum
from ooc.model.layers.per_edge import AttentionOptions, EdgeAggregate, GatAttention, Maximum, Pulling
from ooc.model.lowering.values import Features
from tests.examples import thorough
from tests.kernels.test_kernel_memory import peak_bytes

ROWS, HEADS, CHANNELS, FEATURES = 256, 4, 16, 5
WIDTH = HEADS * CHANNELS
LINEAR, OF_BOTH, OF_HEADS = nn.Linear(FEATURES, WIDTH), nn.Linear(FEATURES, 2 * WIDTH), nn.Linear(FEATURES, HEADS)
ATT = nn.Parameter(torch.randn(1, HEADS, CHANNELS))


class Key:
    """What masks are drawn for."""

    seed = epoch = 0


def term_of(linear: nn.Linear, columns: int) -> EdgeTerm:
    parameters = linear.weight, linear.bias
    return EdgeTerm(FEATURES, columns, lambda: parameters, parameters)


LOOPS = LoopFeatures(is_mean=True)
OPTIONS = AttentionOptions(HEADS, CHANNELS, SelfLoops.EXACTLY_ONE, 0.5, 0)
AS_STORED = replace(OPTIONS, self_loops=SelfLoops.AS_STORED)
OF_ONE_HEAD = replace(OPTIONS, heads=1, channels=WIDTH)
BY_COLUMN = AttentionOptions(WIDTH, 1, SelfLoops.AS_STORED, 0.0, 0)


def attention(
    function: Callable[[range], EdgeFunction], source: int, target: int | None, **options: object
) -> EdgeAggregate:
    values = Features(0, source), None if target is None else Features(1, target)
    given = {"options": OPTIONS, "keep": True, **options}
    return FunctionAttention(2, *values, functions=function, **given)


def gatv2(groups: range) -> Gatv2:
    return Gatv2(ATT.detach()[0, groups.start : groups.stop], 0.2)


def gat(groups: range) -> GatWithFeatures:
    return GatWithFeatures(len(groups), 0.2)


def dots(groups: range) -> TransformerAttention:
    return TransformerAttention(len(groups))


def scaled_and_shifted(groups: range) -> Product:
    of_target = Factor(of_source=False)
    return Product(len(groups), (of_target, Factor(of_target=False)), of_target, Factor(Activation.RELU))


AGGREGATES: dict[str, Callable[[], EdgeAggregate]] = {
    "GAT": lambda: GatAttention(
        2, Features(0, WIDTH + HEADS), Features(1, HEADS), OPTIONS, negative_slope=0.2, keep=True
    ),
    "signed": lambda: GatAttention(
        2, Features(0, WIDTH + 1), Features(1, 1), OF_ONE_HEAD, negative_slope=None, keep=True
    ),
    "maxima": lambda: Maximum(1, Features(0, WIDTH), keep=True),
    "GATv2": lambda: attention(gatv2, WIDTH, WIDTH, att=ATT),
    "GATv2, features": lambda: attention(
        gatv2, WIDTH, WIDTH, att=ATT, term=replace(term_of(LINEAR, CHANNELS), loops=LOOPS)
    ),
    "GAT, features": lambda: attention(
        gat, WIDTH + HEADS, HEADS, term=replace(term_of(OF_HEADS, 1), loops=LOOPS)
    ),
    "Transformer": lambda: attention(dots, 2 * WIDTH, WIDTH, options=AS_STORED),
    "Transformer, features": lambda: attention(
        dots, 2 * WIDTH, WIDTH, options=AS_STORED, term=term_of(LINEAR, CHANNELS)
    ),
    "ResGated": lambda: FunctionSum(
        *(2, Features(0, 2 * WIDTH), Features(1, WIDTH)),
        channels=CHANNELS, functions=lambda groups: gated(len(groups)), term=term_of(OF_BOTH, 2 * CHANNELS), keep=True,
    ),
    "two factors of both ends": lambda: FunctionSum(
        *(2, Features(0, 2 * WIDTH), Features(1, 2 * WIDTH)),
        channels=CHANNELS, columns=WIDTH, functions=lambda groups: Product(len(groups), (Factor(), Factor())),
        keep=True,
    ),
    "scaled and shifted": lambda: FunctionSum(
        *(2, Features(0, WIDTH), Features(1, 2 * WIDTH)),
        channels=CHANNELS, columns=WIDTH, functions=scaled_and_shifted, keep=True,
    ),
    "GINE": lambda: FunctionSum(
        1, Features(0, WIDTH), channels=1, functions=lambda groups: Rectified(), term=term_of(LINEAR, 1), keep=True
    ),
    "GEN": lambda: attention(
        lambda groups: Rectified(1.0, 1e-7), WIDTH, None, options=BY_COLUMN, term=term_of(LINEAR, 1)
    ),
}  # fmt: skip


def tile(degree: int, *, hub: bool) -> TileEdges:
    offsets = torch.arange(ROWS + 1, dtype=torch.int32) * degree
    if hub:
        offsets[1:] = offsets[-1].clone()
    indices = torch.arange(ROWS).repeat_interleave(degree) if hub else torch.arange(degree).repeat(ROWS) % ROWS
    return TileEdges(indices.int(), offsets, 0, ROWS, features_EK=torch.ones(len(indices), FEATURES))


def rows(columns: int) -> Tensor:
    return torch.randn(ROWS, columns, generator=torch.Generator().manual_seed(columns))


def target_rows(aggregate: EdgeAggregate) -> Tensor:
    return rows(0 if aggregate.target is None else aggregate.target.columns)


@pytest.mark.parametrize(
    ("hub", "degree"), thorough(product([False, True], [0, 20, 250]), (True, 0), (True, 20), (False, 250))
)
@pytest.mark.parametrize("name", AGGREGATES)
def test_what_loops_take(name: str, degree: int, hub: bool) -> None:
    aggregate, edges = AGGREGATES[name](), tile(degree, hub=hub)
    source, dp = rows(aggregate.source.columns), rows(aggregate.upstream_columns)
    target, groups = target_rows(aggregate), range(aggregate.groups)
    calls = {
        Pulling.FORWARD: lambda: aggregate.forward(Key(), edges, source, target, groups),
        Pulling.SOURCES: lambda: aggregate.backward_sources(Key(), edges, dp, source, groups),
    }
    if aggregate.pulls_targets:
        calls[Pulling.TARGETS] = lambda: aggregate.backward_targets(Key(), edges, source, dp, groups)
    for pulling, call in calls.items():
        kind = aggregate.per_edge(pulling, aggregate.columns, None, 4)
        assert not kind.edges_at_once and not kind.bytes_per_edge
        bound = ROWS * kind.bytes_per_row + kind.fixed_bytes
        assert bound / 4 < peak_bytes(call) <= bound, pulling


@pytest.mark.parametrize("is_mean", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("degree", [0, 3, 9000])
def test_features_of_self_loops_have_the_bits_of_torch_s(is_mean: bool, dtype: torch.dtype, degree: int) -> None:
    """Rows of more edges than a piece are added up piece by piece, too."""
    edges = tile(3, hub=False) if degree < 9000 else tile(9000 // ROWS + 1, hub=True)
    edges = edges if degree else tile(0, hub=False)
    values = torch.randn(edges.features_EK.shape, generator=torch.Generator().manual_seed(1))
    loops, edges = LoopFeatures(is_mean=is_mean), replace(edges, features_EK=values)
    assert torch.equal(loop_features(loops, edges, dtype), loops.of(edges, dtype))


@pytest.mark.parametrize("name", [name for name in AGGREGATES if "features" in name or name in ("GINE", "GEN")])
def test_features_in_half_the_bytes_are_converted(name: str) -> None:
    """No loop reads float16; what it computes is that of the same numbers in float32."""
    aggregate, edges = AGGREGATES[name](), tile(20, hub=False)
    assert edges.features_EK is not None
    half = torch.randn(edges.features_EK.shape, generator=torch.Generator().manual_seed(1)).half()
    source, target, groups = rows(aggregate.source.columns), target_rows(aggregate), range(aggregate.groups)
    found = [
        aggregate.forward(Key(), replace(edges, features_EK=features), source, target, groups)
        for features in (half, half.float())
    ]
    assert torch.equal(*found)


def test_torch_s_operators_are_planned_for_where_they_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pulls.BY_DEVICE, "cpu", pulls.of_torch)
    for make in AGGREGATES.values():
        assert make().per_edge(Pulling.FORWARD, WIDTH, None, 4).edges_at_once
