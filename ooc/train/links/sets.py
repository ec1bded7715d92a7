# SPDX-License-Identifier: Apache-2.0
"""Links that are trained and scored: as they are given, as rows of a store, and as the files that a step's are in.

Shapes: E links, K negatives of each, P pairs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ooc.errors import BudgetError, OptionError
from ooc.plan.workload import Direction
from ooc.sizes import format_size
from ooc.storage.mixing import GOLDEN, mixed
from ooc.storage.store import SPLITS, Store
from ooc.train.links.arrays import LinkArray
from ooc.train.links.metrics import Ranked

if TYPE_CHECKING:
    from torch_geometric.data import Data

Ints = npt.NDArray[np.int64]

_LINKS_AT_ONCE = 1 << 15
"""That are drawn and put in order together."""
_BYTES_AT_ONCE = 80
"""Of each of them: heads, tails, labels, their order and copies in it."""
_BYTES_PER_LINK = 64
"""Of all links given, while they are put in order."""
_NEGATIVE, _STEP, _EVALUATED = 1, 2, 3
"""What is drawn, beside seed and epoch in the key of a draw."""
_NAMES = ("train", "valid", "test", "valid_negatives", "test_negatives")


@dataclass(frozen=True, slots=True)
class Links:
    """Which links are trained and scored, each [2, E], heads above tails, by the ids that nodes have in the source.

    ``train`` None: the graph's own edges, those of an undirected one once each, without self-loops. Edges of the graph
    carry messages, whether or not they are among the links; leave out of the graph what is scored.
    ``valid_negatives`` and ``test_negatives`` are pairs that are no links: [2, M], against all of which each link is
    ranked (as OGB does for ``hits@K``), or [E, K], tails of their own for every link's head (as for ``mrr``). None:
    ``negatives`` tails for each link, drawn once.
    """

    train: Any = None
    valid: Any = None
    test: Any = None
    valid_negatives: Any = None
    test_negatives: Any = None
    negatives: int = 100

    @classmethod
    def of_split(cls, train: "Data", valid: "Data", test: "Data") -> "Links":
        """What PyG's ``RandomLinkSplit`` gives; train on the edges of ``train``."""

        def pairs(data: "Data", label: int) -> Tensor:
            return cast(Tensor, data.edge_label_index[:, data.edge_label == label])

        return cls(pairs(train, 1), pairs(valid, 1), pairs(test, 1), pairs(valid, 0), pairs(test, 0))

    @classmethod
    def read(cls, path: str | Path) -> "Links":
        """From an ``.npz`` file with arrays of these names, or a folder with ``train.pt``, ``valid.pt`` and ``test.pt``
        as OGB has them. OptionError for one that cannot be read so."""
        try:
            return cls(**(_of_ogb(Path(path)) if Path(path).is_dir() else _of_npz(Path(path))))
        except MemoryError:
            raise
        except Exception as error:  # whatever zip files, pickles and arrays that are damaged come to
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise OptionError(f"links {path} cannot be read: {reason}") from error


def _of_npz(path: Path) -> dict[str, Any]:
    with np.load(path, allow_pickle=False) as file:
        found = {name: file[name] for name in file.files}
    unknown = [name for name in found if name not in _NAMES]
    if unknown:
        raise ValueError(f"it has {unknown[0]}; its arrays are {', '.join(_NAMES)}")
    return found


def _of_ogb(path: Path) -> dict[str, Any]:
    """``edge`` [E, 2] and ``edge_neg`` [M, 2], or ``source_node`` and ``target_node`` [E] and ``target_node_neg``
    [E, K]."""
    found: dict[str, Any] = {}
    for split in SPLITS:
        with torch.serialization.safe_globals(_numpy_globals()):
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


def _numpy_globals() -> list[Any]:
    """What a pickle of an array of whole numbers refers to."""
    from numpy._core import multiarray

    return [multiarray._reconstruct, np.ndarray, np.dtype, type(np.dtype(np.int64)), type(np.dtype(np.int32))]


# ---- which rows links lead to --------------------------------------------------------------------------------


