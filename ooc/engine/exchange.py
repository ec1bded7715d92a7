# SPDX-License-Identifier: Apache-2.0
"""Communication between several processes that train one full graph.

Each process computes a share of the rows, a range of panels (``ooc.stages.panels``). Before it pulls a matrix, or a
slab of its columns, it receives the rows that edges into its own rows come from (its halo), or all rows. The sum of a
row then runs over its edges as in one process. A separate thread sends while others compute: the rows of a matrix part
by part as these are computed, and a slab while the one before it is pulled.

Alternatively slabs are sharded: each process pulls its own slab for all rows, and receives what others have pulled of
theirs. A device with its own memory sends rows directly to another device, or through host memory, some at a time: a
side stream packs the rows to send and unpacks those received. Sums over rows are exchanged panel by panel and added in
one order. What tiles scatter to any process's rows is added by one process after another, in the order of the tiles.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import accumulate, pairwise
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ooc.plan.layout.grid import Grid, align_up
from ooc.plan.workload import EdgesKey, Share
from ooc.prefetch.device import Device, Rows, SideStream
from ooc.prefetch.engine import Event
from ooc.ranks import Ranks
from ooc.storage.checksums import combined
from ooc.threads import Threads

_MOST_HALO_SHARE = 0.8
"""A share of all rows: where more rows than this are in halos, all rows are sent, without being packed."""
_AT_ONCE_BYTES = 4 << 20
"""Bytes of rows that are packed and sent at a time, and as many received."""
_INDEX_BYTES = 2 * torch.int64.itemsize
"""Bytes of a packed row's numbers while it is sent."""
_PURSUED_DIVISIONS = 16
"""Divisions of the first panels among the first processes that are pursued. In 60 random cases of 16 panels and 3
weights, 4 sufficed for the best one."""


_Division = tuple[tuple[float, ...], float, list[int]]
"""A division of the first panels among the first processes: the maximum of each weight, the sum of squares of all, and
where shares begin."""


def divide_rows(weights: Sequence[Sequence[float]], panel_rows: int, rows: int, parts: Sequence[float]) -> list[range]:
    """Return adjacent ranges of rows, in whole panels, for as many processes as there are ``parts``, at least a panel
    each.

    Each of ``weights`` has a number for every panel, the cost of some work after which all processes wait for one
    another. A process should get its part of the sum of ``parts`` of each weight. Minimised is the total over weights
    of the largest cost relative to a process's part. With several ``weights``, only the most promising divisions of the
    first panels are pursued. With fewer panels than processes, the last processes get none.
    """
    panels = len(weights[0])
    if panels < len(parts):
        return divide_rows(weights, panel_rows, rows, parts[:panels]) + [range(rows, rows)] * (len(parts) - panels)
    before = [[0.0, *accumulate(some)] for some in weights]
    found: dict[int, list[_Division]] = {0: [((0.0,) * len(before), 0.0, [0])]}
    for number, part in enumerate(parts, start=1):
        last, others = len(weights[0]) - (len(parts) - number), sum(parts[number:])
        reached: dict[int, list[_Division]] = {}
        for stop in range(last, last + 1) if number == len(parts) else range(number, last + 1):
            tried: dict[tuple[float, ...], tuple[float, list[int]]] = {}
            for first, divisions in found.items():
                taken = [(sums[stop] - sums[first]) / part for sums in before] if first < stop else []
                for most, squares, bounds in divisions if taken else ():
                    so_far, way = tuple(map(max, most, taken)), (squares + sum(taken) ** 2, [*bounds, stop])
                    tried[so_far] = min(way, tried.get(so_far, way))
            left = [(sums[-1] - sums[stop]) / others if others else 0.0 for sums in before]
            best = nsmallest(_PURSUED_DIVISIONS, tried.items(), key=lambda one: (sum(map(max, one[0], left)), one[1]))
            reached[stop] = [(most, *way) for most, way in best]
        found = reached
    bounds = [min(rows, panel * panel_rows) for panel in found[len(weights[0])][0][2]]
    return [range(start, stop) for start, stop in pairwise(bounds)]


