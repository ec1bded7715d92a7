# SPDX-License-Identifier: Apache-2.0
"""How many random cases a property is tried on."""

from collections.abc import Iterable
from typing import TypeVar

from hypothesis import settings

Case = TypeVar("Case")
ORDINARY, THOROUGH = 100, 1000
"""Examples of a property that names no number, in either profile."""


def examples(count: int) -> int:
    """``count`` in an ordinary run, ten times that with ``pytest --hypothesis-profile thorough``."""
    return count * settings().max_examples // ORDINARY


def cases(ordinary: Iterable[Case], thorough: Iterable[Case]) -> list[Case]:
    """Those of an ordinary run, or the ``thorough`` ones with that profile."""
    return list(ordinary if settings().max_examples <= ORDINARY else thorough)
