# SPDX-License-Identifier: Apache-2.0
"""Links that are trained and scored: as they are given, and as rows of a store.

Shapes: E links, K negatives of each.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ooc.errors import BudgetError, OptionError
from ooc.sizes import format_size
from ooc.storage.store import SPLITS, Store
from ooc.train.links.drawn import words
from ooc.train.links.metrics import Ranked

if TYPE_CHECKING:
    from torch_geometric.data import Data

Ints = npt.NDArray[np.int64]

_BYTES_PER_LINK = 64
"""Of all links given, while they are put in order."""
_EVALUATED = 3
"""Draws of tails that scored links are ranked against, in their key."""
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
        self.check(-(-asked.size // 2))
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


# ---- links that are scored ------------------------------------------------------------------------------------------


def scored_links(store: Store, places: Places, links: Links, split: str, seed: int) -> Ranked:
    """The links of a split and what they are ranked against."""
    links_2E = places.rows(split, getattr(links, split))
    count, name = links_2E.shape[1], f"{split}_negatives"
    given = getattr(links, name)
    if given is None:

        def drawn(numbers_n: Ints) -> Ints:
            numbers = (numbers_n[:, None] * links.negatives + np.arange(links.negatives)).astype(np.uint64)
            found = words(numbers, seed, SPLITS.index(split), _EVALUATED) % np.uint64(store.num_nodes)
            return found.astype(np.int64)

        return Ranked(links_2E, own=drawn, each=links.negatives)
    pairs = np.asarray(given)
    if pairs.ndim == 2 and pairs.shape[0] == 2 and count != 2:
        return Ranked(links_2E, shared_2M=places.rows(name, pairs))
    if pairs.ndim == 2 and pairs.shape[0] == count and pairs.shape[1]:
        return Ranked(links_2E, own=lambda numbers: places.of(name, pairs[numbers]), each=pairs.shape[1])
    raise OptionError(f"{name} must be [2, M] or [{count}, K], not {list(pairs.shape)}")
