# SPDX-License-Identifier: Apache-2.0
"""Forward stages that are run again, right before the backward stage that needs their values.

Of a *recomputed* stage nothing is kept for the backward pass, and what no later forward stage reads is not even
written. Before the backward stage that needs such a value, the forward stages from the nearest kept values up to the
value's own stage are run again: on their own rows in the same tiles, with the same functions and the same masks, so
that the values have the same bits. Each stores what the next one pulls and loads, and the last one what the backward
stage needs, in separate matrices that last until the last backward stage that reads them:

    z2 recomputed  …   loss   forward 1   forward 2   backward 2   backward 1
    loads                     z1                      z2.2         z1
    pulls              m3                 m2.2        dp3          dp2
    stores             dp3    m2.2        z2.2        dp2

What an attention or a maximum pulls of stages before any aggregation can be recomputed, too: its backward reads a row's
own values next to what it pulls, and then only the features are kept.

Recomputing a chain of values from the nearest kept one is checkpointing (T. Chen, B. Xu, C. Zhang and C. Guestrin,
arXiv:1604.06174, 2016); the planner chooses which values are kept.

Pure: nothing here computes anything.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from ooc.model.layers.opaque import Opaque
from ooc.model.layers.per_edge import EdgeAggregate
from ooc.model.lowering.values import Aggregate, Value
from ooc.stages.schedule import Recipe, Schedule, in_order


@dataclass(frozen=True, slots=True)
class Forward:
    """One run of forward stage ``stage``: ``recipe`` computes the kept ``values`` and what ``messages`` pull."""

    stage: int
    recipe: Recipe
    values: tuple[Value, ...]
    messages: tuple[Aggregate, ...]


class Recomputation:
    """The stages of ``schedule`` with ``recomputed`` ones run again.

    With ``first_messages``, the first stages are run again, too, for what attentions pull of them
    (``first_messages_of``).
    """

    def __init__(self, schedule: Schedule, recomputed: Collection[int], *, first_messages: bool = False) -> None:
        assert not recomputed or set(recomputed) <= set(recomputable(schedule)), "a stage that cannot be run again"
        self._schedule = schedule
        self._messages = {schedule.source_stage(a): a for a in first_messages_of(schedule)} if first_messages else {}
        self._recomputed = frozenset(recomputed)
        self._read: set[Value] = set()
        """What later forward stages load, including the loss with its part of the backward pass, and the targets' own
        rows."""
        if recomputed:
            pulled = (schedule.pulled(stage) for stage in range(schedule.last + 1))
            self._read.update(one.target for one in pulled if isinstance(one, EdgeAggregate) and one.target is not None)
            self._read.update(self.loss_recipe().leaves)
            for stage in range(schedule.last - 1, -1, -1):
                self._read.update(self.forward(stage).recipe.leaves)
        self.made: dict[Value, int] = {}
        """What the backward pass has recomputed, with the backward stage that needs it first."""
        last = schedule.last if self._recomputed else schedule.first_stages if self._messages else 0
        self.before = {stage: self._repeat(stage) for stage in range(last - 1, -1, -1)}
        """By stage, what is run again before its backward, in order."""

    # ---- forward ----------------------------------------------------------------------------------------

    def loss_recipe(self) -> Recipe:
        """Return the recipe of the last stage for its output and for what its backward needs."""
        schedule, last = self._schedule, self._schedule.last
        return schedule.recipe([schedule.output, *schedule.backward_needs(last)], last, forced=schedule.recorded(last))

    def forward(self, stage: int) -> Forward:
        """Return the epoch's own run of ``stage``, which also computes what moments are taken of.

        Of recomputed values, only those that later forward stages read are stored.
        """
        schedule = self._schedule
        kept = [v for v in schedule.values if v in schedule.kept and schedule.stage[v] == stage]
        stored = tuple(v for v in kept if not self._is_recomputed(v) or v in self._read)
        messages = tuple(schedule.messages(stage))
        barriers = (*messages, *schedule.moments(stage))
        recipe = schedule.recipe([*stored, *(barrier.inputs[0] for barrier in barriers)], stage)
        return Forward(stage, recipe, stored, messages)

    # ---- backward ---------------------------------------------------------------------------------------

    def backward_recipe(self, stage: int) -> Recipe:
        """Return the recipe for what the backward of ``stage`` needs, for the rows that need it."""
        recipe = self._schedule.backward_recipe(stage)
        return replace(recipe, recomputed={v: self.made[v] for v in recipe.leaves if v in self.made})

    def made_for(self, message: Aggregate) -> int | None:
        """Return the backward stage for which what ``message`` pulled is recomputed; None: it is kept."""
        stage = self._schedule.source_stage(message)
        return stage if self._messages.get(stage) is message else None

    def _repeat(self, backward: int) -> list[Forward]:
        """Return what is run again before the stage ``backward``; later backward stages already have theirs."""
        schedule = self._schedule
        values: dict[int, set[Value]] = defaultdict(set)
        messages: dict[int, set[Aggregate]] = defaultdict(set)

        def want(leaves: Iterable[Value]) -> list[Value]:
            missing = [leaf for leaf in leaves if self._is_recomputed(leaf) and leaf not in self.made]
            for leaf in missing:
                values[schedule.stage[leaf]].add(leaf)
            return missing

        self.made |= dict.fromkeys(want(schedule.backward_recipe(backward).leaves), backward)
        if backward in self._messages:
            messages[backward].add(self._messages[backward])
        found: list[Forward] = []
        for stage in range(schedule.last - 1, -1, -1):  # a stage's needs come from earlier ones
            kept, pulled = in_order(values[stage]), in_order(messages[stage])
            if not kept and not pulled:
                continue
            recipe = self._recipe(stage, [*kept, *(aggregate.source for aggregate in pulled)])
            want(recipe.leaves)
            own = schedule.pulled(stage)
            if recipe.pulled and own is not None:
                messages[schedule.source_stage(own)].add(own)
            made = {leaf: self.made.get(leaf, backward) for leaf in recipe.leaves if self._is_recomputed(leaf)}
            found.append(Forward(stage, replace(recipe, recomputed=made, repeated=backward), kept, pulled))
        return found[::-1]

    def _recipe(self, stage: int, targets: Sequence[Value]) -> Recipe:
        """Return the recipe from what is kept of ``stage`` or, if that is not enough, from what it pulls."""
        if stage not in self._recomputed:
            recipe = self._schedule.recipe(targets)
            if not recipe.pulled:
                return recipe
        return self._schedule.recipe(targets, stage)

    def _is_recomputed(self, value: Value) -> bool:
        return value in self._schedule.kept and self._schedule.stage[value] in self._recomputed


def recomputable(schedule: Schedule) -> tuple[int, ...]:
    """Return the stages that may be recomputed.

    They are those of which the backward pass reads something, up to the first attention or maximum, whose result is
    kept with what its own backward needs. First stages, which pull nothing, are excluded: what they keep is always
    computed from constants wherever it is needed (``Schedule``).
    """
    read = {schedule.stage[leaf] for leaf in read_backward(schedule)}
    found = []
    for stage in range(schedule.first_stages, schedule.last):
        if isinstance(schedule.pulled(stage), EdgeAggregate):
            break
        if stage in read:
            found.append(stage)
    return tuple(found)


def first_messages_of(schedule: Schedule) -> tuple[EdgeAggregate, ...]:
    """Return the attentions and maxima whose backward reads own rows of what they pulled of first stages.

    First stages make these from constants. Aggregations whose targets pull them once more are excluded.
    """
    found = (schedule.pulled(stage + 1) for stage in range(min(schedule.first_stages, schedule.last)))
    return tuple(
        above
        for above in found
        if isinstance(above, EdgeAggregate)
        and not isinstance(above, Opaque)
        and above.source.trains
        and not (above.pulls_targets and above.trains_target)
    )


def read_backward(schedule: Schedule) -> tuple[Value, ...]:
    """Return what the stages before the last one keep for the backward pass."""
    leaves = (leaf for stage in range(schedule.last) for leaf in schedule.backward_recipe(stage).leaves)
    return in_order({leaf for leaf in leaves if leaf in schedule.kept})
