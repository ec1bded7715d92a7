# SPDX-License-Identifier: Apache-2.0
"""Edges as they are sorted, and their way from the sort to the store.

An edge is a 64-bit key of row and column. With data (a weight, features, or both) it is a record that begins with the
key, in the dtypes of the store. After the sort, runs of edges are divided, duplicates dropped, and self-loops added.

Records pass through the sort on disk as a whole (``edge_sort``). With D bytes of data per edge, each direction writes 8
+ D bytes to the buckets, reads 8 + D, and writes D to the store, all in sequence. Sorting edge numbers instead and
fetching the data by them would not save anything: 16 bytes per edge to and from the buckets, and then D bytes from any
place of the source, for which a disk reads 4096 (or, as a second sort by place, 8 + D there and back).

N nodes, E edges, F features of an edge, n edges of a block.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from ooc.conversion.whole_numbers import WholeColumns, rounded_by
from ooc.errors import SourceError
from ooc.sources.source import EdgeData, RelationSource
from ooc.storage.array import AnyArray, whole_numbers_rounded
from ooc.storage.store import EDGE_FEATURES, EDGE_WEIGHT, Store

Keys = npt.NDArray[np.uint64]
Edges = npt.NDArray[Any]
"""Edges [n]: keys without data, else records of a `ValueForm`. Those of a run ascend by key; equal keys are in the
source's order."""
KEY = "key"
_WINDOW_ROWS = 1 << 18


def keys_of(edges: Edges) -> Keys:
    """Return the keys of ``edges`` as a contiguous array."""
    return edges if edges.dtype.names is None else np.ascontiguousarray(edges[KEY])


@dataclass(frozen=True, kw_only=True)
class ValueForm:
    """The form of edge data, none without ``columns``: for each array its name, dtype and F (None: one number per edge,
    [E])."""

    columns: tuple[tuple[str, str, int | None], ...] = ()

    @classmethod
    def of_source(cls, source: RelationSource, dtype: str) -> "ValueForm":
        """Return the form in which edge data of ``source`` is stored beside features of ``dtype``: that dtype, weights
        at least float32."""
        columns: list[tuple[str, str, int | None]] = []
        if source.has_edge_weight:
            columns.append((EDGE_WEIGHT, "float32" if dtype == "float16" else dtype, None))
        if source.num_edge_features:
            columns.append((EDGE_FEATURES, dtype, source.num_edge_features))
        return cls(columns=tuple(columns))

    @classmethod
    def of_store(cls, store: Store, direction: str = "in") -> "ValueForm":
        """Return the form of edge data in ``store``."""
        arrays = store.edge_data(direction)
        widths = [array.shape[1] if len(array.shape) == 2 else None for array in arrays]
        return cls(columns=tuple((a.path.name, a.dtype.name, width) for a, width in zip(arrays, widths, strict=True)))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the arrays, in order."""
        return tuple(name for name, _, _ in self.columns)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of an edge."""
        fields = [(name, kind, () if width is None else (width,)) for name, kind, width in self.columns]
        return np.dtype([(KEY, np.uint64), *fields] if fields else np.uint64)

    def ones(self, keys: Keys) -> Edges:
        """Return edges with these ``keys``, whose data is 1."""
        if not self.columns:
            return keys
        edges: Edges = np.empty(len(keys), dtype=self.dtype)
        edges[KEY] = keys
        for name in self.names:
            edges[name] = 1
        return edges

    def records(self, data: EdgeData, count: int, first: int) -> Edges:
        """Return records of ``data`` of the ``count`` edges from ``first`` on, whose keys are still to be filled in.

        SourceError for another number of columns, and for a number that is not finite or does not fit the dtype.
        """
        found: Edges = np.empty(count, dtype=self.dtype)
        given = data._asdict()
        for name, kind, width in self.columns:
            values = given.get(name.removeprefix("edge_"))
            assert values is not None, "every block has what the source says that edges carry"
            wanted = (count,) if width is None else (count, width)
            if values.shape != wanted:
                raise SourceError(f"{name} of the edges from {first} on is of the shape {values.shape}, not {wanted}")
            with np.errstate(over="ignore"):
                found[name] = values
            _check_finite(found[name], values, name, kind, first)
            wide = np.float64 if kind == "float64" else np.float32
            if (rounded := whole_numbers_rounded(values.astype(wide), values)) is not None:
                at = np.argwhere(rounded)[0]
                raise rounded_by(np.dtype(wide).name, _number_name(name, first + at[0], *at[1:]), values[tuple(at)])
        return found

    def whole_columns(self) -> "dict[str, WholeColumns]":
        """Return a check of integers that float64 would round, for each array, by its name in `EdgeData`."""
        return {
            name.removeprefix("edge_"): WholeColumns(width or 1, partial(_number_name, name))
            for name, kind, width in self.columns
            if kind != "float64"
        }

    def wide(self, edges: Edges) -> npt.NDArray[np.float64]:
        """Return the data of ``edges`` [n] in double precision [n, numbers of an edge]."""
        columns = [edges[name].reshape(len(edges), -1) for name in self.names]
        return np.concatenate(columns, axis=1, dtype=np.float64)


