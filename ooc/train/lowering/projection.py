# SPDX-License-Identifier: Apache-2.0
"""Linear maps whose weight is made of several parameters.

GAT's score a_src = (x Wᵀ) · att is linear in x, as z = x Wᵀ itself is: x times a matrix with att W below W. So
everything that an edge needs of a row comes of one dense product, and its gradient needs x alone, not z.

Shapes: R rows at hand, I/O columns in and out.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ooc.train.lowering.products import IN_FULL, Products
from ooc.train.lowering.values import Gradients, Rows, Value
from ooc.train.tensors import first_rows

Weights = Callable[[], tuple[Tensor, Tensor | None]]
"""Weight [O, I] and bias [O] as torch makes them of parameters."""


class Projection(Value):
    """x W(θ)ᵀ + b(θ). ``label`` tells what is made of the parameters θ."""

    affine = True
    heavy = True

    def __init__(
        self,
        index: int,
        source: Value,
        weights: Weights,
        parameters: Sequence[nn.Parameter],
        *,
        label: str,
        product: Products = IN_FULL,
    ) -> None:
        with torch.no_grad():
            weight, bias = weights()
        super().__init__(index, (source,), (len(weight),))
        self.has_bias = bias is not None
        self.weights = weights
        self.parameters = tuple(parameters)
        self.label = label
        self.product = product

    def needs(self) -> tuple[Value, ...]:
        return self.inputs if self.own_trains else ()

    def compute(self, inputs: Sequence[Tensor], rows: Rows, *, record: bool) -> Tensor:
        weight, bias = self.weights()
        source, multiply = inputs[0], self.product
        if multiply.dtype is None:
            return F.linear(source, weight.detach(), None if bias is None else bias.detach())
        weight_IO = multiply.weight((self, "forward"), lambda: weight.detach().T)
        out = multiply(multiply.rounded(source, rows.shared_source), weight_IO, source.dtype)
        return out if bias is None else out.add_(bias.detach())

    def backward(self, gradient: Tensor, operands: Sequence[Tensor | None], rows: Rows) -> Gradients:
        source, multiply, kept_as = operands[0], self.product, gradient.dtype
        factor = multiply.rounded(gradient, rows.shared_gradient)
        found = Gradients([None])
        if self.inputs[0].trains:
            with torch.no_grad():
                weight_OI = multiply.weight((self, "backward"), lambda: self.weights()[0].detach())
            found.inputs[0] = multiply(factor, weight_OI, kept_as)
        if source is None or not self.own_trains:
            return found
        taken = first_rows(multiply.rounded(source, rows.shared_source), gradient.shape[0])
        weight_gradient = multiply(factor.T, taken, kept_as)
        bias_gradient = gradient.sum(dim=0) if self.has_bias else None
        found.parameters = through_weights(self.weights, self.parameters, weight_gradient, bias_gradient)
        return found


def through_weights(
    weights: Weights, parameters: Sequence[nn.Parameter], weight_gradient: Tensor, bias_gradient: Tensor | None
) -> list[tuple[nn.Parameter, Tensor]]:
    """The gradients of the parameters that are trained, from those of the weight [O, I] and bias [O] made of them."""
    with torch.enable_grad():
        weight, bias = weights()
    outputs, gradients = [weight], [weight_gradient]
    if bias is not None and bias_gradient is not None:
        outputs.append(bias)
        gradients.append(bias_gradient)
    pairs = [pair for pair in zip(outputs, gradients, strict=True) if pair[0].requires_grad]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    parts = torch.autograd.grad(
        [output for output, _ in pairs], trained, [part for _, part in pairs], allow_unused=True
    )
    return [(p, part) for p, part in zip(trained, parts, strict=True) if part is not None]
