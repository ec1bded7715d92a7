# SPDX-License-Identifier: Apache-2.0
"""Dense products, with both factors rounded to a narrower type first where that is asked for.

As torch.autocast does it: processors that multiply bfloat16 do so several times as fast as float32. Sums within a
product are taken in float32 and rounded once; everything else stays in the model's own type.
"""

from collections.abc import Callable, Hashable
from threading import Lock

import torch
from torch import Tensor


class Products:
    """``dtype``: what factors are rounded to; None: nothing is.

    Weights are rounded once for all tiles of a program, in the layout that they are multiplied in. They change between
    programs alone, which therefore begin with ``forget_weights``.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype
        self._weights: dict[Hashable, Tensor] = {}
        self._rounding = Lock()

    def __call__(
        self, left_RK: Tensor, right_KC: Tensor, kept_as: torch.dtype | None = None, out: Tensor | None = None
    ) -> Tensor:
        """left · right → [R, C], of type ``kept_as``; None: of the type of ``left``. In ``out``, unless factors are
        rounded."""
        if self.dtype is None:
            return torch.matmul(left_RK, right_KC, out=out)
        return (left_RK.to(self.dtype) @ right_KC.to(self.dtype)).to(kept_as or left_RK.dtype)

    def weight(self, owner: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """The right factor that ``make`` gives, as it is multiplied; ``owner`` tells it from all others."""
        if self.dtype is None:
            return make()
        with self._rounding:  # so that threads do not each make one
            if owner not in self._weights:
                self._weights[owner] = make().to(self.dtype).contiguous()
            return self._weights[owner]

    def forget_weights(self) -> None:
        """Weights may have changed."""
        self._weights.clear()

    def weights_nbytes(self, inputs: int, outputs: int) -> int:
        """What one weight takes rounded, as rows multiply it and as their gradients do."""
        return 0 if self.dtype is None else 2 * self.dtype.itemsize * inputs * outputs

    def rounded(self, factor: Tensor, shared: "SharedFactor") -> Tensor:
        """``factor`` as it is multiplied, rounded once for all the products that take it one after the other."""
        return factor if self.dtype is None else shared.rounded(factor, self.dtype)

    def columns(self, inputs: int, outputs: int) -> int:
        """Columns, of the model's own type, that a product of rows takes beside its factors and its result: both in the
        narrower type, and one of each, which wait rounded for the next product."""
        return 0 if self.dtype is None else 2 * -(-(inputs + outputs) // 2) + outputs


class SharedFactor:
    """The rows, or the gradient, that the products of a tile have rounded last. Often the next one takes the same: what
    two linear maps are added to hands both of them its gradient, and each multiplies it twice; and what two linear maps
    take is multiplied by the gradients of both."""

    __slots__ = ("_factor", "_rounded")

    def __init__(self) -> None:
        self._factor: Tensor | None = None
        self._rounded: Tensor | None = None

    def rounded(self, factor: Tensor, dtype: torch.dtype) -> Tensor:
        """``factor`` in ``dtype``."""
        if self._rounded is None or self._factor is not factor:
            self._factor = self._rounded = None  # the one before makes room
            self._factor, self._rounded = factor, factor.to(dtype)
        return self._rounded


IN_FULL = Products()
