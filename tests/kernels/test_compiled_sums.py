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
from ooc.kernels.compiled import sums
from ooc.kernels.edge_function import TargetLayout, Upstream
from ooc.kernels.edge_terms import EdgeTerms
from ooc.kernels.edges import SelfLoops, TileEdges
from ooc.kernels.functions import Gated
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

    def numbers(self, pulled: int, tile: TileEdges, groups: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """Of rows pulled and own, and of edges."""
        rows, count = max(pulled, tile.rows), len(tile.indices_E)
        widths = {"source": self.source, "target": self.target, "gradient": self.message}
        torch.manual_seed(groups)
        found = {name: torch.randn(rows, groups * width, dtype=dtype) for name, width in widths.items()}
        return found | {
            "features": torch.randn(count, FEATURES, dtype=dtype),
            "loops": torch.randn(rows, FEATURES, dtype=dtype),
            "weight": torch.randn(FEATURES, groups * self.term, dtype=dtype),
            "bias": torch.randn(groups * self.term, dtype=dtype),
        }

    def pulls(self, module: Any, given: dict[str, Tensor], tile: TileEdges, pulled: int, map: str) -> list[Tensor]:
        """Messages, gradients of sources and of targets, and of the map."""
        groups = given["source"].shape[1] // self.source
        function, terms, loop = self.function(groups), None, 0
        if map:
            tile = replace(tile, features_EK=given["features"])
            loop = FEATURES if tile.self_loops is SelfLoops.EXACTLY_ONE else 0
            bias = given["bias"] if map == "bias" else None
            loops = given["loops"][: tile.rows] if loop else None
            terms = EdgeTerms(range(groups), given["source"].dtype, given["weight"], bias, loops)
        layout = TargetLayout(groups, self.target, self.message, 0, loop)
        above = Upstream(given["gradient"], None)
        packed = layout.pack(given["target"], above, given["loops"] if loop else None)
        own = slice(tile.rows)
        value, _ = module.pull_messages(
            function, tile, source_NW=given["source"][:pulled], target_RV=given["target"][own],
            columns=groups * self.message, terms=terms,
        )  # fmt: skip
        sources = module.pull_source_gradients(
            function, tile, source_RW=given["source"][own], target_NP=packed[:pulled], layout=layout, terms=terms
        )
        targets, of_map = module.pull_target_gradients(
            function, tile, source_NW=given["source"][:pulled], target_RV=given["target"][own],
            upstream_R=Upstream(given["gradient"][own], None), with_map=terms is not None, terms=terms,
        )  # fmt: skip
        return [value, sources, targets, *([] if of_map is None else [of_map])]


def gated(channels: int) -> Case:
    return Case(Gated, 2 * channels, channels, channels, 2 * channels)


def narrow(tile: TileEdges) -> TileEdges:
    """With lists of 32 bits: all loops compiled once more would take long."""
    return replace(tile, indices_E=tile.indices_E.int(), offsets_R1=tile.offsets_R1.int())


@given(
    tiles(), st.sampled_from(list(DTYPES)), st.integers(1, 5), st.integers(1, 20), st.sampled_from(["", "map", "bias"])
)
@settings(max_examples=60, deadline=None)
def test_gated(tile: tuple[TileEdges, int], dtype: torch.dtype, groups: int, channels: int, map: str) -> None:
    edges, pulled = narrow(tile[0]), tile[1]
    case = gated(channels)
    numbers = case.numbers(pulled, edges, groups, dtype)
    found, expected = (case.pulls(module, numbers, edges, pulled, map) for module in (sums, edge_function))
    for one, other in zip(found, expected, strict=True):
        same(one, other)


@given(tiles(), st.sampled_from(list(DTYPES)), st.integers(2, 5), st.integers(1, 20), st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_groups_have_the_same_bits_whichever_are_computed(
    tile: tuple[TileEdges, int], dtype: torch.dtype, groups: int, channels: int, first: int
) -> None:
    edges, pulled, first = narrow(tile[0]), tile[1], min(first, groups - 1)
    case = gated(channels)
    numbers = case.numbers(pulled, edges, groups, dtype)
    by_group = {
        name: one if name in ("features", "loops") else one.unflatten(-1, (groups, -1))[..., first:, :].flatten(-2)
        for name, one in numbers.items()
    }
    whole, part = (case.pulls(sums, one, edges, pulled, "bias") for one in (numbers, by_group))
    for one, other in zip(whole, part, strict=True):
        assert torch.equal(one.unflatten(1, (groups, -1))[:, first:].flatten(1), other)


@pytest.mark.parametrize("strange", [float("nan"), float("inf"), -float("inf"), 1e30, -1e30])
def test_what_is_no_number_comes_through_a_gate_as_in_torch(strange: float) -> None:
    edges = TileEdges(torch.tensor([0, 1, 2, 3]).int(), torch.tensor([0, 2, 4]).int(), 0, 4)
    case = gated(3)
    numbers = case.numbers(4, edges, 2, torch.float32)
    for name in ("source", "target", "gradient"):
        changed = numbers | {name: numbers[name].clone()}
        changed[name][1, 2] = strange
        found, expected = (case.pulls(module, changed, edges, 4, "") for module in (sums, edge_function))
        for one, other in zip(found, expected, strict=True):
            same(one, other)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_features_of_other_types(dtype: torch.dtype) -> None:
    """Those that loops read, and those that they leave to torch."""
    edges = TileEdges(torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 4]), 0, 4)
    case = gated(8)
    numbers = case.numbers(4, edges, 3, torch.float32)
    numbers["features"] = numbers["features"].to(dtype)
    found, expected = (case.pulls(module, numbers, edges, 4, "bias") for module in (sums, edge_function))
    for one, other in zip(found, expected, strict=True):
        same(one, other)
