# SPDX-License-Identifier: Apache-2.0
"""Linear maps by a parameter, or by a weight made of several parameters.

GAT's score a_src = (x Wᵀ) · att is linear in x, as z = x Wᵀ itself is: x times a matrix with att W below W. So
everything an edge needs of a row comes from one dense product, and its gradient needs only x, not z.

Shapes: R rows at hand, I/O columns in and out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ooc.kernels.tensors import gradients_of
from ooc.model.lowering.products import IN_FULL, Products
from ooc.model.lowering.values import Gradients, Rows, Summed, Value

_FEW_NUMBERS = 1 << 14
"""A weight with at most this many numbers is made once, under autograd, for values and gradients; calls are then most
of the time."""
Weights = Callable[[], tuple[Tensor, Tensor | None]]
"""A function that makes the weight [O, I] and the bias [O] from parameters."""


@dataclass(frozen=True, slots=True)
class Repeated:
    """Which columns are copies: of ``times`` times ``columns`` columns, and of those that follow, the last of every
    ``columns`` is the same.

    Equal rows of W do not guarantee equal columns to the last bit: a product may add up in another order at its edges.
    """

    times: int
    columns: int

    def put(self, out_RO: Tensor) -> Tensor:
        """Make the columns equal. Their gradients remain those of separate columns, and add up in W's."""
        if self.times > 1:
            heads = out_RO.shape[1] // (self.times * self.columns)
            last = out_RO.view(len(out_RO), heads, self.times, self.columns)[..., -1]
            last[..., 1:] = last[..., :1]
        return out_RO


NO_COPIES = Repeated(1, 1)
"""No repeated columns."""


class Projection(Value):
    """x W(θ)ᵀ + b(θ). ``repeated``: which columns are copies."""

    heavy = True

    def __init__(
        self,
        index: int,
        source: Value,
        weights: Weights,
        parameters: Sequence[nn.Parameter],
        *,
        product: Products = IN_FULL,
        repeated: Repeated = NO_COPIES,
    ) -> None:
        self.made = ComputedWeight(weights, parameters)
        super().__init__(index, (source,), (self.made.columns,))
        self.parameters = tuple(parameters)
        self.product = product
        self.repeated = repeated

    @property
    def gradient_numel(self) -> int:
        return self.made.numel if self.own_trains else 0

    def needs(self) -> tuple[Value, ...]:
        return self.inputs if self.own_trains else ()

    def compute(self, inputs: Sequence[Any], rows: Rows, *, record: bool) -> Tensor:
        return self._multiply(inputs[0], rows)

    def compute_at(self, inputs: Sequence[Any], rows: Rows, out: Tensor) -> Tensor:
        return self._multiply(inputs[0], rows, out)

    def _multiply(self, source: Tensor, rows: Rows, out: Tensor | None = None) -> Tensor:
        (weight, bias), multiply = self.made.values(), self.product
        if multiply.dtype is None and bias is not None:
            if out is None:
                return self.repeated.put(F.linear(source, weight, bias))
            return self.repeated.put(torch.addmm(bias, source, weight.T, out=out))
        weight_IO = multiply.weight((self, "forward"), lambda: weight.T)
        out = multiply(multiply.rounded(source, rows.shared_source), weight_IO, source.dtype, out)
        return self.repeated.put(out if bias is None else out.add_(bias))

    def backward(self, gradient: Tensor, operands: list[Any], rows: Rows, out: Tensor | None = None) -> Gradients:
        """Return the gradients; ``out``: where the input's gradient may be written."""
        source, multiply, kept_as = operands.pop(), self.product, gradient.dtype
        factor = multiply.rounded(gradient, rows.shared_gradient)
        found = Gradients([None])
        if source is not None and self.own_trains:
            taken = multiply.rounded(source, rows.shared_source)
            found.parameters = self._of_parameters(multiply(factor.T, taken, kept_as), gradient)
            del taken
        del source  # its gradient is as large
        if self.source.trains:
            weight_OI = multiply.weight((self, "backward"), lambda: self.made.values()[0])
            found.inputs[0] = multiply(factor, weight_OI, kept_as, out)
        return found

    def _of_parameters(self, weight_gradient: Tensor, gradient: Tensor) -> list[tuple[Summed, Tensor]]:
        return self.made.gradients(weight_gradient, gradient.sum(dim=0) if self.made.has_bias else None)


class Linear(Projection):
    """x Wᵀ with a parameter ``weight`` [O, I]."""

    def __init__(self, index: int, source: Value, weight: nn.Parameter, product: Products = IN_FULL) -> None:
        super().__init__(index, source, lambda: (weight, None), (weight,), product=product)


