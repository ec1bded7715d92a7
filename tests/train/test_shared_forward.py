# SPDX-License-Identifier: Apache-2.0
"""One forward pass to score an epoch and to train the next: the same losses, scores and weights, to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ooc
from ooc.engine.record import EpochRecord
from ooc.storage.store import Store
from ooc.train.trainer import Saving, Trainer
from tests.exactness.comparison import make_trainer, store_of
from tests.exactness.reference import ModelCase
from tests.examples import examples
from tests.graphs import GraphCase, random_data

APART = [saving for saving in Saving if saving is not Saving.SHARED_FORWARD]


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in trainer.model.parameters()]


def outcome(records: list[EpochRecord]) -> list[tuple[Any, ...]]:
    return [(r.epoch, r.loss, r.train_score, r.valid_score, r.test_score) for r in records]


def assert_same(case: ModelCase, store: Store, folder: Path, fit: dict[str, Any], **options: Any) -> Trainer:
    """Training with and without comes to the same; returns the trainer with."""
    with make_trainer(case, store, folder, savings=APART, **options) as apart:
        expected = outcome(apart.fit(**fit))
        assert "train_and_score" not in apart.plan.programs
    with make_trainer(case, store, folder, **options) as shared:
        assert outcome(shared.fit(**fit)) == expected
        assert "train_and_score" in shared.plan.programs
    assert all(torch.equal(a, b) for a, b in zip(weights(apart), weights(shared), strict=True))
    assert shared.best == apart.best
    return shared


@settings(max_examples=examples(3), deadline=None)
@given(
    kind=st.sampled_from(["gcn", "sage"]),
    layers=st.integers(1, 3),
    every=st.integers(1, 3),
    hops=st.booleans(),
    unlabelled=st.sampled_from([0, 100]),
    slabs=st.sampled_from([None, 3]),
    seed=st.integers(0, 100),
)
def test_losses_scores_and_weights(
    kind: str,
    layers: int,
    every: int,
    hops: bool,
    unlabelled: int,
    slabs: int | None,
    seed: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Over models, orders of rows, fractions of labels and plans, in float32."""
    folder = tmp_path_factory.mktemp("case")
    graph = GraphCase(nodes=120, edges=300, unlabelled=unlabelled, seed=seed, train=0.3)
    data = random_data(graph, dtype=torch.float32)
    store = store_of(data, folder)
    if hops:
        store = ooc.convert(data, folder / "hops.ooc", order="hop")
    case = ModelCase(kind=kind, layers=layers)
    fit = {"epochs": 4, "eval_every": every}
    assert_same(case, store, folder, fit, dtype=torch.float32, slab_columns=slabs)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("gat", {"heads": 2}, marks=pytest.mark.thorough),
        ("gat", {"heads": 2, "v2": True}),
        ("sage", {"aggr": "max"}),
        pytest.param("sage", {"aggr": "softmax"}, marks=pytest.mark.thorough),
    ],
)
def test_what_aggregations_keep_for_a_backward_pass_is_no_difference(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    data = random_data(GraphCase(nodes=120, edges=500, train=0.3), dtype=torch.float32)
    case = ModelCase(kind=kind, layers=2, hidden=8, options=options)
    assert_same(case, store_of(data, tmp_path), tmp_path, {"epochs": 3, "eval_every": 1}, dtype=torch.float32)


def test_early_stopping_drops_the_next_epoch(tmp_path: Path) -> None:
    """The scores that end the training arrive with the next epoch's gradients, which are never stepped."""
    data = random_data(GraphCase(nodes=200, edges=300, train=0.1))
    case = ModelCase(kind="gcn", layers=2)
    fit = {"epochs": 300, "eval_every": 1, "patience": 2}
    shared = assert_same(case, store_of(data, tmp_path), tmp_path, fit)
    assert shared.best is not None and shared.epoch == shared.best["epoch"] + 2 < 300


def test_resuming_goes_on_exactly(tmp_path: Path) -> None:
    """From a checkpoint of an epoch that was scored by the next one's forward pass."""
    store = store_of(random_data(GraphCase(nodes=150)), tmp_path)
    case = ModelCase(kind="sage", layers=2)
    with make_trainer(case, store, tmp_path) as whole:
        expected = outcome(whole.fit(6, eval_every=1))

    class Cut(Exception):
        pass

    def cut(event: object) -> None:
        if getattr(getattr(event, "record", None), "epoch", 0) == 3:  # epoch 4 is computed, but not stepped
            raise Cut

    with make_trainer(case, store, tmp_path, out=tmp_path / "run", listener=cut) as begun, pytest.raises(Cut):
        begun.fit(6, eval_every=1)
    run = ooc.train.runs.run.RunFolder.open(tmp_path / "run")  # type: ignore[attr-defined]
    with make_trainer(case, store, tmp_path, out=run) as rest:
        assert outcome(rest.fit(6, eval_every=1, resume=True)) == expected[3:]
        assert outcome(run.records()) == expected


def test_less_is_read_and_computed(tmp_path: Path) -> None:
    """An epoch that is scored on the way moves fewer bytes than one that is scored by itself, if not all fits."""
    store = store_of(random_data(GraphCase(nodes=3000, edges=12000)), tmp_path)
    case = ModelCase(kind="sage", layers=3, hidden=16)
    memory: dict[str, Any] = {"gpu_budget": "1500K", "host_budget": "1M", "slab_columns": 4, "tile_rows": 64}
    moved = {}
    for name, savings in (("apart", APART), ("shared", list(Saving))):
        with make_trainer(case, store, tmp_path, savings=savings, **memory) as trainer:
            trainer.fit(1, eval_every=0)
            before = trainer._session.runtime.taken()
            trainer.fit(2, eval_every=1)
            taken = trainer._session.runtime.taken().since(before)
            moved[name] = taken.ssd_read_bytes + taken.ssd_write_bytes
    assert moved["shared"] < 0.95 * moved["apart"]


def test_dropout_leaves_nothing_to_share(tmp_path: Path) -> None:
    """Neither does an average of the weights, which is scored in the model's place."""
    store = store_of(random_data(GraphCase()), tmp_path)
    attention = ModelCase(kind="gat", options={"heads": 2}, dropout=0.1)
    for case in (ModelCase(kind="gcn", dropout=0.1), ModelCase(kind="gcn", input_dropout=0.1), attention):
        with make_trainer(case, store, tmp_path) as trainer:
            assert "train_and_score" not in trainer.plan.programs


def test_every_program_reads_what_is_planned_whichever_has_run_before_it(tmp_path: Path) -> None:
    """Where a part of what is read is kept from one to the next, and where all of it is."""
    store = store_of(random_data(GraphCase(nodes=1500, edges=6000)), tmp_path)
    case = ModelCase(kind="sage", layers=2, hidden=16)
    for memory, fits in ((1_200_000, False), (10_000_000, True)):
        with make_trainer(case, store, tmp_path, gpu_budget=memory, host_budget="400K", tile_rows=64) as trainer:
            plan, session = trainer.plan, trainer._session
            trainer.fit(1, eval_every=0)
            after = "train"
            for name in ("evaluate", "train", "train", "train_and_score", "train", "evaluate", "evaluate"):
                before = session.runtime.taken()
                trainer.evaluate() if name == "evaluate" else trainer._loss_and_gradients(scored=name != "train")
                read = session.runtime.taken().since(before).ssd_read_bytes
                assert read == plan.bytes_read(name) + plan.filling_bytes(name, after=after), (name, after)
                after = name
            assert plan.filling_bytes("train", after="evaluate") < plan.filling_bytes("train", after=None)
            assert (plan.bytes_read("train") == 0) is fits
