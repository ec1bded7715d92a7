# SPDX-License-Identifier: Apache-2.0
"""Any plan for any tiers, run without a model: every block that is used is there, as it was last written.

Blocks hold one number, changed whenever they are written. Kernels compare; copies, requests of the SSD and the host
happen when they like.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import product
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ooc.engine.program_run import ProgramRun
from ooc.errors import BudgetError, SpillError
from ooc.plan import ColumnPass, Limits, Plan, make_plan
from ooc.plan.layout.passes import sweeps_of
from ooc.plan.program.sequence import Use
from ooc.plan.program.staging import CopyTo, PassingThrough, passing_through
from ooc.plan.program.verifier import verify_plan
from ooc.prefetch.arena import Bytes
from ooc.prefetch.cuda import Cuda, CudaEvent
from ooc.prefetch.device import Device
from ooc.prefetch.device_frames import DeviceWorkspace
from ooc.prefetch.engine import Counters, Engine, Event
from ooc.prefetch.transfers import Transfers
from ooc.stages import PanelSums
from tests.engine.cuda_on_fake import StandIn, Stream, cuda_on
from tests.engine.fake_device import COPIES, Extent, FakeDevice, FakeEvent, Race, WatchedTicket
from tests.examples import examples, ordinary
from tests.plan.workloads import WITH_DEVICE_MEMORY, workload
from tests.prefetch.faults import UNCHECKED


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny tensors: a second thread costs more than it brings."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class LateTicket(WatchedTicket):
    """A request that is carried out when somebody waits for it, if it has not been before."""

    def __init__(self) -> None:
        super().__init__()
        self.work: Any = None

    @property
    def happened(self) -> bool:
        return self.work is None

    def carry_out(self) -> None:
        work, self.work = self.work, None
        if work is not None:
            work()

    def wait(self) -> None:
        self.waited = True
        self.carry_out()

    settle = wait


class Disk(Engine):
    """Blocks by number, in memory; told of to the device."""

    name = "a test's"

    def __init__(self, device: FakeDevice, seed: int) -> None:
        self.counters = Counters()
        self.blocks: dict[int, Bytes] = {}
        self._device = device
        self._random = Random(seed)
        self._open: list[LateTicket] = []
        self._asked: dict[int, list[tuple[bool, LateTicket]]] = {}
        """By block: its requests that nobody has waited for, and whether they write it."""

    def read(self, spans: Sequence[Any], into: Bytes, *, bulk: bool = False) -> LateTicket:
        (block,) = spans
        self.counters.add(read_bytes=into.nbytes)

        def fetch() -> None:
            into[:] = self.blocks[block]

        return self._later(fetch, block, into, writes=True)

    def write(self, spans: Sequence[Any], source: Bytes) -> LateTicket:
        (block,) = spans
        self.counters.add(write_bytes=source.nbytes)

        def keep() -> None:
            self.blocks[block] = source.copy()

        return self._later(keep, block, source, writes=False)

    def _later(self, work: Any, block: int, memory: Bytes, *, writes: bool) -> LateTicket:
        ticket = LateTicket()
        self._device.request(memory, ticket, writes=writes)
        self._note(block, ticket, keeps=not writes)
        ticket.work = work
        self._open.append(ticket)
        if self._random.random() < 0.3:
            self._open.pop(self._random.randrange(len(self._open))).carry_out()
        return ticket

    def _note(self, block: int, ticket: LateTicket, *, keeps: bool) -> None:
        """Nothing on the SSD orders two requests of one block, of which one writes it."""
        asked = [(other, one) for other, one in self._asked.get(block, ()) if not one.waited]
        if any(keeps or other for other, _ in asked):
            raise Race(f"two requests of the SSD for block {block}, the first of which nobody has waited for")
        self._asked[block] = [*asked, (keeps, ticket)]

    def close(self) -> None:
        pass


class Straight(Disk):
    """The same blocks, read into the device's memory and written out of it."""

    def __init__(self, disk: Disk, device: FakeDevice, seed: int) -> None:
        super().__init__(device, seed)
        self.blocks, self.counters, self._asked = disk.blocks, disk.counters, disk._asked
        self.landed = self.lifted = 0

    def read(self, spans: Sequence[Any], into: Any, *, bulk: bool = False) -> LateTicket:
        (block,) = spans
        self.counters.add(read_bytes=into.nbytes)
        self.landed += 1
        memory = Extent.of(into).memory()

        def fetch() -> None:
            memory[:] = self.blocks[block]

        return self._pass_through(fetch, block, into, writes=True)

    def write(self, spans: Sequence[Any], source: Any) -> LateTicket:
        (block,) = spans
        self.counters.add(write_bytes=source.nbytes)
        self.lifted += 1
        memory = Extent.of(source).memory()

        def keep() -> None:
            self.blocks[block] = memory.copy()

        return self._pass_through(keep, block, source, writes=False)

    def _pass_through(self, work: Any, block: int, memory: Any, *, writes: bool) -> LateTicket:
        """Carried out soon, or as late as anybody can bear."""
        ticket = LateTicket()
        self._device.pass_through(memory, ticket, writes=writes)
        self._note(block, ticket, keeps=not writes)
        ticket.work = work
        if self._random.random() < 0.3:
            ticket.carry_out()
        return ticket


