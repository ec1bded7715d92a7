# SPDX-License-Identifier: Apache-2.0
"""Sizes of tensors that look, to a user's Python code, as if the graph had all its rows and edges.

Code is traced and tried on a few rows, for which ``if len(x) > 1000:`` goes one way, but PyG runs it on all rows, for
which it goes the other. Only comparisons can show the difference. So sizes compare as those of the whole graph would
("reported" sizes), while they keep their true values wherever tensors are made or cut by them.
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
_LARGEST_PLAIN = 1 << 16
"""The largest reported value of ``len(x)`` or ``int(index.max())``, which are plain numbers: a tensor of as many rows
may be made of them."""


class SizeReporting(Enum):
    """How sizes are reported. ``COMPARED``: to comparisons and arithmetic. ``CONVERTED``: also where Python takes a
    plain number of a size, which may then be too large for its use. ``PLAIN``: as plain numbers, for floating-point
    arithmetic that asks no method; its results are plain, too."""

    COMPARED = auto()
    CONVERTED = auto()
    PLAIN = auto()


class ReportedSize(int):
    """A size that compares as ``reported``, except with numbers within one of it, such as a largest index. With
    ``is_plain``, it is also reported where Python takes a plain number of it."""

    reported: int
    is_plain: bool
    is_count: bool
    """Whether it is a size, or a sum of sizes, and no quotient; quotients are small and near to other numbers."""

    def __new__(cls, size: int, reported: int, *, is_plain: bool, is_count: bool = True) -> "ReportedSize":
        made = super().__new__(cls, size)
        made.reported, made.is_plain, made.is_count = reported, is_plain, is_count
        return made

    def __bool__(self) -> bool:
        return bool(self.reported)

    def __int__(self) -> int:
        return (
            _cap_plain(_true_size(self), self.reported) if self.is_plain and _is_asked_by_user() else _true_size(self)
        )

    def __float__(self) -> float:
        return float(self.reported)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __floor__(self) -> "ReportedSize":
        return self

    __ceil__ = __floor__

    def __array_ufunc__(self, function: Any, method: str, *given: Any, **options: Any) -> Any:
        """Compute with reported sizes if all operands are numbers; with arrays, whose lengths are true, with true
        ones."""
        reported = all(isinstance(one, (int, float)) for one in given)
        return getattr(function, method)(
            *(_reported_size(one) if reported else _true_size(one) for one in given), **options
        )

    def bit_length(self) -> int:
        return self.reported.bit_length()

    def __hash__(self) -> int:
        return hash(_true_size(self))

    def __eq__(self, other: object) -> bool:
        return _true_size(self) == _true_size(other) or (type(other) is int and self.reported == other)

    def __ne__(self, other: object) -> bool:
        return not self == other


def _arithmetic_method(compute: Callable[..., Any], *, is_count: bool) -> Callable[..., Any]:
    """Return a method that computes with the reported and the true size of the first operand."""

    def method(one: ReportedSize, *others: Any) -> Any:
        if not all(other is None or isinstance(other, (int, float)) for other in others):
            return NotImplemented
        reported = compute(one.reported, *map(_reported_size, others))
        if not isinstance(reported, int):
            return reported
        true = compute(_true_size(one), *map(_true_size, others))
        return ReportedSize(true, reported, is_plain=one.is_plain, is_count=is_count)

    return method


def _comparison_method(compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    def method(one: ReportedSize, other: Any) -> bool:
        if not isinstance(other, ReportedSize) and one.is_count and abs(_true_size(one) - other) <= 1:
            return compare(_true_size(one), other)
        return compare(one.reported, _reported_size(other))

    return method


def _reported_size(size: Any) -> Any:
    return size.reported if isinstance(size, ReportedSize) else size


def _true_size(size: Any) -> Any:
    return int.__index__(size) if isinstance(size, ReportedSize) else size


def _cap_plain(size: int, reported: int) -> int:
    return min(reported, max(size, _LARGEST_PLAIN))


def _swap_operands(compute: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda one, other: compute(other, one)


for _name, _compare in _COMPARISONS.items():
    setattr(ReportedSize, f"__{_name}__", _comparison_method(_compare))
for _name in ("add", "sub", "mul", "floordiv", "truediv", "mod", "rshift", "pow"):
    _compute, _counts = getattr(operator, _name), _name in ("add", "sub", "mul")
    setattr(ReportedSize, f"__{_name}__", _arithmetic_method(_compute, is_count=_counts))
    setattr(ReportedSize, f"__r{_name}__", _arithmetic_method(_swap_operands(_compute), is_count=_counts))
ReportedSize.__abs__ = _arithmetic_method(abs, is_count=True)  # type: ignore[method-assign]
ReportedSize.__neg__ = _arithmetic_method(operator.neg, is_count=True)  # type: ignore[method-assign]
ReportedSize.__round__ = _arithmetic_method(round, is_count=False)  # type: ignore[method-assign]


@contextmanager
def logarithms_of_reported_sizes() -> Iterator[None]:
    """A context in which Python's logarithms take sizes as reported, under whatever name modules imported them, except
    torch's own. Searching all modules takes milliseconds, so it is done once for all kinds of reporting."""
    found = []
    try:
        for path, module in [*sys.modules.items()]:
            if path.startswith("torch."):
                continue
            has = getattr(module, "__dict__", _NOTHING).get
            for name, function in _LOGARITHMS:
                if has(name) is function:
                    found.append((module, name, function))
                    setattr(module, name, _apply_to_reported(function))
        yield
    finally:
        for module, name, function in found:
            setattr(module, name, function)


