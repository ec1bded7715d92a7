# SPDX-License-Identifier: Apache-2.0
"""Where what a chain of layers saves for its backward pass waits: on the device, on the host, on the SSD, or nowhere,
since it is computed again. For any chain of (bytes, seconds, lifetimes).

L items have 2L steps: forward 0 … L-1, then backward in reverse. Item i is made by step i and needed until step 2L-1-i,
so lifetimes are nested: at *depth* k, in steps k and 2L-1-k, items 0 … k are alive and no others. ``plan_chain`` finds
the fates of least time by dynamic programming over depths: what was decided before is alive until after, so one running
total a tier is all that inner depths must know. That the four can be chosen together so is the idea of FlexGNN (KDD
2025).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ooc.errors import BudgetError
from ooc.plan.cost import pcie_seconds, ssd_seconds, together_seconds
from ooc.plan.hardware import UNMEASURED, Hardware
from ooc.plan.program.capacity import budget_of
from ooc.plan.workload import Fate
from ooc.sizes import format_size

_UNITS, _UNITS_OF_TWO = 256, 24
"""That budgets are counted in, where they are of one memory and where of two: what is kept is rounded up to them."""
_REQUEST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What one layer saves, ``nbytes``; its place in the chain says when it is made and needed last.

    ``recompute_s``: seconds to make it once more (None: it cannot be); ``forward_s``, ``backward_s``: of its two steps.
    What they take of the device beside items that are kept there: ``kept_bytes`` where this item is one of them,
    ``away_bytes`` where it leaves and comes back, ``recompute_bytes`` where it is made once more; and ``shared_bytes``
    of the item before it.
    """

    name: str
    nbytes: int
    recompute_s: float | None = None
    forward_s: float = 0.0
    backward_s: float = 0.0
    kept_bytes: int = 0
    away_bytes: int = 0
    recompute_bytes: int = 0
    shared_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ChainPlan:
    """A fate an item, forecast ``seconds`` of all steps, and the most of both memories. Where the CPU computes there is
    one memory, counted as the device's: what is kept there has the fate ``HOST``."""

    fates: tuple[Fate, ...]
    seconds: float
    device_bytes: int
    host_bytes: int


class _Way(NamedTuple):
    """One fate of an item: what it takes of both tiers while it waits, what its steps take beside, and for how long."""

    fate: Fate
    device: int
    host: int
    device_beside: int
    host_beside: int
    seconds: float


class _State(NamedTuple):
    """After a depth is decided: seconds of its steps and all outer ones, and how that came about."""

    seconds: float
    way: _Way | None = None
    before: "_State | None" = None


def plan_chain(items: Sequence[Saved], gpu_budget: int, host_budget: int, hardware: Hardware = UNMEASURED) -> ChainPlan:
    """The plan of least time; BudgetError, with the least budgets that would do, where nothing fits. Where the CPU
    computes (``hardware`` has no device memory), both budgets are of one memory and add up."""
    one = not hardware.has_device_memory
    budgets = (gpu_budget + host_budget, 0) if one else (gpu_budget, host_budget)
    units = [max(1, budget // (_UNITS if one else _UNITS_OF_TWO)) for budget in budgets]
    states = {(0, 0, False): _State(0.0)}  # by units of device and host, and whether the last item is on the device
    for item in items:
        reached: dict[tuple[int, int, bool], _State] = {}
        for way in _ways(item, hardware):
            for (device, host, keeps), state in states.items():
                device, host = device - way.device // -units[0], host - way.host // -units[1]
                beside = way.device_beside + (0 if keeps else item.shared_bytes), way.host_beside
                if device * units[0] + beside[0] > budgets[0] or host * units[1] + beside[1] > budgets[1]:
                    continue
                key, seconds = (device, host, way.device > 0), state.seconds + way.seconds
                if key not in reached or seconds < reached[key].seconds:
                    reached[key] = _State(seconds, way, state)
        if not reached:
            least = leanest(items, hardware)
            found = least.device_bytes, least.host_bytes, budgets, hardware
            raise BudgetError(shortage("the chain", *found, option="gpu_budget"))
        states = reached
    chosen: list[_Way] = []
    last: _State | None = min(states.values(), key=lambda state: state.seconds)
    while last is not None and last.way is not None:
        chosen.append(last.way)
        last = last.before
    return _account(items, chosen[::-1])


def leanest(items: Sequence[Saved], hardware: Hardware = UNMEASURED) -> ChainPlan:
    """What takes the least of the device, and beside that of the host: nothing is kept there."""
    chosen = []
    for item in items:
        ways = [way for way in _ways(item, hardware) if not way.device and not way.host]
        chosen.append(min(ways, key=lambda way: (way.device_beside, way.host_beside, way.seconds)))
    return _account(items, chosen)


def _ways(item: Saved, hardware: Hardware) -> Iterator[_Way]:
    def seconds(*, ssd: int = 0, wire: int = 0, again_s: float = 0.0) -> float:
        there = ssd_seconds(hardware, read_bytes=0, write_bytes=ssd, request_bytes=_REQUEST_BYTES)
        back = ssd_seconds(hardware, read_bytes=ssd, write_bytes=0, request_bytes=_REQUEST_BYTES)
        down = pcie_seconds(hardware, to_device_bytes=0, to_host_bytes=wire)
        up = pcie_seconds(hardware, to_device_bytes=wire, to_host_bytes=0)
        forward = together_seconds(hardware, item.forward_s, there, down)
        return forward + together_seconds(hardware, item.backward_s + again_s, back, up)

    size, on_device = item.nbytes, hardware.has_device_memory
    yield _Way(Fate.DEVICE if on_device else Fate.HOST, size, 0, item.kept_bytes, 0, seconds())
    if not size:
        return
    landing = size if on_device else 0  # it comes by way of the host
    if on_device:
        yield _Way(Fate.HOST, 0, size, item.away_bytes, 0, seconds(wire=size))
    yield _Way(Fate.SSD, 0, 0, item.away_bytes, landing, seconds(ssd=size, wire=landing))
    if item.recompute_s is not None:
        yield _Way(Fate.RECOMPUTE, 0, 0, item.recompute_bytes, 0, seconds(again_s=item.recompute_s))


def _account(items: Sequence[Saved], ways: Sequence[_Way]) -> ChainPlan:
    """What these ways come to, depth by depth, to the byte."""
    device = host = device_peak = host_peak = 0
    keeps = False
    for item, way in zip(items, ways, strict=True):
        device, host = device + way.device, host + way.host
        device_peak = max(device_peak, device + way.device_beside + (0 if keeps else item.shared_bytes))
        host_peak = max(host_peak, host + way.host_beside)
        keeps = way.device > 0
    return ChainPlan(tuple(way.fate for way in ways), sum(way.seconds for way in ways), device_peak, host_peak)


def shortage(
    what: str, device: int, host: int, budgets: tuple[int, int], hardware: Hardware, option: str = "memory"
) -> str:
    """The line that says what is lacking: least bytes of device and host, and what the budgets are. ``option``: which
    bounds a memory that is one."""
    has = [format_size(budget) for budget in budgets]
    needs = f"with nothing kept, {what} takes {format_size(device)} of"
    if not hardware.has_device_memory:
        return f"{needs} memory, of which it may take {has[0]}; give {option}='{budget_of(device)}'"
    return (
        f"{needs} the GPU and {format_size(host)} of the host, and the budgets are {has[0]} and {has[1]}; "
        f"give gpu_budget='{budget_of(device)}' and host_budget='{budget_of(host)}'"
    )
