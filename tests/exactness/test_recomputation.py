# SPDX-License-Identifier: Apache-2.0
"""Whatever the backward pass computes again instead of finding it kept, results are the same to the last bit."""

from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import AGNNConv, GATv2Conv, SAGEConv

import ooc
from ooc.plan import Hardware, Limits, Workload, make_plan
from ooc.plan.planner import Chosen
from ooc.plan.problem import Recomputed, Variants
from ooc.storage.store import Store
from ooc.train import job
from tests.engine.fake_device import FakeDevice, compute_losses_by_torch
from tests.engine.test_device import on_device, use
from tests.exactness.comparison import make_trainer, store_of
from tests.exactness.models import GCNII, Branches, Predicted, Residual
from tests.exactness.reference import CustomCase, ModelCase
from tests.examples import cases
from tests.graphs import GraphCase, random_data

GRAPH = GraphCase(nodes=400, edges=2000, features=12, self_loops=10, isolated=20, duplicates=30, unlabelled=100)
TILE_ROWS = 32
EPOCHS = 2
SCARCE = {"gpu_budget": "420K", "host_budget": "120K", "block_rows": TILE_ROWS}
"""Little enough that much of what is kept goes to the SSD, and so does some of what is computed again."""
PLANS: list[dict[str, Any]] = [SCARCE, {"slab_columns": 5, "block_rows": 2 * TILE_ROWS}]

Force = Callable[[Recomputed], None]


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Force:
    """Takes the choice of what is computed again from the planner."""

    def forced(recomputed: Recomputed) -> None:
        def choose(variants: Variants, limits: Limits, hardware: Hardware) -> Chosen:
            return Chosen(recomputed, make_plan(variants(recomputed), limits, hardware))

        monkeypatch.setattr(job, "choose_workload", choose)

    return forced


def repeatable(workload: Workload) -> list[int]:
    return [kept.stage for kept in workload.kept if kept.recomputable]


def subsets(stages: list[int]) -> Iterator[Recomputed]:
    for count in range(len(stages) + 1):
        yield from map(frozenset, combinations(stages, count))


Outcome = tuple[list[float], dict[str, Any], list[Tensor], list[int]]


def outcome(case: ModelCase, store: Store, folder: Path, **options: Any) -> Outcome:
    """Losses, scores and weights of a short run, whose bytes are its plan's, and what could be computed again."""
    with make_trainer(case, store, folder, dtype=torch.float32, tile_rows=TILE_ROWS, **options) as trainer:
        records = trainer.fit(epochs=EPOCHS, eval_every=0)
        assert records[-1].ssd_read_bytes == trainer.plan.ssd_read_bytes
        assert records[-1].ssd_write_bytes == trainer.plan.ssd_write_bytes
        scores = trainer.evaluate()
        weights = [p.detach().clone() for p in trainer.model.parameters()]
        return [record.loss for record in records], scores, weights, repeatable(trainer.workload)


def assert_same(found: Outcome, expected: Outcome, what: object) -> None:
    assert found[0] == expected[0], what
    assert found[1] == expected[1], what
    assert all(torch.equal(a, b) for a, b in zip(found[2], expected[2], strict=True)), what


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return store_of(random_data(GRAPH, dtype=torch.float32), tmp_path_factory.mktemp("store"))


@pytest.mark.thorough("sage-0.0")
@pytest.mark.parametrize(("kind", "dropout"), [("gcn", 0.4), ("sage", 0.0)])
def test_every_set_of_what_is_computed_again_gives_the_same(
    kind: str, dropout: float, store: Store, tmp_path: Path, force: Force
) -> None:
    """From nothing to all that is kept: losses, scores and weights are equal to the roomiest's. Either kind of layers
    runs every set, under one plan or the other, so that each set comes with each plan."""
    case = ModelCase(kind=kind, layers=4, hidden=24, dropout=dropout)
    force(frozenset())
    expected = outcome(case, store, tmp_path)
    stages = expected[-1]
    assert len(stages) == 3
    for number, recomputed in enumerate(subsets(stages)):
        force(recomputed)
        plan = PLANS[(number + (kind == "sage")) % len(PLANS)]
        assert_same(outcome(case, store, tmp_path, **plan), expected, (recomputed, plan))


