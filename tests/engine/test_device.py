# SPDX-License-Identifier: Apache-2.0
"""On a device with memory of its own: the CPU's results to the bit, the plan's bytes to the byte, and no race."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from io import StringIO
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from torch.utils._pytree import tree_flatten
from torch_geometric.nn import GATConv, GATv2Conv, GINConv
from torch_geometric.nn.models import GAT, GraphSAGE

import ooc
from ooc.engine.record import EpochRecord
from ooc.errors import BudgetError, OptionError, SpillError, StoreError
from ooc.kernels import edge_rows, neighbourhood
from ooc.kernels.dropout import opaque as inner_dropout
from ooc.kernels.dropout import rows as dropout
from ooc.kernels.pulls import BY_DEVICE, Pulls
from ooc.plan import UNMEASURED, UNMEASURED_DEVICE
from ooc.plan.layout.passes import ColumnPass
from ooc.plan.layout.temporaries import PULL_TILE_ROWS
from ooc.prefetch.device_frames import DeviceWorkspace
from ooc.prefetch.engine import Counters, Engine
from ooc.prefetch.engines.choice import choose_engine
from ooc.prefetch.engines.kvikio import KvikioEngine
from ooc.prefetch.engines.plain import SystemCalls
from ooc.progress.plan_report import PlanReport
from ooc.report.tables import print_outcome, print_report
from ooc.sizes import format_size
from ooc.storage.store import Store
from ooc.train.metrics import Metric
from ooc.train.resources import Resources
from ooc.train.runs.run import RunFolder
from ooc.train.setup import prepare
from ooc.train.trainer import Trainer
from tests.damage import seal
from tests.engine.fake_device import FakeDevice, Race, StraightEngine, WatchedEngine, lower_unwatched
from tests.exactness.comparison import least_budgets, make_trainer, store_of, tuned_trainer
from tests.exactness.layers import Carrying, MlpMessages, Two, WeighedMessages
from tests.exactness.models import Residual
from tests.exactness.reference import CustomCase, ModelCase
from tests.exactness.test_edge_features import Gines, Transformers
from tests.exactness.test_inner_dropout import Among
from tests.exactness.test_last_slab import hold, left
from tests.exactness.test_mixed_sums import Beside
from tests.examples import ordinary, thorough
from tests.graphs import GraphCase, random_data
from tests.plan.workloads import WITH_DEVICE_MEMORY
from tests.prefetch.faults import Faults, faulty_engine

GRAPH = GraphCase(nodes=120, edges=540, features=20, self_loops=9, isolated=12, duplicates=24, unlabelled=24)
TILE_ROWS = 32
EPOCHS = 2
MODELS = {
    "gcn": ModelCase(kind="gcn", layers=3, hidden=24, dropout=0.3, input_dropout=0.2),
    "sage": ModelCase(kind="sage", layers=3, hidden=24, dropout=0.3),
    "gin with batch norm": ModelCase(kind="gin", layers=2, hidden=16, options={"norm": "batch_norm", "jk": "cat"}),
    "residual": CustomCase(make=Residual),
    "sums of several scalings": CustomCase(make=Beside),
    "gat": ModelCase(kind="gat", layers=2, hidden=12, dropout=0.3, options={"heads": 3}),
    "sage of maxima": ModelCase(kind="sage", layers=2, hidden=16, dropout=0.3, options={"aggr": "max"}),
    "gatv2": ModelCase(kind="gat", layers=2, hidden=12, dropout=0.3, options={"heads": 3, "v2": True}),
    "layers that run as they are": CustomCase(make=lambda f, c: Two(f, c, MlpMessages)),
    "such layers that drop inside": CustomCase(make=Among, input_dropout=0.2),
}


def layers_of_ones_own(features: int, hidden: int, layers: int, classes: int) -> torch.nn.Module:
    """Two of them, of a width of their own."""
    return Two(features, classes, MlpMessages)


def messages_of_features(features: int, classes: int) -> torch.nn.Module:
    """Layers that run as they are, with features of edges."""
    return Carrying(features, classes, lambda i, o: WeighedMessages(i, o, 3))


RUN_AS_THEY_ARE = {"layers that run as they are", "such layers that drop inside"}


class GatsOfFeatures(torch.nn.Module):
    """GATConv with self-loops of mean features, GATv2Conv with constant ones."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first = GATConv(features, 4, heads=2, edge_dim=3)
        self.second = GATv2Conv(8, classes, edge_dim=3, fill_value=0.5)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x, edge_index, edge_attr).relu(), edge_index, edge_attr)
        return out


SHARES = {(1.0, 1.0): (True, True), (1.0, 40.0): (True, False), (60.0, 60.0): (False, False)}
"""Budgets as multiples of the least that would do, (device, host), and what then moves: over the wire, to the SSD."""

