# SPDX-License-Identifier: Apache-2.0
"""Whether two networks compute the same, so that one forward pass stands for both.

Values are compared by their attributes, functions by their code and all that they refer to; tensors, modules and
anything else have to be the very same ones, since it is always right to compute both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import FunctionType
from typing import Any

import torch

from ooc.model.layers.opaque import Opaque
from ooc.model.lowering.values import Value

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)
"""Types whose instances are what their repr says; unlike ==, it tells 0.0 from -0.0."""

_NOT_COMPARED = {"index", "columns", "trains", "signs"}
"""Attributes of values that tell nothing of what they compute, or nothing that the others do not."""


def compute_the_same(values: Sequence[Value], others: Sequence[Value]) -> bool:
    """Whether these are the same functions of the same parameters, one by one; each with its inputs before it."""
    if len(values) != len(others):
        return False
    pairs = list(zip(values, others, strict=True))
    comparison = _Comparison(dict(pairs))
    try:
        return all(comparison.of_values(value, other) for value, other in pairs)
    except RecursionError:  # something made of parameters in very many steps
        return False


class _Comparison:
    """``pairs``: which value of the one network stands where which of the other does."""

    def __init__(self, pairs: Mapping[Value, Value]) -> None:
        self._pairs = pairs
        self._functions: set[tuple[FunctionType, FunctionType]] = set()
        """Those found to be the same: what is made of parameters may be made of the same ones many times over."""

    def of_values(self, value: Value, other: Value) -> bool:
        """Whether the two compute the same of inputs that are."""
        return type(value) is type(other) and self.same(_computed_by(value), _computed_by(other))

    def same(self, one: Any, other: Any) -> bool:
        """Whether what values compute by is the same: at whatever time one looks."""
        if isinstance(one, Value):
            return self._pairs.get(one) is other
        if one is other:
            return True
        if type(one) is not type(other):
            return False
        if type(one) in _PLAIN:
            return repr(one) == repr(other)
        match one:
            case FunctionType():
                return self._same_function(one, other)
            case slice():
                return self.same((one.start, one.stop, one.step), (other.start, other.stop, other.step))
            case dict():
                return self.same(list(one.items()), list(other.items()))
            case list() | tuple():
                return len(one) == len(other) and all(self.same(a, b) for a, b in zip(one, other, strict=True))
            case _ if is_dataclass(one):
                names = [part.name for part in fields(one)]
                return self.same([getattr(one, n) for n in names], [getattr(other, n) for n in names])
            case _:
                return False

    def _same_function(self, one: FunctionType, other: FunctionType) -> bool:
        """By code, by defaults, and by what is in the variables of the functions around it."""
        if (one, other) not in self._functions:
            if one.__code__ is not other.__code__ or one.__globals__ is not other.__globals__:
                return False
            found, expected = ((f.__defaults__, f.__kwdefaults__, _variables(f)) for f in (one, other))
            if not self.same(found, expected):
                return False
            self._functions.add((one, other))
        return True


def _computed_by(value: Value) -> object:
    if isinstance(value, Opaque):
        return value.tail, value.inputs, value.parameters, value.computes
    return {name: part for name, part in vars(value).items() if name not in _NOT_COMPARED}


def _variables(function: FunctionType) -> list[object]:
    """Of the functions around it; of one that is not set yet something that is the same as nothing else."""
    found: list[object] = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:
            found.append(object())
    return found
