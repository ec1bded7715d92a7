# SPDX-License-Identifier: Apache-2.0
"""Splits given as lists of node ids, as ogb publishes them, asked for a range of nodes at a time."""

from collections.abc import Mapping

import numpy as np

from ooc.conversion.source import Ids, Mask
from ooc.errors import SourceError
from ooc.storage.array import AnyArray
from ooc.storage.store import SPLITS

_WORDS = {
    **{word: "train" for word in ("train", "training")},
    **{word: "valid" for word in ("valid", "val", "validation")},
    **{word: "test" for word in ("test", "testing")},
    **{word: "" for word in ("", "none")},
}


class IndexSplits:
    """The members of ``train``, ``valid`` and ``test`` among ``nodes`` nodes. Holds ``nbytes`` of ids."""

    def __init__(self, ids: Mapping[str, AnyArray], *, nodes: int, name: str) -> None:
        """``ids`` by split, in any order; a split that is not there is empty. SourceError for wrong ids."""
        self._ids: dict[str, Ids] = {}
        for split in SPLITS:
            members = ids.get(split, np.empty(0, dtype=np.int64))
            if members.dtype.kind not in "iu" and members.size:
                raise SourceError(f"{name}: the {split} split is no list of node ids")
            found = np.unique(members.astype(np.int64))
            if len(found) and not (found[0] >= 0 and found[-1] < nodes):
                raise SourceError(
                    f"{name}: the {split} split names the node {found[0 if found[0] < 0 else -1]} of {nodes}"
                )
            self._ids[split] = found
        self.nbytes = sum(found.nbytes for found in self._ids.values())

    def masks(self, start: int, stop: int) -> tuple[Mask, Mask, Mask]:
        """Which of the nodes ``start:stop`` are in ``train``, ``valid`` and ``test``."""
        train, valid, test = (self._mask(split, start, stop) for split in SPLITS)
        return train, valid, test

    def _mask(self, split: str, start: int, stop: int) -> Mask:
        ids = self._ids[split]
        mask = np.zeros(stop - start, dtype=np.bool_)
        first, last = np.searchsorted(ids, (start, stop))
        mask[ids[first:last] - start] = True
        return mask


def masks_of_words(words: AnyArray, row: int, name: str) -> list[Mask]:
    """Who is in ``train``, ``valid`` and ``test`` by a word [n] for each node from ``row`` on. SourceError for another
    word than a split's, empty or ``none``."""
    different, which = np.unique(words, return_inverse=True)
    meant = []
    for word in different.tolist():
        if (meaning := _WORDS.get(word.strip().lower())) is None:
            at = row + int((words == word).argmax())
            raise SourceError(f"{name}: node {at} is in the split {word[:40]!r}; splits are train, valid and test")
        meant.append(meaning)
    return [np.array([meaning == split for meaning in meant], dtype=np.bool_)[which] for split in SPLITS]


def whole_labels(y: AnyArray, row: int, name: str) -> Ids:
    """Classes [n] of the nodes from ``row`` on as int64; NaN becomes -1. SourceError for other fractions."""
    if y.dtype.kind != "f":
        return y.astype(np.int64)
    filled = np.where(np.isnan(y), -1, y)
    whole = np.isfinite(filled) & (filled == np.trunc(filled)) & (np.abs(filled) < 2**53)
    if not whole.all():
        at = int(whole.argmin())
        raise SourceError(f"{name}: node {row + at} has the label {y[at]}, which is no class")
    return filled.astype(np.int64)
