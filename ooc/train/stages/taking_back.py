# SPDX-License-Identifier: Apache-2.0
"""From the gradients of what later stages took to those of what a stage took, and of its parameters.

What is the same for every tile is looked up once (see ``drawing``).
"""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from ooc.train.graph import Scaling
from ooc.train.lowering.general import General
from ooc.train.lowering.per_edge import EdgeAggregate
from ooc.train.lowering.values import Moments, Normalized, Rows, Value
from ooc.train.stages.drawing import Known
from ooc.train.stages.gradients import HandedGradients
from ooc.train.stages.ground import Ground
from ooc.train.stages.names import Names
from ooc.train.stages.schedule import Schedule
from ooc.train.stages.tile import Tensors, Tile
from ooc.train.tensors import shaped, typed


class _Incoming(NamedTuple):
    """The gradient of a value that a later stage has stored; ``shared``: after the scaling of the sums it goes with."""

    value: Value
    name: str
    shared: Scaling | None


class _Followed(NamedTuple):
    """A value whose gradient is taken further, in tiles that begin before row ``stop``: others reach no loss."""

    value: Value
    stop: int


class TakingBack:
    """The backward of ``stage``, without what it draws and pulls."""

    def __init__(self, ground: Ground, schedule: Schedule, names: Names, handed: HandedGradients, stage: int) -> None:
        self._ground = ground
        self._names = names
        self._pulled = schedule.pulled(stage)
        self._incoming = [
            _Incoming(value, name, self._shared(schedule, value, name)) for value, name in handed.incoming(stage)
        ]
        self._followed = [
            _Followed(value, ground.active.training_rows(schedule.reach(value)))
            for value in schedule.backward_of(stage)
        ]
        self._passed_on = handed.passed_on(stage)

    def _shared(self, schedule: Schedule, value: Value, name: str) -> Scaling | None:
        shared = schedule.shares_gradient(value)
        return shared.scaling if shared is not None and name == self._names.sums_gradient(shared) else None

    def __call__(self, gradients: Known, known: Known, tile: Tile, rows: Rows) -> Tensors:
        """What the stage stores. ``gradients`` has those that are at hand already, and is used up; ``known`` the rows
        of the values that are needed."""
        ground, inputs = self._ground, tile.inputs
        for value, name, shared in self._incoming:
            gradient = typed(inputs[name], ground.network.dtype)
            if shared is not None:
                gradient = ground.without_after(gradient, tile, shared)
            add(gradients, value, shaped(gradient, value.tail))
        for value, stop in self._followed:
            if isinstance(value, Moments):
                add(gradients, value.source, value.own_gradient(known[value.source]))
                continue
            if value not in gradients or tile.start >= stop:
                gradients.pop(value, None)  # zero, if there is one
                rows.tape.pop(value, None)
                continue
            found = value.backward(gradients.pop(value), [known.get(operand) for operand in value.operands], rows)
            tile.gradients += found.parameters
            for source, part in zip(value.inputs, found.inputs, strict=True):
                if part is not None and source.trains:
                    add(gradients, source, part)
            if found.moments is not None and isinstance(value, Normalized) and value.moments.trains:
                tile.moment_gradients.append((value.moments, *found.moments))
        return self._outgoing(gradients, known, tile)

    def _outgoing(self, gradients: Known, known: Known, tile: Tile) -> Tensors:
        """What is stored of the gradients that the stage has no more to do with."""
        pulled, names = self._pulled, self._names
        height = tile.stop - tile.start
        out: Tensors = {}
        if isinstance(pulled, General) and pulled.takes_gradient:
            out[names.sums_gradient(pulled)] = self._padded(gradients.get(pulled), pulled.columns, height)
        elif isinstance(pulled, EdgeAggregate) and pulled.takes_gradient:
            padded = self._padded(gradients.get(pulled), pulled.groups * pulled.result, height).contiguous()
            target = None if pulled.target is None else known[pulled.target]
            sums, d_target = pulled.upstream(padded, known[pulled], target)
            out[names.sums_gradient(pulled)] = sums
            if d_target is not None and pulled.target is not None and pulled.target.trains:
                out[names.target_gradient(pulled)] = d_target
        elif pulled is not None and pulled.source.trains:
            gradient = gradients.get(pulled)
            scaled = None if gradient is None else self._ground.after(gradient, tile, pulled.scaling)
            out[names.sums_gradient(pulled)] = self._padded(scaled, pulled.columns, height)
        for value, (prior, name) in self._passed_on.items():
            if prior is not None:
                add(gradients, value, shaped(tile.inputs[prior], value.tail))
            out[name] = self._padded(gradients.get(value), value.columns, height)
        return out

    def _padded(self, gradient: Tensor | None, columns: int, height: int) -> Tensor:
        """[height, columns]: the gradient, and zeros where it has no rows."""
        if gradient is None:
            return self._ground.zeros(height, columns)
        flat = shaped(gradient, (columns,))
        rows = flat.shape[0]
        return flat if rows == height else F.pad(flat, (0, 0, 0, height - rows))


def add(gradients: Known, value: Value, part: Tensor) -> None:
    """Add to the gradient of ``value``; whichever has fewer rows is zero beyond them."""
    rows = part.shape[0]
    if not rows:
        return
    present = gradients.get(value)
    if present is None:
        gradients[value] = part
        return
    if present.shape[0] == rows:
        gradients[value] = present + part
        return
    longer, shorter = (present, part) if present.shape[0] > rows else (part, present)
    total = longer.clone()
    total[: shorter.shape[0]] += shorter
    gradients[value] = total
