# SPDX-License-Identifier: Apache-2.0
"""Dense products, with both factors rounded to a narrower type first where that is asked for.

As torch.autocast does it: processors that multiply bfloat16 do so several times as fast as float32. Sums within a
product are taken in float32 and rounded once; everything else stays in the model's own type.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Products:
    """``dtype``: what factors are rounded to; None: nothing is."""

    dtype: torch.dtype | None = None

    def __call__(self, left_RK: Tensor, right_KC: Tensor, kept_as: torch.dtype | None = None) -> Tensor:
        """left · right → [R, C], of type ``kept_as``; None: of the type of ``left``."""
        if self.dtype is None:
            return left_RK @ right_KC
        return (left_RK.to(self.dtype) @ right_KC.to(self.dtype)).to(kept_as or left_RK.dtype)

    def rounded(self, factor: Tensor, shared: "SharedFactor") -> Tensor:
        """``factor`` as it is multiplied, rounded once for all the products that take it one after the other."""
        return factor if self.dtype is None else shared.rounded(factor, self.dtype)

    def columns(self, inputs: int, outputs: int) -> int:
        """Columns, of the model's own type, that a product of rows takes beside its factors and its result: both in the
        narrower type, and the gradient of the result, which waits rounded for the next one."""
        return 0 if self.dtype is None else -(-(inputs + outputs) // 2) + outputs + -(-outputs // 2)


class SharedFactor:
    """The factor that the products of a tile have rounded last. Often the next one takes the same: what two linear maps
    are added to hands both of them its gradient, and each multiplies it twice."""

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