class Run:
    """A plan on a device, with nothing to compute but whether blocks are what they should be."""

    def __init__(
        self, plan: Plan, seed: int, fake: FakeDevice, device: Device | None = None, *, straight: bool = False
    ) -> None:
        device = device or fake
        self.plan = plan
        self.disk = Disk(fake, seed)
        self.straight = Straight(self.disk, fake, seed) if straight else None
        self.versions: dict[int, int] = {}
        self.buffered: dict[tuple[int, int], list[tuple[int, Tensor]]] = {}
        """By column pass and slab: what has been put into its buffer."""
        self.wrong: list[tuple[str, Tensor]] = []
        host = np.zeros(plan.host_frames * plan.frame_bytes, dtype=np.uint8)
        arena = device.open(arena_bytes=plan.arena_bytes, limit_bytes=plan.device_limit_bytes, host=host)
        nbytes = plan.blocks.nbytes
        for name, base, grid in zip(plan.blocks.names, plan.blocks.bases, plan.blocks.grids, strict=True):
            lasts = name not in plan.matrices or plan.matrices[name].matrix.kind.lasts
            for block in range(base, base + grid.blocks * grid.slabs if lasts else base):
                self.disk.blocks[block] = np.full(nbytes(block), self.value(block), dtype=np.uint8)

        def locate(block: int) -> tuple[Any, int]:
            return [block], nbytes(block)

        self.transfers = Transfers(
            *(device, host, plan.frame_bytes, self.disk, locate, self.straight),
            slab_of=lambda block: plan.blocks.where(block)[1],
            checks=UNCHECKED,
        )
        self.workspace = DeviceWorkspace(device, arena, plan.frame_bytes, self.transfers, nbytes)

    def value(self, block: int) -> int:
        """What ``block`` holds now."""
        return (37 * block + 101 * self.versions.get(block, 0)) % 251

    def moved(self) -> tuple[int, int, int, int]:
        wire, disk = self.transfers.bytes_moved, self.disk.counters
        return wire[CopyTo.DEVICE], wire[CopyTo.HOST], disk.read_bytes, disk.write_bytes

    def run(self, name: str) -> tuple[int, int, int, int]:
        """Once; the bytes it has moved."""
        before = self.moved()
        run: Any = ProgramRun(
            SimpleNamespace(workspace=self.workspace, plan=self.plan, exchange=None),
            name,
            [],
            PanelSums(lambda tile: None, {"": 1}),
        )  # type: ignore[arg-type]
        run.warm_up()
        self.buffered.clear()
        for item in run.passes:
            run.enter(item.index)
            first, stop = run.program.bounds[item.index]
            for step in range(first, stop):
                if step - 2 >= first:
                    run.end(step - 2)
                run.begin(step)
                self._fill(run, item, step)
                self._compute(run, item, step)
                self.workspace.launched(step)
            for step in range(max(first, stop - 2), stop):
                run.end(step)
        run.finish()
        return tuple(now - then for now, then in zip(self.moved(), before, strict=True))  # type: ignore[return-value]

    def _fill(self, run: Any, item: Any, step: int) -> None:
        """Slab buffers, for this sweep or a later one."""
        filling: list[Event] = []
        for block, in_frame in run.program.fill.get(step, ()):
            sweeps = sweeps_of(item)
            assert sweeps is not None
            name, slab, number = self.plan.blocks.where(block)
            at = number * self.plan.matrices[name].grid.block_nbytes(slab, 0)
            memory = self._buffer(run, sweeps, slab)[at : at + self.plan.blocks.nbytes(block)]
            if in_frame:
                self.workspace.await_read(block)
                memory.copy_(self._view(block))
            else:
                filling.append(self.workspace.fill(block, memory))
            self.buffered.setdefault((sweeps.index, slab), []).append((block, memory))
        for block_under_way in filling:
            self.workspace.hold(block_under_way)

    def _buffer(self, run: Any, item: ColumnPass, slab: int) -> Tensor:
        """The buffer of a slab."""
        name = item.pull.source
        planned = self.plan.matrices[name]
        buffers = self.workspace.region(run.region(name, item.index).frame, item.slab_buffers * planned.slab_stride())
        return buffers[slab % item.slab_buffers * planned.slab_stride() :][: planned.slab_stride()]

    def _compute(self, run: Any, item: Any, step: int) -> None:
        """Read what the step reads, then write what it writes: the number changes when a block is begun."""
        slab = run.program.steps[step].slab
        sweeps = sweeps_of(item)
        if sweeps is not None:
            self._buffer(run, sweeps, slab).sum()  # it is pulled, whoever has filled it
            for block, memory in self.buffered.get((sweeps.index, slab), ()):
                self._check(block, memory, f"step {step}, slab buffer")
        spans = [s for s in run.program.uses.spans if s.first <= step <= s.last and s.use is not Use.COPY]
        for span in spans:
            if span.use is Use.READ:
                self._check(span.block, self._view(span.block), f"step {step}")
        for span in spans:
            if span.use is Use.WRITE:
                if span.first == step:
                    self.versions[span.block] = self.versions.get(span.block, 0) + 1
                self._view(span.block).fill_(self.value(span.block))

    def _view(self, block: int) -> Tensor:
        return self.workspace.matrix(block, torch.uint8, 1, self.plan.blocks.nbytes(block))[0]

    def _check(self, block: int, memory: Tensor, what: str) -> None:
        """Without waiting for the answer."""
        self.wrong.append((f"{what} {self.plan.blocks.where(block)}", (memory != self.value(block)).any()))

    def verdict(self) -> list[str]:
        return [what for what, wrong in self.wrong if wrong]


