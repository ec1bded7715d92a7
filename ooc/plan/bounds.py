# SPDX-License-Identifier: Apache-2.0
"""Lower bounds on what the depths still to be decided will cost, by Lagrangian relaxation of the budgets.

Let memory be for hire at a price instead of limited. Without the limits, what is best from some depth on no longer
depends on how much is left, and follows from one sweep over the depths. What it costs so, less the price of all that
was for hire, is never more than what it costs within the limits, at any prices. Good prices are found by subgradient
steps. This is the usual way with shortest paths under resource constraints (G. Y. Handler and I. Zang, Networks
10(4), 1980). What is handed over from one phase to the next and then recomputed is taken to cost nothing here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add

from ooc.plan.levels import Levels


@dataclass(frozen=True)
class Prices:
    """Prices of a unit of device, host and SSD writes, by the depth whose limit is priced."""

    device: tuple[float, ...]
    host: tuple[float, ...]
    writes: tuple[float, ...]

    @classmethod
    def free(cls, depth: int) -> "Prices":
        return cls((0.0,) * depth, (0.0,) * depth, (0.0,) * depth)


class Bound:
    """Lower bounds at given prices.

    ``kept[k + 1][y]``: of all after depth k, priced, if its intermediate is kept as ``y``. ``after[k + 1][x]``: the
    same if that of depth k waits as ``x`` and the next one is kept. ``recomputed[k + 1][a][y]``: if those after a,
    which is kept as ``y``, are recomputed up to k. ``value[k][y]``: of depth k kept as ``y`` without its forward phase.
    At ``k + 1 = 0`` nothing is decided, and the input has one choice.
    """

    def __init__(self, levels: Levels, prices: Prices) -> None:
        self.levels = levels
        self.prices = prices
        depth = levels.chain.depth
        # The price of a unit taken at depth k, which counts in the limits of k and all deeper ones.
        self.device = [*_sums_after(prices.device), 0.0]
        self.host = [*_sums_after(prices.host), 0.0]
        self.writes = [*_sums_after(prices.writes), 0.0]
        self.offset = [-v for v in self._hired()]
        self.value: list[list[float]] = [[] for _ in range(depth)]
        self.kept: list[list[float]] = [[] for _ in range(depth + 1)]
        self.after: list[list[float]] = [[] for _ in range(depth + 1)]
        self.recomputed: list[dict[int, list[float]]] = [{} for _ in range(depth + 1)]
        for k in range(depth - 1, -2, -1):
            self._sweep(k)

    @property
    def total(self) -> float:
        """A lower bound on the cost of an epoch."""
        return self.kept[0][0] + self.offset[0]

    def _hired(self) -> list[float]:
        """By k + 1: the price of all the room there is at depths after k."""
        levels = self.levels.levels
        paid = [
            d * max(0, level.device_room) + h * max(0, level.host_room) + w * (self.levels.write_room or 0)
            for level, d, h, w in zip(levels, self.prices.device, self.prices.host, self.prices.writes, strict=True)
        ]
        return [*_sums_after(paid), 0.0]

    def _sweep(self, k: int) -> None:
        """Everything of depth k from everything of depth k + 1."""
        all_levels, levels = self.levels, self.levels.levels
        choices = levels[k].nothing if k >= 0 else 1
        ancestors = self._ancestors(k)
        if k + 1 == len(levels):
            self.kept[k + 1] = [0.0] * choices
            self.recomputed[k + 1] = {a: [0.0] * n for a, n in ancestors.items()}
            return
        following = levels[k + 1]
        value = [
            back + d * self.device[k + 1] + h * self.host[k + 1] + w * self.writes[k + 1] + rest
            for back, d, h, w, rest in zip(
                following.backward,
                following.device[:-1],
                following.host[:-1],
                following.written[:-1],
                self.kept[k + 2],
                strict=True,
            )
        ]
        self.value[k + 1] = value
        if following.forward[0] is following.forward[-1]:
            after = [min(map(add, following.forward[0], value))] * len(following.forward)
        else:
            after = [min(map(add, row, value)) for row in following.forward]
        self.after[k + 1] = after
        if all_levels.recomputation(k + 1) is None:
            self.kept[k + 1] = after[:choices]
            self.recomputed[k + 1] = {a: [after[-1]] * n for a, n in ancestors.items()}
            return
        deeper = self.recomputed[k + 2]
        self.kept[k + 1] = [
            min(after[y], following.forward[y][-1] + all_levels.again(k, y, k + 1) + deeper[k][y])
            for y in range(choices)
        ]
        handed = following.forward[-1][-1]
        self.recomputed[k + 1] = {
            a: [min(after[-1], handed + all_levels.again(a, y, k + 1) + deeper[a][y]) for y in range(n)]
            for a, n in ancestors.items()
        }

    def _ancestors(self, k: int) -> dict[int, int]:
        """The depths before k from which all up to k can be recomputed, and how many choices each has."""
        found = {}
        at = k
        while at >= 0 and self.levels.recomputation(at) is not None:
            at -= 1
            found[at] = self.levels.levels[at].nothing if at >= 0 else 1
        return found

    def taken(self) -> tuple[list[int], list[int], list[int]]:
        """Units of device, host and SSD writes by depth that the bound's own optimum takes."""
        levels = self.levels.levels
        taken: tuple[list[int], list[int], list[int]] = ([], [], [])
        x, ancestor, choice = 0, -1, 0
        for k, level in enumerate(levels):
            row = level.forward[x]
            y = min(range(level.nothing), key=lambda y, row=row, k=k: row[y] + self.value[k][y])  # type: ignore[misc]
            best = row[y] + self.value[k][y]
            if self.levels.recomputation(k) is not None:
                again = row[-1] + self.levels.again(ancestor, choice, k) + self.recomputed[k + 1][ancestor][choice]
                if again < best:
                    x = level.nothing
                    for tier in taken:
                        tier.append(0)
                    continue
            x, ancestor, choice = y, k, y
            for tier, units in zip(taken, (level.device, level.host, level.written), strict=True):
                tier.append(units[y])
        return taken


