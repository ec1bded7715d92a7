# SPDX-License-Identifier: Apache-2.0
"""Small operations on tensors that tiles call dozens of times, and that mostly have nothing to do.

Torch takes a microsecond or two to find that a type, shape or slice is right already, and only one thread at a time has
the interpreter. Also here: sums of rows by lists of their numbers, numbers to try functions with, and bools as bits,
eight a byte, the first one the highest (NumPy's ``packbits``), on any device.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

_SUM_MODE = 0
"""torch's number of the mode "sum" of ``embedding_bag``."""


def typed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``tensor`` in ``dtype``: itself, if it is."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def shaped(rows: Tensor, tail: Sequence[int]) -> Tensor:
    """Return ``rows`` [R, …] as [R, *tail], with as many numbers a row: itself, if it is."""
    return rows if rows.shape[1:] == tail else rows.reshape(rows.shape[0], *tail)


def fractions(numbers: Tensor) -> Tensor:
    """Return numbers between 0.1 and 0.9, to try functions that give NaN for numbers below 0 or above 1: NaN does not
    tell what it depends on."""
    size = numbers.abs()
    return 0.1 + 0.8 * size / (1 + size)


def first_rows(rows: Tensor, count: int) -> Tensor:
    """Return the first ``count`` rows, or all if there are no more."""
    return rows if rows.shape[0] <= count else rows[:count]


def pull(source_NW: Tensor, indices_E: Tensor, offsets_R1: Tensor, weight_E: Tensor | None = None) -> Tensor:
    """Return the sum of ``source_NW[indices_E[offsets[i]:offsets[i+1]]]`` for each of R rows, each times its weight [R,
    W].

    N nodes, W width of the slab, E edges of these rows, R rows. Indices and offsets have one integer type; weights have
    the source's (None: all 1), and so has the result. Raises RuntimeError for a neighbour that is not one of the N.
    """
    if indices_E.numel() == 0:
        return source_NW.new_zeros(offsets_R1.numel() - 1, source_NW.shape[1])
    # Not through torch.nn.functional, whose checks take as long as a small tile's sum.
    return torch.embedding_bag(source_NW, indices_E, offsets_R1, False, _SUM_MODE, False, weight_E, True)[0]


def largest_columns(rows_RC: Tensor) -> Tensor:
    """Return the column of each row's largest number, the first of several; NaN is the largest: int64 [R]."""
    if rows_RC.device.type == "cpu" and rows_RC.dtype != torch.bfloat16:  # NumPy takes 0.2 to 0.7 of the time
        return torch.from_numpy(rows_RC.numpy().argmax(axis=1))
    return rows_RC.argmax(dim=1)


def pack(bools_RC: Tensor) -> Tensor:
    """Return bools [R, C] as bits, uint8 [R, B], B = ⌈C/8⌉; bits beyond C are 0."""
    if bools_RC.device.type == "cpu":  # NumPy is several times faster here
        return torch.from_numpy(np.packbits(bools_RC.numpy(), axis=1))
    return pack_by_torch(bools_RC)


def unpack(bytes_RB: Tensor, columns: int) -> Tensor:
    """Return packed bits as uint8 [R, C] of zeros and ones."""
    if bytes_RB.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(bytes_RB.numpy(), axis=1, count=columns))
    return unpack_by_torch(bytes_RB, columns)


def pack_by_torch(bools_RC: Tensor) -> Tensor:
    """``pack`` on any device."""
    columns = bools_RC.shape[1]
    padded = F.pad(bools_RC.to(torch.uint8), (0, -columns % 8))
    return (padded.view(len(padded), padded.shape[1] // 8, 8) << _bit_shifts(bools_RC)).sum(dim=2, dtype=torch.uint8)


def unpack_by_torch(bytes_RB: Tensor, columns: int) -> Tensor:
    """``unpack`` on any device."""
    return ((bytes_RB[:, :, None] >> _bit_shifts(bytes_RB)) & 1).flatten(1)[:, :columns]


def _bit_shifts(like: Tensor) -> Tensor:
    """How far each of eight bits is shifted."""
    return torch.arange(7, -1, -1, dtype=torch.uint8, device=like.device)


def gradients_of(outputs: Sequence[Tensor], wanted: Sequence[Tensor], above: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradients of inputs from the gradients of outputs; None for an input without a part in them."""
    tracked = [(output, gradient) for output, gradient in zip(outputs, above, strict=True) if output.requires_grad]
    asked = [tensor for tensor in wanted if tensor.requires_grad]
    if not tracked or not asked:
        return [None] * len(wanted)
    with_gradient, upstream = zip(*tracked, strict=True)
    found = iter(torch.autograd.grad(with_gradient, asked, upstream, allow_unused=True))
    return [next(found) if tensor.requires_grad else None for tensor in wanted]
