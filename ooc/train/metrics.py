# SPDX-License-Identifier: Apache-2.0
"""Scores of predictions: some are counted as the outputs come, others need all outputs ranked.

Shapes: r rows of one split, C outputs, L label columns. Definitions are scikit-learn's; for several labels a node those
of OGB's evaluators (Hu et al., "Open Graph Benchmark", NeurIPS 2020): the mean over the labels that have both positive
and negative rows. Missing labels do not count.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ooc.errors import OptionError
from ooc.kernels.tensors import largest_columns
from ooc.model.lowering.values import TileMoments
from ooc.storage.store import SPLITS, Store, Task
from ooc.suggestions import check_choice

Floats = npt.NDArray[np.floating]
Ranked = Callable[[Floats, npt.NDArray[np.bool_]], float | None]
Scores = dict[str, float | None]
"""``train_score``, ``valid_score`` and ``test_score``, by name."""

FALLING = ("mae", "rmse")
"""The metrics of which lower is better."""


class Metric(Enum):
    """What evaluation measures."""

    ACCURACY = "accuracy"
    MICRO_F1 = "micro-f1"
    MACRO_F1 = "macro-f1"
    ROC_AUC = "roc-auc"
    AVERAGE_PRECISION = "average-precision"
    MAE = "mae"
    RMSE = "rmse"
    R2 = "r2"

    @property
    def higher_is_better(self) -> bool:
        return self.value not in FALLING

    @property
    def ranked(self) -> bool:
        """Whether all rows' outputs must be held at once."""
        return self in (Metric.ROC_AUC, Metric.AVERAGE_PRECISION)

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks that the metric is defined for."""
        match self:
            case Metric.ACCURACY:
                return (Task.CLASSES,)
            case Metric.MICRO_F1 | Metric.MACRO_F1 | Metric.ROC_AUC | Metric.AVERAGE_PRECISION:
                return (Task.CLASSES, Task.MULTILABEL)
            case Metric.MAE | Metric.RMSE | Metric.R2:
                return (Task.VALUES,)


def resolve_metric(name: str | None, task: Task, classes: int) -> Metric:
    """Return the metric of that name, or the task's usual one. Raises OptionError if it is not defined for the task."""
    if name is None:
        return {Task.CLASSES: Metric.ACCURACY, Task.MULTILABEL: Metric.ROC_AUC, Task.VALUES: Metric.MAE}[task]
    check_choice("metric", name, [metric.value for metric in Metric])
    metric = Metric(name)
    if task not in metric.tasks:
        fitting = ", ".join(other.value for other in Metric if task in other.tasks)
        raise OptionError(f"metric {name} is not for a store of the task {task.value}; use one of {fitting}")
    if metric.ranked and task is Task.CLASSES and classes != 2:
        raise OptionError(f"metric {name} is for two classes, the store has {classes}")
    return metric


# ---- counted ------------------------------------------------------------------------------------------------
#
# Tallies stay where outputs were computed, and ``value`` alone brings them to the host: while a program runs, nobody
# waits for a device.


class Tally(Protocol):
    """The intermediate result of some rows; those of different rows of a split are added up."""

    def add(self, other: Self) -> None: ...

    def value(self) -> float | None: ...


TALLY_BYTES = 3 * 8
"""Bytes for each column of the outputs: the most that a tally has."""


def tally(metric: Metric, outputs_rC: Tensor, labels: Tensor) -> Tally:
    """Return the tally of a counted metric for some rows: classes [r], or labels or values [r, L]."""
    match metric:
        case Metric.ACCURACY:
            hits = (largest_columns(outputs_rC) == labels).sum()
            return Sums(torch.stack((torch.full_like(hits, len(labels)), hits)), _mean)
        case Metric.MICRO_F1:
            return Sums(_confusion(outputs_rC, labels), _micro_f1)
        case Metric.MACRO_F1:
            return Sums(_confusion(outputs_rC, labels), partial(_macro_f1, every_label=labels.dim() == 2))
        case Metric.MAE | Metric.RMSE:
            known, squared = ~labels.isnan(), metric is Metric.RMSE
            errors = (outputs_rC - labels).abs().double().masked_fill_(~known, 0)
            total = (errors**2 if squared else errors).sum()
            return Sums(torch.stack((known.sum(dtype=torch.float64), total)), partial(_mean, root=squared))
        case Metric.R2:
            return _squared_errors(outputs_rC, labels)
        case _:
            raise AssertionError(f"{metric} is not counted")


@dataclass(slots=True)
class Sums:
    """Sums over rows, and the function that makes a score of them."""

    sums: Tensor
    made: Callable[[npt.NDArray[Any]], float | None]

    def add(self, other: Self) -> None:
        self.sums += other.sums

    def value(self) -> float | None:
        return self.made(self.sums.cpu().numpy())


def _mean(sums_2: npt.NDArray[Any], *, root: bool = False) -> float:
    """Return the mean from the number of rows or entries and the sum over them (hits, absolute errors); ``root``: the
    root of the mean of squared errors. Rows of a split have some label each."""
    count, total = sums_2.tolist()
    return math.sqrt(total / count) if root else float(total / count)


