# SPDX-License-Identifier: Apache-2.0
"""The memory that budgets leave for arenas and that passes need: whether a layout fits, and the message if none
does."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from math import inf

from ooc.plan.hardware import Hardware
from ooc.plan.layout.grid import Grid
from ooc.plan.layout.layout import Layout, Region
from ooc.plan.layout.passes import (
    ColumnPass,
    Pass,
    Passes,
    blocks_of,
    column_step_rows,
    direct_slabs,
    edge_grid,
    edges_in_memory,
    edges_swept,
    matching_slabs,
    row_step_rows,
)
from ooc.plan.layout.temporaries import most_edges
from ooc.plan.program.staging import IN_TRANSFER, MOST_AHEAD
from ooc.plan.workload import Workload
from ooc.sizes import format_size

_USE_BYTES, _STATED_LIST_BYTES = 180, 64 << 20
"""The most bytes that a plan's lists take for each use of a block by a pass, including what makes, proves or runs them
(measured for making and proving: 80 to 150); and how many bytes of lists the stated memory beside the budgets has room
for."""
LINK_BYTES_PER_S = 10**9
"""The bytes per second that a process is assumed to receive from the others, if nobody has stated or measured it."""


class ExchangeForm(Enum):
    """What processes send one another for a pull."""

    AUTO = "auto"
    """Whichever takes less time, for each pull."""
    HALO = "halo"
    """All columns of the rows of other processes that edges into own rows lead to (the halo)."""
    COLUMNS = "columns"
    """Some columns of all rows, and back what others have pulled of their rows; where columns can be sharded."""


class ExchangeWay(Enum):
    """How rows go from one process's device to another's."""

    AUTO = "auto"
    """Whichever way is faster."""
    HOST = "host"
    """Through the host's memory."""
    DEVICE = "device"
    """From device to device."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The memory a plan may use, and what the user has fixed by hand (``None``: the planner chooses).

    ``ssd_write_bytes``: the most that a training epoch may write to the SSD (drives wear out). ``one_memory``: both
    budgets are of one memory, of which the user gave the sum; each takes from the other what it cannot do without.
    ``processes``: the number of processes that share what the user gave, equally. Each receives ``link_bytes_per_s``;
    with a device, in the way ``exchange_by``. ``beside_bytes``: the part of a process's memory that is held outside the
    plan.
    """

    device_bytes: int
    host_bytes: int
    block_rows: int | None = None
    slab_columns: int | None = None
    ssd_write_bytes: int | None = None
    one_memory: bool = False
    processes: int = 1
    beside_bytes: int = 0
    exchange: ExchangeForm = ExchangeForm.AUTO
    link_bytes_per_s: int = LINK_BYTES_PER_S
    exchange_by: ExchangeWay = ExchangeWay.AUTO

    @property
    def is_direct(self) -> bool:
        """Whether rows go from device to device."""
        return self.exchange_by is ExchangeWay.DEVICE

    def received_bytes_per_s(self, hardware: Hardware) -> float:
        """Return the bytes per second that arrive from other processes where they are computed with."""
        link, wire = self.link_bytes_per_s, hardware.wire
        if wire is None or self.is_direct:
            return link
        return min(link, wire.there_and_back_bytes_per_s)

    def share(self, count: int) -> "Limits":
        """Return the limits of one of ``count`` processes on a machine: its part of memory, with a GPU of its own."""
        device_bytes, host_bytes = self.device_bytes, self.host_bytes // count
        if self.one_memory:  # the parts of both budgets, each rounded down, could be a byte less than that of their sum
            device_bytes //= count
            host_bytes = self.memory_bytes // count - device_bytes
        return replace(self, device_bytes=device_bytes, host_bytes=host_bytes)

    def of_all(self, nbytes: int) -> str:
        """Return the budget that the user must give for all processes, as text, so that each has ``nbytes`` for the
        plan."""
        each = f", for {self.processes} processes" if self.processes > 1 else ""
        return f"'{budget_of((nbytes + self.beside_bytes) * self.processes)}'{each}"

    @property
    def memory_bytes(self) -> int:
        """The sum of both budgets, which is meaningful where they are of one memory."""
        return self.device_bytes + self.host_bytes


