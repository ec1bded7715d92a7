# SPDX-License-Identifier: Apache-2.0
"""Sizes of tensors told to a user's Python as if there were more rows and edges than there are.

Code is tried on a few rows, where ``if len(x) > 1000:`` goes one way, and runs in PyG on all of them, where it goes the
other. No number shows that but those that are compared: so they compare as those of the whole graph would, while they
are the true ones wherever tensors are made or cut by them.
"""

import operator
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_COMPARISONS = {name: getattr(operator, name) for name in ("lt", "le", "gt", "ge")}
_MOST_TOLD = 1 << 16
"""By ``len(x)`` or ``int(index.max())``, which are plain numbers: a tensor of as many rows may be made of them."""


class ToldSize(int):
    """A size that compares as ``told``; but with what is within one of it, as a largest index is, as it is."""

    told: int

    def __new__(cls, size: int, told: int) -> "ToldSize":
        made = super().__new__(cls, size)
        made.told = told
        return made

    def _compared(self, compare: Callable[[Any, Any], bool], other: Any) -> bool:
        if isinstance(other, ToldSize):
            return compare(self.told, other.told)
        if abs(int(self) - other) <= 1:
            return compare(int(self), other)
        return compare(self.told, other)

    def __float__(self) -> float:
        return float(self.told)

    def __truediv__(self, other: Any) -> Any:
        return self.told / _told(other)

    def __rtruediv__(self, other: Any) -> Any:
        return _told(other) / self.told

    def __lt__(self, other: Any) -> bool:
        return self._compared(operator.lt, other)

    def __le__(self, other: Any) -> bool:
        return self._compared(operator.le, other)

    def __gt__(self, other: Any) -> bool:
        return self._compared(operator.gt, other)

    def __ge__(self, other: Any) -> bool:
        return self._compared(operator.ge, other)


def _counted(compute: Callable[[int, int], int]) -> Callable[[Any, Any], Any]:
    """``compute`` of two whole numbers, of which one at least is told as another."""

    def method(one: Any, other: Any) -> Any:
        if not isinstance(other, int):
            return NotImplemented
        return ToldSize(compute(int(one), int(other)), compute(_told(one), _told(other)))

    return method


def _told(size: int) -> int:
    return size.told if isinstance(size, ToldSize) else size


def _reversed(compute: Callable[[int, int], int]) -> Callable[[int, int], int]:
    return lambda one, other: compute(other, one)


for _name, _compute in (("add", operator.add), ("sub", operator.sub), ("mul", operator.mul)):
    setattr(ToldSize, f"__{_name}__", _counted(_compute))
    setattr(ToldSize, f"__r{_name}__", _counted(_reversed(_compute)))
for _name, _compute in (("floordiv", operator.floordiv), ("mod", operator.mod)):
    setattr(ToldSize, f"__{_name}__", _counted(_compute))


class ToldSizes(TorchFunctionMode):
    """Within, sizes from ``least`` on are told by their ratio: those in ``ratios``, all others by ``usual``.
    ``plainly``: also where Python takes a plain number of them, which may then be too large for what it is used for."""

    def __init__(self, least: int, ratios: Mapping[int, float], usual: float, *, plainly: bool) -> None:
        super().__init__()
        self._least, self._ratios, self._usual, self._plainly = least, ratios, usual, plainly

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "").strip("_")
        if name in _COMPARISONS and len(args) == 2 and _is_count(args[0]) and type(args[1]) is int:
            return torch.tensor(_COMPARISONS[name](self._size(int(args[0])), args[1]))
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Size):
            return torch.Size([self._size(size) for size in result])
        if type(result) is not int:
            return result
        match name:
            case "size":
                return self._size(result)
            case "numel" | "nelement":
                told = 1
                for size in args[0].shape:
                    told *= self._size(size)
                return told
            case "item" if _is_count(args[0]):
                return self._size(result)
            case "len" | "int" | "index" if self._plainly and _is_asked_by_user():
                return min(_told(self._size(result)), max(result, _MOST_TOLD))
            case _:
                return result

    def _size(self, size: int) -> int:
        if int(size) < self._least:
            return size
        return ToldSize(size, int(size * self._ratios.get(int(size), self._usual)))


def _is_asked_by_user() -> bool:
    """Whether the innermost code that is neither torch's nor another mode's is neither PyG's nor ours."""
    frame: FrameType | None = sys._getframe(2)
    ours = __name__.partition(".")[0]
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package != "torch" and frame.f_code.co_name != "__torch_function__":
            return package not in ("torch_geometric", ours)
        frame = frame.f_back
    return False


def _is_count(given: Any) -> bool:
    return isinstance(given, Tensor) and not given.dim() and not given.is_floating_point() and given.dtype != torch.bool
