# SPDX-License-Identifier: Apache-2.0
"""Several processes with a device each: the bits of one process on the CPU, bytes as forecast, and no race."""

import re
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch

from ooc.engine import exchange
from ooc.engine.executor import RowPassRun
from ooc.errors import BudgetError, OptionError
from ooc.plan.program import received
from ooc.ranks import Ranks
from ooc.sizes import parse_size
from ooc.storage.store import Store
from ooc.train import resources, sharing
from ooc.train.resources import CPU, Resources
from ooc.train.trainer import Trainer
from tests.engine.fake_device import FakeDevice, FakeSide
from tests.engine.test_device import MODELS, Build, builder, on_device, use
from tests.exactness.comparison import store_of
from tests.examples import cases
from tests.graphs import GraphCase, random_data
from tests.plan.workloads import WITH_DEVICE_MEMORY
from tests.processes import together

_CASE = GraphCase(nodes=130, edges=600, features=20, self_loops=15, isolated=15, duplicates=40, unlabelled=30)
_EPOCHS = 2
_NAMES = {
    "halo": cases(["layers that run as they are"], ["gcn", "gatv2", "layers that run as they are"]),
    "columns": cases(["gin with batch norm", "gat"], ["gin with batch norm", "gat", "sage of maxima"]),
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    data = random_data(_CASE, dtype=torch.float32)
    sources, targets = data.edge_index
    data.edge_index = torch.stack([(targets + sources % 9 - 4).clamp(0, _CASE.nodes - 1), targets])
    return store_of(data, tmp_path_factory.mktemp("store"))


def on_the_cpu(names: Sequence[str], store: Store, folder: Path) -> dict[str, dict[str, Any]]:
    return {name: trained(builder(MODELS[name], store, folder, threads=1)()) for name in names}


def trained(trainer: Trainer, form: str = "halo") -> dict[str, Any]:
    with trainer:
        records = trainer.fit(_EPOCHS, progress=False)
        plan = trainer.plan
        program = "train_and_score" if "train_and_score" in plan.programs else "train"
        found = {"losses": [one.loss for one in records], "scores": trainer.evaluate()}
        if trainer.ranks.count > 1:
            titles = [item.title for item in plan.programs[program]]
            assert any("columns sharded" in title for title in titles) == (form == "columns")
            assert records[-1].received_bytes == plan.received_bytes(program) > 0
            assert records[-1].ssd_write_bytes == plan.bytes_written(program)
            forecast = trainer._planned.plans_by_rank(trainer.limits, trainer.hardware)[trainer.ranks.rank][1]
            planned, run = (
                (one.device_peak_bytes, one.host_peak_bytes, one.received_bytes(program)) for one in (forecast, plan)
            )
            assert planned == run
        weights = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    return found | weights


def assert_same(found: dict[str, Any] | None, alone: dict[str, Any], about: Any) -> None:
    assert found is not None and found.keys() == alone.keys(), about
    for name, value in alone.items():
        same = torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value
        assert same, (about, name)


def least(build: Build) -> tuple[int, int]:
    """The least budgets that errors name, the host's for all processes; all of them ask."""
    gpu, host = 1, 1
    for _ in range(5):
        try:
            build(gpu, host).close()
        except BudgetError as error:
            named = {kind: parse_size(size) for kind, size in re.findall(r"(gpu|host)_budget='(\d+[KMG]?)", str(error))}
            gpu, host = named.get("gpu", gpu), named.get("host", host)
        else:
            return gpu, host
    raise AssertionError(f"budgets of {gpu} and {host} were named as enough and are not")


@pytest.mark.parametrize(("form", "way", "count"), [("halo", "device", 3), ("columns", "host", 2)])
def test_results_are_those_of_one_process_on_the_cpu(
    form: str, way: str, count: int, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few rows at a time, in several parts; of a graph whose edges lead to rows nearby. Gloo, by a group of its own,
    sends from device to device."""
    monkeypatch.setattr(exchange, "_AT_ONCE_BYTES", 1500)
    monkeypatch.setattr(received, "_PART_BYTES", 4000)

    def work(rank: int) -> dict[str, dict[str, Any]]:
        found = {}
        for name in _NAMES[form]:
            with FakeDevice(rank, eager=rank / 4, backend="gloo") as fake:
                use(fake, monkeypatch)
                build = on_device(MODELS[name], store, tmp_path, exchange=form, exchange_by=way)
                found[name] = trained(build(), form)
        return found

    for name in _NAMES[form]:  # what is traced here is not traced by each
        builder(MODELS[name], store, tmp_path, threads=1)().close()
    (alone,) = together(1, tmp_path, lambda rank: on_the_cpu(_NAMES[form], store, tmp_path))
    for rank, found in enumerate(together(count, tmp_path, work)):
        for name in alone:
            assert_same(found and found[name], alone[name], (name, rank))


def test_rows_are_packed_while_others_are_on_the_way(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two pieces at a time, of two pairs of buffers, and no more."""
    monkeypatch.setattr(exchange, "_AT_ONCE_BYTES", 500)

    def work(rank: int) -> set[int]:
        under_way, most = list[Any](), set[int]()
        with FakeDevice(rank) as fake, pytest.MonkeyPatch.context() as patched:
            use(fake, patched)
            put, begin = FakeSide.put, Ranks.begin_all_to_all
            patched.setattr(
                Ranks, "begin_all_to_all", lambda *given: (under_way.append(given[1].data_ptr()), begin(*given))[1]
            )

            def putting(side: FakeSide, rows: Any, source: torch.Tensor) -> Any:
                most.add(len(under_way))
                assert under_way.pop(0) == source.data_ptr() not in under_way
                return put(side, rows, source)

            patched.setattr(FakeSide, "put", putting)
            with on_device(MODELS["gcn"], store, tmp_path, exchange="columns")() as trainer:
                under_way.clear()  # what was sent to find out what is to be
                trainer.fit(1, progress=False)
        return most

    assert together(2, tmp_path, work) == [{1, 2}] * 2


def test_slabs_and_blocks_by_way_of_the_disk(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the least memory, each GPU's and the host's, and never more on a device: slabs go to others as they come
    over the wire, or are sharded turn after turn. Rows stay shared out as they are at first, whoever is slow."""
    monkeypatch.setattr(exchange, "_AT_ONCE_BYTES", 60_000)
    monkeypatch.setattr(sharing, "_WORTH_PLANNING_S", inf)
    forms = dict(cases([("halo", "host")], [("halo", "host"), ("columns", "device")]))

    def work(rank: int) -> dict[str, dict[str, Any]]:
        found = {}
        for form, way in forms.items():
            with FakeDevice(rank, eager=0.3, backend="gloo") as fake:
                use(fake, monkeypatch)
                build = on_device(MODELS["gcn"], store, tmp_path, exchange=form, exchange_by=way, slab_columns=3)
                gpu, host = least(build)
                fake.tensors.weighing = True
                trainer = build(gpu, host)
                plan = trainer.plan
                assert plan.unrolled["train"].fill and plan.to_device_bytes and plan.ssd_write_bytes
                found[form] = trained(trainer, form)
                assert plan.arena_bytes < fake.tensors.peak_bytes <= gpu
        return found

    (alone,) = together(1, tmp_path, lambda rank: on_the_cpu(["gcn"], store, tmp_path))
    for found in together(2, tmp_path, work):
        for form in forms:
            assert_same(found and found[form], alone["gcn"], form)


def test_a_run_goes_on_with_more_devices(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(rank: int, epochs: int, resume: bool) -> list[float]:
        with FakeDevice(rank) as fake:
            use(fake, monkeypatch)
            with on_device(MODELS["gcn"], store, tmp_path, out=tmp_path / "run")() as trainer:
                return [one.loss for one in trainer.fit(epochs, resume=resume, progress=False)]

    (alone,) = together(1, tmp_path, lambda rank: on_the_cpu(["gcn"], store, tmp_path))
    begun = together(2, tmp_path, lambda rank: work(rank, 1, resume=False))
    gone_on = together(3, tmp_path, lambda rank: work(rank, 2, resume=True))
    assert [begun[0] + one for one in gone_on] == [alone["gcn"]["losses"]] * 3


def test_rows_go_from_gpu_to_gpu_where_that_is_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What that takes of a GPU is measured, and planned for."""
    free, rates = [10**9], {"cpu": 2 * 10**10}

    def measured(ranks: Ranks, place: torch.device = CPU, within_bytes: int = 0) -> int:
        if place != CPU:
            free[0] = 10**9 - 10**6 * (ranks.rank + 1)
        return rates[place.type]

    monkeypatch.setattr(Ranks, "measured_link", measured)
    monkeypatch.setattr(resources, "free_device_bytes", lambda device: free[0])

    def shared(
        rank: int, backend: str = "gloo", unit: int | None = None, **options: Any
    ) -> tuple[bool, int, int] | str:
        device = FakeDevice(rank if unit is None else unit, backend=backend)
        try:
            given = Resources.parse(device=device, hardware=WITH_DEVICE_MEMORY, **options)
            given = given.shared_with(Ranks.of_environment())
            return given.limits.is_direct, given.overhead_bytes, given.limits.link_bytes_per_s
        except OptionError as error:
            return str(error)

    def work(rank: int) -> dict[str, Any]:
        found = {
            "as fast as both wires": shared(rank),
            "given": shared(rank, link="3G"),
            "by the host": shared(rank, exchange_by="host"),
            "no library": shared(rank, backend="", exchange_by="device"),
            "one GPU": shared(rank, unit=7),
        }
        rates["meta"] = 10**6
        return found | {"slow": shared(rank), "forced": shared(rank, exchange_by="device")}

    assert WITH_DEVICE_MEMORY.wire is not None
    rates["meta"] = as_fast = int(WITH_DEVICE_MEMORY.wire.there_and_back_bytes_per_s) + 1
    first, second = together(2, tmp_path, work)
    refused = "exchange_by='device' takes a GPU for every process and torch with NCCL; leave it out, or give 'host'"
    by_host, taken = (False, 0, 2 * 10**10), 2_000_000
    expected = {
        "as fast as both wires": (True, taken, as_fast),
        "given": (True, taken, 3 * 10**9),
        "by the host": by_host,
        "no library": refused,
        "one GPU": by_host,
        "slow": by_host,
        "forced": (True, taken, 10**6),
    }
    assert first == second == expected


def test_a_device_that_is_slow_is_given_fewer_rows(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what devices take, not what they wait for the slow one."""
    monkeypatch.setattr(sharing, "_WORTH_PLANNING_S", 0.02)

    def work(rank: int) -> tuple[list[float], int, int]:
        with FakeDevice(rank) as fake, pytest.MonkeyPatch.context() as patched:
            use(fake, patched)
            with on_device(MODELS["gcn"], store, tmp_path, tile_rows=8, block_rows=8)() as trainer:
                before, compute = len(trainer.plan.share or ()), RowPassRun.compute

                def slowly(run: Any, task: Any) -> Any:
                    sleep(0.03 * (rank == 1))
                    return compute(run, task)

                patched.setattr(RowPassRun, "compute", slowly)
                losses = [one.loss for one in trainer.fit(2, progress=False)]
                return losses, before, len(trainer.plan.share or ())

    def on_cpu(rank: int) -> list[float]:
        with builder(MODELS["gcn"], store, tmp_path, tile_rows=8, block_rows=8, threads=1)() as trainer:
            return [one.loss for one in trainer.fit(2, progress=False)]

    (alone,) = together(1, tmp_path, on_cpu)
    first, slow = together(2, tmp_path, work)
    assert first[0] == slow[0] == alone
    assert slow[2] < slow[1] - 16 and first[2] == _CASE.nodes - slow[2]


@pytest.mark.parametrize(
    ("gpus", "shown", "said"),
    [
        (4, "", None),
        (1, "2", None),
        (2, "", "3 processes are to compute on a GPU each, and this machine has 2 GPUs; start as many, or give each"),
        (1, "", "this machine has 1 GPU"),
    ],
)
def test_each_process_has_a_gpu_of_its_own(
    gpus: int, shown: str, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = [0]
    for name, value in {"LOCAL_WORLD_SIZE": "3", "LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": shown}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(resources, "find_spec", lambda name: name)
    monkeypatch.setattr(resources, "Cuda", lambda index: index)
    stubs: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "device_count": lambda: gpus,
        "set_device": current.append,
        "current_device": lambda: current[-1],
    }
    for name, stub in stubs.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    if said is not None:
        with pytest.raises(OptionError, match=said):
            resources.find_device("cuda")
    else:
        assert resources.find_device("cuda") == (1 if gpus > 1 else 0)