class Capacity:
    """The memory that ``limits`` leave for the arenas of layouts of ``workload``.

    On the CPU both budgets are of one memory, and the one arena may take from either. If the device has memory of its
    own, each budget has its arena.
    """

    def __init__(self, workload: Workload, limits: Limits, hardware: Hardware) -> None:
        self.workload, self.limits = workload, limits
        self.has_tiers = hardware.has_device_memory

    # ---- what there is -------------------------------------------------------------------------------------

    def arena_bytes(self, layout: Layout) -> int:
        """Return the bytes left for the arena that is computed in; negative if not even the rest fits."""
        device, host = self.budgets(layout)
        device -= self._fixed_and_scratch_bytes(layout)
        host -= self.host_bytes(layout)
        if device < 0 or host < 0:
            return -1
        return device if self.has_tiers else device + host

    def budgets(self, layout: Layout) -> tuple[int, int]:
        """Return the budgets of device and host. If they are of one memory that has room for both, each gets at least
        what ``layout`` cannot do without."""
        limits, host = self.limits, self.limits.host_bytes
        if limits.one_memory:
            host = max(self.host_bytes(layout), min(host, limits.memory_bytes - self._fixed_and_scratch_bytes(layout)))
        return limits.memory_bytes - host, host

    def frames(self, layout: Layout) -> int:
        """Return the frames of the arena that is computed in: as many as the budgets allow, but no more than regions,
        blocks, work and read-ahead can ever fill."""
        busiest = max((blocks for _, blocks, _ in _frames_by_pass(layout, self.workload)), default=0)
        taken = max((region.stop for regions in layout.regions.values() for region in regions), default=0)
        most = blocks_in(layout, self.workload) + taken + busiest + ahead_frames(busiest)
        return min(most, self.arena_bytes(layout) // layout.frame_bytes)

    def host_frames(self, layout: Layout) -> int | None:
        """Return the frames of the host's own arena; None if there is none."""
        if not self.has_tiers:
            return None
        most = blocks_in(layout, self.workload) + IN_TRANSFER + MOST_AHEAD
        return min(most, (self.limits.host_bytes - self.host_bytes(layout)) // layout.frame_bytes)

    def fits(self, layout: Layout) -> bool:
        """Whether every pass of ``layout`` can run."""
        arena = self.arena_bytes(layout)
        if arena < 0 or frames_needed(layout, self.workload) > arena // layout.frame_bytes:
            return False
        host_frames = self.host_frames(layout)
        return host_frames is None or host_frames >= IN_TRANSFER

    @property
    def most_bytes(self) -> int:
        """An upper bound for the first number of ``least``, for layouts that fit."""
        return self.limits.device_bytes if self.has_tiers else self.limits.memory_bytes

    # ---- what is needed ------------------------------------------------------------------------------------

    def needed_bytes(self, layout: Layout) -> int:
        """Return the least bytes that a run of ``layout`` takes where it is computed, including temporaries and
        parameters."""
        return self._fixed_and_scratch_bytes(layout) + frames_needed(layout, self.workload) * layout.frame_bytes

    def whole_bytes(self, layout: Layout) -> int:
        """Return the least bytes that a run takes on device and host together."""
        return self.needed_bytes(layout) + self.host_bytes(layout)

    def least(self, layout: Layout, below: float = inf) -> tuple[int, int]:
        """Return a sort key for layouts by memory: the bytes needed where it is computed (on a device) or in all, then
        in all. The plan's lists, which take time to count, are left out beyond ``below`` bytes."""
        needed = self.needed_bytes(layout)
        whole = needed + self.workload.fixed_host_bytes
        if (needed if self.has_tiers else whole) <= below:
            whole += self._list_bytes(layout)
        return needed if self.has_tiers else whole, whole

    def host_bytes(self, layout: Layout) -> int:
        """Return the bytes that are always taken on the host."""
        return self.workload.fixed_host_bytes + self._list_bytes(layout)

    def _list_bytes(self, layout: Layout) -> int:
        """Return the bytes of the plan's own lists beyond those stated beside the budgets for any plan."""
        uses = sum(block_uses(layout, self.workload, passes) for passes in layout.programs.values())
        return max(0, uses * (1 + self.has_tiers) * _USE_BYTES - _STATED_LIST_BYTES)

    def parts(self, layout: Layout) -> dict[str, int]:
        """Return what a run of ``layout`` cannot do without: bytes by purpose, with the slabs and blocks of the pass
        that needs most. On a machine with device memory the host's part is separate; elsewhere it is all of one
        memory."""
        held = self._parts_without_host(layout)
        held["row offsets, scalings and scores, on the host"] = self.workload.fixed_host_bytes
        held["the plan's lists, on the host"] = self._list_bytes(layout)
        if self.has_tiers:
            held["blocks on their way, on the host"] = IN_TRANSFER * layout.frame_bytes
        return held

    def _parts_without_host(self, layout: Layout) -> dict[str, int]:
        """Return the same without the host's part."""
        work = self.workload
        slabs, blocks, item = max(_frames_by_pass(layout, work), key=lambda needed: needed[0] + needed[1])
        return {
            "parameters, gradients and optimizer": work.fixed_device_bytes,
            f"temporaries of tiles{self._describe_heaviest_pass(layout.heaviest)}": layout.scratch_bytes,
            f"slabs that are gathered from ({item.title})": slabs * layout.frame_bytes,
            f"blocks of {'two steps' if item.steps_at_once > 1 else 'a step'} ({item.title})": blocks
            * layout.frame_bytes,
        }

    def _describe_heaviest_pass(self, item: Pass | None) -> str:
        """Return which pass has the most temporaries, and the edges of a row if its layer needs all of them at once."""
        if item is None:
            return ""
        kind, work = item.pull.per_edge if item.pull else None, self.workload
        if item.pull is None or kind is None or kind.row_edges <= kind.edges_at_once:
            return f" ({item.title})"
        of_tile = most_edges(work.topologies[item.pull.direction], work.tile_rows, item.rows, work.tile_rows)
        edges = min(kind.row_edges, of_tile)
        by, nbytes = kind.together or "the layer", edges * kind.bytes_per_edge
        held = f"{edges:,} edges of one row, needed at once by {by}, {format_size(nbytes)}"
        return f" ({item.title}: {held} a thread)"

    def _fixed_and_scratch_bytes(self, layout: Layout) -> int:
        return self.workload.fixed_device_bytes + layout.scratch_bytes

    def _spare_host_bytes(self, layout: Layout) -> int:
        """Return the bytes that the host has beyond what ``layout`` needs there; 0 with tiers, since a device cannot
        use them."""
        return 0 if self.has_tiers else max(0, self.limits.host_bytes - self.host_bytes(layout))

    def _least_device(self, layout: Layout) -> int:
        return max(self._fixed_and_scratch_bytes(layout), self.needed_bytes(layout) - self._spare_host_bytes(layout))

    def _least_host(self, layout: Layout) -> int:
        return self.host_bytes(layout) + (IN_TRANSFER * layout.frame_bytes if self.has_tiers else 0)

    def lacking(self, layout: Layout) -> tuple[int, int]:
        """Return a sort key for layouts that do not fit: the bytes that the budgets lack; for a device, before what the
        host needs."""
        device = max(0, self._least_device(layout) - self.limits.device_bytes)
        host = self._least_host(layout)
        return (device, host) if self.has_tiers else (device + max(0, host - self.limits.host_bytes), device)

    def shortage(self, layout: Layout) -> str:
        """Return why ``layout``, for which the budgets lack least, does not fit: what needs how much, what there is,
        and the least budgets that would do."""
        limits = self.limits
        if limits.one_memory:
            need = self.whole_bytes(layout)
            return (
                f"the smallest plan needs {format_size(need)} of memory: {self._describe_parts(layout)}; it may take "
                f"{format_size(limits.memory_bytes)}; give memory={limits.of_all(need)}"
            )
        need, device, host = self.needed_bytes(layout), self._least_device(layout), self._least_host(layout)
        lines, remedies = [], []
        if host > limits.host_bytes:
            ring = " and two blocks on their way" if self.has_tiers else ""
            lines.append(
                f"row offsets and scalings{ring} need {format_size(host)} on the host, the host budget is "
                f"{format_size(limits.host_bytes)}"
            )
            remedies.append(f"host_budget={limits.of_all(host)}")
        if device > limits.device_bytes:
            gpu_budget = format_size(limits.device_bytes)
            if self.has_tiers:
                line = f"the smallest plan needs {format_size(need)} on the device: {self._describe_parts(layout)}; "
                line += f"its budget is {gpu_budget}"
            elif (
                need - self._spare_host_bytes(layout) <= limits.device_bytes
            ):  # outside of the arena: a host budget cannot replace it
                line = f"parameters and what layers compute in need {format_size(device)} of the gpu budget alone, "
                line += f"which is {gpu_budget}"
            else:
                line = (
                    f"the smallest plan needs {format_size(self.whole_bytes(layout))}: {self._describe_parts(layout)}; "
                )
                line += f"the gpu budget is {gpu_budget} and the host budget {format_size(limits.host_bytes)}"
            lines.append(line)
            remedies.append(f"gpu_budget='{budget_of(device)}'")
        return f"{'; '.join(lines)}; give {' and '.join(remedies)}"

    def _describe_parts(self, layout: Layout) -> str:
        """Return the parts of the smallest plan, as ``ooc plan --floor`` prints them; only those on the device if it
        has memory of its own."""
        parts = self._parts_without_host(layout) if self.has_tiers else self.parts(layout)
        return ", ".join(f"{format_size(nbytes)} {what}" for what, nbytes in parts.items() if nbytes)


def blocks_in(layout: Layout, workload: Workload) -> int:
    """Return the number of frames that all blocks would fill, without regions."""
    count = sum(m.grid.blocks * m.grid.slabs for m in layout.matrices.values() if m.in_frames)
    edges = ((t.edges, array) for t in workload.topologies.values() for array in t.arrays.values())
    return count + sum(number * array.edge_bytes // layout.frame_bytes + 1 for number, array in edges)


def budget_of(nbytes: int) -> str:
    """Return a budget as a user would type it, at least ``nbytes`` and less than 1 % more."""
    for unit, scale in (("G", 10**9), ("M", 10**6), ("K", 10**3)):
        if nbytes >= 100 * scale:
            return f"{-(-nbytes // scale)}{unit}"
    return str(nbytes)


def block_uses(layout: Layout, workload: Workload, passes: Passes) -> int:
    """Return about how often a program uses blocks; it includes rows that this process does not compute."""
    key = "block uses", layout.step_rows, layout.frame_bytes
    return passes.remembered(key, lambda: sum(_block_uses(item, layout, workload, passes) for item in passes))


def _block_uses(item: Pass, layout: Layout, workload: Workload, passes: Passes) -> int:
    matrices, sweeps = layout.matrices, 1
    if isinstance(item, ColumnPass):
        source, sweeps = matrices[item.pull.source].grid, item.slabs
        beside = (matrices[name].grid for name in item.pull.own if not matrices[name].whole)
        count = item.slabs * matrices[item.output].grid.blocks
        count += sum(item.slabs * len(matching_slabs(source, own, 0)) * own.blocks for own in beside)
        count += (source.slabs - direct_slabs(passes, item)) * source.blocks
    else:
        count = sum(len(slabs) * matrices[name].grid.blocks for name, slabs, _ in blocks_of(item, matrices, passes))
    edges = (edge_grid(array, topology.edges, layout.frame_bytes) for _, topology, array in edges_swept(item, workload))
    return count + sweeps * sum(grid.blocks for grid in edges)


def blocks_at_once(item: Pass, layout: Layout, workload: Workload, passes: Passes) -> int:
    """Return a bound on the frames in use while a pass computes as many consecutive steps as it has in memory at
    once."""
    key = "blocks at once", item.index, layout.step_rows, layout.frame_bytes
    return passes.remembered(key, lambda: _blocks_at_once(item, layout, workload, passes))


def _blocks_at_once(item: Pass, layout: Layout, workload: Workload, passes: Passes) -> int:
    count = 0
    used: list[tuple[Grid, int]] = []  # matrices, and how many slabs of each
    if isinstance(item, ColumnPass):
        height = column_step_rows(item, layout.matrices, layout.step_rows)
        source = layout.matrices[item.pull.source].grid
        used.append((layout.matrices[item.output].grid, item.processes))
        for own in (layout.matrices[name] for name in item.pull.own):
            slabs = max(len(matching_slabs(source, own.grid, slab)) for slab in range(item.slabs))
            used.append((own.grid, 0 if own.whole else slabs))
        if source.block_rows < layout.step_rows:  # of the step before, until they are in the buffers
            copied = item.slab_buffers - direct_slabs(passes, item)
            count += copied * -(-layout.step_rows // source.block_rows)
    else:
        height = row_step_rows(item, layout.step_rows)
        used += [(layout.matrices[name].grid, len(one)) for name, one, _ in blocks_of(item, layout.matrices, passes)]
    steps = item.steps_at_once
    count += sum(steps * number * -(-height // grid.block_rows) for grid, number in used)
    for _, topology, array in edges_swept(item, workload):
        most = edges_in_memory(item, most_edges(topology, workload.tile_rows, item.rows, height))
        grid = edge_grid(array, topology.edges, layout.frame_bytes)
        count += steps * min(-(-most // grid.block_rows) + 1, grid.blocks)
    return count


def ahead_frames(at_once: int) -> int:
    """Return how many frames are worth having beyond those in use, so that reads and writes go on during a step."""
    return max(4, at_once // 2)


def frames_needed(layout: Layout, workload: Workload) -> int:
    """Return the fewest frames in which every pass can run, without reading ahead."""
    return max((taken + blocks for taken, blocks, _ in _frames_by_pass(layout, workload)), default=0)


def _frames_by_pass(layout: Layout, workload: Workload) -> Iterator[tuple[int, int, Pass]]:
    """Yield for every pass the frames up to the last one taken by a region, the frames it works in, and the pass."""

    def of(passes: Passes, regions: Sequence[Region]) -> list[tuple[int, int, Pass]]:
        taken = (max((r.stop for r in regions if r.first <= p.index <= r.last), default=0) for p in passes)
        return [
            (frames, blocks_at_once(p, layout, workload, passes), p) for frames, p in zip(taken, passes, strict=True)
        ]

    for name, passes in layout.programs.items():
        key = "frames", layout.regions[name], layout.step_rows, layout.frame_bytes
        yield from passes.remembered(key, partial(of, passes, layout.regions[name]))


def capacity_of(
    passes: Passes,
    layout: Layout,
    workload: Workload,
    bounds: Sequence[tuple[int, int]],
    available: Sequence[Sequence[range]],
    *,
    cyclic: bool,
    coarseness: int = 1,
) -> list[int]:
    """Return, for each step, the frames left for waiting blocks, beside those that a pass works in and reads ahead
    into.

    ``bounds`` may be those of a program whose blocks are ``coarseness`` times as tall as the layout's.
    """
    room = []
    for item, pieces in zip(passes, available, strict=True):
        at_once = blocks_at_once(item, layout, workload, passes)
        free = sum(map(len, pieces)) - at_once
        room.append(max(0, free - ahead_frames(at_once)) // coarseness)
    capacity: list[int] = []
    following = *room[1:], *(room[:1] if cyclic else room[-1:])
    for (first, stop), here, then in zip(bounds, room, following, strict=True):
        capacity += [here] * (stop - first)
        if stop > first:
            capacity[-1] = min(here, then)
    return capacity
