# SPDX-License-Identifier: Apache-2.0
"""Choose a fate for what each layer of a chain saves for its backward pass: keep it on the device, offload it to the
host or the SSD, or recompute it.

L items have 2L steps: forward 0 … L-1, then backward in reverse. Item i is made by step i and needed until step 2L-1-i,
so lifetimes are nested: at *depth* k, in steps k and 2L-1-k, exactly the items 0 … k are alive. ``plan_chain`` finds
the fastest fates by dynamic programming over depths. Outer decisions stay alive through all inner depths, so inner
depths need only know one running total for each tier. Choosing the four fates together in this way is the idea of
FlexGNN (KDD 2025).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ooc.errors import BudgetError
from ooc.plan.cost import concurrent_seconds, pcie_seconds, ssd_seconds
from ooc.plan.hardware import UNMEASURED, Hardware
from ooc.plan.program.capacity import budget_of
from ooc.plan.workload import Fate
from ooc.sizes import format_size

_UNITS, _UNITS_OF_TWO = 256, 24
"""The units in which budgets are counted, for one memory and for two; kept bytes are rounded up to them."""
_REQUEST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What one layer saves for its backward pass: ``nbytes`` bytes. Its place in the chain says when it is made and
    last needed.

    ``recompute_s``: seconds to compute it again (None: impossible). ``forward_s``, ``backward_s``: seconds of its two
    steps. Device memory that the steps need beside the items kept there: ``kept_bytes`` if this item is kept,
    ``away_bytes`` if it is offloaded and comes back, ``recompute_bytes`` if it is recomputed; and ``shared_bytes``,
    which the item before it may already hold.
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
    """The fate of each item, the forecast ``seconds`` of all steps, and the peak bytes of both memories. If the CPU
    computes there is one memory, counted as the device's, and items kept in it have the fate ``HOST``."""

    fates: tuple[Fate, ...]
    seconds: float
    device_bytes: int
    host_bytes: int


class _ItemFate(NamedTuple):
    """One fate of an item: the bytes it takes on both tiers while it waits, the bytes its steps need beside, and their
    seconds."""

    fate: Fate
    device: int
    host: int
    device_step_bytes: int
    host_step_bytes: int
    seconds: float


class _State(NamedTuple):
    """The best way to reach a total: seconds of all steps so far, the last fate, and the state before it."""

    seconds: float
    way: _ItemFate | None = None
    before: "_State | None" = None


def plan_chain(items: Sequence[Saved], gpu_budget: int, host_budget: int, hardware: Hardware = UNMEASURED) -> ChainPlan:
    """Return the fastest plan. Raises BudgetError, with the least budgets that would do, if nothing fits. If the CPU
    computes (``hardware`` has no device memory), both budgets are of one memory and are added up."""
    one = not hardware.has_device_memory
    budgets = (gpu_budget + host_budget, 0) if one else (gpu_budget, host_budget)
    units = [max(1, budget // (_UNITS if one else _UNITS_OF_TWO)) for budget in budgets]
    states = {(0, 0, False): _State(0.0)}  # by units of device and host, and whether the last item is on the device
    for item in items:
        reached: dict[tuple[int, int, bool], _State] = {}
        for way in _list_fates(item, hardware):
            for (device, host, keeps), state in states.items():
                device, host = device - way.device // -units[0], host - way.host // -units[1]
                beside = way.device_step_bytes + (0 if keeps else item.shared_bytes), way.host_step_bytes
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
    chosen: list[_ItemFate] = []
    last: _State | None = min(states.values(), key=lambda state: state.seconds)
    while last is not None and last.way is not None:
        chosen.append(last.way)
        last = last.before
    return _account(items, chosen[::-1])


def leanest(items: Sequence[Saved], hardware: Hardware = UNMEASURED) -> ChainPlan:
    """Return the plan that takes the least device memory, then the least host memory: nothing is kept there."""
    chosen = []
    for item in items:
        ways = [way for way in _list_fates(item, hardware) if not way.device and not way.host]
        chosen.append(min(ways, key=lambda way: (way.device_step_bytes, way.host_step_bytes, way.seconds)))
    return _account(items, chosen)


def _list_fates(item: Saved, hardware: Hardware) -> Iterator[_ItemFate]:
    def seconds(*, ssd: int = 0, wire: int = 0, again_s: float = 0.0) -> float:
        there = ssd_seconds(hardware, read_bytes=0, write_bytes=ssd, request_bytes=_REQUEST_BYTES)
        back = ssd_seconds(hardware, read_bytes=ssd, write_bytes=0, request_bytes=_REQUEST_BYTES)
        down = pcie_seconds(hardware, to_device_bytes=0, to_host_bytes=wire)
        up = pcie_seconds(hardware, to_device_bytes=wire, to_host_bytes=0)
        forward = concurrent_seconds(hardware, item.forward_s, there, down)
        return forward + concurrent_seconds(hardware, item.backward_s + again_s, back, up)

    size, on_device = item.nbytes, hardware.has_device_memory
    yield _ItemFate(Fate.DEVICE if on_device else Fate.HOST, size, 0, item.kept_bytes, 0, seconds())
    if not size:
        return
    landing = size if on_device else 0  # it comes through the host
    if on_device:
        yield _ItemFate(Fate.HOST, 0, size, item.away_bytes, 0, seconds(wire=size))
    yield _ItemFate(Fate.SSD, 0, 0, item.away_bytes, landing, seconds(ssd=size, wire=landing))
    if item.recompute_s is not None:
        yield _ItemFate(Fate.RECOMPUTE, 0, 0, item.recompute_bytes, 0, seconds(again_s=item.recompute_s))


def _account(items: Sequence[Saved], ways: Sequence[_ItemFate]) -> ChainPlan:
    """Return the plan of these fates with its peaks, exact to the byte."""
    device = host = device_peak = host_peak = 0
    keeps = False
    for item, way in zip(items, ways, strict=True):
        device, host = device + way.device, host + way.host
        device_peak = max(device_peak, device + way.device_step_bytes + (0 if keeps else item.shared_bytes))
        host_peak = max(host_peak, host + way.host_step_bytes)
        keeps = way.device > 0
    return ChainPlan(tuple(way.fate for way in ways), sum(way.seconds for way in ways), device_peak, host_peak)


def shortage(
    what: str, device: int, host: int, budgets: tuple[int, int], hardware: Hardware, option: str = "memory"
) -> str:
    """Return the message that says what is lacking: the least bytes of device and host, and the budgets. ``option``:
    the argument that sets the budget where there is one memory."""
    has = [format_size(budget) for budget in budgets]
    needs = f"with nothing kept, {what} takes {format_size(device)} of"
    if not hardware.has_device_memory:
        return f"{needs} memory, of which it may take {has[0]}; give {option}='{budget_of(device)}'"
    return (
        f"{needs} the GPU and {format_size(host)} of the host, and the budgets are {has[0]} and {has[1]}; "
        f"give gpu_budget='{budget_of(device)}' and host_budget='{budget_of(host)}'"
    )
