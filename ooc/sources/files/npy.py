# SPDX-License-Identifier: Apache-2.0
"""Arrays in the npy format (numpy.lib.format) that are far larger than memory, read in blocks: from files by position,
from archives as they are inflated, each once.

Nothing is mapped: every block is read into memory of its own, so that what a process holds is what it was given. (Pages
of a mapped file count as its memory while they are in use.)

An edge list [2, E] in an archive is the one that cannot be used as it comes: all sources lie before the first target,
and deflate cannot seek. So it is put on the disk first (``Source.prepare``), in two files of 32-bit ids, half its
size; whatever else is in the archive streams straight into the store.
"""

import io
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import IO

import numpy as np

from ooc.errors import SourceError
from ooc.events import Listener, reported
from ooc.sources.files.prefetching import prefetched
from ooc.sources.files.streams import Blob, damaged, read_exactly, read_values
from ooc.sources.files.zip_members import Archive
from ooc.sources.source import EdgeBlock, Source, ranges, with_data
from ooc.storage.array import AnyArray, flush

MAGIC = b"\x93NUMPY"
_MAGIC_BYTES = 8
_MOST_HEADER_BYTES = 1 << 16
_BLOCK_BYTES = 4 << 20
_ROW_FILES = ("sources.ids", "targets.ids")
_ID = np.dtype(np.uint32)  # A store has at most 2^32 nodes.


@dataclass(frozen=True, kw_only=True)
class NpyHeader:
    """What an npy file says of its array; ``bytes``: length of the header itself."""

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    column_major: bool
    bytes: int

    @property
    def count(self) -> int:
        return prod(self.shape)


def read_header(stream: IO[bytes], *, size: int, name: str) -> NpyHeader:
    """Read the header of an npy file of ``size`` bytes; ``stream`` is left at the first value.

    SourceError for anything but a plain array of numbers that fills the file exactly.
    """
    begin = read_exactly(stream, _MAGIC_BYTES, name)
    version = (begin[6], begin[7])
    if begin[:6] != MAGIC or version not in ((1, 0), (2, 0)):
        raise damaged(name, "it is no npy file of version 1 or 2")
    length = read_exactly(stream, 2 if version == (1, 0) else 4, name)
    header_bytes = int.from_bytes(length, "little")
    if header_bytes > _MOST_HEADER_BYTES:
        raise damaged(name, f"its header claims {header_bytes} bytes")
    text = io.BytesIO(length + read_exactly(stream, header_bytes, name))
    parse = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    try:
        shape, column_major, dtype = parse(text)
    except Exception as error:  # Its text is evaluated as a literal, which raises nearly anything.
        raise damaged(name, f"its header is not numpy's ({type(error).__name__})") from error
    header = NpyHeader(
        shape=tuple(shape),
        dtype=dtype,
        column_major=bool(column_major),
        bytes=_MAGIC_BYTES + len(length) + header_bytes,
    )
    if dtype.hasobject:
        raise SourceError(f"{name} holds an array of Python objects, which are never loaded")
    if dtype.kind not in "biuf" or dtype.names is not None:
        raise SourceError(f"{name} holds {dtype} values, not plain numbers")
    if any(extent < 0 for extent in header.shape) or header.bytes + header.count * dtype.itemsize != size:
        raise damaged(name, f"{size} bytes are no array {list(header.shape)} of {dtype}")
    return header


