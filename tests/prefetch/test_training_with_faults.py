# SPDX-License-Identifier: Apache-2.0
"""On a disk that misbehaves training gives the undisturbed losses or one line, never something in between."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch_geometric.nn.models import GraphSAGE

import ooc
from ooc.errors import OocError
from ooc.prefetch.engine import Engine
from ooc.prefetch.engines.direct import BufferedEngine
from ooc.storage.store import Store
from tests.exactness.comparison import tuned_trainer
from tests.examples import examples
from tests.prefetch.faults import Faults, FaultyCalls, faulty_engine
from tests.prefetch.held import assert_no_more_held, held

EPOCHS = 2
ONE_LINE = re.compile(r"(?P<matrix>\S+): (reading|writing) (?P<file>.+) at byte (?P<offset>\d+) failed: .+")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    path = tmp_path_factory.mktemp("faults") / "graph.ooc"
    return ooc.convert("synthetic:nodes=3000,edges=12000,features=30,classes=4,seed=3", path)


def losses(store: Store, folder: Path) -> list[float]:
    torch.manual_seed(0)
    model = GraphSAGE(30, 24, 3, 4)
    budgets = {"gpu_budget": "800K", "host_budget": "100K"}
    with tuned_trainer(model, store, **budgets, device="cpu", spill_dir=folder, threads=1, tile_rows=64) as trainer:
        records = trainer.fit(epochs=EPOCHS, eval_every=0)
    assert records[0].ssd_write_bytes > 0
    return [record.loss for record in records]


@pytest.fixture(scope="module")
def undisturbed(store: Store, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses(store, tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> list[Faults]:
    """The faults that the next trainer's disk has: the last of this list."""
    faults: list[Faults] = []

    def make() -> Engine:
        if faults[-1].wrong:
            return BufferedEngine(calls=FaultyCalls(faults[-1]))
        return faulty_engine(faults[-1], depth=8, bulk_depth=4, piece_bytes=64 << 10)

    monkeypatch.setattr("ooc.engine.runtime.choose_engine", lambda *_, **__: (make(), "a test"))
    return faults


rates = st.sampled_from([0.0, 0.0, 0.01, 0.2])


@settings(max_examples=examples(5), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 1 << 30),
    short=rates,
    interrupted=rates,
    late=st.sampled_from([0.0, 0.02]),
    broken=st.sampled_from([0.0, 0.0, 0.02, 0.3]),
    full=st.sampled_from([0.0, 0.0, 0.02, 0.3]),
)
def test_the_same_losses_or_one_line(
    store: Store,
    undisturbed: list[float],
    disk: list[Faults],
    tmp_path: Path,
    seed: int,
    short: float,
    interrupted: float,
    late: float,
    broken: float,
    full: float,
) -> None:
    """Short reads, EIO, ENOSPC, signals and spikes of latency at random; no thread, descriptor or file is left."""
    disk.append(
        Faults(seed=seed, short=short, interrupted=interrupted, late=late, late_s=0.005, broken=broken, full=full)
    )
    before = held()
    try:
        assert losses(store, tmp_path) == undisturbed
    except OocError as error:
        assert broken or full, error
        told = ONE_LINE.fullmatch(str(error))
        assert told is not None, error
        assert str(tmp_path) in told["file"] or str(store.path) in told["file"]
    assert_no_more_held(before)
    assert list(tmp_path.iterdir()) == []


def test_faults_that_can_be_ridden_out_are(
    store: Store, undisturbed: list[float], disk: list[Faults], tmp_path: Path
) -> None:
    """Nothing but delays, interruptions and short results, many of them."""
    disk.append(Faults(seed=5, short=0.5, interrupted=0.3, late=0.05, late_s=0.005))
    assert losses(store, tmp_path) == undisturbed
    assert disk[-1].struck > 50


def test_other_bytes_than_were_stored_are_never_computed_with(
    store: Store, undisturbed: list[float], disk: list[Faults], tmp_path: Path
) -> None:
    """One bit of one request in 300, of the store's arrays and of what was spilled: every one is told. Which requests
    these are goes by how threads come to the disk, so it is tried until several matrices had some."""
    told = set[str]()
    for seed in range(100):
        if seed >= examples(4) and len(told) > 2:
            break
        disk.append(Faults(seed=seed, wrong=1 / 300))
        try:
            assert losses(store, tmp_path) == undisturbed
            assert disk[-1].struck == 0
        except OocError as error:
            assert disk[-1].struck > 0
            told.add(str(error).partition(":")[0])
            # When a block is read first its checksum is not known yet; what is no node's index is found all the same.
            assert "returns other bytes" in str(error) or "is damaged; ooc verify" in str(error)
    assert len(told) > 2, "of several matrices"


@pytest.mark.usefixtures("undisturbed")  # libraries start threads of theirs in a process's first training
@pytest.mark.parametrize(("faults", "verb"), [({"broken": 1.0}, "reading"), ({"full": 1.0}, "writing")])
def test_a_dead_disk_is_one_line(
    store: Store, disk: list[Faults], tmp_path: Path, faults: dict[str, float], verb: str
) -> None:
    """The first request that fails ends the run."""
    disk.append(Faults(**faults))
    before = held()
    with pytest.raises(OocError, match=rf"\S+: {verb} .* at byte \d+ failed: "):
        losses(store, tmp_path)
    assert_no_more_held(before)
    assert list(tmp_path.iterdir()) == []
