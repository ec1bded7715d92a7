# SPDX-License-Identifier: Apache-2.0
"""Layers that run as they are, where not even what they gather from fits in memory: it is shuffled, results are the
same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch_geometric.nn import GENConv

from ooc.errors import BudgetError, OocError
from ooc.kernels import neighbourhood
from ooc.plan import UNMEASURED, Limits
from ooc.plan.graphs import GraphStatistics
from ooc.plan.layout.passes import ShufflePass
from ooc.plan.program.plan import Plan
from ooc.plan.simulate.simulator import simulate
from ooc.plan.simulate.timeline import Resource
from ooc.prefetch.engines.direct import DirectEngine
from ooc.sizes import parse_size
from ooc.storage.store import Store
from ooc.train.metrics import Metric
from ooc.train.prediction import Prediction
from ooc.train.resources import Resources
from ooc.train.setup import prepare
from ooc.train.trainer import Trainer
from tests.exactness.comparison import assert_agrees, least, make_trainer, store_of, train_epoch, two_epochs
from tests.exactness.layers import GatedAsItIs, MlpMessages
from tests.exactness.reference import CustomCase
from tests.exactness.test_inner_dropout import OfMessages
from tests.exactness.test_savings import in_hop_order
from tests.examples import cases, examples, ordinary
from tests.graphs import GraphCase, graph_cases, random_data
from tests.prefetch.faults import Faults, faulty_engine
from tests.prefetch.held import assert_no_more_held, held

WIDTH = 64
GRAPH = GraphCase(nodes=1200, edges=2400, features=5, self_loops=20, isolated=25, duplicates=30, unlabelled=180)
WHOLE_BYTES = GRAPH.nodes * WIDTH * 4
OPTIONS: dict[str, Any] = {"tile_rows": 64, "threads": 1, "dtype": torch.float32}
Make = Callable[[int, int], nn.Module]


class Wide(nn.Module):
    """Two layers as they are with wide rows between them, which only the second gathers from."""

    def __init__(self, features: int, classes: int, make: Make = MlpMessages) -> None:
        super().__init__()
        self.first = nn.Linear(features, WIDTH)
        self.second = make(WIDTH, WIDTH)
        self.third = make(WIDTH, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        rows = torch.relu(self.second(torch.relu(self.first(x)), edge_index))
        return self.third(rows, edge_index)


def wide(make: Make) -> CustomCase:
    return CustomCase(make=lambda features, classes: Wide(features, classes, make))


class GenAsItIs(GENConv):
    """For which there is no formula."""


CASE = wide(MlpMessages)
CASES = {
    "an MLP on edges": CASE,
    "an MLP on edges, std": wide(lambda i, o: MlpMessages(i, o, "std")),
    "ResGatedGraphConv": wide(GatedAsItIs),
    "GENConv": wide(lambda i, o: GenAsItIs(i, o, norm=None, learn_t=True)),
}


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


def assert_same(epochs: list[Any], expected: list[Any]) -> None:
    """To the last bit."""
    for one, other in zip(epochs, expected, strict=True):
        assert one.loss == other.loss
        for name, gradient in other.gradients.items():
            assert torch.equal(one.gradients[name], gradient), name


def gathered_in(plan: Plan) -> set[str]:
    """The matrices that are shuffled in training."""
    return {
        item.pull.source for item in plan.programs["train"] if isinstance(item, ShufflePass) and item.pull is not None
    }


def test_budgets_too_small_for_what_is_gathered_from_do(
    store: Store, scarce: dict[str, Any], scarcely: tuple[Any, ...], tmp_path: Path
) -> None:
    """It does not fit, and results are those of large budgets; less than the budget that is named is too
    little."""
    with pytest.raises(BudgetError):
        make_trainer(CASE, store, tmp_path, **OPTIONS, **scarce | {"gpu_budget": int(0.98 * scarce["gpu_budget"])})
    epochs, _, plan, _ = scarcely
    assert gathered_in(plan) == {"m1", "m2"} and plan.arena_bytes < WHOLE_BYTES
    titles = [item.title for item in plan.programs["train"]]
    assert [title for title in titles if "shuffle" in title] == [
        "shuffle m1",
        "forward 1, general path, sources shuffled",
        "shuffle m2",
        "loss, general path, sources shuffled",
        "sources 2, general path, sources shuffled, sources' gradients spilled",
        "sources 1, general path, sources shuffled, sources' gradients spilled",
    ]
    expected, roomy = trained(store, tmp_path)
    assert not roomy.plan.bucketed_rows and not roomy.plan.ssd_write_bytes
    assert_same(epochs, expected)


def test_an_epoch_moves_the_bytes_of_the_plan(scarce: dict[str, Any], scarcely: tuple[Any, ...]) -> None:
    """What is shuffled is written once, and read forward and backward; nothing is left of it. Nor is the arena filled
    beyond what is planned, which keeps the budgets."""
    _, records, plan, left = scarcely
    assert (records[-1].ssd_write_bytes, records[-1].ssd_read_bytes) == (plan.ssd_write_bytes, plan.ssd_read_bytes)
    for record in records:
        assert record.device_peak_bytes <= plan.device_peak_bytes <= scarce["gpu_budget"]
        assert record.host_peak_bytes <= plan.host_peak_bytes <= scarce["host_budget"]
    shuffled = sum(shuffle.nbytes for shuffle in plan.bucketed_rows.values())
    assert shuffled > 2 * WHOLE_BYTES
    assert plan.ssd_write_bytes >= shuffled and plan.ssd_read_bytes >= 2 * shuffled
    assert not left


def test_it_is_planned_without_training(store: Store, scarce: dict[str, Any], scarcely: tuple[Any, ...]) -> None:
    """Of a store the trainer's own plan; of a graph of as many nodes and edges, no fewer bytes."""
    _, _, expected, _ = scarcely
    model = CASE.build(store.num_features, store.num_classes, dtype=torch.float32)
    resources = Resources.parse("1G", "1G", threads=1, tile_rows=64)
    workload, plan = prepare(model, store, resources, metric=Metric.ACCURACY).plan(
        Limits(scarce["gpu_budget"], scarce["host_budget"], block_rows=64), UNMEASURED
    )
    assert plan.bucketed_rows == expected.bucketed_rows and plan.summary() == expected.summary()
    timeline = simulate(plan, workload, UNMEASURED)
    assert timeline.moved_bytes[Resource.SSD_READ] == plan.ssd_read_bytes
    assert timeline.moved_bytes[Resource.SSD_WRITE] == plan.ssd_write_bytes
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
    assert other.bucketed_rows and all(shuffle.nbytes >= WHOLE_BYTES for shuffle in other.bucketed_rows.values())


