# SPDX-License-Identifier: Apache-2.0
"""A row with many edges in an opaque layer, taken in pieces: every sum over the row's edges is completed before
anything that needs it is computed (``kernels.pieces.caught_sums``).

Forward, the layer runs on every piece once for each level of its sums (several times for quantiles), up to the last sum
of that level, and then once to the end. Backward, it runs to the end with these totals as leaves; then on every piece,
from the highest level down, for the gradients of the totals below; and once more, with all totals given, for the
gradients of rows and parameters. So only one piece's edges are in memory, and each is computed a few times.

Shapes: S nodes of a piece's graph, the row first, C columns of the source, O of the result.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from ooc.kernels.dropout.opaque import DroppedRows
from ooc.kernels.edges import TileEdges
from ooc.kernels.neighbourhood import BucketRows, Neighbourhood, neighbourhood, stretches
from ooc.kernels.pieces.caught_sums import AllSumsFound, Catching, CaughtSum, Finding, Total
from ooc.kernels.tensors import gradients_of
from ooc.model.layers.layer import Layer

_PERTURBATIONS = (0.25, 100.0, -100.0)
"""What is added to half as much again of a sum to see what depends on it; it is no more, since there may be as many
places for edges in each row."""
Part = tuple[Tensor, tuple[Tensor, Tensor] | None, list[Tensor | None]]
"""The gradient of a run's own rows, of its other nodes with their rows, and of parameters."""


@dataclass(slots=True)
class SplitRow:
    """A row in pieces. ``tile``: one row with more than ``edges_at_once`` edges, all to rows of the source, run as
    ``running`` says; ``calls``: the sums of the layer; ``totals``: empty, or the totals so far. For one forward pass,
    or several backward ones."""

    layer: Layer
    module: nn.Module
    calls: Sequence[CaughtSum]
    running: Callable[[Neighbourhood], AbstractContextManager[None]]
    tile: TileEdges
    edges_at_once: int
    source: Tensor | BucketRows
    totals: list[Total] = field(default_factory=list)

    def __post_init__(self) -> None:
        # The number of nodes tells which tensors are sums.
        self.layer = replace(self.layer, pairs=False, looks_up=False)

    @torch.no_grad()
    def forward(self) -> Tensor:
        """Return the result [1, O]."""
        self._compute_totals()
        near, _ = next(self._pieces())
        result = self._run(near, near.gather(self.source))
        assert result is not None
        return result

    def backward(self, gradient_1O: Tensor, parameters: Sequence[nn.Parameter], *, trains: bool) -> Iterator[Part]:
        """Yield the gradients of all rows, if ``trains``, and of parameters, part by part; rows ascend, and none is in
        two parts."""
        with torch.no_grad():
            self._compute_totals()
        for total in self.totals:
            total.begin_backward()
        yield self._backward_from_result(gradient_1O, parameters, trains=trains)
        for level in range(self._highest_level, 1, -1):
            below = [total for total, call in zip(self.totals, self.calls, strict=True) if call.level < level]
            leaves = [(total, total.leaf) for total in below if total.leaf is not None]
            for near, is_first in self._pieces():
                x_SC, wanted = near.gather(self.source), [leaf for _, leaf in leaves]
                found = self._gradients(near, x_SC, wanted, level, is_first=is_first)
                for (total, _), part in zip(leaves, found, strict=True):
                    total.gradient = add_gradients(total.gradient, part)
        for total in self.totals:
            total.leaf = None if total.leaf is None else total.leaf.detach()
        of_piece = partial(self._piece_backward, parameters, trains=trains)
        yield from _merge_shared_rows(of_piece(near, is_first=is_first) for near, is_first in self._pieces())

    def _compute_totals(self) -> None:
        """Compute all totals, level by level, unless they are there."""
        if self.totals:
            return
        self.totals += [Total(call.kind) for call in self.calls]
        for level in range(1, self._highest_level + 1):
            wanted = {number for number, call in enumerate(self.calls) if call.level == level}

            def take(number: int, part: Tensor, wanted: Collection[int] = wanted) -> None:
                if number in wanted:
                    self.totals[number].add(part)

            while wanted:
                for near, is_first in self._pieces():
                    self._run(near, near.gather(self.source), level, take, is_first=is_first)
                wanted.difference_update([number for number in wanted if not self.totals[number].end_run()])

    def _backward_from_result(self, gradient_1O: Tensor, parameters: Sequence[nn.Parameter], *, trains: bool) -> Part:
        near, _ = next(self._pieces())
        x_SC = near.gather(self.source).requires_grad_(trains)
        kept = [(total, total.leaf) for total in self.totals if total.leaf is not None]
        with torch.enable_grad():
            result = self._run(near, x_SC)
        assert result is not None
        found = gradients_of([result], [x_SC, *parameters, *(leaf for _, leaf in kept)], [gradient_1O])
        first = 1 + len(parameters)
        for (total, _), part in zip(kept, found[first:], strict=True):
            total.gradient = part
        return (torch.zeros_like(x_SC) if found[0] is None else found[0])[:1], None, found[1:first]

    def _piece_backward(
        self, parameters: Sequence[nn.Parameter], near: Neighbourhood, *, trains: bool, is_first: bool
    ) -> Part:
        """Return a piece's gradients; a function of its own, so that nothing of a piece is kept during the next one."""
        x_SC = near.gather(self.source).requires_grad_(trains)
        found = self._gradients(near, x_SC, [x_SC, *parameters], self._highest_level + 1, is_first=is_first)
        d_x = torch.zeros_like(x_SC) if found[0] is None else found[0]
        return d_x[:1], (near.others_S, d_x[1:]) if trains else None, found[1:]

    def _gradients(
        self, near: Neighbourhood, x_SC: Tensor, wanted: Sequence[Tensor], level: int, *, is_first: bool
    ) -> list[Tensor | None]:
        """Return the gradients of ``wanted`` from the totals of ``level``, or from all of them above the highest
        level."""
        parts: list[Tensor] = []
        above: list[Tensor] = []

        def take(number: int, part: Tensor) -> None:
            total = self.totals[number]
            is_asked = self.calls[number].level == level or level > self._highest_level
            if is_asked and part.requires_grad and total.gradient is not None and len(part):
                parts.append(part)
                with torch.no_grad():
                    above.append(total.spread(part))

        with torch.enable_grad():
            self._run(near, x_SC, level, take, is_first=is_first)
        return gradients_of(parts, wanted, above)

    @property
    def _highest_level(self) -> int:
        return max(call.level for call in self.calls)

    def _run(
        self,
        near: Neighbourhood,
        x_SC: Tensor,
        level: int | None = None,
        take: Callable[[int, Tensor], None] = lambda *_: None,
        *,
        is_first: bool = True,
    ) -> Tensor | None:
        """Run up to the last call of ``level``, or the last of all, passing parts of sums to ``take``; without a level,
        run to the end and return the layer's result."""
        above, last = self._highest_level + 1, -1
        if level is not None:
            last = max(k for k, call in enumerate(self.calls) if call.level == level or level == above)
        options: dict[str, Any] = {"level": above if level is None else level, "last": last, "is_first": is_first}
        catching = Catching(self.layer.where, near, self.calls, self.totals, take, **options)
        try:
            with self.running(near), catching:
                result: Tensor = self.layer.run(self.module, x_SC, near)[:1]
        except AllSumsFound:
            return None
        catching.check()
        return result

    def _pieces(self) -> Iterator[tuple[Neighbourhood, bool]]:
        """Yield the graphs of the pieces, each with whether it is the first."""
        for number, (piece, repeats_before) in enumerate(stretches(self.tile, self.edges_at_once)):
            yield replace(neighbourhood(piece, len(self.source)), repeats_before=repeats_before), number == 0


