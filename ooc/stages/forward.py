# SPDX-License-Identifier: Apache-2.0
"""The forward stages of a program, as functions of a tile of rows.

Stage s pulls what it begins with, computes its values, and stores what is kept, what is pulled next, and the tile's
part of moments. The last stage's outputs are scored or handed on; the loss is in ``backward``.

Tiles are small, and an epoch has thousands of them. What is the same for all is looked up once, outside of the
functions that are called with tiles.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor

from ooc.kernels.sparse_rows import SparseRows
from ooc.kernels.tensors import shaped, typed
from ooc.model.graph import ActiveRows
from ooc.model.layers.per_edge import EdgeAggregate
from ooc.model.lowering.network import EVERYWHERE
from ooc.model.lowering.values import Moments, Rows, Value
from ooc.stages.context import Inputs, Sink, Step, Tensors, Tile
from ooc.stages.places import Place, makes_rows, places_of, used_by_messages_only
from ooc.stages.program import Program
from ooc.stages.recomputation import Forward
from ooc.stages.schedule import Recipe, kept_beyond, last_uses, rows_in


class KnownRows(Inputs[Value]):
    """Rows of a tile's values; a loaded value stays until it is released."""

    __slots__ = ()

    def __missing__(self, value: Value) -> Any:
        rows = self[value] = self.load(value)
        return rows


def forward_steps(program: Program, rows: Callable[[ActiveRows, int], int]) -> list[Step]:
    """Return the stages before the last one; ``rows``: the active rows by hops before the output."""
    schedule, names = program.schedule, program.names
    return [
        _forward(
            program,
            names.forward(stage),
            program.recomputation.forward(stage),
            rows(program.active(stage), schedule.stage_hops[stage]),
            schedule.moments(stage),
        )
        for stage in range(schedule.last)
        if not schedule.is_idle(stage)
    ]


def recompute_steps(program: Program, backward: int) -> list[Step]:
    """Return the forward stages that are run again before the backward of stage ``backward``."""
    hops, names = program.schedule.stage_hops, program.names
    return [
        _forward(
            program,
            f"{names.forward(run.stage)} for {names.backward(backward)}",
            run,
            program.active(run.stage).training_rows(hops[run.stage]),
        )
        for run in program.recomputation.before.get(backward, ())
    ]


def _forward(program: Program, title: str, run: Forward, row_count: int, moments: Sequence[Moments] = ()) -> Step:
    """Return a forward stage, the epoch's own or one that is run again."""
    recipe, names = run.recipe, program.names
    stored = {names.value(v, recipe.repeated): v for v in run.values}
    pulled_next = {names.of("m", a, recipe.repeated): a for a in run.messages}
    program.context.packed |= {name for name, value in stored.items() if value.packed}
    sources = {name: aggregate.source for name, aggregate in pulled_next.items()}
    alone = used_by_messages_only(recipe, sources, [*run.values, *(barrier.source for barrier in moments)])
    over = {name for value, name in alone.items() if value in recipe.order and makes_rows(value)}
    ends = alone | {value: name for name, value in stored.items()}
    values_of = materialise(program, recipe, run.stage, stored=ends)

    def compute(tile: Tile) -> Tensors:
        known = values_of(tile, program.rows(tile))
        for barrier in moments:
            tile.moments.append((barrier, barrier.statistics.of_tile(known[barrier.source])))
        out = {name: shaped(known[v], (v.columns,)) for name, v in stored.items()}
        for name, aggregate in pulled_next.items():
            rows = known[aggregate.source]
            room = tile.room(name, rows.shape[0])
            out[name] = program.message(aggregate, rows, tile, rows if room is None and name in over else room)
        return out

    pulls = program.pull(recipe, run.stage, stored)
    stores = {n: v.columns for n, v in stored.items()} | {n: a.source.columns for n, a in pulled_next.items()}
    return program.step(compute, title, run.stage, row_count, recipe, pulls=pulls, stores=stores, measured=moments)


def score_step(program: Program) -> Step:
    """Return the last stage with scoring, in the row order of the loss, so that sums of scores have the same bits."""
    objective = program.context.objective
    return _last(program, "score", objective.score_inputs, objective.score, reverse=True)


