# SPDX-License-Identifier: Apache-2.0
"""When each value of a network is computed, over which rows, and which values are kept for later.

Aggregates and moments need all rows of their input first: each begins a stage, in the order of the network. A stage's
other values are local. What a later stage or the backward pass needs of an earlier one is either kept, written once
and read at each use, or computed again from what is kept. Kept are

- the *head* of a stage: where the chain of sums behind the pulled matrix ends, before the first norm or activation.
  From it the rest of the stage is computed again for the price of some element-wise work; if all that takes it is a
  ReLU or tanh, the result of that instead;
- what a linear map is given, where that is what was pulled: its weight's gradient needs it;
- the result of an attention or a maximum with what it keeps for its backward, and what targets bring to it;
- what a later stage needs and could only compute from several kept values or through another dense product, or rather
  the last sum on the way there;
- of what a rectifier is given the signs, a bit a value, where the backward of its stage needs nothing else of it.

Where nodes are of several types, a stage is over the rows of one of them, and there is a first stage for each. The
backward of the stage before an aggregation pulls the gradient of what that has pulled, so it has to be over the rows of
its source: where it would not be, a *relay* lies between the two, a stage that only does that. What is pulled is made
there, too, if it is a product for this aggregation alone and wider than what it is of: those for all types of edges
would wait for their turns otherwise, and so would their gradients.

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
    Features,
    Learnt,
    Moments,
    Rowwise,
    Sum,
    Value,
)

V = TypeVar("V", bound=Value)


def is_constant(value: Value) -> bool:
    """Whether it is there before the first stage, and until the last: the features, what is aggregated from them once,
    and an embedding."""
    return isinstance(value, (Features, Learnt)) or (isinstance(value, Aggregate) and value.once)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to have ``targets``: load ``leaves``, then compute ``order``. ``pulled``: it needs what the stage pulls.

    ``reach``: up to how many hops before the output rows of a value are needed; every row of those not in it.
    ``recomputed``: of the leaves those computed again (``recomputation``), with the backward stage that this was
    for; ``repeated``: the backward stage for which this is itself done again.
    """

    leaves: tuple[Value, ...]
    order: tuple[Value, ...]
    pulled: bool
    targets: tuple[Value, ...] = ()
    reach: Mapping[Value, int] = field(default_factory=dict)
    recomputed: Mapping[Value, int] = field(default_factory=dict)
    repeated: int | None = None


