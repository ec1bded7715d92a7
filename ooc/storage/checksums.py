# SPDX-License-Identifier: Apache-2.0
"""Checksums of bytes: the CRC-32C of two concatenated pieces from those of both, and a faster checksum.

The checksum of A followed by B is that of A, shifted by the bits of B in the ring of polynomials over GF(2), plus that
of B (Mark Adler's ``crc32_combine`` of zlib). It needs neither the bytes of B nor A before B.
"""

from functools import lru_cache

import google_crc32c
import numpy as np
import numpy.typing as npt

_POLYNOMIAL = 0x82F63B78  # Castagnoli's, its bits in reverse, as all polynomials here: the highest bit is x to the 0
_ONE = 1 << 31
_ZEROS = bytes(1 << 16)


def combined(first: int, second: int, second_nbytes: int) -> int:
    """Return the CRC-32C of two concatenated parts with the CRC-32C ``first`` and ``second``, the latter of
    ``second_nbytes``."""
    return _product(_shift(second_nbytes), first) ^ second


def of_zeros(nbytes: int) -> int:
    """Return the CRC-32C of so many zero bytes."""
    checksum = 0
    for start in range(0, nbytes, len(_ZEROS)):
        checksum = google_crc32c.extend(checksum, _ZEROS[: nbytes - start])
    return checksum


def quick_sum(memory: npt.NDArray[np.uint8]) -> int:
    """Return the sum of the bytes as 64-bit integers, at twice the rate of a CRC.

    Changed bits or other bytes change it, but exchanged integers do not.
    """
    whole = len(memory) // 8 * 8
    rest = int.from_bytes(memory[whole:].tobytes(), "little")
    return (int(memory[:whole].view(np.uint64).sum(dtype=np.uint64)) + rest) % 2**64


@lru_cache(maxsize=1024)
def _shift(nbytes: int) -> int:
    """Return x to the power of 8 ``nbytes``."""
    result, power = _ONE, _ONE >> 8
    while nbytes:
        if nbytes & 1:
            result = _product(result, power)
        power = _product(power, power)
        nbytes >>= 1
    return result


def _product(left: int, right: int) -> int:
    result = 0
    while left:
        if left & _ONE:
            result ^= right
        left = left << 1 & 0xFFFFFFFF
        right = right >> 1 ^ (_POLYNOMIAL if right & 1 else 0)
    return result
