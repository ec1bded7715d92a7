# SPDX-License-Identifier: Apache-2.0
"""What has been settled when a trainer was made is refused when it changes; values may."""

import operator
import re
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GINConv, SAGEConv

import ooc
from ooc.errors import ModelError, TrainingError
from ooc.storage.store import Store
from ooc.train.model_snapshot import ModelSnapshot
from tests.exactness.comparison import store_of
from tests.graphs import GraphCase, random_data

GRAPH = GraphCase()
FACTOR, SETTINGS, OFFSET = 1.0, SimpleNamespace(shift=[0.0]), torch.zeros(())


def moved(x: Tensor) -> Tensor:
    """By numbers of this module."""
    return x * FACTOR + SETTINGS.shift[0] + OFFSET * 2


def enclosed() -> tuple[Callable[[Tensor], Tensor], Callable[[], None]]:
    """A function that goes by a number around it, and one that changes that."""
    times = 1

    def multiplied(x: Tensor) -> Tensor:
        return x * times

    def doubled() -> None:
        nonlocal times
        times *= 2

    return multiplied, doubled


class Kind(Enum):
    """One's own constants."""

    PLAIN, OTHER = "plain", "other"


class Pair(NamedTuple):
    """Two numbers."""

    first: int
    second: int


class Named(dict[str, int]):
    """Numbers by their names."""


def scaled_by_a_model(model: Any, x: Tensor) -> Tensor:
    scaled: Tensor = x * model.factors
    return scaled


