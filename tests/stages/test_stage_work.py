# SPDX-License-Identifier: Apache-2.0
"""The work that stages say they are is the work they do: multiply-adds as torch counts them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ooc.plan import RowPass
from ooc.storage.store import Store
from tests.exactness.comparison import make_trainer, store_of
from tests.exactness.reference import ModelCase
from tests.graphs import GraphCase, random_data

PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.mm.out, torch.ops.aten.addmm.default)


class MultiplyAdds(TorchDispatchMode):
    """Counts those of the dense products that run on this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in PRODUCTS:
            left, right = args[-2:]
            self.count += left.shape[0] * left.shape[1] * right.shape[1]
        return function(*args, **(kwargs or {}))


GRAPH = GraphCase(nodes=640, edges=3000, features=20)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return store_of(random_data(GRAPH, dtype=torch.float32), tmp_path_factory.mktemp("store"))


@pytest.mark.parametrize("kind", ["gcn", "sage", "gin"])
@pytest.mark.parametrize("layers", [1, 3])
def test_multiply_adds_of_an_epoch_are_those_that_torch_counts(
    kind: str, layers: int, store: Store, tmp_path: Path
) -> None:
    case = ModelCase(kind=kind, layers=layers, hidden=24, dropout=0.5)
    options = {"gpu_budget": "100M", "host_budget": "100M", "tile_rows": 64, "threads": 1}
    with make_trainer(case, store, tmp_path, dtype=torch.float32, **options) as trainer:
        trainer.fit(epochs=1, eval_every=0)  # what is computed once is not an epoch's
        with MultiplyAdds() as counter:
            trainer.fit(epochs=1, eval_every=0)
        stages = [p.stage for p in trainer.plan.programs["train"] if isinstance(p, RowPass)]
    assert sum(stage.rows * stage.multiplies_per_row for stage in stages) == counter.count > 0
    assert all(stage.streamed_bytes_per_row > 0 and stage.operators > 0 for stage in stages)


def test_dropout_and_more_columns_are_more_work(store: Store, tmp_path: Path) -> None:
    def streamed(hidden: int, dropout: float) -> int:
        case = ModelCase(kind="sage", layers=2, hidden=hidden, dropout=dropout)
        with make_trainer(case, store, tmp_path, dtype=torch.float32, gpu_budget="100M", host_budget="100M") as made:
            stages = [p.stage for p in made.plan.programs["train"] if isinstance(p, RowPass)]
            return sum(stage.streamed_bytes_per_row for stage in stages)

    assert streamed(16, 0.0) < streamed(32, 0.0) < streamed(32, 0.5)
