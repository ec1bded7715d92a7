# SPDX-License-Identifier: Apache-2.0
"""Masks of dropout on rows, drawn on a GPU: those of ``ooc.train.dropout``, bit for bit.

NumPy's Philox counts up before it draws, so that a row's first count is one more than on its own account.
"""

import torch
from torch import Tensor

from ooc.train.dropout import Draw
from ooc.train.kernels.cuda.dropout_programs import draw_masks
from ooc.train.kernels.cuda.launch import ceil_div, on_device_of, signed

_DRAWS, _WARPS = 256, 4
"""Counts of a program: two a thread. Never tried otherwise."""
_NUMBERS = 8
"""Of 32 bits, that Philox4x64 gives for a count."""


def keep_mask(draw: Draw, like: Tensor) -> Tensor:
    """Bool, of the shape of ``like`` [R, W] and where it is: which entries are kept."""
    rows, columns = like.shape
    counts = ceil_div(columns, _NUMBERS)
    eights = torch.empty(rows, counts, dtype=torch.int64, device=like.device)
    if eights.numel():
        with on_device_of(like):
            draw_masks[(ceil_div(eights.numel(), _DRAWS),)](
                eights,
                eights.numel(),
                draw.row_start * counts + 1,
                signed(draw.key & (2**64 - 1)),
                signed(draw.key >> 64),
                draw.threshold,
                DRAWS=_DRAWS,
                num_warps=_WARPS,
            )
    return eights.view(torch.bool)[:, :columns]
