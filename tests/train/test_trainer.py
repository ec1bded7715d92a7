# SPDX-License-Identifier: Apache-2.0
"""What a trainer takes, its defaults, and what is left of one that is dropped."""

import gc
import inspect
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.optim.lr_scheduler as lrs
from torch_geometric.data import Data
from torch_geometric.nn import GCN

import ooc
from ooc import memory
from ooc.errors import OptionError, SourceError, TrainingError
from ooc.events import EpochFinished, Event, TaskAdvanced, TaskStarted
from ooc.storage.store import Store
from ooc.train.runs.run import RunFolder
from tests.exactness.comparison import store_of
from tests.graphs import GraphCase, random_data
from tests.train.test_resources import assert_no_more_held, held

DATA = random_data(GraphCase(nodes=60, edges=200, features=8, classes=3), dtype=torch.float32)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return store_of(DATA, tmp_path_factory.mktemp("store"))


def model() -> GCN:
    torch.manual_seed(0)
    return GCN(8, 4, 2, 3)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        return rows * rows


OTHER = torch.nn.Sequential(torch.nn.Linear(2, 2))


def computed() -> torch.Tensor:
    """As another training does."""
    rows: torch.Tensor = Square.apply(OTHER(torch.ones(3, 2)))
    return rows


class WhileOthersCompute(GCN):
    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        with ThreadPoolExecutor(1) as pool:
            assert type(pool.submit(computed).result()) is torch.Tensor
        rows: torch.Tensor = super().forward(x, edge_index)
        return rows


def test_other_threads_compute_while_a_model_is_traced(store: Store, tmp_path: Path) -> None:
    """torch's own functions are replaced meanwhile."""
    with ooc.Trainer(WhileOthersCompute(8, 4, 2, 3), store, spill_dir=tmp_path):
        pass


def test_trainers_side_by_side_train_as_alone(store: Store, tmp_path: Path) -> None:
    models = [model() for _ in range(4)]

    def losses(one: GCN) -> list[float]:
        with ooc.Trainer(one, store, spill_dir=tmp_path, input_dropout=0.3) as trainer:
            return [record.loss for record in trainer.fit(3, progress=False)]

    alone = losses(models[0])
    with ThreadPoolExecutor(3) as pool:
        assert [*pool.map(losses, models[1:])] == [alone] * 3


def test_a_path_and_data_train_as_their_store_does(store: Store, tmp_path: Path) -> None:
    losses = []
    for graph in (store, str(store.path), store.path, DATA):
        with ooc.Trainer(model(), graph, spill_dir=tmp_path) as trainer:
            losses.append([record.loss for record in trainer.fit(epochs=3)])
            assert f"Store({str(trainer.store.path)!r}" in repr(trainer)
            assert repr(trainer).endswith("3 epochs done>")
    assert losses[0] == losses[1] == losses[2] == losses[3]


