# SPDX-License-Identifier: Apache-2.0
"""Every loss is PyG's on the whole graph, however the rows are cut; what is no mean over rows is refused."""

import copy
import json
from collections.abc import Callable
from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv
from torch_geometric.nn.models import GCN

import ooc
from ooc.cli.arguments.recipe import build_loss
from ooc.errors import ModelError, OptionError, StoreError
from ooc.storage.store import Store, open_store
from ooc.train.loss import resolve_loss
from tests.cli.test_recipe import settings
from tests.exactness.comparison import store_of, train_epoch, tuned_trainer
from tests.exactness.reference import disagreement
from tests.examples import ordinary, thorough
from tests.graphs import GraphCase, random_data
from tests.train.labelled import FullBatch, labelled, random_labels, random_values, with_some_missing

DATA = random_data(GraphCase(nodes=120, edges=400, classes=4, unlabelled=20, self_loops=3))
COLUMNS = 3
WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 3.0], dtype=torch.float64)
LABEL_WEIGHTS = torch.tensor([0.5, 2.0, 1.5], dtype=torch.float64)


def by_row(outputs: Tensor, labels: Tensor) -> Tensor:
    """Margin loss, one a row."""
    return F.multi_margin_loss(outputs, labels, reduction="none")


def focal(outputs: Tensor, labels: Tensor) -> Tensor:
    """A scalar that is the mean over the rows it is given."""
    p = outputs.softmax(dim=1).gather(1, labels[:, None])
    return (-((1 - p) ** 2) * p.log()).mean()


CLASSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropy": nn.CrossEntropyLoss(),
    "class weights": nn.CrossEntropyLoss(weight=WEIGHTS),
    "smoothing": nn.CrossEntropyLoss(label_smoothing=0.2),
    "weights and smoothing": nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.3),
    "ignored class": nn.CrossEntropyLoss(ignore_index=2),
    "negative log-likelihoods": nn.NLLLoss(weight=WEIGHTS, ignore_index=1),
    "all at once": nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1, ignore_index=0),
    "sum": nn.CrossEntropyLoss(weight=WEIGHTS, reduction="sum"),
    "another of torch's": nn.MultiMarginLoss(),
    "one loss a row": by_row,
    "a mean": focal,
}
MULTILABEL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "bce": nn.BCEWithLogitsLoss(),
    "positive weights": nn.BCEWithLogitsLoss(pos_weight=LABEL_WEIGHTS),
    "weights": nn.BCEWithLogitsLoss(weight=LABEL_WEIGHTS, pos_weight=LABEL_WEIGHTS),
    "sum": nn.BCEWithLogitsLoss(reduction="sum"),
    "another of torch's": nn.MultiLabelSoftMarginLoss(),
}
VALUES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": nn.MSELoss(),
    "l1": nn.L1Loss(),
    "smooth l1": nn.SmoothL1Loss(beta=0.5),
    "huber": nn.HuberLoss(delta=2.0),
    "one loss a row": lambda outputs, values: (outputs - values).pow(4).sum(dim=1),
}


def make_trainer(store: Store, outputs: int, folder: Path, **options: Any) -> ooc.Trainer:
    torch.manual_seed(2)
    model = GCN(store.num_features, 6, 2, outputs).double()
    options = {"gpu_budget": "64M", "host_budget": "64M", "tile_rows": 8, "spill_dir": folder} | options
    return tuned_trainer(model, store, **options)


def assert_same_as_pyg(store: Store, y: Tensor, outputs: int, loss: Any, folder: Path, *, mean_of_rows: bool) -> None:
    with make_trainer(store, outputs, folder, loss=loss) as trainer:
        reference = FullBatch(trainer.model, DATA, y, lambda *rows: loss(*rows).mean() if mean_of_rows else loss(*rows))
        difference, whose = disagreement(train_epoch(trainer), reference.train(), floor=1e-3)
        assert difference <= 1e-9, whose


def of_thresholds(outputs: Tensor, labels: Tensor) -> Tensor:
    """Ordinal regression: whether the class is above each of the others but the last."""
    above = (labels[:, None] > torch.arange(outputs.shape[1])).to(outputs.dtype)
    return F.binary_cross_entropy_with_logits(outputs, above, reduction="none").sum(dim=1)


