# SPDX-License-Identifier: Apache-2.0
"""Ascending edges (keys ``row << bits | column`` and what they carry) → the arrays of one direction."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ooc.conversion.edges import KeyForm, Run, ValueForm
from ooc.storage.writer import ArrayWriter

_WINDOW_ROWS = 1 << 18
_TOPOLOGY = ("indptr", "indices", "self_loops")


class CsrWriter:
    """Writes ``indptr`` [N+1], ``indices`` [E] and ``self_loops`` [N] of a direction from ascending edges, and
    ``edge_weight`` [E] and ``edge_features`` [E, F] where ``values`` says that they have them.

    ``most_edges`` bounds E, which is known only at the end. ``only_ones``: whether every value is 1.
    """

    def __init__(
        self,
        store: Path,
        direction: str,
        form: KeyForm,
        *,
        most_edges: int,
        values: ValueForm | None,
    ) -> None:
        self._form = form
        self._index_dtype = np.dtype(np.int32 if form.nodes <= 2**31 else np.int64)
        shapes: dict[str, tuple[tuple[int, ...], npt.DTypeLike]] = {
            "indptr": ((form.num_rows + 1,), np.int64),
            "indices": ((most_edges,), self._index_dtype),
            "self_loops": ((form.num_rows,), np.int32),
        }
        for name, kind, width in values.columns if values is not None else ():
            shapes[name] = ((most_edges,) if width is None else (most_edges, width), kind)
        # The first row that is not complete yet, and what came of it so far.
        self._row = self._row_edges = self._row_loops = 0
        self.edges = self.self_loops = 0
        self.only_ones = True
        self._writers = {
            name: ArrayWriter(store, f"{direction}/{name}", shape, dtype) for name, (shape, dtype) in shapes.items()
        }
        self._indptr, self._indices, self._loops = (self._writers[name] for name in _TOPOLOGY)
        self._values = {name: writer for name, writer in self._writers.items() if name not in _TOPOLOGY}
        self._indptr.append(np.zeros(1, dtype=np.int64))

    @property
    def appended(self) -> int:
        """Edges so far."""
        return self._indices.rows

    def found(self) -> dict[str, Any]:
        """How many edges and self-loops there are, and whether all values are 1."""
        return {"edges": self.edges, "self_loops": self.self_loops, "only_ones": self.only_ones}

    def append(self, run: Run) -> None:
        """Add edges, none below those before."""
        keys = run.keys
        if not len(keys):
            return
        if run.values is not None:
            for name, writer in self._values.items():
                column = run.values[name]
                self.only_ones = self.only_ones and bool((column == 1).all())
                writer.append(column)
        rows, columns = self._form.rows(keys), self._form.columns(keys)
        self._indices.append(columns.astype(self._index_dtype))
        looping = rows[rows == columns]
        self.self_loops += len(looping)
        last = int(rows[-1])
        done = done_loops = 0
        for start in range(self._row, last, _WINDOW_ROWS):
            stop = min(start + _WINDOW_ROWS, last)
            here, here_loops = np.searchsorted(rows, stop), np.searchsorted(looping, stop)
            self._end_rows(stop, rows[done:here], looping[done_loops:here_loops])
            done, done_loops = int(here), int(here_loops)
        self._row_edges += len(rows) - done
        self._row_loops += len(looping) - done_loops

    def complete(self) -> None:
        """Complete the remaining rows, and the arrays."""
        nothing = np.empty(0, dtype=np.int64)
        for start in range(self._row, self._form.num_rows, _WINDOW_ROWS):
            self._end_rows(min(start + _WINDOW_ROWS, self._form.num_rows), nothing, nothing)
        for writer in self._writers.values():
            writer.close(shrink=writer not in (self._indptr, self._loops))

    def close(self) -> None:
        """Close the files that are open; what is not complete then stays unfinished."""
        for writer in self._writers.values():
            writer.abandon()

    def _end_rows(self, stop: int, rows: npt.NDArray[np.int64], looping: npt.NDArray[np.int64]) -> None:
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
