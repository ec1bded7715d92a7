# SPDX-License-Identifier: Apache-2.0
"""Several processes that train one full graph: each computes a share of the rows, and they send each other what rows
of other shares need.

A share is a run of panels (``ooc.stages.panels``). Of whatever is gathered along edges, a matrix or a slab of its
columns, every process is sent the rows that edges into its own lead to (its halo), or all rows, before it pulls; a
row's sum then runs over its edges as it does in one process. They are sent by a thread of its own while others compute:
rows of a matrix part by part as these are there, and a slab while the one before it is pulled. Or slabs are sharded:
each pulls its own for the rows of all, and is sent what others have pulled of theirs. Of a device with memory of its
own rows go to that of others, or by way of the host's, some at a time: a side stream packs them and unpacks those of
others. Sums over rows are told panel by panel and added up in one order. What tiles scatter to rows of anybody is added
up by one process after the other, in the order of the tiles.
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

_WORTH_SORTING_OUT = 0.8
"""Of all rows: where more of them are wanted, all are sent, right from where they lie to where they go."""
_AT_ONCE_BYTES = 4 << 20
"""Of rows that are sent by lists, and as much of those that are received."""
_NUMBERS_BYTES = 2 * torch.int64.itemsize
"""Of a row in lists, while it is sent."""
_FOLLOWED = 16
"""Divisions of the first panels among the first processes. Of 60 drawn cases of 16 panels and 3 weights the best was
found with 4."""


_Division = tuple[tuple[float, ...], float, list[int]]
"""Of some panels among some processes: the most of each weight, the sum of squares of all, and where shares begin."""


def divide_rows(weights: Sequence[Sequence[float]], panel_rows: int, rows: int, parts: Sequence[float]) -> list[range]:
    """Rows for as many processes as there are ``parts``, whole panels one behind the other, at least one each. Of each
    of ``weights``, which has one of every panel and after which all wait for one another, each gets about its part of
    the sum of ``parts``, so that those with the most for their part together have as little as can be. With several
    ``weights`` that is searched among the most promising divisions of the first panels only. Of fewer panels than
    processes the last ones of these get none."""
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
            best = nsmallest(_FOLLOWED, tried.items(), key=lambda one: (sum(map(max, one[0], left)), one[1]))
            reached[stop] = [(most, *way) for most, way in best]
        found = reached
    bounds = [min(rows, panel * panel_rows) for panel in found[len(weights[0])][0][2]]
    return [range(start, stop) for start, stop in pairwise(bounds)]


def wanted_rows(
    sources: Iterable[npt.NDArray[np.signedinteger]], shares: Sequence[range], own: range, rows: int
) -> list[Tensor]:
    """By process: which of its rows are among ``sources``, ascending; none of one's ``own``. IndexError for what is no
    row."""
    is_wanted = np.zeros(rows, dtype=np.bool_)
    for found in sources:
        is_wanted[found] = True
    is_wanted[own.start : own.stop] = False
    kind = np.int32 if rows < 2**31 else np.int64
    inside = ((share.start, np.flatnonzero(is_wanted[share.start : share.stop])) for share in shares)
    return [torch.from_numpy((start + found).astype(kind)) for start, found in inside]


def joined_checksum(ranks: Ranks, own: int | None, nbytes: int) -> int | None:
    """The CRC-32C of what all processes have, one behind the other, of this one's ``nbytes``; None where one has
    none. All have come so far when it returns."""
    total = 0
    for checksum, size in ranks.gathered(torch.tensor([-1 if own is None else own, nbytes])):
        if checksum < 0:
            return None
        total = combined(total, int(checksum), int(size))
    return total


@dataclass(frozen=True, slots=True)
class HaloMemory:
    """What one process at most holds to be sent some rows alone: bytes of lists for every direction, and room for rows
    of up to ``row_bytes`` on their way, of which ``most`` go between any two of ``count`` processes, and ``wanted`` to
    one."""

    lists: int = 0
    most: int = 0
    wanted: int = 0

    def __add__(self, other: "HaloMemory") -> "HaloMemory":
        """Of two directions, which are not sent at once."""
        return HaloMemory(self.lists + other.lists, max(self.most, other.most), max(self.wanted, other.wanted))

    def nbytes(self, row_bytes: int, count: int) -> int:
        """All of it."""
        sent = (count - 1) * (row_bytes + _NUMBERS_BYTES)
        return self.lists + 2 * min(self.most * sent, max(_AT_ONCE_BYTES, sent))


@dataclass(frozen=True, slots=True)
class Staging:
    """The memory by way of which a device's rows go to other processes: two pairs of buffers of ``nbytes``, one for
    what is received and one for what is sent, so that some are packed while others are on the way. They are the
    device's where it sends to others directly (``is_direct``), else the host's."""

    nbytes: int = 0
    is_direct: bool = False

    @classmethod
    def of_rows(cls, row_bytes: int, count: int, *, is_direct: bool) -> "Staging":
        """For rows of up to ``row_bytes`` among ``count`` processes."""
        return cls(align_up(max(_AT_ONCE_BYTES, (count - 1) * (row_bytes + _NUMBERS_BYTES))), is_direct)

    @property
    def host_bytes(self) -> int:
        """Of the host's memory."""
        return 0 if self.is_direct else 4 * self.nbytes

    @property
    def device_bytes(self) -> int:
        """Of the device's, where rows are packed in any case, before they are copied to the host in one piece."""
        return (4 if self.is_direct else 1) * self.nbytes


