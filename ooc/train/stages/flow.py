# SPDX-License-Identifier: Apache-2.0
"""The stages of a schedule as steps: what is computed for a tile of rows, forward and backward.

Forward, stage s pulls what it begins with, computes its values, and stores what is kept, what is pulled next, and
the tile's part in moments. The last stage goes on to the loss and takes the gradient back to what it began with.
Backward, stage s pulls the gradient of what the next aggregation pulled, draws its values again from what is kept,
and takes all gradients back to what it began with: they are stored to be pulled in turn. Gradients of values that a
later stage used are stored by that stage and added here.

Where stages are forgotten, forward stages are run again before the backward stage that needs them (again).

Rows that cannot reach the loss are left out: what lies K aggregations before the output is needed only within K hops
of the rows that are scored, and rows lie in the order of that distance, so every stage runs over the first so many.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import cached_property, partial

from torch import Tensor

from ooc.plan.workload import Direction, PerEdge, Pull, Stage
from ooc.train.graph import Scaling
from ooc.train.lowering.general import General
from ooc.train.lowering.network import EVERYWHERE
from ooc.train.lowering.per_edge import EdgeAggregate
from ooc.train.lowering.projection import Projection
from ooc.train.lowering.statistics import MOMENTS_BYTES, tile_moments
from ooc.train.lowering.values import Aggregate, Dropout, Linear, Moments, Normalized, Rows, Rowwise, Value
from ooc.train.stages.again import Forward, Repetitions
from ooc.train.stages.drawing import Drawing, Known
from ooc.train.stages.gradients import HandedGradients
from ooc.train.stages.ground import Ground
from ooc.train.stages.names import Names
from ooc.train.stages.schedule import Recipe, Schedule, is_constant
from ooc.train.stages.taking_back import TakingBack, add
from ooc.train.stages.tile import Kernel, Sink, Step, Tensors, Tile
from ooc.train.stages.work import NO_WORK, Work, backward_work, forward_work, total
from ooc.train.tensors import shaped

_JUDGING_COPIES = 8
"""Matrices as wide as the output that a loss with its gradient, or scoring, makes of it."""


class Flow:
    """Makes the steps of ``schedule``. ``forgotten``: the stages that the backward pass runs again."""

    def __init__(self, ground: Ground, schedule: Schedule, forgotten: Collection[int] = ()) -> None:
        self.ground = ground
        self.schedule = schedule
        self.names = Names(schedule, ground.network, ground.columns)
        self.repetitions = Repetitions(schedule, forgotten)
        self._handed = HandedGradients(schedule, self.names)

    def constants(self) -> list[Aggregate]:
        """What of the network is aggregated once."""
        values = [value for value in self.schedule.values if not is_constant(value)]
        used = dict.fromkeys(source for value in values for source in value.inputs)
        return [v for v in used if isinstance(v, Aggregate) and v.once]

    # ---- forward --------------------------------------------------------------------------------------

    def forwards(self, rows: Callable[[int], int]) -> list[Step]:
        """The stages before the last one; ``rows`` by hops before the output."""
        stages = range(self.schedule.last)
        return [self._forward(stage, rows(self.schedule.stage_hops[stage])) for stage in stages]

    def _forward(self, stage: int, row_count: int) -> Step:
        run = self.repetitions.forward(stage)
        return self._run(self.names.forward(stage), run, row_count, self.schedule.moments(stage))

    def _run(self, title: str, run: Forward, row_count: int, moments: Sequence[Moments] = ()) -> Step:
        """A forward stage, the epoch's own or one that is run again."""
        recipe, stage = run.recipe, run.stage
        stored = {self.names.value(v, recipe.repeated): v for v in run.values}
        pulled_next = {self.names.message(a, recipe.repeated): a for a in run.messages}
        self.ground.packed |= {name for name, value in stored.items() if value.packed}
        draw = self._drawing(recipe, stage)

        def compute(tile: Tile) -> Tensors:
            known = draw(tile, self._rows(tile))
            for barrier in moments:
                tile.moments.append((barrier, tile_moments(known[barrier.source])))
            out = {name: _flat(known[v], v) for name, v in stored.items()}
            return out | {name: self._message(a, known[a.source], tile) for name, a in pulled_next.items()}

        pull, kernel = self._pull(recipe, stage)
        if pull is not None and pull.per_edge is not None:  # a plain sum is scaled before it is kept
            pulled = self.schedule.pulled(stage)
            pull = replace(pull, kept=next((name for name, value in stored.items() if value is pulled), None))
        stores = {n: v.columns for n, v in stored.items()} | {n: a.source.columns for n, a in pulled_next.items()}
        measured = [barrier.source for barrier in moments]
        spec = self._describe(title, row_count, recipe, pull=pull, kernel=kernel, stores=stores, measured=measured)
        return Step(spec, compute, kernel)

    def score(self) -> Step:
        """The last stage, scored. In the order of the loss, so that sums of scores come out the same."""

        def take(tile: Tile, outputs: Tensor) -> None:
            self.ground.objective.score(tile.inputs, tile.start, outputs, tile.contribution)

        rows = self.ground.active.scoring_rows(0)
        return self._last("score", rows, self.ground.objective.score_inputs, take, reverse=True)

    def outputs(self, sink: Sink) -> Step:
        """The last stage, handed to ``sink``."""

        def take(tile: Tile, outputs: Tensor) -> None:
            sink(tile.start, _flat(outputs, self.schedule.output))

        return self._last("outputs", self.ground.active.scoring_rows(0), (), take)

    def _last(
        self,
        title: str,
        rows: int,
        inputs: Sequence[str],
        take: Callable[[Tile, Tensor], None],
        *,
        reverse: bool = False,
    ) -> Step:
        schedule, last = self.schedule, self.schedule.last
        recipe = schedule.recipe([schedule.output], last)
        draw = self._drawing(recipe, last)

        def compute(tile: Tile) -> Tensors:
            take(tile, draw(tile, self._rows(tile))[schedule.output])
            return {}

        pull, kernel = self._pull(recipe, last)
        judging = self.ground.objective.score_operators
        spec = self._describe(
            title, rows, recipe, pull=pull, kernel=kernel, loads=inputs, reverse=reverse, judging=judging
        )
        return Step(spec, compute, kernel)

    # ---- loss and backward ------------------------------------------------------------------------------

    def loss(self, *, scored: bool = False) -> Step:
        """The last stage, the loss, its gradient, and as much backward as needs no other row."""
        schedule, last, objective = self.schedule, self.schedule.last, self.ground.objective
        recipe = self.repetitions.loss_recipe()
        draw = self._drawing(recipe, last, schedule.backward_of(last))
        take_back = self._taking_back(last)

        def compute(tile: Tile) -> Tensors:
            rows = self._rows(tile)
            known = draw(tile, rows)
            outputs = known[schedule.output]
            if scored:
                objective.score(tile.inputs, tile.start, outputs, tile.contribution)
            gradients = {schedule.output: objective.gradient(tile.inputs, tile.start, outputs, tile.contribution)}
            return take_back(gradients, known, tile, rows)

        loads, stores = self._handed.traffic(last)
        pull, kernel = self._pull(recipe, last)
        labels = objective.score_inputs if scored else objective.loss_inputs
        spec = self._describe(
            "loss",
            self.ground.active.training_rows(0),
            recipe,
            pull=pull,
            kernel=kernel,
            loads=(*loads, *labels),
            stores=stores,
            backward=last,
            reverse=True,
            judging=objective.gradient_operators + objective.score_operators * scored,
        )
        return Step(spec, compute, kernel)

    def backwards(self) -> list[Step]:
        """The stages before the last one, last first, down to the first that has something to train."""
        steps: list[Step] = []
        for stage in range(self.schedule.last - 1, -1, -1):
            above = self.schedule.pulled(stage + 1)
            if isinstance(above, General):
                if above.takes_gradient:
                    steps.append(self._scatter(above, stage + 1))
            elif isinstance(above, EdgeAggregate) and above.pulls_targets and above.trains_target:
                steps.append(self._targets(above, stage + 1))
            if self._has_backward(stage):
                steps += [self._repeat(run, stage) for run in self.repetitions.before(stage)]
                steps.append(self._backward(stage))
        return steps

    def _repeat(self, run: Forward, backward: int) -> Step:
        rows = self.ground.active.training_rows(self.schedule.stage_hops[run.stage])
        return self._run(self.names.again(run.stage, backward), run, rows)

    def _has_backward(self, stage: int) -> bool:
        below, above = self.schedule.pulled(stage), self.schedule.pulled(stage + 1)
        pulls = above is not None and not isinstance(above, General) and above.takes_gradient
        return bool(self.schedule.backward_of(stage)) or pulls or (below is not None and below.takes_gradient)

    def _backward(self, stage: int) -> Step:
        schedule, names, ground = self.schedule, self.names, self.ground
        recipe = self.repetitions.backward_recipe(stage)
        draw = self._drawing(recipe, stage, schedule.backward_of(stage))
        take_back = self._taking_back(stage)
        above = schedule.pulled(stage + 1)
        pull: Pull | None = None
        kernel: Kernel | Scaling = Scaling.SUM
        if above is not None and above.source.trains and not isinstance(above, General):
            sums, message = names.sums_gradient(above), names.message_gradient(above)
            per_edge, kernel = None, above.scaling
            if isinstance(above, EdgeAggregate):
                per_edge = self._per_edge(above, above.source.columns, names.message(above), above.upstream_scalars)
                kernel = partial(above.backward_sources, ground)
            pull = Pull(sums, message, ground.backward_direction, per_edge, above.edge_data)

        def compute(tile: Tile) -> Tensors:
            rows = self._rows(tile)
            known = draw(tile, rows)
            gradients: Known = {}
            if pull is not None and above is not None:
                add(gradients, above.source, self._message(above, tile.inputs[pull.output], tile))
            return take_back(gradients, known, tile, rows)

        loads, stores = self._handed.traffic(stage)
        spec = self._describe(
            names.backward(stage),
            ground.active.training_rows(schedule.stage_hops[stage]),
            recipe,
            pull=pull,
            kernel=kernel,
            loads=loads,
            stores=stores,
            backward=stage,
            reverse=True,
        )
        return Step(spec, compute, kernel)

    def _targets(self, aggregate: EdgeAggregate, stage: int) -> Step:
        """The gradient of what targets bring to ``aggregate``, with which ``stage`` begins."""
        names = self.names
        name, target = names.target_gradient(aggregate), aggregate.target
        trained = target is not None and target.trains
        per_edge = self._per_edge(aggregate, aggregate.pulled_target_columns, names.sums_gradient(aggregate))
        pulled = names.pulled_target_gradient(aggregate)
        pull = Pull(names.message(aggregate), pulled, Direction.IN, per_edge, aggregate.edge_data)

        def compute(tile: Tile) -> Tensors:
            gradient, parameters = aggregate.target_gradient(tile.inputs[pull.output])
            tile.gradients += parameters
            return {name: gradient} if trained else {}

        stores = {name: target.columns} if target is not None and trained else {}
        spec = self._describe(
            f"targets {names.backward(stage).removeprefix('backward ')}",
            self.ground.active.training_rows(self.schedule.stage_hops[stage]),
            Recipe((), (), pulled=True),
            pull=pull,
            stores=stores,
            reverse=True,
        )
        return Step(spec, compute, partial(aggregate.backward_targets, self.ground))

    def _scatter(self, aggregate: General, stage: int) -> Step:
        """The gradients of all rows that a layer of unknown insides was run on, with which ``stage`` begins: of those
        that it gave a result for, stored, and of others, scattered. From the first tile to the last in every plan."""
        names, source = self.names, aggregate.source
        name, pulled = names.target_gradient(aggregate), names.pulled_target_gradient(aggregate)
        sums = names.sums_gradient(aggregate)
        per_edge = self._per_edge(aggregate, aggregate.pulled_target_columns, sums)
        scattered = names.message_gradient(aggregate) if source.trains else None
        pull = Pull(names.message(aggregate), pulled, Direction.IN, per_edge, aggregate.edge_data, scattered)

        def compute(tile: Tile) -> Tensors:
            return {name: tile.inputs[pulled]} if source.trains else {}

        spec = self._describe(
            f"sources {names.backward(stage).removeprefix('backward ')}",
            self.ground.active.training_rows(self.schedule.stage_hops[stage]),
            Recipe((), (), pulled=True),
            pull=pull,
            stores={name: source.columns} if source.trains else {},
        )
        return Step(spec, compute, partial(aggregate.scatter, self.ground))

    # ---- rows ----------------------------------------------------------------------------------------------

    def _rows(self, tile: Tile) -> Rows:
        return Rows(tile.start, tile.stop, self.ground.seed, self.ground.epoch)

    def _drawing(self, recipe: Recipe, stage: int, recorded: Collection[Value] = ()) -> Drawing:
        return Drawing(self.ground, self.names, recipe, self.schedule.pulled(stage), recorded)

    def _taking_back(self, stage: int) -> TakingBack:
        return TakingBack(self.ground, self.schedule, self.names, self._handed, stage)

    # ---- descriptions ----------------------------------------------------------------------------------------

    def _message(self, aggregate: Aggregate, rows: Tensor, tile: Tile) -> Tensor:
        """What ``aggregate`` pulls of these rows; and of its gradient, theirs."""
        return rows if isinstance(aggregate, EdgeAggregate) else self.ground.before(rows, tile, aggregate.scaling)

    def _pull(self, recipe: Recipe, stage: int) -> tuple[Pull | None, Kernel | Scaling]:
        """What the forward of ``stage`` pulls, if ``recipe`` needs it, and what with."""
        pulled, names = self.schedule.pulled(stage), self.names
        if not recipe.pulled or pulled is None:
            return None, Scaling.SUM
        message, sums = names.message(pulled, recipe.repeated), names.sums(pulled, recipe.repeated)
        if not isinstance(pulled, EdgeAggregate):
            self.ground.columns[sums] = pulled.columns
            return Pull(message, sums, Direction.IN, edge_data=pulled.edge_data), pulled.scaling
        own = None if pulled.target is None else names.value(pulled.target)
        per_edge = self._per_edge(pulled, pulled.columns, own, pulled.source_scalars)
        return Pull(message, sums, Direction.IN, per_edge, pulled.edge_data), partial(pulled.forward, self.ground)

    def _per_edge(
        self, aggregate: EdgeAggregate, columns: int, own: str | None, apart: tuple[int, ...] = ()
    ) -> PerEdge:
        """How the planner is to think of one of its pulls: a layer of unknown insides takes a row's edges together."""
        itemsize = self.ground.network.dtype.itemsize
        found = aggregate.per_edge(columns, own, itemsize, on_device=self.ground.on_device)
        if apart and not self.ground.on_device:
            found = replace(found, apart=apart)
        if not isinstance(aggregate, General):
            return found
        return replace(found, edges_at_once=max(found.edges_at_once, self._most_edges))

    @cached_property
    def _most_edges(self) -> int:
        """Into a row."""
        return self.ground.rows.most_edges(Direction.IN)

    def _describe(
        self,
        title: str,
        rows: int,
        recipe: Recipe,
        *,
        pull: Pull | None = None,
        kernel: Kernel | Scaling = Scaling.SUM,
        loads: Iterable[str] = (),
        stores: dict[str, int] | None = None,
        backward: int | None = None,
        reverse: bool = False,
        judging: int = 0,
        measured: Sequence[Value] = (),
    ) -> Stage:
        """The stage's description. ``judging``: operators by which outputs get a loss or scores. ``measured``: values
        whose moments are taken. The bound on temporaries counts all that is drawn, recorded and taken back."""
        columns = self.ground.columns
        leaves = {leaf: self.names.value(leaf, recipe.again.get(leaf)) for leaf in recipe.leaves}
        columns |= {name: leaf.columns for leaf, name in leaves.items()}
        reach = {name: recipe.reach[leaf] for leaf, name in leaves.items() if leaf in recipe.reach}
        columns |= stores or {}
        names = tuple(dict.fromkeys([*leaves.values(), *loads]))
        for name in (*names, *(pull.own if pull is not None else ())):
            wanted = min(rows, self.ground.active.training_rows(reach[name])) if name in reach else rows
            self.ground.read_rows[name] = max(wanted, self.ground.read_rows.get(name, 0))
        taken_back = self.schedule.backward_of(backward) if backward is not None else []
        temporaries = [v.columns * _copies(v, v in taken_back) for v in recipe.order]
        temporaries.append(max((_product_columns(v) for v in recipe.order), default=0))
        temporaries.append(_JUDGING_COPIES * self.schedule.output.columns if judging else 0)
        of_moments = MOMENTS_BYTES // self.ground.network.dtype.itemsize
        temporaries.append(max((of_moments * v.columns for v in measured), default=0))
        temporaries.append(2 * max((_columns_at(v) for v in taken_back), default=0))
        upstream = self.schedule.pulled(backward) if backward is not None else None
        if isinstance(upstream, EdgeAggregate):
            temporaries.append(2 * (upstream.upstream_columns + upstream.columns))
        widths = [columns[name] for name in (*names, *(stores or {}))]
        if pull is not None:
            widths += [columns[name] for name in (pull.source, pull.output, *pull.own)]
        return self.spec(
            title,
            rows,
            loads=names,
            pull=pull,
            stores=tuple(stores or {}),
            reverse=reverse,
            temporary_columns=sum(temporaries) + sum(widths),
            work=self._work(recipe, pull, kernel, names, tuple(stores or {}), taken_back, rows=rows, judging=judging),
        )

    def _work(
        self,
        recipe: Recipe,
        pull: Pull | None,
        kernel: Kernel | Scaling,
        loads: Sequence[str],
        stores: Sequence[str],
        taken_back: Sequence[Value],
        *,
        rows: int,
        judging: int,
    ) -> Work:
        """Of one row. What is loaded is read once, what is stored read and written; what is pulled or stored to be
        pulled is scaled by rows, and gradients that several values give are added up."""
        columns = self.ground.columns
        values = sum(columns[name] for name in loads) + 2 * sum(columns[name] for name in stores)
        if pull is not None and isinstance(kernel, Scaling):
            values += (2 * kernel.row_scalings + 3 * (kernel.loop_weight is not None)) * columns[pull.source]
        operators = 2 * (len(loads) + len(stores)) + judging
        if judging:
            values += 2 * _JUDGING_COPIES * self.schedule.output.columns
        reaching = self.ground.active.training_rows
        parts = [Work(0, values, operators)]
        parts += [forward_work(v).spread(reaching(recipe.reach.get(v, EVERYWHERE)), rows) for v in recipe.order]
        parts += [backward_work(v).spread(reaching(self.schedule.reach(v)), rows) for v in taken_back]
        shared = [v for v in taken_back if len(self.schedule.users[v]) > 1]
        return total([*parts, *(Work(0, 3 * v.columns * (len(self.schedule.users[v]) - 1)) for v in shared)])

    def spec(
        self,
        title: str,
        rows: int,
        *,
        loads: tuple[str, ...] = (),
        pull: Pull | None = None,
        stores: tuple[str, ...] = (),
        reverse: bool = False,
        temporary_columns: int | None = None,
        work: Work = NO_WORK,
    ) -> Stage:
        """A stage of so much ``work`` with room for ``temporary_columns`` numbers a row (default: twice what goes in
        and out)."""
        if temporary_columns is None:
            names = [*loads, *stores, *((pull.source,) if pull else ())]
            temporary_columns = 2 * sum(self.ground.columns[name] for name in names)
        itemsize = max(4, self.ground.network.dtype.itemsize)
        return Stage(
            title,
            rows,
            loads,
            pull,
            stores,
            scratch_bytes_per_row=temporary_columns * itemsize,
            reverse=reverse,
            multiplies_per_row=work.multiplies,
            streamed_bytes_per_row=work.values * self.ground.network.dtype.itemsize,
            operators=work.operators,
        )


def _copies(value: Value, taken_back: bool) -> int:
    """Matrices of its own width that computing ``value`` makes, and keeps for its backward."""
    if value.packed:  # a byte for each of its bits, twice, before they are packed
        return 5
    if isinstance(value, Normalized):
        return 5
    if isinstance(value, Rowwise):
        return 3 if taken_back else 2
    return 2 if isinstance(value, Dropout) else 1


def _columns_at(value: Value) -> int:
    """Columns of the gradients at hand while that of ``value`` is taken to its inputs."""
    return value.columns + sum(source.columns for source in value.inputs) + 2 * _product_columns(value)


def _product_columns(value: Value) -> int:
    """Columns that multiplying with a weight takes besides."""
    if not isinstance(value, (Linear, Projection)):
        return 0
    return value.product.columns(value.inputs[0].columns, value.columns)


def _flat(rows: Tensor, value: Value) -> Tensor:
    return shaped(rows, (value.columns,))
