# SPDX-License-Identifier: Apache-2.0
"""Rows that an opaque layer looks up for every edge, as stand-ins that avoid a tensor with one row an edge.

As PyG's layers are written, ``x_j`` is a matrix with a row for every edge. Most layers make two things of it: scores,
which are a few numbers an edge, and a sum of its rows times these. So looked-up rows are replaced by stand-ins. What a
layer computes of the rows of one end alone is computed once for each row. Inner products of both ends, and sums of rows
times a number of the edge, are compiled loops over edges, and so are their gradients. For any other operator, the rows
are looked up as torch does it.

Shapes: E edges, S and R rows at their ends, H heads, C columns in all.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from ooc.kernels.compiled.edge_rows import add_weighted, products
from ooc.kernels.edges import rows_in_line
from ooc.kernels.pieces.reductions import REDUCTIONS, reduction_of

_FEW_COLUMNS = 4
"""Rows with no more numbers than this are looked up at once."""
_DTYPES = (torch.float32, torch.float64)
_OF: Any = Tensor
_LOOK_UP = {_OF.index_select, torch.index_select, _OF.__getitem__}


class _StandIn(Tensor):
    """A stand-in for one row for every edge, ``materialized`` of ``parts`` when it is needed."""

    @classmethod
    def of(cls, shape: tuple[int, ...], parts: list[Tensor], **own: Any) -> Any:
        trains = torch.is_grad_enabled() and any(one.requires_grad for one in parts)
        found: Any = _OF._make_wrapper_subclass(cls, shape, dtype=parts[0].dtype, requires_grad=trains)
        vars(found).update(own, parts=parts, versions=[one._version for one in parts], rows_E=None)
        return found

    def make(self) -> Tensor:
        raise NotImplementedError

    def materialized(self) -> Any:
        """Return the rows, which are looked up once."""
        this: Any = self
        if this.is_current and this.rows_E is None:
            this.rows_E = self.make()
            this.version = this.rows_E._version
        return this.rows_E

    @property
    def is_current(self) -> bool:
        """Whether it still equals the rows that it would make: these may have been written into since."""
        this: Any = self
        if this.rows_E is not None:
            return bool(this.rows_E._version == this.version)
        if [one._version for one in this.parts] != this.versions:
            raise RuntimeError("rows have been written into between being looked up and being used")
        return True

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for handle in _HANDLERS.get(func, ()):
            found = handle(func, args, kwargs)
            if found is not None:
                return found
        args, kwargs = tree_map_only(_StandIn, materialized, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(f"{func} is given rows of edges that have not been looked up")


def materialized(found: Any) -> Any:
    """Return ``found``, or the rows if it is a stand-in."""
    return found.materialized() if isinstance(found, _StandIn) else found


class EdgeRows(_StandIn):
    """A stand-in for the rows ``index_E`` of ``rows`` [S, …], times ``weight_EH`` if given, which has one number for
    each edge or for each of its heads."""

    rows: Tensor
    index_E: Tensor
    weight_EH: Tensor | None
    parts: list[Tensor]

    def make(self) -> Tensor:
        found = self.rows.index_select(0, self.index_E)
        if self.weight_EH is None:
            return found
        heads = self.weight_EH.shape[1]
        by_head = found.reshape(len(found), heads, prod(found.shape[1:]) // heads) * self.weight_EH[:, :, None]
        return by_head.reshape(found.shape)

    def has_same_ends(self, other: "EdgeRows") -> bool:
        """Whether ``other`` has as many rows, at the same ends of the edges."""
        one, two = self.index_E, other.index_E
        is_same = one is two or (one.data_ptr() == two.data_ptr() and one.stride() == two.stride())
        return is_same and len(self.rows) == len(other.rows)


class _Products(_StandIn):
    """A stand-in for rows at one end times rows at the other."""

    left: EdgeRows
    right: EdgeRows

    def make(self) -> Tensor:
        found: Tensor = self.left.materialized() * self.right.materialized()
        return found


class _Concatenated(_StandIn):
    """A stand-in for matrices of edges side by side, some of them looked up."""

    matrices: list[Tensor]

    def make(self) -> Tensor:
        return torch.cat([materialized(one) for one in self.matrices], dim=1)


class LazyGathers(TorchFunctionMode):
    """A mode in which looked-up rows are replaced by stand-ins."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LOOK_UP and not kwargs and type(args[0]) is Tensor and args[0].dtype in _DTYPES:
            rows, index = args[0], args[-1]
            is_index = isinstance(index, Tensor) and index.dtype == torch.int64 and index.dim() == 1
            if func is _OF.__getitem__:  # which counts from the end, too
                is_index = is_index and not (len(index) and int(index.min()) < 0)
            else:
                is_index = is_index and args[1] in (0, -rows.dim())
            if is_index:
                return _gather_rows(rows, index)
        return func(*args, **(kwargs or {}))


