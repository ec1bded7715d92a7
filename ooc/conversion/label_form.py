# SPDX-License-Identifier: Apache-2.0
"""What labels as found in a source are: classes, several answers at once, or values. N nodes, L columns."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from ooc.conversion.source import Ids
from ooc.errors import OptionError, SourceError
from ooc.storage.array import AnyArray
from ooc.storage.store import Task

TASK_OPTION = "task"


@dataclass(frozen=True, kw_only=True)
class LabelForm:
    """The task, and how a block of labels as found becomes one of that task.

    ``width``: L; None for classes. ``note``: how the task was chosen where nobody said and types do not tell.
    """

    name: str
    task: Task
    width: int | None
    note: str | None = None

    def block(self, y: AnyArray, row: int) -> AnyArray:
        """The labels ``y`` [n] or [n, L] of the rows from ``row`` on; SourceError for a class that is none."""
        match self.task:
            case Task.CLASSES:
                return whole(y.reshape(-1), row, self.name)
            case Task.MULTILABEL:
                return self._answers(y, row)
            case Task.VALUES:
                with np.errstate(over="ignore"):
                    return y.reshape(len(y), -1).astype(np.float32)

    def _answers(self, y: AnyArray, row: int) -> AnyArray:
        y = y.reshape(len(y), -1)
        if y.dtype.kind == "f":
            y = np.where(np.isnan(y), -1, y)
        known = (y == 0) | (y == 1) | (y == -1)
        if not known.all():
            at, column = np.argwhere(~known)[0]
            raise SourceError(
                f"{self.name}: label {column} of node {row + at} is {y[at, column]}, neither 0 nor 1; "
                "give task='values' if these are values"
            )
        return y.astype(np.int8)


def label_form(
    name: str, shape: tuple[int, ...], dtype: np.dtype[np.generic], *, asked: str | None, scan: Callable[[], bool]
) -> LabelForm:
    """The form of labels [N] or [N, L] of ``dtype``: what is ``asked`` for, else by shape and type.

    One column: classes. Several of whole numbers or booleans: several answers. Several of floating-point
    numbers: ``scan()`` says whether all are 0 or 1 (answers) or not (values), since both are common.
    """
    width = shape[1] if len(shape) == 2 else 1
    if asked is not None:
        known = {task.value: task for task in Task}
        if asked not in known:
            raise OptionError(f"task {asked!r} is not one of {', '.join(known)}")
        task = known[asked]
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
    """Whether every entry of the ``blocks`` is 0, 1, or one of those for no label: -1, NaN."""
    return all(bool(((y == 0) | (y == 1) | (y == -1) | np.isnan(y)).all()) for y in blocks)


def whole(y: AnyArray, row: int, name: str) -> Ids:
    """Classes [n] of any number type, NaN for none, as int64; SourceError, with the node, for a fraction."""
    if y.dtype.kind != "f":
        return y.astype(np.int64)
    filled = np.where(np.isnan(y), -1, y)
    fits = np.isfinite(filled) & (filled == np.trunc(filled)) & (np.abs(filled) < 2**31)
    if not fits.all():
        at = int(fits.argmin())
        raise SourceError(f"{name}: node {row + at} has the label {y[at]}, which is no class")
    return filled.astype(np.int64)
