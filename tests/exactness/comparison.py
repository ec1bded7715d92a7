# SPDX-License-Identifier: Apache-2.0
"""Running the trainer and the reference side by side."""

import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch_geometric.data import Data

import ooc
from ooc.errors import BudgetError
from ooc.sizes import parse_size
from ooc.storage.store import Store
from ooc.train.trainer import Saving, Trainer, Tuning
from tests.exactness.reference import (
    Epoch,
    ModelCase,
    OptimizerFactory,
    Reference,
    adam,
    buffers_of,
    disagreement,
)

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
FLOOR = {torch.float64: 1e-3, torch.float32: 1e-2}
EPOCHS = 5


def store_of(data: Data, folder: Path) -> Store:
    """``data`` converted in its own precision, edges exactly as they are."""
    dtype = str(data.x.dtype).removeprefix("torch.")
    return ooc.convert(data, folder / "graph.ooc", dtype=dtype, force=True)


def tuned_trainer(
    *arguments: Any, tile_rows: int | None = None, savings: Collection[Saving] = tuple(Saving), **options: Any
) -> Trainer:
    """A trainer with tiles and savings as tests vary them."""
    return Trainer(*arguments, _tuning=Tuning(tile_rows=tile_rows, savings=savings), **options)


def make_trainer(
    case: ModelCase,
    store: Store,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float64,
    make_optimizer: OptimizerFactory = adam,
    **options: Any,
) -> Trainer:
    """A trainer of a new model; with small tiles (unless told otherwise), so that tiny graphs have many."""
    model = case.build(store.num_features, store.num_classes, dtype=dtype)
    options = {"gpu_budget": "64M", "host_budget": "64M", "tile_rows": 8} | options
    spill = folder / "spill"
    spill.mkdir(exist_ok=True)
    return tuned_trainer(
        model,
        store,
        optimizer=make_optimizer(model),
        input_dropout=case.input_dropout,
        spill_dir=spill,
        **options,
    )


def train_epoch(trainer: Trainer) -> Epoch:
    """One more epoch, and the gradients it leaves in the parameters."""
    (record,) = trainer.fit(epochs=1, eval_every=0)
    gradients = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
    return Epoch(record.loss, gradients, buffers_of(trainer.model))


def assert_agrees(
    case: ModelCase,
    data: Data,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float64,
    make_optimizer: OptimizerFactory = adam,
    seed: int = 0,
    epochs: int = EPOCHS,
    store: Store | None = None,
    **options: Any,
) -> None:
    """Losses, all gradients and buffers of ``epochs`` epochs are PyG's, and so is evaluation after them.

    ``store``: ``data`` converted, where that has been done already.
    """
    store = store_of(data, folder) if store is None else store
    with make_trainer(case, store, folder, dtype=dtype, make_optimizer=make_optimizer, seed=seed, **options) as trainer:
        reference = Reference(case, trainer.model, data, make_optimizer, seed)
        for epoch in range(1, epochs + 1):
            expected = reference.train()
            difference, whose = disagreement(train_epoch(trainer), expected, floor=FLOOR[dtype])
            assert difference <= TOLERANCE[dtype], f"epoch {epoch}: {whose} differs by {difference:.1e}"
        scores = trainer.evaluate()
    expected_scores = reference.accuracies()
    assert {name: scores[name] for name in expected_scores} == expected_scores


def least_budgets(build: Callable[[str, str], Trainer]) -> tuple[int, int]:
    """The gpu and host budget that the errors of too small ones name as the least that would do; bytes."""
    gpu, host = "1", "1"
    for _ in range(4):
        try:
            build(gpu, host).close()
        except BudgetError as error:
            needed_gpu = re.search(r"gpu_budget='(\d+[KMG]?)", str(error))
            needed_host = re.search(r"host_budget='(\d+[KMG]?)", str(error))
            assert needed_gpu or needed_host, f"no remedy in: {error}"
            gpu = needed_gpu[1] if needed_gpu else gpu
            host = needed_host[1] if needed_host else host
        else:
            return parse_size(gpu), parse_size(host)
    raise AssertionError(f"{gpu} and {host} were named as enough and are not")
