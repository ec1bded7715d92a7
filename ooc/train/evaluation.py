# SPDX-License-Identifier: Apache-2.0
"""Scoring all splits, out of core: what is counted or collected while the evaluation program runs."""

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ooc.storage.store import Store
from ooc.train.metrics import roc_auc
from ooc.train.stages import SPLITS, Scores, StageBuilder


class Evaluation:
    """``begin``, run the steps, then ``scores``. For ROC-AUC one score a node is collected, 8 bytes each."""

    def __init__(self, builder: StageBuilder, store: Store, metric: str) -> None:
        self.steps = builder.evaluate()
        self._builder = builder
        self._store = store
        self._collect = metric == "roc-auc"
        self._collected: npt.NDArray[np.float64] | None = None

    @staticmethod
    def nbytes(store: Store, metric: str) -> int:
        """Host bytes needed: the collected scores, and what ranking them takes."""
        return 64 * store.num_nodes if metric == "roc-auc" else 0

    def begin(self) -> None:
        self._builder.scores = Scores()
        self._builder.score_sink = None
        if self._collect:
            if self._collected is None:
                self._collected = np.empty(self._store.num_nodes)
            self._builder.score_sink = self._take

    def _take(self, start: int, logits_RC: Tensor) -> None:
        assert self._collected is not None
        margin = (logits_RC[:, 1] - logits_RC[:, 0]).double().numpy()
        self._collected[start : start + len(margin)] = margin

    def scores(self) -> dict[str, float | None]:
        """The metric by split, None where the split is empty."""
        if not self._collect:
            counted = self._builder.scores
            return {s: counted.correct[s] / counted.rows[s] if counted.rows[s] else None for s in SPLITS}
        assert self._collected is not None
        labels = self._store.array("y").read()
        found: dict[str, float | None] = {}
        for split in SPLITS:
            rows = self._store.array(f"split/{split}").read()
            found[split] = roc_auc(self._collected[rows], labels[rows] == 1)
        return found
