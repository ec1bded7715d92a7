# SPDX-License-Identifier: Apache-2.0
"""Bags hold every edge of a piece once for every head, and their sums are those of a loop over edges."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.kernels.bags import BagLists, Bags
from ooc.kernels.edges import ColumnCopy, pieces
from ooc.plan.workload import Direction
from tests.kernels.kernel_cases import PIECES, KernelGraph, graphs, numbers, small_pieces

COLUMNS = 2
CLOSE = dict(rtol=1e-12, atol=1e-12)


@given(graphs(), st.integers(1, 3), st.integers(1, 2), PIECES, st.integers(0, 999))
@settings(max_examples=50, deadline=None)
def test_bags_reduce_as_a_loop_over_edges_does(
    graph: KernelGraph, heads: int, slices: int, edges_per_piece: int, seed: int
) -> None:
    """Whichever edges are summed apart or left out, and into however many slices heads are cut; rows without edges keep
    a sum of 0 and a maximum of −∞."""
    slab = numbers(seed, graph.nodes, heads * slices * COLUMNS)
    tile = next(graph.tiles(Direction.IN, graph.nodes))[2]
    with small_pieces(edges_per_piece):
        for piece in pieces(tile, graph.nodes):
            lists = BagLists(piece, heads, torch.int32)
            bags = Bags(piece, lists, slab, slices=slices)
            values_EH = numbers(seed + 1, piece.edges, heads)
            is_first_EH, is_kept_EH = (numbers(seed + number, piece.edges, heads) > 0 for number in (2, 3))
            sums = slab.new_zeros(piece.stop - piece.start, heads)
            maxima = torch.full_like(sums, -torch.inf)
            apart, kept = slab.new_zeros(2, 2, *sums.shape, slices, COLUMNS)
            for edge, (row, neighbour) in enumerate(zip(piece.row_E, piece.neighbours_E, strict=True)):
                for head in range(heads):
                    value, part = values_EH[edge, head], int(not is_first_EH[edge, head])
                    sums[row, head] += value
                    maxima[row, head] = torch.maximum(maxima[row, head], value)
                    pulled = value * slab[neighbour].view(heads, slices, COLUMNS)[head]
                    apart[part, row, head] += pulled
                    kept[part, row, head] += pulled * is_kept_EH[edge, head]
            values, is_first, is_kept = (bags.by_bag(each) for each in (values_EH, is_first_EH, is_kept_EH))
            torch.testing.assert_close(bags.sums(values), sums, **CLOSE)
            assert torch.equal(bags.maxima(values), maxima)
            torch.testing.assert_close(bags.sums_apart(values, is_first), apart, **CLOSE)
            torch.testing.assert_close(bags.sums_apart(values, is_first, is_kept), kept, **CLOSE)
            rows = piece.neighbours_E.long()
            apart_of_slab = ColumnCopy.of(slab, heads * slices, (-2, -1))
            copied = Bags(piece, lists, torch.full_like(slab, torch.nan), apart_of_slab, slices=slices)
            for number in range(slices):
                column_EH = slab.view(graph.nodes, heads, slices, COLUMNS)[rows][:, :, number, -1]
                assert torch.equal(bags.columns(-1, slice_number=number)[0], bags.by_bag(column_EH))
                pairs = (each.columns(-1, -2, slice_number=number) for each in (copied, bags))
                for found, expected in zip(*pairs, strict=True):
                    assert torch.equal(found, expected)
            assert torch.equal(bags.maxima(bags.spread(sums))[sums != 0], sums[sums != 0])