@pytest.mark.parametrize(
    ("spill_dtype", "threads"), ordinary([(None, 3), ("bfloat16", 1), ("bfloat16", 3)], ("bfloat16", 3))
)
def test_plans_and_threads_do_not_matter(
    store: Store,
    scarcely: tuple[Any, ...],
    tmp_path: Path,
    spill_dtype: str | None,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks of other heights have other buckets than under the least budgets, and so have larger budgets; results are
    equal to the last bit."""
    monkeypatch.setattr(neighbourhood, "EDGES_AT_ONCE", 100)
    given = {"spill_dtype": spill_dtype}
    expected, _ = trained(store, tmp_path, epochs=1, **given)
    buckets = {scarcely[2].bucketed_rows["m2 shuffled"].bucket_rows}
    for block_rows, more_bytes in cases([(192, 0)], [(64, 0), (192, 0), (64, WHOLE_BYTES // 10)]):
        options = given | {"block_rows": block_rows, "threads": threads}
        budgets = least(CASE, store, tmp_path, **OPTIONS | options)
        budgets["gpu_budget"] += more_bytes
        epochs, trainer = trained(store, tmp_path, epochs=1, **options | budgets)
        assert "m2" in gathered_in(trainer.plan), (block_rows, more_bytes)
        buckets.add(trainer.plan.bucketed_rows["m2 shuffled"].bucket_rows)
        assert_same(epochs, expected)
    assert len(buckets) > 1


@given(
    graph=graph_cases(
        nodes=st.integers(500, 650),
        edges=st.integers(300, 900),
        isolated=st.integers(0, 60),
        unlabelled=st.integers(0, 200),
    ),
    name=st.sampled_from(sorted(CASES)),
    tile_rows=st.just(32),
    blocks=st.sampled_from([1, 2]),
)
@settings(
    max_examples=examples(2),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_graph_is_exact(graph: GraphCase, name: str, tile_rows: int, blocks: int, tmp_path: Path) -> None:
    """Losses and gradients are PyG's, whatever the height of blocks."""
    data = random_data(graph)
    store = store_of(data, tmp_path)
    options: dict[str, Any] = {"tile_rows": tile_rows, "block_rows": blocks * tile_rows}
    budgets = least(CASES[name], store, tmp_path, **options)
    plan = assert_agrees(CASES[name], data, tmp_path, epochs=1, store=store, **options | budgets)
    assert gathered_in(plan)


def test_rows_that_do_not_reach_the_loss_are_left_out(tmp_path: Path) -> None:
    """In the order of hops from few training nodes, rows within reach are shuffled, to targets within reach."""
    graph = GraphCase(nodes=1200, edges=1800, unlabelled=900, seed=5)
    store, data = in_hop_order(random_data(graph), tmp_path)
    budgets = least(CASE, store, tmp_path, tile_rows=32)
    plan = assert_agrees(CASE, data, tmp_path, epochs=1, store=store, tile_rows=32, **budgets)
    (item,) = [item for item in plan.programs["train"] if item.title == "shuffle m2"]
    assert item.pull is not None
    shuffle = plan.bucketed_rows[item.pull.output]
    assert shuffle.targets < shuffle.rows < graph.nodes


def test_dropout_in_layers_drops_the_same(store: Store, tmp_path: Path) -> None:
    """Masks belong to nodes and edges of the graph."""
    case = wide(OfMessages)
    budgets = least(case, store, tmp_path, **OPTIONS)
    found = []
    for options in ({}, budgets):
        with make_trainer(case, store, tmp_path, **OPTIONS, **options) as trainer:
            found.append([train_epoch(trainer)])
            assert bool(trainer.plan.bucketed_rows) == bool(options)
    assert_same(*found)


def test_predictions(store: Store, tmp_path: Path) -> None:
    """Under the least budgets as under large ones."""
    model = CASE.build(store.num_features, store.num_classes, dtype=torch.float32).eval()

    def predicted(gpu: int, host: int) -> tuple[Tensor, bool]:
        resources = Resources.parse(gpu, host, spill_dir=tmp_path, tile_rows=64, threads=1)
        prediction = Prediction(model, store, resources)
        try:
            return prediction.read(), bool(prediction._session._prepared.plan.bucketed_rows)
        finally:
            prediction.close()

    with pytest.raises(BudgetError, match="gpu_budget=") as caught:
        predicted(1000, 60_000)
    named = parse_size(str(caught.value).rsplit("gpu_budget='", 1)[1].rstrip("'"))
    (expected, whole), (found, shuffled) = predicted(10**8, 10**8), predicted(named, 60_000)
    assert shuffled and not whole
    assert torch.equal(found, expected)


@pytest.mark.parametrize("faults", [{"full": 0.2}, {"broken": 0.2}], ids=["full", "broken"])
def test_a_disk_that_fails_ends_the_run_with_one_line(
    store: Store, scarce: dict[str, Any], tmp_path: Path, faults: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread, descriptor or file is left."""
    before = held()

    def engine(*_: Any, **__: Any) -> tuple[DirectEngine, str]:
        return faulty_engine(Faults(seed=4, **faults), depth=8, bulk_depth=4), "a test"

    monkeypatch.setattr("ooc.engine.runtime.choose_engine", engine)
    with pytest.raises(OocError, match=r"^\S+( shuffled)?: (reading|writing) .* at byte \d+ failed: [^\n]+$"):
        trained(store, tmp_path, **scarce)
    assert_no_more_held(before)
    assert list((tmp_path / "spill").iterdir()) == []