def ran(
    plan: Plan, seed: int, *, eager: float = 0.2, passed: list[Straight] | None = None, by_cuda: bool = False
) -> list[tuple[int, int, int, int]]:
    """Epochs with an evaluation between them; the bytes that each epoch moved. With ``passed``, some blocks come
    and go straight from and to the SSD: by whom is put there. ``by_cuda``: what asks for streams and events of the
    device is what asks a GPU for them."""
    watched = cuda_on if by_cuda else nullcontext
    with FakeDevice(seed, eager=eager) as fake, torch.no_grad(), watched(fake) as device:
        run = Run(plan, seed, fake, device, straight=passed is not None)
        moved = [run.run("train"), run.run("train")]
        run.run("evaluate")
        run.run("train")
        moved.append(run.run("train"))
        device.close()
        fake.close()
        assert run.verdict() == []
        if passed is not None and run.straight is not None:
            passed.append(run.straight)
    return moved


def planned_bytes(plan: Plan) -> tuple[int, int, int, int]:
    """What every epoch but the first is to move."""
    return plan.to_device_bytes, plan.to_host_bytes, plan.ssd_read_bytes, plan.ssd_write_bytes


@settings(max_examples=examples(12), deadline=None)
@given(
    rows=st.integers(1, 6000),
    layers=st.integers(1, 3),
    device_part=st.floats(0, 1),
    host_part=st.floats(0, 1),
    slab_columns=st.sampled_from([None, 3]),
    seed=st.integers(0, 1 << 20),
    eager=st.sampled_from([0.0, 0.3, 0.9]),
    straight=st.booleans(),
)
def test_every_block_is_what_was_last_written(
    rows: int,
    layers: int,
    device_part: float,
    host_part: float,
    slab_columns: int | None,
    seed: int,
    eager: float,
    straight: bool,
) -> None:
    """And from the second epoch on, the bytes are the plan's."""
    work = workload(rows=rows, width=8, layers=layers)
    device, host = int(2_600_000 + device_part**2 * 1_400_000), int(170_000 + host_part**2 * 800_000)
    try:
        plan = make_plan(work, Limits(device, host, 1024, slab_columns), WITH_DEVICE_MEMORY)
    except BudgetError:
        return
    verify_plan(plan)
    moved = ran(plan, seed, eager=eager, passed=[] if straight else None)
    assert moved[1:] == [planned_bytes(plan)] * 2


def plan_with(rows: int, width: int, device: int, host: int, slab_columns: int) -> Plan:
    return make_plan(
        workload(rows=rows, width=width, layers=2), Limits(device, host, 1024, slab_columns), WITH_DEVICE_MEMORY
    )


