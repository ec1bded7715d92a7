# SPDX-License-Identifier: Apache-2.0
"""Several processes train by sampled batches what one does, bit for bit; one that goes is named."""

import copy
import os
import signal
import socket
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch_geometric.nn.models import GraphSAGE

import ooc
from ooc.ranks import Ranks, RunningStatistics, group
from ooc.storage.store import Store
from ooc.train.batched.batches import SampledTrainer, Sampling
from tests.examples import thorough
from tests.graphs import GraphCase, random_data
from tests.processes import together

_CASE = GraphCase(nodes=300, edges=1800, features=9, self_loops=15, duplicates=20, isolated=5)
_SAMPLING = Sampling(fanouts=[4, 3], batch_size=12, accumulate=4)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return ooc.convert(random_data(_CASE), tmp_path_factory.mktemp("ranks") / "g.ooc")


def _model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return GraphSAGE(9, 8, 2, 4, norm="batch_norm", dropout=0.5)


@pytest.mark.parametrize("compute_dtype", thorough(["float32", "bfloat16"], "bfloat16"))
def test_results_do_not_depend_on_the_number_of_processes(store: Store, tmp_path: Path, compute_dtype: str) -> None:
    """Steps of four batches, the last one of fewer; what is not the first's begins as the first's."""

    def work(rank: int, epochs: int = 2, resume: bool = False, out: str = "") -> dict[str, Any]:
        model = _model(seed=rank)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        options: dict[str, Any] = {"memory": "100M", "optimizer": optimizer, "compute_dtype": compute_dtype}
        with SampledTrainer(model, store, _SAMPLING, out=tmp_path / out if out else None, **options) as trainer:
            records = trainer.fit(epochs, resume=resume, progress=False)
        return {
            "loss": [one.loss for one in records],
            "valid": [one.valid_score for one in records],
            **model.state_dict(),
        }

    (alone,) = together(1, tmp_path, work)
    assert len(alone["loss"]) == 2 and alone["loss"][0] != alone["loss"][1]
    if compute_dtype == "float32":  # begun by two, gone on with by three
        begun = together(2, tmp_path, lambda rank: work(rank, epochs=1, out="run"))[0]
        found = together(3, tmp_path, lambda rank: work(rank, epochs=2, out="run", resume=True))
        found = [one | {name: begun[name] + one[name] for name in ("loss", "valid")} for one in found]
    else:
        found = together(2, tmp_path, work)
    for one in found:
        assert one.keys() == alone.keys()
        for name, value in alone.items():
            assert torch.equal(torch.as_tensor(one[name]), torch.as_tensor(value)), name


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who does not answer is found out within a second."""
    monkeypatch.setattr(group, "BEAT_S", 0.1)
    monkeypatch.setattr(group, "SILENT_BEATS", 8)


def test_a_process_that_is_slow_is_waited_for_and_one_that_is_stopped_is_named(tmp_path: Path, _soon: None) -> None:
    def work(rank: int) -> tuple[str, bool]:
        ranks = Ranks.of_environment()
        (tmp_path / str(rank)).write_text(str(os.getpid()))
        until = time.monotonic() + 1.2
        while rank == 1 and time.monotonic() < until:  # and holds the interpreter
            pass
        ranks.gathered(torch.zeros(3))
        if rank == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(ooc.RankError) as raised:
            ranks.gathered(torch.zeros(3))
        if rank == 0:
            os.kill(int((tmp_path / "2").read_text()), signal.SIGKILL)
        return str(raised.value), raised.value.is_told

    first, second, gone = together(3, tmp_path, work)
    assert gone is None
    assert first[0] == second[0] and "rank 2 has not answered" in first[0]
    assert sorted([first[1], second[1]]) == [False, True]


def test_a_process_that_never_starts_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torchrun: the first keeps the store of all."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        about = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "3"}
    for name, value in about.items():
        monkeypatch.setenv(name, value)

    def work(rank: int) -> tuple[str, bool]:
        os.environ["RANK"] = str(rank)
        if rank == 1:
            os._exit(0)
        with pytest.raises(ooc.RankError) as raised:
            Ranks.of_environment(timedelta(seconds=2))
        return str(raised.value), raised.value.is_told

    first, _, third = together(3, tmp_path, work, meet=False)
    assert first == ("rank 1 has not started within 2 s", False) and third is not None


@pytest.mark.parametrize("said", [{}, {"RANK": "x"}, {"WORLD_SIZE": "many", "RANK": "0"}])
def test_who_is_where_cannot_be_told_is_one_line(said: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ({"WORLD_SIZE": "2"} | said).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ooc.RankError, match="cannot meet as RANK, WORLD_SIZE and MASTER_ADDR say: "):
        Ranks.of_environment(timedelta(seconds=0.5))


def test_who_has_failed_is_named_while_a_device_sends(tmp_path: Path, _soon: None) -> None:
    """NCCL's group ends where it is waited for in vain: it is asked, beat by beat, and ended by who gives up."""

    class Sending:
        """What never ends."""

        aborted = 0

        def is_completed(self) -> bool:
            return False

        def wait(self, timeout: timedelta) -> None:
            raise AssertionError("a time to wait for it")

        def abort(self) -> None:
            self.aborted += 1

    def work(rank: int) -> tuple[str, int]:
        ranks, sending = Ranks.of_environment(), Sending()
        place = torch.device("cpu", 0)
        linked = ranks.linked("gloo", rank, place, 10**6, lambda: 0)
        assert linked.linked("gloo", rank, place, 10**6, lambda: 0) is linked is Ranks.of_environment()
        assert linked.linked("", rank, place, 10**6, lambda: 0).direct is None
        assert linked.linked("gloo", 7, place, 10**6, lambda: 0).direct is None
        linked.direct.abort()
        if rank == 1:
            ranks.failed()
            time.sleep(1)
            return "", 0
        stuck = replace(linked, direct=sending)
        with pytest.raises(ooc.RankError) as raised:
            stuck.directly.wait(sending)
        stuck.failed()
        return str(raised.value), sending.aborted

    first, _, third = together(3, tmp_path, work)
    assert first == third == ("rank 1 has failed", 1)


