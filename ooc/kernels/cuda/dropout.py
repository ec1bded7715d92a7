# SPDX-License-Identifier: Apache-2.0
"""Masks of dropout drawn on a GPU, bit for bit those of the CPU: on rows those of ``ooc.kernels.dropout.rows``, inside
opaque layers those of ``ooc.kernels.dropout.opaque``.

NumPy's Philox counts up before it draws, so a row's first count is one more than it would be otherwise.
"""

import torch
from torch import Tensor

from ooc.kernels.cuda.launch import ceil_div, dropped_below, on_device_of, signed
from ooc.kernels.cuda.programs.dropout import draw_edge_masks, draw_masks
from ooc.kernels.dropout.edges import EdgeDropout

_DRAWS, _WARPS = 256, 4
"""Counts, or entries of edges, of a program (two a thread), and its warps. No other numbers have been tried."""
_NUMBERS = 8
"""32-bit numbers that Philox4x64 gives for a count."""


def keep_mask(like: Tensor, *, key: int, threshold: int, row_start: int) -> Tensor:
    """Return which entries of rows from ``row_start`` on are kept, as bool of the shape of ``like`` [R, W] and where it
    is.

    ``key`` and ``threshold`` are those of ``ooc.kernels.dropout.rows.Draw``.
    """
    rows, columns = like.shape
    counts = ceil_div(columns, _NUMBERS)
    eights = torch.empty(rows, counts, dtype=torch.int64, device=like.device)
    if eights.numel():
        with on_device_of(like):
            draw_masks[(ceil_div(eights.numel(), _DRAWS),)](
                eights,
                eights.numel(),
                row_start * counts + 1,
                signed(key & (2**64 - 1)),
                signed(key >> 64),
                threshold,
                DRAWS=_DRAWS,
                num_warps=_WARPS,
            )
    return eights.view(torch.bool)[:, :columns]


def keep_edges(dropout: EdgeDropout, targets_E: Tensor, sources_E: Tensor, repeats_E: Tensor, columns: int) -> Tensor:
    """Return, as bool [E, columns] on the device of the edges, which entries are kept."""
    keep = torch.empty(len(targets_E), columns, dtype=torch.int8, device=targets_E.device)
    if keep.numel():
        drawn = keep.numel(), columns, *dropped_below(dropout)
        with on_device_of(keep):
            draw_edge_masks[(ceil_div(keep.numel(), _DRAWS),)](
                keep, targets_E, sources_E, repeats_E, *drawn, DRAWS=_DRAWS, num_warps=_WARPS
            )
    return keep.view(torch.bool)
