# SPDX-License-Identifier: Apache-2.0
"""Rows of a tile cut into segments of at most so many edges, as programs take them.

Degrees of real graphs are so uneven that one hub, summed by one program, would outlast all other rows together. So
rows with more than ``EDGES_PER_SEGMENT`` edges are cut at multiples of it from their own first edge: each part is
summed into a slot of a workspace, and a second launch adds a row's slots in order. Where a row is cut depends on
nothing but the row, so results do not depend on tiles.

Everything is computed by torch where the offsets are, in arrays whose lengths follow from R and E alone: nothing is
read back, so a launch waits for nothing. Entries beyond what the rows need are marked by a row number of R.

R rows of a tile with E edges, S segments, L long rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

EDGES_PER_SEGMENT = 512
"""Edges that one program sums one after the other. Few enough that a tile's last programs do not keep the others
waiting; many enough that the workspace stays small beside the results. Never measured on a GPU."""


@dataclass(frozen=True, slots=True)
class Segments:
    """What a launch takes, in order of rows and within a row in order of edges.

    Of every segment: ``row_S`` (R: none), ``first_S`` of the tile's edges, ``edges_S`` (int32) and ``slot_S``, where
    in the workspace it goes; −1: it is the row's only one. Of every long row: ``row_L`` (R: none), ``slot_L`` the
    first of its slots, ``slots_L`` how many. ``slots`` bounds the slots of all rows together.
    """

    rows: int
    slots: int
    row_S: Tensor
    first_S: Tensor
    edges_S: Tensor
    slot_S: Tensor
    row_L: Tensor
    slot_L: Tensor
    slots_L: Tensor

    @property
    def count(self) -> int:
        return len(self.row_S)

    @property
    def long_rows(self) -> int:
        return len(self.row_L)


def cut(offsets_R1: Tensor, edges: int, most: int = EDGES_PER_SEGMENT) -> Segments:
    """The segments of ``most`` edges at most of rows with ``edges`` edges together; ``offsets_R1`` begin at 0."""
    rows = offsets_R1.numel() - 1
    slots, long_rows = bounds(edges, most)
    if rows == 0:
        nothing = offsets_R1[:0].long()
        return Segments(0, 0, nothing, nothing, nothing.int(), nothing, nothing, nothing, nothing.int())
    parts_R = (offsets_R1.diff() + (most - 1)).div_(most, rounding_mode="floor").clamp_(min=1)
    is_long_R = parts_R > 1
    slots_R = parts_R * is_long_R
    part_stops_R, slot_stops_R = parts_R.cumsum(0), slots_R.cumsum(0)

    numbers = torch.arange(rows + edges // most, device=offsets_R1.device)
    row_S = torch.searchsorted(part_stops_R, numbers, right=True)
    is_used_S = row_S < rows
    known_S = row_S.clamp(max=rows - 1)
    part_S = numbers - (part_stops_R - parts_R)[known_S]
    first_S = offsets_R1[known_S] + part_S * most
    edges_S = (offsets_R1[known_S + 1] - first_S).clamp_(max=most) * is_used_S
    slot_S = torch.where(is_long_R[known_S] & is_used_S, (slot_stops_R - slots_R)[known_S] + part_S, -1)

    numbers = torch.arange(1, long_rows + 1, device=offsets_R1.device)
    row_L = torch.searchsorted(is_long_R.cumsum(0), numbers)
    known_L = row_L.clamp(max=rows - 1)
    slots_L = slots_R[known_L] * (row_L < rows)
    slot_L = (slot_stops_R - slots_R)[known_L]
    return Segments(rows, slots, row_S, first_S, edges_S.int(), slot_S, row_L, slot_L, slots_L.int())


def bounds(edges: int, most: int = EDGES_PER_SEGMENT) -> tuple[int, int]:
    """The most slots and the most long rows that so many edges can make."""
    long_rows = edges // (most + 1)
    return edges // most + long_rows, long_rows
