# SPDX-License-Identifier: Apache-2.0
"""Compiled loops of attention by dot products give what torch's operators do."""

from dataclasses import replace
from functools import partial
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
from ooc.kernels.edge_function import Heads, TargetLayout, upstream
from ooc.kernels.edge_terms import EdgeTerms
from ooc.kernels.edges import SelfLoops, TileEdges
from ooc.kernels.functions import TransformerAttention
from tests.examples import examples, thorough
from tests.kernels.kernel_cases import over_edges
from tests.kernels.test_compiled import DTYPES, same, tiles


def of_heads(matrix: Tensor, heads: int, chosen: range) -> Tensor:
    """The columns of some of the heads."""
    return matrix.view(len(matrix), heads, -1)[:, chosen.start : chosen.stop].flatten(1)


def some_terms(
    features: int, has_bias: bool, heads: range, channels: int, loops: Tensor, dtype: torch.dtype
) -> EdgeTerms:
    generator = torch.Generator().manual_seed(1)
    columns = heads.stop * channels
    weight = torch.randn(features, columns, generator=generator, dtype=dtype)
    bias = torch.randn(columns, generator=generator, dtype=dtype) if has_bias else None
    here = slice(heads.start * channels, columns)
    return EdgeTerms(heads, dtype, weight[:, here].contiguous(), bias if bias is None else bias[here], loops)


@pytest.mark.timeout(600)  # loops are compiled
@pytest.mark.parametrize("dtype", thorough(DTYPES, torch.float64))
@given(
    tiles(), st.integers(1, 4), st.integers(1, 40), st.booleans(),
    st.sampled_from([0, 0, 1, 3]), st.booleans(), st.integers(0, 3),
)  # fmt: skip
@settings(max_examples=examples(40), deadline=None)
def test_all_pulls(
    dtype: torch.dtype, tile: tuple[TileEdges, int], heads: int, channels: int, drops: bool, features: int,
    has_bias: bool, first: int,
) -> None:  # fmt: skip
    edges, pulled = tile
    torch.manual_seed(0)
    random = partial(torch.randn, dtype=dtype)
    loops = random(edges.rows, features)
    if features:
        edges = replace(edges, features_EK=random(len(edges.indices_E), features))
    dropout = EdgeDropout(0.4, 1, 2, 3) if drops else None
    columns = heads * channels
    source, query, gradient = random(pulled, 2 * columns), random(edges.rows, columns), random(edges.rows, columns)
    own, layout = random(edges.rows, 2 * columns), TargetLayout(heads, channels, channels, 2)
    target = random(pulled, layout.columns)
    target.view(pulled, heads, -1)[:, :, 2 * channels].abs_()

    def pull(kernels: Any, chosen: range, statistics: Tensor | None = None) -> list[Tensor]:
        terms = None
        if features:
            terms = some_terms(
                features, has_bias, range(first + chosen.start, first + chosen.stop), channels, loops, dtype
            )
        function, some = TransformerAttention(len(chosen)), partial(of_heads, heads=heads, chosen=chosen)
        options: dict[str, Any] = {
            "terms": terms,
            "heads": Heads(range(first + chosen.start, first + chosen.stop), dropout),
        }
        out, lse = over_edges(
            kernels.pull_messages,
            function,
            edges,
            source_NW=some(source),
            target_RV=some(query),
            columns=len(chosen) * channels,
            **options,
        )
        above = upstream(some(gradient), out, lse)
        if statistics is not None:
            above = replace(above, statistics=some(statistics))
        rows, of_map = over_edges(
            kernels.pull_target_gradients,
            function,
            edges,
            source_NW=some(source),
            target_RV=some(query),
            upstream_R=above,
            with_map=True,
            **options,
        )
        sources = over_edges(kernels.pull_source_gradients,
            function, edges, source_RW=some(own), target_NP=some(target),
            layout=replace(layout, groups=len(chosen)), **options,
        )  # fmt: skip
        assert lse is not None and above.statistics is not None
        assert (of_map is None) == (terms is None)
        return [out, lse, above.statistics, rows, sources, *([] if of_map is None else [of_map])]

    expected = pull(edge_function, range(heads))
    found = pull(compiled, range(heads), expected[2])
    for one, other in zip(found, expected, strict=True):
        same(one, other)
    fewer = range(heads // 2, heads)
    for one, some_of_it in zip(found, pull(compiled, fewer, expected[2]), strict=True):
        assert torch.equal(of_heads(one, heads, fewer), some_of_it)


def test_features_that_no_loop_reads_are_converted() -> None:
    half = TileEdges(
        torch.tensor([0, 1, 2]).int(), torch.tensor([0, 2, 3]).int(), 0, 3, features_EK=torch.randn(3, 2).half()
    )
    terms = EdgeTerms(range(1), torch.float32, torch.randn(2, 4))
    options: dict[str, Any] = {"source_NW": torch.randn(3, 8), "target_RV": torch.randn(2, 4), "columns": 4}
    options |= {"terms": terms, "heads": Heads(range(1))}
    assert half.features_EK is not None
    wide = replace(half, features_EK=half.features_EK.float())
    pull = partial(over_edges, compiled.pull_messages, TransformerAttention(1), **options)
    narrow, expected = map(pull, (half, wide))
    for one, other in zip(narrow, expected, strict=True):
        assert one is not None and other is not None and torch.equal(one, other)


@pytest.mark.parametrize("loops", SelfLoops)
def test_a_row_whose_neighbours_are_all_absent_has_none(loops: SelfLoops) -> None:
    edges = TileEdges(torch.tensor([4, 3]).int(), torch.tensor([0, 1, 2]).int(), 3, 5, loops)
    options: dict[str, Any] = {"source_NW": torch.randn(3, 8), "target_RV": torch.randn(2, 4), "heads": Heads(range(1))}
    out, lse = over_edges(compiled.pull_messages, TransformerAttention(1), edges, **options, columns=4)
    assert lse is not None and not out.any() and not lse.any()


def test_damaged_lists_are_named() -> None:
    options: dict[str, Any] = {"source_NW": torch.randn(3, 8), "target_RV": torch.randn(2, 4), "columns": 4}
    edges = TileEdges(torch.tensor([0, 7]).int(), torch.tensor([0, 1, 2]).int(), 0, 3)
    with pytest.raises(StoreError, match="indices are damaged"):
        over_edges(compiled.pull_messages, TransformerAttention(1), edges, **options, heads=Heads(range(1)))
    edges = TileEdges(torch.tensor([2, 1]).int(), torch.tensor([0, 2, 2]).int(), 0, 3)
    dropping = Heads(range(1), EdgeDropout(0.5, 0, 0, 0))
    with pytest.raises(StoreError, match="ascending order"):
        over_edges(compiled.pull_messages, TransformerAttention(1), edges, **options, heads=dropping)


def test_infinite_numbers_and_none_propagate_as_pyg_has_it() -> None:
    edges = TileEdges(torch.tensor([0, 1, 2, 1]).int(), torch.tensor([0, 2, 3, 4]).int(), 0, 3)
    source = torch.ones(3, 8)
    source[0, 1], source[2, 5] = torch.nan, torch.inf
    options: dict[str, Any] = {"source_NW": source, "target_RV": torch.ones(3, 4), "heads": Heads(range(1))}
    out, _ = over_edges(compiled.pull_messages, TransformerAttention(1), edges, **options, columns=4)
    same(out, torch.tensor([[torch.nan] * 4, [1, torch.inf, 1, 1], [1, 1, 1, 1]]))
