# SPDX-License-Identifier: Apache-2.0
"""Who pulls the last slab, and whether the first ones are computed right into their buffers, changes no result."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ooc.plan import problem
from ooc.plan.layout.layout import Choice, Layout, lay_out
from ooc.plan.layout.passes import ColumnPass, RowPass, direct_slabs
from ooc.plan.planner import choose_workload
from ooc.plan.program.plan import Plan
from ooc.plan.workload import Workload
from ooc.storage.store import Store
from ooc.train import job
from tests.exactness.comparison import assert_agrees, least_budgets, make_trainer, store_of
from tests.exactness.reference import CustomCase, ModelCase
from tests.exactness.test_mixed_sums import InTurn
from tests.examples import cases
from tests.graphs import GraphCase, random_data

GRAPH = GraphCase(nodes=260, edges=1600, features=24, self_loops=9, isolated=7, duplicates=15, unlabelled=20)
EVERY_WAY = [(direct, buffers, last) for direct in (True, False) for buffers in (1, 2) for last in (False, True)]
IN_PAIRS = [(direct, buffers, last) for direct, buffers, last in EVERY_WAY if (direct ^ last) == (buffers == 2)]
"""Each two of the three in every combination."""
FAR_APART = [(True, 1, True), (False, 2, False)]
"""For models of layers that are among those of every kind, which are tried in more ways. A thorough run tries all but
these in more."""
CASES: dict[str, tuple[ModelCase, int, dict[str, Any]]] = {
    "gcn": (ModelCase(kind="gcn", layers=3, hidden=40, dropout=0.3, input_dropout=0.2), 16, {}),
    "sage": (ModelCase(kind="sage", layers=3, hidden=40, dropout=0.3), 24, {}),
    "gat": (ModelCase(kind="gat", layers=2, hidden=24, dropout=0.3, options={"heads": 4}), 13, {}),
    "gatv2": (ModelCase(kind="gat", layers=2, hidden=24, options={"heads": 4, "v2": True}), 12, {}),
    "maxima": (ModelCase(kind="sage", layers=2, hidden=24, options={"aggr": "max"}), 8, {}),
    "gcn kept in bfloat16": (ModelCase(kind="gcn", layers=3, hidden=40), 16, {"spill_dtype": "bfloat16"}),
    "layers of every kind": (CustomCase(make=InTurn), 4, {}),
}


def hold(patch: pytest.MonkeyPatch, *, direct: bool, buffers: int, overlap_last: bool) -> None:
    """Let everything that is cut be held like this, whatever the search would rather have."""

    def laid_out(workload: Workload, choice: Choice) -> Layout:
        cuts = {
            name: replace(cut, direct=direct, buffers=buffers, overlap_last=overlap_last) if cut.columns else cut
            for name, cut in choice.cuts.items()
        }
        return lay_out(workload, replace(choice, cuts=cuts))

    patch.setattr(problem, "lay_out", laid_out)
    patch.setattr(job, "choose_workload", choose_workload)  # which has planned the same otherwise before


def left(plan: Plan) -> list[str]:
    """What is pulled of which the last slab is left to the pass that reads the sums."""
    return [i.sweeps.pull.source for i in plan.programs["train"] if isinstance(i, RowPass) and i.sweeps is not None]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return store_of(random_data(GRAPH, dtype=torch.float32), tmp_path_factory.mktemp("store"))


@pytest.mark.thorough("sage")
@pytest.mark.parametrize("name", CASES)
def test_results_do_not_depend_on_who_pulls_the_last_slab(name: str, store: Store, tmp_path: Path) -> None:
    """Losses, weights and logits by ``==``; what is read and written is what each plan says."""
    case, columns, options = CASES[name]
    options = {"slab_columns": columns, "tile_rows": 32, "block_rows": 64, "dtype": torch.float32, **options}
    expected = None
    ways = {"layers of every kind": cases(IN_PAIRS, EVERY_WAY), **dict.fromkeys(("gcn", "sage", "gat"), FAR_APART)}
    for direct, buffers, last in ways.get(name, cases(FAR_APART, IN_PAIRS)):
        with pytest.MonkeyPatch.context() as patch:
            hold(patch, direct=direct, buffers=buffers, overlap_last=last)
            gpu, host = least_budgets(
                lambda gpu=1, host="64M": make_trainer(
                    case, store, tmp_path, gpu_budget=gpu, host_budget=host, **options
                )
            )
            with make_trainer(case, store, tmp_path, gpu_budget=gpu, host_budget=host, **options) as trainer:
                plan, records = trainer.plan, trainer.fit(epochs=2, eval_every=0)
                found = [record.loss for record in records], trainer.predict()
                weights = [p.detach().clone() for p in trainer.model.parameters()]
        assert bool(left(plan)) == last, "in this plan the last slab is pulled otherwise"
        passes = plan.programs["train"]
        in_place = [direct_slabs(passes, item) for item in passes if isinstance(item, ColumnPass)]
        assert any(in_place) == direct
        for record in records[1:]:
            assert (record.ssd_read_bytes, record.ssd_write_bytes) == (plan.ssd_read_bytes, plan.ssd_write_bytes)
        if expected is None:
            expected = found, weights
        assert found[0] == expected[0][0]
        assert torch.equal(found[1], expected[0][1])
        assert all(map(torch.equal, weights, expected[1]))


@pytest.mark.parametrize("kind", ["gcn", "sage", "gat"])
def test_gradients_are_pygs(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hold(monkeypatch, direct=True, buffers=1, overlap_last=True)
    case = ModelCase(kind=kind, layers=3, hidden=24, options={"heads": 4} if kind == "gat" else {})
    assert_agrees(case, random_data(GRAPH), tmp_path, slab_columns=12)