def _check_finite(stored: AnyArray, given: AnyArray, name: str, kind: str, first: int) -> None:
    finite = np.isfinite(stored)
    if finite.all():
        return
    at = np.argwhere(~finite)[0]
    value = given[tuple(at)]
    limit = f", more than {kind} can hold" if np.isfinite(value) else ""
    raise SourceError(f"{_number_name(name, first + at[0], *at[1:])} is {value:g}{limit}")


def _number_name(name: str, edge: int, column: int = 0) -> str:
    """Return the name of a number of an edge's data for messages."""
    return f"the {'weight' if name == EDGE_WEIGHT else f'feature {column}'} of edge {edge}"


@dataclass(frozen=True)
class KeyForm:
    """The form of keys of edges among ``nodes`` nodes: row and column in ``bits`` bits each.

    ``height``: the number of rows, where these are nodes of another type than columns.
    """

    nodes: int
    height: int | None = None

    @property
    def num_rows(self) -> int:
        return self.nodes if self.height is None else self.height

    @property
    def bits(self) -> int:
        return max(1, (self.nodes - 1).bit_length())

    @property
    def largest(self) -> int:
        return (self.nodes - 1) << self.bits | (self.nodes - 1)

    def pack(self, rows: npt.NDArray[np.int64], columns: npt.NDArray[np.int64]) -> Keys:
        """Return keys of the edges, a new array; ids must be in range."""
        keys = rows.astype(np.uint64)
        keys <<= np.uint64(self.bits)
        keys |= columns.view(np.uint64)
        return keys

    def rows(self, keys: Keys) -> npt.NDArray[np.int64]:
        return (keys >> np.uint64(self.bits)).view(np.int64)

    def columns(self, keys: Keys) -> npt.NDArray[np.int64]:
        return (keys & np.uint64((1 << self.bits) - 1)).view(np.int64)

    def loops(self, start: int, stop: int) -> Keys:
        """Return the keys of the self-loops of nodes ``start:stop``."""
        return np.arange(start, stop, dtype=np.uint64) * np.uint64((1 << self.bits) + 1)


def cut(runs: Iterable[Edges], size: int) -> Iterator[Edges]:
    """Yield the same edges in views of at most ``size``, so that arrays derived from them stay small."""
    for run in runs:
        for start in range(0, len(run), size):
            yield run[start : start + size]


def distinct(runs: Iterable[Edges]) -> Iterator[Edges]:
    """Yield ascending keys without duplicates, of edges without data. No run is empty."""
    last: int | None = None
    for keys in runs:
        fresh = _is_first_of_key(keys, last)
        last = int(keys[-1])
        yield keys[fresh]


