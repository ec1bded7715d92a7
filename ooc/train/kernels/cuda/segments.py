# SPDX-License-Identifier: Apache-2.0
"""Rows of a tile cut into segments of at most so many edges, as programs take them.

Degrees of real graphs are so uneven that one hub, summed by one program, would outlast all other rows together. So
rows with more than ``EDGES_PER_SEGMENT`` edges are cut at multiples of it from their own first edge: each part is
summed into a slot of a workspace, and a second launch adds a row's slots in order. Where a row is cut depends on
nothing but the row, so results do not depend on tiles.

Lengths of all lists follow from R and E alone: nothing is read back, so a launch waits for nothing. Entries beyond
what the rows need are marked by a row number of R. ``cutting`` fills the lists where the offsets are.

R rows of a tile with E edges, S segments, L long rows.
"""

from dataclasses import dataclass

from torch import Tensor

EDGES_PER_SEGMENT = 512
"""Edges that one program sums one after the other. Few enough that a tile's last programs do not keep the others
waiting; many enough that the workspace stays small beside the results. Never measured on a GPU."""


@dataclass(frozen=True, slots=True)
class Segments:
    """What a launch takes, in order of rows and within a row in order of edges.

    Of every segment: ``row_S`` (R: none), ``first_S`` of the tile's edges, ``edges_S`` (int32) and ``slot_S``, where
    in the workspace it goes; −1: it is the row's only one. Of every long row: ``row_L`` (R: none), ``slot_L`` the
    first of its slots, ``slots_L`` (int32) how many. Lists may be a little longer than the ``count`` of segments and
    of ``long_rows`` that programs are launched for. ``slots`` bounds the slots of all rows together.
    """

    rows: int
    slots: int
    count: int
    long_rows: int
    row_S: Tensor
    first_S: Tensor
    edges_S: Tensor
    slot_S: Tensor
    row_L: Tensor
    slot_L: Tensor
    slots_L: Tensor


def bounds(edges: int, most: int = EDGES_PER_SEGMENT) -> tuple[int, int]:
    """The most slots and the most long rows that so many edges can make."""
    long_rows = edges // (most + 1)
    return edges // most + long_rows, long_rows
