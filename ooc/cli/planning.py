# SPDX-License-Identifier: Apache-2.0
"""Turn the options of ``ooc plan`` into plans: resolve the graph, the machine, the budgets and the assumptions made."""

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import psutil
import torch

from ooc.cli import as_command_options, print_json
from ooc.cli.arguments import recipe
from ooc.cli.arguments.settings import TrainSettings, check_sampling, model_name, only_store, user_model_of
from ooc.errors import OptionError
from ooc.events import ignore
from ooc.memory import budgets_within, check_memory_alone, default_budgets, divide_memory
from ooc.plan import Hardware, Limits
from ooc.plan.graphs import BIAS, GraphStatistics
from ooc.plan.program.capacity import LINK_BYTES_PER_S, ExchangeForm, ExchangeWay
from ooc.plan.simulate.timeline import merge_timelines
from ooc.progress.plan_report import PlanReport
from ooc.progress.reporter import Reporter
from ooc.ranks import ALONE, Ranks
from ooc.report import tables, what_if
from ooc.report.console import check_drawing, output, say
from ooc.report.gantt import write_gantt
from ooc.sizes import format_size, parse_size
from ooc.storage.store import Store, open_store
from ooc.train.embedding import LearntRows
from ooc.train.job import Job, store_of_statistics
from ooc.train.metrics import resolve_metric
from ooc.train.resources import SPILL_DTYPES, Resources, find_device, free_device_bytes, hardware_for
from ooc.train.schedule import Averaging
from ooc.train.setup import Saving, prepare

if TYPE_CHECKING:
    from ooc.train.links.trainer import LinkObjective

NARROW = "bfloat16"


