# SPDX-License-Identifier: Apache-2.0
"""Dropout whose masks do not depend on how the rows are cut.

Every row has its own range of counters of the generator (``kernels.masks``), so any rows can be drawn anywhere, in any
order, and drawn again in the backward pass, and always come out the same. A sequential generator restarted for every
block of rows would tie the masks to that block height.
"""

from collections.abc import Callable

from torch import Tensor

from ooc.kernels.dropout.masks import Draw


def _drawn_on_host(draw: Draw, like: Tensor) -> Tensor:
    return draw.mask(*like.shape).to(like.device)


def _drawn_by_cuda(draw: Draw, like: Tensor) -> Tensor:
    from ooc.kernels.cuda import dropout  # needs triton

    return dropout.keep_mask(draw, like)


BY_DEVICE: dict[str, Callable[[Draw, Tensor], Tensor]] = {"cpu": _drawn_on_host, "cuda": _drawn_by_cuda}
"""By torch's name of a kind of device: bool, of the shape of a matrix and where it is, which entries are kept."""


def keep_mask(seed: int, epoch: int, layer: int, row_start: int, row_stop: int, columns: int, p: float) -> Tensor:
    """Bool [row_stop - row_start, columns]: which entries dropout of probability ``p`` keeps; on the CPU."""
    return Draw(seed, epoch, layer, row_start, p).mask(row_stop - row_start, columns)


def keep_scale(seed: int, epoch: int, layer: int, row_start: int, like: Tensor, p: float) -> Tensor:
    """What to multiply rows ``row_start``… by: 1 / (1 - p) where kept, 0 where dropped. Shape, dtype and place of
    ``like``."""
    keep = BY_DEVICE[like.device.type](Draw(seed, epoch, layer, row_start, p), like)
    return keep.to(like.dtype).mul_(1.0 / (1.0 - p))
