# SPDX-License-Identifier: Apache-2.0
"""Choose a fate for every matrix under two budgets.

The search starts from the leanest arrangement (everything on the SSD, narrow slabs) and spends what the
budgets leave, most SSD traffic saved per byte and pass first: pulled matrices kept whole (their aggregation
then fuses with the row pass after it), topology, wider slabs, and last the rows of everything else, in part
if need be. Every step is tried by placing all buffers, so a plan that is returned fits.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ooc.errors import BudgetError
from ooc.plan.grid import Stretch, stretches
from ooc.plan.plan import ColumnPass, Plan
from ooc.plan.schedule import Choice, build_plan, pulled_sources, touched
from ooc.plan.workload import Direction, Fate, Workload
from ooc.sizes import format_size

BLOCK_BYTES = 4 << 20
"""Aimed-at size of a row block: large enough for the disk's full rate, small enough to keep several."""
NARROW_COLUMNS = 8
"""Columns of the narrowest slab: 32 bytes of float32, half a cache line a gathered row."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the plan may use, and what the user has fixed by hand (``None``: the planner's choice)."""

    device_bytes: int
    host_bytes: int
    block_rows: int | None = None
    slab_columns: int | None = None


def make_plan(workload: Workload, limits: Limits) -> Plan:
    """The plan for ``workload`` under ``limits``; raises BudgetError naming the least budgets that would do."""
    search = _Search(workload, limits)
    search.keep_sources()
    search.keep_topology()
    search.widen_slabs()
    search.keep_rows()
    return search.plan


