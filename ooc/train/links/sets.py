# SPDX-License-Identifier: Apache-2.0
"""Links to train and to score: as the user gives them and as rows of a store, the nodes at their ends, and known pairs.

Heads are nodes of one type and tails are nodes of one type, maybe the same. Links as rows of the store are [3, E]:
heads, tails, and the numbers of their edge types (0 where there is one type). Shapes: E links, K tails drawn for each.
"""

import zipfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ooc.errors import BudgetError, OptionError
from ooc.plan import Limits
from ooc.sizes import format_size
from ooc.storage.array import AnyArray
from ooc.storage.store import SPLITS, Store
from ooc.storage.types import EDGES, EdgeType

Ints = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]

_BYTES_PER_LINK = 64
"""Bytes that sorting takes for each of the links given."""
_ROWS_AT_ONCE, _EDGES_AT_ONCE = 1 << 14, 1 << 15
"""Rows and edges of the graph that pairs are compared with at a time."""
KNOWN_BYTES = 1 << 21
"""Bytes that looking pairs up among the edges takes, besides ``KNOWN_BYTES_PER_PAIR`` for each."""
KNOWN_BYTES_PER_PAIR = 40


class Ends:
    """The nodes that links of a ``store`` lead from and to: there are ``heads`` nodes for one end and ``tails`` for the
    other.

    In a heterogeneous graph, links are edges of ``edge_types``, whose numbers distinguish them.
    """

    def __init__(self, store: Store, edge_types: tuple[EdgeType, ...] = ()) -> None:
        self.store, self.edge_types = store, edge_types
        self.types = tuple(dict.fromkeys(end for one in edge_types[:1] for end in (one.source, one.target)))
        """The node types of heads and tails: one where both are the same, none in a homogeneous graph."""
        self.relations = len(edge_types) if len(edge_types) > 1 else 0
        """How many edge types the links' numbers distinguish; 0 where links have one type."""
        kinds = self.types or ("",)
        self.heads, self.tails = store.node_counts[kinds[0]], store.node_counts[kinds[-1]]
        self.within_a_type = len(self.types) < 2
        """Whether heads and tails are the same nodes."""

    @classmethod
    def of(cls, store: Store, edge_type: Sequence[str] | None) -> "Ends":
        """Return the ends of links of ``edge_type``; raise OptionError where it is missing or unknown.

        In a graph with one node type, None means links of all edge types.
        """
        types = store.types
        if types is None:
            if edge_type is not None:
                raise OptionError(f"{store.path} has one type of edges; leave out edge_type={tuple(edge_type)}")
            return cls(store)
        there = "; ".join(map(str, types.edges))
        if edge_type is None and len(types.nodes) == 1:
            return cls(store, tuple(types.edges))
        if edge_type is None:
            raise OptionError(f"{store.path} has edges {there}; say of which type links are, by edge_type=")
        if isinstance(edge_type, str) or len(edge_type) != 3 or {edge_type[0], edge_type[2]} - set(types.nodes):
            raise OptionError(f"edge_type={edge_type!r} is no (source, relation, target) of {store.path}: {there}")
        return cls(store, (EdgeType(*edge_type),))

    @property
    def sides(self) -> list[str | None]:
        """The store's topologies from heads to tails, by the number of the edge type; None for a type without edges."""
        types = self.store.types
        if types is None:
            return ["in" if self.store.undirected else "out"]
        return [f"{EDGES}/{one.folder}/out" if one in types.edges else None for one in self.edge_types]

    def ids(self, end: int) -> AnyArray:
        """Return the source's ids of the heads (0) or the tails (-1), in the order of the store's rows."""
        return self.store.read_ids(0, self.tails if end else self.heads, self.types[end] if self.types else "")


