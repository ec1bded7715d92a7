# SPDX-License-Identifier: Apache-2.0
"""Sparse matrices that a model makes of its edges; in a trace, products with them become sums over edges."""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from ooc.errors import ModelError

PRODUCTS = torch.matmul, torch.mm, torch.mv, torch.spmm, torch.sparse.mm, operator.matmul, "matmul", "mm", "mv"
"""Products of a matrix with rows: functions, and names of methods."""
_UNCHANGED_BY = "coalesce", "to_sparse_csr", "to_sparse_coo", "contiguous", "cpu"


@dataclass(frozen=True, eq=False)
class EdgeMatrix:
    """A matrix [nodes, nodes] with an entry for each edge, in a trace: proxies of the entries' ``rows``, ``columns``
    and ``values``. Repeated entries add up, as in torch."""

    rows: Any
    columns: Any
    values: Any

    def __matmul__(self, x: Any) -> Any:
        if type(x) in (EdgeMatrix, Tensor):
            raise self._refuse("a product with something else than a matrix of rows")
        values, tail = (self.values.unsqueeze(-1), [x.size(1)]) if x.dim() > 1 else (self.values, [])
        return x.new_zeros(x.size(0), *tail).index_add(0, self.rows, values * x.index_select(0, self.columns))

    mm = mv = matmul = __matmul__

    def t(self) -> "EdgeMatrix":
        return EdgeMatrix(self.columns, self.rows, self.values)

    def to(self, *args: Any, **kwargs: Any) -> "EdgeMatrix":
        return replace(self, values=self.values.to(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # since Python and torch may ask for any attribute
            raise AttributeError(name)
        if name in _UNCHANGED_BY:
            return lambda: self
        raise self._refuse(f"{name} of it")

    def __fx_create_arg__(self, tracer: Any) -> Any:
        raise self._refuse("a layer that is given it")

    def _refuse(self, what: str) -> ModelError:
        return ModelError(
            f"sparse_coo_tensor takes the edges for a matrix, which may be multiplied with rows, matrix @ x: {what} is "
            "not supported; layers take edge_index and edge_weight"
        )

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        matrix = next(one for one in tree_leaves((args, kwargs)) if isinstance(one, cls))
        if function in PRODUCTS and args[0] is matrix and len(args) == 2 and not kwargs:
            return matrix @ args[1]
        raise matrix._refuse(getattr(function, "__name__", str(function)))


def matrix_of_edges(
    make: Callable[..., Any], indices: Any, values: Any = None, size: Any = None, **options: Any
) -> Any:
    """Return what torch's ``sparse_coo_tensor`` (``make``) returns; for proxies of edges, a matrix in their trace."""
    if not any(isinstance(one, fx.Proxy) for one in tree_leaves((indices, values))):
        given = [one for one in (values, size) if one is not None]
        return make(indices, *given, **options)
    sizes = [*size] if isinstance(size, (tuple, list)) else []
    if values is None or len(sizes) != 2 or not all(isinstance(one, fx.Proxy) for one in sizes):
        raise ModelError(
            "sparse_coo_tensor takes the edges for a matrix: give it values and its size by the rows at hand, "
            "sparse_coo_tensor(edge_index.flip(0), weights, (x.size(0), x.size(0)))"
        )
    return EdgeMatrix(*_edge_ends(indices), values)


def swaps_ends(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call on edges [2, E] gives them with their ends swapped."""
    flips = target in ("flip", torch.flip) and tree_leaves(kwargs.get("dims", args[1:])) in ([0], [-2])
    return flips or (target is operator.getitem and args[1] == [1, 0])


def _edge_ends(indices: Any) -> tuple[Any, Any]:
    """Return the two rows of an index, as they were before a stack or a flip."""
    node = indices.node
    if swaps_ends(node.target, node.args, node.kwargs):
        rows, columns = _edge_ends(indices.tracer.proxy(node.args[0]))
        return columns, rows
    if node.target is torch.stack and len(node.args) == 1 and not node.kwargs.get("dim"):
        return tuple(map(indices.tracer.proxy, node.args[0]))
    return indices[0], indices[1]
