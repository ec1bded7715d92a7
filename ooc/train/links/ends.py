# SPDX-License-Identifier: Apache-2.0
"""What links lead from and to, and which pairs are linked.

Heads and tails are rows of the nodes of one type each, of a graph of one type of nodes both of these. Shapes: E links,
K tails that are drawn for each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ooc.errors import BudgetError, OptionError
from ooc.sizes import format_size
from ooc.storage.array import AnyArray
from ooc.storage.store import Store
from ooc.storage.types import EDGES, EdgeType, perm_name

Ints = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]

_BYTES_PER_LINK = 64
"""Of all links given, while they are put in order."""
_ROWS_AT_ONCE, _EDGES_AT_ONCE = 1 << 14, 1 << 15
"""Of the graph, that pairs are looked for among."""
KNOWN_BYTES = 1 << 21
"""That looking for pairs among the edges takes, besides ``KNOWN_BYTES_PER_PAIR``."""
KNOWN_BYTES_PER_PAIR = 40


@dataclass(frozen=True, slots=True)
class Ends:
    """Heads and tails of the links of a ``store``, in a graph with types those of edges of ``edge_type``."""

    store: Store
    edge_type: EdgeType | None = None

    @classmethod
    def of(cls, store: Store, edge_type: Sequence[str] | None) -> "Ends":
        """OptionError where a graph with types is not told which type of edges its links are, or another one is."""
        types = store.types
        if types is None:
            if edge_type is not None:
                raise OptionError(f"{store.path} has one type of edges; leave out edge_type={tuple(edge_type)}")
            return cls(store)
        there = "; ".join(map(str, types.edges))
        if edge_type is None:
            raise OptionError(f"{store.path} has edges {there}; say of which type links are, by edge_type=")
        if isinstance(edge_type, str) or len(edge_type) != 3 or {edge_type[0], edge_type[2]} - set(types.nodes):
            raise OptionError(f"edge_type={edge_type!r} is no (source, relation, target) of {store.path}: {there}")
        return cls(store, EdgeType(*edge_type))

    @property
    def types(self) -> tuple[str, ...]:
        """The types of nodes of heads and of tails, one where both are the same; nothing where there is but one."""
        kind = self.edge_type
        return () if kind is None else tuple(dict.fromkeys((kind.source, kind.target)))

    @property
    def heads(self) -> int:
        """Nodes that may be heads."""
        return self._count(0)

    @property
    def tails(self) -> int:
        """Nodes that may be tails."""
        return self._count(-1)

    @property
    def within_a_type(self) -> bool:
        """Whether heads and tails are the same nodes."""
        return len(self.types) < 2

    @property
    def side(self) -> str | None:
        """The topology of the store from heads to tails; None where it has no edges of that type."""
        if self.edge_type is None:
            return "in" if self.store.undirected else "out"
        assert self.store.types is not None
        return f"{EDGES}/{self.edge_type.folder}/out" if self.edge_type in self.store.types.edges else None

    def ids(self, end: int) -> AnyArray:
        """What the source calls heads (0) or tails (-1), in the store's rows."""
        types, store = self.store.types, self.store
        if types is None or self.types[end] == types.labelled:
            return store.read_ids(0, store.num_nodes)
        name = perm_name(self.types[end])
        return store.array(name).read() if store.has(name) else np.arange(self._count(end))

    def _count(self, end: int) -> int:
        types = self.store.types
        return self.store.num_nodes if types is None else types.nodes[self.types[end]]


