# SPDX-License-Identifier: Apache-2.0
"""Forward stages run again, right before the backward stage that needs what they once had.

A stage may be *forgotten*: of what it keeps, the backward pass finds nothing, and what no later forward stage reads is
not even written. Before the backward stage that needs a forgotten value, the forward stages from the nearest ones that
are remembered up to its own are run again, each on its own rows in the same tiles, with the same functions and the same
masks: what they compute is the same to the bit. They store what the next of them pulls and loads, and the last of them
what the backward stage asked for, in matrices of their own that last until the last backward stage which reads them:

    z2 forgotten   …   loss   forward 1   forward 2   backward 2   backward 1
    loads                     z1                      z2.2         z1
    pulls              m3                 m2.2        dp3          dp2
    stores             dp3    m2.2        z2.2        dp2

That a chain of forgotten values is computed again from the nearest one that is kept is how checkpointing goes (T. Chen,
B. Xu, C. Zhang and C. Guestrin, arXiv:1604.06174, 2016); which ones are forgotten is the planner's affair.

Pure: nothing here computes anything.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from ooc.model.layers.per_edge import EdgeAggregate
from ooc.model.lowering.values import Aggregate, Value
from ooc.model.stages.schedule import Recipe, Schedule


@dataclass(frozen=True, slots=True)
class Forward:
    """One run of forward stage ``stage``: ``recipe`` computes the kept ``values`` and what ``messages`` pull."""

    stage: int
    recipe: Recipe
    values: tuple[Value, ...]
    messages: tuple[Aggregate, ...]


class Recomputation:
    """The stages of ``schedule`` where ``forgotten`` ones are run again. Nothing is where none is."""

    def __init__(self, schedule: Schedule, forgotten: Collection[int]) -> None:
        assert not forgotten or set(forgotten) <= set(recomputable(schedule)), "a stage that cannot be run again"
        self._schedule = schedule
        self._forgotten = frozenset(forgotten)
        self._read_forward = self._find_read_forward()
        self._made: dict[Value, int] = {}
        """The backward stage that a forgotten value is first computed again for."""
        last = schedule.last if self._forgotten else 0
        self._before = {stage: self._repeat(stage) for stage in range(last - 1, -1, -1)}

    # ---- forward ----------------------------------------------------------------------------------------

    def forward(self, stage: int) -> Forward:
        """The epoch's own run of ``stage``, which computes what moments are taken of besides."""
        return self._forward(stage, self._read_forward)

    def loss_recipe(self) -> Recipe:
        """How the last stage has its output and what its backward needs."""
        schedule, last = self._schedule, self._schedule.last
        recorded = schedule.recorded(last)
        return schedule.recipe([schedule.output, *schedule.backward_needs(last), *recorded], last, forced=recorded)

    def _forward(self, stage: int, read: Collection[Value]) -> Forward:
        """Of what is forgotten, only what is in ``read`` is stored."""
        schedule = self._schedule
        kept = [v for v in schedule.values if v in schedule.kept and schedule.stage[v] == stage]
        stored = tuple(v for v in kept if not self._is_forgotten(v) or v in read)
        messages = tuple(schedule.messages(stage))
        barriers = (*messages, *schedule.moments(stage))
        recipe = schedule.recipe([*stored, *(barrier.inputs[0] for barrier in barriers)], stage)
        return Forward(stage, recipe, stored, messages)

    def _find_read_forward(self) -> frozenset[Value]:
        """What later forward stages load, the loss among them, and the backward part that goes with it."""
        if not self._forgotten:
            return frozenset()
        found = {*self.loss_recipe().leaves}
        for stage in range(self._schedule.last - 1, -1, -1):
            found |= {*self._forward(stage, found).recipe.leaves}
        return frozenset(found)

    # ---- backward ---------------------------------------------------------------------------------------

    def backward_recipe(self, stage: int) -> Recipe:
        """How to have what the backward of ``stage`` needs, for the rows that need it."""
        recipe = self._schedule.backward_recipe(stage)
        return replace(recipe, recomputed={v: self._made[v] for v in recipe.leaves if v in self._made})

    def before(self, stage: int) -> Sequence[Forward]:
        """What is run again before the backward of ``stage``, in order."""
        return self._before.get(stage, ())

    @property
    def values(self) -> tuple[Value, ...]:
        """What the backward pass has computed again."""
        return tuple(self._made)

    def _repeat(self, backward: int) -> list[Forward]:
        """What is run again before the stage ``backward``, whose predecessors have theirs already."""
        schedule = self._schedule
        values: dict[int, set[Value]] = defaultdict(set)
        messages: dict[int, set[Aggregate]] = defaultdict(set)

        def want(leaves: Iterable[Value]) -> list[Value]:
            missing = [leaf for leaf in leaves if self._is_forgotten(leaf) and leaf not in self._made]
            for leaf in missing:
                values[schedule.stage[leaf]].add(leaf)
            return missing

        self._made |= dict.fromkeys(want(schedule.backward_recipe(backward).leaves), backward)
        found: list[Forward] = []
        for stage in range(schedule.last - 1, -1, -1):  # what a stage asks for comes of earlier ones
            kept, pulled = _sorted(values[stage]), tuple(sorted(messages[stage], key=lambda a: a.index))
            if not kept and not pulled:
                continue
            recipe = self._recipe(stage, [*kept, *(aggregate.source for aggregate in pulled)])
            want(recipe.leaves)
            own = schedule.pulled(stage)
            if recipe.pulled and own is not None:
                messages[schedule.source_stage(own)].add(own)
            made = {leaf: self._made.get(leaf, backward) for leaf in recipe.leaves if self._is_forgotten(leaf)}
            found.append(Forward(stage, replace(recipe, recomputed=made, repeated=backward), kept, pulled))
        return found[::-1]

    def _recipe(self, stage: int, targets: Sequence[Value]) -> Recipe:
        """From what is kept of ``stage``, or where that is forgotten or does not do, from what it pulls."""
        if stage not in self._forgotten:
            recipe = self._schedule.recipe(targets)
            if not recipe.pulled:
                return recipe
        return self._schedule.recipe(targets, stage)

    def _is_forgotten(self, value: Value) -> bool:
        return value in self._schedule.kept and self._schedule.stage[value] in self._forgotten


def recomputable(schedule: Schedule) -> tuple[int, ...]:
    """The stages that may be forgotten: those of which the backward pass reads something, up to the first attention or
    maximum, whose result is kept with what its own backward needs. Without the first stage, which pulls nothing: what
    it keeps is drawn from what is there in every epoch, wherever it is needed (``Schedule``)."""
    read = {schedule.stage[leaf] for leaf in read_backward(schedule)}
    found = []
    for stage in range(1, schedule.last):
        if isinstance(schedule.pulled(stage), EdgeAggregate):
            break
        if stage in read:
            found.append(stage)
    return tuple(found)


def read_backward(schedule: Schedule) -> tuple[Value, ...]:
    """What the stages before the last one keep for the backward pass."""
    leaves = (leaf for stage in range(schedule.last) for leaf in schedule.backward_recipe(stage).leaves)
    return _sorted({leaf for leaf in leaves if leaf in schedule.kept})


def _sorted(values: Iterable[Value]) -> tuple[Value, ...]:
    return tuple(sorted(values, key=lambda value: value.index))
