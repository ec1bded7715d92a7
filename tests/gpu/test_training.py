# SPDX-License-Identifier: Apache-2.0
"""``device="cuda"``: a GPU where there is one, otherwise the tests' device with the kernels in the interpreter."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data

import ooc
from ooc.engine import pull_run
from ooc.errors import BudgetError, StoreError
from ooc.kernels import aggregate, memory
from ooc.kernels.cuda.segments import EDGES_PER_SEGMENT, long_parts
from ooc.kernels.dropout import opaque as inner_dropout
from ooc.kernels.dropout import rows as dropout
from ooc.kernels.pulls import BY_DEVICE, Pulls
from ooc.model import graph
from ooc.model.layers import attention
from ooc.plan.hardware import UNMEASURED_DEVICE
from ooc.plan.layout import layout
from ooc.storage.store import Store
from ooc.train.trainer import Trainer
from tests.damage import seal
from tests.engine.fake_device import FakeDevice, lower_unwatched
from tests.engine.test_device import GatsOfFeatures
from tests.exactness.comparison import FLOOR, TOLERANCE, least_budgets, store_of, tuned_trainer
from tests.exactness.layers import AmongOthers, Cosine, principal, twice
from tests.exactness.reference import CustomCase, Epoch, ModelCase, Reference, disagreement, smooth_adam
from tests.exactness.test_edge_features import Gines, Transformers
from tests.exactness.test_inner_dropout import Among
from tests.examples import thorough
from tests.gpu.device import DEVICE, launch
from tests.graphs import GraphCase, random_data

pytestmark = pytest.mark.gpu

EPOCHS = 2
GRAPH = GraphCase(nodes=48, edges=130, features=12, self_loops=6, duplicates=8, train=0.2, unlabelled=25)
MODELS = {
    "gcn": ModelCase(kind="gcn", dropout=0.2),
    "sage": ModelCase(kind="sage", dropout=0.2),
    "sage of maxima": ModelCase(kind="sage", dropout=0.2, options={"aggr": "max"}),
    "gat": ModelCase(kind="gat", dropout=0.3, options={"heads": 2}),
    "gatv2": ModelCase(kind="gat", options={"heads": 2, "v2": True}),  # masks take the interpreter a minute
}
HUB_EDGES = EDGES_PER_SEGMENT + 8
_FEW_EDGES = 8
"""Of a part, for the interpreter's sake."""
FOR_COMPILED = pytest.mark.skipif(DEVICE.type != "cuda", reason="the interpreter would take a minute and a half")
WITH_FEATURES: dict[str, Callable[[int, int], nn.Module]] = {
    "transformer": Transformers,
    "gine": Gines,
    "gat and gatv2": GatsOfFeatures,
}
AS_THEY_ARE: dict[str, Callable[[int, int], nn.Module]] = {
    "self-loops of its own": twice(Cosine),
    "PNAConv": twice(principal),
    "among others": AmongOthers,
    "dropout inside": Among,
}


def copied(value: Any) -> Any:
    """Tensors of their own: the interpreter copies the whole memory of one to and fro."""
    if isinstance(value, Tensor):
        return value.clone()
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{f.name: copied(part) for f in fields(value) if isinstance(part := getattr(value, f.name), Tensor)}
        )
    return value


