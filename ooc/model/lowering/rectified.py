# SPDX-License-Identifier: Apache-2.0
"""Activations whose gradient needs little: ReLU and LeakyReLU need only the signs of their input, one bit a value; tanh
and the logistic function need their result; ELU needs its input, and nothing else that autograd would record.

Keeping one bit a value of a rectifier's input is Gist's idea (A. Jain et al., ISCA 2018). Here the bits are a value
like others, kept only if the backward pass does not have the input at hand for another reason. Either way the gradient
has the same bits as autograd's.

Shapes: R rows, C numbers a row, ⌈C/8⌉ bytes a row of signs.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ooc.kernels.tensors import pack, shaped, unpack
from ooc.model.lowering.values import Gradients, Rows, Value

aten = torch.ops.aten


class Signs(Value):
    """Where the gradient passes a rectifier of ``source`` unchanged, eight numbers a byte: uint8 [R, ⌈C/8⌉].

    ``not_a_number``: whether it passes at NaN. For ReLU it does, here as in autograd.
    """

    packed = True
    trains = False

    def __init__(self, index: int, source: Value, *, not_a_number: bool) -> None:
        super().__init__(index, (source,), (-(-source.columns // 8),))
        self.not_a_number = not_a_number

    def compute(self, inputs: Sequence[Tensor], rows: Rows, *, record: bool) -> Tensor:
        numbers = shaped(inputs[0], (self.source.columns,))
        if numbers.device.type != "cpu":
            return pack(~(numbers <= 0) if self.not_a_number else numbers > 0)
        compared = numbers.numpy()  # comparing as integers is several times faster than torch here
        return pack(torch.from_numpy(~(compared <= 0) if self.not_a_number else compared > 0))

    def unpacked(self, signs: Tensor, dtype: torch.dtype) -> Tensor:
        """Return 1 where the gradient passes, otherwise 0: [R, …], shaped as the source."""
        ones = unpack(signs, self.source.columns)
        return shaped(ones.to(dtype), self.source.tail)


class Rectified(Value):
    """ReLU of the input, or LeakyReLU with ``slope``. ``backward`` needs ``signs``, or the input, or, for ReLU, the
    result."""

    def __init__(self, index: int, source: Value, signs: Signs, slope: float | None) -> None:
        super().__init__(index, (source,), source.tail)
        self.signs = signs
        self.slope = slope

    @property
    def operands(self) -> tuple[Value, ...]:
        return self.signs, self.source, self

    def needs(self) -> tuple[Value, ...]:
        return (self.signs,)

    def compute(self, inputs: Sequence[Tensor], rows: Rows, *, record: bool) -> Tensor:
        return F.relu(inputs[0]) if self.slope is None else F.leaky_relu(inputs[0], self.slope)

    def compute_at(self, inputs: Sequence[Tensor], rows: Rows, out: Tensor) -> Tensor:
        if self.slope is None:
            return torch.clamp_min(inputs[0], 0, out=out)  # ReLU calls this
        aten.leaky_relu.out(inputs[0], self.slope, out=out)
        return out

    def backward(
        self, gradient: Tensor, operands: Sequence[Tensor | None], rows: Rows, *, over: bool = False
    ) -> Gradients:
        """Return the gradient of the input. ``over``: write it over ``gradient``, which is not needed any more."""
        signs, source, result = operands
        if source is None and self.slope is None:
            source = result
        if source is None:
            assert signs is not None
            source = self.signs.unpacked(signs, gradient.dtype)
        # What autograd calls; torch.where with a mask of bools took twenty times as long.
        backward, how = aten.threshold_backward, list[float]([0])
        if self.slope is not None:
            backward, how = aten.leaky_relu_backward, [self.slope, False]
        if over:
            return Gradients([backward.grad_input(gradient, source, *how, grad_input=gradient)])
        return Gradients([backward.default(gradient, source, *how)])


class Sigmoidal(Value):
    """tanh of the input, or with ``logistic`` 1 / (1 + exp(-input)). ``backward`` needs the result."""

    def __init__(self, index: int, source: Value, *, logistic: bool) -> None:
        super().__init__(index, (source,), source.tail)
        self._function = torch.sigmoid if logistic else torch.tanh
        self._backward = aten.sigmoid_backward if logistic else aten.tanh_backward

    @property
    def operands(self) -> tuple[Value, ...]:
        return (self,)

    def needs(self) -> tuple[Value, ...]:
        return (self,)

    def compute(self, inputs: Sequence[Tensor], rows: Rows, *, record: bool) -> Tensor:
        return self._function(inputs[0])

    def compute_at(self, inputs: Sequence[Tensor], rows: Rows, out: Tensor) -> Tensor:
        return self._function(inputs[0], out=out)

    def backward(
        self, gradient: Tensor, operands: Sequence[Tensor | None], rows: Rows, *, over: bool = False
    ) -> Gradients:
        """Return the gradient of the input. ``over``: write it over ``gradient``, which is not needed any more."""
        (result,) = operands
        assert result is not None
        if over:
            return Gradients([self._backward.grad_input(gradient, result, grad_input=gradient)])
        return Gradients([self._backward.default(gradient, result)])


class ExponentialLinear(Value):
    """ELU of the input, with ``alpha``."""

    def __init__(self, index: int, source: Value, alpha: float) -> None:
        super().__init__(index, (source,), source.tail)
        self.alpha = alpha

    def needs(self) -> tuple[Value, ...]:
        return self.inputs

    def compute(self, inputs: Sequence[Tensor], rows: Rows, *, record: bool) -> Tensor:
        return F.elu(inputs[0], self.alpha)

    def backward(self, gradient: Tensor, operands: Sequence[Tensor | None], rows: Rows) -> Gradients:
        (source,) = operands
        assert source is not None
        return Gradients([torch.ops.aten.elu_backward.default(gradient, self.alpha, 1, 1, False, source)])
