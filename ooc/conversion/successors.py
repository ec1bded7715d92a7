# SPDX-License-Identifier: Apache-2.0
"""The successor lists of a BVGraph, decoded one after the other.

One long loop, on purpose: it runs once a node and a few times an arc, and a call costs as much as the work
in it. Each codeword is looked up by its next 16 bits; ``Code.read`` takes those that are longer.
"""

import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from ooc.conversion.bit_codes import LENGTH_BITS, TABLE_BITS, Bits, Code, Family, to_integers, windows
from ooc.errors import BudgetError, SourceError
from ooc.sizes import format_size

_CHUNK_BYTES = 1 << 18
_MOST_LISTED = 1 << 20
_WINDOW_BYTES = 16  # Of memory for a byte of the stream, where windows are not in a list.
_NUMBER_BYTES = 64  # Of a Python integer in two lists.
_SHIFT = 64 - TABLE_BITS
_MASK = (1 << TABLE_BITS) - 1
_LENGTH = (1 << LENGTH_BITS) - 1
_LEAST_PADDING_BITS = 128


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

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
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

    def check_end(self, wanted: Mapping[str, int | None]) -> None:
        """SourceError where what was read is not as ``wanted``, by ``bits``, ``arcs``, ``copied arcs``, …"""
        found = {
            "bits": self._bits,
            "arcs": self._copied + self._in_intervals + self._residual,
            "copied arcs": self._copied,
            "arcs in intervals": self._in_intervals,
            "residual arcs": self._residual,
        }
        for name, count in wanted.items():
            if count is not None and count != found[name]:
                raise SourceError(f"{self._path} has {found[name]} {name}, {count} by its properties: it is damaged")
        if 8 * self._size - self._bits > _LEAST_PADDING_BITS:
            raise SourceError(f"{self._path} goes on after its last node: it is damaged, or of another graph")

    def _chunk(self, node: int, recent: list[list[int]], chunk_bytes: int) -> Iterator[list[int]]:
        """The lists from ``node`` on that lie in the next ``chunk_bytes`` as a whole."""
        layout, nodes, least_interval = self._layout, self._nodes, self._layout.least_interval
        start = self._bits // 8
        data = self._map[start : start + chunk_bytes]
        bits, ahead = Bits(data), to_integers(windows(data), _MOST_LISTED)
        outdegrees, references, block_counts, blocks, residuals = (
            code.table()
            for code in (layout.outdegree, layout.reference, layout.block_count, layout.block, layout.residual)
        )
        gamma = Code(Family.GAMMA)
        gammas, slots, end = gamma.table(), layout.window + 1, 8 * len(data)
        at = self._bits - 8 * start
        try:
            while node < nodes:
                entry = outdegrees[ahead[at >> 3] >> _SHIFT - (at & 7) & _MASK]
                if entry:
                    degree = entry >> LENGTH_BITS
                    at += entry & _LENGTH
                else:
                    degree, at = layout.outdegree.read(bits, at)
                copied = in_intervals = 0
                found: list[int] = []
                if degree:
                    if degree > nodes:
                        raise self._damaged(node, f"{degree} successors among {nodes} nodes")
                    if degree > self._most_held:
                        raise self._too_long(node)
                    if layout.window:
                        entry = references[ahead[at >> 3] >> _SHIFT - (at & 7) & _MASK]
                        if entry:
                            reference = entry >> LENGTH_BITS
                            at += entry & _LENGTH
                        else:
                            reference, at = layout.reference.read(bits, at)
                        if reference:
                            if reference > layout.window or reference > node:
                                raise self._damaged(node, f"a reference {reference} nodes back")
                            whole = recent[(node - reference) % slots]
                            entry = block_counts[ahead[at >> 3] >> _SHIFT - (at & 7) & _MASK]
                            if entry:
                                count = entry >> LENGTH_BITS
                                at += entry & _LENGTH
                            else:
                                count, at = layout.block_count.read(bits, at)
                            if not count:
                                found = whole[:]
                            else:
                                place, copying = 0, True
                                for number in range(count):
                                    entry = blocks[ahead[at >> 3] >> _SHIFT - (at & 7) & _MASK]
                                    if entry:
                                        length = entry >> LENGTH_BITS
                                        at += entry & _LENGTH
                                    else:
                                        length, at = layout.block.read(bits, at)
                                    if number:
                                        length += 1
                                    if copying:
                                        found += whole[place : place + length]
                                    place += length
                                    copying = not copying
                                if place > len(whole):
                                    raise self._damaged(node, "blocks past the end of the list they copy")
                                if copying:
                                    found += whole[place:]
                            copied = len(found)
                    left = degree - copied
                    if left and least_interval:
                        entry = gammas[ahead[at >> 3] >> _SHIFT - (at & 7) & _MASK]
                        if entry:
                            count = entry >> LENGTH_BITS
                            at += entry & _LENGTH
                        else:
                            count, at = gamma.read(bits, at)
                        first = 0
                        for number in range(count):
                            entry = gammas[ahead[at >> 3] >> _SHIFT - (at & 7) & _MASK]
                            if entry:
                                value = entry >> LENGTH_BITS
                                at += entry & _LENGTH
                            else:
                                value, at = gamma.read(bits, at)
                            if number:
                                first += value + 1
                            else:
                                first = node + (-(value + 1 >> 1) if value & 1 else value >> 1)
                            entry = gammas[ahead[at >> 3] >> _SHIFT - (at & 7) & _MASK]
                            if entry:
                                length = (entry >> LENGTH_BITS) + least_interval
                                at += entry & _LENGTH
                            else:
                                length, at = gamma.read(bits, at)
                                length += least_interval
                            in_intervals += length
                            if in_intervals > left:
                                break
                            found += range(first, first + length)
                            first += length
                        left -= in_intervals
                    if left < 0:
                        raise self._damaged(node, f"more successors than its {degree}")
                    if left:
                        entry = residuals[ahead[at >> 3] >> _SHIFT - (at & 7) & _MASK]
                        if entry:
                            value = entry >> LENGTH_BITS
                            at += entry & _LENGTH
                        else:
                            value, at = layout.residual.read(bits, at)
                        successor = node + (-(value + 1 >> 1) if value & 1 else value >> 1)
                        found.append(successor)
                        for _ in range(left - 1):
                            entry = residuals[ahead[at >> 3] >> _SHIFT - (at & 7) & _MASK]
                            if entry:
                                successor += (entry >> LENGTH_BITS) + 1
                                at += entry & _LENGTH
                            else:
                                value, at = layout.residual.read(bits, at)
                                successor += value + 1
                            found.append(successor)
                    found.sort()  # Of a few ascending runs, which is merging them.
                    if found[0] < 0 or found[-1] >= nodes:
                        raise self._damaged(node, f"a successor that is none of {nodes} nodes")
                if at > end:
                    return
                recent[node % slots] = found
                self._copied += copied
                self._in_intervals += in_intervals
                self._residual += degree - copied - in_intervals
                self._bits = 8 * start + at
                node += 1
                yield found
        except IndexError:  # The chunk ends within a list: it is read again with the next.
            return
        except ValueError as error:
            raise self._damaged(node, str(error)) from error

    def _damaged(self, node: int, what: str) -> SourceError:
        return SourceError(f"{self._path} cannot be read, it is damaged: {what} (node {node})")

    def _too_long(self, node: int) -> BudgetError:
        return BudgetError(
            f"the list of node {node} of {self._path} is too long for the host budget; "
            f"{format_size(self._most_held * _NUMBER_BYTES)} of it are for lists: give twice as much or more"
        )