class _Search:
    """The arrangement so far (``choice``, ``plan``) and the steps that improve it."""

    def __init__(self, workload: Workload, limits: Limits) -> None:
        self.workload = workload
        self.limits = limits
        self._stretches: dict[int, dict[Direction, list[Stretch]]] = {}
        self.sources = pulled_sources(workload)
        self.choice, self.plan = self._leanest()

    def _build(self, choice: Choice) -> Plan:
        rows = choice.block_rows
        if rows not in self._stretches:
            self._stretches[rows] = {
                direction: stretches(
                    list(topology.tile_edges),
                    rows=self.workload.rows,
                    tile_rows=self.workload.tile_rows,
                    block_rows=rows,
                )
                for direction, topology in self.workload.topologies.items()
            }
        return build_plan(
            self.workload,
            choice,
            stretches=self._stretches[rows],
            device_limit_bytes=self.limits.device_bytes,
            host_limit_bytes=self.limits.host_bytes,
        )

    def _fits(self, plan: Plan) -> bool:
        return plan.device_peak_bytes <= self.limits.device_bytes and plan.host_peak_bytes <= self.limits.host_bytes

    def _try(self, choice: Choice) -> bool:
        """Take ``choice`` if it fits."""
        plan = self._build(choice)
        if self._fits(plan):
            self.choice, self.plan = choice, plan
            return True
        return False

    def _leanest(self) -> tuple[Choice, Plan]:
        """Everything on the SSD, with the tallest row blocks that leave half of the device for other things."""
        slabs = {
            name: min(columns, self.limits.slab_columns or NARROW_COLUMNS) for name, columns in self.sources.items()
        }
        heights = [self.limits.block_rows] if self.limits.block_rows else list(self._heights())
        for slab_buffers in (2, 1):
            for height in heights:
                choice = Choice(block_rows=height, slab_columns=slabs, slab_buffers=slab_buffers)
                plan = self._build(choice)
                roomy = 2 * plan.device_peak_bytes <= self.limits.device_bytes
                if self._fits(plan) and (roomy or height == heights[-1]):
                    return choice, plan
        raise BudgetError(_shortage(plan, self.limits))

    def _heights(self) -> Iterator[int]:
        """Row-block heights to try, tallest first: tiles times powers of two."""
        tile = self.workload.tile_rows
        widest = max(m.columns * m.itemsize for m in self.workload.matrices.values())
        height = tile
        while height < self.workload.rows and height * widest * 2 <= BLOCK_BYTES:
            height *= 2
        while height >= tile:
            yield height
            height //= 2

    def _in_a_tier(self, change: Callable[[Fate], Choice]) -> bool:
        """Try a change with host memory first: the device's is what slabs and blocks live on."""
        return self._try(change(Fate.HOST)) or self._try(change(Fate.DEVICE))

    def keep_sources(self) -> None:
        """Keep pulled matrices whole, so that their aggregation needs neither slabs nor a second pass."""
        if self.limits.slab_columns is not None:
            return
        for name in self._by_merit(list(self.sources)):
            rows = self.workload.matrices[name].rows
            self._in_a_tier(lambda tier, name=name, rows=rows: self._keeping(name, tier, rows))  # type: ignore[misc]

    def keep_topology(self) -> None:
        for direction in sorted(self.workload.topologies, key=lambda d: d.value):
            self._in_a_tier(
                lambda tier, direction=direction: replace(  # type: ignore[misc]
                    self.choice, topologies={**self.choice.topologies, direction: tier}
                )
            )

    def widen_slabs(self) -> None:
        """Fewer, wider slabs for the sources that stay on the SSD: each slab reads the topology once."""
        if self.limits.slab_columns is not None:
            return
        for name, columns in self.sources.items():
            if name in self.choice.resident:
                continue
            for count in range(1, -(-columns // NARROW_COLUMNS) + 1):
                width = -(-columns // count)
                if width <= self.choice.slab_columns[name]:
                    break
                if self._try(replace(self.choice, slab_columns={**self.choice.slab_columns, name: width})):
                    break

    def keep_rows(self) -> None:
        """Keep as many leading row blocks of everything else as there is room for."""
        rest = [name for name in self.plan.matrices if name not in self.sources]
        for name in self._by_merit(rest):
            for tier in (Fate.HOST, Fate.DEVICE):
                if name in self.choice.resident:
                    break
                self._keep_most(name, tier)

    def _keep_most(self, name: str, tier: Fate) -> None:
        planned = self.plan.matrices[name]
        if self._try(self._keeping(name, tier, planned.matrix.rows)):
            return
        if name in self._sums():
            return  # written slab by slab: kept whole or not at all
        low, high = 0, planned.grid.blocks
        while high - low > 1:
            middle = (low + high) // 2
            if self._fits(self._build(self._keeping(name, tier, middle * self.choice.block_rows))):
                low = middle
            else:
                high = middle
        if low:
            self._try(self._keeping(name, tier, low * self.choice.block_rows))

    def _sums(self) -> set[str]:
        """Matrices that column passes write."""
        steps = (step for steps in self.plan.programs.values() for step in steps)
        return {step.pull.output for step in steps if isinstance(step, ColumnPass)}

    def _keeping(self, name: str, tier: Fate, rows: int) -> Choice:
        return replace(self.choice, resident={**self.choice.resident, name: (tier, rows)})

    def _by_merit(self, names: list[str]) -> list[str]:
        """Most bytes of SSD traffic an epoch per byte kept and pass it is kept for, first."""
        passes = self.plan.programs["train"]
        merit: dict[str, float] = {}
        for name in names:
            uses = [p.index for p in passes if name in touched(p)]
            span = max(uses) - min(uses) + 1 if uses else len(passes)
            if self.plan.matrices[name].matrix.kind.value != "scratch":
                span = len(passes)
            merit[name] = len(uses) / span
        return sorted(names, key=lambda name: (-merit[name], name))


def _shortage(plan: Plan, limits: Limits) -> str:
    """Who needs how much, what there is, and what would do."""
    parts = []
    device, host = plan.device_peak_bytes, plan.host_peak_bytes
    if device > limits.device_bytes:
        peak_buffer = max(
            (b for b in plan.buffers.values() if b.tier is Fate.DEVICE), key=lambda b: b.nbytes, default=None
        )
        largest = f" (largest buffer: {peak_buffer.name}, {format_size(peak_buffer.nbytes)})" if peak_buffer else ""
        parts.append(
            f"the leanest plan needs {format_size(device)} on the device{largest}, the gpu budget is "
            f"{format_size(limits.device_bytes)}; give --gpu-budget {_round_up(device)}"
        )
    if host > limits.host_bytes:
        parts.append(
            f"row offsets and scalings need {format_size(host)} on the host, the host budget is "
            f"{format_size(limits.host_bytes)}; give --host-budget {_round_up(host)}"
        )
    return " and ".join(parts)


def _round_up(nbytes: int) -> str:
    """A budget of at least ``nbytes``, as one would type it."""
    for unit, scale in (("G", 10**9), ("M", 10**6), ("K", 10**3)):
        if nbytes >= 10 * scale:
            return f"{-(-nbytes // scale)}{unit}"
    return str(nbytes)
