# SPDX-License-Identifier: Apache-2.0
"""A decoder of a BVGraph's successor lists, one after another, from instantaneous codes: a stream of bits, the most
significant first.

(γ and δ: Elias, "Universal codeword sets", 1975; ζ: Boldi and Vigna, "Codes for the World Wide Web", 2004.) Values
start at 0. Bits are a text of 0 and 1 here, which Python searches, slices and parses at the speed of C.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from ooc.errors import BudgetError, SourceError
from ooc.sizes import format_size
from ooc.sources.files.streams import Blob

_MOST_VALUE_BITS = 62
KNOWN_BITS = 12
_CHUNK_BYTES = 1 << 18
_TEXT_BYTES = 20  # Of memory for a byte of the stream: its bits as a text, and what that is made of.
_NUMBER_BYTES = 64  # Of a Python integer in two lists.
_LEAST_PADDING_BITS = 128


class Family(Enum):
    """The family of a code."""

    UNARY = "unary"
    GAMMA = "gamma"
    DELTA = "delta"
    ZETA = "zeta"


@dataclass(frozen=True)
class Code:
    """A code: its family and, for ζ, the parameter k.

    ``known``: a cache of the values and lengths of short codewords, by the bits that begin with them.
    """

    family: Family
    k: int = 0
    known: dict[str, tuple[int, int]] = field(default_factory=dict, compare=False, repr=False)

    def read(self, bits: str, at: int) -> tuple[int, int]:
        """Return ``(value, where the next codeword starts)`` of the codeword at bit ``at``.

        IndexError where it goes past the end, ValueError for a number of more than 62 bits.
        """
        value, length = self.known.get(bits[at : at + KNOWN_BITS]) or self.decoded(bits, at)
        return value, at + length

    def decoded(self, bits: str, at: int) -> tuple[int, int]:
        """Return ``(value, length)`` of the codeword at bit ``at``, and cache it if it is short."""
        found, ahead = self._decoded(bits, at), bits[at : at + KNOWN_BITS]
        if found[1] <= len(ahead) == KNOWN_BITS:
            self.known[ahead] = found
        return found

    def _decoded(self, bits: str, at: int) -> tuple[int, int]:
        one = bits.find("1", at)
        if one < 0:
            raise IndexError("past the end")
        zeros, rest = one - at, one + 1
        match self.family:
            case Family.UNARY:
                return zeros, zeros + 1
            case Family.GAMMA:
                return _number(bits, one, zeros + 1) - 1, 2 * zeros + 1
            case Family.DELTA:
                length = _number(bits, one, zeros + 1) - 1
                rest += zeros
                # A length that is too long is refused before it is the number of a power's bits.
                return (_number(bits, rest, length) | 1 << length) - 1, rest + length - at
            case Family.ZETA:
                width = zeros * self.k + self.k - 1
                short = _number(bits, rest, width)
                if short < (least := 1 << zeros * self.k):
                    return short + least - 1, rest + width - at
                return _number(bits, rest, width + 1) - 1, rest + width + 1 - at


def _number(bits: str, at: int, width: int) -> int:
    """Return the ``width`` bits from ``at`` on as a number."""
    if width > _MOST_VALUE_BITS:
        raise ValueError("a number of more than 62 bits")
    if at + width > len(bits):
        raise IndexError("past the end")
    return int(bits[at : at + width], 2) if width else 0


_GAMMA = Code(Family.GAMMA)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The encoding of a graph's lists. ``window``: how many nodes back a list may be copied from; ``least_interval``:
    the length of the shortest interval, 0 without intervals."""

    window: int
    least_interval: int
    outdegree: Code
    reference: Code
    block_count: Code
    block: Code
    residual: Code


