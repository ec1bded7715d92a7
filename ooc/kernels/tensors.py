# SPDX-License-Identifier: Apache-2.0
"""What tiles ask of torch dozens of times, and mostly need not: types, shapes and rows that are right already.

Each of these takes torch a microsecond or two to find nothing to do, and only one thread at a time has the interpreter.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def typed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor`` in ``dtype``: itself, where it is."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def shaped(rows: Tensor, tail: Sequence[int]) -> Tensor:
    """``rows`` [R, …] as [R, *tail], as many numbers a row: itself, where it is."""
    return rows if rows.shape[1:] == tail else rows.reshape(rows.shape[0], *tail)


def first_rows(rows: Tensor, count: int) -> Tensor:
    """The first ``count`` rows: all, where there are no more."""
    return rows if rows.shape[0] <= count else rows[:count]