def test_fewer_outputs_than_classes(tmp_path: Path) -> None:
    """What they mean a loss of one's own knows; there are no scores."""
    store = store_of(DATA, tmp_path)
    assert_same_as_pyg(store, DATA.y, 3, of_thresholds, tmp_path, mean_of_rows=True)
    with make_trainer(store, 3, tmp_path, loss=of_thresholds) as trainer:
        assert set(trainer.evaluate().values()) == {None} and trainer.predict().shape == (store.num_nodes, 3)
    with pytest.raises(ooc.OocError, match="the model has 3 outputs, metric accuracy needs 4, one a class"):
        make_trainer(store, 3, tmp_path, loss=of_thresholds, metric="accuracy")
    with pytest.raises(ooc.OocError, match="the model has 3 outputs, the store has 4 classes"):
        make_trainer(store, 3, tmp_path, loss=nn.CrossEntropyLoss())


@pytest.mark.parametrize("loss", CLASSES.values(), ids=CLASSES.keys())
def test_classes(loss: Any, tmp_path: Path) -> None:
    """Weights, smoothing and ignored classes with torch's own divisor."""
    assert_same_as_pyg(store_of(DATA, tmp_path), DATA.y, 4, loss, tmp_path, mean_of_rows=loss is by_row)


@pytest.mark.parametrize("asked", ["balanced", "0.5,0,1,3"])
def test_class_weights_of_the_command_line(asked: str, tmp_path: Path) -> None:
    """PyG's full batch under ``F.cross_entropy(weight=…)``, with its weighted mean; balanced weights are
    scikit-learn's."""
    store = store_of(DATA, tmp_path)
    weight = torch.tensor([0.5, 0, 1, 3], dtype=torch.float64)
    if asked == "balanced":
        y = DATA.y[DATA.train_mask]
        weight = len(y) / (4 * torch.bincount(y, minlength=4).double())
    loss: Any = build_loss(settings(class_weights=asked), store)
    assert torch.equal(loss.weight, weight.float())
    loss.weight = loss.weight.double()

    def expected(outputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(outputs, labels, weight=loss.weight)

    with make_trainer(store, 4, tmp_path, loss=loss) as trainer:
        reference = FullBatch(trainer.model, DATA, DATA.y, expected)
        for _ in range(2):
            difference, whose = disagreement(train_epoch(trainer), reference.train(), floor=1e-3)
            assert difference <= 1e-9, whose


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["cross-entropy", "class weights", "ignored class", "sum"])
def test_cross_entropy_without_autograd_is_autograds_to_the_bit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    loss: Any = copy.deepcopy(CLASSES[name]).to(dtype)
    outputs = 30 * torch.randn(500, 4, generator=torch.Generator().manual_seed(0), dtype=dtype)
    labels = torch.randint(0, 4, (500,), generator=torch.Generator().manual_seed(1))
    resolved = resolve_loss(loss, store_of(DATA, tmp_path), columns=[4], dtype=dtype)
    found, gradient = resolved.gradient(outputs, labels)

    leaf = outputs.requires_grad_()
    expected = F.cross_entropy(leaf, labels, loss.weight, ignore_index=loss.ignore_index, reduction="sum")
    expected.backward()
    assert torch.equal(found, expected.detach())
    assert leaf.grad is not None and torch.equal(gradient, leaf.grad)


@pytest.mark.parametrize("loss", MULTILABEL.values(), ids=MULTILABEL.keys())
def test_several_labels_a_node(loss: Any, tmp_path: Path) -> None:
    """The mean is over rows and labels."""
    y = random_labels(DATA, COLUMNS)
    assert_same_as_pyg(labelled(DATA, y, tmp_path), y, COLUMNS, loss, tmp_path, mean_of_rows=False)


@pytest.mark.parametrize("loss", VALUES.values(), ids=VALUES.keys())
def test_values(loss: Any, tmp_path: Path) -> None:
    """Regression of several columns at once."""
    y = random_values(DATA, COLUMNS)
    by_row = not isinstance(loss, nn.Module)
    assert_same_as_pyg(labelled(DATA, y, tmp_path), y, COLUMNS, loss, tmp_path, mean_of_rows=by_row)


