# SPDX-License-Identifier: Apache-2.0
"""Ascending edge keys (``row << bits | column``) → the arrays of one direction of the topology."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ooc.conversion.edge_sort import Keys
from ooc.storage.array import Array, create_array, resume_array

_WINDOW_ROWS = 1 << 18
_STATE = ("row", "row_edges", "row_loops", "edges", "self_loops_found")


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


class SelfLoops:
    """Puts a self-loop for every node that lacks one into ascending keys. ``node``: the first still to be seen to."""

    def __init__(self, form: KeyForm, node: int = 0) -> None:
        self._form = form
        self.node = node

    def among(self, blocks: Iterable[Keys]) -> Iterator[Keys]:
        """``blocks`` and, between their keys, the loops that were lacking; none below the keys of earlier calls."""
        form = self._form
        for block in blocks:
            if not len(block):
                continue
            # Loops up to the block's last key belong here; later ones may still come in later blocks.
            stop = min(form.nodes, int(block[-1]) // ((1 << form.bits) + 1) + 1)
            done = 0
            while stop - self.node > _WINDOW_ROWS:  # A sparse graph: many rows in few keys.
                loops = form.loops(self.node, self.node + _WINDOW_ROWS)
                here = int(np.searchsorted(block, loops[-1], side="right"))
                yield _merged(block[done:here], loops)
                self.node, done = self.node + _WINDOW_ROWS, here
            yield _merged(block[done:], form.loops(self.node, stop)) if stop > self.node else block[done:]
            self.node = max(self.node, stop)

    def remaining(self) -> Iterator[Keys]:
        """The loops of the nodes after the last key."""
        while self.node < self._form.nodes:
            stop = min(self._form.nodes, self.node + _WINDOW_ROWS)
            yield self._form.loops(self.node, stop)
            self.node = stop


def _merged(keys: Keys, loops: Keys) -> Keys:
    at = np.searchsorted(keys, loops)
    lacking = np.ones(len(loops), dtype=np.bool_)
    inside = at < len(keys)
    lacking[inside] = keys[at[inside]] != loops[inside]
    return np.insert(keys, at[lacking], loops[lacking])


class CsrWriter:
    """Writes ``indptr`` [N+1], ``indices`` [E] and ``self_loops`` [N] of a direction from ascending keys.

    ``most_edges`` bounds E, which is known only at the end. ``progress``: another process's to go on from.
    """

    def __init__(
        self, store: Path, direction: str, form: KeyForm, *, most_edges: int, progress: dict[str, Any] | None = None
    ) -> None:
        self._form = form
        self._index_dtype = np.dtype(np.int32 if form.nodes <= 2**31 else np.int64)
        shapes: dict[str, tuple[int, npt.DTypeLike]] = {
            "indptr": (form.nodes + 1, np.int64),
            "indices": (most_edges, self._index_dtype),
            "self_loops": (form.nodes, np.int32),
        }
        state = progress or dict.fromkeys(_STATE, 0)
        # The first row that is not complete yet, and what came of it so far.
        self._row, self._row_edges, self._row_loops = (int(state[name]) for name in _STATE[:3])
        self.edges, self.self_loops = (int(state[name]) for name in _STATE[3:])
        self._writers = {
            name: create_array(store, f"{direction}/{name}", (rows,), dtype)
            if progress is None
            else resume_array(store, f"{direction}/{name}", (rows,), dtype, progress[name])
            for name, (rows, dtype) in shapes.items()
        }
        self._indptr, self._indices, self._loops = self._writers.values()
        if progress is None:
            self._indptr.append(np.zeros(1, dtype=np.int64))

    @property
    def appended(self) -> int:
        """Keys so far."""
        return self._indices.rows

    def progress(self) -> dict[str, Any]:
        """How far it has come, as JSON; see ``ArrayWriter.progress``."""
        state = (self._row, self._row_edges, self._row_loops, self.edges, self.self_loops)
        return dict(zip(_STATE, state, strict=True)) | {
            name: writer.progress() for name, writer in self._writers.items()
        }

    def flush(self) -> None:
        """Have all keys so far on the disk."""
        for writer in self._writers.values():
            writer.flush()

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
        for writer in self._writers.values():
            writer.abandon()

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
