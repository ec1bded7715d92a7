# SPDX-License-Identifier: Apache-2.0
"""Dense products, with both factors first rounded to a narrower type if asked.

This is what torch.autocast does: processors with bfloat16 products multiply several times as fast as in float32. Sums
within a product are in float32 and rounded once; everything else keeps the model's own type.
"""

from collections.abc import Callable, Hashable
from threading import Lock

import torch
from torch import Tensor


class Products:
    """Dense products with factors rounded to ``dtype`` (None: not rounded).

    Weights are rounded once for all tiles of a program, in the layout that they are multiplied in. They change only
    between programs, which therefore begin with ``forget_weights``.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype
        self._weights: dict[Hashable, Tensor] = {}
        self._rounding = Lock()

    def __call__(
        self, left_RK: Tensor, right_KC: Tensor, kept_as: torch.dtype | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Return left · right [R, C] of type ``kept_as`` (None: the type of ``left``). It is written to ``out``, unless
        factors are rounded."""
        if self.dtype is None:
            return torch.matmul(left_RK, right_KC, out=out)
        return (left_RK.to(self.dtype) @ right_KC.to(self.dtype)).to(kept_as or left_RK.dtype)

    def weight(self, owner: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """Return the right factor made by ``make``, as it is multiplied; ``owner`` identifies it."""
        if self.dtype is None:
            return make()
        with self._rounding:  # so that threads do not all make one
            if owner not in self._weights:
                self._weights[owner] = make().to(self.dtype).contiguous()
            return self._weights[owner]

    def forget_weights(self) -> None:
        """Discard rounded weights, which may have changed."""
        self._weights.clear()

    def weights_nbytes(self, inputs: int, outputs: int) -> int:
        """Return the bytes of one weight's rounded copies, one for products of rows and one for their gradients."""
        return 0 if self.dtype is None else 2 * self.dtype.itemsize * inputs * outputs

    def rounded(self, factor: Tensor, shared: "SharedFactor") -> Tensor:
        """Return ``factor`` as it is multiplied, rounded once for consecutive products with it."""
        return factor if self.dtype is None else shared.rounded(factor, self.dtype)

    def columns(self, inputs: int, outputs: int) -> int:
        """Return how many columns, of the model's own type, a product of rows takes beside its factors and its result:
        both in the narrower type, and one of each that is kept rounded for the next product."""
        return 0 if self.dtype is None else 2 * -(-(inputs + outputs) // 2) + outputs


class SharedFactor:
    """The rows, or the gradient, that a tile's products have rounded last. The next product often takes the same: two
    linear maps that are added get the same gradient, and each multiplies it twice; the input of two linear maps is
    multiplied by the gradients of both."""

    __slots__ = ("_factor", "_rounded")

    def __init__(self) -> None:
        self._factor: Tensor | None = None
        self._rounded: Tensor | None = None

    def rounded(self, factor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return ``factor`` in ``dtype``."""
        if self._rounded is None or self._factor is not factor:
            self._factor = self._rounded = None  # free the previous one first
            self._factor, self._rounded = factor, factor.to(dtype)
        return self._rounded


IN_FULL = Products()
