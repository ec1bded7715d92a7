# SPDX-License-Identifier: Apache-2.0
"""Measuring gives figures that a plan can be made of, within its memory and disk, and leaves nothing behind."""

import threading
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from ooc.errors import BudgetError, OptionError
from ooc.events import Event, TaskAdvanced, TaskFinished, TaskStarted, ignore
from ooc.kernels import pulls
from ooc.kernels.edges import TileEdges
from ooc.plan import Hardware
from ooc.profile import Profile, bench, disk, epoch, measure, processor, profile
from ooc.profile.bench import Bench, Round, settled
from tests.examples import thorough


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sixteenth of everything, twice: fast, and as wrong as that is."""
    monkeypatch.setattr(bench, "_ROUNDS", 2)
    monkeypatch.setattr(bench, "_ALIKE", 1e9)
    monkeypatch.setattr(disk, "FILE_BYTES", 32 << 20)
    monkeypatch.setattr(disk, "_MEMORY_BYTES", 8 << 20)
    monkeypatch.setattr(disk, "_WINDOW_S", 0.005)
    monkeypatch.setattr(processor, "POOL_BYTES", 8 << 20)
    monkeypatch.setattr(processor, "_EDGES", 1 << 16)
    monkeypatch.setattr(processor, "cache_bytes", lambda device: 4 << 20)
    monkeypatch.setattr(epoch, "_TILES", 16)
    monkeypatch.setattr(epoch, "_ROWS", 16 * 1024)
    monkeypatch.setattr(epoch, "_SCARCE", 5_000_000)


@pytest.fixture(name="bench")
def a_bench() -> Iterator[Bench]:
    with Bench(torch.device("cpu"), 2) as made:
        yield made


@pytest.mark.usefixtures("small")
def test_a_measured_machine_can_be_planned_by(tmp_path: Path) -> None:
    events: list[Event] = []
    threads = threading.active_count()
    found = measure(tmp_path, events.append, threads=2)
    assert Hardware.from_dict(found.hardware.as_dict()) == found.hardware, "every rate is a positive number"
    assert Profile.from_dict(found.as_dict(), where="here") == found
    assert found.hardware.threads == 2 and not found.hardware.has_device_memory
    assert 0 <= found.hardware.overlap <= 1
    assert found.date in found.hardware.source
    assert 0 <= found.others <= 1
    assert {"SSD read", "SSD write", "SSD both ways", "host copy", "aggregation", "aggregation in cache"} <= {
        reading.what for reading in found.readings
    }
    assert isinstance(events[0], TaskStarted) and isinstance(events[-1], TaskFinished)
    assert [e.done for e in events if isinstance(e, TaskAdvanced)] == list(range(events[0].total))
    assert list(tmp_path.iterdir()) == [] and threading.active_count() == threads


@pytest.mark.usefixtures("small")
def test_pulls_are_timed_with_the_kernels_of_training(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the device, whatever it is; with what they would have to wait for at hand, as it is in training."""
    timed: list[tuple[int, ...]] = []

    def sums(tile: TileEdges, source_NW: Tensor) -> Tensor:
        assert tile.parts_P2 is not None and not len(tile.parts_P2)
        timed.append((tile.rows, tile.indices_E.numel(), *source_NW.shape))
        return source_NW

    kernels = replace(pulls.BY_DEVICE["cpu"](), sums=sums)
    monkeypatch.setitem(pulls.BY_DEVICE, "cpu", lambda: kernels)
    processor.pull_times(bench, torch.ones(1 << 16))
    widths = {row_bytes // 4 for row_bytes in processor.ROW_BYTES}
    expected = {(1024, 1024 * degree, (1 << 16) // width, width) for degree in processor.DEGREES for width in widths}
    assert set(timed) == expected


@pytest.mark.parametrize("cache_bytes", thorough([0, 4 << 20, 1 << 40], 4 << 20))
@pytest.mark.usefixtures("small")
def test_what_is_computed_of_edges_is_timed_whatever_the_cache(
    cache_bytes: int, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A virtual machine may tell of a cache larger than what is pulled from, or of none."""
    monkeypatch.setattr(processor, "cache_bytes", lambda device: cache_bytes)
    took = epoch.EpochTimes(per_step=1e-4, per_tile=1e-4, per_block=1e-4, per_byte=1e-9)
    assert profile._measured_processor(bench, took).computed_bytes_per_s > 0


@pytest.mark.usefixtures("small")
def test_the_number_of_torch_s_threads_is_as_before_even_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()

    def fail(*arguments: object, **options: object) -> None:
        raise BudgetError("no")

    monkeypatch.setattr(profile, "measure_epoch", fail)
    with pytest.raises(BudgetError):
        measure(tmp_path, ignore, threads=2)
    assert torch.get_num_threads() == before
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1_000_000))
    with pytest.raises(BudgetError, match=r"needs a file of 537 MB, where 1.00 MB are free; give another spill_dir=$"):
        measure(tmp_path, ignore)


@pytest.mark.usefixtures("small")
def test_the_file_that_is_measured_is_random_throughout(tmp_path: Path) -> None:
    """A disk that compresses would look faster."""
    with ExitStack() as stack:
        probe = disk._Probe(tmp_path, 32 << 20, stack)
        probe._fill()
        memory = probe._arena.view(0, disk._MEMORY_BYTES)
        assert len(zlib.compress(memory.tobytes(), 1)) > 0.99 * memory.nbytes


def test_memory_too_scarce_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "available_memory_bytes", lambda: 100_000_000)
    with pytest.raises(BudgetError, match=r"needs 300 MB of memory, 100 MB are free; end other programs$"):
        measure(tmp_path, ignore)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="does not exist"):
        measure(tmp_path / "missing", ignore)


@pytest.mark.parametrize("waited_s", [0.0, 0.3])
def test_so_many_times_the_work_takes_so_many_times_as_long(waited_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """By clocks that tasks advance; not counted is how long threads ``waited`` for a processor."""
    busy_s = 0.0

    def compute(task: int) -> None:
        nonlocal busy_s
        busy_s += 0.25

    monkeypatch.setattr("ooc.profile.bench.perf_counter", lambda: busy_s + waited_s * busy_s)
    monkeypatch.setattr("ooc.profile.bench.process_time", lambda: busy_s)
    monkeypatch.setattr("ooc.profile.bench.waited_s", lambda: waited_s * busy_s)
    with Bench(torch.device("cpu"), 1) as bench:
        assert [bench.seconds(compute, tasks) for tasks in (3, 12)] == pytest.approx([0.75, 3.0])


def test_what_a_gpu_does_fast_is_repeated_between_two_looks_at_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tasks in turn, until waiting for the device, 60 µs each time, is next to nothing."""
    now_s = 0.0
    numbers: list[int] = []

    def compute(task: int) -> None:
        nonlocal now_s
        now_s += 1e-4
        numbers.append(task)

    def wait(device: torch.device) -> None:
        nonlocal now_s
        now_s += 60e-6

    monkeypatch.setattr("ooc.profile.bench.perf_counter", lambda: now_s)
    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    with Bench(torch.device("cuda"), 1) as bench:
        assert bench.seconds(compute, 2) == pytest.approx(2e-4, rel=0.02)
    assert numbers == [0, 1] * (len(numbers) // 2)


def test_the_slab_of_a_gpu_is_many_times_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most a share of free memory; the processor's is as it is."""
    free = 80 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 << 30))
    monkeypatch.setattr(processor, "cache_bytes", lambda device: 50 << 20)
    gpu = torch.device("cuda")
    assert processor.pool_bytes(gpu) == 800 << 20
    free = (1 << 30) + 5
    assert processor.pool_bytes(gpu) == 256 << 20
    monkeypatch.setattr(processor, "cache_bytes", lambda device: 0)
    free = 80 << 30
    assert processor.pool_bytes(gpu) == processor.pool_bytes(torch.device("cpu")) == processor.POOL_BYTES


def test_rounds_go_on_until_two_of_them_agree() -> None:
    """By the clock, and at least five, at most fifteen: then nobody was in the way of these two."""
    disturbed = [Round(clock_s, 1.0) for clock_s in (2.0, 1.5, 3.0, 1.1, 4.0)]
    assert not settled(disturbed)
    assert settled([*disturbed, Round(1.12, 1.0)])
    assert not settled([Round(1.0, 1.0)] * 4)
    assert settled([Round(1.0, 1.0)] * 5)
    growing = [Round(1.5**i, 1.0) for i in range(15)]
    assert not settled(growing[:14])
    assert settled(growing)


def test_the_median_round_counts_without_what_others_took(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor by less than the processor time, of which a thread that waited for the interpreter took none."""
    timed = [Round(1.0, 0.8), Round(1.01, 0.8), Round(5.0, 0.9, waited_s=3.7), Round(1.2, 1.1), Round(7.0, 0.9, 6.5)]
    rounds = iter([Round(9.0, 9.0), *timed])  # the first one warms up
    monkeypatch.setattr(bench, "_on_threads", lambda compute, tasks: next(rounds))
    assert [round(one.own_s, 2) for one in timed] == [1.0, 1.01, 1.3, 1.2, 0.9]
    assert bench.seconds(lambda task: None, 1) == 1.01


def test_one_thread_launches_the_operators_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """So their seconds are not shared among the cores of the host."""
    ones = torch.ones
    with Bench(torch.device("cuda"), 4) as gpu:
        monkeypatch.setattr(torch, "ones", lambda *shape, device: ones(*shape))
        monkeypatch.setattr(gpu, "_on_device", lambda compute, tasks: Round(0.005 * tasks, 0.005 * tasks))
        assert processor.operator_seconds(gpu) == pytest.approx(5e-6)
