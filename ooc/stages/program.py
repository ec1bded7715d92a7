# SPDX-License-Identifier: Apache-2.0
"""A program of stages: a schedule with names, a description of each stage for the planner, and the gradients that
stages store for each other.

The work of a stage is the multiply-adds of dense products and the values that element-wise operations read and write,
per row, and the operators, per tile.

Rows that cannot reach the loss are left out. Values K aggregations before the output are needed only within K hops of
the scored rows, and rows are ordered by that distance, so every stage runs over a prefix of the rows.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from types import MappingProxyType

from torch import Tensor

from ooc.kernels.sparse_rows import DRAWN_BYTES, DRAWN_NUMBERS, ENTRY_BYTES
from ooc.model.graph import ActiveRows, AnyScaling, Scaling
from ooc.model.layers.opaque import Opaque
from ooc.model.layers.per_edge import EdgeAggregate, Pulling, Result
from ooc.model.lowering.network import EVERYWHERE
from ooc.model.lowering.projection import Projection, SparseProduct
from ooc.model.lowering.rectified import ExponentialLinear, Rectified, Sigmoidal, Signs
from ooc.model.lowering.values import (
    MOMENTS_BYTES,
    Aggregate,
    Dropout,
    Moments,
    Noise,
    Rows,
    Rowwise,
    Sum,
    Value,
)
from ooc.plan.workload import ALL_ROWS, EdgesKey, PerEdge, Pull, Stage
from ooc.stages.context import Kernel, StageContext, Step, Tensors, Tile
from ooc.stages.names import Names, embedding_gradient, embedding_name
from ooc.stages.recomputation import Recomputation
from ooc.stages.schedule import Recipe, Schedule, is_constant, kept_beyond, last_uses, rows_in

_SCORING_COPIES = 8
"""Matrices as wide as the output that a loss with its gradient, or scoring, allocates."""
_ON_CPU, _ON_DEVICE = (36, 60), (2, 2 * _SCORING_COPIES)
"""The cost, in streamed values, of one random number (with its comparison and the factor made from it), and of each
output of a loss with its gradient, or of scores. Measured by processor time in tiles of 1,024 × 128: 3.0 ns; 4.6 ns (16
classes, of selected rows); 0.16 ns for a product with a scalar, which streams two values. A GPU takes some 40 integer
instructions per number, by data sheets (A5000, A100) 4 to 6 ps: as long as it streams 1 to 2 values."""
_NORM_VALUES = 6
"""The cost of normalising one column: read to be centred, scaled and shifted, and each time written."""

_WIDE, _PACKED_VALUES = 128, 5
"""The cost of packing in products with a side narrower than ``_WIDE``, as streamed values per value of the other side.
Measured: 16 × 128 at 41 G multiply-adds a second, 64 × 64 at 62, 128 × 128 at 72."""
_SPARSE_FORWARD, _SPARSE_BACKWARD = 4, 32
"""Multiply-adds of a dense product in the time of one of a sparse product, and of one of its weight's gradient.
Measured with 33 entries in rows of 8,415, and a weight of 64 columns."""
_STEP_COPIES, _STEP_VALUES, _STEP_OPERATORS = 4, 24, 16
"""The cost of an optimizer's step of rows: matrices of their width beside the results, values, and operators."""
_DIFFERENTIATED_AT_ONCE = (Sum, Projection, Dropout, Rectified, Sigmoidal, ExponentialLinear, Result)
"""Values whose gradient is computed without intermediate gradients."""
_RECORDED_OPERATORS = 16
"""Operators for a function that autograd differentiates: recording it, and a separate run of autograd's engine."""


