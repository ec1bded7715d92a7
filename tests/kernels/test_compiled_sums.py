# SPDX-License-Identifier: Apache-2.0
"""Compiled sums of gated and rectified messages, and their gradients, are torch's, column by column."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ooc.kernels import edge_function
from ooc.kernels.compiled import edge_function as compiled
from ooc.kernels.edge_function import EdgeMessages, Heads, TargetLayout, Upstream
from ooc.kernels.edge_terms import EdgeTerms
from ooc.kernels.edges import SelfLoops, TileEdges
from ooc.kernels.functions import Activation, Factor, Product, Rectified
from tests.examples import thorough
from tests.kernels.kernel_cases import over_edges
from tests.kernels.test_compiled import DTYPES, same, tiles

FEATURES = 6


@dataclass(frozen=True)
class Case:
    """What is pulled of some ``groups``: widths of a group of sources', targets' and terms' rows, and of messages."""

    function: Callable[[int], Any]
    source: int
    target: int
    message: int
    term: int
    is_softmax: bool = False

    def numbers(self, pulled: int, tile: TileEdges, groups: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """Of rows pulled and own, and of edges."""
        rows, count = max(pulled, tile.rows), len(tile.indices_E)
        widths = {"source": self.source, "target": self.target, "gradient": self.message, "d": 1, "lse": 1}
        torch.manual_seed(groups)
        found = {name: torch.randn(rows, groups * width, dtype=dtype) for name, width in widths.items()}
        return found | {
            "features": torch.randn(count, FEATURES, dtype=dtype),
            "lse": found["lse"] + 4,
            "terms": torch.randn(count, groups * self.term, dtype=dtype),
            "loops": torch.randn(rows, FEATURES, dtype=dtype),
            "weight": torch.randn(FEATURES, groups * self.term, dtype=dtype),
            "bias": torch.randn(groups * self.term, dtype=dtype),
        }

    def pulls(self, module: Any, given: dict[str, Tensor], tile: TileEdges, pulled: int, term: str) -> list[Tensor]:
        """Messages, gradients of sources and of targets, and of the map."""
        groups = given["source"].shape[1] // self.source
        loop_RK, weight, bias = None, None, None
        if term:
            tile = replace(tile, features_EK=given["terms" if term == "themselves" else "features"])
        if term in ("map", "bias"):
            weight, bias = given["weight"], given["bias"] if term == "bias" else None
            loop_RK = given["loops"] if tile.self_loops is SelfLoops.EXACTLY_ONE else None
        own, loop = slice(tile.rows), 0 if loop_RK is None else FEATURES
        terms = None
        if term:
            loops = None if loop_RK is None else loop_RK[own]
            terms = EdgeTerms(range(groups), given["source"].dtype, weight, bias, loops)
        heads = Heads(range(groups)) if self.is_softmax else None
        options: dict[str, Any] = {"terms": terms, "heads": heads}
        layout = TargetLayout(groups, self.target, self.message, 2 * self.is_softmax, loop)
        statistics = torch.stack((given["lse"], given["d"]), dim=2).flatten(1) if self.is_softmax else None
        above = Upstream(given["gradient"], statistics)
        packed = layout.pack(given["target"], above, loop_RK)
        value, lse = over_edges(module.pull_messages,
            self.function(groups), tile, source_NW=given["source"][:pulled], target_RV=given["target"][own],
            columns=groups * self.message, **options,
        )  # fmt: skip
        sources = over_edges(module.pull_source_gradients,
            self.function(groups), tile, source_RW=given["source"][own], target_NP=packed[:pulled], layout=layout,
            **options,
        )  # fmt: skip
        targets, of_map = over_edges(module.pull_target_gradients,
            self.function(groups), tile, source_NW=given["source"][:pulled], target_RV=given["target"][own],
            upstream_R=above.select(torch.arange(tile.rows)), with_map=weight is not None, **options,
        )  # fmt: skip
        return [one for one in (value, lse, sources, targets, of_map) if one is not None]


def product(channels: int, *factors: Factor, **more: Any) -> Case:
    like = Product(1, factors or (Factor(Activation.SIGMOID), Factor(of_target=False)), **more)
    return Case(
        lambda groups: replace(like, groups=groups),
        like.by_sources * channels,
        like.by_targets * channels,
        channels,
        len(like.factors) * channels,
    )


@st.composite
def factors(draw: st.DrawFn) -> Factor:
    """Of sources, of targets or both."""
    of_source, of_target = draw(st.sampled_from([(True, True), (True, False), (False, True)]))
    return Factor(draw(st.sampled_from(Activation)), draw(st.sampled_from([0.2, 1.0, 1.5])), of_source, of_target)


RECTIFIED = Case(lambda _: Rectified(), source=1, target=0, message=1, term=1)
SOFTMAX = Case(lambda _: Rectified(0.7, 1e-3), source=1, target=0, message=1, term=1, is_softmax=True)


@given(
    tiles(), st.sampled_from(list(DTYPES)), st.integers(1, 5), st.integers(1, 20), st.sampled_from(["", "map", "bias"]),
    st.lists(factors(), min_size=1, max_size=2).filter(lambda some: any(factor.of_source for factor in some)),
)  # fmt: skip
@settings(max_examples=120, deadline=None)
def test_products(
    tile: tuple[TileEdges, int], dtype: torch.dtype, groups: int, channels: int, map: str, factors: list[Factor]
) -> None:
    edges, pulled = tile
    case = product(channels, *factors)
    numbers = case.numbers(pulled, edges, groups, dtype)
    found, expected = (case.pulls(module, numbers, edges, pulled, map) for module in (compiled, edge_function))
    for one, other in zip(found, expected, strict=True):
        same(one, other)


@given(
    tiles(), st.sampled_from(list(DTYPES)), st.integers(1, 5), st.integers(1, 20), st.none() | factors(), factors(),
    st.lists(factors(), min_size=1, max_size=2).filter(lambda some: any(factor.of_source for factor in some)),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_products_with_something_added(
    tile: tuple[TileEdges, int], dtype: torch.dtype, groups: int, channels: int, added: Factor | None, outer: Factor,
    factors: list[Factor],
) -> None:  # fmt: skip
    edges, pulled = tile
    added = added and replace(added, activation=Activation.IDENTITY)
    case = product(channels, *factors, added=added, outer=outer)
    numbers = case.numbers(pulled, edges, groups, dtype)
    found, expected = (case.pulls(module, numbers, edges, pulled, "") for module in (compiled, edge_function))
    for one, other in zip(found, expected, strict=True):
        same(one, other)


@given(
    tiles(), st.sampled_from(list(DTYPES)), st.sampled_from([RECTIFIED, SOFTMAX]), st.integers(1, 70),
    st.sampled_from(["", "themselves", "map", "bias"]),
)  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_rectified(tile: tuple[TileEdges, int], dtype: torch.dtype, case: Case, columns: int, term: str) -> None:
    edges, pulled = tile
    if term:  # there are no loops then
        edges = replace(edges, self_loops=SelfLoops.AS_STORED)
    numbers = case.numbers(pulled, edges, columns, dtype)
    found, expected = (case.pulls(module, numbers, edges, pulled, term) for module in (compiled, edge_function))
    for one, other in zip(found, expected, strict=True):
        same(one, other)


@given(
    tiles(), st.sampled_from(list(DTYPES)), st.sampled_from([*map(product, (1, 7, 8, 20)), RECTIFIED, SOFTMAX]),
    st.integers(2, 40), st.integers(1, 39),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_columns_have_the_same_bits_whichever_are_computed(
    tile: tuple[TileEdges, int], dtype: torch.dtype, case: Case, groups: int, first: int
) -> None:
    (edges, pulled), first = tile, min(first, groups - 1)
    if case in (RECTIFIED, SOFTMAX):
        edges = replace(edges, self_loops=SelfLoops.AS_STORED)
    numbers = case.numbers(pulled, edges, groups, dtype)

    def others(one: Tensor) -> Tensor:
        return one.unflatten(-1, (groups, one.shape[-1] // groups))[..., first:, :].flatten(-2)

    by_group = {name: one if name in ("features", "loops") else others(one) for name, one in numbers.items()}
    whole, part = (case.pulls(compiled, one, edges, pulled, "bias") for one in (numbers, by_group))
    for one, other in zip(whole, part, strict=True):
        assert torch.equal(others(one), other)


@pytest.mark.parametrize("case", [product(3), RECTIFIED, SOFTMAX])
@pytest.mark.parametrize("strange", [float("nan"), float("inf"), -float("inf"), 1e30, -1e30])
def test_what_is_no_number_comes_through_as_in_torch(case: Case, strange: float) -> None:
    edges = TileEdges(torch.tensor([0, 1, 2, 3]).int(), torch.tensor([0, 2, 4]).int(), 0, 4)
    numbers = case.numbers(4, edges, 4, torch.float32)
    for name in ("source", "target", "gradient"):
        if numbers[name].numel():
            changed = numbers | {name: numbers[name].clone()}
            changed[name][1, 2] = strange
            for term in ("", "map"):
                found, expected = (case.pulls(module, changed, edges, 4, term) for module in (compiled, edge_function))
                for one, other in zip(found, expected, strict=True):
                    same(one, other)


@pytest.mark.parametrize("dtype", thorough([torch.float64, torch.float16], torch.float64))
def test_features_of_other_types(dtype: torch.dtype) -> None:
    """Those that loops read, and those that are converted."""
    edges = TileEdges(torch.tensor([0, 1, 2, 3]).int(), torch.tensor([0, 1, 4]).int(), 0, 4)
    case = product(8)
    numbers = case.numbers(4, edges, 3, torch.float32)
    numbers["features"] = numbers["features"].to(dtype)
    found, expected = (case.pulls(module, numbers, edges, 4, "bias") for module in (compiled, edge_function))
    for one, other in zip(found, expected, strict=True):
        same(one, other)


class Narrow:
    """Pulls of rows that are rounded to bfloat16, as they are or as float32."""

    def __init__(self, *, widened: bool) -> None:
        self.dtype = torch.float32 if widened else torch.bfloat16

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def pull(edges: EdgeMessages, **options: Any) -> Any:
            rows = {key: options[key] for key in ("source_NW", "target_NP") if key in options}
            pulled = {key: one.bfloat16().to(self.dtype) for key, one in rows.items()}
            return getattr(compiled, name)(edges, **options | pulled)

        return pull


def test_rows_of_bfloat16_are_computed_with_in_float32() -> None:
    """Bit for bit as if they had been float32 before. Softmaxes keep nothing in bfloat16, nor do layers with features
    of edges, as all that is rectified has."""
    edges = TileEdges(torch.tensor([0, 1, 2, 3]).int(), torch.tensor([0, 2, 4]).int(), 0, 4)
    case = product(3)
    numbers = case.numbers(4, edges, 4, torch.float32)
    narrow, wide = (case.pulls(Narrow(widened=widened), numbers, edges, 4, "") for widened in (False, True))
    for one, other in zip(narrow, wide, strict=True):
        assert one.dtype == torch.float32 and torch.equal(one, other)
