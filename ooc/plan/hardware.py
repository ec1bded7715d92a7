# SPDX-License-Identifier: Apache-2.0
"""A machine as the planner sees it: how much memory it has, and how fast each of its parts is.

Plain data from a profile of this machine, from a file or from a data sheet. Rates are in bytes, values or multiply-adds
a second, times in seconds.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import partial
from itertools import pairwise
from typing import Annotated, Any, Self, get_args, get_type_hints

from ooc.errors import HardwareError


@dataclass(frozen=True, slots=True)
class Curve:
    """A measured function, linear between its ``points`` (x, y), which are ascending in x.

    It is constant before the first point. Beyond the last point it is proportional to x if ``proportional``, otherwise
    constant.
    """

    points: tuple[tuple[float, float], ...]
    proportional: bool = False

    def at(self, x: float) -> float:
        """Return the value at ``x``."""
        after = bisect_right(self.points, (x, float("inf")))
        if after == 0:
            return self.points[0][1]
        x0, y0 = self.points[after - 1]
        if after == len(self.points):
            return y0 * x / x0 if self.proportional and x0 > 0 else y0
        x1, y1 = self.points[after]
        return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def _read_number(value: Any, *, zero: bool = False) -> float:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf")
    if not good or (value == 0 and not zero):
        raise HardwareError(f"must be a positive number, not {value!r}")
    return float(value)


def _read_share(value: Any) -> float:
    if _read_number(value, zero=True) > 1:
        raise HardwareError(f"must be from 0 to 1, not {float(value)}")
    return float(value)


def _read_whole_number(value: Any, *, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise HardwareError(f"must be a whole number from {least} on, not {value!r}")
    return value


def _read_text(value: Any) -> str:
    if not isinstance(value, str):
        raise HardwareError(f"must be text, not {value!r}")
    return value


def _read_rates(value: Any) -> dict[str, float]:
    """Read rates by dtype."""
    if not isinstance(value, Mapping):
        raise HardwareError(f"must be an object, not {value!r}")
    if "float32" not in value:
        raise HardwareError("lacks float32")
    return {dtype: _read_number(rate) for dtype, rate in value.items()}


def _read_curve(value: Any, *, proportional: bool = False) -> Curve:
    """Read a list of [x, y], or one number that holds everywhere."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return Curve(((1.0, _read_number(value)),))
    points = []
    for point in value:
        if not isinstance(point, Sequence) or isinstance(point, str) or len(point) != 2:
            raise HardwareError(f"must be a list of [x, y], not {point!r}")
        points.append((_read_number(point[0], zero=True), _read_number(point[1])))
    if not points or any(b[0] <= a[0] for a, b in pairwise(points)):
        raise HardwareError("must be a list of [x, y] with x ascending")
    return Curve(tuple(points), proportional)


_Positive = Annotated[float, _read_number]
_Number = Annotated[float, partial(_read_number, zero=True)]
_Count = Annotated[int, partial(_read_whole_number, least=1)]
_CountOrZero = Annotated[int, partial(_read_whole_number, least=0)]
_Rates = Annotated[Curve, _read_curve]
_Times = Annotated[Curve, partial(_read_curve, proportional=True)]
"""Types of the entries of a hardware file, each with the function that reads it or says what it must be."""


def _read_fields(kind: type, data: Mapping[str, Any], where: str) -> Any:
    """Return the ``kind`` that ``data`` describes. Raises HardwareError naming ``where`` and the entry that is
    wrong."""
    known = {f.name: f for f in fields(kind)}
    if unknown := sorted(set(data) - known.keys()):
        raise HardwareError(f"{where}: {', '.join(unknown)} is nothing that a machine has")
    found: dict[str, Any] = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        value = data.get(name)
        if value is None and known[name].default is not MISSING:
            continue
        if name not in data:
            raise HardwareError(f"{where}: {name} is missing")
        part, *readers = get_args(hint) or (hint,)  # Annotated[float, reader], Wire | None, Disk
        if part in (Disk, Processor, Wire):
            if not isinstance(value, Mapping):
                raise HardwareError(f"{where}: {name} must be an object, not {value!r}")
            found[name] = _read_fields(part, value, where)
            continue
        try:
            found[name] = readers[0](value)
        except HardwareError as error:
            raise HardwareError(f"{where}: {name} {error}") from None
    return kind(**found)


