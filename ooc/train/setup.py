# SPDX-License-Identifier: Apache-2.0
"""From a model, a graph and what may be used to a plan: everything that is checked and decided before a byte moves.

``prepare`` lowers a model for training; its ``Job`` plans for any machine and budgets, and never runs. Of the
graph, only where the edges of every tile begin is read, and for layers of unknown insides the in-edges, once, a tile's
at a time, and once more where what they gather does not fit in memory; what that takes beside a tile's edges is a few
bytes a node (``ooc.engine.shuffle_counts``). ``Job.ready`` is what a ``Session`` runs on this machine.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import cache, cached_property, lru_cache, partial
from math import ceil, inf
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from ooc.engine.exchange import Exchange, HaloMemory, Staging, divide_rows, halo_memory, wanted_rows
from ooc.engine.first_aggregation import find_aggregation
from ooc.engine.session import Prepared
from ooc.engine.shuffle_counts import counted_gathers, counted_rows, most_gathers, most_rows
from ooc.errors import BudgetError, ModelError, OptionError, StoreError
from ooc.model.graph import (
    LAPLACIANS,
    ActiveRows,
    AnyScaling,
    GraphRows,
    RelationScaling,
    damaged,
    load_rows,
    most_edges,
    reverse_of,
    rows_nbytes,
)
from ooc.model.lowering.assembly import Results, Setting
from ooc.model.lowering.network import Network, lower
from ooc.model.lowering.products import IN_FULL, Products
from ooc.model.stages import TELLING_BYTES, StageBuilder, Step, panel_rows
from ooc.model.workload import (
    EdgeCounts,
    ScatterCounts,
    TileEdges,
    counted,
    describe_workload,
    matrix_columns,
    store_matrices,
    stored,
)
from ooc.plan import Hardware, Limits, Plan, Workload
from ooc.plan.cost import stage_seconds
from ooc.plan.graphs import GraphStatistics, reach, spread_edges
from ooc.plan.layout.layout import Layout
from ooc.plan.layout.passes import ColumnPass
from ooc.plan.layout.shuffle import GatheredRows
from ooc.plan.planner import choose_workload
from ooc.plan.problem import Problem
from ooc.plan.program.build import build_plan
from ooc.plan.program.capacity import Capacity, ExchangeForm
from ooc.plan.program.verifier import verify_plan
from ooc.plan.solver import minimum_memory
from ooc.plan.workload import Direction, EdgeData, EdgesKey, RelationEdges, Share
from ooc.ranks import Ranks
from ooc.sizes import format_size
from ooc.storage.array import Array, chunk_rows
from ooc.storage.store import Store, Task, array_shapes
from ooc.train.embedding import LearntRows
from ooc.train.loss import RowsLoss, resolve_loss, takes_results
from ooc.train.metrics import Metric, make_scorer
from ooc.train.objective import Objective, no_objective
from ooc.train.optimizer_state import WHERE, StateOnDisk, why_in_memory
from ooc.train.resources import CPU, Resources, spill_dtype
from ooc.train.schedule import Averaging

IGNORABLE = ("none", *(data.value for data in EdgeData), "all")
"""What may be left out of what edges carry."""

_WORTH_PLANNING_S, _UNEVEN, _UNLIKE = 0.1, 0.1, 0.5
"""Seconds by which computing an epoch is to differ, and parts of what it takes on average: that of one process from the
others', or of all from what was forecast."""
_EDGES_AT_ONCE = 1 << 20
_BYTES_OF_AN_EDGE = 34
"""That a device takes of a tile's in a pass that sums: indices put together, parts of long rows, and blocks."""
_BYTES_OF_A_PULL = 16, 10
"""Of a row and an edge that a kernel pulls, beside what it makes of the row: offsets, indices, parts of long rows."""
_BESIDE_A_PULL = 5, 4
"""Times as much as that there is with a frame that is being widened."""

T = TypeVar("T")
Programs = Callable[[StageBuilder], dict[str, list[Step]]]
"""The programs to be planned, by the names they are run by. The planner weighs ``train`` most."""


