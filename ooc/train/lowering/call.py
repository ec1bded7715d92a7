# SPDX-License-Identifier: Apache-2.0
"""A convolution as a model calls it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ooc.errors import ModelError
from ooc.train.lowering.assembly import Assembly
from ooc.train.lowering.values import Value


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a convolution: its arguments by name, what refusals call it, and how to apply a module to rows."""

    where: str
    arguments: dict[str, Any]
    assembly: Assembly
    apply: Callable[[nn.Module, Value], Value]

    def matrix(self, name: str) -> Value:
        """The argument ``name``, which must be a matrix of rows."""
        value = self.arguments[name]
        if not isinstance(value, Value):
            raise ModelError(f"{self.where}: {name} must be one matrix of rows")
        return value

    def refuse(self, reason: str) -> ModelError:
        return ModelError(f"{self.where}: {reason}")

    def weight(self, linear: Any) -> nn.Parameter:
        """The weight of a linear layer; one that is computed from others is refused."""
        if not isinstance(linear.weight, nn.Parameter):
            raise self.refuse("a weight that is computed from others is not supported")
        return linear.weight
