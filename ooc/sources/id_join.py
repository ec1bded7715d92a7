# SPDX-License-Identifier: Apache-2.0
"""Which node each end of each edge is, by ids of any kind, in as little memory as there is.

An id is 16 bytes here, its *key*: a whole number, or a text of at most 16 bytes, is its own key; of a longer text it is
120 bits of BLAKE2b and a last byte that no text in UTF-8 has. So short ids are compared as they are, and two long ones
are mistaken for each other with the probability of 2⁻¹²⁰; two *nodes* with the same key are compared in full.

Where the keys of all nodes fit, they are held and searched, and the ends stream by. Else it is a hash join as databases
do it out of core (Grace join): keys of nodes and of ends are spread over files by their hash until the nodes of a file
fit, and what is found goes to files by the ends' places, which brings it into the order of the edges again. Everything
is written and read in sequence. (DuckDB would do the same, but its memory limit is of its buffers alone, and a hundred
megabytes or so must be over it; a conversion here may have 32.)

N nodes, E edges, n keys of a block; an edge k has the ends 2k (source) and 2k + 1 (target).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from shutil import rmtree

import numpy as np
import numpy.typing as npt

from ooc.events import Listener, reported
from ooc.sources.source import Ids
from ooc.storage.array import flush

Keys = npt.NDArray[np.uint64]
"""[n, 2]; beside a place, a node's number or an end's, [n, 3]."""
KEY_BYTES = 16
NODE_BYTES = 80
"""Of memory for each node whose key is held: the key, its hash and the node's number, and all again while sorting."""
_LONG = b"\xff"  # No byte of UTF-8.
_FAN_OUT_BITS = 7
_LEVELS = 64 // _FAN_OUT_BITS
_RECORD_BYTES = 24
_END_BYTES = 256  # Of memory for each end of a block that is spread or searched for.
_FOUND = np.dtype([("place", "<u8"), ("node", "<u4")])
_ABSENT = np.iinfo(np.uint32).max


def keys_of_texts(ids: list[bytes]) -> Keys:
    """The keys [n, 2] of ``ids``, none of which holds a zero byte."""
    short = [text if len(text) <= KEY_BYTES else _digest(text) for text in ids]
    return np.array(short, dtype=f"S{KEY_BYTES}").view(np.uint64).reshape(-1, 2)


def keys_of_numbers(ids: Ids) -> Keys:
    """The keys [n, 2] of whole numbers."""
    return np.stack([ids.view(np.uint64), np.zeros(len(ids), dtype=np.uint64)], axis=1)


def _digest(text: bytes) -> bytes:
    return blake2b(text, digest_size=KEY_BYTES - len(_LONG)).digest() + _LONG


@dataclass(frozen=True)
class Joined:
    """``ends``: how many there were. ``twice``: two nodes of the same key. ``absent``: the first end that is no node's.

    Where one of the latter two is not None, nothing else is known.
    """

    ends: int
    twice: tuple[int, int] | None = None
    absent: int | None = None


def join(
    nodes: Iterable[Keys], count: int, ends: Iterable[Keys], out: Path, *, limit_bytes: int, listener: Listener
) -> Joined:
    """Write the node of each of the ``ends``, in order, as uint32 to the file ``out``, which appears when it is whole.

    ``nodes``: the keys of ``count`` nodes in order; ``ends``: of all ends of edges. Takes about ``limit_bytes`` of
    memory; what it needs of the disk lies beside ``out``.
    """
    partial = out.with_name(out.name + ".partial")
    if count * NODE_BYTES <= limit_bytes:
        found = _held(nodes, ends, partial)
    else:
        found = _OnDisk(partial, limit_bytes, listener).join(nodes, ends)
    if found.twice is None and found.absent is None:
        flush(partial)
        partial.rename(out)
    return found


