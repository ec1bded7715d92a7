# SPDX-License-Identifier: Apache-2.0
"""A network on a graph, with its plans: for this machine, to be run, or for any machine and budgets.

A ``Job`` plans and never runs. It reads little of the graph: where the edges of every tile begin, and for opaque layers
the in-edges, once, a tile at a time, and once more where gathered rows do not fit in memory. Beside a tile's edges that
takes a few bytes a node (``ooc.stages.edge_counts``). ``Job.ready`` returns what a ``Session`` runs on this machine.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ooc.engine.exchange import Exchange
from ooc.engine.first_aggregation import find_aggregation
from ooc.engine.session import Prepared
from ooc.errors import BudgetError
from ooc.model.graph import ActiveRows, GraphRows, load_rows, rows_nbytes
from ooc.model.lowering.network import Network
from ooc.plan import Hardware, Limits, Plan, Workload
from ooc.plan.graphs import GraphStatistics, reach
from ooc.plan.planner import choose_workload
from ooc.plan.problem import Problem
from ooc.plan.program.verifier import verify_plan
from ooc.plan.solver import minimum_memory
from ooc.plan.workload import Direction
from ooc.ranks import Ranks
from ooc.sizes import format_size
from ooc.stages import StageBuilder, Step
from ooc.stages.edge_counts import EdgeCounts
from ooc.stages.workload import describe_workload, matrix_columns, store_matrices
from ooc.storage.array import Array, chunk_rows
from ooc.storage.store import Store, Task, array_shapes
from ooc.train.embedding import LearntRows
from ooc.train.objective import Objective
from ooc.train.optimizer_state import StateOnDisk
from ooc.train.resources import Resources, spill_dtype, unrounded

Programs = Callable[[StageBuilder], dict[str, list[Step]]]
"""A function that returns the programs to plan, by name. The planner gives ``train`` the most weight."""


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection: of a plan's many objects hardly any are in cycles, and scanning all of torch's
    objects took a quarter of the planning time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The programs of a network with their memory requirements, before it is decided what is kept where."""

    builder: StageBuilder
    steps: dict[str, list[Step]]
    workload: Workload


