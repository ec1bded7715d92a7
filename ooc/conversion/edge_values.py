# SPDX-License-Identifier: Apache-2.0
"""What edges carry besides their ends, as records: a weight, features, or both, side by side in the types of the store.

Records travel with their edges through the sort on disk (``edge_sort``). For D bytes of them an edge that moves, in
each direction, 8 + D bytes to the buckets, 8 + D back and D to the store, all in sequence. To sort edge numbers
instead and fetch by them would save none of that: 16 bytes an edge to and from the buckets, and then D bytes from
any place of the source, for which a disk reads 4096 (or, as a second sort by place, 8 + D there and back again).

N nodes, E edges, F features of an edge, n edges of a block.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ooc.conversion.source import EdgeBlock, EdgeData, Source
from ooc.errors import SourceError
from ooc.storage.array import AnyArray
from ooc.storage.store import EDGE_FEATURES, EDGE_WEIGHT, Store

Values = npt.NDArray[np.void]
_ADDED = 1  # The value of an edge that is added, a self-loop: as in PyG's add_remaining_self_loops.


@dataclass(frozen=True, kw_only=True)
class ValueForm:
    """``columns``: of each array, its type and F (None: one number an edge, [E])."""

    columns: tuple[tuple[str, str, int | None], ...]

    @classmethod
    def of_source(cls, source: Source, dtype: str) -> "ValueForm | None":
        """How edge data of ``source`` is stored beside features of ``dtype``: in that, weights in float32 at the least.

        None where it has none.
        """
        columns: list[tuple[str, str, int | None]] = []
        if source.has_edge_weight:
            columns.append((EDGE_WEIGHT, "float32" if dtype == "float16" else dtype, None))
        if source.num_edge_features:
            columns.append((EDGE_FEATURES, dtype, source.num_edge_features))
        return cls(columns=tuple(columns)) if columns else None

    @classmethod
    def of_store(cls, store: Store) -> "ValueForm | None":
        """As ``store`` has them; None where it has none."""
        arrays = store.edge_data("in")
        widths = [array.shape[1] if len(array.shape) == 2 else None for array in arrays]
        columns = tuple((array.path.name, array.dtype.name, width) for array, width in zip(arrays, widths, strict=True))
        return cls(columns=columns) if columns else None

    @property
    def names(self) -> tuple[str, ...]:
        """The arrays, in order."""
        return tuple(name for name, _, _ in self.columns)

    @property
    def dtype(self) -> np.dtype[np.void]:
        """Of a record."""
        return np.dtype([(name, kind, () if width is None else (width,)) for name, kind, width in self.columns])

    @property
    def numbers(self) -> int:
        """How many an edge has."""
        return sum(width or 1 for _, _, width in self.columns)

    def records(self, data: EdgeData | None, count: int, first: int) -> Values:
        """``data`` of the ``count`` edges from ``first`` on; SourceError where a number is none or does not fit."""
        found: Values = np.empty(count, dtype=self.dtype)
        given = data._asdict() if data is not None else {}
        for name, kind, width in self.columns:
            values = given.get(name.removeprefix("edge_"))
            if values is None or values.dtype.kind not in "biuf":
                raise SourceError(f"edges from {first} on have no {name.replace('_', ' ')} that is numbers")
            wanted = (count,) if width is None else (count, width)
            if values.shape != wanted:
                raise SourceError(f"{name} of the edges from {first} on is of the shape {values.shape}, not {wanted}")
            with np.errstate(over="ignore"):
                found[name] = values
            _check_finite(found[name], values, name, kind, first)
        return found

    def added(self, count: int) -> Values:
        """Of ``count`` edges that are no source's."""
        found: Values = np.empty(count, dtype=self.dtype)
        for name in self.names:
            found[name] = _ADDED
        return found

    def wide(self, records: Values) -> npt.NDArray[np.float64]:
        """The numbers of ``records`` [n] in double precision [n, ``numbers``]."""
        parts = [records[name].reshape(len(records), -1) for name in self.names]
        return np.concatenate(parts, axis=1, dtype=np.float64)

    def narrow(self, wide: npt.NDArray[np.float64]) -> Values:
        """The records of those numbers; infinite where one does not fit."""
        found: Values = np.empty(len(wide), dtype=self.dtype)
        done = 0
        with np.errstate(over="ignore"):
            for name, _, width in self.columns:
                part = wide[:, done : done + (width or 1)]
                found[name] = part[:, 0] if width is None else part
                done += width or 1
        return found


def taken(values: Values, places: npt.NDArray[np.int64]) -> Values:
    """``values[places]``, each record moved as a whole: several times faster than number by number."""
    whole = values.view(f"V{values.dtype.itemsize}")
    return whole.take(places).view(values.dtype)


def _check_finite(stored: AnyArray, given: AnyArray, name: str, kind: str, first: int) -> None:
    finite = np.isfinite(stored)
    if finite.all():
        return
    at = np.argwhere(~finite)[0]
    value = given[tuple(at)]
    what = "weight" if name == EDGE_WEIGHT else f"feature {at[1]}"
    limit = f", more than {kind} can hold" if np.isfinite(value) else ""
    raise SourceError(f"the {what} of edge {first + int(at[0])} is {value:g}{limit}")


def with_data(
    edges: Iterator[EdgeBlock],
    *,
    weight: Iterator[AnyArray] | None = None,
    features: Iterator[AnyArray] | None = None,
    name: str,
) -> Iterator[EdgeBlock]:
    """``edges`` with weights [n] and features [n, F] that come in blocks of their own, in the same order, beside what
    they carry already.

    SourceError, saying ``name``, where there are not as many.
    """
    given = [_Rows(blocks, name) if blocks is not None else None for blocks in (weight, features)]
    for block in edges:
        done = 0
        while done < len(block.sources):
            take = min([len(block.sources) - done, *(rows.ready() for rows in given if rows is not None)])
            here = slice(done, done + take)
            own = (None if array is None else array[here] for array in block.data or EdgeData())
            data = EdgeData(*(rows.take(take) if rows else array for rows, array in zip(given, own, strict=True)))
            yield EdgeBlock(block.sources[here], block.targets[here], data)
            done += take
    for rows in given:
        if rows is not None:
            rows.check_end()


class _Rows:
    """Rows that come in blocks, taken as many at a time as is wanted."""

    def __init__(self, blocks: Iterator[AnyArray], name: str) -> None:
        self._blocks, self._name = iter(blocks), name
        self._block: AnyArray = np.empty(0)
        self._done = 0

    def ready(self) -> int:
        """How many can be taken at once, one at the least."""
        while self._done == len(self._block):
            block = next(self._blocks, None)
            if block is None:
                raise SourceError(f"{self._name} ends before the edges do")
            self._block, self._done = block, 0
        return len(self._block) - self._done

    def take(self, count: int) -> AnyArray:
        """The next ``count`` rows, of those that are ready."""
        self._done += count
        return self._block[self._done - count : self._done]

    def check_end(self) -> None:
        """SourceError where a row is left."""
        if self._done < len(self._block) or any(len(block) for block in self._blocks):
            raise SourceError(f"{self._name} has more rows than there are edges")
