# SPDX-License-Identifier: Apache-2.0
"""The number of threads changes no bit of any result."""

from pathlib import Path

import pytest
import torch

from ooc.engine.workers import OrderedPipeline, WorkerPool
from tests.exactness.comparison import make_trainer, store_of
from tests.exactness.reference import ModelCase
from tests.examples import thorough
from tests.graphs import GraphCase, random_data


@pytest.mark.parametrize("kind", thorough(["gcn", "sage"], "gcn"))
def test_threads_change_nothing(kind: str, tmp_path: Path) -> None:
    """Losses and weights, to the bit, with tiles computed one by one and several at a time; passes are short, so that
    tiles are handed out in some epochs and not in others."""
    store = store_of(random_data(GraphCase(nodes=700, edges=3000, features=20), dtype=torch.float32), tmp_path)
    case = ModelCase(kind=kind, layers=3, hidden=16, dropout=0.3)
    results = []
    for threads in (1, 2, 5):
        options = {"threads": threads, "tile_rows": 32, "block_rows": 128}
        with make_trainer(case, store, tmp_path, dtype=torch.float32, **options) as trainer:
            losses = [record.loss for record in trainer.fit(epochs=7, eval_every=0)]
            results.append((losses, [p.detach().clone() for p in trainer.model.parameters()]))
    for losses, weights in results[1:]:
        assert losses == results[0][0]
        assert all(torch.equal(one, other) for one, other in zip(weights, results[0][1], strict=True))


def test_an_error_of_a_task_is_raised_in_its_turn() -> None:
    """What comes before it is reduced; what comes after it is left out."""
    pool, reduced = WorkerPool(2), list[float]()
    with pytest.raises(ZeroDivisionError), OrderedPipeline(pool, lambda x: 6 / x, reduced.append) as tasks:
        for step, number in enumerate((3, 2, 0, 1)):
            tasks.put(step, number)
        tasks.drain()
    pool.close()
    assert reduced == [2, 3]


def test_short_passes_are_tried_either_way() -> None:
    """Handed out first; then alone as often; then as it took less. A long pass is always handed out."""
    pool = WorkerPool(1)

    def run(name: str, *, alone_s: float, handed_s: float) -> bool:
        handed_out, took_s = pool.way(name)
        took_s.append(handed_s if handed_out else alone_s)
        return handed_out

    for name, alone_s, handed_s, found in (
        ("alone is faster", 1e-3, 3e-3, [True] * 3 + [False] * 5),
        ("handed out is faster", 8e-3, 3e-3, [True] * 3 + [False] * 3 + [True] * 2),
        ("long", 1e-3, 1.0, [True] * 8),
    ):
        assert [run(name, alone_s=alone_s, handed_s=handed_s) for _ in range(8)] == found
