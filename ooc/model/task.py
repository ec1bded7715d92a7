# SPDX-License-Identifier: Apache-2.0
"""The labels of a store for losses and metrics: one class a node, several yes-or-no labels, or numbers."""

import torch
from torch import Tensor

from ooc.errors import StoreError
from ooc.storage.store import Store, Task


class Targets:
    """The labels of the rows of splits, as losses and metrics take them. In a valid store every row of a split has one.

    If a row has none, the CPU raises StoreError at once. On a device the host would have to wait for every tile, so the
    fault is only recorded there, and ``refuse_damaged`` checks it when a program is over. Until then class or label 0
    takes the place of a missing one, since a loss that looks up an invalid class spoils a GPU's context. A split that
    has been found valid is not checked again. On a device this is for one thread.

    Rows of a ``store`` may have only some of their labels; missing ones are NaN.
    """

    def __init__(self, store: Store) -> None:
        self._task, self._classes, self._incomplete = store.task, store.num_classes, store.num_incomplete > 0
        self._any_missing: Tensor | None = None
        self._unchecked_splits: set[str] = set()
        self._valid: set[str] = set()

    def begin(self) -> None:
        """Forget what was recorded in a program that did not end."""
        self._any_missing = None
        self._unchecked_splits.clear()

    def of(self, split: str, labels_RL: Tensor, rows: Tensor, *, outputs: Tensor) -> Tensor:
        """Return the labels of ``rows`` [r], which belong to ``split``: classes [r] int64, otherwise [r, L] in the
        dtype of ``outputs``.

        Raises StoreError, on the CPU, for a row without a label, or with an invalid class.
        """
        labels = labels_RL[rows, 0] if self._task is Task.CLASSES else labels_RL[rows]
        if split not in self._valid:
            labels = self._check_labels(split, labels, classes=max(outputs.shape[1], self._classes))
        if self._task is Task.CLASSES:
            return labels
        targets = labels.to(outputs.dtype)
        if self._incomplete and self._task is Task.MULTILABEL:
            targets = targets.masked_fill_(labels < 0, torch.nan)
        return targets

    def refuse_damaged(self) -> None:
        """Raise StoreError if a row without a label has been met since ``begin``. The host waits for the device."""
        noted, self._any_missing = self._any_missing, None
        if noted is not None and bool(noted):
            raise self._damage_error()
        self._valid |= self._unchecked_splits

    def _check_labels(self, split: str, labels: Tensor, *, classes: int) -> Tensor:
        missing = self._are_missing(labels, classes)
        if self._incomplete and missing.dim() == 2:
            missing = missing.all(dim=1, keepdim=True)
        found = missing.any()
        if labels.device.type == "cpu":
            if bool(found):
                raise self._damage_error()
            return labels
        self._any_missing = found if self._any_missing is None else self._any_missing | found
        self._unchecked_splits.add(split)
        return labels.masked_fill(missing, 0)

    def _are_missing(self, labels: Tensor, classes: int) -> Tensor:
        match self._task:
            case Task.CLASSES:
                return (labels < 0) | (labels >= classes)
            case Task.MULTILABEL:
                return labels < 0
            case Task.VALUES:
                return torch.isnan(labels)

    def _damage_error(self) -> StoreError:
        missing = "class" if self._task is Task.CLASSES else "label"
        return StoreError(f"y of the store is damaged: a row of a split has no {missing}; see ooc verify")
