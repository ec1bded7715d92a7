# SPDX-License-Identifier: Apache-2.0
"""An NVIDIA GPU through torch.cuda. It has never been run on one: no machine that runs the tests has a GPU.

Kernels run in torch's current stream. So all that torch computes between epochs, for instance an optimizer's step, is
in order with them and needs no events. Copies have a stream for each direction, so that they overlap with kernels and
with each other.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ooc.errors import BudgetError
from ooc.plan.program.staging import CopyTo
from ooc.prefetch.arena import Bytes
from ooc.prefetch.device import Device, Rows, SideStream, parts_of
from ooc.prefetch.engine import Event
from ooc.sizes import format_size

_cuda: Any = torch.cuda
"""torch.cuda, whose classes and functions are only partly typed."""

_OVERHEAD_BYTES = 128 << 20
"""An estimate of memory outside the arena. cuBLAS takes a workspace of up to 32 MiB per handle, and cuBLASLt as much
(its documentation, "cublasSetWorkspace"); torch's allocator rounds up to segments of 2 and 20 MiB
(``torch.cuda.memory_stats``). For a GPU like the H100, torch 2.11 asks for 32 MiB for cuBLAS."""


class CudaEvent(Event):
    """An event. ``blocking``: a waiting thread sleeps instead of spinning. ``timed``: the GPU records its time."""

    def __init__(self, stream: torch.cuda.Stream, *, timed: bool) -> None:
        self.event: Any = _cuda.Event(enable_timing=timed, blocking=True)
        self.event.record(stream)

    @property
    def happened(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()

    def seconds_since(self, earlier: "CudaEvent") -> float:
        """Return the time between two ``timed`` events that have happened, by the GPU's clock."""
        return float(earlier.event.elapsed_time(self.event)) / 1000


class CudaSide(SideStream):
    """A side stream whose kernels pack rows in its own device memory, ``nbytes``; the host copies are made from there
    in one piece."""

    def __init__(self, place: torch.device, nbytes: int) -> None:
        self._place = place
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=place)
        self._stream: Any = _cuda.Stream(place)

    def take(self, target: Tensor, rows: Sequence[Rows], after: Event | None) -> Event:
        if after is not None:
            self._stream.wait_event(_own(after))
        packed = self._on_device(target)
        with self.current():
            for part, (matrix, numbers) in zip(parts_of(packed, rows), rows, strict=True):
                if numbers is None:
                    part.copy_(matrix)
                else:
                    torch.index_select(matrix, 0, numbers.to(self._place), out=part)
            if packed is not target:
                target.copy_(packed, non_blocking=True)
        return CudaEvent(self._stream, timed=False)

    def put(self, rows: Sequence[Rows], source: Tensor) -> Event:
        packed = self._on_device(source)
        with self.current():
            if packed is not source:
                packed.copy_(source, non_blocking=True)
            for part, (matrix, numbers) in zip(parts_of(packed, rows), rows, strict=True):
                if numbers is None:
                    matrix.copy_(part)
                else:
                    matrix.index_copy_(0, numbers.to(self._place).long(), part)
        return CudaEvent(self._stream, timed=False)

    def current(self) -> AbstractContextManager[Any]:
        found: AbstractContextManager[Any] = _cuda.stream(self._stream)
        return found

    def _on_device(self, staging: Tensor) -> Tensor:
        return staging if staging.device == self._place else self.memory[: staging.nbytes]

    def close(self) -> None:
        """Wait for everything, then release the memory."""
        self._stream.synchronize()
        self.memory.untyped_storage().resize_(0)


