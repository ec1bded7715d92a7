# SPDX-License-Identifier: Apache-2.0
"""npy arrays inside archives, read as they are inflated, each once.

An edge list [2, E] is the one that cannot be used as it comes: all sources lie before the first target, and
deflate cannot seek. So it is put on the disk first (``Source.prepare``), in two files of 32-bit ids, half its
size; whatever else is in the archive streams straight into the store.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ooc.conversion.ahead import ahead
from ooc.conversion.edge_values import with_data
from ooc.conversion.npy_stream import NpyHeader, read_header, row_blocks, value_blocks
from ooc.conversion.source import EdgeBlock, Source, ranges
from ooc.conversion.streams import Stream
from ooc.conversion.zip_members import Archive, Member
from ooc.errors import SourceError, SpillError
from ooc.events import Listener, TaskAdvanced, TaskFinished, TaskStarted
from ooc.storage.array import AnyArray, flush

_BLOCK_BYTES = 4 << 20
_ROW_FILES = ("sources.ids", "targets.ids")
_ID = np.dtype(np.uint32)  # A store has at most 2^32 nodes.


@dataclass(frozen=True)
class PackedArray:
    """A member of an archive and what its header says."""

    member: Member
    header: NpyHeader

    @classmethod
    def find(cls, archive: Archive, name: str, where: str) -> "PackedArray":
        """The array in the member ``name``.npy; SourceError, saying ``where``, if there is none."""
        member = archive.member(f"{name}.npy")
        if member is None:
            raise SourceError(f"{where} has no array {name}")
        return cls(member, read_header(member.open(), size=member.size, name=member.name))

    @property
    def name(self) -> str:
        """For messages."""
        return self.member.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.header.shape

    def matrix(self, wanted: str) -> tuple[int, int]:
        """Rows and columns; SourceError where it is no matrix with a row for each node, ``wanted``."""
        if len(self.shape) != 2 or not 0 < self.shape[0] <= 2**32 or self.shape[1] < 1:
            raise SourceError(f"{self.name} has the shape {list(self.shape)}, not {wanted}")
        return self.shape[0], self.shape[1]

    def num_edges(self) -> int:
        """E of an edge list [2, E]; SourceError for anything else."""
        if len(self.shape) != 2 or self.shape[0] != 2 or self.header.dtype.kind not in "iu":
            raise SourceError(f"{self.name} is {self.header.dtype} {list(self.shape)}, not node ids [2, edges]")
        return self.shape[1]

    def values(self, size: int) -> Iterator[AnyArray]:
        """All values in file order, at most ``size`` at a time."""
        return value_blocks(self._first_value(), self.header, size, self.name)

    def rows(self, size: int) -> Iterator[AnyArray]:
        """The rows of a matrix, at most ``size`` at a time."""
        row_bytes = max(1, self.shape[1] * self.header.dtype.itemsize)
        return row_blocks(self._first_value(), self.header, min(size, _BLOCK_BYTES // row_bytes), self.name)

    def _first_value(self) -> Stream:
        stream = self.member.open()
        read_header(stream, size=self.member.size, name=self.name)
        return stream


def unpacked_bytes(edges: PackedArray) -> int:
    """Disk that the ids of ``edges`` take."""
    return 2 * edges.num_edges() * _ID.itemsize


def unpacking(source: Source, edges: PackedArray, features: PackedArray | None = None) -> Source:
    """``source`` with the ``edges``, which its ``prepare`` puts on the disk, and their ``features`` [E, F]."""
    num_edges = edges.num_edges()
    if features is not None and (len(features.shape) != 2 or features.shape[0] != num_edges or not features.shape[1]):
        raise SourceError(f"{features.name} has the shape {list(features.shape)}, not [{num_edges} edges, features]")
    source = replace(source, num_edge_features=features.shape[1] if features is not None else 0)

    def unprepared(size: int) -> Iterator[EdgeBlock]:
        raise AssertionError("the edges are read after prepare")

    def prepare(folder: Path, listener: Listener) -> Source:
        paths = tuple(folder / name for name in _ROW_FILES)
        if any(not path.exists() or path.stat().st_size != num_edges * _ID.itemsize for path in paths):
            _write_ids(edges, paths, source.num_nodes, listener)
        unpacked = _reading(paths, num_edges)
        if features is None:
            return replace(source, edges=unpacked)
        return replace(
            source, edges=lambda size: with_data(unpacked(size), features=features.rows(size), name=features.name)
        )

    return replace(source, edges=unprepared, prepare=prepare, prepare_bytes=unpacked_bytes(edges))


def _write_ids(edges: PackedArray, paths: tuple[Path, ...], nodes: int, listener: Listener) -> None:
    """The sources and the targets of ``edges``, each id checked, to the files ``paths``."""
    total = edges.num_edges()
    task, done = "unpacking edges", 0
    partial = [path.with_name(path.name + ".partial") for path in paths]
    values_ahead = ahead(edges.values(_BLOCK_BYTES // edges.header.dtype.itemsize))
    listener(TaskStarted(task, 2 * total, "ids"))
    with partial[0].open("wb") as sources, partial[1].open("wb") as targets, values_ahead as blocks:
        for values in blocks:
            _check_ids(values, nodes, edges.name)
            ids = values.astype(_ID)
            if edges.header.column_major:  # Pairs: what was saved is the transpose of [E, 2].
                assert len(ids) % 2 == 0, "a block is an even number of ids, and so are all"
                sources.write(np.ascontiguousarray(ids[0::2]).data)
                targets.write(np.ascontiguousarray(ids[1::2]).data)
            else:
                first = min(max(0, total - done), len(ids))
                sources.write(ids[:first].data)
                targets.write(ids[first:].data)
            done += len(ids)
            listener(TaskAdvanced(task, done))
    for written, path in zip(partial, paths, strict=True):
        flush(written)
        written.rename(path)
    listener(TaskFinished(task))


def _check_ids(ids: AnyArray, nodes: int, name: str) -> None:
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= nodes):
        bad = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        raise SourceError(f"{name}: an edge at node {bad} leaves the graph: its nodes are 0 to {nodes - 1}")


def _reading(paths: tuple[Path, ...], num_edges: int) -> Callable[[int], Iterator[EdgeBlock]]:
    def edges(size: int) -> Iterator[EdgeBlock]:
        with paths[0].open("rb") as sources, paths[1].open("rb") as targets:
            for start, stop in ranges(num_edges, size):
                ends = [np.fromfile(file, dtype=_ID, count=stop - start) for file in (sources, targets)]
                if any(len(ids) != stop - start for ids in ends):
                    raise SpillError(f"{paths[0].parent}: the edges that were put there end before edge {stop}")
                first, second = (ids.astype(np.int64) for ids in ends)
                yield EdgeBlock(first, second)

    return edges