def output_step(program: Program, sink: Sink) -> Step:
    """Return the last stage, whose outputs go to ``sink``."""

    def take(tile: Tile, outputs: Tensor) -> None:
        sink(tile.start, shaped(outputs, (program.schedule.output.columns,)))

    return _last(program, "outputs", (), take)


def _last(
    program: Program, title: str, inputs: Sequence[str], take: Callable[[Tile, Tensor], None], *, reverse: bool = False
) -> Step:
    schedule, context = program.schedule, program.context
    recipe = schedule.recipe([schedule.output], schedule.last)
    values_of = materialise(program, recipe, schedule.last)

    def compute(tile: Tile) -> Tensors:
        take(tile, values_of(tile, program.rows(tile))[schedule.output])
        return {}

    rows, scoring = program.active(schedule.last).scoring_rows(0), context.objective.score_operators
    return program.step(
        compute,
        title,
        schedule.last,
        rows,
        recipe,
        loads=inputs,
        reverse=reverse,
        scoring=scoring,
    )


# ---- a tile's values ----------------------------------------------------------------------------------------


def materialise(
    program: Program,
    recipe: Recipe,
    stage: int,
    recorded: Collection[Value] = (),
    *,
    stored: Mapping[Value, str] = MappingProxyType({}),
) -> Callable[[Tile, Rows], KnownRows]:
    """Return the function that computes the values of ``recipe`` in ``stage``: loaded, pulled, or computed.

    ``recorded``: values whose backward follows; ``stored``: those that end in a matrix unchanged, or scaled in place.
    The function takes a tile and returns the rows of all these values, as far as they are needed. A tile lies
    completely within the rows that reach the loss, or completely beyond them. Values are released after their last use;
    loaded ones too, and loaded again if the backward needs them, since rows in several blocks are copied.
    """
    context, names, active = program.context, program.names, program.active(stage)
    dtype = context.network.dtype
    pulled = program.schedule.pulled(stage) if recipe.pulled else None
    sums = "" if pulled is None else names.of("p", pulled, recipe.repeated)
    is_scaled = not isinstance(pulled, EdgeAggregate)

    loaded = {v: names.value(v, recipe.recomputed.get(v)) for v in recipe.leaves}
    places = places_of(recipe, pulled if is_scaled else None, stored)
    # For tiles that need the value.
    stops = {v: active.training_rows(recipe.reach.get(v, EVERYWHERE)) for v in recipe.order}
    computed = [(v, rows_in(v), stops[v], v in recorded, places.get(v)) for v in recipe.order]
    done_with = last_uses(recipe.order, rows_in, kept_beyond(recipe))

    def room(place: Place, source: Value, first_RC: Tensor, tile: Tile) -> Tensor | None:
        found = tile.room(place.matrix, first_RC.shape[0])
        if found is None and place.over and (source is not pulled or tile.pulled_is_own):
            return first_RC
        return found

    def values_of(tile: Tile, rows: Rows) -> KnownRows:
        start, inputs = tile.start, tile.inputs

        def load(value: Value) -> Any:
            matrix = inputs[loaded[value]]
            if isinstance(matrix, SparseRows):
                return matrix.typed(dtype)
            return matrix if value.packed else shaped(typed(matrix, dtype), value.tail)

        known = KnownRows(load)
        if pulled is not None and is_scaled:
            sums_RC: Tensor = inputs.pop(sums)
            over = sums_RC if tile.pulled_is_own else None
            known[pulled] = scaled_RC = context.scaled(sums_RC, tile, pulled.scaling, over, after=True)
            tile.pulled_is_own |= scaled_RC is not sums_RC
            del sums_RC, over, scaled_RC
        elif pulled is not None:
            known[pulled] = inputs.pop(sums)
        for (value, sources, stop, record, place), done in zip(computed, done_with, strict=True):
            if start < stop:
                inputs_of = [known[source] for source in sources]
                out = None if place is None else room(place, sources[0], inputs_of[0], tile)
                if out is None:
                    known[value] = value.compute(inputs_of, rows, record=record)
                else:
                    known[value] = value.compute_at(inputs_of, rows, out)
                del inputs_of, out
            for source in done:
                known.pop(source, None)
        return known

    return values_of
