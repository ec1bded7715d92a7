# SPDX-License-Identifier: Apache-2.0
"""Degrees of rows whose edges have weights, as PyG's ``gcn_norm`` takes them.

Every row has one self-loop in them: its own, with the weight it has, or one that is added, as
``add_remaining_self_loops`` does. Where a row has several, PyG keeps the last one's weight, and so does this: a store
has them in the order of the source.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ooc.errors import ModelError
from ooc.storage.store import Store

_CHUNK_EDGES = 1 << 18


def weighted_degrees(
    store: Store, into_rows: npt.NDArray[np.signedinteger], start: int, *, loop_weight: float | None
) -> tuple[Tensor, Tensor]:
    """Sums of the weights of the in-edges [R] of the rows from ``start``, whose edges begin at ``into_rows`` [R+1].

    ``loop_weight``: what a self-loop weighs that is added to a row without one; None: none is. The second tensor [R]
    is what makes of a row's self-loops the one that counts. Both in float64. Raises ModelError for a sum below zero,
    which has no square root.
    """
    rows = len(into_rows) - 1
    degree, loops = np.zeros(rows), np.zeros(rows)
    counts = np.full(rows, 0.0 if loop_weight is None else loop_weight)
    indices, weights = store.topology("in")[1], store.edge_weight("in")
    first, last = int(into_rows[0]), int(into_rows[-1])
    for low in range(first, last, _CHUNK_EDGES):
        high = min(last, low + _CHUNK_EDGES)
        of_row = np.repeat(np.arange(rows), np.diff(np.clip(into_rows, low, high)))
        weight = weights.read(low, high).astype(np.float64)
        degree += np.bincount(of_row, weights=weight, minlength=rows)
        is_loop = indices.read(low, high) == of_row + start
        loops += np.bincount(of_row[is_loop], weights=weight[is_loop], minlength=rows)
        counts[of_row[is_loop]] = weight[is_loop]
    missing = counts - loops if loop_weight is not None else np.zeros(rows)
    degree += missing
    if rows and degree.min() < 0:
        row = int(degree.argmin())
        raise ModelError(
            f"the weights of the edges into row {start + row} of {store.path} sum to {degree[row]:.6g}: GCN's "
            "normalisation is by their square root, and PyG gives NaN; use normalize=False or other weights"
        )
    return torch.from_numpy(degree), torch.from_numpy(missing)