class Behind(nn.Module):
    """A layer whose targets bring rows of their own to what they pull, between one that may be run again and a norm."""

    def __init__(self, features: int, classes: int, second: nn.Module) -> None:
        super().__init__()
        self.zeroth, self.first, self.second = SAGEConv(features, 8), SAGEConv(8, 8), second
        self.norm, self.out = nn.BatchNorm1d(8), nn.Linear(8, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(self.zeroth(x, edge_index).relu(), edge_index).tanh()
        found: Tensor = self.out(self.norm(self.second(x, edge_index)))
        return found


OTHERS: dict[str, ModelCase] = {
    "agnn behind": CustomCase(make=lambda *sizes: Behind(*sizes, AGNNConv(add_self_loops=False))),
    "gatv2 behind": CustomCase(make=lambda *sizes: Behind(*sizes, GATv2Conv(8, 4, heads=2))),
    "dropped input": ModelCase(kind="gcn", layers=3, dropout=0.3, input_dropout=0.2),
    "dropped input, sage": ModelCase(kind="sage", layers=3, dropout=0.3, input_dropout=0.2),
    "batch norm": ModelCase(kind="gcn", layers=3, dropout=0.2, options={"norm": "batch_norm"}),
    "jumping knowledge": ModelCase(kind="sage", layers=3, options={"jk": "cat"}),
    "gin": ModelCase(kind="gin", layers=3, options={"train_eps": True}),
    "residual": CustomCase(make=Residual),
    "branches": CustomCase(make=Branches),
    "initial residual": CustomCase(make=GCNII),
    "propagated": CustomCase(make=Predicted),
}


@pytest.mark.thorough("gatv2 behind", "dropped input, sage", "initial residual", "branches")
@pytest.mark.parametrize("case", OTHERS.values(), ids=OTHERS.keys())
def test_so_do_other_models(case: ModelCase, store: Store, tmp_path: Path, force: Force) -> None:
    """Norms over all rows, values that skip layers, weights used twice: each alone, and all at once under either plan;
    in an ordinary run the last alone, by slabs, and all where memory is scarce."""
    force(frozenset())
    expected = outcome(case, store, tmp_path)
    stages = expected[-1]
    everything, alone = frozenset(stages), [frozenset((stage,)) for stage in stages]
    for number, recomputed in enumerate(dict.fromkeys([*cases(alone[-1:], alone), everything])):
        force(recomputed)
        plans = PLANS if recomputed == everything else [PLANS[number % len(PLANS)]]
        for plan in cases([PLANS[recomputed != everything]], plans):
            plan = {**plan, **({"gpu_budget": "1M"} if "gpu_budget" in plan else {})}
            assert_same(outcome(case, store, tmp_path, **plan), expected, (recomputed, plan))


ATTENDING: dict[str, ModelCase] = {
    "attention": ModelCase(kind="gat", hidden=16, dropout=0.3, input_dropout=0.2, options={"heads": 4}),
    "maxima": ModelCase(kind="sage", options={"aggr": "max", "project": True}),
}


@pytest.mark.parametrize("case", ATTENDING.values(), ids=ATTENDING.keys())
def test_so_does_what_the_first_attention_pulls(
    case: ModelCase, store: Store, tmp_path: Path, force: Force, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made of the features once more before the backward pass has its own rows of it; offered on a device alone."""
    compute_losses_by_torch(monkeypatch)
    force(frozenset())
    expected = outcome(case, store, tmp_path)
    force(frozenset((0,)))
    for plan in PLANS:
        plan = {**plan, **({"gpu_budget": "1M"} if "gpu_budget" in plan else {})}
        assert_same(outcome(case, store, tmp_path, **plan), expected, plan)
    with FakeDevice(1) as fake:
        use(fake, monkeypatch)
        with on_device(case, store, tmp_path, dtype=torch.float32, tile_rows=TILE_ROWS)() as trainer:
            assert [record.loss for record in trainer.fit(epochs=EPOCHS, eval_every=0)] == expected[0]
            names = [stage.name for stage in trainer.workload.programs["train"]]
            assert names[-2:] == ["messages 1 for backward 0", "backward 0"]
        force(frozenset())
        with on_device(case, store, tmp_path, dtype=torch.float32, tile_rows=TILE_ROWS)() as trainer:
            assert repeatable(trainer.workload) == [0]


@pytest.mark.thorough("gcn")
@pytest.mark.parametrize("kind", ["gcn", "sage"])
def test_few_labels_give_the_same(kind: str, tmp_path: Path, force: Force) -> None:
    """In hop order most rows are left out, in what is computed again as in the forward pass that is scored."""
    data = random_data(GraphCase(nodes=1500, edges=3000, unlabelled=1400, train=0.2, seed=3), dtype=torch.float32)
    store = ooc.convert(data, tmp_path / "graph.ooc", dtype="float32", order="hop")
    case = ModelCase(kind=kind, layers=4, hidden=24)
    force(frozenset())
    expected = outcome(case, store, tmp_path)
    stages = expected[-1]
    for recomputed in [*map(frozenset, combinations(stages, 1)), frozenset(stages)]:
        force(recomputed)
        assert_same(outcome(case, store, tmp_path, slab_columns=7), expected, recomputed)


def test_forward_stages_run_again_right_before_the_backward_that_needs_them(
    store: Store, tmp_path: Path, force: Force
) -> None:
    """Into matrices of their own, which nothing else reads; what is recomputed is not written forward."""
    force(frozenset((2,)))
    case = ModelCase(kind="gcn", layers=4, hidden=24)
    with make_trainer(case, store, tmp_path, dtype=torch.float32, tile_rows=TILE_ROWS) as trainer:
        stages = trainer.workload.programs["train"]
        assert [row["matrix"] for row in trainer.plan.summary() if row["fate"] == "recompute"] == ["z3"]
    names = [stage.name for stage in stages]
    at = names.index("backward 3")
    assert names[at - 2 : at] == ["forward 2 for backward 3", "forward 3 for backward 3"]
    first, second, backward = stages[at - 2 : at + 1]
    assert first.stores == ("m3.3",) and first.pull is None and "z2" in first.loads
    assert second.pull is not None and second.pull.source == "m3.3"
    assert second.stores == ("z3.3",) and "z3.3" in backward.loads
    others = [stage for stage in stages if stage not in (second, backward)]
    assert not any("z3" in (*stage.stores, *stage.loads) for stage in stages)
    assert not any("z3.3" in (*stage.stores, *stage.loads) for stage in others)


def test_a_chain_is_run_again_from_the_nearest_that_is_kept(store: Store, tmp_path: Path, force: Force) -> None:
    """For every one of its members anew: none of them outlives the backward stage it was computed for."""
    force(frozenset((1, 2)))
    case = ModelCase(kind="gcn", layers=4, hidden=24)
    with make_trainer(case, store, tmp_path, dtype=torch.float32, tile_rows=TILE_ROWS) as trainer:
        stages = trainer.workload.programs["train"]
    again = [stage.name for stage in stages if " for " in stage.name]
    assert again == [
        "forward 1 for backward 3",
        "forward 2 for backward 3",
        "forward 3 for backward 3",
        "forward 1 for backward 2",
        "forward 2 for backward 2",
    ]
    assert "z1" in stages[[stage.name for stage in stages].index("forward 1 for backward 2")].loads


def test_what_is_rounded_is_not_computed_again(store: Store, tmp_path: Path) -> None:
    """It would come of rounded values, and be others."""
    case = ModelCase(kind="gcn", layers=3)
    with make_trainer(case, store, tmp_path, dtype=torch.float32, spill_dtype="bfloat16") as trainer:
        assert len(trainer.workload.kept) == 2
        assert not repeatable(trainer.workload)


def test_attention_is_not_run_again(store: Store, tmp_path: Path) -> None:
    """Its result is kept with what its backward pass needs besides."""
    with make_trainer(ModelCase(kind="gat", layers=3), store, tmp_path, dtype=torch.float32) as trainer:
        assert trainer.workload.kept
        assert not repeatable(trainer.workload)


def test_what_is_handed_over_has_a_share_that_is_computed_again(store: Store, tmp_path: Path, force: Force) -> None:
    """GraphSAGE's z2 waits for the next forward stage; the backward pass does not find it."""
    force(frozenset((1,)))
    case = ModelCase(kind="sage", layers=3, hidden=24)
    with make_trainer(case, store, tmp_path, dtype=torch.float32, tile_rows=TILE_ROWS) as trainer:
        rows = {row["matrix"]: row for row in trainer.plan.summary()}
        stages = {stage.name: stage for stage in trainer.workload.programs["train"]}
    assert "z2" in stages["forward 2"].stores and "z2" in stages["loss"].loads
    assert "z2" not in stages["backward 2"].loads
    assert rows["z2"]["fate"] == "host + recompute"
    assert int(rows["z2"]["resident"]) + int(rows["z2"]["recompute"]) == 100
