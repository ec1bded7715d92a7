# SPDX-License-Identifier: Apache-2.0
"""Blocks tile the matrix and its file; stretches tile the topology."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from ooc.plan import grid
from ooc.plan.grid import Grid, stretches


@given(
    rows=st.integers(1, 300),
    columns=st.integers(1, 40),
    itemsize=st.sampled_from([2, 4, 8]),
    block_rows=st.integers(1, 100),
    slab_columns=st.integers(1, 40),
)
def test_blocks_cover_the_matrix_once_and_do_not_overlap_in_the_file(
    rows: int, columns: int, itemsize: int, block_rows: int, slab_columns: int
) -> None:
    g = Grid(rows, columns, itemsize, block_rows, min(slab_columns, columns))
    ranges = []
    for slab in range(g.slabs):
        assert g.slab_offset(slab) % 4096 == 0
        for block in range(g.blocks):
            start = g.block_offset(slab, block)
            ranges.append((start, start + g.block_nbytes(slab, block)))
    assert sum(stop - start for start, stop in ranges) == rows * columns * itemsize
    ranges.sort()
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))
    assert ranges[-1][1] <= g.file_nbytes


@given(
    degrees=st.lists(st.integers(0, 9), min_size=1, max_size=60),
    tile_rows=st.integers(1, 7),
    tiles_per_block=st.integers(1, 5),
    limit=st.integers(1, 30),
)
def test_stretches_cover_rows_and_edges_in_order_within_blocks(
    degrees: list[int], tile_rows: int, tiles_per_block: int, limit: int
) -> None:
    rows = len(degrees)
    tile_edges = [sum(degrees[:row]) for row in range(0, rows, tile_rows)] + [sum(degrees)]
    block_rows = tile_rows * tiles_per_block
    grid.STRETCH_EDGES, kept = limit, grid.STRETCH_EDGES
    try:
        found = stretches(tile_edges, rows=rows, tile_rows=tile_rows, block_rows=block_rows)
    finally:
        grid.STRETCH_EDGES = kept
    assert [s.row_start for s in found] == [0, *(s.row_stop for s in found[:-1])]
    assert found[-1].row_stop == rows
    assert [s.edge_start for s in found] == [0, *(s.edge_stop for s in found[:-1])]
    assert found[-1].edge_stop == sum(degrees)
    for s in found:
        assert s.row_start // block_rows == (s.row_stop - 1) // block_rows
        assert s.edge_stop - s.edge_start <= limit or s.row_stop - s.row_start <= tile_rows