def on_copies(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def pulled(*given: Any, **named: Any) -> Any:
        return kernel(*map(copied, given), **{name: copied(value) for name, value in named.items()})

    return pulled


@contextmanager
def device(patched: pytest.MonkeyPatch) -> Iterator[None]:
    """What computes where there is no GPU: the kernels of a GPU, each of them one of the tests' device."""
    if DEVICE.type == "cuda":
        yield
        return
    with FakeDevice() as fake:
        of_gpu = BY_DEVICE["cuda"]()
        kernels = fake.pulls(Pulls(*(on_copies(getattr(of_gpu, pull.name)) for pull in fields(Pulls))))
        patched.setitem(BY_DEVICE, fake.place.type, lambda: kernels)
        for drawing in (dropout, inner_dropout):
            patched.setitem(drawing.BY_DEVICE, fake.place.type, fake.kernel(drawing.BY_DEVICE["cuda"]))
        patched.setattr("ooc.train.resources.find_device", lambda name: fake)
        lower_unwatched(patched)
        yield


@pytest.fixture(scope="module")
def data() -> Data:
    return random_data(GRAPH, dtype=torch.float32)


@pytest.fixture(scope="module")
def store(data: Data, tmp_path_factory: pytest.TempPathFactory) -> Store:
    return store_of(data, tmp_path_factory.mktemp("gpu"))


@pytest.fixture(scope="module")
def data_of_edges() -> Data:
    return random_data(replace(GRAPH, nodes=40, edges=80, edge_features=3), dtype=torch.float32)


def trainer_of(case: ModelCase, store: Store, folder: Path, **options: Any) -> Trainer:
    """Of a new model, with small tiles."""
    model = case.build(store.num_features, store.num_classes, dtype=torch.float32)
    return tuned_trainer(
        model,
        store,
        optimizer=smooth_adam(model),
        **({"spill_dir": folder, "tile_rows": 32} | options),
    )


def on_device(case: ModelCase, store: Store, folder: Path, **options: Any) -> Trainer:
    """With the least memory that will do there and on the host."""

    def build(gpu: int | str, host: int | str) -> Trainer:
        budgets: dict[str, Any] = {"gpu_budget": gpu, "host_budget": host}
        return trainer_of(case, store, folder, device="cuda", hardware=UNMEASURED_DEVICE, **budgets, **options)

    gpu, host = least_budgets(build)
    if DEVICE.type == "cuda":
        gpu = least_to_the_byte(lambda gpu: build(gpu, "1G"), gpu)
        _, host = least_budgets(lambda _, host: build(gpu, host))
    return build(gpu, host)


def least_to_the_byte(build: Callable[[int], Trainer], named: int) -> int:
    """The least GPU budget. ``named``, from an error's message, is rounded up to three digits: beside what CUDA takes
    for itself that is more than all data of a small graph, and nothing would go over the wire."""

    def fits(nbytes: int) -> bool:
        try:
            build(nbytes).close()
        except BudgetError:
            return False
        return True

    return bisect_left(range(named), True, lo=named * 98 // 100, key=fits)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="torch weighs what it takes of a GPU's memory only")
def test_torch_never_takes_more_of_the_gpu_than_the_least_budget(store: Store, tmp_path: Path) -> None:
    """Arena, parameters, temporaries, workspaces, and what the allocator rounds up to."""
    with on_device(MODELS["sage"], store, tmp_path) as trainer:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        trainer.fit(epochs=EPOCHS, eval_every=0)
        assert torch.cuda.max_memory_reserved() <= trainer.limits.device_bytes


@pytest.mark.parametrize("name", thorough(MODELS, "sage", "sage of maxima", "gatv2"))
def test_losses_and_gradients_are_pygs(
    name: str, data: Data, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout on edges and rows included; and the bytes over the wire are the plan's. GAT's heads are pulled in slices,
    as wide ones are; whole they are below."""
    monkeypatch.setattr(attention, "_WIDEST_SLICE", 2)
    monkeypatch.setattr(attention, "_NARROWEST_SLICE", 1)
    compare(MODELS[name], data, store, tmp_path, monkeypatch)


def cut_every(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Let parts of rows be of so many edges at most."""
    monkeypatch.setattr(graph, "long_parts", partial(long_parts, most=most))
    for module in (launch, memory, pull_run):
        monkeypatch.setattr(module, "EDGES_PER_SEGMENT", most)


@pytest.mark.parametrize("name", thorough(["sage", "sage of maxima", pytest.param("gat", marks=FOR_COMPILED)], "sage"))
def test_rows_that_are_cut(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a hub that half of all edges lead to, in the second tile, and of one that they come from: their parts come
    with the offsets of their tiles. In the interpreter parts are of few edges."""
    if DEVICE.type != "cuda":
        cut_every(monkeypatch, _FEW_EDGES)
    hub_edges = HUB_EDGES if DEVICE.type == "cuda" else _FEW_EDGES + 3
    data = random_data(replace(GRAPH, nodes=40, edges=80), dtype=torch.float32)
    sources, targets = torch.randint(0, 40, (2, hub_edges), generator=torch.Generator().manual_seed(0))
    edges = [data.edge_index, torch.stack((sources, torch.full_like(sources, 35)))]
    data.edge_index = torch.cat((*edges, torch.stack((torch.full_like(targets, 3), targets))), dim=1)
    compare(MODELS[name], data, store_of(data, tmp_path), tmp_path, monkeypatch)


@pytest.mark.parametrize("name", thorough(["gcn", "sage of maxima", "gat"], "gat"))
def test_rows_whose_edges_come_in_pieces(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a hub in the second tile, and of one that edges come from, within the least memory; and losses are those of
    all edges at once to the bit. Parts are of few edges, for the interpreter's sake."""
    cut_every(monkeypatch, most := _FEW_EDGES)
    data = random_data(replace(GRAPH, nodes=40, edges=40, duplicates=4), dtype=torch.float32)
    sources, targets = torch.randint(0, 40, (2, 30), generator=torch.Generator().manual_seed(0))
    edges = [data.edge_index, torch.stack((sources, torch.full_like(sources, 35)))]
    data.edge_index = torch.cat((*edges, torch.stack((torch.full_like(targets, 3), targets))), dim=1)
    store, case = store_of(data, tmp_path), MODELS[name]
    losses = []
    for at_once in (3 * most, 1 << 20):
        monkeypatch.setattr(layout, "_MOST_EDGES_AT_ONCE", at_once)
        with device(monkeypatch), on_device(case, store, tmp_path) as trainer:
            steps = trainer.plan.unrolled["train"].steps
            assert any(step.edges for step in steps) is (at_once < 100)
            losses.append(compare_epochs(case, trainer, data))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("name", thorough(WITH_FEATURES, "gat and gatv2"))
def test_features_of_edges(name: str, data_of_edges: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In scores and messages, of added self-loops too, and the gradients of what maps them."""
    store = store_of(data_of_edges, tmp_path)
    compare(CustomCase(make=WITH_FEATURES[name]), data_of_edges, store, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", thorough(AS_THEY_ARE, "self-loops of its own", "among others"))
def test_layers_that_run_as_they_are(
    name: str, data: Data, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the same bits again; with what memory there is, since to try how little would do takes long."""
    case, enough = CustomCase(make=AS_THEY_ARE[name]), {"gpu_budget": "1G", "host_budget": "1G"}
    losses = []
    for _ in range(2 if DEVICE.type == "cuda" else 1):
        with device(monkeypatch), trainer_of(case, store, tmp_path, device="cuda", **enough) as trainer:
            losses.append(compare_epochs(case, trainer, data))
    assert losses[0] == losses[-1]


def compare(case: ModelCase, data: Data, store: Store, folder: Path, patched: pytest.MonkeyPatch) -> None:
    """Some epochs and the scores behind them, with PyG's."""
    with device(patched), on_device(case, store, folder) as trainer:
        compare_epochs(case, trainer, data)
        assert trainer.plan.to_device_bytes > 0


def compare_epochs(case: ModelCase, trainer: Trainer, data: Data) -> list[float]:
    """The losses. The interpreter takes long for what is more than sums: one epoch of that will do."""
    reference, losses = Reference(case, trainer.model, data, smooth_adam), []
    epochs = EPOCHS if DEVICE.type == "cuda" or case in (MODELS["gcn"], MODELS["sage"]) else 1
    for epoch in range(1, epochs + 1):
        expected = reference.train()
        (record,) = trainer.fit(epochs=1, eval_every=0)
        losses.append(record.loss)
        gradients = {name: p.grad.cpu() for name, p in trainer.model.named_parameters() if p.grad is not None}
        buffers = {name: buffer.cpu() for name, buffer in trainer.model.named_buffers()}
        found = Epoch(record.loss, gradients, buffers)
        difference, whose = disagreement(found, expected, floor=FLOOR[torch.float32])
        assert difference <= TOLERANCE[torch.float32], f"epoch {epoch}: {whose} differs by {difference:.1e}"
    assert epochs == 1 or record.to_device_bytes == trainer.plan.to_device_bytes
    scores, expected_scores = trainer.evaluate(), reference.accuracies()
    assert {name: scores[name] for name in expected_scores} == expected_scores
    return losses


@pytest.mark.parametrize("name", thorough(["sage", "sage of maxima", "gat"], "gat"))
def test_in_hop_order_losses_are_those_of_the_cpu(
    name: str, data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not every row is computed, and neighbours beyond them are passed over."""
    hopped = ooc.convert(data, tmp_path / "hop.ooc", dtype="float32", order="hop")
    case = replace(MODELS[name], dropout=0.0)
    with trainer_of(case, hopped, tmp_path) as trainer:
        expected = [record.loss for record in trainer.fit(epochs=EPOCHS, eval_every=0)]
    with device(monkeypatch), on_device(case, hopped, tmp_path) as trainer:
        found = [record.loss for record in trainer.fit(epochs=EPOCHS, eval_every=0)]
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", thorough(["gcn", "sage"], "gcn"))
def test_intermediates_in_bfloat16_are_summed_in_float32(
    name: str, data: Data, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row's own with its neighbours', and rounded once: to the even number where two are as near, for which the
    CPU is made to round that way. Rounded once more, losses are some 1e-4 apart."""
    case, narrow = replace(MODELS[name], dropout=0.0), {"spill_dtype": "bfloat16"}
    pull = aggregate.pull
    with monkeypatch.context() as patched, trainer_of(case, store, tmp_path, **narrow) as trainer:
        patched.setattr(aggregate, "pull", lambda source, *lists: pull(source.float(), *lists).to(source.dtype))
        expected = [record.loss for record in trainer.fit(epochs=EPOCHS, eval_every=0)]
    with device(monkeypatch), on_device(case, store, tmp_path, **narrow) as trainer:
        found = [record.loss for record in trainer.fit(epochs=EPOCHS, eval_every=0)]
    assert found == pytest.approx(expected, rel=1e-6 if DEVICE.type == "cpu" else 1e-3)


@pytest.mark.parametrize("name", thorough(["sage", "sage of maxima", "gat"], "sage of maxima"))
def test_damage_is_told_before_any_weight_is_stepped(
    name: str, data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels do not follow a neighbour that is none, and the program's end says so."""
    damaged = store_of(data, tmp_path)
    (extent,) = damaged.topology("in")[1].extents(100, 101)
    with extent.path.open("r+b") as file:
        file.seek(extent.offset)
        file.write((10_000).to_bytes(extent.nbytes, "little"))
    seal(damaged.topology("in")[1])
    with device(monkeypatch), on_device(replace(MODELS[name], dropout=0.0), damaged, tmp_path) as trainer:
        before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
        with pytest.raises(StoreError, match=r"in/indices of the store .* is damaged"):
            trainer.fit(epochs=1, eval_every=0)
        trainer.close()
    assert all(torch.equal(one, other) for one, other in zip(before, trainer.model.parameters(), strict=True))
