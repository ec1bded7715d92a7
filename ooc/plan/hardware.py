# SPDX-License-Identifier: Apache-2.0
"""A machine as the planner sees it: how much memory it has and how fast each of its parts is.

Plain data, from a profile of the machine at hand, from a file, or from a data sheet; every rate is in bytes, values
or multiply-adds a second, every time in seconds.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, Self

from ooc.errors import HardwareError


@dataclass(frozen=True, slots=True)
class Curve:
    """A measured function, linear between its ``points`` (x, y), x ascending.

    Before the first point it is constant; beyond the last it goes on through the origin's proportion where
    ``proportional``, and is constant otherwise.
    """

    points: tuple[tuple[float, float], ...]
    proportional: bool = False

    def at(self, x: float) -> float:
        """The value at ``x``."""
        after = bisect_right(self.points, (x, float("inf")))
        if after == 0:
            return self.points[0][1]
        x0, y0 = self.points[after - 1]
        if after == len(self.points):
            return y0 * x / x0 if self.proportional and x0 > 0 else y0
        x1, y1 = self.points[after]
        return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


@dataclass(frozen=True, slots=True)
class Disk:
    """The drive of the spill directory. ``both_ways_bytes_per_s``: reads and writes together, when both go on.

    Rates are by bytes of a request, with as many requests in flight as give the most.
    """

    read_bytes_per_s: Curve
    write_bytes_per_s: Curve
    both_ways_bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class Wire:
    """The way between host memory and a device with memory of its own, from and to pinned memory."""

    to_device_bytes_per_s: float
    to_host_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Processor:
    """What computes: the CPU with all its threads, or a GPU.

    ``pull_seconds_per_edge``: of one gathered and added row, by its bytes, out of a slab far larger than the cache;
    ``cached_pull_seconds_per_edge``: out of one that lies in it (None: no faster); ``cache_bytes``: how much of a slab
    it holds. ``pull_seconds_per_row``: of a pulled row besides, however many edges it has. ``multiplies_per_s``:
    multiply-adds of a dense product, by dtype. ``stream_bytes_per_s``: bytes read and written by element-wise work,
    as ``Stage.streamed_bytes_per_row`` counts them. ``seconds_per_step``, ``seconds_per_tile`` and
    ``seconds_per_operator``: of what a step, a tile of a row pass, and an operator on a tile cost however few rows they
    have; the interpreter runs one at a time, so threads do not share these.
    """

    pull_seconds_per_edge: Curve
    multiplies_per_s: Mapping[str, float]
    stream_bytes_per_s: float
    seconds_per_step: float
    seconds_per_tile: float = 0.0
    seconds_per_operator: float = 0.0
    pull_seconds_per_row: float = 0.0
    cached_pull_seconds_per_edge: Curve | None = None
    cache_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Hardware:
    """One machine. ``device_memory_bytes`` is 0 and ``wire`` None where the CPU computes: then both budgets are of the
    same memory, and no block is copied from one to the other.

    ``threads``: of the CPU, at which its rates were measured. ``seconds_per_block``: of the processor's time, all
    threads sharing it, for moving one block to or from the SSD, however small it is.
    ``overlap``: the part of the time of the resources that are not the bottleneck which is hidden behind it (1: all).
    ``source``: where the figures are from, for people to read.
    """

    name: str
    source: str
    threads: int
    host_memory_bytes: int
    device_memory_bytes: int
    processor: Processor
    disk: Disk
    host_copy_bytes_per_s: float
    seconds_per_block: float
    overlap: float
    wire: Wire | None = None

    @property
    def has_device_memory(self) -> bool:
        return self.wire is not None

    def as_dict(self) -> dict[str, Any]:
        """For a file: ``from_dict`` gives the same again."""
        described: dict[str, Any] = _plain(self)
        return described

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, where: str = "hardware") -> Self:
        """The machine that ``data`` describes; HardwareError naming ``where`` and the entry that is wrong."""
        disk = _part(data, "disk", where)
        processor = _part(data, "processor", where)
        wire = _part(data, "wire", where) if data.get("wire") is not None else None
        for given, kind in ((data, cls), (disk, Disk), (processor, Processor), (wire or {}, Wire)):
            _only_known(given, kind, where)
        return cls(
            name=_text(data, "name", where),
            source=_text(data, "source", where),
            threads=_whole(data, "threads", where, least=1),
            host_memory_bytes=_whole(data, "host_memory_bytes", where, least=1),
            device_memory_bytes=_whole(data, "device_memory_bytes", where, least=0),
            processor=Processor(
                pull_seconds_per_edge=_curve(processor, "pull_seconds_per_edge", where, proportional=True),
                multiplies_per_s=_rates(processor, "multiplies_per_s", where),
                stream_bytes_per_s=_number(processor, "stream_bytes_per_s", where),
                seconds_per_step=_number(processor, "seconds_per_step", where, zero=True),
                seconds_per_tile=_perhaps(processor, "seconds_per_tile", where),
                seconds_per_operator=_perhaps(processor, "seconds_per_operator", where),
                pull_seconds_per_row=_perhaps(processor, "pull_seconds_per_row", where),
                cached_pull_seconds_per_edge=_curve(processor, "cached_pull_seconds_per_edge", where, proportional=True)
                if processor.get("cached_pull_seconds_per_edge") is not None
                else None,
                cache_bytes=_whole({"cache_bytes": 0, **processor}, "cache_bytes", where, least=0),
            ),
            disk=Disk(
                read_bytes_per_s=_curve(disk, "read_bytes_per_s", where),
                write_bytes_per_s=_curve(disk, "write_bytes_per_s", where),
                both_ways_bytes_per_s=_number(disk, "both_ways_bytes_per_s", where),
                latency_s=_number(disk, "latency_s", where, zero=True),
            ),
            host_copy_bytes_per_s=_number(data, "host_copy_bytes_per_s", where),
            seconds_per_block=_number(data, "seconds_per_block", where, zero=True),
            overlap=_share(data, "overlap", where),
            wire=None
            if wire is None
            else Wire(
                to_device_bytes_per_s=_number(wire, "to_device_bytes_per_s", where),
                to_host_bytes_per_s=_number(wire, "to_host_bytes_per_s", where),
            ),
        )


UNMEASURED = Hardware(
    name="unmeasured",
    source="estimates from two AVX-512 cores with a virtio NVMe drive; ooc profile measures this machine",
    threads=2,
    host_memory_bytes=1,
    device_memory_bytes=0,
    processor=Processor(
        # Per edge and byte of a row, out of a slab of 134 MB and one of 17 MB: as ooc profile measured these cores.
        pull_seconds_per_edge=Curve(((32.0, 5.5e-9), (128.0, 7.5e-9), (512.0, 2.8e-8), (1024.0, 5.6e-8)), True),
        cached_pull_seconds_per_edge=Curve(((32.0, 3.3e-9), (128.0, 3.3e-9), (512.0, 1.05e-8), (1024.0, 1.8e-8)), True),
        cache_bytes=32 << 20,
        pull_seconds_per_row=2.5e-8,
        multiplies_per_s={"float32": 7.5e10, "bfloat16": 1.5e11, "float64": 3.2e10},
        stream_bytes_per_s=7.5e10,
        seconds_per_step=4e-5,
        seconds_per_tile=2e-5,
        seconds_per_operator=4.5e-6,
    ),
    disk=Disk(
        read_bytes_per_s=Curve(((1048576.0, 2e9),)),
        write_bytes_per_s=Curve(((1048576.0, 2e9),)),
        both_ways_bytes_per_s=3e9,
        latency_s=1e-4,
    ),
    host_copy_bytes_per_s=1.7e10,
    seconds_per_block=1.3e-4,
    overlap=0.85,
)
"""What the planner goes by where nobody has measured."""

UNMEASURED_DEVICE = replace(
    UNMEASURED,
    source="estimates for any GPU on PCIe 4.0, and a drive of 2 GB/s; ooc profile --device cuda measures this machine",
    device_memory_bytes=1,
    processor=Processor(
        pull_seconds_per_edge=Curve(((32.0, 1e-10), (4096.0, 1e-8)), True),
        multiplies_per_s={"float32": 5e12, "bfloat16": 5e13, "float64": 1e12},
        stream_bytes_per_s=3e11,
        seconds_per_step=1e-4,
        seconds_per_tile=2e-5,
        seconds_per_operator=5e-6,
    ),
    wire=Wire(to_device_bytes_per_s=1.2e10, to_host_bytes_per_s=1.2e10),
)
"""The same for a device with memory of its own: nobody has measured one yet."""


def _plain(value: Any) -> Any:
    if isinstance(value, Curve):
        return [list(point) for point in value.points]
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "__dataclass_fields__"):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value) if getattr(value, f.name) is not None}
    return value


def _only_known(data: Mapping[str, Any], kind: type, where: str) -> None:
    unknown = sorted(set(data) - {f.name for f in fields(kind)})
    if unknown:
        raise HardwareError(f"{where}: {', '.join(unknown)} is nothing that a machine has")


def _entry(data: Mapping[str, Any], name: str, where: str) -> Any:
    if name not in data:
        raise HardwareError(f"{where}: {name} is missing")
    return data[name]


def _part(data: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    part = _entry(data, name, where)
    if not isinstance(part, Mapping):
        raise HardwareError(f"{where}: {name} must be an object, not {part!r}")
    return part


def _text(data: Mapping[str, Any], name: str, where: str) -> str:
    text = _entry(data, name, where)
    if not isinstance(text, str):
        raise HardwareError(f"{where}: {name} must be text, not {text!r}")
    return text


def _number(data: Mapping[str, Any], name: str, where: str, *, zero: bool = False) -> float:
    return _checked(_entry(data, name, where), name, where, zero=zero)


def _perhaps(data: Mapping[str, Any], name: str, where: str) -> float:
    """A number that may be left out: then it is 0."""
    return _number(data, name, where, zero=True) if name in data else 0.0


def _checked(number: Any, name: str, where: str, *, zero: bool = False) -> float:
    good = isinstance(number, (int, float)) and not isinstance(number, bool) and 0 <= number < float("inf")
    if not good or (number == 0 and not zero):
        raise HardwareError(f"{where}: {name} must be a positive number, not {number!r}")
    return float(number)


def _share(data: Mapping[str, Any], name: str, where: str) -> float:
    share = _number(data, name, where, zero=True)
    if share > 1:
        raise HardwareError(f"{where}: {name} must be from 0 to 1, not {share}")
    return share


def _whole(data: Mapping[str, Any], name: str, where: str, *, least: int) -> int:
    number = _entry(data, name, where)
    if not isinstance(number, int) or isinstance(number, bool) or number < least:
        raise HardwareError(f"{where}: {name} must be a whole number from {least} on, not {number!r}")
    return number


def _rates(data: Mapping[str, Any], name: str, where: str) -> dict[str, float]:
    rates = _part(data, name, where)
    if "float32" not in rates:
        raise HardwareError(f"{where}: {name} lacks float32")
    return {dtype: _checked(rate, f"{name} of {dtype}", where) for dtype, rate in rates.items()}


def _curve(data: Mapping[str, Any], name: str, where: str, *, proportional: bool = False) -> Curve:
    """A list of [x, y], or one number that holds everywhere."""
    given = _entry(data, name, where)
    if not isinstance(given, Sequence) or isinstance(given, str):
        return Curve(((1.0, _checked(given, name, where)),))
    points = []
    for point in given:
        if not isinstance(point, Sequence) or isinstance(point, str) or len(point) != 2:
            raise HardwareError(f"{where}: {name} must be a list of [x, y], not {point!r}")
        points.append((_checked(point[0], name, where, zero=True), _checked(point[1], name, where)))
    if not points or any(b[0] <= a[0] for a, b in pairwise(points)):
        raise HardwareError(f"{where}: {name} must be a list of [x, y] with x ascending")
    return Curve(tuple(points), proportional)