class Saving(Enum):
    """Work that may be left out without changing any result."""

    FIRST_AGGREGATION = "first aggregation once"
    """A(X) of constant features is computed once instead of in every epoch."""
    ACTIVE_ROWS = "active rows"
    """In a store in hop order, only rows that can reach a scored row are computed."""
    SHARED_FORWARD = "one forward pass to score and to train"
    """Without dropout, the forward pass that scores an epoch's weights is the next epoch's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What tests and measurements vary. ``tile_rows`` are computed at once, and their sums added in that order (None:
    by the model's widths); ``savings`` are on unless left out, and change no result."""

    tile_rows: int | None = None
    savings: Collection[Saving] = tuple(Saving)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The programs of a network, and what they ask of memory, before anybody has decided what is kept where."""

    builder: StageBuilder
    steps: dict[str, list[Step]]
    workload: Workload


def prepare(
    model: nn.Module,
    graph: Store | GraphStatistics,
    resources: Resources,
    *,
    metric: Metric | None = None,
    loss: RowsLoss | None = None,
    objective: Objective | None = None,
    averaging: Averaging | None = None,
    input_dropout: float = 0.0,
    ignore_edge_data: str = "none",
    compute_dtype: str = "float32",
    seed: int = 0,
    savings: Collection[Saving] = tuple(Saving),
    optimizer: Callable[[], torch.optim.Optimizer] | None = None,
    optimizer_options: Sequence[Mapping[str, Any]] = (),
    optimizer_state: str = "memory",
    state_folder: Path | None = None,
    scoring_only: bool = False,
    learnt: LearntRows | None = None,
    outputs_of: tuple[str, ...] = (),
) -> "Job":
    """Training ``model`` on ``graph``: a store, or the statistics of a graph that is not here.

    Arguments as of ``Trainer``; ``optimizer`` is asked for where it is to be known what it keeps, whose options, group
    by group, are ``optimizer_options``; ``state_folder``: where a run has that. ``objective``: what takes the place of
    ``loss`` and ``metric`` of nodes. ``scoring_only``: what trains is another's affair, and the program
    ``train`` scores. ``learnt``: the embedding that is trained along, where there is one. ``outputs_of``: see
    ``Setting``. Raises ModelError for what cannot be run exactly.
    """
    store = graph if isinstance(graph, Store) else store_of_statistics(graph)
    store.check_one_graph("training of the full graph", takes_types=True)
    if objective is None and not store.split_sizes["train"]:
        raise StoreError(f"{store.path} has no training nodes; convert it with a split, or train links")
    averaging = averaging or Averaging(model, None, 1)
    if learnt is not None:
        _check_embedding(resources, averaging)
    if store.types is not None:
        check_types(store, resources)
    resources, network, active = lower_model(
        model,
        store,
        resources,
        input_dropout=input_dropout,
        savings=savings,
        ignore_edge_data=ignore_edge_data,
        compute_dtype=compute_dtype,
        embedding_columns={} if learnt is None else learnt.widths,
        of_classes=objective is None,
        outputs_of=outputs_of,
        results=Results.ALL if objective is not None or takes_results(loss) else Results.FIRST,
    )
    if learnt is not None:
        learnt.keep(network.learnt)
    if objective is None:
        assert metric is not None
        objective = _objective_of_nodes(store, network, resources, loss, metric, scored=active.scoring[0])
    if optimizer_state not in WHERE:
        raise OptionError(f"optimizer state {optimizer_state!r} is not one of {', '.join(WHERE)}")
    state = None
    if optimizer is not None and not scoring_only:
        state = partial(_state_on_disk, network, resources, optimizer, optimizer_state, state_folder)
    # Scoring and training compute the same: one pass does both. Where weights are averaged, they do not.
    both = Saving.SHARED_FORWARD in savings and network.same_in_evaluation and not (averaging.active or scoring_only)

    def programs(builder: StageBuilder) -> dict[str, list[Step]]:
        train = builder.evaluate() if scoring_only else builder.train()
        found = {"prepare": builder.prepare(), "train": train, "evaluate": builder.evaluate()}
        return found | {"train_and_score": builder.train_and_score()} if both else found

    host_bytes, device_bytes = objective.memory_bytes(store, on_device=resources.on_device)
    return Job(
        network,
        store,
        edge_counts(graph),
        resources,
        active,
        objective,
        programs,
        seed=seed,
        extra_host_bytes=host_bytes,
        extra_device_bytes=averaging.nbytes + device_bytes + _third_number_bytes(network, optimizer_options),
        learnt=learnt,
        make_state=state,
        state_where=optimizer_state,
    )


def _objective_of_nodes(
    store: Store, network: Network, resources: Resources, loss: RowsLoss | None, metric: Metric, *, scored: int
) -> Objective:
    """The loss of nodes' labels and the metric, of which ``scored`` rows are scored."""
    columns = network.result_columns or (network.training.columns,)
    return Objective(
        store.task,
        resolve_loss(loss, store, columns=columns, dtype=network.dtype, place=resources.place),
        make_scorer(store, metric, rows=scored, outputs=network.outputs, dtype=network.dtype),
        tile_rows=resources.tile_rows,
        incomplete=store.num_incomplete > 0,
        space="" if store.types is None else store.types.labelled,
    )


