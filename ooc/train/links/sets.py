# SPDX-License-Identifier: Apache-2.0
"""Links that are trained and scored: as they are given, and as rows of a store.

Shapes: E links, K negatives of each.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ooc.errors import OptionError
from ooc.storage.store import SPLITS
from ooc.train.links.drawn import words
from ooc.train.links.ends import Ends, KnownLinks, Places
from ooc.train.links.metrics import NOBODY, Ranked

Ints = npt.NDArray[np.int64]

_EVALUATED = 3
"""Draws of tails that scored links are ranked against, in their key."""
_DRAWN_AGAIN = 16
"""Times that a pair which is linked is drawn again."""
_NAMES = ("train", "valid", "test", "valid_negatives", "test_negatives")


@dataclass(frozen=True, slots=True)
class Links:
    """Which links are trained and scored, each [2, E], heads above tails, by the ids that nodes have in the source.

    ``train`` None: the graph's own edges, those of an undirected one once each, without self-loops. Edges of the graph
    carry messages, whether or not they are among the links; leave out of the graph what is scored.
    ``valid_negatives`` and ``test_negatives`` are pairs that are no links: [2, M], against all of which each link is
    ranked (as OGB does for ``hits@K``), or [E, K], tails of their own for every link's head (as for ``mrr``). None:
    ``negatives`` tails for each link, drawn once; 0: all there are but its own.

    ``filtered``: pairs that are linked are no negatives. In training those are left out that are edges of the graph or
    training links; what is drawn to rank against is drawn again, and of all tails those are left out, that are linked
    by an edge of the graph or a link of any split. ``edge_type``: of a graph with types, (source, relation, target):
    heads are nodes of the one type, tails of the other. Where all nodes are of one type it may be left out: then links
    are of all types of edges, [3, E], the numbers of these, in the store's order, between heads and tails.
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
        """What PyG's ``RandomLinkSplit`` gives; train on the edges of ``train``. Of ``HeteroData`` links are those of
        ``edge_type``. Splits that have no negatives are ranked by ``options``."""

        def pairs(data: Any, label: int) -> Tensor | None:
            data = data if edge_type is None else data[edge_type]
            found: Tensor = data.edge_label_index[:, data.edge_label == label]
            return found if found.shape[1] else None

        splits = pairs(train, 1), pairs(valid, 1), pairs(test, 1)
        return cls(*splits, pairs(valid, 0), pairs(test, 0), edge_type=edge_type, **options)

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


# ---- links that are scored ------------------------------------------------------------------------------------------


def scored_links(ends: Ends, places: Places, links: Links, split: str, seed: int, known: KnownLinks | None) -> Ranked:
    """The links of a split and what they are ranked against; pairs that are ``known`` are not drawn."""
    links_3E = places.rows(split, getattr(links, split))
    count, name = links_3E.shape[1], f"{split}_negatives"
    given = getattr(links, name)
    if given is None and links.negatives:
        key = seed, SPLITS.index(split), _EVALUATED
        drawn = partial(_drawn_tails, ends, links_3E, links.negatives, key, known)
        return Ranked(links_3E, own=drawn, each=links.negatives)
    if given is None:
        return Ranked(links_3E, own=partial(_all_tails, ends, links_3E, known), each=ends.tails)
    pairs = np.asarray(given)
    height = 3 if ends.relations else 2
    if pairs.ndim == 2 and pairs.shape[0] == height and count != height:
        return Ranked(links_3E, shared_3M=places.rows(name, pairs))
    if pairs.ndim == 2 and pairs.shape[0] == count and pairs.shape[1]:
        return Ranked(links_3E, own=lambda numbers: places.tails(name, pairs[numbers]), each=pairs.shape[1])
    raise OptionError(f"{name} must be [{height}, M] or [{count}, K], not {list(pairs.shape)}")


def _drawn_tails(
    ends: Ends, links_3E: Ints, each: int, key: tuple[int, ...], known: KnownLinks | None, numbers_n: Ints
) -> Ints:
    """Tails [n, K] of links by their numbers, drawn evenly; those that are linked drawn again, -1 after many times."""
    numbers_nK = (numbers_n[:, None] * each + np.arange(each)).astype(np.uint64)
    found = (words(numbers_nK, *key) % np.uint64(ends.tails)).astype(np.int64)
    for again in range(_DRAWN_AGAIN if known is not None else 0):
        assert known is not None
        linked = known.of(links_3E[:, numbers_n], np.maximum(found, 0))
        if not linked.any():
            break
        drawn = words(numbers_nK[linked], *key, again) % np.uint64(ends.tails)
        found[linked] = drawn.astype(np.int64) if again < _DRAWN_AGAIN - 1 else NOBODY
    return found


def _all_tails(ends: Ends, links_3E: Ints, known: KnownLinks | None, numbers_n: Ints) -> Ints:
    """Every tail for each of these links, -1 in the place of its own, and of those that are linked."""
    found = np.tile(np.arange(ends.tails), (len(numbers_n), 1))
    if known is not None:
        found[known.of(links_3E[:, numbers_n], found)] = NOBODY
    np.put_along_axis(found, links_3E[1, numbers_n, None], NOBODY, axis=1)
    return found
