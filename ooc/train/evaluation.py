# SPDX-License-Identifier: Apache-2.0
"""Scoring all splits, out of core: what is counted or collected while outputs go by.

Shapes: r rows of a split in one tile, C outputs, L label columns (1 for two classes).
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ooc.model.task import label_columns
from ooc.storage.store import SPLITS, Store, Task
from ooc.train.metrics import RANKING_BYTES, RANKINGS, TALLY_BYTES, Metric, Tally, tally


class Scorer:
    """A metric whose parts add up: ``begin``, then ``of_rows`` for the rows of a tile (on any thread) and ``add`` in
    order, then ``scores``."""

    def __init__(self, metric: Metric, outputs: int) -> None:
        self._metric = metric
        self._tallies: dict[str, Tally] = {}
        self.host_bytes = 0
        self.device_bytes = 2 * len(SPLITS) * outputs * TALLY_BYTES
        """Of every split so far and of one tile."""

    def begin(self) -> None:
        self._tallies = {}

    def of_rows(self, rows: Tensor, outputs_rC: Tensor, labels: Tensor) -> Tally | None:
        return tally(self._metric, outputs_rC, labels)

    def add(self, split: str, part: Tally) -> None:
        if split in self._tallies:
            self._tallies[split].add(part)
        else:
            self._tallies[split] = part

    def scores(self) -> dict[str, float | None]:
        return {split: self._tallies[split].value() if split in self._tallies else None for split in SPLITS}


def make_scorer(store: Store, metric: Metric, *, rows: int, outputs: int, dtype: torch.dtype) -> Scorer:
    """The scorer of ``metric``. Scored rows lie among the first ``rows``, of so many ``outputs`` of type ``dtype``."""
    return RankingScorer(store, metric, rows, dtype) if metric.ranked else Scorer(metric, outputs)


class RankingScorer(Scorer):
    """A metric of the ranking of all rows: one number a row and label is kept until the end, in host memory: on a
    device the host waits for every tile."""

    def __init__(self, store: Store, metric: Metric, rows: int, dtype: torch.dtype) -> None:
        super().__init__(metric, outputs=0)
        self._store = store
        self._rank = RANKINGS[metric]
        columns = label_columns(store)
        self._shape = (rows, columns)
        # Logits as they are, or the margin between two, which float64 takes without rounding ties.
        single = dtype is torch.float32 and store.task is Task.MULTILABEL
        self._type = np.dtype(np.float32) if single else np.dtype(np.float64)
        self._outputs: npt.NDArray[np.floating] | None = None
        self.host_bytes = rows * (columns * self._type.itemsize + store.array("y").row_bytes + RANKING_BYTES)
        """Collected outputs, labels and splits, and what ranking a column takes."""

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
