# SPDX-License-Identifier: Apache-2.0
"""A machine measured: the ``Hardware`` that the planner takes, and every figure for people to read."""

import datetime
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, Self

import psutil
import torch

from ooc.errors import BudgetError, HardwareError, OptionError
from ooc.events import Listener, TaskAdvanced, TaskFinished, TaskStarted
from ooc.memory import available_memory_bytes
from ooc.plan.hardware import Curve, Hardware, Processor, Wire
from ooc.prefetch.arena import Arena
from ooc.profile import memory, processor
from ooc.profile.bench import Bench
from ooc.profile.disk import DiskTimes, measure_disk
from ooc.profile.epoch import EpochTimes, measure_epoch
from ooc.profile.processor import PullTimes
from ooc.sizes import format_size

LEAST_MEMORY_BYTES = 300_000_000
"""What measuring takes at most beyond the interpreter with torch."""
_TASK = "measuring this machine"
_NEAR_SHARE, _MIDDLING_SHARE = 0.125, 0.5
"""Of the cache: a slab so small lies in it whole, beside whatever else is there; of a larger one some part."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One figure for people: ``what`` was measured, at which ``setting``, in ``unit``."""

    what: str
    setting: str
    value: float
    unit: str


@dataclass(frozen=True, slots=True)
class Profile:
    """``hardware`` as of ``date`` (ISO 8601), and the readings behind it. ``others``: the share of the processors that
    other processes took meanwhile; where it is large, the clock's readings tell little."""

    hardware: Hardware
    date: str
    readings: tuple[Reading, ...]
    others: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """For a file: ``from_dict`` gives the same again."""
        return {
            "date": self.date,
            "hardware": self.hardware.as_dict(),
            "readings": [asdict(reading) for reading in self.readings],
            "others": self.others,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, where: str) -> Self:
        """The inverse of ``as_dict``; HardwareError naming ``where`` and what is wrong."""
        try:
            readings = tuple(Reading(**reading) for reading in data["readings"])
            hardware = Hardware.from_dict(data["hardware"], where=where)
            return cls(hardware, str(data["date"]), readings, float(data["others"]))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise HardwareError(f"{where}: this is no profile of a machine: {error}") from None


def measure(folder: Path, listener: Listener, *, device: str = "cpu", threads: int | None = None) -> Profile:
    """Measure this machine with the disk of ``folder``, about fifteen seconds. ``device``: ``"cpu"`` or ``"cuda"``.

    Takes a file of 537 MB in ``folder`` and 300 MB of memory while it runs, and leaves neither. BudgetError where there
    is no room for them. The CUDA side has not been run on a machine that has one.
    """
    if not folder.is_dir():
        raise OptionError(f"spill folder {folder} does not exist")
    free = available_memory_bytes()
    if free < LEAST_MEMORY_BYTES:
        raise BudgetError(
            f"measuring this machine needs {format_size(LEAST_MEMORY_BYTES)} of memory, {format_size(free)} are free; "
            "end other programs"
        )
    threads = threads or torch.get_num_threads()
    usage = _Usage()
    with _Progress(listener).task() as step, Bench(torch.device(device), threads) as bench:
        step("disk")
        disk = measure_disk(folder)
        step("memory and processor")
        rates = _Rates.measured(bench)
        step("host copies")
        host = rates if device == "cpu" else _host_rates(threads)
        step("executor")
        epoch = measure_epoch(folder, threads=threads, cores=bench.cores)
    wire = memory.wire(bench.device) if device == "cuda" else None
    date = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    hardware = _hardware(bench, disk, rates, host.copy_bytes_per_s, epoch, wire, date)
    return Profile(
        hardware,
        date,
        tuple(_readings(hardware, disk, rates, host.copy_bytes_per_s)),
        usage.of_others(),
    )


class _Usage:
    """Of the processors, since it was made."""

    def __init__(self) -> None:
        self._begun, self._mine, self._all = self._now()

    def of_others(self) -> float:
        """The share that other processes have had, from 0 to 1."""
        now, mine, everybody = self._now()
        had = (everybody - self._all) - (mine - self._mine)
        cores = psutil.cpu_count() or 1
        return min(1.0, max(0.0, had / (cores * max(1e-9, now - self._begun))))

    def _now(self) -> tuple[float, float, float]:
        times = psutil.cpu_times()
        return perf_counter(), process_time(), times.user + times.nice + times.system


