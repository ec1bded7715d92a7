# SPDX-License-Identifier: Apache-2.0
"""Scoring all splits, out of core: what is counted or collected while outputs go by.

Shapes: r rows of a split in one tile, C outputs, L label columns (1 for two classes).
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ooc.model.task import label_columns
from ooc.storage.store import SPLITS, Store, Task
from ooc.train.metrics import RANKING_BYTES, RANKINGS, TALLY_BYTES, Metric, Tally, tally


class Scorer(Protocol):
    """``begin``, then ``of_rows`` for the rows of a tile (on any thread) and ``add`` in order, then ``scores``."""

    def begin(self) -> None: ...

    def of_rows(self, rows: Tensor, outputs_rC: Tensor, labels: Tensor) -> Tally | None: ...

    def add(self, split: str, part: Tally) -> None: ...

    def scores(self) -> dict[str, float | None]: ...


def make_scorer(store: Store, metric: Metric, *, rows: int, dtype: torch.dtype) -> Scorer:
    """The scorer of ``metric``. Scored rows lie among the first ``rows``; ``dtype`` is that of the outputs."""
    return Collected(store, metric, rows, dtype) if metric.ranked else Counted(metric)


def scoring_nbytes(store: Store, metric: Metric, *, rows: int, dtype: torch.dtype) -> int:
    """Host bytes a scorer needs: collected outputs, labels and splits, and what ranking a column takes."""
    if not metric.ranked:
        return 0
    y = store.array("y")
    return rows * (label_columns(store) * _collected_type(store, dtype).itemsize + y.row_bytes + RANKING_BYTES)


def tallies_nbytes(metric: Metric, outputs: int) -> int:
    """Device bytes of what is counted of so many outputs, of every split so far and in one tile."""
    return 0 if metric.ranked else 2 * len(SPLITS) * outputs * TALLY_BYTES


def _collected_type(store: Store, dtype: torch.dtype) -> np.dtype[np.floating]:
    """Of what is ranked: logits as they are, or the margin between two, which float64 takes without rounding ties."""
    single = dtype is torch.float32 and store.task is Task.MULTILABEL
    return np.dtype(np.float32) if single else np.dtype(np.float64)


class Counted:
    """A metric whose parts add up."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._tallies: dict[str, Tally] = {}

    def begin(self) -> None:
        self._tallies = {}

    def of_rows(self, rows: Tensor, outputs_rC: Tensor, labels: Tensor) -> Tally:
        return tally(self._metric, outputs_rC, labels)

    def add(self, split: str, part: Tally) -> None:
        if split in self._tallies:
            self._tallies[split].add(part)
        else:
            self._tallies[split] = part

    def scores(self) -> dict[str, float | None]:
        return {split: self._tallies[split].value() if split in self._tallies else None for split in SPLITS}


class Collected:
    """A metric of the ranking of all rows: one number a row and label is kept until the end, in host memory: on a
    device the host waits for every tile."""

    def __init__(self, store: Store, metric: Metric, rows: int, dtype: torch.dtype) -> None:
        self._store = store
        self._rank = RANKINGS[metric]
        self._shape = (rows, label_columns(store))
        self._type = _collected_type(store, dtype)
        self._outputs: npt.NDArray[np.floating] | None = None

    def begin(self) -> None:
        if self._outputs is None:
            self._outputs = np.empty(self._shape, dtype=self._type)

    def of_rows(self, rows: Tensor, outputs_rC: Tensor, labels: Tensor) -> None:
        """Keep the outputs; ``rows`` [r] of different calls are different."""
        assert self._outputs is not None
        if labels.dim() == 1:
            outputs_rC = outputs_rC.double()
            outputs_rC = outputs_rC[:, 1:2] - outputs_rC[:, 0:1]
        self._outputs[rows.cpu().numpy()] = outputs_rC.cpu().numpy()

    def add(self, split: str, part: Tally) -> None:
        raise AssertionError("nothing is counted")

    def scores(self) -> dict[str, float | None]:
        """By split, the mean over the columns for which the metric is defined."""
        assert self._outputs is not None
        rows, columns = self._shape
        labels = self._store.array("y").read(0, rows).reshape(rows, columns)
        found: dict[str, float | None] = {}
        for split in SPLITS:
            members = self._store.array(f"split/{split}").read(0, rows)
            ranked = [self._rank(self._outputs[members, k], labels[members, k] == 1) for k in range(columns)]
            defined = [score for score in ranked if score is not None]
            found[split] = sum(defined) / len(defined) if defined else None
        return found
