# SPDX-License-Identifier: Apache-2.0
"""Sizes of tensors that look, to a user's Python code, as if the graph had all its rows and edges.

Code is traced and tried on a few rows, for which ``if len(x) > 1000:`` goes one way, but PyG runs it on all rows, for
which it goes the other. Only comparisons can show the difference. So sizes compare as those of the whole graph would
("told" sizes), while they keep their true values wherever tensors are made or cut by them.
"""

import math
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum, auto
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_COMPARISONS = {name: getattr(operator, name) for name in ("lt", "le", "gt", "ge")}
_LOGARITHMS: tuple[tuple[str, Callable[..., float]], ...] = (
    ("log", math.log),
    ("log2", math.log2),
    ("log10", math.log10),
)
"""Logarithms that read the digits of whole numbers directly and call no method of theirs."""
_NOTHING: dict[str, Any] = {}
_MOST_TOLD = 1 << 16
"""The largest told value of ``len(x)`` or ``int(index.max())``, which are plain numbers: a tensor of as many rows may
be made of them."""


class Telling(Enum):
    """How sizes are told. ``COMPARED``: to comparisons and arithmetic. ``TAKEN``: also where Python takes a plain
    number of a size, which may then be too large for its use. ``GIVEN``: as plain numbers, for floating-point
    arithmetic that asks no method; results of it are not told."""

    COMPARED = auto()
    TAKEN = auto()
    GIVEN = auto()


class ToldSize(int):
    """A size that compares as ``told``, except with numbers within one of it, such as a largest index. With
    ``is_plain``, it is also told where Python takes a plain number of it."""

    told: int
    is_plain: bool
    is_count: bool
    """Whether it is a size, or a sum of sizes, and no quotient; quotients are small and near to other numbers."""

    def __new__(cls, size: int, told: int, *, is_plain: bool, is_count: bool = True) -> "ToldSize":
        made = super().__new__(cls, size)
        made.told, made.is_plain, made.is_count = told, is_plain, is_count
        return made

    def __bool__(self) -> bool:
        return bool(self.told)

    def __int__(self) -> int:
        return _plain(_true(self), self.told) if self.is_plain and _is_asked_by_user() else _true(self)

    def __float__(self) -> float:
        return float(self.told)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __floor__(self) -> "ToldSize":
        return self

    __ceil__ = __floor__

    def __array_ufunc__(self, function: Any, method: str, *given: Any, **options: Any) -> Any:
        """Compute with told sizes if all operands are numbers; with arrays, whose lengths are true, use true sizes."""
        told = all(isinstance(one, (int, float)) for one in given)
        return getattr(function, method)(*(_told(one) if told else _true(one) for one in given), **options)

    def bit_length(self) -> int:
        return self.told.bit_length()

    def __hash__(self) -> int:
        return hash(_true(self))

    def __eq__(self, other: object) -> bool:
        return _true(self) == _true(other) or (type(other) is int and self.told == other)

    def __ne__(self, other: object) -> bool:
        return not self == other


def _counted(compute: Callable[..., Any], *, is_count: bool) -> Callable[..., Any]:
    """Return a method that computes with the told and the true size of the first operand."""

    def method(one: ToldSize, *others: Any) -> Any:
        if not all(other is None or isinstance(other, (int, float)) for other in others):
            return NotImplemented
        told = compute(one.told, *map(_told, others))
        if not isinstance(told, int):
            return told
        true = compute(_true(one), *map(_true, others))
        return ToldSize(true, told, is_plain=one.is_plain, is_count=is_count)

    return method


