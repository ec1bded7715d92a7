# SPDX-License-Identifier: Apache-2.0
"""Whether the first slabs of what is pulled are computed right into their buffers changes no result."""

from pathlib import Path

import pytest
import torch

from ooc.plan import planner
from ooc.plan.passes import ColumnPass
from ooc.plan.plan import Plan
from ooc.plan.planner import LAST_STEPS
from ooc.plan.slabs import direct_slabs
from tests.exactness.comparison import make_trainer, store_of
from tests.exactness.reference import ModelCase
from tests.graphs import GraphCase, random_data

GRAPH = GraphCase(nodes=800, edges=5000, features=24)
CASE = ModelCase(kind="sage", layers=3, hidden=40, dropout=0.3, input_dropout=0.2)
BUDGETS = {"gpu_budget": 1_500_000, "host_budget": 500_000, "slab_columns": 8, "tile_rows": 64}


def direct(plan: Plan) -> list[int]:
    """By column pass of an epoch, the slabs that are."""
    passes = plan.programs["train"]
    return [direct_slabs(passes, item) for item in passes if isinstance(item, ColumnPass)]


def test_results_do_not_depend_on_where_the_first_slabs_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses and weights by ``==``; what is read and written is what each plan says."""
    store = store_of(random_data(GRAPH, dtype=torch.float32), tmp_path)
    found = []
    for begins in ((LAST_STEPS, True), (LAST_STEPS, False)):
        monkeypatch.setattr(planner, "_LEANER_AND_LEANER", (begins,))
        monkeypatch.setattr(planner._Search, "_otherwise", staticmethod(lambda choice, group: choice))
        with make_trainer(CASE, store, tmp_path, dtype=torch.float32, **BUDGETS) as trainer:
            records = trainer.fit(epochs=3)
            parameters = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
            found.append((direct(trainer.plan), [record.loss for record in records], parameters))
    (in_place, losses, weights), (apart, other_losses, other_weights) = found
    assert all(in_place) and in_place
    assert not any(apart)
    assert losses == other_losses
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)