@dataclass(frozen=True, slots=True)
class _Rates:
    """Of what computes."""

    far: PullTimes
    near: PullTimes | None
    pool_bytes: int
    cache_bytes: int
    gather_rows_per_s: float
    multiplies_per_s: dict[str, float]
    stream_bytes_per_s: float
    operator_s: float
    copy_bytes_per_s: float

    @classmethod
    def measured(cls, bench: Bench) -> Self:
        size = processor.pool_bytes(bench.device)
        arena = Arena(size) if bench.device.type == "cpu" else None
        try:
            pool = _pool(bench, arena, size)
            cache = processor.cache_bytes(bench.device)
            far, near = processor.pull_times(bench, pool), None
            if 0 < cache < size:
                small, middling = (pool[: int(share * cache) // 4] for share in (_NEAR_SHARE, _MIDDLING_SHARE))
                near = processor.pull_times(bench, small)
                cache = max(small.nbytes, processor.kept_in_cache_bytes(bench, middling, near, far))
            return cls(
                far=far,
                near=near,
                pool_bytes=size,
                cache_bytes=cache if near is not None else 0,
                gather_rows_per_s=processor.gather_rows_per_s(bench, pool),
                multiplies_per_s=dict(processor.multiplies_per_s(bench)),
                stream_bytes_per_s=processor.stream_bytes_per_s(bench, pool),
                operator_s=processor.operator_seconds(bench),
                copy_bytes_per_s=memory.copy_bytes_per_s(bench, pool),
            )
        finally:
            if arena is not None:
                arena.close()


_BETWEEN_OPERATORS = 1.2
"""How much longer a GPU's host takes for an operator of an epoch than for one in a loop: the interpreter has to find
out which is next. 1.1 for GraphSAGE and 1.3 for GCN, where nothing but the host takes any time (docs/gpu-executor.md).
"""


def _pool(bench: Bench, arena: Arena | None, size: int) -> torch.Tensor:
    """Memory to work in, ``size`` bytes, touched, as float32."""
    if arena is None:
        return torch.ones(size // 4, device=bench.device)
    pool = torch.from_numpy(arena.view(0, size)).view(torch.float32)
    return pool.fill_(1.0)


def _host_rates(threads: int) -> _Rates:
    """Those of the CPU beside a GPU."""
    with Bench(torch.device("cpu"), threads) as bench:
        return _Rates.measured(bench)


def _hardware(
    bench: Bench,
    disk: DiskTimes,
    rates: _Rates,
    host_copy: float,
    epoch: EpochTimes,
    wire: Wire | None,
    date: str,
) -> Hardware:
    cuda = bench.device.type == "cuda"
    return Hardware(
        name=torch.cuda.get_device_name(bench.device) if cuda else processor_name(),
        source=f"measured by ooc profile, {date}",
        threads=bench.threads,
        host_memory_bytes=int(psutil.virtual_memory().total),
        device_memory_bytes=int(torch.cuda.mem_get_info(bench.device)[1]) if cuda else 0,
        processor=Processor(
            pull_seconds_per_edge=rates.far.per_edge,
            multiplies_per_s=rates.multiplies_per_s,
            stream_bytes_per_s=rates.stream_bytes_per_s,
            seconds_per_step=epoch.per_step,
            seconds_per_tile=epoch.per_tile,
            seconds_per_operator=rates.operator_s * (_BETWEEN_OPERATORS if cuda else 1),
            pull_seconds_per_row=rates.far.per_row,
            cached_pull_seconds_per_edge=rates.near.per_edge if rates.near is not None else None,
            cache_bytes=rates.cache_bytes,
        ),
        disk=disk.disk,
        host_copy_bytes_per_s=host_copy,
        seconds_per_block=epoch.per_block,
        overlap=epoch.overlap,
        wire=wire,
    )


def processor_name() -> str:
    """The CPU's model."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "this machine"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "this machine"


def _readings(hardware: Hardware, disk: DiskTimes, rates: _Rates, host_copy: float) -> Iterator[Reading]:
    for what, curve in (("SSD read", disk.disk.read_bytes_per_s), ("SSD write", disk.disk.write_bytes_per_s)):
        for size, rate in curve.points:
            yield Reading(what, f"{_binary(size)} requests", rate, "B/s")
    for depth, rate in disk.by_depth.items():
        yield Reading("SSD read", f"1 MiB requests, {depth} at once", rate, "B/s")
    yield Reading("SSD both ways", "1 MiB requests", disk.disk.both_ways_bytes_per_s, "B/s")
    yield Reading("SSD latency", "4 KiB", disk.disk.latency_s, "s")
    yield Reading("host copy", "128 MiB", host_copy, "B/s")
    if hardware.wire is not None:
        yield Reading("to the device", "64 MiB, pinned", hardware.wire.to_device_bytes_per_s, "B/s")
        yield Reading("to the host", "64 MiB, pinned", hardware.wire.to_host_bytes_per_s, "B/s")
        yield Reading("device copy", _binary(rates.pool_bytes), rates.copy_bytes_per_s, "B/s")
    yield Reading("gather", "random rows of 512 B", 512 * rates.gather_rows_per_s, "B/s")
    yield from _pull_readings("aggregation", rates.far)
    if rates.near is not None:
        yield from _pull_readings("aggregation in cache", rates.near)
        yield Reading("cache", "what a slab gets of it", rates.cache_bytes, "B")
    for dtype, rate in rates.multiplies_per_s.items():
        yield Reading("dense product", dtype, rate, "multiply-adds/s")
    yield Reading("element-wise", "tiles of 1,024 × 128", rates.stream_bytes_per_s, "B/s")
    yield Reading("operator", "on next to nothing", rates.operator_s, "s")
    yield Reading("executor", "a step", hardware.processor.seconds_per_step, "s")
    yield Reading("executor", "a tile", hardware.processor.seconds_per_tile, "s")
    yield Reading("executor", "a block to or from the SSD", hardware.seconds_per_block, "s")
    yield Reading("overlap", "of the SSD with computing", hardware.overlap, "")


def _pull_readings(what: str, times: PullTimes) -> Iterator[Reading]:
    curve: Curve = times.per_edge
    for row_bytes, seconds in curve.points:
        yield Reading(what, f"rows of {row_bytes:.0f} B", 1 / seconds, "edges/s")
    for degree, rate in times.by_degree.items():
        yield Reading(what, f"rows of 512 B, {degree} edges each", rate, "edges/s")


def _binary(size: float) -> str:
    return f"{size / (1 << 20):.0f} MiB" if size >= 1 << 20 else f"{size / (1 << 10):.0f} KiB"


class _Progress:
    """Parts done, told to a listener."""

    parts = 4

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._done = -1

    @contextmanager
    def task(self) -> Iterator[Any]:
        self._listener(TaskStarted(_TASK, self.parts, "parts"))
        try:
            yield self._next
        finally:
            self._listener(TaskFinished(_TASK))

    def _next(self, part: str) -> None:
        self._done += 1
        self._listener(TaskAdvanced(_TASK, self._done))
