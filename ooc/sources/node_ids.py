# SPDX-License-Identifier: Apache-2.0
"""The ids of a source's nodes, on the disk in their order; the distinct ids of edges, ascending; and the node of each
edge's ends.

Ids are integers, int64, or texts, UTF-8 in arrays of objects. More ids than memory holds are sorted in runs, which are
merged as they are read.

The nodes of all ends are found in little memory. Here an id is 16 bytes, its *key*. An integer, or a text of at most 16
bytes, is its own key. The key of a longer text is 120 bits of BLAKE2b and a last byte that UTF-8 never has. So short
ids are compared exactly, and two long ones are confused with a probability of 2⁻¹²⁰; two *nodes* with the same key are
compared in full.

If the keys of all nodes fit in memory, they are held and searched while the ends stream past. Otherwise it is an
out-of-core hash join (Grace join): keys of nodes and of ends are distributed to files by their hash until the nodes of
a file fit. The nodes found are distributed to files by the ends' places, which restores the order of the edges. All
reads and writes are sequential. (DuckDB would do the same, but its memory limit covers only its buffers and must exceed
a hundred megabytes or so; a conversion here may have 32.)

N nodes, E edges, n keys of a block; an edge k has the ends 2k (source) and 2k + 1 (target).
"""

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
import numpy.typing as npt

from ooc.errors import SourceError
from ooc.events import Listener, reported
from ooc.sources.source import Ids, Mask
from ooc.storage.array import AnyArray, flush, runs
from ooc.storage.mixing import GOLDEN, mixed
from ooc.storage.record_files import RecordFiles, Records

MOST_BYTES = 1024
"""The longest text, since stores keep ids at the width of the longest."""
_LENGTH = np.dtype("<u2")
_BLOCK_BYTES = 1 << 20
_NUMBER_BYTES = 4 * 8
"""Bytes of memory for each integer: merging holds two runs, both in one, sorted, and the distinct ones of it."""
_TEXT_BYTES = 100
"""Bytes of memory for each text while runs are merged, besides its own bytes."""
_MOST_RUNS = 64
_MOST_SPAN = 8
"""How many times larger than the number of nodes the integers' range may be, for a lookup by place."""