class Schedule:
    """The stages of ``output``. ``training``: with a backward pass; ``recompute``: what comes of constants is not kept.

    ``stage`` says when a value is first there, ``barriers[s]`` what stage s begins with (None: first stages and
    relays), ``spaces[s]`` the type of its rows, ``first_stages`` how many come before any aggregation, ``learnt`` by
    first stage the embedding of its rows, ``kept`` what is kept, ``users`` who takes a value as input.
    """

    def __init__(self, output: Value, *, training: bool, recompute: bool) -> None:
        self.output = output
        self.values = values_of(output)
        if training:  # and what the rectifiers among them may need for their gradients
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
        self.learnt = {self.stage[value]: value for value in self.values if isinstance(value, Learnt)}
        self.last = self.stage[output]
        self.kept: set[Value] = set()
        self.of_constants: set[Value] = set()
        """What is kept, or would be, and comes of the features and of what is aggregated from them once."""
        for stage in range(self.last):
            self._choose(stage, training)
        self._keep_rectified()
        self.dropped = self.of_constants if recompute else set()
        """What would be kept but for ``recompute``."""
        self.kept -= self.dropped
        if training:
            for stage in range(self.last):
                self._keep_signs(stage)
        self.stage_hops = self._stage_hops(training)

    def _enter(self, value: Value) -> None:
        if is_constant(value):
            self.stage[value] = self.spaces.index(value.space)  # the first over its rows
            return
        if isinstance(value, Signs):
            self.stage[value] = self.stage[value.source]
            self.hops[value] = self.hops[value.source]
            return
        if isinstance(value, (Aggregate, Moments)):
            source, pulls = value.source, isinstance(value, Aggregate)
            product = pulls and self._is_for_one(source, value)
            is_pulled_back = pulls and self._training and source.trains and not isinstance(value, Opaque)
            if (product or is_pulled_back) and self.spaces[-1] != source.space:
                self._begin(None, source.space)
            if product:
                self.stage[source] = len(self.barriers) - 1
            self.stage[value] = self._begin(value, value.space)
        else:
            self.stage[value] = max((self.stage[source] for source in value.inputs), default=0)

    def _is_for_one(self, source: Value, aggregate: Value) -> bool:
        """Whether ``source`` is better made right before it is pulled."""
        alone = source.space != "" and self.users[source] == [aggregate]
        return alone and isinstance(source, Projection) and source.columns > source.source.columns

    def _begin(self, barrier: Value | None, space: str) -> int:
        """A stage more."""
        self.barriers.append(barrier)
        self.spaces.append(space)
        return len(self.barriers) - 1

    def is_idle(self, stage: int) -> bool:
        """Whether its forward has nothing to do: as most relays, or the first stage of nodes that are only summed
        over."""
        stores = any(self.stage[value] == stage for value in self.kept) or self.messages(stage) or self.moments(stage)
        return len(set(self.spaces)) > 1 and not stores

    def pulled(self, stage: int) -> Aggregate | None:
        """What ``stage`` pulls, if it begins with an aggregation."""
        barrier = self.barriers[stage]
        return barrier if isinstance(barrier, Aggregate) else None

    def in_stage(self, stage: int) -> list[Value]:
        """The local values of ``stage``."""
        return [
            v
            for v in self.values
            if self.stage[v] == stage and not is_constant(v) and not isinstance(v, (Aggregate, Moments))
        ]

    def all_in_stage(self, stage: int) -> list[Value]:
        """The values that are first there in ``stage``, with what it pulls; an embedding in the first."""
        before = self.learnt.get(stage, self.pulled(stage))
        return [*([before] if before is not None else []), *self.in_stage(stage)]

    def messages(self, stage: int) -> list[Aggregate]:
        """The aggregations that pull what ``stage`` computes."""
        return [b for b in self.barriers if isinstance(b, Aggregate) and self.source_stage(b) == stage]

    def moments(self, stage: int) -> list[Moments]:
        """The moments that are taken of what ``stage`` computes."""
        return [b for b in self.barriers if isinstance(b, Moments) and self.source_stage(b) == stage]

    def source_stage(self, barrier: Value) -> int:
        return self.stage[barrier.inputs[0]]

    # ---- the backward pass -------------------------------------------------------------------------------

    def backward_of(self, stage: int) -> list[Value]:
        """The values whose gradients are taken further in the backward of ``stage``, last first."""
        found = [v for v in self.in_stage(stage) if v.trains] + [m for m in self.moments(stage) if m.trains]
        return sorted(found, key=lambda value: -value.index)

    def reach(self, value: Value) -> int:
        """Up to how many hops before the output rows of ``value`` have a gradient."""
        return EVERYWHERE if isinstance(value, Moments) else self.hops[value]

    def backward_needs(self, stage: int) -> dict[Value, int]:
        """The values whose rows that takes, and up to how many hops before the output."""
        return _furthest((self._at_hand(need), reach) for need, reach in self._needs(stage))

    def recorded(self, stage: int) -> list[Value]:
        """The values of ``stage`` that autograd differentiates, and which its backward therefore has to compute."""
        return [v for v in self.backward_of(stage) if isinstance(v, Rowwise)]

    def backward_recipe(self, stage: int, needs: Mapping[Value, int] | None = None) -> Recipe:
        """How to have what the backward of ``stage`` needs, or ``needs`` of that, for the rows that need it."""
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
        """What taking the gradient of ``value`` further needs, as it is at hand."""
        return [*map(self._at_hand, value.needs())]

    def upstream_needs(self, stage: int) -> tuple[Value, ...]:
        """What the gradient of what ``stage`` pulls is made with, last of all."""
        pulled = self.pulled(stage)
        return pulled.needs() if pulled is not None and pulled.finds_upstream else ()

    def _at_hand(self, need: Value) -> Value:
        """Whichever tells what signs do, where these are not kept: a rectifier's result, if that is, or its input."""
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
        """What the backward of ``stage`` needs, signs as such, each with the reach of the value that needs it."""
        values = self.backward_of(stage)
        needs = [(n, EVERYWHERE) for n in self.upstream_needs(stage)]
        return needs + [(n, self.reach(v)) for v in values for n in v.needs()]

    def later_users(self, value: Value) -> list[Value]:
        """The local users of ``value`` in later stages."""
        own = self.stage[value]
        return [u for u in self.users[value] if not isinstance(u, (Aggregate, Moments)) and self.stage[u] > own]

    def shares_gradient(self, value: Value) -> Aggregate | None:
        """The aggregation whose result gets the very gradient that ``value`` gets from later stages, if there is one.

        So it is for what is added to an aggregation's result. t · gradient is stored anyway, to be pulled; where
        t is never zero, the gradient can be had back.
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
        return pulled if self._bearer(user) is self._bearer(pulled) else None

    def distant_users(self, value: Value) -> list[Value]:
        """The aggregations of ``value`` that are pulled back later than in the stage after its own; what is scattered
        to waits for the stage itself."""
        own = self.stage[value]
        aggregates = (u for u in self.users[value] if isinstance(u, Aggregate) and u.source is value)
        return [u for u in aggregates if self.stage[u] > own + 1 and not isinstance(u, Opaque)]

    def _bearer(self, value: Value) -> Value:
        """The last value that has the same gradient as ``value``."""
        users = self.users[value]
        while len(users) == 1 and self.stage[users[0]] == self.stage[value] and _passes_on(users[0], value):
            value = users[0]
            users = self.users[value]
        return value

    # ---- what is kept ------------------------------------------------------------------------------------

    def recipe(self, targets: Collection[Value], stage: int | None = None, forced: Sequence[Value] = ()) -> Recipe:
        """How to have ``targets`` in ``stage``; None: outside, where nothing is pulled. ``forced`` are computed
        besides, even where they are kept."""
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

    def _choose(self, stage: int, training: bool) -> None:
        """Decide what of ``stage`` is kept."""
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
            self._provide(value, stage, uses=crossing.get(value, 0))

    def _more_than_signs(self, stage: int) -> list[Value]:
        return list(dict.fromkeys(need for need, _ in self._needs(stage) if not isinstance(need, Signs)))

    def _keep_signs(self, stage: int) -> None:
        """Keep the signs that the backward of ``stage`` needs of rows that it would not have at hand anyway."""
        needs = self._needs(stage)
        recipe = self.backward_recipe(stage, _furthest(need for need in needs if not isinstance(need[0], Signs)))
        at_hand = {*recipe.leaves, *recipe.order}
        for need, reach in needs:
            known = self._at_hand(need)
            if isinstance(need, Signs) and (known not in at_hand or recipe.reach[known] < reach):
                self.kept.add(need)

    def _keep_rectified(self) -> None:
        """In place of what is kept for a ReLU or tanh alone, its result: that tells the gradient, too, and need not be
        computed again wherever it is used."""
        for value in in_order(self.kept):
            users = self.users[value]
            if len(users) == 1 and is_told_by_result(users[0]) and self.stage[users[0]] == self.stage[value]:
                for kept in (self.kept, self.of_constants):
                    if value in kept:
                        kept.remove(value)
                        kept.add(users[0])

    def _provide(self, value: Value, stage: int, *, uses: int) -> None:
        """See to it that ``value`` can be had outside its stage: ``uses`` times later, or (0) by its backward alone."""
        if value in self.kept or is_constant(value):
            return
        recipe = self.recipe([value])
        if recipe.pulled:
            path = self._path(stage)
            self.kept.add(value if value in path else path[-1])
            recipe = self.recipe([value])
            if recipe.pulled:  # what was pulled has several users
                self.kept.add(path[0])
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
            self._provide(value.source, stage, uses=1)
        elif wanted:
            anchor = self._anchor(value, stage)
            self.kept.add(anchor)
            if constant:
                self.of_constants.add(anchor)

    def _path(self, stage: int) -> list[Value]:
        """From what ``stage`` pulls along sums and at most one linear map, each the only user of the one before."""
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
        """``value``, or the sum or product it is computed from without another one: better kept, for the way back."""
        light = (Dropout, Rectified, Sigmoidal, ExponentialLinear, Rowwise)
        while isinstance(value, light) and not value.heavy:
            sources = rows_in(value)
            if len(sources) != 1 or self.stage[sources[0]] != stage or is_constant(sources[0]):
                break
            value = sources[0]
        return value

    def _stage_hops(self, training: bool) -> list[int]:
        """Hops before the output, at most, of what each stage computes; a stage has all rows that later ones of its
        type of nodes have, and in ``training`` those that its backward pulls the gradient of the next sum's source for:
        an earlier stage may have computed it, for more rows."""
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
    """Whether its result tells what its gradient needs."""
    return isinstance(value, Sigmoidal) or (isinstance(value, Rectified) and value.slope is None)


def _passes_on(user: Value, value: Value) -> bool:
    """Whether ``user`` is a sum that hands its own gradient to ``value``."""
    if not isinstance(user, Sum):
        return False
    factors = [factor for factor, term in zip(user.factors, user.inputs, strict=True) if term is value]
    return factors == [1.0]


def _furthest(needs: Iterable[tuple[Value, int]]) -> dict[Value, int]:
    """The largest reach of each value."""
    found: dict[Value, int] = {}
    for value, reach in needs:
        found[value] = max(reach, found.get(value, 0))
    return found


def rows_in(value: Value) -> list[Value]:
    """The inputs that it is computed from row by row."""
    return [source for source in value.inputs if not isinstance(source, Moments)]


def last_uses(
    order: Sequence[Value], used: Callable[[Value], Iterable[Value]], kept: Iterable[Value]
) -> list[tuple[Value, ...]]:
    """Of each in ``order`` what it is the last to have ``used``, but for what is ``kept`` beyond all of them."""
    later, found = set(kept), list[tuple[Value, ...]]()
    for value in reversed(order):
        found.append(tuple(source for source in dict.fromkeys(used(value)) if source not in later))
        later.update(found[-1])
    return found[::-1]


def kept_beyond(recipe: Recipe) -> list[Value]:
    """What stays at hand after all of ``recipe`` is computed: leaves are loaded again."""
    return [value for value in recipe.targets if value not in recipe.leaves]


def in_order(values: Iterable[V]) -> tuple[V, ...]:
    """As the network computes them."""
    return tuple(sorted(values, key=lambda value: value.index))