@dataclass(eq=False)
class Job:
    """A network on a graph, its programs, and plans of them for any machine and budgets.

    ``extra_host_bytes`` and ``extra_device_bytes`` are needed beside the programs' memory. ``learnt``: the network's
    embedding. ``make_state`` describes the optimizer's state, if it can be on the SSD. It is there if ``state_where``
    says so, or where no plan is found otherwise.
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
    """Whether the last plan has the optimizer's state on the SSD."""

    def __post_init__(self) -> None:
        network, store, resources = self.network, self.store, self.resources
        self._learnt_arrays = {} if self.learnt is None else self.learnt.arrays
        self._arrays = _arrays(network, store, resources.ranks) | self._learnt_arrays
        self._rows = GraphRows()
        self._spill_dtype = spill_dtype(resources, network, store)
        self._fixed_host_bytes = self.extra_host_bytes + rows_nbytes(
            store, network.scalings, network.dtype.itemsize, on_device=resources.on_device
        )
        self._candidates: dict[tuple[frozenset[int], bool], Candidate] = {}
        self._in_parts = False

    @property
    def workload(self) -> Workload:
        """The workload without recomputation."""
        return self._candidate(frozenset()).workload

    def plan(self, limits: Limits, hardware: Hardware) -> tuple[Workload, Plan]:
        """Return the workload and its verified plan for a machine within ``limits``.

        BudgetError, with the least budgets that would suffice, where there is no plan.
        """
        self._admit_row_data(limits, hardware)
        candidate, plan = self._choose_plan(limits, hardware)
        return candidate.workload, plan

    def plans_by_rank(self, limits: Limits, hardware: Hardware) -> list[tuple[Workload, Plan]]:
        """Return the workload and plan of each of the processes that train the graph together."""
        return [self.plan(limits, hardware)]

    @without_garbage_collection()
    def floor(self, limits: Limits, hardware: Hardware) -> dict[str, int]:
        """Return the least memory that training takes without recomputation, in bytes by part.

        Of ``limits`` only manual settings count, no budget.
        """
        self._place_state(on_disk=True)
        return min(self._least_memory(limits, hardware), key=lambda parts: sum(parts.values()))

    def _least_memory(self, limits: Limits, hardware: Hardware) -> list[dict[str, int]]:
        """Return the least memory, by part; where x is aggregated once, also the least if that is done in parts of the
        columns."""
        limits, found = replace(limits, device_bytes=0, host_bytes=0, ssd_write_bytes=None), list[dict[str, int]]()
        for in_parts in (False, True) if self._aggregates_once else (False,):
            self._in_parts = in_parts
            problem = Problem(self.workload, limits, hardware)
            found.append(problem.capacity.parts(minimum_memory(problem)))
        self._in_parts = False
        return found

    @property
    def _aggregates_once(self) -> bool:
        """Whether x is aggregated once, by a single process on the CPU."""
        of_one = self.resources.ranks.count == 1 and not self.resources.on_device
        return of_one and bool(self._candidate(frozenset()).steps.get("prepare"))

    def ready(self) -> Prepared:
        """Return all that a session runs on this machine.

        Data about every row is admitted and read, then the rest is planned around it. BudgetError with the least
        budgets that would suffice.
        """
        resources, network = self.resources, self.network
        self._admit_row_data(resources.limits, resources.hardware)
        if not self._rows.offsets:
            self._rows = load_rows(self.store, network.scalings, network.dtype, on_device=resources.on_device)
            self.counts.rows = self._rows
        self._candidates.clear()
        candidate, plan, exchange = self._plan_here()
        return Prepared(
            store=self.store,
            network=network,
            arrays=self._arrays,
            rows=self._rows,
            dtype=network.dtype,
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

    def _plan_here(self) -> tuple[Candidate, Plan, Exchange | None]:
        """Return the plan of this process, and its exchange with others."""
        return *self._choose_plan(self.resources.limits, self.resources.hardware), None

    def _admit_row_data(self, limits: Limits, hardware: Hardware) -> None:
        """Raise BudgetError where the host budget is smaller than the data about every row with all other fixed
        memory."""
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
        """The optimizer's state, if it can be on the SSD."""
        return None if self.make_state is None else self.make_state()

    @without_garbage_collection()
    def _choose_plan(self, limits: Limits, hardware: Hardware) -> tuple[Candidate, Plan]:
        """Return the candidate and the verified plan with the shortest epoch.

        Only where there is no plan otherwise does the optimizer's state go to the SSD, and then x is aggregated in
        parts of the columns.
        """
        self._place_state(on_disk=False)
        self._in_parts = False
        try:
            return self._plan_best_candidate(limits, hardware)
        except BudgetError as error:
            lacking, before = error, self.has_state_on_disk
        self._place_state(on_disk=True)
        if self.has_state_on_disk != before:
            try:
                return self._plan_best_candidate(limits, hardware)
            except BudgetError as error:
                lacking = error
        if not self._aggregates_once:
            raise lacking
        whole, in_parts = (sum(parts.values()) for parts in self._least_memory(limits, hardware))
        if in_parts >= whole:
            raise lacking
        self._in_parts = True
        return self._plan_best_candidate(limits, hardware)

    def _place_state(self, *, on_disk: bool) -> None:
        """Decide whether the optimizer's state is on the SSD: as set by the user, else as asked for if that saves
        memory."""
        where = self.state_where
        on_disk = where == "ssd" or (where == "auto" and on_disk)
        if on_disk:
            state = self.state
            spares = state is not None and state.spared_bytes > state.pieces_bytes + state.step_bytes
            on_disk = spares or (state is not None and where == "ssd")
        if on_disk != self.has_state_on_disk:
            self.has_state_on_disk = on_disk
            self._candidates.clear()

    def _plan_best_candidate(self, limits: Limits, hardware: Hardware) -> tuple[Candidate, Plan]:
        chosen = choose_workload(lambda recomputed: self._candidate(recomputed).workload, limits, hardware)
        verify_plan(chosen.plan)
        return self._candidate(chosen.recomputed), chosen.plan

    def _candidate(self, recomputed: frozenset[int]) -> Candidate:
        """Return the programs with these forward stages ``recomputed`` in the backward pass instead of kept."""
        key = recomputed, self._in_parts
        if key not in self._candidates:
            builder = self._builder(recomputed)
            steps = self.programs(builder)
            workload = self._describe_workload(builder, steps)
            self._candidates[key] = Candidate(builder=builder, steps=steps, workload=workload)
        return self._candidates[key]

    def _builder(self, recomputed: frozenset[int]) -> StageBuilder:
        network, store, resources = self.network, self.store, self.resources
        return StageBuilder(
            network=network,
            rows=self._rows,
            backward_direction=Direction.IN if store.undirected else Direction.OUT,
            objective=self.objective,
            columns=matrix_columns(network, store) | {name: one.columns for name, one in self._learnt_arrays.items()},
            aggregated=frozenset(self._arrays),
            recomputed_stages=recomputed,
            in_parts=self._in_parts,
            active=self.active,
            seed=self.seed,
            place=resources.place,
            on_device=resources.on_device,
            sparse="x" if store.sparse_features is not None else None,
            embedding=None if self.learnt is None else self.learnt.stepping,
        )

    def _describe_workload(self, builder: StageBuilder, steps: dict[str, list[Step]]) -> Workload:
        """Return the memory requirements of the programs, with all fixed memory."""
        resources, network = self.resources, self.network
        workload = describe_workload(
            network,
            builder,
            self.store,
            self._arrays,
            self.counts,
            tile_rows=resources.tile_rows,
            fixed_host_bytes=self._fixed_host_bytes,
            spill_dtype=self._spill_dtype,
            threads=resources.threads,
            steps=steps,
        )
        fixed_host, fixed_device, state_bytes = workload.fixed_host_bytes, workload.fixed_device_bytes, 0
        if self.has_state_on_disk and self.state is not None:
            pieces, state_bytes = self.state.pieces_bytes, self.state.nbytes
            fixed_host += pieces if resources.on_device else 0
            fixed_device += self.state.step_bytes - self.state.spared_bytes + (0 if resources.on_device else pieces)
        kept = workload.kept
        if self._spill_dtype != network.dtype:
            # Recomputing from rounded values would make results depend on the plan.
            kept = tuple(replace(one, recomputable=False) for one in kept)
        return replace(
            workload,
            fixed_host_bytes=fixed_host,
            fixed_device_bytes=fixed_device + self.extra_device_bytes + resources.overhead_bytes,
            state_bytes=state_bytes,
            kept=kept,
            may_round=self.learnt is None and not unrounded(self.network, self.store),
        )


def _arrays(network: Network, store: Store, ranks: Ranks) -> dict[str, Array]:
    """Return the store's matrices, with those first aggregations that were kept and are in the stores of all
    processes."""
    without_zeros = {"x"} if store.sparse_features is not None else set()
    names = [name for name in store_matrices(store) if store.has(name) and name not in without_zeros]
    arrays = {name: store.array(name) for name in names}
    kept = [find_aggregation(store, scaling, network.dtype) for scaling in network.aggregated_once]
    of_all = ranks.gathered(torch.tensor([one is not None for one in kept])) if kept and ranks.heartbeat else []
    for number, (scaling, one) in enumerate(zip(network.aggregated_once, kept, strict=True)):
        if one is not None and all(found[number] for found in of_all):
            arrays[network.first_aggregation(scaling)] = one
    return arrays


def store_of_statistics(graph: GraphStatistics) -> Store:
    """Return a store with the counts of ``graph``, whose arrays have shapes and no data.

    Rows are in hop order; each of the ``labelled`` ones counts as a training row, and all splits have the same reach.
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
    path, arrays = Path(f"graph {graph.name}"), {}  # a path that is never accessed
    for name, shape in array_shapes(attributes).items():  # as ``ooc convert`` would write them, without content
        dtype = graph.feature_dtype if name == "x" else "bool" if name.startswith("split/") else "int64"
        if name.endswith("/indices") and graph.nodes <= 2**31:
            dtype = "int32"
        columns = shape[1] if len(shape) == 2 else 1
        chunks = (chunk_rows(shape[0], columns * np.dtype(dtype).itemsize), *shape[1:])
        arrays[name] = Array(name, path / name, shape, chunks, dtype)
    return Store(path, attributes, arrays)