@pytest.fixture(scope="module")
def scarce() -> Plan:
    """All three tiers in use, slab buffers filled from below, blocks moved out of the way of regions."""
    plan = plan_with(8000, 8, 3_517_930, 372_176, 3)
    assert plan.ssd_write_bytes and plan.to_host_bytes
    assert any(program.fill for program in plan.unrolled.values())
    assert any(any(program.moves.values()) for program in plan.unrolled.values())
    return plan


def test_a_scarce_plan_runs(scarce: Plan) -> None:
    ran(scarce, 0)


@pytest.fixture(scope="module")
def scarcer() -> Plan:
    """The least device memory: most of what is moved passes through host memory only, slabs as well."""
    return plan_with(8000, 8, 2_700_000, 372_176, 3)


@pytest.mark.parametrize(
    ("which", "seed"), ordinary(product(("scarce", "scarcer"), range(2)), ("scarce", 0), ("scarcer", 1))
)
def test_blocks_come_and_go_straight(which: str, seed: int, request: pytest.FixtureRequest) -> None:
    """Those that host memory would only pass on, as many as are found. Bytes are the plan's all the same."""
    plan: Plan = request.getfixturevalue(which)
    passed: list[Straight] = []
    assert ran(plan, seed, passed=passed)[1:] == [planned_bytes(plan)] * 2
    found = {name: straight_of(plan, name) for name in ("train", "evaluate")}
    assert all(found["train"])
    assert passed[0].landed == 4 * len(found["train"].reads) + len(found["evaluate"].reads)
    assert passed[0].lifted == 4 * len(found["train"].writes) + len(found["evaluate"].writes)


def straight_of(plan: Plan, name: str) -> PassingThrough:
    return passing_through(plan.staged[name], plan.unrolled[name], lambda block: plan.blocks.where(block)[1])


def test_slab_buffers_are_filled_straight_for_later_sweeps_only(scarcer: Plan) -> None:
    """For the sweep that begins, the SSD could not read ahead of it."""
    staging, upper = scarcer.staged["train"], scarcer.unrolled["train"]
    found = straight_of(scarcer, "train").reads
    of_slabs = found - passing_through(staging, upper, lambda block: -1).reads
    assert of_slabs
    for index, block in of_slabs:
        step = next(t.step for t in staging.transfers[index:] if t.block == block)
        assert block in {filled for filled, _ in upper.fill[step]}
        assert scarcer.blocks.where(block)[1] > upper.steps[step].slab


@pytest.mark.parametrize(
    ("owner", "method", "forgetful"),
    [
        (FakeEvent, "wait", lambda self: None),
        (DeviceWorkspace, "hold", lambda self, moved: self.device.hold(moved) if moved.of_stream else None),
        (Transfers, "await_saved", lambda self, block: None),
        (DeviceWorkspace, "_await_left", lambda self, frame: None),
        (DeviceWorkspace, "_behind", lambda self, frame: []),
    ],
    ids=[
        "for what the device does",
        "for the block",
        "for what the SSD writes",
        "kernels for what leaves",
        "copies for what leaves",
    ],
)
def test_a_straight_request_that_is_not_waited_for_is_seen(
    scarce: Plan, scarcer: Plan, owner: type, method: str, forgetful: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, method, forgetful)
    with pytest.raises(Race):
        for seed, plan in product(range(3), (scarce, scarcer)):
            ran(plan, seed, passed=[])