@dataclass(eq=False)
class Planning:
    """A training that can be planned for any machine and budgets. ``given_hardware`` is that of ``--hardware``; None
    means this machine, as measured with the spill folder's disk or, unmeasured, as estimated."""

    settings: TrainSettings
    graph: Store | GraphStatistics
    given_hardware: Hardware | None
    savings: Collection[Saving]
    ranks: Ranks = ALONE
    _jobs: dict[str, Job] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._device = find_device(self.settings.device if self.given_hardware is None else "auto")
        self.hardware = self.given_hardware or hardware_for(self._device, Path(self.settings.spill_dir or "."))
        self._store = store_of_statistics(self.graph) if isinstance(self.graph, GraphStatistics) else self.graph

    @cached_property
    def limits(self) -> Limits:
        """The budgets given by options; by default those of this machine, or 9/10 of a described machine's memory."""
        settings, machine = self.settings, self.hardware
        if self.given_hardware is None:
            on_device, whole = default_budgets(free_device_bytes(self._device))
        else:
            whole = int(what_if.SHARE_OF_MEMORY * machine.host_memory_bytes)
            on_device = int(what_if.SHARE_OF_MEMORY * machine.device_memory_bytes)
            if not machine.has_device_memory:
                on_device, whole = divide_memory(whole)
        if settings.memory is not None:
            check_memory_alone(settings.gpu_budget, settings.host_budget, on_device=machine.has_device_memory)
            on_device, whole = divide_memory(settings.memory)
        one_memory = settings.gpu_budget is None and settings.host_budget is None and not machine.has_device_memory
        count, way = self.ranks.local_count, ExchangeWay(settings.exchange_by)
        if way is ExchangeWay.AUTO and machine.has_device_memory:
            can = self._device is None or self._device.backend
            way = ExchangeWay.DEVICE if can else ExchangeWay.HOST
        return Limits(
            on_device if settings.gpu_budget is None else settings.gpu_budget,
            whole if settings.host_budget is None else settings.host_budget,
            block_rows=settings.block_rows,
            slab_columns=settings.slab_columns,
            exchange=ExchangeForm(settings.exchange),
            exchange_by=way,
            link_bytes_per_s=settings.link or LINK_BYTES_PER_S,
            ssd_write_bytes=settings.max_ssd_writes,
            one_memory=one_memory,
            processes=count,
        ).share(count)

    @property
    def memory_bytes(self) -> int:
        """The bytes of host memory of the machine planned for."""
        return self.hardware.host_memory_bytes if self.given_hardware else psutil.virtual_memory().total

    def resource_amounts(self) -> dict[str, int]:
        """Return the memory budgets and the SSD's read rate, by the names that points of ``--what-if`` use."""
        limits, disk = self.limits, self.hardware.disk
        return {
            "memory_bytes": limits.memory_bytes,
            "gpu_budget_bytes": limits.device_bytes,
            "host_budget_bytes": limits.host_bytes,
            "ssd_bytes_per_s": int(disk.read_bytes_per_s.at(what_if.REQUEST_BYTES)),
        }

    def report(
        self, limits: Limits | None = None, hardware: Hardware | None = None, *, narrow: bool = False
    ) -> PlanReport:
        """Return the plan for these budgets and this machine; with ``narrow``, intermediates spill as bfloat16.

        Raise BudgetError where no plan fits.
        """
        limits, hardware = limits or self.limits, hardware or self.hardware
        job = self._job(NARROW if narrow else self.settings.spill_dtype, limits)
        workload, plan = job.plan(limits, hardware)
        return PlanReport.of_run(workload, plan, hardware, limits, eval_every=self.settings.eval_every)

    def report_by_rank(self) -> list[PlanReport]:
        """Return one plan for each rank of a distributed training."""
        parts = self._job(self.settings.spill_dtype, self.limits).plans_by_rank(self.limits, self.hardware)
        every = self.settings.eval_every
        return [PlanReport.of_run(*part, self.hardware, self.limits, eval_every=every) for part in parts]

    def floor(self) -> dict[str, int]:
        """Return the least memory, in bytes, that training takes, by purpose."""
        return self._job(self.settings.spill_dtype, self.limits).floor(self.limits, self.hardware)

    def assumptions(self) -> list[str]:
        """Return the assumptions of the plan, one line each."""
        lines = []
        if isinstance(self.graph, GraphStatistics):
            lines += _graph_assumptions(self.graph, pruned=Saving.ACTIVE_ROWS in self.savings)
        lines.append(f"{self.hardware.name}: {self.hardware.source}")
        asked = self.limits.device_bytes, self.limits.host_bytes
        there = budgets_within(*asked, device_free_bytes=free_device_bytes(self._device))
        if self.given_hardware is None and there != asked:
            sizes = format_size(sum(there))
            if self.hardware.has_device_memory:
                sizes = f"{format_size(there[0])} for the device and {format_size(there[1])} for the host"
            lines.append(f"more memory than is free: training here would be planned for {sizes}")
        return lines

    def describe_graph(self) -> str:
        """Return one line with the graph's name and its counts."""
        store = self._store
        name = store.name if isinstance(self.graph, GraphStatistics) else str(store.path)
        kind = "undirected, both directions counted" if store.undirected else "directed"
        if store.types is not None:
            kind = f"{len(store.types.edges)} types; nodes are those of type {store.types.labelled}"
        features = f"{store.num_features} features ({store.array('x').dtype})" if store.num_features else "no features"
        return (
            f"{name}: {store.num_nodes:,} nodes, {store.num_edges:,} edges ({kind}), {features}, "
            f"{store.num_classes} {'classes' if store.array('y').columns == 1 else 'labels'}"
        )

    def describe_training(self) -> str:
        """Return one line with the graph's name, the model and the machine."""
        settings = self.settings
        name = self._store.name if isinstance(self.graph, GraphStatistics) else self.graph.path.stem
        shape = "" if user_model_of(settings.model) else f" with {settings.layers} layers {settings.hidden} wide"
        return f"{name}, {model_name(settings.model)}{shape}, {self.hardware.name}"

    def _job(self, spill_dtype: str, limits: Limits) -> Job:
        if spill_dtype not in self._jobs:
            settings, store = self.settings, self._store
            model = recipe.planned_model(settings, store)
            resources = Resources(
                limits=limits,
                tile_rows=0,
                threads=settings.threads or (self.hardware.threads if self.given_hardware else torch.get_num_threads()),
                spill_dir=Path(settings.spill_dir or "."),
                listener=ignore,
                spill_dtype=SPILL_DTYPES[spill_dtype],
                hardware=self.hardware,
                device=self._device,
                ranks=self.ranks,
            )
            # Class weights need labels, which a graph that is not here lacks, and change no plan.
            of_loss = settings if self.graph is store else replace(settings, class_weights="none")
            embedding, learnt = recipe.build_embedding(settings), None
            if embedding is not None:
                learnt = LearntRows(embedding, store, torch.float32, clip_norm=settings.clip)
            what: dict[str, Any] = {
                "averaging": Averaging(model, recipe.build_average(settings, model), 1),
                "input_dropout": settings.input_dropout,
                "savings": self.savings,
                "ignore_edge_data": settings.edge_data_left_out,
                "compute_dtype": settings.dtype,
                "optimizer": partial(recipe.build_optimizer, settings, model),
                "optimizer_options": [recipe.optimizer_options(settings)],
                "optimizer_state": settings.optimizer_state,
                "learnt": learnt,
            }
            if settings.links is None:
                metric = resolve_metric(settings.metric, store.task, store.num_classes)
                what |= {"loss": recipe.build_loss(of_loss, store), "metric": metric}
                self._jobs[spill_dtype] = prepare(model, self.graph, resources, **what)
            else:
                model = recipe.with_decoder(settings, model, store.types)
                self._jobs[spill_dtype] = self._link_objective(resources).prepared(model, store, resources, **what)
        return self._jobs[spill_dtype]

    def _link_objective(self, resources: Resources) -> "LinkObjective":
        from ooc.train.links.metrics import LinkMetric
        from ooc.train.links.trainer import LinkObjective

        settings = self.settings
        if isinstance(self.graph, GraphStatistics):
            raise OptionError("--links are those of a store, not of a graph that --graph describes")
        return LinkObjective.of(
            recipe.links_of(settings),
            self.graph,
            metric=LinkMetric.of(settings.metric or "mrr"),
            negatives=settings.negatives,
            seed=settings.seed,
            dtype=torch.float32,
            resources=resources,
        )