def add_gradients(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    """Return the sum of two gradients; not in place, since gradients of several parameters may be one tensor."""
    return part if total is None else total if part is None else total + part


def levels_of(run: Callable[[Finding], None], near: Neighbourhood) -> tuple[CaughtSum, ...]:
    """Return the sums of a layer, and their levels, when it is ``run`` in this mode on ``near``; nothing if they are
    unknown or there are none. A call depends on another one if its operands change with the other's result, also for a
    much larger or smaller result, as layers may distinguish rows of many edges; or if it fails for such a result."""
    plain = Finding(near)
    run(plain)
    if not all(rows for _, rows in plain.found):
        return ()
    levels = [1] * len(plain.found)
    for changed, by in product(range(len(plain.found)), _PERTURBATIONS):
        other = Finding(near, changed, by)
        try:
            run(other)
        except Exception:
            if by == _PERTURBATIONS[0]:
                return ()
            other.given = [one + torch.nan for one in plain.given]
        else:
            if other.found != plain.found:
                return ()
        for later in range(changed + 1, len(levels)):
            if not torch.equal(other.given[later], plain.given[later]):
                levels[later] = max(levels[later], levels[changed] + 1)
    found = zip(plain.found, levels, plain.held_bytes, strict=True)
    return tuple(CaughtSum(kind, rows, *known) for (kind, rows), *known in found if isinstance(rows, DroppedRows))


def _merge_shared_rows(parts: Iterator[Part]) -> Iterator[Part]:
    """Yield the parts with a row that is in two neighbouring parts only in the later one: repeated edges may lie in
    both."""
    waiting: tuple[Tensor, Tensor] | None = None
    for own, others, of_parameters in parts:
        if others is not None:
            rows_S, values_SC = others
            if waiting is not None and len(rows_S) and bool(rows_S[0] == waiting[0][0]):
                values_SC[:1] += waiting[1]
            elif waiting is not None:
                rows_S, values_SC = torch.cat((waiting[0], rows_S)), torch.cat((waiting[1], values_SC))
            waiting = rows_S[-1:], values_SC[-1:].clone()
            others = (rows_S[:-1], values_SC[:-1]) if len(rows_S) else None
            waiting = waiting if len(rows_S) else None
        yield own, others, of_parameters
    if waiting is not None:
        yield torch.zeros_like(waiting[1]), waiting, []
