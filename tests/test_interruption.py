# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C in somebody's program that calls ooc: KeyboardInterrupt where nothing is half done."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch_geometric.nn.models import GraphSAGE

import ooc
from ooc.events import Event, TaskStarted
from ooc.interruption import interruptible_by_ctrl_c
from ooc.storage.store import Store
from tests.exactness.comparison import store_of
from tests.graphs import GraphCase, random_data

GRAPH = GraphCase(nodes=300)


@pytest.fixture(autouse=True)
def _heeded() -> Iterator[None]:
    """Python's own handler, which is not there where the tests run in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


class Pressing:
    """A listener that interrupts the ``number``-th task of the work, and goes on unharmed."""

    def __init__(self, number: int) -> None:
        self.left, self.unharmed = number, False

    def __call__(self, event: Event) -> None:
        if isinstance(event, TaskStarted):
            self.left -= 1
            if self.left == 0:
                press()
                self.unharmed = True


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """One small store for all."""
    return store_of(random_data(GRAPH, dtype=torch.float32), tmp_path_factory.mktemp("store"))


def model() -> GraphSAGE:
    torch.manual_seed(0)
    return GraphSAGE(GRAPH.features, 8, 2, GRAPH.classes)


def test_an_interrupted_epoch_is_as_if_it_had_not_begun(store: Store, tmp_path: Path) -> None:
    """Training can go on, with the losses that it has without."""
    with ooc.Trainer(model(), store, "64M", "64M", spill_dir=tmp_path) as trainer:
        expected = [record.loss for record in trainer.fit(4, eval_every=0)]
    pressing = Pressing(3)
    before = threading.active_count()
    with ooc.Trainer(model(), store, "64M", "64M", spill_dir=tmp_path, listener=pressing) as trainer:
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(4, eval_every=0)
        assert pressing.unharmed
        done = trainer.epoch
        assert done < 4
        assert [record.loss for record in trainer.fit(4 - done, eval_every=0)] == expected[done:]
    assert threading.active_count() == before
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupted_conversion_of_an_object_leaves_nothing(tmp_path: Path) -> None:
    """Whether it would be given the same one again, nobody knows."""
    pressing = Pressing(2)
    with pytest.raises(KeyboardInterrupt):
        ooc.convert(random_data(GRAPH, dtype=torch.float32), tmp_path / "g.ooc", split="random", listener=pressing)
    assert pressing.unharmed
    assert list(tmp_path.iterdir()) == []


def test_who_asks_when_all_is_done_is_heard() -> None:
    """What would come next is not wanted either."""
    with pytest.raises(KeyboardInterrupt), interruptible_by_ctrl_c():
        press()


def test_a_handler_of_the_program_stays(store: Store, tmp_path: Path) -> None:
    """It says itself what Ctrl-C does."""
    heard = []
    signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    with ooc.Trainer(model(), store, "64M", "64M", spill_dir=tmp_path, listener=Pressing(2)) as trainer:
        assert len(trainer.fit(2, eval_every=0)) == 2
    assert heard == [signal.SIGINT]


def test_other_threads_have_no_signals(store: Store, tmp_path: Path) -> None:
    records = []

    def work() -> None:
        with ooc.Trainer(model(), store, "64M", "64M", spill_dir=tmp_path) as trainer:
            records.extend(trainer.fit(1, eval_every=0))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(records) == 1