def _micro_f1(counts_3C: npt.NDArray[np.int64]) -> float:
    hits, predictions, occurrences = counts_3C.sum(axis=1).tolist()
    return 2 * hits / (predictions + occurrences) if predictions + occurrences else 0.0


def _macro_f1(counts_3C: npt.NDArray[np.int64], *, every_label: bool) -> float | None:
    """Return the mean F1 score of the classes that occur in the split or among its predictions, or of all labels of
    multilabel nodes, where a label that never occurs and is never predicted scores 0, as in scikit-learn."""
    hits_C, predictions_C, occurrences_C = counts_3C
    both_C = predictions_C + occurrences_C  # twice the true positives, and all false ones
    counted = (both_C > 0) | every_label
    scores = 2 * hits_C[counted] / np.maximum(both_C[counted], 1)
    return float(scores.mean()) if len(scores) else None


def _confusion(outputs_rC: Tensor, labels: Tensor) -> Tensor:
    """Return how often every class or label was predicted correctly, was predicted, and occurs: [3, C] int64."""
    if labels.dim() == 2:
        predicted, actual = (outputs_rC > 0) & ~labels.isnan(), labels > 0.5
        return torch.stack([(predicted & actual).sum(dim=0), predicted.sum(dim=0), actual.sum(dim=0)])
    classes, chosen = outputs_rC.shape[1], largest_columns(outputs_rC)
    hits = labels.masked_fill(chosen != labels, classes)  # an additional class for all others
    return torch.stack([_occurrences(of, classes + 1)[:classes] for of in (hits, chosen, labels)])


def _occurrences(classes_r: Tensor, classes: int) -> Tensor:
    """Return how often each class occurs, [C] int64. bincount would make the host wait for a device, to find the
    largest class."""
    if classes_r.device.type == "cpu":
        return torch.bincount(classes_r, minlength=classes)
    counts_C = torch.zeros(classes, dtype=torch.int64, device=classes_r.device)
    return counts_C.index_add_(0, classes_r, torch.ones_like(classes_r))


@dataclass(slots=True)
class SquaredErrors:
    """For each column [L], in float64: the ``moments`` of the values, and squared errors."""

    moments: TileMoments
    error_L: Tensor

    def add(self, other: Self) -> None:
        self.moments, self.error_L = self.moments.joined(other.moments), self.error_L + other.error_L

    def value(self) -> float | None:
        """The mean over columns of 1 - errors / deviations; None with fewer than two rows.

        A column that never varies scores 1 if it is predicted exactly, otherwise 0.
        """
        if self.moments.count < 2:
            return None
        deviation_L, error_L = torch.stack((self.moments.deviations, self.error_L)).cpu().numpy()
        varying = deviation_L > 0
        share_L = np.divide(error_L, deviation_L, out=np.zeros_like(error_L), where=varying)
        constant_L = np.where(error_L == 0, 1.0, 0.0)
        return float(np.where(varying, 1 - share_L, constant_L).mean())


def _squared_errors(outputs_rC: Tensor, values_rL: Tensor) -> SquaredErrors:
    rows, values_rL = len(values_rL), values_rL.double()
    mean_L = _column_sums(values_rL) / rows
    error_L = _column_sums((outputs_rC.double() - values_rL) ** 2)
    return SquaredErrors(TileMoments(rows, mean_L, _column_sums((values_rL - mean_L) ** 2)), error_L)


def _column_sums(rows_rL: Tensor) -> Tensor:
    """Return column sums [L]. On the CPU they are NumPy's, whose order of summing does not depend on the processor's
    vectors."""
    return torch.from_numpy(rows_rL.numpy().sum(axis=0)) if rows_rL.device.type == "cpu" else rows_rL.sum(dim=0)


# ---- ranked -------------------------------------------------------------------------------------------------


RANKING_BYTES = 64
"""Bytes a row for ranking one column: the column, its order, sums along it."""


def roc_auc(scores: Floats, positive: npt.NDArray[np.bool_]) -> float | None:
    """Return the area under the ROC curve of ``scores`` [r] for the rows marked ``positive`` [r]; None with only one
    class.

    It is the Mann-Whitney statistic, in which ties count half; NaN if some scores are.
    """
    positives = int(positive.sum())
    negatives = len(positive) - positives
    if not positives or not negatives:
        return None
    if np.isnan(scores).any():
        return math.nan
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    last_rank = np.cumsum(counts)
    mean_rank = last_rank - (counts - 1) / 2
    rank_sum = float(mean_rank[inverse][positive].sum())
    return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives)


def average_precision(scores: Floats, positive: npt.NDArray[np.bool_]) -> float | None:
    """Return Σ recall step × precision over falling thresholds, with equal scores in one step; None with only one
    class, NaN if some scores are."""
    positives = int(positive.sum())
    if not positives or positives == len(positive):
        return None
    if np.isnan(scores).any():
        return math.nan
    order = np.argsort(scores)[::-1]
    ranked = scores[order]
    last_of_ties = np.append(np.flatnonzero(ranked[1:] != ranked[:-1]), len(ranked) - 1)
    hits = np.cumsum(positive[order])[last_of_ties]
    steps = np.diff(hits, prepend=0) / positives
    return float((steps * hits / (last_of_ties + 1)).sum())


