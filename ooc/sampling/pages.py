# SPDX-License-Identifier: Apache-2.0
"""Rows of one array of a store, copied from memory or from pages of 4 KiB that an engine reads.

What later batches need of an array is known once they are sampled. Pages are therefore kept by L. A. Belady's rule with
bypass (IBM Systems Journal 5(2), 1966): after each batch the pages whose next use is nearest, cached or just read. Of
pages that no known batch needs again, the cached ones stay. Within a batch a page is read once.

The store has checksums of chunks, which are many pages. Therefore all of an array is read once at first: chunks are
compared with the store's checksums, and a sum of each page is kept, to compare the page with whenever it is read again.

n rows asked for, P pages of a batch, C columns.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt

from ooc.events import Listener, ignore, reported
from ooc.prefetch.arena import Arena, Bytes
from ooc.prefetch.engine import PAGE_BYTES, ChunkFile, Engine, Span, Ticket
from ooc.sampling.runs import expand_ranges
from ooc.storage.array import AnyArray, Array
from ooc.storage.sparse_array import INDEX_DTYPE, Entries, SparseArray

Places = npt.NDArray[np.integer[Any]]
MOST_BATCHES = 1000
"""The most batches that may be known ahead."""
_NEVER, _FREE = MOST_BATCHES, MOST_BATCHES + 1
"""The next use of a page that no known batch needs, and of a frame that holds no page."""
_STAGED = 2
"""Windows of pages being read at once, beside the one that rows are copied from."""
SUM_BYTES = 4
_PER_PAGE_BYTES = 1 + 4 + 2 * 2 + SUM_BYTES
"""Bytes for every page of an array, cached or not: wanted or not, its frame, its next use (twice), a sum."""
_PICKED_ENTRY_BYTES = 32
_PER_FRAME_BYTES = 8 + 2 + 17
"""Bytes for every cached page: its number, its next use, and the search for free frames."""


Sums = dict[str, npt.NDArray[np.uint32]]
"""By array, the sum of each page's 32-bit words."""


