# SPDX-License-Identifier: Apache-2.0
"""A mode in which torch's operators add in a fixed order, so that an opaque layer gives the same bits every time.

On a GPU most operators that add rows up by an index (``scatter_add``, ``index_add``, the gradients of ``index_select``
and ``gather``) add in the order in which threads arrive. In deterministic mode, torch sorts by the index first;
operators without such a way raise.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ooc.errors import ModelError

_MEMORY: Any = torch.utils.deterministic
"""torch's settings of deterministic algorithms; a module without type annotations."""
_NOT_DETERMINISTIC = "does not have a deterministic implementation"
_WORKSPACE_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
_SCATTERED = {torch.Tensor.scatter_add: "index_add", torch.scatter_add: "index_add"}
_SCATTERED |= {torch.Tensor.scatter_add_: "index_add_"}


@contextmanager
def in_fixed_order(place: torch.device, where: str) -> Iterator[None]:
    """A context in which a GPU computes the same bits every time, as other devices do anyway. Raises ModelError naming
    ``where`` and the operator if there is no deterministic way."""
    if place.type != "cuda":
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = _MEMORY.fill_uninitialized_memory
    # Torch requires fixed cuBLAS workspaces for determinism, since it keeps them by stream.
    os.environ.setdefault(_WORKSPACE_VARIABLE, ":4096:8")
    torch.use_deterministic_algorithms(True)
    _MEMORY.fill_uninitialized_memory = False
    try:
        with RowsByIndex():
            yield
    except RuntimeError as error:
        if _NOT_DETERMINISTIC not in str(error):
            raise
        operator = str(error).split(maxsplit=1)[0]
        raise ModelError(
            f"{where}: {operator} gives other bits every time, and torch has no deterministic one; use device='cpu'"
        ) from error
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        _MEMORY.fill_uninitialized_memory = fills


class RowsByIndex(TorchFunctionMode):
    """A mode in which rows scattered whole, each by one number, are added by that number: deterministic torch then
    sorts E numbers instead of one for every entry."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SCATTERED:
            found = rows_scattered(*args, **kwargs)
            if found is not None:
                into, dim, numbers_E, rows = found
                return getattr(into, _SCATTERED[func])(dim, numbers_E, rows)
        return func(*args, **kwargs)


def rows_scattered(into: Tensor, dim: int, index: Tensor, src: Any) -> tuple[Tensor, int, Tensor, Tensor] | None:
    """Return scattered entries as rows along ``dim`` with one number each; None if they are not."""
    if not isinstance(src, Tensor) or index.shape != src.shape or into.dim() != src.dim() or not src.numel():
        return None
    dim %= src.dim()
    for other in reversed(range(src.dim())):
        if other == dim:
            continue
        is_row = index.shape[other] == 1 or index.stride(other) == 0
        if not is_row or into.shape[other] != src.shape[other]:
            return None
        index = index.select(other, 0)
    return into, dim, index, src
