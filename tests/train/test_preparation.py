# SPDX-License-Identifier: Apache-2.0
"""Training planned without being run: the trainer's own plan, and plans for graphs that are not here."""

import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GENConv
from torch_geometric.nn.models import GAT, GCN

import ooc
from ooc.errors import BudgetError
from ooc.model.layers import opaque
from ooc.model.layers.conformance import ProbeResult, probe_layer
from ooc.plan import UNMEASURED, UNMEASURED_DEVICE, Hardware, Limits
from ooc.plan.graphs import KNOWN, GraphStatistics, reach
from ooc.plan.workload import Direction, PerEdge
from ooc.stages.edge_counts import EdgeCounts
from ooc.storage.store import Store
from ooc.train.job import store_of_statistics
from ooc.train.metrics import Metric
from ooc.train.resources import Resources, usual_tile_rows
from ooc.train.setup import prepare
from tests.exactness.comparison import make_trainer
from tests.exactness.reference import ModelCase
from tests.examples import thorough

SOURCE = "synthetic:nodes=6000,edges=60000,features=24,classes=5"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Directed, with few labels, in hop order."""
    folder = tmp_path_factory.mktemp("store")
    return ooc.convert(f"{SOURCE},seed=3,labelled=0.02,directed=1", folder / "graph.ooc", order="hop")


def resources(**options: str | int) -> Resources:
    return Resources.parse("1G", "1G", threads=2, tile_rows=64, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["gcn", "sage", "gin"])
@pytest.mark.parametrize(
    ("gpu", "host"), thorough([(64_000_000, 64_000_000), (600_000, 700_000)], (64_000_000, 64_000_000))
)
def test_a_store_gets_the_plan_that_the_trainer_makes(
    kind: str, gpu: int, host: int, store: Store, tmp_path: Path
) -> None:
    """Matrix by matrix, byte by byte, in memory and under tight budgets."""
    case = ModelCase(kind=kind, layers=3, hidden=16)
    options = {"gpu_budget": gpu, "host_budget": host, "tile_rows": 64, "threads": 2}
    with make_trainer(case, store, tmp_path, dtype=torch.float32, **options) as trainer:
        expected = trainer.plan
        rows = trainer.workload.topologies
    model = case.build(store.num_features, store.num_classes, dtype=torch.float32)
    workload, plan = prepare(model, store, resources(), metric=Metric.ACCURACY).plan(Limits(gpu, host), UNMEASURED)
    assert plan.summary() == expected.summary()
    assert plan.unrolled == expected.unrolled
    assert {d: list(t.tile_edges) for d, t in workload.topologies.items()} == {
        d: list(t.tile_edges) for d, t in rows.items()
    }
    assert (plan.device_peak_bytes, plan.host_peak_bytes) == (expected.device_peak_bytes, expected.host_peak_bytes)


def test_for_a_machine_with_a_gpu_its_kernels_are_admitted(store: Store) -> None:
    """Which go through all edges of a tile at once, with workspaces for long rows; whatever the machine at hand."""

    def pulls(machine: Hardware) -> tuple[list[PerEdge], bool]:
        model = GAT(store.num_features, 16, 2, store.num_classes, heads=2)
        workload = prepare(model, store, replace(resources(), hardware=machine), metric=Metric.ACCURACY).workload
        stages = workload.programs["train"]
        return [s.pull.per_edge for s in stages if s.pull and s.pull.per_edge], workload.parts is not None

    (here, in_parts_here), (there, in_parts_there) = pulls(UNMEASURED), pulls(UNMEASURED_DEVICE)
    assert (in_parts_here, in_parts_there) == (False, True)
    assert len(here) == len(there) == 4
    assert all(on_cpu.edges_at_once < 1 << 20 for on_cpu in here)
    assert all(on_gpu.edges_at_once > 1 << 20 for on_gpu in there)
    assert all(0 < on_gpu.bytes_per_edge < torch.float32.itemsize for on_gpu in there)


@pytest.mark.parametrize(
    ("columns", "nodes", "expected"),
    [
        (256, 1_000, 1024),
        (256, 100_000, 4096),
        (256, 500_000, 16_384),
        (256, 2_000_000, 32_768),
        (256, 100_000_000, 65_536),
        (64, 1_000, 1024),
        (64, 100_000_000, 65_536),
    ],
)
def test_a_gpu_has_taller_tiles_where_the_graph_is_large(columns: int, nodes: int, expected: int) -> None:
    """A tile takes as long to launch however tall it is; but there are to be sixteen, so that little is held."""
    assert usual_tile_rows(columns, nodes, features=columns, on_device=True) == expected
    assert usual_tile_rows(columns, nodes, features=columns, on_device=False) == (4096 if nodes >= 400_000 else 2048)


@pytest.mark.parametrize(
    ("columns", "nodes", "expected"),
    [
        (64, 4_096, 2048),
        (64, 5_000, 2560),
        (64, 16_384, 8192),
        (64, 16_385, 2048),
        (128, 10_000, 2048),
        (512, 5_000, 1024),
    ],
)
def test_tiles_are_a_half_of_small_graphs_with_few_columns(columns: int, nodes: int, expected: int) -> None:
    """Which are in the cache all the same; fewer calls are made, and two threads have one each."""
    assert usual_tile_rows(columns, nodes, features=columns, on_device=False) == expected


@pytest.mark.parametrize("gpu", ["1G", "8G"])
def test_what_a_gpu_would_run_depends_on_no_budget_and_no_threads(gpu: str) -> None:
    """One thread launches everything, however many the machine has; tiles are the same whatever the budgets."""
    graph = KNOWN["ogbn-products"]
    asked = replace(Resources.parse(gpu, "64G", threads=16), hardware=UNMEASURED_DEVICE)
    workload = prepare(GCN(graph.features, 256, 3, graph.classes), graph, asked, metric=Metric.ACCURACY).workload
    assert (workload.tile_rows, workload.threads) == (7680, 1)


def test_edges_of_a_store_are_counted_by_tile(store: Store) -> None:
    for direction in (Direction.IN, Direction.OUT):
        indptr, _ = store.topology(direction.value)
        offsets = indptr.read()
        assert list(EdgeCounts(store).of_tiles(direction, 100)) == [*offsets[:-1:100].tolist(), store.num_edges]


@pytest.mark.parametrize("seed", thorough([1, 2], 2))
@pytest.mark.parametrize("labelled", ["0.002", "0.02", "0.3"])
def test_the_reach_that_is_assumed_is_not_exceeded(seed: int, labelled: str, tmp_path: Path) -> None:
    """By a graph with hubs in hop order, at any distance from its labelled rows."""
    source = f"{SOURCE},seed={seed},labelled={labelled},directed=1"
    store = ooc.convert(source, tmp_path / "graph.ooc", order="hop")
    counts = store.attributes["hops"]
    graph = GraphStatistics(
        name="same",
        nodes=store.num_nodes,
        edges=store.num_edges,
        features=24,
        classes=5,
        labelled=counts[0],
        source="a test",
    )
    assumed = reach(graph)
    for hops, count in enumerate(counts):
        assert assumed[min(hops, len(assumed) - 1)] >= count


def test_fewer_labels_are_fewer_rows_unless_savings_are_off() -> None:
    graph = GraphStatistics(
        name="few", nodes=200_000, edges=1_000_000, features=16, classes=4, labelled=500, source="a test"
    )
    pruned = prepare(GCN(16, 8, 2, 4), graph, resources(), metric=Metric.ACCURACY).workload
    whole = prepare(GCN(16, 8, 2, 4), graph, resources(), savings=(), metric=Metric.ACCURACY).workload
    assert pruned.programs["train"][-1].rows < 20_000
    assert {stage.rows for stage in whole.programs["train"]} == {200_000}


def test_a_graph_that_is_not_here_reads_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    graph = GraphStatistics(
        name="none", nodes=10_000, edges=80_000, features=16, classes=4, labelled=10_000, source="a test"
    )
    prospect = prepare(GCN(16, 8, 2, 4), graph, resources(), metric=Metric.ACCURACY)
    _, plan = prospect.plan(Limits(10**8, 10**8), UNMEASURED)
    assert plan.ssd_write_bytes == 0
    with pytest.raises(BudgetError, match=r"give gpu_budget="):
        prospect.plan(Limits(1000, 10**8), UNMEASURED)
    with pytest.raises(BudgetError, match=r"10,000 nodes need .* give host_budget="):
        prospect.plan(Limits(10**8, 1000), UNMEASURED)
    assert list(tmp_path.iterdir()) == []


def test_nothing_as_tall_as_the_graph_is_held() -> None:
    """269 million rows are described in less than a byte for every fifty."""
    graph = KNOWN["igb260m"]
    model = GCN(graph.features, 256, 3, graph.classes)
    tracemalloc.start()
    try:
        workload = prepare(model, graph, Resources.parse("80G", "512G", threads=8), metric=Metric.ACCURACY).workload
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert workload.rows == graph.nodes
    assert workload.fixed_host_bytes >= 2 * 8 * graph.nodes
    assert peak < graph.nodes // 50


def test_a_store_of_counts_has_the_shapes_of_one_that_is_there() -> None:
    store = store_of_statistics(KNOWN["MAG240M"])
    assert store.array("x").shape == (121_751_666, 768)
    assert store.array("x").itemsize == 2
    assert store.topology("in")[1].itemsize == 4
    assert store.split_sizes["train"] == 121_751_666


def test_layers_are_tried_on_one_thread(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of small operators would wait for each other where other programs compute, too: 10 s became 110."""
    threads = []

    def watched(*args: Any, **options: Any) -> ProbeResult:
        threads.append(torch.get_num_threads())
        return probe_layer(*args, **options)

    monkeypatch.setattr(opaque, "probe_layer", watched)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with ooc.Trainer(GNN(store), store, memory="64M"):
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert set(threads) == {1}


class GNN(nn.Module):
    """Of a layer that runs as it is."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.conv = GENConv(store.num_features, store.num_classes, aggr="softmax", learn_t=True)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, edge_index)