@dataclass(frozen=True, slots=True)
class Work:
    """An amount of work: per row multiply-adds and values read or written; per tile ``operators``, each with its Python
    code."""

    multiplies: int = 0
    values: int = 0
    operators: int = 1

    def __add__(self, other: "Work") -> "Work":
        return Work(self.multiplies + other.multiplies, self.values + other.values, self.operators + other.operators)

    def spread(self, rows: int, of: int) -> "Work":
        """Return the work of the first ``rows`` rows, averaged over ``of`` rows."""
        return self if rows >= of else Work(self.multiplies * rows // of, self.values * rows // of, self.operators)


NO_WORK = Work(operators=0)
Pulls = tuple[Pull | None, Kernel | AnyScaling]
"""The pull of a stage, and the kernel or scaling it pulls with."""


class Program:
    """The stages of ``schedule``. ``recomputed``: those whose values the backward pass recomputes; 0 stands for what
    attentions pull of first stages."""

    def __init__(self, context: StageContext, schedule: Schedule, recomputed: Collection[int] = ()) -> None:
        self.context = context
        self.schedule = schedule
        self.names = Names(schedule, context.network, context.columns)
        later = {stage for stage in recomputed if stage}
        self.recomputation = Recomputation(schedule, later, first_messages=0 in recomputed)

    def constants(self) -> list[Aggregate]:
        """Return what the network aggregates only once."""
        values = [value for value in self.schedule.values if not is_constant(value)]
        used = dict.fromkeys(source for value in values for source in value.inputs)
        return [v for v in used if isinstance(v, Aggregate) and v.once]

    def learnt_matrices(self, stage: int) -> dict[str, int]:
        """Return the matrices of a first ``stage``'s embedding and of its optimizer state, with their columns."""
        learnt, stepping = self.schedule.learnt[stage], self.context.embedding
        assert stepping is not None, "an embedding is trained with an optimizer"
        name = embedding_name(learnt.space)
        return dict.fromkeys((name, *(f"{name}.{state}" for state in stepping.optimizer.states)), learnt.columns)

    def steps_in_backward(self, stage: int) -> bool:
        """Return whether the backward of a first ``stage``, which computes an embedding's gradient, also steps the
        rows.

        It does if it has all rows, and the norm of all gradients is not needed first.
        """
        stepping, active = self.context.embedding, self.active(stage)
        if stage not in self.schedule.learnt or stepping is None or stepping.clip_norm is not None:
            return False
        return active.training_rows(self.schedule.stage_hops[stage]) == active.nodes

    def active(self, stage: int) -> ActiveRows:
        """Return the rows that have to be computed, of the node type of ``stage``."""
        return self.context.active.of(self.schedule.spaces[stage])

    def rows(self, tile: Tile) -> Rows:
        """Return the rows of a tile, before any of their values is computed."""
        return Rows(tile.start, tile.stop, self.context.seed, self.context.epoch)

    def message(self, aggregate: Aggregate, rows: Tensor, tile: Tile, out: Tensor | None = None) -> Tensor:
        """Return what ``aggregate`` pulls of these rows, or, of its gradient, the rows' part; in ``out`` if scaled."""
        if isinstance(aggregate, EdgeAggregate):
            return rows
        return self.context.scaled(rows, tile, aggregate.scaling, out)

    def pull(self, recipe: Recipe, stage: int, stored: Mapping[str, Value] = MappingProxyType({})) -> Pulls:
        """Return what the forward of ``stage`` pulls, if ``recipe`` needs it, and what it pulls with.

        ``stored``: the values that are stored unchanged, by matrix.
        """
        pulled, names = self.schedule.pulled(stage), self.names
        if not recipe.pulled or pulled is None:
            return None, Scaling.SUM
        message, sums = names.of("m", pulled, recipe.repeated), names.of("p", pulled, recipe.repeated)
        if not isinstance(pulled, EdgeAggregate):
            self.context.columns[sums] = pulled.columns
            direction = self.context.direction(pulled.scaling)
            return Pull(message, sums, direction, edge_data=pulled.edge_data), pulled.scaling
        own, beside = (*map(names.value, pulled.own_values), None, None)[:2]
        per_edge = self.per_edge(pulled, Pulling.FORWARD, pulled.columns, own)
        per_edge = replace(per_edge, beside=beside)
        kept = next((name for name, value in stored.items() if value is pulled), None)
        pull = Pull(message, sums, self.context.along(pulled), per_edge, pulled.edge_data, kept=kept)
        return pull, partial(pulled.forward, self.context)

    def per_edge(self, aggregate: EdgeAggregate, pulling: Pulling, columns: int, own: str | None) -> PerEdge:
        """Return a description of a pull for the planner: an opaque layer may need all edges of a row at once."""
        itemsize = self.context.network.dtype.itemsize
        found = aggregate.per_edge(pulling, columns, own, itemsize, on_device=self.context.on_device)
        if not isinstance(aggregate, Opaque) or aggregate.splits_rows:
            return found
        return replace(found, row_edges=self._most_edges(self.context.along(aggregate)) or aggregate.most_edges)

    @cache  # noqa: B019  # as long as the program is there
    def _most_edges(self, direction: EdgesKey) -> int:
        """Return the most edges into a row."""
        return self.context.rows.most_edges(direction)

    def step(
        self,
        compute: Callable[[Tile], Tensors],
        title: str,
        stage: int,
        rows: int,
        recipe: Recipe,
        *,
        pulls: Pulls | None = None,
        loads: Iterable[str] = (),
        stores: dict[str, int] | None = None,
        backward: int | None = None,
        reverse: bool = False,
        scoring: int = 0,
        measured: Sequence[Moments] = (),
    ) -> Step:
        """Return the step of ``stage`` that ``compute`` computes, with its description.

        ``pulls``: given if it is not what ``recipe`` pulls in the forward pass. ``scoring``: operators of a loss or
        scores. ``measured``: the moments that are computed. The bound on temporaries counts all that is computed,
        recorded and differentiated.
        """
        pull, kernel = self.pull(recipe, stage) if pulls is None else pulls
        columns, stores, active = self.context.columns, stores or {}, self.active(stage)
        leaves = {leaf: self.names.value(leaf, recipe.recomputed.get(leaf)) for leaf in recipe.leaves}
        columns |= {name: leaf.columns for leaf, name in leaves.items()}
        reach = {name: recipe.reach[leaf] for leaf, name in leaves.items() if leaf in recipe.reach}
        columns |= stores
        names = tuple(dict.fromkeys([*leaves.values(), *loads]))
        for name in (*names, *(pull.own if pull is not None else ())):
            wanted = min(rows, active.training_rows(reach[name])) if name in reach else rows
            self.context.read_rows[name] = max(wanted, self.context.read_rows.get(name, 0))
        differentiated = self.schedule.backward_of(backward) if backward is not None else []
        beside = sum(columns[name] for name in loads if name not in leaves.values())
        temporaries = [self._most_at_once(recipe, stage, pull, differentiated, backward, stores), beside]
        temporaries.append(max((_product_columns(v) for v in recipe.order), default=0))
        temporaries.append(_SCORING_COPIES * self.schedule.output.columns if scoring else 0)
        of_moments = MOMENTS_BYTES // self.context.network.dtype.itemsize
        temporaries.append(
            max((of_moments * one.source.columns + one.statistics.inner_columns for one in measured), default=0)
        )
        learnt = self.schedule.learnt.get(stage)
        stepped = learnt.columns if learnt is not None and embedding_name(learnt.space) in stores else 0
        temporaries.append(_STEP_COPIES * stepped)

        drawn, scored = _ON_DEVICE if self.context.on_device else _ON_CPU
        # What is loaded is read once, what is stored read and written; what is pulled or stored to be pulled is scaled
        # by rows, and gradients that several values give are added up.
        values = sum(columns[name] for name in names if name != self.context.sparse) + 2 * sum(stores.values())
        if pull is not None and isinstance(kernel, AnyScaling):
            basic = kernel.basic
            scalings = (not basic.plain) + basic.normalized  # how often a row is scaled on its way to a sum
            values += (2 * scalings + 3 * (basic.loop_weight is not None)) * columns[pull.source]
        if scoring:
            values += scored * self.schedule.output.columns
        reaching, users = active.training_rows, self.schedule.users
        work = [Work(0, values, 2 * (len(names) + len(stores)) + scoring)]
        forward = ((v, reaching(recipe.reach.get(v, EVERYWHERE))) for v in recipe.order)
        work += [_forward_work(v, drawn).spread(reached, rows) for v, reached in forward]
        work += [_backward_work(v).spread(reaching(self.schedule.reach(v)), rows) for v in differentiated]
        if stepped:
            work.append(Work(0, _STEP_VALUES * stepped, _STEP_OPERATORS))
        work += [Work(0, 3 * v.columns * (len(users[v]) - 1)) for v in differentiated if len(users[v]) > 1]
        spec = self.spec(
            title,
            rows,
            sum(temporaries),
            loads=names,
            pull=pull,
            stores=tuple(stores),
            reverse=reverse,
            work=sum(work, NO_WORK),
            space=self.schedule.spaces[stage],
        )
        return Step(spec, compute, kernel)

    def _most_at_once(
        self,
        recipe: Recipe,
        stage: int,
        pull: Pull | None,
        differentiated: Sequence[Value],
        backward: int | None,
        stores: Mapping[str, int],
    ) -> int:
        """Return the most columns that a tile of ``stage`` has at a time.

        They belong to rows loaded and pulled, values, their recordings, and gradients; at the end, what it ``stores``
        may be copies.
        """
        schedule, most, stored = self.schedule, 0, sum(stores.values())
        known, tape, gradients = dict[Value, int](), dict[Value, int](), dict[Value, int]()

        def make(columns: int) -> None:
            nonlocal most
            most = max(most, columns + sum(map(sum, (known.values(), tape.values(), gradients.values()))))

        def have(values: Iterable[Value]) -> None:
            """Count loaded values as copies, since rows in several blocks are copied."""
            known.update((v, v.columns if v.entries_per_row is None else 0) for v in values if v in recipe.leaves)

        if pull is not None:  # a plain sum's rows are scaled
            own = sum(self.context.columns[name] for name in pull.own)
            columns = self.context.columns[pull.output]
            make(columns + (own if pull.per_edge is not None else columns))
            pulled = schedule.pulled(stage if recipe.pulled else stage + 1)
            assert pulled is not None
            if recipe.pulled:
                known[pulled] = columns
            else:
                gradients[pulled.source] = columns
        for value, done in zip(recipe.order, last_uses(recipe.order, rows_in, kept_beyond(recipe)), strict=True):
            have(rows_in(value))
            make(made := _made_columns(value, value in differentiated, on_device=self.context.on_device))
            known[value] = value.columns if value.entries_per_row is None else 0
            if value in differentiated and isinstance(value, (Dropout, Rowwise)):
                tape[value] = made - known[value]
            for source in done:
                known.pop(source, None)
        if backward is None:
            make(stored)
            return most
        inner = {*differentiated}
        gradients = {v: v.columns for v in inner if not schedule.users[v] or not inner.issuperset(schedule.users[v])}
        make(
            2 * max((value.columns for value, *_ in self.incoming(backward)), default=0)
        )  # loaded, and scaled or added
        done_with = last_uses(differentiated, schedule.used_backward, schedule.upstream_needs(backward))
        for value, done in zip(differentiated, done_with, strict=True):
            have(used := schedule.used_backward(value))
            gradients.pop(value, None)
            if isinstance(value, Projection) and value.product.dtype is None:  # the weight's gradient is computed first
                make(value.columns)
                for one in done:
                    known.pop(one, None)
            # Adding to existing gradients allocates new ones.
            added = sum(gradients.get(source, 0) for source in value.inputs)
            drawn = isinstance(value, Dropout) and value not in tape
            unpacked = any(isinstance(need, Signs) for need in used)
            make(_columns_at(value) + added + 2 * value.columns * (drawn or unpacked))
            gradients |= {source: source.columns for source in value.inputs if source.trains}
            for one in (value, *done):
                tape.pop(one, None)
                known.pop(one, None)
        have(schedule.upstream_needs(backward))
        make(2 * max((value.columns for value, (prior, _) in self.passed_on(backward).items() if prior), default=0))
        pulled = schedule.pulled(backward)
        if isinstance(pulled, EdgeAggregate) and pulled.finds_upstream:
            gradients.pop(pulled, None)
            make(2 * (pulled.upstream_columns + pulled.groups * pulled.result))
        make(stored)
        return most

    def spec(
        self,
        title: str,
        rows: int,
        temporary_columns: int,
        *,
        loads: tuple[str, ...] = (),
        pull: Pull | None = None,
        stores: tuple[str, ...] = (),
        reverse: bool = False,
        work: Work = NO_WORK,
        rows_at_once: int = ALL_ROWS,
        space: str = "",
    ) -> Stage:
        """Return a stage with this ``work`` and room for ``temporary_columns`` numbers per row."""
        itemsize = max(4, self.context.network.dtype.itemsize)
        drawn = DRAWN_BYTES * max(DRAWN_NUMBERS, self.context.columns.get("x", 0))
        return Stage(
            title,
            rows,
            tuple(name for name in loads if name != self.context.sparse),
            pull,
            stores,
            entry_bytes=ENTRY_BYTES if self.context.sparse in loads else 0,
            beside_bytes=drawn if self.context.network.drops_sparse and self.context.sparse in loads else 0,
            scratch_bytes_per_row=temporary_columns * itemsize,
            reverse=reverse,
            multiplies_per_row=work.multiplies,
            streamed_bytes_per_row=work.values * self.context.network.dtype.itemsize,
            operators=work.operators,
            rows_at_once=rows_at_once,
            space=space,
        )

    # ---- gradients that backward stages store for earlier ones ---------------------------------------------

    def incoming(self, stage: int) -> list[tuple[Value, str, AnyScaling | None]]:
        """Return the gradients that later stages have stored for values of this stage.

        Each comes with the scaling it has been multiplied with, where it is shared with a sum's gradient.
        """
        schedule, names = self.schedule, self.names
        found: list[tuple[Value, str, AnyScaling | None]] = []
        for value in schedule.all_in_stage(stage):
            writers = self._writers(value)
            shared = schedule.shares_gradient(value) if value.trains else None
            if writers:
                found.append((value, names.gradient(value, writers, writers[-1]), None))
            elif shared is not None:
                found.append((value, names.of("dp", shared), shared.scaling))
        for aggregate in (barrier for barrier in schedule.barriers if isinstance(barrier, EdgeAggregate)):
            brought = aggregate.brought if aggregate.before is None else None  # the first one gets the sum of all
            ends = [("dt", brought), *([("dm", aggregate.source)] if isinstance(aggregate, Opaque) else [])]
            for kind, end in ends:
                if end is not None and end.trains and schedule.stage[end] == stage:
                    found.append((end, names.of(kind, aggregate), None))
        return found

    def passed_on(self, stage: int) -> dict[Value, tuple[str | None, str]]:
        """Return the values of earlier stages to whose gradients this one adds, with the existing gradient and the new
        one."""
        found: dict[Value, tuple[str | None, str]] = {}
        for earlier in range(stage):
            for value in self.schedule.all_in_stage(earlier):
                writers = self._writers(value)
                if stage in writers:
                    place = writers.index(stage)
                    prior = self.names.gradient(value, writers, writers[place - 1]) if place else None
                    found[value] = (prior, self.names.gradient(value, writers, stage))
        return found

    def traffic(self, stage: int) -> tuple[tuple[str, ...], dict[str, int]]:
        """Return the gradients that the backward of ``stage`` loads, and those it stores with their columns."""
        loads = [name for _, name, _ in self.incoming(stage)]
        stores: dict[str, int] = {}
        pulled = self.schedule.pulled(stage)
        if pulled is not None and pulled.finds_upstream:
            stores[self.names.of("dp", pulled)] = pulled.upstream_columns
        target = pulled.target if isinstance(pulled, EdgeAggregate) and not pulled.pulls_targets else None
        if pulled is not None and target is not None and target.trains:
            stores[self.names.of("dt", pulled)] = target.columns
        for value, (prior, name) in self.passed_on(stage).items():
            stores[name] = value.columns
            if prior is not None:
                loads.append(prior)
        if self.steps_in_backward(stage):
            loads += (learnt := self.learnt_matrices(stage))
            stores |= learnt
        elif (rows := self.schedule.learnt.get(stage)) is not None:
            stores[embedding_gradient(rows.space)] = rows.columns
        return tuple(dict.fromkeys(loads)), stores

    def _writers(self, value: Value) -> list[int]:
        """Return the stages whose backward adds to the gradient of ``value``, of an earlier stage, in their order."""
        schedule = self.schedule
        if not value.trains or schedule.shares_gradient(value) is not None:
            return []
        stages = {schedule.stage[user] for user in schedule.later_users(value)}
        stages |= {schedule.stage[user] - 1 for user in schedule.distant_users(value)}
        return sorted(stages, reverse=True)


def _made_columns(value: Value, differentiated: bool, *, on_device: bool) -> int:
    """Return the columns that computing ``value`` allocates, including what it keeps for its backward."""
    if value.entries_per_row is not None:
        return 0
    if value.packed:  # a byte for each of its bits, twice, before they are packed
        return 5 * value.columns
    if isinstance(value, Rowwise) and value.moments:
        return 5 * max(value.columns, value.source.columns) + value.inner_columns
    if isinstance(value, Rowwise):
        return (3 if differentiated else 2) * value.columns + value.inner_columns
    if isinstance(value, Noise):  # two 64-bit numbers for each, and the results
        return 10 * value.columns
    if isinstance(value, Dropout):  # the mask, a byte for each on a device
        return value.columns - (-value.columns // 4 if on_device else -value.columns)
    return value.columns


def _columns_at(value: Value) -> int:
    """Return the columns of gradients that propagating the gradient of ``value`` to its inputs allocates.

    Where autograd may allocate others on the way, they count twice.
    """
    needed = [v.columns for v in value.inputs if v.trains or (isinstance(value, Rowwise) and v.entries_per_row is None)]
    made = value.columns + sum(needed)
    inner = value.statistics.inner_columns if isinstance(value, Moments) else 0
    return (1 if isinstance(value, _DIFFERENTIATED_AT_ONCE) else 2) * made + inner + 2 * _product_columns(value)


def _product_columns(value: Value) -> int:
    """Return the further columns that a product with a weight takes."""
    if not isinstance(value, Projection):
        return 0
    return value.product.columns(value.inputs[0].columns, value.columns)


# ---- how much work values are -----------------------------------------------------------------------------
#
# Counts, no times: what they take is the machine's affair (``ooc.plan.hardware``). A function of rows whose insides are
# not known counts as one that reads its inputs once and writes its output once, and twice that backward.


def _forward_work(value: Value, drawn: int = 0) -> Work:
    """Return the work of computing ``value`` from its inputs; a random number costs as much as ``drawn`` values."""
    inputs = sum(source.held_columns for source in value.inputs if not isinstance(source, Moments))
    match value:
        case SparseProduct():
            return Work(_SPARSE_FORWARD * inputs * value.columns, 2 * inputs + value.columns, 4)
        case Projection():
            narrow, wide = sorted((inputs, value.columns))
            packed = _PACKED_VALUES * wide * max(0, _WIDE - narrow) // _WIDE
            return Work(inputs * value.columns, inputs + value.columns + packed, 2)
        case Sum():
            operators = len(value.inputs) + len(value.parameters) - 1 + (value.factors[0] != 1)
            return Work(0, 3 * operators * value.columns, operators)
        case Dropout() | Noise():
            return Work(0, (3 + drawn) * value.columns, 5)
        case Rowwise() if value.moments:
            return Work(2 * value.total_numbers, _NORM_VALUES * max(value.columns, value.source.columns), 6)
        case Signs():
            return Work(0, inputs + value.columns, 3)
        case Rowwise():
            return Work(_products(value), inputs + value.columns, 2)
        case _:
            return Work(0, inputs + value.columns)


def _backward_work(value: Value) -> Work:
    """Return the work of propagating the gradient of ``value`` to its inputs and parameters, with its needs at hand."""
    forward = _forward_work(value)
    match value:
        case SparseProduct():
            return Work(_SPARSE_BACKWARD * forward.multiplies // _SPARSE_FORWARD, forward.values, 24)
        case Projection():
            products = value.inputs[0].trains + value.own_trains
            return Work(products * forward.multiplies, products * forward.values, 2 * products)
        case Sum():
            scaled = sum(factor != 1 for factor in value.factors)
            return Work(0, (2 * scaled + len(value.parameters)) * value.columns, 1 + scaled + 2 * len(value.parameters))
        case Dropout() | Rectified() | Sigmoidal() | ExponentialLinear():
            return Work(0, 3 * value.columns)
        case Result():
            return NO_WORK
        case _:
            return Work(2 * forward.multiplies, 2 * forward.values, _RECORDED_OPERATORS)


def _products(value: Rowwise) -> int:
    """Return the multiply-adds per row of a function's matrices, each of which is assumed to multiply the row once."""
    return sum(parameter.numel() for parameter in value.parameters if parameter.dim() > 1)