def test_trainers_may_be_made_at_the_same_moment(store: Store, tmp_path: Path) -> None:
    """In threads: what is replaced while a model's calls are looked for is as it was afterwards."""

    class Slow(GCN):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            time.sleep(0.02)
            return super().forward(*args, **kwargs)

    def slow() -> GCN:
        torch.manual_seed(0)
        return Slow(8, 4, 2, 3)

    replaced, models, made = torch.nn.Module.__call__, [slow() for _ in range(3)], list[ooc.Trainer]()
    threads = [
        Thread(target=lambda m: made.append(ooc.Trainer(m, store, spill_dir=tmp_path)), args=(m,)) for m in models
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    losses = set()
    for trainer in made:
        with trainer:
            losses.add(trainer.fit(epochs=1, progress=False)[0].loss)
    assert (len(made), len(losses)) == (3, 1) and torch.nn.Module.__call__ is replaced


def test_the_store_made_of_data_goes_with_the_trainer(tmp_path: Path) -> None:
    with ooc.Trainer(model(), DATA, spill_dir=tmp_path) as trainer:
        assert trainer.store.path.is_relative_to(tmp_path)
    trainer = ooc.Trainer(model(), DATA, spill_dir=tmp_path)
    del trainer
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_graph_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(ooc.OocError):
        ooc.Trainer(model(), tmp_path / "nowhere.ooc")
    with pytest.raises(ooc.OocError):
        ooc.Trainer(model(), {"x": DATA.x}, spill_dir=tmp_path)  # type: ignore[arg-type]

    class MadeWhenAsked(torch.utils.data.Dataset[Data]):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> Data:
            return DATA.clone()

    with pytest.raises(ooc.SourceError, match="labels are of graphs"):
        ooc.Trainer(model(), MadeWhenAsked(), spill_dir=tmp_path)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_what_is_given_in_the_place_of_something_else_is_named(store: Store, tmp_path: Path) -> None:
    net: Any = model()
    optimizer: Any = torch.optim.Adam(net.parameters())
    no_model = "the model must be a torch.nn.Module, and is "
    cases: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        (no_model + "of type Data; the model comes first", (DATA, net), {}),
        (no_model + "the class GCN; make one", (GCN, DATA), {}),
        ("gpu budget: Adam is no size", (net, store, optimizer), {}),
        ("gpu budget: Adam is no size", (net, store, optimizer), {"memory": "1G"}),
        ("memory: nan is no size", (net, store), {"memory": float("nan")}),
        (r"loss MSELoss is a class; give MSELoss\(\)", (net, store), {"loss": torch.nn.MSELoss}),
        (r"leave the sigmoid out of the model and give BCEWithLogitsLoss", (net, store), {"loss": torch.nn.BCELoss()}),
        ("scheduler 'cosine' is none of torch", (net, store), {"optimizer": optimizer, "scheduler": "cosine"}),
        ("StepLR'> is none of torch", (net, store), {"optimizer": optimizer, "scheduler": lrs.StepLR}),
        ("device 'meta' is not one of", (net, store), {"device": torch.device("meta")}),
    ]
    for message, given, options in cases:
        with pytest.raises(ooc.OocError, match=message):
            ooc.Trainer(*given, spill_dir=tmp_path, **options)
    assert list(tmp_path.iterdir()) == []
    for memory_bytes in (2e8, np.int64(200_000_000), np.float32(2e8)):
        with ooc.Trainer(net, store, memory=memory_bytes, device=torch.device("cpu"), spill_dir=tmp_path) as trainer:
            assert trainer.limits.memory_bytes == 200_000_000


def test_budgets_are_shares_of_what_is_free_and_scratch_is_on_the_stores_disk(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 4_000_000_000)
    with ooc.Trainer(model(), store) as trainer:
        assert (trainer.limits.device_bytes, trainer.limits.host_bytes) == (1_000_000_000, 2_000_000_000)
        assert trainer.spill_dir == store.path.parent
    with ooc.Trainer(model(), store, out=tmp_path / "runs" / "run") as trainer:
        assert trainer.spill_dir == tmp_path


def test_memory_is_both_budgets_where_the_cpu_computes(store: Store) -> None:
    with ooc.Trainer(model(), store, memory="60M") as trainer:
        assert (trainer.limits.device_bytes, trainer.limits.host_bytes) == (20_000_000, 40_000_000)
    with pytest.raises(ooc.OptionError, match="give either it or gpu_budget= and host_budget="):
        ooc.Trainer(model(), store, memory="60M", host_budget="10M")
    with pytest.raises(ooc.BudgetError, match=r"give memory='\d+K?'") as raised:
        ooc.Trainer(model(), store, memory="1K")
    assert "device" not in str(raised.value) and "budget" not in str(raised.value)
    with ooc.Trainer(model(), store, memory=str(raised.value).split("memory='")[1].rstrip("'")) as trainer:
        least = trainer.fit(epochs=2)
    with ooc.Trainer(model(), store) as trainer:
        assert [record.loss for record in trainer.fit(epochs=2)] == [record.loss for record in least]