def test_nothing_is_under_way_when_an_error_has_been_settled(scarce: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host knows of the end of every copy and request: the memory may go."""
    with FakeDevice(1) as fake, torch.no_grad():
        run = Run(scarce, 1, fake)
        run.run("train")

        writes = Mock(side_effect=[None] * 2 + [SpillError("the disk is full")])
        monkeypatch.setattr(run.disk, "write", lambda *given: (writes(), Disk.write(run.disk, *given))[1])
        with pytest.raises(SpillError):
            run.run("train")
        run.workspace.settle()
        assert all(fake.host[COPIES[direction]] == len(fake.copies[direction]) > 0 for direction in CopyTo)
        assert all(ticket.waited for _, _, ticket in fake.requests)
        fake.close()


def test_host_frames_that_swap_their_names_hold_what_the_next_epoch_looks_for() -> None:
    """Otherwise it would read it from the SSD once more."""
    plan = plan_with(5000, 16, 4_136_032, 817_803, 6)
    assert any(plan.staged["train"].program.moves.values())
    assert ran(plan, 0)[1:] == [planned_bytes(plan)] * 2


class Forgetful(dict[int, Any]):
    """Whatever is put here is gone."""

    def __setitem__(self, key: int, value: Any) -> None:
        pass


def without_passing(self: Transfers, *arguments: Any, **named: Any) -> None:
    make_transfers(self, *arguments, **named)
    self._passing = Forgetful()


def fill_at_once(self: DeviceWorkspace, block: int, memory: Tensor) -> Event:
    return self.transfers.send(block, CopyTo.DEVICE, memory, [])


def write_at_once(self: DeviceWorkspace, block: int, step: int) -> None:
    self._leaving[self._where[block]] = self.transfers.send(block, CopyTo.HOST, self._memory(block), [])


make_transfers = Transfers.__init__
BROKEN = {
    "kernels for what fills slab buffers": (DeviceWorkspace, "hold", lambda self, transfer: None),
    "the host for events": (FakeEvent, "wait", lambda self: None),
    "the host for the SSD": (LateTicket, "wait", lambda self: None),
    "the host for what it writes to the SSD": (FakeEvent, "happened", property(lambda self: True)),
    "kernels for what they read": (DeviceWorkspace, "await_read", lambda self, block: None),
    "kernels for what leaves": (DeviceWorkspace, "_await_left", lambda self, frame: None),
    "copies into frames for kernels and what leaves": (DeviceWorkspace, "_behind", lambda self, frame: []),
    "copies into frames for the last kernels that used them": (DeviceWorkspace, "vacate", lambda self, step: None),
    "copies into slab buffers for kernels": (DeviceWorkspace, "fill", fill_at_once),
    "copies out of frames for kernels": (DeviceWorkspace, "write", write_at_once),
    "whoever uses a host frame for copies through it": (Transfers, "__init__", without_passing),
    "copies for what the SSD reads": (Transfers, "await_read", lambda self, block: None),
    "frames and reads for what the SSD writes": (Transfers, "await_saved", lambda self, block: None),
    "the end for what is to be saved": (Transfers, "_save_what_has_come", lambda self: self._unsaved.clear()),
}
"""Who waits for what, and how to make them forget it."""


@pytest.mark.parametrize("by_cuda", [False, True], ids=["", "by torch.cuda"])
@pytest.mark.parametrize("which", BROKEN)
def test_whoever_forgets_to_wait_is_seen(
    scarce: Plan, scarcer: Plan, which: str, by_cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a race; what never waits for a block's write to be asked for looks for a block that is nowhere."""
    owner, method, forgetful = BROKEN[which]
    monkeypatch.setattr(owner, method, forgetful)
    with pytest.raises(KeyError if which == "the end for what is to be saved" else Race):
        for seed, plan in product(range(3), (scarce, scarcer)):
            ran(plan, seed, by_cuda=by_cuda)


def test_what_torch_cuda_is_asked_for_keeps_everything_apart(scarce: Plan, scarcer: Plan) -> None:
    """Its streams and events are those of the tests' device: no race, and the plan's bytes."""
    for plan, passed in (scarce, None), (scarcer, []):
        assert ran(plan, 0, passed=passed, by_cuda=True)[1:] == [planned_bytes(plan)] * 2


def copy_without_an_end(self: Cuda, *given: Any) -> Event:
    before = self.record()
    copy(self, *given)
    return before


def set_once(self: StandIn, stream: Stream) -> None:
    self.current = self.current if not self.current.of_kernels else stream


copy = Cuda.copy
BROKEN_CUDA = {
    "copies, for events": (Stream, "wait_event", lambda self, event: None),
    "kernels, for events": (Cuda, "hold", lambda self, event: None),
    "events behind copies": (Cuda, "copy", copy_without_an_end),
    "events behind kernels": (Cuda, "record", lambda self: CudaEvent(self._streams[CopyTo.HOST], timed=False)),
    "the host, for events": (CudaEvent, "wait", lambda self: None),
    "the host, whether something has happened": (CudaEvent, "happened", property(lambda self: True)),
    "the stream is left current": (StandIn, "set_stream", set_once),
}
"""What ``ooc.prefetch.cuda`` could forget."""


@pytest.mark.parametrize("which", BROKEN_CUDA)
def test_what_torch_cuda_is_not_asked_for_is_seen(
    scarce: Plan, scarcer: Plan, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, method, forgetful = BROKEN_CUDA[which]
    monkeypatch.setattr(owner, method, forgetful)
    with pytest.raises(Race):
        for seed, plan in product(range(3), (scarce, scarcer)):
            ran(plan, seed, by_cuda=True)