def _held(nodes: Iterable[Keys], ends: Iterable[Keys], out: Path) -> Joined:
    table = _Table(np.concatenate([*_placed(nodes), np.empty((0, 3), dtype=np.uint64)]))
    if table.twice is not None:
        return Joined(0, twice=table.twice)
    done = 0
    with out.open("wb") as file:
        for keys in ends:
            numbers, there = table.numbers(keys)
            if not there.all():
                return Joined(0, absent=done + int(there.argmin()))
            file.write(numbers.astype("<u4").data)
            done += len(keys)
    return Joined(done)


def _placed(blocks: Iterable[Keys]) -> Iterator[Keys]:
    """Keys [n, 2] with their places in order [n, 3]."""
    done = 0
    for keys in blocks:
        places = np.arange(done, done + len(keys), dtype=np.uint64)
        yield np.concatenate([keys, places[:, None]], axis=1)
        done += len(keys)


def _hashes(keys: Keys) -> npt.NDArray[np.uint64]:
    """64 well mixed bits of each key [n] (the last steps are those of SplitMix64)."""
    mixed = keys[:, 0] * np.uint64(0x9E3779B97F4A7C15) ^ (keys[:, 1] + np.uint64(1)) * np.uint64(0xC2B2AE3D27D4EB4F)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    found: npt.NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(31))
    return found


class _Table:
    """The nodes of ``records`` [n, 3], found by their keys. ``twice``: two of one key."""

    def __init__(self, records: Keys) -> None:
        hashes = _hashes(records)
        order = np.argsort(hashes, kind="stable")
        if (hashes[order[1:]] == hashes[order[:-1]]).any():  # Of one key, or, which is rare, of several.
            order = np.lexsort((records[:, 1], records[:, 0], hashes))
        self._hashes, self._records = hashes[order], records[order]
        keys = self._records[:, :2]
        same = np.flatnonzero((keys[1:] == keys[:-1]).all(axis=1))
        rows = self._records[same[0] : same[0] + 2, 2].tolist() if len(same) else []
        self.twice = (min(rows), max(rows)) if rows else None

    def numbers(self, keys: Keys) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_]]:
        """The node of each of the ``keys`` [n, 2], and whether there is one."""
        hashes, last = _hashes(keys), len(self._hashes) - 1
        if last < 0:
            return np.zeros(len(keys), dtype=np.uint64), np.zeros(len(keys), dtype=np.bool_)
        order = np.argsort(hashes)  # Neighbouring searches share their steps in the cache.
        at = np.empty(len(keys), dtype=np.int64)
        at[order] = np.minimum(np.searchsorted(self._hashes, hashes[order]), last)
        there = (self._records[at, :2] == keys).all(axis=1)
        while (more := ~there & (self._hashes[at] == hashes) & (at < last)).any():  # Another key of the same hash.
            at[more] += 1
            there |= (self._records[at, :2] == keys).all(axis=1)
        return self._records[at, 2], there


@dataclass(frozen=True)
class _Part:
    """``count`` records in the file ``path``, of nodes or of ends."""

    path: Path
    count: int

    def blocks(self, size: int) -> Iterator[Keys]:
        """The records [n, 3], at most ``size`` at a time."""
        if not self.count:
            return
        with self.path.open("rb") as file:
            while data := file.read(size * _RECORD_BYTES):
                yield np.frombuffer(data, dtype=np.uint64).reshape(-1, 3)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