class Numbers(nn.Module):
    """A number a node, [N] if it is ``flat``, else [N, 1]."""

    def __init__(self, flat: bool) -> None:
        super().__init__()
        self.conv, self.flat = SAGEConv(DATA.num_features, 1), flat

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.conv(x, edge_index)
        return x.squeeze(-1) if self.flat else x


def squeezing(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.mse_loss(outputs.view(-1), labels)


def one_class(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs, labels.squeeze(1))


class Powers(nn.Module):
    """One loss a row, which is what it calls a reduction."""

    reduction = "none"

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return (outputs - labels).pow(4)


@pytest.mark.parametrize(
    ("flat", "y", "loss"),
    [
        (False, random_values(DATA, 1)[:, 0], squeezing),
        (False, random_values(DATA, 1)[:, 0], lambda o, y: F.mse_loss(o, y[:, None])),
        (True, random_values(DATA, 1)[:, 0], lambda o, y: F.l1_loss(o, y)),
        (True, random_values(DATA, 1)[:, 0], Powers()),
        (True, random_values(DATA, 1), lambda o, y: F.mse_loss(o[:, None], y)),
        (None, DATA.y[:, None], one_class),
        (None, DATA.y[:, None], lambda o, y: F.cross_entropy(o, y[:, 0])),
    ],
)
def test_outputs_and_labels_of_data_are_given_as_they_are(
    flat: bool | None, y: Tensor, loss: Any, tmp_path: Path
) -> None:
    """[N] or [N, 1] each, as a script has them. What takes no [N, 1], which a script squeezes before, is given [N]."""
    data = DATA.clone()
    data.y = y
    torch.manual_seed(2)
    model: nn.Module = GCN(DATA.num_features, 6, 2, 4) if flat is None else Numbers(flat)
    with tuned_trainer(model.double(), data, loss=loss, memory="64M", tile_rows=8, spill_dir=tmp_path) as trainer:
        reference = FullBatch(trainer.model, DATA, y, lambda *rows: loss(*rows).mean())
        reference.y = y  # of whole numbers, too
        for _ in range(2):
            difference, whose = disagreement(train_epoch(trainer), reference.train(), floor=1e-3)
            assert difference <= 1e-9, whose
    if y.dim() == 2 and flat is None:
        with tuned_trainer(model, data, loss=F.cross_entropy, memory="64M", spill_dir=tmp_path) as trainer:
            trainer.fit(1, eval_every=0)


SPREADING = [nn.MSELoss(), F.mse_loss, lambda outputs, labels: (outputs - labels).abs().mean()]


@pytest.mark.parametrize(
    ("flat", "loss"),
    ordinary(product([False, True], SPREADING), *zip(cycle([False, True]), SPREADING, strict=False)),
)
def test_what_torch_would_spread_to_all_pairs_of_nodes_is_refused(flat: bool, loss: Any, tmp_path: Path) -> None:
    """Outputs [N, 1] and labels [N], or the other way round; where the loss is the usual one it is of each node."""
    data = DATA.clone()
    data.y = random_values(DATA, 1) if flat else random_values(DATA, 1)[:, 0]
    said = r"\[N\], and y, \[N, 1\], .*y\[:, 0\]" if flat else r"\[N, 1\], and y, \[N\], .*y\[:, None\]"
    with pytest.raises(ModelError, match=said):
        tuned_trainer(Numbers(flat).double(), data, loss=loss, memory="64M", spill_dir=tmp_path)
    with tuned_trainer(Numbers(flat).double(), data, memory="64M", spill_dir=tmp_path) as trainer:
        trainer.fit(1, eval_every=0)


def of_known(outputs: Tensor, labels: Tensor) -> Tensor:
    """One loss a row, over what is known of it."""
    return ((outputs - labels.nan_to_num()) ** 2).masked_fill(labels.isnan(), 0).sum(dim=1)


INCOMPLETE = {
    "bce": (random_labels, nn.BCEWithLogitsLoss(reduction="none")),
    "positive weights": (random_labels, nn.BCEWithLogitsLoss(pos_weight=LABEL_WEIGHTS, reduction="none")),
    "mse": (random_values, nn.MSELoss(reduction="none")),
    "huber": (random_values, nn.HuberLoss(reduction="none")),
}


@pytest.mark.parametrize(
    ("name", "reduction"),
    ordinary(
        product(INCOMPLETE, ("mean", "sum")),
        *(("bce", "mean"), ("positive weights", "mean"), ("mse", "mean"), ("huber", "sum"), ("bce", "sum")),
    ),
)
def test_labels_that_are_missing_add_nothing(name: str, reduction: str, tmp_path: Path) -> None:
    """The mean is over those that are there, of all training nodes together."""
    make, each = INCOMPLETE[name]
    y = with_some_missing(make(DATA, COLUMNS))
    loss = copy.copy(each)
    loss.reduction = reduction

    def expected(outputs: Tensor, labels: Tensor) -> Tensor:
        known = ~labels.isnan()
        losses = each(outputs, labels.nan_to_num())[known]
        return losses.mean() if reduction == "mean" else losses.sum()

    store = labelled(DATA, y, tmp_path)
    assert store.num_incomplete > 20
    with make_trainer(store, COLUMNS, tmp_path, loss=loss) as trainer:
        wanted = y if y.is_floating_point() else y.double().masked_fill(y < 0, torch.nan)
        reference = FullBatch(trainer.model, DATA, wanted, expected)
        for _ in range(2):
            difference, whose = disagreement(train_epoch(trainer), reference.train(), floor=1e-3)
            assert difference <= 1e-9, whose


def test_a_loss_of_ones_own_knows_missing_labels_as_nan(tmp_path: Path) -> None:
    """One loss a row it gives, or is refused: how many labels all rows have, no mean over some of them knows."""
    y = with_some_missing(random_values(DATA, COLUMNS))
    assert_same_as_pyg(labelled(DATA, y, tmp_path), y, COLUMNS, of_known, tmp_path, mean_of_rows=True)
    store = labelled(DATA, with_some_missing(random_labels(DATA, COLUMNS)), tmp_path)

    def masked(outputs: Tensor, labels: Tensor) -> Tensor:
        known = ~labels.isnan()
        return F.binary_cross_entropy_with_logits(outputs[known], labels[known])

    for loss, said in (
        (masked, "masked is not the mean of its rows'"),
        (nn.MultiLabelSoftMarginLoss(), "is NaN where"),
    ):
        with pytest.raises(ModelError, match=said):
            make_trainer(store, COLUMNS, tmp_path, loss=loss)


def test_the_usual_loss_follows_from_the_labels(tmp_path: Path) -> None:
    """Cross-entropy, BCE, squared error."""
    cases = [
        (store_of(DATA, tmp_path), DATA.y, 4, nn.CrossEntropyLoss()),
        (labelled(DATA, random_labels(DATA, 2), tmp_path), random_labels(DATA, 2), 2, nn.BCEWithLogitsLoss()),
        (labelled(DATA, random_values(DATA, 2), tmp_path), random_values(DATA, 2), 2, nn.MSELoss()),
    ]
    for store, y, outputs, loss in cases:
        again = labelled(DATA, y, tmp_path) if y.dim() == 2 else store_of(DATA, tmp_path)
        with make_trainer(again, outputs, tmp_path) as trainer:
            expected = FullBatch(trainer.model, DATA, y, loss).train().loss
            assert trainer.fit(1, eval_every=0)[0].loss == pytest.approx(expected, rel=1e-12)
        assert store.num_nodes == again.num_nodes


def in_pairs(outputs: Tensor, labels: Tensor) -> Tensor:
    """Looks across rows: no sum of anything over rows."""
    return (outputs @ outputs.T).exp().mean()


def summed(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs, labels, reduction="sum")


def hardest(count: int) -> Callable[[Tensor, Tensor], Tensor]:
    """The mean of the largest losses, of all where there are fewer."""

    def of_hardest(outputs: Tensor, labels: Tensor) -> Tensor:
        losses = F.cross_entropy(outputs, labels, reduction="none")
        return losses.topk(min(count, len(losses))).values.mean()

    return of_hardest


def first_of(count: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Leaves out rows from the ``count``-th on, of those that it is given."""

    def of_first(outputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(outputs, labels, reduction="none") * (torch.arange(len(labels)) < count)

    return of_first


def doubled_from(count: int, *, row_by_row: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """Counts for more where there are as many rows."""

    def doubled(outputs: Tensor, labels: Tensor) -> Tensor:
        losses = F.cross_entropy(outputs, labels, reduction="none" if row_by_row else "mean")
        return losses * (2 if len(labels) >= count else 1)

    return doubled


WEIGHTS_OF_A_MODEL = nn.Parameter(torch.ones(3))


def penalised(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs, labels) + 0.1 * WEIGHTS_OF_A_MODEL.square().sum()


class Fading:
    """Counts for less after a hundred epochs, as it takes calls to be."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        self.calls += 1
        return F.cross_entropy(outputs, labels) * (1.0 if self.calls < 100 else 0.5)


class Learned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(outputs * self.scale, labels)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (in_pairs, "in_pairs is not the mean of its rows' losses"),
        (summed, "summed is not the mean"),
        (partial(F.cross_entropy, weight=WEIGHTS), r"not the mean .* weighs classes .*CrossEntropyLoss\(weight"),
        (hardest(10), "of_hardest is not the mean"),
        (hardest(100), "of_hardest is not the mean"),
        (first_of(40), "of_first is not the mean"),
        (first_of(1_500), "of_first is not the mean"),
        (doubled_from(20, row_by_row=True), "doubled is not the mean"),
        (doubled_from(1_500, row_by_row=False), "doubled is not the mean"),
        (penalised, "penalised is of more than outputs and labels"),
        (Fading(), "Fading changes what it is by being called"),
        (Learned(), "Learned has parameters of its own"),
        (nn.BCEWithLogitsLoss(), "BCEWithLogitsLoss takes a row of targets a node, the store's task is 'classes'"),
        (nn.MSELoss(), "MSELoss takes a row"),
        (nn.CrossEntropyLoss(reduction="none"), "reduction='none'"),
        (nn.CrossEntropyLoss(weight=WEIGHTS.float()), "its weight is torch.float32, the model is torch.float64"),
        (nn.CrossEntropyLoss(weight=WEIGHTS[:3]), "3 class weights, the model 4 outputs"),
        (nn.CrossEntropyLoss(weight=torch.zeros(4, dtype=torch.float64)), "leave no training row anything"),
        (nn.GaussianNLLLoss(), "GaussianNLLLoss cannot take"),
        (lambda outputs, labels: outputs.sum(dim=0), r"gives \[4\] for 5 rows"),
        (lambda outputs, labels: outputs, r"gives \[5, 4\] for 5 rows"),
        (lambda outputs, labels: torch.zeros(()), "cannot take"),
        (lambda outputs, labels: -outputs.log()[torch.arange(len(labels)), labels].sum(), "not the mean of its rows'"),
        (lambda outputs, labels: (-1 - outputs.abs()).sqrt().sum(dim=1), "no finite number"),
        ("cross", "give a torch loss or a callable"),
    ],
)
def test_what_is_no_mean_over_rows_is_refused(loss: Any, said: str, tmp_path: Path) -> None:
    """By name and in one line, before anything is written."""
    with pytest.raises(ModelError, match=said) as caught:
        make_trainer(store_of(DATA, tmp_path), 4, tmp_path, loss=loss)
    assert "\n" not in str(caught.value)


