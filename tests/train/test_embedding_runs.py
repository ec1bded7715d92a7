# SPDX-License-Identifier: Apache-2.0
"""A run with an embedding goes on from wherever it was stopped, and gives what it has learnt."""

from collections.abc import Callable
from dataclasses import replace
from errno import ENOSPC
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch_geometric.nn import GCNConv

import ooc
from ooc.errors import ModelError, OocError, OptionError, RunError, SpillError, TrainingError
from ooc.prefetch.frames import HostWorkspace
from ooc.sizes import format_size
from ooc.stages import PanelSums, Tile
from ooc.storage.array import PAGE_BYTES
from ooc.storage.store import Store
from ooc.storage.types import Types
from ooc.train.embedding import LearntRows
from ooc.train.runs.run import RunFolder
from ooc.train.trainer import Saving, Trainer, Tuning
from tests.exactness.comparison import in_turn
from tests.exactness.reference import ModelCase
from tests.examples import ordinary, thorough

EPOCHS = 4
SHARED, APART = ModelCase(kind="sage", layers=2), ModelCase(kind="sage", layers=2, dropout=0.4)
"""Whose scores come with the next epoch's forward pass, and those for which that takes one of its own."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("store")
    return ooc.convert("synthetic:nodes=3000,edges=9000,features=0,classes=4", folder / "g.ooc")


def trainer_of(store: Store, case: ModelCase, run: Path | None, **options: Any) -> Trainer:
    model = case.build(8, 4, dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    options = {"embedding": ooc.Embedding(8, lr=0.05)} | options
    return Trainer(model, store, optimizer=optimizer, memory="48M", out=run, **options)


def rows_of(trainer: Trainer) -> Tensor:
    rows = trainer.predict("embeddings", layer=0)
    assert rows is not None
    return rows


def outcome(
    store: Store, case: ModelCase, run: Path, *, epochs: int = EPOCHS, tuning: Tuning | None = None, **fit: Any
) -> tuple[Any, ...]:
    """Losses and scores of all epochs, the weights, the rows."""
    with trainer_of(store, case, run, _tuning=tuning or Tuning()) as trainer:
        trainer.fit(epochs, progress=False, **fit)
        rows = rows_of(trainer)
        weights = [p.detach().clone() for p in trainer.model.parameters()]
    records = RunFolder.open(run).records()
    return [(r.epoch, r.loss, r.valid_score, r.test_score) for r in records], weights, rows


@pytest.fixture(scope="module")
def undisturbed(store: Store, tmp_path_factory: pytest.TempPathFactory) -> dict[float, tuple[Any, ...]]:
    """The outcomes of runs that nothing stops, by how much is dropped."""
    return {case.dropout: outcome(store, case, tmp_path_factory.mktemp("whole") / "run") for case in (SHARED, APART)}


def assert_same(found: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    assert found[0] == expected[0]
    assert all(map(torch.equal, found[1], expected[1]))
    assert torch.equal(found[2], expected[2])


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_rows_go_by_the_rate_that_scores_have_made(store: Store, clip_norm: float | None, tmp_path: Path) -> None:
    """Also where these come with the next epoch's gradients, on whose way rows are stepped."""
    found = []
    for savings in (tuple(Saving), [saving for saving in Saving if saving is not Saving.SHARED_FORWARD]):
        model = SHARED.build(8, 4, dtype=torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        plateau = ReduceLROnPlateau(optimizer, mode="max", patience=0, threshold=0.1)
        options: dict[str, Any] = {"optimizer": optimizer, "scheduler": plateau, "clip_norm": clip_norm}
        options |= {"embedding": ooc.Embedding(8, optimizer="sgd"), "_tuning": Tuning(savings=savings)}
        with Trainer(model, store, memory="48M", spill_dir=tmp_path, **options) as trainer:
            losses = [record.loss for record in trainer.fit(EPOCHS, progress=False)]
            found.append((losses, [p.detach() for p in model.parameters()], rows_of(trainer)))
        assert optimizer.param_groups[0]["lr"] < 0.5
    assert_same(*found)


@pytest.mark.parametrize("before", [2, 3])
def test_a_run_goes_on_where_scores_have_passes_of_their_own(
    before: int, store: Store, undisturbed: dict[float, tuple[Any, ...]], tmp_path: Path
) -> None:
    """Which takes fewer versions of rows than it was begun with."""
    outcome(store, SHARED, tmp_path / "run", epochs=before)
    apart = Tuning(savings=tuple(saving for saving in Saving if saving is not Saving.SHARED_FORWARD))
    assert_same(outcome(store, SHARED, tmp_path / "run", resume=True, tuning=apart), undisturbed[SHARED.dropout])


class Stopped(Exception):
    """As a kill would stop it."""


PLACES: dict[str, tuple[type, str, bool]] = {
    "while rows are written": (HostWorkspace, "write", False),
    "before they are committed": (LearntRows, "commit", False),
    "after they are committed": (LearntRows, "commit", True),
    "before the best is kept": (RunFolder, "save_best", False),
    "between the best and the checkpoint": (RunFolder, "save", False),
    "after the checkpoint": (RunFolder, "save", True),
    "after the metrics": (RunFolder, "append", True),
}


CASES = {"shared forward, at once": (SHARED, 1), "shared forward": (SHARED, 3), "apart": (APART, 3)}


@pytest.mark.parametrize(
    ("place", "case"),
    ordinary(in_turn(PLACES, CASES, all_ways=PLACES), *(one.id for one in in_turn(PLACES, CASES))),
)
def test_a_stopped_run_goes_on_to_the_same(
    place: str,
    case: tuple[ModelCase, int],
    store: Store,
    undisturbed: dict[float, tuple[Any, ...]],
    tmp_path: Path,
) -> None:
    """Wherever it was stopped, in whichever epoch: losses, scores, weights and rows, to the bit."""
    (kind, name, behind), (model, calls) = PLACES[place], case
    original: Callable[..., Any] = getattr(kind, name)
    run, left = tmp_path / "run", calls

    def stopping(*arguments: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        found = original(*arguments, **options) if behind or left else None
        if not left:
            raise Stopped
        return found

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(kind, name, stopping)
        outcome(store, model, run)
    assert_same(outcome(store, model, run, resume=True), undisturbed[model.dropout])


@pytest.mark.parametrize(
    "case",
    [pytest.param(SHARED, id="shared forward", marks=pytest.mark.thorough), pytest.param(APART, id="apart")],
)
def test_predictions_are_of_the_best_epoch_or_the_last(case: ModelCase, store: Store, tmp_path: Path) -> None:
    """Each of the two states has rows that go with its weights."""
    from ooc.train.prediction import Prediction
    from ooc.train.resources import Resources
    from ooc.train.runs.state import learnt_rows, load_weights

    kept: dict[int, Tensor] = {}
    with trainer_of(store, case, tmp_path / "run") as trainer:
        for epoch in range(1, EPOCHS + 1):
            trainer.fit(1, progress=False)
            kept[epoch] = rows_of(trainer)
        assert trainer.best is not None
        best = trainer.best["epoch"]
    run = RunFolder.open(tmp_path / "run")
    for which, epoch in (("best", best), ("last", EPOCHS)):
        model = case.build(8, 4, dtype=torch.float32)
        model.load_state_dict(load_weights(run, which))
        learnt = learnt_rows(run, which, ooc.Embedding(8), store)
        resources = Resources.parse(memory="48M", spill_dir=tmp_path)
        prediction = Prediction(model, store, resources, "embeddings", layer=0, learnt=learnt)
        assert torch.equal(prediction.read(), kept[epoch]), f"{which}: not the rows of epoch {epoch}"
        prediction.close()


def test_an_epoch_that_patience_ends_is_dropped(store: Store, tmp_path: Path) -> None:
    """The rows are those that were scored last, in memory and on disk."""
    found, embedding = [], ooc.Embedding(8, lr=3.0)
    for scored in (True, False):
        with trainer_of(store, SHARED, tmp_path / f"run-{scored}", embedding=embedding) as trainer:
            records = trainer.fit(30, patience=1, progress=False)
            assert len(records) < 30
            if scored:
                scores = trainer.evaluate()
                assert (scores["valid_score"], scores["test_score"]) == (
                    records[-1].valid_score,
                    records[-1].test_score,
                )
            found.append([record.loss for record in trainer.fit(2, eval_every=0, progress=False)])
    with trainer_of(store, SHARED, tmp_path / "other", embedding=embedding) as trainer:
        expected = trainer.fit(len(records) + 2, eval_every=0, progress=False)[-2:]
    assert found == [[record.loss for record in expected]] * 2


def test_rows_that_are_no_numbers_are_not_kept(store: Store, tmp_path: Path) -> None:
    """The checkpoint before them is."""
    embedding = ooc.Embedding(8, optimizer="sgd", lr=1e38, weight_decay=1e3)
    with (
        trainer_of(store, APART, tmp_path / "run", embedding=embedding) as trainer,
        pytest.raises(TrainingError, match="made the embedding infinite or no number; there is no checkpoint"),
    ):
        trainer.fit(3, progress=False)


def test_any_tile_of_a_panel_tells_that_rows_are_no_numbers() -> None:
    found: list[Tile] = []
    sums = PanelSums(found.append, {"": 8})
    sums.begin_pass("")
    for start in (0, 4):
        sums.reduce(Tile(start, start + 4, {}, diverged=start == 4))
    sums.end_pass(reverse=False)
    assert [tile.diverged for tile in found] == [True]


def test_without_a_run_the_rows_end_with_the_trainer(store: Store, tmp_path: Path) -> None:
    """Nothing is left on the disk, and what comes later says so."""
    trainer = trainer_of(store, APART, None, spill_dir=tmp_path)
    trainer.fit(1, progress=False)
    trainer.close()
    assert not list(tmp_path.iterdir())
    with pytest.raises(RunError, match="the embedding went when the trainer was closed"):
        trainer.fit(1, progress=False)


def test_another_embedding_is_refused(store: Store, tmp_path: Path) -> None:
    """One of other columns or another optimizer, or none."""
    outcome(store, APART, tmp_path / "run", eval_every=0)
    others = {
        "is of another embedding": ooc.Embedding(8, optimizer="sgd"),
        "is of another model": 9,
        "was trained on another store": None,
    }
    for message, embedding in others.items():
        columns = 9 if embedding == 9 else 8
        with pytest.raises(OocError, match=message):
            if embedding is None:
                features = ooc.convert("synthetic:nodes=3000,edges=9000,features=8,classes=4", tmp_path / "f.ooc")
                with trainer_of(features, APART, tmp_path / "run", embedding=None) as trainer:
                    trainer.fit(6, resume=True)
            else:
                model = APART.build(columns, 4, dtype=torch.float32)
                options: dict[str, Any] = {"memory": "48M", "out": tmp_path / "run", "embedding": embedding}
                with Trainer(model, store, **options) as trainer:
                    trainer.fit(6, resume=True)


def test_a_version_that_is_not_there_is_named(store: Store, tmp_path: Path) -> None:
    outcome(store, APART, tmp_path / "run", eval_every=0)
    for file in (tmp_path / "run" / "embedding").glob("emb.exp_avg.*"):
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(RunError, match=r"emb\.exp_avg\.\d\.npy is not the embedding that the checkpoint names"):
        outcome(store, APART, tmp_path / "run", resume=True)


@pytest.mark.parametrize("name", thorough(["emb", "emb.exp_avg_sq"], "emb"))
def test_other_bytes_than_a_checkpoint_tells_of_are_not_gone_on_with(
    store: Store, undisturbed: dict[float, tuple[Any, ...]], tmp_path: Path, name: str
) -> None:
    with trainer_of(store, SHARED, tmp_path / "run") as trainer:
        trainer.fit(2, progress=False)
        current = trainer._learnt.arrays[name].current_path if trainer._learnt else tmp_path
    data = bytearray(current.read_bytes())
    data[PAGE_BYTES + 2999 * 32] ^= 4
    current.write_bytes(data)
    for _ in range(2):  # nothing is kept of what was computed with them
        told = pytest.raises(SpillError, match=rf"^{name}: the SSD returns other bytes of .*/{current.name} than")
        with trainer_of(store, SHARED, tmp_path / "run") as trainer, told:
            trainer.fit(EPOCHS, resume=True, progress=False)
    data[PAGE_BYTES + 2999 * 32] ^= 4
    current.write_bytes(data)
    assert_same(outcome(store, SHARED, tmp_path / "run", resume=True), undisturbed[SHARED.dropout])


def test_a_runs_rows_are_not_made_anew(store: Store, tmp_path: Path) -> None:
    """Predicting or scoring before the run is gone on with is refused, and leaves it as it was."""
    outcome(store, APART, tmp_path / "run", eval_every=0)
    files = {file: file.read_bytes() for file in (tmp_path / "run" / "embedding").iterdir()}
    with trainer_of(store, APART, tmp_path / "run") as trainer:
        for ask in (trainer.evaluate, lambda: rows_of(trainer), lambda: trainer.fit(1)):
            with pytest.raises(RunError, match="holds a run already"):
                ask()
    assert {file: file.read_bytes() for file in files} == files


def test_versions_are_arrays_of_numpy(store: Store, tmp_path: Path) -> None:
    """In the order of the store's rows."""
    with trainer_of(store, APART, tmp_path / "run") as trainer:
        trainer.fit(1, eval_every=0, progress=False)
        rows = rows_of(trainer)[torch.from_numpy(store.array("perm").read())]
    found = [np.load(file) for file in (tmp_path / "run" / "embedding").glob("emb.?.npy")]
    assert any(np.array_equal(one, rows.numpy()) for one in found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spill_dtype": "bfloat16"}, "not trained with a narrower spill_dtype"),
        ({"embedding": 7}, "the model takes 8 features, the embedding has 7"),
        ({"embedding": None}, "have no features; train an embedding of them, embedding=64"),
    ],
)
def test_what_cannot_be_is_named(options: dict[str, Any], message: str, store: Store) -> None:
    with pytest.raises(OocError, match=message):
        trainer_of(store, APART, None, **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, {}), "an embedding's columns must be a whole number from 1 on, not 0"),
        ((4, {"optimizer": "lbfgs"}), "not one of adam, adamw, sparseadam, adagrad, sgd"),
        ((4, {"lr": 0.0}), "learning rate must be positive"),
        ((4, {"std": -1.0}), "must not be negative"),
        ((4, {"std": "1"}), "must be a number"),
        ((4, {"amsgrad": True}), "adam has no option 'amsgrad'; it has betas, eps, weight_decay"),
        ((4, {"betas": (2.0, 0.9)}), "Adam says: Invalid beta parameter"),
    ],
)
def test_wrong_embeddings_are_named(arguments: tuple[int, dict[str, Any]], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        ooc.Embedding(arguments[0], **arguments[1])


def test_columns_may_be_a_number_of_numpys_and_go_with_the_types_of_nodes() -> None:
    embedding, types = ooc.Embedding(np.int64(8), lr=0.1), Types({"a": 3, "b": 4}, {"a": 2, "b": 0}, {}, "a")
    assert repr(embedding) == "Embedding(8, optimizer='adam', lr=0.1, std=1.0)"
    assert embedding.widths(None) == {"": 8} and embedding.widths(types) == {"b": 8}
    with pytest.raises(OptionError, match=r"every type of nodes has features; .* as \{'a': 8\}"):
        embedding.widths(replace(types, features={"a": 2, "b": 1}))
    with pytest.raises(OptionError, match="one type of nodes; give the columns of its embedding as one number"):
        ooc.Embedding({"a": 8}).widths(None)


@pytest.mark.parametrize("taken", ["not", "detached", "without gradients"])
def test_a_model_that_gives_it_no_gradient_is_refused(taken: str, store: Store) -> None:
    """torch would leave such an embedding as it is, weight decay included."""

    class Blind(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = GCNConv(8, 8), torch.nn.Linear(8, 4)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            if taken == "not":
                x = torch.zeros_like(x)
            elif taken == "detached":
                x = x.detach()
            else:
                with torch.no_grad():
                    x = x * 2
            return self.last(self.first(x, edge_index))

    with pytest.raises(ModelError, match=r"gives its input no gradient|not supported"):
        Trainer(Blind(), store, memory="48M", embedding=8)


def test_rows_are_on_the_disk_before_a_checkpoint_names_them(store: Store, tmp_path: Path) -> None:
    """No write of them is under way when they are committed."""
    seen = []
    with trainer_of(store, APART, tmp_path / "run") as trainer, pytest.MonkeyPatch.context() as patch:
        original = LearntRows.commit

        def committed(self: LearntRows) -> None:
            runtime = trainer._session.runtime
            assert runtime is not None
            assert isinstance(runtime.workspace, HostWorkspace)
            under_way = {runtime.plan.blocks.where(block)[0] for block in runtime.workspace._on_their_way}
            seen.append({name for name in under_way if name.startswith("emb")})
            original(self)

        patch.setattr(LearntRows, "commit", committed)
        trainer.fit(2, progress=False)
    assert seen == [set(), set()]


def test_what_is_too_large_for_the_disk_is_refused_first(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedding counts, with what is kept of it, and leaves nothing there."""
    monkeypatch.setattr("ooc.engine.session.shutil.disk_usage", lambda folder: SimpleNamespace(free=500_000))
    refused = pytest.raises(ooc.BudgetError, match=r"keeps an embedding of .* where 500 KB are free")
    with trainer_of(store, APART, tmp_path / "run") as trainer, refused:
        trainer.fit(1, progress=False)
    assert not (tmp_path / "run" / "embedding").exists()


def test_a_disk_that_is_full_meanwhile_is_told_with_the_room_for_all(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not just for the files that were made."""
    full = Mock(side_effect=OSError(ENOSPC, "No space left on device"))
    monkeypatch.setattr("ooc.train.embedding._make_file", full)
    with trainer_of(store, APART, None, spill_dir=tmp_path) as trainer:
        with pytest.raises(SpillError, match=r"no room for the embedding, [\d.]+ KB: No space") as raised:
            trainer.fit(1, progress=False)
        room = trainer._learnt.room_beside(tmp_path, False)
    assert f" {format_size(room)}:" in str(raised.value)


def test_rows_that_go_with_no_weights_are_not_there(store: Store, tmp_path: Path) -> None:
    for state in (None, {"versions": {"other": 0}}):
        with pytest.raises(RunError, match="names no version of the embedding that goes with its weights"):
            LearntRows.of_run(ooc.Embedding(8), store, torch.float32, tmp_path, state)
