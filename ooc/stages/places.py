# SPDX-License-Identifier: Apache-2.0
"""The memory in which a tile's values and gradients are computed: over another value's rows that are no longer needed,
or directly where they are stored.

A product that writes to memory takes hardly longer than one that writes to the cache, and in-place operations then find
its rows there; copying the rows takes a third of a product's time. Therefore a product whose rows are stored after only
sums, rectifiers and tanh of them writes to their final memory.

Pure: nothing here computes anything.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ooc.model.layers.per_edge import Result
from ooc.model.lowering.projection import Projection, SparseProduct
from ooc.model.lowering.rectified import Rectified, Sigmoidal
from ooc.model.lowering.values import Sum, Value
from ooc.stages.schedule import Recipe, kept_beyond, rows_in


@dataclass(frozen=True, slots=True)
class Place:
    """Where to compute a value: in the rows of ``matrix`` where they are stored, if possible, or ``over`` the first
    input."""

    over: bool
    matrix: str | None


def places_of(recipe: Recipe, pulled: Value | None, stored: Mapping[Value, str]) -> dict[Value, Place]:
    """Return the places of values of ``recipe``; ``stored`` ones end in a matrix unchanged, or scaled in place."""
    users = Counter(source for value in recipe.order for source in rows_in(value))
    kept, order = set(kept_beyond(recipe)), set(recipe.order)

    def goes_over(value: Value) -> bool:
        """Return whether ``value`` may overwrite its first input, which the tile owns and does not need otherwise."""
        if not isinstance(value, (Sum, Rectified, Sigmoidal)):
            return False
        source = value.inputs[0]
        alone = users[source] == 1 and source not in kept and source.tail == value.tail
        return alone and (source is pulled or (source in order and makes_rows(source)))

    def is_dense(value: Value) -> bool:
        """Return whether ``value`` is a product that is written where it is told."""
        return isinstance(value, Projection) and not isinstance(value, SparseProduct)

    def begins(value: Value) -> bool:
        """Return whether ``value`` derives from a product in place."""
        return is_dense(value) or (goes_over(value) and begins(value.inputs[0]))

    ends = {value: name for value, name in stored.items() if len(value.tail) == 1}
    found: dict[Value, Place] = {}
    for value in reversed(recipe.order):
        name = ends.get(value)
        over = goes_over(value)
        if over and name is not None and begins(value.inputs[0]):
            ends[value.inputs[0]], name = name, None
        if over or (name is not None and (is_dense(value) or isinstance(value, (Sum, Rectified, Sigmoidal)))):
            found[value] = Place(over, name)
    return found


def makes_rows(value: Value) -> bool:
    """Return whether ``value`` computes rows that share no memory with others."""
    if isinstance(value, (Sum, Result)):
        return value.makes_rows
    return isinstance(value, (Projection, Rectified, Sigmoidal))


def used_by_messages_only(recipe: Recipe, messages: Mapping[str, Value], others: Collection[Value]) -> dict[Value, str]:
    """Return, by matrix, the values of ``recipe`` that only ``messages`` use, which may be scaled in place.

    They have no other use, also not by ``others``.
    """
    taken = Counter([*messages.values(), *others, *(source for value in recipe.order for source in rows_in(value))])
    return {value: name for name, value in messages.items() if taken[value] == 1}


def gradient_places(values: Sequence[Value], stored: Mapping[Value, str]) -> dict[Value, str]:
    """Return where the gradients of products' inputs may be computed, among ``values`` whose gradients are propagated.

    It is possible where the gradient ends in one of the ``stored`` matrices, unchanged or scaled in place.
    """
    found: dict[Value, str] = {}

    def follow(value: Value, name: str) -> None:
        users = [user for user in values if value in user.inputs]
        for user in users:
            if isinstance(user, Projection):
                found[user] = name
            elif len(users) == 1 and passes_gradient_on(user):
                follow(user, name)

    for value, name in stored.items():
        if len(value.tail) == 1:
            follow(value, name)
    return found


def passes_gradient_on(value: Value) -> bool:
    """Return whether the gradient of ``value`` becomes that of one input and of no other."""
    if isinstance(value, Sum):
        return [factor for factor, one in zip(value.factors, value.inputs, strict=True) if one.trains] == [1]
    return isinstance(value, (Rectified, Sigmoidal))
