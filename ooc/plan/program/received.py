# SPDX-License-Identifier: Apache-2.0
"""What a process is sent by others while it computes a pass, part by part, and what of it computing does not hide."""

from collections.abc import Sequence
from typing import NamedTuple

_MOST_PARTS = 8
_PART_BYTES = 1 << 20


class Received(NamedTuple):
    """Bytes that come in so many equal parts: a slab while the one before it is pulled, rows as others have them."""

    nbytes: int
    parts: int


def sent_parts(nbytes: int) -> int:
    """In how many parts matrices of so many bytes together are sent while they are computed."""
    return max(1, min(_MOST_PARTS, nbytes // _PART_BYTES))


def exposed_s(received: Sequence[Received], computed_s: float, bytes_per_s: float) -> float:
    """How much longer than ``computed_s`` a pass takes for what it receives. One part of what comes in n is computed,
    or pulled, while nothing is sent, and one is sent while nothing else is done; the others may be hidden."""
    alone_s = sum(one.nbytes / one.parts for one in received) / bytes_per_s
    beside_s = sum(one.nbytes for one in received) / bytes_per_s - alone_s
    most = max((one.parts for one in received), default=1)
    return alone_s + max(0.0, beside_s - computed_s * (1 - 1 / most))
