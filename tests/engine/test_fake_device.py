# SPDX-License-Identifier: Apache-2.0
"""The device of the tests: orderly use gives what it should, and disorder of every kind is seen."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from ooc.plan.program.staging import CopyTo
from ooc.prefetch.arena import Bytes
from tests.engine.fake_device import FakeDevice, Race, WatchedTicket, WrongPlace

SIZE = 64


class Setting:
    """A device with four frames, and as much host memory."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.host: Bytes = np.arange(4 * SIZE, dtype=np.uint8)
        self.arena = device.open(arena_bytes=4 * SIZE, limit_bytes=1000, host=self.host)

    def frame(self, number: int) -> Tensor:
        return self.arena[number * SIZE :][:SIZE]

    def below(self, number: int) -> Tensor:
        return torch.from_numpy(self.host)[number * SIZE :][:SIZE]


@pytest.fixture(params=range(6))
def setting(request: pytest.FixtureRequest) -> Iterator[Setting]:
    with FakeDevice(request.param, eager=(request.param % 3) / 3) as device:
        yield Setting(device)
        device.close()


def test_what_events_keep_apart_comes_out_right(setting: Setting) -> None:
    """Copied in, doubled, copied out of the same frame, which the next block takes."""
    device, frame = setting.device, setting.frame(0)
    came = device.copy(frame, setting.below(0), CopyTo.DEVICE, [])
    device.hold(came)
    frame.mul_(2)
    left = device.copy(setting.below(1), frame, CopyTo.HOST, [device.record()])
    again = device.copy(frame, setting.below(2), CopyTo.DEVICE, [left])
    device.hold(again)
    frame.add_(1)
    back = device.copy(setting.below(3), frame, CopyTo.HOST, [device.record()])
    back.wait()
    expected = np.arange(4 * SIZE, dtype=np.uint8)
    assert (setting.host[SIZE : 2 * SIZE] == 2 * expected[:SIZE]).all()
    assert (setting.host[3 * SIZE :] == expected[2 * SIZE : 3 * SIZE] + 1).all()


def test_a_copy_that_nobody_waits_for_may_not_have_happened() -> None:
    with FakeDevice(0, eager=0.0) as device:
        setting = Setting(device)
        device.copy(setting.frame(0), setting.below(1), CopyTo.DEVICE, [])
        assert device.done[CopyTo.DEVICE] == 0
        device.close()
        assert device.done[CopyTo.DEVICE] == 1


def test_a_kernel_that_does_not_wait_for_its_operand_is_seen(setting: Setting) -> None:
    setting.device.copy(setting.frame(0), setting.below(0), CopyTo.DEVICE, [])
    setting.frame(1).zero_()
    with pytest.raises(Race, match="add"):
        setting.frame(0).add_(1)


def test_a_kernel_that_overwrites_what_is_copied_out_is_seen(setting: Setting) -> None:
    device, frame = setting.device, setting.frame(0)
    device.copy(setting.below(0), frame, CopyTo.HOST, [device.record()])
    frame.sum()  # to read it does no harm
    with pytest.raises(Race, match="zero"):
        frame.zero_()


def test_a_copy_into_a_frame_that_a_pending_kernel_reads_is_seen(setting: Setting) -> None:
    device = setting.device
    before = device.record()
    total = setting.frame(0).sum()
    device.copy(setting.frame(1), setting.below(0), CopyTo.DEVICE, [before])
    with pytest.raises(Race, match="sum"):
        device.copy(setting.frame(0), setting.below(0), CopyTo.DEVICE, [before])
    device.copy(setting.frame(0), setting.below(0), CopyTo.DEVICE, [device.record()])
    assert int(total) == 255 * SIZE


def test_a_copy_out_of_a_frame_that_a_pending_kernel_fills_is_seen(setting: Setting) -> None:
    device = setting.device
    before = device.record()
    setting.frame(0).zero_()
    with pytest.raises(Race, match="zero"):
        device.copy(setting.below(0), setting.frame(0), CopyTo.HOST, [before])


def test_copies_of_both_ways_through_one_frame_need_an_event(setting: Setting) -> None:
    device = setting.device
    device.copy(setting.frame(0), setting.below(0), CopyTo.DEVICE, [])
    for frame, below in ((0, 1), (1, 0)):
        with pytest.raises(Race, match="the other way"):
            device.copy(setting.below(below), setting.frame(frame), CopyTo.HOST, [])


