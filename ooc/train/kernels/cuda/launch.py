# SPDX-License-Identifier: Apache-2.0
"""What all launches have in common: types, numbers of programs, and on which device."""

from contextlib import AbstractContextManager, nullcontext

import torch
import triton.language as tl
from torch import Tensor

from ooc.errors import ModelError

_TYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.float32,
    torch.float16: tl.float32,
}
"""In what Triton sums rows of a type."""
_SUMS = {torch.float64: torch.float64}


def accumulator(dtype: torch.dtype) -> tl.dtype:
    """In what sums of rows of type ``dtype`` are made. Raises :class:`ModelError` where there is no kernel."""
    try:
        return _TYPES[dtype]
    except KeyError:
        raise ModelError(
            f"rows of {dtype} cannot be summed on a GPU; float64, float32, bfloat16 and float16 can"
        ) from None


def sums_dtype(dtype: torch.dtype) -> torch.dtype:
    """The same as a type of torch: float32, or float64 of float64."""
    return _SUMS.get(dtype, torch.float32)


def ceil_div(count: int, size: int) -> int:
    return -(-count // size)


def signed(word: int) -> int:
    """64 bits as the signed number that they are to a program."""
    return word - (word >> 63 << 64)


def rows_in_line(matrix: Tensor) -> Tensor:
    """``matrix`` with the numbers of a row side by side; rows may lie apart."""
    return matrix if matrix.stride(1) == 1 or matrix.shape[1] <= 1 else matrix.contiguous()


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Launches within go to the GPU where ``tensor`` is; in the interpreter there is none."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