def _at_once(row_bytes: int, count: int) -> int:
    """How many rows go to each of the other processes at a time."""
    return max(1, _AT_ONCE_BYTES // ((row_bytes + _NUMBERS_BYTES) * (count - 1)))


def halo_memory(counts_PP: Tensor, shares: Sequence[range], rows: int) -> HaloMemory | None:
    """[i, j]: how many rows of process j are wanted by i; None where these are so many that all are sent."""
    if int(counts_PP.sum()) > _WORTH_SORTING_OUT * sum(rows - len(share) for share in shares):
        return None
    given_P, wanted_P = counts_PP.sum(0), counts_PP.sum(1)  # what is wanted is known to the plan as well
    lists = int((given_P + 2 * wanted_P).max()) * (4 if rows < 2**31 else 8)
    return HaloMemory(lists, int(counts_PP.max()), int(wanted_P.max()))


def part_of(rows: range, part: range) -> range:
    """Of ``rows`` the ``part.start``-th of ``part.stop`` parts."""
    start, stop = (len(rows) * at // part.stop for at in (part.start, part.start + 1))
    return rows[start:stop]


def _within(rows: Tensor, bounds: range) -> Tensor:
    """Those of ascending ``rows`` that are within ``bounds``."""
    return rows[bisect_left(rows.numpy(), bounds.start) : bisect_left(rows.numpy(), bounds.stop)]


@dataclass(frozen=True, slots=True)
class Halo:
    """Rows that are sent for the pulls of one direction, ascending, by process: ``wanted`` of its rows by this one, and
    ``given`` of this one's to it. ``most``: between any two processes."""

    wanted: list[Tensor]
    given: list[Tensor]
    most: int

    def of_parts(self, parts: Sequence[range], rank: int) -> tuple[list[Tensor], list[Tensor]]:
        """Those given, of the part of process ``rank``, which this one is, and those wanted, of those of the others."""
        given = [_within(rows, parts[rank]) for rows in self.given]
        return given, [_within(rows, part) for rows, part in zip(self.wanted, parts, strict=True)]


class Shift(NamedTuple):
    """What some rows are sent in: those ``sent`` go to the process ``by`` numbers behind this one, and those of the one
    as many before it come to ``received``; of no process they are more than ``most`` rows of ``row_bytes``."""

    by: int
    received: Tensor
    sent: Tensor
    most: int
    row_bytes: int


class Exchange:
    """What the processes of one training tell each other while a program runs; ``shares``: by type of nodes the rows
    of each; ``staging``: where a device computes."""

    def __init__(self, ranks: Ranks, shares: Mapping[str, Sequence[range]]) -> None:
        self.ranks, self._shares = ranks, shares
        self.staging = Staging()
        self._device: Device | None = None
        self._side: SideStream | None = None
        self._pairs = torch.empty(0, dtype=torch.uint8)
        self.share = Share(ranks.rank, shares)
        """What this process computes."""
        self._beside = self._between = replace(ranks, group=ranks.beside)
        self._sender: Threads | None = None
        self._halos: dict[EdgesKey, Halo] = {}
        self._moments: dict[str, list[Event]] = {}
        """By program: on a device, when it began, began to wait for others, had what it waited for, …, and ended."""
        self._running: list[Event] = []
        self.received_bytes = 0
        self.waited_s = 0.0
        """For rows of others, and for their sums."""

    def find_halo(
        self, direction: EdgesKey, sources: Iterable[npt.NDArray[np.signedinteger]], space: str
    ) -> HaloMemory:
        """Settle what is sent for pulls of ``direction``, ``sources`` being those of all edges into this process's
        rows, a few at a time, nodes of type ``space``: the halo where that is much less than all rows. Returns what
        that takes. Holds a byte a row meanwhile."""
        ranks, shares = self.ranks, self._shares[space]
        rows = shares[-1].stop
        wanted = ranks.all_of(lambda: wanted_rows(sources, shares, shares[ranks.rank], rows))
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
        """The rows of other processes that pulls of ``direction`` are sent, ascending; None: all."""
        halo = self._halos.get(direction)
        return None if halo is None else torch.cat(halo.wanted).numpy()

    def compute_on(self, device: Device, *staging: Tensor) -> None:
        """Matrices are the ``device``'s from here on, and go directly, or by way of ``staging``, host memory that it
        knows."""
        self._device, self._side = device, device.side(self.staging.device_bytes)
        if self.staging.is_direct:
            self._between = self.ranks.directly
        self._pairs = (staging or [self._side.memory])[0].view(2, 2, self.staging.nbytes)

    @contextmanager
    def during(self, program: str) -> Iterator[None]:
        """Within, a program runs."""
        self._running = self._moments[program] = []
        self._note()
        yield
        self._note()
        self._running = []

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Within, this process waits for others."""
        started = perf_counter()
        self._note()
        yield
        self._note()
        self.waited_s += perf_counter() - started

    def _note(self) -> None:
        if self._device is not None:
            self._running.append(self._device.record(timed=True))

    def device_s(self, program: str) -> float:
        """How long the last run of a program took on a device, but for waiting for others."""
        moments = self._moments[program]
        moments[-1].wait()
        return sum(after.seconds_since(before) for before, after in zip(moments[::2], moments[1::2], strict=True))

    @property
    def parts(self) -> list[float]:
        """Of all rows, those of each process."""
        by_rank = [sum(map(len, shares)) for shares in zip(*self._shares.values(), strict=True)]
        return [rows / sum(by_rank) for rows in by_rank]

    def have_all(self, values: Tensor, space: str, offsets: npt.NDArray[np.signedinteger] | None = None) -> None:
        """Of values of no program that go with rows, of which every process has those of its own, have those of all;
        of several of a row those of each begin at ``offsets`` [N + 1]."""
        bounds = [(share.start, share.stop) for share in self._shares[space]]
        if offsets is not None:
            bounds = [(int(offsets[start]), int(offsets[stop])) for start, stop in bounds]
        with self._waiting():
            self.ranks.broadcast_parts([values[start:stop].view(torch.uint8) for start, stop in bounds])

    def begin(
        self, matrix_NC: Tensor, space: str, direction: EdgesKey | None = None, part: range = range(1)
    ) -> "Future[Event | None]":
        """Of a matrix of nodes of type ``space``, of which every process has its own rows, begin to be sent those of
        others that pulls of ``direction`` gather (None: all); to be waited for. ``part``: of so many (its stop) equal
        parts of the rows of every process the one (its start) that is there by now. All have to begin the same in the
        same order."""
        halo = None if direction is None else self._halos.get(direction)
        is_on_device = self._device is not None and matrix_NC.device.type != "cpu"
        written = self._device.record() if self._device is not None and is_on_device else None
        return self._on_thread(self._send, written, matrix_NC, space, halo, part)

    def begin_shifts(self, shifts: Sequence[Shift]) -> "Future[Event | None]":
        """Begin to send some rows, one after the other; to be waited for. As for ``begin``."""
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
        """Return when what has been begun is there; for what a device computes from here on, it is."""
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
        """By lists, of every process those in its one of ``parts``, so many at a time that they take
        ``_AT_ONCE_BYTES``."""
        at_once = _at_once(matrix_NC[:1].nbytes, self.ranks.count)
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
        """The same, or all rows of the ``parts``, of a device's matrix → when they are there."""
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
        """Send each process those of a device's rows that are ``given`` to it, and have those ``wanted`` of it, so many
        at a time, of no process more than ``most`` of ``row_bytes`` → when they are there. While some are on the way
        the next are packed, and those before unpacked."""
        side, at_once, there = self._side, _at_once(row_bytes, self.ranks.count), written
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
                side.take(sent, some_given, written).wait()  # and what was put of this pair has left it
                under_way.append((self._between.begin_all_to_all(received, sent, *sizes), some_wanted, received))
                if number:
                    there = put_first()
            return put_first() if under_way else there

    def abandon(self) -> None:
        """This process does not go on. Returns when nothing is sent any more."""
        self.ranks.failed()
        self.close()

    def close(self) -> None:
        """End the thread; the next that begins has another one."""
        if self._sender is not None:
            self._sender.shutdown(cancel_futures=True)
            self._sender = None

    def gathered_rows(
        self, own: Iterator[Tensor], grid: Grid, dtype: torch.dtype, space: str, to: int
    ) -> Iterator[Tensor]:
        """Rows of a matrix, block by block as each process has its own, for one of them. All have to go through it, of
        whom the others get nothing."""
        ranks = self.ranks
        for rank, share in enumerate(self._shares[space]):
            for rows in (grid.part(number, share) for number in grid.blocks_with(share)):
                block = next(own) if rank == ranks.rank else torch.empty(len(rows), grid.columns, dtype=dtype)
                if rank != to:
                    ranks.hand_on(block.view(torch.uint8), rank, to)
                if ranks.rank == to:
                    yield block

    def of_all(self, own: float) -> list[float]:
        """What every process has."""
        return [float(one) for one in self.ranks.gathered(torch.tensor([own], dtype=torch.float64))]

    def panels(self, found: Sequence[Any], reverse: bool) -> Iterator[Any]:
        """What every process has ``found`` of its panels, in the order of the rows, one at a time."""
        ranks = self.ranks
        place = torch.device("cpu") if self._device is None else self._device.place
        with self._waiting():
            counts = [int(count) for count in ranks.gathered(torch.tensor([len(found)]))]
        for rank in reversed(range(ranks.count)) if reverse else range(ranks.count):
            for number in range(counts[rank]):
                yield ranks.sent(found[number] if rank == ranks.rank else None, rank, place)

    def in_turn(self, sums_NC: Tensor) -> Callable[[], None]:
        """Wait until all processes before this one have added to a matrix, and have what they came to. Returns what
        hands it on, then waits for what it comes to in the end."""
        ranks, last = self.ranks, self.ranks.count - 1
        at_once = len(sums_NC) if self._device is None else _at_once(sums_NC[:1].nbytes, ranks.count)
        pieces = torch.split(sums_NC.view(torch.uint8), at_once)

        def hand_to(rank: int) -> None:
            for piece in pieces:
                ranks.hand_on(piece, rank - 1, rank)

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
