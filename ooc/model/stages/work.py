# SPDX-License-Identifier: Apache-2.0
"""How much work the values of a stage are: multiply-adds of dense products and values that element-wise work reads and
writes, by row, and operators, by tile.

Counts, no times: what they take is the machine's affair (``ooc.plan.hardware``). A function of rows whose insides are
not known counts as one that reads its inputs once and writes its output once, and twice that backward.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ooc.model.lowering.rectified import Rectified, Signs
from ooc.model.lowering.values import Dropout, Linear, Moments, Normalized, Rowwise, Sum, Value

DRAWN_VALUES = 8
"""Values streamed in the time that drawing one random number and comparing it takes. Measured on two AVX-512 cores:
1.7 ns a number in tiles of 1,024 × 128 against 0.2 ns a value of a product by a scalar, both by processor time."""
_NORM_VALUES = 6
"""Of one column: read to be centred, scaled and shifted, each written again."""

_WIDE, _PACKED_VALUES = 128, 5
"""Products with a side narrower than ``_WIDE`` spend more on putting the other side in order: so many values streamed
for each of its own. Measured: 16 × 128 at 41 G multiply-adds a second, 64 × 64 at 62, 128 × 128 at 72."""
_RECORDED_OPERATORS = 16
"""Of a function that autograd differentiates: recording it, and an engine's run of its own."""


@dataclass(frozen=True, slots=True)
class Work:
    """Of one row multiply-adds, and values read or written; of a tile ``operators``, each with its share of Python."""

    multiplies: int = 0
    values: int = 0
    operators: int = 1

    def __add__(self, other: "Work") -> "Work":
        return Work(self.multiplies + other.multiplies, self.values + other.values, self.operators + other.operators)

    def spread(self, rows: int, of: int) -> "Work":
        """Done for the first ``rows`` rows alone, as so much for each of ``of`` rows."""
        return self if rows >= of else Work(self.multiplies * rows // of, self.values * rows // of, self.operators)


NO_WORK = Work(operators=0)


def total(parts: Iterable[Work]) -> Work:
    """All of them together."""
    return sum(parts, NO_WORK)


def forward_work(value: Value) -> Work:
    """To compute ``value`` from its inputs."""
    inputs = sum(source.columns for source in value.inputs if not isinstance(source, Moments))
    match value:
        case Linear():
            narrow, wide = sorted((inputs, value.columns))
            packed = _PACKED_VALUES * wide * max(0, _WIDE - narrow) // _WIDE
            return Work(inputs * value.columns, inputs + value.columns + packed, 2)
        case Sum():
            operators = len(value.inputs) + len(value.parameters) - 1 + (value.factors[0] != 1)
            return Work(0, 3 * operators * value.columns, operators)
        case Dropout():
            return Work(0, (3 + DRAWN_VALUES) * value.columns, 5)
        case Normalized():
            return Work(0, _NORM_VALUES * value.columns, 6)
        case Signs():
            return Work(0, inputs + value.columns, 3)
        case Rowwise():
            return Work(_products(value), inputs + value.columns, 2)
        case _:
            return Work(0, inputs + value.columns)


def backward_work(value: Value) -> Work:
    """To take the gradient of ``value`` to its inputs and parameters, what it needs being at hand."""
    forward = forward_work(value)
    match value:
        case Linear():
            products = value.inputs[0].trains + value.own_trains
            return Work(products * forward.multiplies, products * forward.values, 2 * products)
        case Sum():
            scaled = sum(factor != 1 for factor in value.factors)
            return Work(0, (2 * scaled + len(value.parameters)) * value.columns, 1 + scaled + 2 * len(value.parameters))
        case Dropout() | Rectified():
            return Work(0, 3 * value.columns)
        case _:
            return Work(2 * forward.multiplies, 2 * forward.values, _RECORDED_OPERATORS)


def _products(value: Rowwise) -> int:
    """Multiply-adds a row of a function's matrices: each is taken to multiply the row once."""
    return sum(parameter.numel() for parameter in value.parameters if parameter.dim() > 1)
