# SPDX-License-Identifier: Apache-2.0
"""A tile's edges in pieces of bounded size, as the pulls of attention and maxima read them.

Shapes: N rows of the pulled matrices, R rows of the tile, E edges of the tile or of a piece of it, W columns.

A plain sum holds nothing for each edge, but scores and messages do. So a tile is read in pieces of at most
``EDGES_PER_PIECE`` edges, including added self-loops: whole rows while they fit; a longer row is cut at multiples of
this from its own first edge. Where a row is cut depends only on the row, so results do not depend on tiles. A softmax
over a row's edges takes its pieces one after the other.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ooc.errors import StoreError
from ooc.kernels.cuda.carried import Carried
from ooc.kernels.deferred_checks import DeferredChecks
from ooc.kernels.tensors import pull

AnyIntegers = npt.NDArray[np.signedinteger]

EDGES_PER_PIECE = 49152
"""Edges of a piece: few enough that a piece takes little memory beside a slab, many enough that operators take longer
than their calls, in which threads wait for one another. A tile of 2,048 rows with 16 edges each is one piece."""


class Spare:
    """Memory that a plan has set aside for retained results, ``nbytes`` in all; for any thread."""

    def __init__(self, nbytes: int) -> None:
        self.left = nbytes
        self._lock = Lock()

    def take(self, nbytes: int) -> bool:
        """Take ``nbytes`` if so many are left; return whether they were."""
        with self._lock:
            fits = nbytes <= self.left
            self.left -= nbytes * fits
        return fits

    def give(self, nbytes: int) -> None:
        """Free ``nbytes`` again."""
        with self._lock:
            self.left += nbytes


class Retained:
    """Results retained for the tiles of one topology, by name, as far as there is ``spare`` memory: those that are the
    same in every epoch, and those one pass computes for another. Results never depend on what is retained. A tile is on
    one thread at a time."""

    def __init__(self, spare: Spare) -> None:
        self._spare = spare
        self._found: dict[Hashable, tuple[Any, int]] = {}

    def get(self, name: Hashable) -> Any:
        """Return the retained result, or None."""
        return self._found.get(name, (None, 0))[0]

    def keep(self, name: Hashable, nbytes: int, make: Callable[[], Any]) -> Any:
        """Retain the result of ``make`` until it is taken, and return it; return None without calling ``make`` if
        memory is short."""
        self.take(name)
        if not self._spare.take(nbytes):
            return None
        self._found[name] = made, _ = make(), nbytes
        return made

    def take(self, name: Hashable) -> Any:
        """Return the retained result and free its memory."""
        value, nbytes = self._found.pop(name, (None, 0))
        self._spare.give(nbytes)
        return value


class SelfLoops(Enum):
    """The treatment of edges from a row to itself."""

    AS_STORED = "as stored"
    EXACTLY_ONE = "exactly one"
    """Stored self-loops are left out and every row gets one, as by PyG's ``remove_self_loops`` and
    ``add_self_loops``."""


@dataclass(frozen=True, slots=True)
class TileEdges:
    """The neighbours of rows ``start`` … ``start + R`` of the graph in one direction.

    ``indices_E`` and ``offsets_R1`` (counted from the tile's first edge) have one integer type. ``nodes``: the rows of
    the graph; neighbours at or beyond the end of a shorter pulled matrix are absent and add nothing. ``weight_E``,
    ``features_EK``: the data of the edges in the store's types, if asked for. ``checks``: where faults of the lists are
    recorded; None if kernels raise. ``edges_per_piece``: the limit where something as wide as a row is made for each
    edge. ``parts_P2``: the parts of long rows for a GPU's kernels (``ooc.kernels.cuda.segments``), or None.
    ``retained``: results retained for tiles. ``carried``: on a GPU, set if these are a piece of the rows' edges. The
    first row may then have begun before them and the last may continue behind them; their offsets are below 0 or beyond
    the number of edges.
    """

    indices_E: Tensor
    offsets_R1: Tensor
    start: int
    nodes: int
    self_loops: SelfLoops = SelfLoops.AS_STORED
    weight_E: Tensor | None = None
    features_EK: Tensor | None = None
    checks: DeferredChecks | None = None
    edges_per_piece: int | None = None
    parts_P2: Tensor | None = None
    retained: Retained | None = None
    carried: Carried | None = None

    @property
    def rows(self) -> int:
        return self.offsets_R1.numel() - 1

    @property
    def offsets_here_R1(self) -> Tensor:
        """Where rows begin among these edges; rows that begin before them or continue behind them are clipped."""
        return self.offsets_R1 if self.carried is None else self.offsets_R1.clamp(0, self.indices_E.numel())


@dataclass(frozen=True)
class Piece:
    """Edges of rows ``start:stop`` of a tile: all their edges, or, for one long row, a stretch of them; at least one
    edge.

    ``neighbours_E``: rows of the pulled matrices; ``offsets_R1`` delimit the piece's rows. ``continues``: this is a
    further stretch of a row already begun, to be added to its results. ``positions_E``: which of the tile's edges these
    are, as ``counted`` numbers them. ``repeats_before``: how many edges before this stretch equal its first one.
    ``has_added``: self-loops were added at the ends of rows.
    """

    start: int
    stop: int
    tile_start: int
    neighbours_E: Tensor
    offsets_R1: Tensor
    continues: bool
    positions_E: Tensor | slice
    repeats_before: int
    has_added: bool = False

    @property
    def rows(self) -> slice:
        """The piece's rows among the tile's."""
        return slice(self.start, self.stop)

    @property
    def edges(self) -> int:
        return self.neighbours_E.numel()

    @cached_property
    def row_E(self) -> Tensor:
        """The row of every edge, counted from the piece's first: int64."""
        counts = self.offsets_R1.diff().long()
        return torch.repeat_interleave(torch.arange(self.stop - self.start), counts, output_size=self.edges)

    @cached_property
    def _positions(self) -> Tensor:
        return torch.arange(self.edges, dtype=self.offsets_R1.dtype)

    def gather(self, matrix_NW: Tensor) -> Tensor:
        """Return a copy of the neighbours' rows of a pulled matrix [E, W]."""
        return matrix_NW.index_select(0, self.neighbours_E)

    def spread(self, values_RW: Tensor) -> Tensor:
        """Return a copy of every row's values for each of its edges [E, W]."""
        return values_RW.index_select(0, self.row_E)

    def sums(self, values_EW: Tensor, weight_E: Tensor | None = None) -> Tensor:
        """Return the sum over every row's edges, in their order, each times its weight [rows, W]."""
        return pull(rows_in_line(values_EW), self._positions, self.offsets_R1, weight_E)

    def maxima(self, values_EW: Tensor) -> Tensor:
        """Return the largest value over every row's edges [rows, W]; −∞ without edges."""
        out = values_EW.new_full((self.stop - self.start, values_EW.shape[1]), -torch.inf)
        return out.scatter_reduce_(0, self.row_E[:, None].expand_as(values_EW), values_EW, "amax")

    def repeats_E(self) -> Tensor:
        """Return how many edges before each one run between the same two rows: int64.

        Both ends count alike, because a store's lists of neighbours are in ascending order. An added self-loop is the
        only edge of its kind, and the last of its row.
        """
        offsets, values = self.offsets_R1.long(), self.neighbours_E
        first_E = torch.ones(self.edges, dtype=torch.bool)
        first_E[1:] = values[1:] != values[:-1]
        first_E[offsets[:-1][offsets[:-1] < self.edges]] = True
        positions = torch.arange(self.edges)
        run_E = torch.cummax(positions * first_E, 0).values
        repeats = positions - run_E
        if self.repeats_before:
            repeats[run_E == 0] += self.repeats_before
        return repeats


class RunningSoftmax:
    """A softmax over the edges of R rows with H heads, in pieces, and the sums weighted by it: "online softmax"
    (Milakov and Gimelshein, 2018).

    If a row's edges come in several pieces, the sums so far are scaled down whenever a higher score appears. Rows
    within one piece, which are almost all, need no scaling.

    ``totals``: matrices [R, H, …], zero at first, to which the caller adds sums weighted by what ``weigh`` returns;
    ``finish`` divides them by the sums of weights. A row without edges keeps its zeros.
    """

    def __init__(self, rows: int, heads: int, like: Tensor, totals: Sequence[Tensor]) -> None:
        self._highest_RH = like.new_full((rows, heads), -torch.inf)
        self._sum_RH = like.new_zeros(rows, heads)
        self._totals = totals

    def weigh(self, piece: Piece, score_EH: Tensor) -> Tensor:
        """Return exp(score - highest so far), written over ``score_EH``."""
        here = piece.rows
        highest = piece.maxima(score_EH)
        if piece.continues:
            highest = torch.maximum(highest, self._highest_RH[here])
            shrink = (self._highest_RH[here] - highest).exp_()
            self._sum_RH[here] *= shrink
            for total in self._totals:
                total[here] *= shrink.view(*shrink.shape, *[1] * (total.dim() - 2))
        self._highest_RH[here] = highest
        weight = score_EH.sub_(piece.spread(highest)).exp_()
        self._sum_RH[here] += piece.sums(weight)
        return weight

    def finish(self) -> Tensor:
        """Normalise the totals, and return the logarithm of the sum of exponentials [R, H], 0 for a row without
        edges."""
        empty_RH = self._sum_RH == 0
        share_RH = self._sum_RH.masked_fill(empty_RH, 1.0).reciprocal_()
        for total in self._totals:
            total *= share_RH.view(*share_RH.shape, *[1] * (total.dim() - 2))
        return self._sum_RH.log_().add_(self._highest_RH).masked_fill_(empty_RH, 0.0)


def rows_in_line(matrix: Tensor) -> Tensor:
    """Return ``matrix`` with the numbers of a row side by side in memory.

    A single column is contiguous whatever its stride, but ``embedding_bag`` looks at the stride and rounds differently
    if it is not 1.
    """
    return matrix if matrix.stride(1) == 1 else matrix.clone(memory_format=torch.contiguous_format)


def pieces(tile: TileEdges, rows: int) -> Iterator[Piece]:
    """Yield the edges of ``tile`` to neighbours below ``rows``, the length of the pulled matrices, in order and in
    pieces."""
    if tile.indices_E.numel():
        highest_row(tile, tile.indices_E)
    indices_E, offsets_R1, places_E = counted(tile, rows)
    capacity, offsets = tile.edges_per_piece or EDGES_PER_PIECE, offsets_R1.numpy()
    start = 0
    while start < tile.rows:
        begin = int(offsets[start])
        stop = int(np.searchsorted(offsets, begin + capacity, side="right")) - 1
        stop = min(max(stop, start + 1), tile.rows)
        end = int(offsets[stop])
        for first in range(begin, end, capacity):
            last = min(first + capacity, end)
            equal = torch.searchsorted(indices_E[begin:first], indices_E[first])
            yield Piece(
                start,
                stop,
                tile.start,
                indices_E[first:last],
                (offsets_R1[start : stop + 1] - first).clamp_(0, last - first),
                continues=first > begin,
                positions_E=slice(first, last) if places_E is None else places_E[first:last],
                repeats_before=int(torch.searchsorted(indices_E[begin:first], indices_E[first], right=True) - equal),
                has_added=tile.self_loops is SelfLoops.EXACTLY_ONE,
            )
        start = stop


def counted(tile: TileEdges, rows: int, *, has_loops: bool = True) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return indices and offsets of the edges of ``tile`` to neighbours below ``rows``, with self-loops as it asks for
    them. Also return which of the tile's edges these are, if edges carry data (None: exactly those): the self-loop
    added for row i, the last of its row, has the i-th number after all of the tile's edges. ``has_loops``: whether
    self-loops may be stored."""
    indices, offsets, adds = tile.indices_E, tile.offsets_R1, tile.self_loops is SelfLoops.EXACTLY_ONE
    keep = places = None
    # In hop order all are below in forward passes: takes a tenth of the time of checking each.
    if rows < tile.nodes and len(indices) and indices.numpy().max() >= rows:
        keep = indices < rows
    if adds and has_loops:
        others = are_other_rows(indices, offsets, tile.start)
        keep = others if keep is None else keep & others
    if keep is not None:
        indices, offsets, places = select_edges(keep, indices, offsets)
    if not adds:
        return indices, offsets, places
    given = torch.arange(len(indices)) if places is None else places
    indices, offsets, is_given = insert_self_loops(indices, offsets, tile.start, min(tile.start + tile.rows, rows))
    if tile.features_EK is None:
        return indices, offsets, None
    places, behind = torch.empty(len(indices), dtype=torch.int64), len(tile.indices_E)
    places[is_given] = given
    places[~is_given] = torch.arange(behind, behind + len(indices) - len(given))
    return indices, offsets, places


def highest_row(tile: TileEdges, neighbours_E: Tensor) -> int:
    """Return the largest of some neighbours of the tile's rows, at least one. Raises :class:`StoreError` if any is not
    a row."""
    lowest, highest = (int(bound) for bound in torch.aminmax(neighbours_E))
    if lowest < 0 or highest >= tile.nodes:
        raise StoreError(
            f"a neighbour of rows from {tile.start} is none of the store's {tile.nodes} rows: "
            "indices are damaged; ooc verify tells where; convert again"
        )
    return highest


def are_other_rows(indices_E: Tensor, offsets_R1: Tensor, start: int) -> Tensor:
    """Return, as bool [E], which neighbours of rows ``start…`` are another row."""
    rows = torch.arange(start, start + len(offsets_R1) - 1, dtype=indices_E.dtype, device=indices_E.device)
    return indices_E != torch.repeat_interleave(rows, offsets_R1.diff(), output_size=len(indices_E))


def select_edges(is_kept_E: Tensor, indices_E: Tensor, offsets_R1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return indices and offsets of the edges that are kept, and their positions. With NumPy, positions are found once
    and looked up by rows, two to four times as fast as with torch's masks."""
    kept = np.flatnonzero(is_kept_E.numpy())
    offsets = offsets_R1.numpy()
    before = np.searchsorted(kept, offsets).astype(offsets.dtype)
    return torch.from_numpy(indices_E.numpy()[kept]), torch.from_numpy(before), torch.from_numpy(kept)


def insert_self_loops(indices_E: Tensor, offsets_R1: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return indices and offsets of rows ``start…`` in which each row before ``stop`` is the last of its own
    neighbours; and, as bool, which edges are not these self-loops."""
    count = max(0, stop - start)
    given, offsets = indices_E.numpy(), offsets_R1.numpy()
    added = np.minimum(np.arange(len(offsets), dtype=offsets.dtype), count)
    places = offsets[1 : count + 1] + added[:count]
    is_given = np.ones(len(given) + count, dtype=np.bool_)
    is_given[places] = False
    indices = np.empty(len(is_given), dtype=given.dtype)
    indices[is_given] = given  # twice as fast as torch's masked_scatter_
    indices[places] = np.arange(start, start + count, dtype=given.dtype)
    return torch.from_numpy(indices), torch.from_numpy(offsets + added), torch.from_numpy(is_given)
