# SPDX-License-Identifier: Apache-2.0
"""Attention by GATv2's scores and by GAT's with features of edges gives compiled what torch's operators give."""

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ooc.errors import StoreError
from ooc.kernels import edge_function
from ooc.kernels.compiled import edge_function as compiled
from ooc.kernels.dropout.edges import EdgeDropout
from ooc.kernels.edge_function import Heads, TargetLayout, Upstream
from ooc.kernels.edge_terms import EdgeTerms
from ooc.kernels.edges import SelfLoops, TileEdges
from ooc.kernels.functions import EdgeFunction, Gatv2, GatWithFeatures
from tests.examples import examples
from tests.kernels.kernel_cases import over_edges
from tests.kernels.test_compiled import DTYPES, same, tiles

KINDS = ("GATv2", "GAT", "GAT of several")
pytestmark = pytest.mark.timeout(600)  # loops are compiled, on a loaded machine for minutes


@dataclass(frozen=True)
class Layer:
    """Matrices of all heads of one layer over a tile, either way, and what is computed of some of the heads."""

    kind: str
    tile: TileEdges
    source: Tensor
    target: Tensor
    gradient: Tensor
    statistics: Tensor
    att: Tensor
    slope: float
    p: float | None
    weight: Tensor | None
    bias: Tensor | None
    loops: Tensor | None

    @classmethod
    def of(
        cls, kind: str, tile: TileEdges, pulled: int, dtype: torch.dtype, heads: int, channels: int, slope: float,
        p: float | None, features: int, bias: bool,
    ) -> "Layer":  # fmt: skip
        """With random numbers."""
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        source, target, term = {
            "GATv2": (channels, channels, channels), "GAT": (channels + 1, 1, 1), "GAT of several": (channels + 1, 3, 1)
        }[kind]  # fmt: skip
        rows = max(pulled, tile.start + tile.rows)
        return cls(
            kind,
            replace(tile, features_EK=draw(len(tile.indices_E), features)) if features else tile,
            draw(rows, heads, source),
            draw(rows, heads, target),
            draw(rows, heads, channels),
            torch.stack((draw(rows, heads) + 3, draw(rows, heads)), dim=2),
            draw(heads, channels),
            slope,
            p,
            draw(features, heads, term) if features else None,
            draw(heads, term) if features and bias else None,
            draw(tile.rows, features) if features and tile.self_loops is SelfLoops.EXACTLY_ONE else None,
        )

    def pulls(self, module: ModuleType, pulled: int, heads: range) -> list[Tensor]:
        """Everything that the three pulls of the tile give for some heads, of rows head by head."""
        count, own, part = (
            len(heads),
            slice(self.tile.start, self.tile.start + self.tile.rows),
            slice(heads.start, heads.stop),
        )
        function: EdgeFunction = Gatv2(self.att[part], self.slope)
        if self.kind != "GATv2":
            function = GatWithFeatures(count, self.slope, *((2, 3) if self.kind == "GAT of several" else ()))

        def rows(matrix: Tensor, span: slice) -> Tensor:
            return matrix[span, part].flatten(1)

        options: dict[str, Any] = {"heads": Heads(heads, None if self.p is None else EdgeDropout(self.p, 1, 2, 3))}
        if self.weight is not None:
            bias = None if self.bias is None else self.bias[part].flatten()
            weight = self.weight[:, part].flatten(1)
            options["terms"] = EdgeTerms(heads, self.source.dtype, weight, bias, self.loops)
        near = slice(0, pulled)
        value, lse = over_edges(module.pull_messages,
            function, self.tile, source_NW=rows(self.source, near), target_RV=rows(self.target, own),
            columns=count * self.att.shape[1], **options,
        )  # fmt: skip
        above = Upstream(rows(self.gradient, near), rows(self.statistics, near))
        layout = TargetLayout(
            count, self.target.shape[2], self.att.shape[1], 2, 0 if self.loops is None else self.loops.shape[1]
        )
        brought_loops = None if self.loops is None else self.loops.new_zeros(pulled, self.loops.shape[1])
        d_source = over_edges(module.pull_source_gradients,
            function, self.tile, source_RW=rows(self.source, own),
            target_NP=layout.pack(rows(self.target, near), above, brought_loops), layout=layout, **options,
        )  # fmt: skip
        brought = self.target[own, part]
        if self.kind == "GATv2":
            brought = torch.cat((brought, self.att[part].expand(self.tile.rows, -1, -1)), dim=2)
        d_target, d_map = over_edges(module.pull_target_gradients,
            function, self.tile, source_NW=rows(self.source, near), target_RV=brought.flatten(1),
            upstream_R=Upstream(rows(self.gradient, own), rows(self.statistics, own)),
            with_map=self.weight is not None, **options,
        )  # fmt: skip
        found = [value, lse, d_source, d_target, *([] if d_map is None else [d_map])]
        return [matrix.view(self.tile.rows, count, -1) for matrix in found]