class Places:
    """The rows of heads and tails by their ids in the source; found once, [N] of each type."""

    def __init__(self, ends: Ends, memory_bytes: int) -> None:
        self._store, self._ends, self._memory_bytes = ends.store, ends, memory_bytes
        nodes = ends.heads + (0 if ends.within_a_type else ends.tails)
        self._check(16 * nodes, f"finding {nodes:,} nodes")
        heads = _Rows(ends.ids(0))
        self._of = heads, heads if ends.within_a_type else _Rows(ends.ids(-1))

    def rows(self, what: str, links: object) -> Ints:
        """[2, E] of links by ids. OptionError where they are none."""
        found = np.asarray(links)
        if found.ndim != 2 or found.shape[0] != 2 or not found.shape[1]:
            shape = list(found.shape)
            raise OptionError(f"links {what} must be [2, E], heads above tails, E at least 1, not {shape}")
        self.check(found.shape[1])
        return np.stack([self._found(what, ids, end) for ids, end in zip(found, (0, 1), strict=True)])

    def edges(self) -> Ints:
        """[2, E] of the graph's own, as rows."""
        side = self._ends.side
        if side is None:
            raise OptionError(f"{self._store.path} has no edges {self._ends.edge_type}; give links to train on")
        offsets, tails = self._store.topology(side)
        self.check(tails.shape[0])
        heads = np.repeat(np.arange(self._ends.heads), np.diff(offsets.read()).astype(np.int64))
        found = np.stack((heads, tails.read().astype(np.int64)))
        if self._ends.within_a_type:
            found = found[:, found[0] < found[1] if self._store.undirected else found[0] != found[1]]
        if not found.shape[1]:
            raise OptionError(f"{self._store.path} has no edges to train as links")
        return found

    def tails(self, what: str, ids: object) -> Ints:
        """Of any ids of tails; in their shape."""
        return self._found(what, np.asarray(ids), 1)

    def _found(self, what: str, asked: AnyArray, end: int) -> Ints:
        self.check(-(-asked.size // 2))
        try:
            return self._of[end].of(asked)
        except LookupError as error:
            (missing,) = error.args
            kind = f"{self._ends.types[-end]!r} " if self._ends.types else ""
            raise OptionError(f"links {what}: there is no node {kind}{missing} in {self._store.path}") from None
        except TypeError:
            raise OptionError(f"links {what} must be ids of nodes, not {asked.dtype}") from None

    def check(self, links: int) -> None:
        """BudgetError where so many of them take too much while they are put in order."""
        self._check(_BYTES_PER_LINK * links, f"putting {links:,} links in order")

    def _check(self, needed: int, what: str) -> None:
        if needed > self._memory_bytes:
            there = format_size(self._memory_bytes)
            raise BudgetError(f"{what} needs {format_size(needed)} of memory; it may take {there}")


class _Rows:
    """Rows by ``ids`` [N]."""

    def __init__(self, ids: AnyArray) -> None:
        is_range = ids.dtype.kind != "S" and bool((ids == np.arange(len(ids))).all())
        self._order = None if is_range else np.argsort(ids, kind="stable")
        self._ids = ids if self._order is None else ids[self._order]

    def of(self, asked: AnyArray) -> Ints:
        """In the shape of ``asked``. TypeError where these are no ids, LookupError with one that is not there."""
        texts = self._ids.dtype.kind == "S"
        if asked.dtype.kind not in ("USTO" if texts else "iu"):
            raise TypeError(asked.dtype)
        if texts and asked.dtype.kind != "S":
            asked = np.char.encode(asked.astype(str), "utf-8")
        at = np.minimum(np.searchsorted(self._ids, asked), len(self._ids) - 1)
        if (absent := self._ids[at] != asked).any():
            raise LookupError(asked[absent].flat[0])
        return np.asarray(at if self._order is None else self._order[at], dtype=np.int64)


class KnownLinks:
    """The pairs that are edges of the store, from head to tail, or among ``further`` links [2, F], rows of the store,
    which are held, 8 bytes each. Edges are read as they are asked for, a few at a time."""

    def __init__(self, ends: Ends, further: Sequence[Ints] = ()) -> None:
        self._tails = np.uint64(ends.tails)
        self._arrays = None if ends.side is None else ends.store.topology(ends.side)
        self._further = np.unique(np.concatenate([np.empty(0, np.uint64), *(self._keys(*pairs) for pairs in further)]))
        self.nbytes = self._further.nbytes

    def of(self, heads_n: Ints, tails_nK: Ints) -> npt.NDArray[np.bool_]:
        """Which pairs of a head and one of its tails are linked [n, K]."""
        keys = self._keys(heads_n[:, None], tails_nK).reshape(-1)
        order = np.argsort(keys)
        ascending = keys[order]
        linked = _among(ascending, self._further)
        for edges in self._edges_of(ascending):
            first, last = np.searchsorted(ascending, edges[0]), np.searchsorted(ascending, edges[-1], side="right")
            linked[first:last] |= _among(ascending[first:last], edges)
        found = np.empty_like(linked)
        found[order] = linked
        return found.reshape(tails_nK.shape)

    def among(self, heads_n: Ints, tails_nK: Ints, links_2E: Ints) -> npt.NDArray[np.bool_]:
        """Which of them are among these links alone [n, K]."""
        return _among(self._keys(heads_n[:, None], tails_nK), np.sort(self._keys(*links_2E)))

    def _keys(self, heads: Ints, tails: Ints) -> Keys:
        return heads.astype(np.uint64) * self._tails + tails.astype(np.uint64)

    def _edges_of(self, keys: Keys) -> Iterator[Keys]:
        """The keys of the edges of the heads of ascending ``keys``, ascending, some at a time."""
        if self._arrays is None or not len(keys):
            return
        offsets, tails = self._arrays
        first, last = int(keys[0] // self._tails), int(keys[-1] // self._tails) + 1
        for start in range(first, last, _ROWS_AT_ONCE):
            stop = min(last, start + _ROWS_AT_ONCE)
            asked = keys[slice(*np.searchsorted(keys, np.array([start, stop], np.uint64) * self._tails))]
            if not len(asked):
                continue
            start, stop = int(asked[0] // self._tails), int(asked[-1] // self._tails) + 1
            ends = offsets.read(start, stop + 1)
            for low in range(int(ends[0]), int(ends[-1]), _EDGES_AT_ONCE):
                numbers = np.arange(low, high := min(int(ends[-1]), low + _EDGES_AT_ONCE))
                heads = start + np.searchsorted(ends, numbers, side="right") - 1
                found = self._keys(heads, tails.read(low, high))
                found.sort()
                yield found


def _among(asked: Keys, known: Keys) -> npt.NDArray[np.bool_]:
    """Which are there, in ascending ``known`` ones."""
    if not len(known):
        return np.zeros(asked.shape, dtype=np.bool_)
    found: npt.NDArray[np.bool_] = known[np.minimum(np.searchsorted(known, asked), len(known) - 1)] == asked
    return found
