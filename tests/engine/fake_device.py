# SPDX-License-Identifier: Apache-2.0
"""A device with memory of its own, made of host memory: as slow, as quick and as disorderly as a real one may be.

Copies happen as late as anybody can bear, or early, in any order that the events allow. A kernel here is an operator of
torch that touches the arena: it is computed when it is launched, and counts as pending until somebody has waited for an
event behind it. Every access is compared with all others that it is not ordered with, by vector clocks (Mattern,
"Virtual time and global states of distributed systems", 1988): one that a real device could have done too early or too
late raises ``Race``, whatever happened to come out here.

Tensors are the device's or the host's, as with CUDA: what is made of a tensor of the device is the device's, operators
that take some of both are refused, and so is NumPy. ``place`` is a label (torch's "meta", of which nothing is used but
the name); underneath all tensors are the CPU's, so results are the CPU's to the bit.

Kernels that are no operators of torch are made the device's by ``FakeDevice.kernel``: launched once, whatever they do.
"""

import ctypes
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from random import Random
from threading import RLock
from time import perf_counter
from typing import Any, ClassVar, Self

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ooc.kernels.aggregate import Own
from ooc.kernels.edges import TileEdges
from ooc.kernels.pulls import Pulls
from ooc.plan.program.staging import CopyTo
from ooc.prefetch.arena import Bytes
from ooc.prefetch.device import Device, Rows, SideStream, parts_of
from ooc.prefetch.engine import Counters, Engine, Event, Span, Ticket
from ooc.train.setup import lower_model

Clock = tuple[int, int, int, int]
"""How much of each stream has happened: kernels, copies to the device, copies to the host, and the side stream."""
KERNELS, COPIES, SIDE = 0, {CopyTo.DEVICE: 1, CopyTo.HOST: 2}, 3
_NOTHING: Clock = (0, 0, 0, 0)


class Race(AssertionError):
    """Two accesses to the same bytes, at least one of them a write, that nothing keeps apart."""


class WrongPlace(AssertionError):
    """An operator got tensors of the host and of the device, or NumPy one of the device."""


def merged(one: Clock, other: Clock) -> Clock:
    return max(one[0], other[0]), max(one[1], other[1]), max(one[2], other[2]), max(one[3], other[3])


@dataclass(frozen=True)
class Extent:
    """Bytes by address."""

    start: int
    stop: int

    @classmethod
    def of(cls, tensor: Tensor) -> "Extent":
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return cls(tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize)

    @classmethod
    def of_array(cls, array: Bytes) -> "Extent":
        return cls(array.ctypes.data, array.ctypes.data + array.nbytes)

    def meets(self, other: "Extent") -> bool:
        return self.start < other.stop and other.start < self.stop

    def memory(self) -> Bytes:
        return np.frombuffer((ctypes.c_uint8 * (self.stop - self.start)).from_address(self.start), dtype=np.uint8)


@dataclass
class Copy:
    """The ``number``-th of its direction, behind ``after``."""

    number: int
    direction: CopyTo
    target: Extent
    source: Extent
    after: Clock

    @property
    def stream(self) -> int:
        return COPIES[self.direction]

    @property
    def on_device(self) -> Extent:
        return self.target if self.direction is CopyTo.DEVICE else self.source

    @property
    def on_host(self) -> Extent:
        return self.source if self.direction is CopyTo.DEVICE else self.target


@dataclass
class Exchanged:
    """The ``number``-th of the side stream, behind ``after``: what it touches of the arena, whether it writes there,
    and what it does."""

    number: int
    after: Clock
    touched: list[tuple[Extent, bool]]
    run: Callable[[], None]
    stream: ClassVar[int] = SIDE

    def meets(self, extent: Extent, *, writes: bool) -> bool:
        """Whether it and what reads, or ``writes``, ``extent`` have to be kept apart."""
        return any(own.meets(extent) and (writes or written) for own, written in self.touched)


@dataclass
class Access:
    """Of the ``number``-th kernel."""

    number: int
    extent: Extent
    writes: bool
    what: str


class FakeEvent(Event):
    def __init__(self, device: "FakeDevice", clock: Clock) -> None:
        self.device, self.clock = device, clock
        self.at_s = perf_counter()
        """Kernels are computed when they are launched."""

    def seconds_since(self, earlier: "FakeEvent") -> float:
        return self.at_s - earlier.at_s

    @property
    def happened(self) -> bool:
        """Now and then it has, and nobody knows beforehand."""
        known = merged(self.device.host, self.clock) == self.device.host
        if not known and self.device.random.random() < 0.5:
            self.wait()
            known = True
        return known

    def wait(self) -> None:
        with self.device.lock:
            self.device.reach(self.clock)
            self.device.host = merged(self.device.host, self.clock)


