# SPDX-License-Identifier: Apache-2.0
"""A convolution as a model calls it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ooc.errors import ModelError
from ooc.plan.workload import EdgeData
from ooc.train.lowering.assembly import Assembly
from ooc.train.lowering.values import Value

ARGUMENTS = {EdgeData.WEIGHT: "edge_weight", EdgeData.FEATURES: "edge_attr"}
"""What PyG's models call what edges carry."""


@dataclass(frozen=True, slots=True)
class EdgeInput:
    """Stands for what the store's edges carry: good for nothing but being given to a convolution."""

    data: EdgeData


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a convolution: its arguments by name, what refusals call it, and how to trace a module on rows."""

    where: str
    arguments: dict[str, Any]
    assembly: Assembly
    trace: Callable[[nn.Module, Value], Value]

    def matrix(self, name: str) -> Value:
        """The argument ``name``, which must be a matrix of rows."""
        value = self.arguments[name]
        if not isinstance(value, Value):
            raise ModelError(f"{self.where}: {name} must be one matrix of rows")
        return value

    def takes(self, name: str, data: EdgeData) -> bool:
        """Whether the argument ``name`` is what the store's edges carry of this kind; it may be nothing, too."""
        given = self.arguments.get(name)
        if given is None:
            return False
        if given != EdgeInput(data):
            raise self.refuse(f"{name} must be the model's own {ARGUMENTS[data]}")
        self.assembly.edge_data.add(data)
        return True

    def refuse(self, reason: str) -> ModelError:
        return ModelError(f"{self.where}: {reason}")

    def apply(self, module: nn.Module, rows: Value) -> Value:
        """What a module inside the convolution gives for rows, whatever it is."""
        try:
            return self.trace(module, rows)
        except ModelError as error:
            raise self.refuse(str(error)) from error