def test_more_rows_than_are_tried_are_told(tmp_path: Path) -> None:
    """A loss that goes another way by as many rows as training has is refused, with fewer it is taken."""
    store = store_of(random_data(GraphCase(nodes=12_000, edges=100, train=0.5)), tmp_path)
    with pytest.raises(ModelError, match="doubled goes another way by how many rows it is given"):
        make_trainer(store, 4, tmp_path, loss=doubled_from(5_000, row_by_row=False))
    make_trainer(store, 4, tmp_path, loss=doubled_from(11_000, row_by_row=False)).close()


MANY = 40
ONE_OF_MANY = torch.ones(MANY, dtype=torch.float64).index_fill_(0, torch.tensor([33]), 2.0)
TWICE_FROM_THE_FIFTH = torch.ones(MANY, dtype=torch.float64).index_fill_(0, torch.arange(5, MANY), 2.0)


class OfOneClass(nn.CrossEntropyLoss):
    """Is none of torch's own, whose meaning is known."""


def by_count(outputs: Tensor, labels: Tensor) -> Tensor:
    """Every class counts the same, however many rows it has."""
    weights = 1 / labels.bincount(minlength=MANY)[labels].to(outputs.dtype)
    return (weights * F.cross_entropy(outputs, labels, reduction="none")).sum() / weights.sum()


