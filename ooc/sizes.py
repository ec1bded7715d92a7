# SPDX-License-Identifier: Apache-2.0
"""Sizes in bytes as people write them: ``G`` is 10⁹ bytes, ``GiB`` is 2³⁰."""

import re
from math import isfinite
from numbers import Integral, Real
from typing import Any, cast

from ooc.errors import BudgetError, OptionError

_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)


def parse_size(text: Any, *, name: str = "size", zero: bool = False) -> int:
    """Return the bytes in ``text``: ``"40G"``, ``"1.5GiB"``, ``"800 MB"`` or a plain number (``4e9``), rounded down.

    Raises OptionError, naming the option ``name``, for anything else, and for sizes of zero unless ``zero``.
    """
    if isinstance(text, Real) and isfinite(text):  # numpy's, too
        size = int(cast(float, text))
    else:
        match = _PATTERN.fullmatch(text.strip()) if isinstance(text, str) else None
        if match is None or (match[3] and not match[2]):
            given = repr(text) if isinstance(text, str | Real) else type(text).__name__
            raise OptionError(f"{name}: {given} is no size; write e.g. 800M, 40G or 512GiB")
        unit = match[2].upper()
        size = int(float(match[1]) * (_BINARY[unit] if match[3] else _DECIMAL[unit]))
    if size < 0 or (size == 0 and not zero):
        raise OptionError(f"{name}: {text} is no size; it must be positive")
    return size


def check_whole(given: Any, *, name: str, least: int = 1) -> None:
    """Raise OptionError unless ``given`` is a whole number from ``least`` on."""
    if not isinstance(given, Integral) or given < least:
        raise OptionError(f"{name} must be a whole number from {least} on, not {given!r}")


def check_number(given: Any, *, name: str) -> None:
    """Raise OptionError unless ``given`` is a number."""
    if not isinstance(given, Real):
        raise OptionError(f"{name} must be a number, not {given!r}")


def format_size(size_bytes: float) -> str:
    """Format bytes with three significant digits and decimal units: ``1950000000`` → ``"1.95 GB"``."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if size_bytes >= scale:
            value = size_bytes / scale
            return f"{value:.{max(0, 2 - (value >= 10) - (value >= 100))}f} {unit}"
    return f"{size_bytes:.0f} B"


def too_small(what: str, needed: int, budget_bytes: int, held: str = "") -> BudgetError:
    """Return the error that says that ``what`` needs this many bytes, some of them ``held``, and names the option that
    helps."""
    return BudgetError(
        f"{what} needs {format_size(needed)}{held}, the host budget is {format_size(budget_bytes)}; "
        f"give host_budget='{-(-needed // 1_000_000)}M'"
    )