def _compared(compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    def method(one: ToldSize, other: Any) -> bool:
        if not isinstance(other, ToldSize) and one.is_count and abs(_true(one) - other) <= 1:
            return compare(_true(one), other)
        return compare(one.told, _told(other))

    return method


def _told(size: Any) -> Any:
    return size.told if isinstance(size, ToldSize) else size


def _true(size: Any) -> Any:
    return int.__index__(size) if isinstance(size, ToldSize) else size


def _plain(size: int, told: int) -> int:
    return min(told, max(size, _MOST_TOLD))


def _reversed(compute: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda one, other: compute(other, one)


for _name, _compare in _COMPARISONS.items():
    setattr(ToldSize, f"__{_name}__", _compared(_compare))
for _name in ("add", "sub", "mul", "floordiv", "truediv", "mod", "rshift", "pow"):
    _compute, _counts = getattr(operator, _name), _name in ("add", "sub", "mul")
    setattr(ToldSize, f"__{_name}__", _counted(_compute, is_count=_counts))
    setattr(ToldSize, f"__r{_name}__", _counted(_reversed(_compute), is_count=_counts))
ToldSize.__abs__ = _counted(abs, is_count=True)  # type: ignore[method-assign]
ToldSize.__neg__ = _counted(operator.neg, is_count=True)  # type: ignore[method-assign]
ToldSize.__round__ = _counted(round, is_count=False)  # type: ignore[method-assign]


@contextmanager
def logarithms_told() -> Iterator[None]:
    """A context in which Python's logarithms take sizes as told, under whatever name modules imported them, except
    torch's own. Searching all modules takes milliseconds, so it is done once for all kinds of telling."""
    found = []
    try:
        for path, module in [*sys.modules.items()]:
            if path.startswith("torch."):
                continue
            has = getattr(module, "__dict__", _NOTHING).get
            for name, function in _LOGARITHMS:
                if has(name) is function:
                    found.append((module, name, function))
                    setattr(module, name, _of_told(function))
        yield
    finally:
        for module, name, function in found:
            setattr(module, name, function)


def _of_told(function: Callable[..., float]) -> Callable[..., float]:
    return lambda *given: function(*map(_told, given))


class SizesTold(TorchFunctionMode):
    """A mode in which sizes of at least ``least`` are told, multiplied by their ratio in ``ratios``, or by ``usual``.
    Within ``logarithms_told``, logarithms take them, too."""

    def __init__(self, least: int, ratios: Mapping[int, float], usual: float, telling: Telling) -> None:
        super().__init__()
        self._least, self._ratios, self._usual, self._telling = least, ratios, usual, telling

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, is_given = getattr(func, "__name__", "").strip("_"), self._telling is Telling.GIVEN
        is_compared = name in _COMPARISONS and not is_given
        if is_compared and len(args) == 2 and _is_count(args[0]) and type(args[1]) is int:
            return torch.tensor(_COMPARISONS[name](self._size(int(args[0])), args[1])).view(args[0].shape)
        result = func(*args, **(kwargs or {}))
        if is_given:
            if not _is_asked_by_user():
                return result
            if isinstance(result, torch.Size):
                return torch.Size([self._plain(size) for size in result])
            return self._plain(result) if type(result) is int and name == "size" else result
        if isinstance(result, torch.Size):
            return torch.Size([self._size(size) for size in result])
        if type(result) is not int:
            return result
        match name:
            case "size":
                return self._size(result)
            case "numel" | "nelement":
                return math.prod(map(self._size, args[0].shape))
            case "item" if _is_count(args[0]):
                return self._size(result)
            case "len" | "int" | "index" if self._telling is Telling.TAKEN and _is_asked_by_user():
                return self._plain(result)
            case _:
                return result

    def _plain(self, size: int) -> int:
        return _plain(_true(size), _told(self._size(size)))

    def _size(self, size: int) -> int:
        true = _true(size)
        if true < self._least:
            return size
        told = round(true * self._ratios.get(true, self._usual))
        return ToldSize(true, told, is_plain=self._telling is Telling.TAKEN)


def _is_asked_by_user() -> bool:
    """Whether the innermost caller outside of torch and of modes is neither PyG nor this package."""
    frame: FrameType | None = sys._getframe(2)
    ours = __name__.partition(".")[0]
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package != "torch" and frame.f_code.co_name != "__torch_function__":
            return package not in ("torch_geometric", ours)
        frame = frame.f_back
    return False


def _is_count(given: Any) -> bool:
    is_one = isinstance(given, Tensor) and given.numel() == 1 and given.dim() <= 1
    return is_one and not given.is_floating_point() and given.dtype != torch.bool
