# SPDX-License-Identifier: Apache-2.0
"""The loss and the backward stages of a program, as functions of a tile of rows.

The last stage continues to the loss and propagates the gradient back to the values the stage began with. In the
backward pass, stage s pulls the gradient of what the next aggregation pulled, restores its values from what was kept,
and propagates all gradients to what it began with; these are stored to be pulled in turn. A later stage that used a
value stores that value's gradient, which is added here (``Program.incoming``).

The optimizer steps an embedding's rows tile by tile as their gradient is computed, if all rows have a gradient.
Otherwise a separate stage steps all rows, since an optimizer may also move rows with a zero gradient. A separate stage
is also used where gradients are clipped, since their norm is known only afterwards. Rows are replaced in place, by the
last pass of a program that reads them.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ooc.kernels.tensors import shaped, typed
from ooc.model.graph import AnyScaling, Scaling
from ooc.model.layers.opaque import Opaque
from ooc.model.layers.per_edge import EdgeAggregate, Pulling
from ooc.model.lowering.projection import Projection
from ooc.model.lowering.rectified import Rectified, Sigmoidal
from ooc.model.lowering.values import Moments, Rows, Value
from ooc.plan.workload import Pull
from ooc.stages.context import Kernel, Step, Tensors, Tile
from ooc.stages.forward import KnownRows, materialise, recompute_steps
from ooc.stages.names import embedding_gradient
from ooc.stages.places import gradient_places, passes_gradient_on
from ooc.stages.program import Program
from ooc.stages.schedule import Recipe, last_uses

_ONLY_PULLED = Recipe((), (), pulled=True)


def loss_step(program: Program, *, scored: bool = False) -> Step:
    """Return the last stage, the loss, its gradient, and the part of the backward pass that needs no other rows."""
    schedule, last, objective = program.schedule, program.schedule.last, program.context.objective
    recipe = program.recomputation.loss_recipe()
    values_of = materialise(program, recipe, last, schedule.backward_of(last))
    backward = tile_backward(program, last)

    def compute(tile: Tile) -> Tensors:
        rows = program.rows(tile)
        known = values_of(tile, rows)
        outputs = known[schedule.output]
        if scored:
            objective.score(tile, outputs)
        gradients = GradientRows()
        gradients.add(schedule.output, objective.gradient(tile, outputs), is_own=True)
        return backward(gradients, known, tile, rows)

    loads, stores = program.traffic(last)
    labels = objective.score_inputs if scored else objective.loss_inputs
    return program.step(
        compute,
        "loss",
        last,
        program.active(last).training_rows(0),
        recipe,
        loads=(*loads, *labels),
        stores=stores,
        backward=last,
        reverse=True,
        scoring=objective.gradient_operators + objective.score_operators * scored,
    )


def backward_steps(program: Program) -> list[Step]:
    """Return the stages before the last one, last first, down to the first one with something to train."""
    steps: list[Step] = []
    for stage in range(program.schedule.last - 1, -1, -1):
        above = program.schedule.pulled(stage + 1)
        if isinstance(above, EdgeAggregate) and above.pulls_targets and above.trains_target:
            steps.append(_target_step(program, above, stage + 1))
        below = program.schedule.pulled(stage)
        pulls = above is not None and not isinstance(above, Opaque) and above.takes_gradient
        learns = pulls or stage in program.schedule.learnt or (below is not None and below.finds_upstream)
        if program.schedule.backward_of(stage) or learns:
            steps += [*recompute_steps(program, stage), _backward(program, stage)]
    # Embeddings that no backward stage steps get a stage of their own.
    return [*steps, *(_step(program, at) for at in program.schedule.learnt if not program.steps_in_backward(at))]


def _backward(program: Program, stage: int) -> Step:
    schedule, names, context = program.schedule, program.names, program.context
    recipe = program.recomputation.backward_recipe(stage)
    values_of = materialise(program, recipe, stage, schedule.backward_of(stage))
    backward = tile_backward(program, stage)
    above = schedule.pulled(stage + 1)
    pull: Pull | None = None
    kernel: Kernel | AnyScaling = Scaling.SUM
    if above is not None and above.source.trains and not isinstance(above, Opaque):
        sums, message = names.of("dp", above), names.of("dm", above)
        per_edge, kernel = None, above.scaling
        if isinstance(above, EdgeAggregate):
            own = names.of("m", above, program.recomputation.made_for(above))
            per_edge = program.per_edge(above, Pulling.SOURCES, above.source.columns, own)
            kernel = partial(above.backward_sources, context)
        pull = Pull(sums, message, context.direction(above.scaling, backward=True), per_edge, above.edge_data)

    def compute(tile: Tile) -> Tensors:
        rows = program.rows(tile)
        gradients = GradientRows()
        if pull is not None and above is not None:
            sums: Tensor = tile.inputs.pop(pull.output)
            is_own = tile.pulled_is_own and pull.per_edge is None
            found = program.message(above, sums, tile, sums if is_own else None)
            gradients.add(above.source, found, is_own=is_own or found is not sums)
            del sums, found
        known = values_of(tile, rows)
        return backward(gradients, known, tile, rows)

    loads, stores = program.traffic(stage)
    return program.step(
        compute,
        names.backward(stage),
        stage,
        program.active(stage).training_rows(schedule.stage_hops[stage]),
        recipe,
        pulls=(pull, kernel),
        loads=loads,
        stores=stores,
        backward=stage,
        reverse=True,
    )


def _target_step(program: Program, aggregate: EdgeAggregate, stage: int) -> Step:
    """Return the step that computes the gradient of the targets' own rows in ``aggregate``, with which ``stage``
    begins.

    Several aggregations may continue one another; then the gradient found by the later ones for the same rows is added.
    For an opaque layer, the step computes the gradients of all rows that the layer was run on: those of target rows are
    stored, those of other rows are scattered, from the first tile to the last in every plan.
    """
    names, brought, opaque = program.names, aggregate.brought, isinstance(aggregate, Opaque)
    name, pulled = names.of("dt", aggregate), names.of("pt", aggregate)
    trained = brought is not None and brought.trains
    columns = aggregate.pulled_target_columns
    per_edge = program.per_edge(aggregate, Pulling.TARGETS, columns, names.of("dp", aggregate))
    if aggregate.after is not None:
        per_edge = replace(per_edge, beside=names.of("dt", aggregate.after))
    if isinstance(aggregate, Opaque) and aggregate.target is not None:
        per_edge = replace(per_edge, beside=names.value(aggregate.target))
    scattered = names.of("dm", aggregate) if opaque and aggregate.source.trains else None
    just_so = trained and brought is not None and not opaque and aggregate.pulled_target_columns == brought.columns
    pull = Pull(
        *(names.of("m", aggregate), pulled, program.context.along(aggregate), per_edge, aggregate.edge_data, scattered),
        kept=name if just_so else None,
    )

    def compute(tile: Tile) -> Tensors:
        gradient, parameters = aggregate.target_gradient(tile.inputs.pop(pulled))
        tile.gradients += parameters
        return {name: gradient} if trained else {}

    return program.step(
        compute,
        f"{'sources' if opaque else 'targets'} {names.backward(stage).removeprefix('backward ')}",
        stage,
        program.active(stage).training_rows(program.schedule.stage_hops[program.schedule.stage[aggregate.upstream_of]]),
        _ONLY_PULLED,
        pulls=(pull, partial(aggregate.backward_targets, program.context)),
        stores={name: brought.columns} if brought is not None and trained else {},
        reverse=not opaque,
    )


# ---- a tile's gradients -------------------------------------------------------------------------------------


class GradientRows(dict[Value, Tensor]):
    """The gradients of some values' rows; ``own``: those whose memory no other tensor shares."""

    __slots__ = ("own",)

    def __init__(self) -> None:
        super().__init__()
        self.own: set[Value] = set()

    def take(self, value: Value) -> tuple[Tensor, bool]:
        """Remove and return the gradient of ``value``, and whether no other tensor shares its memory."""
        is_own = value in self.own
        self.own.discard(value)
        return self.pop(value), is_own

    def add(self, value: Value, part: Tensor, *, is_own: bool = False) -> None:
        """Add ``part`` to the gradient of ``value``: of all rows of the tile, or of none, as active rows are whole
        tiles.

        ``is_own``: no other tensor shares the memory of ``part``.
        """
        present = self.get(value)
        if not part.shape[0]:
            return
        if present is None:
            self[value] = part
            if not is_own:
                return
        else:
            out = present if value in self.own else part if is_own else None
            self[value] = torch.add(present, part, out=out)
        self.own.add(value)


