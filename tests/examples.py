# SPDX-License-Identifier: Apache-2.0
"""How many random cases a property is tried on."""

from hypothesis import settings

ORDINARY, THOROUGH = 100, 1000
"""Examples of a property that names no number, in either profile."""


def examples(count: int) -> int:
    """``count`` in an ordinary run, ten times that with ``pytest --hypothesis-profile thorough``."""
    return count * settings().max_examples // ORDINARY
