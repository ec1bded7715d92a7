# SPDX-License-Identifier: Apache-2.0
"""The optimizer's step of an embedding's rows: as its gradient is found, tile by tile, where all rows have one, and
else in a stage of its own over all rows, since an optimizer may move those whose gradient is zero, too; so also where
gradients are clipped, whose norm is not known before.

Rows are replaced where they lie in memory, by the last pass of a program that reads them.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from ooc.model.stages.context import Step, Tensors, Tile
from ooc.model.stages.names import embedding_gradient
from ooc.model.stages.schedule import Recipe

if TYPE_CHECKING:
    from ooc.model.stages.program import Program


def step_of_rows(program: "Program", stage: int) -> Callable[[Tile, Tensor], Tensors]:
    """From a tile of a first ``stage``, with its rows of the embedding and of what is kept of it, and their gradient to
    the new rows."""
    stepping = program.context.embedding
    assert stepping is not None
    name, *states = program.learnt_matrices(stage)

    def stepped(tile: Tile, gradient_RD: Tensor) -> Tensors:
        kept = [tile.inputs[state] for state in states]
        rows_RD, kept = stepping.optimizer.step(
            tile.inputs[name], gradient_RD, kept, lr=stepping.lr, number=stepping.number
        )
        tile.diverged = bool((rows_RD * 0).sum() != 0)  # a tenth of the time that isfinite takes
        return {name: rows_RD, **dict(zip(states, kept, strict=True))}

    return stepped


def embedding_steps(program: "Program") -> list[Step]:
    """The stages of their own, where such are needed."""
    return [_step(program, at) for at in program.schedule.learnt if not program.steps_in_backward(at)]


def _step(program: "Program", stage: int) -> Step:
    stepped, context, space = step_of_rows(program, stage), program.context, program.schedule.learnt[stage].space
    stepping, gradients = context.embedding, embedding_gradient(space)
    assert stepping is not None

    def compute(tile: Tile) -> Tensors:
        found, height = stepping.clipped(tile.inputs[gradients], context.network), tile.stop - tile.start
        return stepped(tile, F.pad(found, (0, 0, 0, height - len(found))))

    matrices = program.learnt_matrices(stage)
    loads, title = (gradients, *matrices), f"step {space}".rstrip()
    nothing = Recipe((), (), pulled=False)
    return program.step(compute, title, stage, program.active(stage).nodes, nothing, loads=loads, stores=matrices)
