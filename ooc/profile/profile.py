# SPDX-License-Identifier: Apache-2.0
"""The measured machine: the ``Hardware`` for the planner, and its figures for people.

Profiles are kept in the user's cache folder, one for each machine, disk and device. Another machine, processor, number
of cores, GPU, filesystem or version of this program has a profile of its own, so several machines may share a home
folder. A damaged profile counts as missing.
"""

import contextlib
import datetime
import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, Self

import psutil
import torch
from torch import Tensor

from ooc.errors import BudgetError, HardwareError, OptionError
from ooc.events import Listener, reported
from ooc.memory import available_memory_bytes, cache_folder, mount_of, processor_name
from ooc.plan import UNMEASURED, UNMEASURED_DEVICE, Hardware
from ooc.plan.hardware import Curve, Processor, Wire
from ooc.prefetch.arena import Arena
from ooc.profile import processor
from ooc.profile.bench import Bench
from ooc.profile.disk import measure_disk
from ooc.profile.epoch import EpochTimes, measure_epoch
from ooc.sizes import format_size
from ooc.storage.array import replace_file
from ooc.version import __version__

LEAST_MEMORY_BYTES = 300_000_000
"""The most memory that measuring takes, beyond the interpreter with torch."""
_PARTS = 4
_NEAR_SHARE, _MIDDLING_SHARE = 0.125, 0.5
"""Fractions of the cache: a slab of the first size lies in it whole, beside everything else; of one of the second size,
a part does."""
_LEAST_CACHE_BYTES = 8 << 20
"""Bytes of the last cache if the system does not tell."""
_BETWEEN_OPERATORS = 1.2
"""How much longer a GPU's host takes for an operator in an epoch than in a loop, since the interpreter must find out
which is next: 1.1 for GraphSAGE and 1.3 for GCN, where only the host takes any time (docs/gpu-executor.md)."""
_OVERLAP = 0.4
"""The overlap of the SSD with computing. Measured by epochs of a second it varied from 0.04 to 0.82 within a quarter of
an hour on one machine; 16 trainings that use the SSD are forecast equally well with 0.3 to 0.45 for all of them
(docs/profile.md)."""
_PIECE_VALUES = 1 << 18
_PINNED_BYTES = 64 << 20
_COPY_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Reading:
    """One figure for people: ``what`` was measured, at which ``setting``, in ``unit``."""

    what: str
    setting: str
    value: float
    unit: str


@dataclass(frozen=True, slots=True)
class Profile:
    """The ``hardware`` as measured on ``date`` (ISO 8601). ``others``: the share of the processors that other processes
    took meanwhile; if it is large, the figures are unreliable."""

    hardware: Hardware
    date: str
    others: float = 0.0

    @property
    def readings(self) -> list[Reading]:
        """The figures of ``hardware``, for people."""
        return list(_readings(self.hardware))

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for a file; ``from_dict`` reads it back."""
        return {
            "date": self.date,
            "hardware": self.hardware.as_dict(),
            "readings": [asdict(reading) for reading in self.readings],
            "others": self.others,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, where: str) -> Self:
        """The inverse of ``as_dict``. Raises HardwareError naming ``where`` and what is wrong."""
        try:
            hardware = Hardware.from_dict(data["hardware"], where=where)
            return cls(hardware, str(data["date"]), float(data["others"]))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise HardwareError(f"{where}: this is no profile of a machine: {error}") from None


def measure(folder: Path, listener: Listener, *, device: str = "cpu", threads: int | None = None) -> Profile:
    """Measure this machine with the disk of ``folder``, for about fifteen seconds. ``device``: ``"cpu"`` or ``"cuda"``.

    It takes a file of 537 MB in ``folder`` and 300 MB of memory while it runs, and frees both. Raises BudgetError if
    there is no room for them. The CUDA side has never been run on a machine with CUDA.
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
    before = _used()
    place = torch.device(device)

    with reported(listener, "measuring this machine", _PARTS, "parts") as begin:
        with Bench(place, threads) as bench:
            begin(0)
            disk = measure_disk(folder)
            begin(1)
            epoch = measure_epoch(folder, threads=threads, cores=bench.cores)
            begin(2)
            rates = _measured_processor(bench, epoch)
        begin(3)
        with Bench(torch.device("cpu"), threads) as bench, ExitStack() as stack:
            host_copy = _copy_bytes_per_s(bench, _pool(bench.device, stack))
    date = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    cuda = place.type == "cuda"
    hardware = Hardware(
        name=torch.cuda.get_device_name(place) if cuda else processor_name(),
        source=f"measured by ooc profile, {date}",
        threads=threads,
        host_memory_bytes=int(psutil.virtual_memory().total),
        device_memory_bytes=int(torch.cuda.mem_get_info(place)[1]) if cuda else 0,
        processor=rates,
        disk=disk,
        host_copy_bytes_per_s=host_copy,
        seconds_per_block=epoch.per_block,
        seconds_per_moved_byte=epoch.per_byte,
        overlap=_OVERLAP,
        wire=_wire(place) if cuda else None,
    )
    there_s, others_s = (now - then for now, then in zip(_used(), before, strict=True))
    return Profile(hardware, date, min(1.0, max(0.0, others_s / max(1e-9, there_s))))