@st.composite
def layers(draw: st.DrawFn) -> tuple[Layer, int]:
    tile, pulled = draw(tiles())
    dtype = draw(st.sampled_from(list(DTYPES)))
    layer = Layer.of(
        draw(st.sampled_from(KINDS)), tile, pulled, dtype, draw(st.integers(1, 5)),
        draw(st.integers(1, 40)), draw(st.sampled_from([0.2, 0.0, -0.5, 1.0])), draw(st.sampled_from([None, 0.4])),
        draw(st.sampled_from([0, 0, 1, 3])), draw(st.booleans()),
    )  # fmt: skip
    return layer, pulled


@given(layers())
@settings(max_examples=examples(50), deadline=None)
def test_all_pulls_are_torch_s(case: tuple[Layer, int]) -> None:
    layer, pulled = case
    heads = range(layer.att.shape[0])
    found = layer.pulls(compiled, pulled, heads)  # type: ignore[arg-type]
    for one, expected in zip(found, layer.pulls(edge_function, pulled, heads), strict=True):
        scale = expected.nan_to_num(0.0, 0.0, 0.0).abs().max().clamp(min=1) if expected.numel() else 1
        same(one / scale, expected / scale)


@given(layers(), st.data())
@settings(max_examples=examples(40), deadline=None)
def test_heads_and_tiles_change_no_bit(case: tuple[Layer, int], data: st.DataObject) -> None:
    layer, pulled = case
    count = layer.att.shape[0]
    first = data.draw(st.integers(0, count - 1))
    some = range(first, data.draw(st.integers(first + 1, count)))
    every = layer.pulls(compiled, pulled, range(count))
    for one, whole in zip(layer.pulls(compiled, pulled, some), every, strict=True):
        assert torch.equal(one, whole[:, some.start : some.stop])
    tile, row = layer.tile, data.draw(st.integers(0, layer.tile.rows - 1))
    begin, end = int(tile.offsets_R1[row]), int(tile.offsets_R1[row + 1])
    alone = replace(
        layer,
        tile=replace(
            tile, indices_E=tile.indices_E[begin:end], offsets_R1=tile.offsets_R1[row : row + 2] - begin,
            start=tile.start + row, features_EK=None if tile.features_EK is None else tile.features_EK[begin:end],
        ),
        loops=None if layer.loops is None else layer.loops[row : row + 1],
    )  # fmt: skip
    for one, whole in zip(alone.pulls(compiled, pulled, range(count)), every, strict=True):
        assert torch.equal(one[0], whole[row])


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_number_stays_so(kind: str) -> None:
    tile = TileEdges(torch.tensor([0, 1, 2, 0, 1]).int(), torch.tensor([0, 3, 3, 5]).int(), 0, 3)
    layer = Layer.of(kind, tile, 3, torch.float64, 2, 9, 0.2, None, 0, False)
    for number in (torch.nan, torch.inf):
        layer.source[2, 1, 3] = number
        found = layer.pulls(compiled, 3, range(2))
        for one, expected in zip(found, layer.pulls(edge_function, 3, range(2)), strict=True):
            assert torch.equal(one.isnan(), expected.isnan())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loops", SelfLoops)
def test_a_row_whose_neighbours_are_all_absent_has_none(kind: str, loops: SelfLoops) -> None:
    numbers = (torch.tensor(one, dtype=torch.int32) for one in ([4, 3], [0, 1, 2]))
    layer = Layer.of(kind, TileEdges(*numbers, 3, 5, loops), 3, torch.float32, 2, 9, 0.2, None, 0, False)
    assert not any(found.any() for found in layer.pulls(compiled, 3, range(2)))


def test_damaged_lists_are_named() -> None:
    for kind in KINDS:
        tile = TileEdges(torch.tensor([0, 7], dtype=torch.int32), torch.tensor([0, 1, 2], dtype=torch.int32), 0, 3)
        with pytest.raises(StoreError, match="indices are damaged"):
            Layer.of(kind, tile, 3, torch.float32, 1, 2, 0.2, None, 0, False).pulls(compiled, 3, range(1))
        tile = TileEdges(torch.tensor([2, 1], dtype=torch.int32), torch.tensor([0, 2, 2], dtype=torch.int32), 0, 3)
        with pytest.raises(StoreError, match="ascending order"):
            Layer.of(kind, tile, 3, torch.float32, 1, 2, 0.2, 0.5, 0, False).pulls(compiled, 3, range(1))


def test_features_of_other_types_are_converted() -> None:
    tile = TileEdges(torch.tensor([0, 1]).int(), torch.tensor([0, 1, 2]).int(), 0, 3)
    layer = Layer.of("GATv2", tile, 3, torch.float32, 2, 4, 0.2, None, 3, True)
    halves = layer.tile.features_EK.half()  # type: ignore[union-attr]
    narrow, wide = (replace(layer, tile=replace(layer.tile, features_EK=one)) for one in (halves, halves.float()))
    for one, expected in zip(narrow.pulls(compiled, 3, range(2)), wide.pulls(compiled, 3, range(2)), strict=True):
        assert torch.equal(one, expected)