def tile_backward(program: Program, stage: int) -> Callable[[GradientRows, KnownRows, Tile, Rows], Tensors]:
    """Return the function that propagates a tile's gradients through ``stage``.

    It takes the gradients known so far, which it uses up, the rows of the values needed, and the tile. It returns what
    the stage stores, and adds parameters' gradients to the tile.
    """
    context, schedule, names = program.context, program.schedule, program.names
    incoming, active = program.incoming(stage), program.active(stage)
    values = schedule.backward_of(stage)
    done_with = last_uses(values, schedule.used_backward, schedule.upstream_needs(stage))
    operands_of = {v: [(one, one in schedule.used_backward(v)) for one in v.operands] for v in values}
    followed = [
        (v, operands_of[v], active.training_rows(schedule.reach(v)), done)
        for v, done in zip(values, done_with, strict=True)
    ]
    pulled, passed_on = schedule.pulled(stage), program.passed_on(stage)
    learnt = schedule.learnt.get(stage)
    stepped = step_of_rows(program, stage) if program.steps_in_backward(stage) else None
    ends = {value: name for value, (_, name) in passed_on.items()}
    if pulled is not None and pulled.finds_upstream and not isinstance(pulled, EdgeAggregate):
        ends[pulled] = names.of("dp", pulled)
    places = gradient_places(values, ends)

    def backward(gradients: GradientRows, known: KnownRows, tile: Tile, rows: Rows) -> Tensors:
        for value, name, scaling in incoming:
            gradient = typed(tile.inputs[name], context.network.dtype)
            if scaling is not None:
                scale = context.scale(gradient, tile, scaling, after=True)  # the scale is nowhere zero
                gradient = gradient if scale is None else gradient / scale
            gradients.add(value, shaped(gradient, value.tail))
        for value, used, stop, done in followed:
            operands = list[Tensor | None]()
            if isinstance(value, Moments):
                gradients.add(value.source, value.statistics.gradient(known[value.source]))
            elif value in gradients and tile.start < stop:
                operands += (known[operand] if needed else known.get(operand) for operand, needed in used)
            else:  # rows from ``stop`` on reach no loss: zero, if there is one
                gradients.pop(value, None)
                rows.tape.pop(value, None)
            for need in done:
                known.pop(need, None)
            if value in gradients:
                _propagate(value, gradients, operands, tile, rows, places.get(value))
        height = tile.stop - tile.start
        out: Tensors = {}
        if isinstance(pulled, EdgeAggregate) and not isinstance(pulled, Opaque) and pulled.finds_upstream:
            result = or_zeros(gradients.get(pulled), pulled.groups * pulled.result, height).contiguous()
            target = None if pulled.target is None else known[pulled.target]
            sums, d_target = pulled.upstream(result, known[pulled], target)
            out[names.of("dp", pulled)] = sums
            if d_target is not None and pulled.target is not None and pulled.target.trains:
                out[names.of("dt", pulled)] = d_target
        elif pulled is not None and pulled.finds_upstream:
            found = gradients.get(pulled)
            name = names.of("dp", pulled)
            if found is not None:
                room = tile.room(name, found.shape[0]) if found.dim() == 2 else None
                room = found if room is None and pulled in gradients.own and pulled not in passed_on else room
                found = context.scaled(found, tile, pulled.scaling, room, after=True)
            out[name] = or_zeros(found, pulled.columns, height)
        for value, (prior, name) in passed_on.items():
            if prior is not None:
                gradients.add(value, shaped(tile.inputs[prior], value.tail))
            out[name] = or_zeros(gradients.get(value), value.columns, height)
        if learnt is not None:
            found = or_zeros(gradients.get(learnt), learnt.columns, height)
            if stepped is not None:
                return out | stepped(tile, found)
            out[embedding_gradient(learnt.space)] = found
            if context.embedding is not None and context.embedding.clip_norm is not None:
                tile.squares = float(found.double().square().sum())
        return out

    def or_zeros(gradient: Tensor | None, columns: int, height: int) -> Tensor:
        """Return the gradient as [height, columns], with zeros if there is none."""
        if gradient is None:
            return torch.zeros(height, columns, dtype=context.network.dtype, device=context.place)
        return shaped(gradient, (columns,))

    return backward


