# SPDX-License-Identifier: Apache-2.0
"""The programs of a network: training, scoring, both at once, predicting, and what is prepared once."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ooc.kernels.tensors import typed
from ooc.model.graph import ActiveRows, AnyScaling, ends_of
from ooc.model.lowering.values import Aggregate, Summed, Value
from ooc.plan.workload import ALL_ROWS, Kept, Pull
from ooc.stages.backward import backward_steps, loss_step
from ooc.stages.context import Sink, StageContext, Step, Tensors, Tile
from ooc.stages.forward import forward_steps, output_step, score_step
from ooc.stages.program import Program
from ooc.stages.recomputation import first_messages_of, read_backward, recomputable
from ooc.stages.schedule import Schedule
from ooc.storage.types import features_name

_SCALED_NUMBERS = 1 << 17
"""Of what is scaled before it is gathered, and after, at a time on the CPU, or a single row: half a megabyte, which is
no more of what a tile leaves to be scaled than a core's cache holds."""


@dataclass(kw_only=True, eq=False)
class StageBuilder(StageContext):
    """Makes the steps of the programs of a network on a graph, and adds up what tiles contribute.

    ``aggregated``: the matrices A(X) that are there already. ``recomputed_stages``: the forward stages of which nothing
    is kept for the backward pass; of stage 0, what comes of x and A(X) alone is computed wherever it is needed, and in
    no program kept, and what attentions pull of first stages is made again. ``epoch`` is set before each run of a
    training program. Tiles are computed in any order and on any thread, and only read what is here; ``reduce`` adds
    their sums, in the order of the stage's rows, whatever the plan.
    """

    aggregated: Collection[str]
    recomputed_stages: Collection[int]

    def __post_init__(self) -> None:
        network, of_constants = self.network, 0 in self.recomputed_stages
        schedule = Schedule(network.training, training=True, recompute=of_constants)
        self._training = Program(self, schedule, self.recomputed_stages)
        self._evaluation = Program(self, Schedule(network.evaluation, training=False, recompute=of_constants))

    @property
    def recomputed(self) -> dict[str, tuple[int, int]]:
        """Matrices that the backward pass computes again instead of having them kept: (rows, columns)."""
        program, schedule = self._training, self._training.schedule
        recomputed = schedule.dropped.union(program.recomputation.values)
        stages = ((v, schedule.stage[v]) for v in schedule.values if v in recomputed)
        return {
            program.names.value(v): (program.active(stage).training_rows(schedule.stage_hops[stage]), v.columns)
            for v, stage in stages
        }

    @property
    def kept(self) -> tuple[Kept, ...]:
        """What forward stages keep for the backward pass; all first ones together, as number 0."""
        program, schedule = self._training, self._training.schedule
        waiting: dict[int, list[Value]] = {}
        for value in read_backward(schedule):
            if value not in program.recomputation.values:
                stage = schedule.stage[value]
                waiting.setdefault(0 if stage < schedule.first_stages else stage, []).append(value)
        recomputed = {*recomputable(schedule), *({0} if schedule.of_constants.issuperset(waiting.get(0, ())) else ())}
        found = {stage: tuple(map(program.names.value, values)) for stage, values in waiting.items()}
        messages = [a for a in first_messages_of(schedule) if program.recomputation.made_for(a) is None]
        if messages and self.on_device:  # on the CPU nobody has looked at what it is worth
            found[0] = tuple(program.names.of("m", aggregate) for aggregate in messages)
            recomputed.add(0)
        return tuple(Kept(stage, matrices, stage in recomputed) for stage, matrices in sorted(found.items()))

    @property
    def most_gradients(self) -> int:
        """Numbers in the gradients that one tile leaves of parameters, in whichever stage these are most."""
        schedule = self._training.schedule

        def of(stage: int) -> int:
            ends = (schedule.pulled(at) for at in (stage, stage + 1) if at <= schedule.last)
            values = [*schedule.backward_of(stage), *(value for value in ends if value is not None)]
            return sum(value.gradient_numel for value in values)

        return max(map(of, range(schedule.last + 1)))

    def reduce(self, tile: Tile) -> None:
        """Add what a computed tile contributes to gradients, moments, loss and scores."""
        self._add_gradients(tile.gradients)
        for moments, part in tile.moments:
            if tile.start == 0:
                moments.statistics.begin()
            moments.statistics.add(part, rows=self.active.of(moments.space).nodes)
        for moments, *found in tile.moment_gradients:
            moments.statistics.add_gradients(*found)
        if self.embedding is not None:
            self.embedding.diverged |= tile.diverged
            self.embedding.squares += tile.squares
        self.objective.reduce(tile.contribution)

    def _add_gradients(self, found: Sequence[tuple[Summed, Tensor]]) -> None:
        """By one operator, where no parameter has two gradients: a GPU would add both at once."""
        sums = [summed.grad for summed, _ in found if summed.grad is not None]
        assert len(sums) == len(found)
        if len(set(map(id, sums))) < len(sums):
            for total, (_, gradient) in zip(sums, found, strict=True):
                total.add_(gradient)
        elif found:
            torch._foreach_add_(sums, [gradient for _, gradient in found])

    # ---- the programs -------------------------------------------------------------------------------

    def prepare(self) -> list[Step]:
        """What is computed once: t · A(s · x) and further hops, as far as the network asks for them, scaling after
        scaling."""
        constants = [v for program in (self._training, self._evaluation) for v in program.constants()]
        steps: list[Step] = []
        for scaling in self.network.scalings:
            wanted = {v.hops: v for v in constants if v.scaling == scaling}
            if wanted and not (max(wanted) == 1 and self.network.first_aggregation(scaling) in self.aggregated):
                steps += self._aggregate_once(scaling, wanted)
        return steps

    def _aggregate_once(self, scaling: AnyScaling, wanted: Mapping[int, Aggregate]) -> list[Step]:
        """``wanted``: by hops."""
        program, network = self._training, self.network
        source, target = ends_of(scaling)
        x, sources, targets = features_name(source), self.active.of(source).nodes, self.active.of(target).nodes
        other = "" if scaling == network.scalings[0] else f".{scaling.label}"
        so = f" by {scaling.value}" if other else ""
        last, at_once = max(wanted), 2 * self.columns[x]  # before and after they are scaled
        some = ALL_ROWS if self.on_device else max(1, _SCALED_NUMBERS // self.columns[x])

        def message(hop: int) -> str:
            return f"mx{hop}{other}"

        def scaled(tile: Tile) -> Tensors:
            of_tile = tile.inputs[x] if self.sparse is None else tile.inputs[x].dense()
            rows = typed(of_tile, network.dtype)
            del of_tile
            return {message(1): self.scaled_before(rows, tile, scaling)}

        steps: list[Step] = []
        for hop in range(1, last + 1):
            name, sums = network.first_aggregation(scaling, hop), f"px{hop}{other}"
            kept = (name,) if hop in wanted and name not in self.aggregated else ()
            stores = (*kept, *((message(hop + 1),) if hop < last else ()))
            self.columns |= dict.fromkeys((message(hop), sums, *stores), self.columns[x])
            if hop == 1:
                spec = program.spec(
                    f"scale x{so}",
                    sources,
                    at_once,
                    loads=(x,),
                    stores=(message(1),),
                    rows_at_once=some,
                    space=source,
                )
                steps.append(Step(spec, scaled))

            def compute(tile: Tile, sums: str = sums, stores: tuple[str, ...] = stores) -> Tensors:
                rows = self.scaled_after(tile.inputs.pop(sums), tile, scaling)
                return {
                    name: self.scaled_before(rows, tile, scaling) if name.startswith("m") else rows for name in stores
                }

            pull = Pull(message(hop), sums, self.direction(scaling), edge_data=wanted[last].edge_data)
            title = f"aggregate x{so}" if hop == 1 else f"aggregate x again{so} ({hop})"
            spec = program.spec(title, targets, at_once, pull=pull, stores=stores, rows_at_once=some, space=target)
            steps.append(Step(spec, compute, scaling))
        return steps

    def train(self) -> list[Step]:
        """Forward stage by stage, the loss and its gradient, backward stage by stage."""
        program = self._training
        return [*forward_steps(program, ActiveRows.training_rows), loss_step(program), *backward_steps(program)]

    def evaluate(self) -> list[Step]:
        """Forward in evaluation mode, then every split scored."""
        program = self._evaluation
        return [*forward_steps(program, ActiveRows.scoring_rows), score_step(program)]

    def train_and_score(self) -> list[Step]:
        """``train``, its forward pass reaching as far as ``evaluate``'s and scored before the weights change: where
        training's computes what evaluation's does (``Network.same_in_evaluation``), so that one can stand for both.

        Bit for bit the losses and scores of the two programs: both cut rows into the same tiles.
        """
        program = self._training
        steps = forward_steps(program, ActiveRows.scoring_rows)
        if self.active.training_rows(0) == self.active.scoring_rows(0):
            return [*steps, loss_step(program, scored=True), *backward_steps(program)]
        return [*steps, score_step(program), loss_step(program), *backward_steps(program)]

    def predict(self, layer: int, sink: Sink, node_type: str = "") -> list[Step]:
        """Forward in evaluation mode to what convolution ``layer`` and its activation give, handed to ``sink``; 0: the
        embedding of nodes of ``node_type``.

        ``active.scoring`` counts hops from the rows that are wanted, those of layer ``layer``.
        """
        target = self.network.layer(layer, node_type)
        program = Program(self, Schedule(target, training=False, recompute=False))
        return [*forward_steps(program, ActiveRows.scoring_rows), output_step(program, sink)]
