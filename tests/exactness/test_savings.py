# SPDX-License-Identifier: Apache-2.0
"""Leaving out what cannot reach the loss changes neither losses nor gradients nor scores."""

import dataclasses
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, SAGEConv

import ooc
from ooc.engine import runtime
from ooc.plan.workload import Kind
from ooc.prefetch.arena import Arena
from ooc.storage.store import Store
from ooc.train.trainer import Saving
from tests.exactness.comparison import FLOOR, TOLERANCE, in_turn, least_budgets, make_trainer, train_epoch
from tests.exactness.layers import GatedAsItIs, Make, MlpMessages
from tests.exactness.models import MODELS, Branches, Predicted, Residual
from tests.exactness.reference import CustomCase, ModelCase, Reference, adam, disagreement
from tests.examples import examples
from tests.graphs import GraphCase, random_data

ALL, NONE = tuple(Saving), ()


def in_hop_order(data: Data, folder: Path) -> tuple[Store, Data]:
    """The store of ``data`` in hop order, and the same graph with its nodes in the store's order."""
    folder.mkdir(exist_ok=True)
    shutil.rmtree(folder / "graph.ooc", ignore_errors=True)
    store = ooc.convert(data, folder / "graph.ooc", dtype="float64", order="hop")
    perm = torch.from_numpy(store.array("perm").read())
    place = torch.empty_like(perm)
    place[perm] = torch.arange(len(perm))
    rows = {name: data[name][perm] for name in ("x", "y", "train_mask", "val_mask", "test_mask")}
    return store, Data(edge_index=place[data.edge_index], **rows)


def assert_same_training(case: ModelCase, store: Store, data: Data, folder: Path, **options: object) -> None:
    """Two epochs and an evaluation, against PyG on the whole graph."""
    with make_trainer(case, store, folder, **options) as trainer:
        reference = Reference(case, trainer.model, data, adam, 0)
        for _ in range(2):
            expected = reference.train()
            difference, whose = disagreement(train_epoch(trainer), expected, floor=FLOOR[torch.float64])
            assert difference <= TOLERANCE[torch.float64], f"{whose} differs by {difference:.1e}"
        scores = trainer.evaluate()
    expected_scores = reference.accuracies()
    assert {name: scores[name] for name in expected_scores} == expected_scores


@settings(max_examples=examples(6), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    graph=st.builds(
        GraphCase,
        nodes=st.integers(5, 120),
        edges=st.integers(0, 300),
        undirected=st.booleans(),
        self_loops=st.integers(0, 3),
        isolated=st.integers(0, 4),
        unlabelled=st.integers(0, 119),
        train=st.sampled_from([0.01, 0.5, 1.0]),
        seed=st.integers(0, 99),
    ),
    kind=st.sampled_from(["gcn", "sage"]),
    layers=st.integers(1, 4),
    hidden=st.sampled_from([3, 12]),
    dropout=st.sampled_from([0.0, 0.4]),
    input_dropout=st.sampled_from([0.0, 0.2]),
    savings=st.sampled_from([ALL, NONE, (Saving.ACTIVE_ROWS,), (Saving.FIRST_AGGREGATION,)]),
    plan=st.sampled_from([{}, {"slab_columns": 2}, {"slab_columns": 5, "block_rows": 16}]),
)
def test_savings_change_nothing(
    tmp_path_factory: pytest.TempPathFactory,
    graph: GraphCase,
    kind: str,
    layers: int,
    hidden: int,
    dropout: float,
    input_dropout: float,
    savings: tuple[Saving, ...],
    plan: dict[str, int],
) -> None:
    """From one labelled node to all, directed and undirected, whatever is saved and however it is planned."""
    folder = tmp_path_factory.mktemp("savings")
    store, data = in_hop_order(random_data(graph), folder)
    case = ModelCase(kind=kind, layers=layers, hidden=hidden, dropout=dropout, input_dropout=input_dropout)
    assert_same_training(case, store, data, folder, savings=savings, **plan)


SPREAD: dict[str, ModelCase] = {
    "jumping knowledge": ModelCase(kind="sage", layers=3, options={"jk": "cat"}),
    "batch norm": ModelCase(kind="gcn", layers=3, dropout=0.2, options={"norm": "batch_norm"}),
    "gin": ModelCase(kind="gin", layers=2, options={"train_eps": True}),
    "residual": CustomCase(make=Residual),
    "branches": CustomCase(make=Branches),
    "propagated": CustomCase(make=Predicted),
    "simplified": CustomCase(make=MODELS["SGC twice"]),
}
"""Models whose values reach the output over more or fewer hops than their neighbours."""


