# SPDX-License-Identifier: Apache-2.0
"""Scores are those of their definitions, written out anew here, and do not depend on how rows are cut."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch_geometric.nn.models import GCN

from ooc.errors import BudgetError, OptionError
from ooc.storage.store import SPLITS, Store
from ooc.train.metrics import Metric, average_precision, roc_auc, tally
from tests.exactness.comparison import store_of, tuned_trainer
from tests.examples import thorough
from tests.graphs import GraphCase, random_data
from tests.train.labelled import FullBatch, labelled, random_labels, random_values, with_some_missing

Array = npt.NDArray[np.float64]

DATA = random_data(GraphCase(nodes=200, edges=700, classes=4, unlabelled=20))
TWO = random_data(GraphCase(nodes=200, edges=700, classes=2, unlabelled=20))


# ---- definitions ------------------------------------------------------------------------------------------


def auc_by_pairs(scores: Array, positive: npt.NDArray[np.bool_]) -> float:
    """The share of pairs that are in order, ties counting half."""
    apart = scores[positive][:, None] - scores[~positive][None, :]
    return float(((apart > 0) + 0.5 * (apart == 0)).mean())


def precision_by_thresholds(scores: Array, positive: npt.NDArray[np.bool_]) -> float:
    """Precision at every threshold, weighted by the recall that it adds."""
    total, recall = 0.0, 0.0
    for threshold in sorted(set(scores.tolist()), reverse=True):
        chosen = scores >= threshold
        now = (chosen & positive).sum() / positive.sum()
        total += (now - recall) * (chosen & positive).sum() / chosen.sum()
        recall = now
    return float(total)


def f1(predicted: npt.NDArray[np.bool_], actual: npt.NDArray[np.bool_]) -> float:
    hits = (predicted & actual).sum()
    return float(2 * hits / (predicted.sum() + actual.sum())) if predicted.any() or actual.any() else 0.0


def expected(metric: Metric, outputs: Array, y: Array) -> float | None:
    """The score of one split's rows by the definition."""
    if y.ndim == 1 and metric.ranked:
        outputs, y = outputs[:, 1:] - outputs[:, :1], y[:, None]
    known = ~np.isnan(y) & (y != -1) if y.ndim == 2 and metric is not Metric.R2 else np.ones(y.shape, dtype=np.bool_)
    match metric:
        case Metric.ACCURACY:
            return float((outputs.argmax(1) == y).mean())
        case Metric.MICRO_F1 if y.ndim == 1:
            return float((outputs.argmax(1) == y).mean())
        case Metric.MICRO_F1:
            return f1((outputs > 0)[known], (y == 1)[known])
        case Metric.MACRO_F1 if y.ndim == 1:
            chosen = outputs.argmax(1)
            return float(np.mean([f1(chosen == k, y == k) for k in set(y.tolist()) | set(chosen.tolist())]))
        case Metric.MACRO_F1:
            columns = zip(outputs.T, y.T, known.T, strict=True)
            return float(np.mean([f1(o[there] > 0, answer[there] == 1) for o, answer, there in columns]))
        case Metric.ROC_AUC | Metric.AVERAGE_PRECISION:
            one = auc_by_pairs if metric is Metric.ROC_AUC else precision_by_thresholds
            columns = [(o[there], answer[there] == 1) for o, answer, there in zip(outputs.T, y.T, known.T, strict=True)]
            both = [one(scores, positive) for scores, positive in columns if 0 < positive.sum() < len(positive)]
            return float(np.mean(both)) if both else None
        case Metric.MAE:
            return float(np.abs(outputs - y)[known].mean())
        case Metric.RMSE:
            return float(np.sqrt(((outputs - y) ** 2)[known].mean()))
        case Metric.R2:
            return float((1 - ((outputs - y) ** 2).sum(0) / ((y - y.mean(0)) ** 2).sum(0)).mean())


# ---- the trainer's --------------------------------------------------------------------------------------------

CASES = [
    *(("classes", metric) for metric in (Metric.ACCURACY, Metric.MICRO_F1, Metric.MACRO_F1)),
    *(("two classes", metric) for metric in (Metric.ROC_AUC, Metric.AVERAGE_PRECISION, Metric.MACRO_F1)),
    *(("multilabel", metric) for metric in Metric if metric.value not in ("accuracy", "mae", "rmse", "r2")),
    *(("values", metric) for metric in (Metric.MAE, Metric.RMSE, Metric.R2)),
    *(("some missing", metric) for metric in Metric if metric.value not in ("accuracy", "mae", "rmse", "r2")),
    ("some values missing", Metric.MAE),
    ("some values missing", Metric.RMSE),
]


