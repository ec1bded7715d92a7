# SPDX-License-Identifier: Apache-2.0
"""Storage for saved tensors outside the device: whole storages go there and return as bytes that views are made of.

A storage that is fetched early is read while other things are computed.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from ooc.plan.layout.grid import align_up
from ooc.prefetch.arena import Arena, Bytes
from ooc.prefetch.engine import PAGE_BYTES, Span, Ticket
from ooc.prefetch.engines.choice import choose_engine
from ooc.prefetch.spill import create_spill

_PARTS, _MOST_PART_BYTES = 4, 4 << 20
"""The parts of the memory through which the SSD is written: one is filled while others are written."""
_WRITES = 8
"""Writes into which the largest storage is divided at least."""


def staging_bytes(largest_bytes: int) -> int:
    """Return the bytes of memory through which ``Ssd`` is written, for a largest storage of ``largest_bytes``."""
    return _PARTS * min(_MOST_PART_BYTES, align_up(max(1, largest_bytes // _WRITES)))


def landing_bytes(nbytes: int) -> int:
    """Return the bytes of memory that a storage of ``nbytes`` returns to, with page alignment."""
    return align_up(nbytes) + PAGE_BYTES


def _landing(nbytes: int, device: str) -> Tensor:
    made = torch.empty(landing_bytes(nbytes), dtype=torch.uint8, device=device)
    first = 0 if made.is_meta else -made.data_ptr() % PAGE_BYTES
    return made[first : first + align_up(nbytes)]


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class Tier(ABC):
    """A place for storages, used by one thread at a time. A token identifies a storage that was put there."""

    @abstractmethod
    def put(self, storage: UntypedStorage) -> Any:
        """Store the storage's bytes and return the token; the storage may be freed afterwards."""

    @abstractmethod
    def fetch(self, token: Any) -> None:
        """Begin to bring the storage back."""

    @abstractmethod
    def take(self, token: Any) -> Tensor:
        """Return the storage's bytes, uint8; only once for each token."""

    def drop(self, token: Any) -> None:  # noqa: B027
        """Release the token: its storage is no longer needed."""


class Nowhere(Tier):
    """A tier for dry runs on the meta device, where tensors have no content: it returns the sizes that ``Ssd``
    returns."""

    def put(self, storage: UntypedStorage) -> int:
        return storage.nbytes()

    def fetch(self, token: int) -> None:
        raise AssertionError("a dry run reads nothing ahead")

    def take(self, token: int) -> Tensor:
        return _landing(token, "meta")


@dataclass(eq=False, slots=True)
class _Extent:
    """A storage's place in the file, its writes, or the read and the memory that it returns to."""

    offset: int
    nbytes: int
    device: torch.device
    requests: list[Ticket] = field(default_factory=list)
    landing: Tensor | None = None


class Ssd(Tier):
    """A nameless file of ``nbytes`` in ``folder``, written through ``staging`` bytes of memory.

    ``put`` waits when the memory is full. Reads go directly to the tensor's memory, bypassing the page cache.
    """

    def __init__(self, folder: Path, nbytes: int, staging: int) -> None:
        self._file = create_spill(folder, "saved tensors", nbytes)
        self._engine, _ = choose_engine(folder)
        self.counters = self._engine.counters
        self._arena, self._part = Arena(staging), staging // _PARTS
        views = [self._arena.view(start, self._part) for start in range(0, staging, self._part)]
        self._parts: list[tuple[Bytes, list[Ticket]]] = [(view, []) for view in views]
        self._turns = cycle(self._parts)
        self._end = self._alive = 0
        self._reads: list[tuple[Ticket, Tensor]] = []  # keeps memory alive while the kernel writes to it

    def put(self, storage: UntypedStorage) -> _Extent:
        source, nbytes = _bytes_of(storage), storage.nbytes()
        extent = _Extent(self._end, nbytes, storage.device)
        self._end += align_up(nbytes)
        self._alive += 1
        for start in range(0, nbytes, self._part):
            memory, writes = next(self._turns)
            while writes:
                writes.pop().wait()
            part = source[start : start + self._part]
            torch.from_numpy(memory)[: len(part)].copy_(part)
            there = self._span(extent.offset + start, len(part))
            writes.append(self._engine.write([there], memory[: there.nbytes]))
            extent.requests.append(writes[0])
        return extent

    def fetch(self, token: _Extent) -> None:
        for write in token.requests:
            write.wait()
        token.landing = _landing(token.nbytes, "cpu")
        read = self._engine.read([self._span(token.offset, token.nbytes)], token.landing.numpy())
        token.requests = [read]
        self._reads.append((read, token.landing))

    def take(self, token: _Extent) -> Tensor:
        if token.landing is None:
            self.fetch(token)
        token.requests[0].wait()
        self._reads = [read for read in self._reads if not read[0].happened]
        landing, token.landing = token.landing, None
        assert landing is not None
        return landing.to(token.device)

    def drop(self, token: _Extent) -> None:
        self._alive -= 1
        if not self._alive:
            self._settle()
            self._end = 0  # start over in the next forward pass

    def close(self) -> None:
        """Free everything, after pending reads and writes have ended."""
        self._settle()
        self._engine.close()
        self._file.close()
        self._arena.close()

    def _settle(self) -> None:
        for ticket in [ticket for _, writes in self._parts for ticket in writes] + [
            ticket for ticket, _ in self._reads
        ]:
            ticket.settle()
        self._reads.clear()

    def _span(self, offset: int, nbytes: int) -> Span:
        return Span(self._file, offset, align_up(nbytes), "saved tensors")


class Pinned(Tier):
    """Pinned host memory for a GPU, copied on a stream of its own. It has never been run on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def put(self, storage: UntypedStorage) -> list[Tensor]:
        host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
        self._copy(host, _bytes_of(storage))
        return [host]

    def fetch(self, token: list[Tensor]) -> None:
        token.append(torch.empty(len(token[0]), dtype=torch.uint8, device=self._device))
        self._copy(token[1], token[0])

    def take(self, token: list[Tensor]) -> Tensor:
        if len(token) == 1:
            self.fetch(token)
        torch.cuda.current_stream(self._device).wait_stream(self._copies)
        return token.pop()

    def _copy(self, target: Tensor, source: Tensor) -> None:
        self._copies.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._copies):
            target.copy_(source, non_blocking=True)
        (source if source.is_cuda else target).record_stream(self._copies)
