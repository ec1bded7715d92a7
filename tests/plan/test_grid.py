# SPDX-License-Identifier: Apache-2.0
"""Blocks tile the matrix and its file, and fill frames."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from ooc.plan.layout.grid import Grid, block_height


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
    step_rows=st.sampled_from([1, 8, 1024]),
    row_bytes=st.integers(1, 2000),
    frame_rows=st.integers(1, 64),
)
def test_a_block_fits_its_frame_and_twice_as_many_rows_would_not(
    step_rows: int, row_bytes: int, frame_rows: int
) -> None:
    frame_bytes = step_rows * row_bytes * frame_rows
    height = block_height(step_rows=step_rows, row_bytes=row_bytes, frame_bytes=frame_bytes)
    assert height * row_bytes <= frame_bytes < 2 * height * row_bytes
    assert height % step_rows == 0 and (height // step_rows).bit_count() == 1