class Places:
    """The rows of nodes by their ids in the source; found once, [N]."""

    def __init__(self, store: Store, memory_bytes: int) -> None:
        self._store, self._memory_bytes = store, memory_bytes
        self._check(16 * store.num_nodes, f"finding {store.num_nodes:,} nodes")
        ids = store.read_ids(0, store.num_nodes)
        self._order = None if _is_range(ids) else np.argsort(ids, kind="stable")
        self._ids = ids if self._order is None else ids[self._order]

    def rows(self, what: str, links: Any) -> Ints:
        """[2, E] of links by ids. OptionError where they are none."""
        found = np.asarray(links)
        if found.ndim != 2 or found.shape[0] != 2 or not found.shape[1]:
            shape = list(found.shape)
            raise OptionError(f"links {what} must be [2, E], heads above tails, E at least 1, not {shape}")
        return self.of(what, found)

    def edges(self) -> Ints:
        """[2, E] of the graph's own, as rows."""
        store, side = self._store, "in" if self._store.undirected else "out"
        self.check(store.num_edges)
        offsets, tails = (array.read().astype(np.int64) for array in store.topology(side))
        found = np.stack((np.repeat(np.arange(store.num_nodes), np.diff(offsets)), tails))
        kept = found[0] < found[1] if store.undirected else found[0] != found[1]
        if not kept.any():
            raise OptionError(f"{store.path} has no edges to train as links")
        return found[:, kept]

    def of(self, what: str, ids: Any) -> Ints:
        """Of any ids; in their shape."""
        asked = np.asarray(ids)
        texts = self._ids.dtype.kind == "S"
        if asked.dtype.kind not in ("USTO" if texts else "iu"):
            raise OptionError(f"links {what} must be ids of nodes, not {asked.dtype}")
        self.check(asked.size)
        if texts and asked.dtype.kind != "S":
            asked = np.char.encode(asked.astype(str), "utf-8")
        at = np.minimum(np.searchsorted(self._ids, asked), len(self._ids) - 1)
        if (absent := self._ids[at] != asked).any():
            raise OptionError(f"links {what}: there is no node {asked[absent].flat[0]} in {self._store.path}")
        return np.asarray(at if self._order is None else self._order[at], dtype=np.int64)

    def check(self, links: int) -> None:
        """BudgetError where so many of them take too much while they are put in order."""
        self._check(_BYTES_PER_LINK * links, f"putting {links:,} links in order")

    def _check(self, needed: int, what: str) -> None:
        if needed > self._memory_bytes:
            there = format_size(self._memory_bytes)
            raise BudgetError(f"{what} needs {format_size(needed)} of memory; it may take {there}")


def _is_range(ids: npt.NDArray[Any]) -> bool:
    return ids.dtype.kind != "S" and bool((ids == np.arange(len(ids))).all())


# ---- links of a step ------------------------------------------------------------------------------------------


