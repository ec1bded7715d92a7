# SPDX-License-Identifier: Apache-2.0
"""What a store's labels are: one class a node, several yes-or-no labels, or numbers."""

import torch
from torch import Tensor

from ooc.errors import StoreError
from ooc.storage.store import Store, Task


def label_columns(store: Store) -> int:
    """Columns of ``y``."""
    return store.array("y").columns


def targets(task: Task, labels_RL: Tensor, rows: Tensor, *, outputs: Tensor, sound: bool = False) -> Tensor:
    """The labels of ``rows`` as losses and metrics take them: classes [r] int64, otherwise [r, L] like ``outputs``.

    StoreError where a row has no label, or a class that the model has no output for: rows of a split have one in
    every store that is sound. ``sound``: they were found to have one, and nobody looks again.
    """
    if task is Task.CLASSES:
        classes = labels_RL[rows, 0]
        if not sound and not bool(((classes >= 0) & (classes < outputs.shape[1])).all()):
            raise StoreError("y of the store is damaged: a row of a split has no class; see ooc verify")
        return classes
    labels = labels_RL[rows]
    if not sound and bool((labels < 0).any() if task is Task.MULTILABEL else torch.isnan(labels).any()):
        raise StoreError("y of the store is damaged: a row of a split has no label; see ooc verify")
    return labels.to(outputs.dtype)
