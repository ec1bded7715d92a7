# SPDX-License-Identifier: Apache-2.0
"""The programs of a network: training, scoring, both at once, predicting, and the preparation that is computed once."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any

import torch

from ooc.kernels.tensors import typed
from ooc.model.graph import ActiveRows, AnyScaling, ends_of
from ooc.model.lowering.values import Aggregate, Value
from ooc.plan.workload import ALL_ROWS, Kept, Pull, Stage
from ooc.stages.backward import backward_steps, loss_step
from ooc.stages.context import Sink, StageContext, Step, Tensors, Tile
from ooc.stages.forward import forward_steps, output_step, score_step
from ooc.stages.program import Program
from ooc.stages.recomputation import first_messages_of, read_backward, recomputable
from ooc.stages.schedule import Schedule
from ooc.storage.types import features_name

_SCALED_NUMBERS = 1 << 17
"""Numbers scaled at a time on the CPU, before and after gathering, or a single row.

They take half a megabyte: a tile leaves no more to be scaled than a core's cache holds.
"""
_SLAB_COLUMNS = 8
"""Columns of the narrowest slab."""


def _widths_of_parts(columns: int) -> list[int]:
    """Return the widths of parts of ``columns``, such that there are about as many parts as slabs in each."""
    width = -(-isqrt(_SLAB_COLUMNS * columns) // _SLAB_COLUMNS) * _SLAB_COLUMNS
    return [min(width, columns - first) for first in range(0, columns, width)]


@dataclass(kw_only=True, eq=False)
class StageBuilder(StageContext):
    """A builder of the steps of a network's programs on a graph, which also adds up what tiles contribute.

    ``aggregated``: the existing matrices A(X). ``recomputed_stages``: the forward stages of which nothing is kept for
    the backward pass. For stage 0, values that depend on x and A(X) only are computed wherever they are needed, in all
    programs, and what attentions pull of first stages is recomputed. ``epoch`` is set before each run of a training
    program. Tiles are computed in any order and on any thread, and only read this object; ``reduce`` adds their sums,
    in the order of the stage's rows, whatever the plan.
    """

    aggregated: Collection[str]
    recomputed_stages: Collection[int]
    in_parts: bool = False

    def __post_init__(self) -> None:
        network, of_constants = self.network, 0 in self.recomputed_stages
        schedule = Schedule(network.training, training=True, recompute=of_constants)
        self._training = Program(self, schedule, self.recomputed_stages)
        self._evaluation = Program(self, Schedule(network.evaluation, training=False, recompute=of_constants))

    @property
    def recomputed(self) -> dict[str, tuple[int, int]]:
        """Matrices that the backward pass recomputes instead of having them kept: (rows, columns)."""
        program, schedule = self._training, self._training.schedule
        recomputed = schedule.dropped.union(program.recomputation.made)
        stages = ((v, schedule.stage[v]) for v in schedule.values if v in recomputed)
        return {
            program.names.value(v): (program.active(stage).training_rows(schedule.stage_hops[stage]), v.columns)
            for v, stage in stages
        }

    @property
    def kept(self) -> tuple[Kept, ...]:
        """What forward stages keep for the backward pass; all first stages together have the number 0."""
        program, schedule = self._training, self._training.schedule
        waiting: dict[int, list[Value]] = {}
        for value in read_backward(schedule):
            if value not in program.recomputation.made:
                stage = schedule.stage[value]
                waiting.setdefault(0 if stage < schedule.first_stages else stage, []).append(value)
        recomputed = {*recomputable(schedule), *({0} if schedule.of_constants.issuperset(waiting.get(0, ())) else ())}
        found = {stage: tuple(map(program.names.value, values)) for stage, values in waiting.items()}
        messages = [a for a in first_messages_of(schedule) if program.recomputation.made_for(a) is None]
        if messages and self.on_device:  # not measured on the CPU
            found[0] = tuple(program.names.of("m", aggregate) for aggregate in messages)
            recomputed.add(0)
        return tuple(Kept(stage, matrices, stage in recomputed) for stage, matrices in sorted(found.items()))

    @property
    def most_gradients(self) -> int:
        """The most numbers in the parameter gradients that one tile leaves, over all stages."""
        schedule = self._training.schedule

        def of(stage: int) -> int:
            ends = (schedule.pulled(at) for at in (stage, stage + 1) if at <= schedule.last)
            values = [*schedule.backward_of(stage), *(value for value in ends if value is not None)]
            return sum(value.gradient_numel for value in values)

        return max(map(of, range(schedule.last + 1)))

    def reduce(self, tile: Tile) -> None:
        """Add a computed tile's contribution to gradients, moments, loss and scores."""
        for summed, gradient in tile.gradients:
            assert summed.grad is not None, "there are zeros to add to"
            summed.grad.add_(gradient)
        for moments, part in tile.moments:
            if tile.start == 0:
                moments.statistics.begin()
            moments.statistics.add(part, rows=self.active.of(moments.space).nodes)
        for moments, *found in tile.moment_gradients:
            moments.statistics.add_gradients(*found)
        if self.embedding is not None:
            self.embedding.diverged |= tile.diverged
            self.embedding.squares += tile.squares
        self.objective.reduce(tile)

    # ---- the programs -------------------------------------------------------------------------------

    def prepare(self) -> list[Step]:
        """Return the steps of what is computed once: t · A(s · x) and further hops that the network uses, scaling by
        scaling."""
        constants = [v for program in (self._training, self._evaluation) for v in program.constants()]
        steps: list[Step] = []
        for scaling in self.network.scalings:
            wanted = {v.hops: v for v in constants if v.scaling == scaling}
            if wanted and not (max(wanted) == 1 and self.network.first_aggregation(scaling) in self.aggregated):
                steps += self._aggregate_once(scaling, wanted)
        return steps

    def _aggregate_once(self, scaling: AnyScaling, wanted: Mapping[int, Aggregate]) -> list[Step]:
        """Return the steps for one scaling; ``wanted``: the aggregates by hop.

        With ``in_parts``, x is divided into matrices of some columns, each of which goes through all hops, and the
        results are concatenated. A pass then has blocks of the slabs of one part in memory, not of all.
        """
        network, (source, target) = self.network, ends_of(scaling)
        x, sources = features_name(source), self.active.of(source).nodes
        other = "" if scaling == network.scalings[0] else f".{scaling.label}"
        so = f" by {scaling.value}" if other else ""
        kept = {hop: network.first_aggregation(scaling, hop) for hop in sorted(wanted)}
        kept = {hop: name for hop, name in kept.items() if name not in self.aggregated}
        columns = self.columns[x]
        widths = _widths_of_parts(columns) if self.in_parts else [columns]

        def scale(stores: Sequence[str]) -> Step:
            self.columns |= zip(stores, widths, strict=True)

            def scaled(tile: Tile) -> Tensors:
                of_tile = tile.inputs[x] if self.sparse is None else tile.inputs[x].dense()
                rows = typed(of_tile, network.dtype)
                del of_tile
                rows = self.scaled(rows, tile, scaling)
                return dict(zip(stores, torch.split(rows, widths, dim=1), strict=True))

            return Step(
                self._independent_spec(f"scale x{so}", sources, columns, stores, loads=(x,), space=source), scaled
            )

        if len(widths) == 1:
            return [scale([f"mx1{other}"]), *self._hops(scaling, wanted, kept, columns, other, so)]
        parts = [f".{part}{other}" for part in range(len(widths))]
        steps = [scale([f"sx{part}" for part in parts])]
        for number, (part, width) in enumerate(zip(parts, widths, strict=True), start=1):
            at = f"{so}, part {number}"
            steps.append(self._concatenated(f"slice x{at}", source, (f"sx{part}",), f"mx1{part}", width))
            steps += self._hops(scaling, wanted, {hop: f"gx{hop}{part}" for hop in kept}, width, part, at)
        for hop, name in kept.items():
            title, found = f"put x side by side{so} ({hop})", tuple(f"gx{hop}{part}" for part in parts)
            steps.append(self._concatenated(title, target, found, name, columns))
        return steps

    def _hops(
        self,
        scaling: AnyScaling,
        wanted: Mapping[int, Aggregate],
        kept: Mapping[int, str],
        columns: int,
        of: str,
        so: str,
    ) -> list[Step]:
        """Return the steps from scaled features, all columns or the part ``of`` them, to those that are ``kept``, by
        hop."""
        _, target = ends_of(scaling)
        targets, last, steps = self.active.of(target).nodes, max(wanted), list[Step]()
        for hop in range(1, last + 1):
            sums, following = f"px{hop}{of}", (f"mx{hop + 1}{of}",) if hop < last else ()
            stores = (*((kept[hop],) if hop in kept else ()), *following)
            self.columns |= dict.fromkeys((sums, *stores), columns)

            def compute(
                tile: Tile, sums: str = sums, stores: Sequence[str] = stores, following: Sequence[str] = following
            ) -> Tensors:
                rows = self.scaled(tile.inputs.pop(sums), tile, scaling, after=True)
                return {name: self.scaled(rows, tile, scaling) if name in following else rows for name in stores}

            pull = Pull(f"mx{hop}{of}", sums, self.direction(scaling), edge_data=wanted[last].edge_data)
            title = f"aggregate x{so}" if hop == 1 else f"aggregate x again{so} ({hop})"
            spec = self._independent_spec(title, targets, columns, stores, pull=pull, space=target)
            steps.append(Step(spec, compute, scaling))
        return steps

    def _concatenated(self, title: str, space: str, loads: tuple[str, ...], stored: str, columns: int) -> Step:
        """Return the step that concatenates the rows of some matrices."""
        self.columns[stored] = columns

        def compute(tile: Tile) -> Tensors:
            return {stored: torch.cat([tile.inputs[name] for name in loads], dim=1)}

        rows = self.active.of(space).nodes
        return Step(self._independent_spec(title, rows, columns, (stored,), loads=loads, space=space), compute)

    def _independent_spec(self, title: str, rows: int, columns: int, stores: Sequence[str], **more: Any) -> Stage:
        """Return a stage without dependencies between rows, with work before and after."""
        some = ALL_ROWS if self.on_device else max(1, _SCALED_NUMBERS // columns)
        return self._training.spec(title, rows, 2 * columns, stores=tuple(stores), rows_at_once=some, **more)

    def train(self) -> list[Step]:
        """Return the training program: forward stage by stage, the loss and its gradient, backward stage by stage."""
        program = self._training
        return [*forward_steps(program, ActiveRows.training_rows), loss_step(program), *backward_steps(program)]

    def evaluate(self) -> list[Step]:
        """Return the evaluation program: forward in evaluation mode, then every split scored."""
        program = self._evaluation
        return [*forward_steps(program, ActiveRows.scoring_rows), score_step(program)]

    def train_and_score(self) -> list[Step]:
        """Return ``train``, scored before the weights change, with a forward pass that extends as far as that of
        ``evaluate``.

        It can replace both programs where training computes the same function as evaluation
        (``Network.same_in_evaluation``). Its losses and scores have the same bits as those of the two programs, since
        both divide rows into the same tiles.
        """
        program = self._training
        steps = forward_steps(program, ActiveRows.scoring_rows)
        if self.active.training_rows(0) == self.active.scoring_rows(0):
            return [*steps, loss_step(program, scored=True), *backward_steps(program)]
        return [*steps, score_step(program), loss_step(program), *backward_steps(program)]

    def predict(self, layer: int, sink: Sink, node_type: str = "") -> list[Step]:
        """Return the program that hands the outputs of convolution ``layer`` with its activation to ``sink``, in
        evaluation mode.

        Layer 0 is the embedding of nodes of ``node_type``. ``active.scoring`` counts hops from the wanted rows, those
        of layer ``layer``.
        """
        target = self.network.layer(layer, node_type)
        program = Program(self, Schedule(target, training=False, recompute=False))
        return [*forward_steps(program, ActiveRows.scoring_rows), output_step(program, sink)]
