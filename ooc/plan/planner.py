# SPDX-License-Identifier: Apache-2.0
"""Choose how pulled matrices are held, under two budgets; which blocks stay in memory follows from the sequence.

The search starts from the leanest arrangement (narrow slabs, one buffer each) and goes, source by source, to
whatever makes the forecast epoch shortest, until no change of one source helps. Every candidate is forecast from a
coarse version of its program; the one chosen is unrolled in full, so a plan that is returned fits.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ooc.errors import BudgetError
from ooc.plan.forecast import forecast_seconds
from ooc.plan.hardware import UNMEASURED, Hardware
from ooc.plan.plan import Plan
from ooc.plan.schedule import (
    Choice,
    Cut,
    Layout,
    ahead_frames,
    blocks_at_once,
    build_plan,
    frames_needed,
    lay_out,
    pulled_sources,
)
from ooc.plan.workload import Workload
from ooc.sizes import format_size

BLOCK_BYTES = 4 << 20
"""The largest block: large enough for the disk's full rate, small enough to keep several."""
NARROW_COLUMNS = 8
"""Columns of the narrowest slab: 32 bytes of float32, half a cache line a gathered row."""
_ROUNDS = 3
_WHOLE = Cut(0, 0)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the plan may use, and what the user has fixed by hand (``None``: the planner's choice)."""

    device_bytes: int
    host_bytes: int
    block_rows: int | None = None
    slab_columns: int | None = None


def make_plan(workload: Workload, limits: Limits, hardware: Hardware = UNMEASURED) -> Plan:
    """The plan for ``workload`` under ``limits``; raises BudgetError naming the least budgets that would do."""
    return _Search(workload, limits, hardware).run()


class _Search:
    """The arrangement so far and the steps that improve it."""

    def __init__(self, workload: Workload, limits: Limits, hardware: Hardware) -> None:
        self.workload = workload
        self.limits = limits
        self.hardware = hardware
        self.sources = pulled_sources(workload)
        self.alike = self._groups()

    def run(self) -> Plan:
        layout = self._best()
        return build_plan(
            self.workload,
            layout,
            frames=self._frames(layout),
            device_limit_bytes=self.limits.device_bytes,
            host_limit_bytes=self.limits.host_bytes,
        )

    def _arena_bytes(self, layout: Layout) -> int:
        """What the budgets leave for the arena; negative where not even the rest fits."""
        device = self.limits.device_bytes - self.workload.fixed_device_bytes - layout.scratch_bytes
        host = self.limits.host_bytes - self.workload.fixed_host_bytes
        return -1 if device < 0 or host < 0 else device + host

    def _frames(self, layout: Layout) -> int:
        """Frames of the arena: all that the budgets allow, but no more than there can ever be blocks for."""
        planned = layout.matrices.values()
        most = sum(m.grid.blocks * m.grid.slabs for m in planned if not m.whole)
        most += sum(t.nbytes // layout.frame_bytes + 1 for t in self.workload.topologies.values())
        most += max((r.stop for regions in layout.regions.values() for r in regions), default=0)
        busiest = max(
            (
                blocks_at_once(item, layout, self.workload, passes)
                for passes in layout.programs.values()
                for item in passes
            ),
            default=0,
        )
        most += busiest + ahead_frames(busiest)
        return min(most, self._arena_bytes(layout) // layout.frame_bytes)

    def _fits(self, layout: Layout) -> bool:
        arena = self._arena_bytes(layout)
        return arena >= 0 and frames_needed(layout, self.workload) <= arena // layout.frame_bytes

    # ---- sources -------------------------------------------------------------------------------------------

    def _groups(self) -> list[list[str]]:
        """Sources of one shape and role, which are held alike: the search is as long as there are shapes."""
        groups: dict[tuple[int, int, int, bool], list[str]] = {}
        for name in self.sources:
            matrix = self.workload.matrices[name]
            loaded = any(name in s.loads for stages in self.workload.programs.values() for s in stages)
            groups.setdefault((matrix.rows, matrix.columns, matrix.itemsize, loaded), []).append(name)
        return list(groups.values())

    def _best(self) -> Layout:
        choice, layout = self._leanest()
        seconds = self._seconds(layout)
        whole = replace(choice, cuts=dict.fromkeys(self.sources, _WHOLE))
        if self.limits.slab_columns is None and seconds > 0:
            choice, layout, seconds = self._better(choice, layout, seconds, [whole])
        for _ in range(_ROUNDS):
            before = seconds
            for group in self.alike:
                candidates = [
                    replace(choice, cuts={**choice.cuts, **dict.fromkeys(group, cut)}) for cut in self._cuts(group[0])
                ]
                choice, layout, seconds = self._better(choice, layout, seconds, candidates)
            taller = [replace(choice, step_rows=height) for height in self._heights_asked()]
            choice, layout, seconds = self._better(choice, layout, seconds, taller)
            if seconds >= before:
                break
        return layout

    def _better(
        self, choice: Choice, layout: Layout, seconds: float, candidates: list[Choice]
    ) -> tuple[Choice, Layout, float]:
        for candidate in candidates:
            if candidate == choice:
                continue
            tried = lay_out(self.workload, candidate)
            if not self._fits(tried):
                continue
            forecast = self._seconds(tried)
            if forecast < seconds:
                choice, layout, seconds = candidate, tried, forecast
        return choice, layout, seconds

    def _seconds(self, layout: Layout) -> float:
        return forecast_seconds(self.workload, layout, self.hardware, frames=self._frames(layout))

    def _cuts(self, name: str) -> Iterator[Cut]:
        """Ways to hold a source: whole, or in more and more slabs."""
        columns = self.sources[name]
        if self.limits.slab_columns is not None:
            for buffers in (1, 2):
                yield Cut(min(columns, self.limits.slab_columns), buffers)
            return
        yield _WHOLE
        seen = set()
        for count in (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128):
            width = -(-columns // count)
            if width in seen or width < min(columns, NARROW_COLUMNS):
                continue
            seen.add(width)
            for buffers in range(1, min(3, -(-columns // width)) + 1):
                yield Cut(width, buffers)

    def _leanest(self) -> tuple[Choice, Layout]:
        """The leanest arrangement, with the tallest blocks that leave three quarters of the memory for other things."""
        heights = self._heights_asked()
        for height in heights:
            choice, layout = self._leanest_of(height)
            need = frames_needed(layout, self.workload) * layout.frame_bytes
            roomy = 4 * need <= self._arena_bytes(layout)
            if self._fits(layout) and (roomy or height == heights[-1]):
                return choice, layout
        raise BudgetError(self._shortage(layout))

    def _leanest_of(self, height: int) -> tuple[Choice, Layout]:
        """Slabs as narrow as they go take the least memory, but where blocks of many slabs take more."""
        widths = [
            NARROW_COLUMNS,
            2 * NARROW_COLUMNS,
            4 * NARROW_COLUMNS,
            8 * NARROW_COLUMNS,
            max(self.sources.values(), default=1),
        ]
        if self.limits.slab_columns is not None:
            widths = [self.limits.slab_columns]
        choices = [
            Choice(height, {name: Cut(min(columns, width), 1) for name, columns in self.sources.items()})
            for width in widths
        ]
        if self.limits.slab_columns is None:
            choices.append(Choice(height, dict.fromkeys(self.sources, _WHOLE)))
        layouts = [(choice, lay_out(self.workload, choice)) for choice in choices]
        return min(layouts, key=lambda c: frames_needed(c[1], self.workload) * c[1].frame_bytes + c[1].scratch_bytes)

    def _heights_asked(self) -> list[int]:
        return [self.limits.block_rows] if self.limits.block_rows else list(self._heights())

    def _heights(self) -> Iterator[int]:
        """Heights of a step to try, tallest first: tiles times powers of two."""
        tile = self.workload.tile_rows
        widest = max(m.columns * m.itemsize for m in self.workload.matrices.values())
        height = tile
        while height < self.workload.rows and height * widest * 2 <= BLOCK_BYTES:
            height *= 2
        while height >= tile:
            yield height
            height //= 2

    def _shortage(self, layout: Layout) -> str:
        """Who needs how much, what there is, and what would do."""
        work, limits = self.workload, self.limits
        arena = frames_needed(layout, work) * layout.frame_bytes
        if work.fixed_host_bytes > limits.host_bytes:
            least = work.fixed_host_bytes
            line = (
                f"row offsets and scalings need {format_size(least)} on the host, the host budget is "
                f"{format_size(limits.host_bytes)}; give --host-budget {_round_up(least)}"
            )
            computing = work.fixed_device_bytes + layout.scratch_bytes + arena
            if computing > limits.device_bytes:
                line += f" and --gpu-budget {_round_up(computing)}"
            return line
        need = work.fixed_device_bytes + layout.scratch_bytes
        spare = limits.host_bytes - work.fixed_host_bytes
        least = max(need, need + arena - spare)
        slab = max((r for regions in layout.regions.values() for r in regions), key=lambda r: r.count, default=None)
        largest = ""
        if slab is not None:
            width = layout.matrices[slab.matrix].grid.slab_columns
            size = format_size(slab.count * layout.frame_bytes)
            largest = f", of which {size} hold {width} columns of {slab.matrix}"
        return (
            f"the leanest plan needs {format_size(need + arena + work.fixed_host_bytes)}{largest}; the gpu budget is "
            f"{format_size(limits.device_bytes)} and the host budget {format_size(limits.host_bytes)}; "
            f"give --gpu-budget {_round_up(least)}"
        )


def _round_up(nbytes: int) -> str:
    """A budget of at least ``nbytes``, as one would type it."""
    for unit, scale in (("G", 10**9), ("M", 10**6), ("K", 10**3)):
        if nbytes >= 10 * scale:
            return f"{-(-nbytes // scale)}{unit}"
    return str(nbytes)