def _propagate(
    value: Value, gradients: GradientRows, operands: list[Tensor | None], tile: Tile, rows: Rows, place: str | None
) -> None:
    """Propagate the gradient of ``value`` to its inputs and parameters; ``operands`` may be freed on the way.

    The gradient of a product's input may be computed where the rows of the matrix ``place`` are stored.
    """
    gradient, is_own = gradients.take(value)
    if isinstance(value, Projection):
        out = None if value.source in gradients else tile.room(place, gradient.shape[0])
        found, is_own = value.backward(gradient, operands, rows, out), True
    elif isinstance(value, (Rectified, Sigmoidal)):
        found, is_own = value.backward(gradient, operands, rows, over=is_own), True
    else:
        found, is_own = value.backward(gradient, operands, rows), is_own and passes_gradient_on(value)
    del gradient
    tile.gradients += found.parameters
    for source, part in zip(value.inputs, found.inputs, strict=True):
        if part is not None and source.trains:
            gradients.add(source, part, is_own=is_own)
    tile.moment_gradients += found.moments


# ---- the rows of an embedding ---------------------------------------------------------------------------------------


def step_of_rows(program: Program, stage: int) -> Callable[[Tile, Tensor], Tensors]:
    """Return the function that steps a tile's rows of the embedding at the first ``stage``.

    It takes the tile, with its rows of the embedding and of optimizer state, and their gradient; it returns the new
    rows.
    """
    stepping = program.context.embedding
    assert stepping is not None
    name, *states = program.learnt_matrices(stage)

    def stepped(tile: Tile, gradient_RD: Tensor) -> Tensors:
        kept = [tile.inputs[state] for state in states]
        rows_RD, kept = stepping.optimizer.step(
            tile.inputs[name], gradient_RD, kept, lr=stepping.lr, number=stepping.number
        )
        tile.diverged = bool((rows_RD * 0).sum() != 0)  # takes a tenth of the time of isfinite
        return {name: rows_RD, **dict(zip(states, kept, strict=True))}

    return stepped


def _step(program: Program, stage: int) -> Step:
    stepped, context, space = step_of_rows(program, stage), program.context, program.schedule.learnt[stage].space
    stepping, gradients = context.embedding, embedding_gradient(space)
    assert stepping is not None

    def compute(tile: Tile) -> Tensors:
        found, height = stepping.clipped(tile.inputs[gradients], context.network), tile.stop - tile.start
        return stepped(tile, F.pad(found, (0, 0, 0, height - len(found))))

    matrices = program.learnt_matrices(stage)
    loads, title = (gradients, *matrices), f"step {space}".rstrip()
    nothing = Recipe((), (), pulled=False)
    return program.step(compute, title, stage, program.active(stage).nodes, nothing, loads=loads, stores=matrices)
