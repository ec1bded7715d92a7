# SPDX-License-Identifier: Apache-2.0
"""Losses and scores on a device with memory of its own: the CPU's, and the host waits for no tile of them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ooc.errors import StoreError
from ooc.storage.array import Array
from ooc.storage.store import Store, Task
from ooc.train.loss import Loss
from ooc.train.metrics import Metric, Scorer
from ooc.train.objective import Objective
from ooc.train.trainer import Trainer
from tests.damage import seal
from tests.engine.fake_device import FakeDevice, compute_losses_by_torch
from tests.engine.test_device import builder, on_device, use
from tests.exactness.comparison import in_turn, least_budgets, store_of
from tests.exactness.reference import ModelCase
from tests.examples import thorough
from tests.train.labelled import labelled, random_labels, random_values, with_some_missing
from tests.train.test_metrics import CASES, DATA, case_of

MODEL = ModelCase(kind="gcn", layers=2, hidden=8)
TILE_ROWS = 64
MASKS = {"train": "train_mask", "valid": "val_mask"}
METRICS = {Task.CLASSES: "accuracy", Task.MULTILABEL: "micro-f1", Task.VALUES: "r2"}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    """What ``device="cuda"`` means in a test."""
    compute_losses_by_torch(monkeypatch)
    with FakeDevice(1) as fake:
        use(fake, monkeypatch)
        yield fake


UNLIKE = [case for case in CASES if case[0] != "multilabel" or case[1] in (Metric.MACRO_F1, Metric.AVERAGE_PRECISION)]
"""Counts and rankings of labels each; all metrics of labels of which some are missing."""


@pytest.mark.parametrize(
    ("labels", "metric"),
    thorough(
        UNLIKE,
        *(("classes", Metric.MICRO_F1), ("two classes", Metric.MACRO_F1), ("two classes", Metric.AVERAGE_PRECISION)),
        *(("values", Metric.MAE), ("values", Metric.RMSE), ("some values missing", Metric.RMSE)),
        *(("multilabel", Metric.MACRO_F1), ("some missing", Metric.MICRO_F1)),
        *(("some missing", Metric.ROC_AUC), ("some missing", Metric.AVERAGE_PRECISION)),
    ),
    ids=lambda case: getattr(case, "value", case),
)
def test_scores_are_the_cpus_and_nobody_waits_for_a_tile(
    labels: str, metric: Metric, tmp_path: Path, device: FakeDevice
) -> None:
    """From the first epoch on, as many things are asked with few tiles as with many: but by rankings, whose outputs
    the host collects. Column sums of R2 are torch's there, and NumPy's on the CPU."""
    store = case_of(labels, tmp_path)[0]
    options: dict[str, Any] = {"dtype": torch.float64, "metric": metric.value}
    with builder(MODEL, store, tmp_path, threads=1, tile_rows=TILE_ROWS, block_rows=TILE_ROWS, **options)() as trainer:
        expected = scored(trainer)
    asked = []
    for tile_rows in (TILE_ROWS, TILE_ROWS // 2)[: 1 if metric.ranked else 2]:
        with on_device(MODEL, store, tmp_path, tile_rows=tile_rows, block_rows=tile_rows, **options)() as trainer:
            device.asked.clear()
            found = scored(trainer)
            asked.append(len(device.asked))
            if tile_rows == TILE_ROWS and metric is not Metric.R2:
                assert found == expected
    assert [score for epoch in found for score in epoch[1:]] == pytest.approx(
        [score for epoch in expected for score in epoch[1:]], rel=1e-9
    )
    assert asked[0] == asked[-1]


def scored(trainer: Trainer) -> list[tuple[float | None, ...]]:
    """Loss and scores of some epochs: of one with the next epoch's forward pass, of the last one by themselves."""
    records = trainer.fit(epochs=2, eval_every=1)
    return [(record.loss, record.train_score, record.valid_score, record.test_score) for record in records]


@pytest.mark.parametrize(("labels", "metric"), [("two classes", "macro-f1"), ("values", "r2")])
def test_what_is_counted_is_admitted(labels: str, metric: str, tmp_path: Path, device: FakeDevice) -> None:
    """With the least budget that there is a plan for, never more than that is alive on the device."""
    build = on_device(MODEL, case_of(labels, tmp_path)[0], tmp_path, dtype=torch.float64, metric=metric)
    gpu, host = least_budgets(build)
    device.tensors.weighing = True
    with build(gpu, host) as trainer:
        trainer.fit(epochs=2, eval_every=1)
        assert trainer.plan.arena_bytes < device.tensors.peak_bytes <= gpu