class Model(nn.Module):
    """Two layers with what may be changed between."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.first = GINConv(nn.Linear(GRAPH.features, 8), eps=0.1)
        self.norm, self.drop, self.act = nn.BatchNorm1d(8), nn.Dropout(0.5), torch.relu
        self.shares = {"own": [0.5, 0.5]}
        self.multiplied, self.doubled = enclosed()
        self.register_buffer("shift", torch.zeros(8))
        self.shift: Tensor
        self.factor = torch.ones(())
        self.held = SimpleNamespace(
            factor=1.0, several=[torch.ones(()), np.ones(())], unused=0, weight=self.norm.weight
        )
        self.kinds: list[Any] = [Kind.PLAIN, OrderedDict(first=1, second=2), range(2), Pair(1, 2), Named(first=1)]
        self.pair, self.named = Pair(1, 2), Named(first=1)
        self.register_buffer("order", torch.arange(8))
        self.second = SAGEConv(8, GRAPH.classes)
        self.best, self.losses = 0.0, list[float]()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        _ = self.kinds, self.pair, self.named
        x = self.drop(moved(self.norm(self.multiplied(self.first(x, edge_index)))) + self.shift)
        x = x[:, self.order] * (self.held.factor * self.held.several[0] * float(self.held.several[1]))
        x = self.act(x) * (1.0 - self.shift.square()) * self.factor
        return self.second(x * (self.scale * self.shares["own"][0]), edge_index)


def give(model: Model, **values: float) -> None:
    model.load_state_dict(
        model.state_dict() | {name.replace("_", "."): torch.tensor([v]) for name, v in values.items()}
    )


CHANGES: dict[str, tuple[Callable[[Model], object], str]] = {
    "a layer frozen": (lambda m: m.second.requires_grad_(False), "second.lin_l.weight.requires_grad"),
    "another type": (lambda m: m.second.half(), "second.lin_l.weight.dtype"),
    "a norm's statistics frozen": (lambda m: m.norm.eval(), "norm.training"),
    "another rate": (lambda m: setattr(m.drop, "p", 0.1), "drop.p"),
    "a number in a list": (lambda m: m.shares["own"].insert(0, 0.1), "shares"),
    "a number of the class": (lambda m: setattr(Model, "scale", Model.scale + 1), "scale"),
    "another layer": (lambda m: setattr(m, "norm", nn.BatchNorm1d(8)), "norm"),
    "another parameter": (lambda m: setattr(m.norm, "bias", nn.Parameter(torch.zeros(8))), "norm.bias"),
    "another buffer": (lambda m: setattr(m, "shift", torch.ones(8)), "shift"),
    "another tensor": (lambda m: setattr(m, "factor", torch.zeros(())), "factor"),
    "a tensor written into": (lambda m: m.factor.zero_(), "factor"),
    "a tensor's data written into": (lambda m: m.factor.data.zero_(), "factor"),
    "a tensor of a list": (lambda m: m.held.several[0].zero_(), "held.several"),
    "an array": (lambda m: m.held.several[1].fill(0), "held.several"),
    "a number of an object": (lambda m: setattr(m.held, "factor", 2.0), "held.factor"),
    "another constant": (lambda m: operator.setitem(m.kinds, 0, Kind.OTHER), "kinds"),
    "a number by a name": (lambda m: m.kinds[1].update(second=3), "kinds"),
    "another name": (lambda m: m.kinds[1].update(third=m.kinds[1].pop("second")), "kinds"),
    "another range": (lambda m: operator.setitem(m.kinds, 2, range(3)), "kinds"),
    "a number of one's own dictionary": (lambda m: m.kinds[4].update(first=2), "kinds"),
    "another tuple of names": (lambda m: setattr(m, "pair", Pair(1, 3)), "pair"),
    "one's own dictionary": (lambda m: m.named.update(first=2), "named"),
    "a tensor of the module": (lambda _: OFFSET.add_(1), "test_model_snapshot.OFFSET"),
    "whole numbers": (lambda m: m.order.copy_(m.order.flip(0)), "the value of order"),
    "a layer more": (lambda m: setattr(m, "third", nn.Linear(2, 2)), "third"),
    "a hook": (lambda m: m.second.lin_l.register_forward_hook(lambda *_: None), "second.lin_l.forward_hooks"),
    "a hook of PyG": (lambda m: m.first.register_propagate_forward_hook(lambda *_: None), "propagate_forward_hooks"),
    "a hook on a parameter": (lambda m: m.norm.bias.register_hook(lambda _: None), "norm.bias.hooks"),
    "another forward": (lambda m: setattr(m.drop, "forward", lambda x: x), "drop.forward"),
    "another activation": (lambda m: setattr(m, "act", torch.tanh), "act"),
    "a number of the module": (lambda m: globals().update(FACTOR=FACTOR + 1), "test_model_snapshot.FACTOR"),
    "a number in something": (lambda m: SETTINGS.shift.insert(0, 0.1), "test_model_snapshot.SETTINGS.shift"),
    "a number around a function": (lambda m: m.doubled(), r"times around .*doubled"),
    "a number of a sum": (lambda m: give(m, first_eps=2.0), "the value of first.eps"),
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """One small store for all."""
    return store_of(random_data(GRAPH, dtype=torch.float32), tmp_path_factory.mktemp("store"))


@pytest.mark.parametrize(("change", "said"), CHANGES.values(), ids=CHANGES.keys())
def test_later_changes_are_told_by_name(change: Callable[[Model], object], said: str) -> None:
    model = Model()
    snapshot = ModelSnapshot(model)
    snapshot.check()
    change(model)
    with pytest.raises(ModelError, match=f"{said} of the model has changed"):
        snapshot.check()


@pytest.mark.parametrize("what", ["another layer", "a number of a sum"])
def test_later_changes_are_refused(what: str, store: Store, tmp_path: Path) -> None:
    """Before an epoch, and before an evaluation."""
    model, (change, said) = Model(), CHANGES[what]
    with ooc.Trainer(model, store, "64M", "64M", spill_dir=tmp_path) as trainer:
        trainer.fit(1, eval_every=0)
        change(model)
        for run in (trainer.fit, trainer.evaluate):
            with pytest.raises(ModelError, match=f"{said} of the model has changed"):
                run()


def test_what_holds_itself_is_looked_into_once(store: Store, tmp_path: Path) -> None:
    """A list, a dictionary, and an object that knows who has it."""
    model = Model()
    shares, parts = model.shares["own"], SimpleNamespace(shares=[0.0])
    shares.append(shares)
    parts.shares.append({"shares": parts})
    model.named.update(own=model.named)  # type: ignore[arg-type]
    model.held.several.append(parts)
    with ooc.Trainer(model, store, "64M", "64M", spill_dir=tmp_path) as trainer:
        trainer.fit(1, eval_every=0)
        shares[1] = 0.1
        with pytest.raises(ModelError, match="shares of the model has changed"):
            trainer.fit(1, eval_every=0)


def test_values_may_change(store: Store, tmp_path: Path) -> None:
    """Of weights and buffers, also to what they were; so may modes, and what no function of the model reads."""
    model = Model()
    with ooc.Trainer(model, store, "64M", "64M", spill_dir=tmp_path) as trainer:
        trainer.fit(1, eval_every=0)
        trainer.evaluate()
        with torch.no_grad():
            model.second.lin_l.weight.zero_()
            model.shift += 1
        model.held.unused += 1
        model.best = 1.0
        model.losses.append(1.0)
        model.order += 0
        give(model, first_eps=0.1)
        model.eval()
        trainer.fit(1, eval_every=0)
        model.train()
        trainer.fit(1, eval_every=0)


def test_so_may_a_number_with_the_name_of_an_attribute(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a notebook, whose own ``x``, ``norm`` or ``loss`` is nothing to a forward that reads ``self.norm``."""
    monkeypatch.setitem(globals(), "norm", 1.0)
    with ooc.Trainer(Model(), store, "64M", "64M", spill_dir=tmp_path) as trainer:
        trainer.fit(1, eval_every=0)
        monkeypatch.setitem(globals(), "norm", 2.0)
        trainer.fit(1, eval_every=0)


