# SPDX-License-Identifier: Apache-2.0
"""The optimizer's step of an embedding's rows: as its gradient is found, tile by tile, where all rows have one, and
else in a stage of its own over all rows, since an optimizer may move those whose gradient is zero, too.

Rows are replaced where they lie in memory, by the last pass of a program that reads them.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from ooc.model.stages.context import Step, Tensors, Tile
from ooc.model.stages.names import ALL_GRADIENTS
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
    """The stage of its own, where one is needed."""
    if 0 not in program.schedule.learnt or program.steps_in_backward(0):
        return []
    stepped = step_of_rows(program, 0)

    def compute(tile: Tile) -> Tensors:
        gradient, height = tile.inputs[ALL_GRADIENTS], tile.stop - tile.start
        return stepped(tile, F.pad(gradient, (0, 0, 0, height - len(gradient))))

    matrices = program.learnt_matrices(0)
    loads = (ALL_GRADIENTS, *matrices)
    nothing = Recipe((), (), pulled=False)
    step = program.step(compute, "step", 0, program.context.active.nodes, nothing, loads=loads, stores=matrices)
    return [step]
