# SPDX-License-Identifier: Apache-2.0
"""Ascending edge keys (``row << bits | column``) → the arrays of one direction of the topology."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ooc.conversion.edge_sort import Keys
from ooc.storage.array import Array, ArrayWriter, create_array

_WINDOW_ROWS = 1 << 18


@dataclass(frozen=True)
class KeyForm:
    """How an edge among ``nodes`` nodes is packed: row and column in ``bits`` bits each."""

    nodes: int

    @property
    def bits(self) -> int:
        return max(1, (self.nodes - 1).bit_length())

    @property
    def largest(self) -> int:
        return (self.nodes - 1) << self.bits | (self.nodes - 1)

    def pack(self, rows: npt.NDArray[np.int64], columns: npt.NDArray[np.int64]) -> Keys:
        """Keys of the edges, a new array; ids must be in range."""
        keys = rows.astype(np.uint64)
        keys <<= np.uint64(self.bits)
        keys |= columns.view(np.uint64)
        return keys

    def rows(self, keys: Keys) -> npt.NDArray[np.int64]:
        return (keys >> np.uint64(self.bits)).view(np.int64)

    def columns(self, keys: Keys) -> npt.NDArray[np.int64]:
        return (keys & np.uint64((1 << self.bits) - 1)).view(np.int64)

    def loops(self, start: int, stop: int) -> Keys:
        """The keys of the self-loops of nodes ``start:stop``."""
        return np.arange(start, stop, dtype=np.uint64) * np.uint64((1 << self.bits) + 1)


def cut(blocks: Iterable[Keys], size: int) -> Iterator[Keys]:
    """The same keys in views of at most ``size``, so that what is derived from a block stays small."""
    for block in blocks:
        for start in range(0, len(block), size):
            yield block[start : start + size]


def distinct(blocks: Iterable[Keys]) -> Iterator[Keys]:
    """Ascending keys without repetitions."""
    last: int | None = None
    for block in blocks:
        if not len(block):
            continue
        fresh = np.empty(len(block), dtype=np.bool_)
        fresh[0] = last is None or int(block[0]) != last
        np.not_equal(block[1:], block[:-1], out=fresh[1:])
        last = int(block[-1])
        yield block[fresh]


def with_self_loops(blocks: Iterable[Keys], form: KeyForm) -> Iterator[Keys]:
    """Ascending keys with a self-loop put in for every node that lacks one."""
    node = 0
    for block in blocks:
        if not len(block):
            continue
        # Loops up to the block's last key belong here; later ones may still come in later blocks.
        stop = min(form.nodes, int(block[-1]) // ((1 << form.bits) + 1) + 1)
        done = 0
        while stop - node > _WINDOW_ROWS:  # A sparse graph: many rows in few keys.
            loops = form.loops(node, node + _WINDOW_ROWS)
            here = int(np.searchsorted(block, loops[-1], side="right"))
            yield _merged(block[done:here], loops)
            node, done = node + _WINDOW_ROWS, here
        yield _merged(block[done:], form.loops(node, stop)) if stop > node else block[done:]
        node = max(node, stop)
    while node < form.nodes:
        stop = min(form.nodes, node + _WINDOW_ROWS)
        yield form.loops(node, stop)
        node = stop


def _merged(keys: Keys, loops: Keys) -> Keys:
    at = np.searchsorted(keys, loops)
    lacking = np.ones(len(loops), dtype=np.bool_)
    inside = at < len(keys)
    lacking[inside] = keys[at[inside]] != loops[inside]
    return np.insert(keys, at[lacking], loops[lacking])


class CsrWriter:
    """Writes ``indptr`` [N+1], ``indices`` [E] and ``self_loops`` [N] of a direction from ascending keys.

    ``most_edges`` bounds E, which is known only at the end.
    """

    def __init__(self, store: Path, direction: str, form: KeyForm, *, most_edges: int) -> None:
        self._form = form
        self._index_dtype = np.dtype(np.int32 if form.nodes <= 2**31 else np.int64)
        self._indptr = create_array(store, f"{direction}/indptr", (form.nodes + 1,), np.int64)
        self._indices = create_array(store, f"{direction}/indices", (most_edges,), self._index_dtype)
        self._loops = create_array(store, f"{direction}/self_loops", (form.nodes,), np.int32)
        self._indptr.append(np.zeros(1, dtype=np.int64))
        self._row = 0  # The first row that is not complete yet, ...
        self._row_edges = self._row_loops = 0  # ... and what came of it so far.
        self.edges = 0
        self.self_loops = 0

    def append(self, keys: Keys) -> None:
        """Add ascending ``keys``, none below those before."""
        if not len(keys):
            return
        rows, columns = self._form.rows(keys), self._form.columns(keys)
        self._indices.append(columns.astype(self._index_dtype))
        looping = rows[rows == columns]
        self.self_loops += len(looping)
        last = int(rows[-1])
        done = done_loops = 0
        for start in range(self._row, last, _WINDOW_ROWS):
            stop = min(start + _WINDOW_ROWS, last)
            here, here_loops = np.searchsorted(rows, stop), np.searchsorted(looping, stop)
            self._complete(stop, rows[done:here], looping[done_loops:here_loops])
            done, done_loops = int(here), int(here_loops)
        self._row_edges += len(rows) - done
        self._row_loops += len(looping) - done_loops

    def close(self) -> tuple[Array, Array, Array]:
        """Complete the remaining rows; ``(indptr, indices, self_loops)``."""
        nothing = np.empty(0, dtype=np.int64)
        for start in range(self._row, self._form.nodes, _WINDOW_ROWS):
            self._complete(min(start + _WINDOW_ROWS, self._form.nodes), nothing, nothing)
        return self._indptr.close(), self._indices.close(shrink=True), self._loops.close()

    def abandon(self) -> None:
        """Close the open files."""
        for writer in self._writers():
            writer.abandon()

    def _writers(self) -> tuple[ArrayWriter, ...]:
        return self._indptr, self._indices, self._loops

    def _complete(self, stop: int, rows: npt.NDArray[np.int64], looping: npt.NDArray[np.int64]) -> None:
        """Rows up to ``stop`` are complete; ``rows`` and ``looping`` name each row once an edge and loop."""
        first, height = self._row, stop - self._row
        counts = np.bincount(rows - first, minlength=height)
        counts[0] += self._row_edges
        loops = np.bincount(looping - first, minlength=height)
        loops[0] += self._row_loops
        ends = np.cumsum(counts, out=counts)
        ends += self.edges
        self._indptr.append(ends)
        self._loops.append(loops.astype(np.int32))
        self.edges = int(ends[-1])
        self._row, self._row_edges, self._row_loops = stop, 0, 0
