# SPDX-License-Identifier: Apache-2.0
"""A tile's rows cut into segments of bounded length, as programs take them.

Degrees of real graphs are so uneven that one hub, summed by one program, would outlast all other rows together. So rows
with more than ``EDGES_PER_SEGMENT`` edges are cut at multiples of it from their own first edge. Each part is summed
into a slot of a workspace, and a second launch adds a row's slots in order. Where a row is cut depends only on the row,
so results do not depend on tiles. A tile of many edges comes in pieces of whole rows and whole parts; a row's state is
passed from one piece to the next (``carried``).

Whoever has the offsets in host memory lists the parts there, once for a graph, and passes those of a tile along with
its offsets: few rows are long, and a tile without long rows needs no list. Every other row is a segment of its own,
which programs find by its number.

R rows of a tile, P parts of its long rows.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, from_numpy

from ooc.kernels.edges import TileEdges

EDGES_PER_SEGMENT = 512
"""Edges that one program sums one after the other: few enough that a tile's last programs do not keep the others
waiting, many enough that the workspace stays small beside the results. Never measured on a GPU."""


def cut(tile: TileEdges, most: int = EDGES_PER_SEGMENT) -> tuple[Tensor, int]:
    """Return the parts of a tile's long rows, and their number P. If they have not been listed, the host waits for the
    offsets and lists them. A launch takes these segments first, as they take longest, then all R rows, skipping the
    long ones.

    For every part, the list has its row in the graph and which of the row's parts it is, in order of rows, then of
    edges. The part's place in the list is its slot in the workspace. If edges come in pieces, the parts of a piece are
    listed, followed by ``Carried.before`` if the piece begins within a row.
    """
    parts_P2 = tile.parts_P2
    if parts_P2 is None:
        offsets = tile.offsets_R1.cpu().numpy()
        parts_P2 = from_numpy(long_parts(offsets, tile.start, most)).to(tile.offsets_R1.device)
    slots, before = parts_P2.shape[0], None if tile.carried is None else tile.carried.before
    if before is not None:
        parts_P2 = torch.cat((parts_P2, before.to(parts_P2.dtype)))
    return parts_P2, slots


def long_parts(
    offsets_R1: npt.NDArray[np.signedinteger], start: int = 0, most: int = EDGES_PER_SEGMENT
) -> npt.NDArray[np.signedinteger]:
    """Return the parts [P, 2] of rows with more than ``most`` edges, as in ``cut``, in the offsets' type. The rows are
    those from ``start`` on, and their edges begin at ``offsets_R1``."""
    edges_R = np.diff(offsets_R1)
    rows_L = np.flatnonzero(edges_R > most)
    parts_L = -(-edges_R[rows_L] // most)
    first_L = np.cumsum(parts_L) - parts_L
    number_P = np.arange(parts_L.sum())
    parts_P2 = np.stack((np.repeat(rows_L + start, parts_L), number_P - np.repeat(first_L, parts_L)), axis=1)
    return parts_P2.astype(offsets_R1.dtype)


def most_parts(edges: int, most: int = EDGES_PER_SEGMENT) -> int:
    """Return the most parts that this many edges can make."""
    return edges // most + edges // (most + 1)