def test_a_process_that_goes_is_named(tmp_path: Path, _soon: None) -> None:
    def work(rank: int) -> str:
        ranks = Ranks.of_environment()
        assert ranks.from_first(lambda: "as the first says") == "as the first says"
        rates = {int(rate) for rate in ranks.gathered(torch.tensor([ranks.measured_link()]))}
        assert len(rates) == 1 and min(rates) > 1000
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(ooc.RankError) as raised:
            ranks.gathered(torch.zeros(3))
        return str(raised.value)

    first, gone, third = together(3, tmp_path, work)
    assert gone is None
    assert first == third == "rank 1 has gone or does not answer"


def test_processes_that_are_started_anew_meet_by_the_same_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``torchrun --max-restarts`` starts them: where those of before listened is still in its store."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    about = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
    for name, value in (about | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, value)

    def work(rank: int) -> list[float]:
        os.environ["RANK"] = str(rank)
        return [float(found) for found in Ranks.of_environment().gathered(torch.tensor([rank + 1.0]))]

    for start in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", start)
        assert together(2, tmp_path, work, meet=False) == [[1.0, 2.0]] * 2


def test_what_a_device_is_sent_is_not_copied_from_it(tmp_path: Path) -> None:
    """Of a tensor of the meta device there is nothing to copy."""

    def work(rank: int) -> str:
        ranks, place = Ranks.of_environment(), ("cpu", "meta")[rank]
        ranks.broadcast(torch.ones(3, device=place), 0)
        ranks.send_between(torch.ones(3, device=place), 0, 1)
        return place

    assert together(2, tmp_path, work) == ["cpu", "meta"]


def test_where_one_fails_all_end_and_one_says_why(tmp_path: Path) -> None:
    def work(rank: int) -> list[Any]:
        ranks, found = Ranks.of_environment(), []

        def fail() -> None:
            if rank == 1:
                raise ooc.BudgetError("too little")

        def fail_later() -> None:
            if rank == 0:
                ranks.failed()
                raise ooc.StoreError("damaged")
            ranks.gathered(torch.zeros(3))

        for failing in (lambda: ranks.in_all(fail), fail_later):
            with pytest.raises(ooc.OocError) as raised:
                failing()
            found.append((type(raised.value).__name__, getattr(raised.value, "is_told", False)))
        return found

    told = ("RankError", True)
    assert together(2, tmp_path, work) == [[told, ("StoreError", False)], [("BudgetError", False), told]]


def test_a_batch_that_is_interrupted_leaves_statistics_as_they_were() -> None:
    norm = nn.BatchNorm1d(3)
    norm(torch.randn(5, 3))
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    statistics = RunningStatistics(norm, Ranks())
    with pytest.raises(KeyboardInterrupt), statistics.of_batch():
        norm(torch.randn(5, 3))
        raise KeyboardInterrupt
    assert norm.momentum == 0.1
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())
    x, twin = torch.randn(5, 3), copy.deepcopy(norm)
    with statistics.of_batch():
        norm(x)
    statistics.fold(1)
    twin(x)
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(norm.state_dict()[name], value)
    with pytest.raises(ooc.ModelError, match="called twice"), statistics.of_batch():
        norm(norm(x))


def test_a_step_has_a_batch_for_every_process(store: Store, tmp_path: Path) -> None:
    def work(rank: int) -> str:
        with pytest.raises(ooc.OptionError) as raised:
            SampledTrainer(_model(0), store, Sampling(fanouts=[2, 2], batch_size=12), memory="100M")
        return str(raised.value)

    assert all("give accumulate=2 or more" in said for said in together(2, tmp_path, work))