@pytest.mark.parametrize(
    "loss",
    [
        partial(F.nll_loss, weight=ONE_OF_MANY),
        partial(F.nll_loss, weight=TWICE_FROM_THE_FIFTH),
        OfOneClass(weight=ONE_OF_MANY),
        lambda outputs, labels: F.cross_entropy(outputs, labels, ignore_index=33),
        by_count,
    ],
    ids=["one weight", "weights from the fifth on", "a subclass", "one class ignored", "by count"],
)
def test_a_class_that_counts_otherwise_shows_wherever_it_is(loss: Any, tmp_path: Path) -> None:
    """Every class is tried, however many there are."""
    data = random_data(GraphCase(nodes=200, edges=400, classes=MANY))
    with pytest.raises(ModelError, match="is not the mean of its rows' losses"):
        make_trainer(store_of(data, tmp_path), MANY, tmp_path, loss=loss)


@pytest.mark.parametrize("classes", thorough([1, 2, 3, 4, 7], 3, 4))
def test_a_mean_over_rows_passes_whatever_the_number_of_classes(classes: int, tmp_path: Path) -> None:
    """And so does one loss a row."""
    data = random_data(GraphCase(nodes=60, edges=100, classes=classes))
    for loss in (focal, by_row, nn.NLLLoss()):
        make_trainer(store_of(data, tmp_path), classes + (classes == 1), tmp_path, loss=loss).close()


