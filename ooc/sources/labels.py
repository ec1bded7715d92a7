# SPDX-License-Identifier: Apache-2.0
"""Labels and splits of a source.

Labels are classes, several binary labels, or values. Splits are lists of nodes, words, or random, in an order that is
computed and not stored.

N nodes, L columns of labels, n of them in a block.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ooc.errors import SourceError
from ooc.sources.source import Ids, LabelBlock, Mask
from ooc.storage.array import AnyArray
from ooc.storage.store import SPLITS, Task
from ooc.suggestions import check_choice

_MIXING_ROUNDS = 3

_Numbers = npt.NDArray[np.uint64]


class Shuffle:
    """A bijection of ``range(n)``: mixing rounds over the next power of two, repeated until below n.

    Each round multiplies by an odd number and folds the upper half onto the lower; both can be undone.
    """

    def __init__(self, n: int, seed: int, *, stream: int = 0) -> None:
        self._n = n
        bits = max(2, (n - 1).bit_length())
        self._mask = np.uint64((1 << bits) - 1)
        self._half = np.uint64((bits + 1) // 2)
        drawn = np.random.SeedSequence([seed, stream, 0x0C]).generate_state(_MIXING_ROUNDS, np.uint64)
        odd = [(int(value) & int(self._mask)) | 1 for value in drawn]
        self._factors = [np.uint64(value) for value in odd]
        self._inverses = [np.uint64(pow(value, -1, 1 << bits)) for value in odd]
        self._offset = np.uint64(int(drawn[0]) >> 17 & int(self._mask))

    def at(self, places: Ids) -> Ids:
        """Return the values at ``places`` of the order."""
        return self._walk_into_range(places, self._mix)

    def place_of(self, values: Ids) -> Ids:
        """Return the places of ``values`` in the order: the inverse of :meth:`at`."""
        return self._walk_into_range(values, self._unmix)

    def _mix(self, x: _Numbers) -> _Numbers:
        x = (x + self._offset) & self._mask
        for factor in self._factors:
            x *= factor
            x &= self._mask
            x ^= x >> self._half
        return x

    def _unmix(self, x: _Numbers) -> _Numbers:
        x = x.copy()
        for inverse in reversed(self._inverses):
            x ^= x >> self._half
            x *= inverse
            x &= self._mask
        x -= self._offset
        x &= self._mask
        return x

    def _walk_into_range(self, values: Ids, step: Callable[[_Numbers], _Numbers]) -> Ids:
        out = step(values.astype(np.uint64))
        limit = np.uint64(self._n)
        while len(outside := np.flatnonzero(out >= limit)):
            out[outside] = step(out[outside])
        return out.view(np.int64)


TASK_OPTION = "task"
MOST_CLASSES = 65_536
"""The most classes of a smaller graph whose number of classes is not given, and the most that may have names."""
_LONGEST_NAME = 1000
_MISSING_LABELS = {"NA", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "NULL", "null", "None"}
"""Texts that pandas reads from a file as missing."""
USUAL_SPLIT = "random"
"""The split that is made where the source defines none."""
_RANDOM_TRAIN, _RANDOM_VALID = 0.6, 0.2
_SPLIT_WORDS = {
    **{word: "train" for word in ("train", "training")},
    **{word: "valid" for word in ("valid", "val", "validation")},
    **{word: "test" for word in ("test", "testing")},
    **{word: "" for word in ("", "none")},
}


@dataclass(frozen=True, kw_only=True)
class LabelForm:
    """The task, and the conversion of a block of raw labels to that task's form.

    ``width``: L; None for classes. ``note``: how the task was chosen where neither the user nor the types decide.
    """

    name: str
    task: Task
    width: int | None
    note: str | None = None

    def block(self, y: AnyArray, row: int) -> AnyArray:
        """Return the labels ``y`` [n] or [n, L] of the rows from ``row`` on; raise SourceError for an invalid class."""
        match self.task:
            case Task.CLASSES:
                return whole_labels(y.reshape(-1), row, self.name)
            case Task.MULTILABEL:
                return self._binary_labels(y, row)
            case Task.VALUES:
                return y.reshape(len(y), -1)

    def _binary_labels(self, y: AnyArray, row: int) -> AnyArray:
        y = y.reshape(len(y), -1)
        if y.dtype.kind == "f":
            y = np.where(np.isnan(y), -1, y)
        known = (y == 0) | (y == 1) | (y == -1)
        if not known.all():
            at, column = np.argwhere(~known)[0]
            raise SourceError(
                f"{self.name}: label {column} of node {row + at} is {y[at, column]}, neither 0 nor 1; "
                "if these are values, convert with task='values', or give them as floating-point numbers"
            )
        return y.astype(np.int8)


def label_form(
    name: str, shape: tuple[int, ...], dtype: np.dtype[np.generic], *, asked: str | None, scan: Callable[[], bool]
) -> LabelForm:
    """Return the form of labels [N] or [N, L] of ``dtype``: the one ``asked`` for, or else by shape and dtype.

    One column means classes. Several columns of integers or booleans mean binary labels. For several of floating-point
    numbers, ``scan()`` tells whether all are 0 or 1 (binary labels) or not (values), since both are common.
    """
    width = shape[1] if len(shape) == 2 else 1
    if asked is not None:
        check_choice("task", asked, [task.value for task in Task])
        task = Task(asked)
        if task is Task.CLASSES and width > 1:
            raise SourceError(f"{name} has labels in {width} columns, which are no classes")
        return LabelForm(name=name, task=task, width=None if task is Task.CLASSES else width)
    if width == 1:
        return LabelForm(name=name, task=Task.CLASSES, width=None)
    if dtype.kind != "f":
        return LabelForm(name=name, task=Task.MULTILABEL, width=width)
    task = Task.MULTILABEL if scan() else Task.VALUES
    return LabelForm(name=name, task=task, width=width, note=f"{name}: labels are taken as {task.value}")


def only_answers(blocks: Iterable[AnyArray]) -> bool:
    """Return whether every entry of the ``blocks`` is 0, 1, or a mark for a missing label: -1, NaN."""
    return all(bool(((y == 0) | (y == 1) | (y == -1) | np.isnan(y)).all()) for y in blocks)


def whole_labels(y: AnyArray, row: int, name: str) -> Ids:
    """Return classes [n] of the nodes from ``row`` on as int64, NaN as -1; raise SourceError for other fractions."""
    if y.dtype.kind != "f":
        return y.astype(np.int64)
    filled = np.where(np.isnan(y), -1, y)
    whole = np.isfinite(filled) & (filled == np.trunc(filled)) & (np.abs(filled) < 2**53)
    if not whole.all():
        at = int(whole.argmin())
        raise SourceError(f"{name}: node {row + at} has the label {y[at]}, which is no class; or give task='values'")
    return filled.astype(np.int64)


# ---- splits ------------------------------------------------------------------------------------------------------

Split = Callable[[int, int], tuple[Mask, ...]]
"""A function from nodes ``start:stop`` to their masks of ``train``, ``valid`` and ``test``."""


FoundLabels = Iterator[tuple[AnyArray, Sequence[Mask]]]
"""Blocks of raw labels [n] or [n, L], with masks of ``train``, ``valid`` and ``test``."""


def in_splits(values: Iterable[AnyArray], split: Split) -> FoundLabels:
    """Yield the labels of all nodes in order, with the masks of ``split``."""
    row = 0
    for y in values:
        yield y, split(row, row + len(y))
        row += len(y)


def label_blocks(form: LabelForm, found: FoundLabels, *, at_random: bool = False) -> Iterator[LabelBlock]:
    """Yield the labels ``found`` in the given form. ``at_random``: unlabelled nodes are in no split."""
    row = 0
    for raw, masks in found:
        y = form.block(raw, row)
        if at_random:
            labelled = form.task.labelled(y)
            masks = [mask & labelled for mask in masks]
        yield LabelBlock(y, *masks)
        row += len(y)


ClassNames = tuple[str, ...]
"""The classes' names by number; empty where classes are numbers in the source."""


