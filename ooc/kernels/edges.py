# SPDX-License-Identifier: Apache-2.0
"""A tile's edges in pieces of bounded size, as the pulls of attention and maxima read them.

Shapes: N rows of the pulled matrices, R rows of the tile, E edges of the tile or of a piece of it, W columns.

A plain sum never holds anything per edge, but a score or a message does. So a tile is read in pieces of at most
``EDGES_PER_PIECE`` edges, added self-loops among them: whole rows while they fit, and a row with more edges than that
cut at multiples of it from its own first edge. Where a row is cut depends on nothing but the row, so results do not
depend on tiles. A softmax over a row's edges takes its pieces one after the other.
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
"""Few enough that what one piece takes is little beside a slab; many enough that operators outweigh their calls, in
which threads wait for one another: a tile of 2,048 rows with 16 edges each is one piece."""


class Spare:
    """Memory that a plan has set aside for what is retained, ``nbytes`` in all; on any thread."""

    def __init__(self, nbytes: int) -> None:
        self.left = nbytes
        self._lock = Lock()

    def take(self, nbytes: int) -> bool:
        """Whether so many bytes were left, which are taken then."""
        with self._lock:
            fits = nbytes <= self.left
            self.left -= nbytes * fits
        return fits

    def give(self, nbytes: int) -> None:
        """So many bytes are free again."""
        with self._lock:
            self.left += nbytes


class Retained:
    """What is retained of the tiles of one topology, by name, as far as there is ``spare`` memory: what is the same in
    every epoch, and what one pass finds for another. Nothing depends on what there is. A tile is on one thread at a
    time."""

    def __init__(self, spare: Spare) -> None:
        self._spare = spare
        self._found: dict[Hashable, tuple[Any, int]] = {}

    def get(self, name: Hashable) -> Any:
        """None where it is not there."""
        return self._found.get(name, (None, 0))[0]

    def keep(self, name: Hashable, nbytes: int, make: Callable[[], Any]) -> Any:
        """What ``make`` gives, until it is taken; None, and nothing is made, where there are not so many bytes."""
        self.take(name)
        if not self._spare.take(nbytes):
            return None
        self._found[name] = made, _ = make(), nbytes
        return made

    def take(self, name: Hashable) -> Any:
        """It is no longer kept; its memory counts as free."""
        value, nbytes = self._found.pop(name, (None, 0))
        self._spare.give(nbytes)
        return value


class SelfLoops(Enum):
    """What becomes of edges from a row to itself."""

    AS_STORED = "as stored"
    EXACTLY_ONE = "exactly one"
    """Those stored are left out and every row gets one: ``remove_self_loops`` and ``add_self_loops`` of PyG."""


@dataclass(frozen=True, slots=True)
class TileEdges:
    """The neighbours of rows ``start`` … ``start + R`` of the graph in one direction.

    ``indices_E`` and ``offsets_R1`` (counted from the tile's first edge) are of one integer type. ``nodes`` is the
    number of rows of the graph; neighbours at or beyond the end of a shorter pulled matrix are absent: they add
    nothing. ``weight_E`` and ``features_EK`` are what the edges carry, in the store's types, where it was asked for.
    ``checks``: where it is noted what is wrong with the lists; None where the kernels raise. ``edges_per_piece``: at
    most, where something as wide as a row is made for each. ``parts_P2``: the parts of long rows, for the kernels of a
    GPU (``ooc.kernels.cuda.segments``); None where nobody has listed them.
    ``retained``: what is retained of tiles.
    ``carried``: on a GPU, where these are a piece of the rows' edges. Then the first row may have begun before the
    first of them, and the last one may go on behind the last: offsets are below 0 there, or beyond their number.
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
        """Where rows begin among these edges, of those that begin before them or go on behind them just these."""
        return self.offsets_R1 if self.carried is None else self.offsets_R1.clamp(0, self.indices_E.numel())


@dataclass(frozen=True)
class Piece:
    """Edges of rows ``start:stop`` of a tile, all that they have or, for one long row, a stretch of them: at least
    one edge.

    ``neighbours_E`` are rows of the pulled matrices, ``offsets_R1`` delimit the piece's rows. ``continues``: this
    is a further stretch of a row already begun, to be added to what there is. ``positions_E``: which of the tile's
    edges these are, as ``counted`` numbers them. ``repeats_before`` counts the edges before this stretch that equal its
    first one. ``has_added``: self-loops were added at the ends of rows.
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
        """For every edge its row, counted from the piece's first: int64."""
        counts = self.offsets_R1.diff().long()
        return torch.repeat_interleave(torch.arange(self.stop - self.start), counts, output_size=self.edges)

    @cached_property
    def _positions(self) -> Tensor:
        return torch.arange(self.edges, dtype=self.offsets_R1.dtype)

    def gather(self, matrix_NW: Tensor) -> Tensor:
        """The neighbours' rows of a pulled matrix [E, W], in a copy."""
        return matrix_NW.index_select(0, self.neighbours_E)

    def spread(self, values_RW: Tensor) -> Tensor:
        """Values of every row at each of its edges [E, W], in a copy."""
        return values_RW.index_select(0, self.row_E)

    def sums(self, values_EW: Tensor, weight_E: Tensor | None = None) -> Tensor:
        """Sum over every row's edges, in their order, each times its weight → [rows, W]."""
        return pull(rows_in_line(values_EW), self._positions, self.offsets_R1, weight_E)

    def maxima(self, values_EW: Tensor) -> Tensor:
        """Largest over every row's edges → [rows, W]; −∞ where there are none."""
        out = values_EW.new_full((self.stop - self.start, values_EW.shape[1]), -torch.inf)
        return out.scatter_reduce_(0, self.row_E[:, None].expand_as(values_EW), values_EW, "amax")

    def repeats_E(self) -> Tensor:
        """How many edges before each one run between the same two rows: int64.

        Both ends count alike, because lists of neighbours are in ascending order in a store. An added self-loop
        is the only edge of its kind and always the last of its row.
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
    """Weights of edges, for every one of H heads, in a tile of R rows, and the sums that were made with them: "online
    softmax" (Milakov and Gimelshein, 2018).

    Where a row's edges come in several pieces, what was summed with the highest score so far is scaled down whenever a
    higher one appears. Rows within one piece, which is nearly all of them, take no part in that.

    ``totals`` are matrices [R, H, …], zero at first, to which the caller adds sums weighted by what ``weigh``
    returns; ``finish`` divides them by the sum of weights. A row without edges keeps its zeros.
    """

    def __init__(self, rows: int, heads: int, like: Tensor, totals: Sequence[Tensor]) -> None:
        self._highest_RH = like.new_full((rows, heads), -torch.inf)
        self._sum_RH = like.new_zeros(rows, heads)
        self._totals = totals

    def weigh(self, piece: Piece, score_EH: Tensor) -> Tensor:
        """exp(score - highest so far), written over ``score_EH``."""
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
        """Normalise the totals; the logarithm of the sum of exponentials [R, H], 0 for a row without edges."""
        empty_RH = self._sum_RH == 0
        share_RH = self._sum_RH.masked_fill(empty_RH, 1.0).reciprocal_()
        for total in self._totals:
            total *= share_RH.view(*share_RH.shape, *[1] * (total.dim() - 2))
        return self._sum_RH.log_().add_(self._highest_RH).masked_fill_(empty_RH, 0.0)


def rows_in_line(matrix: Tensor) -> Tensor:
    """``matrix`` with the numbers of a row side by side.

    A single column is contiguous whatever its stride, but ``embedding_bag`` goes by the stride, and rounds otherwise
    where that is not 1.
    """
    return matrix if matrix.stride(1) == 1 else matrix.clone(memory_format=torch.contiguous_format)


def pieces(tile: TileEdges, rows: int) -> Iterator[Piece]:
    """The edges of ``tile`` to neighbours below ``rows``, the length of the pulled matrices, in order; not where there
    are none."""
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
    """Indices and offsets of the edges of ``tile`` to neighbours below ``rows``, with self-loops as it asks for them;
    and where they carry anything which of the tile's edges these are (None: just those): an added self-loop, the last
    of its row, comes behind all of the tile's, that of row i as the i-th. ``has_loops``: whether some may be stored."""
    indices, offsets, adds = tile.indices_E, tile.offsets_R1, tile.self_loops is SelfLoops.EXACTLY_ONE
    keep = places = None
    # As always forward, in an order by hops, all are below: a tenth of the time of looking at each.
    if rows < tile.nodes and len(indices) and indices.numpy().max() >= rows:
        keep = indices < rows
    if adds and has_loops:
        others = are_others(indices, offsets, tile.start)
        keep = others if keep is None else keep & others
    if keep is not None:
        indices, offsets, places = only(keep, indices, offsets)
    if not adds:
        return indices, offsets, places
    given = torch.arange(len(indices)) if places is None else places
    indices, offsets, is_given = with_self(indices, offsets, tile.start, min(tile.start + tile.rows, rows))
    if tile.features_EK is None:
        return indices, offsets, None
    places, behind = torch.empty(len(indices), dtype=torch.int64), len(tile.indices_E)
    places[is_given] = given
    places[~is_given] = torch.arange(behind, behind + len(indices) - len(given))
    return indices, offsets, places


def highest_row(tile: TileEdges, neighbours_E: Tensor) -> int:
    """The largest of some neighbours, at least one, of the tile's rows. Raises :class:`StoreError` where one of them is
    no row."""
    lowest, highest = (int(bound) for bound in torch.aminmax(neighbours_E))
    if lowest < 0 or highest >= tile.nodes:
        raise StoreError(
            f"a neighbour of rows from {tile.start} is none of the store's {tile.nodes} rows: "
            "indices are damaged; ooc verify tells where; convert again"
        )
    return highest


def are_others(indices_E: Tensor, offsets_R1: Tensor, start: int) -> Tensor:
    """Bool [E]: which neighbours of rows ``start…`` are another row."""
    rows = torch.arange(start, start + len(offsets_R1) - 1, dtype=indices_E.dtype, device=indices_E.device)
    return indices_E != torch.repeat_interleave(rows, offsets_R1.diff(), output_size=len(indices_E))


def only(is_kept_E: Tensor, indices_E: Tensor, offsets_R1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Indices and offsets of the edges that are kept, and which those are. By NumPy, where they are is found once, and
    looked up by rows: two to four times as fast as torch's masks."""
    kept = np.flatnonzero(is_kept_E.numpy())
    offsets = offsets_R1.numpy()
    before = np.searchsorted(kept, offsets).astype(offsets.dtype)
    return torch.from_numpy(indices_E.numpy()[kept]), torch.from_numpy(before), torch.from_numpy(kept)


def with_self(indices_E: Tensor, offsets_R1: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
    """Indices and offsets of rows ``start…``, those before ``stop`` last among their own neighbours; and bool, which
    edges are not those self-loops."""
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
