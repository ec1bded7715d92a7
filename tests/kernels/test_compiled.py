# SPDX-License-Identifier: Apache-2.0
"""Compiled loops give what torch's operators do."""

import math
import pickle
from importlib import import_module
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ooc.errors import StoreError
from ooc.kernels import gat, maximum
from ooc.kernels.compiled import gat as compiled_gat
from ooc.kernels.compiled import loops
from ooc.kernels.compiled import maximum as compiled_maximum
from ooc.kernels.compiled.lanes import NBYTES, exp, load, store
from ooc.kernels.compiled.loops import compiled
from ooc.kernels.dropout.edges import EdgeDropout
from ooc.kernels.edges import SelfLoops, TileEdges
from tests.processes import together

DTYPES = {torch.float32: 2e-5, torch.float64: 1e-12}


def same(found: Tensor, expected: Tensor) -> None:
    """To rounding, of sums of numbers as large as the largest."""
    rtol = DTYPES[expected.dtype]
    atol = rtol * max(1.0, float(expected.abs().max())) if expected.numel() else 0.0
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, equal_nan=True)


@st.composite
def tiles(draw: st.DrawFn) -> tuple[TileEdges, int]:
    """A tile with rows of no edges, of many, of repeated ones and of loops; and how many rows there are to pull."""
    nodes, rows = draw(st.integers(2, 40)), draw(st.integers(1, 12))
    start = draw(st.integers(0, max(0, nodes - rows)))
    rows = min(rows, nodes - start)
    counts = draw(st.lists(st.sampled_from([0, 1, 3, 17, 63, 64, 65, 200]), min_size=rows, max_size=rows))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    lists = [torch.randint(0, nodes, (count,), generator=generator).sort().values for count in counts]
    indices = torch.cat(lists).to(torch.int32)  # every type of these is compiled for itself, which takes seconds
    offsets = torch.tensor([0, *counts]).cumsum(0).to(indices.dtype)
    loops = draw(st.sampled_from(list(SelfLoops)))
    pulled = nodes - draw(st.sampled_from([0, 0, 1])) * (nodes > start + rows)
    return TileEdges(indices, offsets, start, nodes, loops), pulled


def test_rows_are_prefetched_for_every_edge_some_edges_ahead() -> None:
    counts = torch.tensor([3, 0, 40, 1, 70, 150, 2])
    indices_E = torch.randint(0, 500, (int(counts.sum()),), generator=torch.Generator().manual_seed(0))
    offsets_R1 = torch.cat((torch.zeros(1, dtype=torch.long), counts.cumsum(0)))
    walk = loops.Walk.over(TileEdges(indices_E, offsets_R1, 0, 500), torch.empty(500, 1))
    ahead = list[int]()
    for row in range(len(counts)):
        while loops.gather.py_func(walk, row):  # type: ignore[attr-defined]
            ahead += walk.ahead_E[: walk.at[loops.TAKEN]].tolist()
    assert ahead[: -loops.AHEAD] == indices_E[loops.AHEAD :].tolist()


