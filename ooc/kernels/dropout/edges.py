# SPDX-License-Identifier: Apache-2.0
"""Dropout of attention coefficients, with masks that an edge's source and its target draw alike.

Forward, targets pull over in-edges; backward, sources pull over out-edges. Neither knows where the other's lists hold
an edge. So a mask is a pure function of what both know: seed, epoch, layer, head, the two rows, and how many edges
between the same two rows come before (see ``Piece.repeats_E``). If edges carry nothing, those between the same two rows
have the same score and message, so it does not matter which of them is dropped. If they carry features, a store has
them in the order of its source in both directions, so both ends count alike.

The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), computed here on
arrays, since NumPy's own only counts upwards. One value of the counter serves four heads.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ooc.errors import StoreError
from ooc.kernels.edges import Piece
from ooc.plan.workload import Direction

HEADS_PER_COUNT = 4
"""32-bit numbers that Philox4x32 gives for one value of its counter."""

UNSORTED = "neighbours of a row are not in ascending order, as dropout on edges needs; convert again"
"""The message for lists whose repeated edges cannot be told apart."""

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
_HALF = np.uint64(32)

Words = npt.NDArray[np.uint32]
Rows = npt.NDArray[np.int64]


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[int, int]) -> tuple[Words, Words, Words, Words]:
    """Return Philox4x32-10 of every element of ``counter``, four arrays of one shape."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        left = c0 * _MULTIPLIERS[0]
        right = c2 * _MULTIPLIERS[1]
        c0 = (right >> _HALF).astype(np.uint32) ^ c1 ^ np.uint32(k0)
        c2 = (left >> _HALF).astype(np.uint32) ^ c3 ^ np.uint32(k1)
        c1, c3 = right.astype(np.uint32), left.astype(np.uint32)
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def key_of(*numbers: int) -> tuple[int, int]:
    """Return the generator's key for ``numbers``: the seed, and what distinguishes these draws from others."""
    entropy = [number & (2**64 - 1) for number in numbers]
    first, second = np.random.SeedSequence(entropy).generate_state(2, np.uint32)
    return int(first), int(second)


@dataclass(frozen=True, slots=True)
class EdgeDropout:
    """Dropout with probability ``p`` on every edge and head of one layer in one epoch."""

    p: float
    seed: int
    epoch: int
    layer: int

    def scale(self, piece: Piece, direction: Direction, heads: range, dtype: torch.dtype) -> Tensor:
        """Return the factors of coefficients [E, heads]: 1 / (1 - p) where kept, 0 where dropped.

        ``direction``: whether the tile's rows are the targets (``IN``) or the sources of its edges. ``heads``: numbers
        among all heads of the layer, which may be computed in groups.
        """
        _check_order(piece)
        own = piece.row_E.add(piece.tile_start + piece.start).numpy()
        other = piece.neighbours_E.numpy().astype(np.int64, copy=False)
        target, source = (own, other) if direction is Direction.IN else (other, own)
        keep = self.keep(target, source, piece.repeats_E().numpy().astype(np.uint32), heads)
        return keep.to(dtype).mul_(self.kept_scale)

    def keep(self, target: Rows, source: Rows, repeats: Words, heads: range) -> Tensor:
        """Return, as bool [E, heads], which coefficients are kept, for edges between these rows [E] with this many
        repeats before each."""
        high = ((target >> 32) << 8 | (source >> 32)) << 16
        threshold = np.uint32(self.threshold)
        keep = np.empty((len(target), len(heads)), dtype=np.bool_)
        for group in range(heads.start // HEADS_PER_COUNT, -(-heads.stop // HEADS_PER_COUNT)):
            last = (high | group).astype(np.uint32)
            words = philox((target.astype(np.uint32), source.astype(np.uint32), repeats, last), self.key)
            for lane, word in enumerate(words):
                head = group * HEADS_PER_COUNT + lane
                if head in heads:
                    np.greater_equal(word, threshold, out=keep[:, head - heads.start])
        return torch.from_numpy(keep)

    @property
    def threshold(self) -> int:
        """A coefficient is dropped if its 32-bit random number is below this."""
        return min(round(self.p * 2**32), _LOW)

    @property
    def kept_scale(self) -> float:
        """The factor of coefficients that are kept."""
        return 0.0 if self.p == 1.0 else 1.0 / (1.0 - self.p)

    @property
    def key(self) -> tuple[int, int]:
        """The generator's key: two 32-bit numbers."""
        return key_of(self.seed, self.epoch, self.layer)


def keep_edges(dropout: EdgeDropout, targets_E: Tensor, sources_E: Tensor, repeats_E: Tensor, columns: int) -> Tensor:
    """Return, as bool [E, columns] computed on the CPU, which entries are kept for E edges in any order between these
    rows of the store. ``repeats_E``: how many edges before each have the same two ends; all int64. A node counts as the
    edge from it to itself."""
    rows = targets_E.numpy(), sources_E.numpy(), repeats_E.numpy().astype(np.uint32)
    return dropout.keep(*rows, range(columns))


def _check_order(piece: Piece) -> None:
    """Check that equal neighbours are side by side, as repeated edges are told apart by their place among equals."""
    falls = piece.neighbours_E[1:] < piece.neighbours_E[:-1]
    falls &= piece.row_E[1:] == piece.row_E[:-1]
    if piece.has_added:
        falls &= piece.neighbours_E[1:] != piece.row_E[1:] + (piece.tile_start + piece.start)  # the added self-loop
    if bool(falls.any()):
        raise StoreError(UNSORTED)