def of_rows(chosen: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """The mean of the squared errors of some rows alone."""
    return lambda outputs, targets: (outputs - targets)[chosen(targets)].square().mean()


@pytest.mark.parametrize(
    ("task", "loss"),
    [
        ("multilabel", of_rows(lambda labels: labels.any(dim=1))),
        ("multilabel", of_rows(lambda labels: ~labels.all(dim=1))),
        ("multilabel", of_rows(lambda labels: labels[:, 30] == 0)),
        ("values", of_rows(lambda values: values[:, 0] != 0)),
        ("values", of_rows(lambda values: values[:, 0] != -1)),
        ("values", of_rows(lambda values: values[:, 0].abs() < 4)),
        ("values", lambda outputs, values: (outputs - values.log()).square().mean().sqrt()),
    ],
    ids=["no label", "every label", "one label", "zero", "minus one", "far off", "no number of some"],
)
def test_targets_that_count_otherwise_show(task: str, loss: Any, tmp_path: Path) -> None:
    """Of several labels a node, and of values, what a loss is likely to leave out is tried."""
    y = random_labels(DATA, 64) if task == "multilabel" else random_values(DATA, 2)
    with pytest.raises(ModelError, match="is not the mean of its rows' losses"):
        make_trainer(labelled(DATA, y, tmp_path), y.shape[1], tmp_path, loss=loss)


class TwoTasks(nn.Module):
    """Classes and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.classes, self.number = SAGEConv(DATA.num_features, 6), nn.Linear(6, 4), nn.Linear(6, 1)

    def forward(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        x = self.conv(x, edge_index)
        return self.classes(x), self.number(x)


def of_both_tasks(results: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    return F.cross_entropy(results[0], labels[:, 0].long()) + F.mse_loss(results[1], labels[:, 1:])


def test_a_loss_that_takes_no_made_up_labels_is_tried_on_the_stores(tmp_path: Path) -> None:
    """As where one column of them is a class; what is no mean is refused as ever."""
    data = DATA.clone()
    data.y = torch.stack([DATA.y.clamp(min=0).double(), DATA.x[:, 0]], dim=1)
    options: dict[str, Any] = {"memory": "64M", "tile_rows": 8, "spill_dir": tmp_path}
    torch.manual_seed(2)
    with tuned_trainer(TwoTasks().double(), data, loss=of_both_tasks, **options) as trainer:
        reference = FullBatch(trainer.model, DATA, data.y, of_both_tasks)  # type: ignore[arg-type]
        reference.model.forward = lambda *given: Several(TwoTasks.forward(reference.model, *given))
        for _ in range(2):
            difference, whose = disagreement(train_epoch(trainer), reference.train(), floor=1e-3)
            assert difference <= 1e-9, whose
    for loss, said in (
        (lambda results, labels: 2 * of_both_tasks(results, labels) * len(labels), "is not the mean of its rows'"),
        (
            lambda results, labels: F.cross_entropy(results[0], labels.long()),
            r"cannot take outputs \[r, \d\] and labels .* of r training rows",
        ),
    ):
        with pytest.raises(ModelError, match=said):
            tuned_trainer(TwoTasks().double(), data, loss=loss, **options)


class Several(tuple[Tensor, ...]):
    """Results of which rows are taken together."""

    def __getitem__(self, key: Any) -> Any:
        return Several(one[key] for one in self) if isinstance(key, Tensor) else super().__getitem__(key)


class OneNumber(nn.Module):
    """Gives a number a node, in a column or by itself."""

    def __init__(self, squeezed: bool) -> None:
        super().__init__()
        self.gcn, self.squeezed = GCN(DATA.num_features, 6, 2, 1), squeezed

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.gcn(x, edge_index)
        return out.squeeze() if self.squeezed else out


FRACTIONS: dict[str, tuple[Tensor, Any]] = {
    "values": (torch.randn(120, dtype=torch.float64), None),
    "mse": (torch.arange(120) % 5, nn.MSELoss()),
    "l1": (torch.arange(120) % 5, F.l1_loss),
    "bce": (torch.arange(120) % 2, nn.BCEWithLogitsLoss()),
    "bce of shares": (torch.arange(120) / 119, nn.BCEWithLogitsLoss()),
    "bce, a function": ((torch.arange(120) % 2).double(), F.binary_cross_entropy_with_logits),
}
SHAPES = {
    "labels in no column": ((), False),
    "neither": ((), True),
    "outputs in no column": ((1,), True),
    "both": ((1,), False),
}


@pytest.mark.parametrize(
    ("which", "shapes"),
    ordinary(
        product(FRACTIONS, SHAPES),
        *zip(FRACTIONS, cycle(("neither", "both")), strict=False),
        *(("values", "both"), ("bce", "neither")),
    ),
)
def test_of_data_fractions_and_the_loss_say_that_labels_are_no_classes(which: str, shapes: str, tmp_path: Path) -> None:
    """One number a node, as those who train on one number write it."""
    (y, loss), (columns, squeezed) = FRACTIONS[which], SHAPES[shapes]
    torch.manual_seed(0)
    data, model = copy.copy(DATA), OneNumber(squeezed).double()
    spreads = isinstance(loss, nn.MSELoss) or loss is F.l1_loss  # which is refused where shapes differ
    data.y = y.view(-1, *(columns if not spreads else () if squeezed else (1,)))
    expected = copy.deepcopy(model)
    options: dict[str, Any] = {
        "memory": "64M",
        "spill_dir": tmp_path,
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
    }
    with ooc.Trainer(model, data, loss=loss, **options) as trainer:
        losses = [record.loss for record in trainer.fit(2, progress=False)]
        predicted = trainer.predict()
    optimizer, mask = torch.optim.SGD(expected.parameters(), 0.1), data.train_mask
    for found in losses:
        optimizer.zero_grad()
        wanted = (loss or F.mse_loss)(expected(data.x, data.edge_index)[mask].view(-1), y[mask].double())
        wanted.backward()
        optimizer.step()
        assert found == pytest.approx(wanted.item(), rel=1e-10)
    with torch.no_grad():
        torch.testing.assert_close(
            predicted.view(-1), expected(data.x, data.edge_index).view(-1), rtol=1e-9, atol=1e-11
        )


def test_values_are_not_rounded_to_what_features_are(tmp_path: Path) -> None:
    """Of PyG's Data, whose features may be whole numbers or of 32 bits. To a regression -1 is a number."""
    values, mask, losses = random_values(DATA, 2), DATA.train_mask, []
    for x, y in ((DATA.x.float(), values), ((DATA.x * 9).long(), values), (DATA.x, values.sign().long())):
        model = GCN(x.shape[1], 4, 1, 2).double()
        expected = F.mse_loss(model(x.double(), DATA.edge_index)[mask], y[mask].double()).item()
        data = Data(x, DATA.edge_index, y=y, train_mask=mask)
        with ooc.Trainer(model, data, loss=nn.MSELoss(), memory="64M", spill_dir=tmp_path) as trainer:
            losses.append((trainer.fit(1, eval_every=0, progress=False)[0].loss, expected))
    assert all(found == pytest.approx(expected, rel=1e-12) for found, expected in losses)


def test_outputs_must_be_as_many_as_labels(tmp_path: Path) -> None:
    """Elementwise losses would otherwise stretch one over the other."""
    store = labelled(DATA, random_values(DATA, 1), tmp_path)
    with pytest.raises(ModelError, match="4 outputs, loss MSELoss needs 1"):
        make_trainer(store, 4, tmp_path)
    with pytest.raises(ModelError, match="takes one class a node, the store's task is 'values'"):
        make_trainer(store, 1, tmp_path, loss=nn.CrossEntropyLoss())
    of_each_node = nn.BCEWithLogitsLoss(weight=torch.ones(store.split_sizes["train"], 1, dtype=torch.float64))
    with pytest.raises(ModelError, match=r"its weight \[\d+, 1\] is not one number a label, \[1\]"):
        make_trainer(store, 1, tmp_path, loss=of_each_node)


QUANTILES = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)