@given(
    tiles(), st.sampled_from(list(DTYPES)), st.integers(1, 5), st.integers(1, 40), st.booleans(), st.booleans(),
    st.sampled_from([(1, 0), (2, 0), (2, 1), (3, 3)]), st.sampled_from([0.2, 0.0, -0.5, 1.0, None]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_gat(
    tile: tuple[TileEdges, int], dtype: torch.dtype, groups: int, channels: int, keep: bool, drops: bool,
    sliced: tuple[int, int], slope: float | None,
) -> None:  # fmt: skip
    edges, pulled = tile
    slices, first = sliced
    groups = slices if slope is None else groups * slices  # signed coefficients are those of one head
    dropout = EdgeDropout(0.4, 1, 2, 3) if drops else None
    heads = gat.GatHeads(range(first * slices, first * slices + groups), slope, dropout, slices)
    torch.manual_seed(0)
    source = torch.randn(pulled, groups * (channels + 1), dtype=dtype)
    target = torch.randn(edges.rows, groups // slices, dtype=dtype).repeat_interleave(slices, dim=1)
    found = compiled_gat.attend(heads, edges, source_NS=source, a_dst_RG=target, keep=keep)
    same(found, gat.attend(heads, edges, source_NS=source, a_dst_RG=target, keep=keep))
    if keep:
        gradient = torch.randn(edges.rows, groups * channels, dtype=dtype)
        backward = zip(*(one.upstream(gradient, found, target) for one in (compiled_gat, gat)), strict=True)
        for one, other in backward:
            same(one, other)

    source = torch.randn(edges.rows, groups, channels + 1, dtype=dtype)
    target = torch.randn(pulled, groups, channels + 3, dtype=dtype)
    for scalars in (source[..., -1:], target[..., -3:-1]):  # slices of a head have the same
        scalars.copy_(scalars[:, ::slices].repeat_interleave(slices, dim=1))
    given = {"target_NS": target.view(pulled, -1), "source_RS": source.view(edges.rows, -1)}
    same(compiled_gat.pull_sources(heads, edges, **given), gat.pull_sources(heads, edges, **given))


def test_bits_do_not_depend_on_the_heads_beside() -> None:
    torch.manual_seed(0)
    counts = torch.tensor([0, 3, 70, 200, 1])
    offsets = torch.cat((torch.zeros(1), counts.cumsum(0))).to(torch.int32)
    edges = TileEdges(torch.randint(0, 50, (274,)).sort().values.to(torch.int32), offsets, 4, 50)
    source, target = torch.randn(50, 4, 12), torch.randn(5, 4)
    above, own = torch.randn(50, 4, 14), torch.randn(5, 4, 12)
    dropout = EdgeDropout(0.4, 1, 2, 3)

    def pulled(first: int, stop: int) -> list[Tensor]:
        heads, part = gat.GatHeads(range(first, stop), 0.2, dropout), slice(first, stop)
        forward = {"source_NS": source[:, part].flatten(1), "a_dst_RG": target[:, part], "keep": True}
        backward = {"target_NS": above[:, part].flatten(1), "source_RS": own[:, part].flatten(1)}
        return [compiled_gat.attend(heads, edges, **forward), compiled_gat.pull_sources(heads, edges, **backward)]

    parts = zip(pulled(0, 1), pulled(1, 4), strict=True)
    for whole, some in zip(pulled(0, 4), (torch.cat(part, dim=1) for part in parts), strict=True):
        assert torch.equal(whole, some)


@pytest.mark.parametrize("place", [0, 1, 70, 129])
@pytest.mark.parametrize("strange", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_no_number_is_so_for_its_row_alone(place: int, strange: float) -> None:
    """Wherever it comes among the row's edges; -∞ is a weight of 0."""
    heads, source, target = gat.GatHeads(range(1), 0.2), torch.randn(131, 4), torch.zeros(2, 1)
    source[place, -1] = strange
    edges = TileEdges(torch.tensor([*range(130), 130]).int(), torch.tensor([0, 130, 131]).int(), 0, 131)
    found = compiled_gat.attend(heads, edges, source_NS=source, a_dst_RG=target, keep=False)
    same(found, gat.attend(heads, edges, source_NS=source, a_dst_RG=target, keep=False))
    assert found[0].isnan().all() == (strange != -math.inf) and found[1].isfinite().all()


@pytest.mark.parametrize("loops", SelfLoops)
def test_a_row_whose_neighbours_are_all_absent_has_none(loops: SelfLoops) -> None:
    heads, source, target = gat.GatHeads(range(1), 0.2), torch.randn(3, 2), torch.randn(2, 1)
    edges = TileEdges(torch.tensor([4, 3]).int(), torch.tensor([0, 1, 2]).int(), 3, 5, loops)
    assert not compiled_gat.attend(heads, edges, source_NS=source, a_dst_RG=target, keep=True).any()


def test_damaged_lists_are_named() -> None:
    heads, source, target = gat.GatHeads(range(1), 0.2), torch.randn(3, 2), torch.randn(2, 1)
    edges = TileEdges(torch.tensor([0, 7]).int(), torch.tensor([0, 1, 2]).int(), 0, 3)
    with pytest.raises(StoreError, match="indices are damaged"):
        compiled_gat.attend(heads, edges, source_NS=source, a_dst_RG=target, keep=False)
    edges = TileEdges(torch.tensor([2, 1]).int(), torch.tensor([0, 2, 2]).int(), 0, 3)
    dropping = gat.GatHeads(range(1), 0.2, EdgeDropout(0.5, 0, 0, 0))
    with pytest.raises(StoreError, match="ascending order"):
        compiled_gat.attend(dropping, edges, source_NS=source, a_dst_RG=target, keep=False)


@given(tiles(), st.sampled_from(list(DTYPES)), st.integers(1, 70), st.booleans(), st.booleans())
@settings(max_examples=40, deadline=None)
def test_maxima(tile: tuple[TileEdges, int], dtype: torch.dtype, columns: int, keep: bool, strange: bool) -> None:
    edges, pulled = tile
    torch.manual_seed(columns)
    source = torch.randn(pulled, columns).mul_(2).round_().to(dtype)  # many ties, zeros among them
    if strange:
        source[0] = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=dtype).repeat(columns)[:columns]
    found = compiled_maximum.pull_maxima(edges, source, keep=keep)
    assert torch.equal(found.nan_to_num(7.5), maximum.pull_maxima(edges, source, keep=keep).nan_to_num(7.5))

    target, own = torch.randn(pulled, columns, 2).round_().to(dtype), source[torch.arange(edges.rows) % pulled]
    found = compiled_maximum.pull_sources(edges, target_NK=target.view(pulled, -1), source_RW=own)
    same(found, maximum.pull_sources(edges, target_NK=target.view(pulled, -1), source_RW=own))


def test_lists_of_64_bits() -> None:
    """Every loop goes over them alike; this one is compiled soonest."""
    lists, maxima = (torch.tensor([0, 2, 1]), torch.tensor([0, 1, 3])), torch.arange(3.0).expand(3, 3)
    narrow = TileEdges(*(numbers.to(torch.int32) for numbers in lists), 1, 3)
    given = {"target_NK": torch.stack((maxima.t(), maxima + 1), dim=2).flatten(1), "source_RW": maxima[:2]}
    found = compiled_maximum.pull_sources(TileEdges(*lists, 1, 3), **given)
    assert found.any() and torch.equal(found, compiled_maximum.pull_sources(narrow, **given))


@compiled
def _exponentials(of_RL, out_RL):
    lanes = NBYTES // of_RL.itemsize
    for row in range(len(of_RL)):
        store(out_RL, row, 0, lanes, exp(load(of_RL, row, 0, lanes)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_powers_of_e(dtype: torch.dtype) -> None:
    """Of ordinary numbers to two units of the last place; those too large and too small are what they are nearest to,
    and nothing is made of what is no number."""
    limit = math.log(torch.finfo(dtype).max)
    special = torch.tensor([float("nan"), float("inf"), 2 * limit, -float("inf"), -2 * limit, 0.0, -0.0, 1.0])
    ordinary = torch.linspace(1 - limit, limit - 1, 8 * 4097, dtype=torch.float64)
    values = torch.cat((special.to(dtype), ordinary.to(dtype))).view(-1, 64 // dtype.itemsize)
    found = torch.empty_like(values)
    _exponentials(values.numpy(), found.numpy())
    found, expected = found.view(-1), values.view(-1).double().exp()
    assert found[0].isnan()
    assert bool((found[1:3] > torch.finfo(dtype).max / 4).all()) and bool(found[1:3].isfinite().all())
    assert found[3:8].tolist() == pytest.approx([0.0, 0.0, 1.0, 1.0, math.e], rel=torch.finfo(dtype).eps)
    normal = expected[8:] > torch.finfo(dtype).tiny * 2
    assert float((found[8:] / expected[8:] - 1)[normal].abs().max()) < 3 * torch.finfo(dtype).eps


def test_where_nothing_can_be_written_every_process_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(function: object) -> None:
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr(loops, "_Cache", nowhere)
    assert loops.compiled(lambda number: number + 1)(2) == 3


def test_of_processes_that_begin_together_one_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loop_of_both.py").write_text(
        "from ooc.kernels.compiled.loops import compiled\n\n\n@compiled\ndef loop(number):\n    return number + 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    loop: Any = import_module("loop_of_both").loop
    compile_loop = loop._compiler.compile

    def slowly(*signature: Any) -> Any:
        sleep(1)
        return compile_loop(*signature)

    monkeypatch.setattr(loop._compiler, "compile", slowly)
    found = together(2, tmp_path, lambda rank: (loop(rank), loop.stats.cache_misses.total()))
    assert [number for number, _ in found] == [1, 2]
    assert sorted(misses for _, misses in found) == [0, 1]


def test_what_another_version_has_compiled_is_compiled_anew(tmp_path: Path) -> None:
    """Its index names types that are there no longer; a cut one is of a process that was killed."""
    index = loops._Index(str(tmp_path), "loop", "stamp")
    index.save("key", b"machine code")
    assert index.load("key") == b"machine code"
    path = tmp_path / "loop.nbi"
    gone = pickle.dumps(index._version) + b"cooc.kernels.compiled.loops\nGone\n."
    for found in (gone, path.read_bytes()[:-3], b""):
        path.write_bytes(found)
        assert index.load("key") is None
    index.save("key", b"machine code")
    assert index.load("key") == b"machine code"
