# SPDX-License-Identifier: Apache-2.0
"""What a store's labels are: one class a node, several yes-or-no labels, or numbers."""

import torch
from torch import Tensor

from ooc.errors import StoreError
from ooc.storage.store import Store, Task


class Targets:
    """The labels of rows of splits, as losses and metrics take them; rows of a split have one in every valid store.

    Where one has none, the CPU raises StoreError at once. On a device the host would have to wait for every tile, so
    that it is only noted there, and ``refuse_damaged`` asks when a program is over; until then class or label 0 stands
    in for it, since a loss that looks up a class which is none spoils a GPU's context. Of a split that has been found
    valid nobody asks again. On a device used by one thread.

    Rows of a ``store`` may have some of their labels only; what is missing is NaN.
    """

    def __init__(self, store: Store) -> None:
        self._task, self._classes, self._incomplete = store.task, store.num_classes, store.num_incomplete > 0
        self._noted: Tensor | None = None
        self._noted_of: set[str] = set()
        self._valid: set[str] = set()

    def begin(self) -> None:
        """Forget what was noted in a program that came to no end."""
        self._noted = None
        self._noted_of.clear()

    def of(self, split: str, labels_RL: Tensor, rows: Tensor, *, outputs: Tensor) -> Tensor:
        """The labels of ``rows`` [r], which belong to ``split``: classes [r] int64, otherwise [r, L] like ``outputs``.

        StoreError, on the CPU, where a row has no label, or a class that is none.
        """
        labels = labels_RL[rows, 0] if self._task is Task.CLASSES else labels_RL[rows]
        if split not in self._valid:
            labels = self._looked_at(split, labels, classes=max(outputs.shape[1], self._classes))
        if self._task is Task.CLASSES:
            return labels
        targets = labels.to(outputs.dtype)
        if self._incomplete and self._task is Task.MULTILABEL:
            targets = targets.masked_fill_(labels < 0, torch.nan)
        return targets

    def refuse_damaged(self) -> None:
        """StoreError where a row has been met since ``begin`` that has no label. The host waits for the device."""
        noted, self._noted = self._noted, None
        if noted is not None and bool(noted):
            raise self._damaged()
        self._valid |= self._noted_of

    def _looked_at(self, split: str, labels: Tensor, *, classes: int) -> Tensor:
        missing = self._missing(labels, classes)
        if self._incomplete and missing.dim() == 2:
            missing = missing.all(dim=1, keepdim=True)
        found = missing.any()
        if labels.device.type == "cpu":
            if bool(found):
                raise self._damaged()
            return labels
        self._noted = found if self._noted is None else self._noted | found
        self._noted_of.add(split)
        return labels.masked_fill(missing, 0)

    def _missing(self, labels: Tensor, classes: int) -> Tensor:
        match self._task:
            case Task.CLASSES:
                return (labels < 0) | (labels >= classes)
            case Task.MULTILABEL:
                return labels < 0
            case Task.VALUES:
                return torch.isnan(labels)

    def _damaged(self) -> StoreError:
        missing = "class" if self._task is Task.CLASSES else "label"
        return StoreError(f"y of the store is damaged: a row of a split has no {missing}; see ooc verify")
