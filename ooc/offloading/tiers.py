# SPDX-License-Identifier: Apache-2.0
"""Where saved tensors wait that leave the device: storages go there whole, and come back as bytes that views are made
of. What is sent for early is on its way while other things are computed.
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
"""Of what the SSD is written by way of: one part is filled while others are written."""
_WRITES = 8
"""That the largest storage takes at least."""


def staging_bytes(largest_bytes: int) -> int:
    """Of memory that ``Ssd`` is written by way of, where the largest storage has so many bytes."""
    return _PARTS * min(_MOST_PART_BYTES, align_up(max(1, largest_bytes // _WRITES)))


def landing_bytes(nbytes: int) -> int:
    """Of what so many bytes come back to, from where a page begins."""
    return align_up(nbytes) + PAGE_BYTES


def _landing(nbytes: int, device: str) -> Tensor:
    made = torch.empty(landing_bytes(nbytes), dtype=torch.uint8, device=device)
    first = 0 if made.is_meta else -made.data_ptr() % PAGE_BYTES
    return made[first : first + align_up(nbytes)]


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class Tier(ABC):
    """Used by one thread at a time. A token stands for what was put there."""

    @abstractmethod
    def put(self, storage: UntypedStorage) -> Any:
        """Take the storage's bytes; it may be freed when this returns. Returns the token."""

    @abstractmethod
    def fetch(self, token: Any) -> None:
        """Begin to bring it back."""

    @abstractmethod
    def take(self, token: Any) -> Tensor:
        """Its bytes, from the first on, uint8; once."""

    def drop(self, token: Any) -> None:  # noqa: B027
        """Nobody needs it any more."""


class Nowhere(Tier):
    """On the meta device nothing has content: sizes are as with ``Ssd``."""

    def put(self, storage: UntypedStorage) -> int:
        return storage.nbytes()

    def fetch(self, token: int) -> None:
        raise AssertionError("a dry run reads nothing ahead")

    def take(self, token: int) -> Tensor:
        return _landing(token, "meta")


@dataclass(eq=False, slots=True)
class _Extent:
    """A storage's place in the file, its writes, or the read and the memory that it comes back to."""

    offset: int
    nbytes: int
    device: torch.device
    requests: list[Ticket] = field(default_factory=list)
    landing: Tensor | None = None


class Ssd(Tier):
    """A nameless file of ``nbytes`` in ``folder``, written by way of ``staging`` bytes of memory: who puts something
    there waits when these are full. Reads go right to where the tensor will be, past the page cache."""

    def __init__(self, folder: Path, nbytes: int, staging: int) -> None:
        self._file = create_spill(folder, "saved tensors", nbytes)
        self._engine, _ = choose_engine(folder)
        self.counters = self._engine.counters
        self._arena, self._part = Arena(staging), staging // _PARTS
        views = [self._arena.view(start, self._part) for start in range(0, staging, self._part)]
        self._parts: list[tuple[Bytes, list[Ticket]]] = [(view, []) for view in views]
        self._turns = cycle(self._parts)
        self._end = self._alive = 0
        self._reads: list[tuple[Ticket, Tensor]] = []  # the kernel writes to these, whoever may have dropped them

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
            self._end = 0  # of the next forward pass

    def close(self) -> None:
        """Free everything, when what is under way has ended."""
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
    """Host memory of a GPU, copied to and from beside its kernels. It has never been run on one."""

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