class Places:
    """The rows of heads and tails, looked up by their ids in the source; takes [N] for each type, made once."""

    def __init__(self, ends: Ends, limits: Limits) -> None:
        self._store, self._ends, self._limits = ends.store, ends, limits
        nodes = ends.heads + (0 if ends.within_a_type else ends.tails)
        self.admit(16 * nodes, f"finding {nodes:,} nodes")
        heads = _Rows(ends.ids(0))
        self._of = heads, heads if ends.within_a_type else _Rows(ends.ids(-1))

    def rows(self, what: str, links: object) -> Ints:
        """Return links given by ids as rows [3, E]; raise OptionError where they are malformed.

        They are given as heads above tails [2, E], or with the numbers of edge types between both [3, E].
        """
        relations = self._ends.relations
        among = "numbers of edge types above " if relations else ""
        form = f"[{2 + bool(relations)}, E], heads above {among}tails"
        if hasattr(links, "edge_index"):
            remedy = "data that RandomLinkSplit gives has them in edge_label_index, where edge_label is 1"
            raise OptionError(f"links {what} must be {form}, not {type(links).__name__}; {remedy}")
        found = np.asarray(links)
        if found.ndim != 2 or found.shape[0] != 2 + bool(relations) or not found.shape[1]:
            raise OptionError(f"links {what} must be {form}, E at least 1, not {list(found.shape)}")
        self.check(found.shape[1])
        kinds: AnyArray = found[1] if relations else np.zeros(found.shape[1], np.int64)
        kinds = _as_numbers(kinds)
        if relations and not (kinds.dtype.kind in "iu" and 0 <= kinds.min() <= kinds.max() < relations):
            raise OptionError(f"links {what}: edge types are numbered from 0 to {relations - 1}")
        heads, tails = self._found(what, found[0], 0), self._found(what, found[-1], 1)
        return np.stack((heads, tails, kinds.astype(np.int64)))

    def edges(self) -> Ints:
        """Return the graph's own edges as links [3, E]."""
        store, ends, parts = self._store, self._ends, list[Ints]()
        sides = [(number, side) for number, side in enumerate(ends.sides) if side is not None]
        self.check(sum(store.topology(side)[1].shape[0] for _, side in sides))
        for number, side in sides:
            offsets, tails = store.topology(side)
            heads = np.repeat(np.arange(ends.heads), np.diff(offsets.read()).astype(np.int64))
            found = np.stack((heads, tails.read().astype(np.int64), np.full_like(heads, number)))
            if ends.within_a_type:
                found = found[:, found[0] < found[1] if store.undirected else found[0] != found[1]]
            parts.append(found)
        if not parts:
            raise OptionError(f"{store.path} has no edges {ends.edge_types[0]}; give links to train on")
        links_3E = np.concatenate(parts, axis=1)
        if not links_3E.shape[1]:
            raise OptionError(f"{store.path} has no edges to train as links")
        return links_3E

    def tails(self, what: str, ids: object) -> Ints:
        """Return the rows of ids of tails, in their shape."""
        return self._found(what, np.asarray(ids), 1)

    def _found(self, what: str, asked: AnyArray, end: int) -> Ints:
        self.check(-(-asked.size // 2))
        try:
            return self._of[end].of(asked)
        except LookupError as error:
            (missing,) = error.args
            missing = missing.decode() if isinstance(missing, bytes) else missing
            kind = f"{self._ends.types[-end]!r} " if self._ends.types else ""
            raise OptionError(f"links {what}: there is no node {kind}{missing} in {self._store.path}") from None
        except TypeError:
            raise OptionError(f"links {what} must be ids of nodes, not {asked.dtype}") from None

    def check(self, links: int) -> None:
        """Raise BudgetError where sorting so many ``links`` takes too much memory."""
        self.admit(_BYTES_PER_LINK * links, f"putting {links:,} links in order")

    def admit(self, needed: int, what: str) -> None:
        """Raise BudgetError where ``what`` needs more memory than it may take."""
        if needed > (has := self._limits.memory_bytes):
            there = f"it may take {format_size(has)}; give memory={self._limits.of_all(needed)}, or more"
            raise BudgetError(f"{what} needs {format_size(needed)} of memory; {there}")


def _as_numbers(given: AnyArray) -> AnyArray:
    """Return numbers given as texts, beside ids that are, as numbers; anything else, such as 007, as it is."""
    if given.dtype.kind in "USTO":
        with suppress(ValueError, OverflowError):
            numbers = (written := given.astype(str)).astype(np.int64)
            return numbers if (numbers.astype(str) == written).all() else given
    return given


class _Rows:
    """A lookup of rows by ``ids`` [N]."""

    def __init__(self, ids: AnyArray) -> None:
        is_range = ids.dtype.kind != "S" and bool((ids == np.arange(len(ids))).all())
        self._order = None if is_range else np.argsort(ids, kind="stable")
        self._ids = ids if self._order is None else ids[self._order]

    def of(self, asked: AnyArray) -> Ints:
        """Return the rows of ``asked`` in its shape; raise TypeError where these are no ids, LookupError with an
        unknown one."""
        texts = self._ids.dtype.kind == "S"
        asked = asked if texts else _as_numbers(asked)
        if asked.dtype.kind not in ("USTO" if texts else "iu"):
            raise TypeError(asked.dtype)
        if texts and asked.dtype.kind != "S":
            asked = np.char.encode(asked.astype(str), "utf-8")
        at = np.minimum(np.searchsorted(self._ids, asked), len(self._ids) - 1)
        if (absent := self._ids[at] != asked).any():
            raise LookupError(asked[absent].flat[0])
        return np.asarray(at if self._order is None else self._order[at], dtype=np.int64)


class KnownLinks:
    """The pairs that are linked: by an edge of the store, from head to tail, or by one of the ``further`` links [3, F].

    The further links, as rows of the store, are held in memory, 8 bytes each. Links of several edge types are
    distinguished. Edges are read when they are needed, a few at a time.
    """

    def __init__(self, ends: Ends, further: Sequence[Ints] = ()) -> None:
        self._heads, self._tails = np.uint64(ends.heads), np.uint64(ends.tails)
        self._arrays = [None if side is None else ends.store.topology(side) for side in ends.sides]
        self._further = np.unique(np.concatenate([np.empty(0, np.uint64), *(self._keys(*links) for links in further)]))
        self.nbytes = self._further.nbytes

    def of(self, links_3n: Ints, tails_nK: Ints) -> npt.NDArray[np.bool_]:
        """Return which pairs of a link's head and one of its row of tails are linked [n, K]."""
        heads_n, _, kinds_n = links_3n
        keys = self._keys(heads_n[:, None], tails_nK, kinds_n[:, None]).reshape(-1)
        order = np.argsort(keys)
        ascending = keys[order]
        linked = _among(ascending, self._further)
        for edges in self._edges_of(ascending):
            first, last = np.searchsorted(ascending, edges[0]), np.searchsorted(ascending, edges[-1], side="right")
            linked[first:last] |= _among(ascending[first:last], edges)
        found = np.empty_like(linked)
        found[order] = linked
        return found.reshape(tails_nK.shape)

    def among(self, links_3n: Ints, tails_nK: Ints) -> npt.NDArray[np.bool_]:
        """Return which of these pairs are among these links alone [n, K]."""
        heads_n, _, kinds_n = links_3n
        return _among(self._keys(heads_n[:, None], tails_nK, kinds_n[:, None]), np.sort(self._keys(*links_3n)))

    def _keys(self, heads: Ints, tails: Ints, kinds: Ints) -> Keys:
        of_pairs = heads.astype(np.uint64) * self._tails + tails.astype(np.uint64)
        return kinds.astype(np.uint64) * (self._heads * self._tails) + of_pairs

    def _edges_of(self, keys: Keys) -> Iterator[Keys]:
        """Yield the keys of the edges of all heads in ``keys``, in ascending order, some at a time; ``keys`` ascend."""
        for number, arrays in enumerate(self._arrays):
            base = np.uint64(number) * self._heads * self._tails
            asked = keys[slice(*np.searchsorted(keys, np.array([base, base + self._heads * self._tails])))]
            if arrays is None or not len(asked):
                continue
            offsets, tails = arrays
            first, last = int((asked[0] - base) // self._tails), int((asked[-1] - base) // self._tails) + 1
            for start in range(first, last, _ROWS_AT_ONCE):
                stop = min(last, start + _ROWS_AT_ONCE)
                bounds = base + np.array([start, stop], np.uint64) * self._tails
                here = asked[slice(*np.searchsorted(asked, bounds))] - base
                if not len(here):
                    continue
                start, stop = int(here[0] // self._tails), int(here[-1] // self._tails) + 1
                ends = offsets.read(start, stop + 1)
                for low in range(int(ends[0]), int(ends[-1]), _EDGES_AT_ONCE):
                    numbers = np.arange(low, high := min(int(ends[-1]), low + _EDGES_AT_ONCE))
                    heads = start + np.searchsorted(ends, numbers, side="right") - 1
                    found = self._keys(heads, tails.read(low, high), np.full_like(heads, number))
                    found.sort()
                    yield found


def _among(asked: Keys, known: Keys) -> npt.NDArray[np.bool_]:
    """Return which of ``asked`` are in ``known``, which ascends."""
    if not len(known):
        return np.zeros(asked.shape, dtype=np.bool_)
    found: npt.NDArray[np.bool_] = known[np.minimum(np.searchsorted(known, asked), len(known) - 1)] == asked
    return found


# ---- links as they are given ----------------------------------------------------------------------------------------


_NAMES = ("train", "valid", "test", "valid_negatives", "test_negatives")


@dataclass(frozen=True, slots=True)
class Links:
    """The links to train and to score, each [2, E], heads above tails, by the ids that nodes have in the source.

    ``train`` None: the graph's own edges, each of an undirected graph once, without self-loops. Edges of the graph
    carry messages whether or not they are among the links; leave edges to be scored out of the graph.
    ``valid_negatives`` and ``test_negatives`` are pairs that are not linked: [2, M] to rank every link against (as OGB
    does for ``hits@K``), or [E, K] tails for each link's own head (as for ``mrr``). Where there are two links, both
    forms are [2, K]: a tuple is taken as pairs, a list as tails. None: ``negatives`` tails for each link, drawn once;
    0: all tails but the link's own.

    ``filtered``: linked pairs are no negatives. In training, negatives that are edges of the graph or training links
    are left out. In scoring, such a negative that was drawn is drawn again; where all tails are ranked, those linked by
    an edge or by a link of any split are left out. ``edge_type``: in a heterogeneous graph, (source, relation, target):
    heads are nodes of the source type, tails of the target type. Where all nodes have one type it may be left out. Then
    links are of all edge types, [3, E], with the numbers of the types, in the store's order, between heads and tails.
    """

    train: Any = None
    valid: Any = None
    test: Any = None
    valid_negatives: Any = None
    test_negatives: Any = None
    negatives: int = 100
    filtered: bool = False
    edge_type: tuple[str, str, str] | None = None

    @classmethod
    def of_split(
        cls, train: Any, valid: Any, test: Any, edge_type: tuple[str, str, str] | None = None, **options: Any
    ) -> "Links":
        """Return the links of PyG's ``RandomLinkSplit``, also with ``split_labels``; train on the edges of ``train``.

        With ``HeteroData``, links are those of ``edge_type``. Splits without negatives are ranked as ``options`` say.
        """

        def pairs(data: Any, label: int) -> Tensor | None:
            data = data if edge_type is None else data[edge_type]
            apart = f"{('neg', 'pos')[label]}_edge_label"
            if hasattr(data, "edge_types"):
                raise OptionError(
                    f"{type(data).__name__} has several types of edges; edge_type= says of which links are"
                )
            if "pos_edge_label" in data:
                label_E, found_2E = data.get(apart), data.get(f"{apart}_index")
                is_other_E = label_E is not None and label_E != label
            elif "edge_label" in data:
                label_E, found_2E = data.edge_label, data.edge_label_index
                is_other_E = (label_E != 0) & (label_E != 1)
                found_2E = found_2E[:, label_E == label]
            else:
                of = "" if edge_type is None else f" of edges {edge_type}"
                raise OptionError(f"there is no edge_label{of}, which PyG's RandomLinkSplit gives to links")
            if is_other_E is not False and bool(is_other_E.any()):
                raise OptionError(
                    "links have labels of their own in edge_label, as ratings are, which are not trained on; without, "
                    "deleted before the split, links are told from pairs that are none"
                )
            return found_2E if found_2E is not None and found_2E.shape[1] else None

        splits = pairs(train, 1), pairs(valid, 1), pairs(test, 1)
        negatives: list[Any] = [pairs(valid, 0), pairs(test, 0)]
        for at, links in enumerate(splits[1:]):
            if links is not None and negatives[at] is not None and links.shape[1] == len(links):
                negatives[at] = tuple(negatives[at])  # for two links, a list would mean tails for each link
        return cls(splits[0], splits[1], splits[2], negatives[0], negatives[1], edge_type=edge_type, **options)

    @classmethod
    def read(cls, path: str | Path) -> "Links":
        """Read links from an ``.npz`` file with arrays of these names, or from OGB's folder of ``train.pt``,
        ``valid.pt`` and ``test.pt``. OptionError for a file that cannot be read so."""
        try:
            return cls(**(_of_ogb(Path(path)) if Path(path).is_dir() else _of_npz(Path(path))))
        except MemoryError:
            raise
        except Exception as error:  # damaged files may raise almost anything
            reason = getattr(error, "strerror", None) or next(iter(str(error).splitlines()), type(error).__name__)
            raise OptionError(f"links {path} cannot be read: {reason}") from error


def _of_npz(path: Path) -> dict[str, Any]:
    with path.open("rb") as opened:
        if not zipfile.is_zipfile(opened):  # NumPy would advise to read it as a pickled program
            raise ValueError("it is no .npz file")
    with np.load(path, allow_pickle=False) as file:
        found = {name: file[name] for name in file.files}
    unknown = [name for name in found if name not in _NAMES]
    if unknown:
        raise ValueError(f"it has {unknown[0]}; its arrays are {', '.join(_NAMES)}")
    return found


def _of_ogb(path: Path) -> dict[str, Any]:
    """Return OGB's arrays as [2, E] or [E, K].

    They are ``edge`` [E, 2] and ``edge_neg`` [M, 2], or ``source_node`` and ``target_node`` [E] and ``target_node_neg``
    [E, K].
    """
    from numpy._core import multiarray

    of_arrays: list[Any] = [
        multiarray._reconstruct,
        np.ndarray,
        np.dtype,
        type(np.dtype(np.int64)),
        type(np.dtype(np.int32)),
    ]
    found: dict[str, Any] = {}
    for split in SPLITS:
        with torch.serialization.safe_globals(of_arrays):
            file = torch.load(path / f"{split}.pt", weights_only=True)
        if "edge" in file:
            found[split] = np.asarray(file["edge"]).T
            negative = np.asarray(file["edge_neg"]).T if "edge_neg" in file else None
        else:
            found[split] = np.stack([np.asarray(file[f"{end}_node"]).reshape(-1) for end in ("source", "target")])
            negative = np.asarray(file["target_node_neg"]) if "target_node_neg" in file else None
        if negative is not None and split != "train":
            found[f"{split}_negatives"] = negative
    return found
