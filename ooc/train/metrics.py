# SPDX-License-Identifier: Apache-2.0
"""Scores of predictions: some are counted as the outputs come, some need all of them ranked.

Shapes: r rows of one split, C outputs, L label columns. Definitions are scikit-learn's, and for several labels a
node those of OGB's evaluators (Hu et al., "Open Graph Benchmark", NeurIPS 2020): the mean over the labels of which
there are rows with and rows without.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ooc.errors import OptionError
from ooc.storage.store import Task

Floats = npt.NDArray[np.floating]
Ranked = Callable[[Floats, npt.NDArray[np.bool_]], float | None]


class Metric(Enum):
    """What evaluation measures."""

    ACCURACY = "accuracy"
    MICRO_F1 = "micro-f1"
    MACRO_F1 = "macro-f1"
    ROC_AUC = "roc-auc"
    AVERAGE_PRECISION = "average-precision"
    MAE = "mae"
    R2 = "r2"

    @property
    def higher_is_better(self) -> bool:
        return self is not Metric.MAE

    @property
    def ranked(self) -> bool:
        """Whether all rows' outputs must be held at once."""
        return self in (Metric.ROC_AUC, Metric.AVERAGE_PRECISION)

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks it is defined for."""
        match self:
            case Metric.ACCURACY:
                return (Task.CLASSES,)
            case Metric.MICRO_F1 | Metric.MACRO_F1 | Metric.ROC_AUC | Metric.AVERAGE_PRECISION:
                return (Task.CLASSES, Task.MULTILABEL)
            case Metric.MAE | Metric.R2:
                return (Task.VALUES,)


def resolve_metric(name: str | None, task: Task, classes: int) -> Metric:
    """The metric of that name; the usual one of the task where there is none given. OptionError if it cannot be."""
    if name is None:
        return {Task.CLASSES: Metric.ACCURACY, Task.MULTILABEL: Metric.ROC_AUC, Task.VALUES: Metric.MAE}[task]
    names = [metric.value for metric in Metric]
    if name not in names:
        raise OptionError(f"metric {name!r} is not one of {', '.join(names)}")
    metric = Metric(name)
    if task not in metric.tasks:
        fitting = ", ".join(other.value for other in Metric if task in other.tasks)
        raise OptionError(f"metric {name} is not for a store of the task {task.value}; use one of {fitting}")
    if metric.ranked and task is Task.CLASSES and classes != 2:
        raise OptionError(f"metric {name} is for two classes, the store has {classes}")
    return metric


# ---- counted ------------------------------------------------------------------------------------------------


class Tally(Protocol):
    """What some rows came to; tallies of different rows of one split are added up."""

    def add(self, other: Self) -> None: ...

    def value(self) -> float | None: ...


def tally(metric: Metric, outputs_rC: Tensor, labels: Tensor) -> Tally:
    """What a counted metric makes of some rows: classes [r], or labels or values [r, L]."""
    match metric:
        case Metric.ACCURACY:
            return Correct(len(labels), int((outputs_rC.argmax(dim=1) == labels).sum()))
        case Metric.MICRO_F1 | Metric.MACRO_F1:
            return _confusion(outputs_rC, labels, macro=metric is Metric.MACRO_F1)
        case Metric.MAE:
            return AbsoluteErrors(labels.numel(), float((outputs_rC - labels).abs().double().sum()))
        case Metric.R2:
            return _squared_errors(outputs_rC, labels)
        case _:
            raise AssertionError(f"{metric} is not counted")


@dataclass(slots=True)
class Correct:
    """Rows, and rows whose class was predicted."""

    rows: int
    correct: int

    def add(self, other: Self) -> None:
        self.rows += other.rows
        self.correct += other.correct

    def value(self) -> float | None:
        return self.correct / self.rows if self.rows else None


@dataclass(slots=True)
class Confusion:
    """True positives, false positives and false negatives of every class or label, [C] each.

    The mean of the F1 scores is over the classes that occur in the split or among its predictions, and over all
    labels where a node has several, one that never occurs and is never predicted scoring 0: as scikit-learn does.
    """

    true_positive: npt.NDArray[np.int64]
    false_positive: npt.NDArray[np.int64]
    false_negative: npt.NDArray[np.int64]
    macro: bool
    every_label: bool

    def add(self, other: Self) -> None:
        self.true_positive += other.true_positive
        self.false_positive += other.false_positive
        self.false_negative += other.false_negative

    def value(self) -> float | None:
        wrong = self.false_positive + self.false_negative
        if not self.macro:
            occurring = 2 * int(self.true_positive.sum()) + int(wrong.sum())
            return 2 * int(self.true_positive.sum()) / occurring if occurring else 0.0
        occurring_C = 2 * self.true_positive + wrong
        counted = np.ones(len(wrong), dtype=np.bool_) if self.every_label else occurring_C > 0
        scores = 2 * self.true_positive[counted] / np.maximum(occurring_C[counted], 1)
        return float(scores.mean()) if len(scores) else None


def _confusion(outputs_rC: Tensor, labels: Tensor, *, macro: bool) -> Confusion:
    several = labels.dim() == 2
    if several:
        predicted, actual = outputs_rC > 0, labels > 0.5
        hits = (predicted & actual).sum(dim=0)
        predictions, occurrences = predicted.sum(dim=0), actual.sum(dim=0)
    else:
        classes = outputs_rC.shape[1]
        chosen = outputs_rC.argmax(dim=1)
        hits = torch.bincount(labels[chosen == labels], minlength=classes)
        predictions, occurrences = (torch.bincount(which, minlength=classes) for which in (chosen, labels))
    tp, fp, fn = hits.cpu().numpy(), (predictions - hits).cpu().numpy(), (occurrences - hits).cpu().numpy()
    return Confusion(tp, fp, fn, macro, every_label=several)


@dataclass(slots=True)
class AbsoluteErrors:
    """Entries, and the sum of their absolute errors."""

    entries: int
    total: float

    def add(self, other: Self) -> None:
        self.entries += other.entries
        self.total += other.total

    def value(self) -> float | None:
        return self.total / self.entries if self.entries else None


@dataclass(slots=True)
class SquaredErrors:
    """Per column [L]: mean of the values, their squared deviations from it, squared errors; and the rows.

    Means and deviations of parts are joined as by Chan, Golub and LeVeque ("Updating formulae and a pairwise
    algorithm for computing sample variances", 1979): no difference of large sums.
    """

    rows: int
    mean_L: npt.NDArray[np.float64]
    deviation_L: npt.NDArray[np.float64]
    error_L: npt.NDArray[np.float64]

    def add(self, other: Self) -> None:
        rows = self.rows + other.rows
        apart_L = other.mean_L - self.mean_L
        self.deviation_L = self.deviation_L + other.deviation_L + apart_L**2 * (self.rows * other.rows / rows)
        self.mean_L = self.mean_L + apart_L * (other.rows / rows)
        self.error_L = self.error_L + other.error_L
        self.rows = rows

    def value(self) -> float | None:
        """The mean over columns of 1 - errors / deviations; None with fewer than two rows.

        A column that never varies scores 1 where it is met exactly, otherwise 0.
        """
        if self.rows < 2:
            return None
        varying = self.deviation_L > 0
        share_L = np.divide(self.error_L, self.deviation_L, out=np.zeros_like(self.error_L), where=varying)
        constant_L = np.where(self.error_L == 0, 1.0, 0.0)
        return float(np.where(varying, 1 - share_L, constant_L).mean())


def _squared_errors(outputs_rC: Tensor, values_rL: Tensor) -> SquaredErrors:
    values, errors = values_rL.double().cpu().numpy(), (outputs_rC.double() - values_rL.double()).cpu().numpy()
    mean_L = values.mean(axis=0)
    return SquaredErrors(len(values), mean_L, ((values - mean_L) ** 2).sum(axis=0), (errors**2).sum(axis=0))


# ---- ranked -------------------------------------------------------------------------------------------------


RANKING_BYTES = 64
"""A row: what ranking one column takes (the column, its order, sums along it)."""


def roc_auc(scores: Floats, positive: npt.NDArray[np.bool_]) -> float | None:
    """Area under the ROC curve of ``scores`` [r] for the rows marked ``positive`` [r]; None with one class only.

    By the Mann-Whitney statistic, ties counting half.
    """
    positives = int(positive.sum())
    negatives = len(positive) - positives
    if not positives or not negatives:
        return None
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    last_rank = np.cumsum(counts)
    mean_rank = last_rank - (counts - 1) / 2
    rank_sum = float(mean_rank[inverse][positive].sum())
    return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives)


def average_precision(scores: Floats, positive: npt.NDArray[np.bool_]) -> float | None:
    """Σ recall step × precision over falling thresholds, equal scores in one step; None with one class only."""
    positives = int(positive.sum())
    if not positives or positives == len(positive):
        return None
    order = np.argsort(scores)[::-1]
    ranked = scores[order]
    last_of_ties = np.append(np.flatnonzero(ranked[1:] != ranked[:-1]), len(ranked) - 1)
    hits = np.cumsum(positive[order])[last_of_ties]
    steps = np.diff(hits, prepend=0) / positives
    return float((steps * hits / (last_of_ties + 1)).sum())


RANKINGS: dict[Metric, Ranked] = {Metric.ROC_AUC: roc_auc, Metric.AVERAGE_PRECISION: average_precision}