def test_fit_shows_a_line_an_epoch_unless_told_not_to(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    with ooc.Trainer(model(), store) as trainer:
        trainer.fit(epochs=2)
        out, err = capsys.readouterr()
        assert out == "" and [line.split("  ")[0] for line in err.splitlines()] == ["epoch 1/2", "epoch 2/2"]
        trainer.fit(epochs=2, progress=False)
    assert capsys.readouterr() == ("", "")


def test_every_epoch_is_scored_unless_told_otherwise(store: Store) -> None:
    with ooc.Trainer(model(), store) as trainer:
        assert all(record.valid_score is not None for record in trainer.fit(epochs=3))
        assert all(record.valid_score is None for record in trainer.fit(epochs=2, eval_every=0))


def test_a_layer_frozen_between_two_trainers_stays_as_it_is() -> None:
    """As after PyG's ``zero_grad``: it was stepped by what the first training had left as its gradient."""
    data, mine, other = DATA.clone(), model().double(), model().double()
    data.x = data.x.double()
    optimizers = [torch.optim.Adam(one.parameters(), lr=0.01) for one in (mine, other)]
    for trained in range(2):
        for one in (mine, other):
            one.convs[0].requires_grad_(not trained)
        with ooc.Trainer(mine, data, memory="64M", optimizer=optimizers[0]) as trainer:
            losses = [record.loss for record in trainer.fit(2, progress=False)]
        for found in losses:
            optimizers[1].zero_grad()
            loss = F.cross_entropy(other(data.x, data.edge_index)[data.train_mask], data.y[data.train_mask])
            loss.backward()
            optimizers[1].step()
            assert found == pytest.approx(loss.item(), rel=1e-10)
        torch.testing.assert_close(mine.state_dict(), other.state_dict(), rtol=1e-9, atol=1e-12)


def test_a_run_is_gone_on_with_by_its_folder(store: Store, tmp_path: Path) -> None:
    with ooc.Trainer(model(), store, out=tmp_path / "run") as trainer:
        trainer.fit(epochs=2)
    with ooc.Trainer(model(), store, out=tmp_path / "run") as trainer:
        with pytest.raises(ooc.RunError, match="holds a run already; give resume=True"):
            trainer.fit(epochs=2)
        assert [record.epoch for record in trainer.fit(epochs=3, resume=True)] == [3]
    assert len(RunFolder.open(tmp_path / "run").records()) == 3


def test_a_run_is_not_gone_on_with_on_another_graph(tmp_path: Path) -> None:
    """Though it is at the same place, or has as many nodes and columns; one made anew of the same Data is the same."""
    data = DATA.clone()
    for again in (False, True):
        with ooc.Trainer(model(), data, memory="64M", out=tmp_path / "run") as trainer:
            trainer.fit(epochs=1 + again, resume=again)
    data.x[0] += 1
    with pytest.raises(ooc.RunError, match="was trained on another store than"):
        ooc.Trainer(model(), data, memory="64M", out=tmp_path / "run")


def test_a_dropped_trainer_leaves_nothing_and_warns(store: Store, tmp_path: Path) -> None:
    with ooc.Trainer(model(), store, spill_dir=tmp_path) as trainer:
        trainer.fit(epochs=1)  # pools that stay for good are there
    before = held()
    trainer = ooc.Trainer(model(), store, spill_dir=tmp_path, out=tmp_path / "run")
    trainer.fit(epochs=1)
    gc.disable()  # it is in no cycle
    try:
        with pytest.warns(ResourceWarning, match=r"a trainer of GCN was dropped without close\(\)"):
            del trainer
    finally:
        gc.enable()
    assert_no_more_held(before)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (lambda trainer: trainer.fit(-1), "epochs must be a whole number from 0 on, not -1"),
        (lambda trainer: trainer.fit(1.5), "epochs must be a whole number from 0 on, not 1.5"),
        (lambda trainer: trainer.fit(1, eval_every=-1), "eval_every must be a whole number"),
        (lambda trainer: trainer.fit(1, patience=0.5), "patience must be a whole number"),
        (lambda trainer: trainer.fit(epoch=1), r"fit takes no epoch=; did you mean epochs\?"),
        (lambda trainer: trainer.predict(out=5), "out must be str or Path or None, not 5"),
        (lambda trainer: trainer.evaluate("test"), "evaluate: too many positional arguments"),
    ],
)
def test_what_methods_are_not_given_is_named(asked: Callable[[ooc.Trainer], object], said: str, store: Store) -> None:
    """A patience of -1 trained nothing, and 1.5 epochs were two."""
    trainer = ooc.Trainer(GCN(store.num_features, 8, 2, store.num_classes), store)
    with trainer, pytest.raises(OptionError, match=said):
        asked(trainer)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"seed": "1"}, "seed must be a whole number from 0 on, not '1'"),
        ({"seed": None}, "seed must be a whole number from 0 on, not None"),
        ({"threads": "2"}, "threads must be a whole number from 1 on, not '2'"),
        ({"block_rows": "8"}, "block rows must be a whole number from 1 on, not '8'"),
        ({"slab_columns": 2.5}, "slab columns must be a whole number from 1 on, not 2.5"),
        ({"average_from": 0}, "average_from must be a whole number from 1 on, not 0"),
        ({"embedding": "64"}, "an embedding's columns must be a whole number from 1 on, not '64'"),
        ({"input_dropout": "0.5"}, "input_dropout must be a number, not '0.5'"),
        ({"clip_norm": "1"}, "clip norm must be a number, not '1'"),
        ({"hardware": "a100"}, "hardware 'a100' is none as ooc profile measures it"),
        ({"spill_dir": "/proc"}, "spill_dir /proc: "),
        ({"spill_dir": 5}, "spill_dir must be str or Path or None, not 5"),
        ({"out": 5}, "out 5 is no path of a folder"),
        ({"compute_dtype": torch.bfloat16}, "compute_dtype must be str, not dtype"),
        ({"listener": "csv"}, "listener must be Callable, not 'csv'"),
        ({"lr": 0.1}, r"Trainer takes no lr=; it is the optimizer's: optimizer=torch.optim.Adam\(.*, lr=…\)"),
        ({"epochs": 5}, r"Trainer takes no epochs=; fit\(epochs=…\) does"),
        ({"loss_fn": None}, r"Trainer takes no loss_fn=; did you mean loss\?"),
    ],
)
def test_options_of_other_types_and_names_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        ooc.Trainer(model(), DATA, **options)


