# SPDX-License-Identifier: Apache-2.0
"""Recognise torch's operators that add rows up by an index, or reduce them otherwise.

Shapes: E rows that are reduced to R.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ooc.kernels.fixed_order import rows_scattered

_OF = torch.Tensor
_INDEX_ADD_ARGUMENTS = "input", "dim", "index", "source"
_SCATTER_ARGUMENTS = "input", "dim", "index", "src", "reduce"
_INDEX_REDUCE_ARGUMENTS = "input", "dim", "index", "source", "reduce"
_INDEX_PUT_ARGUMENTS = "input", "indices", "values", "accumulate"
_GIVEN: dict[Any, tuple[str, ...]] = {
    **dict.fromkeys((_OF.scatter_add, _OF.scatter_add_, torch.scatter_add), _SCATTER_ARGUMENTS),
    **dict.fromkeys((_OF.scatter_reduce, _OF.scatter_reduce_, torch.scatter_reduce), _SCATTER_ARGUMENTS),
    **dict.fromkeys((_OF.index_add, _OF.index_add_, torch.index_add), _INDEX_ADD_ARGUMENTS),
    **dict.fromkeys((_OF.index_reduce, _OF.index_reduce_, torch.index_reduce), _INDEX_REDUCE_ARGUMENTS),
    **dict.fromkeys((_OF.index_put, _OF.index_put_, torch.index_put, torch.index_put_), _INDEX_PUT_ARGUMENTS),
}
"""The argument names of each operator, in order."""
_EMPTY_RESULT = {"sum": 0.0, "prod": 1.0, "amax": -torch.inf, "amin": torch.inf, "mean": torch.nan}
"""The result for segments without rows."""
_IN_PLACE = {_OF.scatter_add_, _OF.scatter_reduce_, _OF.index_add_, _OF.index_reduce_, _OF.index_put_, torch.index_put_}
PRODUCTS = {torch.matmul, torch.mm, _OF.matmul, _OF.mm, _OF.__matmul__, torch.sparse.mm, torch.smm, torch.spmm}
"""Products of matrices, of which the first may be sparse."""


REDUCTIONS = (torch.segment_reduce, *_GIVEN)


@dataclass(frozen=True, slots=True)
class Reduction:
    """Rows along ``dim``, one for each of ``numbers_E``, that are added to that row of ``into``, or reduced with it by
    torch's ``name``. ``includes``: the value that was there counts, even if there are others; ``in_place``: ``into`` is
    written to."""

    name: str
    into: Tensor
    dim: int
    numbers_E: Tensor
    rows: Tensor
    includes: bool
    in_place: bool


def reduction_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Reduction | None:
    """Return what a call of ``func`` reduces, or None if that is not whole rows by an index."""
    if func is torch.segment_reduce:
        return _segment_reduction(*args, **kwargs)
    names = _GIVEN.get(func)
    if names is None or "alpha" in kwargs:
        return None
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    if names is _INDEX_PUT_ARGUMENTS:
        indices = given["indices"]
        if not given.get("accumulate") or len(indices) != 1:
            return None
        given |= {"dim": 0, "index": indices[0], "source": given["values"]}
    into, index = given["input"], given["index"]
    dim, rows = given["dim"] % into.dim(), given.get("src", given.get("source"))
    if not isinstance(rows, Tensor) or not isinstance(index, Tensor) or index.dtype == torch.bool:
        return None
    if names is _SCATTER_ARGUMENTS and index.dim() > 1:
        if not rows.numel():
            index = index.new_empty(0)
        elif (found := rows_scattered(into, dim, index, rows)) is not None:
            index = found[2]
    if index.dim() != 1 or rows.dim() != into.dim() or rows.shape[dim] != len(index):
        return None
    includes = given.get("include_self", True)
    return Reduction(given.get("reduce", "sum"), into, dim, index, rows, includes, func in _IN_PLACE)


def _segment_reduction(
    data: Tensor,
    reduce: str,
    *,
    lengths: Tensor | None = None,
    axis: int = 0,
    initial: float | None = None,
    **_: Any,
) -> Reduction | None:
    """Return the reduction of consecutive rows."""
    name = {"max": "amax", "min": "amin"}.get(reduce, reduce)
    if lengths is None or lengths.dim() != 1 or axis != 0 or (initial is not None and name != "sum"):
        return None
    numbers_E = torch.arange(len(lengths), device=data.device).repeat_interleave(lengths)
    into = data.new_full((len(lengths), *data.shape[1:]), initial or _EMPTY_RESULT[name])
    includes = name in ("sum", "prod")
    return Reduction(name, into, 0, numbers_E, data, includes=includes, in_place=False)