class IdFile:
    """The ids that :meth:`write` wrote to ``path``: ``rows`` of them; ``width``: bytes of the longest text, 0 for
    integers.

    Texts are concatenated, with their lengths in a second file.
    """

    def __init__(self, path: Path, *, rows: int, width: int) -> None:
        self.path, self.rows, self.width = path, rows, width

    @classmethod
    def write(cls, path: Path, blocks: Iterable[AnyArray]) -> "IdFile":
        """Write all ``blocks`` of ids, of one kind; the files appear when they are complete."""
        partial, rows, width = path.with_name(path.name + ".partial"), 0, 0
        with partial.open("wb") as file, _lengths_path(partial).open("wb") as lengths:
            for ids in blocks:
                rows += len(ids)
                if ids.dtype == np.object_:
                    sizes = np.fromiter(map(len, ids), dtype=_LENGTH, count=len(ids))
                    width = max(width, int(sizes.max(initial=0)))
                    lengths.write(sizes.tobytes())
                    file.write(b"".join(ids.tolist()))
                else:
                    file.write(ids.astype("<i8", copy=False).tobytes())
        for written, name in ((_lengths_path(partial), _lengths_path(path)), (partial, path)):
            flush(written)
            written.rename(name)
        return cls(path, rows=rows, width=width)

    def blocks(self, size: int) -> Iterator[AnyArray]:
        """Yield the ids in order, at most ``size`` at a time."""
        with self.path.open("rb") as file, _lengths_path(self.path).open("rb") as lengths:
            if not self.width:
                while data := file.read(8 * size):
                    yield np.frombuffer(data, dtype="<i8").astype(np.int64, copy=False)
                return
            while sizes := np.frombuffer(lengths.read(size * _LENGTH.itemsize), dtype=_LENGTH).tolist():
                data, start, texts = file.read(sum(sizes)), 0, np.empty(len(sizes), dtype=np.object_)
                for at, length in enumerate(sizes):
                    texts[at] = data[start : start + length]
                    start += length
                yield texts

    def stored(self, size: int) -> Iterator[AnyArray]:
        """Yield the ids as stores have them, int64 [n] or bytes [n, ``width``] padded with zeros, at most ``size`` at a
        time."""
        if not self.width:
            yield from self.blocks(size)
            return
        for texts in self.blocks(max(1, min(size, _BLOCK_BYTES // self.width))):
            yield np.array(texts.tolist(), dtype=f"S{self.width}").view(np.uint8).reshape(len(texts), self.width)

    def texts_of(self, rows: Iterable[int]) -> list[str]:
        """Return the ids of some ``rows``; reads from the start, for messages only."""
        found: dict[int, Any] = {}
        first = 0
        for ids in self.blocks(1 << 14):
            found |= {row: ids[row - first] for row in rows if first <= row < first + len(ids)}
            first += len(ids)
        return [found[row].decode() if self.width else str(found[row]) for row in rows]

    def are_rows(self) -> bool:
        """Return whether the ids are 0, 1, 2, …"""
        done = 0
        for ids in () if self.width else self.blocks(_BLOCK_BYTES // 8):
            if not np.array_equal(ids, np.arange(done, done + len(ids))):
                return False
            done += len(ids)
        return not self.width


def encoded(texts: Iterable[str], where: str) -> AnyArray:
    """Return texts in UTF-8, as they are compared and kept; raise SourceError, with ``where``, for an invalid one."""
    try:
        found = [text.encode() for text in texts]
    except UnicodeEncodeError as error:
        raise SourceError(f"{where} holds a text that is none in Unicode: {error.reason}") from error
    for text in found:
        if len(text) > MOST_BYTES:
            shown = text[:40].decode("utf-8", "replace")
            raise SourceError(f"{where} holds the id {shown}…, {len(text)} bytes long: {MOST_BYTES} are the most")
    if b"\0" in b"".join(found):
        raise SourceError(f"{where} holds an id with a NUL character in it")
    return np.array(found, dtype=np.object_)


def collect(blocks: Iterable[AnyArray], path: Path, *, limit_bytes: int) -> IdFile:
    """Write the distinct ids in ``blocks``, ascending (texts by their bytes), to the file ``path``.

    Takes about ``limit_bytes`` of memory, and beside ``path`` twice the ids' bytes on the disk.
    """
    folder, runs, written = path.with_name(path.name + ".runs"), list[IdFile](), 0
    rmtree(folder, ignore_errors=True)
    held: AnyArray | None = None
    waiting: list[AnyArray] = []
    taken = 0

    def spill(ids: Iterable[AnyArray]) -> IdFile:
        nonlocal written
        written += 1
        (folder / str(written)).mkdir(parents=True)
        return IdFile.write(folder / str(written) / "run", ids)

    for ids in map(distinct_ids, filter(len, blocks)):
        waiting.append(ids)
        taken += _held_bytes(ids)
        # As many runs wait as are held, so that every id is merged few times.
        if held is None or sum(map(len, waiting)) > len(held):
            held, waiting = distinct_ids(np.concatenate([*waiting, *([] if held is None else [held])])), []
            taken = _held_bytes(held)
        if taken > limit_bytes:
            runs.append(spill([distinct_ids(np.concatenate([held, *waiting]))]))
            held, waiting, taken = None, [], 0
        if len(runs) == _MOST_RUNS:
            old, runs = runs, [spill(_merge(runs, limit_bytes))]
            for run in old:
                rmtree(run.path.parent)
    last = [] if held is None else [distinct_ids(np.concatenate([held, *waiting]))]
    if runs and last:
        runs.append(spill(last))
    found = IdFile.write(path, _merge(runs, limit_bytes) if runs else last)
    rmtree(folder, ignore_errors=True)
    return found


def distinct_ids(ids: AnyArray) -> AnyArray:
    """Return the distinct ids, ascending. (``np.unique`` hashes, which is many times slower for millions.)"""
    if ids.dtype == np.object_:
        return np.array(sorted(set(ids.tolist())), dtype=np.object_)
    if len(ids) and (span := int(ids.max()) - (least := int(ids.min()))) < _MOST_SPAN * len(ids):  # Many times as fast.
        seen = np.zeros(span + 1, dtype=np.bool_)
        seen[ids - least] = True
        return np.flatnonzero(seen) + least
    ids = np.sort(ids)
    keep = np.ones(len(ids), dtype=np.bool_)
    np.not_equal(ids[1:], ids[:-1], out=keep[1:])
    return ids[keep]


def _merge(runs: list[IdFile], limit_bytes: int) -> Iterator[AnyArray]:
    """Yield all ids of ``runs``, each of which is ascending."""
    size = max(16, limit_bytes // (_MOST_RUNS * 2 * _TEXT_BYTES))
    streams = [run.blocks(size) for run in runs]
    heads = [next(stream) for stream in streams]
    while heads:
        # No later block can contain ids up to there.
        stop = np.sort(np.concatenate([head[-1:] for head in heads]))[:1]
        places = [int(np.searchsorted(head, stop, side="right")[0]) for head in heads]
        yield distinct_ids(np.concatenate([head[:at] for head, at in zip(heads, places, strict=True)]))
        rest = zip(heads, places, streams, strict=True)
        left = [(head[at:] if at < len(head) else next(stream, None), stream) for head, at, stream in rest]
        heads = [head for head, _ in left if head is not None]
        streams = [stream for head, stream in left if head is not None]


def _held_bytes(ids: AnyArray) -> int:
    return sum(map(len, ids)) + _TEXT_BYTES * len(ids) if ids.dtype == np.object_ else _NUMBER_BYTES * len(ids)


def _lengths_path(path: Path) -> Path:
    return path.with_name(path.name + ".lengths")


Keys = npt.NDArray[np.uint64]
"""Keys [n, 2]; with a place, the number of a node or an end, [n, 3]."""
KEY_BYTES = 16
NODE_BYTES = 80
"""Bytes of memory for each node whose key is held: the key, its hash and the node's number, and all again while
sorting."""
_HASHED = b"\xff"  # A byte that UTF-8 never uses.
_FAN_OUT_BITS = 7
_FAN_OUT = 1 << _FAN_OUT_BITS
_LEVELS = 64 // _FAN_OUT_BITS
_RECORD_DTYPE = np.dtype((np.uint64, (3,)))
_END_BYTES = 256  # Of memory for each end of a block that is spread or searched for.
_FOUND_DTYPE = np.dtype([("place", "<u8"), ("node", "<u4")])
_ABSENT = np.iinfo(np.uint32).max


def keys_of(ids: AnyArray) -> Keys:
    """Return the keys [n, 2] of ``ids``, integers or texts without zero bytes."""
    if ids.dtype != np.object_:
        return np.stack([ids.view(np.uint64), np.zeros(len(ids), dtype=np.uint64)], axis=1)
    size = KEY_BYTES - len(_HASHED)
    short = [
        text if len(text) <= KEY_BYTES else blake2b(text, digest_size=size).digest() + _HASHED for text in ids.tolist()
    ]
    return np.array(short, dtype=f"S{KEY_BYTES}").view(np.uint64).reshape(-1, 2)


@dataclass(frozen=True)
class Joined:
    """The result of a join. ``ends``: their number; ``duplicate``: two nodes of the same key; ``absent``: the first end
    without a node.

    Where one of the latter two is not None, nothing else is known.
    """

    ends: int
    duplicate: tuple[int, int] | None = None
    absent: int | None = None


def join(
    nodes: Iterable[Keys], count: int, ends: Iterable[Keys], out: Path, *, limit_bytes: int, listener: Listener
) -> Joined:
    """Write the node of each of the ``ends``, in order, as uint32 to the file ``out``, which appears when it is
    complete.

    ``nodes``: the keys of ``count`` nodes in order; ``ends``: those of all ends of edges. Takes about ``limit_bytes``
    of memory, and temporary files beside ``out``.
    """
    if count * NODE_BYTES > limit_bytes:
        partial = _partial_path(out)
        found = _DiskJoin(partial, limit_bytes, listener).join(nodes, ends)
        return found if found.duplicate is not None or found.absent is not None else _finish_file(out, found)
    table = _NodeTable(np.concatenate([*_with_places(nodes), np.empty((0, 3), dtype=np.uint64)]))
    return (
        Joined(0, duplicate=table.duplicate)
        if table.duplicate is not None
        else _write_found(map(table.numbers, ends), out)
    )


def take_rows(ends: Iterable[Ids], count: int, out: Path) -> Joined:
    """Do the same where ids are the nodes' numbers, 0 … ``count`` - 1."""
    return _write_found(((ids, (ids >= 0) & (ids < count)) for ids in ends), out)


def _write_found(found: Iterable[tuple[AnyArray, Mask]], out: Path) -> Joined:
    """Write nodes, with flags that say which of them exist."""
    done = 0
    with _partial_path(out).open("wb") as file:
        for numbers, there in found:
            if not there.all():
                return Joined(0, absent=done + int(there.argmin()))
            file.write(numbers.astype("<u4").data)
            done += len(numbers)
    return _finish_file(out, Joined(done))


def _partial_path(out: Path) -> Path:
    return out.with_name(out.name + ".partial")


def _finish_file(out: Path, found: Joined) -> Joined:
    flush(_partial_path(out))
    _partial_path(out).rename(out)
    return found


def _with_places(blocks: Iterable[Keys]) -> Iterator[Keys]:
    """Yield keys [n, 2] with their places in order [n, 3]."""
    done = 0
    for keys in blocks:
        places = np.arange(done, done + len(keys), dtype=np.uint64)
        yield np.concatenate([keys, places[:, None]], axis=1)
        done += len(keys)


def _hashes(keys: Keys) -> npt.NDArray[np.uint64]:
    """Return 64 well mixed bits of each key [n]."""
    return mixed(keys[:, 0] * GOLDEN ^ (keys[:, 1] + np.uint64(1)) * np.uint64(0xC2B2AE3D27D4EB4F))


def _first_words(keys: Keys) -> npt.NDArray[np.uint64]:
    return np.ascontiguousarray(keys[:, 0])


class _NodeTable:
    """The nodes of ``records`` [n, 3], looked up by their keys. ``duplicate``: two nodes of one key.

    Integers in a narrow range are looked up by their place in it, all others by search.
    """

    def __init__(self, records: Keys) -> None:
        # Whole numbers need no hash to be told apart, and neighbours among them are often asked for together.
        self._hash = _hashes if records[:, 1].any() else _first_words
        hashes = self._hash(records)
        order = np.argsort(hashes, kind="stable")
        if (hashes[order[1:]] == hashes[order[:-1]]).any():  # Of one key, or, which is rare, of several.
            order = np.lexsort((records[:, 1], records[:, 0], hashes))
        self._hashes, (self._first, self._second, self._nodes) = hashes[order], records[order].T.copy()
        same = np.flatnonzero((self._first[1:] == self._first[:-1]) & (self._second[1:] == self._second[:-1]))
        rows = self._nodes[same[0] : same[0] + 2].tolist() if len(same) else []
        self.duplicate = (min(rows), max(rows)) if rows else None
        self._least = self._first[:1]
        span = int(self._first[-1]) - int(self._first[0]) + 1 if self._hash is _first_words and len(records) else 0
        self._direct = np.full(span if span <= _MOST_SPAN * len(records) else 0, _ABSENT, dtype=np.uint32)
        if len(self._direct):
            self._direct[self._first - self._least] = self._nodes

    def numbers(self, keys: Keys) -> tuple[AnyArray, Mask]:
        """Return the node of each of the ``keys`` [n, 2], and whether there is one."""
        last = len(self._hashes) - 1
        if last < 0:
            return np.zeros(len(keys), dtype=np.uint64), np.zeros(len(keys), dtype=np.bool_)
        if len(self._direct):
            places = keys[:, 0] - self._least
            inside = (places < len(self._direct)) & (keys[:, 1] == 0)
            found = self._direct[np.where(inside, places, 0)]
            return found, inside & (found != _ABSENT)
        hashes = self._hash(keys)
        order = np.argsort(hashes)  # Neighbouring searches share their steps in the cache.
        at = np.empty(len(keys), dtype=np.int64)
        at[order] = np.minimum(np.searchsorted(self._hashes, hashes[order]), last)
        there = self._are_at(at, keys)
        while (more := ~there & (self._hashes[at] == hashes) & (at < last)).any():  # Another key of the same hash.
            at[more] += 1
            there |= self._are_at(at, keys)
        return self._nodes[at], there

    def _are_at(self, places: Ids, keys: Keys) -> Mask:
        """Return whether the keys are at these places of the table."""
        found: Mask = (self._first[places] == keys[:, 0]) & (self._second[places] == keys[:, 1])
        return found


class _DiskJoin:
    def __init__(self, out: Path, limit_bytes: int, listener: Listener) -> None:
        self._out, self._listener = out, listener
        self._folder = out.with_name(out.name + ".parts")
        self._most_nodes = max(1, limit_bytes * 2 // 3 // NODE_BYTES)
        self._block = max(256, limit_bytes // 3 // _END_BYTES)
        self._range_rows = max(1024, limit_bytes // 2 // (_FOUND_DTYPE.itemsize + 4))
        self._duplicate: tuple[int, int] | None = None
        self._absent: int | None = None

    def join(self, nodes: Iterable[Keys], ends: Iterable[Keys]) -> Joined:
        rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        node_parts = self._spread(_with_places(nodes), "nodes", 0)
        end_parts = self._spread(_with_places(ends), "ends", 0)
        total = sum(part.count for part in end_parts)
        with reported(self._listener, "finding the edges' nodes", len(node_parts), "parts") as advance:
            for done, (some_nodes, some_ends) in enumerate(zip(node_parts, end_parts, strict=True), start=1):
                self._match(some_nodes, some_ends, 1)
                if self._duplicate is not None:
                    break
                advance(done)
        if self._duplicate is None and self._absent is None:
            self._write_in_order(total)
        rmtree(self._folder)
        return Joined(total, self._duplicate, self._absent)

    def _spread(self, blocks: Iterable[Keys], name: str, level: int) -> list[Records]:
        """Distribute records to files by bits of their keys' hashes, other bits at each ``level``."""
        files, shift = RecordFiles(self._folder, _FAN_OUT, f"{name}-"), np.uint64(64 - _FAN_OUT_BITS * (level + 1))
        with closing(files):
            for whole in blocks:
                for start in range(0, len(whole), self._block):
                    records = whole[start : start + self._block]
                    files.add(records, (_hashes(records) >> shift & np.uint64(_FAN_OUT - 1)).astype(np.uint8))
        return [Records(files.path(part), count, _RECORD_DTYPE) for part, count in enumerate(files.counts)]

    def _match(self, nodes: Records, ends: Records, level: int) -> None:
        """Look up the nodes of ``ends`` among ``nodes``, all of whose hashes begin with the same bits."""
        if nodes.count > self._most_nodes and level < _LEVELS:
            node_parts = self._spread(nodes.blocks(self._block), nodes.path.stem, level)
            nodes.path.unlink(missing_ok=True)
            end_parts = self._spread(ends.blocks(self._block), ends.path.stem, level)
            ends.path.unlink(missing_ok=True)
            for some_nodes, some_ends in zip(node_parts, end_parts, strict=True):
                self._match(some_nodes, some_ends, level + 1)
            return
        # So many of one hash share one key; the first ones are enough.
        first = next(nodes.blocks(self._most_nodes), np.empty((0, 3), dtype=np.uint64))
        table = _NodeTable(first)
        if table.duplicate is not None:
            self._duplicate = table.duplicate
            return
        assert nodes.count <= self._most_nodes, "keys of the same 63 bits of their hashes, by the million"
        for records in ends.blocks(self._block):
            numbers, there = table.numbers(records[:, :2])
            if not there.all():
                absent = int(records[int(there.argmin()), 2])
                self._absent = absent if self._absent is None else min(self._absent, absent)
            if self._absent is None:
                self._write_to_ranges(records[:, 2], numbers)
        for part in (nodes, ends):
            part.path.unlink(missing_ok=True)

    def _write_to_ranges(self, places: npt.NDArray[np.uint64], numbers: npt.NDArray[np.uint64]) -> None:
        """Write the nodes found for ascending ``places`` to the files of their ranges."""
        found = np.empty(len(places), dtype=_FOUND_DTYPE)
        found["place"], found["node"] = places, numbers
        ranges = places // np.uint64(self._range_rows)
        for first, last in runs(ranges, gap=0):
            with self._range_path(int(ranges[first])).open("ab") as file:
                file.write(found[first:last].data)

    def _write_in_order(self, total: int) -> None:
        with self._out.open("wb") as file:
            for start in range(0, total, self._range_rows):
                path = self._range_path(start // self._range_rows)
                found = np.fromfile(path, dtype=_FOUND_DTYPE)
                nodes = np.full(min(self._range_rows, total - start), _ABSENT, dtype="<u4")
                nodes[(found["place"] - np.uint64(start)).astype(np.int64)] = found["node"]
                assert len(found) == len(nodes), "every end was found once"
                file.write(nodes.data)
                path.unlink()

    def _range_path(self, number: int) -> Path:
        return self._folder / f"range-{number}"