def _gather_rows(rows: Tensor, index_E: Tensor, weight_EH: Tensor | None = None) -> Any:
    if weight_EH is None and prod(rows.shape[1:]) <= _FEW_COLUMNS:
        return rows.index_select(0, index_E)
    parts = [one for one in (rows, index_E, weight_EH) if one is not None]
    shape = len(index_E), *rows.shape[1:]
    return EdgeRows.of(shape, parts, rows=rows, index_E=index_E, weight_EH=weight_EH)


def _is_plain(one: Any) -> bool:
    """Whether it is rows, looked up or not, without a factor for each edge."""
    return one.is_current and one.weight_EH is None if isinstance(one, EdgeRows) else not isinstance(one, _StandIn)


# ---- ways to compute without rows of edges: each gives None where it is none ------------------------------


def _answer_query(func: Any, args: Any, kwargs: Any) -> Any:
    """Answer a question that does not depend on a tensor's values."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _filled(func: Any, args: Any, kwargs: Any) -> Any:
    return func(args[0].parts[0], *args[1:], **kwargs)


def _expand_index(func: Any, args: Any, kwargs: Any) -> Any:
    """Expand an index of rows to all their numbers."""
    return None if isinstance(args[0], _StandIn) else args[0].expand(args[1].shape)


def _reshape(func: Any, args: Any, kwargs: Any) -> Any:
    one = args[0]
    if not isinstance(one, EdgeRows) or not one.is_current:
        return None
    like = func(torch.empty(one.shape, dtype=one.dtype, device="meta"), *args[1:], **kwargs)
    if like.shape[:1] != one.shape[:1] or like.dtype != one.dtype:
        return None
    return _gather_rows(one.rows.reshape(len(one.rows), *like.shape[1:]), one.index_E, one.weight_EH)


def _multiply_rows(func: Any, args: Any, kwargs: Any) -> Any:
    """Rows times numbers of the edge, or times the rows at its other end."""
    if kwargs or len(args) != 2:
        return None
    one, other = args if isinstance(args[0], EdgeRows) else args[::-1]
    if not isinstance(one, EdgeRows) or not one.is_current or not isinstance(other, Tensor) or other.dtype != one.dtype:
        return None
    if isinstance(other, EdgeRows):
        are_two = _is_plain(one) and _is_plain(other) and one.shape == other.shape and not one.has_same_ends(other)
        return _Products.of(tuple(one.shape), [*one.parts, *other.parts], left=one, right=other) if are_two else None
    if isinstance(other, _StandIn) or other.dim() != one.dim() or len(other) != len(one) or other.shape[-1] != 1:
        return None
    heads, before_EH = list(other.shape[1:]), one.weight_EH
    while heads and heads[-1] == 1:
        heads.pop()
    if heads != list(one.shape[1 : 1 + len(heads)]):
        return None
    weight_EH = other.reshape(len(other), prod(heads))
    if before_EH is not None:
        counts = {before_EH.shape[1], weight_EH.shape[1]}
        if len(counts - {1}) > 1:
            return None
        weight_EH = before_EH * weight_EH
    return _gather_rows(one.rows, one.index_E, weight_EH)


def _sum_columns(func: Any, args: Any, kwargs: Any) -> Any:
    """Sums of every row's numbers, or of those of each head, such as for products of both ends."""
    one, given = args[0], dict(zip(("dim", "keepdim"), args[1:], strict=False)) | kwargs
    dims = given.get("dim")
    (dim,) = dims if isinstance(dims, (tuple, list)) and len(dims) == 1 else (dims,)
    is_last = one.dim() > 1 and dim in (-1, one.dim() - 1) and not given.keys() - {"dim", "keepdim"}
    if not is_last or not one.is_current:
        return None
    if isinstance(one, EdgeRows):
        return _gather_rows(one.rows.sum(**given), one.index_E) if one.weight_EH is None else None
    if not isinstance(one, _Products):
        return None
    left, right, heads = one.left, one.right, one.shape[1:-1]
    ends = left.rows.flatten(1), left.index_E, right.rows.flatten(1), right.index_E
    found: Tensor = _InnerProducts.apply(*ends, prod(heads))  # type: ignore[no-untyped-call]
    return found.reshape(len(found), *heads, *[1] * bool(given.get("keepdim")))


