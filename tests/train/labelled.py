# SPDX-License-Identifier: Apache-2.0
"""Stores whose nodes have several labels or numbers instead of a class, and PyG training to compare with."""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn.models.basic_gnn import BasicGNN

from ooc.storage.array import open_array
from ooc.storage.store import Store, Task
from ooc.storage.writer import ArrayWriter
from tests.exactness.comparison import store_of
from tests.exactness.reference import Epoch


def labelled(data: Data, y: Tensor, folder: Path, *, told: bool = True) -> Store:
    """``data`` with the labels ``y`` [N, L]: int8 for several labels a node, float32 for values; ``told``: the store
    says of how many nodes some are missing."""
    store = store_of(data, folder)
    task = {torch.int8: "multilabel", torch.float32: "values"}[y.dtype]
    attributes = {**store.attributes, "task": task, "num_classes": y.shape[1]}
    if told and (incomplete := int(Task(task).incomplete(y.numpy()).sum())):
        attributes["incomplete_labels"] = incomplete
    shutil.rmtree(store.path / "y")
    with ArrayWriter(store.path, "y", tuple(y.shape), y.numpy().dtype) as writer:
        writer.append(y.numpy()[store.array("perm").read()])
    metadata = json.loads((store.path / "zarr.json").read_text())
    (store.path / "zarr.json").write_text(json.dumps({**metadata, "attributes": attributes}))
    return Store(store.path, attributes, {name: open_array(store.path, name) for name in store.arrays()})


def random_labels(data: Data, columns: int, *, seed: int = 0) -> Tensor:
    """[N, L] int8, -1 in the rows of nodes in no split; the last column is 0 throughout."""
    y = torch.randint(0, 2, (data.num_nodes, columns), generator=torch.Generator().manual_seed(seed), dtype=torch.int8)
    y[:, -1] = 0
    y[~(data.train_mask | data.val_mask | data.test_mask)] = -1
    return y


def random_values(data: Data, columns: int, *, seed: int = 0) -> Tensor:
    """[N, L] float32 that depend on the features, NaN in the rows of nodes in no split."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(data.x.shape[1], columns, generator=generator, dtype=data.x.dtype)
    y = (data.x @ mixing + 10).float()
    y[~(data.train_mask | data.val_mask | data.test_mask)] = float("nan")
    return y


def with_some_missing(y: Tensor) -> Tensor:
    """``y`` [N, L] without about a third of its labels; of every node that has some, one stays."""
    missing = torch.rand(y.shape, generator=torch.Generator().manual_seed(9)) < 0.35
    missing[missing.all(dim=1), 0] = False
    return y.masked_fill(missing, torch.nan if y.is_floating_point() else -1)


class FullBatch:
    """Trains a copy of ``model`` by PyG alone; ``loss`` takes (outputs, labels) of the training rows."""

    def __init__(
        self, model: BasicGNN, data: Data, y: Tensor, loss: Callable[[Tensor, Tensor], Tensor], lr: float = 0.01
    ) -> None:
        self.model = copy.deepcopy(model)
        self.data, self.y, self.loss = data, y if y.dim() == 1 else y.to(data.x.dtype), loss
        self.optimizer: Any = torch.optim.Adam(self.model.parameters(), lr=lr)

    def train(self, before_step: Callable[[], object] = lambda: None) -> Epoch:
        """One epoch; ``before_step`` is called with the gradients in place."""
        self.model.train()
        self.optimizer.zero_grad()
        mask = self.data.train_mask
        loss = self.loss(self.model(self.data.x, self.data.edge_index)[mask], self.y[mask])
        loss.backward()
        before_step()
        gradients = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        self.optimizer.step()
        return Epoch(loss.item(), gradients)

    @torch.no_grad()
    def outputs(self) -> np.ndarray[Any, Any]:
        """[N, C] in eval mode."""
        self.model.eval()
        return np.asarray(self.model(self.data.x, self.data.edge_index))
