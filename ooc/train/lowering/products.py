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

    def __call__(self, left_RK: Tensor, right_KC: Tensor) -> Tensor:
        """left · right → [R, C], of the type of ``left``."""
        if self.dtype is None:
            return left_RK @ right_KC
        return (left_RK.to(self.dtype) @ right_KC.to(self.dtype)).to(left_RK.dtype)

    def columns(self, inputs: int, outputs: int) -> int:
        """Columns, of the model's own type, that a product of rows takes beside its factors and its result."""
        return 0 if self.dtype is None else -(-(inputs + outputs) // 2)


IN_FULL = Products()