def _sums_after(values: Sequence[float]) -> list[float]:
    """By position: the sum of the values from there on."""
    return list(accumulate(reversed(values)))[::-1]


def improve(levels: Levels, start: Bound, *, cost: float, steps: int) -> list[Bound]:
    """``start`` and the bounds of ``steps`` subgradient steps from it towards ``cost``, what a plan is known to cost.

    A step is as long as it would have to be if the bound rose all the way (B. T. Polyak, 1969), halved whenever two in
    a row bring nothing.
    """
    limits = _limits(levels)
    bounds, best, stride, idle = [start], start, 1.0, 0
    at = start
    for _ in range(steps):
        if best.total >= cost * (1 - 1e-9):
            break
        used = [list(accumulate(tier)) for tier in at.taken()]
        now = [list(tier) for tier in (at.prices.device, at.prices.host, at.prices.writes)]
        slopes = {(t, k): used[t][k] - room for (t, k), room in limits.items()}
        slopes = {key: s for key, s in slopes.items() if s > 0 or now[key[0]][key[1]] > 0}
        length = sum(s * s for s in slopes.values())
        if not length:
            break
        for (t, k), slope in slopes.items():
            now[t][k] = max(0.0, now[t][k] + stride * (cost - at.total) / length * slope)
        at = Bound(levels, Prices(tuple(now[0]), tuple(now[1]), tuple(now[2])))
        bounds.append(at)
        idle = 0 if at.total > best.total else idle + 1
        if at.total > best.total:
            best = at
        elif idle % 2 == 0:
            stride, at = stride / 2, best
    return bounds


def _limits(levels: Levels) -> dict[tuple[int, int], int]:
    """The limits worth a price, by (tier, depth): those that no deeper one implies."""
    limits: dict[tuple[int, int], int] = {}
    least: list[int | None] = [None, None]
    for k in range(levels.chain.depth - 1, -1, -1):
        for tier, room in enumerate((levels.levels[k].device_room, levels.levels[k].host_room)):
            lowest = least[tier]
            if lowest is None or room < lowest:
                least[tier] = room
                limits[tier, k] = max(0, room)
    if levels.write_room is not None:
        limits[2, levels.chain.depth - 1] = max(0, levels.write_room)
    return limits