def names_of_classes(texts: Iterable[AnyArray], where: str) -> ClassNames:
    """Return the distinct non-empty ``texts`` in alphabetical order.

    SourceError, which says ``where`` they are, for too many or too long texts, and for texts that pandas would read as
    missing.
    """
    found: set[str] = set()
    for block in texts:
        found.update(block.tolist())
        if any(len(name) > _LONGEST_NAME for name in found):
            raise SourceError(f"{where} holds texts of more than {_LONGEST_NAME} characters: these are no classes")
        if len(found) > MOST_CLASSES + 1:
            raise SourceError(
                f"{where} holds more than {MOST_CLASSES:,} different texts, such as {block[-1][:40]!r}: these are no "
                "classes"
            )
    if unclear := sorted(found & _MISSING_LABELS):
        raise SourceError(
            f"{where} holds {unclear[0]!r}, which may be no label or a class of that name: leave such cells empty, or "
            "call the class otherwise"
        )
    return tuple(sorted(found - {""}))


def classes_of_names(texts: AnyArray, names: ClassNames) -> Ids:
    """Return the class of each of the ``texts`` [n], its place in ``names``; -1 for an empty text."""
    place = {"": -1, **{name: at for at, name in enumerate(names)}}
    return np.fromiter(map(place.__getitem__, texts.tolist()), dtype=np.int64, count=len(texts))