class NpyArray:
    """The array in an npy file, which is read from anywhere, or in an archive's member, from the first value on.

    With ``raw`` the values of that shape and type that fill a file without header.
    """

    def __init__(self, where: Path | Blob, *, raw: tuple[tuple[int, ...], np.dtype[np.generic]] | None = None) -> None:
        """SourceError where the file is missing, damaged, or of another size than its shape takes."""
        if isinstance(where, Path) and not where.is_file():
            raise SourceError(f"{where} is missing")
        self._blob = Blob.of_file(where) if isinstance(where, Path) else where
        self.name = self._blob.name
        if raw is None:
            with self._blob.open() as stream:
                self.header = read_header(stream, size=self._blob.size, name=self.name)
        else:
            self.header = NpyHeader(shape=raw[0], dtype=raw[1], column_major=False, bytes=0)
            if self.header.count * raw[1].itemsize != self._blob.size:
                raise SourceError(f"{self.name} has {self._blob.size} bytes, which are no {raw[1]} {list(raw[0])}")
        self.shape, self.dtype = self.header.shape, self.header.dtype

    @classmethod
    def find(cls, archive: Archive, name: str, where: str) -> "NpyArray":
        """The array in the member ``name``.npy; SourceError, saying ``where``, if there is none."""
        member = archive.member(f"{name}.npy")
        if member is None:
            raise SourceError(f"{where} has no array {name}")
        return cls(member)

    @property
    def path(self) -> Path:
        """Of one in a file."""
        return Path(self.name)

    @property
    def seekable(self) -> bool:
        """Whether it is in a file."""
        return self._blob.inside is None

    def matrix(self, wanted: str) -> tuple[int, int]:
        """Rows and columns; SourceError where it is no matrix of rows, ``wanted``, that can be converted."""
        if len(self.shape) != 2 or not 0 < self.shape[0] <= 2**32 or self.shape[1] < 1:
            raise SourceError(f"{self.name} has the shape {list(self.shape)}, not {wanted}")
        self._check_rows()
        return self.shape[0], self.shape[1]

    def check_column(self, nodes: int) -> None:
        """SourceError where it has not one value for each of ``nodes``, [N] or [N, 1]."""
        if self.shape not in ((nodes,), (nodes, 1)):
            raise SourceError(
                f"{self.name} has the shape {list(self.shape)}, an entry for each of {nodes} nodes wanted"
            )

    def values(self, size: int) -> Iterator[AnyArray]:
        """All values in file order, at most ``size`` at a time; the end is checked after the last."""
        with self._blob.open() as stream:
            self._seek(stream, 0)
            for start, stop in ranges(self.header.count, size):
                yield read_values(stream, stop - start, self.dtype, self.name)
            if stream.read(1):
                raise damaged(self.name, "it is longer than it says")

    def whole(self) -> AnyArray:
        """All of it, in memory."""
        flat = np.concatenate([np.empty(0, dtype=self.dtype), *self.values(max(1, self.header.count))])
        return flat.reshape(self.shape, order="F" if self.header.column_major else "C")

    def rows(self, start: int, stop: int) -> AnyArray:
        """The rows ``start:stop`` of an array in a file whose rows lie one after another."""
        width = prod(self.shape[1:])
        return self._values(start * width, (stop - start) * width).reshape(stop - start, *self.shape[1:])

    def row_blocks(self, size: int) -> Iterator[AnyArray]:
        """All rows, at most ``size`` at a time."""
        self._check_rows()
        width = prod(self.shape[1:])
        rows_at_once = max(1, min(size, _BLOCK_BYTES // max(1, width * self.dtype.itemsize)))
        for values in self.values(rows_at_once * width):
            yield values.reshape(-1, *self.shape[1:])

    def num_edges(self, preferred: int = 0) -> int:
        """How many edges there are in [2, E] or [E, 2]; ``preferred``: the axis of the two where both could be."""
        return self.shape[1 - self._axis_of_ends(preferred)]

    def ends_one_by_one(self, preferred: int = 0) -> bool:
        """Whether each edge's two ends lie side by side."""
        return (self._axis_of_ends(preferred) == 1) != self.header.column_major

    def edge_blocks(self, size: int, *, preferred: int = 0) -> Iterator[EdgeBlock]:
        """The edges in order, at most ``size`` at a time."""
        total = self.num_edges(preferred)
        for start, stop in ranges(total, min(size, _BLOCK_BYTES // self.dtype.itemsize)):
            if self.ends_one_by_one(preferred):
                pairs = self._values(2 * start, 2 * (stop - start)).reshape(-1, 2).astype(np.int64)
                yield EdgeBlock(np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1]))
            else:
                ends = (self._values(offset + start, stop - start) for offset in (0, total))
                first, second = (ids.astype(np.int64) for ids in ends)
                yield EdgeBlock(first, second)

    def _axis_of_ends(self, preferred: int) -> int:
        axis = preferred if len(self.shape) == 2 and self.shape[preferred] == 2 else 1 - preferred
        if len(self.shape) != 2 or self.shape[axis] != 2 or self.dtype.kind not in "iu":
            wanted = "[2, edges]" if preferred == 0 else "[edges, 2]"
            raise SourceError(f"{self.name} is {self.dtype} {list(self.shape)}, not node ids {wanted}")
        return axis

    def _check_rows(self) -> None:
        if self.header.column_major and min(self.shape) > 1:
            raise SourceError(f"{self.name} lies column by column; write it again with numpy.ascontiguousarray")

    def _seek(self, stream: IO[bytes], first: int) -> None:
        """Go to the value ``first``."""
        if self.seekable:
            stream.seek(self.header.bytes + first * self.dtype.itemsize)
        else:  # zipfile gives up comparing checksums where a member is sought in
            assert not first, "members are read from the first value on"
            read_exactly(stream, self.header.bytes, self.name)

    def _values(self, first: int, count: int) -> AnyArray:
        with self._blob.open() as stream:
            self._seek(stream, first)
            return read_values(stream, count, self.dtype, self.name)


def edges_between(sources: NpyArray, targets: NpyArray, size: int) -> Iterator[EdgeBlock]:
    """Edges from the ids in one array to those in the other, at most ``size`` at a time."""
    for first, second in zip(sources.values(size), targets.values(size), strict=True):
        yield EdgeBlock(first.astype(np.int64), second.astype(np.int64))


def unpacking(source: Source, edges: NpyArray, features: NpyArray | None = None) -> Source:
    """``source`` with the ``edges``, which its ``prepare`` puts on the disk, and their ``features`` [E, F]."""
    num_edges = edges.num_edges()
    if features is not None and (len(features.shape) != 2 or features.shape[0] != num_edges or not features.shape[1]):
        raise SourceError(f"{features.name} has the shape {list(features.shape)}, not [{num_edges} edges, features]")
    source = replace(source, num_edge_features=features.shape[1] if features is not None else 0)

    def prepare(folder: Path, listener: Listener) -> Source:
        paths = tuple(folder / name for name in _ROW_FILES)
        if any(not path.exists() or path.stat().st_size != num_edges * _ID.itemsize for path in paths):
            _write_ids(edges, paths, source.num_nodes, listener)
        sources, targets = (NpyArray(path, raw=((num_edges,), _ID)) for path in paths)

        def unpacked(size: int) -> Iterator[EdgeBlock]:
            edges = edges_between(sources, targets, size)
            if features is None:
                return edges
            return with_data(edges, features=features.row_blocks(size), name=features.name)

        return replace(source, edges=unpacked)

    return replace(source, prepare=prepare, prepare_bytes=2 * num_edges * _ID.itemsize)


def _write_ids(edges: NpyArray, paths: tuple[Path, ...], nodes: int, listener: Listener) -> None:
    """The sources and the targets of ``edges``, each id checked, to the files ``paths``."""
    total = edges.num_edges()
    done = 0
    partial = [path.with_name(path.name + ".partial") for path in paths]
    prefetching = prefetched(edges.values(_BLOCK_BYTES // edges.dtype.itemsize))
    with ExitStack() as stack:
        sources, targets = (stack.enter_context(path.open("wb")) for path in partial)
        advance = stack.enter_context(reported(listener, "unpacking edges", 2 * total, "ids"))
        for values in stack.enter_context(prefetching):
            _check_ids(values, nodes, edges.name)
            ids = values.astype(_ID)
            if edges.ends_one_by_one():
                assert len(ids) % 2 == 0, "a block is an even number of ids, and so are all"
                sources.write(np.ascontiguousarray(ids[0::2]).data)
                targets.write(np.ascontiguousarray(ids[1::2]).data)
            else:
                first = min(max(0, total - done), len(ids))
                sources.write(ids[:first].data)
                targets.write(ids[first:].data)
            done += len(ids)
            advance(done)
    for written, path in zip(partial, paths, strict=True):
        flush(written)
        written.rename(path)


def _check_ids(ids: AnyArray, nodes: int, name: str) -> None:
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= nodes):
        bad = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        raise SourceError(f"{name}: an edge at node {bad} leaves the graph: its nodes are 0 to {nodes - 1}")
