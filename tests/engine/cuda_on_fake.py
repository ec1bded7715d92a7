# SPDX-License-Identifier: Apache-2.0
"""``ooc.prefetch.cuda`` on the tests' device: its streams, events and copies are recorded as those of a GPU would run.

In place of torch.cuda stands what turns every wait, record and copy into one of the fake device's. So it is seen not
only that the executor names what must have happened before, but that CUDA is told so: what it is not told is a race.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ooc.plan.program.staging import CopyTo
from ooc.prefetch import cuda
from ooc.prefetch.arena import Bytes
from ooc.prefetch.cuda import Cuda
from ooc.prefetch.engine import Event
from tests.engine.fake_device import Extent, FakeDevice, FakeEvent, Race


class Stream:
    """Of copies: ``behind`` is what the next one waits for, ``last`` the end of the one before. The fake device has one
    stream of kernels, and knows."""

    def __init__(self, fake: FakeDevice, *, of_kernels: bool = False) -> None:
        self._fake, self.of_kernels = fake, of_kernels
        self._behind: list[Event] = []
        self._last: Event = FakeEvent(fake, (0, 0, 0, 0))

    def wait_event(self, event: "StandInEvent") -> None:
        if self.of_kernels:
            self._fake.hold(event.at)
        else:
            self._behind.append(event.at)

    def end(self) -> Event:
        """Of all that was sent off in it so far."""
        return self._fake.record() if self.of_kernels else self._last

    def synchronize(self) -> None:
        self.end().wait()

    def copy(self, target: Tensor, source: Tensor) -> None:
        direction = CopyTo.DEVICE if Extent.of(target).meets(self._fake.arena) else CopyTo.HOST
        self._last = self._fake.copy(target, source, direction, self._behind)
        self._behind = []


class StandInEvent:
    """Recorded once."""

    at: Event

    def record(self, stream: Stream) -> None:
        self.at = stream.end()

    def query(self) -> bool:
        return self.at.happened

    def synchronize(self) -> None:
        self.at.wait()


class StandIn(TorchFunctionMode):
    """torch.cuda, as far as ``Cuda`` asks, and the copies of torch's in its streams."""

    def __init__(self, fake: FakeDevice) -> None:
        super().__init__()
        self.fake = fake
        self.kernels = self.current = Stream(fake, of_kernels=True)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.current.of_kernels:
            return func(*args, **(kwargs or {}))
        if func is not torch.Tensor.copy_ or not (kwargs or {}).get("non_blocking"):
            raise Race(f"{func.__name__} in a stream of copies")
        self.current.copy(*args)
        return args[0]

    def Stream(self, place: torch.device) -> Stream:
        return Stream(self.fake)

    def Event(self, *, enable_timing: bool, blocking: bool) -> StandInEvent:
        return StandInEvent()

    def set_stream(self, stream: Stream) -> None:
        self.current = stream

    def cudart(self) -> Any:
        return SimpleNamespace(cudaHostRegister=lambda *memory: 0, cudaHostUnregister=lambda address: 0)


class Adopted(Cuda):
    """Whose arena the fake device watches."""

    def __init__(self, fake: FakeDevice) -> None:
        super().__init__()
        self.place, self._fake = fake.place, fake

    def open(self, *, arena_bytes: int, limit_bytes: int, host: Bytes, graph: Sequence[Bytes] = ()) -> Tensor:
        arena = super().open(arena_bytes=arena_bytes, limit_bytes=limit_bytes, host=host, graph=graph)
        return self._fake.adopt(arena.fill_(255), [host, *graph])

    def close(self) -> None:
        super().close()
        self._fake.close()


@contextmanager
def cuda_on(fake: FakeDevice) -> Iterator[Cuda]:
    """What is watched within is ``fake``'s, asked for by way of torch.cuda."""
    stand_in = StandIn(fake)
    stubs = {
        "get_device_name": lambda index: "a GPU that is none",
        "get_device_properties": lambda place: SimpleNamespace(total_memory=1 << 40),
        "set_per_process_memory_fraction": lambda share, place: None,
        "empty_cache": lambda: None,
        "current_stream": lambda place: stand_in.kernels,
    }
    with mock.patch.object(cuda, "_cuda", stand_in), mock.patch.multiple(torch.cuda, **stubs), stand_in:
        yield Adopted(fake)
