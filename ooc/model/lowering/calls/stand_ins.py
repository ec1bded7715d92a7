# SPDX-License-Identifier: Apache-2.0
"""What stands in a trace for results that are no values: those computed anew at each use, and rows in other shapes."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import Tensor, nn
from torch.fx.node import map_aggregate

from ooc.errors import ModelError
from ooc.model.lowering.values import Codes, Moments, RowCount, Value

Known = dict[Any, Any]
"""The rows of values and the moments that something is computed from, and what has been computed from them so far."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Computed:
    """A result that is recomputed at each use, from rows, parameters and sums over all rows."""

    name: str = ""
    evaluate: Callable[[Known], Any]
    inputs: tuple[Value, ...] = ()
    parameters: tuple[nn.Parameter, ...] = ()
    moments: tuple[Moments, ...] = ()

    def of(self, known: Known) -> Any:
        if self not in known:
            known[self] = self.evaluate(known)
        return known[self]

    def function(self, *tensors: Tensor) -> Any:
        """Compute it from rows of the inputs, followed by the moments."""
        given = iter(tensors)
        known: Known = {value: next(given) for value in self.inputs}
        return self.of(known | {one: tuple(islice(given, one.statistics.parts)) for one in self.moments})


class Free(Computed):
    """A result without row inputs, which is the same for all rows."""

    def has_sums(self, where: str) -> bool:
        """Raise ModelError if it depends on sums over all rows, which a tile's edges do not get; otherwise return
        False."""
        if self.moments:
            raise ModelError(f"{where} is given a sum over all rows; a matrix of rows may be computed of it before")
        return False


@dataclass(frozen=True)
class OneGraph:
    """Stands for ``batch`` of a single graph: every row belongs to the only one."""


@dataclass(frozen=True)
class OneBatch:
    """All rows as a batch of one, [1, N, …]."""

    rows: Value


@dataclass(frozen=True)
class Stacked:
    """Several matrices stacked, [K, N, …], or a tensor whose rows are in dimension ``at``; kept as ``rows`` [N, K,
    …]."""

    rows: Value
    at: int = 1


@dataclass(frozen=True, eq=False, kw_only=True)
class Parts(Computed):
    """Several results of one function of rows, or truth values, which are not kept by themselves.

    ``at``: the dimension of rows, if it is one tensor."""

    at: int = 0


ROW_RESULTS = (Value, Stacked, Codes, OneBatch, OneGraph, Parts, RowCount)
"""What has something to do with rows."""


def parameter_of(argument: Any) -> Any:
    """Return the parameter that an argument stands for, or None."""
    if not isinstance(argument, Free) or len(argument.parameters) != 1 or argument.moments:
        return None
    (parameter,) = argument.parameters
    return parameter if argument.of({}) is parameter else None


def leaves_of(tree: Any) -> list[Any]:
    """Return the leaves of an argument, through lists, tuples, dictionaries and slices."""
    found: list[Any] = []
    map_aggregate(tree, found.append)
    return found