def test_the_disk_must_wait_for_the_wire_and_the_wire_for_the_disk(setting: Setting) -> None:
    device, memory = setting.device, setting.host[:SIZE]
    copied = device.copy(setting.frame(0), setting.below(0), CopyTo.DEVICE, [])
    with pytest.raises(Race, match="SSD"):
        device.request(memory, WatchedTicket(), writes=True)
    device.request(memory, WatchedTicket(), writes=False)
    copied.wait()
    ticket = WatchedTicket()
    device.request(memory, ticket, writes=True)
    with pytest.raises(Race, match="SSD"):
        device.copy(setting.frame(0), setting.below(0), CopyTo.DEVICE, [])
    ticket.waited = True
    device.copy(setting.frame(0), setting.below(0), CopyTo.DEVICE, [])


def test_tensors_of_host_and_device_do_not_mix(setting: Setting) -> None:
    there, here = torch.ones(3, device=setting.device.place), torch.ones(3)
    assert there.device == setting.device.place and (there + 1).device == setting.device.place
    assert here.device.type == "cpu"
    with pytest.raises(WrongPlace):
        there + here
    with pytest.raises(WrongPlace):
        here[there.nonzero()]
    with pytest.raises(WrongPlace):
        there.numpy()
    assert torch.equal(there + here.to(there.device), there * 2)
    assert torch.equal(there.cpu() + here, here * 2) and (there.to("cpu").numpy() == 1).all()


def test_parameters_move_there_and_back_with_their_gradients(setting: Setting) -> None:
    """In place, as an optimizer that holds them must see it."""
    place = setting.device.place
    weight = torch.nn.Parameter(torch.ones(2, 2))
    (weight.sum() * 3).backward()
    gradient = weight.grad
    assert gradient is not None
    weight.grad = None
    weight.data = weight.data.to(place)
    weight.grad = gradient.to(place)
    assert weight.device == place
    torch.optim.SGD([weight], lr=1.0).step()
    weight.grad = None
    weight.data = weight.data.to("cpu")
    assert torch.equal(weight.detach(), torch.full((2, 2), -2.0))


def test_a_kernel_of_its_own_is_launched_once_and_watched_like_any(setting: Setting) -> None:
    """What it is given must have come, and be the device's; what it returns is the device's."""
    device = setting.device

    def doubled(given: Tensor) -> Tensor:
        assert given.device.type == "cpu", "nobody watches inside"
        return torch.from_numpy(2 * given.numpy())

    kernel = device.kernel(doubled)
    launched = device.kernels
    result = kernel(setting.frame(1))
    assert device.kernels == launched + 1
    assert result in device.tensors
    device.copy(setting.frame(0), setting.below(0), CopyTo.DEVICE, [])
    with pytest.raises(Race, match="doubled"):
        kernel(setting.frame(0))
    with pytest.raises(WrongPlace, match="doubled"):
        kernel(setting.below(2))


WAITED_FOR: dict[str, Callable[[Tensor], object]] = {
    "a number": lambda t: int(t[0]),
    "a truth value": lambda t: bool((t > 0).any()),
    "a list": lambda t: t.tolist(),
    "a copy": lambda t: t.cpu(),
    "places": lambda t: t.nonzero(),
    "those of a mask": lambda t: t[t > 1],
    "several where a mask is": lambda t: t.__setitem__(t > 1, t[:2].clone()),
    "repeats": lambda t: torch.repeat_interleave(t, t),
    "distinct ones": lambda t: t.unique(),
    "counts": lambda t: t.bincount(minlength=9),
    "equality": lambda t: torch.equal(t, t + 1),
}
LAUNCHED: dict[str, Callable[[Tensor], object]] = {
    "places, if one knows how many": lambda t: torch.nonzero_static(t, size=2),
    "those of places": lambda t: t[t[:1]],
    "one value where a mask is": lambda t: t.__setitem__(t > 1, 5),
    "some at places": lambda t: t.__setitem__(t[:1].clone(), t[:1].clone()),
    "repeats, if one knows how many": lambda t: torch.repeat_interleave(t, t, output_size=6),
    "a choice": lambda t: torch.where(t > 1, t, 0),
    "bounds": lambda t: torch.aminmax(t),
}


@pytest.mark.parametrize("name", [*WAITED_FOR, *LAUNCHED])
def test_it_is_noted_for_what_the_host_waits(name: str) -> None:
    """Whether by its own operator or in another."""
    compute = (WAITED_FOR | LAUNCHED)[name]
    with FakeDevice(0) as device:
        there = torch.tensor([0, 1, 2, 3]).to(device.place)
        device.asked.clear()
        compute(there)
    assert bool(device.asked) == (name in WAITED_FOR)