def _graph_assumptions(graph: GraphStatistics, *, pruned: bool) -> list[str]:
    lines = [f"counts of {graph.name}: {graph.source}"]
    hub = f"one row has {graph.most_neighbours:,} neighbours"
    if not pruned:
        lines.append("every layer computes all rows (--no-savings)")
    elif graph.labelled == graph.nodes:
        lines.append("all nodes are labelled and trained on: every layer computes all rows")
    else:
        lines.append(
            f"all {graph.labelled:,} labelled nodes are trained on; from there in-edges lead to sources drawn "
            f"uniformly, {BIAS} times the mean degree a row: more rows than hubs would give"
        )
    lines.append(f"edges are spread evenly over the rows, but for a heaviest tile: {hub}; no self-loops")
    return lines


# ---- what is shown of it ------------------------------------------------------------------------------------------


def print_planned(planning: Planning, *, gantt: Path | None, advice: bool, as_json: bool) -> None:
    ranks = planning.report_by_rank()
    report = ranks[0]
    rate = planning.limits.received_bytes_per_s(planning.hardware)
    joined = merge_timelines([one.timeline for one in ranks], [one.plan.received(one.program) for one in ranks], rate)
    if gantt is not None:
        write_gantt(gantt, *(joined if len(ranks) > 1 else [report.timeline]))
    more: dict[str, Any] = {"changes": [], "assumptions": planning.assumptions()}
    if len(ranks) > 1:
        alone = replace(planning, ranks=ALONE)  # one process with the memory of all
        more["ranks"] = tables.describe_ranks(ranks, joined, alone.report().epoch_s)
    elif advice:
        narrow = planning.settings.spill_dtype == NARROW
        more["changes"] = what_if.changes(report, planning.report, spilled_narrow=narrow)
    if as_json:
        print_json({"graph": planning.describe_graph(), **report.as_dict(), **more})
        return
    console = output()
    say(console, planning.describe_graph())
    say(console, f"{planning.hardware.name}: {tables.describe_budgets(report)}")
    say(console, f"waiting in memory: {tables.describe_waiting(report)}")
    tables.print_summary(report, console)
    tables.print_report(report, console)
    if "ranks" in more:
        tables.print_ranks(more["ranks"], console)
    if more["changes"]:
        tables.print_changes(more["changes"], console)
    tables.print_assumptions(more["assumptions"], console)