class SparseProduct(Projection):
    """The product of sparse rows, for which W is stored column by column. Factors are never rounded."""

    def __init__(
        self, index: int, source: Value, weights: Weights, parameters: Sequence[nn.Parameter], **options: Any
    ) -> None:
        def by_columns() -> tuple[Tensor, Tensor | None]:
            weight_OF, bias = weights()
            return weight_OF.T.contiguous(), bias

        super().__init__(index, source, by_columns, parameters, **options)
        self.tail = (self.made.values()[0].shape[1],)

    def compute(self, inputs: Sequence[Any], rows: Rows, *, record: bool) -> Tensor:
        weight_FO, bias = self.made.values()
        out_RO = inputs[0].times(weight_FO)
        return self.repeated.put(out_RO if bias is None else out_RO.add_(bias))

    def compute_at(self, inputs: Sequence[Any], rows: Rows, out: Tensor) -> Tensor:
        return self.compute(inputs, rows, record=False)

    def backward(self, gradient: Tensor, operands: list[Any], rows: Rows, out: Tensor | None = None) -> Gradients:
        if operands[0] is None or not self.own_trains:
            return Gradients([None])
        columns_U, sums_UO = operands[0].transposed_times(gradient)
        size = self.source.columns, self.columns
        of_weight = torch.sparse_coo_tensor(columns_U[None], sums_UO, size, check_invariants=False, is_coalesced=True)
        return Gradients([None], self._of_parameters(of_weight, gradient))


class ComputedWeight:
    """A weight [O, I] and bias [O] made of parameters once a program, as parameters only change between programs.

    A small one is made once for values and gradients, and its autograd record is counted as much again. Gradients of
    the weight and bias are added up over all tiles, in order, and propagated to the parameters when a program has
    ended. Making and differentiating them for every tile was more than half of the operators of GAT's epoch in memory.
    A linear layer's own weight and bias take no memory, and their gradients are summed in place.
    """

    def __init__(self, weights: Weights, parameters: Sequence[nn.Parameter]) -> None:
        with torch.no_grad():
            weight, bias = weights()
        self._shapes = weight.shape, None if bias is None else bias.shape
        self.columns = len(weight)
        self.numel = weight.numel() + (0 if bias is None else bias.numel())
        self.has_bias = bias is not None
        self.nbytes = 0
        """The bytes they take beside the parameters, with their gradients."""
        self._weights, self._parameters = weights, tuple(parameters)
        self._is_small = False
        self.sums: tuple[_Sum, ...] = ()
        """What tiles add gradients to, if the weight or the bias is made."""
        if not all(isinstance(made, nn.Parameter) for made in (weight, bias) if made is not None):
            self._is_small = self.numel <= _FEW_NUMBERS
            self.nbytes = (4 if self._is_small else 2) * self.numel * weight.itemsize
            self.sums = _Sum(), _Sum()
        self._values: tuple[Tensor, Tensor | None] | None = None
        self._recorded: tuple[Tensor, Tensor | None] | None = None
        self._making = Lock()

    def values(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias, without gradients; on any thread."""
        if not self.sums:
            weight, bias = self._weights()
            return weight.detach(), None if bias is None else bias.detach()
        with self._making:  # so that threads do not all make one
            if self._values is None:
                records = self._is_small and self.sums[0].grad is not None
                with torch.set_grad_enabled(records):
                    weight, bias = made = self._weights()
                self._recorded = made if records else None
                self._values = weight.detach(), None if bias is None else bias.detach()
            return self._values

    def forget(self) -> None:
        """Discard the weight and bias, as parameters may have changed."""
        self._values = self._recorded = None

    def gradients(self, weight: Tensor, bias: Tensor | None) -> list[tuple[Summed, Tensor]]:
        """Return a tile's gradients with what they are to be added to."""
        made: tuple[Any, ...] = self.sums or self._weights()  # the parameters themselves, without a copy
        pairs = zip(made, (weight, bias), strict=True)
        found = [(sums, part) for sums, part in pairs if sums is not None and part is not None]
        return found if self.sums else [(parameter, part) for parameter, part in found if parameter.requires_grad]

    def begin(self) -> None:
        """Begin a program, before any tile has added gradients."""
        for sums, shape in zip(self.sums, self._shapes, strict=False):
            sums.grad = None if shape is None else self._parameters[0].new_zeros(shape)

    def finish(self) -> None:
        """End a program: give parameters their gradients."""
        if not self.sums:
            return
        weight, bias = (sums.grad for sums in self.sums)
        assert weight is not None
        recorded, self._recorded = self._recorded, None
        for parameter, part in through_weights(self._weights, self._parameters, weight, bias, recorded):
            assert parameter.grad is not None
            parameter.grad.add_(part)

    def end(self) -> None:
        """Free the sums."""
        self._recorded = None
        for sums in self.sums:
            sums.grad = None


@dataclass(slots=True)
class _Sum:
    """The sum of a made weight's or bias's gradients."""

    grad: Tensor | None = None


def through_weights(
    weights: Weights,
    parameters: Sequence[nn.Parameter],
    weight_gradient: Tensor,
    bias_gradient: Tensor | None,
    recorded: tuple[Tensor, Tensor | None] | None = None,
) -> list[tuple[nn.Parameter, Tensor]]:
    """Return the gradients of the trained parameters from those of the weight [O, I] and bias [O] made of them;
    ``recorded``: these, if they were made under autograd."""
    with torch.enable_grad():
        pairs = zip(recorded or weights(), (weight_gradient, bias_gradient), strict=True)
    made, above = zip(*((one, part) for one, part in pairs if one is not None and part is not None), strict=True)
    found = zip(parameters, gradients_of(made, parameters, above), strict=True)
    return [(parameter, part) for parameter, part in found if part is not None]