class Successors:
    """The successor lists of ``nodes`` nodes in the file ``stream``, ascending ids each; iterate once.

    SourceError for a damaged or truncated stream, BudgetError for lists too long to hold.
    """

    def __init__(self, stream: Path, *, nodes: int, layout: Layout, budget_bytes: int) -> None:
        self._path, self._nodes, self._layout = stream, nodes, layout
        self._most_held = max(1 << 16, budget_bytes // 4 // _NUMBER_BYTES)
        self._most_chunk_bytes = max(4 * _CHUNK_BYTES, budget_bytes // 4 // _TEXT_BYTES)
        blob = Blob.of_file(stream)
        self._stream, self._size = blob.open(), blob.size
        self._bits = 0
        self._copied = self._in_intervals = self._residual = 0

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
        """Raise SourceError where the counts read differ from ``wanted``, by ``bits``, ``arcs``, ``copied arcs``, …"""
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
        """Yield the lists from ``node`` on that lie completely in the next ``chunk_bytes``."""
        layout, nodes, slots = self._layout, self._nodes, self._layout.window + 1
        start = self._bits // 8
        self._stream.seek(start)
        data = self._stream.read(chunk_bytes)
        bits, at = f"{int.from_bytes(data, 'big'):0{8 * len(data)}b}" if data else "", self._bits - 8 * start
        arcs = all_copied = all_residual = 0
        try:
            while node < nodes:
                degree, at = layout.outdegree.read(bits, at)
                found: list[int] = []
                if degree:
                    if degree > nodes:
                        raise ValueError(f"{degree} successors among {nodes} nodes")
                    if degree > self._most_held:
                        raise self._too_long(node)
                    if layout.window:
                        reference, at = layout.reference.read(bits, at)
                        if reference:
                            if reference > layout.window or reference > node:
                                raise ValueError(f"a reference {reference} nodes back")
                            found, at = _copied(layout, bits, at, recent[(node - reference) % slots])
                    copied = len(found)
                    left = degree - copied
                    if left and layout.least_interval:
                        left, at = _intervals(layout, bits, at, node, left, found)
                    if left < 0:
                        raise ValueError(f"more successors than its {degree}")
                    if left:
                        at = _residuals(layout.residual, bits, at, node, left, found)
                    found.sort()  # Of a few ascending runs, which is merging them.
                    if found[0] < 0 or found[-1] >= nodes:
                        raise ValueError(f"a successor that is none of {nodes} nodes")
                    all_copied += copied
                    all_residual += left
                    arcs += degree
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


# The pieces of a list, read from bit ``at`` on; each gives the bit after it, too. ValueError for what cannot be.


def _copied(layout: Layout, bits: str, at: int, whole: list[int]) -> tuple[list[int], int]:
    """Return the copied part of the list ``whole``: every second one of some blocks; all of it where there are no
    blocks."""
    count, at = layout.block_count.read(bits, at)
    if not count:
        return whole[:], at
    found: list[int] = []
    place, copying, least = 0, True, 0
    for _ in range(count):
        length, at = layout.block.read(bits, at)
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


def _intervals(layout: Layout, bits: str, at: int, node: int, left: int, found: list[int]) -> tuple[int, int]:
    """Append runs of consecutive ids to ``found``; return how many of ``left`` successors remain."""
    count, at = _GAMMA.read(bits, at)
    first = None
    for _ in range(count):
        value, at = _GAMMA.read(bits, at)
        first = node + _signed(value) if first is None else first + value + 1
        length, at = _GAMMA.read(bits, at)
        length += layout.least_interval
        left -= length
        if left < 0:  # Before a list of any length is made.
            break
        found += range(first, first + length)
        first += length
    return left, at


def _residuals(code: Code, bits: str, at: int, node: int, left: int, found: list[int]) -> int:
    """Append ``left`` single successors to ``found``. The loop's body is written out, since a call costs as much as its
    work."""
    value, at = code.read(bits, at)
    successor = node + _signed(value)
    found.append(successor)
    known = code.known
    for _ in range(left - 1):
        value, length = known.get(bits[at : at + KNOWN_BITS]) or code.decoded(bits, at)
        successor += value + 1
        at += length
        found.append(successor)
    return at


def _signed(value: int) -> int:
    """Return 0, -1, 1, -2, … for 0, 1, 2, 3, …"""
    return -(value + 1 >> 1) if value & 1 else value >> 1
