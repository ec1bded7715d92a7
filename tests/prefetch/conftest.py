# SPDX-License-Identifier: Apache-2.0
"""Memory that is dear to touch, touched once for all tests."""

from collections.abc import Iterator

import pytest

from ooc.prefetch.arena import Arena


@pytest.fixture(scope="session")
def huge() -> Iterator[Arena]:
    """A little more than 2 GiB."""
    arena = Arena((2 << 30) + (1 << 20))
    yield arena
    arena.close()