def test_counts_of_members_are_admitted(tmp_path: Path, device: FakeDevice) -> None:
    """Four bytes a tile and split, in host memory."""
    store = store_of(DATA, tmp_path)
    admitted = []
    for tile_rows in (TILE_ROWS, TILE_ROWS // 4):
        with on_device(MODEL, store, tmp_path, tile_rows=tile_rows, block_rows=tile_rows)() as trainer:
            admitted.append(trainer.workload.fixed_host_bytes)
    tiles = [-(-store.num_nodes // tile_rows) for tile_rows in (TILE_ROWS, TILE_ROWS // 4)]
    assert admitted[1] - admitted[0] == 4 * 3 * (tiles[1] - tiles[0])


@pytest.mark.parametrize("tile_rows", [1, 7, 64, 1000])
def test_members_are_counted_tile_by_tile(tile_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many tiles are read at a time."""
    store = store_of(DATA, tmp_path)
    monkeypatch.setattr("ooc.train.objective._CHUNK_ROWS", 50)
    scorer = Scorer(Metric.ACCURACY, store.num_classes)
    objective = Objective(store, Loss(lambda *_: pytest.fail(), 1.0), scorer, tile_rows=tile_rows)
    objective.count_split_rows(store)
    with FakeDevice(1) as fake:
        for split in ("train", "valid", "test"):
            whole = torch.from_numpy(store.array(f"split/{split}").read())
            for start in range(0, store.num_nodes, tile_rows):
                member_R = whole[start : start + tile_rows]
                there = objective.rows_of(split, start, member_R.to(fake.place))
                assert there.cpu().tolist() == member_R.nonzero().squeeze(1).tolist()
                assert "nonzero" not in " ".join(fake.asked)


# ---- damaged labels ----------------------------------------------------------------------------------------


def classes(value: int) -> Callable[[str, Path], Store]:
    """A store of classes in which a row of a split has the class ``value``."""

    def damaged(split: str, folder: Path) -> Store:
        store = store_of(DATA, folder)
        row = int(store.array(f"split/{split}").read().nonzero()[0][3])
        overwrite(store.array("y"), row, value)
        return store

    return damaged


def several_labels(split: str, folder: Path) -> Store:
    y = random_labels(DATA, 3)
    y[DATA[MASKS[split]].nonzero()[3], 1] = -1
    return labelled(DATA, y, folder, told=False)


def values(split: str, folder: Path) -> Store:
    y = random_values(DATA, 2)
    y[DATA[MASKS[split]].nonzero()[3]] = float("nan")
    return labelled(DATA, y, folder)


def incomplete(split: str, folder: Path) -> Store:
    y = with_some_missing(random_labels(DATA, 3))
    y[DATA[MASKS[split]].nonzero()[3]] = -1
    return labelled(DATA, y, folder)


def overwrite(array: Array, row: int, value: int) -> None:
    (extent,) = array.extents(row, row + 1)
    with extent.path.open("r+b") as file:
        file.seek(extent.offset)
        file.write(value.to_bytes(array.itemsize, "little", signed=True))
    seal(array)


DAMAGED = {
    "no class": (classes(-1), "class"),
    "a class too large": (classes(4), "class"),
    "several labels": (several_labels, "label"),
    "values": (values, "label"),
    "none of labels that may be missing": (incomplete, "label"),
}


@pytest.mark.parametrize(("kind", "split"), in_turn(DAMAGED, {"train": "train", "valid": "valid"}))
def test_a_row_of_a_split_without_a_label_is_one_line(
    kind: str, split: str, tmp_path: Path, device: FakeDevice
) -> None:
    """Told when the program is over that has met it, before any weight is stepped; until then no loss, which could not
    look up such a class, gets to see it. What the CPU says at once."""
    damaged, missing = DAMAGED[kind]
    store = damaged(split, tmp_path)
    said = f"y of the store is damaged: a row of a split has no {missing}; see ooc verify"
    for build in (on_device, builder):
        with build(MODEL, store, tmp_path, dtype=torch.float64, metric=METRICS[store.task])() as trainer:
            if split == "valid":
                trainer.fit(epochs=1, eval_every=0)
            before = [parameter.detach().clone().cpu() for parameter in trainer.model.parameters()]
            with pytest.raises(StoreError, match=said):
                trainer.fit(epochs=1, eval_every=0) if split == "train" else trainer.evaluate()
            with pytest.raises(StoreError, match=said):
                trainer.fit(epochs=1, eval_every=0) if split == "train" else trainer.evaluate()
            trainer.close()
            assert all(torch.equal(one, other) for one, other in zip(before, trainer.model.parameters(), strict=True))