def coalesced(runs: Iterable[Edges], form: ValueForm, keys_form: KeyForm) -> Iterator[Edges]:
    """Yield each key once, with the sum of its edges' data, as PyG's ``coalesce`` does by default.

    Sums are in double precision, in the source's order, so that the division into runs changes no bit. SourceError
    where a sum does not fit its stored dtype.
    """
    # The last key, of which more may come, and its sums [1, numbers].
    held: tuple[int, npt.NDArray[np.float64]] | None = None
    for run in runs:
        keys, wide = keys_of(run), form.wide(run)
        if held is not None:
            keys = np.concatenate([np.array([held[0]], dtype=np.uint64), keys])
            wide = np.concatenate([held[1], wide])
        fresh = _is_first_of_key(keys, None)
        group = np.cumsum(fresh) - 1
        sums = np.stack([np.bincount(group, weights=column) for column in wide.T], axis=1).astype(
            np.float64, copy=False
        )
        keys = keys[fresh]
        held = int(keys[-1]), sums[-1:]
        if len(keys) > 1:
            yield _cast_sums(keys[:-1], sums[:-1], form, keys_form)
    if held is not None:
        yield _cast_sums(np.array([held[0]], dtype=np.uint64), held[1], form, keys_form)


def _cast_sums(keys: Keys, sums: npt.NDArray[np.float64], form: ValueForm, keys_form: KeyForm) -> Edges:
    edges, done = form.ones(keys), 0
    for name, _, width in form.columns:
        with np.errstate(over="ignore"):  # the result is infinite then
            edges[name] = sums[:, done] if width is None else sums[:, done : done + width]
        done += width or 1
    fits = np.isfinite(form.wide(edges)).all(axis=1)
    if not fits.all():
        at = keys[int(fits.argmin())][None]
        ends = sorted((int(keys_form.rows(at)[0]), int(keys_form.columns(at)[0])))
        raise SourceError(
            f"the edges between the nodes {ends[0]} and {ends[1]} have data whose sum cannot be stored; "
            "give drop_duplicates=False, or a dtype= that holds more"
        )
    return edges


def _is_first_of_key(keys: Keys, last: int | None) -> npt.NDArray[np.bool_]:
    """Return which ``keys`` differ from the one before; ``last``: the key before the first."""
    fresh = np.empty(len(keys), dtype=np.bool_)
    fresh[0] = last is None or int(keys[0]) != last
    np.not_equal(keys[1:], keys[:-1], out=fresh[1:])
    return fresh


def with_self_loops(runs: Iterable[Edges], form: KeyForm, values: ValueForm) -> Iterator[Edges]:
    """Yield ``runs`` with a self-loop added for every node that has none, with data 1, as PyG's
    add_remaining_self_loops."""
    node = 0  # The first node not handled yet.
    for run in chain(filter(len, runs), [values.ones(np.empty(0, dtype=np.uint64))]):
        keys = keys_of(run)
        # Loops up to the run's last key belong here; later ones may still come in later runs.
        stop = (int(keys[-1]) if len(keys) else form.largest) // ((1 << form.bits) + 1) + 1
        done = 0
        while stop - node > _WINDOW_ROWS:  # A sparse graph: many rows in few keys.
            loops = form.loops(node, node + _WINDOW_ROWS)
            here = int(np.searchsorted(keys, loops[-1], side="right"))
            yield _insert_loops(run[done:here], loops, values)
            node, done = node + _WINDOW_ROWS, here
        yield _insert_loops(run[done:], form.loops(node, stop), values)
        node = max(node, stop)


def _insert_loops(run: Edges, loops: Keys, values: ValueForm) -> Edges:
    """Return ``run`` with those of the ``loops`` that it lacks."""
    keys = keys_of(run)
    at = np.searchsorted(keys, loops)
    lacking = np.ones(len(loops), dtype=np.bool_)
    inside = at < len(keys)
    lacking[inside] = keys[at[inside]] != loops[inside]
    return np.insert(run, at[lacking], values.ones(loops[lacking]))