def _third_number_bytes(network: Network, options: Sequence[Mapping[str, Any]]) -> int:
    """Of a third number that some optimizers keep of every parameter, beside the two that a workload counts."""
    if not any(one.get("amsgrad") or (one.get("centered") and one.get("momentum")) for one in options):
        return 0
    return sum(parameter.numel() for parameter in network.parameters) * network.dtype.itemsize


@dataclass(eq=False)
class Job:
    """A network on a graph, its programs, and plans of them for any machine and budgets.

    ``extra_host_bytes`` and ``extra_device_bytes`` are needed beside what the programs ask for. ``learnt``: the
    embedding that the network reads. ``make_state`` makes what is known of what the optimizer keeps, where it can be on
    the SSD, as it is if ``state_where`` says so, or where no plan is found otherwise.
    """

    network: Network
    store: Store
    counts: EdgeCounts
    resources: Resources
    active: ActiveRows
    objective: Objective
    programs: Programs
    seed: int = 0
    extra_host_bytes: int = 0
    extra_device_bytes: int = 0
    learnt: LearntRows | None = None
    make_state: Callable[[], StateOnDisk | None] | None = None
    state_where: str = "memory"
    has_state_on_disk: bool = field(default=False, init=False)
    """Whether what the optimizer keeps is on the SSD in the plan that was made last."""

    def __post_init__(self) -> None:
        network, store, resources = self.network, self.store, self.resources
        self._learnt_arrays = {} if self.learnt is None else self.learnt.arrays
        self._arrays = _arrays(network, store, resources.ranks) | self._learnt_arrays
        self._rows = GraphRows()
        self._spill_dtype = spill_dtype(resources, network)
        laplacian = bool(set(LAPLACIANS) & set(network.scalings))
        if self._spill_dtype != network.dtype and laplacian and store.num_self_loops:
            raise ModelError(
                "ChebConv on a graph with self-loops keeps intermediates in its own type; give no spill_dtype"
            )
        self._fixed_host_bytes = self.extra_host_bytes + rows_nbytes(
            store, network.scalings, network.dtype.itemsize, on_device=resources.on_device
        )
        self._candidates: dict[frozenset[int], Candidate] = {}
        self._shares: dict[str, list[range]] = {}
        threads = resources.threads_by_rank or [1] * resources.ranks.count
        self._speeds: Sequence[float] = [some / max(threads) for some in threads]
        self._forecast_s: dict[str, float] = {}
        """By program: what the first process was to compute."""
        self._slowness = 1.0
        """How many times as long as was forecast computing takes."""
        self._exchange_bytes, self._staging = 0, Staging()
        self._halo_rows: dict[EdgesKey, int] = {}
        self._sharded: frozenset[str] = frozenset()
        """What the plan that was made last shards, of which all pull as much, whatever their rows."""

    @property
    def workload(self) -> Workload:
        """What is to be done where nothing is recomputed."""
        return self._candidate(frozenset()).workload

    def plan(self, limits: Limits, hardware: Hardware) -> tuple[Workload, Plan]:
        """What is to be done, and the verified plan for a machine within ``limits``; BudgetError where there is none,
        with the least budgets that would do."""
        self._admit_rows(limits, hardware)
        candidate, plan = self._choose(limits, hardware)
        return candidate.workload, plan

    def plans_by_rank(self, limits: Limits, hardware: Hardware) -> list[tuple[Workload, Plan]]:
        """The same of each of the processes that train the graph together."""
        if self.resources.ranks.count == 1:
            return [self.plan(limits, hardware)]
        self._admit_rows(limits, hardware)
        halos, candidate, plan = self._shared_out(self._planned_halos, partial(self._choose, limits, hardware))
        parts = ((Share(rank, self._shares), halo) for rank, halo in enumerate(halos))
        return [self._own_part(candidate.workload, plan, share, halo, limits, hardware) for share, halo in parts]

    def floor(self, limits: Limits, hardware: Hardware) -> dict[str, int]:
        """The least memory that training takes, part by part; bytes. Where nothing is recomputed. Of ``limits`` only
        what is fixed by hand counts, no budget."""
        limits = replace(limits, device_bytes=0, host_bytes=0, ssd_write_bytes=None)
        self._keep_state(on_disk=True)
        problem = Problem(self.workload, limits, hardware)
        return problem.capacity.parts(minimum_memory(problem))

    def ready(self) -> Prepared:
        """All that a session runs on this machine: what is known of every row is admitted and read, then the rest is
        planned around it. Raises BudgetError with the least budgets that would do."""
        resources, network = self.resources, self.network
        self._admit_rows(resources.limits, resources.hardware)
        if not self._rows.offsets:
            self._rows = load_rows(self.store, network.scalings, network.dtype, on_device=resources.on_device)
            self.counts = replace(self.counts, tile_edges=counted(self._rows))
        self._candidates.clear()
        exchange = None
        if resources.ranks.count == 1:
            candidate, plan = self._choose(resources.limits, resources.hardware)
        else:
            exchange, candidate, plan = self._shared_out(self._found_halos, self._choose_measured)
            problem = Problem(candidate.workload, resources.limits, resources.hardware)
            self._forecast_s = {name: problem.computing_s(plan, name) for name in plan.programs}
            halos = {side: exchange.halo_rows(side) for side in candidate.workload.topologies}
            part = exchange.share, halos, resources.limits, resources.hardware
            _, plan = self._own_part(candidate.workload, plan, *part)
        return Prepared(
            store=self.store,
            network=network,
            arrays=self._arrays,
            builder=candidate.builder,
            steps=candidate.steps,
            workload=candidate.workload,
            plan=plan,
            spill_dir=resources.spill_dir,
            spill_dtype=self._spill_dtype,
            threads=resources.own_threads,
            device=resources.device,
            listener=resources.listener,
            exchange=exchange,
        )

    def _shared_out(
        self, find_halos: Callable[[], T], choose: Callable[[], tuple[Candidate, Plan]]
    ) -> tuple[T, Candidate, Plan]:
        """What these give once every process has a share of the rows of every type of nodes, of as much to do as goes
        with its speed; once more, where it is known only then what is sharded."""
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
        """By type of nodes: the rows of each process, by its speed."""
        nodes = self.store.node_counts
        return {space: divide_rows(some, high, nodes[space], self._speeds) for space, (high, some) in panels.items()}

    def _panels(self) -> dict[str, tuple[int, list[list[float]]]]:
        """By type of nodes: rows of a panel, and the seconds that an epoch computes for each, apart for stages of
        different rows: who has none of the first ones has nothing to do in some. Of what is sharded all pull as much,
        whatever their rows: that is left out."""
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

    def even_out(self, program: str, taken_s: Sequence[float]) -> bool:
        """Have shares go by the seconds that every process has computed ``program`` for its own, and what is sent by
        how these compare with what was forecast, from the next ``ready`` on; False where neither changes. To be asked
        by all of them with the same figures."""
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
        # Of a device's seconds some are the wires'.
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
        """As ``_choose``, with links as fast beside computing as they are measured to be."""
        limits = self.resources.limits
        rate = max(1, int(limits.link_bytes_per_s * self._slowness))
        return self._choose(replace(limits, link_bytes_per_s=rate), self.resources.hardware)

    def _found_halos(self) -> Exchange:
        """What all tell each other, with the rows of others that this process's edges lead to."""
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
        """The same by process, for all of them, of a store."""
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
        self._exchange_bytes = memory.nbytes(row_bytes, count) + TELLING_BYTES
        if self.resources.on_device:  # where gradients that are told come by way of the host as well
            gradients = sum(parameter.numel() for parameter in self.network.parameters) * self.network.dtype.itemsize
            self._staging = Staging.of_rows(row_bytes, count, is_direct=self.resources.limits.is_direct)
            self._exchange_bytes = memory.lists + self._staging.host_bytes + TELLING_BYTES + 4 * gradients
        self._candidates.clear()

    def _halo_directions(self) -> list[EdgesKey]:
        """Those that are pulled in, if there is the memory to know halos: a byte a row to find them, and up to four for
        every row of its lists. In one order everywhere."""
        limits, self._exchange_bytes, self._halo_rows = self.resources.limits, 0, {}
        there = limits.memory_bytes if limits.one_memory else limits.host_bytes
        if self._fixed_host_bytes + 5 * sum(self.store.node_counts.values()) > there:
            return []
        return [side for side in dict.fromkeys(p.direction for p in self.workload.pulls) if side.of_edges]

    def _ends(self, direction: EdgesKey) -> tuple[str, str]:
        """The types of the nodes that pull over these edges, and of those that are pulled."""
        if self.store.types is None or not isinstance(direction, RelationEdges):
            return "", ""
        kind = self.store.types.by_folder(direction.folder)
        return (kind.target, kind.source) if direction.direction is Direction.IN else (kind.source, kind.target)

    def _sources(self, direction: EdgesKey, share: range, space: str) -> Iterator[Any]:
        """Where all edges into rows of a share come from, nodes of type ``space``, a few at a time; StoreError for what
        is no row."""
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
        """Of a plan that all processes have made alike for the first one's share: the same for another one."""
        layout = Layout(**{one.name: getattr(plan, one.name) for one in fields(Layout)})
        known = ((side, halos.get(side), one) for side, one in workload.topologies.items())
        topologies = {side: replace(one, halo=halo, halo_rows=None) for side, halo, one in known}
        workload = replace(workload, share=share, topologies=topologies)
        own = build_plan(layout, Capacity(workload, limits, hardware))
        verify_plan(own)
        return workload, own

    def _admit_rows(self, limits: Limits, hardware: Hardware) -> None:
        """BudgetError where the host budget is smaller than what is known of every row and what is needed besides."""
        fixed, has = self._fixed_host_bytes, limits.memory_bytes if limits.one_memory else limits.host_bytes
        if fixed <= has:
            return
        needs = f"row offsets, scalings and scores of {self.store.num_nodes:,} nodes need {format_size(fixed)}"
        if not limits.one_memory:
            there = f"the host budget is {format_size(has)}; give host_budget={limits.of_all(fixed)}"
            raise BudgetError(f"{needs} on the host, {there}")
        least = sum(self.floor(limits, hardware).values())
        there = f"it may take {format_size(has)}; give memory={limits.of_all(least)}"
        raise BudgetError(f"{needs} of memory, and all together {format_size(least)}; {there}")

    @cached_property
    def state(self) -> StateOnDisk | None:
        """What the optimizer keeps, where it can be on the SSD."""
        return None if self.make_state is None else self.make_state()

    def _choose(self, limits: Limits, hardware: Hardware) -> tuple[Candidate, Plan]:
        """The candidate and plan that make the shortest epoch; verified. What the optimizer keeps goes to the SSD only
        where there is no plan otherwise."""
        self._keep_state(on_disk=False)
        try:
            return self._chosen(limits, hardware)
        except BudgetError:
            before = self.has_state_on_disk
            self._keep_state(on_disk=True)
            if self.has_state_on_disk == before:
                raise
        return self._chosen(limits, hardware)

    def _keep_state(self, *, on_disk: bool) -> None:
        """What the optimizer keeps is on the SSD, if that spares memory, or not, unless it is settled."""
        where = self.state_where
        on_disk = where == "ssd" or (where == "auto" and on_disk)
        if on_disk:
            state = self.state
            spares = state is not None and state.spared_bytes > state.pieces_bytes + state.step_bytes
            on_disk = spares or (state is not None and where == "ssd")
        if on_disk != self.has_state_on_disk:
            self.has_state_on_disk = on_disk
            self._candidates.clear()

    def _chosen(self, limits: Limits, hardware: Hardware) -> tuple[Candidate, Plan]:
        chosen = choose_workload(lambda recomputed: self._candidate(recomputed).workload, limits, hardware)
        verify_plan(chosen.plan)
        return self._candidate(chosen.recomputed), chosen.plan

    def _candidate(self, recomputed: frozenset[int]) -> Candidate:
        """``recomputed``: the forward stages of which the backward pass finds nothing kept and computes it anew."""
        if recomputed in self._candidates:
            return self._candidates[recomputed]
        resources, network, store, learnt = self.resources, self.network, self.store, self.learnt
        builder = StageBuilder(
            network=network,
            rows=self._rows,
            backward_direction=Direction.IN if store.undirected else Direction.OUT,
            objective=self.objective,
            columns=matrix_columns(network, store) | {name: one.columns for name, one in self._learnt_arrays.items()},
            aggregated=frozenset(self._arrays),
            recomputed_stages=recomputed,
            active=self.active,
            seed=self.seed,
            place=resources.place,
            on_device=resources.on_device,
            sparse="x" if store.sparse_features is not None else None,
            embedding=None if learnt is None else learnt.stepping,
        )
        if self._shares:
            heights = {space: panel_rows(nodes, resources.tile_rows) for space, nodes in store.node_counts.items()}
            builder.panels_held += max(
                -(-len(share) // heights[space]) for space, shares in self._shares.items() for share in shares
            )
        steps = self.programs(builder)
        workload = describe_workload(
            network,
            builder,
            store,
            self._arrays,
            self.counts,
            tile_rows=resources.tile_rows,
            fixed_host_bytes=self._fixed_host_bytes + self._exchange_bytes,
            spill_dtype=self._spill_dtype,
            threads=resources.threads,
            steps=steps,
        )
        if self.has_state_on_disk and self.state is not None:
            pieces, beside = self.state.pieces_bytes, self.state.step_bytes - self.state.spared_bytes
            workload = replace(
                workload,
                fixed_host_bytes=workload.fixed_host_bytes + (pieces if resources.on_device else 0),
                fixed_device_bytes=workload.fixed_device_bytes + beside + (0 if resources.on_device else pieces),
                state_bytes=self.state.nbytes,
            )
        kept = workload.kept
        if self._spill_dtype != network.dtype:
            # What is computed again comes of rounded values: then the plan would change results.
            kept = tuple(replace(one, recomputable=False) for one in kept)
        fixed = workload.fixed_device_bytes + self.extra_device_bytes + resources.overhead_bytes
        workload = replace(workload, fixed_device_bytes=fixed + self._staging.device_bytes, kept=kept)
        if self._shares:  # what is shuffled by way of files is another process's as well
            halos = self._halo_rows
            known = workload.topologies.items()
            topologies = {side: replace(one, halo_rows=halos.get(side) or None) for side, one in known}
            share = Share(0, self._shares)
            workload = replace(workload, share=share, topologies=topologies, scatter_counts={}, bucketing={})
        self._candidates[recomputed] = made = Candidate(builder=builder, steps=steps, workload=workload)
        return made


def _sharded(plan: Plan) -> frozenset[str]:
    """What is sharded among processes in training."""
    columns = (item for item in plan.programs["train"] if isinstance(item, ColumnPass) and item.processes > 1)
    return frozenset(item.pull.source for item in columns)


def edge_counts(graph: Store | GraphStatistics) -> EdgeCounts:
    """How edges are spread over rows: counted in a store when they are asked for, of statistics, and of links, what may
    be at most."""
    store = graph if isinstance(graph, Store) else None
    edges = spread(graph) if isinstance(graph, GraphStatistics) else stored(graph)

    @cache
    def scattered(direction: EdgesKey) -> ScatterCounts:
        if store is not None and direction.of_edges:
            return counted_rows(store)
        reverse = None if store is None else reverse_of(store, direction)
        return most_rows(edges, reverse or Direction.OUT)

    @cache
    def gathered(direction: EdgesKey) -> GatheredRows:
        if store is not None and direction.of_edges:
            return counted_gathers(store)
        return most_gathers(edges, direction)

    return EdgeCounts(edges, scattered, gathered)


def _arrays(network: Network, store: Store, ranks: Ranks) -> dict[str, Array]:
    """The store's matrices, with the first aggregations that were kept and are of use: by all processes, each of whose
    stores may be another one."""
    without_zeros = {"x"} if store.sparse_features is not None else set()
    names = [name for name in store_matrices(store) if store.has(name) and name not in without_zeros]
    arrays = {name: store.array(name) for name in names}
    kept = [find_aggregation(store, scaling, network.dtype) for scaling in network.aggregated_once]
    of_all = ranks.gathered(torch.tensor([one is not None for one in kept])) if kept and ranks.have_met else []
    for number, (scaling, one) in enumerate(zip(network.aggregated_once, kept, strict=True)):
        if one is not None and all(found[number] for found in of_all):
            arrays[network.first_aggregation(scaling)] = one
    return arrays


def lower_model(
    model: nn.Module,
    store: Store,
    given: Resources,
    *,
    input_dropout: float,
    savings: Collection[Saving],
    ignore_edge_data: str = "none",
    compute_dtype: str = "float32",
    embedding_columns: Mapping[str, int] = MappingProxyType({}),
    of_classes: bool = True,
    results: Results = Results.FIRST,
    outputs_of: tuple[str, ...] = (),
) -> tuple[Resources, Network, ActiveRows]:
    """The network that ``model`` is on the store, what is ``given`` with rows of a tile that suit it, and the rows to
    compute for it. ModelError for what cannot be.

    ``ignore_edge_data``: which of the edges' weights and features are left out (``IGNORABLE``). ``compute_dtype``: what
    the factors of dense products are rounded to, if it is narrower than the model's own type. ``embedding_columns``: by
    type of nodes, of embeddings that are trained along. ``of_classes``: there has to be an output for every class.
    ``results``: which of several are meant. ``outputs_of``: see ``Setting``.
    """
    features = (store.num_features,) if store.types is None else store.types.features.values()
    if not any(features) and not embedding_columns:
        raise ModelError(f"the nodes of {store.path} have no features; train an embedding of them, embedding=64")

    def active_rows(hops: int) -> ActiveRows:
        if Saving.ACTIVE_ROWS not in savings:
            return ActiveRows.all_of(store, hops)
        return whole_tiles(ActiveRows.of_store(store, hops), resources.tile_rows)

    def edges_per_row(scaling: AnyScaling) -> float:
        if store.types is None or not isinstance(scaling, RelationScaling):
            return store.num_edges / store.num_nodes
        return store.types.edges[scaling.relation] / store.types.nodes[scaling.relation.target]

    x = store.sparse_features
    of_a_row = cache(lambda: inf if "statistics" in store.source else most_edges(store))
    setting = Setting(
        num_nodes=store.num_nodes,
        num_edges=store.num_edges,
        num_features=store.num_features,
        aggregate_once=Saving.FIRST_AGGREGATION in savings,
        input_dropout=input_dropout,
        edge_data=edge_data_used(store, ignore_edge_data),
        product=_products(compute_dtype),
        num_edge_features=store.num_edge_features,
        embedding_columns=embedding_columns,
        feature_entries_per_row=None if x is None else x.entries / store.num_nodes,
        on_cpu=not given.on_device,
        most_edges=of_a_row,
        types=store.types,
        outputs_of=outputs_of,
        results=results,
    )
    classes, learnt = store.num_classes if of_classes else 0, max(embedding_columns.values(), default=0)
    lowered = partial(lower, model, setting, num_classes=classes, active=active_rows, edges_per_row=edges_per_row)
    resources = given.for_model(model, store, None, learnt=learnt)
    network = lowered()
    known = given.for_model(model, store, network, learnt=learnt)
    if known.tile_rows != resources.tile_rows:  # tiles are lower by what the model is found to be
        resources, network = known, lowered()
    by_rows = given.on_device and not given.tile_rows
    resources = resources.for_rows_of(*_row_bytes(network, store, active_rows(network.hops)) if by_rows else (1, 1))
    return resources, network, active_rows(network.hops)


def _row_bytes(network: Network, store: Store, active: ActiveRows) -> tuple[int, int]:
    """What a device has of a row at a time, at most: what it computes it in; and blocks of two steps, or its edges."""
    builder = StageBuilder(
        network=network,
        rows=GraphRows(),
        objective=no_objective(store, network.outputs),
        columns=matrix_columns(network, store),
        active=active,
        backward_direction=Direction.OUT,
        aggregated=(),
        recomputed_stages=(),
        seed=0,
        place=CPU,
        on_device=True,
        sparse="x" if store.sparse_features is not None else None,
    )
    stages = [step.spec for step in (*builder.prepare(), *builder.train())]
    moved = max(sum(builder.columns[name] for name in (*stage.loads, *stage.stores)) for stage in stages)
    edges = ceil(store.num_edges / store.num_nodes)
    of_row, of_edge = _BYTES_OF_A_PULL
    kinds = (stage.pull.per_edge for stage in stages if stage.pull is not None)
    pulled = max((kind.bytes_per_row // kind.groups + of_row + of_edge * edges for kind in kinds if kind), default=0)
    computed = max(*(stage.scratch_bytes_per_row for stage in stages), pulled * _BESIDE_A_PULL[0] // _BESIDE_A_PULL[1])
    return computed, max(2 * moved * network.dtype.itemsize, _BYTES_OF_AN_EDGE * edges)


def edge_data_used(store: Store, ignore: str) -> frozenset[EdgeData]:
    """What the store's edges carry but for what is to be ignored; OptionError for what is none of ``IGNORABLE``."""
    if ignore not in IGNORABLE:
        raise OptionError(f"edge data to ignore, {ignore!r}, is not one of {', '.join(IGNORABLE)}")
    carried = {EdgeData.WEIGHT: store.has_edge_weight, EdgeData.FEATURES: store.num_edge_features > 0}
    if store.types is not None:
        carried[EdgeData.FEATURES] = bool(store.types.edge_features)
    return frozenset(data for data in EdgeData if carried[data] and ignore not in ("all", data.value))


def whole_tiles(active: ActiveRows, tile_rows: int) -> ActiveRows:
    """``active`` with rows added up to whole tiles, so that every program cuts the rows it shares into the same
    tiles and comes to the same bits. What is computed for the rows added is wrong, and reaches no other row.
    """

    def up(rows: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(min(active.nodes, -(-count // tile_rows) * tile_rows) for count in rows)

    others = {name: whole_tiles(one, tile_rows) for name, one in active.others.items()}
    return replace(active, training=up(active.training), scoring=up(active.scoring), others=others)


# ---- a graph that is not here -------------------------------------------------------------------------------


def store_of_statistics(graph: GraphStatistics) -> Store:
    """A store with the counts of ``graph``, whose arrays have shapes and nothing to read.

    Rows are in hop order; each of the ``labelled`` ones counts as one to train on, and all splits reach as far.
    """
    reached = reach(graph)
    attributes: dict[str, Any] = {
        "name": graph.name,
        "num_nodes": graph.nodes,
        "num_edges": graph.edges,
        "num_features": graph.features,
        "num_classes": graph.classes,
        "num_self_loops": 0,
        "undirected": graph.undirected,
        "task": Task.CLASSES.value,
        "split_sizes": {"train": graph.labelled, "valid": 0, "test": 0},
        "order": "hop",
        "hops": reached,
        "train_hops": reached,
        "source": {"statistics": graph.source},
    }
    path, arrays = Path(f"graph {graph.name}"), {}  # where nothing is, and nothing is looked for
    for name, shape in array_shapes(attributes).items():  # as ``ooc convert`` would write them but for their content
        dtype = graph.feature_dtype if name == "x" else "bool" if name.startswith("split/") else "int64"
        if name.endswith("/indices") and graph.nodes <= 2**31:
            dtype = "int32"
        columns = shape[1] if len(shape) == 2 else 1
        chunks = (chunk_rows(shape[0], columns * np.dtype(dtype).itemsize), *shape[1:])
        arrays[name] = Array(name, path / name, shape, chunks, dtype)
    return Store(path, attributes, arrays)


def spread(graph: GraphStatistics) -> TileEdges:
    """The edges of its tiles, as ``ooc.plan.graphs`` assumes them; alike in both directions."""

    @lru_cache(maxsize=1)
    def counted(tile_rows: int) -> Sequence[int]:
        return spread_edges(graph, tile_rows)

    return lambda direction, tile_rows: counted(tile_rows)


def check_types(store: Store, resources: Resources) -> None:
    """OptionError for what graphs with types are not trained with."""
    if resources.on_device:
        raise OptionError(f"{store.path} has several types of nodes or edges, which are not trained with a GPU")


# ---- checks ------------------------------------------------------------------------------------------------


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """ModelError for an optimizer that could not step this model."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ModelError("optimizer LBFGS evaluates the loss several times a step, which is not supported")
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ModelError("optimizer SparseAdam takes sparse gradients only, these are dense; use Adam")
    own = {id(parameter) for parameter in model.parameters()}
    if any(id(parameter) not in own for group in optimizer.param_groups for parameter in group["params"]):
        raise ModelError(f"optimizer {type(optimizer).__name__} holds parameters that are not the model's")


def _check_embedding(resources: Resources, averaging: Averaging) -> None:
    """OptionError for what no embedding is trained with."""
    narrower = resources.spill_dtype not in (None, torch.float32, torch.float64)
    refused = {
        "on a GPU": resources.on_device,
        "with averaged weights": averaging.active,
        "with a narrower spill_dtype": narrower,
    }
    for how, asked in refused.items():
        if asked:
            raise OptionError(f"an embedding is not trained {how}; leave out one of the two")


def _state_on_disk(
    network: Network,
    resources: Resources,
    make_optimizer: Callable[[], torch.optim.Optimizer],
    where: str,
    folder: Path | None,
) -> StateOnDisk | None:
    """What the optimizer keeps, if that may be on the SSD. OptionError where it is to be there and cannot."""
    optimizer = make_optimizer()
    if where != "ssd" and why_in_memory(optimizer) is not None:
        return None
    cut_off = {id(parameter) for parameter in network.cut_off}
    stepped = [parameter for parameter in network.parameters if id(parameter) not in cut_off]
    state = StateOnDisk(optimizer, stepped, folder=folder, follows=resources.ranks.rank > 0)
    return state if state.nbytes else None


def _products(name: str) -> Products:
    if name not in ("float32", "bfloat16"):
        why = "; float16 would lose small gradients, bfloat16 has float32's range" if name == "float16" else ""
        raise OptionError(f"compute dtype {name!r} is not one of float32, bfloat16{why}")
    return Products(torch.bfloat16) if name == "bfloat16" else IN_FULL
