# SPDX-License-Identifier: Apache-2.0
"""Processes on several machines train what one process does, each machine with what is its own; what differs is
refused, and a machine that is gone is named. Machines are namespaces of this one, for who may make some."""

import copy
import importlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch_geometric.nn.models import GraphSAGE

import ooc
from ooc.ranks import Ranks, group
from ooc.ranks.group import Machines, Place, check_reached
from ooc.train.setup import Tuning
from tests.examples import thorough
from tests.graphs import GraphCase, random_data
from tests.processes import together
from tests.tools.loaded import TOOLS

_SILENT = "has not answered for 1 s", "has gone or does not answer"
_CASE = GraphCase(nodes=150, edges=900, features=9, self_loops=15, duplicates=20, isolated=5)


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who does not answer is found out within a second."""
    monkeypatch.setattr(group, "BEAT_S", 0.1)
    monkeypatch.setattr(group, "SILENT_BEATS", 10)


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Two machines; both have a copy of one store."""
    monkeypatch.setattr(sys, "path", [str(TOOLS), *sys.path])
    machines = importlib.import_module("machines")
    ooc.convert(random_data(_CASE), tmp_path / "g.ooc", dtype="float64")
    try:
        with machines.machines(tmp_path / "machines", ["alpha", "beta"]) as found:
            for one in found:
                shutil.copytree(tmp_path / "g.ooc", one.folder / "g.ooc")
            yield found
    except machines.MachinesUnavailable as why:
        pytest.skip(str(why))


def _on(machines: list[Any], folder: Path, work: Callable[[int], Any]) -> list[Any]:
    """What ``work`` gives processes that run on these machines, by rank."""

    def there(rank: int) -> Any:
        machines[rank].enter()
        os.environ |= {"MASTER_ADDR": machines[0].name, "MASTER_PORT": "29500"}
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(len(machines))}
        return work(rank)

    return together(len(machines), folder, there, meet=False)