class _OnDisk:
    def __init__(self, out: Path, limit_bytes: int, listener: Listener) -> None:
        self._out, self._listener = out, listener
        self._folder = out.with_name(out.name + ".parts")
        self._most_nodes = max(1, limit_bytes * 2 // 3 // NODE_BYTES)
        self._block = max(256, limit_bytes // 3 // _END_BYTES)
        self._height = max(1024, limit_bytes // 2 // (_FOUND.itemsize + 4))
        self._twice: tuple[int, int] | None = None
        self._absent: int | None = None

    def join(self, nodes: Iterable[Keys], ends: Iterable[Keys]) -> Joined:
        rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        node_parts = self._spread(_placed(nodes), "nodes", 0)
        end_parts = self._spread(_placed(ends), "ends", 0)
        total = sum(part.count for part in end_parts)
        with reported(self._listener, "finding the edges' nodes", len(node_parts), "parts") as advance:
            for done, (some_nodes, some_ends) in enumerate(zip(node_parts, end_parts, strict=True), start=1):
                self._match(some_nodes, some_ends, 1)
                if self._twice is not None:
                    break
                advance(done)
        if self._twice is None and self._absent is None:
            self._put_in_order(total)
        rmtree(self._folder)
        return Joined(total, self._twice, self._absent)

    def _spread(self, blocks: Iterable[Keys], name: str, level: int) -> list[_Part]:
        """Spread records over files by bits of their keys' hashes, others at each ``level``."""
        fan_out = 1 << _FAN_OUT_BITS
        counts = np.zeros(fan_out, dtype=np.int64)
        paths = [self._folder / f"{name}-{part}" for part in range(fan_out)]
        shift = np.uint64(64 - _FAN_OUT_BITS * (level + 1))
        for whole in blocks:
            for start in range(0, len(whole), self._block):
                records = whole[start : start + self._block]
                part_of = (_hashes(records) >> shift & np.uint64(fan_out - 1)).astype(np.uint8)
                records = records[np.argsort(part_of, kind="stable")]
                here = np.bincount(part_of, minlength=fan_out)
                counts += here
                for part, (first, last) in enumerate(pairwise([0, *np.cumsum(here).tolist()])):
                    if first < last:
                        with paths[part].open("ab") as file:
                            file.write(records[first:last].data)
        return [_Part(path, count) for path, count in zip(paths, counts.tolist(), strict=True)]

    def _match(self, nodes: _Part, ends: _Part, level: int) -> None:
        """Find the ``nodes`` of ``ends``, all of whose hashes begin alike."""
        if nodes.count > self._most_nodes and level < _LEVELS:
            node_parts = self._spread(nodes.blocks(self._block), nodes.path.name, level)
            nodes.remove()
            end_parts = self._spread(ends.blocks(self._block), ends.path.name, level)
            ends.remove()
            for some_nodes, some_ends in zip(node_parts, end_parts, strict=True):
                self._match(some_nodes, some_ends, level + 1)
            return
        # So many of one hash are of one key, of which the first ones tell.
        first = next(nodes.blocks(self._most_nodes), np.empty((0, 3), dtype=np.uint64))
        table = _Table(first)
        if table.twice is not None:
            self._twice = table.twice
            return
        assert nodes.count <= self._most_nodes, "keys of the same 63 bits of their hashes, by the million"
        for records in ends.blocks(self._block):
            numbers, there = table.numbers(records[:, :2])
            if not there.all():
                absent = int(records[int(there.argmin()), 2])
                self._absent = absent if self._absent is None else min(self._absent, absent)
            if self._absent is None:
                self._keep(records[:, 2], numbers)
        nodes.remove()
        ends.remove()

    def _keep(self, places: npt.NDArray[np.uint64], numbers: npt.NDArray[np.uint64]) -> None:
        """Put what was found for ascending ``places`` to the files of their ranges."""
        found = np.empty(len(places), dtype=_FOUND)
        found["place"], found["node"] = places, numbers
        ranges = places // np.uint64(self._height)
        cuts = [0, *(np.flatnonzero(ranges[1:] != ranges[:-1]) + 1).tolist(), len(places)]
        for first, last in pairwise(cuts):
            with self._range_path(int(ranges[first])).open("ab") as file:
                file.write(found[first:last].data)

    def _put_in_order(self, total: int) -> None:
        with self._out.open("wb") as file:
            for start in range(0, total, self._height):
                path = self._range_path(start // self._height)
                found = np.fromfile(path, dtype=_FOUND)
                nodes = np.full(min(self._height, total - start), _ABSENT, dtype="<u4")
                nodes[(found["place"] - np.uint64(start)).astype(np.int64)] = found["node"]
                assert len(found) == len(nodes), "every end was found once"
                file.write(nodes.data)
                path.unlink()

    def _range_path(self, number: int) -> Path:
        return self._folder / f"range-{number}"