def test_what_is_computed_of_a_buffer_alone_is_computed_anew(tmp_path: Path) -> None:
    """Once it was written into."""
    data, model = random_data(GRAPH, dtype=torch.float32), Model()
    model.drop.p = 0.0
    with ooc.Trainer(model, store_of(data, tmp_path), "64M", "64M", spill_dir=tmp_path) as trainer:
        trainer.fit(1, eval_every=0)
        model.shift.fill_(0.5)
        with torch.no_grad():
            expected = F.cross_entropy(model(data.x, data.edge_index)[data.train_mask], data.y[data.train_mask])
        (record,) = trainer.fit(1, eval_every=0)
    assert record.loss == pytest.approx(float(expected), rel=1e-5)


def test_what_a_forward_pass_puts_by_may_change(store: Store, tmp_path: Path) -> None:
    """Which somebody has made run between two epochs."""

    class Keeping(Model):
        kept: Tensor

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self._remembered(super().forward(x, edge_index))

        def _remembered(self, x: Tensor) -> Tensor:
            self.kept = x
            return x

    model = Keeping()
    model.kept = torch.zeros(1)
    with ooc.Trainer(model, store, "64M", "64M", spill_dir=tmp_path) as trainer:
        trainer.fit(1, eval_every=0)
        model.kept = torch.ones(1)
        trainer.fit(1, eval_every=0)


@pytest.mark.parametrize("how", ["by name", "PyG", "held"])
def test_what_may_be_read_by_any_name_may_not_change(how: str, store: Store, tmp_path: Path) -> None:
    """By ``getattr``, by functions of PyG, or by one that a list holds."""

    class ByName(Model):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return super().forward(x, edge_index) * getattr(self, "fac" + "tors")

    class OfPyG(GINConv):  # type: ignore[misc]
        factors = 1.0

    class Held(Model):
        def __init__(self, after: Callable[[Any, Tensor], Tensor]) -> None:
            super().__init__()
            self.after = {"times": after}

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.after["times"](self, super().forward(x, edge_index))

    made = {
        "by name": ByName,
        "PyG": lambda: OfPyG(nn.Linear(GRAPH.features, GRAPH.classes)),
        "held": lambda: Held(scaled_by_a_model),
    }
    model = made[how]()
    model.factors = 1.0  # type: ignore[assignment]
    with ooc.Trainer(model, store, "64M", "64M", spill_dir=tmp_path) as trainer:
        trainer.fit(1, eval_every=0)
        model.factors = 2.0  # type: ignore[assignment]
        with pytest.raises(ModelError, match="factors of the model has changed"):
            trainer.fit(1, eval_every=0)


