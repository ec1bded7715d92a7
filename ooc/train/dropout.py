# SPDX-License-Identifier: Apache-2.0
"""Dropout whose masks do not depend on how the rows are cut.

The generator is NumPy's Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), a pure
function of a key and a counter. The key is (seed, epoch, layer), and every row has its own range of counters, so
any rows can be drawn anywhere, in any order, and drawn again in the backward pass, and always come out the same.
A sequential generator restarted for every block of rows would tie the masks to that block height.
"""

import numpy as np
import numpy.typing as npt
import torch

_DRAWS_PER_COUNT = 8
"""32-bit numbers that Philox4x64 gives for one value of its counter."""


def _draw(seed: int, epoch: int, layer: int, row_start: int, row_stop: int, columns: int) -> npt.NDArray[np.uint32]:
    """Uniform 32-bit numbers [rows, columns], the same for a row whatever rows are drawn with it."""
    counts = -(-columns // _DRAWS_PER_COUNT)
    key = (seed & (2**64 - 1)) | (epoch & (2**48 - 1)) << 64 | (layer & (2**16 - 1)) << 112
    # The full range of 64 bits is the raw stream; unlike random_raw, this way of asking for it frees the interpreter.
    generator = np.random.Generator(np.random.Philox(key=key, counter=row_start * counts))
    rows = row_stop - row_start
    raw = generator.integers(0, 2**64 - 1, rows * counts * 4, dtype=np.uint64, endpoint=True)
    return raw.astype("<u8", copy=False).view("<u4").reshape(rows, counts * _DRAWS_PER_COUNT)[:, :columns]


def keep_mask(seed: int, epoch: int, layer: int, row_start: int, row_stop: int, columns: int, p: float) -> torch.Tensor:
    """Bool [row_stop - row_start, columns]: which entries dropout of probability ``p`` keeps.

    ``layer`` 0 is dropout on the input features, ``k`` the k-th dropout of the model, in the order of its forward.
    """
    threshold = np.uint32(min(round(p * 2**32), 2**32 - 1))
    return torch.from_numpy(_draw(seed, epoch, layer, row_start, row_stop, columns) >= threshold)


def keep_scale(seed: int, epoch: int, layer: int, row_start: int, like: torch.Tensor, p: float) -> torch.Tensor:
    """What to multiply rows ``row_start``… by: 1 / (1 - p) where kept, 0 where dropped. Shape, dtype and place of
    ``like``; drawn on the host, wherever that is."""
    keep = keep_mask(seed, epoch, layer, row_start, row_start + like.shape[0], like.shape[1], p)
    return keep.to(like.device, non_blocking=True).to(like.dtype).mul_(1.0 / (1.0 - p))
