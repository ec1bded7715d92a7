# SPDX-License-Identifier: Apache-2.0
"""Layers that run as they are, where sources' gradients do not fit in memory: spilled as runs, results are the same."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch_geometric.nn import FeaStConv, SAGEConv

from ooc.errors import BudgetError, OocError
from ooc.kernels import neighbourhood
from ooc.plan import UNMEASURED, Limits
from ooc.plan.graphs import GraphStatistics
from ooc.prefetch.engines.direct import DirectEngine
from ooc.sizes import parse_size
from ooc.storage.store import Store
from ooc.train.metrics import Metric
from ooc.train.resources import Resources
from ooc.train.setup import prepare
from ooc.train.trainer import Trainer
from tests.exactness.comparison import assert_agrees, least, make_trainer, store_of, train_epoch, two_epochs
from tests.exactness.layers import MlpMessages
from tests.exactness.reference import CustomCase
from tests.exactness.test_savings import in_hop_order
from tests.examples import examples, ordinary
from tests.graphs import GraphCase, graph_cases, random_data
from tests.prefetch.faults import Faults, faulty_engine
from tests.prefetch.held import assert_no_more_held, held

WIDTH = 24
GRAPH = GraphCase(nodes=1200, edges=3300, features=5, self_loops=13, isolated=17, duplicates=20, unlabelled=120)
WHOLE_BYTES = GRAPH.nodes * WIDTH * 4


class Wide(nn.Module):
    """Two layers as they are, the second of wide rows."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first = MlpMessages(features, WIDTH)
        self.second = MlpMessages(WIDTH, classes, "softmax")

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x, edge_index)), edge_index)


class Deep(nn.Module):
    """Two layers as they are, after and between others."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(features, WIDTH), MlpMessages(WIDTH, WIDTH)
        self.third, self.fourth = SAGEConv(WIDTH, WIDTH), MlpMessages(WIDTH, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        rows = self.second(torch.relu(self.first(x)), edge_index)
        return self.fourth(torch.relu(self.third(rows, edge_index) + rows), edge_index)


CASE = CustomCase(make=Wide)
OPTIONS: dict[str, Any] = {"tile_rows": 64, "threads": 1, "dtype": torch.float32}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return store_of(random_data(GRAPH, dtype=torch.float32), tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def scarce(store: Store, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The least budgets."""
    return least(CASE, store, tmp_path_factory.mktemp("least"), **OPTIONS)


def trained(store: Store, folder: Path, epochs: int = 2, **options: Any) -> tuple[list[Any], Trainer]:
    """Losses and gradients of some epochs, and the trainer, closed."""
    with make_trainer(CASE, store, folder, **OPTIONS | options) as trainer:
        return [train_epoch(trainer) for _ in range(epochs)], trainer