def _used() -> tuple[float, float]:
    """Return the seconds of all processors so far, and those that other processes have had."""
    times = psutil.cpu_times()
    return perf_counter() * (psutil.cpu_count() or 1), times.user + times.nice + times.system - process_time()


def _measured_processor(bench: Bench, epoch: EpochTimes) -> Processor:
    """Return the rates of the processor, and the costs of steps and tiles from an ``epoch``."""
    with ExitStack() as stack:
        pool = _pool(bench.device, stack)
        cache = processor.cache_bytes(bench.device)
        far, near, computed = processor.pull_times(bench, pool), None, 0.0
        operator_s = processor.operator_seconds(bench)
        if 0 < cache < pool.nbytes:
            small, middling = (pool[: int(share * cache) // 4] for share in (_NEAR_SHARE, _MIDDLING_SHARE))
            near = processor.pull_times(bench, small)
            cache = max(small.nbytes, processor.kept_in_cache_bytes(bench, middling, near, far))
        if bench.device.type == "cpu":  # rows that fit the real cache, whatever size is reported
            part = pool[: int(_NEAR_SHARE * min(max(cache, _LEAST_CACHE_BYTES), pool.nbytes)) // 4]
            computed = processor.computed_bytes_per_s(bench, part, far if near is None else near, operator_s)
        between = _BETWEEN_OPERATORS if bench.device.type == "cuda" else 1
        return Processor(
            pull_seconds_per_edge=far.per_edge,
            pull_seconds_per_row=far.per_row,
            cached_pull_seconds_per_edge=None if near is None else near.per_edge,
            cache_bytes=0 if near is None else cache,
            multiplies_per_s=dict(processor.multiplies_per_s(bench)),
            stream_bytes_per_s=processor.stream_bytes_per_s(bench, pool),
            seconds_per_step=epoch.per_step,
            seconds_per_tile=epoch.per_tile,
            seconds_per_operator=operator_s * between,
            computed_bytes_per_s=computed,
        )


def _pool(device: torch.device, stack: ExitStack) -> Tensor:
    """Return initialised memory of ``device`` to work in, as float32, until ``stack`` is closed."""
    size = processor.pool_bytes(device)
    if device.type != "cpu":
        return torch.ones(size // 4, device=device)
    arena = Arena(size)
    stack.callback(arena.close)
    return torch.from_numpy(arena.view(0, size)).view(torch.float32).fill_(1.0)


def _copy_bytes_per_s(bench: Bench, memory: Tensor) -> float:
    """Return the bytes per second of copies on the host, from one half of ``memory`` to the other."""
    source, target = memory.chunk(2)

    def task(number: int) -> None:
        part = slice(number * _PIECE_VALUES, (number + 1) * _PIECE_VALUES)
        target[part].copy_(source[part])

    return source.nbytes / bench.seconds(task, len(source) // _PIECE_VALUES)


def _wire(device: torch.device) -> Wire:
    """Measure both directions between pinned host memory and ``device``."""
    pinned = torch.empty(_PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(_PINNED_BYTES, dtype=torch.uint8, device=device)

    def rate(target: Tensor, source: Tensor) -> float:
        found = []
        for _ in range(_COPY_ROUNDS):
            torch.cuda.synchronize(device)
            begun = perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize(device)
            found.append(perf_counter() - begun)
        return _PINNED_BYTES / min(found)

    return Wire(to_device_bytes_per_s=rate(there, pinned), to_host_bytes_per_s=rate(pinned, there))


def _readings(hardware: Hardware) -> Iterator[Reading]:
    disk, computing, wire = hardware.disk, hardware.processor, hardware.wire
    for what, curve in (("SSD read", disk.read_bytes_per_s), ("SSD write", disk.write_bytes_per_s)):
        for size, rate in curve.points:
            shown = f"{size / (1 << 20):.0f} MiB" if size >= 1 << 20 else f"{size / (1 << 10):.0f} KiB"
            yield Reading(what, f"{shown} requests", rate, "B/s")
    yield Reading("SSD both ways", "1 MiB requests", disk.both_ways_bytes_per_s, "B/s")
    yield Reading("SSD latency", "4 KiB", disk.latency_s, "s")
    yield Reading("host copy", "128 MiB", hardware.host_copy_bytes_per_s, "B/s")
    if wire is not None:
        yield Reading("to the device", "64 MiB, pinned", wire.to_device_bytes_per_s, "B/s")
        yield Reading("to the host", "64 MiB, pinned", wire.to_host_bytes_per_s, "B/s")
    yield from _pull_readings("aggregation", computing.pull_seconds_per_edge)
    yield Reading("aggregation", "a row besides its edges", computing.pull_seconds_per_row, "s")
    if computing.cached_pull_seconds_per_edge is not None:
        yield from _pull_readings("aggregation in cache", computing.cached_pull_seconds_per_edge)
        yield Reading("cache", "what a slab gets of it", computing.cache_bytes, "B")
    for dtype, rate in computing.multiplies_per_s.items():
        yield Reading("dense product", dtype, rate, "multiply-adds/s")
    yield Reading("element-wise", "tiles of 1,024 × 128", computing.stream_bytes_per_s, "B/s")
    if computing.computed_bytes_per_s:
        yield Reading("attention", "as so much streamed for edges", computing.computed_bytes_per_s, "B/s")
    yield Reading("operator", "on next to nothing", computing.seconds_per_operator, "s")
    yield Reading("executor", "a step", computing.seconds_per_step, "s")
    yield Reading("executor", "a tile", computing.seconds_per_tile, "s")
    yield Reading("executor", "a block to or from the SSD", hardware.seconds_per_block, "s")
    yield Reading("executor", "1 MiB of it", hardware.seconds_per_moved_byte * (1 << 20), "s")


def _pull_readings(what: str, seconds_per_edge: Curve) -> Iterator[Reading]:
    for row_bytes, seconds in seconds_per_edge.points:
        yield Reading(what, f"rows of {row_bytes:.0f} B", 1 / seconds, "edges/s")


# ---- kept in the user's cache folder --------------------------------------------------------------------------------


_MACHINE_ID = Path("/etc/machine-id")


def cached(folder: Path, *, device: str = "cpu") -> Profile | None:
    """Return the profile of this machine with the disk of ``folder``; None if there is none."""
    path = location(folder, device=device)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return Profile.from_dict(data, where=str(path))
    except (OSError, ValueError, HardwareError):
        return None


def known_hardware(folder: Path, *, device: str = "cpu") -> Hardware:
    """Return this machine as measured with the disk of ``folder``, or estimates if it has not been measured."""
    profile = cached(folder, device=device)
    if profile is not None:
        return profile.hardware
    return UNMEASURED if device == "cpu" else UNMEASURED_DEVICE


def keep(profile: Profile, folder: Path, *, device: str = "cpu") -> Path:
    """Write ``profile``, whole or not at all; return its path. Raises OSError if the cache folder cannot be written."""
    path = location(folder, device=device)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"machine": _identity(folder, device), **profile.as_dict()}, indent=2, allow_nan=False)
    replace_file(path, (text + "\n").encode())
    return path


def location(folder: Path, *, device: str = "cpu") -> Path:
    """Return the path of such a profile, existing or not."""
    text = json.dumps(_identity(folder, device), sort_keys=True)
    return cache_folder() / f"profile-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def _identity(folder: Path, device: str) -> dict[str, str | int]:
    """Return what a profile is valid for. The system's name and id are hashed, since the id must not be passed on."""
    number = ""
    with contextlib.suppress(OSError):
        number = _MACHINE_ID.read_text(encoding="ascii").strip()
    return {
        "host": hashlib.sha256(f"{platform.node()} {number}".encode()).hexdigest()[:16],
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "disk": "{} {} on {}".format(*mount_of(folder)),
        "version": __version__,
    }
