# SPDX-License-Identifier: Apache-2.0
"""The successor lists of a BVGraph, decoded one after the other from instantaneous codes: a stream of bits, most
significant first.

(γ and δ: Elias, "Universal codeword sets", 1975; ζ: Boldi and Vigna, "Codes for the World Wide Web", 2004.)
Values start at 0. Most codewords are short: a table over the next 16 bits tells value and length at once; ``Code.read``
takes those that are longer, bit by bit. The lookups that come for each node and each arc are written out, on purpose: a
call costs as much as the work in it.
"""

import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Self

import numpy as np

from ooc.errors import BudgetError, SourceError
from ooc.sizes import format_size
from ooc.storage.array import AnyArray

TABLE_BITS = 16
WINDOW_BYTES = 8
LENGTH_BITS = 5
_MOST_VALUE_BITS = 62
_CHUNK_BYTES = 1 << 18
_MOST_LISTED = 1 << 20
_WINDOW_BYTES = 16  # Of memory for a byte of the stream, where windows are not in a list.
_NUMBER_BYTES = 64  # Of a Python integer in two lists.
_SHIFT = 64 - TABLE_BITS
_MASK = (1 << TABLE_BITS) - 1
_LENGTH = (1 << LENGTH_BITS) - 1
_LEAST_PADDING_BITS = 128


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
                # A length that is too long is refused before it is the number of a power's bits.
                return (bits.integer(at, length) | 1 << length) - 1, at + length
            case Family.ZETA:
                least, width = 1 << zeros * self.k, zeros * self.k + self.k - 1
                short = bits.integer(at, width)
                if short < least:
                    return short + least - 1, at + width
                return (short << 1 | bits.integer(at + width, 1)) - 1, at + width + 1

    @cache  # noqa: B019 (there are few codes)
    def table(self) -> list[int]:
        """For each 16 bits that may come next ``value << 5 | length`` of the codeword they start with, 0 where it
        is longer."""
        found = [0] * (1 << TABLE_BITS)
        for start in range(1 << TABLE_BITS):
            try:
                value, length = self.read(Bits(start.to_bytes(TABLE_BITS // 8, "big")), 0)
            except (IndexError, ValueError):
                continue
            found[start] = value << LENGTH_BITS | length
        return found


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


_GAMMA = Code(Family.GAMMA)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the lists of a graph are written. ``window``: how many nodes back lists may be copied from;
    ``least_interval``: length of the shortest interval, 0: there are none."""

    window: int
    least_interval: int
    outdegree: Code
    reference: Code
    block_count: Code
    block: Code
    residual: Code


class Successors:
    """The lists of ``nodes`` nodes in the file ``stream``, ascending ids each. A context manager; iterate once.

    SourceError for a stream that is damaged or stops early, BudgetError for lists too long to hold.
    """

    def __init__(self, stream: Path, *, nodes: int, layout: Layout, budget_bytes: int) -> None:
        self._path, self._nodes, self._layout = stream, nodes, layout
        self._most_held = max(1 << 16, budget_bytes // 4 // _NUMBER_BYTES)
        self._most_chunk_bytes = max(4 * _CHUNK_BYTES, budget_bytes // 4 // _WINDOW_BYTES)
        self._file = stream.open("rb")
        self._size = stream.stat().st_size
        self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) if self._size else b""
        self._bits = 0
        self._copied = self._in_intervals = self._residual = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        if isinstance(self._map, mmap.mmap):
            self._map.close()
        self._file.close()

    def __iter__(self) -> Iterator[list[int]]:
        recent: list[list[int]] = [[] for _ in range(self._layout.window + 1)]
        node, chunk_bytes = 0, _CHUNK_BYTES
        while node < self._nodes:
            before = node
            for found in self._chunk(node, recent, chunk_bytes):
                yield found
                node += 1
            if node > before:
                chunk_bytes = _CHUNK_BYTES
            elif self._bits // 8 + chunk_bytes >= self._size:
                raise self._damaged(node, "it stops early")
            else:  # Its list takes more than the chunk.
                chunk_bytes *= 4
                if chunk_bytes > self._most_chunk_bytes:
                    raise self._too_long(node)

    def check_end(self, wanted: Mapping[str, int]) -> None:
        """SourceError where what was read is not as ``wanted``, by ``bits``, ``arcs``, ``copied arcs``, …"""
        found = {
            "bits": self._bits,
            "arcs": self._copied + self._in_intervals + self._residual,
            "copied arcs": self._copied,
            "arcs in intervals": self._in_intervals,
            "residual arcs": self._residual,
        }
        for name, count in wanted.items():
            if count != found[name]:
                raise SourceError(f"{self._path} has {found[name]} {name}, {count} by its properties: it is damaged")
        if 8 * self._size - self._bits > _LEAST_PADDING_BITS:
            raise SourceError(f"{self._path} goes on after its last node: it is damaged, or of another graph")

    def _chunk(self, node: int, recent: list[list[int]], chunk_bytes: int) -> Iterator[list[int]]:
        """The lists from ``node`` on that lie in the next ``chunk_bytes`` as a whole."""
        layout, nodes, slots = self._layout, self._nodes, self._layout.window + 1
        start = self._bits // 8
        part = _Part(self._map[start : start + chunk_bytes], layout)
        at = self._bits - 8 * start
        arcs = all_copied = all_residual = 0
        try:
            while node < nodes:
                degree, at = part.value(part.outdegrees, layout.outdegree, at)
                found: list[int] = []
                if degree:
                    if degree > nodes:
                        raise ValueError(f"{degree} successors among {nodes} nodes")
                    if degree > self._most_held:
                        raise self._too_long(node)
                    if layout.window:
                        reference, at = part.value(part.references, layout.reference, at)
                        if reference:
                            if reference > layout.window or reference > node:
                                raise ValueError(f"a reference {reference} nodes back")
                            found, at = part.copied(at, recent[(node - reference) % slots])
                    copied = len(found)
                    left = degree - copied
                    if left and layout.least_interval:
                        count, at = part.value(part.gammas, _GAMMA, at)
                        if count:
                            left, at = part.intervals(at, node, count, left, found)
                    if left < 0:
                        raise ValueError(f"more successors than its {degree}")
                    if left:
                        at = part.residuals(at, node, left, found)
                    found.sort()  # Of a few ascending runs, which is merging them.
                    if found[0] < 0 or found[-1] >= nodes:
                        raise ValueError(f"a successor that is none of {nodes} nodes")
                    if at > part.end:
                        return
                    all_copied += copied
                    all_residual += left
                    arcs += degree
                elif at > part.end:
                    return
                recent[node % slots] = found
                self._bits = 8 * start + at
                node += 1
                yield found
        except IndexError:  # The chunk ends within a list: it is read again with the next.
            return
        except ValueError as error:
            raise self._damaged(node, str(error)) from error
        finally:
            self._copied += all_copied
            self._residual += all_residual
            self._in_intervals += arcs - all_copied - all_residual

    def _damaged(self, node: int, what: str) -> SourceError:
        return SourceError(f"{self._path} cannot be read, it is damaged: {what} (node {node})")

    def _too_long(self, node: int) -> BudgetError:
        return BudgetError(
            f"the list of node {node} of {self._path} is too long for the host budget; "
            f"{format_size(self._most_held * _NUMBER_BYTES)} of it are for lists: give twice as much or more"
        )


class _Part:
    """A part of the stream: ``ahead``, the 64 bits from each byte on, and the tables to look codewords up in.

    Its methods read a list's pieces from bit ``at`` on; with what they found they return the bit after it. IndexError
    past the end of the part (or zeros from ``ahead``: the caller compares with ``end``), ValueError for what cannot be.
    """

    def __init__(self, data: bytes, layout: Layout) -> None:
        self.bits, ahead = Bits(data), windows(data)
        # What gives Python integers fastest: a list where they are few enough, else in place.
        self.ahead: Sequence[int] = ahead.tolist() if len(ahead) <= _MOST_LISTED else ahead.data
        self.end = 8 * len(data)
        self.outdegrees, self.references = layout.outdegree.table(), layout.reference.table()
        self.gammas = _GAMMA.table()
        self._block_counts, self._blocks = layout.block_count.table(), layout.block.table()
        self._residuals = layout.residual.table()
        self._layout = layout

    def value(self, table: list[int], code: Code, at: int) -> tuple[int, int]:
        """The value in a ``code`` at bit ``at``, and the bit after it."""
        entry = table[self.ahead[at >> 3] >> _SHIFT - (at & 7) & _MASK]
        return (entry >> LENGTH_BITS, at + (entry & _LENGTH)) if entry else code.read(self.bits, at)

    def copied(self, at: int, whole: list[int]) -> tuple[list[int], int]:
        """What is copied of the list ``whole``: every second of some blocks of it; all of it where there are none."""
        blocks, code = self._blocks, self._layout.block
        count, at = self.value(self._block_counts, self._layout.block_count, at)
        if not count:
            return whole[:], at
        found: list[int] = []
        place, copying, least = 0, True, 0
        for _ in range(count):
            length, at = self.value(blocks, code, at)
            length += least
            if copying:
                found += whole[place : place + length]
            place += length
            copying, least = not copying, 1  # Only the first may be empty.
        if place > len(whole):
            raise ValueError("blocks past the end of the list they copy")
        if copying:
            found += whole[place:]
        return found, at

    def intervals(self, at: int, node: int, count: int, left: int, found: list[int]) -> tuple[int, int]:
        """Append ``count`` runs of consecutive ids to ``found``; how many of ``left`` successors remain."""
        gammas, least = self.gammas, self._layout.least_interval
        first = None
        for _ in range(count):
            value, at = self.value(gammas, _GAMMA, at)
            first = node + _signed(value) if first is None else first + value + 1
            length, at = self.value(gammas, _GAMMA, at)
            length += least
            left -= length
            if left < 0:  # Before a list of any length is made.
                break
            found += range(first, first + length)
            first += length
        return left, at

    def residuals(self, at: int, node: int, left: int, found: list[int]) -> int:
        """Append ``left`` single successors to ``found``."""
        ahead, residuals, code = self.ahead, self._residuals, self._layout.residual
        value, at = self.value(residuals, code, at)
        successor = node + _signed(value)
        found.append(successor)
        for _ in range(left - 1):
            entry = residuals[ahead[at >> 3] >> _SHIFT - (at & 7) & _MASK]
            if entry:
                successor += (entry >> LENGTH_BITS) + 1
                at += entry & _LENGTH
            else:
                value, at = code.read(self.bits, at)
                successor += value + 1
            found.append(successor)
        return at


def _signed(value: int) -> int:
    """0, -1, 1, -2, … for 0, 1, 2, 3, …"""
    return -(value + 1 >> 1) if value & 1 else value >> 1