def print_batches(stores: Sequence[str], memories: str, options: dict[str, Any], as_json: bool) -> None:
    """Print the largest batches of whole graphs that fit each of ``memories``, such as ``8G,12G``."""
    from ooc.train.batched.graphs import fitting_batches  # imports PyG

    store = open_store(stores[0] if stores else only_store(Path()))
    if not store.num_graphs:
        raise OptionError(f"--batches is for stores of many graphs; {store.path} is one")
    settings = TrainSettings(store=str(store.path), **options)
    check_sampling(settings, many_graphs=True)
    model = recipe.build_model(settings, store)
    sizes = sorted({parse_size(text, name="--batches") for text in memories.split(",")})
    fits = fitting_batches(
        model,
        store,
        sizes,
        paths=settings.paths,
        hops=settings.hops,
        ignore_edge_data=settings.edge_data_left_out,
        hardware=hardware_for(None, Path(settings.spill_dir or ".")),
    )
    if as_json:
        print_json({"store": str(store.path), "batches": [asdict(fit) for fit in fits]})
        return
    console = output()
    say(console, tables.describe_store(store))
    tables.print_fits(fits, console)


def print_least_memory(planning: Planning, as_json: bool) -> None:
    parts = planning.floor()
    if as_json:
        print_json({"graph": planning.describe_graph(), "floor": parts, "assumptions": planning.assumptions()})
        return
    console = output()
    say(console, planning.describe_graph())
    tables.print_floor(parts, console)
    tables.print_assumptions(planning.assumptions(), console)


def print_what_if(planning: Planning, texts: Sequence[str], *, plot: Path | None, as_json: bool) -> None:
    if plot is not None:
        check_drawing(plot, *what_if.SUFFIXES)
    limits, machine, memory_bytes = planning.limits, planning.hardware, planning.memory_bytes
    least_bytes = sum(planning.floor().values())
    axes = what_if.full_axes(
        what_if.parse_axes(texts), machine, limits, memory_bytes=memory_bytes, least_bytes=least_bytes
    )
    with Reporter() as reporter:
        cells = what_if.grid(axes, limits, machine, planning.report, reporter)
    command = click.get_current_context().command
    for cell in cells:
        if not cell["feasible"]:
            cell["reason"] = as_command_options(cell["reason"], command)
    found = what_if.next_points(cells, planning.resource_amounts())
    assumptions = planning.assumptions()
    if machine.has_device_memory:
        assumptions.append(f"cards are as fast as {machine.name}'s, and differ in memory alone")
    if as_json:
        print_json({"graph": planning.describe_graph(), "cells": cells, "steps": found, "assumptions": assumptions})
    else:
        console = output()
        say(console, planning.describe_graph())
        what_if.print_grid(cells, console)
        what_if.print_next_points(found, console)
        tables.print_assumptions(assumptions, console)
    if plot is not None:
        what_if.draw(cells, plot, title=planning.describe_training())