class NodeList:
    """A list of node ``ids`` that is queried by ranges of nodes. Holds ``nbytes`` of ids."""

    def __init__(self, ids: AnyArray, *, nodes: int, name: str) -> None:
        """``ids`` are in any order. SourceError, with ``name``, for ids outside ``nodes`` nodes and for repeated
        ones."""
        if ids.dtype.kind not in "iu" and ids.size:
            raise SourceError(f"{name} is no list of node ids")
        found = np.unique(ids.astype(np.int64))
        if len(found) and not (found[0] >= 0 and found[-1] < nodes):
            raise SourceError(f"{name} names the node {found[0 if found[0] < 0 else -1]} of {nodes}")
        if len(found) < ids.size:  # a program that indexes by the list would count it several times
            ascending = np.sort(ids, axis=None)
            again = ascending[1:][ascending[1:] == ascending[:-1]][0]
            raise SourceError(f"{name} names the node {again} several times; give np.unique of it")
        self._ids, self.nbytes = found, found.nbytes

    def mask(self, start: int, stop: int) -> Mask:
        """Return the mask of the nodes ``start:stop`` that are on the list."""
        mask = np.zeros(stop - start, dtype=np.bool_)
        first, last = np.searchsorted(self._ids, (start, stop))
        mask[self._ids[first:last] - start] = True
        return mask


class IndexSplits:
    """Splits given as lists of node ids, as ogb publishes them. Holds ``nbytes`` of ids."""

    def __init__(self, ids: Mapping[str, AnyArray], *, nodes: int, name: str) -> None:
        """``ids`` by split, in any order; a missing split is empty. SourceError for wrong ids."""
        nobody = np.empty(0, dtype=np.int64)
        self._lists = [
            NodeList(ids.get(split, nobody), nodes=nodes, name=f"{name}: the {split} split") for split in SPLITS
        ]
        self.nbytes = sum(found.nbytes for found in self._lists)

    def masks(self, start: int, stop: int) -> tuple[Mask, ...]:
        """Return the masks of ``train``, ``valid`` and ``test`` for the nodes ``start:stop``."""
        return tuple(found.mask(start, stop) for found in self._lists)


def masks_of_words(words: AnyArray, row: int, name: str) -> list[Mask]:
    """Return masks of ``train``, ``valid`` and ``test`` from a word [n] for each node from ``row`` on.

    SourceError for a word that is not a split's name, empty or ``none``.
    """
    meant: dict[str, int] = {}
    for word in dict.fromkeys(words.tolist()):
        if (meaning := _SPLIT_WORDS.get(word.strip().lower())) is None:
            at = row + int((words == word).argmax())
            raise SourceError(f"{name}: node {at} is in the split {word[:40]!r}; splits are train, valid and test")
        meant[word] = SPLITS.index(meaning) if meaning else len(SPLITS)
    which = np.fromiter(map(meant.__getitem__, words.tolist()), dtype=np.int8, count=len(words))
    return [which == at for at in range(len(SPLITS))]


def unsaid_split_note(where: str) -> str:
    """Return the note about the random split that is made because ``where`` defines no splits."""
    return f"{where} says nothing of splits:\n  random 60/20/20, seed 0 (another one: --split random:SEED)"


def random_split(nodes: int, text: str) -> tuple[Split, str]:
    """Return a random 60/20/20 split for ``"random"`` or ``"random:SEED"``, and its description."""
    word, _, number = text.partition(":")
    if word != "random" or not (number == "" or number.isdecimal()):
        raise SourceError(f"split {text!r} is neither a column of masks nor random[:SEED]")
    seed = int(number or 0)
    shuffle = Shuffle(nodes, seed)
    train, valid = round(_RANDOM_TRAIN * nodes), round((_RANDOM_TRAIN + _RANDOM_VALID) * nodes)

    def members(start: int, stop: int) -> tuple[Mask, ...]:
        if stop > nodes:  # The order covers only these.
            raise SourceError(f"there are labels of more than the {nodes} nodes or graphs that there are")
        place = shuffle.place_of(np.arange(start, stop, dtype=np.int64))
        return place < train, (place >= train) & (place < valid), place >= valid

    return members, f"random 60/20/20, seed {seed}"