def test_whole_numbers_may_be_numpys(tmp_path: Path) -> None:
    """They ended a run at its first line of JSON."""
    number = np.int64
    given: dict[str, Any] = {"seed": number(3), "threads": number(1), "memory": number(64_000_000)}
    with ooc.Trainer(model(), DATA, out=tmp_path / "run", **given) as trainer:
        assert len(trainer.fit(number(1), eval_every=number(1), progress=False)) == 1
    assert '"seed": 3' in (tmp_path / "run" / "config.json").read_text()


def test_splits_that_are_asked_for_must_be_there() -> None:
    bare = Data(x=DATA.x, edge_index=DATA.edge_index)
    with pytest.raises(ooc.StoreError, match=r"has no training nodes: it was made without labels \(y\) and splits"):
        ooc.Trainer(model(), bare, memory="64M")
    bare.y, bare.train_mask = DATA.y, DATA.train_mask
    with ooc.Trainer(model(), bare, memory="64M") as trainer:
        with pytest.raises(OptionError, match=r"patience counts evaluations, and .* has no validation split"):
            trainer.fit(2, eval_every=1, patience=1, progress=False)
        with pytest.raises(ooc.StoreError, match="has no nodes in the split valid"):
            ooc.NeighborLoader(trainer.store, [2], input_nodes="valid")


@pytest.mark.parametrize("metric", ["accuracy", "macro-f1"])
def test_nodes_may_be_for_validation_and_for_test(metric: str, tmp_path: Path) -> None:
    """As where there is no other split; but not for training as well."""
    data = DATA.clone()
    data.val_mask = data.test_mask
    with ooc.Trainer(model(), data, metric=metric, spill_dir=tmp_path) as trainer:
        (record,) = trainer.fit(1, progress=False)
    assert record.valid_score == record.test_score is not None
    data.val_mask = data.train_mask
    with pytest.raises(SourceError, match=r"the splits overlap: node \d+ is in train and valid, and would be scored"):
        ooc.Trainer(model(), data, spill_dir=tmp_path)


def test_errors_do_not_name_the_place_of_a_graph_that_was_given(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"^the graph is one graph; ooc.Trainer trains on it$"):
        ooc.GraphTrainer(model(), DATA, spill_dir=tmp_path)
    with (
        ooc.Trainer(model(), DATA, spill_dir=tmp_path) as trainer,
        pytest.raises(OptionError, match="layer must be a whole number from 0 on, not '1'"),
    ):
        trainer.predict("embeddings", layer="1")  # type: ignore[arg-type]


