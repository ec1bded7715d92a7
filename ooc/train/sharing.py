# SPDX-License-Identifier: Apache-2.0
"""A training shared by several processes: each computes a share of the rows of every node type, in proportion to its
speed, and plans for what it receives of the others' rows.

All processes make the same plan for the first one's share; the same layout is then unrolled for each one's own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, TypeVar

import torch

from ooc.engine.exchange import Exchange, HaloMemory, Staging, divide_rows, halo_memory, wanted_rows
from ooc.errors import OptionError
from ooc.model.graph import damaged
from ooc.plan import Hardware, Limits, Plan, Workload
from ooc.plan.cost import stage_seconds
from ooc.plan.layout.layout import Layout
from ooc.plan.layout.passes import ColumnPass
from ooc.plan.problem import Problem
from ooc.plan.program.build import build_plan
from ooc.plan.program.capacity import Capacity, ExchangeForm
from ooc.plan.program.verifier import verify_plan
from ooc.plan.workload import Direction, EdgesKey, RelationEdges, Share
from ooc.stages import EXCHANGE_BYTES, StageBuilder, Step, panel_rows
from ooc.train.job import Candidate, Job

_WORTH_PLANNING_S, _UNEVEN, _UNLIKE = 0.1, 0.1, 0.5
"""Planning anew is worth it if computing an epoch differs by at least this many seconds, and by this fraction of the
average: one process from the others, or all from the forecast."""
_EDGES_AT_ONCE = 1 << 20

T = TypeVar("T")


@dataclass(eq=False)
class SharedJob(Job):
    """The job of several processes, which may exist or only be planned for."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._shares: dict[str, list[range]] = {}
        threads = self.resources.threads_by_rank or [1] * self.resources.ranks.count
        self._speeds: Sequence[float] = [some / max(threads) for some in threads]
        self._forecast_s: dict[str, float] = {}
        """By program, the forecast seconds that the first process computes."""
        self._slowness = 1.0
        """How many times as long as forecast computing takes."""
        self._exchange_bytes, self._staging = 0, Staging()
        self._halo_rows: dict[EdgesKey, int] = {}
        self._sharded: frozenset[str] = frozenset()
        """What the last plan shards; all processes pull equally much of it, whatever their rows."""

    def plans_by_rank(self, limits: Limits, hardware: Hardware) -> list[tuple[Workload, Plan]]:
        self._admit_row_data(limits, hardware)
        halos, candidate, plan = self._shared_out(self._planned_halos, partial(self._choose_plan, limits, hardware))
        parts = ((Share(rank, self._shares), halo) for rank, halo in enumerate(halos))
        return [self._own_part(candidate.workload, plan, share, halo, limits, hardware) for share, halo in parts]

    def floor(self, limits: Limits, hardware: Hardware) -> dict[str, int]:
        """Return the least memory as if every process received all rows of the others; finding which are needed would
        itself take memory."""
        self._shares, memory = self._divided(self._panels()), HaloMemory()
        for direction in self._directions():
            nodes = self.store.node_counts[self._ends(direction)[1]]
            memory += HaloMemory(3 * nodes * (4 if nodes < 2**31 else 8), nodes, nodes)
        self._admit_halos(memory)
        return super().floor(limits, hardware)

    def _plan_here(self) -> tuple[Candidate, Plan, Exchange]:
        resources = self.resources
        exchange, candidate, plan = self._shared_out(self._found_halos, self._choose_measured)
        problem = Problem(candidate.workload, resources.limits, resources.hardware)
        self._forecast_s = {name: problem.computing_s(plan, name) for name in plan.programs}
        halos = {side: exchange.halo_rows(side) for side in candidate.workload.topologies}
        part = exchange.share, halos, resources.limits, resources.hardware
        _, plan = self._own_part(candidate.workload, plan, *part)
        return candidate, plan, exchange

    def _builder(self, recomputed: frozenset[int]) -> StageBuilder:
        builder, tile_rows = super()._builder(recomputed), self.resources.tile_rows
        heights = {space: panel_rows(nodes, tile_rows) for space, nodes in self.store.node_counts.items()}
        every = ((space, share) for space, shares in self._shares.items() for share in shares)
        builder.panels_held += max((-(-len(share) // heights[space]) for space, share in every), default=0)
        return builder

    def _describe_workload(self, builder: StageBuilder, steps: dict[str, list[Step]]) -> Workload:
        workload = super()._describe_workload(builder, steps)
        host_bytes = workload.fixed_host_bytes + self._exchange_bytes
        device_bytes = workload.fixed_device_bytes + self._staging.device_bytes
        workload = replace(workload, fixed_host_bytes=host_bytes, fixed_device_bytes=device_bytes)
        if not self._shares:
            return workload
        # Rows shuffled through files may belong to another process.
        halos, known = self._halo_rows, workload.topologies.items()
        topologies = {side: replace(one, halo_rows=halos.get(side) or None) for side, one in known}
        share = Share(0, self._shares)
        return replace(workload, share=share, topologies=topologies, scatter_counts={}, bucketing={})

    def _shared_out(
        self, find_halos: Callable[[], T], choose: Callable[[], tuple[Candidate, Plan]]
    ) -> tuple[T, Candidate, Plan]:
        """Give every process a share of the rows of every node type in proportion to its speed, and return the halos
        and the choice. It is done twice if only then is it known what is sharded."""
        count = self.resources.ranks.count
        for again in (True, False):
            panels = self._panels()
            height, (most, *_) = max(panels.values(), key=lambda found: len(found[1][0]))
            if len(most) < count:
                most_of_them = f"at most {len(most)}, as each takes whole panels of {height} rows"
                raise OptionError(f"{count} processes are too many for {self.store.path}: {most_of_them}")
            self._shares = self._divided(panels)
            found, (candidate, plan) = find_halos(), choose()
            before, self._sharded = self._sharded, _sharded(plan)
            if not again or before == self._sharded or self._divided(self._panels()) == self._shares:
                break
        return found, candidate, plan

    def _divided(self, panels: Mapping[str, tuple[int, list[list[float]]]]) -> dict[str, list[range]]:
        """Return the rows of each process by its speed, by node type."""
        nodes = self.store.node_counts
        return {space: divide_rows(some, high, nodes[space], self._speeds) for space, (high, some) in panels.items()}

    def _panels(self) -> dict[str, tuple[int, list[list[float]]]]:
        """Return, by node type, the rows of a panel and the seconds that an epoch computes for each panel, separately
        for stages with different rows: a process without the first rows has nothing to do in some. Sharded pulls are
        left out, as all do equally much of them."""
        found = {}
        for space, nodes in self.store.node_counts.items():
            height = panel_rows(nodes, self.resources.tile_rows)
            found[space] = height, self._panel_seconds(space, range(0, nodes, height)) or [[1.0] * -(-nodes // height)]
        return found

    def _panel_seconds(self, space: str, starts: range) -> list[list[float]]:
        workload, hardware, found = self.workload, self.resources.hardware, dict[int, list[float]]()
        for stage in (one for one in workload.programs["train"] if one.space == space):
            if stage.pull is not None and stage.pull.source in self._sharded:
                stage = replace(stage, pull=None)
            seconds = found.setdefault(stage.rows, [0.0] * len(starts))
            edges = None if stage.pull is None else workload.topologies[stage.pull.direction]
            for panel, start in enumerate(starts):
                rows = range(start, max(start, min(start + starts.step, stage.rows)))
                pulled = edges.edges_of(rows, workload.tile_rows) if edges is not None and rows else 0
                seconds[panel] += stage_seconds(stage, len(rows), pulled, workload, hardware)
        return [*found.values()]

    def rebalance(self, program: str, taken_s: Sequence[float]) -> bool:
        """Set shares by the seconds that every process has computed ``program`` for its own rows, and the form of
        exchange by how these compare with the forecast, from the next ``ready`` on. Return False if neither changes.
        All processes must call it with the same figures."""
        panels, own = self._panels(), [0.0] * len(taken_s)
        for space, (height, weights) in panels.items():
            for rank, one in enumerate(self._shares[space]):
                panels_of_rank = slice(one.start // height, -(-one.stop // height) if one else 0)
                own[rank] += sum(sum(some[panels_of_rank]) for some in weights)
        threads, speeds, mean_s = self.resources.threads, self._speeds, sum(taken_s) / len(taken_s)
        first_s, on_device = self._forecast_s[program] * threads, self.resources.on_device
        of_machine = threads if on_device else max(threads, self.resources.hardware.threads)
        even_s = first_s / of_machine - own[0] if self._sharded else 0.0
        done = [max(1e-9, even_s + one) for one in own]
        forecast_s = max(1e-9, first_s * sum(done) / len(done) / done[0])
        # Part of a device's time is spent on transfers.
        unlike_s = 0.0 if on_device else abs(mean_s - self._slowness * forecast_s)
        is_unlike = unlike_s >= max(_UNLIKE * mean_s, _WORTH_PLANNING_S)
        if is_unlike:
            self._slowness = mean_s / forecast_s
        if max(taken_s) - mean_s >= max(_UNEVEN * mean_s, _WORTH_PLANNING_S):
            self._speeds = [weight / max(1e-9, seconds) for weight, seconds in zip(done, taken_s, strict=True)]
            if self._divided(panels) != self._shares:
                return True
            self._speeds = speeds
        is_open = self.resources.limits.exchange is ExchangeForm.AUTO
        return is_unlike and is_open and _sharded(self._choose_measured()[1]) != self._sharded

    def _choose_measured(self) -> tuple[Candidate, Plan]:
        """As ``_choose_plan``, with links as fast relative to computing as measured."""
        limits = self.resources.limits
        rate = max(1, int(limits.link_bytes_per_s * self._slowness))
        return self._choose_plan(replace(limits, link_bytes_per_s=rate), self.resources.hardware)

    def _found_halos(self) -> Exchange:
        """Return the exchange with the other processes, which tell each other the rows of others that their edges lead
        to."""
        exchange, memory = Exchange(self.resources.ranks, self._shares), HaloMemory()
        for direction in self._halo_directions():
            target, source = self._ends(direction)
            sources = self._sources(direction, exchange.share.rows[target], source)
            memory += (found := exchange.find_halo(direction, sources, source))
            self._halo_rows[direction] = found.wanted
        self._admit_halos(memory)
        exchange.staging = self._staging
        return exchange

    def _planned_halos(self) -> list[dict[EdgesKey, Any]]:
        """Return the halos of all processes, from a store."""
        found, memory = [dict[EdgesKey, Any]() for _ in range(self.resources.ranks.count)], HaloMemory()
        for direction in self._halo_directions() if self.store.path.exists() else ():
            target, source = self._ends(direction)
            shares, nodes = self._shares[source], self.store.node_counts[source]
            pairs = zip(self._shares[target], shares, strict=True)
            wanted = [wanted_rows(self._sources(direction, one, source), shares, own, nodes) for one, own in pairs]
            of_halo = halo_memory(torch.tensor([[*map(len, one)] for one in wanted]), shares, nodes)
            if of_halo is not None:
                memory += of_halo
                self._halo_rows[direction] = of_halo.wanted
                for rank, one in enumerate(wanted):
                    found[rank][direction] = torch.cat(one).numpy()
        self._admit_halos(memory)
        return found

    def _admit_halos(self, memory: HaloMemory) -> None:
        widest = max((matrix.columns for matrix in self.workload.matrices.values()), default=0)
        row_bytes, count = widest * self.network.dtype.itemsize, self.resources.ranks.count
        self._exchange_bytes = memory.nbytes(row_bytes, count) + EXCHANGE_BYTES
        if self.resources.on_device:  # where gradients that are told come by way of the host as well
            gradients = sum(parameter.numel() for parameter in self.network.parameters) * self.network.dtype.itemsize
            self._staging = Staging.of_rows(row_bytes, count, is_direct=self.resources.limits.is_direct)
            self._exchange_bytes = memory.lists + self._staging.host_bytes + EXCHANGE_BYTES + 4 * gradients
        self._candidates.clear()

    def _halo_directions(self) -> list[EdgesKey]:
        """Return the directions with halos, if there is the memory to find them: a byte a row, and up to four for every
        row of its lists. The order is the same in all processes."""
        limits, self._exchange_bytes, self._halo_rows = self.resources.limits, 0, {}
        there = limits.memory_bytes if limits.one_memory else limits.host_bytes
        if self._fixed_host_bytes + 5 * sum(self.store.node_counts.values()) > there:
            return []
        return self._directions()

    def _directions(self) -> list[EdgesKey]:
        return [side for side in dict.fromkeys(p.direction for p in self.workload.pulls) if side.of_edges]

    def _ends(self, direction: EdgesKey) -> tuple[str, str]:
        """Return the types of the nodes that pull over these edges, and of those that are pulled."""
        if self.store.types is None or not isinstance(direction, RelationEdges):
            return "", ""
        kind = self.store.types.by_folder(direction.folder)
        return (kind.target, kind.source) if direction.direction is Direction.IN else (kind.source, kind.target)

    def _sources(self, direction: EdgesKey, share: range, space: str) -> Iterator[Any]:
        """Yield the source nodes, of type ``space``, of all edges into rows of a share, some at a time. Raises
        StoreError for an invalid one."""
        indptr, indices = self.store.topology(direction.value)
        first, stop = (int(indptr.read(row, row + 1)[0]) for row in (share.start, share.stop))
        for start in range(first, stop, _EDGES_AT_ONCE):
            found = indices.read(start, min(start + _EDGES_AT_ONCE, stop))
            if not 0 <= int(found.min()) <= int(found.max()) < self.store.node_counts[space]:
                raise damaged(self.store, indices.name)
            yield found

    def _own_part(
        self,
        workload: Workload,
        plan: Plan,
        share: Share,
        halos: Mapping[EdgesKey, Any],
        limits: Limits,
        hardware: Hardware,
    ) -> tuple[Workload, Plan]:
        """Return the plan for one process, from the plan that all have made for the first one's share."""
        layout = Layout(**{one.name: getattr(plan, one.name) for one in fields(Layout)})
        known = ((side, halos.get(side), one) for side, one in workload.topologies.items())
        topologies = {side: replace(one, halo=halo, halo_rows=None) for side, halo, one in known}
        workload = replace(workload, share=share, topologies=topologies)
        own = build_plan(layout, Capacity(workload, limits, hardware))
        verify_plan(own)
        return workload, own


def _sharded(plan: Plan) -> frozenset[str]:
    """Return what is sharded among processes in training."""
    columns = (item for item in plan.programs["train"] if isinstance(item, ColumnPass) and item.processes > 1)
    return frozenset(item.pull.source for item in columns)
