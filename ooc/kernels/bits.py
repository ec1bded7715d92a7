# SPDX-License-Identifier: Apache-2.0
"""Bools as bits, eight a byte, the first one the highest: NumPy's ``packbits``, wherever the tensors are.

Shapes: R rows, C bools a row, B = ⌈C/8⌉ bytes.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


def pack(bools_RC: Tensor) -> Tensor:
    """uint8 [R, B]; the bits beyond C are 0."""
    if bools_RC.device.type == "cpu":  # NumPy is several times faster here
        return torch.from_numpy(np.packbits(bools_RC.numpy(), axis=1))
    return pack_by_torch(bools_RC)


def unpack(bytes_RB: Tensor, columns: int) -> Tensor:
    """uint8 [R, C] of zeros and ones."""
    if bytes_RB.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(bytes_RB.numpy(), axis=1, count=columns))
    return unpack_by_torch(bytes_RB, columns)


def pack_by_torch(bools_RC: Tensor) -> Tensor:
    """``pack`` on any device."""
    columns = bools_RC.shape[1]
    padded = F.pad(bools_RC.to(torch.uint8), (0, -columns % 8))
    return (padded.view(len(padded), padded.shape[1] // 8, 8) << _places(bools_RC)).sum(dim=2, dtype=torch.uint8)


def unpack_by_torch(bytes_RB: Tensor, columns: int) -> Tensor:
    """``unpack`` on any device."""
    return ((bytes_RB[:, :, None] >> _places(bytes_RB)) & 1).flatten(1)[:, :columns]


def _places(like: Tensor) -> Tensor:
    """How far each of eight bits is moved."""
    return torch.arange(7, -1, -1, dtype=torch.uint8, device=like.device)
