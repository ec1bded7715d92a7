# SPDX-License-Identifier: Apache-2.0
"""When each value of a network is computed, over which rows, and which values are kept for later.

Aggregates and moments need all rows of their input first: each begins a stage, in the order of the network. A stage's
other values are local. What a later stage or the backward pass needs of an earlier stage is either kept (written once
and read at each use) or computed again from what is kept. Kept are

- the *head* of a stage: the end of the chain of sums after the pulled matrix, before the first norm or activation. From
  it the rest of the stage is recomputed by a few element-wise operations. If only a ReLU or tanh uses it, its result is
  kept instead;
- the input of a linear map, where that is the pulled matrix: its weight's gradient needs it;
- the result of an attention or a maximum with what its backward needs, and the targets' own rows in it;
- a value that a later stage needs and that depends on several kept values or on another dense product; or rather, the
  last sum on the way there;
- the signs of a rectifier's input, a bit per value, where the backward of its stage needs nothing else of it.

In a heterogeneous graph a stage is over the rows of one node type, and each type has a first stage. The backward of the
stage before an aggregation pulls the gradient of what that aggregation has pulled, so that stage has to be over the
rows of the aggregation's source. Where it would not be, a *relay* is inserted, a stage that only does that. A product
for this aggregation alone that is wider than its input is also made in the relay; otherwise the products for all edge
types, and their gradients, would have to wait for their turns.

Pure: nothing here computes anything.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from ooc.model.layers.opaque import Opaque
from ooc.model.layers.per_edge import EdgeAggregate
from ooc.model.lowering.network import EVERYWHERE, hops, values_of
from ooc.model.lowering.projection import Linear, Projection
from ooc.model.lowering.rectified import ExponentialLinear, Rectified, Sigmoidal, Signs
from ooc.model.lowering.values import (
    Aggregate,
    Dropout,
    EmbeddingRows,
    Features,
    Moments,
    Rowwise,
    Sum,
    Value,
)

V = TypeVar("V", bound=Value)


def is_constant(value: Value) -> bool:
    """Return whether the value exists before the first stage and throughout: features, their aggregates, an
    embedding."""
    return isinstance(value, (Features, EmbeddingRows)) or (isinstance(value, Aggregate) and value.once)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to obtain ``targets``: load ``leaves``, then compute ``order``. ``pulled``: it needs what the stage pulls.

    ``reach``: for each value, the hops before the output up to which its rows are needed; every row of values without
    an entry. ``recomputed``: the leaves that are recomputed (``recomputation``), with the backward stage they are for;
    ``repeated``: the backward stage for which this recipe itself is run again.
    """

    leaves: tuple[Value, ...]
    order: tuple[Value, ...]
    pulled: bool
    targets: tuple[Value, ...] = ()
    reach: Mapping[Value, int] = field(default_factory=dict)
    recomputed: Mapping[Value, int] = field(default_factory=dict)
    repeated: int | None = None


