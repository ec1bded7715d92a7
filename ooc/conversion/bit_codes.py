# SPDX-License-Identifier: Apache-2.0
"""Instantaneous codes, read from a stream of bits, most significant first.

(γ and δ: Elias, "Universal codeword sets", 1975; ζ: Boldi and Vigna, "Codes for the World Wide Web", 2004.)
Values start at 0. Most codewords are short: a table over the next 16 bits tells value and length at once; the
others are read bit by bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache

import numpy as np

from ooc.storage.array import AnyArray

TABLE_BITS = 16
WINDOW_BYTES = 8
LENGTH_BITS = 5
_MOST_VALUE_BITS = 62


class Family(Enum):
    """Which code."""

    UNARY = "unary"
    GAMMA = "gamma"
    DELTA = "delta"
    ZETA = "zeta"


@dataclass(frozen=True)
class Code:
    """A family and, for ζ, its parameter k."""

    family: Family
    k: int = 0

    def read(self, bits: "Bits", at: int) -> tuple[int, int]:
        """``(value, where the next codeword starts)`` of the one at bit ``at``."""
        zeros = bits.zeros(at)
        at += zeros + 1
        match self.family:
            case Family.UNARY:
                return zeros, at
            case Family.GAMMA:
                return (1 << zeros | bits.integer(at, zeros)) - 1, at + zeros
            case Family.DELTA:
                length = (1 << zeros | bits.integer(at, zeros)) - 1
                at += zeros
                return (1 << length | bits.integer(at, length)) - 1, at + length
            case Family.ZETA:
                least, width = 1 << zeros * self.k, zeros * self.k + self.k - 1
                short = bits.integer(at, width)
                if short < least:
                    return short + least - 1, at + width
                return (short << 1 | bits.integer(at + width, 1)) - 1, at + width + 1

    def table(self) -> list[int]:
        """For each 16 bits that may come next ``value << 5 | length`` of the codeword they start with, 0 where it
        is longer."""
        return _table(self)


class Bits:
    """The bytes ``data`` as bits; IndexError for any past their end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._end = 8 * len(data)

    def zeros(self, at: int) -> int:
        """How many zeros there are before the next one."""
        byte, shift = divmod(at, 8)
        while True:
            part = self._data[byte : byte + WINDOW_BYTES]
            if not part:
                raise IndexError("past the end")
            value = int.from_bytes(part, "big") & ((1 << 8 * len(part) - shift) - 1)
            if value:
                return 8 * (byte + len(part)) - value.bit_length() - at
            byte, shift = byte + len(part), 0

    def integer(self, at: int, width: int) -> int:
        """The next ``width`` bits as a number."""
        if width > _MOST_VALUE_BITS:
            raise ValueError("a number of more than 62 bits")
        if at + width > self._end:
            raise IndexError("past the end")
        last = -(-(at + width) // 8)
        value = int.from_bytes(self._data[at // 8 : last], "big") >> 8 * last - at - width
        return value & ((1 << width) - 1)


def windows(data: bytes) -> AnyArray:
    """For each byte of ``data`` the 64 bits that start with it, zeros past the end; uint64 [len(data)]."""
    padded = np.frombuffer(data + bytes(WINDOW_BYTES - 1), dtype=np.uint8)
    found = np.zeros(len(data), dtype=np.uint64)
    for byte in range(WINDOW_BYTES):
        found <<= np.uint64(8)
        found |= padded[byte : byte + len(data)]
    return found


@cache
def _table(code: Code) -> list[int]:
    found = [0] * (1 << TABLE_BITS)
    for start in range(1 << TABLE_BITS):
        try:
            value, length = code.read(Bits(start.to_bytes(TABLE_BITS // 8, "big")), 0)
        except (IndexError, ValueError):
            continue
        found[start] = value << LENGTH_BITS | length
    return found


def to_integers(numbers: AnyArray, few: int) -> Sequence[int]:
    """``numbers`` as what gives Python integers fastest: a list where they are at most ``few``, else in place."""
    return numbers.tolist() if len(numbers) <= few else numbers.data