class TrainingLinks:
    """The training links of a store by their heads, with K negatives each, and the files that a step's are in.

    ``links_2E``: rows of heads and tails. ``total``: links and negatives.
    """

    def __init__(self, folder: Path, store: Store, links_2E: Ints, negatives: int, seed: int) -> None:
        self._seed, self._nodes, self._negatives = seed, store.num_nodes, negatives
        heads, tails = links_2E
        self._order = np.lexsort((tails, heads))
        self._tails = tails[self._order]
        counts = np.bincount(heads, minlength=store.num_nodes)
        self._first = np.concatenate(([0], np.cumsum(counts)))
        self._ids = store
        self.total = len(heads) * (1 + negatives)
        index = np.int32 if store.num_nodes <= 2**31 else np.int64
        made = partial(LinkArray, folder, Direction.LINKS)
        offsets = made("indptr", store.num_nodes + 1, np.int64)
        offsets.put(0, self._first * (1 + negatives))
        self._indices, self._labels = made("indices", self.total, index), made("edge_weight", self.total, np.float32)
        self.arrays: dict[str, LinkArray] = {array.name: array for array in (offsets, self._indices, self._labels)}

    @property
    def nbytes(self) -> int:
        """Of host memory, from the first step to the last."""
        most = int(np.diff(self._first).max()) * (1 + self._negatives)
        held = int(self._order.nbytes + self._tails.nbytes + self._first.nbytes)
        return held + _BYTES_AT_ONCE * max(_LINKS_AT_ONCE, most)

    def draw(self, epoch: int, step: int, steps: int) -> int:
        """Write the links of a step; returns how many there are, negatives among them."""
        count = 0
        for first, last, heads in self._pieces():
            tails_nK = self._drawn(epoch, first, last)
            tails = np.concatenate((self._tails[first:last, None], tails_nK), axis=1)
            labels = np.zeros(tails.shape, dtype=np.float32)
            labels[:, 0] = 1
            if steps > 1:
                labels[self._step_of(epoch, first, last, steps) != step] = np.nan
                count += int((~np.isnan(labels)).sum())
            else:
                count += labels.size
            order = np.lexsort((labels.reshape(-1), tails.reshape(-1), np.repeat(heads, tails.shape[1])))
            self._indices.put(first * (1 + self._negatives), tails.reshape(-1)[order])
            self._labels.put(first * (1 + self._negatives), labels.reshape(-1)[order])
        return count

    def drawn(self, epoch: int, step: int, steps: int) -> tuple[Tensor, Tensor]:
        """Which links of those given a step has, ascending, and the tails drawn for each, by their ids."""
        links = len(self._tails)
        chosen = np.flatnonzero(self._step_of(epoch, 0, links, steps) == step)
        tails_nK = self._drawn(epoch, 0, links)[chosen]
        order = np.argsort(self._order[chosen])
        ids = self._ids.read_ids(0, self._nodes)
        return torch.from_numpy(self._order[chosen][order]), torch.from_numpy(ids[tails_nK[order]].astype(np.int64))

    def _pieces(self) -> Iterator[tuple[int, int, Ints]]:
        """Links from one to another, of whole heads, and the head of each."""
        node, width = 0, 1 + self._negatives
        while node < self._nodes:
            first = int(self._first[node])
            last = max(first + 1, first + _LINKS_AT_ONCE // width)
            stop = int(np.searchsorted(self._first, last, side="right")) - 1
            stop = min(max(stop, node + 1), self._nodes)
            counts = np.diff(self._first[node : stop + 1])
            if counts.any():
                yield first, int(self._first[stop]), np.repeat(np.arange(node, stop), counts)
            node = stop

    def _drawn(self, epoch: int, first: int, last: int) -> Ints:
        """Tails [n, K] for links from one to another."""
        numbers = np.arange(first * self._negatives, last * self._negatives, dtype=np.uint64)
        found = _words(numbers, self._seed, epoch, _NEGATIVE) % np.uint64(self._nodes)
        return found.astype(np.int64).reshape(last - first, self._negatives)

    def _step_of(self, epoch: int, first: int, last: int, steps: int) -> Ints:
        """Which step of an epoch each of these links is in."""
        words = _words(np.arange(first, last, dtype=np.uint64), self._seed, epoch, _STEP)
        return (words % np.uint64(steps)).astype(np.int64)


def scored_links(store: Store, places: Places, links: Links, split: str, seed: int) -> Ranked:
    """The links of a split and what they are ranked against."""
    links_2E = places.rows(split, getattr(links, split))
    count, name = links_2E.shape[1], f"{split}_negatives"
    given = getattr(links, name)
    if given is None:

        def drawn(numbers_n: Ints) -> Ints:
            words = (numbers_n[:, None] * links.negatives + np.arange(links.negatives)).astype(np.uint64)
            found = _words(words, seed, SPLITS.index(split), _EVALUATED) % np.uint64(store.num_nodes)
            return found.astype(np.int64)

        return Ranked(links_2E, own=drawn, each=links.negatives)
    pairs = np.asarray(given)
    if pairs.ndim == 2 and pairs.shape[0] == 2 and count != 2:
        return Ranked(links_2E, shared_2M=places.rows(name, pairs))
    if pairs.ndim == 2 and pairs.shape[0] == count and pairs.shape[1]:
        return Ranked(links_2E, own=lambda numbers: places.of(name, pairs[numbers]), each=pairs.shape[1])
    raise OptionError(f"{name} must be [2, M] or [{count}, K], not {list(pairs.shape)}")


def _words(numbers: npt.NDArray[np.uint64], *key: int) -> npt.NDArray[np.uint64]:
    """A random word [n] for each number under a key."""
    start = np.random.SeedSequence([part & (2**64 - 1) for part in key]).generate_state(1, np.uint64)
    return mixed(start + (numbers + np.uint64(1)) * GOLDEN)