class SideEvent(FakeEvent):
    """Waited for by the thread of the side stream; the other one knows nothing of that."""

    def wait(self) -> None:
        with self.device.lock:
            self.device.reach(self.clock)


class FakeSide(SideStream):
    """What is sent off here happens as late as it may, or earlier."""

    def __init__(self, device: "FakeDevice", nbytes: int) -> None:
        self._device, self._nbytes = device, nbytes
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device.place)
        self._known = Extent.of(self.memory)

    def take(self, target: Tensor, rows: Sequence[Rows], after: Event | None) -> Event:
        parts = [(given, some) for given, some in zip(self._parts(target, rows), rows, strict=True) if len(given)]

        def run() -> None:
            for part, (matrix, numbers) in parts:
                part.copy_(matrix if numbers is None else matrix[numbers.long()])

        return self._send(rows, run, after, target, writes=False)

    def put(self, rows: Sequence[Rows], source: Tensor) -> Event:
        parts = [(given, some) for given, some in zip(self._parts(source, rows), rows, strict=True) if len(given)]

        def run() -> None:
            for part, (matrix, numbers) in parts:
                if numbers is None:
                    matrix.copy_(part)
                else:
                    matrix[numbers.long()] = part

        return self._send(rows, run, None, source, writes=True)

    def _parts(self, memory: Tensor, rows: Sequence[Rows]) -> list[Tensor]:
        assert memory.nbytes <= self._nbytes, "more than it was made for"
        return parts_of(memory, rows)

    def _send(
        self, rows: Sequence[Rows], run: Callable[[], None], after: Event | None, staging: Tensor, *, writes: bool
    ) -> Event:
        device = self._device
        start, stop = staging.data_ptr(), staging.data_ptr() + staging.nbytes
        known = [*device.locked, self._known]
        assert start == stop or any(one.start <= start and stop <= one.stop for one in known), "memory it does not know"
        touched = []
        for matrix, numbers in rows:
            if numbers is None:
                some = matrix
            elif len(numbers):
                some = matrix[int(numbers[0]) : int(numbers[-1]) + 1]
            else:
                continue
            if some.numel():
                touched.append((Extent.of(some), writes))
        with device.lock:
            return device.exchange(touched, run, _NOTHING if after is None else after.clock)


