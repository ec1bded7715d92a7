# SPDX-License-Identifier: Apache-2.0
"""Dropout whose masks do not depend on how the rows are cut.

The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), a pure
function of a key and a counter. The key is (seed, epoch), the counter (row, column // 4, layer), so any block
of any matrix can be drawn anywhere, in any order, on any device, and drawn again in the backward pass, and
always comes out the same. A sequential generator restarted for every block of rows would tie the masks to
that block height.
"""

import numba
import numpy as np
import numpy.typing as npt
import torch


@numba.njit(cache=True, inline="always")
def _philox(c0, c1, c2, c3, k0, k1):  # type: ignore[no-untyped-def]
    """Ten rounds of Philox4x32 on uint32 counters and keys."""
    for _ in range(10):
        p0 = np.uint64(0xD2511F53) * np.uint64(c0)
        p1 = np.uint64(0xCD9E8D57) * np.uint64(c2)
        c0, c2 = (
            np.uint32(p1 >> np.uint64(32)) ^ c1 ^ k0,
            np.uint32(p0 >> np.uint64(32)) ^ c3 ^ k1,
        )
        c1, c3 = np.uint32(p1), np.uint32(p0)
        k0 = np.uint32(k0 + np.uint32(0x9E3779B9))
        k1 = np.uint32(k1 + np.uint32(0xBB67AE85))
    return c0, c1, c2, c3


@numba.njit(cache=True, nogil=True)
def _fill(out, row_start, threshold, value, layer, k0, k1):  # type: ignore[no-untyped-def]
    """out[r, c] = value where the draw of (row_start + r, c) is at least threshold, else 0."""
    rows, columns = out.shape
    groups = columns // 4
    for r in range(rows):
        row = np.uint64(row_start + r)
        low = np.uint32(row)
        high = np.uint32(row >> np.uint64(32))
        for g in range(groups):
            a, b, c, d = _philox(low, high, np.uint32(g), layer, k0, k1)
            out[r, 4 * g] = value if a >= threshold else 0
            out[r, 4 * g + 1] = value if b >= threshold else 0
            out[r, 4 * g + 2] = value if c >= threshold else 0
            out[r, 4 * g + 3] = value if d >= threshold else 0
        if 4 * groups < columns:
            draws = _philox(low, high, np.uint32(groups), layer, k0, k1)
            for c in range(4 * groups, columns):
                out[r, c] = value if draws[c - 4 * groups] >= threshold else 0


def _draw(
    out: npt.NDArray[np.generic], seed: int, epoch: int, layer: int, row_start: int, p: float, value: float
) -> None:
    threshold = np.uint32(min(round(p * 2**32), 2**32 - 1))
    mixed = (seed * 0x9E3779B97F4A7C15 + epoch) & 0xFFFFFFFFFFFFFFFF
    keys = np.uint32(mixed & 0xFFFFFFFF), np.uint32(mixed >> 32)
    _fill(out, row_start, threshold, out.dtype.type(value), np.uint32(layer), *keys)


def keep_mask(seed: int, epoch: int, layer: int, row_start: int, row_stop: int, columns: int, p: float) -> torch.Tensor:
    """Bool [row_stop - row_start, columns]: which entries dropout of probability ``p`` keeps.

    ``layer`` 0 is dropout on the input features, ``k`` the one after convolution ``k``.
    """
    mask = np.empty((row_stop - row_start, columns), dtype=np.bool_)
    _draw(mask, seed, epoch, layer, row_start, p, True)
    return torch.from_numpy(mask)


def keep_scale(seed: int, epoch: int, layer: int, row_start: int, like: torch.Tensor, p: float) -> torch.Tensor:
    """What to multiply rows ``row_start``… by: 1 / (1 - p) where kept, 0 where dropped. Shape and dtype of ``like``."""
    scale = np.empty(tuple(like.shape), dtype=str(like.dtype).removeprefix("torch."))
    _draw(scale, seed, epoch, layer, row_start, p, 1.0 / (1.0 - p))
    return torch.from_numpy(scale)