def _trained(store: str | Path, epochs: int, **options: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = GraphSAGE(9 + options.get("embedding", 0), 8, 2, 4).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    resume = options.pop("resume", False)
    tuning = Tuning(tile_rows=8)
    with ooc.Trainer(model, store, optimizer=optimizer, _tuning=tuning, **options) as trainer:
        records = trainer.fit(epochs, progress=False, resume=resume)
        limits = trainer.limits
    kept = [] if not Path(store).exists() else [one.name for one in Path(store).glob("agg/*_float64")]
    scored = {one.epoch: (one.loss, one.valid_score, one.test_score) for one in records}
    return {"scored": scored, "weights": model.state_dict(), "limits": limits, "kept": kept}


def test_each_machine_has_files_threads_and_memory_of_its_own(pair: list[Any], tmp_path: Path) -> None:
    """Two processes on one, one on the other, whose store lies elsewhere; then the other way round, going on with a run
    that only the first machine has, where only its store has the first aggregation."""
    alpha, beta = pair
    alone = _trained(tmp_path / "g.ooc", 3, memory="300M")
    (beta.folder / "g.ooc").rename(beta.folder / "other.ooc")

    def work(rank: int, epochs: int, machines: list[Any], **options: Any) -> dict[str, Any]:
        name, memory, threads = ("g.ooc", "400M", 1) if machines[rank] is alpha else ("other.ooc", "150M", 2)
        return _trained(name, epochs, memory=memory, threads=threads, out="run", **options)

    placed = [alpha, alpha, beta]
    begun = _on(placed, tmp_path, lambda rank: work(rank, 2, placed))
    assert [one["kept"] for one in begun] == [["mean_float64"]] * 3
    assert all(one["limits"].memory_bytes == begun[0]["limits"].memory_bytes <= 150_000_000 for one in begun)
    shutil.rmtree(beta.folder / "other.ooc" / "agg")
    assert not (beta.folder / "run").exists()
    placed = [alpha, beta, beta]
    gone_on = _on(placed, tmp_path, lambda rank: work(rank, 3, placed, resume=True))
    for before, after in zip(begun, gone_on, strict=True):
        assert before["scored"] | after["scored"] == alone["scored"]
        for name, weight in alone["weights"].items():
            assert torch.equal(after["weights"][name], weight), name


def test_a_store_that_is_another_one_is_refused_in_a_line_on_each_machine(pair: list[Any], tmp_path: Path) -> None:
    """Another order of the same edges, too; what was converted anew to the same bytes is the same."""
    data = random_data(_CASE)
    shutil.rmtree(pair[1].folder / "g.ooc")
    ooc.convert(copy.deepcopy(data), pair[1].folder / "g.ooc", dtype="float64")
    ooc.convert(data, pair[1].folder / "hop.ooc", dtype="float64", order="hop")

    def work(rank: int) -> list[Any]:
        alike = _trained("g.ooc", 1, memory="300M")["scored"]
        found: list[Any] = [alike[1]]
        with pytest.raises(ooc.OocError) as raised:
            _trained("hop.ooc" if rank == 1 else "g.ooc", 1, memory="300M")
        return [*found, str(raised.value), getattr(raised.value, "is_told", False)]

    placed = [pair[0], pair[1], pair[1], pair[0]]
    first, second, third, fourth = _on(placed, tmp_path, work)
    assert first[0] == second[0] == third[0] == fourth[0]
    assert second[1].startswith("the store hop.ooc is not that of rank 0 (alpha): it differs in order, in/indices, ")
    assert [one[2] for one in (first, second, third, fourth)] == [False, False, True, True]
    assert first[1] == f"rank 1 (beta) has failed: {second[1]}"


def test_an_embedding_needs_a_run_that_all_machines_share(pair: list[Any], tmp_path: Path) -> None:
    """Files that another machine makes under the same name are others."""

    def work(rank: int, out: Path, store: str | Path = "g.ooc") -> Any:
        try:
            return _trained(store, 2, memory="300M", embedding=3, out=out)["scored"]
        except ooc.OocError as error:
            return str(error)

    own = _on(pair, tmp_path, lambda rank: work(rank, Path("run")))
    assert own[1].startswith("run/embedding is not that of rank 0 (alpha), and all write to it; give an out= that ")
    (alone,) = together(1, tmp_path, lambda rank: work(rank, tmp_path / "alone", tmp_path / "g.ooc"))
    assert _on(pair, tmp_path, lambda rank: work(rank, tmp_path / "run")) == [alone] * 2


@pytest.mark.parametrize("gone", thorough([0, 2], 2))
def test_a_machine_that_nothing_reaches_any_more_is_named_on_both(
    pair: list[Any], tmp_path: Path, _soon: None, gone: int
) -> None:
    """Also that of the first process, which keeps the store; having all others know waits for nobody."""

    def work(rank: int) -> tuple[str, bool]:
        ranks = Ranks.of_environment()
        ranks.gathered(torch.zeros(3))
        if rank == gone:
            pair[gone // 2].unplug()
        with pytest.raises(ooc.RankError) as raised:
            ranks.gathered(torch.zeros(3))
        ranks.failed()
        if not rank:  # the store goes with it
            sleep(1)
        return str(raised.value), raised.value.is_told

    first, second, third = _on([pair[0], pair[0], pair[1]], tmp_path, work)
    assert {first[0], second[0]} <= {f"rank 2 (beta) {what}" for what in _SILENT} and first[0] == second[0]
    assert sorted([first[1], second[1]]) == [False, True]
    said = "the process that keeps the store of all others, torchrun's or rank 0 (alpha), does not answer"
    assert third == (said, False)


def test_who_has_gone_is_named_where_the_store_has_gone_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keeper ends like all others; this process says what it knows, and raises nothing while it fails."""

    class Gone:
        def __getattr__(self, name: str) -> Any:
            def answer(*arguments: Any) -> Any:
                raise RuntimeError("Connection reset by peer")

            return answer

    machines = Machines([Place("alpha", "1"), Place("alpha", "1"), Place("beta", "2", "10.77.0.2")])
    found = group.Heartbeat(Gone(), 1, 3, machines)
    found.fail()
    found.end()
    monkeypatch.setattr(found, "_verdict", None)
    found._judge(Gone(), 2, "has gone or does not answer")
    with pytest.raises(ooc.RankError, match=r"^rank 2 \(beta\) has gone or does not answer$"):
        found.check()


def test_of_every_machine_one_process_tells_what_went_wrong() -> None:
    machines = Machines([Place("a", "1"), Place("a", "1"), Place("a", "2"), Place("a", "2")])
    tells = {by: [rank for rank in range(4) if not machines.is_told(by, rank)] for by in range(4)}
    assert tells == {0: [0, 2], 1: [1, 2], 2: [0, 2], 3: [0, 3]}
    of_three = Machines([Place("a", "1"), Place("a", "2"), Place("a", "2")])
    assert Ranks(rank=0, count=3, machines=of_three).most_on_a_machine == 2  # whose memory is divided most
    assert machines.name(3) == "rank 3 (a)" and Machines([Place("a")] * 2).name(1) == "rank 1"


def test_a_name_that_leads_to_no_other_machine_is_refused() -> None:
    """As Debian has a machine's own name in /etc/hosts; what gloo would say is that it cannot connect."""
    alpha, beta = Place("alpha", "1", "10.77.0.1"), Place("beta", "2", "127.0.1.1")
    with pytest.raises(
        ooc.RankError, match=r"^rank 1 \(beta\): .* 127.0.1.1, .*; set GLOO_SOCKET_IFNAME to "
    ) as raised:
        check_reached([alpha, beta, beta], 2)
    assert raised.value.is_told
    check_reached([alpha, beta._replace(interfaces="eth0")], 0)
    check_reached([beta, beta], 0)


def test_one_machine_may_count_more_starts_than_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun does by c10d: only that whose process has gone counts; where the first is not started anew."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    about = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
    for name, value in (about | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, value)

    def work(rank: int, start: int) -> tuple[bool, list[float]]:
        os.environ |= {"RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": str(rank * start)}
        ranks = Ranks.of_environment(timedelta(seconds=20))
        return ranks.is_anew, [float(found) for found in ranks.gathered(torch.tensor([rank + 1.0]))]

    for start in (0, 1):
        found = together(2, tmp_path, lambda rank, start=start: work(rank, start), meet=False)  # type: ignore[misc]
        assert found == [(start > 0, [1.0, 2.0])] * 2
