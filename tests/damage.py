# SPDX-License-Identifier: Apache-2.0
"""Stores that hold what they should not."""

from pathlib import Path

import numpy as np

from ooc.storage.array import CHECKSUM_FILE, Array, open_array


def seal(array: Array) -> None:
    """Make the checksums of ``array`` agree with what its files hold now."""
    sums = [array.checksum(chunk) for chunk in range(array.num_chunks)]
    np.array(sums, dtype="<u4").tofile(array.path / CHECKSUM_FILE)


def seal_named(store: Path, name: str) -> None:
    """The same of the array ``name`` of the store at ``store``."""
    seal(open_array(store, name))