class Pages:
    """The chunk files of ``array`` as one sequence of ``count`` pages; ``sums``, shared with others, are filled by
    `learn`."""

    def __init__(self, array: Array, engine: Engine, sums: Sums | None = None, listener: Listener = ignore) -> None:
        self.array = array
        self.count = pages_of(array)
        self._sums, self._listener = {} if sums is None else sums, listener
        self._per_chunk = array.chunk_bytes // PAGE_BYTES
        self._engine = engine
        self._files = [ChunkFile(array.chunk_path(chunk)) for chunk in range(array.num_chunks)]

    def requests(self, pages: Places, bounds: AnyArray) -> list[Places]:
        """Return, for each part of the ascending ``pages`` between ``bounds`` [parts + 1], its requests [r, 3].

        A request is (chunk, offset, bytes); adjacent pages are one request.
        """
        apart = (np.diff(pages) != 1) | (pages[1:] % self._per_chunk == 0)
        begins = np.union1d(np.flatnonzero(apart) + 1, bounds[:-1])
        begins = begins[begins < len(pages)]
        chunks, within = np.divmod(pages[begins].astype(np.int64), self._per_chunk)
        sizes = np.diff(begins, append=len(pages))
        found = np.stack([chunks, within * PAGE_BYTES, sizes * PAGE_BYTES], axis=1)
        return np.split(found, np.searchsorted(begins, bounds[1:-1]))

    def read(self, requests: Iterable[Sequence[int]], into: Bytes) -> Ticket:
        """Read each request (chunk, offset, bytes) into ``into``, one after the other."""
        files, name = self._files, self.array.name
        return self._engine.read([Span(files[chunk], offset, nbytes, name) for chunk, offset, nbytes in requests], into)

    def read_range(self, first: int, stop: int, into: Bytes) -> Ticket:
        """Read the pages ``first:stop`` into ``into``."""
        per_chunk = self._per_chunk
        cuts = pairwise([first, *range(first - first % per_chunk + per_chunk, stop, per_chunk), stop])
        requests = [(at // per_chunk, at % per_chunk * PAGE_BYTES, (end - at) * PAGE_BYTES) for at, end in cuts]
        return self.read(requests, into)

    def learn(self, buffers: Sequence[Bytes]) -> None:
        """Read every page once, through ``buffers``, and keep its sum; raise StoreError where a chunk's checksum is
        wrong."""
        if self.array.name in self._sums or not self.array.has_checksums:
            return
        stored, sums = self.array.checksums(), np.empty(self.count, dtype=np.uint32)
        most, per_chunk = len(buffers[0]) // PAGE_BYTES, self._per_chunk
        parts = (
            range(first, min(first + most, chunk + per_chunk))
            for chunk in range(0, self.count, per_chunk)
            for first in range(chunk, chunk + per_chunk, most)
        )
        free, under_way, checksum = deque(buffers), deque[tuple[range, Bytes, Ticket]](), 0
        with reported(self._listener, f"checking {self.array.name}", self.count, "pages") as advance:
            try:
                while True:
                    while free and (part := next(parts, None)) is not None:
                        into = free.popleft()
                        ticket = self.read_range(part.start, part.stop, into[: len(part) * PAGE_BYTES])
                        under_way.append((part, into, ticket))
                    if not under_way:
                        break
                    part, into, ticket = under_way[0]
                    ticket.wait()
                    under_way.popleft()
                    memory, (chunk, within) = into[: len(part) * PAGE_BYTES], divmod(part.start, per_chunk)
                    checksum = google_crc32c.extend(checksum if within else 0, memory)
                    sums[part.start : part.stop] = _sums_of(memory)
                    if within + len(part) == per_chunk and checksum != stored[chunk]:
                        raise self.array.damaged(chunk)
                    free.append(into)
                    advance(part.stop)
            finally:
                for *_, ticket in under_way:
                    ticket.settle()
        self._sums[self.array.name] = sums

    def compare(self, pages: Places, memory: Bytes) -> None:
        """Raise StoreError where ``memory`` does not have the bytes that these ``pages`` had at first."""
        sums = self._sums.get(self.array.name)
        if sums is not None and (wrong := np.flatnonzero(sums[pages] != _sums_of(memory))).size:
            raise self.array.damaged(int(pages[wrong[0]]) // self._per_chunk)


class ResidentRows:
    """All rows of an array in memory, read once."""

    def __init__(self, pages: Pages) -> None:
        self.pages_read = pages.count
        array = pages.array
        memory: Bytes = np.empty(0, dtype=np.uint8)
        if pages.count:
            memory = Arena(pages.count * PAGE_BYTES).view(0, pages.count * PAGE_BYTES)
            pages.read_range(0, pages.count, memory).wait()
        if array.has_checksums:
            for chunk, stored in enumerate(array.checksums().tolist()):
                if google_crc32c.extend(0, memory[chunk * array.chunk_bytes :][: array.chunk_bytes]) != stored:
                    raise array.damaged(chunk)
        self._rows = memory.view(array.dtype).reshape(array.padded_rows, *array.shape[1:])

    def take(self, rows: AnyArray, uses: "Uses | None" = None) -> AnyArray:
        """Return the ``rows`` in that order, [n] or [n, C]."""
        return np.take(self._rows, rows, axis=0)


class SparseRows(ResidentRows):
    """The rows of a sparse matrix: its entries in memory, read once, and dense rows when they are taken."""

    def __init__(self, array: SparseArray) -> None:
        self.pages_read = 0
        self._columns = array.columns
        self._counts, self._columns_of, self._values = array.read_entries(0, array.shape[0])
        self._starts = np.cumsum(self._counts) - self._counts

    def take(self, rows: AnyArray, uses: "Uses | None" = None) -> AnyArray:
        """Return the ``rows`` in that order, dense, [n, C]."""
        counts = self._counts[rows]
        places = expand_ranges(self._starts[rows], counts)
        return Entries(counts, self._columns_of[places], self._values[places]).dense(self._columns)


@dataclass(frozen=True, slots=True)
class Uses:
    """The ``pages`` [P] that a batch needs, ascending, and for each the place of the ``next`` known batch that needs
    it."""

    pages: Places
    next: npt.NDArray[np.int16]


@dataclass(frozen=True, slots=True)
class Foresight:
    """The uses of several batches, and the ``first`` use of every page of the array."""

    uses: list[Uses]
    first: npt.NDArray[np.int16]


class _Window(NamedTuple):
    """The pages ``low:high`` of a batch, as far as memory to copy from allows, and the rows ``start:stop`` inside them.

    Pages from ``new`` on were in no window before. Rows count in ascending order.
    """

    low: int
    new: int
    high: int
    start: int
    stop: int


class PagedRows:
    """Rows of an array of which ``cache_pages`` are cached; rows are copied from ``work_pages`` at a time.

    Raises StoreError where the SSD returns other bytes than the store's. One thread may call ``needs`` and ``foresee``
    while another one calls ``begin`` and ``take``.
    """

    def __init__(self, pages: Pages, *, cache_pages: int, work_pages: int) -> None:
        self.pages_read = 0
        self._pages = pages
        array = pages.array
        self._row_bytes, self._work_pages = array.row_bytes, work_pages
        self._pages_a_row = most_pages_of_row(array)
        arena = Arena((cache_pages + (1 + _STAGED) * work_pages) * PAGE_BYTES)

        def frames(first: int, count: int) -> Bytes:
            return arena.view(first * PAGE_BYTES, count * PAGE_BYTES).reshape(count, PAGE_BYTES)

        self._cache = frames(0, cache_pages)
        self._work = frames(cache_pages, work_pages)
        self._staging = [frames(cache_pages + (1 + k) * work_pages, work_pages) for k in range(_STAGED)]
        pages.learn([frames.reshape(-1) for frames in self._staging])
        items = self._work.reshape(-1).view(array.dtype)
        strides = (array.itemsize,) * len(array.shape)
        overlapping = (len(items) - array.columns + 1, *array.shape[1:])
        self._rows_at = np.lib.stride_tricks.as_strided(items, overlapping, strides, writeable=False)
        self._wanted = np.zeros(pages.count, dtype=np.bool_)
        self._frame_of = np.full(pages.count, -1, dtype=np.int32)
        self._page_in = np.full(cache_pages, -1, dtype=np.int64)
        self._next_use = np.full(cache_pages, _FREE, dtype=np.int16)

    def needs(self, rows: AnyArray) -> Places:
        """Return the pages that contain these rows [P], ascending."""
        wanted, at_bytes = self._wanted, rows.astype(np.int64) * self._row_bytes
        first, last = at_bytes // PAGE_BYTES, (at_bytes + self._row_bytes - 1) // PAGE_BYTES
        for further in range(self._pages_a_row):
            wanted[np.minimum(first + further, last)] = True
        pages = np.flatnonzero(wanted)
        wanted[pages] = False
        return pages.astype(np.int32)

    def foresee(self, batches: Sequence[Places], later: Sequence[Places] = ()) -> Foresight:
        """Return the uses of consecutive batches that need these pages; ``later`` batches follow them."""
        following = np.full(self._pages.count, _NEVER, dtype=np.int16)
        uses = []
        for number, pages in reversed([*enumerate([*batches, *later])]):
            uses.append(Uses(pages, following[pages]))
            following[pages] = number
        return Foresight(uses[::-1][: len(batches)], following)

    def begin(self, foresight: Foresight) -> None:
        """Start the batches of ``foresight``: set each cached page's next use to its first use there."""
        held = np.flatnonzero(self._page_in >= 0)
        self._next_use[held] = foresight.first[self._page_in[held]]

    def take(self, rows: AnyArray, uses: Uses | None = None) -> AnyArray:
        """Return the ``rows`` in that order, [n] or [n, C]; ``uses``: the batch's uses in the foresight."""
        array = self._pages.array
        if uses is None:
            uses = self.foresee([self.needs(rows)]).uses[0]
        out = np.empty((len(rows), *array.shape[1:]), dtype=array.dtype)
        order = np.argsort(rows, kind="stable")
        at_bytes = rows[order].astype(np.int64) * self._row_bytes
        first = last = np.searchsorted(uses.pages, at_bytes // PAGE_BYTES)
        if self._pages_a_row > 1:
            last = np.searchsorted(uses.pages, (at_bytes + self._row_bytes - 1) // PAGE_BYTES)
        at_bytes %= PAGE_BYTES
        at_bytes += first * PAGE_BYTES
        at_items = at_bytes // array.itemsize
        for window in self._windows(uses, first, last):
            picked = slice(window.start, window.stop)
            out[order[picked]] = self._rows_at[at_items[picked] - window.low * PAGE_BYTES // array.itemsize]
        return out

    # ---- pages of a batch --------------------------------------------------------------------------------------

    def _windows_over(self, count: int, first: Places, last: Places) -> Iterator[_Window]:
        """Yield windows over ``count`` pages such that each row lies within one of them."""
        low = new = start = 0
        while start < len(last):
            high = min(count, low + self._work_pages)
            stop = int(last.searchsorted(high))
            yield _Window(low, new, high, start, stop)
            start, new = stop, high
            low = int(first[stop]) if stop < len(first) else high

    def _windows(self, uses: Uses, first: Places, last: Places) -> Iterator[_Window]:
        """Yield each window of a batch once its pages are adjacent in ``_work``; meanwhile the next one's are read.

        Pages come from the window before, from the disk, or from the cache. A page that should be cached when no frame
        is free yet is not cached. That is rare, as frames become free throughout a batch.
        """
        pages, work, cache = uses.pages, self._work, self._cache
        frames = self._frame_of[pages]
        present, absent = np.flatnonzero(frames >= 0), np.flatnonzero(frames < 0)
        kept, free, given_up = self._choose_cached(uses, frames, present, absent)
        missing, frames = pages[absent], frames[present]
        windows = list(self._windows_over(len(pages), first, last))
        ends = np.array([0, *(window.high for window in windows)])
        reading = absent.searchsorted(ends)
        requests = self._pages.requests(missing, reading)
        keeping, cached = _slices_between(kept, reading), _slices_between(present, ends)
        ready = (len(free) - len(given_up) + given_up.searchsorted(ends[1:])).tolist()
        self.pages_read += len(missing)

        def send(number: int) -> Ticket | None:
            if not len(requests[number]):
                return None
            return self._pages.read(requests[number].tolist(), self._staging[number % _STAGED].reshape(-1))

        tickets = [send(0)] if windows else []
        stayed: list[Places] = []
        used = before = 0
        try:
            for number, (window, part) in enumerate(zip(windows, _slices_between(absent, ends), strict=True)):
                if number + 1 < len(windows):
                    tickets.append(send(number + 1))
                staged = self._staging[number % _STAGED][: part.stop - part.start]
                ticket = tickets[number]
                if ticket is not None:
                    ticket.wait()
                    self._pages.compare(missing[part], staged)
                carried = window.new - window.low
                work[:carried] = work[window.low - before : window.new - before]
                work[absent[part] - window.low] = staged
                work[present[cached[number]] - window.low] = cache[frames[cached[number]]]
                before = window.low
                yield window
                staying = kept[keeping[number]][: ready[number] - used]
                cache[free[used : used + len(staying)]] = staged[staying - part.start]
                stayed.append(staying)
                used += len(staying)
        finally:
            for ticket in tickets:
                if ticket is not None:
                    ticket.settle()  # before that the memory must not be freed
        held, staying = free[:used], np.concatenate([kept[:0], *stayed])
        self._frame_of[missing[staying]] = held
        self._page_in[held] = missing[staying]
        self._next_use[held] = uses.next[absent[staying]]

    def _choose_cached(
        self, uses: Uses, frames: AnyArray, present: Places, absent: Places
    ) -> tuple[Places, Places, Places]:
        """Choose the pages to cache.

        Returns which of the ``absent`` pages to cache, by their places there; the free frames for them; and the places
        [P] of the pages in the last of these frames, which the batch must use first.
        """
        next_use, room = self._next_use, len(self._next_use)
        later = uses.next[absent]
        next_use[frames[present]] = uses.next[present]
        held = np.bincount(next_use, minlength=_FREE + 1)[:_FREE]
        total = np.cumsum(held + np.bincount(later, minlength=_FREE))
        limit = int(np.searchsorted(total, room, side="right"))  # pages used later than this have no room
        room_at_limit = room - (int(total[limit - 1]) if limit else 0)
        surplus, kept = (next_use > limit) | (next_use == _FREE), later < limit
        if limit < _FREE:
            surplus[np.flatnonzero(next_use == limit)[room_at_limit:]] = True
            kept[np.flatnonzero(later == limit)[: max(0, room_at_limit - int(held[limit]))]] = True
        given_up = present[surplus[frames[present]]]
        surplus[frames[given_up]] = False
        free = np.concatenate([np.flatnonzero(surplus), frames[given_up]])
        pages = self._page_in[free]
        self._frame_of[pages[pages >= 0]] = -1
        self._page_in[free] = -1
        next_use[free] = _FREE
        return np.flatnonzero(kept), free, given_up


Rows = ResidentRows | PagedRows


def _slices_between(places: Places, bounds: AnyArray) -> list[slice]:
    """Return where the ascending ``places`` lie between ``bounds`` [parts + 1]."""
    return [slice(*pair) for pair in pairwise(places.searchsorted(bounds).tolist())]


def pages_of(array: Array) -> int:
    """Return the number of pages of all chunk files; 0 for a sparse matrix, which is not read in pages."""
    return 0 if isinstance(array, SparseArray) else array.num_chunks * array.chunk_bytes // PAGE_BYTES


def _sums_of(memory: Bytes) -> npt.NDArray[np.uint32]:
    """Return a sum of each page's words, which any change of a single word changes."""
    sums: npt.NDArray[np.uint32] = memory.view(np.uint32).reshape(-1, PAGE_BYTES // 4).sum(axis=1, dtype=np.uint32)
    return sums


def most_pages_of_row(array: Array) -> int:
    """Return the largest number of pages that one row extends over."""
    return -(-array.row_bytes // PAGE_BYTES) + (PAGE_BYTES % array.row_bytes != 0)


def resident_bytes(array: Array) -> int:
    """Return the bytes that :class:`ResidentRows` takes; of a sparse matrix, including those while rows are copied."""
    if isinstance(array, SparseArray):
        return array.entries * (_PICKED_ENTRY_BYTES + INDEX_DTYPE.itemsize + array.itemsize) + 16 * array.shape[0]
    return pages_of(array) * PAGE_BYTES


def paged_bytes(array: Array, work_pages: int) -> int:
    """Return the bytes that :class:`PagedRows` takes beside its cache, each page of which takes :func:`frame_bytes`."""
    if isinstance(array, SparseArray):
        return resident_bytes(array)
    return pages_of(array) * _PER_PAGE_BYTES + (1 + _STAGED) * work_pages * PAGE_BYTES


def frame_bytes() -> int:
    """Return the bytes that one cached page takes."""
    return PAGE_BYTES + _PER_FRAME_BYTES