def case_of(labels: str, folder: Path) -> tuple[Store, torch.Tensor, int]:
    """The store, its labels by node, and how many outputs they need."""
    match labels:
        case "classes":
            return store_of(DATA, folder), DATA.y, 4
        case "two classes":
            return store_of(TWO, folder), TWO.y, 2
        case "multilabel":
            y = random_labels(DATA, 3)
            return labelled(DATA, y, folder), y, 3
        case "some missing":
            y = with_some_missing(random_labels(DATA, 3))
            return labelled(DATA, y, folder), y, 3
        case "some values missing":
            y = with_some_missing(random_values(DATA, 2))
            return labelled(DATA, y, folder), y, 2
        case _:
            y = random_values(DATA, 2)
            return labelled(DATA, y, folder), y, 2


@pytest.mark.parametrize(
    ("labels", "metric"),
    thorough(
        CASES,
        *(("two classes", Metric.MACRO_F1), ("multilabel", Metric.AVERAGE_PRECISION)),
        *(("some missing", Metric.ROC_AUC), ("some missing", Metric.MICRO_F1), ("some values missing", Metric.RMSE)),
    ),
    ids=lambda case: getattr(case, "value", case),
)
def test_every_split_is_scored_by_the_definition(labels: str, metric: Metric, tmp_path: Path) -> None:
    """And to the same bits with other blocks and threads."""
    store, y, outputs = case_of(labels, tmp_path)
    data = TWO if labels == "two classes" else DATA
    found = []
    for options in ({"threads": 1}, {"threads": 2, "block_rows": 16, "slab_columns": 2}):
        torch.manual_seed(1)
        model = GCN(store.num_features, 6, 2, outputs).double()
        with tuned_trainer(
            model, store, "64M", "64M", metric=metric.value, tile_rows=8, spill_dir=tmp_path, **options
        ) as trainer:
            trainer.fit(2, eval_every=0)
            found.append(trainer.evaluate())
            logits = FullBatch(model, data, y, lambda *_: _[0].sum()).outputs()
    masks = {"train": data.train_mask, "valid": data.val_mask, "test": data.test_mask}
    labels_of = y.double().numpy() if y.is_floating_point() else y.numpy()
    for split in SPLITS:
        rows = masks[split].numpy()
        assert found[0][f"{split}_score"] == pytest.approx(expected(metric, logits[rows], labels_of[rows]), rel=1e-9)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("labels", "metric"),
    [
        *(("values", metric) for metric in ("mae", "r2")),
        ("multilabel", "roc-auc"),
        *(("two classes", metric) for metric in ("roc-auc", "average-precision")),
    ],
)
def test_outputs_that_are_no_numbers_have_no_score(labels: str, metric: str, tmp_path: Path) -> None:
    """And no epoch is the best by it. An error of NaN ended a run that was to go on, as JSON has none."""
    store, _, outputs = case_of(labels, tmp_path)
    model = GCN(store.num_features, 6, 2, outputs).double()
    with tuned_trainer(model, store, "64M", "64M", metric=metric, spill_dir=tmp_path, out=tmp_path / "run") as trainer:
        for parameter in model.parameters():
            parameter.data.fill_(torch.nan)
        (record,) = trainer.fit(1, allow_nonfinite=True, progress=False)
        assert record.valid_score is record.test_score is trainer.best is None


def test_the_usual_metric_follows_from_the_labels(tmp_path: Path) -> None:
    """Accuracy, ROC-AUC, mean absolute error."""
    for labels, metric in (("classes", Metric.ACCURACY), ("multilabel", Metric.ROC_AUC), ("values", Metric.MAE)):
        store, _, outputs = case_of(labels, tmp_path)
        model = GCN(store.num_features, 6, 2, outputs).double()
        assert tuned_trainer(model, store, "64M", "64M", spill_dir=tmp_path).metric is metric


