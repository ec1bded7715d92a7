# SPDX-License-Identifier: Apache-2.0
"""The budgets: what they leave for arenas, whether a layout fits, and what to say when none does."""

from collections.abc import Sequence
from dataclasses import dataclass

from ooc.plan.hardware import Hardware
from ooc.plan.layout import Layout
from ooc.plan.occupancy import ahead_frames, blocks_at_once, frames_needed
from ooc.plan.passes import Pass, RowPass
from ooc.plan.staging import IN_TRANSFER, frames_to_hold
from ooc.plan.workload import Workload
from ooc.sizes import format_size


@dataclass(frozen=True, slots=True)
class Limits:
    """What the plan may use, and what the user has fixed by hand (``None``: the planner's choice).

    ``ssd_write_bytes``: the most that a training epoch may write to the SSD (drives wear out).
    """

    device_bytes: int
    host_bytes: int
    block_rows: int | None = None
    slab_columns: int | None = None
    ssd_write_bytes: int | None = None


class Room:
    """What ``limits`` leave for the arenas of layouts of ``workload``.

    On the CPU both budgets are of one memory, and the one arena may take from either; where the device has memory of
    its own, each budget has its arena.
    """

    def __init__(self, workload: Workload, limits: Limits, hardware: Hardware) -> None:
        self.workload, self.limits = workload, limits
        self.has_tiers = hardware.has_device_memory

    # ---- what there is -------------------------------------------------------------------------------------

    def arena_bytes(self, layout: Layout) -> int:
        """For the arena that is computed in; negative where not even the rest fits."""
        device = self.limits.device_bytes - self._beside_device(layout)
        host = self.limits.host_bytes - self.workload.fixed_host_bytes
        if device < 0 or host < 0:
            return -1
        return device if self.has_tiers else device + host

    def frames(self, layout: Layout) -> int:
        """Frames of that arena: all that the budgets allow, but no more than there can ever be blocks for."""
        most = _blocks(layout, self.workload)
        most += max((r.stop for regions in layout.regions.values() for r in regions), default=0)
        busiest = max((at_once for _, at_once in _at_once(layout, self.workload)), default=0)
        most += busiest + ahead_frames(busiest)
        return min(most, self.arena_bytes(layout) // layout.frame_bytes)

    def host_frames(self, layout: Layout) -> int | None:
        """Frames of the host's own arena; None where it has none."""
        if not self.has_tiers:
            return None
        most = frames_to_hold(_blocks(layout, self.workload))
        return min(most, (self.limits.host_bytes - self.workload.fixed_host_bytes) // layout.frame_bytes)

    def fits(self, layout: Layout) -> bool:
        """Whether every pass of ``layout`` can run."""
        arena = self.arena_bytes(layout)
        if arena < 0 or frames_needed(layout, self.workload) > arena // layout.frame_bytes:
            return False
        host_frames = self.host_frames(layout)
        return host_frames is None or host_frames >= IN_TRANSFER

    # ---- what is needed ------------------------------------------------------------------------------------

    def needed_bytes(self, layout: Layout) -> int:
        """What the leanest run of ``layout`` takes where it is computed, the temporaries and parameters included."""
        return self._beside_device(layout) + frames_needed(layout, self.workload) * layout.frame_bytes

    def needed_host_bytes(self, layout: Layout) -> int:
        """What the leanest run takes of host memory, where that is not the memory that is computed in."""
        ring = IN_TRANSFER * layout.frame_bytes if self.has_tiers else 0
        return self.workload.fixed_host_bytes + ring

    def _beside_device(self, layout: Layout) -> int:
        return self.workload.fixed_device_bytes + layout.scratch_bytes

    def shortage(self, leanest: Sequence[Layout]) -> str:
        """Why none of ``leanest``, the leanest layout of every block height, fits: who needs how much, what there is,
        and the least budgets that would do."""
        return self._shortage_of_tiers(leanest) if self.has_tiers else self._shortage_of_one(leanest)

    def _shortage_of_one(self, leanest: Sequence[Layout]) -> str:
        work, limits = self.workload, self.limits
        if work.fixed_host_bytes > limits.host_bytes:
            need = min(self.needed_bytes(one) for one in leanest)
            least = work.fixed_host_bytes
            line = (
                f"row offsets and scalings need {format_size(least)} on the host, the host budget is "
                f"{format_size(limits.host_bytes)}; give host_budget='{budget_of(least)}'"
            )
            if need > limits.device_bytes:
                line += f" and gpu_budget='{budget_of(need)}'"
            return line
        spare = limits.host_bytes - work.fixed_host_bytes

        def least_device(one: Layout) -> int:
            return max(self._beside_device(one), self.needed_bytes(one) - spare)

        layout = min(leanest, key=least_device)
        need, least = self.needed_bytes(layout), least_device(layout)
        if need - spare <= limits.device_bytes:
            # Both together would do: what the arena is not for may not be taken from the host budget.
            return (
                f"parameters and what layers compute in need {format_size(least)} of the gpu budget alone, which is "
                f"{format_size(limits.device_bytes)}; give gpu_budget='{budget_of(least)}'"
            )
        return (
            f"the leanest plan needs {format_size(need + work.fixed_host_bytes)}{_largest(layout, work)}; the gpu "
            f"budget is {format_size(limits.device_bytes)} and the host budget {format_size(limits.host_bytes)}; "
            f"give gpu_budget='{budget_of(least)}'"
        )

    def _shortage_of_tiers(self, leanest: Sequence[Layout]) -> str:
        work, limits = self.workload, self.limits
        fitting = [one for one in leanest if self.needed_bytes(one) <= limits.device_bytes]
        layout = min(fitting, key=self.needed_host_bytes) if fitting else min(leanest, key=self.needed_bytes)
        device, host = self.needed_bytes(layout), self.needed_host_bytes(layout)
        lines, remedies = [], []
        if host > limits.host_bytes:
            ring = format_size(host - work.fixed_host_bytes)
            lines.append(
                f"the host needs {format_size(host)}, {format_size(work.fixed_host_bytes)} of it for row offsets and "
                f"scalings and {ring} for two blocks on their way, and its budget is {format_size(limits.host_bytes)}"
            )
            remedies.append(f"host_budget='{budget_of(host)}'")
        if device > limits.device_bytes:
            lines.append(
                f"the leanest plan needs {format_size(device)} on the device{_largest(layout, work)}, and its budget "
                f"is {format_size(limits.device_bytes)}"
            )
            remedies.append(f"gpu_budget='{budget_of(device)}'")
        return f"{'; '.join(lines)}; give {' and '.join(remedies)}"


def _blocks(layout: Layout, workload: Workload) -> int:
    """Frames that all there is would fill, regions aside."""
    count = sum(m.grid.blocks * m.grid.slabs for m in layout.matrices.values() if m.in_frames)
    edges = ((t.edges, array) for t in workload.topologies.values() for array in t.arrays.values())
    return count + sum(number * array.edge_bytes // layout.frame_bytes + 1 for number, array in edges)


def _at_once(layout: Layout, workload: Workload) -> list[tuple[Pass, int]]:
    """Every pass, and the frames in use at once while it is computed."""
    return [
        (item, blocks_at_once(item, layout, workload, passes)) for passes in layout.programs.values() for item in passes
    ]


def _largest(layout: Layout, workload: Workload) -> str:
    """What takes most of the leanest arena: the narrowest slab of a matrix, or the blocks that one pass works in; or
    more than either, what a layer of unknown insides makes of its edges."""
    slab = max((r for regions in layout.regions.values() for r in regions), key=lambda r: r.count, default=None)
    item, frames = max(_at_once(layout, workload), key=lambda counted: counted[1])
    heaviest, largest = layout.heaviest, max(frames, 0 if slab is None else slab.count) * layout.frame_bytes
    is_general = heaviest is not None and heaviest.pull is not None and heaviest.pull.is_general
    if heaviest is not None and is_general and layout.scratch_bytes > largest:
        return f", of which {format_size(layout.scratch_bytes)} are what a layer makes of edges in {heaviest.title}"
    if slab is not None and (slab.count >= frames or not isinstance(item, RowPass)):
        planned = layout.matrices[slab.matrix]
        if planned.runs is not None:
            return f", of which {format_size(slab.count * layout.frame_bytes)} are for runs of {slab.matrix}"
        if planned.deal is not None:
            return f", of which {format_size(slab.count * layout.frame_bytes)} are for buckets of {slab.matrix}"
        width = planned.grid.slab_columns
        return f", of which {format_size(slab.count * layout.frame_bytes)} hold {width} columns of {slab.matrix}"
    if not isinstance(item, RowPass):
        return ""
    names = ", ".join(dict.fromkeys((*item.reads, *item.stores)))
    return f", of which {format_size(frames * layout.frame_bytes)} are blocks of {names} in {item.stage.name}"


def budget_of(nbytes: int) -> str:
    """A budget of at least ``nbytes`` and less than 1 % more, as one would type it."""
    for unit, scale in (("G", 10**9), ("M", 10**6), ("K", 10**3)):
        if nbytes >= 100 * scale:
            return f"{-(-nbytes // scale)}{unit}"
    return str(nbytes)