@pytest.fixture(scope="module")
def scarcely(store: Store, scarce: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    """Under the least budgets."""
    return two_epochs(CASE, store, tmp_path_factory.mktemp("scarce"), **OPTIONS, **scarce)


class Apart(nn.Module):
    """A layer whose targets' own rows lie in another matrix than sources'."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first, self.second = SAGEConv(features, WIDTH), FeaStConv(WIDTH, classes, add_self_loops=False)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        found: Tensor = self.second(torch.relu(self.first(x, edge_index)), edge_index)
        return found


def test_neighbours_in_the_tile_are_counted_where_targets_lie_apart(tmp_path: Path) -> None:
    store = store_of(random_data(replace(GRAPH, nodes=1024), dtype=torch.float32), tmp_path)
    case, losses, given = CustomCase(make=Apart), [], OPTIONS | {"tile_rows": 256}
    for options in ({}, least(case, store, tmp_path, **given)):
        with make_trainer(case, store, tmp_path, **given, **options) as trainer:
            assert bool(options) == bool(trainer.plan.partial_sums)
            losses.append([train_epoch(trainer).loss for _ in range(2)])
    assert losses[0] == losses[1]


def test_budgets_too_small_for_both_matrices_do(
    store: Store, scarce: dict[str, Any], scarcely: tuple[Any, ...], tmp_path: Path
) -> None:
    """The one that is gathered from and its gradient; results are those of large budgets."""
    with pytest.raises(BudgetError):
        make_trainer(CASE, store, tmp_path, **OPTIONS, **scarce | {"gpu_budget": int(0.98 * scarce["gpu_budget"])})
    epochs, _, plan, _ = scarcely
    assert list(plan.partial_sums) == ["dm2"]
    assert plan.arena_bytes < 2 * WHOLE_BYTES
    (title,) = [item.title for item in plan.programs["train"] if "spilled" in item.title]
    assert ", general path" in title and title.endswith("sources' gradients spilled")
    expected, roomy = trained(store, tmp_path)
    assert not roomy.plan.partial_sums and not roomy.plan.ssd_write_bytes
    for one, other in zip(epochs, expected, strict=True):
        assert one.loss == other.loss
        assert all(torch.equal(one.gradients[name], gradient) for name, gradient in other.gradients.items())


def test_an_epoch_moves_the_bytes_of_the_plan(scarcely: tuple[Any, ...]) -> None:
    """Runs are written once and read once, and nothing is left of them."""
    _, records, plan, left = scarcely
    for record in records[1:]:
        assert record.ssd_write_bytes == plan.ssd_write_bytes
        assert record.ssd_read_bytes == plan.ssd_read_bytes
    assert plan.ssd_write_bytes >= plan.partial_sums["dm2"].nbytes > WHOLE_BYTES
    assert not left


def test_they_are_planned_without_training(store: Store, scarce: dict[str, Any], scarcely: tuple[Any, ...]) -> None:
    """Of a store the trainer's own plan; of a graph of as many nodes and edges, no fewer bytes."""
    _, _, expected, _ = scarcely
    model = CASE.build(store.num_features, store.num_classes, dtype=torch.float32)
    resources = Resources.parse("1G", "1G", threads=1, tile_rows=64)
    limits = Limits(scarce["gpu_budget"], scarce["host_budget"], block_rows=64)
    _, plan = prepare(model, store, resources, metric=Metric.ACCURACY).plan(limits, UNMEASURED)
    assert plan.partial_sums == expected.partial_sums and plan.summary() == expected.summary()
    graph = GraphStatistics(
        name="like it",
        nodes=store.num_nodes,
        edges=store.num_edges,
        features=store.num_features,
        classes=store.num_classes,
        labelled=store.num_nodes,
        source="a test",
    )
    prospect = prepare(model, graph, resources, metric=Metric.ACCURACY)
    with pytest.raises(BudgetError, match="gpu_budget=") as caught:
        prospect.plan(Limits(1000, 50_000, block_rows=64), UNMEASURED)
    named = parse_size(str(caught.value).rsplit("gpu_budget='", 1)[1].rstrip("'"))
    _, other = prospect.plan(Limits(named, 50_000, block_rows=64), UNMEASURED)
    assert other.partial_sums["dm2"].nbytes >= expected.partial_sums["dm2"].nbytes


@pytest.mark.parametrize(
    ("spill_dtype", "threads"), ordinary([(None, 3), ("bfloat16", 1), ("bfloat16", 3)], ("bfloat16", 3))
)
def test_plans_and_threads_do_not_matter(
    store: Store, tmp_path: Path, spill_dtype: str | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of other heights have other buckets, and results are equal to the last bit."""
    monkeypatch.setattr(neighbourhood, "EDGES_AT_ONCE", 100)
    given = {"spill_dtype": spill_dtype}
    expected, _ = trained(store, tmp_path, epochs=1, **given)
    buckets = set()
    for block_rows in (64, 512):
        options = given | {"block_rows": block_rows, "threads": threads}
        scarce = least(CASE, store, tmp_path, **OPTIONS | options)
        epochs, trainer = trained(store, tmp_path, epochs=1, **options | scarce)
        assert list(trainer.plan.partial_sums) == ["dm2"], block_rows
        buckets.add(trainer.plan.partial_sums["dm2"].buckets)
        assert epochs[0].loss == expected[0].loss
        for name, gradient in expected[0].gradients.items():
            assert torch.equal(epochs[0].gradients[name], gradient), (name, block_rows)
    assert len(buckets) > 1


@pytest.mark.thorough
@given(
    graph=graph_cases(
        nodes=st.integers(600, 900),
        edges=st.integers(300, 1500),
        isolated=st.integers(0, 60),
        unlabelled=st.integers(0, 200),
    ),
    tile_rows=st.sampled_from([32, 64]),
)
@settings(
    max_examples=examples(2),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_graph_is_exact(graph: GraphCase, tile_rows: int, tmp_path: Path) -> None:
    """Losses and gradients are PyG's."""
    data = random_data(graph)
    store = store_of(data, tmp_path)
    budgets = least(CASE, store, tmp_path, tile_rows=tile_rows)
    plan = assert_agrees(CASE, data, tmp_path, epochs=2, store=store, tile_rows=tile_rows, **budgets)
    assert plan.partial_sums


def test_rows_that_do_not_reach_the_loss_have_none(tmp_path: Path) -> None:
    """In the order of hops from few training nodes, runs are of the rows within reach."""
    graph = GraphCase(nodes=1400, edges=2300, unlabelled=1260, seed=5)
    store, data = in_hop_order(random_data(graph), tmp_path)
    budgets = least(CASE, store, tmp_path, tile_rows=64)
    plan = assert_agrees(CASE, data, tmp_path, epochs=1, store=store, tile_rows=64, **budgets)
    assert plan.partial_sums["dm2"].rows < graph.nodes / 2


def test_several_layers_that_spill(tmp_path: Path) -> None:
    """Each has runs of its own, among layers that are taken apart."""
    case = CustomCase(make=Deep)
    data = random_data(GraphCase(nodes=600, edges=1600))
    store = store_of(data, tmp_path)
    budgets = least(case, store, tmp_path, tile_rows=64)
    plan = assert_agrees(case, data, tmp_path, epochs=1, store=store, tile_rows=64, **budgets)
    assert sorted(plan.partial_sums) == ["dm1", "dm3"]


@pytest.mark.parametrize("faults", [{"full": 0.2}, {"broken": 0.2}], ids=["full", "broken"])
def test_a_disk_that_fails_ends_the_run_with_one_line(
    store: Store, scarce: dict[str, Any], tmp_path: Path, faults: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread, descriptor or file is left."""
    before = held()

    def engine(*_: Any, **__: Any) -> tuple[DirectEngine, str]:
        return faulty_engine(Faults(seed=3, **faults), depth=8, bulk_depth=4), "a test"

    monkeypatch.setattr("ooc.engine.runtime.choose_engine", engine)
    with pytest.raises(OocError, match=r"^[^:\n]+: (reading|writing) .* at byte \d+ failed: [^\n]+$"):
        trained(store, tmp_path, **scarce)
    assert_no_more_held(before)
    assert list((tmp_path / "spill").iterdir()) == []


def test_a_disk_without_room_for_them_is_found_before_training(
    store: Store, scarce: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan knows how much they take."""
    monkeypatch.setattr("ooc.engine.session.shutil.disk_usage", lambda folder: SimpleNamespace(free=100_000))
    with pytest.raises(BudgetError, match=r"the plan spills .* where 100.* are free"):
        trained(store, tmp_path, **scarce)
