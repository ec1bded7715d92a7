# SPDX-License-Identifier: Apache-2.0
"""What the CUDA device asks of torch.cuda, with a torch.cuda that only takes notes: there is no GPU here.

That it asks for the right things in the right order, not that a GPU does them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ooc.errors import BudgetError
from ooc.plan.program.staging import CopyTo
from ooc.prefetch import cuda
from ooc.prefetch.cuda import Cuda, CudaEvent
from ooc.prefetch.device import Rows


class Notes:
    """A torch.cuda whose streams are names and whose events are numbers."""

    def __init__(self) -> None:
        self.taken: list[tuple[Any, ...]] = []
        self.streams = iter(("in", "out", "side"))
        self.refuses_to_lock = 0
        self.current = self.stream_named("kernels")

    def stream_named(self, name: str) -> Any:
        return SimpleNamespace(
            name=name,
            wait_event=lambda event: self.taken.append((name, "waits", event.number)),
            wait_stream=lambda other: self.taken.append((name, "waits for", other.name)),
            synchronize=lambda: self.taken.append((name, "ends")),
        )

    def Stream(self, place: torch.device) -> Any:
        return self.stream_named(next(self.streams))

    def Event(self, *, enable_timing: bool, blocking: bool) -> Any:
        assert blocking
        number = sum(note[1] == "records" for note in self.taken)

        def record(stream: Any) -> None:
            self.taken.append((stream.name, "records", number))

        def elapsed_time(later: Any) -> float:
            assert enable_timing, "an event that was not told to note when it happens"
            return 1000.0 * (later.number - number)

        known = {"query": lambda: True, "synchronize": lambda: None, "elapsed_time": elapsed_time}
        return SimpleNamespace(number=number, record=record, **known)

    def set_stream(self, stream: Any) -> None:
        self.taken.append((stream.name, "is current"))

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.set_stream(stream)
        yield

    def cudart(self) -> Any:
        def register(address: int, nbytes: int, flags: int) -> int:
            self.taken.append(("host", "locked", nbytes))
            return self.refuses_to_lock

        return SimpleNamespace(
            cudaHostRegister=register, cudaHostUnregister=lambda address: self.taken.append(("host", "unlocked"))
        )


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> Notes:
    notes = Notes()
    monkeypatch.setattr(cuda, "_cuda", notes)
    for name, stub in {
        "get_device_name": lambda index: "a GPU",
        "get_device_properties": lambda place: SimpleNamespace(total_memory=1000),
        "set_per_process_memory_fraction": lambda share, place: notes.taken.append(("memory", "at most", share)),
        "empty_cache": lambda: None,
        "current_stream": lambda place: notes.current,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    return notes


def opened(limit_bytes: int = 500) -> tuple[Cuda, torch.Tensor, Any]:
    device = Cuda()
    device.place = torch.device("cpu")
    host, facts = np.arange(64, dtype=np.uint8), np.zeros(8, dtype=np.uint8)
    return device, device.open(arena_bytes=64, limit_bytes=limit_bytes, host=host, graph=[facts]), host


@pytest.mark.parametrize(("limit", "share"), [(500, 0.5), (5000, 1.0)])
def test_the_budget_is_the_processs_share_until_it_is_closed(notes: Notes, limit: int, share: float) -> None:
    device, arena, _ = opened(limit)
    assert arena.dtype is torch.uint8 and arena.nbytes == 64
    assert notes.taken == [("memory", "at most", share), ("host", "locked", 64), ("host", "locked", 8)]
    notes.taken.clear()
    device.close()
    unlocked = [("host", "unlocked")] * 2
    assert notes.taken == [
        *((name, "ends") for name in ("in", "out", "kernels")),
        *unlocked,
        ("memory", "at most", 1.0),
    ]
    notes.taken.clear()
    device.close()
    assert ("host", "unlocked") not in notes.taken


def test_the_arena_is_given_back_whoever_has_views_of_it(notes: Notes) -> None:
    """A second trainer of the process has as much of the GPU as the first had, before anything is collected."""
    device, arena, _ = opened()
    view = arena[8:16].view(torch.float32)
    device.close()
    assert arena.untyped_storage().nbytes() == view.untyped_storage().nbytes() == 0


def test_copies_go_behind_their_events_in_the_stream_of_their_way(notes: Notes) -> None:
    device, arena, host = opened()
    notes.taken.clear()
    kernels = device.record()
    came = device.copy(arena, torch.from_numpy(host), CopyTo.DEVICE, [kernels])
    device.hold(came)
    left = device.copy(torch.from_numpy(host), arena, CopyTo.HOST, [kernels, came])
    assert left.happened
    assert (arena.numpy() == np.arange(64)).all()
    assert notes.taken == [
        ("kernels", "records", 0),
        *(("in", "waits", 0), ("in", "is current"), ("kernels", "is current"), ("in", "records", 1)),
        ("kernels", "waits", 1),
        *(("out", "waits", 0), ("out", "waits", 1)),
        *(("out", "is current"), ("kernels", "is current"), ("out", "records", 2)),
    ]


def test_rows_go_to_other_processes_in_a_stream_of_their_own(notes: Notes) -> None:
    """By their numbers or as they lie, packed in memory of the device, to the host and back."""
    device, _, _ = opened()
    matrix_NC, others_NC = torch.arange(20.0).view(10, 2), torch.zeros(10, 2)
    staging = torch.zeros(64, dtype=torch.uint8)
    side = device.side(64)
    notes.taken.clear()
    kernels = device.record()
    rows = [torch.tensor([1, 4, 9], dtype=torch.int32), torch.tensor([], dtype=torch.int32)]
    side.take(staging[:40], [*(Rows(matrix_NC, some) for some in rows), Rows(matrix_NC[2:4])], kernels)
    there = side.put([Rows(others_NC, rows[0]), Rows(others_NC[5:7])], staging[:40])
    device.hold(there)
    assert torch.equal(others_NC[[1, 4, 9]], matrix_NC[[1, 4, 9]]) and torch.equal(others_NC[5:7], matrix_NC[2:4])
    assert int(others_NC.count_nonzero()) == 10
    assert notes.taken == [
        ("kernels", "records", 0),
        *(("side", "waits", 0), ("side", "is current"), ("side", "records", 1)),
        *(("side", "is current"), ("side", "records", 2)),
        ("kernels", "waits", 2),
    ]
    notes.taken.clear()
    device.close()
    assert notes.taken[0] == ("side", "ends")


def test_kernels_run_in_the_stream_that_is_current_when_a_program_begins(notes: Notes) -> None:
    device, _, _ = opened()
    device.record()
    notes.current = notes.stream_named("a user's")
    device.begin()
    device.record()
    device.begin()
    assert notes.taken[-3:] == [
        *(("kernels", "records", 0), ("a user's", "waits for", "kernels"), ("a user's", "records", 1))
    ]


def test_events_are_timed_where_somebody_wants_to_know(notes: Notes) -> None:
    device = Cuda(timed=True)
    first, _, third = (device.record() for _ in range(3))
    assert isinstance(first, CudaEvent) and isinstance(third, CudaEvent)
    assert third.seconds_since(first) == 2.0


def test_memory_that_cannot_be_had_is_one_line(notes: Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    notes.refuses_to_lock = 2
    with pytest.raises(BudgetError, match=r"does not lock 64 B of host memory \(error 2\).*host_budget="):
        opened()
    notes.refuses_to_lock = 0

    def refuse(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(BudgetError, match=r"a GPU refuses an arena of 64 B.*gpu_budget="):
        opened()
    assert notes.taken[-3:] == [*[("host", "unlocked")] * 2, ("memory", "at most", 1.0)]