class Schedule:
    """The stages of ``output``. ``training``: with a backward pass; ``recompute``: values from constants are not kept.

    ``stage``: the stage in which a value is first available; ``barriers[s]``: what stage s begins with (None: first
    stages and relays); ``spaces[s]``: the node type of its rows; ``first_stages``: how many precede any aggregation;
    ``learnt``: by first stage, the embedding of its rows; ``kept``: the kept values; ``users``: the values that take a
    value as input.
    """

    def __init__(self, output: Value, *, training: bool, recompute: bool) -> None:
        self.output = output
        self.values = values_of(output)
        if training:  # with the signs that rectifiers may need for gradients
            signs = [value.signs for value in self.values if isinstance(value, Rectified)]
            self.values = list(in_order([*self.values, *signs]))
        self.users: dict[Value, list[Value]] = {value: [] for value in self.values}
        for value in self.values:
            for source in dict.fromkeys(() if is_constant(value) or isinstance(value, Signs) else value.inputs):
                self.users[source].append(value)
        self.spaces = [*dict.fromkeys(value.space for value in self.values if is_constant(value))]
        self.first_stages = len(self.spaces)
        self.barriers: list[Value | None] = [None] * self.first_stages
        self._training = training
        self.stage: dict[Value, int] = {}
        self.hops = hops(output)
        for value in self.values:
            self._enter(value)
        self.learnt = {self.stage[value]: value for value in self.values if isinstance(value, EmbeddingRows)}
        self.last = self.stage[output]
        self.kept: set[Value] = set()
        self.of_constants: set[Value] = set()
        """The values that are kept, or would be, and depend only on features and their aggregates."""
        for stage in range(self.last):
            self._choose_kept(stage, training)
        self._keep_rectified()
        self.dropped = self.of_constants if recompute else set()
        """The values that are not kept because of ``recompute``."""
        self.kept -= self.dropped
        if training:
            for stage in range(self.last):
                self._keep_signs(stage)
        self.stage_hops = self._stage_hops(training)

    def _enter(self, value: Value) -> None:
        if is_constant(value):
            self.stage[value] = self.spaces.index(value.space)  # the first stage over its rows
            return
        if isinstance(value, Signs):
            self.stage[value] = self.stage[value.source]
            self.hops[value] = self.hops[value.source]
            return
        if isinstance(value, (Aggregate, Moments)):
            source, pulls = value.source, isinstance(value, Aggregate)
            product = pulls and self._serves_one_aggregate(source, value)
            is_pulled_back = pulls and self._training and source.trains and not isinstance(value, Opaque)
            if (product or is_pulled_back) and self.spaces[-1] != source.space:
                self._begin(None, source.space)
            if product:
                self.stage[source] = len(self.barriers) - 1
            self.stage[value] = self._begin(value, value.space)
        else:
            self.stage[value] = max((self.stage[source] for source in value.inputs), default=0)

    def _serves_one_aggregate(self, source: Value, aggregate: Value) -> bool:
        """Return whether ``source`` is better computed right before it is pulled."""
        alone = source.space != "" and self.users[source] == [aggregate]
        return alone and isinstance(source, Projection) and source.columns > source.source.columns

    def _begin(self, barrier: Value | None, space: str) -> int:
        """Begin another stage."""
        self.barriers.append(barrier)
        self.spaces.append(space)
        return len(self.barriers) - 1

    def is_idle(self, stage: int) -> bool:
        """Return whether the stage's forward has nothing to do, as in most relays, or in first stages of targets
        only."""
        stores = any(self.stage[value] == stage for value in self.kept) or self.messages(stage) or self.moments(stage)
        return len(set(self.spaces)) > 1 and not stores

    def pulled(self, stage: int) -> Aggregate | None:
        """Return what ``stage`` pulls, if it begins with an aggregation."""
        barrier = self.barriers[stage]
        return barrier if isinstance(barrier, Aggregate) else None

    def in_stage(self, stage: int) -> list[Value]:
        """Return the local values of ``stage``."""
        return [
            v
            for v in self.values
            if self.stage[v] == stage and not is_constant(v) and not isinstance(v, (Aggregate, Moments))
        ]

    def all_in_stage(self, stage: int) -> list[Value]:
        """Return the values first available in ``stage``, with what it pulls; with an embedding in a first stage."""
        before = self.learnt.get(stage, self.pulled(stage))
        return [*([before] if before is not None else []), *self.in_stage(stage)]

    def messages(self, stage: int) -> list[Aggregate]:
        """Return the aggregations that pull what ``stage`` computes."""
        return [b for b in self.barriers if isinstance(b, Aggregate) and self.source_stage(b) == stage]

    def moments(self, stage: int) -> list[Moments]:
        """Return the moments of what ``stage`` computes."""
        return [b for b in self.barriers if isinstance(b, Moments) and self.source_stage(b) == stage]

    def source_stage(self, barrier: Value) -> int:
        return self.stage[barrier.inputs[0]]

    # ---- the backward pass -------------------------------------------------------------------------------

    def backward_of(self, stage: int) -> list[Value]:
        """Return the values whose gradients are propagated in the backward of ``stage``, last first."""
        found = [v for v in self.in_stage(stage) if v.trains] + [m for m in self.moments(stage) if m.trains]
        return sorted(found, key=lambda value: -value.index)

    def reach(self, value: Value) -> int:
        """Return the hops before the output up to which rows of ``value`` have a gradient."""
        return EVERYWHERE if isinstance(value, Moments) else self.hops[value]

    def backward_needs(self, stage: int) -> dict[Value, int]:
        """Return the values whose rows the backward of ``stage`` needs, and up to how many hops before the output."""
        return _furthest((self._available(need), reach) for need, reach in self._needs(stage))

    def recorded(self, stage: int) -> list[Value]:
        """Return the values of ``stage`` that autograd differentiates, which its backward therefore has to compute."""
        return [v for v in self.backward_of(stage) if isinstance(v, Rowwise)]

    def backward_recipe(self, stage: int, needs: Mapping[Value, int] | None = None) -> Recipe:
        """Return the recipe for what the backward of ``stage`` needs, or for ``needs`` of that, for the rows that need
        it."""
        recorded = self.recorded(stage)
        targets = self.backward_needs(stage) if needs is None else needs
        recipe = self.recipe(targets, forced=recorded)
        reach = dict(targets)
        for value in recorded:
            reach[value] = max(self.reach(value), reach.get(value, 0))
        for value in reversed(recipe.order):
            for source in value.inputs:
                reach[source] = max(reach[value], reach.get(source, 0))
        return replace(recipe, reach=reach)

    def used_backward(self, value: Value) -> list[Value]:
        """Return what propagating the gradient of ``value`` needs, as it is available."""
        return [*map(self._available, value.needs())]

    def upstream_needs(self, stage: int) -> tuple[Value, ...]:
        """Return what the last step of the backward, the gradient of what ``stage`` pulls, needs."""
        pulled = self.pulled(stage)
        return pulled.needs() if pulled is not None and pulled.finds_upstream else ()

    def _available(self, need: Value) -> Value:
        """Return what replaces signs that are not kept: a rectifier's result, if that is kept, or its input."""
        if not isinstance(need, Signs) or need in self.kept:
            return need
        return next(
            (
                one
                for one in self.users[need.source]
                if isinstance(one, Rectified) and is_told_by_result(one) and one in self.kept
            ),
            need.source,
        )

    def _needs(self, stage: int) -> list[tuple[Value, int]]:
        """Return what the backward of ``stage`` needs, including signs, each with the reach of the value that needs
        it."""
        values = self.backward_of(stage)
        needs = [(n, EVERYWHERE) for n in self.upstream_needs(stage)]
        return needs + [(n, self.reach(v)) for v in values for n in v.needs()]

    def later_users(self, value: Value) -> list[Value]:
        """Return the local users of ``value`` in later stages."""
        own = self.stage[value]
        return [u for u in self.users[value] if not isinstance(u, (Aggregate, Moments)) and self.stage[u] > own]

    def shares_gradient(self, value: Value) -> Aggregate | None:
        """Return the aggregation whose result has the same gradient as ``value`` gets from later stages, if there is
        one.

        That is so for what is added to an aggregation's result. t · gradient is stored anyway, to be pulled; where t is
        never zero, the gradient can be recovered from it.
        """
        later = self.later_users(value)
        if len(later) != 1 or any(isinstance(u, Aggregate) for u in self.distant_users(value)):
            return None
        user = later[0]
        pulled = self.pulled(self.stage[user])
        if pulled is None or not pulled.source.trains or pulled.scaling.basic.may_vanish:
            return None
        if isinstance(pulled, EdgeAggregate):
            return None
        if not _passes_on(user, value) or len(self.users[pulled]) != 1:
            return None
        return pulled if self._gradient_owner(user) is self._gradient_owner(pulled) else None

    def distant_users(self, value: Value) -> list[Value]:
        """Return the aggregations of ``value`` whose gradient is pulled later than in the stage after its own.

        Gradients that are scattered wait for the stage itself.
        """
        own = self.stage[value]
        aggregates = (u for u in self.users[value] if isinstance(u, Aggregate) and u.source is value)
        return [u for u in aggregates if self.stage[u] > own + 1 and not isinstance(u, Opaque)]

    def _gradient_owner(self, value: Value) -> Value:
        """Return the last value that has the same gradient as ``value``."""
        users = self.users[value]
        while len(users) == 1 and self.stage[users[0]] == self.stage[value] and _passes_on(users[0], value):
            value = users[0]
            users = self.users[value]
        return value

    # ---- what is kept ------------------------------------------------------------------------------------

    def recipe(self, targets: Collection[Value], stage: int | None = None, forced: Sequence[Value] = ()) -> Recipe:
        """Return how to obtain ``targets`` in ``stage``; None: outside of it, where nothing is pulled.

        ``forced`` values are computed as well, even if they are kept.
        """
        available = self.pulled(stage) if stage is not None else None
        leaves: set[Value] = set()
        order: set[Value] = set()
        pulled = False
        waiting = [*targets, *forced]
        while waiting:
            value = waiting.pop()
            if value in leaves or value in order or isinstance(value, Moments):
                continue
            if value is available or (isinstance(value, Aggregate) and not value.once and value not in self.kept):
                pulled = True
            elif is_constant(value) or (
                value in self.kept and value not in forced and (stage is None or self.stage[value] < stage)
            ):
                leaves.add(value)
            else:
                order.add(value)
                waiting.extend(value.inputs)
        return Recipe(in_order(leaves), in_order(order), pulled, tuple(targets))

    def _choose_kept(self, stage: int, training: bool) -> None:
        """Decide which values of ``stage`` are kept."""
        aggregates = [a for a in self.barriers if isinstance(a, EdgeAggregate)]
        own = (value for a in aggregates for value in a.own_values if self.stage[value] == stage)
        self.kept |= {value for value in own if not is_constant(value)}
        needs = [n for n in self._more_than_signs(stage) if self.stage[n] == stage] if training else []
        later = [n for s in range(stage + 1, self.last + 1) for n in self._more_than_signs(s)] if training else []
        crossing = {}
        for value in [*self.in_stage(stage), *filter(None, [self.pulled(stage)])]:
            uses = len({self.stage[user] for user in self.later_users(value)})
            if uses or value in later:
                crossing[value] = uses + (value in later) + (value in needs)
        for value in in_order({*needs, *crossing}):
            self._make_available(value, stage, uses=crossing.get(value, 0))

    def _more_than_signs(self, stage: int) -> list[Value]:
        return list(dict.fromkeys(need for need, _ in self._needs(stage) if not isinstance(need, Signs)))

    def _keep_signs(self, stage: int) -> None:
        """Keep the signs that the backward of ``stage`` needs for rows it would not have otherwise."""
        needs = self._needs(stage)
        recipe = self.backward_recipe(stage, _furthest(need for need in needs if not isinstance(need[0], Signs)))
        at_hand = {*recipe.leaves, *recipe.order}
        for need, reach in needs:
            known = self._available(need)
            if isinstance(need, Signs) and (known not in at_hand or recipe.reach[known] < reach):
                self.kept.add(need)

    def _keep_rectified(self) -> None:
        """Keep a ReLU's or tanh's result instead of an input that nothing else uses.

        The result suffices for the gradient, and need not be recomputed wherever it is used.
        """
        for value in in_order(self.kept):
            users = self.users[value]
            if len(users) == 1 and is_told_by_result(users[0]) and self.stage[users[0]] == self.stage[value]:
                for kept in (self.kept, self.of_constants):
                    if value in kept:
                        kept.remove(value)
                        kept.add(users[0])

    def _make_available(self, value: Value, stage: int, *, uses: int) -> None:
        """Make ``value`` available outside its stage: for ``uses`` later stages, or (0) for its backward only."""
        if value in self.kept or is_constant(value):
            return
        recipe = self.recipe([value])
        if recipe.pulled:
            path = self._linear_path(stage)
            self.kept.add(value if value in path else path[-1])
            recipe = self.recipe([value])
        if value in self.kept:
            return
        constant, heavy = all(map(is_constant, recipe.leaves)), any(one.heavy for one in recipe.order)
        if uses:
            wanted = len(recipe.leaves) > 1 or (heavy and uses > 1)
        else:
            foreign = any(self.stage[leaf] != stage for leaf in recipe.leaves)
            wanted = heavy and (constant or foreign)
        if wanted and isinstance(value, Linear) and uses == 1 and self.stage[value.source] == stage:
            self._make_available(value.source, stage, uses=1)
        elif wanted:
            anchor = self._anchor(value, stage)
            self.kept.add(anchor)
            if constant:
                self.of_constants.add(anchor)

    def _linear_path(self, stage: int) -> list[Value]:
        """Return the chain from what ``stage`` pulls along sums and at most one linear map, each the only user of the
        one before."""
        pulled = self.pulled(stage)
        assert pulled is not None
        path: list[Value] = [pulled]
        products = 0
        while len(self.users[path[-1]]) == 1:
            user = self.users[path[-1]][0]
            products += isinstance(user, Linear)
            if self.stage[user] != stage or not isinstance(user, (Sum, Linear)) or products > 1:
                break
            path.append(user)
        return path

    def _anchor(self, value: Value, stage: int) -> Value:
        """Return ``value``, or the value it is computed from by element-wise operations: the better one to keep for
        backward."""
        light = (Dropout, Rectified, Sigmoidal, ExponentialLinear, Rowwise)
        while isinstance(value, light) and not value.heavy:
            sources = rows_in(value)
            if len(sources) != 1 or self.stage[sources[0]] != stage or is_constant(sources[0]):
                break
            value = sources[0]
        return value

    def _stage_hops(self, training: bool) -> list[int]:
        """Return, for each stage, the most hops before the output of what it computes.

        A stage has all rows that later stages of its node type have. In ``training`` it also has those of the next
        sum's source, whose gradient its backward pulls, since an earlier stage may have computed the source for more
        rows.
        """
        found: list[int] = []
        later: dict[str, int] = {}
        for stage in range(self.last, -1, -1):
            own = [self.hops[v] for v in self.in_stage(stage)]
            own += [self.hops[a.source] for a in self.messages(stage)]
            own += [self.hops[m.source] for m in self.moments(stage)]
            above = self.pulled(stage + 1) if stage < self.last else None
            if training and above is not None and above.source.trains and not isinstance(above, Opaque):
                own.append(self.hops[above.source])
            space = self.spaces[stage]
            later[space] = max([*own, later.get(space, 0)])
            found.append(later[space])
        return found[::-1]


