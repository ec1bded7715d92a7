# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy of some of a tile's rows, and its gradient, as a compiled loop. A row stays in the cache from its
largest output to its gradient; torch's operators go over all rows a dozen times.

Shapes: R rows of a tile, C outputs.
"""

import numpy as np
import torch
from torch import Tensor

from ooc.kernels.compiled.lanes import NBYTES, exp, higher, largest, load, spread, store, total
from ooc.kernels.compiled.loops import clear, compiled


def cross_entropy(
    outputs_RC: Tensor, labels_R: Tensor, counts_R: Tensor, *, weight_C: Tensor | None, ignored: int, divisor: float
) -> tuple[Tensor, Tensor] | None:
    """Return the sum of the losses of the rows that count, bool [R], by their classes [R], float64; and its gradient
    [R, C] divided by ``divisor``, 0 in other rows. ``weight_C``: weights of classes. The class ``ignored`` adds
    nothing.

    Returns None if a class that counts is not one of the outputs, or if the loop does not support their type.
    """
    if outputs_RC.dtype not in (torch.float32, torch.float64):
        return None
    outputs_RC, gradient_RC = outputs_RC.contiguous(), torch.empty_like(outputs_RC)
    lanes = NBYTES // outputs_RC.itemsize
    row_1L = outputs_RC.new_full((1, -(-outputs_RC.shape[1] // lanes) * lanes), -torch.inf)
    weight_C = outputs_RC.new_empty(0) if weight_C is None else weight_C.to(outputs_RC.dtype)
    given = labels_R.long().numpy(), counts_R.numpy(), weight_C.numpy(), (ignored, divisor)
    found = _cross_entropy(outputs_RC.numpy(), *given, row_1L.numpy(), gradient_RC.numpy())
    return None if np.isneginf(found) else (torch.tensor(found, dtype=torch.float64), gradient_RC)


@compiled
def _cross_entropy(outputs_RC, labels_R, counts_R, weight_C, numbers, row_1L, gradient_RC):
    """Return the sum, or −∞ if a class is not one of the outputs."""
    (ignored, divisor), (rows, columns), padded = numbers, outputs_RC.shape, row_1L.shape[1]
    kind, lanes, losses = outputs_RC.dtype.type, NBYTES // outputs_RC.itemsize, 0.0
    for row in range(rows):
        label = labels_R[row]
        if not counts_R[row] or 0 <= label == ignored:
            clear(gradient_RC, row)
            continue
        if not 0 <= label < columns:
            return -np.inf
        highest, sums = spread(kind(-np.inf)), spread(kind(0))
        for column in range(0, columns, lanes):
            store(row_1L, 0, column, columns, load(outputs_RC, row, column, columns))
            highest = higher(load(row_1L, 0, column, padded), highest)
        top = largest(highest)
        for column in range(0, columns, lanes):
            power = exp(load(row_1L, 0, column, padded) - top)
            store(row_1L, 0, column, columns, power)
            sums = sums + power
        weight, powers = np.float64(weight_C[label] if len(weight_C) else 1), np.float64(total(sums))
        losses += weight * (np.log(powers) + top - outputs_RC[row, label])
        share = kind(weight / divisor / powers)
        for column in range(0, columns, lanes):
            store(gradient_RC, row, column, columns, load(row_1L, 0, column, padded) * share)
        gradient_RC[row, label] -= kind(weight / divisor)
    return losses