def _concatenate(func: Any, args: Any, kwargs: Any) -> Any:
    matrices = args[0]
    if kwargs.get("dim", (*args[1:], 0)[0]) not in (1, -1) or kwargs.keys() - {"dim"}:
        return None
    if not all(one.dim() == 2 and one.dtype == matrices[0].dtype and _is_plain(one) for one in matrices):
        return None
    parts = [part for one in matrices for part in (one.parts if isinstance(one, EdgeRows) else [one])]
    return _Concatenated.of((len(matrices[0]), sum(one.shape[1] for one in matrices)), parts, matrices=matrices)


def _map_linearly(func: Any, args: Any, kwargs: Any) -> Any:
    """A linear map of matrices side by side, computed for each by itself, on rows instead of edges."""
    if not isinstance(args[0], _Concatenated) or not args[0].is_current:
        return None
    given = dict(zip(("weight", "bias"), args[1:], strict=False)) | kwargs
    weight, total = given["weight"], given.get("bias")
    for one, part in zip(args[0].matrices, weight.split([one.shape[1] for one in args[0].matrices], 1), strict=True):
        if isinstance(one, EdgeRows):
            found = F.linear(one.rows, part).index_select(0, one.index_E)
        else:
            found = F.linear(one, part)
        total = found if total is None else total + found
    return total


def _apply_to_rows(func: Any, args: Any, kwargs: Any) -> Any:
    """A function of the rows of one end, and of values that are the same for all edges."""
    if any(one is True for one in (*args, *kwargs.values())):  # in place
        return None
    if func is not F.linear and any(isinstance(one, Tensor) for one in kwargs.values()):
        return None
    given = [one for one in args if isinstance(one, Tensor)]
    rows = [one for one in given if isinstance(one, EdgeRows)]
    if not rows or not all(map(_is_plain, given)) or not all(map(rows[0].has_same_ends, rows[1:])):
        return None
    others = [one for one in given if not isinstance(one, EdgeRows)]
    if func is F.linear:
        if args[0] is not rows[0]:
            return None
    elif any(len(one) != 1 if one.dim() == rows[0].dim() else one.dim() > rows[0].dim() for one in others):
        return None
    found = func(*(one.rows if isinstance(one, EdgeRows) else one for one in args), **kwargs)
    return _gather_rows(found, rows[0].index_E)


def _scatter_sum(func: Any, args: Any, kwargs: Any) -> Any:
    """Sums by an index."""
    asked = reduction_of(func, args, kwargs)
    if asked is None or asked.name != "sum" or asked.dim or not isinstance(asked.rows, EdgeRows):
        return None
    one, into, weight_EH = asked.rows, asked.into, asked.rows.weight_EH
    if not one.is_current or isinstance(into, _StandIn) or into.dtype != one.dtype or into.shape[1:] != one.shape[1:]:
        return None
    weight_EH = one.rows.new_ones(len(one), 1) if weight_EH is None else weight_EH
    given = one.rows.flatten(1), one.index_E, weight_EH, asked.numbers_E, len(into)
    total: Tensor = _WeightedSum.apply(*given)  # type: ignore[no-untyped-call]
    total = total.reshape(into.shape)
    return into.add_(total) if asked.in_place else into + total


