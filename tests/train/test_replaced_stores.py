# SPDX-License-Identifier: Apache-2.0
"""A store that another one takes the place of while it is used: an error, never results of both."""

import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch

import ooc
from ooc.engine.first_aggregation import GROUP
from ooc.errors import StoreError
from ooc.events import EpochFinished, Event, TaskAdvanced
from ooc.sampling.loader import NeighborLoader
from ooc.storage.store import Store
from ooc.storage.verification import verify
from ooc.train.prediction import Prediction
from ooc.train.resources import Resources
from ooc.train.trainer import Trainer
from tests.exactness.comparison import make_trainer, store_of
from tests.exactness.reference import ModelCase
from tests.graphs import GraphCase, random_data

CASE = ModelCase(kind="sage", layers=2, hidden=8)
SWAPPED = r"the store .*graph\.ooc was replaced or changed while it was in use"


def make(folder: Path, seed: int) -> Store:
    folder.mkdir()
    return store_of(random_data(GraphCase(nodes=300, edges=900, features=7, seed=seed), dtype=torch.float32), folder)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """The store that is trained on."""
    return make(tmp_path / "first store", 1)


@pytest.fixture
def swap(store: Store, tmp_path: Path) -> Callable[[], None]:
    """Puts another store of the same shapes in the place of ``store``."""
    other = make(tmp_path / "second", 2)

    def swap() -> None:
        shutil.rmtree(store.path)
        other.path.rename(store.path)

    return swap


def train(store: Store, tmp_path: Path, **options: object) -> Trainer:
    return make_trainer(CASE, store, tmp_path, dtype=torch.float32, **options)


@pytest.mark.parametrize("moment", [EpochFinished, TaskAdvanced], ids=["between epochs", "within an epoch"])
def test_training_stops_before_it_records_a_mix(
    moment: type[Event], store: Store, swap: Callable[[], None], tmp_path: Path
) -> None:
    """Of the epoch in which, or before which, the store was replaced there is neither a step nor a record."""
    finished: list[int] = []

    def listen(event: Event) -> None:
        if isinstance(event, EpochFinished):
            finished.append(event.record.epoch)
        if isinstance(event, moment) and len(finished) == 2 and store.path.stat().st_ino == before:
            swap()
            weights.extend(parameter.detach().clone() for parameter in trainer.model.parameters())

    weights: list[torch.Tensor] = []
    before = store.path.stat().st_ino
    with train(store, tmp_path, listener=listen, out=tmp_path / "run") as trainer:
        with pytest.raises(StoreError, match=SWAPPED):
            trainer.fit(epochs=5, eval_every=0)
        assert all(torch.equal(*pair) for pair in zip(weights, trainer.model.parameters(), strict=True))
    assert finished == [1, 2]
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    assert not (store.path / GROUP).exists()


def test_a_store_replaced_between_planning_and_training(store: Store, swap: Callable[[], None], tmp_path: Path) -> None:
    with train(store, tmp_path) as trainer:
        swap()
        with pytest.raises(StoreError, match=SWAPPED):
            trainer.fit(epochs=1, eval_every=0)
    assert not (store.path / GROUP).exists()


def test_a_store_that_is_gone(store: Store, tmp_path: Path) -> None:
    with train(store, tmp_path) as trainer:
        trainer.fit(epochs=1, eval_every=0)
        store.path.rename(tmp_path / "elsewhere")
        with pytest.raises(StoreError, match=SWAPPED):
            trainer.fit(epochs=1, eval_every=0)


def test_predicting_stops(store: Store, swap: Callable[[], None], tmp_path: Path) -> None:
    def listen(event: Event) -> None:
        if isinstance(event, TaskAdvanced) and event.task == "predicting" and not swapped:
            swapped.append(True)
            swap()

    swapped: list[bool] = []
    model = CASE.build(store.num_features, store.num_classes, dtype=torch.float32)
    found = Prediction(model, store, Resources.parse("8M", "8M", listener=listen), "logits")
    with pytest.raises(StoreError, match=SWAPPED):
        found.write(tmp_path / "p.npy")
    found.close()
    assert swapped and not (tmp_path / "p.npy").exists()


def test_what_is_kept_in_the_store_does_not_count(store: Store, tmp_path: Path) -> None:
    """A first aggregation that another trainer keeps there, and one that is removed."""
    with train(store, tmp_path) as first, train(ooc.open(store.path), tmp_path) as second:
        first.fit(epochs=1, eval_every=0)
        assert (store.path / GROUP).exists()
        second.fit(epochs=1, eval_every=0)
        shutil.rmtree(store.path / GROUP)
        assert first.fit(epochs=1, eval_every=0)[0].loss == second.fit(epochs=1, eval_every=0)[0].loss


def test_batches_are_of_one_store(store: Store, swap: Callable[[], None]) -> None:
    """What pages are compared with is of the store that was opened, and no damage where another one is there."""
    with closing(NeighborLoader(store, [2], 30, memory="2M")) as loader:
        batches = iter(loader)
        next(batches)
        swap()
        with pytest.raises(StoreError, match=SWAPPED):
            list(batches)


def test_a_store_that_is_replaced_while_it_is_verified_is_not_called_damaged(
    store: Store, swap: Callable[[], None]
) -> None:
    swapped: list[Event] = []

    def listen(event: Event) -> None:
        if not swapped:
            swap()
        swapped.append(event)

    with pytest.raises(StoreError, match=SWAPPED):
        verify(store, listen)