def test_what_listeners_may_ask_of_the_trainer(store: Store) -> None:
    """Scores; all else would take away what the epoch under way works in, and is refused by name."""

    def trained(asked: Callable[[ooc.Trainer], object]) -> list[float]:
        def listen(event: Event) -> None:
            if isinstance(event, EpochFinished):
                asked(trainer)

        torch.manual_seed(0)
        trainer = ooc.Trainer(GCN(store.num_features, 8, 2, store.num_classes), store, listener=listen)
        with trainer:
            return [record.loss for record in trainer.fit(3, progress=False)]

    assert trained(lambda trainer: trainer.evaluate()) == trained(lambda trainer: None)
    for asked in (lambda t: t.predict(), lambda t: t.fit(), lambda t: t.close()):
        with pytest.raises(TrainingError, match="the trainer is at work"):
            trained(asked)
    with pytest.raises(TrainingError, match="a listener has changed weights"):
        trained(lambda trainer: next(trainer.model.parameters()).data.zero_())


@pytest.mark.parametrize("asked", [ooc.Trainer.evaluate, ooc.Trainer.predict, ooc.Trainer.close])
def test_amid_an_epoch_nothing_may_be_asked(asked: Callable[[ooc.Trainer], object], store: Store) -> None:
    """Not even scores, whose pass would take the memory of the one under way: it ended in a KeyError."""

    def listen(event: Event) -> None:
        if isinstance(event, TaskAdvanced) and event.task == "epoch 1":
            with pytest.raises(TrainingError, match=r"ask it for evaluate\(\) when an epoch is over"):
                asked(trainer)

    with ooc.Trainer(GCN(store.num_features, 8, 2, store.num_classes), store, listener=listen) as trainer:
        assert len(trainer.fit(2, progress=False)) == 2


def test_a_trainer_works_for_one_thread_at_a_time(store: Store) -> None:
    met: list[BaseException] = []

    def listen(event: Event) -> None:
        if isinstance(event, EpochFinished) and not met:
            other = Thread(target=ask)
            other.start()
            other.join()

    def ask() -> None:
        try:
            trainer.evaluate()
        except TrainingError as error:
            met.append(error)

    with ooc.Trainer(GCN(store.num_features, 8, 2, store.num_classes), store, listener=listen) as trainer:
        trainer.fit(2, progress=False)
    assert "at work in another thread" in str(met[0])


def test_a_closed_trainer_of_data_says_so(tmp_path: Path) -> None:
    """What its graph was converted to is gone with it."""
    trainer = ooc.Trainer(GCN(9, 8, 2, 4), random_data(GraphCase(), dtype=torch.float32), spill_dir=tmp_path)
    trainer.close()
    for asked in (trainer.fit, trainer.predict, trainer.evaluate):
        with pytest.raises(TrainingError, match="the trainer is closed, and its graph with it"):
            asked()


def test_what_tests_vary_is_no_argument_of_users() -> None:
    names = inspect.signature(ooc.Trainer).parameters
    assert not {"tile_rows", "savings"} & set(names)


@pytest.mark.parametrize(
    ("dropout", "task"), [(0.0, "epoch 4"), (0.5, "evaluation")], ids=["scored by the next epoch", "scored by itself"]
)
def test_an_epoch_that_is_interrupted_before_it_is_scored_is_not_lost(
    dropout: float, task: str, store: Store, tmp_path: Path
) -> None:
    """Its step is made: the next call of fit scores and keeps it, as if nothing had been."""

    def trained(name: str, at: int | None) -> list[tuple[int, float, float | None]]:
        seen = 0

        def listen(event: Event) -> None:
            nonlocal seen
            if isinstance(event, TaskStarted) and event.task == task:
                seen += 1
                if seen == at:
                    raise KeyboardInterrupt

        torch.manual_seed(0)
        model = GCN(store.num_features, 8, 2, store.num_classes, dropout=dropout)
        with ooc.Trainer(model, store, out=tmp_path / name, listener=listen) as trainer:
            try:
                trainer.fit(5, progress=False)
            except KeyboardInterrupt:
                trainer.fit(5 - trainer.epoch, progress=False)
        return [(one.epoch, one.loss, one.valid_score) for one in RunFolder.open(tmp_path / name).records()]

    undisturbed = trained("a", None)
    assert trained("b", 1 if task == "epoch 4" else 3) == undisturbed
    assert [epoch for epoch, *_ in undisturbed] == [1, 2, 3, 4, 5]