@dataclass(frozen=True, slots=True)
class Disk:
    """The drive of the spill directory. ``both_ways_bytes_per_s``: the sum of both rates while it reads and writes at
    once.

    Rates depend on the bytes of a request, with as many requests in flight as give the highest rate.
    """

    read_bytes_per_s: _Rates
    write_bytes_per_s: _Rates
    both_ways_bytes_per_s: _Positive
    latency_s: _Number


@dataclass(frozen=True, slots=True)
class Wire:
    """The connection between pinned host memory and a device with memory of its own."""

    to_device_bytes_per_s: _Positive
    to_host_bytes_per_s: _Positive

    @property
    def there_and_back_bytes_per_s(self) -> float:
        """The rate of moving the same bytes to the host and back, one after the other."""
        return 1 / (1 / self.to_host_bytes_per_s + 1 / self.to_device_bytes_per_s)


@dataclass(frozen=True, slots=True)
class Processor:
    """The processor that computes: the CPU with all its threads, or a GPU.

    ``pull_seconds_per_edge``: seconds to gather and add one row, by its bytes, from a slab far larger than the cache;
    ``cached_pull_seconds_per_edge``: from a slab that lies in the cache (None: no faster); ``cache_bytes``: how much of
    a slab the cache holds. ``pull_seconds_per_row``: further seconds for each pulled row, however many edges it has.
    ``multiplies_per_s``: multiply-adds of dense products, by dtype. ``stream_bytes_per_s``: bytes that element-wise
    work reads and writes, as ``Stage.streamed_bytes_per_row`` counts them. ``computed_bytes_per_s``: the same for what
    pulls compute for edges, as ``EdgeWork`` counts it, without opaque layers (0: the same rate). ``seconds_per_step``,
    ``seconds_per_tile`` and ``seconds_per_operator``: the fixed cost of a step, of a tile in a row pass, and of an
    operator. The interpreter runs one thread at a time, so threads do not share these.
    """

    pull_seconds_per_edge: _Times
    multiplies_per_s: Annotated[Mapping[str, float], _read_rates]
    stream_bytes_per_s: _Positive
    seconds_per_step: _Number
    seconds_per_tile: _Number = 0.0
    seconds_per_operator: _Number = 0.0
    pull_seconds_per_row: _Number = 0.0
    cached_pull_seconds_per_edge: Annotated[Curve | None, partial(_read_curve, proportional=True)] = None
    cache_bytes: _CountOrZero = 0
    computed_bytes_per_s: _Number = 0.0


@dataclass(frozen=True, slots=True)
class Hardware:
    """One machine. If the CPU computes, ``device_memory_bytes`` is 0 and ``wire`` is None; both budgets are then of the
    same memory, and no block is copied between them.

    ``threads``: the CPU threads at which the rates were measured. ``seconds_per_block`` and ``seconds_per_moved_byte``:
    processor time, shared by all threads, to move a block to or from the SSD, checksums included. ``overlap``: the
    fraction of the time of all resources but the bottleneck that is hidden behind it (1: all). ``source``: where the
    figures are from, for people to read.
    """

    name: Annotated[str, _read_text]
    source: Annotated[str, _read_text]
    threads: _Count
    host_memory_bytes: _Count
    device_memory_bytes: _CountOrZero
    processor: Processor
    disk: Disk
    host_copy_bytes_per_s: _Positive
    seconds_per_block: _Number
    overlap: Annotated[float, _read_share]
    wire: Wire | None = None
    seconds_per_moved_byte: _Number = 0.0

    def moving_s(self, nbytes: float, blocks: float = 1.0) -> float:
        """Return the seconds of processor time to move this much to or from the SSD."""
        return blocks * self.seconds_per_block + nbytes * self.seconds_per_moved_byte

    @property
    def has_device_memory(self) -> bool:
        return self.wire is not None

    def as_dict(self) -> dict[str, Any]:
        """Return the machine as plain data for a file; ``from_dict`` reads it back."""
        described: dict[str, Any] = _to_plain_data(self)
        return described

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, where: str = "hardware") -> Self:
        """Return the machine that ``data`` describes. Raises HardwareError naming ``where`` and the entry that is
        wrong."""
        machine: Self = _read_fields(cls, data, where)
        return machine


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
"""The machine that the planner assumes if nobody has measured one."""

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
"""The machine with a GPU that the planner assumes; these rates have not been measured on one."""


def _to_plain_data(value: Any) -> Any:
    if isinstance(value, Curve):
        return [list(point) for point in value.points]
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "__dataclass_fields__"):
        return {
            f.name: _to_plain_data(getattr(value, f.name)) for f in fields(value) if getattr(value, f.name) is not None
        }
    return value
