# SPDX-License-Identifier: Apache-2.0
"""Scores of predictions."""

import numpy as np
import numpy.typing as npt


def roc_auc(scores: npt.NDArray[np.floating], positive: npt.NDArray[np.bool_]) -> float | None:
    """Area under the ROC curve of ``scores`` [R] for the rows marked ``positive`` [R]; None with one class only.

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