class FakeDevice(Device):
    """Within ``with``, torch's operators are watched. ``eager``: how likely a copy happens as soon as it may;
    ``backend``: by which it sends to others, of another ``seed`` each."""

    name = "a fake device"
    overhead_bytes = 0
    place = torch.device("meta")

    def __init__(self, seed: int = 0, *, eager: float = 0.2, backend: str = "") -> None:
        self.random = Random(seed)
        self._seed, self.backend = seed, backend
        self.eager = eager
        self.host: Clock = _NOTHING
        """What the host knows to have happened."""
        self.held: Clock = _NOTHING
        """What kernels launched from now on are behind."""
        self.kernels = 0
        self.copies: dict[CopyTo, list[Copy]] = {direction: [] for direction in CopyTo}
        self.done = dict.fromkeys(CopyTo, 0)
        self.queues: dict[CopyTo, deque[Copy]] = {direction: deque() for direction in CopyTo}
        self.exchanged: list[Exchanged] = []
        """Of the side stream."""
        self.exchanging: deque[Exchanged] = deque()
        self.lock = RLock()
        """Another thread has the side stream."""
        self.accesses: list[Access] = []
        self.requests: list[tuple[Extent, bool, WatchedTicket]] = []
        self.passages: list[tuple[Extent, bool, WatchedTicket]] = []
        """Requests of the SSD for the arena; whether they write to it."""
        self.limit_bytes = 0
        self.opened = 0
        self.arena = Extent(0, 0)
        self._memory: Tensor | None = None
        self.host_memory = Extent(0, 0)
        self.locked: list[Extent] = []
        """The memory of the host that it knows."""
        self.loose: list[torch.Size] = []
        """Of tensors brought here from other memory by who does not want to wait, and may have to."""
        self._watching = ExitStack()
        self.tensors = Tensors()
        self.asked: list[str] = []
        """Operators for which the host has waited."""

    def __enter__(self) -> Self:
        self._watching.enter_context(_Operators(self))
        self._watching.enter_context(_Functions(self))
        return self

    def __exit__(self, *error: object) -> None:
        self._watching.close()

    # ---- the device ----------------------------------------------------------------------------------------

    @property
    def unit(self) -> int:
        return self._seed

    def open(self, *, arena_bytes: int, limit_bytes: int, host: Bytes, graph: Sequence[Bytes] = ()) -> Tensor:
        self.limit_bytes = limit_bytes
        memory = torch.full((arena_bytes,), 255, dtype=torch.uint8, device=self.place)  # no number, no neighbour
        return self.adopt(memory, [host, *graph])

    def adopt(self, arena: Tensor, locked: Sequence[Bytes]) -> Tensor:
        """Somebody else's arena; copies go to and come from the first of the host's memory that it knows."""
        assert not self.opened, "it was not closed"
        self.opened += 1
        self._memory = arena
        self.arena = Extent.of(self._memory)
        self.locked = [Extent.of_array(memory) for memory in locked]
        self.host_memory = self.locked[0]
        return arena

    def begin(self) -> None:
        """There is one stream of kernels."""

    def copy(self, target: Tensor, source: Tensor, direction: CopyTo, after: Sequence[Event]) -> Event:
        with self.lock:
            return self._copy(target, source, direction, after)

    def _copy(self, target: Tensor, source: Tensor, direction: CopyTo, after: Sequence[Event]) -> Event:
        self._now_and_then()
        stream, before = COPIES[direction], self.copies[direction]
        clock = self.host if not before else merged(self.host, self._clock_of(before[-1]))
        for event in after:
            assert isinstance(event, FakeEvent)
            clock = merged(clock, event.clock)
        assert target.is_contiguous() and source.is_contiguous() and target.nbytes == source.nbytes
        if not target.nbytes:  # whoever copies nothing wants to know when he could have
            return FakeEvent(self, clock)
        copy = Copy(len(before) + 1, direction, Extent.of(target), Extent.of(source), clock)
        assert self.arena.start <= copy.on_device.start and copy.on_device.stop <= self.arena.stop
        assert self.host_memory.start <= copy.on_host.start and copy.on_host.stop <= self.host_memory.stop
        self._check_copy(copy)
        before.append(copy)
        self.queues[direction].append(copy)
        assert self._clock_of(copy)[stream] == copy.number
        return FakeEvent(self, self._clock_of(copy))

    def record(self, *, timed: bool = False) -> Event:
        self._now_and_then()
        return FakeEvent(self, self._launched())

    def hold(self, event: Event) -> None:
        assert isinstance(event, FakeEvent)
        with self.lock:
            self.held = merged(self.held, event.clock)
            self.reach(event.clock)

    def side(self, nbytes: int) -> SideStream:
        return FakeSide(self, nbytes)

    def close(self) -> None:
        if self.opened:
            copies = (len(self.copies[direction]) for direction in CopyTo)
            self.reach((self.kernels, *copies, len(self.exchanged)))
            self.opened -= 1
            self._memory = None
            self.arena = self.host_memory = Extent(0, 0)

    # ---- what happens when ---------------------------------------------------------------------------------

    def reach(self, clock: Clock) -> None:
        """Let everything in ``clock`` happen and nothing else, in any order that the events allow."""
        with self.lock:
            while wanted := [one for one in self._heads() if one.number <= clock[one.stream]]:
                self._carry_out(self.random.choice([one for one in wanted if self._may_happen(one)]))

    def _heads(self) -> list[Copy | Exchanged]:
        return [queue[0] for queue in (*self.queues.values(), self.exchanging) if queue]

    def _may_happen(self, one: Copy | Exchanged) -> bool:
        copies = all(self.done[direction] >= one.after[COPIES[direction]] for direction in CopyTo)
        return copies and len(self.exchanged) - len(self.exchanging) >= one.after[SIDE]

    def _now_and_then(self) -> None:
        with self.lock:
            while self.random.random() < self.eager:
                ready = [one for one in self._heads() if self._may_happen(one)]
                if not ready:
                    return
                self._carry_out(self.random.choice(ready))

    def _carry_out(self, copy: Copy | Exchanged) -> None:
        if isinstance(copy, Exchanged):
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                copy.run()
            assert self.exchanging.popleft() is copy
            return
        copy.target.memory()[:] = copy.source.memory()
        assert self.queues[copy.direction].popleft() is copy
        self.done[copy.direction] = copy.number

    def _clock_of(self, copy: Copy) -> Clock:
        own = tuple(copy.number if COPIES[copy.direction] == stream else 0 for stream in range(4))
        return merged(copy.after, (own[0], own[1], own[2], own[3]))

    def _launched(self) -> Clock:
        return merged(merged(self.held, self.host), (self.kernels, 0, 0, 0))

    # ---- who touches what ----------------------------------------------------------------------------------

    def _check_copy(self, copy: Copy) -> None:
        """Against kernels, copies the other way, and requests of the SSD."""
        first = bisect_right(self.accesses, copy.after[KERNELS], key=lambda access: access.number)
        for access in self.accesses[first:]:
            if access.extent.meets(copy.on_device) and (access.writes or copy.direction is CopyTo.DEVICE):
                raise Race(f"copy {copy.number} {copy.direction.value} and {access.what}, which may be pending")
        for direction in CopyTo:
            if direction is not copy.direction:
                for other in self.copies[direction][copy.after[COPIES[direction]] :]:
                    if other.on_device.meets(copy.on_device) or other.on_host.meets(copy.on_host):
                        raise Race(f"copy {copy.number} {copy.direction.value} and copy {other.number} the other way")
        what, writes = f"copy {copy.number} {copy.direction.value}", copy.direction is CopyTo.DEVICE
        self._check_passages(what, copy.on_device, writes=writes)
        self._check_exchanged(what, copy.on_device, copy.after, writes=writes)
        for extent, writes, ticket in self.requests:
            if not ticket.waited and extent.meets(copy.on_host) and (writes or copy.direction is CopyTo.HOST):
                raise Race(f"copy {copy.number} {copy.direction.value} and a request of the SSD that may be under way")

    def pass_through(self, memory: Tensor, ticket: "WatchedTicket", *, writes: bool) -> None:
        """A request of the SSD for the arena; ``writes``: into it. The host must know that nothing there is pending."""
        extent = Extent.of(memory)
        what = f"a {'read' if writes else 'write'} of the SSD"
        assert self.arena.start <= extent.start and extent.stop <= self.arena.stop
        self._check_passages(what, extent, writes=writes)
        self._check_exchanged(what, extent, self.host, writes=writes)
        for access in self.accesses[bisect_right(self.accesses, self.host[KERNELS], key=lambda one: one.number) :]:
            if access.extent.meets(extent) and (writes or access.writes):
                raise Race(f"{what} and {access.what}, which may be pending")
        for direction in CopyTo:
            for copy in self.copies[direction][self.host[COPIES[direction]] :]:
                if copy.on_device.meets(extent) and (writes or direction is CopyTo.DEVICE):
                    raise Race(f"{what} and copy {copy.number} {direction.value}, which may be pending")
        self.passages = [one for one in self.passages if not one[2].waited] + [(extent, writes, ticket)]

    def exchange(self, touched: list[tuple[Extent, bool]], run: Callable[[], None], after: Clock) -> Event:
        """In the side stream, behind ``after`` and all that was sent off there → its end."""
        self._now_and_then()
        for one in self.exchanged[-1:]:
            after = merged(merged(after, one.after), (0, 0, 0, one.number))
        number = len(self.exchanged) + 1
        what = f"exchange {number}"
        for extent, writes in touched:
            assert self.arena.start <= extent.start and extent.stop <= self.arena.stop
            self._check_passages(what, extent, writes=writes)
            first = bisect_right(self.accesses, after[KERNELS], key=lambda access: access.number)
            for access in self.accesses[first:]:
                if access.extent.meets(extent) and (access.writes or writes):
                    raise Race(f"{what} and {access.what}, which may be pending")
            for direction in CopyTo:
                for copy in self.copies[direction][after[COPIES[direction]] :]:
                    if copy.on_device.meets(extent) and (writes or direction is CopyTo.DEVICE):
                        raise Race(f"{what} and copy {copy.number} {direction.value}, for which it does not wait")
        self.exchanged.append(Exchanged(number, after, touched, run))
        self.exchanging.append(self.exchanged[-1])
        return SideEvent(self, merged(after, (0, 0, 0, number)))

    def _check_exchanged(self, what: str, extent: Extent, known: Clock, *, writes: bool) -> None:
        for one in self.exchanged[known[SIDE] :]:
            if one.meets(extent, writes=writes):
                raise Race(f"{what} and exchange {one.number}, for which it does not wait")

    def _check_passages(self, what: str, extent: Extent, *, writes: bool) -> None:
        for other, written, ticket in self.passages:
            if not ticket.waited and other.meets(extent) and (writes or written):
                raise Race(f"{what} and a request of the SSD for the arena, for which nobody has waited")

    def launch(self, what: str, touched: Sequence[tuple[Tensor, bool]]) -> None:
        """A kernel, and what it reads and writes of the arena."""
        with self.lock:
            self._launch(what, touched)

    def _launch(self, what: str, touched: Sequence[tuple[Tensor, bool]]) -> None:
        self._now_and_then()
        self.kernels += 1
        known = self._launched()
        for tensor, writes in touched:
            extent = Extent.of(tensor)
            self._check_passages(what, extent, writes=writes)
            self._check_exchanged(what, extent, known, writes=writes)
            for direction in CopyTo:
                for copy in self.copies[direction][known[COPIES[direction]] :]:
                    if copy.on_device.meets(extent) and (writes or direction is CopyTo.DEVICE):
                        raise Race(f"{what} and copy {copy.number} {direction.value}, for which it does not wait")
            self.accesses.append(Access(self.kernels, extent, writes, what))

    def kernel(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` as one kernel of this device: it reads the tensors that it is given, all of them the device's,
        and what it returns, alone, in a tuple or in a dataclass, is new memory there. Inside, nobody watches."""

        def launched(*args: Any, **kwargs: Any) -> Any:
            given = list(_tensors_in((*args, *kwargs.values())))
            if any(t not in self.tensors and t.dim() for t in given):
                raise WrongPlace(f"{function.__name__} of a tensor of the host")
            held = [t for t in given if t.numel() and self.arena.start <= t.data_ptr() < self.arena.stop]
            if held:
                self.launch(function.__name__, [(tensor, False) for tensor in held])
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                result = function(*args, **kwargs)
            for tensor in _tensors_in([result]):
                self.tensors.add(tensor)
            return result

        return launched

    def pulls(self, of: Pulls) -> Pulls:
        """The kernels ``of`` another device, as this one's; sums go right to where they are wanted, as a GPU's do."""
        kernels = Pulls(*(self.kernel(getattr(of, pull.name)) for pull in fields(Pulls)))

        def sums(
            tile: TileEdges, source_NW: Tensor, *, has_loops: bool = True, own: Own = None, out: Tensor | None = None
        ) -> Tensor:
            pulled = kernels.sums(tile, source_NW, has_loops=has_loops, own=own)
            return pulled if out is None or out.dtype != pulled.dtype else out.copy_(pulled)

        return replace(kernels, sums=sums)

    def request(self, memory: Bytes, ticket: "WatchedTicket", *, writes: bool) -> None:
        """Of the SSD; ``writes``: into memory."""
        extent = Extent.of_array(memory)
        for direction in CopyTo:
            for copy in self.copies[direction][self.host[COPIES[direction]] :]:
                if copy.on_host.meets(extent) and (writes or direction is CopyTo.HOST):
                    raise Race(f"a request of the SSD and copy {copy.number} {direction.value}, which may be pending")
        self.requests = [request for request in self.requests if not request[2].waited]
        self.requests.append((extent, writes, ticket))


class Tensors:
    """Which tensors are the device's: by their storage, as long as it lives. ``peak_bytes``: the most that was alive at
    a time, once ``weighing`` is set."""

    def __init__(self) -> None:
        self._known: dict[int, StorageWeakRef] = {}
        self._nbytes: dict[int, int] = {}
        self._purge_at = 4096
        self._at_most = 0
        """Bytes of all that are known, alive or not."""
        self.weighing = False
        self.peak_bytes = 0

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._known[storage._cdata] = StorageWeakRef(storage)
            self._nbytes[storage._cdata] = storage.nbytes()
            self._at_most += storage.nbytes()
            if len(self._known) > self._purge_at or (self.weighing and self._at_most > self.peak_bytes):
                self._purge()
                if self.weighing:
                    self.peak_bytes = max(self.peak_bytes, self._at_most)

    def _purge(self) -> None:
        self._known = {key: known for key, known in self._known.items() if not known.expired()}
        self._nbytes = {key: self._nbytes[key] for key in self._known}
        self._at_most = sum(self._nbytes.values())
        self._purge_at = 4096 + 2 * len(self._known)

    def __contains__(self, tensor: object) -> bool:
        return isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata in self._known


def _tensors_in(values: Sequence[object]) -> Iterator[Tensor]:
    """Those among arguments, and in the tuples and dataclasses among them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors_in(value)
        elif is_dataclass(value):
            yield from _tensors_in([getattr(value, field.name) for field in fields(value)])


def _tensors_of(values: Iterable[object]) -> Iterator[Tensor]:
    """Those among an operator's arguments or results, and in the lists among them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors_of(value)


def _is_cpu(device: object) -> bool:
    return device is not None and torch.device(device).type == "cpu"


_PLACES: frozenset[Any] = frozenset(
    [torch.Tensor.device.__get__, torch.Tensor.numpy, torch.Tensor.to, torch.Tensor.tolist, torch.Tensor.cpu]
)
"""What is asked of tensors that a device of its own answers differently."""


class _Functions(TorchFunctionMode):
    """What Python asks of tensors: where they are, and to come to the host."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _PLACES and args and args[0] in self._device.tensors:
            if func == torch.Tensor.device.__get__:
                return self._device.place
            if func is torch.Tensor.numpy:
                raise WrongPlace("NumPy cannot take a tensor of the device")
            asked = [*args[1:2], *args[2:3], kwargs.get("device")] if func is torch.Tensor.to else []
            devices = [one for one in asked if isinstance(one, (str, torch.device))]
            if func is torch.Tensor.tolist:
                self._device.asked.append("tolist")
            if func is torch.Tensor.cpu or any(_is_cpu(one) for one in devices):
                return self._to_host(args[0])
        return func(*args, **kwargs)

    def _to_host(self, tensor: Tensor) -> Tensor:
        """A copy, for which the host waits: everything launched so far has happened."""
        self._device.host = merged(self._device.host, self._device._launched())
        with torch.no_grad():
            copied = torch.empty(tensor.shape, dtype=tensor.dtype)
            copied.copy_(tensor)
        return copied


class _Operators(TorchDispatchMode):
    """What torch computes: where it is, and what it touches."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self._device = device

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, so torch need not see to it that this is not."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        ours = self._device.tensors
        made_there = kwargs.get("device") == self._device.place
        if made_there:
            kwargs["device"] = torch.device("cpu")
        tensors = [*_tensors_of((*args, *kwargs.values()))]
        there = [tensor for tensor in tensors if tensor in ours]
        if not there and not made_there:  # of the host alone
            return func(*args, **kwargs)
        between = func.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten._to_copy, torch.ops.aten.set_)
        if kwargs.get("non_blocking") and made_there and tensors[0] not in ours:
            extent = Extent.of(tensors[0])
            if not any(one.start <= extent.start and extent.stop <= one.stop for one in self._device.locked):
                self._device.loose.append(tensors[0].shape)
        if there and not between and any(t not in ours and t.dim() for t in tensors):
            raise WrongPlace(f"{func} of tensors of the host and of the device")
        if there and (_asks(func, args, kwargs) or _goes_to_host(func, tensors, ours)):
            self._device.asked.append(str(func))
        if there and not _is_view(func):
            arena = self._device.arena
            touched = [(t, writes) for t, writes in _accesses(func, args, kwargs) if t in ours and t.numel()]
            inside = [(t, writes) for t, writes in touched if arena.start <= t.data_ptr() < arena.stop]
            if inside:
                self._device.launch(str(func), inside)
        result = func(*args, **kwargs)
        if made_there or (there and not (between and tensors[0] not in ours)):
            hosts = {id(tensor) for tensor in tensors if tensor not in ours}
            for value in _tensors_of((result,)):
                if id(value) not in hosts:
                    ours.add(value)
        return result


_ATEN = torch.ops.aten
_ASKING = (
    *(_ATEN.nonzero, _ATEN._local_scalar_dense, _ATEN.masked_select, _ATEN.equal, _ATEN.bincount),
    *(_ATEN._unique2, _ATEN.unique_consecutive, _ATEN.unique_dim),
)
"""Numbers of the device decide what the host does next, the size of the result for one."""
_STORING = (_ATEN.index_put, _ATEN.index_put_, _ATEN._index_put_impl_)


def _asks(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the host waits for the result, or torch does on the way to it without another operator.

    A mask as an index is made numbers of elements first, but for one value that is put everywhere; repeats are added
    up where nobody says what they come to.
    """
    packet = func.overloadpacket
    if packet is _ATEN.index or packet in _STORING:
        is_fill = packet in _STORING and args[2].numel() == 1
        masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
        return bool(masks) and not is_fill
    if packet is _ATEN.repeat_interleave:
        return kwargs.get("output_size") is None
    return packet in _ASKING


def _goes_to_host(func: Any, tensors: Sequence[Tensor], ours: Tensors) -> bool:
    """Whether it copies a tensor of the device to one of the host."""
    return func.overloadpacket is torch.ops.aten.copy_ and tensors[0] not in ours


@cache
def _is_view(func: Any) -> bool:
    """Whether it only gives another look at its operand."""
    aliases = [returned.alias_info for returned in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


@cache
def _arguments(func: Any) -> list[tuple[str, bool]]:
    """What an operator's arguments are called, and whether it writes to them."""
    aliases = [(argument.name, argument.alias_info) for argument in func._schema.arguments]
    return [(name, alias is not None and alias.is_write) for name, alias in aliases]


def _accesses(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[Tensor, bool]]:
    """The tensors that an operator takes, and whether it writes to them."""
    found = []
    for place, (name, writes) in enumerate(_arguments(func)):
        value = args[place] if place < len(args) else kwargs.get(name)
        found += [(tensor, writes) for tensor in _tensors_of((value,))]
    return found


class WatchedTicket(Ticket):
    """``waited``: whether the host has waited for it."""

    __slots__ = ("inner", "waited")

    def __init__(self) -> None:
        self.inner: Ticket | None = None
        self.waited = False

    @property
    def happened(self) -> bool:
        return self.inner.happened

    @property
    def ended_s(self) -> float:
        return self.inner.ended_s

    def wait(self) -> None:
        self.waited = True
        self.inner.wait()

    def settle(self) -> None:
        self.waited = True
        self.inner.settle()


class WatchedEngine(Engine):
    """``inner``, whose requests a fake device knows of."""

    def __init__(self, inner: Engine, device: FakeDevice) -> None:
        self.inner, self.device = inner, device
        self.name = inner.name

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "watch":
            self.inner.watch = value
        super().__setattr__(name, value)

    @property
    def counters(self) -> Counters:
        return self.inner.counters

    def read(self, spans: Sequence[Span], into: Bytes, *, bulk: bool = False) -> Ticket:
        return self._watched(lambda: self.inner.read(spans, into, bulk=bulk), into, writes=True)

    def write(self, spans: Sequence[Span], source: Bytes) -> Ticket:
        return self._watched(lambda: self.inner.write(spans, source), source, writes=False)

    def _watched(self, send: Callable[[], Ticket], memory: Bytes, *, writes: bool) -> Ticket:
        pending = WatchedTicket()
        self.device.request(memory, pending, writes=writes)
        pending.inner = send()
        return pending

    def close(self) -> None:
        self.inner.close()


class StraightEngine(WatchedEngine):
    """``inner`` reading into the arena of a fake device and writing out of it."""

    landed = lifted = 0

    def read(self, spans: Sequence[Span], into: Any, *, bulk: bool = False) -> Ticket:
        pending = WatchedTicket()
        self.device.pass_through(into, pending, writes=True)
        self.landed += 1
        pending.inner = self.inner.read(spans, Extent.of(into).memory(), bulk=bulk)
        return pending

    def write(self, spans: Sequence[Span], source: Any) -> Ticket:
        pending = WatchedTicket()
        self.device.pass_through(source, pending, writes=False)
        self.lifted += 1
        pending.inner = self.inner.write(spans, Extent.of(source).memory())
        return pending


def unwatched(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which has nothing to do with a device: nobody watches what it computes."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes(), _pop_mode_temporarily():
            return function(*args, **kwargs)

    return run


def lower_unwatched(patched: pytest.MonkeyPatch) -> None:
    """Taking models apart is nothing that a device does, and takes several times as long while one is watched."""
    for caller in ("ooc.train.setup", "ooc.train.prediction"):
        patched.setattr(f"{caller}.lower_model", unwatched(lower_model))


def compute_losses_by_torch(patched: pytest.MonkeyPatch) -> None:
    """On the CPU, too, whose loop gives other last bits."""
    patched.setattr("ooc.train.loss._compiled_cross_entropy", lambda: None)