def _apply_to_reported(function: Callable[..., float]) -> Callable[..., float]:
    return lambda *given: function(*map(_reported_size, given))


class ReportedSizes(TorchFunctionMode):
    """A mode in which sizes of at least ``least`` are reported multiplied by their ratio in ``ratios``, or by
    ``usual``. Within ``logarithms_of_reported_sizes``, logarithms take them, too."""

    def __init__(self, least: int, ratios: Mapping[int, float], usual: float, reporting: SizeReporting) -> None:
        super().__init__()
        self._least, self._ratios, self._default_ratio, self._reporting = least, ratios, usual, reporting

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, is_given = getattr(func, "__name__", "").strip("_"), self._reporting is SizeReporting.PLAIN
        is_compared = name in _COMPARISONS and not is_given
        if is_compared and len(args) == 2 and _is_count(args[0]) and type(args[1]) is int:
            return torch.tensor(_COMPARISONS[name](self._report(int(args[0])), args[1])).view(args[0].shape)
        result = func(*args, **(kwargs or {}))
        if is_given:
            if not _is_asked_by_user():
                return result
            if isinstance(result, torch.Size):
                return torch.Size([self._cap_plain(size) for size in result])
            return self._cap_plain(result) if type(result) is int and name == "size" else result
        if isinstance(result, torch.Size):
            return torch.Size([self._report(size) for size in result])
        if type(result) is not int:
            return result
        match name:
            case "size":
                return self._report(result)
            case "numel" | "nelement":
                return math.prod(map(self._report, args[0].shape))
            case "item" if _is_count(args[0]):
                return self._report(result)
            case "len" | "int" | "index" if self._reporting is SizeReporting.CONVERTED and _is_asked_by_user():
                return self._cap_plain(result)
            case _:
                return result

    def _cap_plain(self, size: int) -> int:
        return _cap_plain(_true_size(size), _reported_size(self._report(size)))

    def _report(self, size: int) -> int:
        true = _true_size(size)
        if true < self._least:
            return size
        reported = round(true * self._ratios.get(true, self._default_ratio))
        return ReportedSize(true, reported, is_plain=self._reporting is SizeReporting.CONVERTED)


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