def is_told_by_result(value: Value) -> bool:
    """Return whether a value's result suffices to compute its gradient."""
    return isinstance(value, Sigmoidal) or (isinstance(value, Rectified) and value.slope is None)


def _passes_on(user: Value, value: Value) -> bool:
    """Return whether ``user`` is a sum that passes its own gradient on to ``value``."""
    if not isinstance(user, Sum):
        return False
    factors = [factor for factor, term in zip(user.factors, user.inputs, strict=True) if term is value]
    return factors == [1.0]


def _furthest(needs: Iterable[tuple[Value, int]]) -> dict[Value, int]:
    """Return the largest reach of each value."""
    found: dict[Value, int] = {}
    for value, reach in needs:
        found[value] = max(reach, found.get(value, 0))
    return found


def rows_in(value: Value) -> list[Value]:
    """Return the inputs from which the value is computed row by row."""
    return [source for source in value.inputs if not isinstance(source, Moments)]


def last_uses(
    order: Sequence[Value], used: Callable[[Value], Iterable[Value]], kept: Iterable[Value]
) -> list[tuple[Value, ...]]:
    """Return, for each value in ``order``, those of its ``used`` values that no later one uses, except ``kept``
    ones."""
    later, found = set(kept), list[tuple[Value, ...]]()
    for value in reversed(order):
        found.append(tuple(source for source in dict.fromkeys(used(value)) if source not in later))
        later.update(found[-1])
    return found[::-1]


def kept_beyond(recipe: Recipe) -> list[Value]:
    """Return the values that remain after ``recipe`` is computed; leaves are loaded again instead."""
    return [value for value in recipe.targets if value not in recipe.leaves]


def in_order(values: Iterable[V]) -> tuple[V, ...]:
    """Return the values in the order of the network."""
    return tuple(sorted(values, key=lambda value: value.index))