class Cuda(Device):
    """GPU ``index`` as CUDA numbers them. ``timed``: events record their times, to show what overlaps."""

    overhead_bytes = _OVERHEAD_BYTES

    def __init__(self, index: int = 0, *, timed: bool = False) -> None:
        self._timed = timed
        self.place = torch.device("cuda", index)
        self.name = torch.cuda.get_device_name(index)
        self._streams: dict[CopyTo, torch.cuda.Stream] = {}
        self._kernels: Any = torch.cuda.current_stream(self.place)
        self._pinned: list[Bytes] = []
        self._arena: Tensor | None = None
        self._side: CudaSide | None = None
        self.backend = "nccl" if dist.is_available() and dist.is_nccl_available() else ""

    @property
    def unit(self) -> int:
        """The first 60 bits of the card's UUID."""
        card: Any = torch.cuda.get_device_properties(self.place)
        return int(str(card.uuid).replace("-", "")[:15], 16)

    def open(self, *, arena_bytes: int, limit_bytes: int, host: Bytes, graph: Sequence[Bytes] = ()) -> Tensor:
        total = torch.cuda.get_device_properties(self.place).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), self.place)
        torch.cuda.empty_cache()  # an earlier arena may have had another size
        try:
            for memory in (host, *graph):
                self._pin(memory)
            arena = torch.empty(arena_bytes, dtype=torch.uint8, device=self.place)
        except BudgetError:
            self.close()
            raise
        except torch.OutOfMemoryError:
            self.close()
            raise BudgetError(
                f"{self.name} refuses an arena of {format_size(arena_bytes)}; end other programs that use it, or give "
                "a smaller gpu_budget="
            ) from None
        self._streams = {direction: _cuda.Stream(self.place) for direction in CopyTo}
        self._arena = arena
        return arena

    def begin(self) -> None:
        # Asked for once a program: for every event and copy it would be a twentieth of the host's time.
        current: Any = torch.cuda.current_stream(self.place)
        if current != self._kernels:  # the earlier program's kernels may still use the arena
            current.wait_stream(self._kernels)
            self._kernels = current

    def copy(self, target: Tensor, source: Tensor, direction: CopyTo, after: Sequence[Event]) -> Event:
        stream = self._streams[direction]
        for event in after:
            stream.wait_event(_own(event))
        _cuda.set_stream(stream)  # in 11 us with the copy; ``with torch.cuda.stream`` makes it 24
        try:
            target.copy_(source, non_blocking=True)
        finally:
            _cuda.set_stream(self._kernels)
        return CudaEvent(stream, timed=self._timed)

    def record(self, *, timed: bool = False) -> Event:
        return CudaEvent(self._kernels, timed=timed or self._timed)

    def hold(self, event: Event) -> None:
        self._kernels.wait_event(_own(event))

    def side(self, nbytes: int) -> SideStream:
        self._side = CudaSide(self.place, nbytes)
        return self._side

    def close(self) -> None:
        if self._side is not None:
            self._side.close()
            self._side = None
        # Kernels' stream too: what it brings from the graph's memory must have come before that is unlocked.
        for stream in (*self._streams.values(), *[self._kernels] * bool(self._streams)):
            stream.synchronize()
        self._streams = {}
        while self._pinned:
            _cuda.cudart().cudaHostUnregister(self._pinned.pop().ctypes.data)
        if self._arena is not None:
            # Whoever still has a view, a traceback for one, would keep the memory from the next trainer.
            self._arena.untyped_storage().resize_(0)
            self._arena = None
            torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0, self.place)

    def _pin(self, memory: Bytes) -> None:
        """Lock pages of host memory: only then do copies run asynchronously and at the full rate of PCIe.

        With a copy of pageable memory, the driver may make the host wait for all earlier kernels ("API synchronization
        behavior", CUDA's documentation).
        """
        if not memory.nbytes:
            return
        code = int(_cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0))
        if code:
            raise BudgetError(
                f"CUDA does not lock {format_size(memory.nbytes)} of host memory (error {code}); give a smaller "
                "host_budget=, or a higher limit of locked memory (ulimit -l)"
            )
        self._pinned.append(memory)


def _own(event: Event) -> Any:
    assert isinstance(event, CudaEvent)
    return event.event
