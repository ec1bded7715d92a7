# SPDX-License-Identifier: Apache-2.0
"""Dropout and noise of rows, with numbers that do not depend on how the rows are cut into tiles.

The generator is NumPy's Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), a pure function
of a key, (seed, epoch, layer), and a counter. Every row has its own range of counters. So any rows can be drawn
anywhere, in any order, and again in the backward pass, with the same numbers. A GPU draws the same numbers
(``ooc.kernels.cuda.dropout``).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_DRAWS_PER_COUNT = 8
"""32-bit numbers that Philox4x64 gives for one value of its counter."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Dropout with probability ``p`` from row ``row_start`` on. ``layer`` 0 is dropout on the input features, ``k`` the
    k-th dropout of the model in the order of its forward."""

    seed: int
    epoch: int
    layer: int
    row_start: int
    p: float

    @property
    def key(self) -> int:
        """The generator's key, of 128 bits."""
        return (self.seed & (2**64 - 1)) | (self.epoch & (2**48 - 1)) << 64 | (self.layer & (2**16 - 1)) << 112

    @property
    def threshold(self) -> int:
        """An entry is dropped if its 32-bit random number is below this."""
        return min(round(self.p * 2**32), 2**32 - 1)

    def mask(self, rows: int, columns: int) -> Tensor:
        """Return, as bool [rows, columns] on the CPU, which entries are kept."""
        return torch.from_numpy(self._numbers(rows, columns) >= np.uint32(self.threshold))

    def _numbers(self, rows: int, columns: int) -> npt.NDArray[np.uint32]:
        """Return uniform 32-bit numbers [rows, columns], the same for a row whatever rows are drawn with it."""
        counts = -(-columns // _DRAWS_PER_COUNT)
        # The full range of 64 bits is the raw stream; unlike random_raw, this way of asking for it frees the
        # interpreter.
        generator = np.random.Generator(np.random.Philox(key=self.key, counter=self.row_start * counts))
        raw = generator.integers(0, 2**64 - 1, rows * counts * 4, dtype=np.uint64, endpoint=True)
        return raw.astype("<u8", copy=False).view("<u4").reshape(rows, counts * _DRAWS_PER_COUNT)[:, :columns]


def _draw_on_host(draw: Draw, like: Tensor) -> Tensor:
    return draw.mask(*like.shape).to(like.device)


def _draw_by_cuda(draw: Draw, like: Tensor) -> Tensor:
    from ooc.kernels.cuda import dropout  # needs triton

    return dropout.keep_mask(like, key=draw.key, threshold=draw.threshold, row_start=draw.row_start)


BY_DEVICE: dict[str, Callable[[Draw, Tensor], Tensor]] = {"cpu": _draw_on_host, "cuda": _draw_by_cuda}
"""Functions that tell, as bool of the shape of a matrix and where it is, which entries are kept, by torch's name of the
kind of device."""


def keep_scale(seed: int, epoch: int, layer: int, row_start: int, like: Tensor, p: float) -> Tensor:
    """Return the factors of rows ``row_start``…: 1 / (1 - p) where kept, 0 where dropped, with shape, dtype and place
    of ``like``. On a device, return whether they are kept, in a fourth of the memory; ``dropped`` accepts both."""
    keep = BY_DEVICE[like.device.type](Draw(seed, epoch, layer, row_start, p), like)
    return keep.to(like.dtype).mul_(1.0 / (1.0 - p)) if like.device.type == "cpu" else keep


def dropped(rows: Tensor, scale: Tensor, p: float) -> Tensor:
    """Return ``rows`` times ``keep_scale``."""
    if scale.dtype != torch.bool:
        return rows * scale
    found: Tensor = torch.ops.aten.native_dropout_backward.default(rows, scale, 1.0 / (1.0 - p))
    return found


def noise(seed: int, epoch: int, layer: int, row_start: int, like: Tensor) -> Tensor:
    """Return normal numbers of mean 0 and variance 1 for rows ``row_start``…, each from two uniform ones (Box and
    Muller, "A note on the generation of random normal deviates", 1958), with shape, dtype and place of ``like``; drawn
    on the host."""
    rows, columns = like.shape
    uniform = (Draw(seed, epoch, layer, row_start, 0.0)._numbers(rows, 2 * columns) + 0.5) / 2.0**32
    found = np.sqrt(-2.0 * np.log(uniform[:, :columns])) * np.cos(2.0 * np.pi * uniform[:, columns:])
    return torch.from_numpy(found).to(device=like.device, dtype=like.dtype)
