# SPDX-License-Identifier: Apache-2.0
"""Every resource closes: no thread, descriptor or spill file is left, however a run ends."""

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch_geometric.nn.models import GCN

from ooc.errors import BudgetError, ModelError, OptionError
from ooc.events import EpochFinished, Event
from ooc.storage.store import Store
from ooc.train.trainer import Trainer
from tests.exactness.comparison import make_trainer, store_of
from tests.exactness.reference import ModelCase
from tests.graphs import GraphCase, random_data

GRAPH = GraphCase(nodes=1000, edges=4000, features=30, self_loops=10)
MODEL = ModelCase(kind="sage", layers=3, hidden=24, dropout=0.2, input_dropout=0.1)
SMALL = {"gpu_budget": "450K", "host_budget": "60K", "tile_rows": 32}
"""Budgets under which matrices spill."""


class Stop(Exception):
    """Raised by a listener in the middle of a run."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A graph whose training spills under ``SMALL``."""
    return store_of(random_data(GRAPH, dtype=torch.float32), tmp_path_factory.mktemp("store"))


def make(store: Store, folder: Path, **options: object) -> Trainer:
    return make_trainer(MODEL, store, folder, dtype=torch.float32, **{**SMALL, **options})


@pytest.fixture(scope="module")
def _pools(store: Store, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Those that stay for good are there."""
    with make(store, tmp_path_factory.mktemp("first")) as trainer:
        records = trainer.fit(epochs=1, eval_every=0)
        trainer.evaluate()
    assert records[0].ssd_write_bytes > 0


@pytest.fixture
def build(store: Store, tmp_path: Path, _pools: None) -> Callable[..., Trainer]:
    """Trainers that spill."""
    return partial(make, store, tmp_path)


Held = tuple[int, int, int]


def held() -> Held:
    """Threads by the kernel and by Python, and open descriptors."""
    return (
        psutil.Process().num_threads(),
        threading.active_count(),
        len(list(Path("/proc/self/fd").iterdir())),
    )


def assert_no_more_held(before: Held) -> None:
    """Nothing more than ``before``, within two seconds: the kernel ends a joined thread a little later."""
    deadline = time.monotonic() + 2
    while any(now > then for now, then in zip(held(), before, strict=True)):
        assert time.monotonic() < deadline, f"threads and descriptors held: {before} before, {held()} now"
        time.sleep(0.01)


def spilled(tmp_path: Path) -> list[Path]:
    """What is left in the spill folder."""
    return sorted((tmp_path / "spill").rglob("*"))


def test_close_leaves_nothing(build: Callable[..., Trainer], tmp_path: Path) -> None:
    """After a run, an evaluation, and closing twice."""
    before = held()
    for _ in range(2):
        trainer = build()
        trainer.fit(epochs=2, eval_every=0)
        trainer.evaluate()
        trainer.close()
        trainer.close()
    assert_no_more_held(before)
    assert spilled(tmp_path) == []


def test_a_trainer_never_used_leaves_nothing(build: Callable[..., Trainer], tmp_path: Path) -> None:
    """Made and closed."""
    before = held()
    build().close()
    assert_no_more_held(before)
    assert spilled(tmp_path) == []


@pytest.mark.parametrize("exception", [Stop, KeyboardInterrupt])
def test_an_exception_in_a_listener_leaves_nothing(
    exception: type[BaseException], build: Callable[..., Trainer], tmp_path: Path
) -> None:
    """The exception comes through unchanged, and the run is cleaned up."""
    before = held()

    def listen(event: Event) -> None:
        if isinstance(event, EpochFinished) and event.record.epoch >= 2:
            raise exception

    with pytest.raises(exception), build(listener=listen) as trainer:
        trainer.fit(epochs=5, eval_every=0)
    assert_no_more_held(before)
    assert spilled(tmp_path) == []


def test_an_exception_in_the_middle_of_an_epoch_leaves_nothing(build: Callable[..., Trainer], tmp_path: Path) -> None:
    """At any event, whichever pass it comes from (every third is tried)."""
    seen: list[Event] = []
    with build(listener=seen.append) as trainer:
        trainer.fit(epochs=1, eval_every=0)
        trainer.evaluate()
    before = held()
    for position in range(0, len(seen), 3):
        count = 0

        def listen(event: Event, position: int = position) -> None:
            nonlocal count
            count += 1
            if count > position:
                raise Stop

        with pytest.raises(Stop), build(listener=listen) as trainer:
            trainer.fit(epochs=1, eval_every=0)
            trainer.evaluate()
    assert_no_more_held(before)
    assert spilled(tmp_path) == []


@pytest.mark.parametrize(
    ("layers", "options", "error"),
    [
        (2, {"memory": "10K"}, BudgetError),
        (0, {}, ModelError),
        *((2, {name: "x"}, (OptionError, ModelError)) for name in ("metric", "scheduler", "average", "loss")),
    ],
    ids=lambda value: next(iter(value), "model") if isinstance(value, dict) else "",
)
def test_data_that_is_not_trained_on_is_not_kept(
    layers: int, options: dict[str, Any], error: type[Exception], tmp_path: Path
) -> None:
    """The store that was made of it goes, though the error that says why is still there, as it is in a notebook."""
    data, spill = random_data(GraphCase(), dtype=torch.float32), tmp_path / "spill"
    model = GCN(data.num_features, 8, layers, 4) if layers else torch.nn.Bilinear(3, 3, 4)
    with pytest.raises(error) as raised:
        Trainer(model, data, **{"memory": "64M", "spill_dir": spill} | options)
    assert raised.traceback and spilled(tmp_path) == []


def test_a_disk_that_fails_leaves_nothing(
    build: Callable[..., Trainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that fails is an error of ours that names the file; threads, descriptors and files go."""
    from ooc.errors import OocError

    before = held()
    failing = {"on": False}
    real = os.pwritev

    def pwritev(*arguments: object) -> int:
        if failing["on"]:
            raise OSError(5, "Input/output error")
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "pwritev", pwritev)
    with build() as trainer:
        trainer.fit(epochs=1, eval_every=0)
        failing["on"] = True
        with pytest.raises(OocError) as caught:
            trainer.fit(epochs=1, eval_every=0)
    assert "\n" not in str(caught.value)
    assert_no_more_held(before)
    assert spilled(tmp_path) == []