def pinball(outputs: Tensor, labels: Tensor) -> Tensor:
    """Several quantiles of one number."""
    short = labels - outputs
    return torch.maximum(QUANTILES * short, (QUANTILES - 1) * short).mean()


def distilled(outputs: Tensor, labels: Tensor) -> Tensor:
    """A class and what a teacher says of all."""
    soft = F.kl_div(outputs.log_softmax(1), labels[:, 1:].softmax(1), reduction="batchmean")
    return F.cross_entropy(outputs, labels[:, 0].abs().long() % 3) + soft


@pytest.mark.parametrize(("loss", "outputs", "labels"), [(pinball, 3, 1), (distilled, 3, 4)])
def test_a_loss_of_ones_own_may_be_of_more_outputs_or_labels(
    loss: Any, outputs: int, labels: int, tmp_path: Path
) -> None:
    """Which no metric is of: there are no scores then, and what goes by them is refused, where a training went on past
    its patience."""
    y = random_values(DATA, labels)
    store = labelled(DATA, y, tmp_path)
    assert_same_as_pyg(store, y, outputs, loss, tmp_path, mean_of_rows=False)
    with make_trainer(store, outputs, tmp_path, loss=loss) as trainer:
        record = trainer.fit(epochs=1, progress=False)[0]
        assert record.train_score is record.valid_score is record.test_score is None
        assert set(trainer.evaluate().values()) == {None}
        with pytest.raises(OptionError, match="patience counts evaluations, and there are no scores of these outputs"):
            trainer.fit(epochs=9, patience=1, progress=False)
    with pytest.raises(OptionError, match=f"has {outputs} outputs, metric rmse needs {labels}, one a label"):
        make_trainer(store, outputs, tmp_path, loss=loss, metric="rmse")


@pytest.mark.parametrize("task", ["multilabel", "values"])
def test_a_training_row_without_a_label_is_damage(task: str, tmp_path: Path) -> None:
    """Not a loss of something else."""
    y = random_labels(DATA, 2) if task == "multilabel" else random_values(DATA, 2)
    y[DATA.train_mask.nonzero()[3]] = -1 if task == "multilabel" else float("nan")
    with (
        make_trainer(labelled(DATA, y, tmp_path), 2, tmp_path) as trainer,
        pytest.raises(StoreError, match="y of the store is damaged"),
    ):
        trainer.fit(1, eval_every=0)


def test_an_unknown_task_is_refused(tmp_path: Path) -> None:
    """A store of a later version is no store of classes."""
    metadata = store_of(DATA, tmp_path).path / "zarr.json"
    group = json.loads(metadata.read_text())
    group["attributes"]["task"] = "links"
    metadata.write_text(json.dumps(group))
    with pytest.raises(StoreError, match="'links'"):
        open_store(metadata.parent)