RANKINGS: dict[Metric, Ranked] = {Metric.ROC_AUC: roc_auc, Metric.AVERAGE_PRECISION: average_precision}


def named_scores(by_split: Mapping[str, float | None]) -> Scores:
    """Return scores as in records; None instead of a number that is not finite, which can be no best score."""
    return {f"{split}_score": None if s is None or not math.isfinite(s) else s for split, s in by_split.items()}


# ---- scoring while outputs go by ----------------------------------------------------------------------------


class Scorer:
    """A metric whose parts add up: ``begin``, then ``of_rows`` for the rows of a tile (on any thread) and ``add`` in
    order, then ``scores``. ``metric`` None: nothing is scored."""

    def __init__(self, metric: Metric | None, outputs: int) -> None:
        self.metric = metric
        self._tallies: dict[str, Tally] = {}
        self.host_bytes = 0
        self.device_bytes = 2 * len(SPLITS) * outputs * TALLY_BYTES
        """Bytes for every split so far and for one tile."""
        self.outputs: Floats | None = None
        """What is kept of every row [rows, L], if anything."""

    def begin(self) -> None:
        self._tallies = {}

    def of_rows(self, rows: Tensor, outputs_rC: Tensor, labels: Tensor) -> Tally | None:
        return None if self.metric is None else tally(self.metric, outputs_rC, labels)

    def add(self, split: str, part: Tally) -> None:
        if split in self._tallies:
            self._tallies[split].add(part)
        else:
            self._tallies[split] = part

    def scores(self) -> dict[str, float | None]:
        return {split: self._tallies[split].value() if split in self._tallies else None for split in SPLITS}


def make_scorer(store: Store, metric: Metric | None, *, rows: int, outputs: int, dtype: torch.dtype) -> Scorer:
    """Return the scorer of ``metric``, or, if None, of the usual one as far as it applies to such outputs. Scored rows
    are among the first ``rows``, with ``outputs`` outputs of type ``dtype``."""
    asked, metric = metric, metric or resolve_metric(None, store.task, store.num_classes)
    if metric is Metric.R2 and store.num_incomplete:
        raise OptionError(f"metric r2 is of labels that are all there, {store.path} misses some; use mae")
    of_classes = store.task is Task.CLASSES
    needed = store.num_classes if of_classes else store.array("y").columns
    if outputs < needed or (outputs != needed and not of_classes):
        if asked is not None:
            each = "class" if of_classes else "label"
            needs = f"metric {metric.value} needs {needed}, one a {each}; leave it out for no scores"
            raise OptionError(f"the model has {outputs} outputs, {needs}")
        return Scorer(None, 0)  # only the user's own loss knows their meaning
    return RankingScorer(store, metric, rows, dtype) if metric.ranked else Scorer(metric, outputs)


class RankingScorer(Scorer):
    """A metric that ranks all rows. One number for each row and label is kept until the end, in host memory; on a
    device the host waits for every tile."""

    def __init__(self, store: Store, metric: Metric, rows: int, dtype: torch.dtype) -> None:
        super().__init__(metric, outputs=0)
        self._store = store
        self._rank = RANKINGS[metric]
        columns = store.array("y").columns
        self._shape = (rows, columns)
        # Logits as they are, or the margin between two, which float64 takes without rounding ties.
        single = dtype is torch.float32 and store.task is Task.MULTILABEL
        self._type = np.dtype(np.float32) if single else np.dtype(np.float64)
        self.host_bytes = rows * (columns * self._type.itemsize + store.array("y").row_bytes + RANKING_BYTES)
        """Bytes of collected outputs, labels and splits, and for ranking a column."""

    def begin(self) -> None:
        if self.outputs is None:
            self.outputs = np.empty(self._shape, dtype=self._type)

    def of_rows(self, rows: Tensor, outputs_rC: Tensor, labels: Tensor) -> None:
        """Keep the outputs; ``rows`` [r] of different calls are different."""
        assert self.outputs is not None
        if labels.dim() == 1:
            outputs_rC = outputs_rC.double()
            outputs_rC = outputs_rC[:, 1:2] - outputs_rC[:, 0:1]
        self.outputs[rows.cpu().numpy()] = outputs_rC.cpu().numpy()

    def scores(self) -> dict[str, float | None]:
        """Return, by split, the mean over the columns for which the metric is defined."""
        assert self.outputs is not None
        rows, columns = self._shape
        labels = self._store.array("y").read(0, rows).reshape(rows, columns)
        found: dict[str, float | None] = {}
        for split in SPLITS:
            members = self._store.array(f"split/{split}").read(0, rows)
            ranked = []
            for k in range(columns):
                known = members & (labels[:, k] >= 0) if self._store.num_incomplete else members
                ranked.append(self._rank(self.outputs[known, k], labels[known, k] == 1))
            defined = [score for score in ranked if score is not None]
            found[split] = sum(defined) / len(defined) if defined else None
        return found