def test_two_trainers_side_by_side_do_not_disturb_each_other(build: Callable[..., Trainer]) -> None:
    """The same spill folder, different files."""
    with build() as first, build() as second:
        losses = [[t.fit(epochs=1, eval_every=0)[0].loss for t in (first, second)] for _ in range(2)]
    assert all(a == b for a, b in losses)


def test_stale_spill_is_never_read(build: Callable[..., Trainer], store: Store, tmp_path: Path) -> None:
    """Whatever lies in the spill folder from a killed run has no influence, even when it is full of NaN."""
    with build() as trainer:
        expected = [record.loss for record in trainer.fit(epochs=2, eval_every=0)]
        files = [path for path in spilled(tmp_path) if path.is_file()]
        stale = {path: path.stat().st_size for path in files}
    for path, size in stale.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\xff" * size)
    with build() as trainer:
        assert [record.loss for record in trainer.fit(epochs=2, eval_every=0)] == expected


def test_the_model_is_usable_after_close(build: Callable[..., Trainer]) -> None:
    """Parameters and gradients are ordinary tensors, not views of freed arenas."""
    trainer = build()
    trainer.fit(epochs=1, eval_every=0)
    model = trainer.model
    trainer.close()
    for parameter in model.parameters():
        assert bool(torch.isfinite(parameter).all())
        assert parameter.grad is not None and bool(torch.isfinite(parameter.grad).all())