def wanted_rows(
    sources: Iterable[npt.NDArray[np.signedinteger]], shares: Sequence[range], own: range, rows: int
) -> list[Tensor]:
    """Return, for each process, which of its rows are among ``sources``, ascending; none of one's ``own``.

    IndexError for a source outside all rows.
    """
    is_wanted = np.zeros(rows, dtype=np.bool_)
    for found in sources:
        is_wanted[found] = True
    is_wanted[own.start : own.stop] = False
    kind = np.int32 if rows < 2**31 else np.int64
    inside = ((share.start, np.flatnonzero(is_wanted[share.start : share.stop])) for share in shares)
    return [torch.from_numpy((start + found).astype(kind)) for start, found in inside]


def joined_checksum(ranks: Ranks, own: int | None, nbytes: int) -> int | None:
    """Return the CRC-32C of all processes' bytes in order, of which this one has ``nbytes``; None where one is unknown.

    All processes have arrived here when it returns.
    """
    total = 0
    for checksum, size in ranks.gathered(torch.tensor([-1 if own is None else own, nbytes])):
        if checksum < 0:
            return None
        total = combined(total, int(checksum), int(size))
    return total


@dataclass(frozen=True, slots=True)
class HaloMemory:
    """The largest memory that one process holds to exchange halo rows.

    ``lists``: bytes of the lists for every direction; ``most``: rows between any two processes; ``wanted``: rows sent
    to one process.
    """

    lists: int = 0
    most: int = 0
    wanted: int = 0

    def __add__(self, other: "HaloMemory") -> "HaloMemory":
        """Combine two directions, which are not sent at the same time."""
        return HaloMemory(self.lists + other.lists, max(self.most, other.most), max(self.wanted, other.wanted))

    def nbytes(self, row_bytes: int, count: int) -> int:
        """Return the total, for rows of up to ``row_bytes`` among ``count`` processes."""
        sent = (count - 1) * (row_bytes + _INDEX_BYTES)
        return self.lists + 2 * min(self.most * sent, max(_AT_ONCE_BYTES, sent))


@dataclass(frozen=True, slots=True)
class Staging:
    """The memory through which a device's rows go to other processes.

    It is two pairs of buffers of ``nbytes``, one for receiving and one for sending, so that rows are packed while
    others are on their way. The buffers are on the device where it sends directly to others (``is_direct``), else on
    the host.
    """

    nbytes: int = 0
    is_direct: bool = False

    @classmethod
    def of_rows(cls, row_bytes: int, count: int, *, is_direct: bool) -> "Staging":
        """Return the memory for rows of up to ``row_bytes`` among ``count`` processes."""
        return cls(align_up(max(_AT_ONCE_BYTES, (count - 1) * (row_bytes + _INDEX_BYTES))), is_direct)

    @property
    def host_bytes(self) -> int:
        """Bytes of the host's memory."""
        return 0 if self.is_direct else 4 * self.nbytes

    @property
    def device_bytes(self) -> int:
        """Bytes of the device's memory, where rows are always packed before they are copied to the host in one
        piece."""
        return (4 if self.is_direct else 1) * self.nbytes


