# SPDX-License-Identifier: Apache-2.0
"""Sums over neighbours by a compiled loop are those of torch's ``embedding_bag``, to the bit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.nn.models import GCN

import ooc
from ooc.kernels import aggregate
from ooc.kernels.edges import SelfLoops, TileEdges
from tests.examples import examples

neighbour_sums = pytest.importorskip("ooc.kernels.compiled.neighbour_sums", reason="numba is not installed")


def _edges(degrees: list[int], nodes: int, dtype: torch.dtype) -> TileEdges:
    """Some rows' neighbours in the middle of a graph."""
    offsets = torch.tensor([0, *degrees]).cumsum(0)
    generator = torch.Generator().manual_seed(1)
    indices = torch.randint(nodes, (int(offsets[-1]),), generator=generator)
    return TileEdges(indices.to(dtype), offsets.to(dtype), nodes // 2, nodes)


@given(
    degrees=st.lists(st.one_of(st.integers(0, 5), st.sampled_from([70, 200])), min_size=1, max_size=20),
    width=st.one_of(st.integers(1, 40), st.sampled_from([32, 48, 63, 64, 65, 80, 96, 112, 127, 128, 129, 256, 300])),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    own=st.sampled_from([None, "all", "each", "added"]),
    integers=st.sampled_from([torch.int32, torch.int64]),
    weighted=st.booleans(),
    shorter=st.integers(0, 25),
    has_loops=st.booleans(),
)
@settings(max_examples=examples(50))
def test_bits_are_those_of_torch(
    degrees: list[int], width: int, dtype: torch.dtype, own: str | None, integers: torch.dtype, *, weighted: bool,
    shorter: int, has_loops: bool,
) -> None:  # fmt: skip
    """With weights, with what rows add of themselves, and where the source has fewer rows than the graph."""
    nodes, generator = 50, torch.Generator().manual_seed(2)
    tile = _edges(degrees, nodes, integers)
    source = torch.randn(nodes - shorter, width, generator=generator).to(dtype)
    if weighted and dtype is not torch.bfloat16:
        tile = replace(tile, weight_E=torch.randn(len(tile.indices_E), generator=generator).to(dtype))
    if own == "added":
        tile = replace(tile, self_loops=SelfLoops.EXACTLY_ONE, weight_E=None)
    each = torch.randn(tile.rows, 1, generator=generator).to(dtype)
    of_rows = {None: None, "all": 1.0, "each": each, "added": None}[own]
    expected = aggregate.pull_tile(tile, source, own=of_rows, has_loops=has_loops)
    assert torch.equal(neighbour_sums.pull_tile(tile, source, own=of_rows, has_loops=has_loops), expected)


def test_rows_are_put_where_they_belong() -> None:
    """If there is a place where they lie one right behind the other; else somewhere else."""
    tile = _edges([3, 0, 70], 50, torch.int32)
    source = torch.randn(50, 128, generator=torch.Generator().manual_seed(3))
    expected = aggregate.pull_tile(tile, source)
    place = torch.full((3, 128), torch.nan)
    assert neighbour_sums.pull_tile(tile, source, out=place) is place
    assert torch.equal(place, expected)
    apart = torch.full((3, 256), torch.nan)[:, :128]
    assert torch.equal(neighbour_sums.pull_tile(tile, source, out=apart), expected)
    assert apart.isnan().all()
    narrower = torch.full((3, 127), torch.nan)
    assert neighbour_sums.pull_tile(tile, source, out=narrower) is narrower
    assert torch.equal(narrower, expected[:, :127])


@pytest.mark.parametrize("neighbour", [-1, 50])
def test_a_neighbour_that_is_no_row_is_an_error(neighbour: int) -> None:
    """As of torch's."""
    tile = _edges([3, 0, 70], 50, torch.int32)
    tile.indices_E[40] = neighbour
    source = torch.randn(50, 128, generator=torch.Generator().manual_seed(3))
    for pull_tile in (aggregate.pull_tile, neighbour_sums.pull_tile):
        with pytest.raises(RuntimeError):
            pull_tile(tile, source)


def test_every_width_that_has_a_loop_is_rehearsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first pass: the widest may have none, where a narrower one, in whole cache lines, does."""
    store = ooc.convert("synthetic:nodes=600,edges=3000,features=100,classes=9,directed=1", tmp_path / "g.ooc")
    summed, rows, sums = set[int](), list[int](), neighbour_sums._sums

    def noted(edges: Any, numbers: Any, own: Any, source: Any, out: Any) -> bool:
        rows.append(len(source))
        if len(source) == 1:
            summed.add(source.shape[1])
        elif source.shape[1] not in summed:
            pytest.fail(f"{source.shape[1]} columns were not rehearsed")
        return bool(sums(edges, numbers, own, source, out))

    monkeypatch.setattr(neighbour_sums, "_sums", noted)
    model = GCN(100, 100, num_layers=3, out_channels=48)
    with ooc.Trainer(model, store, memory="200M", optimizer=torch.optim.Adam(model.parameters())) as trainer:
        trainer.fit(epochs=1, eval_every=0)
    assert max(rows) > 1, "a loop summed something"