@pytest.mark.parametrize(
    ("labels", "metric", "said"),
    [
        ("classes", "roc-auc", "is for two classes, the store has 4"),
        ("classes", "average-precision", "is for two classes"),
        ("classes", "mae", "task classes; use one of accuracy, micro-f1, macro-f1, roc-auc"),
        ("multilabel", "accuracy", "task multilabel; use one of micro-f1"),
        ("values", "macro-f1", "task values; use one of mae, rmse, r2"),
        ("some values missing", "r2", "r2 is of labels that are all there, .* misses some; use mae"),
        ("classes", "beauty", "'beauty' is not one of accuracy, "),
    ],
)
def test_metrics_that_do_not_fit_are_refused(labels: str, metric: str, said: str, tmp_path: Path) -> None:
    """With those that do."""
    store, _, outputs = case_of(labels, tmp_path)
    with pytest.raises(OptionError, match=said):
        tuned_trainer(GCN(store.num_features, 6, 2, outputs).double(), store, metric=metric, spill_dir=tmp_path)


def test_scores_that_are_held_count_against_the_budget(tmp_path: Path) -> None:
    """A ranking needs all outputs: refused, with the budget that would do, where a counted metric runs."""
    store, _, outputs = case_of("multilabel", tmp_path)
    model = GCN(store.num_features, 6, 2, outputs).double()
    budget = 9000
    with tuned_trainer(model, store, "64M", budget, metric="micro-f1", spill_dir=tmp_path, tile_rows=8) as trainer:
        trainer.fit(1, eval_every=0)
    with pytest.raises(BudgetError, match="give host_budget="):
        tuned_trainer(model, store, "64M", budget, metric="roc-auc", spill_dir=tmp_path, tile_rows=8)


# ---- by themselves --------------------------------------------------------------------------------------------

RANKED = st.lists(st.tuples(st.integers(-5, 5), st.booleans()), min_size=1, max_size=40)


@given(RANKED)
def test_rankings_with_ties(rows: list[tuple[int, bool]]) -> None:
    """As by comparing all pairs and trying all thresholds; None where there is one class only."""
    import scipy.stats  # here, not where every process collects all tests

    scores, positive = np.array([float(s) for s, _ in rows]), np.array([p for _, p in rows])
    if positive.all() or not positive.any():
        assert roc_auc(scores, positive) is None and average_precision(scores, positive) is None
        return
    assert roc_auc(scores, positive) == pytest.approx(auc_by_pairs(scores, positive), abs=1e-12)
    assert average_precision(scores, positive) == pytest.approx(precision_by_thresholds(scores, positive), abs=1e-12)
    statistic = scipy.stats.mannwhitneyu(scores[positive], scores[~positive]).statistic
    assert roc_auc(scores, positive) == pytest.approx(statistic / positive.sum() / (~positive).sum(), abs=1e-12)


@pytest.mark.parametrize("metric", [Metric.ACCURACY, Metric.MACRO_F1, Metric.MICRO_F1, Metric.MAE, Metric.R2])
@given(st.integers(2, 30), st.integers(1, 10), st.integers(0, 1000))
def test_tallies_of_parts_add_up(metric: Metric, rows: int, height: int, seed: int) -> None:
    """Whatever the parts."""
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 3, (rows,), generator=generator)
    if metric in (Metric.MAE, Metric.R2):
        labels = torch.randn(rows, 3, generator=generator, dtype=torch.float64) + 100
    whole, total = tally(metric, outputs, labels), None
    for start in range(0, rows, height):
        part = tally(metric, outputs[start : start + height], labels[start : start + height])
        if total is None:
            total = part
        else:
            total.add(part)
    assert total is not None
    assert total.value() == pytest.approx(whole.value(), rel=1e-9)
    assert whole.value() == pytest.approx(expected(metric, outputs.numpy(), labels.numpy()), rel=1e-9)


@given(st.integers(2, 300), st.integers(1, 5), st.integers(0, 1000))
def test_r2_on_the_cpu_is_numpys_to_the_bit(rows: int, columns: int, seed: int) -> None:
    """Sums included, whatever the processor."""
    generator = torch.Generator().manual_seed(seed)
    outputs, values = torch.randn(2, rows, columns, generator=generator, dtype=torch.float64)
    assert tally(Metric.R2, outputs, values).value() == expected(Metric.R2, outputs.numpy(), values.numpy())


def test_r2_of_values_that_never_vary() -> None:
    """1 where they are met, otherwise 0; None for a single row."""
    values = torch.full((4, 1), 2.0, dtype=torch.float64)
    assert tally(Metric.R2, values, values).value() == 1.0
    assert tally(Metric.R2, values + 1, values).value() == 0.0
    assert tally(Metric.R2, values[:1], values[:1]).value() is None