def _rows_at_once(row_bytes: int, count: int) -> int:
    """Return how many rows go to each of the other processes at a time."""
    return max(1, _AT_ONCE_BYTES // ((row_bytes + _INDEX_BYTES) * (count - 1)))


def halo_memory(counts_PP: Tensor, shares: Sequence[range], rows: int) -> HaloMemory | None:
    """Return the halos' memory; None where so many rows are wanted that all are sent.

    ``counts_PP`` [i, j]: how many rows of process j are wanted by process i.
    """
    if int(counts_PP.sum()) > _MOST_HALO_SHARE * sum(rows - len(share) for share in shares):
        return None
    given_P, wanted_P = counts_PP.sum(0), counts_PP.sum(1)  # the plan holds the wanted rows as well
    lists = int((given_P + 2 * wanted_P).max()) * (4 if rows < 2**31 else 8)
    return HaloMemory(lists, int(counts_PP.max()), int(wanted_P.max()))


def part_of(rows: range, part: range) -> range:
    """Return part number ``part.start`` of ``part.stop`` equal parts of ``rows``."""
    start, stop = (len(rows) * at // part.stop for at in (part.start, part.start + 1))
    return rows[start:stop]


def _within(rows: Tensor, bounds: range) -> Tensor:
    """Return those of the ascending ``rows`` that are within ``bounds``."""
    return rows[bisect_left(rows.numpy(), bounds.start) : bisect_left(rows.numpy(), bounds.stop)]


@dataclass(frozen=True, slots=True)
class Halo:
    """The rows that are sent for the pulls of one direction, ascending, by process.

    ``wanted``: that process's rows that this one needs; ``given``: this one's rows that it needs; ``most``: rows
    between any two processes.
    """

    wanted: list[Tensor]
    given: list[Tensor]
    most: int

    def of_parts(self, parts: Sequence[range], rank: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return the given rows in this process's (``rank``) part, and the wanted rows in the other processes'
        parts."""
        given = [_within(rows, parts[rank]) for rows in self.given]
        return given, [_within(rows, part) for rows, part in zip(self.wanted, parts, strict=True)]


class Shift(NamedTuple):
    """One step of an exchange in which every process sends to the process ``by`` numbers after it.

    ``sent`` goes there, and ``received`` is filled by the process as many numbers before. No process sends more than
    ``most`` rows of ``row_bytes``.
    """

    by: int
    received: Tensor
    sent: Tensor
    most: int
    row_bytes: int


class Exchange:
    """The communication of one training's processes while programs run.

    ``shares``: by node type, the rows of each process; ``staging``: used where a device computes.
    """

    def __init__(self, ranks: Ranks, shares: Mapping[str, Sequence[range]]) -> None:
        self.ranks, self._shares = ranks, shares
        self.staging = Staging()
        self._device: Device | None = None
        self._side: SideStream | None = None
        self._pairs = torch.empty(0, dtype=torch.uint8)
        self.share = Share(ranks.rank, shares)
        """The share of this process."""
        self._beside = self._between = replace(ranks, group=ranks.beside)
        self._sender: Threads | None = None
        self._halos: dict[EdgesKey, Halo] = {}
        self._moments: dict[str, list[Event]] = {}
        """By program: on a device, the moments when it began, began to wait for others, went on, …, and ended."""
        self._running: list[Event] = []
        self.received_bytes = 0
        self.waited_s = 0.0
        """Seconds spent waiting for rows and sums of other processes."""

    def find_halo(
        self, direction: EdgesKey, sources: Iterable[npt.NDArray[np.signedinteger]], space: str
    ) -> HaloMemory:
        """Decide which rows are sent for pulls of ``direction``: the halo if it is much smaller than all rows.

        ``sources`` are those of all edges into this process's rows, a few at a time, nodes of type ``space``. Returns
        the memory this takes. Holds a byte per row meanwhile.
        """
        ranks, shares = self.ranks, self._shares[space]
        rows = shares[-1].stop
        wanted = ranks.in_all(lambda: wanted_rows(sources, shares, shares[ranks.rank], rows))
        counts_PP = torch.stack([*ranks.gathered(torch.tensor([len(one) for one in wanted]))])
        memory = halo_memory(counts_PP, shares, rows)
        if memory is None:
            return HaloMemory()
        given_P = counts_PP[:, ranks.rank].tolist()
        given = torch.empty(sum(given_P), dtype=wanted[0].dtype)
        ranks.all_to_all(given, torch.cat(wanted), given_P, [len(one) for one in wanted])
        self._halos[direction] = Halo(wanted, [*torch.split(given, given_P)], memory.most)
        return memory

    def halo_rows(self, direction: EdgesKey) -> Any:
        """Return the rows of other processes that are sent for pulls of ``direction``, ascending; None: all."""
        halo = self._halos.get(direction)
        return None if halo is None else torch.cat(halo.wanted).numpy()

    def compute_on(self, device: Device, *staging: Tensor) -> None:
        """From now on matrices are on the ``device``; rows go directly, or through ``staging``, pinned host memory."""
        self._device, self._side = device, device.side(self.staging.device_bytes)
        if self.staging.is_direct:
            self._between = self.ranks.directly
        self._pairs = (staging or [self._side.memory])[0].view(2, 2, self.staging.nbytes)

    @contextmanager
    def during(self, program: str) -> Iterator[None]:
        """Within this context, a program runs, whose times are recorded."""
        self._running = self._moments[program] = []
        self._note()
        yield
        self._note()
        self._running = []

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Within this context, this process waits for others; the time is added up."""
        started = perf_counter()
        self._note()
        yield
        self._note()
        self.waited_s += perf_counter() - started

    def _note(self) -> None:
        if self._device is not None:
            self._running.append(self._device.record(timed=True))

    def device_s(self, program: str) -> float:
        """Return how long the last run of a program took on a device, without waiting for other processes."""
        moments = self._moments[program]
        moments[-1].wait()
        return sum(after.seconds_since(before) for before, after in zip(moments[::2], moments[1::2], strict=True))

    @property
    def parts(self) -> list[float]:
        """Each process's share of all rows, as a fraction."""
        by_rank = [sum(map(len, shares)) for shares in zip(*self._shares.values(), strict=True)]
        return [rows / sum(by_rank) for rows in by_rank]

    def have_all(self, values: Tensor, space: str, offsets: npt.NDArray[np.signedinteger] | None = None) -> None:
        """Fill in the values of other processes' rows, in an array outside of programs.

        Where a row has several values, those of each begin at ``offsets`` [N + 1].
        """
        bounds = [(share.start, share.stop) for share in self._shares[space]]
        if offsets is not None:
            bounds = [(int(offsets[start]), int(offsets[stop])) for start, stop in bounds]
        with self._waiting():
            self.ranks.broadcast_parts([values[start:stop].view(torch.uint8) for start, stop in bounds])

    def begin(
        self, matrix_NC: Tensor, space: str, direction: EdgesKey | None = None, part: range = range(1)
    ) -> "Future[Event | None]":
        """Begin to receive the rows of other processes that pulls of ``direction`` gather (None: all rows); see
        ``wait``.

        The matrix has rows of nodes of type ``space``, of which every process has its own. ``part``: the number (its
        start) of the part to send now, of so many (its stop) equal parts of every process's rows. All processes must
        begin the same exchanges in the same order.
        """
        halo = None if direction is None else self._halos.get(direction)
        is_on_device = self._device is not None and matrix_NC.device.type != "cpu"
        written = self._device.record() if self._device is not None and is_on_device else None
        return self._on_thread(self._send, written, matrix_NC, space, halo, part)

    def begin_shifts(self, shifts: Sequence[Shift]) -> "Future[Event | None]":
        """Begin several shifts, one after another, as ``begin`` does; see ``wait``."""
        return self._on_thread(self._shift, None if self._device is None else self._device.record(), shifts)

    @torch.no_grad()
    def _shift(self, written: Event | None, shifts: Sequence[Shift]) -> Event | None:
        rank, count = self.ranks.rank, self.ranks.count
        for by, received, sent, most, row_bytes in shifts:
            source, target = (rank - by) % count, (rank + by) % count
            if written is not None:
                given, wanted = ([Rows(some[:0])] * count for some in (sent, received))
                given[target], wanted[source] = Rows(sent), Rows(received)
                written = self._staged(given, wanted, most, row_bytes, written)
                continue
            memory, packed = (some.view(-1).view(torch.uint8) for some in (received, sent.contiguous()))
            self._beside.pass_on(memory, packed, source, target)
            self.received_bytes += received.nbytes
        return written

    def _on_thread(self, send: "Callable[..., Event | None]", *what: Any) -> "Future[Event | None]":
        if self._sender is None:
            self._sender = Threads(1, "exchange")
        return self._sender.submit(send, *what)

    def wait(self, *begun: "Future[Event | None]") -> None:
        """Wait until exchanges that were begun are complete; on a device, for what it computes from here on."""
        with self._waiting():
            for one in begun:
                assert self._sender is not None
                there = self._sender.result(one)
                if there is not None and self._device is not None:
                    self._device.hold(there)

    @torch.no_grad()
    def _send(
        self, written: Event | None, matrix_NC: Tensor, space: str, halo: Halo | None, part: range
    ) -> Event | None:
        parts = [part_of(range(len(matrix_NC))[share.start : share.stop], part) for share in self._shares[space]]
        if written is not None:
            return self._staged_rows(matrix_NC, halo, parts, written)
        if halo is not None:
            self._some_rows(matrix_NC, halo, parts)
            return None
        rows = [matrix_NC[share.start : share.stop].view(torch.uint8) for share in parts]
        self._beside.broadcast_parts(rows)
        self.received_bytes += sum(some.nbytes for some in rows) - rows[self.ranks.rank].nbytes
        return None

    def _some_rows(self, matrix_NC: Tensor, halo: Halo, parts: Sequence[range]) -> None:
        """Exchange the halo's rows, of every process those in its entry of ``parts``, about ``_AT_ONCE_BYTES`` at a
        time."""
        at_once = _rows_at_once(matrix_NC[:1].nbytes, self.ranks.count)
        of_part_given, of_part_wanted = halo.of_parts(parts, self.ranks.rank)
        for first in range(0, min(halo.most, max(map(len, parts))), at_once):
            given, wanted = (
                [rows[first : first + at_once] for rows in lists] for lists in (of_part_given, of_part_wanted)
            )
            sent = matrix_NC.index_select(0, torch.cat(given))
            received = matrix_NC.new_empty(sum(map(len, wanted)), matrix_NC.shape[1])
            self._beside.all_to_all(received, sent, [*map(len, wanted)], [*map(len, given)])
            matrix_NC.index_copy_(0, torch.cat(wanted).long(), received)
            self.received_bytes += received.nbytes

    def _staged_rows(self, matrix_NC: Tensor, halo: Halo | None, parts: Sequence[range], written: Event) -> Event:
        """Exchange the halo's rows or all rows of the ``parts``, of a device's matrix; return the event of their
        arrival."""
        rank, row_bytes = self.ranks.rank, matrix_NC.shape[1] * matrix_NC.itemsize
        most = max(map(len, parts))
        if halo is not None:
            given, wanted = ([Rows(matrix_NC, rows) for rows in lists] for lists in halo.of_parts(parts, rank))
            return self._staged(given, wanted, min(halo.most, most), row_bytes, written)
        wanted = [Rows(matrix_NC[part.start : part.stop]) for part in parts]
        given = [wanted[rank]] * len(parts)
        given[rank] = wanted[rank] = Rows(matrix_NC[:0])
        return self._staged(given, wanted, most, row_bytes, written)

    def _staged(
        self, given: Sequence[Rows], wanted: Sequence[Rows], most: int, row_bytes: int, written: Event
    ) -> Event:
        """Send each process the device's rows that are ``given`` to it, and receive those ``wanted`` from it.

        They go some at a time, at most ``most`` rows of ``row_bytes`` per process. While some are on their way, the
        next ones are packed and the ones before unpacked. Returns the event of their arrival.
        """
        side, at_once, there = self._side, _rows_at_once(row_bytes, self.ranks.count), written
        under_way: list[tuple[Any, Sequence[Rows], Tensor]] = []
        assert side is not None

        def put_first() -> Event:
            work, rows, received = under_way.pop(0)
            self._between.wait(work)
            self.received_bytes += received.nbytes
            return side.put(rows, received)

        with side.current():
            for number, first in enumerate(range(0, most, at_once)):
                some_given, some_wanted = ([rows.some(first, at_once) for rows in each] for each in (given, wanted))
                sizes = [[rows.nbytes for rows in each] for each in (some_wanted, some_given)]
                pair = self._pairs[number % 2]
                received, sent = (buffer[: sum(nbytes)] for buffer, nbytes in zip(pair, sizes, strict=True))
                side.take(sent, some_given, written).wait()  # by then this pair's earlier rows have been sent
                under_way.append((self._between.begin_all_to_all(received, sent, *sizes), some_wanted, received))
                if number:
                    there = put_first()
            return put_first() if under_way else there

    def abandon(self) -> None:
        """Tell the others that this process gives up; return when nothing is being sent."""
        self.ranks.failed()
        self.close()

    def close(self) -> None:
        """End the thread; a new one is started when needed."""
        if self._sender is not None:
            self._sender.shutdown(cancel_futures=True)
            self._sender = None

    def gathered_rows(
        self, own: Iterator[Tensor], grid: Grid, dtype: torch.dtype, space: str, to: int
    ) -> Iterator[Tensor]:
        """Yield the rows of a matrix, block by block, on process ``to``; on the others nothing.

        ``own`` are the blocks that each process has. All processes must iterate to the end.
        """
        ranks = self.ranks
        for rank, share in enumerate(self._shares[space]):
            for rows in (grid.part(number, share) for number in grid.blocks_with(share)):
                block = next(own) if rank == ranks.rank else torch.empty(len(rows), grid.columns, dtype=dtype)
                if rank != to:
                    ranks.send_between(block.view(torch.uint8), rank, to)
                if ranks.rank == to:
                    yield block

    def of_all(self, own: float) -> list[float]:
        """Return every process's number."""
        return [float(one) for one in self.ranks.gathered(torch.tensor([own], dtype=torch.float64))]

    def panels(self, found: Sequence[Any], reverse: bool) -> Iterator[Any]:
        """Yield what every process has ``found`` for its panels, in the order of the rows."""
        ranks = self.ranks
        place = torch.device("cpu") if self._device is None else self._device.place
        with self._waiting():
            counts = [int(count) for count in ranks.gathered(torch.tensor([len(found)]))]
        for rank in reversed(range(ranks.count)) if reverse else range(ranks.count):
            for number in range(counts[rank]):
                yield ranks.broadcast_object(found[number] if rank == ranks.rank else None, rank, place)

    def in_turn(self, sums_NC: Tensor) -> Callable[[], None]:
        """Wait until all processes before this one have added to a matrix, and receive their sums.

        Returns a function that passes the sums on, and then waits for the final ones.
        """
        ranks, last = self.ranks, self.ranks.count - 1
        at_once = len(sums_NC) if self._device is None else _rows_at_once(sums_NC[:1].nbytes, ranks.count)
        pieces = torch.split(sums_NC.view(torch.uint8), at_once)

        def hand_to(rank: int) -> None:
            for piece in pieces:
                ranks.send_between(piece, rank - 1, rank)

        with self._waiting():
            for rank in range(ranks.rank):
                hand_to(rank + 1)

        def hand_on() -> None:
            with self._waiting():
                for rank in range(ranks.rank, last):
                    hand_to(rank + 1)
                for piece in pieces:
                    ranks.broadcast(piece, last)

        self.received_bytes += sums_NC.nbytes * ((ranks.rank > 0) + (ranks.rank < last))
        return hand_on