@pytest.mark.thorough("propagated-dropped", "jumping knowledge-whole", "gin-whole")
@pytest.mark.parametrize(("name", "input_dropout"), in_turn(SPREAD, {"whole": 0.0, "dropped": 0.2}))
def test_savings_change_nothing_in_other_models(name: str, input_dropout: float, tmp_path: Path) -> None:
    """Few labels: most rows are left out, unless a norm looks at all of them."""
    store, data = in_hop_order(random_data(GraphCase(nodes=150, edges=200, unlabelled=144, seed=5)), tmp_path)
    case = dataclasses.replace(SPREAD[name], input_dropout=input_dropout)
    for savings in (ALL, NONE):
        assert_same_training(case, store, data, tmp_path, savings=savings, slab_columns=3)


def test_few_labels_leave_most_rows_out(tmp_path: Path) -> None:
    """The stages of the last layers run over few rows, and measured traffic is what was planned."""
    graph = GraphCase(nodes=1500, edges=3000, unlabelled=1480, seed=3)
    store, _ = in_hop_order(random_data(graph), tmp_path)
    case = ModelCase(kind="sage", layers=3, hidden=40)
    options: dict[str, Any] = {"savings": ALL, "block_rows": 8}
    gpu, host = least_budgets(
        lambda gpu, host: make_trainer(case, store, tmp_path, gpu_budget=gpu, host_budget=host, **options)
    )
    with make_trainer(case, store, tmp_path, gpu_budget=gpu, host_budget=host, **options) as trainer:
        rows = {p.stage.name: p.stage.rows for p in trainer.plan.programs["train"] if hasattr(p, "stage")}
        assert "s1" in trainer.plan.spilled
        record = trainer.fit(epochs=2, eval_every=0)[-1]  # the first epoch fills the memory
        assert record.ssd_read_bytes == trainer.plan.ssd_read_bytes > 0
        assert record.ssd_write_bytes == trainer.plan.ssd_write_bytes > 0
    assert rows["loss"] == -(-store.split_sizes["train"] // 8) * 8  # whole tiles
    assert rows["loss"] < rows["forward 2"] < rows["forward 1"] < store.num_nodes // 2
    assert rows["backward 2"] == rows["forward 2"]


def test_of_what_a_rectifier_is_given_the_backward_pass_reads_bits(tmp_path: Path) -> None:
    """And numbers only of the rows whose own product a later layer adds: the first ones, and no others are kept."""
    graph = GraphCase(nodes=1500, edges=3000, unlabelled=1480, seed=3)
    store, data = in_hop_order(random_data(graph), tmp_path)
    case = ModelCase(kind="sage", layers=3, hidden=40)
    with make_trainer(case, store, tmp_path, savings=ALL) as trainer:
        stages = {stage.name: stage for stage in trainer.workload.programs["train"]}
        matrices = trainer.workload.matrices
    assert "s1" in stages["forward 1"].stores and "s1" in stages["backward 1"].loads
    assert (matrices["s1"].kind, matrices["s1"].columns, matrices["s1"].itemsize) == (Kind.BITS, 5, 1)
    assert matrices["s1"].rows == stages["backward 1"].rows > matrices["z1"].rows >= stages["backward 2"].rows
    assert_same_training(case, store, data, tmp_path, savings=ALL)


def test_what_is_read_as_numbers_anyway_has_no_bits(tmp_path: Path) -> None:
    """A weight whose gradient needs the rectifier's result brings its input, and autograd its own."""
    store, _ = in_hop_order(random_data(GraphCase(nodes=100)), tmp_path)
    for case in (ModelCase(kind="gcn", layers=3, hidden=40), ModelCase(kind="gcn", options={"norm": "batch_norm"})):
        with make_trainer(case, store, tmp_path) as trainer:
            assert not [m for m in trainer.workload.matrices.values() if m.kind is Kind.BITS]


def test_what_memory_holds_before_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that training leaves out and evaluation does not are whatever bytes lie there, NaN for one."""
    monkeypatch.setattr(runtime, "Arena", _NotANumber)
    graph = GraphCase(nodes=1500, edges=3000, unlabelled=1400, train=0.2, seed=3)
    store, data = in_hop_order(random_data(graph), tmp_path)
    for kind in ("sage", "gcn", "gat"):
        case = ModelCase(kind=kind, layers=3)
        with make_trainer(case, store, tmp_path) as trainer:
            rows = [{s.name: s.rows for s in trainer.workload.programs[p]} for p in ("train", "evaluate")]
        assert rows[0]["forward 2"] < rows[1]["forward 2"]
        for plan in ({}, {"slab_columns": 4}):
            assert_same_training(case, store, data, tmp_path, **plan)


class _NotANumber(Arena):
    """Memory full of ones: of floating-point numbers, NaN."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.view(0, nbytes).fill(0xFF)
        self.used_bytes = 0


def test_the_first_aggregation_is_kept_and_used_until_the_store_changes(tmp_path: Path) -> None:
    """A second trainer has nothing to prepare and gives the same losses; a stamp that does not fit is ignored."""
    store, _ = in_hop_order(random_data(GraphCase(nodes=60)), tmp_path)
    case = ModelCase(kind="gcn", layers=2, hidden=8)
    with make_trainer(case, store, tmp_path) as trainer:
        first = [record.loss for record in trainer.fit(epochs=2, eval_every=0)]
        assert trainer.plan.programs["prepare"]
    kept = store.path / "agg" / "gcn_float64"
    assert kept.is_dir()
    with make_trainer(case, ooc.open(store.path), tmp_path) as trainer:
        assert not trainer.plan.programs["prepare"]
        assert [record.loss for record in trainer.fit(epochs=2, eval_every=0)] == first
    (kept / "stamp.json").write_text('{"x": 1}')
    kept.with_name(f"{kept.name}.partial-{socket.gethostname()}-{1 << 30}").mkdir()  # left by a killed process
    with make_trainer(case, ooc.open(store.path), tmp_path) as trainer:
        assert trainer.plan.programs["prepare"]
        assert [record.loss for record in trainer.fit(epochs=2, eval_every=0)] == first
    assert "1}" not in (kept / "stamp.json").read_text()
    assert sorted(path.name for path in (store.path / "agg").iterdir()) == ["gcn_float64", "zarr.json"]
    shutil.rmtree(kept)
    with (
        make_trainer(case, ooc.open(store.path), tmp_path) as trainer,
        patch(
            "ooc.engine.first_aggregation.shutil.disk_usage", lambda folder: SimpleNamespace(free=2 * 60 * 9 * 8 - 1)
        ),
    ):
        assert [record.loss for record in trainer.fit(epochs=2, eval_every=0)] == first
    assert not kept.exists()  # a cache must not fill the disk


def test_where_z1_would_spill_it_is_computed_again_to_the_same_bits(tmp_path: Path) -> None:
    """The plan says so, nothing of it is written, and losses equal those with plenty of memory."""
    store, _ = in_hop_order(random_data(GraphCase(nodes=3000, edges=9000, features=6)), tmp_path)
    case = ModelCase(kind="sage", layers=2, hidden=64)
    options = {"dtype": torch.float64, "tile_rows": 64}
    with make_trainer(case, store, tmp_path, **options) as trainer:
        assert "z1" in trainer.plan.matrices
        plenty = [record.loss for record in trainer.fit(epochs=2, eval_every=0)]
    with make_trainer(case, store, tmp_path, gpu_budget="1400K", host_budget="200K", **options) as trainer:
        assert [row["matrix"] for row in trainer.plan.summary() if row["fate"] == "recompute"] == ["z1"]
        assert "z1" not in trainer.plan.matrices
        assert [record.loss for record in trainer.fit(epochs=2, eval_every=0)] == plenty


class SideBySide(nn.Module):
    """Two layers in each of which two convolutions pull the same rows."""

    def __init__(self, features: int, classes: int, left: Make, right: Make) -> None:
        super().__init__()
        self.left = nn.ModuleList([left(features, 6), left(6, classes)])
        self.right = nn.ModuleList([right(features, 6), right(6, classes)])

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = (self.left[0](x, edge_index) + self.right[0](x, edge_index)).tanh()
        out: Tensor = self.left[1](x, edge_index) + self.right[1](x, edge_index)
        return out


PAIRS: dict[str, tuple[Make, Make]] = {
    "two scalings": (GCNConv, SAGEConv),
    "attention and a sum": (GATConv, GCNConv),
    "a sum and attention": (SAGEConv, GATConv),
    "maxima and attention": (
        lambda i, o: SAGEConv(i, o, aggr="max"),
        lambda i, o: GATv2Conv(i, o, heads=2, concat=False),
    ),
    "as it is and a sum": (MlpMessages, GCNConv),
    "a sum and as it is": (GCNConv, MlpMessages),
    "both as they are": (MlpMessages, GatedAsItIs),
}


@pytest.mark.thorough("as it is and a sum", "attention and a sum")
@pytest.mark.parametrize("name", PAIRS)
def test_two_aggregations_of_the_same_rows(name: str, tmp_path: Path) -> None:
    """The gradient that the later one has for these rows reaches further than what lies between the two."""
    store, data = in_hop_order(random_data(GraphCase(nodes=150, edges=260, unlabelled=140, seed=5)), tmp_path)
    case = CustomCase(make=lambda features, classes: SideBySide(features, classes, *PAIRS[name]))
    assert_same_training(case, store, data, tmp_path)
