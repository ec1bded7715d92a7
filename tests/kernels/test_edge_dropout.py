# SPDX-License-Identifier: Apache-2.0
"""Masks of edges are Philox's numbers, drawn alike at both ends."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ooc.errors import StoreError
from ooc.kernels.dropout.edges import EdgeDropout, philox
from ooc.kernels.edges import SelfLoops, TileEdges, pieces
from ooc.plan.workload import Direction
from tests.examples import examples
from tests.kernels.kernel_cases import HEIGHTS, PIECES, KernelGraph, graphs, small_pieces


def scale_of_edges(dropout: EdgeDropout, edge_index: Tensor, heads: range) -> Tensor:
    """Scales [E, heads] of edges in any order, one by one in plain Python."""
    seen: Counter[tuple[int, int]] = Counter()
    key = np.random.SeedSequence([dropout.seed, dropout.epoch, dropout.layer]).generate_state(2, np.uint32)
    rows = []
    for source, target in edge_index.t().tolist():
        repeat = seen[source, target]
        seen[source, target] += 1
        words: list[int] = []
        for group in range(-(-heads.stop // 4)):
            counter = tuple(np.array([word], dtype=np.uint32) for word in (target, source, repeat, group))
            words += [int(word[0]) for word in philox(counter, (int(key[0]), int(key[1])))]
        kept = [words[head] >= round(dropout.p * 2**32) for head in heads]
        rows.append([1 / (1 - dropout.p) if keep else 0.0 for keep in kept])
    return torch.tensor(rows, dtype=torch.float64).view(-1, len(heads))


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_numbers_are_philox4x32_10(counter: list[int], key: list[int], expected: list[int]) -> None:
    """The known answers that Random123, the authors' own library, ships with."""
    words = philox(tuple(np.array([word], dtype=np.uint32) for word in counter), (key[0], key[1]))
    assert [int(word[0]) for word in words] == expected


Drawn = Counter[tuple[float, ...]]


def drawn(graph: KernelGraph, direction: Direction, height: int, dropout: EdgeDropout, heads: range) -> Drawn:
    """How often every (source, target, scales) occurs as one direction sees it."""
    found: Drawn = Counter()
    for _, _, tile in graph.tiles(direction, height):
        for piece in pieces(tile, graph.nodes):
            own = (piece.row_E + tile.start + piece.start).tolist()
            scales = dropout.scale(piece, direction, heads, torch.float64).tolist()
            for row, neighbour, scale in zip(own, piece.neighbours_E.tolist(), scales, strict=True):
                ends = (neighbour, row) if direction is Direction.IN else (row, neighbour)
                found[*ends, *scale] += 1
    return found


@given(graphs(), HEIGHTS, HEIGHTS, PIECES, st.integers(0, 5), st.integers(1, 6))
@settings(max_examples=examples(20), deadline=None)
def test_both_ends_draw_the_same_masks(
    graph: KernelGraph, height: int, other_height: int, edges_per_piece: int, first_head: int, heads: int
) -> None:
    """Edge for edge, repeated ones and added self-loops included, however either direction is cut."""
    dropout = EdgeDropout(0.5, seed=2**63 + 1, epoch=3, layer=2)
    some = range(first_head, first_head + heads)
    with small_pieces(edges_per_piece):
        forward = drawn(graph, Direction.IN, height, dropout, some)
    assert forward == drawn(graph, Direction.OUT, other_height, dropout, some)


@given(graphs(SelfLoops.AS_STORED), HEIGHTS, PIECES, st.integers(0, 5), st.integers(1, 6))
@settings(max_examples=examples(20), deadline=None)
def test_masks_are_those_drawn_one_by_one(
    graph: KernelGraph, height: int, edges_per_piece: int, first_head: int, heads: int
) -> None:
    dropout = EdgeDropout(0.3, seed=1, epoch=3, layer=2)
    some = range(first_head, first_head + heads)
    expected = scale_of_edges(dropout, graph.edge_index, some)
    with small_pieces(edges_per_piece):
        found = drawn(graph, Direction.IN, height, dropout, some)
    ends = graph.edge_index.t().tolist()
    assert found == Counter((*pair, *scale) for pair, scale in zip(ends, expected.tolist(), strict=True))


def one_row(neighbours: list[int]) -> TileEdges:
    return TileEdges(torch.tensor(neighbours), torch.tensor([0, len(neighbours)]), 0, nodes=10**6)


def test_shares_and_independence() -> None:
    """A share p is dropped, heads, seeds, epochs and layers differ, and what is kept is scaled."""
    (piece,) = pieces(replace(one_row(list(range(16000))), edges_per_piece=16000), 10**6)
    masks = []
    for key in [(0, 0, 1), (1, 0, 1), (0, 1, 1), (0, 0, 2)]:
        scale = EdgeDropout(0.25, *key).scale(piece, Direction.IN, range(2), torch.float32)
        assert scale.unique().tolist() == [0.0, pytest.approx(4 / 3)]
        assert (scale == 0).double().mean(0).tolist() == pytest.approx([0.25, 0.25], abs=0.02)
        masks += list(scale.unbind(1))
    for i, mask in enumerate(masks):
        assert all(((mask != other).double().mean() - 0.375).abs() < 0.02 for other in masks[:i])


def test_everything_is_dropped_at_one() -> None:
    (piece,) = pieces(one_row([0, 1, 2]), 10)
    assert not EdgeDropout(1.0, 0, 0, 0).scale(piece, Direction.IN, range(3), torch.float32).any()


def test_neighbours_out_of_order_are_refused() -> None:
    (piece,) = pieces(one_row([1, 0, 1]), 10)
    with pytest.raises(StoreError, match="ascending order"):
        EdgeDropout(0.5, 0, 0, 0).scale(piece, Direction.IN, range(1), torch.float32)