Scores = dict[str, float | None]
Build = Callable[..., Trainer]
Least = Callable[..., tuple[int, int]]
OnCpu = Callable[[str], "Outcome"]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny tensors: a second thread costs more than it brings."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Outcome:
    losses: list[float]
    scores: Scores
    logits: Tensor | None
    weights: dict[str, Tensor]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return store_of(random_data(GRAPH, dtype=torch.float32), tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def least(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Least:
    """The least budgets, for the device and for the host, that do for a model on ``store``; found once."""
    known: dict[str, tuple[int, int]] = {}

    def find(model: str, **options: Any) -> tuple[int, int]:
        key = f"{model} {options}"
        if key not in known:
            with FakeDevice(1) as fake, pytest.MonkeyPatch.context() as patch:
                use(fake, patch)
                known[key] = least_budgets(on_device(MODELS[model], store, tmp_path_factory.mktemp("least"), **options))
        return known[key]

    return find


@pytest.fixture(scope="module")
def on_the_cpu(store: Store, tmp_path_factory: pytest.TempPathFactory) -> OnCpu:
    """What comes of a model on ``store`` where the processor computes; found once."""

    @cache
    def find(name: str) -> Outcome:
        return outcome(builder(MODELS[name], store, tmp_path_factory.mktemp("cpu"), threads=1)(), predict=True)

    return find


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    """What ``device="cuda"`` means in a test."""
    with FakeDevice(1) as fake:
        use(fake, monkeypatch)
        yield fake


def use(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch, engine: Callable[[], Engine] | None = None) -> None:
    """Let ``device="cuda"`` mean ``fake``, which is told of every request of the SSD and has the CPU's kernels."""

    def watched(*folders: Path) -> tuple[Engine, str]:
        inner = choose_engine(*folders)[0] if engine is None else engine()
        return WatchedEngine(inner, fake), "a test"

    monkeypatch.setattr("ooc.train.resources.find_device", lambda name: fake if name == "cuda" else None)
    monkeypatch.setattr("ooc.engine.runtime.choose_engine", watched)
    monkeypatch.setitem(BY_DEVICE, fake.place.type, lambda: fake.pulls(BY_DEVICE["cpu"]()))
    lower_unwatched(monkeypatch)
    for drawing in (dropout, inner_dropout):
        monkeypatch.setitem(drawing.BY_DEVICE, fake.place.type, fake.kernel(drawing.BY_DEVICE["cpu"]))


def builder(model: ModelCase, store: Store, folder: Path, **options: Any) -> Build:
    def build(gpu: int | str = "64M", host: int | str = "64M", **more: Any) -> Trainer:
        given = {"dtype": torch.float32, "tile_rows": TILE_ROWS, "block_rows": TILE_ROWS, **options, **more}
        return make_trainer(model, store, folder, gpu_budget=gpu, host_budget=host, **given)

    return build


def on_device(model: ModelCase, store: Store, folder: Path, **options: Any) -> Build:
    return builder(model, store, folder, device="cuda", hardware=WITH_DEVICE_MEMORY, **options)


def outcome(trainer: Trainer, *, predict: bool = False) -> Outcome:
    """Of some epochs, an evaluation and, if asked for, a prediction, which is planned by itself."""
    with trainer:
        losses = [record.loss for record in trainer.fit(epochs=1, eval_every=0)]
        losses += [record.loss for record in trainer.fit(epochs=EPOCHS - 1, eval_every=0)]
        scores = trainer.evaluate()
        logits = trainer.predict() if predict else None
        assert (logits is not None) == predict
    return Outcome(losses, scores, logits, {n: p.detach().clone() for n, p in trainer.model.named_parameters()})


def assert_same(found: Outcome, expected: Outcome) -> None:
    assert found.losses == expected.losses
    assert found.scores == expected.scores
    assert found.logits is None or (expected.logits is not None and torch.equal(found.logits, expected.logits))
    for name, weight in found.weights.items():
        assert torch.equal(weight, expected.weights[name]), name


# ---- results -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    thorough(
        [name for name in MODELS if name not in ("sage", "layers that run as they are")],
        *("sums of several scalings", "gat", "gatv2", "such layers that drop inside"),
    ),
)
def test_results_are_the_cpus_to_the_bit(
    name: str, store: Store, least: Least, on_the_cpu: OnCpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the budgets of the three tiers, and in whatever order copies happen: the least, and others in turn."""
    model, expected = MODELS[name], on_the_cpu(name)
    gpu, host = least(name)
    found = []
    least_share, *others = SHARES
    shares = [*SHARES] if name == "gcn" else [least_share, others[[*MODELS].index(name) % len(others)]]
    for seed, (of_device, of_host) in enumerate(shares):
        with FakeDevice(seed, eager=seed / len(shares)) as fake:
            use(fake, monkeypatch)
            trainer = on_device(model, store, tmp_path)(int(gpu * of_device), int(host * of_host))
            moved = trainer.plan.to_device_bytes > 0, trainer.plan.ssd_bytes > 0
            assert moved == SHARES[of_device, of_host], "all three tiers have their part"
            found.append(outcome(trainer, predict=of_device == 1.0 == of_host))
            assert not fake.opened
    for one in found:
        assert_same(one, expected)


@pytest.mark.parametrize(
    ("name", "slab_columns", "buffers", "overlap_last"),
    ordinary(
        [
            *(("gcn", 3, 1, True), ("gcn", 3, 2, False), ("gcn", 5, 2, True)),
            *(("gat", 5, 1, True), ("gat", 5, 2, False), ("gatv2", 5, 1, False), ("gatv2", 5, 2, True)),
            *(("sage of maxima", 5, 1, True), ("sage of maxima", 5, 2, False)),
        ],
        *(("gcn", 3, 2, False), ("gat", 5, 1, True), ("gatv2", 5, 2, True), ("sage of maxima", 5, 1, True)),
    ),
)
def test_slabs_come_over_the_wire(
    name: str,
    slab_columns: int,
    buffers: int,
    overlap_last: bool,
    store: Store,
    on_the_cpu: OnCpu,
    tmp_path: Path,
    device: FakeDevice,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Column passes, whose slab buffers are filled from below while others are pulled: of attention head by head. The
    last slab may be pulled with the rows that its sums are for."""
    model, expected = MODELS[name], on_the_cpu(name)
    hold(monkeypatch, direct=True, buffers=buffers, overlap_last=overlap_last)
    build = on_device(model, store, tmp_path, slab_columns=slab_columns)
    gpu, host = least_budgets(build)
    trainer = build(int(1.1 * gpu), int(1.1 * host))
    assert any(program.fill for program in trainer.plan.unrolled.values())
    assert bool(left(trainer.plan)) == overlap_last
    assert_same(outcome(trainer), expected)


@pytest.mark.parametrize("name", thorough(["gat", "gatv2", "sage of maxima"], "gatv2"))
def test_a_step_that_is_pulled_at_once_gives_the_same(name: str, tmp_path: Path, device: FakeDevice) -> None:
    """Where something is made of every edge, a device takes several of the CPU's tiles, if other passes take as much
    memory."""
    data = random_data(replace(GRAPH, nodes=4 * PULL_TILE_ROWS - 100, edges=30_000), dtype=torch.float32)
    store, tall = store_of(data, tmp_path), {"tile_rows": PULL_TILE_ROWS, "block_rows": 2 * PULL_TILE_ROWS}
    model = MODELS[name]
    expected = outcome(builder(model, store, tmp_path, threads=1, **tall)())
    trainer = on_device(model, store, tmp_path, slab_columns=5, **tall)()
    pulls = [item for item in trainer.plan.programs["train"] if isinstance(item, ColumnPass)]
    assert max(item.rows_at_once for item in pulls if item.pull.per_edge) >= 2 * PULL_TILE_ROWS
    assert_same(outcome(trainer), expected)


def test_a_device_makes_rows_of_edges(
    store: Store, tmp_path: Path, device: FakeDevice, rows_of_edges: pytest.MonkeyPatch
) -> None:
    """Where the CPU leaves them be."""
    rows_of_edges.undo()
    model, materialized, begun = MODELS["layers that run as they are"], edge_rows.materialized, list[int]()

    def watched(rows: Tensor) -> Tensor:
        begun.append(1)
        return materialized(rows)

    rows_of_edges.setattr(edge_rows, "materialized", watched)
    trainer = on_device(model, store, tmp_path)()
    begun.clear()  # trying a layer is no run of it
    found = outcome(trainer)
    assert not begun
    expected = outcome(builder(model, store, tmp_path)())
    assert begun, "or nothing was seen above"
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    for name, weight in expected.weights.items():
        torch.testing.assert_close(found.weights[name], weight, rtol=1e-4, atol=1e-6)


def test_layers_that_run_as_they_are_have_few_edges_at_a_time(
    tmp_path: Path, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tile of many edges goes run by run, as on the CPU, where runs are shorter; and one of none has a neighbour that
    stands in."""
    data = random_data(replace(GRAPH, nodes=120, edges=400), dtype=torch.float32)
    data.edge_index = data.edge_index[:, data.edge_index[1] < 120 // TILE_ROWS * TILE_ROWS]  # none in the last tile
    store = store_of(data, tmp_path)
    for name in ("EDGES_AT_ONCE", "EDGES_AT_ONCE_ON_DEVICE"):
        monkeypatch.setattr(neighbourhood, name, 60)
    model = MODELS["layers that run as they are"]
    expected = outcome(builder(model, store, tmp_path, threads=1)())
    assert_same(outcome(on_device(model, store, tmp_path)()), expected)


@pytest.mark.parametrize(
    "make", thorough([Transformers, Gines, GatsOfFeatures, messages_of_features], Transformers, Gines)
)
def test_features_of_edges_come_over_the_wire(
    make: Callable[..., torch.nn.Module], tmp_path: Path, device: FakeDevice
) -> None:
    """In either direction; those of added self-loops are made where they are used."""
    store = store_of(random_data(replace(GRAPH, edge_features=3), dtype=torch.float32), tmp_path)
    model = CustomCase(make=make)
    expected = outcome(builder(model, store, tmp_path, threads=1)())
    build = on_device(model, store, tmp_path)
    gpu, host = least_budgets(build)
    assert_same(outcome(build(int(1.1 * gpu), int(1.1 * host))), expected)


@pytest.mark.parametrize("name", thorough(["gcn", "sage of maxima"], "sage of maxima"))
def test_features_without_their_zeros_get_these_back(name: str, tmp_path: Path, device: FakeDevice) -> None:
    """On the device, tile by tile: then it multiplies what the CPU multiplies of features with their zeros."""
    data = random_data(GRAPH, dtype=torch.float32)
    data.x[data.x < 1.5] = 0
    dense, sparse = (
        ooc.convert(data, tmp_path / f"{form}.ooc", feature_form=form, order="hop") for form in ("dense", "sparse")
    )
    expected = outcome(builder(MODELS[name], dense, tmp_path)())
    assert_same(outcome(on_device(MODELS[name], sparse, tmp_path)()), expected)


@pytest.mark.parametrize("name", thorough(["gcn", "gat"], "gat"))
def test_blocks_come_and_go_straight(
    name: str,
    store: Store,
    least: Least,
    on_the_cpu: OnCpu,
    tmp_path: Path,
    device: FakeDevice,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where an engine moves the device's memory: the same results, the plan's bytes, and the record says so."""
    engines: list[StraightEngine] = []

    def straight(folder: Path, *, device: str, counters: Counters) -> Engine:
        engines.append(StraightEngine(KvikioEngine(calls=SystemCalls(), counters=counters), fake))
        return engines[-1]

    fake = device
    monkeypatch.setattr("ooc.engine.runtime.choose_gpudirect", straight)
    model, expected = MODELS[name], on_the_cpu(name)
    gpu, host = least(name)
    assert_same(outcome(on_device(model, store, tmp_path)(gpu, host)), expected)
    assert engines[0].landed and engines[0].lifted
    with on_device(model, store, tmp_path)(gpu, host) as trainer:
        plan, (_, record) = trainer.plan, trainer.fit(epochs=2, eval_every=0)
    planned = plan.to_device_bytes, plan.to_host_bytes, plan.ssd_read_bytes, plan.ssd_write_bytes
    assert moved(record) == planned
    assert record.ssd_way.endswith(
        "and kvikio straight to the GPU and back by GPUDirect where nothing waits in host memory"
    )


@pytest.mark.parametrize("name", thorough(["gcn", "sage of maxima"], "gcn"))
def test_intermediates_kept_in_half_the_bytes_are_widened_on_the_device(
    name: str, store: Store, tmp_path: Path, device: FakeDevice
) -> None:
    model = MODELS[name]
    options: dict[str, Any] = {"spill_dtype": "bfloat16", "slab_columns": 8}
    expected = outcome(builder(model, store, tmp_path, threads=1, **options)())
    build = on_device(model, store, tmp_path, **options)
    gpu, host = least_budgets(build)
    assert_same(outcome(build(gpu, host)), expected)


@pytest.mark.parametrize("name", thorough(["sage", "gat", "sage of maxima"], "sage"))
def test_rows_in_hop_order_pull_from_fewer(name: str, tmp_path: Path, device: FakeDevice) -> None:
    """Neighbours beyond the rows that reach the loss are left out, on the device as on the CPU."""
    data = random_data(GraphCase(nodes=600, edges=1500, features=12, train=0.02, unlabelled=520), dtype=torch.float32)
    hopped = ooc.convert(data, tmp_path / "hop.ooc", dtype="float32", order="hop")
    model = MODELS[name]
    expected = outcome(builder(model, hopped, tmp_path, threads=1)())
    build = on_device(model, hopped, tmp_path)
    gpu, host = least_budgets(build)
    trainer = build(2 * gpu, 2 * host)
    assert any(item.rows < 600 for item in trainer.plan.programs["train"])
    assert_same(outcome(trainer), expected)


def test_averages_schedules_and_clipping_are_the_cpus(store: Store, tmp_path: Path, device: FakeDevice) -> None:
    def trained(build: Build) -> tuple[list[float], Scores, dict[str, Tensor]]:
        torch.manual_seed(3)
        model = GraphSAGE(20, 16, 2, 4)
        average = torch.optim.swa_utils.AveragedModel(model)
        options: dict[str, Any] = {"spill_dir": tmp_path, "tile_rows": TILE_ROWS, "clip_norm": 0.5, "average": average}
        with build(model, store, "16M", "16M", **options) as trainer:
            losses = [record.loss for record in trainer.fit(epochs=EPOCHS, eval_every=EPOCHS)]
            scores = trainer.evaluate()
        return losses, scores, {name: p.detach() for name, p in average.named_parameters()}

    losses, scores, weights = trained(lambda *a, **k: tuned_trainer(*a, **k, threads=1))
    found = trained(lambda *a, **k: tuned_trainer(*a, **k, device="cuda", hardware=WITH_DEVICE_MEMORY))
    assert (losses, scores) == found[:2]
    assert all(torch.equal(weight, found[2][name]) for name, weight in weights.items())


def test_a_loss_with_weights_of_its_own_goes_to_the_device(store: Store, tmp_path: Path, device: FakeDevice) -> None:
    weight = torch.tensor([1.0, 2.0, 0.5, 1.5])
    for loss in (torch.nn.CrossEntropyLoss(weight=weight), lambda out, y: torch.nn.functional.cross_entropy(out, y)):
        losses = []
        for build in (builder, on_device):
            with build(MODELS["gcn"], store, tmp_path)("16M", "16M", loss=loss, threads=1) as trainer:
                losses.append([record.loss for record in trainer.fit(epochs=2, eval_every=0)])
        assert losses[0] == losses[1]
    assert weight.device.type == "cpu"


# ---- bytes and memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", thorough([1.0, 1.2], 1.0))
def test_every_epoch_moves_the_planned_bytes_each_way(
    share: float, store: Store, least: Least, tmp_path: Path, device: FakeDevice
) -> None:
    """To the device, to the host, from the SSD and to it. The first epoch also fills the memory."""
    build = on_device(MODELS["sage"], store, tmp_path)
    gpu, host = least("sage")
    with build(int(share * gpu), int(share * host)) as trainer:
        plan = trainer.plan
        first, second = trainer.fit(epochs=2, eval_every=0)
        after = "train"
        for name in ("evaluate", "train", "evaluate", "evaluate"):
            before = trainer._session.runtime.taken()
            trainer.evaluate() if name == "evaluate" else trainer._loss_and_gradients(scored=False)
            read = trainer._session.runtime.taken().since(before).ssd_read_bytes
            assert read == plan.bytes_read(name) + plan.filling_bytes(name, after=after), (name, after)
            after = name
    assert moved(first)[0] >= plan.to_device_bytes > 0
    planned = plan.to_device_bytes, plan.to_host_bytes, plan.ssd_read_bytes, plan.ssd_write_bytes
    assert moved(second) == planned
    assert first.ssd_way.endswith(", by way of host memory")


def moved(record: EpochRecord) -> tuple[int, int, int, int]:
    return record.to_device_bytes, record.to_host_bytes, record.ssd_read_bytes, record.ssd_write_bytes


@pytest.mark.parametrize("make", thorough([GraphSAGE, GAT, layers_of_ones_own], GAT))
def test_a_prospect_plans_what_the_trainer_runs(
    make: Callable[..., torch.nn.Module], store: Store, tmp_path: Path, device: FakeDevice
) -> None:
    """With what the device takes beside, and with one thread that launches everything."""
    device.overhead_bytes = 3_000_000
    options: dict[str, Any] = {"hardware": WITH_DEVICE_MEMORY, "device": "cuda", "tile_rows": TILE_ROWS}
    model = make(20, 16, 2, 4)
    resources = Resources.parse("4M", "1M", spill_dir=tmp_path, **options)
    _, plan = prepare(model, store, resources, metric=Metric.ACCURACY).plan(resources.limits, resources.hardware)
    with tuned_trainer(model, store, "4M", "1M", spill_dir=tmp_path, **options) as trainer:
        assert (trainer.plan.unrolled, trainer.plan.staged) == (plan.unrolled, plan.staged)
        assert trainer.plan.summary() == plan.summary()
        assert trainer.plan.device_peak_bytes == plan.device_peak_bytes
    assert plan.has_tiers and plan.fixed_device_bytes > 3_000_000


def test_the_plan_and_the_outcome_say_what_goes_over_the_wire(
    store: Store, least: Least, tmp_path: Path, device: FakeDevice
) -> None:
    build = on_device(MODELS["sage"], store, tmp_path)
    gpu, host = least("sage")
    said = StringIO()
    console = Console(file=said, width=120)
    with build(gpu, host) as trainer:
        report = PlanReport.of_run(trainer.workload, trainer.plan, trainer.hardware, trainer.limits, eval_every=0)
        print_report(report, console)
        records = trainer.fit(epochs=1, eval_every=0)
    print_outcome(
        records,
        report,
        console,
        metric=trainer.metric,
        store_bytes=store.nbytes,
        run=tmp_path,
    )
    there, back = format_size(trainer.plan.to_device_bytes), format_size(trainer.plan.to_host_bytes)
    told = re.sub(" +", " ", said.getvalue())
    assert re.search(rf"to device [^\n]* {there}\b", told) and re.search(rf"to host [^\n]* {back}\b", told)
    assert f"to the device {format_size(records[0].to_device_bytes)}" in told


@pytest.mark.parametrize(
    "name",
    ordinary(sorted(MODELS.keys() - RUN_AS_THEY_ARE), "gin with batch norm", "gatv2", "sage of maxima"),
)
def test_the_host_waits_for_no_tile(name: str, store: Store, tmp_path: Path, device: FakeDevice) -> None:
    """In no epoch, neither for its loss nor for its scores. These, and whether all weights are finite, are asked for
    when a program is over; in the first epoch also whether labels are valid, and lists that are pulled with. Layers
    that run as they are, are asked by every tile how many in-neighbours it has. Before either, GIN's ε,
    one of each layer, are compared with what they were."""
    with on_device(MODELS[name], store, tmp_path, tile_rows=16, block_rows=16)() as trainer:
        training = [asked(device, lambda: trainer.fit(epochs=1, eval_every=0)) for _ in range(2)]
        scoring = [asked(device, trainer.evaluate) for _ in range(2)]
        tiles = -(-store.num_nodes // trainer.plan.tile_rows)
        lists = 2 * len(trainer.plan.topologies)
        compared = sum(isinstance(module, GINConv) for module in trainer.model.modules())
    assert not device.loose
    for epochs, numbers in ((training, 2 + compared), (scoring, 3 + compared)):
        assert epochs[1] == numbers
        assert numbers < epochs[0] <= numbers + 2 + lists < numbers + tiles


def asked(device: FakeDevice, run: Callable[[], object]) -> int:
    """How often the host waits for something that the device computes."""
    device.asked.clear()
    run()
    return len(device.asked)


@pytest.mark.parametrize(("name", "in_hop_order"), thorough([("gcn", True), ("sage", False)], ("sage", False)))
def test_nor_where_intermediates_are_narrow_and_rows_are_left_out(
    name: str, in_hop_order: bool, tmp_path: Path, device: FakeDevice
) -> None:
    """Self-loops that are stored, and neighbours beyond the last row that is needed, are passed over by the kernels."""
    case = GraphCase(nodes=600, edges=1500, features=12, self_loops=30, train=0.02, unlabelled=520)
    order = "hop" if in_hop_order else "none"
    store = ooc.convert(random_data(case, dtype=torch.float32), tmp_path / "in.ooc", dtype="float32", order=order)
    build = on_device(MODELS[name], store, tmp_path, spill_dtype="bfloat16")
    gpu, host = least_budgets(build)
    with build(gpu, host) as trainer:
        trainer.fit(epochs=1, eval_every=0)
        device.asked.clear()
        trainer.fit(epochs=1, eval_every=0)
        assert len(device.asked) <= 2 + 2 * len(trainer.plan.topologies)


def test_the_cpu_has_no_wire(store: Store, tmp_path: Path) -> None:
    with builder(MODELS["gcn"], store, tmp_path)() as trainer:
        (record,) = trainer.fit(epochs=1, eval_every=0)
    assert record.to_device_bytes == record.to_host_bytes == 0
    assert record.ssd_way in ("direct", "buffered")


@pytest.mark.parametrize(
    "name",
    thorough(
        ["gcn", "gin with batch norm", "sage of maxima", "gatv2", "layers that run as they are"],
        *("gin with batch norm", "sage of maxima"),
    ),
)
def test_with_the_least_budget_there_is_never_more_on_the_device(
    name: str, store: Store, least: Least, tmp_path: Path, device: FakeDevice
) -> None:
    """Its arena, parameters and their gradients, the optimizer's state, and the temporaries of tiles, all together.
    Those within a kernel are others' to weigh (tests/gpu/test_memory.py)."""
    gpu, host = least(name)
    device.tensors.weighing = True
    with on_device(MODELS[name], store, tmp_path)(gpu, host) as trainer:
        trainer.fit(epochs=2, eval_every=1)
        assert trainer.plan.arena_bytes < device.tensors.peak_bytes <= gpu
        assert not trainer.plan.partial_sums and not trainer.plan.bucketed_rows  # what the CPU would do with less


def test_the_device_is_given_its_budget_and_what_is_planned(
    store: Store, least: Least, tmp_path: Path, device: FakeDevice
) -> None:
    build = on_device(MODELS["gcn"], store, tmp_path)
    gpu, host = least("gcn")
    with build(gpu, host) as trainer:
        (record,) = trainer.fit(epochs=1, eval_every=0)
        assert device.limit_bytes == gpu
        assert device.arena.stop - device.arena.start == trainer.plan.arena_bytes
        assert device.host_memory.stop - device.host_memory.start == trainer.plan.host_arena_bytes
        assert record.device_peak_bytes == trainer.plan.device_peak_bytes <= gpu
        assert record.host_peak_bytes == trainer.plan.host_peak_bytes <= host


def test_what_the_device_takes_beside_is_admitted(
    store: Store, least: Least, tmp_path: Path, device: FakeDevice
) -> None:
    build = on_device(MODELS["gcn"], store, tmp_path)
    gpu, host = least("gcn")
    device.overhead_bytes = 50_000_000
    with pytest.raises(BudgetError, match=r"gpu_budget="):
        build(gpu, host)
    build(gpu + 51_000_000, host).close()


def test_the_model_is_on_the_device_while_it_trains_and_on_the_cpu_after(
    store: Store, tmp_path: Path, device: FakeDevice
) -> None:
    """With its gradients, its optimizer's state and its buffers."""
    model = MODELS["gin with batch norm"]

    def places(trainer: Trainer) -> set[str]:
        tensors: list[Tensor] = [*trainer.model.parameters(), *trainer.model.buffers()]
        tensors += [p.grad for p in trainer.model.parameters() if p.grad is not None]
        tensors += [v for s in trainer.optimizer.state.values() for v in s.values() if v.dim()]
        return {tensor.device.type for tensor in tensors}

    with on_device(model, store, tmp_path)() as trainer:
        parameters = list(trainer.model.parameters())
        trainer.fit(epochs=1, eval_every=0)
        assert places(trainer) == {"meta"}
        trainer.close()
        assert places(trainer) == {"cpu"}
        trainer.fit(epochs=1, eval_every=0)
        assert all(one is other for one, other in zip(trainer.model.parameters(), parameters, strict=True))
    assert places(trainer) == {"cpu"}


def test_a_run_goes_on_where_it_stopped(
    store: Store, tmp_path: Path, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints hold no tensor of the device: they are read where there may be none."""
    model, save = MODELS["sage"], torch.save
    saved: list[Tensor] = []

    def watched(state: object, file: object) -> None:
        saved.extend(value for value in tree_flatten(state)[0] if isinstance(value, Tensor))
        save(state, file)

    monkeypatch.setattr(torch, "save", watched)
    with on_device(model, store, tmp_path)() as trainer:
        whole = [record.loss for record in trainer.fit(epochs=EPOCHS, eval_every=0)]
    pieces = []
    for epochs in (1, EPOCHS):
        run = RunFolder.open(tmp_path / "run") if epochs > 1 else tmp_path / "run"
        with on_device(model, store, tmp_path)(out=run) as trainer:
            pieces += [record.loss for record in trainer.fit(epochs=epochs, resume=epochs > 1, eval_every=0)]
    assert pieces == whole
    assert saved and not any(tensor in device.tensors for tensor in saved)


# ---- what is refused, and what fails -----------------------------------------------------------------------


def test_a_machine_of_another_kind_is_refused(store: Store, tmp_path: Path, device: FakeDevice) -> None:
    model = GraphSAGE(20, 8, 2, 4)
    with pytest.raises(OptionError, match="no wire"):
        tuned_trainer(model, store, spill_dir=tmp_path, device="cuda", hardware=UNMEASURED)
    with pytest.raises(OptionError, match="the CPU is to compute"):
        tuned_trainer(model, store, spill_dir=tmp_path, device="cpu", hardware=WITH_DEVICE_MEMORY)


def test_without_a_profile_the_plan_is_made_by_estimates_that_say_so(
    store: Store, tmp_path: Path, device: FakeDevice
) -> None:
    with tuned_trainer(GraphSAGE(20, 8, 2, 4), store, spill_dir=tmp_path, device="cuda") as trainer:
        assert trainer.hardware is UNMEASURED_DEVICE
        assert "estimates" in trainer.hardware.source
        assert trainer.plan.has_tiers


def test_without_cuda_the_device_is_refused_in_one_line(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(OptionError, match="device cuda is not available on this machine; use device='cpu'"):
        tuned_trainer(GraphSAGE(20, 8, 2, 4), store, spill_dir=tmp_path, device="cuda")


@pytest.mark.parametrize("waits", [True, False], ids=["the kernel says so", "the kernel passes over it"])
def test_a_damaged_neighbour_list_is_one_line(
    waits: bool, tmp_path: Path, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told when the program is over, before any weight is stepped, where kernels cannot raise."""
    store = store_of(random_data(GRAPH, dtype=torch.float32), tmp_path)
    damage(store, 100, [10_000])
    if not waits:
        monkeypatch.setitem(BY_DEVICE, device.place.type, lambda: device.pulls(passing_over(BY_DEVICE["cpu"]())))
    with on_device(MODELS["sage"], store, tmp_path)() as trainer:
        before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
        with pytest.raises(StoreError, match=r"in/indices of the store .* is damaged"):
            trainer.fit(epochs=1, eval_every=0)
    assert all(torch.equal(one, other) for one, other in zip(before, trainer.model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("name", "waits"), thorough([("gat", True), ("gat", False), ("sage of maxima", False)], ("gat", False))
)
def test_so_it_is_where_attention_and_maxima_pull(
    name: str, waits: bool, tmp_path: Path, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of(random_data(GRAPH, dtype=torch.float32), tmp_path)
    damage(store, 100, [10_000])
    if not waits:
        monkeypatch.setitem(BY_DEVICE, device.place.type, lambda: device.pulls(passing_over(BY_DEVICE["cpu"]())))
    with on_device(MODELS[name], store, tmp_path)() as trainer:
        before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
        with pytest.raises(StoreError, match="damaged"):
            trainer.fit(epochs=1, eval_every=0)
    assert all(torch.equal(one, other) for one, other in zip(before, trainer.model.parameters(), strict=True))


@pytest.mark.parametrize("waits", [True, False], ids=["the kernel says so", "the kernel passes over it"])
def test_neighbours_out_of_order_are_refused_where_dropout_counts_them(
    waits: bool, tmp_path: Path, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks of repeated edges would be others forward than backward; without dropout the order is nobody's affair."""
    store = store_of(random_data(GRAPH, dtype=torch.float32), tmp_path)
    offsets, indices = (array.read() for array in store.topology("in"))
    first = next(int(a) for a, b in pairwise(offsets) if b - a > 1 and indices[a] != indices[b - 1])
    stop = int(offsets[offsets > first][0])
    damage(store, first, indices[first:stop][::-1].tolist())
    if not waits:
        monkeypatch.setattr("ooc.kernels.dropout.edges._check_order", lambda piece: None)
    with on_device(MODELS["gat"], store, tmp_path)() as trainer, pytest.raises(StoreError, match="ascending order"):
        trainer.fit(epochs=1, eval_every=0)
    with on_device(replace(MODELS["gat"], dropout=0.0), store, tmp_path)() as trainer:
        trainer.fit(epochs=1, eval_every=0)


def damage(store: Store, first: int, values: list[int]) -> None:
    """Let other neighbours stand in the in-lists from edge ``first`` on."""
    at = 0
    for extent in store.topology("in")[1].extents(first, first + len(values)):
        itemsize = store.topology("in")[1].itemsize
        taken = values[at : at + extent.nbytes // itemsize]
        at += len(taken)
        with extent.path.open("r+b") as file:
            file.seek(extent.offset)
            file.write(b"".join(value.to_bytes(itemsize, "little") for value in taken))
    seal(store.topology("in")[1])


def passing_over(pulls: Pulls) -> Pulls:
    """The forward pulls without a word about neighbours that are none: like any beyond the source's end, they add
    nothing."""
    return replace(
        pulls,
        sums=lambda tile, source, **rows: pulls.sums(replace(tile, nodes=1 << 30), source, **rows),
        attend=lambda gat, tile, **rows: pulls.attend(gat, replace(tile, nodes=1 << 30), **rows),
        maxima=lambda tile, source, **rows: pulls.maxima(replace(tile, nodes=1 << 30), source, **rows),
    )


def test_without_triton_cuda_is_refused_in_one_line(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("ooc.train.resources.find_spec", lambda name: None)
    with pytest.raises(OptionError, match="triton, which is not installed; pip install triton"):
        tuned_trainer(GraphSAGE(20, 8, 2, 4), store, spill_dir=tmp_path, device="cuda")


def test_memory_used_up_within_the_budget_is_one_line(
    store: Store, tmp_path: Path, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Should temporaries take more than was admitted, the device refuses them rather than pass its budget."""

    def refuse(*_: object, **__: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 MiB")

    with on_device(MODELS["gcn"], store, tmp_path)() as trainer:
        refusing = replace(BY_DEVICE["cpu"](), sums=refuse)
        monkeypatch.setitem(BY_DEVICE, device.place.type, lambda: device.pulls(refusing))
        with pytest.raises(BudgetError, match=r"used up, within its budget of .*Tried to allocate.*gpu_budget="):
            trainer.fit(epochs=1, eval_every=0)


def test_a_broken_disk_is_one_line_and_nothing_is_left_under_way(
    store: Store, least: Least, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MODELS["sage"]
    faults = Faults(seed=5)
    with FakeDevice(2) as fake:
        use(fake, monkeypatch, lambda: faulty_engine(faults))
        build = on_device(model, store, tmp_path)
        gpu, host = least("sage")
        undisturbed = outcome(build(gpu, host))
        faults = Faults(seed=5, broken=0.2)
        with build(gpu, host) as trainer, pytest.raises(SpillError, match="failed"):
            trainer.fit(epochs=2, eval_every=0)
        assert not fake.opened
        faults = Faults(seed=6, short=0.2, interrupted=0.1)
        assert_same(outcome(build(gpu, host)), undisturbed)


# ---- whether the checks would see it -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "method"),
    ordinary(product(("gcn", "gat"), ("await_read", "_behind")), ("gcn", "await_read"), ("gat", "_behind")),
)
def test_an_executor_that_forgets_an_event_is_seen(
    name: str,
    method: str,
    store: Store,
    least: Least,
    tmp_path: Path,
    device: FakeDevice,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The comparisons above mean something: without these waits there is a race (test_device_workspace: any wait)."""
    build = on_device(MODELS[name], store, tmp_path, slab_columns=16)
    gpu, host = least(name, slab_columns=16)
    trainer = build(int(1.2 * gpu), int(1.2 * host))
    nothing = [] if method == "_behind" else None
    monkeypatch.setattr(DeviceWorkspace, method, lambda self, which: nothing)
    with trainer, pytest.raises(Race):
        trainer.fit(epochs=2, eval_every=0)
