# SPDX-License-Identifier: Apache-2.0
"""How many random cases a property is tried on, and which of many cases alike an ordinary run leaves out."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest
from _pytest.mark import ParameterSet
from hypothesis import settings

Case = TypeVar("Case")
ORDINARY, THOROUGH = 70, 1000
"""Examples of a property that names no number, in either profile."""


def examples(count: int) -> int:
    """``count`` with a hundred examples; fewer in an ordinary run, ten times that in a thorough one."""
    return max(1, count * settings().max_examples // 100)


def is_thorough() -> bool:
    return settings().max_examples > ORDINARY


def cases(ordinary: Iterable[Case], thorough: Iterable[Case]) -> list[Case]:
    """Those of an ordinary run, or the ``thorough`` ones with that profile."""
    return list(thorough if is_thorough() else ordinary)


def every_other(*axes: Iterable[str]) -> list[str]:
    """Of the ids of a product of cases every other one, of which and of the rest each has any two values together."""
    counted = itertools.product(*map(enumerate, axes))
    return ["-".join(part for _, part in one) for one in counted if sum(number for number, _ in one) % 2]


def thorough(values: Iterable[Any], *left: Any) -> list[Any]:
    """Parameters: ``values``, of which those ``left``, each by itself or by its id, are for a thorough run alone."""
    return _parameters(values, left, lambda key: key in left)


def ordinary(values: Iterable[Any], *kept: Any) -> list[Any]:
    """Parameters: ``values``, of which all but those ``kept`` are for a thorough run alone."""
    return _parameters(values, kept, lambda key: key not in kept)


def _parameters(values: Iterable[Any], named: tuple[Any, ...], is_left: Callable[[Any], bool]) -> list[Any]:
    found = [_parameter(value) for value in values]
    keys = [one.id or (one.values[0] if len(one.values) == 1 else one.values) for one in found]
    assert all(name in keys for name in named), f"{named} are not all among {keys}"
    left = [pytest.mark.thorough]
    return [
        pytest.param(*one.values, marks=[*one.marks, *left * is_left(key)], id=one.id)
        for one, key in zip(found, keys, strict=True)
    ]


def _parameter(value: Any) -> ParameterSet:
    if isinstance(value, ParameterSet):
        return value
    return pytest.param(*value) if isinstance(value, tuple) else pytest.param(value)
