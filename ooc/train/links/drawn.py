# SPDX-License-Identifier: Apache-2.0
"""The links of a training step: the positive ones, the negatives drawn for each, and the files that hold both.

All draws of an epoch together are a random permutation of enough copies of all nodes. The permutation is a Feistel
network (M. Luby, C. Rackoff, SIAM Journal on Computing 17(2), 1988), whose inverse tells for which links a node is
drawn. So links can be listed by their tails as well, without sorting them.

Shapes: E links, K negatives of each.
"""

import os
import weakref
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ooc.errors import OocError, OptionError, SpillError, as_error
from ooc.plan.workload import Direction
from ooc.prefetch.spill import open_nameless
from ooc.sampling.runs import pieces
from ooc.sizes import format_size
from ooc.storage.array import PAGE_BYTES, Array, write_at
from ooc.storage.checksums import combined, of_zeros
from ooc.storage.mixing import GOLDEN, mixed
from ooc.train.links.sets import KNOWN_BYTES, KNOWN_BYTES_PER_PAIR, Ends, Ints, KnownLinks


class LinkArray(Array):
    """An array of ``rows`` zeros in a file of ``folder``, as the part ``part`` of a topology. SpillError without disk
    space.

    Values that are put there in order, from the first row to the last, get a checksum. Reading the whole array in order
    then compares it.
    """

    def __init__(self, folder: Path, side: Direction, part: str, rows: int, dtype: npt.DTypeLike) -> None:
        kind = np.dtype(dtype).newbyteorder("<")
        nbytes = -(-max(1, rows) * kind.itemsize // PAGE_BYTES) * PAGE_BYTES
        with as_error(SpillError, f"{folder}: no room for links, {format_size(nbytes)}"):
            folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = open_nameless(folder)
            self.close = weakref.finalize(self, os.close, self._descriptor)
            os.posix_fallocate(self._descriptor, 0, nbytes)
        path = Path(f"/proc/self/fd/{self._descriptor}")
        super().__init__(f"{side.value}/{part}", path, (rows,), (nbytes // kind.itemsize,), kind.str)
        self._put_bytes, self._crc = 0, 0

    def chunk_path(self, index: int) -> Path:
        """Return the path of the file, which is the only chunk."""
        return self.path

    @property
    def has_checksums(self) -> bool:
        """Whether all values were put there in order."""
        return 0 < self._put_bytes == self.shape[0] * self.row_bytes

    def checksums(self) -> npt.NDArray[np.uint32]:
        """The CRC-32C of the file including the zeros at its end, [1]."""
        zeros = self.chunk_bytes - self._put_bytes
        return np.array([combined(self._crc, of_zeros(zeros), zeros)], dtype=np.uint32)

    def damaged(self, chunk: int) -> OocError:
        """Return the error for links whose bytes differ from those written."""
        return SpillError(f"{self.name}: the SSD returns other bytes of links than were written")

    def put(self, start: int, values: npt.NDArray[Any]) -> None:
        """Write ``values`` to the entries from ``start`` on."""
        data = np.ascontiguousarray(values, dtype=self.dtype).view(np.uint8)
        follows = start * self.row_bytes == (self._put_bytes if start else 0)
        self._crc = google_crc32c.extend(self._crc if start else 0, data) if follows else 0
        self._put_bytes = start * self.row_bytes + len(data) if follows else -1
        self._seen = 0, 0, 0
        with as_error(SpillError, "links cannot be written"):
            write_at(self._descriptor, data, start * self.row_bytes)


_REVERSED_AT_ONCE = 1 << 17
"""Links that are sorted at a time."""
_BYTES_PER_LINK = 48
"""Bytes that sorting takes for each of them: both ends, the bucket, and the order."""


class ReversedLinks:
    """Links by their tails, as a topology of ``side``, made from the links by their heads, whose ``tails`` are written.

    Links are distributed to buckets of tails, each of which is sorted by itself. Making the object takes 8 bytes a
    node, ``fill`` takes ``nbytes``.
    """

    def __init__(self, folder: Path, side: Direction, tails: LinkArray, nodes: int) -> None:
        self._by_heads, total, index = tails, tails.shape[0], tails.dtype
        counts = np.zeros(nodes, dtype=np.int64)
        for first in range(0, total, _REVERSED_AT_ONCE):
            np.add.at(counts, tails.read(first, min(total, first + _REVERSED_AT_ONCE)), 1)
        ends = np.concatenate(([0], np.cumsum(counts)))
        # A bucket has at most as many links as are sorted at once, or a single tail.
        self._nodes = [0, *(stop for _, stop in pieces((ends[1:], _REVERSED_AT_ONCE)))]
        self._starts = ends[self._nodes].tolist()
        self._offsets, self._heads = (
            LinkArray(folder, side, "indptr", nodes + 1, np.int64),
            LinkArray(folder, side, "indices", total, index),
        )
        self._tails = LinkArray(folder, side, "tails", total, index)
        self._offsets.put(0, ends)
        self._is_filled = False
        self.arrays = {array.name: array for array in (self._offsets, self._heads)}
        self.nbytes = 16 * len(self._nodes) + _BYTES_PER_LINK * min(total, _REVERSED_AT_ONCE)

    def fill(self, offsets: npt.NDArray[np.signedinteger]) -> None:
        """Write the heads of all links, once; ``offsets`` [N + 1]: where the links of each head begin."""
        if self._is_filled:
            return
        total, at = self._by_heads.shape[0], list(self._starts)
        for first in range(0, total, _REVERSED_AT_ONCE):
            last = min(total, first + _REVERSED_AT_ONCE)
            heads = np.searchsorted(offsets, np.arange(first, last, dtype=offsets.dtype), side="right") - 1
            tails = self._by_heads.read(first, last)
            bucket = np.searchsorted(self._nodes, tails, side="right") - 1
            order = np.argsort(bucket, kind="stable")
            found, counts = np.unique(bucket, return_counts=True)
            done = 0
            for number, count in zip(found.tolist(), counts.tolist(), strict=True):
                mine = order[done : done + count]
                self._heads.put(at[number], heads[mine])
                self._tails.put(at[number], tails[mine])
                done, at[number] = done + count, at[number] + count
        for number, (start, stop) in enumerate(pairwise(self._starts)):
            if self._nodes[number + 1] - self._nodes[number] > 1:
                order = np.argsort(self._tails.read(start, stop), kind="stable")
                self._heads.put(start, self._heads.read(start, stop)[order])
        self._is_filled = True


Words = npt.NDArray[np.uint64]

_LINKS_AT_ONCE = 1 << 15
"""Links that are drawn and sorted at a time."""
_BYTES_AT_ONCE = 96
"""Bytes for each of them: heads, tails, labels, their order and copies in that order."""
_ROUNDS = 6
_NEGATIVE, _STEP = 1, 2
"""Purposes of a draw: beside seed and epoch, the third part of its key."""


class Permutation:
    """A pseudorandom permutation of the numbers below ``size``, chosen by a key."""

    def __init__(self, size: int, *key: int) -> None:
        self._size = np.uint64(size)
        bits = max(2, (size - 1).bit_length())
        self._low = np.uint64(bits - bits // 2)
        self._masks = [np.uint64((1 << count) - 1) for count in (bits // 2, bits - bits // 2)]
        self._keys = _seed_words(_ROUNDS, *key)

    def of(self, numbers: Words) -> Words:
        """Return the positions that the numbers are mapped to [n]."""
        return self._cycle_walk(numbers, range(_ROUNDS))

    def inverse(self, numbers: Words) -> Words:
        """Return the numbers that are mapped to these positions."""
        return self._cycle_walk(numbers, range(_ROUNDS - 1, -1, -1))

    def _cycle_walk(self, numbers: Words, rounds: range) -> Words:
        """Apply the rounds to each number, again while the result is not below ``size`` (cycle walking).

        In each round, one half of a number's bits is changed by a hash of the other half.
        """
        found = self._apply_rounds(numbers, rounds)
        left = np.flatnonzero(found >= self._size)
        while len(left):
            found[left] = self._apply_rounds(found[left], rounds)
            left = left[found[left] >= self._size]
        return found

    def _apply_rounds(self, numbers: Words, rounds: range) -> Words:
        halves = [numbers >> self._low, numbers & self._masks[1]]
        for turn in rounds:
            own, other = turn % 2, 1 - turn % 2
            halves[own] = halves[own] ^ (mixed(halves[other] + self._keys[turn]) & self._masks[own])
        return (halves[0] << self._low) | halves[1]


class TrainingLinks:
    """A store's training links by their heads, with K negatives each, and the files that hold a step's links.

    ``links_3E``: rows of heads and tails, of nodes as ``ends`` says, and numbers of the edge types. ``reversible``: the
    links may be asked for by their tails, too. ``filtered``: negatives that are edges of the graph or training links
    are left out.
    """

    def __init__(
        self,
        folder: Path,
        ends: Ends,
        links_3E: Ints,
        negatives: int,
        seed: int,
        *,
        reversible: bool,
        filtered: bool = False,
    ) -> None:
        self._seed, self._ends, self._negatives, self._reversed_in = seed, ends, negatives, -1
        self._known = KnownLinks(ends) if filtered else None
        heads, tails, kinds = links_3E
        self.count = links = len(heads)
        nodes, self._nodes = ends.tails, ends.heads
        total = links * (1 + negatives)
        self._copies = -(-links * negatives // nodes)
        index = np.int32 if nodes <= 2**31 else np.int64
        made = partial(LinkArray, folder, Direction.LINKS)
        self._first = _offsets(heads, ends.heads)
        self._order, self._tails = made("order", links, np.int64), made("tails", links, index)
        order = np.lexsort((kinds, tails, heads))
        self._order.put(0, order)
        self._tails.put(0, tails[order])
        self._kinds = made("kinds", links if ends.relations else 1, np.int32)
        if ends.relations:
            self._kinds.put(0, kinds[order])
        offsets = made("indptr", ends.heads + 1, np.int64)
        offsets.put(0, self._first * (1 + negatives))
        self._indices, self._labels = made("indices", total, index), made("edge_weight", total, np.float32)
        most = int(np.diff(self._first).max()) * (1 + negatives)
        arrays, self._numbers = [offsets, self._indices, self._labels], None
        if ends.relations:
            arrays.append(numbers := made("edge_features", total, np.float32))
            self._numbers = numbers
        if reversible:
            made = partial(LinkArray, folder, Direction.LINKS_REVERSED)
            self._heads, self._reversed_offsets = made("heads", links, index), made("indptr", nodes + 1, np.int64)
            self._heads.put(0, heads[np.argsort(tails, kind="stable")])
            stops = _offsets(tails, nodes) + self._copies * np.arange(nodes + 1)
            self._reversed_offsets.put(0, stops)
            self._reversed = made("indices", int(stops[-1]), index)
            self._at_once = max(1, _LINKS_AT_ONCE * nodes // int(stops[-1]))
            starts = np.append(stops[:: self._at_once], stops[-1])
            most = max(most, int(np.diff(starts).max()))
            arrays += [self._reversed_offsets, self._reversed]
        self.arrays: dict[str, LinkArray] = {array.name: array for array in arrays}
        at_once = min(max(_LINKS_AT_ONCE, most), max(array.shape[0] for array in arrays))
        of_known = 0 if self._known is None else KNOWN_BYTES + KNOWN_BYTES_PER_PAIR * at_once
        self.nbytes = int(self._first.nbytes) + _BYTES_AT_ONCE * at_once + of_known
        """Bytes of host memory that this takes from the first step to the last."""

    def draw(self, epoch: int, step: int, steps: int, *, both_ways: bool) -> int:
        """Write the links of a step, with ``both_ways`` by their tails as well; return how many there are, with
        negatives."""
        count = 0
        for first, last, heads in self._pieces():
            tails_nK, links_3n = self._drawn(epoch, first, last), self._links(first, last, heads)
            tails = np.concatenate((links_3n[1][:, None], tails_nK), axis=1)
            labels = np.zeros(tails.shape, dtype=np.float32)
            labels[:, 0] = 1
            if self._known is not None:
                labels[:, 1:][self._linked(self._known, links_3n, tails_nK)] = np.nan
            if steps > 1:
                labels[self._step_of(epoch, first, last, steps) != step] = np.nan
            count += labels.size - int(np.isnan(labels).sum())
            order = np.lexsort((labels.reshape(-1), tails.reshape(-1), np.repeat(heads, tails.shape[1])))
            self._indices.put(first * (1 + self._negatives), tails.reshape(-1)[order])
            self._labels.put(first * (1 + self._negatives), labels.reshape(-1)[order])
            if self._numbers is not None:
                kinds = np.repeat(links_3n[2], tails.shape[1])
                self._numbers.put(first * (1 + self._negatives), kinds[order].astype(np.float32))
        if both_ways and self._reversed_in != epoch:
            self._reverse(epoch)
            self._reversed_in = epoch
        return count

    def drawn(self, epoch: int, step: int, steps: int) -> tuple[Tensor, Tensor]:
        """Return a step's links, as ascending numbers of those given, and the ids of the tails drawn for each.

        The id is -1 for a negative that is left out. Raises OptionError where ids are strings, which no tensor holds.
        """
        links, ids = self.count, self._ends.ids(-1)
        if ids.dtype.kind == "S":
            raise OptionError("negatives are told by whole numbers, and the ids of these nodes are texts")
        tails_EK = self._drawn(epoch, 0, links)
        found = ids[tails_EK].astype(np.int64)
        if self._known is not None:
            heads = np.repeat(np.arange(self._nodes), np.diff(self._first))
            found[self._linked(self._known, self._links(0, links, heads), tails_EK)] = -1
        chosen = np.flatnonzero(self._step_of(epoch, 0, links, steps) == step)
        numbers = self._order.read()[chosen]
        order = np.argsort(numbers)
        return torch.from_numpy(numbers[order]), torch.from_numpy(found[chosen][order])

    def _links(self, first: int, last: int, heads_n: Ints) -> Ints:
        """Return the links ``first:last`` as heads, tails and edge types [3, n]."""
        tails_n = self._tails.read(first, last).astype(np.int64)
        kinds_n = np.zeros_like(tails_n) if self._numbers is None else self._kinds.read(first, last).astype(np.int64)
        return np.stack((heads_n, tails_n, kinds_n))

    @staticmethod
    def _linked(known: KnownLinks, links_3n: Ints, drawn_nK: Ints) -> npt.NDArray[np.bool_]:
        """Return which drawn tails [n, K] are linked to their head, by an edge of the graph or one of the links given.

        The links must be all those of their heads.
        """
        return known.of(links_3n, drawn_nK) | known.among(links_3n, drawn_nK)

    def _pieces(self) -> Iterator[tuple[int, int, Ints]]:
        """Yield ranges of links that contain all links of their heads, with the head of each link."""
        for node, stop in pieces((self._first[1:], max(1, _LINKS_AT_ONCE // (1 + self._negatives)))):
            counts = np.diff(self._first[node : stop + 1])
            if counts.any():
                yield int(self._first[node]), int(self._first[stop]), np.repeat(np.arange(node, stop), counts)

    def _permutation(self, epoch: int) -> Permutation:
        """Return the epoch's permutation of the copies of all nodes, in which copies of one node are adjacent."""
        return Permutation(self._copies * self._ends.tails, self._seed, epoch, _NEGATIVE)

    def _drawn(self, epoch: int, first: int, last: int) -> Ints:
        """Return the negative tails [n, K] of the links ``first:last``."""
        numbers = np.arange(first * self._negatives, last * self._negatives, dtype=np.uint64)
        found = self._permutation(epoch).of(numbers) // np.uint64(self._copies)
        return found.astype(np.int64).reshape(last - first, self._negatives)

    def _reverse(self, epoch: int) -> None:
        """Write the heads by tails: for each tail the heads of its links, then one head for each of its copies.

        A copy's head is that of the link it is drawn for. A copy that is drawn for no link gets the tail itself as
        head; such an entry has no effect.
        """
        permutation, copies, nodes = self._permutation(epoch), self._copies, self._ends.tails
        for first in range(0, nodes, self._at_once):
            last = min(nodes, first + self._at_once)
            ends = self._reversed_offsets.read(first, last + 1)
            draws = permutation.inverse(np.arange(first * copies, last * copies, dtype=np.uint64)).astype(np.int64)
            links = draws // self._negatives
            heads = np.searchsorted(self._first, links, side="right") - 1
            heads = np.where(links < self.count, heads, np.repeat(np.arange(first, last), copies))
            found = np.empty(ends[-1] - ends[0], dtype=np.int64)
            is_drawn = np.zeros(len(found), dtype=np.bool_)
            is_drawn[((ends[1:] - ends[0])[:, None] - 1 - np.arange(copies)).reshape(-1)] = True
            found[is_drawn] = heads
            found[~is_drawn] = self._heads.read(ends[0] - first * copies, ends[-1] - last * copies)
            self._reversed.put(int(ends[0]), found)

    def _step_of(self, epoch: int, first: int, last: int, steps: int) -> Ints:
        """Return the step of the epoch that each of these links is in; steps differ by at most one link."""
        shuffled = Permutation(self.count, self._seed, epoch, _STEP)
        return (shuffled.of(np.arange(first, last, dtype=np.uint64)) % np.uint64(steps)).astype(np.int64)


def words(numbers: Words, *key: int) -> Words:
    """Return a pseudorandom 64-bit word [n] for each number under a key."""
    return mixed(_seed_words(1, *key) + (numbers + np.uint64(1)) * GOLDEN)


def _seed_words(count: int, *key: int) -> Words:
    states = np.random.SeedSequence([part & (2**64 - 1) for part in key]).generate_state(count, np.uint64)
    return np.asarray(states, dtype=np.uint64)


def _offsets(rows: Ints, nodes: int) -> Ints:
    """Return where the links of each node begin, and where the last one's end [N + 1]."""
    return np.concatenate(([0], np.cumsum(np.bincount(rows, minlength=nodes))))