def test_functions_of_python_may_remember(store: Store, tmp_path: Path) -> None:
    """As expressions that it has compiled."""

    class Naming(Model):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            self.name = [re.sub("weight", str(len(name)), name) for name, _ in self.named_parameters()]
            return super().forward(x, edge_index)

    re.purge()
    with ooc.Trainer(Naming(), store, "64M", "64M", spill_dir=tmp_path) as trainer:
        trainer.fit(1, eval_every=0)


@pytest.mark.parametrize("after", [0, 50])
def test_what_counts_how_often_it_runs_is_refused(after: int, store: Store, tmp_path: Path) -> None:
    """Also where that has no effect at first: it would be traced once, whatever the number of epochs."""
    calls = 0

    class Counting(Model):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            x = super().forward(x, edge_index)
            return x if calls < after else x * calls

    with pytest.raises(ModelError, match=r"calls around .* changes whenever the model runs|with other numbers"):
        ooc.Trainer(Counting(), store, "64M", "64M", spill_dir=tmp_path)


def _replace(data: Data, name: str) -> None:
    data[name] = data[name].clone()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data.x.mul_(2), "x"),
        (lambda data: data.train_mask.fill_(True), "train_mask"),
        (lambda data: _replace(data, "edge_index"), "edge_index"),
    ],
    ids=["features written into", "more nodes to train on", "other edges"],
)
def test_later_changes_of_data_are_refused_by_name(change: Callable[[Data], object], said: str, tmp_path: Path) -> None:
    """A store has been made of them, which would not follow; what is let go may be."""
    data = random_data(GRAPH, dtype=torch.float32)
    with ooc.Trainer(Model(), data, memory="64M", spill_dir=tmp_path) as trainer:
        trainer.fit(1, eval_every=0)
        del data.val_mask
        trainer.fit(1, eval_every=0)
        change(data)
        for run in (trainer.fit, trainer.evaluate, trainer.predict):
            with pytest.raises(TrainingError, match=f"^{said} of the data has changed"):
                run()
        del data
        trainer.fit(1, eval_every=0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda loss: loss.weight.mul_(2.0), "weight"),
        (lambda loss: setattr(loss, "weight", torch.ones(GRAPH.classes)), "weight"),
        (lambda loss: setattr(loss, "label_smoothing", 0.1), "label_smoothing"),
        (lambda loss: setattr(loss, "reduction", "sum"), "reduction"),
    ],
    ids=["weights written into", "other weights", "smoothing", "a sum"],
)
def test_later_changes_of_torchs_losses_are_refused_by_name(
    change: Callable[[nn.Module], object], said: str, store: Store, tmp_path: Path
) -> None:
    """What they give was found out before; one's own is called as it is."""
    loss = nn.CrossEntropyLoss(weight=torch.arange(1.0, GRAPH.classes + 1))
    with ooc.Trainer(Model(), store, "64M", "64M", spill_dir=tmp_path, loss=loss) as trainer:
        trainer.fit(1, eval_every=0)
        change(loss)
        with pytest.raises(ModelError, match=f"^{said} of the loss has changed"):
            trainer.fit(1, eval_every=0)


class Scaled(nn.Module):
    """A loss of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.cross, self.scale = nn.CrossEntropyLoss(), 1.0

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return self.cross(outputs, labels) * self.scale


REDUCTION = "none"


def by_a_word(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs, labels, reduction=REDUCTION)


@pytest.mark.parametrize(
    ("loss", "change", "said"),
    [
        (Scaled(), lambda loss: setattr(loss.cross, "reduction", "sum"), "cross.reduction"),
        (by_a_word, lambda _: globals().update(REDUCTION="sum"), r".*REDUCTION"),
    ],
    ids=["a part", "a global"],
)
def test_a_loss_of_ones_own_may_not_become_a_sum(
    loss: Any, change: Callable[[Any], object], said: str, store: Store, tmp_path: Path
) -> None:
    """Whose numbers may change."""
    with ooc.Trainer(Model(), store, "64M", "64M", spill_dir=tmp_path, loss=loss) as trainer:
        trainer.fit(1, eval_every=0)
        if isinstance(loss, Scaled):
            loss.scale = 0.5
            trainer.fit(1, eval_every=0)
        change(loss)
        with pytest.raises(ModelError, match=f"^{said} of the loss has changed"):
            trainer.fit(1, eval_every=0)
