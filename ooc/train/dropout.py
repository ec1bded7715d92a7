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


@numba.njit(cache=True, nogil=True)
def _draw_row(draws, row, layer, k0, k1):  # type: ignore[no-untyped-def]
    """Ten rounds of Philox4x32 for every four columns of a row, into ``draws`` [4 * groups] uint32.

    Products are formed in 64 bits; the loop over groups has no branch, so that it compiles to vector code.
    """
    mask = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    low, high = np.uint64(row) & mask, np.uint64(row) >> shift
    for group in range(draws.shape[0] // 4):
        c0, c1, c2, c3 = low, high, np.uint64(group), np.uint64(layer)
        key0, key1 = np.uint64(k0), np.uint64(k1)
        for _ in range(10):
            p0 = np.uint64(0xD2511F53) * c0
            p1 = np.uint64(0xCD9E8D57) * c2
            c0, c1 = (p1 >> shift) ^ c1 ^ key0, p1 & mask
            c2, c3 = (p0 >> shift) ^ c3 ^ key1, p0 & mask
            key0 = (key0 + np.uint64(0x9E3779B9)) & mask
            key1 = (key1 + np.uint64(0xBB67AE85)) & mask
        draws[4 * group] = np.uint32(c0)
        draws[4 * group + 1] = np.uint32(c1)
        draws[4 * group + 2] = np.uint32(c2)
        draws[4 * group + 3] = np.uint32(c3)


@numba.njit(cache=True, nogil=True)
def _fill(out, row_start, threshold, value, layer, k0, k1):  # type: ignore[no-untyped-def]
    """out[r, c] = value where the draw of (row_start + r, c) is at least threshold, else 0."""
    rows, columns = out.shape
    draws = np.empty((columns + 3) // 4 * 4, dtype=np.uint32)
    for r in range(rows):
        _draw_row(draws, row_start + r, layer, k0, k1)
        for c in range(columns):
            out[r, c] = value if draws[c] >= threshold else 0


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