_QUERIES = "shape ndim dtype device is_cuda layout is_sparse requires_grad"
_MULTIPLY = (_OF.mul, torch.mul, _OF.__mul__, _OF.__rmul__, _OF.multiply, torch.multiply)
_ROWWISE_FUNCTIONS = (
    *(_OF.add, torch.add, _OF.__add__, _OF.__radd__, _OF.sub, torch.sub, _OF.__sub__, _OF.div, _OF.__truediv__),
    *(F.relu, torch.relu, _OF.relu, F.leaky_relu, F.elu, F.silu, F.gelu, torch.tanh, _OF.tanh, torch.sigmoid),
    *(_OF.sigmoid, _OF.neg, _OF.__neg__),
)
_HANDLERS: dict[Any, tuple[Callable[[Any, Any, Any], Any], ...]] = {
    **{getattr(_OF, name).__get__: (_answer_query,) for name in _QUERIES.split()},
    **dict.fromkeys((_OF.size, _OF.dim, _OF.numel, _OF.__len__, _OF.is_floating_point), (_answer_query,)),
    **dict.fromkeys((_OF.new_zeros, _OF.new_ones, _OF.new_empty, _OF.new_full), (_filled,)),
    **dict.fromkeys(REDUCTIONS, (_scatter_sum,)),
    **dict.fromkeys((_OF.view, _OF.reshape, torch.reshape, _OF.flatten, torch.flatten), (_reshape,)),
    **dict.fromkeys((_OF.sum, torch.sum), (_sum_columns,)),
    **dict.fromkeys((torch.cat, torch.concat), (_concatenate,)),
    **dict.fromkeys(_ROWWISE_FUNCTIONS, (_apply_to_rows,)),
    **dict.fromkeys(_MULTIPLY, (_multiply_rows, _apply_to_rows)),
    F.linear: (_map_linearly, _apply_to_rows),
    _OF.expand_as: (_expand_index,),
}


# ---- with gradients -------------------------------------------------------------------------------------------------


def _check_index(index_E: Tensor, count: int) -> Tensor:
    """Check an index into ``count`` rows."""
    if len(index_E) and not 0 <= int(index_E.min()) <= int(index_E.max()) < count:
        raise IndexError(f"an edge leads to none of {count} rows")
    return index_E


class _WeightedSum(torch.autograd.Function):
    """Sums of rows times numbers of edges, [R, C]."""

    @staticmethod
    def forward(ctx: Any, rows_SC: Tensor, from_E: Tensor, weight_EH: Tensor, into_E: Tensor, count: int) -> Tensor:
        rows_SC, weight_EH = rows_in_line(rows_SC), weight_EH.contiguous()
        ctx.save_for_backward(rows_SC, _check_index(from_E, len(rows_SC)), weight_EH, _check_index(into_E, count))
        return add_weighted(rows_SC.new_zeros(count, rows_SC.shape[1]), into_E, rows_SC, from_E, weight_EH)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_RC: Tensor) -> tuple[Tensor | None, ...]:
        (rows_SC, from_E, weight_EH, into_E), above_RC = ctx.saved_tensors, rows_in_line(gradient_RC)
        of_rows, of_weights = ctx.needs_input_grad[0], ctx.needs_input_grad[2]
        zeros_SC = rows_SC.new_zeros(rows_SC.shape if of_rows else 0)
        d_rows = add_weighted(zeros_SC, from_E, above_RC, into_E, weight_EH) if of_rows else None
        d_weight = products(rows_SC, from_E, above_RC, into_E, weight_EH.shape[1]) if of_weights else None
        return d_rows, None, d_weight, None, None


class _InnerProducts(torch.autograd.Function):
    """Inner products of the rows at both ends of edges, by head, [E, H]."""

    @staticmethod
    def forward(ctx: Any, left_SC: Tensor, left_E: Tensor, right_RC: Tensor, right_E: Tensor, heads: int) -> Tensor:
        left_SC, right_RC = rows_in_line(left_SC), rows_in_line(right_RC)
        ctx.save_for_backward(
            left_SC, _check_index(left_E, len(left_SC)), right_RC, _check_index(right_E, len(right_RC))
        )
        return products(left_SC, left_E, right_RC, right_E, heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_EH: Tensor) -> tuple[Tensor | None, ...]:
        (left_SC, left_E, right_RC, right_E), above_EH = ctx.saved_tensors, gradient_EH.contiguous()
        ends = (left_SC, left_E, right_RC, right_E), (right_RC, right_E, left_SC, left_E)
        d_left, d_right = (
            add_weighted(rows.new_zeros(rows.shape), at_E, others, from_E, above_EH) if wanted else None
            for (rows, at_E, others, from_E), wanted in zip(ends, ctx.needs_input_grad[:3:2], strict=True)
        )
        return d_left, None, d_right, None, None
